// How a record of a low-rank index comes from the keys of its tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "index/low_rank_record.h"
#include "index/mean.h"

namespace kvr {
namespace KVR_ISA {

class LowRankBuilder {
 public:
  // keys [head_size, entry_tokens]
  void build(const Index& index, const float* keys, uint8_t* record) {
    const int d = index.head_size, n = index.entry_tokens, rank = rank_of(index), width = padded(n);
    const LowRankFields f(index);
    buffer_.resize(d + d * width + d * kMostRank + (kMostRank + 1) * width);
    float* mean = buffer_.data();
    float* rest = mean + d;
    float* directions = rest + d * width;
    float* parts = directions + d * kMostRank;
    for (int c = 0; c < d; ++c) {
      const float* row = keys + c * n;
      mean[c] = mean_of(row, n);
      for (int i = 0; i < n; ++i) rest[c * width + i] = row[i] - mean[c];
      std::fill(rest + c * width + n, rest + (c + 1) * width, 0.0f);
    }
    const float mean_scale = scale_of_mean(mean, rest, d, d * width);
    principal_.find(rest, d, n, rank, directions);
    round_directions(directions, d, rank, record + f.directions);
    const uint16_t bits = bits_as<uint32_t>(mean_scale) >> 16;
    std::memcpy(record, &bits, 2);
    for (int c = 0; c < d; ++c) {
      const float whole = rounded(mean[c] / mean_scale);
      record[f.mean + c] = static_cast<int>(whole);
      // The coefficients are for what has been rounded.
      const float off = mean[c] - whole * mean_scale;
      for (int i = 0; i < n; ++i) rest[c * width + i] += off;
    }
    fit_coefficients(directions, rest, d, width, rank, parts);
    std::fill_n(parts + rank * width, width, 0.0f);
    float inverse[kMostRank + 1] = {};
    for (int k = 0; k < rank; ++k)
      inverse[k] = round_scale(parts + k * width, n, mean_scale, record + LowRankFields::kScales + k);
    for (int p = 0; p < f.pairs; ++p)
      round_coefficients(parts + 2 * p * width, width, n, inverse + 2 * p,
                         record + f.coefficients + p * n);
  }

 private:
  // So large that the scales of directions are not too large beside it; in bfloat16.
  static float scale_of_mean(const float* mean, const float* rest, int d, int elements) {
    const float unit = std::max({largest_magnitude(mean, d) / kByteMost,
                                 largest_magnitude(rest, elements) / kLeastMeanSteps, kLeastScale});
    const uint32_t bits = bits_as<uint32_t>(unit);
    return bits_as<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
  }

  // Directions [d, kMostRank] -> whole numbers of each one's scale, there and in the record.
  static void round_directions(float* directions, int d, int rank, uint8_t* out) {
    int at[kMostRank], step[kMostRank];  // of a direction's first byte, and to its next four
    for_blocks(rank, [&](int first, int width) {
      for (int k = 0; k < width; ++k) {
        at[first + k] = first * d / 2 + 4 * k;
        step[first + k] = 4 * width;
      }
    });
    constexpr int kVectors = kMostRank / kWidth;
    Floats most[kVectors] = {};
    for (int c = 0; c < d; ++c)
      for (int v = 0; v < kVectors; ++v) {
        const Floats x = load_as<Floats>(directions + c * kMostRank + v * kWidth);
        most[v] = max(most[v], max(x, -x));
      }
    for (Floats& m : most) m = kNibbleMost / max(m, splat(kLeastScale));
    const auto round = [&](int c, int v) {
      float* p = directions + c * kMostRank + v * kWidth;
      const Floats x = rounded(load_as<Floats>(p) * most[v]);
      store_floats(p, x);
      return __builtin_convertvector(x, Ints) + 8;
    };
    for (int c = 0; c < d / 2; ++c)
      for (int v = 0; v < kVectors; ++v) {
        const Ints pairs = (round(c, v) & 15) | (round(d / 2 + c, v) & 15) << 4;
        for (int k = v * kWidth; k < std::min((v + 1) * kWidth, rank); ++k)
          out[at[k] + c / 4 * step[k] + c % 4] = pairs[k - v * kWidth];
      }
  }

  // The scale of a direction's coefficients, rounded up; returns its inverse.
  static float round_scale(const float* parts, int n, float mean_scale, uint8_t* out) {
    const float ratio = largest_magnitude(parts, n) / kNibbleMost / mean_scale;
    const int32_t bits = bits_as<int32_t>(ratio) - kScaleBias + (1 << kScaleShift) - 1;
    *out = std::clamp(bits >> kScaleShift, 0, 255);
    return 1 / (direction_scale(*out) * mean_scale);
  }

  // Of two directions; parts [2, width].
  static void round_coefficients(const float* parts, int width, int n, const float* inverse,
                                 uint8_t* out) {
    const auto whole = [&](int token, int k) {
      const float x = rounded(parts[k * width + token] * inverse[k]);
      return (x > kNibbleMost ? 7 : x >= -kNibbleMost ? static_cast<int>(x) : -7) + 8;
    };
    for (int i = 0; i < n; ++i, ++out) {
      const int token = i / 16 * 16 + i % 16 / 2, k = i % 2;
      *out = whole(token, k) | whole(token + 8, k) << 4;
    }
  }

  // parts [rank, width]: of the directions, such that the rest is nearest to their sums.
  static void fit_coefficients(const float* directions, const float* rest, int d, int width, int rank,
                               float* parts) {
    float squares[kMostRank][kMostRank];
    outer_products(directions, kMostRank, rank, directions, kMostRank, kMostRank, d, squares[0],
                   kMostRank);
    outer_products(directions, kMostRank, rank, rest, width, width, d, parts, width);
    // Cholesky's factors of the squares, inverses in the diagonal; directions may be zero or alike.
    for (int k = 0; k < rank; ++k) {
      float left = squares[k][k] * 1.0005f;
      for (int j = 0; j < k; ++j) left -= squares[k][j] * squares[k][j];
      squares[k][k] = 1 / __builtin_sqrtf(std::max(left, 1e-3f));
      for (int i = k + 1; i < rank; ++i) {
        float x = squares[i][k];
        for (int j = 0; j < k; ++j) x -= squares[i][j] * squares[k][j];
        squares[i][k] = x * squares[k][k];
      }
    }
    for (int i = 0; i < width; i += kWidth) {
      float* column = parts + i;
      const auto part = [&](int k) { return load_as<Floats>(column + k * width); };
      for (int k = 0; k < rank; ++k) {
        Floats x = part(k);
        for (int j = 0; j < k; ++j) x -= part(j) * squares[k][j];
        store_floats(column + k * width, x * squares[k][k]);
      }
      for (int k = rank - 1; k >= 0; --k) {
        Floats x = part(k);
        for (int j = k + 1; j < rank; ++j) x -= part(j) * squares[j][k];
        store_floats(column + k * width, x * squares[k][k]);
      }
    }
  }

  Principal principal_;
  std::vector<float> buffer_;
};

}  // namespace KVR_ISA
}  // namespace kvr
