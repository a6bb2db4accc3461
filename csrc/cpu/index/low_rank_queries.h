// Queries of a low-rank index as whole numbers, in the order in which the stages of scoring
// (low_rank_stages.h) take them.
#pragma once

#include <algorithm>
#include <vector>

#include "index/low_rank_record.h"

namespace kvr {
namespace KVR_ISA {

constexpr float kMeanMost = 16383;
constexpr int kTokens = 32;           // of an entry, whose masses are summed together
constexpr int kLanes = kWidth == 16 ? 16 : 8;  // words of four channels that are multiplied at once
constexpr int kVectorBytes = 2 * 4 * kLanes;   // of a query: lower channels, and then upper ones
constexpr int kLeastExponent = 64 << 23, kExponents = 0x7f800000;

// The queries of a task in whole numbers.
class RoundedQueries {
 public:
  struct Factors {
    float directions;  // of products with them; of base 2
    float mean;
    int offset;        // of products with directions, which are kept plus 8
  };

  // queries [count, head_size]
  RoundedQueries(const float* queries, int count, int rank, int d, float scale)
      : d_(d), stride_(0) {
    for_blocks(rank, [&](int, int width) { stride_ += vectors(width) * kVectorBytes; });
    thread_local std::vector<Line> byte_lines, half_lines;
    thread_local std::vector<Factors> factors;
    byte_lines.assign((count * stride_ + 63) / 64, Line{});
    half_lines.resize((count * d * 2 + 63) / 64);
    int8_t* const bytes = byte_lines.data()->bytes;
    int16_t* const halves = reinterpret_cast<int16_t*>(half_lines.data());
    factors.resize(count);
    std::vector<int8_t> small(d);
    for (int i = 0; i < count; ++i, queries += d) {
      const float most = largest_magnitude(queries, d);
      const float coarse = std::max(most / kByteMost, kLeastScale);
      const float fine = std::max(most / kMeanMost, kLeastScale);
      int total = 0;
      for (int c = 0; c < d; ++c) {
        const int whole = static_cast<int>(rounded(queries[c] / coarse));
        small[c] = whole;
        halves[i * d + c] = static_cast<int>(rounded(queries[c] / fine));
        total += static_cast<int8_t>(whole);
      }
      spread(small.data(), rank, bytes + i * stride_);
      factors[i] = {coarse * scale * kLog2E, fine * scale, 8 * total};
    }
    bytes_ = bytes;
    halves_ = halves;
    factors_ = factors.data();
  }

  // As lanes of a block of directions need them: per vector of these, kLanes words of lower channels
  // and as many of upper ones.
  const int8_t* bytes(int i) const { return bytes_ + int64_t(i) * stride_; }
  const int16_t* halves(int i) const { return halves_ + int64_t(i) * d_; }
  const Factors& factors(int i) const { return factors_[i]; }
  int64_t stride() const { return stride_; }

  // Of kLanes, that a block of directions takes.
  int vectors(int width) const { return (d_ / 8 * width + kLanes - 1) / kLanes; }

 private:
  struct Line {  // vectors do not cross lines of the cache
    alignas(64) int8_t bytes[64];
  };

  void spread(const int8_t* channels, int rank, int8_t* to) const {
    for_blocks(rank, [&](int, int width) {
      for (int v = 0; v < vectors(width); ++v, to += kVectorBytes)
        for (int lane = 0; lane < kLanes; ++lane) {
          const int row = (kLanes * v + lane) / width;
          if (row >= d_ / 8) continue;
          std::memcpy(to + 4 * lane, channels + 4 * row, 4);
          std::memcpy(to + kVectorBytes / 2 + 4 * lane, channels + d_ / 2 + 4 * row, 4);
        }
    });
  }

  const int d_;
  int64_t stride_;
  const int8_t* bytes_;
  const int16_t* halves_;
  const Factors* factors_;
};

// A query's products with the directions of an entry, times their scales, in 8 bits.
struct Along {
  alignas(16) int8_t parts[kMostRank];
  float unit;     // less the query's factor
#if !defined(__AVX512F__)
  int32_t start;  // of sums with coefficients, which are kept plus 8
#endif
};

}  // namespace KVR_ISA
}  // namespace kvr
