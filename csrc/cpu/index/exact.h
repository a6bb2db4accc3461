// Scores an entry by all its keys. No index selects better pages, and none is slower: it reads as much
// as attention to all pages. It is for evaluation, and for scoring the best pages of another index
// again.
//
// Record: none; the keys are read from vLLM's cache.
#pragma once

#include "index/tokens.h"
#include "keys.h"

namespace kvr {
namespace KVR_ISA {

// Calls take(g, scores) for each query of a KV head with the scores of an entry's tokens. The queries
// are multiplied by the softmax scale. There is room for padded(tokens) scores.
template <class E, class Take>
inline void exact_scores(const Index& index, int64_t entry, int head, const float* queries, int group,
                         const Take& take) {
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
    take(g, scores.data());
  }
}

// The logarithm of the mass of an entry's keys, out[g * stride].
template <class E>
inline void exact_score(const Index& index, int64_t entry, int head, const float* queries, int group,
                        float* out, int64_t stride) {
  exact_scores<E>(index, entry, head, queries, group, [&](int g, float* scores) {
    out[g * stride] = log_sum_exp(scores, index.entry_tokens);
  });
}

template <class E>
struct Exact : IndexOf<E> {
  static void score(const ScoreTask<E>& t) {
    score_entries(t, [&](int64_t entry, int head, const float* queries, float* out, int j) {
      exact_score<E>(t.index, entry, head, queries, t.group, out + j, t.stride);
    });
  }

  static void score_tokens(const ScoreTask<E>& t) {
    const int n = t.index.entry_tokens;
    score_entries(t, [&](int64_t entry, int head, const float* queries, float* out, int j) {
      exact_scores<E>(t.index, entry, head, queries, t.group, [&](int g, const float* scores) {
        std::copy_n(scores, n, out + g * t.stride + int64_t(j) * n);
      });
    });
  }

 private:
  // Calls score(entry, head, queries, output of the head, j).
  template <class Score>
  static void score_entries(const ScoreTask<E>& t, const Score& score) {
    const float* queries = float_queries(t, t.scale);
    for (int head = 0; head < t.heads; ++head)
      for (int j = t.begin; j < t.end; ++j)
        score(t.records.entry(j), t.first_head + head,
              queries + head * t.group * t.index.head_size, t.out + head * t.unit_stride, j);
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
