// Sphere around the keys (ArkVale): the score is an upper bound of every q.k, q.centre + |q| radius.
//
// Record: mean of the keys [head_size], in the precision of the cache; distance of the farthest key
// from it (float).
#pragma once

#include <cstring>
#include <vector>

#include "index/mean.h"

namespace kvr {
namespace KVR_ISA {

template <class E>
struct Bounding : IndexOf<E> {
  static void score(const ScoreTask<E>& t) {
    const int d = t.index.head_size;
    score_linear<E, 1>(t, {t.query, t.heads * t.group * d, Identity{}});
    for (int head = 0; head < t.heads; ++head) {
      for (int g = 0; g < t.group; ++g) {
        const E* q = t.query + int64_t(head * t.group + g) * d;
        Floats squares = {};
        for (int c = 0; c < d; c += kWidth) squares += E::load(q + c) * E::load(q + c);
        const float norm = __builtin_sqrtf(sum(squares)) * t.scale;
        float* out = t.out + head * t.unit_stride + g * t.stride;
        for (int j = t.begin; j < t.end; ++j) {
          float radius;
          std::memcpy(&radius, t.records.at(j, t.first_head + head) + d * sizeof(E), 4);
          out[j] += norm * radius;
        }
      }
    }
  }

  static void build(const BuildTask<E>& t) {
    const int d = t.index.head_size, n = t.index.entry_tokens;
    Mean<E>::build(t);
    thread_local std::vector<float> squares;
    squares.assign(n, 0);
    for (int c = 0; c < d; ++c) {
      const float* row = t.keys + c * n;
      const float mean = mean_of(row, n);
      for (int i = 0; i < n; ++i) squares[i] += (row[i] - mean) * (row[i] - mean);
    }
    const float radius = __builtin_sqrtf(*std::max_element(squares.begin(), squares.end()));
    std::memcpy(t.record + d * sizeof(E), &radius, 4);
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
