// Takes keys that lie in vLLM's cache into the page index; compiled once per instruction set.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr int64_t kSerialTokens = 4096;  // below this, waking the other threads costs more
constexpr int kGroup = 16;               // tokens whose words lie side by side for AMX

// Minima and maxima of neighbours. As in update_index, of equal values (zeros differ in sign) the
// later one counts; so neighbours stay neighbours, and the earlier comes first.
struct Bounds {
  Floats lo, hi;
};

// Every second element of two vectors.
template <int first, size_t... i>
static Floats every_second(Floats a, Floats b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, (first + 2 * static_cast<int>(i))...);
}
static Floats even(Floats a, Floats b) {
  return every_second<0>(a, b, std::make_index_sequence<kWidth>{});
}
static Floats odd(Floats a, Floats b) {
  return every_second<1>(a, b, std::make_index_sequence<kWidth>{});
}

// Of the pairs among 2 * kWidth elements.
template <class E>
static Bounds bounds_of_pairs(const E* p) {
  const Floats a = E::load(p), b = E::load(p + kWidth);
  return {min(even(a, b), odd(a, b)), max(even(a, b), odd(a, b))};
}
static Bounds bounds_of_pairs(const BFloat16* p) {  // the halves of words
  const Words words = load_as<Words>(p);
  const Floats earlier = (Floats)(words << 16), later = (Floats)(words & 0xffff0000u);
  return {min(earlier, later), max(earlier, later)};
}

// Of every 2^levels elements, kWidth times.
template <class E, int levels>
static Bounds bounds(const E* p) {
  if constexpr (levels == 1) {
    return bounds_of_pairs(p);
  } else {
    const Bounds a = bounds<E, levels - 1>(p);
    const Bounds b = bounds<E, levels - 1>(p + (kWidth << (levels - 1)));
    return {min(even(a.lo, b.lo), odd(a.lo, b.lo)), max(even(a.hi, b.hi), odd(a.hi, b.hi))};
  }
}

template <class E, int levels>
static void all_bounds(const E* elements, int count, float* lo, float* hi) {
  for (int i = 0; i < count; i += kWidth) {
    const Bounds b = bounds<E, levels>(elements + (i << levels));
    std::memcpy(lo + i, &b.lo, sizeof b.lo);
    std::memcpy(hi + i, &b.hi, sizeof b.hi);
  }
}

template <class E>
using BoundsFn = decltype(&all_bounds<E, 3>);

template <class E>
static BoundsFn<E> bounds_fn(int summary_size) {
  static constexpr BoundsFn<E> kFns[] = {all_bounds<E, 3>, all_bounds<E, 4>, all_bounds<E, 5>,
                                         all_bounds<E, 6>, all_bounds<E, 7>};
  return kFns[__builtin_ctz(summary_size) - 3];
}

// Keys as AMX has them -> [head_size, page_size].
template <class E>
static void transpose(const E* keys, int head_size, int page_size, E* out) {
  constexpr int kPerWord = 4 / sizeof(E);
  for (int first = 0; first < page_size; first += kGroup) {
    for (int c = 0; c < head_size; c += kPerWord, keys += kGroup * kPerWord) {
      E* row = out + c * page_size + first;
      if constexpr (kPerWord == 1) {
        std::copy_n(keys, kGroup, row);
      } else {
        uint32_t words[kGroup];
        uint16_t low[kGroup], high[kGroup];
        std::memcpy(words, keys, sizeof words);
        for (int t = 0; t < kGroup; ++t) {
          low[t] = words[t];
          high[t] = words[t] >> 16;
        }
        std::memcpy(row, low, sizeof low);
        std::memcpy(row + page_size, high, sizeof high);
      }
    }
  }
}

template <class E>
static void index_page(const PageIndexing& p, int64_t i, int head) {
  const LayerState& layer = p.layer;
  const int d = layer.head_size, page_size = layer.page_size, size = layer.summary_size;
  const int parts = page_size / size, length = p.lengths[i];
  const int entries = (length + size - 1) / size;
  const int64_t page = p.pages[i];
  thread_local std::vector<E> copy;
  thread_local std::vector<float> lo, hi;  // [head_size, parts]
  copy.resize(d * page_size);
  lo.resize(d * parts);
  hi.resize(d * parts);
  const E* keys = static_cast<const E*>(p.cache) + (page * layer.kv_heads + head) * 2 * d * page_size;
  if (p.layout == KeyLayout::kAmx) {
    transpose(keys, d, page_size, copy.data());
    keys = copy.data();
  }
  if (length < entries * size) {  // what is missing of the last entry is as its last key
    if (keys != copy.data()) std::copy_n(keys, copy.size(), copy.data());
    for (E* row = copy.data(); row != copy.data() + copy.size(); row += page_size)
      std::fill(row + length, row + entries * size, row[length - 1]);
    keys = copy.data();
  }
  bounds_fn<E>(size)(keys, d * parts, lo.data(), hi.data());
  const auto store = [&](const float* values, int part, E* to) {
    for (int c = 0; c < d; c += kWidth, to += kWidth) {
      Floats v;
      if (parts == 1)
        v = load_as<Floats>(values + c);
      else
        for (int k = 0; k < kWidth; ++k) v[k] = values[(c + k) * parts + part];
      E::store(to, v);
    }
  };
  for (int part = 0; part < entries; ++part) {
    const int64_t entry = page * parts + part;
    E* to = static_cast<E*>(layer.index) + (entry * layer.kv_heads + head) * 2 * d;
    store(lo.data(), part, to);
    store(hi.data(), part, to + d);
  }
}

template <class E>
static void index_pages_of(const PageIndexing& p) {
  const int heads = p.layer.kv_heads;
#pragma omp parallel for collapse(2) schedule(static) \
    if (p.num_pages * heads * p.layer.page_size > kSerialTokens)
  for (int64_t i = 0; i < p.num_pages; ++i)
    for (int head = 0; head < heads; ++head) index_page<E>(p, i, head);
}

void index_pages(const PageIndexing& p) {
  switch (p.layer.dtype) {
    case DType::kBFloat16: return index_pages_of<BFloat16>(p);
    case DType::kFloat16: return index_pages_of<Float16>(p);
    case DType::kFloat32: return index_pages_of<Float32>(p);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
