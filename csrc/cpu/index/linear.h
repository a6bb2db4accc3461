// Indexes whose score is a sum of products: one or two parts of the query times as many fields of the
// record. Each field is [head_size], in the precision of the cache.
#pragma once

#include <cstring>
#include <vector>

#include "index/task.h"

namespace kvr {
namespace KVR_ISA {

// Parts of queries, one after the other.
template <class E, int F>
class QueryParts {
 public:
  using Part = typename E::Factor;

  // split(x) gives the parts of kWidth elements.
  template <class Split>
  QueryParts(const E* q, int n, const Split& split) {
    thread_local std::vector<Part> buffer;
    if (buffer.size() < F * static_cast<size_t>(n)) buffer.resize(F * n);
    for (int f = 0; f < F; ++f) part[f] = buffer.data() + f * n;
    for (int i = 0; i < n; i += kWidth) {
      Floats parts[F];
      split(E::load(q + i), parts);
      for (int f = 0; f < F; ++f) store_rounded<Part>(buffer.data() + f * n + i, parts[f]);
    }
  }
  const Part* part[F];
};

// Products of N queries, from the element `at` on, with P rows of F fields. Several rows at a time
// share the loads of the queries.
template <class E, int F, int N, int P>
inline void products(const QueryParts<E, F>& q, int64_t at, const E* const (&rows)[P], int d,
                     Floats (&acc)[N][P]) {
  KVR_UNROLL for (int g = 0; g < N; ++g)
    KVR_UNROLL for (int p = 0; p < P; ++p) acc[g][p] = Floats{};
  for (int c = 0; c < d; c += E::kLanes) {
    const int lanes = d - c;
    typename E::Lanes field[F][P];
    KVR_UNROLL for (int p = 0; p < P; ++p)
      KVR_UNROLL for (int f = 0; f < F; ++f) field[f][p] = E::lanes(rows[p] + f * d + c, lanes);
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      typename E::Lanes part[F];
      KVR_UNROLL for (int f = 0; f < F; ++f)
        part[f] = QueryParts<E, F>::Part::lanes(q.part[f] + at + int64_t(g) * d + c, lanes);
      KVR_UNROLL for (int p = 0; p < P; ++p)
        KVR_UNROLL for (int f = 0; f < F; ++f)
          E::add_products(acc[g][p], part[f], field[f][p]);
    }
  }
}

// Entries that are scored together for N query heads; one by one what is left of them.
template <int N>
constexpr int kEntriesTogether = N <= kAccumulators / 4 ? 4 : N <= kAccumulators / 2 ? 2 : 1;

// Scores P adjacent entries of a KV head, from j on, for N query heads: out[g * stride + j].
template <class E, int F, int N, int P>
static void score_together(const QueryParts<E, F>& q, int64_t query_at, const ScoreTask<E>& t,
                           int head, int j, float* out) {
  const E* record[P];
  KVR_UNROLL for (int p = 0; p < P; ++p)
    record[p] = reinterpret_cast<const E*>(t.records.at(j + p, t.first_head + head));
  Floats acc[N][P];
  products<E, F, N, P>(q, query_at, record, t.index.head_size, acc);
  // For any P the sums are in the same order: equal records have equal scores.
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    float* to = out + g * t.stride + j;
    if constexpr (kEntriesTogether<N> == 4) {
      Floats each[4] = {};
      KVR_UNROLL for (int p = 0; p < P; ++p) each[p] = acc[g][p];
      const Quad sums = sum_four(each[0], each[1], each[2], each[3]) * t.scale;
      std::memcpy(to, &sums, P * sizeof(float));
    } else {
      KVR_UNROLL for (int p = 0; p < P; ++p) to[p] = sum(acc[g][p]) * t.scale;
    }
  }
}

template <class E, int F, int N>
static void score_heads(const QueryParts<E, F>& q, int64_t query_at, const ScoreTask<E>& t, int head,
                        int first, int last, float* out) {
  constexpr int kTogether = kEntriesTogether<N>;
  int j = first;
  for (; j + kTogether <= last; j += kTogether)
    score_together<E, F, N, kTogether>(q, query_at, t, head, j, out);
  for (; j < last; ++j) score_together<E, F, N, 1>(q, query_at, t, head, j, out);
}

// Computes the scores of a task, given the parts of all its queries.
template <class E, int F>
static void score_linear(const ScoreTask<E>& t, const QueryParts<E, F>& q) {
  using Fn = decltype(&score_heads<E, F, 1>);
  static constexpr Fn kFns[kGroupBlock] = {
      score_heads<E, F, 1>, score_heads<E, F, 2>, score_heads<E, F, 3>, score_heads<E, F, 4>,
      score_heads<E, F, 5>, score_heads<E, F, 6>, score_heads<E, F, 7>, score_heads<E, F, 8>};
  const int d = t.index.head_size;
  by_blocks(t, t.index.scored_bytes(), [&](int head, int first, int last, float* out) {
    for (int g = 0; g < t.group; g += kGroupBlock)
      kFns[std::min(kGroupBlock, t.group - g) - 1](q, (int64_t(head) * t.group + g) * d, t, head,
                                                   first, last, out + g * t.stride);
  });
}

// The score is the query times the first field of the record.
struct Identity {
  void operator()(Floats x, Floats (&parts)[1]) const { parts[0] = x; }
};

}  // namespace KVR_ISA
}  // namespace kvr
