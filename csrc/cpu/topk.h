// The best of a row of scores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace kvr {
namespace KVR_ISA {

// How many of values[0..n) have a bit pattern of at least `floor`.
inline int count_at_least(const float* values, int n, int32_t floor) {
  Ints counts = {};
  int j = 0;
  for (; j + kWidth <= n; j += kWidth) counts -= (load_as<Ints>(values + j) >= floor);
  int count = 0;
  for (int i = 0; i < kWidth; ++i) count += counts[i];
  for (; j < n; ++j) {
    int32_t bits;
    std::memcpy(&bits, values + j, 4);
    count += bits >= floor;
  }
  return count;
}

// values[0..n) -> what orders like them by bit pattern, negative ones too: zeros are equal, whatever
// their signs, and no number counts least.
inline void to_ordered(float* values, int n) {
  for (int j = 0; j < n; ++j) {
    int32_t bits;
    std::memcpy(&bits, values + j, 4);
    if (values[j] != values[j]) bits = std::numeric_limits<int32_t>::min();
    else if (bits < 0) bits = -(bits & std::numeric_limits<int32_t>::max());
    std::memcpy(values + j, &bits, 4);
  }
}

// The k largest by bit pattern of values[0..n), n > k > 0: their positions plus `offset` in rising
// order; of equal values the lower position wins. Non-negative floats order like their bit patterns,
// others after to_ordered.
inline void top_k(const float* values, int n, int k, int32_t offset, int32_t* out,
                  bool negative = false) {
  int32_t floor = 0;  // bit pattern that at least k values reach, raised until no more do
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
  int ties = floor == std::numeric_limits<int32_t>::max()
                 ? k : k - count_at_least(values, n, floor + 1);
  int taken = 0;
  for (int j = 0; j < n && taken < k;) {
    const int end = std::min(j + kWidth, n);
    if (count_at_least(values + j, end - j, floor) == 0) j = end;
    for (; j < end && taken < k; ++j) {
      int32_t bits;
      std::memcpy(&bits, values + j, 4);
      const bool tie = bits == floor && ties > 0;
      ties -= tie;
      out[taken] = offset + j;
      taken += tie || bits > floor;
    }
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
