// From bounds of attention scores to the best pages (FreeKV, section 3.2).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "simd.h"

namespace kvr {
namespace KVR_ISA {

// Pooled scores below this cannot be told apart: exp_nonpositive makes all that is 87 below a head's
// best bound equal, and what comes before it loses bits where it is weighted.
constexpr float kLeastScore = 0x1p-100f;

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

// The k best of pages [first, last), k > 0, in rising order, by the logarithm of what pool_group and
// sum_parts make of bounds[g][0..n): however far apart the bounds are, nothing underflows. Bounds
// that are no numbers count least.
inline void top_k_of_logs(const float* bounds, int64_t stride, int group, int n, int parts,
                          int first, int last, int k, int32_t* out) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  const auto add = [](double total, double log) { return log > -40 ? total + std::exp(log) : total; };
  thread_local std::vector<double> norms, logs;
  thread_local std::vector<int32_t> order;
  norms.resize(group);
  for (int g = 0; g < group; ++g) {
    const float* b = bounds + g * stride;
    const double top = *std::max_element(b, b + n);
    double total = 0;
    for (int j = 0; j < n; ++j) total = add(total, b[j] - top);
    norms[g] = top + std::log(total);
  }
  logs.resize(last);
  for (int page = first; page < last; ++page) {
    const int begin = page * parts, end = std::min(n, begin + parts);
    double top = kNone, total = 0;
    for (int g = 0; g < group; ++g)
      for (int j = begin; j < end; ++j) top = std::max(top, bounds[g * stride + j] - norms[g]);
    for (int g = 0; g < group; ++g)
      for (int j = begin; j < end; ++j) total = add(total, bounds[g * stride + j] - norms[g] - top);
    const double log = top + std::log(total);
    logs[page] = std::isnan(log) ? kNone : log;
  }
  order.resize(last - first);
  std::iota(order.begin(), order.end(), first);
  std::nth_element(order.begin(), order.begin() + k, order.end(), [&](int32_t a, int32_t b) {
    return logs[a] != logs[b] ? logs[a] > logs[b] : a < b;
  });
  std::copy_n(order.begin(), k, out);
  std::sort(out, out + k);
}

}  // namespace KVR_ISA
}  // namespace kvr
