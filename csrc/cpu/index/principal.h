// The directions in which the keys of an entry differ most: approximately their singular vectors.
//
// They are found by power iteration on the products of all pairs of keys. The start is good already:
// the keys that differ most from those chosen before them (a Cholesky decomposition with pivots).
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "index/tokens.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kMostRank = 16;

inline void store_floats(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// Adds the sum over c of a[c][0..R) times b[c][0..T vectors) to out[0..R)[..].
template <int R, int T>
inline void add_outer(const float* a, int a_stride, const float* b, int b_stride, int count,
                      float* out, int out_stride) {
  Floats sums[R][T];
  KVR_UNROLL for (int r = 0; r < R; ++r)
    KVR_UNROLL for (int v = 0; v < T; ++v) sums[r][v] = Floats{};
  for (int c = 0; c < count; ++c, a += a_stride, b += b_stride) {
    Floats x[T];
    KVR_UNROLL for (int v = 0; v < T; ++v) x[v] = load_as<Floats>(b + v * kWidth);
    KVR_UNROLL for (int r = 0; r < R; ++r)
      KVR_UNROLL for (int v = 0; v < T; ++v) sums[r][v] += x[v] * a[r];
  }
  KVR_UNROLL for (int r = 0; r < R; ++r)
    KVR_UNROLL for (int v = 0; v < T; ++v) store_floats(out + r * out_stride + v * kWidth, sums[r][v]);
}

// out[rows, columns] = sum over c of a[c][rows] times b[c][columns]. Takes four rows and a vector of
// columns at a time, so there has to be room for multiples of these.
inline void outer_products(const float* a, int a_stride, int rows, const float* b, int b_stride,
                           int columns, int count, float* out, int out_stride) {
  for (int r = 0; r < rows; r += 4) {
    int j = 0;
    for (; j + 2 * kWidth <= columns; j += 2 * kWidth)
      add_outer<4, 2>(a + r, a_stride, b + j, b_stride, count, out + r * out_stride + j, out_stride);
    for (; j < columns; j += kWidth)
      add_outer<4, 1>(a + r, a_stride, b + j, b_stride, count, out + r * out_stride + j, out_stride);
  }
}

class Principal {
 public:
  // `rest` is [d, padded(n)]: keys less their mean, and zeros behind the last one. Writes the
  // directions, [d, kMostRank], each times the length of the keys' parts along it.
  void find(const float* rest, int d, int n, int rank, float* directions) {
    width_ = padded(n);
    rank_ = rank;
    buffer_.resize((width_ + 2 * kMostRank) * width_);
    products_ = buffer_.data();
    basis_ = products_ + width_ * width_;
    image_ = basis_ + kMostRank * width_;
    outer_products(rest, width_, width_, rest, width_, width_, d, products_, width_);
    normalise_products();
    choose_keys(n);
    orthonormalise();
    for (int i = 0; i < kIterations; ++i) {
      multiply();
      orthonormalise();
    }
    project(rest, d, directions);
  }

 private:
  static constexpr int kIterations = 2;
  static constexpr float kLeast = 1e-30f;       // sum of the keys' squares that counts as none
  static constexpr float kLeastPart = 1e-12f;   // share of a square below which the rest is rounding

  // Scaled so that no power of the products overflows.
  void normalise_products() {
    float total = 0;
    for (int i = 0; i < width_; ++i) total += products_[i * width_ + i];
    const float factor = total > kLeast ? 1 / total : total == total ? 0 : total;
    for (int i = 0; i < width_ * width_; i += kWidth)
      store_floats(products_ + i, load_as<Floats>(products_ + i) * factor);
  }

  // The start: the products of the keys with those keys that differ most.
  void choose_keys(int n) {
    float* left = image_;  // squares of the parts outside of the directions so far
    for (int i = 0; i < width_; ++i) left[i] = products_[i * width_ + i];
    for (int k = 0; k < rank_; ++k) {
      const int pivot = std::max_element(left, left + n) - left;
      float* row = basis_ + k * width_;
      const float inverse = left[pivot] > kLeastPart ? 1 / __builtin_sqrtf(left[pivot]) : 0;
      for (int i = 0; i < width_; i += kWidth) {
        Floats x = load_as<Floats>(products_ + pivot * width_ + i);
        for (int j = 0; j < k; ++j)
          x -= load_as<Floats>(basis_ + j * width_ + i) * basis_[j * width_ + pivot];
        x *= inverse;
        store_floats(row + i, x);
        store_floats(left + i, load_as<Floats>(left + i) - x * x);
      }
      left[pivot] = 0;
    }
  }

  // Gram-Schmidt; a rest that is only rounding becomes zero.
  void orthonormalise() {
    for (int k = 0; k < rank_; ++k) {
      float* row = basis_ + k * width_;
      const float before = dot(row, row);
      for (int j = 0; j < k; ++j) {
        const float* other = basis_ + j * width_;
        const float part = dot(row, other);
        for (int i = 0; i < width_; i += kWidth)
          store_floats(row + i, load_as<Floats>(row + i) - load_as<Floats>(other + i) * part);
      }
      const float after = dot(row, row);
      const float factor = after <= before * kLeastPart ? 0 : 1 / __builtin_sqrtf(after);
      for (int i = 0; i < width_; i += kWidth)
        store_floats(row + i, load_as<Floats>(row + i) * factor);
    }
  }

  float dot(const float* a, const float* b) const {
    Floats total = {};
    for (int i = 0; i < width_; i += kWidth) total += load_as<Floats>(a + i) * load_as<Floats>(b + i);
    return sum(total);
  }

  // basis = basis times products.
  void multiply() {
    for (int k = 0; k < rank_; k += 4)
      for (int i = 0; i < width_; i += kWidth) {
        Floats sums[4] = {};
        for (int j = 0; j < width_; ++j) {
          const Floats x = load_as<Floats>(products_ + j * width_ + i);
          KVR_UNROLL for (int r = 0; r < 4; ++r) sums[r] += x * basis_[(k + r) * width_ + j];
        }
        KVR_UNROLL for (int r = 0; r < 4; ++r) store_floats(image_ + (k + r) * width_ + i, sums[r]);
      }
    std::swap(basis_, image_);
  }

  void project(const float* rest, int d, float* directions) const {
    for (int c = 0; c < d; ++c, rest += width_, directions += kMostRank)
      for (int k = 0; k < rank_; k += 4) {
        Floats sums[4] = {};
        for (int i = 0; i < width_; i += kWidth) {
          const Floats x = load_as<Floats>(rest + i);
          KVR_UNROLL for (int r = 0; r < 4; ++r)
            sums[r] += x * load_as<Floats>(basis_ + (k + r) * width_ + i);
        }
        const Quad all = sum_four(sums[0], sums[1], sums[2], sums[3]);
        std::memcpy(directions + k, &all, sizeof all);
      }
  }

  int width_, rank_;
  float *products_, *basis_, *image_;
  std::vector<float> buffer_;
};

}  // namespace KVR_ISA
}  // namespace kvr
