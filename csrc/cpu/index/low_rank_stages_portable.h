// The stages of scoring (low_rank_stages.h) for any CPU.
#pragma once

#include <algorithm>

#include "index/low_rank_queries.h"

namespace kvr {
namespace KVR_ISA {

template <int N>
inline void products(const uint8_t* record, const LowRankFields& f, int d,
                     const RoundedQueries& queries, int i, int32_t (&out)[N][kMostRank]) {
  const uint8_t* p = record + f.directions;
  const int8_t* q = queries.bytes(i);
  for (int g = 0; g < N; ++g)
    for (int k = 0; k < kMostRank; ++k) out[g][k] = k < f.rank ? -queries.factors(i + g).offset : 0;
  for_blocks(f.rank, [&](int first, int width) {
    for (int at = 0; at < d / 8 * width; ++at, p += 4)
      for (int g = 0; g < N; ++g) {
        const int8_t* words = q + g * queries.stride() + at / kLanes * kVectorBytes + at % kLanes * 4;
        for (int j = 0; j < 4; ++j)
          out[g][first + at % width] += (p[j] & 15) * words[j] + (p[j] >> 4) * words[kVectorBytes / 2 + j];
      }
    q += queries.vectors(width) * kVectorBytes;
  });
}

template <int N>
inline void round_products(const uint8_t* record, const int32_t (&products)[N][kMostRank],
                           Along (&along)[N]) {
  const uint8_t* scales = record + LowRankFields::kScales;
  for (int g = 0; g < N; ++g) {
    float parts[kMostRank], most = 0;
    for (int k = 0; k < kMostRank; ++k) {
      parts[k] = products[g][k] * (direction_scale(scales[k]) * mean_scale_of(record));
      most = std::max(most, __builtin_fabsf(parts[k]));
    }
    const int32_t exponent = std::max(bits_as<int32_t>(most) & kExponents, kLeastExponent);
    const float factor = bits_as<float>((260u << 23) - exponent);
    int total = 0;
    for (int k = 0; k < kMostRank; ++k) {
      const float part = rounded(parts[k] * factor);
      along[g].parts[k] = part > 127 ? 127 : part >= -128 ? static_cast<int>(part) : -128;
      total += along[g].parts[k];
    }
    along[g].unit = bits_as<float>(exponent - (6 << 23));
    along[g].start = -8 * total;
  }
}

// Sums of a product per token, for N queries.
template <int N>
struct TokenSums {
  int16_t sums[N][kTokens];

  // Of kWidth tokens from one on.
  Floats at(int g, int first) const {
    Floats v;
    for (int i = 0; i < kWidth; ++i) v[i] = sums[g][first + i];
    return v;
  }
};

template <int N>
inline void sum_tokens(const uint8_t* c, int64_t stride, int pairs, int count,
                       const Along (&along)[N], TokenSums<N>& out) {
  for (int g = 0; g < N; ++g)
    for (int t = 0; t < count; ++t) {
      const uint8_t* at = c + t / 16 * 16 + t % 8 * 2;
      int total = along[g].start;
      for (int p = 0; p < pairs; ++p, at += stride)
        for (int k = 0; k < 2; ++k)
          total += (at[k] >> t / 8 % 2 * 4 & 15) * along[g].parts[2 * p + k];
      out.sums[g][t] = total;
    }
}

template <int N>
inline void along_mean(const uint8_t* mean, int d, const int16_t* q, Floats (&out)[N]) {
  for (int g = 0; g < N; ++g, q += d) {
    int total = 0;
    for (int c = 0; c < d; ++c) total += static_cast<int8_t>(mean[c]) * q[c];
    out[g] = Floats{static_cast<float>(total)};
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
