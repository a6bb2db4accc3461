// Mean of the keys. The score is a lower bound of the logarithm of the page's mass, less the logarithm
// of its tokens. If some channels of the keys have outliers, which dominate minimum and maximum, it
// tells pages apart far better than these.
//
// Record: mean [head_size].
#pragma once

#include "index/linear.h"

namespace kvr {
namespace KVR_ISA {

// Writes field(row of keys of a channel) for every channel in the precision of the cache.
template <class E, class Field>
inline void store_field(const BuildTask<E>& t, int number, const Field& field) {
  const int d = t.index.head_size;
  E* to = reinterpret_cast<E*>(t.record) + number * d;
  for (int c = 0; c < d; c += kWidth) {
    Floats v;
    for (int k = 0; k < kWidth; ++k) v[k] = field(t.keys + (c + k) * t.index.entry_tokens);
    store_rounded<E>(to + c, v);
  }
}

inline float mean_of(const float* row, int n) {
  float total = 0;
  for (int i = 0; i < n; ++i) total += row[i];
  return total / n;
}

template <class E>
struct Mean : IndexOf<E> {
  static void score(const ScoreTask<E>& t) {
    score_linear<E, 1>(t, {t.query, t.heads * t.group * t.index.head_size, Identity{}});
  }
  static void build(const BuildTask<E>& t) {
    store_field(t, 0, [&](const float* row) { return mean_of(row, t.index.entry_tokens); });
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
