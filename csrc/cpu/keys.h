// Converts keys in the layouts of vLLM's CPU cache to floats.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kAmxTokens = 16;  // the words of 16 tokens lie side by side

// Keys in the layout for AMX -> [head_size, page_size].
template <class E>
inline void transpose_amx(const E* keys, int head_size, int page_size, E* out) {
  constexpr int kPerWord = 4 / sizeof(E);
  for (int first = 0; first < page_size; first += kAmxTokens) {
    for (int c = 0; c < head_size; c += kPerWord, keys += kAmxTokens * kPerWord) {
      E* row = out + c * page_size + first;
      if constexpr (kPerWord == 1) {
        std::copy_n(keys, kAmxTokens, row);
      } else {
        uint32_t words[kAmxTokens];
        uint16_t low[kAmxTokens], high[kAmxTokens];
        std::memcpy(words, keys, sizeof words);
        for (int t = 0; t < kAmxTokens; ++t) {
          low[t] = words[t];
          high[t] = words[t] >> 16;
        }
        std::memcpy(row, low, sizeof low);
        std::memcpy(row + page_size, high, sizeof high);
      }
    }
  }
}

// Takes words of two elements apart.
template <class E>
inline void take_apart(const E* p, Floats& low, Floats& high) {
  const Words words = load_as<Words>(p);
  const Halves halves[2] = {__builtin_convertvector(words & 0xffffu, Halves),
                            __builtin_convertvector(words >> 16, Halves)};
  E parts[2][kWidth];
  std::memcpy(parts, halves, sizeof halves);
  low = E::load(parts[0]);
  high = E::load(parts[1]);
}
template <>
inline void take_apart<BFloat16>(const BFloat16* p, Floats& low, Floats& high) {
  const Words words = load_as<Words>(p);
  low = (Floats)(words << 16);
  high = (Floats)(words & 0xffff0000u);
}

// Elements -> floats, any number of them.
template <class E>
inline void to_floats(const E* from, int n, float* to) {
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Floats x = E::load(from + i);
    std::memcpy(to + i, &x, sizeof x);
  }
  if (i < n) {
    E rest[kWidth] = {};
    std::copy(from + i, from + n, rest);
    const Floats x = E::load(rest);
    std::memcpy(to + i, &x, (n - i) * sizeof(float));
  }
}

// The keys of a (page, KV head), [head_size, page_size].
template <class E>
inline const E* keys_of_page(const Index& index, int64_t page, int head) {
  const int d = index.head_size, size = index.page_size;
  const E* keys = static_cast<const E*>(index.cache) + (page * index.kv_heads + head) * 2 * d * size;
  if (index.layout == KeyLayout::kTransposed) return keys;
  thread_local std::vector<E> copy;
  copy.resize(d * size);
  if (index.layout == KeyLayout::kAmx) {
    transpose_amx(keys, d, size, copy.data());
  } else {
    for (int t = 0; t < size; ++t)
      for (int c = 0; c < d; ++c) copy[c * size + t] = keys[t * 2 * d + c];
  }
  return copy.data();
}

// The keys of an entry and KV head; out is [head_size, stride].
template <class E>
inline void keys_of_entry(const Index& index, int64_t entry, int head, int stride, float* out) {
  const int parts = index.parts(), spans = index.spans(), n = index.entry_tokens / spans;
  for (int i = 0; i < spans; ++i) {
    const E* keys = keys_of_page<E>(index, entry / parts * spans + i, head) + entry % parts * n;
    for (int c = 0; c < index.head_size; ++c)
      to_floats(keys + c * index.page_size, n, out + c * stride + i * n);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
