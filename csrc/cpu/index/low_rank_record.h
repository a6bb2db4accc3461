// The record of a low-rank index (low_rank.h), and numbers that building and scoring share.
//
// Record: scale of the mean (bfloat16); scales of the directions [rank], relative to the mean's, a
// byte each: exponent above, mantissa below; mean [head_size], 8 bits; directions, 4 bits plus 8, in
// blocks of 8, 4, 2 and 1 of them, a block being [head_size / 8, directions, 4]: byte (i, k, j) has
// channel 4 i + j of direction k below and head_size / 2 + 4 i + j above; coefficients
// [pairs of directions, entry_tokens / 16, 8, 2], 4 bits plus 8: byte (p, i, j, k) has those of
// direction 2 p + k, of token 16 i + j below and 16 i + 8 + j above.
#pragma once

#include <algorithm>
#include <cstring>

#include "index/principal.h"

namespace kvr {
namespace KVR_ISA {

constexpr float kNibbleMost = 7, kByteMost = 127;
constexpr float kLeastScale = 1e-8f;  // of what is rounded
constexpr float kLeastMeanSteps = 64;  // the keys' largest part beside their mean, in its scale
constexpr int kScaleBias = 115 << 23, kScaleShift = 19;  // byte 0 is 2^-12, 16 steps per octave

inline int rank_of(const Index& index) { return static_cast<int>(index.parameters[0]); }

// Where a record has its fields.
struct LowRankFields {
  int rank, pairs, mean, directions, coefficients;
  static constexpr int kScales = 2;
  explicit LowRankFields(const Index& index)
      : rank(rank_of(index)), pairs((rank + 1) / 2), mean(kScales + rank),
        directions(mean + index.head_size), coefficients(directions + rank * index.head_size / 2) {}
};

// Widths of the blocks of directions, the largest first; calls use(first direction, width).
template <class Use>
inline void for_blocks(int rank, const Use& use) {
  for (int first = 0; first < rank;) {
    const int left = rank - first, width = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    use(first, width);
    first += width;
  }
}

inline float mean_scale_of(const uint8_t* record) {
  return bits_as<float>(uint32_t(load_as<uint16_t>(record)) << 16);
}

// Relative to the mean's.
inline float direction_scale(uint8_t byte) {
  return bits_as<float>(kScaleBias + (int32_t(byte) << kScaleShift));
}

// Whole numbers nearest to x, below 2^22; a vector of floats of any width.
template <class V>
inline V rounded(V x) {
  constexpr float kShift = 12582912;
  return (x + kShift) - kShift;
}

// Of n values, as many as fill vectors.
inline float largest_magnitude(const float* values, int n) {
  Floats most = {};
  for (int i = 0; i < n; i += kWidth) {
    const Floats x = load_as<Floats>(values + i);
    most = max(most, max(x, -x));
  }
  float largest = most[0];
  for (int i = 1; i < kWidth; ++i) largest = std::max(largest, most[i]);
  return largest;
}

}  // namespace KVR_ISA
}  // namespace kvr
