// The k best of a row of scores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "simd.h"

namespace kvr {
namespace KVR_ISA {

// The number of values[0..n) with a bit pattern of at least `floor`.
inline int count_at_least(const float* values, int n, int32_t floor) {
  int count = 0, j = 0;
#if defined(__AVX512F__)
  for (; j + kWidth <= n; j += kWidth)
    count += __builtin_popcount(_mm512_cmpge_epi32_mask(load_as<__m512i>(values + j),
                                                        _mm512_set1_epi32(floor)));
#else
  Ints counts = {};
  for (; j + kWidth <= n; j += kWidth) counts -= (load_as<Ints>(values + j) >= floor);
  for (int i = 0; i < kWidth; ++i) count += counts[i];
#endif
  for (; j < n; ++j) {
    int32_t bits;
    std::memcpy(&bits, values + j, 4);
    count += bits >= floor;
  }
  return count;
}

// The positions of these values, in rising order. There has to be room for n + kWidth positions.
inline int at_least(const float* values, int n, int32_t floor, int32_t* out) {
  int count = 0, j = 0;
#if defined(__AVX512F__)
  Ints places;
  for (int i = 0; i < kWidth; ++i) places[i] = i;
  for (; j + kWidth <= n; j += kWidth) {
    const __m512i bits = load_as<__m512i>(values + j);
    const __mmask16 reach = _mm512_cmpge_epi32_mask(bits, _mm512_set1_epi32(floor));
    const __m512i chosen = _mm512_maskz_compress_epi32(reach, (__m512i)(places + j));
    std::memcpy(out + count, &chosen, sizeof chosen);
    count += __builtin_popcount(reach);
  }
#endif
  for (; j < n; ++j) {
    int32_t bits;
    std::memcpy(&bits, values + j, 4);
    out[count] = j;
    count += bits >= floor;
  }
  return count;
}

// Replaces values[0..n) by numbers whose bit patterns order like the values, also negative ones. Zeros
// of both signs are equal, and NaN counts least.
inline void to_ordered(float* values, int n) {
  for (int j = 0; j < n; ++j) {
    int32_t bits;
    std::memcpy(&bits, values + j, 4);
    if (values[j] != values[j]) bits = std::numeric_limits<int32_t>::min();
    else if (bits < 0) bits = -(bits & std::numeric_limits<int32_t>::max());
    std::memcpy(values + j, &bits, 4);
  }
}

// The highest bit pattern that at least k of values[0..n) reach, n >= k > 0. Negative patterns are
// considered only if the caller says that there may be some.
inline int32_t floor_of(const float* values, int n, int k, bool negative = false) {
  int32_t floor = 0;  // raised until no more than k reach it
  int count = n;
  if (negative) {
    count = count_at_least(values, n, 0);
    if (count < k) {
      floor = std::numeric_limits<int32_t>::min();
      count = n;
    }
  }
  for (int bit = 30; bit >= 0 && count > k; --bit) {
    const int32_t candidate = floor | (int32_t{1} << bit);
    const int reach = count_at_least(values, n, candidate);
    if (reach < k) continue;
    floor = candidate;
    count = reach;
  }
  return floor;
}

// The positions of the k largest of values[0..n) by bit pattern, n >= k > 0, plus `offset` and in
// rising order. Of equal values the one at the lower position wins. Floats that are not negative order
// like their bit patterns; others do so after to_ordered. NaN may be there, whose sign bit may be set:
// if it leaves fewer than k, some k are chosen.
inline void top_k(const float* values, int n, int k, int32_t offset, int32_t* out,
                  bool negative = false) {
  thread_local std::vector<int32_t> places;
  places.resize(n + kWidth);
  int32_t floor = floor_of(values, n, k, negative);
  int count = at_least(values, n, floor, places.data());
  if (count < k) {
    floor = std::numeric_limits<int32_t>::min();
    count = at_least(values, n, floor, places.data());
  }
  const auto is_tie = [&](int32_t place) {
    int32_t bits;
    std::memcpy(&bits, values + place, 4);
    return bits == floor;
  };
  int ties = k;  // how many values equal to the floor are taken
  if (count > k)
    for (int i = 0; i < count; ++i) ties -= !is_tie(places[i]);
  for (int i = 0, taken = 0; taken < k; ++i) {
    if (count > k && is_tie(places[i]) && ties-- <= 0) continue;
    out[taken++] = offset + places[i];
  }
}

// The same for many values that are not negative. A sample gives a bound that few values reach; only
// these values are read more than once.
inline void top_k_of_many(const float* values, int n, int k, int32_t offset, int32_t* out) {
  constexpr int kEvery = 16;
  thread_local std::vector<float> sample, best;
  thread_local std::vector<int32_t> places;
  const int sampled = n / kEvery;
  const int share = k / kEvery;
  const int rank = share + 4 * static_cast<int>(__builtin_sqrtf(share)) + 8;  // enough, very probably
  if (2 * rank >= sampled) return top_k(values, n, k, offset, out);
  sample.resize(sampled);
  for (int i = 0; i < sampled; ++i) sample[i] = values[i * kEvery];
  const int32_t floor = floor_of(sample.data(), sampled, rank);
  places.resize(n + kWidth);
  const int count = at_least(values, n, floor, places.data());
  if (count < k) return top_k(values, n, k, offset, out);
  best.resize(count);
  for (int i = 0; i < count; ++i) best[i] = values[places[i]];
  top_k(best.data(), count, k, 0, out);
  for (int i = 0; i < k; ++i) out[i] = offset + places[out[i]];
}

}  // namespace KVR_ISA
}  // namespace kvr
