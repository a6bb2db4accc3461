// The retrieval ops, compiled once per instruction set (KVR_ISA names it).
#include "kernels.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "checks.h"
#include "selection.h"
#include "simd.h"

#define KVR_STRING_(x) #x
#define KVR_STRING(x) KVR_STRING_(x)
#define KVR_CONCAT_(a, b) a##b
#define KVR_CONCAT(a, b) KVR_CONCAT_(a, b)
// Completely, and early: arrays of vectors become registers.
#define KVR_UNROLL _Pragma("GCC unroll 16")

namespace kvr {
namespace KVR_ISA {

void index_pages(const PageIndexing&);  // index_pages.cpp

constexpr int kGroupBlock = 8;      // query heads scored together
constexpr int kAccumulators = kWidth == 16 ? 16 : 8;  // of scores, that registers have room for
constexpr int kBlock = 4;           // summaries scored per KV head, before the next head's
constexpr int kAhead = 8;           // summaries to fetch ahead
constexpr int kChunk = 128;         // summaries per scoring task
constexpr int kSerialKeys = 4096;   // work below which waking the other threads costs more
constexpr int kSerialScores = 64;

// ---------------------------------------------------------------------------------------------
// Page index: channel-wise min and max of the keys of a page, or of parts of one (FreeKV,
// section 3.2)
// ---------------------------------------------------------------------------------------------

// A maximal range of consecutive tokens that one summary covers.
struct Run {
  int64_t entry, first, last;  // tokens [first, last)
  bool starts;                 // holds the summary's first token, so the old one is void
};

static std::vector<Run>& find_runs(const IndexUpdate& u) {
  thread_local std::vector<Run> runs;
  runs.clear();
  for (int64_t t = 0; t < u.num_tokens; ++t) {
    const int64_t slot = u.slot_mapping[t];
    if (slot < 0) continue;
    const int64_t entry = slot / u.layer.summary_size;
    const bool first = slot % u.layer.summary_size == 0;
    if (!first && !runs.empty() && runs.back().entry == entry && runs.back().last == t) {
      runs.back().last = t + 1;
      continue;
    }
    if (entry >= u.layer.index_entries)
      refuse_token(t, slot, u.layer.index_entries * u.layer.summary_size);
    runs.push_back({entry, t, t + 1, first});
  }
  return runs;
}

template <class E>
static void update_run(const IndexUpdate& u, const Run& run) {
  const int d = u.layer.head_size, heads = u.layer.kv_heads;
  for (int h = 0; h < heads; ++h) {
    E* lo = static_cast<E*>(u.layer.index) + (run.entry * heads + h) * 2 * d;
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

template <class E>
static void update_index_of(const IndexUpdate& u) {
  const std::vector<Run>& runs = find_runs(u);
  if (u.num_tokens * u.layer.kv_heads <= kSerialKeys) {
    for (const Run& run : runs) update_run<E>(u, run);
    return;
  }
  const int64_t n = static_cast<int64_t>(runs.size());
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) update_run<E>(u, runs[i]);
}

// ---------------------------------------------------------------------------------------------
// Scores: an upper bound of every q.k in what a summary covers, as relu(q).kmax + min(q, 0).kmin
// ---------------------------------------------------------------------------------------------

// The query heads of one KV head, split by sign.
template <class E>
class SplitQuery {
 public:
  using Part = typename E::Factor;

  SplitQuery(const E* q, int n) {
    thread_local std::vector<Part> buffer;
    if (buffer.size() < 2 * static_cast<size_t>(n)) buffer.resize(2 * n);
    positive = buffer.data();
    negative = buffer.data() + n;
    for (int i = 0; i < n; i += kWidth) {
      const Floats x = E::load(q + i);
      Part::store(buffer.data() + i, max(x, Floats{}));
      Part::store(buffer.data() + n + i, min(x, Floats{}));
    }
  }
  const Part *positive, *negative;
};

// The summaries of a request's context, in its order; those of all KV heads lie side by side.
template <class E>
struct Summaries {
  const E* index;
  const int32_t* pages;
  int shift;       // log2 of the entries per page
  int head_size, kv_heads;

  const E* at(int j, int head) const {
    const int64_t entry = (int64_t(pages[j >> shift]) << shift) + (j & ((1 << shift) - 1));
    return index + (entry * kv_heads + head) * 2 * head_size;
  }
};

// Scores of P adjacent summaries of a KV head from j on, for the N query heads from query_head on;
// out[g * out_stride + j]. More of them at a time share what is loaded of the queries.
template <class E, int N, int P>
static void score_together(const SplitQuery<E>& q, int query_head, const Summaries<E>& summaries,
                           int head, int j, float scale, float* out, int64_t out_stride) {
  const int d = summaries.head_size;
  const E* lo[P];
  KVR_UNROLL for (int p = 0; p < P; ++p) lo[p] = summaries.at(j + p, head);
  Floats acc[N][P];
  KVR_UNROLL for (int g = 0; g < N; ++g)
    KVR_UNROLL for (int p = 0; p < P; ++p) acc[g][p] = Floats{};
  for (int c = 0; c < d; c += E::kLanes) {
    const int lanes = d - c;
    typename E::Lanes kmin[P], kmax[P];
    KVR_UNROLL for (int p = 0; p < P; ++p) {
      kmin[p] = E::lanes(lo[p] + c, lanes);
      kmax[p] = E::lanes(lo[p] + d + c, lanes);
    }
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const int64_t at = int64_t(query_head + g) * d + c;
      const auto pos = SplitQuery<E>::Part::lanes(q.positive + at, lanes);
      const auto neg = SplitQuery<E>::Part::lanes(q.negative + at, lanes);
      KVR_UNROLL for (int p = 0; p < P; ++p) {
        E::add_products(acc[g][p], pos, kmax[p]);
        E::add_products(acc[g][p], neg, kmin[p]);
      }
    }
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    float* to = out + g * out_stride + j;
    if constexpr (P == 4) {
      const Quad sums = sum_four(acc[g][0], acc[g][1], acc[g][2], acc[g][3]) * scale;
      std::memcpy(to, &sums, sizeof sums);
    } else {
      KVR_UNROLL for (int p = 0; p < P; ++p) to[p] = sum(acc[g][p]) * scale;
    }
  }
}

// Scores of summaries [begin, end) of a KV head for the N query heads from query_head on. Summaries
// up to `limit` come next, and are fetched into the second-level cache meanwhile: the first level
// has too few misses in flight to hide the memory's latency.
template <class E, int N>
static void score(const SplitQuery<E>& q, int query_head, const Summaries<E>& summaries, int head,
                  int begin, int end, int limit, float scale, float* out, int64_t out_stride) {
  constexpr int kTogether = N <= kAccumulators / 4 ? 4 : N <= kAccumulators / 2 ? 2 : 1;
  const size_t entry_bytes = 2 * summaries.head_size * sizeof(E);
  int j = begin;
  for (; j + kTogether <= end; j += kTogether) {
    for (int next = j + kAhead; next < std::min(j + kAhead + kTogether, limit); ++next) {
      const char* ahead = reinterpret_cast<const char*>(summaries.at(next, head));
      for (size_t b = 0; b < entry_bytes; b += 64) __builtin_prefetch(ahead + b, 0, 2);
    }
    score_together<E, N, kTogether>(q, query_head, summaries, head, j, scale, out, out_stride);
  }
  for (; j < end; ++j)
    score_together<E, N, 1>(q, query_head, summaries, head, j, scale, out, out_stride);
}

template <class E>
using ScoreFn = decltype(&score<E, 1>);

template <class E>
static ScoreFn<E> score_fn(int heads) {
  static constexpr ScoreFn<E> kFns[kGroupBlock] = {
      score<E, 1>, score<E, 2>, score<E, 3>, score<E, 4>,
      score<E, 5>, score<E, 6>, score<E, 7>, score<E, 8>};
  return kFns[heads - 1];
}

// ---------------------------------------------------------------------------------------------
// One decode step of one layer
// ---------------------------------------------------------------------------------------------

// Mean over the group of cos(q, previous q) (FreeKV, section 3.3).
template <class E>
static float query_similarity(const E* q, const E* prev, int group, int d) {
  float mean = 0;
  for (int g = 0; g < group; ++g, q += d, prev += d) {
    Floats dot = {}, qq = {}, pp = {};
    for (int c = 0; c < d; c += kWidth) {
      const Floats a = E::load(q + c), b = E::load(prev + c);
      dot += a * b;
      qq += a * a;
      pp += b * b;
    }
    const float norm = __builtin_sqrtf(sum(qq) * sum(pp));
    mean += norm > 0 ? sum(dot) / norm : 0;
  }
  return mean / group;
}

template <class E>
struct Planner {
  const DecodeRows& rows;
  const LayerState& layer;
  const E* queries;
  int64_t query_stride;

  explicit Planner(const DecodePlan& p)
      : rows(p.rows), layer(p.layer), queries(static_cast<const E*>(p.query)),
        query_stride(p.query_stride) {}

  int group_elements() const { return layer.group * layer.head_size; }
  int parts() const { return layer.page_size / layer.summary_size; }
  int pages(int row) const { return (rows.seq_lens[row] + layer.page_size - 1) / layer.page_size; }
  int summaries(int row) const {
    return (rows.seq_lens[row] + layer.summary_size - 1) / layer.summary_size;
  }
  const int32_t* blocks(int row) const { return rows.block_table + row * rows.block_table_stride; }
  const E* query(int row, int head) const {
    return queries + row * query_stride + int64_t(head) * group_elements();
  }

  // Scores of summaries [begin, end) of a row for all KV heads: their entries lie side by side, so
  // the index is read in its order.
  void score(int row, int begin, int end, float* scores, int64_t unit_stride, int64_t stride) const {
    const SplitQuery<E> q(query(row, 0), layer.kv_heads * group_elements());
    for (int first = begin; first < end; first += kBlock)
      for (int head = 0; head < layer.kv_heads; ++head)
        score_head(row, head, q, head * layer.group, first, std::min(first + kBlock, end), end,
                   scores + head * unit_stride, stride);
  }

  void score_head(int row, int head, const SplitQuery<E>& q, int query_head, int begin, int end,
                  int limit, float* scores, int64_t stride) const {
    const Summaries<E> summaries{static_cast<const E*>(layer.index), blocks(row),
                                 __builtin_ctz(parts()), layer.head_size, layer.kv_heads};
    for (int g = 0; g < layer.group; g += kGroupBlock)
      score_fn<E>(std::min(kGroupBlock, layer.group - g))(q, query_head + g, summaries, head, begin,
                                                          end, limit, layer.scale,
                                                          scores + g * stride, stride);
  }

  // Selects for the next step, decides whose selection this step attends to, writes the page list.
  void select(int row, int head, float* scores, int64_t stride) const {
    const int n = pages(row), k = rows.select_pages[row];
    const int sink = rows.sink_pages[row], window = rows.window_pages[row];
    const int32_t* block = blocks(row);
    int32_t* list = rows.page_table + (int64_t(row) * layer.kv_heads + head) * rows.page_table_stride;
    // Entries address the cache seen as [pages * kv_heads] single-head pages.
    const auto append = [&](int32_t page) { *list++ = block[page] * layer.kv_heads + head; };
    if (k < 0) {
      for (int j = 0; j < n; ++j) append(j);
      return;
    }
    for (int j = 0; j < sink; ++j) append(j);
    if (k > 0) {
      const int64_t unit = int64_t(rows.slots[row]) * layer.kv_heads + head;
      int32_t* kept = layer.prev_selection + unit * layer.max_selected;
      E* prev = static_cast<E*>(layer.prev_query) + unit * group_elements();
      const E* q = query(row, head);
      const bool correct = must_correct(row, q, prev);
      if (!correct)
        for (int i = 0; i < k; ++i) append(kept[i]);
      select_best(row, head, q, scores, stride, kept);
      if (correct) {
        for (int i = 0; i < k; ++i) append(kept[i]);
#pragma omp atomic
        rows.corrected[rows.slots[row]] += 1;
      }
      std::memcpy(prev, q, group_elements() * sizeof(E));
    }
    for (int j = n - window; j < n; ++j) append(j);
  }

  // The best pages between sink and window, given the bounds of all.
  void select_best(int row, int head, const E* q, float* scores, int64_t stride,
                   int32_t* best) const {
    const int n = summaries(row), k = rows.select_pages[row];
    const int first = rows.sink_pages[row], last = pages(row) - rows.window_pages[row];
    pool_group(scores, stride, layer.group, n);
    if (parts() > 1) sum_parts(scores, n, parts());
    top_k(scores + first, last - first, k, first, best);
    if (std::all_of(best, best + k, [&](int32_t page) { return scores[page] >= kLeastScore; }))
      return;
    // The bounds once more: pooling took their place.
    score_head(row, head, SplitQuery<E>(q, group_elements()), 0, 0, n, n, scores, stride);
    top_k_of_logs(scores, stride, layer.group, n, parts(), first, last, k, best);
  }

  bool must_correct(int row, const E* q, const E* prev) const {
    const float tau = rows.threshold[row];
    if (rows.fresh[row] || tau >= 1.0f) return true;
    if (tau <= -1.0f) return false;
    return query_similarity(q, prev, layer.group, layer.head_size) < tau;
  }
};

template <class E>
static void plan_decode_of(const DecodePlan& p) {
  const Planner<E> planner(p);
  const DecodeRows& rows = p.rows;
  const int heads = p.layer.kv_heads;
  int most = 0;  // summaries of a row
  for (int r = 0; r < rows.rows; ++r)
    if (rows.select_pages[r] > 0) most = std::max(most, planner.summaries(r));
  // Scores of a wave of rows at a time: the scratch stays bounded however large the batch, and all
  // threads share the scoring of a single long request. A task scores a stretch of the index for all
  // KV heads, whose entries lie side by side.
  const int wave = std::min<int>(rows.rows, (4 * omp_get_max_threads() + heads - 1) / heads);
  const int chunks = (most + kChunk - 1) / kChunk;
  const int64_t stride = int64_t(chunks) * kChunk;
  const int64_t unit_stride = p.layer.group * stride;
  thread_local std::vector<float> scratch;  // engines in one process may step at the same time
  const size_t needed = wave * heads * unit_stride;
  if (scratch.size() < needed) scratch.resize(needed);
  float* scores = scratch.data();
#pragma omp parallel if (int64_t(rows.rows) * heads * most > kSerialScores)
  for (int first = 0; first < rows.rows; first += wave) {
    const int count = std::min(wave, rows.rows - first);
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < count * chunks; ++task) {
      const int row = first + task / chunks, begin = task % chunks * kChunk;
      const int end = std::min(begin + kChunk, planner.summaries(row));
      if (rows.select_pages[row] <= 0 || begin >= end) continue;
      planner.score(row, begin, end, scores + (row - first) * heads * unit_stride, unit_stride,
                    stride);
    }
#pragma omp for schedule(dynamic, 1)
    for (int unit = 0; unit < count * heads; ++unit)
      planner.select(first + unit / heads, unit % heads, scores + unit * unit_stride, stride);
  }
}

static void update_index(const IndexUpdate& u) {
  switch (u.layer.dtype) {
    case DType::kBFloat16: return update_index_of<BFloat16>(u);
    case DType::kFloat16: return update_index_of<Float16>(u);
    case DType::kFloat32: return update_index_of<Float32>(u);
  }
}

static void plan_decode(const DecodePlan& p) {
  switch (p.layer.dtype) {
    case DType::kBFloat16: return plan_decode_of<BFloat16>(p);
    case DType::kFloat16: return plan_decode_of<Float16>(p);
    case DType::kFloat32: return plan_decode_of<Float32>(p);
  }
}

}  // namespace KVR_ISA

extern const KernelTable KVR_CONCAT(table_, KVR_ISA);
const KernelTable KVR_CONCAT(table_, KVR_ISA) = {KVR_STRING(KVR_ISA), KVR_ISA::update_index,
                                                 KVR_ISA::plan_decode, KVR_ISA::index_pages};

}  // namespace kvr
