// Representative keys (InfLLM, section 3.2): the score is the mean of q.k over a few keys that
// represent their page. This is q times the mean of these keys, so the record holds the mean.
//
// InfLLM chooses the keys that later tokens attend to most. A record is made here before later tokens
// are known, of the keys farthest from the mean of the page.
//
// Record: mean of the representative keys [head_size], in the precision of the cache.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "index/mean.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kRepresentatives = 4;

template <class E>
struct Representative : IndexOf<E> {
  static void score(const ScoreTask<E>& t) { Mean<E>::score(t); }

  static void build(const BuildTask<E>& t) {
    const int d = t.index.head_size, n = t.index.entry_tokens;
    thread_local std::vector<float> distance;
    thread_local std::vector<int> order;
    distance.assign(n, 0);
    for (int c = 0; c < d; ++c) {
      const float* row = t.keys + c * n;
      const float mean = mean_of(row, n);
      for (int i = 0; i < n; ++i) distance[i] += (row[i] - mean) * (row[i] - mean);
    }
    order.resize(n);
    std::iota(order.begin(), order.end(), 0);
    const int kept = std::min(kRepresentatives, n);
    std::partial_sort(order.begin(), order.begin() + kept, order.end(), [&](int a, int b) {
      return distance[a] != distance[b] ? distance[a] > distance[b] : a < b;
    });
    std::sort(order.begin(), order.begin() + kept);
    store_field(t, 0, [&](const float* row) {
      float total = 0;
      for (int i = 0; i < kept; ++i) total += row[order[i]];
      return total / kept;
    });
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
