// Keeps an index up to date: as keys are written, or from those in vLLM's cache; compiled once per
// instruction set.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "checks.h"
#include "index/table.h"
#include "index/value_mean.h"
#include "kernels.h"
#include "keys.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kSerialKeys = 4096;        // work below which waking the other threads costs more
constexpr int64_t kSerialTokens = 4096;

// ---------------------------------------------------------------------------------------------
// As keys are written
// ---------------------------------------------------------------------------------------------

// A maximal range of consecutive tokens that one entry covers.
struct Run {
  int64_t entry, first, last;  // tokens [first, last)
  bool starts;                 // holds the entry's first token, so the old record is void
};

static std::vector<Run>& find_runs(const IndexUpdate& u) {
  thread_local std::vector<Run> runs;
  runs.clear();
  for (int64_t t = 0; t < u.num_tokens; ++t) {
    const int64_t slot = u.slot_mapping[t];
    if (slot < 0) continue;
    const int64_t entry = slot / u.index.entry_tokens;
    const bool first = slot % u.index.entry_tokens == 0;
    if (!first && !runs.empty() && runs.back().entry == entry && runs.back().last == t) {
      runs.back().last = t + 1;
      continue;
    }
    if (entry >= u.index.entries)
      refuse_token(t, slot, u.index.entries * u.index.entry_tokens);
    runs.push_back({entry, t, t + 1, first});
  }
  return runs;
}

template <class E>
static void update_run(const IndexUpdate& u, const Run& run) {
  const int d = u.index.head_size, heads = u.index.kv_heads;
  for (int h = 0; h < heads; ++h) {
    E* lo = reinterpret_cast<E*>(u.index.record(run.entry, h));
    E* hi = lo + d;
    for (int c = 0; c < d; c += kWidth) {
      const E* key = static_cast<const E*>(u.keys) + run.first * u.key_stride + h * d + c;
      Floats a = run.starts ? E::load(key) : E::load(lo + c);
      Floats b = run.starts ? a : E::load(hi + c);
      for (int64_t t = run.first; t < run.last; ++t, key += u.key_stride) {
        const Floats k = E::load(key);
        a = min(a, k);
        b = max(b, k);
      }
      E::store(lo + c, a);
      E::store(hi + c, b);
    }
  }
}

// Whether records are built here: exact has none, and an index without kernels builds its own.
template <class E>
static bool builds(const Index& index) {
  return index.means || (index.record_bytes > 0 && functions_of<E>(index.kind).build != nullptr);
}

// The keys that have just been written are in the cache: so are those of all entries they complete.
static std::vector<int64_t>& find_completed(const IndexUpdate& u) {
  thread_local std::vector<int64_t> completed;
  completed.clear();
  const int64_t size = u.index.entry_tokens, tokens = u.index.entries * size;
  for (int64_t t = 0; t < u.num_tokens; ++t) {
    const int64_t slot = u.slot_mapping[t];
    if (slot >= tokens) refuse_token(t, slot, tokens);
    if (slot >= 0 && slot % size == size - 1) completed.push_back(slot / size);
  }
  return completed;
}

template <class E>
static void build_entry(const Index& index, int64_t entry, int head) {
  if (index.means) write_value_means<E>(index, entry, head);
  if (index.scored_bytes() == 0) return;
  thread_local std::vector<float> keys;
  keys.resize(index.head_size * index.entry_tokens);
  keys_of_entry<E>(index, entry, head, index.entry_tokens, keys.data());
  functions_of<E>(index.kind).build({index, keys.data(), index.record(entry, head)});
}

template <class E>
static void build_entries(const Index& index, const std::vector<int64_t>& entries) {
  const int heads = index.kv_heads;
  const int64_t n = static_cast<int64_t>(entries.size());
#pragma omp parallel for collapse(2) schedule(static) if (n * heads > 1)
  for (int64_t i = 0; i < n; ++i)
    for (int head = 0; head < heads; ++head) build_entry<E>(index, entries[i], head);
}

template <class E>
static void update_index_of(const IndexUpdate& u) {
  if (!u.index.grows) {
    const std::vector<int64_t>& completed = find_completed(u);
    if (builds<E>(u.index)) build_entries<E>(u.index, completed);
    return;
  }
  const std::vector<Run>& runs = find_runs(u);
  if (u.num_tokens * u.index.kv_heads <= kSerialKeys) {
    for (const Run& run : runs) update_run<E>(u, run);
    return;
  }
  const int64_t n = static_cast<int64_t>(runs.size());
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) update_run<E>(u, runs[i]);
}

// ---------------------------------------------------------------------------------------------
// From keys in the cache
// ---------------------------------------------------------------------------------------------

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
                                         all_bounds<E, 6>, all_bounds<E, 7>, all_bounds<E, 8>};
  return kFns[__builtin_ctz(summary_size) - 3];
}

template <class E>
static void bound_page(const PageIndexing& p, int64_t i, int head) {
  const Index& index = p.index;
  const int d = index.head_size, page_size = index.page_size, size = index.entry_tokens;
  const int parts = page_size / size, length = p.lengths[i];
  const int entries = (length + size - 1) / size;
  const int64_t page = p.pages[i];
  thread_local std::vector<E> copy;
  thread_local std::vector<float> lo, hi;  // [head_size, parts]
  copy.resize(d * page_size);
  lo.resize(d * parts);
  hi.resize(d * parts);
  const E* keys = keys_of_page<E>(index, page, head);
  if (length < entries * size) {  // what is missing of the last entry is as its last key
    std::copy_n(keys, copy.size(), copy.data());
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
    E* to = reinterpret_cast<E*>(index.record(entry, head));
    store(lo.data(), part, to);
    store(hi.data(), part, to + d);
  }
}

template <class E>
static void index_page(const PageIndexing& p, int64_t i, int head) {
  const Index& index = p.index;
  if (index.grows) return bound_page<E>(p, i, head);
  if (!builds<E>(index)) return;
  if (const int spans = index.spans(); spans > 1) {  // the last page completes an entry
    if (p.pages[i] % spans == spans - 1 && p.lengths[i] == index.page_size)
      build_entry<E>(index, p.pages[i] / spans, head);
    return;
  }
  const int64_t first = int64_t(p.pages[i]) * index.parts();
  for (int part = 0; part < p.lengths[i] / index.entry_tokens; ++part)
    build_entry<E>(index, first + part, head);
}

template <class E>
static void index_pages_of(const PageIndexing& p) {
  const int heads = p.index.kv_heads;
#pragma omp parallel for collapse(2) schedule(static) \
    if (p.num_pages * heads * p.index.page_size > kSerialTokens)
  for (int64_t i = 0; i < p.num_pages; ++i)
    for (int head = 0; head < heads; ++head) index_page<E>(p, i, head);
}

template <class E>
static void read_keys_of(const KeyReading& r) {
  const int d = r.index.head_size, size = r.index.entry_tokens, heads = r.index.kv_heads;
#pragma omp parallel for collapse(2) schedule(static) \
    if (r.num_entries * heads * size > kSerialTokens)
  for (int64_t i = 0; i < r.num_entries; ++i)
    for (int head = 0; head < heads; ++head) {
      thread_local std::vector<float> keys;
      keys.resize(d * size);
      keys_of_entry<E>(r.index, r.entries[i], head, size, keys.data());
      for (int t = 0; t < size; ++t)
        for (int c = 0; c < d; ++c)
          r.keys[((i * size + t) * heads + head) * d + c] = keys[c * size + t];
    }
}

void update_index(const IndexUpdate& u) {
  switch (u.index.dtype) {
    case DType::kBFloat16: return update_index_of<BFloat16>(u);
    case DType::kFloat16: return update_index_of<Float16>(u);
    case DType::kFloat32: return update_index_of<Float32>(u);
  }
}

void index_pages(const PageIndexing& p) {
  switch (p.index.dtype) {
    case DType::kBFloat16: return index_pages_of<BFloat16>(p);
    case DType::kFloat16: return index_pages_of<Float16>(p);
    case DType::kFloat32: return index_pages_of<Float32>(p);
  }
}

void read_keys(const KeyReading& r) {
  switch (r.index.dtype) {
    case DType::kBFloat16: return read_keys_of<BFloat16>(r);
    case DType::kFloat16: return read_keys_of<Float16>(r);
    case DType::kFloat32: return read_keys_of<Float32>(r);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
