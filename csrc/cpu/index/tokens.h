// The score of an entry from the scores of its tokens: the logarithm of their mass.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "index/task.h"

namespace kvr {
namespace KVR_ISA {

inline int padded(int n) { return (n + kWidth - 1) / kWidth * kWidth; }

// log(sum of exp) of values[0..n); NaN if one of them is, wherever it is. Overwrites what follows them up to
// padded(n).
inline float log_sum_exp(float* values, int n) {
  std::fill(values + n, values + padded(n), -std::numeric_limits<float>::infinity());
  Floats top = load_as<Floats>(values);
  for (int i = kWidth; i < n; i += kWidth) top = max(top, load_as<Floats>(values + i));
  float highest = top[0];
  for (int i = 1; i < kWidth; ++i) highest = std::max(highest, top[i]);
  Floats total = {};
  for (int i = 0; i < n; i += kWidth) {
    const Floats x = load_as<Floats>(values + i);
    total += x == x ? exp_nonpositive(x - highest) : x;  // exp makes a number of NaN
  }
  return highest + std::log(sum(total));
}

// The queries of a task as floats, times a factor.
template <class E>
inline const float* float_queries(const ScoreTask<E>& t, float factor) {
  thread_local std::vector<float> buffer;
  const int n = t.heads * t.group * t.index.head_size;
  buffer.resize(n);
  scaled_to(buffer.data(), t.query, n, factor);
  return buffer.data();
}

}  // namespace KVR_ISA
}  // namespace kvr
