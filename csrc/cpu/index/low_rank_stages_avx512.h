// The stages of scoring (low_rank_stages.h) with AVX-512: its dot products of bytes (VNNI) take the place
// of three instructions of AVX2 each.
#pragma once

#include "index/low_rank_stages_x86.h"

namespace kvr {
namespace KVR_ISA {

// Nibbles of bytes: lower ones, and upper ones.
struct Nibbles {
  __m512i lower, upper;
  explicit Nibbles(__m512i bytes) {
    asm("" : "+v"(bytes));  // or GCC loads them twice
    const __m512i low = _mm512_set1_epi8(15);
    lower = _mm512_and_si512(bytes, low);
    upper = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
  }
};

// The sums of lanes that have the same direction.
template <int kDirections>
inline __m256i folded(__m512i totals) {
  const __m256i halves =
      _mm256_add_epi32(_mm512_castsi512_si256(totals), _mm512_extracti64x4_epi64(totals, 1));
  if constexpr (kDirections == 8) return halves;
  return _mm256_castsi128_si256(folded<kDirections>(halves));
}

// Products of N queries with a block of directions; on to the next block.
template <int N, int kDirections>
inline void block_products(int d, int64_t stride, const int (&offsets)[N], const uint8_t*& p,
                           const int8_t*& q, int32_t (&out)[N][kMostRank], int first) {
  __m512i totals[N];
  KVR_UNROLL for (int g = 0; g < N; ++g) totals[g] = _mm512_setzero_si512();
  int left = d / 2 * kDirections;
  const auto add = [&](__m512i bytes) {
    const Nibbles x(bytes);
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const int8_t* words = q + g * stride;
      totals[g] = _mm512_dpbusd_epi32(totals[g], x.lower, load_as<__m512i>(words));
      totals[g] = _mm512_dpbusd_epi32(totals[g], x.upper, load_as<__m512i>(words + 64));
    }
    q += kVectorBytes;
  };
  for (; left >= 64; left -= 64, p += 64) add(load_as<__m512i>(p));
  if (left > 0) {
    add(_mm512_maskz_loadu_epi32((1 << left / 4) - 1, p));
    p += left;
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const __m256i x =
        _mm256_sub_epi32(folded<kDirections>(totals[g]), _mm256_set1_epi32(offsets[g]));
    std::memcpy(out[g] + first, &x, 4 * kDirections);
  }
}

// Products with the directions -> along them, given their scales.
inline Along round_along(const int32_t* products, __m512 scales) {
  const __m512 parts = _mm512_cvtepi32_ps(load_as<__m512i>(products)) * scales;
  const __m512 magnitudes = _mm512_abs_ps(parts);
  const __m256 both =
      _mm256_max_ps(_mm512_castps512_ps256(magnitudes), _mm512_extractf32x8_ps(magnitudes, 1));
  const Unit unit(both);
  const __m512 factor = _mm512_castsi512_ps(_mm512_broadcastd_epi32(unit.inverse));
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(parts * factor));
  Along along;
  std::memcpy(along.parts, &bytes, sizeof bytes);
  along.unit = unit.value();
  return along;
}

// The parts along the directions of an entry, from products with these.
template <int N>
inline void round_products(const uint8_t* record, const int32_t (&products)[N][kMostRank],
                           Along (&along)[N]) {
  const __m512i bytes = _mm512_cvtepu8_epi32(load_as<__m128i>(record + LowRankFields::kScales));
  const __m512 scales = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(bytes, kScaleShift),
                                                             _mm512_set1_epi32(kScaleBias)));
  const __m512 absolute = scales * _mm512_set1_ps(mean_scale_of(record));
  KVR_UNROLL for (int g = 0; g < N; ++g)
    along[g] = round_along(products[g], absolute);
}

// Sums of a product per token, for N queries.
template <int N>
struct TokenSums {
  __m512i sums[N][kTokens / kWidth];

  // Of kWidth tokens from one on.
  Floats at(int g, int first) const { return (Floats)_mm512_cvtepi32_ps(sums[g][first / kWidth]); }
};

// Sums of what N queries have along the directions with the coefficients of 32 tokens or, in the
// first half of them, 16.
template <int N>
inline void sum_tokens(const uint8_t* c, int64_t stride, int pairs, int count,
                       const Along (&along)[N], TokenSums<N>& out) {
  // Words of two pairs of directions -> those of a token side by side: what four products take.
  const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                          22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const auto load = [&](const uint8_t* at) {
    return count == kTokens ? load_as<__m256i>(at) : _mm256_castsi128_si256(load_as<__m128i>(at));
  };
  const __m512i eights = _mm512_set1_epi8(8), zero = _mm512_setzero_si512();
  __m512i lower[N], upper[N], more[N];  // more: by the 8 that is added to coefficients
  KVR_UNROLL for (int g = 0; g < N; ++g) lower[g] = upper[g] = more[g] = zero;
  for (int p = 0; p < pairs; p += 2, c += 2 * stride) {
    const __m256i second = p + 1 < pairs ? load(c + stride) : _mm256_setzero_si256();
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load(c)), second, 1);
    const Nibbles x(_mm512_permutexvar_epi16(places, both));
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const __m512i parts = _mm512_set1_epi32(load_as<int32_t>(along[g].parts + 2 * p));
      lower[g] = _mm512_dpbusd_epi32(lower[g], x.lower, parts);
      upper[g] = _mm512_dpbusd_epi32(upper[g], x.upper, parts);
      more[g] = _mm512_dpbusd_epi32(more[g], eights, parts);
    }
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    // Of eight tokens each come those with lower nibbles, and then those with upper ones.
    out.sums[g][0] = _mm512_sub_epi32(
        _mm512_inserti64x4(lower[g], _mm512_castsi512_si256(upper[g]), 1), more[g]);
    out.sums[g][1] =
        _mm512_sub_epi32(_mm512_shuffle_i64x2(lower[g], upper[g], 0xee), more[g]);
  }
}

// Products of N queries with the mean, whose lanes are still to be added up.
template <int N>
inline void along_mean(const uint8_t* mean, int d, const int16_t* q, Floats (&out)[N]) {
  __m512i totals[N];
  KVR_UNROLL for (int g = 0; g < N; ++g) totals[g] = _mm512_setzero_si512();
  const auto add = [&](__m256i bytes, __mmask32 some, int c) {
    const __m512i x = _mm512_cvtepi8_epi16(bytes);
    KVR_UNROLL for (int g = 0; g < N; ++g)
      totals[g] = _mm512_dpwssd_epi32(totals[g], x, _mm512_maskz_loadu_epi16(some, q + g * d + c));
  };
  int c = 0;
  for (; c + 32 <= d; c += 32) add(load_as<__m256i>(mean + c), ~__mmask32{}, c);
  if (c < d) add(_mm256_castsi128_si256(load_as<__m128i>(mean + c)), 0xffff, c);
  KVR_UNROLL for (int g = 0; g < N; ++g) out[g] = (Floats)_mm512_cvtepi32_ps(totals[g]);
}

}  // namespace KVR_ISA
}  // namespace kvr
