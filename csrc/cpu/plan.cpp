// Which pages a decode step or a chunk of a prompt attends to, and which KV heads correct their last
// selection; compiled once per instruction set (KVR_ISA names it).
#include "kernels.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "index/table.h"
#include "mass.h"
#include "outliers.h"
#include "pooling.h"
#include "remainder.h"
#include "simd.h"
#include "topk.h"

#define KVR_STRING_(x) #x
#define KVR_STRING(x) KVR_STRING_(x)
#define KVR_CONCAT_(a, b) a##b
#define KVR_CONCAT(a, b) KVR_CONCAT_(a, b)

// The instruction set whose object code of build.cpp, filter.cpp, codec.cpp and linear.cpp serves.
#ifndef KVR_SHARED
#define KVR_SHARED KVR_ISA
#endif

namespace kvr {
namespace KVR_SHARED {

void update_index(const IndexUpdate&);  // build.cpp
void index_pages(const PageIndexing&);
void read_keys(const KeyReading&);
void select_context(const ContextSelection&);  // filter.cpp
void encode_units(const UnitCoding&);          // codec.cpp
void decode_units(const UnitCoding&);
void multiply(const LinearLayer&);             // linear.cpp
void multiply_quantised(const QuantisedLayer&);  // quantised.cpp

}  // namespace KVR_SHARED

namespace KVR_ISA {

void attend(const Attention&);               // attend.cpp
void attend_prompt(const PromptAttention&);  // attend_prompt.cpp

constexpr int kChunk = 128;         // most entries per scoring task
constexpr int kTokenChunk = 32;     // the same where their tokens are scored
constexpr int kChunkTokens = 8192;  // most tokens of the entries, as long as they are kWidth or more
constexpr int kSerialScores = 64;   // work below which waking the other threads costs more

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

// The scores of the items of a KV head in a row, for each query head, and what tasks made of them. An item
// is what has a score: a token, an entry or, of an entry of several pages, a page.
struct HeadScores {
  float* scores;                     // [group, stride]
  int64_t stride;
  Mass* masses;                      // [group, chunks]
  float* sums;                       // [group, chunks, MeanSums::size]; null: there is no remainder
  int chunks;
};

// Units of a KV head among which the best are, and what tells them.
struct Candidates {
  int first, last;                   // units between sink and window
  std::vector<int32_t> outliers;
  std::vector<int32_t> units;        // the candidates, rising
  std::vector<float> norms;          // [group]; logarithms of the divisors of shares
};

template <class E>
struct Planner {
  const DecodeRows& rows;
  const Chooser& chooser;
  const Index& index;
  const DecodePlan& plan;
  const ScoreFn<E> score_fn;
  const int per_entry;               // scores
  const int parts;                   // scores per unit of selection
  const int chunk;                   // entries per scoring task, whatever the other rows; a multiple
                                     // of kWidth
  int most = 0;                      // entries of a row that are scored

  explicit Planner(const DecodePlan& p)
      : rows(p.rows), chooser(p.chooser), index(p.chooser.index), plan(p),
        score_fn(rows.per_token ? functions_of<E>(index.kind).score_tokens
                                : functions_of<E>(index.kind).score),
        per_entry(rows.per_token ? index.entry_tokens : index.spans()),
        parts(rows.per_token ? 1 : index.parts()),
        chunk(std::clamp(kChunkTokens / index.entry_tokens, kWidth,
                         rows.per_token ? kTokenChunk : kChunk) / kWidth * kWidth) {
    for (int r = 0; r < rows.rows; ++r)
      if (rows.scores(r)) most = std::max(most, entries(r));
  }

  int group_elements() const { return chooser.group * index.head_size; }
  int units(int row) const { return rows.units(row, index.page_size); }
  int entries(int row) const { return index.entries_of(rows.selected_by(row)); }
  bool adds_up() const { return plan.rest_lse != nullptr && chooser.remainder > 0; }
  int64_t sum_size() const { return MeanSums::size(index.head_size); }
  const int32_t* blocks(int row) const { return rows.block_table + row * rows.block_table_stride; }
  const E* query(int row, int head) const {
    return static_cast<const E*>(plan.query) + row * plan.query_stride +
           int64_t(head) * group_elements();
  }

  // Scores of entries [begin, end) of a row for some KV heads: their records lie side by side, so
  // the index is read in its order.
  void score(int row, int head, int heads, int begin, int end, float* scores, int64_t unit_stride,
             int64_t stride) const {
    if (plan.scores != nullptr) {
      for (int h = head; h < head + heads; ++h)
        for (int g = 0; g < chooser.group; ++g) {
          const int64_t unit = (int64_t(row) * index.kv_heads + h) * chooser.group + g;
          std::copy_n(plan.scores + unit * plan.score_stride + begin * per_entry,
                      (end - begin) * per_entry,
                      scores + (h - head) * unit_stride + g * stride + begin * per_entry);
        }
      return;
    }
    score_fn({index, Records(index, blocks(row)), query(row, head), head, heads, chooser.group,
              chooser.scale, begin, end, scores, unit_stride, stride, adds_up()});
  }

  // The same of a task, made ready for pooling and, with a remainder, added up; `heads` of all KV heads.
  void score_task(int row, int task, const HeadScores* heads) const {
    const int begin = task * chunk, end = std::min(begin + chunk, entries(row));
    score(row, 0, index.kv_heads, begin, end, heads->scores, chooser.group * heads->stride, heads->stride);
    if (is_raw(chooser.pooling)) return;
    const int first = begin * per_entry, count = (end - begin) * per_entry;
    for (int head = 0; head < index.kv_heads; ++head)
      for (int g = 0; g < chooser.group; ++g) {
        const HeadScores& of = heads[head];
        of.masses[g * of.chunks + task] = exp_scores(of.scores + g * of.stride + first, count);
      }
    if (adds_up()) add_up(row, task, first, count, heads);
  }

  // Adds up the items of a task that exp_scores has given their masses.
  void add_up(int row, int task, int first, int count, const HeadScores* heads) const {
    const Records records(index, blocks(row));
    thread_local std::vector<int32_t> items;
    items.resize(count);
    std::iota(items.begin(), items.end(), first);
    for (int head = 0; head < index.kv_heads; ++head) {
      const HeadScores& of = heads[head];
      MeanSums(records, head).sum(items, chooser.group, of.scores, of.stride, of.sums + task * sum_size(),
                                  of.chunks * sum_size());
    }
  }

  // Selects for the next step, decides whose selection this step attends to, writes the list.
  void select(int row, int head, const HeadScores& of) const {
    const int n = units(row), k = chooser.select(rows, row, head);
    const int sink = rows.sink[row], window = rows.window[row];
    const int32_t* block = blocks(row);
    const int64_t number = int64_t(row) * index.kv_heads + head;
    int32_t* list = rows.lists + number * rows.lists_stride;
    const int attended = sink + k + window, size = rows.unit(index.page_size);
    const bool tail = attended == n || window > 0;  // whether the last unit is listed
    // Tokens of so many units, less the rest of the tail page where it is in.
    const auto list_tokens = [&](int units) {
      rows.lengths[number] = units * size - (tail && units > 0 ? n * size - rows.seq_lens[row] : 0);
    };
    list_tokens(attended);
    if (plan.rest_lse != nullptr)
      std::fill_n(plan.rest_lse + number * chooser.group, chooser.group,
                  -std::numeric_limits<float>::infinity());
    // Numbers of pages, where the cache is seen as [pages * kv_heads] single-head ones, or of tokens.
    const int shift = __builtin_ctz(index.page_size), last = index.page_size - 1;
    const auto append = [&](int32_t j) {
      *list++ = rows.per_token
                    ? (block[j >> shift] * index.kv_heads + head) << shift | (j & last)
                    : block[j] * index.kv_heads + head;
    };
    if (attended == n && rows.mode[row] != Mode::kSelect) {
      for (int j = 0; j < n; ++j) append(j);
      return;
    }
    for (int j = 0; j < sink; ++j) append(j);
    if (k > 0) {
      const int64_t unit = int64_t(rows.seats[row]) * index.kv_heads + head;
      int32_t* kept = chooser.selected + unit * chooser.max_selected;
      if (rows.mode[row] == Mode::kGiven) {
        for (int i = 0; i < k; ++i) append(kept[i]);
      } else {
        const int chosen =
            select_anew(row, head, k, attended == n, of, kept, append);
        if (chosen < k) list_tokens(attended - k + chosen);
      }
    } else if (of.sums != nullptr && rows.scores(row) && attended < n && entries(row) > 0) {
      leave_rest(row, head, nullptr, 0, take_rest(row, of));
    }
    for (int j = n - window; j < n; ++j) append(j);
  }

  // The same of what a query selects; a step that attends to everything takes it at once, since the
  // previous one may have had less. Returns how many units are listed.
  template <class Append>
  int select_anew(int row, int head, int k, bool everything, const HeadScores& of, int32_t* kept,
                  const Append& append) const {
    const int64_t unit = int64_t(rows.seats[row]) * index.kv_heads + head;
    E* prev = static_cast<E*>(chooser.prev_query) + unit * group_elements();
    const E* q = query(row, head);
    const bool correct = must_correct(row, q, prev);
    const bool anew = correct || everything;
    thread_local std::vector<int32_t> enough;
    const bool may_rest = of.sums != nullptr && (!everything || rows.mass[row] < 1);
    Remainder* const rest = may_rest ? &take_rest(row, of) : nullptr;
    if (!anew)
      for (int i = 0; i < k; ++i) append(kept[i]);
    const int count = select_best(row, head, k, of, kept, enough);
    if (anew)
      for (int i = 0; i < count; ++i) append(count < k ? enough[i] : kept[i]);
    if (rest != nullptr && (!everything || count < k))
      leave_rest(row, head, count < k ? enough.data() : kept, count, *rest);
    if (correct) {
#pragma omp atomic
      rows.corrected[rows.seats[row]] += 1;
    }
    if (count < k) {
#pragma omp atomic
      rows.spared[rows.seats[row]] += k - count;
    }
    std::memcpy(prev, q, group_elements() * sizeof(E));
    return count;
  }

  // What a KV head's scores add up to; pooling takes their place.
  Remainder& take_rest(int row, const HeadScores& of) const {
    thread_local Remainder remainder;
    remainder.take(of.scores, of.stride, chooser.group, entries(row) * per_entry, chunk * per_entry,
                   of.chunks, of.masses, of.sums, sum_size());
    return remainder;
  }

  // What the row does not attend to, beside sink, window and the selected units.
  void leave_rest(int row, int head, const int32_t* selected, int count, Remainder& remainder) const {
    thread_local std::vector<int32_t> attended;
    attended.assign(selected, selected + count);
    for (int j = 0; j < rows.sink[row]; ++j) attended.push_back(j);
    for (int j = units(row) - rows.window[row]; j < units(row); ++j) attended.push_back(j);
    const int64_t first = (int64_t(row) * index.kv_heads + head) * chooser.group;
    remainder.leave(Records(index, blocks(row)), head, attended, chooser.remainder,
                    plan.rest_values + first * index.head_size, plan.rest_lse + first);
  }

  // The k best units between sink and window, given the scores of all entries, as score_task left them:
  // first the outliers among them.
  // Returns how many of them are enough for the row's mass; if fewer than k, `enough` has these.
  int select_best(int row, int head, int k, const HeadScores& of, int32_t* best,
                  std::vector<int32_t>& enough) const {
    thread_local Candidates found;
    found.first = rows.sink[row];
    found.last = units(row) - rows.window[row];
    found.units.resize(std::min<int64_t>(found.last - found.first,
                                         std::max<int64_t>(k, int64_t(k) * chooser.rerank)));
    found.norms.resize(chooser.group);
    find_outliers(Records(index, blocks(row)), head, found.first, found.last,
                  outlier_units(chooser.outliers, k), found.outliers);
    if (is_raw(chooser.pooling)) {
      find_by_scores(row, of, found);
    } else {
      find_by_shares(row, of, found);
      if (rows.mass[row] < 1 && reaches_mass(row, k, of, found, enough)) {
        std::copy_n(found.units.data(), k, best);
        return enough.size();
      }
      if (any_too_low(of, found)) find_by_logs(row, head, of, found);
    }
    if (int(found.units.size()) > k)
      rerank(row, head, found.units, found.norms.data(), k, best);
    else
      std::copy_n(found.units.data(), k, best);
    return k;
  }

  static void put_first(const std::vector<int32_t>& outliers, float* scores) {
    for (const int32_t unit : outliers) scores[unit] = std::numeric_limits<float>::infinity();
  }

  // The best units by scores as they are, pooled.
  void find_by_scores(int row, const HeadScores& of, Candidates& found) const {
    const int n = entries(row) * per_entry, first = found.first, count = found.last - first;
    pool_raw(of.scores, of.stride, chooser.group, n, chooser.pooling == Pooling::kMax);
    if (parts > 1) pool_parts(of.scores, n, parts, true);
    put_first(found.outliers, of.scores);
    to_ordered(of.scores + first, count);
    top_k(of.scores + first, count, found.units.size(), first, found.units.data(), true);
  }

  // The best units by shares of the attention, pooled.
  void find_by_shares(int row, const HeadScores& of, Candidates& found) const {
    const int n = entries(row) * per_entry, first = found.first;
    pool_shares(of.scores, of.stride, chooser.group, n, chunk * per_entry, of.chunks, of.masses,
                chooser.pooling, found.norms.data());
    if (parts > 1) pool_parts(of.scores, n, parts, false);
    put_first(found.outliers, of.scores);
    top_k_of_many(of.scores + first, found.last - first, found.units.size(), first,
                  found.units.data());
  }

  // Whether fewer than k units reach the row's mass: `enough` has these, rising. Units that pooling cannot
  // tell apart are none of them.
  bool reaches_mass(int row, int k, const HeadScores& of, const Candidates& found,
                    std::vector<int32_t>& enough) const {
    const int n = entries(row) * per_entry;
    reach_mass(rows.mass[row], of.scores, (n + parts - 1) / parts, found.first, found.last,
               found.units, enough);
    if (int(enough.size()) >= k || !(of.scores[enough.back()] >= kLeastScore)) return false;
    std::sort(enough.begin(), enough.end());
    return true;
  }

  // Whether shares are so low that pooling cannot tell the units apart.
  static bool any_too_low(const HeadScores& of, const Candidates& found) {
    return std::any_of(found.units.begin(), found.units.end(),
                       [&](int32_t unit) { return !(of.scores[unit] >= kLeastScore); });
  }

  // The best units by logarithms of shares. Scores once more: pooling took their place.
  void find_by_logs(int row, int head, const HeadScores& of, Candidates& found) const {
    score(row, head, 1, 0, entries(row), of.scores, 0, of.stride);
    top_k_of_logs(of.scores, of.stride, chooser.group, entries(row) * per_entry, parts, found.first,
                  found.last, found.units.size(), chooser.pooling, found.outliers,
                  found.units.data());
  }

  // The k best of the candidates by their keys.
  void rerank(int row, int head, const std::vector<int32_t>& candidates, const float* norms, int k,
              int32_t* best) const {
    const int group = chooser.group, count = candidates.size();
    thread_local std::vector<float> queries, scores, values;
    queries.resize(group_elements());
    scores.resize(group * parts);
    values.resize(count);
    scaled_to(queries.data(), query(row, head), group_elements(), chooser.scale);
    const Records records(index, blocks(row));
    for (int i = 0; i < count; ++i) {
      for (int part = 0; part < parts; ++part)
        exact_score<E>(index, records.entry(candidates[i] * parts + part), head, queries.data(),
                       group, scores.data() + part, parts);
      values[i] = pooled(chooser.pooling, scores.data(), parts, group, norms);
    }
    to_ordered(values.data(), count);
    top_k(values.data(), count, k, 0, best, true);
    for (int i = 0; i < k; ++i) best[i] = candidates[best[i]];
  }

  bool must_correct(int row, const E* q, const E* prev) const {
    const float tau = rows.threshold[row];
    if (rows.fresh[row] || tau >= 1.0f) return true;
    if (tau <= -1.0f) return false;
    return query_similarity(q, prev, chooser.group, index.head_size) < tau;
  }
};

template <class E>
static void plan_decode_of(const DecodePlan& p) {
  const Planner<E> planner(p);
  const DecodeRows& rows = p.rows;
  const int heads = p.chooser.index.kv_heads;
  // Scores of a wave of rows at a time: the scratch stays bounded however large the batch, and all
  // threads share the scoring of a single long request. A task scores a stretch of the index for all
  // KV heads, whose entries lie side by side.
  const int most = planner.most, chunk = planner.chunk, group = p.chooser.group;
  const int chunks = (most + chunk - 1) / chunk;
  const int64_t stride = int64_t(chunks) * chunk * planner.per_entry;
  const bool rest = planner.adds_up();
  const int64_t sums = rest ? chunks * planner.sum_size() : 0;
  const int shared = std::min<int>(rows.rows, (4 * omp_get_max_threads() + heads - 1) / heads);
  const int wave = std::clamp<int64_t>(kMostScores / std::max<int64_t>(heads * group * stride, 1), 1,
                                       std::max(shared, 1));
  // Engines in one process may step at the same time.
  thread_local std::vector<float> scratch;
  thread_local std::vector<Mass> stretches;
  thread_local std::vector<HeadScores> units;
  units.resize(wave * heads);
  const int64_t query_heads = int64_t(units.size()) * group;
  if (int64_t(scratch.size()) < query_heads * (stride + sums)) scratch.resize(query_heads * (stride + sums));
  if (int64_t(stretches.size()) < query_heads * chunks) stretches.resize(query_heads * chunks);
  for (size_t i = 0; i < units.size(); ++i)
    units[i] = {scratch.data() + i * group * stride, stride, stretches.data() + i * group * chunks,
                rest ? scratch.data() + query_heads * stride + i * group * sums : nullptr, chunks};
  const HeadScores* scored = units.data();
#pragma omp parallel if (int64_t(rows.rows) * heads * most > kSerialScores)
  for (int first = 0; first < rows.rows; first += wave) {
    const int count = std::min(wave, rows.rows - first);
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < count * chunks; ++task) {
      const int at = task / chunks, row = first + at, number = task % chunks;
      if (!rows.scores(row) || number * chunk >= planner.entries(row)) continue;
      planner.score_task(row, number, scored + at * heads);
    }
#pragma omp for schedule(dynamic, 1)
    for (int unit = 0; unit < count * heads; ++unit)
      planner.select(first + unit / heads, unit % heads, scored[unit]);
  }
}

static void plan_decode(const DecodePlan& p) {
  switch (p.chooser.index.dtype) {
    case DType::kBFloat16: return plan_decode_of<BFloat16>(p);
    case DType::kFloat16: return plan_decode_of<Float16>(p);
    case DType::kFloat32: return plan_decode_of<Float32>(p);
  }
}

}  // namespace KVR_ISA

extern const KernelTable KVR_CONCAT(table_, KVR_ISA);
const KernelTable KVR_CONCAT(table_, KVR_ISA) = {
    KVR_STRING(KVR_ISA),       KVR_SHARED::update_index, KVR_ISA::plan_decode,
    KVR_SHARED::index_pages,   KVR_SHARED::read_keys,    KVR_ISA::attend,
    KVR_ISA::attend_prompt,    KVR_SHARED::select_context, KVR_SHARED::multiply,
    KVR_SHARED::multiply_quantised, KVR_SHARED::encode_units, KVR_SHARED::decode_units,
    KVR_ISA::kIndexNames};

}  // namespace kvr
