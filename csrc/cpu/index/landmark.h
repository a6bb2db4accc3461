// Landmark of the keys (ShadowKV): their mean, and how unlike it the least like key is. The mean misses
// such a key, so pages of which it is the least like one are outliers, which a step may attend to
// whatever their scores are (outliers.h).
//
// Record: mean of the keys [head_size], in the precision of the cache; lowest cosine of a key with it
// (float).
#pragma once

#include <cstring>
#include <vector>

#include "index/mean.h"

namespace kvr {
namespace KVR_ISA {

// The lowest cosine of a record.
inline float least_cosine(const Index& index, const uint8_t* record) {
  return load_as<float>(record + index.scored_bytes() - sizeof(float));
}

template <class E>
struct Landmark : IndexOf<E> {
  static void score(const ScoreTask<E>& t) { Mean<E>::score(t); }

  static void build(const BuildTask<E>& t) {
    const int d = t.index.head_size, n = t.index.entry_tokens;
    Mean<E>::build(t);
    thread_local std::vector<float> products, squares;
    products.assign(n, 0);
    squares.assign(n, 0);
    float of_mean = 0;
    for (int c = 0; c < d; ++c) {
      const float* row = t.keys + c * n;
      const float mean = mean_of(row, n);
      of_mean += mean * mean;
      for (int i = 0; i < n; ++i) {
        products[i] += row[i] * mean;
        squares[i] += row[i] * row[i];
      }
    }
    float least = 1;
    for (int i = 0; i < n; ++i) {
      const float norm = __builtin_sqrtf(squares[i]) * __builtin_sqrtf(of_mean);
      const float cosine = norm == 0 ? 0 : products[i] / norm;
      if (cosine < least || cosine != cosine) least = cosine;
    }
    std::memcpy(t.record + t.index.scored_bytes() - sizeof least, &least, sizeof least);
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
