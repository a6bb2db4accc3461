// Mean and standard deviation of the keys per channel: the score is q.mean + c |q|.std. The bound of
// min/max, q.centre + |q|.half_width, takes the same bytes and arithmetic, but there one outlier
// determines centre and width.
//
// Record: mean [head_size], c times the standard deviation [head_size].
#pragma once

#include "index/mean.h"

namespace kvr {
namespace KVR_ISA {

template <class E>
struct MeanStd : IndexOf<E> {
  static constexpr const char* kParameters = "spread";
  static void score(const ScoreTask<E>& t) {
    score_linear<E, 2>(t, {t.query, t.heads * t.group * t.index.head_size, Split{}});
  }
  static void build(const BuildTask<E>& t) {
    const int n = t.index.entry_tokens;
    store_field(t, 0, [&](const float* row) { return mean_of(row, n); });
    store_field(t, 1, [&](const float* row) {
      const float mean = mean_of(row, n);
      float total = 0;
      for (int i = 0; i < n; ++i) total += (row[i] - mean) * (row[i] - mean);
      return t.index.parameters[0] * __builtin_sqrtf(total / n);
    });
  }

 private:
  struct Split {
    void operator()(Floats x, Floats (&parts)[2]) const {
      parts[0] = x;
      parts[1] = max(x, -x);
    }
  };
};

}  // namespace KVR_ISA
}  // namespace kvr
