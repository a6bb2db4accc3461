// From bounds of attention scores to the best pages (FreeKV, section 3.2).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace kvr {
namespace KVR_ISA {

// scores[g][0..n) -> scores[0][0..n): the mean over the group of softmax over j.
// Rows are padded to a multiple of kWidth by the caller's stride; the padding is overwritten.
inline void pool_group(float* scores, int64_t stride, int group, int n) {
  const int padded = (n + kWidth - 1) / kWidth * kWidth;
  for (int g = 0; g < group; ++g) {
    float* s = scores + g * stride;
    std::fill(s + n, s + padded, -std::numeric_limits<float>::infinity());
    Floats top = load_as<Floats>(s);
    for (int j = kWidth; j < padded; j += kWidth) top = max(top, load_as<Floats>(s + j));
    float highest = top[0];
    for (int i = 1; i < kWidth; ++i) highest = std::max(highest, top[i]);
    Floats total = {};
    for (int j = 0; j < padded; j += kWidth) {
      const Floats e = exp_nonpositive(load_as<Floats>(s + j) - highest);
      std::memcpy(s + j, &e, sizeof e);
      total += e;
    }
    const float weight = 1.0f / (sum(total) * group);
    for (int j = 0; j < padded; j += kWidth) {
      Floats p = load_as<Floats>(s + j) * weight;
      if (g > 0) p += load_as<Floats>(scores + j);
      std::memcpy(scores + j, &p, sizeof p);
    }
  }
}

// scores of n summaries -> scores of their pages: what their summaries have in all.
inline void sum_parts(float* scores, int n, int parts) {
  for (int j = 0; j * parts < n; ++j) {
    float total = 0;
    for (int i = j * parts; i < std::min(n, (j + 1) * parts); ++i) total += scores[i];
    scores[j] = total;
  }
}

// How many of values[0..n) have a bit pattern of at least `floor`. Non-negative floats order like
// their bit patterns.
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

// The k largest of values[0..n), n > k > 0, all non-negative: their positions plus `offset` in
// rising order; of equal values the lower position wins.
inline void top_k(const float* values, int n, int k, int32_t offset, int32_t* out) {
  int32_t floor = 0;  // bit pattern that at least k values reach, raised until no more do
  for (int bit = 30, count = n; bit >= 0 && count > k; --bit) {
    const int32_t candidate = floor | (int32_t{1} << bit);
    const int reach = count_at_least(values, n, candidate);
    if (reach < k) continue;
    floor = candidate;
    count = reach;
  }
  int ties = k - count_at_least(values, n, floor + 1);
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
