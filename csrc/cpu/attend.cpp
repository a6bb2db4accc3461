// Attention of single tokens over lists of tokens or pages; compiled once per instruction set.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "decode/heads.h"
#include "decode/tiles.h"
#include "kernels.h"

namespace kvr {
namespace KVR_ISA {

constexpr float kNothing = -std::numeric_limits<float>::infinity();  // the logarithm of 0
constexpr int kLeastTask = 256;      // tokens
constexpr int kMostTasks = 32;       // of a list
constexpr int kSerialTokens = 256;   // work below which waking the other threads costs more

// Splits the lists into tasks, each by its own length, and puts the parts together: what a row gets
// depends neither on other rows nor on the number of threads.
template <class Tile>
class Attending {
  using E = typename Tile::E;
  using P = typename Tile::P;
  using Queries = std::conditional_t<Tile::kRows, RowQueries<P>, PageQueries<P>>;

 public:
  explicit Attending(const Attention& a)
      : a_(a), units_(a.rows * a.kv_heads), columns_(prompt::round_up(a.head_size, kTwo)) {
    int64_t tokens = 0;
    first_task_.resize(units_ + 1);
    for (int u = 0; u < units_; ++u) {
      tokens += a.lengths[u];
      first_task_[u + 1] = first_task_[u] + (a.lengths[u] + task_tokens(u) - 1) / task_tokens(u);
    }
    parallel_ = tokens > kSerialTokens;
  }

  void run() {
    const int tasks = first_task_[units_], group = a_.group;
    thread_local std::vector<float> buffer;  // engines in one process may step at the same time
    thread_local std::vector<Partial> partials;
    buffer.resize(int64_t(tasks) * group * columns_);
    partials.resize(int64_t(tasks) * group);
    float* values = buffer.data();
    Partial* parts = partials.data();
#pragma omp parallel if (parallel_)
    {
#pragma omp for schedule(dynamic, 1)
      for (int task = 0; task < tasks; ++task)
        attend_to(task, values + int64_t(task) * group * columns_, parts + int64_t(task) * group);
#pragma omp for schedule(static)
      for (int head = 0; head < units_ * group; ++head)
        merge(head / group, head % group, values, parts);
    }
  }

 private:
  const E* query(int unit) const {
    return static_cast<const E*>(a_.query) + unit / a_.kv_heads * a_.query_stride +
           int64_t(unit % a_.kv_heads) * a_.group * a_.head_size;
  }

  int task_tokens(int unit) const {
    const int share = std::max((a_.lengths[unit] + kMostTasks - 1) / kMostTasks, kLeastTask);
    return prompt::round_up(share, kTile);
  }

  void attend_to(int task, float* values, Partial* parts) const {
    const int unit =
        std::upper_bound(first_task_.begin(), first_task_.end(), task) - first_task_.begin() - 1;
    const int first = (task - first_task_[unit]) * task_tokens(unit);
    const int last = std::min<int>(first + task_tokens(unit), a_.lengths[unit]);
    const int group = a_.group, together = heads_together(group);
    const Queries q(query(unit), group, a_.head_size);
    std::fill_n(values, group * columns_, 0.0f);
    std::fill_n(parts, group, Partial{});
    const List list(a_, unit);
    Tile tile(a_, list, first, std::min(kTile, last - first));
    tile.fetch_all();
    for (int at = first; at < last; at += kTile) {
      const Tile next(a_, list, at + kTile, std::clamp(last - at - kTile, 0, kTile));
      for (int g = 0; g < group; g += together)
        add(std::min(together, group - g), q, g, tile, g == 0 ? next : tile, values, parts,
            a_.weights == nullptr ? nullptr : weights_of(unit, g) + at);
      tile = next;
    }
  }

  // Adds a tile's tokens to the parts of some heads from the g-th on.
  void add(int heads, const Queries& q, int g, const Tile& tile, const Tile& next, float* values,
           Partial* parts, float* wanted) const {
    using Fn = decltype(&Attending::add_to<1>);
    static constexpr auto kFns = functions<Fn>(std::make_index_sequence<kHeadBlock>{});
    (this->*kFns.of[heads - 1])(q, g, tile, next, values + g * columns_, parts + g, wanted);
  }
  template <class Fn>
  struct Functions {
    Fn of[kHeadBlock];
  };
  template <class Fn, size_t... i>
  static constexpr Functions<Fn> functions(std::index_sequence<i...>) {
    return {{&Attending::add_to<i + 1>...}};
  }
  template <int N>
  void add_to(const Queries& q, int g, const Tile& tile, const Tile& next, float* values,
              Partial* parts, float* wanted) const {
    Heads<Tile, N>{a_.head_size, a_.scale * kLog2E, a_.softcap * kLog2E, values, columns_, parts, wanted, a_.weight_stride}
        .add(q, g, tile, next);
  }

  float* weights_of(int unit, int g) const {
    return a_.weights + (int64_t(unit) * a_.group + g) * a_.weight_stride;
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

  // The parts of a query head. Of nothing at all zeros come out.
  void merge(int unit, int g, const float* values, const Partial* parts) const {
    const int d = a_.head_size, group = a_.group;
    const int first = first_task_[unit], last = first_task_[unit + 1];
    const int64_t head = int64_t(unit % a_.kv_heads) * group + g, row = unit / a_.kv_heads;
    const int64_t query_head = row * a_.kv_heads * group + head;
    const float sink = a_.sinks == nullptr ? kNothing : a_.sinks[head] * kLog2E;
    const float rest = a_.rest_lse == nullptr ? kNothing : a_.rest_lse[query_head] * kLog2E;
    float top = std::max({sink, rest, kLeastLogit});
    for (int task = first; task < last; ++task)
      top = std::max(top, parts[task * group + g].reference);
    const float rest_mass = std::exp2(rest - top);
    float total = std::exp2(sink - top) + rest_mass, mass = total;
    for (int task = first; task < last; ++task) {
      const Partial& part = parts[task * group + g];
      const float factor = std::exp2(part.reference - top);
      total += sum(part.totals) * factor;
      mass += sum(part.masses) * factor;
    }
    thread_local std::vector<float> sums, ordered;
    sums.assign(columns_, 0);
    ordered.resize(columns_);
    for (int task = first; task < last; ++task) {
      const float factor = std::exp2(parts[task * group + g].reference - top) / total;
      const float* part = values + (int64_t(task) * group + g) * columns_;
      for (int c = 0; c < columns_; c += kWidth) {
        const Floats x = load_as<Floats>(sums.data() + c) + load_as<Floats>(part + c) * factor;
        std::memcpy(sums.data() + c, &x, sizeof x);
      }
    }
    for (int c = 0; c < d; ++c) ordered[c] = sums[Tile::channel_place(c)];
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
    if (a_.weights != nullptr) exponentiate(weights_of(unit, g), a_.lengths[unit], lse);
  }

  const Attention& a_;
  const int units_, columns_;
  std::vector<int> first_task_;
  bool parallel_;
};

template <class E, KeyLayout layout>
static void attend_to_pages(const Attention& a) {
  if (a.run >= kTile) return Attending<PageTile<E, layout, true>>(a).run();
  return Attending<PageTile<E, layout, false>>(a).run();
}

template <class E>
static void attend_of(const Attention& a) {
  switch (a.layout) {
    case KeyLayout::kRows: return Attending<RowTile<E>>(a).run();
    case KeyLayout::kTransposed: return attend_to_pages<E, KeyLayout::kTransposed>(a);
    case KeyLayout::kAmx:  // of 2 bytes, as its caller has checked
      if constexpr (sizeof(E) == 2) return Attending<PageTile<E, KeyLayout::kAmx, false>>(a).run();
  }
}

void attend(const Attention& a) {
  switch (a.dtype) {
    case DType::kBFloat16: return attend_of<BFloat16>(a);
    case DType::kFloat16: return attend_of<Float16>(a);
    case DType::kFloat32: return attend_of<Float32>(a);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
