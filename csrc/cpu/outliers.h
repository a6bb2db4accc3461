// Outliers (ShadowKV): units that a KV head attends to whatever the query is, since the mean of their
// keys tells least of one of them.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "index/landmark.h"
#include "pooling.h"
#include "topk.h"

namespace kvr {
namespace KVR_ISA {

// The outliers among `selected` units: a share of them, rounded down, but one at least of two or more.
inline int outlier_units(double share, int selected) {
  return std::max(static_cast<int>(share * selected), share > 0 && selected > 1 ? 1 : 0);
}

// The `count` units of [first, last) with the lowest cosine of a key and the mean of its entry, in rising
// order; of equal ones the earlier units. Cosines that are no numbers count highest.
inline void find_outliers(const Records& records, int head, int first, int last, int count,
                          std::vector<int32_t>& out) {
  out.resize(count);
  if (count == 0) return;
  const Index& index = records.index;
  const int parts = index.parts();
  thread_local std::vector<float> unlike;
  unlike.assign(last - first, -std::numeric_limits<float>::infinity());
  for (int entry = first * parts; entry < last * parts; ++entry) {
    float& of_unit = unlike[entry / parts - first];
    of_unit = higher(of_unit, -least_cosine(index, records.at(entry, head)));
  }
  to_ordered(unlike.data(), last - first);
  top_k(unlike.data(), last - first, count, first, out.data(), true);
}

}  // namespace KVR_ISA
}  // namespace kvr
