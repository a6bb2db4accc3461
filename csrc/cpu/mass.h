// A mass of the attention that is enough (Twilight).
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace kvr {
namespace KVR_ISA {

// As few of the candidates, the best first, as reach a mass together with sink and window, which are what
// lies outside of [first, last), but one at least; given the pooled scores of all units that have some,
// which are shares.
inline void reach_mass(float mass, const float* shares, int units, int first, int last,
                       const std::vector<int32_t>& candidates, std::vector<int32_t>& enough) {
  double total = 0, reached = 0;
  for (int j = 0; j < units; ++j) {
    total += shares[j];
    if (j < first || j >= last) reached += shares[j];
  }
  enough = candidates;
  std::stable_sort(enough.begin(), enough.end(),
                   [&](int32_t a, int32_t b) { return shares[a] > shares[b]; });
  const double wanted = mass * total;
  size_t count = 0;
  do reached += shares[enough[count++]];
  while (count < enough.size() && !(reached >= wanted));
  enough.resize(count);
}

}  // namespace KVR_ISA
}  // namespace kvr
