// Parts of the stages of scoring (low_rank_stages.h) that AVX2 and AVX-512 share.
#pragma once

#include <immintrin.h>

#include "index/low_rank_queries.h"

namespace kvr {
namespace KVR_ISA {

// The sums of lanes that have the same direction.
template <int kDirections>
inline __m128i folded(__m256i totals) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(totals), _mm256_extracti128_si256(totals, 1));
  if (kDirections <= 2) x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  if (kDirections == 1) x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1));
  return x;
}

// The power of two in which products are rounded to 8 bits, given magnitudes.
struct Unit {
  __m128i exponent, inverse;
  explicit Unit(__m256 magnitudes) {
    __m128 most =
        _mm_max_ps(_mm256_castps256_ps128(magnitudes), _mm256_extractf128_ps(magnitudes, 1));
    most = _mm_max_ps(most, _mm_shuffle_ps(most, most, 0x4e));
    most = _mm_max_ps(most, _mm_shuffle_ps(most, most, 0xb1));
    const __m128i exponents = _mm_and_si128(_mm_castps_si128(most), _mm_set1_epi32(kExponents));
    exponent = _mm_max_epi32(exponents, _mm_set1_epi32(kLeastExponent));
    inverse = _mm_sub_epi32(_mm_set1_epi32(int(260u << 23)), exponent);
  }
  float value() const {
    return bits_as<float>(_mm_cvtsi128_si32(_mm_sub_epi32(exponent, _mm_set1_epi32(6 << 23))));
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
