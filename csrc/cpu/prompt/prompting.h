// Attention of prompts over lists of pages.
//
// A task is a block of a sequence's queries and a KV head. Its rows are the head's query heads of all
// these queries, query after query, so keys and values are read once for all of them. They are packed
// kTile tokens at a time, and met by as many rows together as leave their queries in L1.
//
// Lists are divided into stretches of a fixed length, whose parts are merged in order: a result
// depends neither on the number of threads, nor on other sequences, nor on a prompt's chunks.
#pragma once

#include <omp.h>

#include <vector>

#include "kernels.h"
#include "prompt/panels.h"
#include "prompt/rows.h"
#include "room.h"

namespace kvr {
namespace KVR_ISA {
namespace prompt {

constexpr int kStretch = 2048;        // tokens
// Elements of a task's queries, and of its outputs: with the panels they stay in L2.
#if defined(__AMX_BF16__)
constexpr int kTaskElements = 65536;  // machines with AMX have a larger one
#else
constexpr int kTaskElements = 32768;
#endif
constexpr int kTogether = 3072;       // elements of queries that meet a panel in L1
constexpr int kTasksPerThread = 4;
constexpr int kPartsPerThread = 8;  // at a time: memory does not grow with contexts
constexpr int64_t kSerialLogits = 4096;  // work below which waking the other threads costs more

struct Task {
  int sequence, head;
  int first, queries;  // of the sequence's queries
  int seen;            // tokens of the list that the first of them sees
  int64_t logits;      // of a query head
};

template <class P>
class Prompting {
  using E = typename P::Element;
  using Word = typename P::Word;
  using Block = prompt::Block<P>;
  static constexpr int kMicro = P::kMicro;

 public:
  explicit Prompting(const PromptAttention& a)
      : a_(a),
        columns_(round_up(a.head_size, kColumns)),
        words_(a.head_size / P::kDepth),
        together_(std::max(kTogether / (a.head_size * kMicro), 1) * kMicro),
        logits_{a.scale * kLog2E, a.softcap * kLog2E} {
    const int queries = std::max(kTaskElements / (a.head_size * a.group), 1);
    rows_ = round_up(queries * a.group, kMicro);
    for (int s = 0; s < a.sequences; ++s)
      for (int first = 0; first < a.queries(s); first += queries) {
        const int some = std::min(queries, a.queries(s) - first);
        for (int h = 0; h < a.kv_heads; ++h) {
          const int seen = a.seen[a.list(s, h)] + first;
          const int64_t read = a.window > 0 ? std::min(seen, a.window) : seen;
          tasks_.push_back({s, h, first, some, seen, (read + some / 2) * some});
        }
      }
    std::stable_sort(tasks_.begin(), tasks_.end(),
                     [](const Task& x, const Task& y) { return x.logits > y.logits; });
  }

  void run() {
    const int count = tasks_.size();
    int64_t logits = 0;
    for (const Task& task : tasks_) logits += task.logits * a_.group;
    const bool parallel = logits > kSerialLogits;
    if (count < kTasksPerThread * omp_get_max_threads()) return run_by_stretches(parallel);
#pragma omp parallel if (parallel)
    {
      [[maybe_unused]] const typename Block::Setup setup;
#pragma omp for schedule(dynamic, 1)
      for (int t = 0; t < count; ++t) {
        const Task& task = tasks_[t];
        const Rows<P> rows = rows_of(task);
        float* const memory = scratch().parts.of(2 * part_floats());
        const Part whole = part_at(memory, 0), more = part_at(memory, 1);
        attend_stretch(task, rows, first_stretch(task), whole);
        for (int i = 1; i < stretches(task); ++i) {
          attend_stretch(task, rows, first_stretch(task) + i, more);
          merge(task, whole, more);
        }
        finish(task, whole);
      }
    }
  }

 private:
  // A thread's own.
  struct Scratch {
    Room<Word> queries, keys, values;
    Room<float> logits, sums, parts;
    Room<int> begins, limits, unseen;
  };
  static Scratch& scratch() {
    thread_local Scratch own;
    return own;
  }

  void run_by_stretches(bool parallel) const {
    const int count = tasks_.size();
    std::vector<int> firsts(count + 1);  // stretches of the tasks before each
    for (int t = 0; t < count; ++t) firsts[t + 1] = firsts[t] + stretches(tasks_[t]);
    const int all = firsts[count], wave = std::min(kPartsPerThread * omp_get_max_threads(), all);
    thread_local Room<float> room;  // engines in one process may step at the same time
    float* const memory = room.of((count + wave) * part_floats());
    float* const parts = memory + count * part_floats();
#pragma omp parallel if (parallel)
    {
      [[maybe_unused]] const typename Block::Setup setup;
      for (int begin = 0; begin < all; begin += wave) {
        const int end = std::min(begin + wave, all);
#pragma omp for schedule(dynamic, 1)
        for (int i = begin; i < end; ++i) {
          const int t = std::upper_bound(firsts.begin(), firsts.end(), i) - firsts.begin() - 1;
          const Task& task = tasks_[t];
          const int stretch = i - firsts[t];
          attend_stretch(task, rows_of(task), first_stretch(task) + stretch,
                         stretch == 0 ? part_at(memory, t) : part_at(parts, i - begin));
        }
#pragma omp for schedule(dynamic, 1)
        for (int t = 0; t < count; ++t) {
          const Part whole = part_at(memory, t);
          const int last = std::min(firsts[t + 1], end);
          for (int i = std::max(firsts[t] + 1, begin); i < last; ++i)
            merge(tasks_[t], whole, part_at(parts, i - begin));
          if (begin < firsts[t + 1] && firsts[t + 1] <= end) finish(tasks_[t], whole);
        }
      }
    }
  }

  int64_t part_floats() const { return int64_t(rows_) * (columns_ + 2); }
  Part part_at(float* memory, int64_t i) const {
    float* const out = memory + i * part_floats();
    float* const references = out + int64_t(rows_) * columns_;
    return {out, references, references + rows_};
  }

  int first_stretch(const Task& task) const {
    return a_.window > 0 ? std::max(task.seen - a_.window, 0) / kStretch : 0;
  }
  int stretches(const Task& task) const {
    return (task.seen + task.queries - 2) / kStretch + 1 - first_stretch(task);
  }

  Rows<P> rows_of(const Task& task) const {
    const int group = a_.group, given = task.queries * group, count = round_up(given, kMicro);
    Scratch& own = scratch();
    const Rows<P> rows{count,
                       own.queries.of(int64_t(count) * words_),
                       own.begins.of(count),
                       own.limits.of(count),
                       own.sums.of(count * kWidth),
                       own.unseen.of(count / kMicro)};
    for (int r = 0; r < count; ++r) {
      const int row = std::min(r, given - 1);
      Block::pack(static_cast<const E*>(a_.query) + place(task, row, a_.query_stride), a_.head_size, r,
                  rows.queries);
      rows.limits[r] = task.seen + row / group;
      rows.begins[r] = a_.window > 0 ? std::max(rows.limits[r] - a_.window, 0) : 0;
    }
    return rows;
  }

  // Where a row is in the queries, or in the output.
  int64_t place(const Task& task, int row, int64_t stride) const {
    const int64_t token = a_.starts[task.sequence] + task.first + row / a_.group;
    return token * stride + int64_t(head(task, row)) * a_.head_size;
  }
  int head(const Task& task, int row) const { return task.head * a_.group + row % a_.group; }

  const E* unit(const Task& task, int page) const {
    const int64_t entry = a_.entries[a_.list(task.sequence, task.head) * a_.stride + page];
    const int64_t number = a_.per_head ? entry : entry * a_.kv_heads + task.head;
    return static_cast<const E*>(a_.cache) + number * 2 * a_.page_size * a_.head_size;
  }

  void attend_stretch(const Task& task, const Rows<P>& rows, int stretch, const Part& part) const {
    Scratch& own = scratch();
    std::fill_n(part.out, int64_t(rows.count) * columns_, 0.0f);
    std::fill_n(part.references, rows.count, 0.0f);
    std::fill_n(part.sums, rows.count, 0.0f);
    std::fill_n(rows.sums, rows.count * kWidth, 0.0f);
    std::fill_n(rows.unseen, rows.count / kMicro, kMicro);
    const int d = a_.head_size;
    const Panels<P> panels{d, a_.page_size, a_.layout, own.keys.of(Panels<P>::key_words(d)),
                           own.values.of(Panels<P>::value_words(d))};
    const int last = std::min(rows.limits[rows.count - 1], (stretch + 1) * kStretch);
    const int begin = std::max(stretch * kStretch, rows.begins[0] / kTile * kTile);
    for (int first = begin; first < last; first += kTile) {
      const int tokens = std::min(kTile, last - first);
      for (int t = 0, some; t < tokens; t += some) {
        const int at = first + t, from = at % a_.page_size;  // pages may have several tiles
        some = std::min(a_.page_size - from, tokens - t);
        panels.take(unit(task, at / a_.page_size), from, t, some);
      }
      panels.end_values(tokens);
      const bool apart = hides_infinite(rows, first, tokens, panels);
      for (int row = 0; row < rows.count; row += together_)
        attend_tile(rows, row, std::min(row + together_, rows.count), first, tokens, panels, apart,
                    part);
    }
    for (int r = 0; r < rows.count; ++r)
      part.sums[r] = sum(load_as<Floats>(rows.sums + r * kWidth));
  }

  // Whether some rows do not see a token of the tile whose value is infinite or NaN.
  static bool hides_infinite(const Rows<P>& rows, int first, int tokens, const Panels<P>& panels) {
    const int left = std::min(rows.begins[rows.count - 1] - first, tokens);
    const int right = std::max(rows.limits[0] - first, 0);
    return (left > 0 && panels.any_infinite(0, left)) ||
           (right < tokens && panels.any_infinite(right, tokens));
  }

  // Rows from one on up to another, with the tile that begins at the list's token `first`; each row
  // apart if the values that another one sees must not reach it.
  void attend_tile(const Rows<P>& rows, int from, int to, int first, int tokens,
                   const Panels<P>& panels, bool apart, const Part& part) const {
    const int begin = seen_by_block(rows, from, first, tokens).begin;
    const int end = seen_by_block(rows, to - kMicro, first, tokens).end;
    float* const logits = scratch().logits.of(int64_t(together_) * kTile);
    constexpr int kMostBlocks = kTogether / (16 * kMicro);
    Floats tops[kMostBlocks];
    std::fill_n(tops, kMostBlocks, splat(kLowest));
    const auto multiply = logits_.cap > 0 ? Block::template multiply_keys<true>
                                          : Block::template multiply_keys<false>;
    for (int t = begin; t < end; t += kColumns)
      for (int r = from; r < to; r += kMicro) {
        const Span span = seen_by_block(rows, r, first, tokens);
        if (t < span.begin || t >= span.end) continue;
        Floats& top = tops[(r - from) / kMicro];
        top = multiply(rows.queries + int64_t(r) * words_, panels.keys_of(t), words_, logits_,
                       part.references + r, logits + (r - from) * kTile + t, top);
      }
    for (int r = from; r < to; r += kMicro) {
      const Span span = seen_by_block(rows, r, first, tokens);
      if (span.empty()) continue;
      float* const x = logits + (r - from) * kTile;
      if (rows.unseen[r / kMicro] > 0 || any_above(tops[(r - from) / kMicro], kBound))
        refer_anew(rows, r, span, first, x, part, columns_);
      weigh<P>(rows, r, span, first, x);
    }
    for (int c = 0; c < columns_; c += kColumns)
      for (int r = from; r < to; r += kMicro) {
        const Span span = seen_by_block(rows, r, first, tokens);
        if (span.empty()) continue;
        const float* const x = logits + (r - from) * kTile;
        const auto* weights = reinterpret_cast<const typename P::Weight*>(x);
        float* const out = part.out + int64_t(r) * columns_ + c;
        if (apart) {
          for (int i = 0; i < kMicro; ++i) {
            const Span seen = seen_by_row(rows, r + i, first, span);
            Block::multiply_values_of_row(i, weights, panels.values_of(c), seen.begin, seen.end, out,
                                          columns_);
          }
          continue;
        }
        const int begin = span.begin / P::kDepth, words = (span.end + P::kDepth - 1) / P::kDepth;
        Block::multiply_values(weights + span.begin, panels.values_of(c) + begin * kColumns,
                               words - begin, out, columns_);
      }
  }

  // Adds another part to the whole.
  void merge(const Task& task, const Part& whole, const Part& more) const {
    for (int r = 0; r < task.queries * a_.group; ++r) {
      if (more.sums[r] == 0) continue;
      const bool only = whole.sums[r] == 0;
      const float top = only ? more.references[r] : std::max(whole.references[r], more.references[r]);
      const float ours = only ? 0 : std::exp2(whole.references[r] - top);
      const float theirs = std::exp2(more.references[r] - top);
      float* out = whole.out + int64_t(r) * columns_;
      const float* other = more.out + int64_t(r) * columns_;
      for (int c = 0; c < a_.head_size; c += kWidth) {
        const Floats x = load_as<Floats>(out + c) * ours + load_as<Floats>(other + c) * theirs;
        std::memcpy(out + c, &x, sizeof x);
      }
      whole.sums[r] = whole.sums[r] * ours + more.sums[r] * theirs;
      whole.references[r] = top;
    }
  }

  void finish(const Task& task, const Part& whole) const {
    for (int r = 0; r < task.queries * a_.group; ++r) {
      float total = whole.sums[r], top = whole.references[r], factor = 1;
      if (a_.sinks != nullptr) {
        const float sink = a_.sinks[head(task, r)] * kLog2E;
        top = std::max(top, sink);
        factor = std::exp2(whole.references[r] - top);
        total = total * factor + std::exp2(sink - top);
      }
      factor /= total;
      E* out = static_cast<E*>(a_.out) + place(task, r, a_.out_stride);
      for (int c = 0; c < a_.head_size; c += kWidth)
        store_rounded<E>(out + c, load_as<Floats>(whole.out + int64_t(r) * columns_ + c) * factor);
      if (a_.lse == nullptr) continue;
      const int64_t token = a_.starts[task.sequence] + task.first + r / a_.group;
      a_.lse[token * a_.kv_heads * a_.group + head(task, r)] = (top + std::log2(total)) * kLn2;
    }
  }

  const PromptAttention& a_;
  const int columns_, words_, together_;
  const Logits logits_;
  std::vector<Task> tasks_;
  int rows_;
};

}  // namespace prompt

}  // namespace KVR_ISA
}  // namespace kvr
