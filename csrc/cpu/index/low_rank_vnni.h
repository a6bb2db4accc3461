// The stages of scoring a low-rank index (low_rank_stages.h) in vectors of 512 bits, with VNNI.
#pragma once

#include <immintrin.h>

namespace kvr {
namespace KVR_ISA {

// The sums of lanes that have the same direction, of 8 directions at most.
template <int kDirections>
inline __m256i folded(__m512i totals) {
  __m256i x = _mm256_add_epi32(_mm512_castsi512_si256(totals), _mm512_extracti64x4_epi64(totals, 1));
  if (kDirections == 8) return x;
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  if (kDirections <= 2) y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  if (kDirections == 1) y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1));
  return _mm256_castsi128_si256(y);
}

// Products of N queries with a block of directions, from the first-th on; on to the next block.
template <int N, int kDirections>
inline void block_products(int d, int64_t stride, const int (&offsets)[N], const uint8_t*& p,
                           const int8_t*& q, __m512i (&out)[N], int& first) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512i lower[N], upper[N];
  KVR_UNROLL for (int g = 0; g < N; ++g) lower[g] = upper[g] = _mm512_setzero_si512();
  for (int left = d / 8 * kDirections; left > 0; left -= kLanes, q += 8 * kLanes) {
    const __mmask16 some = left >= kLanes ? 0xffff : (1 << left) - 1;
    const __m512i pairs = _mm512_maskz_loadu_epi32(some, p);
    const __m512i a = _mm512_and_si512(pairs, low);
    const __m512i b = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      lower[g] = _mm512_dpbusd_epi32(lower[g], a, load_as<__m512i>(q + g * stride));
      upper[g] = _mm512_dpbusd_epi32(upper[g], b, load_as<__m512i>(q + g * stride + 4 * kLanes));
    }
    p += 4 * std::min(left, kLanes);
  }
  const __mmask16 to = ((1 << kDirections) - 1) << first;
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const __m256i x = _mm256_sub_epi32(folded<kDirections>(_mm512_add_epi32(lower[g], upper[g])),
                                       _mm256_set1_epi32(offsets[g]));
    out[g] = _mm512_mask_expand_epi32(out[g], to, _mm512_castsi256_si512(x));
  }
  first += kDirections;
}

// Products of N queries, from the i-th on, with the directions.
template <int N>
inline void products(const uint8_t* record, const LowRankFields& f, int d,
                     const RoundedQueries& queries, int i, int32_t (&out)[N][kMostRank]) {
  const uint8_t* p = record + f.directions;
  const int8_t* q = queries.bytes(i);
  const int64_t stride = queries.stride();
  int offsets[N];
  __m512i totals[N];  // stored at once: what is read at once later comes from the store then
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    offsets[g] = queries.factors(i + g).offset;
    totals[g] = _mm512_setzero_si512();
  }
  int first = 0;
  while (first + 8 <= f.rank) block_products<N, 8>(d, stride, offsets, p, q, totals, first);
  if (f.rank & 4) block_products<N, 4>(d, stride, offsets, p, q, totals, first);
  if (f.rank & 2) block_products<N, 2>(d, stride, offsets, p, q, totals, first);
  if (f.rank & 1) block_products<N, 1>(d, stride, offsets, p, q, totals, first);
  KVR_UNROLL for (int g = 0; g < N; ++g) std::memcpy(out[g], &totals[g], sizeof totals[g]);
}

// The parts along the directions of an entry, from products with these.
template <int N>
inline void round_products(const uint8_t* record, const int32_t (&products)[N][kMostRank],
                           const RoundedQueries& queries, int i, Along (&along)[N]) {
  const __m512i steps = _mm512_cvtepu8_epi32(load_as<__m128i>(record + LowRankFields::kScales));
  const __m512i scales = _mm512_add_epi32(_mm512_slli_epi32(steps, kScaleShift),
                                          _mm512_set1_epi32(kScaleBias));
  const __m512 factors = _mm512_set1_ps(mean_scale_of(record)) * _mm512_castsi512_ps(scales);
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const __m512 x = _mm512_cvtepi32_ps(load_as<__m512i>(products[g])) * factors;
    const __m512 magnitudes = _mm512_abs_ps(x);
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(magnitudes),
                                       _mm512_extractf32x8_ps(magnitudes, 1));
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    most = _mm_max_ps(most, _mm_shuffle_ps(most, most, 0x4e));
    most = _mm_max_ps(most, _mm_shuffle_ps(most, most, 0xb1));
    const __m128i exponents = _mm_and_si128(_mm_castps_si128(most), _mm_set1_epi32(kExponents));
    const __m128i exponent = _mm_max_epi32(exponents, _mm_set1_epi32(kLeastExponent));
    const __m128i inverse = _mm_sub_epi32(_mm_set1_epi32(int(260u << 23)), exponent);
    const __m512 factor = _mm512_broadcastss_ps(_mm_castsi128_ps(inverse));
    const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x * factor));
    const __m128i halves =
        _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    const int total = _mm_cvtsi128_si32(_mm_add_epi32(halves, _mm_shuffle_epi32(halves, 0x4e)));
    std::memcpy(along[g].parts, &bytes, sizeof bytes);
    along[g].unit =
        bits_as<float>(_mm_cvtsi128_si32(_mm_sub_epi32(exponent, _mm_set1_epi32(6 << 23))));
    along[g].start = -8 * (total - 128 * kMostRank);
    const __m128 limit =
        _mm_mul_ss(_mm_set_ss(queries.factors(i + g).farthest), _mm_castsi128_ps(inverse));
    along[g].limit = _mm_cvttss_si32(_mm_min_ss(limit, _mm_set_ss(kNoLimit)));
  }
}

// Sums of what N queries have along the directions with the coefficients of 32 tokens or, in the
// first half of them, 16, within limits; in an order of their own.
template <int N>
inline void sum_tokens(const uint8_t* c, int64_t stride, int pairs, int count,
                       const Along (&along)[N], int16_t (&sums)[N][kTokens]) {
  const __m512i low = _mm512_set1_epi8(15);
  // Two pairs of directions at a time: one in each half of a vector.
  __m512i lower[N], upper[N], parts[N];
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    lower[g] = upper[g] = _mm512_setzero_si512();
    parts[g] = _mm512_castsi128_si512(load_as<__m128i>(along[g].parts));
  }
  const __mmask8 row = count == kTokens ? 0xf : 0x3;  // of words of 8 bytes
  __m512i places = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(1), 1);
  for (int p = 0; p < pairs; p += 2, c += 2 * stride) {
    const __m512i first = _mm512_castsi256_si512(_mm256_maskz_loadu_epi64(row, c));
    const __mmask8 other = p + 1 < pairs ? row : 0;
    const __m512i both =
        _mm512_inserti64x4(first, _mm256_maskz_loadu_epi64(other, c + stride), 1);
    const __m512i a = _mm512_and_si512(both, low);
    const __m512i b = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const __m512i x = _mm512_permutexvar_epi16(places, parts[g]);
      lower[g] = _mm512_add_epi16(lower[g], _mm512_maddubs_epi16(a, x));
      upper[g] = _mm512_add_epi16(upper[g], _mm512_maddubs_epi16(b, x));
    }
    places = _mm512_add_epi16(places, _mm512_set1_epi16(2));
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const __m256i start = _mm256_set1_epi16(along[g].start);
    const __m256i most = _mm256_set1_epi16(along[g].limit), least = _mm256_set1_epi16(-along[g].limit);
    const auto store = [&](int16_t* to, __m512i halves) {
      const __m256i sum = _mm256_add_epi16(_mm512_castsi512_si256(halves),
                                           _mm512_extracti64x4_epi64(halves, 1));
      const __m256i within =
          _mm256_min_epi16(_mm256_max_epi16(_mm256_add_epi16(sum, start), least), most);
      std::memcpy(to, &within, sizeof within);
    };
    store(sums[g], lower[g]);
    store(sums[g] + count / 2, upper[g]);
  }
}

// Products of N queries with the mean, in as many lanes as there are.
template <int N>
inline void along_mean(const uint8_t* mean, int d, const int16_t* q, Floats (&out)[N]) {
  __m512i totals[N];
  KVR_UNROLL for (int g = 0; g < N; ++g) totals[g] = _mm512_setzero_si512();
  for (int c = 0; c < d; c += 32) {
    const bool all = c + 32 <= d;
    const __m512i x = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi64(all ? 0xf : 0x3, mean + c));
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const __m512i y = _mm512_maskz_loadu_epi16(all ? ~__mmask32{} : 0xffff, q + g * d + c);
      totals[g] = _mm512_dpwssd_epi32(totals[g], x, y);
    }
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) out[g] = (Floats)_mm512_cvtepi32_ps(totals[g]);
}

}  // namespace KVR_ISA
}  // namespace kvr
