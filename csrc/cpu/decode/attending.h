// Attention of rows that decode: its tasks, and how their parts are put together.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "decode/heads.h"
#include "kernels.h"

namespace kvr {
namespace KVR_ISA {

constexpr float kNothing = -std::numeric_limits<float>::infinity();  // the logarithm of 0
constexpr int kLeastTask = 256;      // tokens
constexpr int kMostTasks = 32;       // of a list
constexpr int kSerialTokens = 256;   // work below which waking the other threads costs more

// Tokens of a list, from one on up to another. Those up to `fetched` are wanted soon.
struct Span {
  int first, last, fetched;
};

// Where the weights of a unit's g-th head go.
inline float* weights_of(const Attention& a, int unit, int g) {
  return a.weights + (int64_t(unit) * a.group + g) * a.weight_stride;
}

// Splits the lists into tasks, each by its own length, and puts the parts together: what a row gets
// depends neither on other rows nor on the number of threads. The queries of a row meet the tokens that all
// of them see together, and the others one after the other, as a single query does. An Adder adds spans of tokens to the parts of heads, kAtOnce tokens at a time.
template <class Adder>
class Attending {
  using E = typename Adder::E;

 public:
  explicit Attending(const Attention& a)
      : a_(a), units_(a.rows * a.kv_heads), columns_(prompt::round_up(a.head_size, kTwo)) {
    int64_t tokens = 0;
    first_task_.resize(units_ + 1);
    first_part_.resize(units_ + 1);
    first_head_.resize(units_ + 1);
    for (int u = 0; u < units_; ++u) {
      const int tasks = (a.lengths[u] + task_tokens(u) - 1) / task_tokens(u);
      tokens += int64_t(a.lengths[u]) * queries(u);
      first_task_[u + 1] = first_task_[u] + tasks;
      first_part_[u + 1] = first_part_[u] + int64_t(tasks) * heads(u);
      first_head_[u + 1] = first_head_[u] + heads(u);
    }
    parallel_ = tokens > kSerialTokens;
  }

  void run() {
    const int tasks = first_task_[units_], all_heads = first_head_[units_];
    thread_local std::vector<float> buffer;  // engines in one process may step at the same time
    thread_local std::vector<Partial> partials;
    buffer.resize(first_part_[units_] * columns_);
    partials.resize(first_part_[units_]);
    float* values = buffer.data();
    Partial* parts = partials.data();
#pragma omp parallel if (parallel_)
    {
#pragma omp for schedule(dynamic, 1)
      for (int task = 0; task < tasks; ++task) attend_to(task, values, parts);
#pragma omp for schedule(static)
      for (int head = 0; head < all_heads; ++head) {
        const int unit = unit_of(first_head_, head);
        merge(unit, head - first_head_[unit], values, parts);
      }
    }
  }

 private:
  int queries(int unit) const { return a_.queries(unit / a_.kv_heads); }
  int heads(int unit) const { return queries(unit) * a_.group; }

  // Of the i-th query of a unit.
  const E* query(int unit, int i) const {
    const int64_t row = a_.first_query(unit / a_.kv_heads) + i;
    return static_cast<const E*>(a_.query) + row * a_.query_stride +
           int64_t(unit % a_.kv_heads) * a_.group * a_.head_size;
  }

  // Of all queries of a unit, side by side.
  const E* all_queries(int unit) const {
    const int count = queries(unit), elements = a_.group * a_.head_size;
    if (count == 1) return query(unit, 0);
    thread_local std::vector<E> together;
    together.resize(count * elements);
    for (int i = 0; i < count; ++i)
      std::copy_n(query(unit, i), elements, together.data() + i * elements);
    return together.data();
  }

  static int unit_of(const std::vector<int>& firsts, int i) {
    return std::upper_bound(firsts.begin(), firsts.end(), i) - firsts.begin() - 1;
  }

  int task_tokens(int unit) const {
    const int share = std::max((a_.lengths[unit] + kMostTasks - 1) / kMostTasks, kLeastTask);
    return prompt::round_up(share, kTile);
  }

  void attend_to(int task, float* all_values, Partial* all_parts) const {
    const int unit = unit_of(first_task_, task), all = heads(unit);
    const int first = (task - first_task_[unit]) * task_tokens(unit);
    const int last = std::min<int>(first + task_tokens(unit), a_.lengths[unit]);
    const int64_t part = first_part_[unit] + int64_t(task - first_task_[unit]) * all;
    float* const values = all_values + part * columns_;
    Partial* const parts = all_parts + part;
    std::fill_n(values, all * columns_, 0.0f);
    std::fill_n(parts, all, Partial{});
    const int seen = a_.lengths[unit] - (queries(unit) - 1);  // by the first query, and so by all
    const int shared = seen >= last ? last : std::max(first, first + (seen - first) / Adder::kAtOnce * Adder::kAtOnce);
    const Adder adder(a_, unit, columns_);
    if (first < shared) adder.add(all_queries(unit), all, {first, shared, last}, values, parts);
    for (int i = 0; shared < last && i < queries(unit); ++i) {
      const int begin = i * a_.group, last_seen = std::min(last, seen + i);
      if (last_seen > shared)
        adder.add(query(unit, i), a_.group, {shared, last_seen, last_seen}, values + begin * columns_,
                  parts + begin);
      else if (shared == first)
        std::fill_n(parts + begin, a_.group, Partial{{}, {}, kLeastLogit, false});
    }
  }

  // Logits, in powers of two, -> weights.
  static void exponentiate(float* logits, int count, float lse) {
    for (int t = 0; t < count; t += kWidth) {
      const int some = std::min(kWidth, count - t);
      Floats x[1] = {};
      std::memcpy(x, logits + t, some * sizeof(float));
      x[0] = min(splat(0), x[0] - lse);
      prompt::exp2_of<5>(x);
      std::memcpy(logits + t, x, some * sizeof(float));
    }
  }

  // The parts of a unit's g-th head, of all its queries. Of nothing at all zeros come out.
  void merge(int unit, int g, const float* values, const Partial* parts) const {
    const int d = a_.head_size, all = heads(unit), tasks = first_task_[unit + 1] - first_task_[unit];
    const int64_t head = int64_t(unit % a_.kv_heads) * a_.group + g % a_.group;
    const int64_t row = a_.first_query(unit / a_.kv_heads) + g / a_.group;
    values += first_part_[unit] * columns_;
    parts += first_part_[unit];
    const int64_t query_head = row * a_.kv_heads * a_.group + head;
    const float sink = a_.sinks == nullptr ? kNothing : a_.sinks[head] * kLog2E;
    const float rest = a_.rest_lse == nullptr ? kNothing : a_.rest_lse[query_head] * kLog2E;
    float top = std::max({sink, rest, kLeastLogit});
    for (int task = 0; task < tasks; ++task) top = std::max(top, parts[task * all + g].reference);
    const float rest_mass = std::exp2(rest - top);
    float total = std::exp2(sink - top) + rest_mass, mass = total;
    for (int task = 0; task < tasks; ++task) {
      const Partial& part = parts[task * all + g];
      const float factor = std::exp2(part.reference - top);
      total += sum(part.totals) * factor;
      mass += sum(part.masses) * factor;
    }
    thread_local std::vector<float> sums, ordered;
    sums.assign(columns_, 0);
    ordered.resize(columns_);
    for (int task = 0; task < tasks; ++task) {
      const float factor = std::exp2(parts[task * all + g].reference - top) / total;
      const float* part = values + (int64_t(task) * all + g) * columns_;
      for (int c = 0; c < columns_; c += kWidth) {
        const Floats x = load_as<Floats>(sums.data() + c) + load_as<Floats>(part + c) * factor;
        std::memcpy(sums.data() + c, &x, sizeof x);
      }
    }
    for (int c = 0; c < d; ++c) ordered[c] = sums[Adder::channel_place(c)];
    if (rest_mass > 0) {
      const float* values = a_.rest_values + query_head * d;
      for (int c = 0; c < d; ++c) ordered[c] += values[c] * (rest_mass / total);
    }
    const int64_t place = row * a_.out_stride + head * d;
    if (a_.out_floats)
      std::copy_n(ordered.data(), d, static_cast<float*>(a_.out) + place);
    else
      for (int c = 0; c < d; c += kWidth)
        store_rounded<E>(static_cast<E*>(a_.out) + place + c, load_as<Floats>(ordered.data() + c));
    const float lse = top + std::log2(mass);
    if (a_.lse != nullptr) a_.lse[query_head] = lse * kLn2;
    if (a_.weights != nullptr) exponentiate(weights_of(a_, unit, g), a_.lengths[unit], lse);
  }

  const Attention& a_;
  const int units_, columns_;
  std::vector<int> first_task_, first_head_;
  std::vector<int64_t> first_part_;
  bool parallel_;
};

}  // namespace KVR_ISA
}  // namespace kvr
