// The mean of the values of an entry, which a record of any index may end with; of an entry of several
// pages, that of each.
//
// Field: scale (bfloat16); mean [head_size], 8 bits, as whole numbers of the scale. An infinite scale says
// that there is no mean, since a value was not finite.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr float kMeanSteps = 127, kLeastMeanScale = 1e-8f;
constexpr uint16_t kNoMean = 0x7f80;  // infinity

inline float value_scale(const void* field) {
  return bits_as<float>(uint32_t(load_as<uint16_t>(field)) << 16);
}

// Adds the values of n tokens of a page, from the first on, to sums [head_size].
template <class E>
inline void add_values(const Index& index, int64_t page, int head, int first, int n, float* sums) {
  const int d = index.head_size, size = index.page_size;
  const E* unit = static_cast<const E*>(index.cache) + (page * index.kv_heads + head) * 2 * d * size;
  for (int t = first; t < first + n; ++t) {
    if (index.layout == KeyLayout::kAmx) {  // as in PageStaging
      for (int c = 0; c < d; c += kWidth) {
        E together[kWidth];
        for (int k = 0; k < kWidth; ++k) {
          const int channel = c + k;
          together[k] = unit[d * size + (channel / 16 * (size / 2) + t / 2) * 32 + channel % 16 * 2 + t % 2];
        }
        const Floats x = load_as<Floats>(sums + c) + E::load(together);
        std::memcpy(sums + c, &x, sizeof x);
      }
      continue;
    }
    const E* values = index.layout == KeyLayout::kRows ? unit + int64_t(t) * 2 * d + d : unit + int64_t(size + t) * d;
    for (int c = 0; c < d; c += kWidth) {
      const Floats x = load_as<Floats>(sums + c) + E::load(values + c);
      std::memcpy(sums + c, &x, sizeof x);
    }
  }
}

// Writes the mean of n tokens' values, which are in the cache.
template <class E>
inline void write_value_mean(const Index& index, int64_t page, int head, int first, int n,
                             uint8_t* field) {
  const int d = index.head_size;
  thread_local std::vector<float> mean;
  mean.assign(d, 0);
  add_values<E>(index, page, head, first, n, mean.data());
  float most = 0, all = 0;
  for (int c = 0; c < d; ++c) {
    mean[c] /= n;
    most = std::max(most, std::fabs(mean[c]));
    all += mean[c] * 0;  // NaN unless all are finite
  }
  if (std::isnan(all)) {
    std::memcpy(field, &kNoMean, 2);
    std::memset(field + 2, 0, d);
    return;
  }
  const uint32_t exact = bits_as<uint32_t>(std::max(most / kMeanSteps, kLeastMeanScale));
  const uint16_t bits = (exact + 0x7fff + (exact >> 16 & 1)) >> 16;
  std::memcpy(field, &bits, 2);
  const float scale = value_scale(field);
  for (int c = 0; c < d; ++c)
    field[2 + c] = static_cast<uint8_t>(static_cast<int8_t>(
        std::clamp(std::nearbyint(mean[c] / scale), -kMeanSteps, kMeanSteps)));
}

// Writes the means of an entry into its record.
template <class E>
inline void write_value_means(const Index& index, int64_t entry, int head) {
  const int parts = index.parts(), spans = index.spans(), n = index.entry_tokens / spans;
  uint8_t* field = index.record(entry, head) + index.scored_bytes();
  for (int i = 0; i < spans; ++i, field += index.mean_bytes())
    write_value_mean<E>(index, entry / parts * spans + i, head, entry % parts * n, n, field);
}

}  // namespace KVR_ISA
}  // namespace kvr
