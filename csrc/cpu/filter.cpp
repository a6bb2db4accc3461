// Which tokens a filter layer selects for the layers after it, by the attention of its latest queries
// (OmniKV, section 4.2). Compiled once per instruction set (KVR_ISA names it).
#include "kernels.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "index/tokens.h"
#include "keys.h"
#include "simd.h"
#include "topk.h"

namespace kvr {
namespace KVR_ISA {

namespace {

constexpr int kTokens = 256;                    // per task
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// kWidth tokens' products with N queries, from where the first one's channels begin.
template <class E, int N>
inline void products(const E* keys, int d, int stride, const float* q, Floats (&acc)[N]) {
  for (int c = 0; c < d; ++c) {
    const Floats key = E::load(keys + c * stride);
    KVR_UNROLL for (int g = 0; g < N; ++g) acc[g] += key * q[g * d + c];
  }
}

// The same of keys as AMX has them: words of two channels.
template <int N>
inline void products_amx(const BFloat16* keys, int d, const float* q, Floats (&acc)[N]) {
  for (int c = 0; c < d; c += 2, keys += 2 * kAmxTokens) {
    const Words words = load_as<Words>(keys);
    const Floats low = (Floats)(words << 16), high = (Floats)(words & 0xffff0000u);
    KVR_UNROLL for (int g = 0; g < N; ++g) acc[g] += low * q[g * d + c] + high * q[g * d + c + 1];
  }
}

// Scores of the tokens of a (page, KV head) for N of its query heads; out[g * stride + token].
template <class E, int N>
void score_page(const Index& index, const E* keys, const float* q, float* out, int64_t stride) {
  const int d = index.head_size, size = index.page_size;
  for (int t = 0; t < size; t += kWidth) {
    Floats acc[N] = {};
    if constexpr (std::is_same_v<E, BFloat16>) {
      if (index.layout == KeyLayout::kAmx)
        products_amx<N>(keys + t / kAmxTokens * kAmxTokens * d + t % kAmxTokens * 2, d, q, acc);
      else
        products<E, N>(keys + t, d, size, q, acc);
    } else {
      products<E, N>(keys + t, d, size, q, acc);
    }
    KVR_UNROLL for (int g = 0; g < N; ++g) std::memcpy(out + g * stride + t, &acc[g], sizeof acc[g]);
  }
}

template <class E>
struct Filter {
  using Fn = decltype(&score_page<E, 1>);
  static constexpr Fn kFns[kGroupBlock] = {
      score_page<E, 1>, score_page<E, 2>, score_page<E, 3>, score_page<E, 4>,
      score_page<E, 5>, score_page<E, 6>, score_page<E, 7>, score_page<E, 8>};

  const ContextSelection& s;
  const DecodeRows& rows;
  const ContextSelector& selector;
  const Index& index;
  const int heads, group, queries;

  explicit Filter(const ContextSelection& s)
      : s(s), rows(s.rows), selector(s.selector), index(s.selector.index), heads(index.kv_heads),
        group(s.selector.group), queries(s.queries) {}

  // Whether the row selects by this one of its queries, and what that one attends to.
  bool counts(int row, int j) const {
    return rows.select[row] > 0 && s.weights[row * queries + j] > 0 && context(row, j) > 0;
  }
  int context(int row, int j) const { return rows.selected_by(row) - (queries - 1 - j); }

  // In vLLM's layout for this element: where score_page reads it.
  const E* keys(int64_t page, int head) const {
    if (index.layout == KeyLayout::kAmx && std::is_same_v<E, BFloat16>)
      return static_cast<const E*>(index.cache) +
             (page * heads + head) * 2 * index.head_size * index.page_size;
    return keys_of_page<E>(index, page, head);
  }

  // Scores of a stretch of the context, [heads * group, stride], and per head the logarithm of their
  // mass.
  void score(int row, int j, int begin, float* scores, int64_t stride, float* masses,
             int64_t mass_stride) const {
    const int d = index.head_size, size = index.page_size, all = heads * group;
    const int end = std::min(begin + kTokens, context(row, j));
    thread_local std::vector<float> q;
    q.resize(all * d);
    const E* from = static_cast<const E*>(s.query) + (int64_t(row) * queries + j) * s.query_stride;
    scaled_to(q.data(), from, all * d, selector.scale);
    const int32_t* blocks = rows.block_table + row * rows.block_table_stride;
    for (int t = begin; t < end; t += size)
      for (int h = 0; h < heads; ++h) {
        const E* page = keys(blocks[t / size], h);
        for (int g = 0; g < group; g += kGroupBlock) {
          const int64_t head = h * group + g;
          kFns[std::min(kGroupBlock, group - g) - 1](index, page, q.data() + head * d,
                                                     scores + head * stride + t, stride);
        }
      }
    const int last = (end + size - 1) / size * size;
    for (int head = 0; head < all; ++head) {
      float* of_head = scores + head * stride;
      if (selector.softcap > 0) cap(of_head + begin, last - begin);
      std::fill(of_head + end, of_head + last, kNothing);
      masses[head * mass_stride] = log_sum_exp(of_head + begin, end - begin);
    }
  }

  // Caps logits, a multiple of kWidth. NaN stays NaN.
  void cap(float* logits, int count) const {
    const float highest = selector.softcap;
    for (int t = 0; t < count; t += kWidth) {
      const Floats x = load_as<Floats>(logits + t) / highest;
      const Floats decay = exp_nonpositive(min(x, -x) * 2.0f);
      const Floats size = (1.0f - decay) / (1.0f + decay) * highest;
      const Floats capped = x == x ? (x < 0 ? -size : size) : x;
      std::memcpy(logits + t, &capped, sizeof capped);
    }
  }

  // The logarithm of the mass of a head: of `used` parts, and of its sink.
  float norm(int head, const float* parts, int used) const {
    const float sink = selector.sinks == nullptr ? kNothing : selector.sinks[head];
    const float top = std::max(*std::max_element(parts, parts + used), sink);
    float total = std::exp(sink - top);
    for (int c = 0; c < used; ++c) total += std::exp(parts[c] - top);
    return top + std::log(total);
  }

  float* rating(int row, int j) const {
    return s.ratings + (int64_t(row) * queries + j) * s.rating_stride;
  }

  // The highest part of a head's attention that each token gets.
  void pool(int row, int j, int begin, const float* scores, int64_t stride, const float* norms,
            float* pooled) const {
    const int end = std::min(begin + kTokens, context(row, j)), all = heads * group;
    for (int t = begin; t < end; t += kWidth) {
      Floats top = splat(kNothing);
      for (int head = 0; head < all; ++head)  // NaN leaves the top as it is
        top = max(load_as<Floats>(scores + head * stride + t) - norms[head], top);
      if (s.ratings == nullptr)
        add(row, j, top, pooled + t);
      else
        std::memcpy(rating(row, j) + t, &top, sizeof(float) * std::min(kWidth, end - t));
    }
  }

  // Several queries' parts add up. Of a single one it is their logarithms, which do not underflow.
  void add(int row, int j, Floats top, float* pooled) const {
    if (queries > 1)
      top = load_as<Floats>(pooled) + s.weights[row * queries + j] * exp_nonpositive(min(top, splat(0)));
    std::memcpy(pooled, &top, sizeof top);
  }

  void add_rated(int row, int j, float* pooled) const {
    const int end = context(row, j);
    for (int t = 0; t < end; t += kWidth) {
      Floats top = splat(kNothing);
      std::memcpy(&top, rating(row, j) + t, sizeof(float) * std::min(kWidth, end - t));
      add(row, j, top, pooled + t);
    }
  }

  void choose(int row, float* pooled) const {
    const int k = rows.select[row], first = rows.sink[row];
    const int count = rows.seq_lens[row] - rows.window[row] - first;
    int32_t* chosen = selector.selected + int64_t(rows.seats[row]) * selector.max_selected;
    to_ordered(pooled + first, count);
    top_k(pooled + first, count, k, first, chosen, true);
  }
};

template <class E>
void select_context_of(const ContextSelection& s) {
  const Filter<E> filter(s);
  const DecodeRows& rows = s.rows;
  const int all = filter.heads * filter.group;
  int most = 0;  // tokens of a row
  for (int r = 0; r < rows.rows; ++r)
    if (rows.select[r] > 0) most = std::max(most, rows.seq_lens[r]);
  const int chunks = (most + kTokens - 1) / kTokens;
  const int64_t stride = int64_t(chunks) * kTokens;
  // Rows at a time, so that the scratch stays bounded however large the batch.
  const int wave = std::clamp<int64_t>(kMostScores / std::max<int64_t>(all * stride, 1), 1,
                                       std::min(rows.rows, 2 * omp_get_max_threads()));
  thread_local std::vector<float> scratch;  // engines in one process may step at the same time
  const size_t needed = wave * (all * (stride + chunks + 1) + stride);
  if (scratch.size() < needed) scratch.resize(needed);
  float* const scores = scratch.data();               // [wave, all, stride]
  float* const masses = scores + wave * all * stride; // [wave, all, chunks]
  float* const norms = masses + wave * all * chunks;  // [wave, all]
  float* const pooled = norms + wave * all;           // [wave, stride]
#pragma omp parallel
  for (int first = 0; first < rows.rows; first += wave) {
    const int count = std::min(wave, rows.rows - first);
    if (s.queries > 1) {
#pragma omp for
      for (int i = 0; i < count; ++i) std::fill_n(pooled + i * stride, stride, 0.0f);
    }
    if (s.rated) {
#pragma omp for schedule(dynamic, 1)
      for (int i = 0; i < count; ++i)
        for (int j = 0; j < s.queries; ++j)
          if (filter.counts(first + i, j)) filter.add_rated(first + i, j, pooled + i * stride);
    }
    for (int j = 0; j < (s.rated ? 0 : s.queries); ++j) {
      const auto each_chunk = [&](int task, const auto& act) {
        const int i = task / chunks, begin = task % chunks * kTokens;
        if (filter.counts(first + i, j) && begin < filter.context(first + i, j)) act(i, begin);
      };
#pragma omp for schedule(dynamic, 1)
      for (int task = 0; task < count * chunks; ++task)
        each_chunk(task, [&](int i, int begin) {
          filter.score(first + i, j, begin, scores + i * all * stride, stride,
                       masses + i * all * chunks + begin / kTokens, chunks);
        });
#pragma omp for
      for (int unit = 0; unit < count * all; ++unit) {
        const int row = first + unit / all;
        if (!filter.counts(row, j)) continue;
        const int used = (filter.context(row, j) + kTokens - 1) / kTokens;
        norms[unit] = filter.norm(unit % all, masses + unit * chunks, used);
      }
#pragma omp for schedule(dynamic, 1)
      for (int task = 0; task < count * chunks; ++task)
        each_chunk(task, [&](int i, int begin) {
          filter.pool(first + i, j, begin, scores + i * all * stride, stride, norms + i * all,
                      pooled + i * stride);
        });
    }
    if (s.ratings != nullptr && !s.rated) continue;  // the heads of other workers are to count, too
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < count; ++i)
      if (rows.select[first + i] > 0) filter.choose(first + i, pooled + i * stride);
  }
}

}  // namespace

void select_context(const ContextSelection& s) {
  switch (s.selector.index.dtype) {
    case DType::kBFloat16: return select_context_of<BFloat16>(s);
    case DType::kFloat16: return select_context_of<Float16>(s);
    case DType::kFloat32: return select_context_of<Float32>(s);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
