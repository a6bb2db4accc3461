// The attention that a page gets, from all its keys: as good as any selection of pages can be, and as
// slow as reading all keys. For evaluation, and to score the best by another index again.
//
// Record: nothing; it reads vLLM's cache.
#pragma once

#include "index/tokens.h"
#include "keys.h"

namespace kvr {
namespace KVR_ISA {

// Logarithms of the mass of an entry's keys for the queries of a KV head, times the softmax scale;
// out[g * stride].
template <class E>
inline void exact_score(const Index& index, int64_t entry, int head, const float* queries, int group,
                        float* out, int64_t stride) {
  const int d = index.head_size, n = index.entry_tokens, width = padded(n);
  thread_local std::vector<float> keys, scores;
  keys.resize(d * width);
  scores.resize(width);
  keys_of_entry<E>(index, entry, head, width, keys.data());
  for (int g = 0; g < group; ++g, queries += d) {
    for (int i = 0; i < width; i += kWidth) {
      Floats total = {};
      for (int c = 0; c < d; ++c) total += load_as<Floats>(keys.data() + c * width + i) * queries[c];
      std::memcpy(scores.data() + i, &total, sizeof total);
    }
    out[g * stride] = log_sum_exp(scores.data(), n);
  }
}

template <class E>
struct Exact {
  static void score(const ScoreTask<E>& t) {
    const float* queries = float_queries(t, t.scale);
    const int d = t.index.head_size;
    for (int head = 0; head < t.heads; ++head)
      for (int j = t.begin; j < t.end; ++j)
        exact_score<E>(t.index, t.records.entry(j), t.first_head + head,
                       queries + head * t.group * d, t.group, t.out + head * t.unit_stride + j,
                       t.stride);
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
