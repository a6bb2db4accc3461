// The stages of scoring (low_rank_stages.h) with AVX2.
#pragma once

#include "index/low_rank_stages_x86.h"

namespace kvr {
namespace KVR_ISA {

// Adds products of N queries with a vector of a block's directions; no sum of four exceeds 16 bits.
template <int N>
inline void add_products(__m256i pairs, const int8_t* q, int64_t stride, __m256i (&sums)[N]) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i lower = _mm256_and_si256(pairs, low);
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low);
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const __m256i sum =
        _mm256_add_epi16(_mm256_maddubs_epi16(lower, load_as<__m256i>(q + g * stride)),
                         _mm256_maddubs_epi16(upper, load_as<__m256i>(q + g * stride + 32)));
    sums[g] = _mm256_add_epi16(sums[g], sum);
  }
}

// Products of N queries with a block of directions, of `bytes`, without the queries' offsets.
template <int N>
inline void along_block(const uint8_t* p, int bytes, const int8_t* q, int64_t stride,
                        __m256i (&totals)[N]) {
  KVR_UNROLL for (int g = 0; g < N; ++g) totals[g] = _mm256_setzero_si256();
  for (; bytes > 0; bytes -= 128) {
    __m256i sums[N];
    KVR_UNROLL for (int g = 0; g < N; ++g) sums[g] = _mm256_setzero_si256();
    if (bytes >= 128) {
#pragma GCC unroll 2  // unrolled, the vectors do not fit in registers
      for (int v = 0; v < 4; ++v, p += 32, q += 64)
        add_products<N>(load_as<__m256i>(p), q, stride, sums);
    } else {
      for (int left = bytes; left > 0; left -= 32, p += 32, q += 64) {
        const __m256i lanes = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
        const __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), lanes);
        add_products<N>(_mm256_maskload_epi32(reinterpret_cast<const int*>(p), some), q, stride,
                        sums);
      }
    }
    KVR_UNROLL for (int g = 0; g < N; ++g)
      totals[g] = _mm256_add_epi32(totals[g], _mm256_madd_epi16(sums[g], _mm256_set1_epi16(1)));
  }
}

// Products of N queries with a block of directions; on to the next block.
template <int N, int kDirections>
inline void block_products(int d, int64_t stride, const int (&offsets)[N], const uint8_t*& p,
                           const int8_t*& q, int32_t (&out)[N][kMostRank], int first) {
  const int bytes = d / 2 * kDirections;
  __m256i totals[N];
  along_block<N>(p, bytes, q, stride, totals);
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    if constexpr (kDirections == 8) {
      const __m256i x = _mm256_sub_epi32(totals[g], _mm256_set1_epi32(offsets[g]));
      std::memcpy(out[g] + first, &x, 32);
    } else {
      const __m128i x = _mm_sub_epi32(folded<kDirections>(totals[g]), _mm_set1_epi32(offsets[g]));
      std::memcpy(out[g] + first, &x, 4 * kDirections);
    }
  }
  p += bytes;
  q += (bytes + 31) / 32 * kVectorBytes;
}

// Products with the directions -> along them, given their scales.
inline Along round_along(const int32_t* products, __m256 first_scales, __m256 last_scales) {
  const __m256 a = _mm256_cvtepi32_ps(load_as<__m256i>(products)) * first_scales;
  const __m256 b = _mm256_cvtepi32_ps(load_as<__m256i>(products + 8)) * last_scales;
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256 both = _mm256_max_ps(_mm256_and_ps(a, magnitude), _mm256_and_ps(b, magnitude));
  const Unit unit(both);
  const __m256 factor = _mm256_castsi256_ps(_mm256_broadcastsi128_si256(unit.inverse));
  const __m256i x = _mm256_cvtps_epi32(a * factor), y = _mm256_cvtps_epi32(b * factor);
  const __m128i bytes = _mm_packs_epi16(
      _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)),
      _mm_packs_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
  const __m128i halves = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  const int total = _mm_cvtsi128_si32(_mm_add_epi32(halves, _mm_shuffle_epi32(halves, 0x4e)));
  Along along;
  std::memcpy(along.parts, &bytes, sizeof bytes);
  along.unit = unit.value();
  along.start = -8 * (total - 128 * kMostRank);
  return along;
}

// The parts along the directions of an entry, from products with these.
template <int N>
inline void round_products(const uint8_t* record, const int32_t (&products)[N][kMostRank],
                           Along (&along)[N]) {
  const __m256 mean = _mm256_set1_ps(mean_scale_of(record));
  const auto scales = [&](int first) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(
        reinterpret_cast<const __m128i*>(record + LowRankFields::kScales + first)));
    return mean * _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(bytes, kScaleShift),
                                                       _mm256_set1_epi32(kScaleBias)));
  };
  const __m256 first_scales = scales(0), last_scales = scales(8);
  KVR_UNROLL for (int g = 0; g < N; ++g)
    along[g] = round_along(products[g], first_scales, last_scales);
}

// Sums of a product per token, for N queries.
template <int N>
struct TokenSums {
  alignas(32) int16_t sums[N][kTokens];

  // Of kWidth tokens from one on.
  Floats at(int g, int first) const {
    return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(load_as<__m128i>(sums[g] + first)));
  }
};

// Sums of what N queries have along the directions with the coefficients of 32 tokens or, in the
// first half of them, 16.
template <int N>
inline void sum_tokens(const uint8_t* c, int64_t stride, int pairs, int count,
                       const Along (&along)[N], TokenSums<N>& out) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i lower[N], upper[N];
  KVR_UNROLL for (int g = 0; g < N; ++g)
    lower[g] = upper[g] = _mm256_set1_epi16(along[g].start);
  for (int p = 0; p < pairs; ++p, c += stride) {
    const __m256i both = count == kTokens ? load_as<__m256i>(c)
                                          : _mm256_castsi128_si256(load_as<__m128i>(c));
    const __m256i a = _mm256_and_si256(both, low);
    const __m256i b = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const __m256i parts = _mm256_set1_epi16(load_as<int16_t>(along[g].parts + 2 * p));
      lower[g] = _mm256_add_epi16(lower[g], _mm256_maddubs_epi16(a, parts));
      upper[g] = _mm256_add_epi16(upper[g], _mm256_maddubs_epi16(b, parts));
    }
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const auto store = [&](int16_t* to, __m256i sum) { std::memcpy(to, &sum, sizeof sum); };
    // Of 16 tokens at once, since a load that two stores feed waits for both.
    store(out.sums[g], _mm256_permute2x128_si256(lower[g], upper[g], 0x20));
    if (count == kTokens) store(out.sums[g] + 16, _mm256_permute2x128_si256(lower[g], upper[g], 0x31));
  }
}

// Products of N queries with the mean, whose lanes are still to be added up.
template <int N>
inline void along_mean(const uint8_t* mean, int d, const int16_t* q, Floats (&out)[N]) {
  __m256i totals[N];
  KVR_UNROLL for (int g = 0; g < N; ++g) totals[g] = _mm256_setzero_si256();
  for (int c = 0; c < d; c += 16) {
    const __m256i x = _mm256_cvtepi8_epi16(load_as<__m128i>(mean + c));
    KVR_UNROLL for (int g = 0; g < N; ++g)
      totals[g] =
          _mm256_add_epi32(totals[g], _mm256_madd_epi16(x, load_as<__m256i>(q + g * d + c)));
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    out[g] = _mm256_cvtepi32_ps(totals[g]);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
