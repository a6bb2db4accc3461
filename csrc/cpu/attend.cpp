// Attention of single tokens over lists of tokens, in a cache of rows; compiled once per instruction
// set.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "index/linear.h"
#include "kernels.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kTile = 32;            // tokens whose keys are read before their values
constexpr int kHeadBlock = 4;        // query heads together
constexpr int kLeastTask = 128;      // tokens
constexpr int kTasksPerThread = 4;
constexpr int kSerialTokens = 256;   // work below which waking the other threads costs more

// Of a query head over some of its tokens: values are weighted by the exponentials of scores less
// `top`, and not yet divided by their sum.
struct Partial {
  float top, total;
};

// Splits the lists into tasks, and puts the parts together.
template <class E>
class Attending {
 public:
  explicit Attending(const Attention& a) : a_(a), units_(a.rows * a.kv_heads) {
    int64_t tokens = 0;
    for (int u = 0; u < units_; ++u) tokens += a.lengths[u];
    const int64_t tasks = int64_t(kTasksPerThread) * omp_get_max_threads();
    const int64_t share = std::max<int64_t>((tokens + tasks - 1) / tasks, kLeastTask);
    task_tokens_ = (share + kTile - 1) / kTile * kTile;
    first_task_.resize(units_ + 1);
    for (int u = 0; u < units_; ++u)
      first_task_[u + 1] = first_task_[u] + (a.lengths[u] + task_tokens_ - 1) / task_tokens_;
    parallel_ = tokens > kSerialTokens;
  }

  void run() {
    const int tasks = first_task_[units_], group = a_.group, d = a_.head_size;
    thread_local std::vector<float> buffer;  // engines in one process may step at the same time
    thread_local std::vector<Partial> partials;
    buffer.resize(int64_t(tasks) * group * d);
    partials.resize(int64_t(tasks) * group);
    float* values = buffer.data();
    Partial* parts = partials.data();
#pragma omp parallel if (parallel_)
    {
#pragma omp for schedule(dynamic, 1)
      for (int task = 0; task < tasks; ++task)
        attend(task, values + int64_t(task) * group * d, parts + int64_t(task) * group);
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

  // Keys of tokens [first, first + count) of a list, each before its value.
  void find(int unit, int first, int count, const E** rows) const {
    const int32_t* list = a_.entries + unit * a_.entries_stride;
    const E* cache = static_cast<const E*>(a_.cache);
    for (int t = 0; t < count; ++t) {
      const int64_t entry = list[(first + t) / a_.run];
      rows[t] = cache + (entry * a_.run + (first + t) % a_.run) * 2 * a_.head_size;
    }
  }

  void attend(int task, float* values, Partial* parts) const {
    using Fn = decltype(&Attending::attend_heads<1>);
    static constexpr Fn kFns[kHeadBlock] = {&Attending::attend_heads<1>, &Attending::attend_heads<2>,
                                            &Attending::attend_heads<3>, &Attending::attend_heads<4>};
    const int unit =
        std::upper_bound(first_task_.begin(), first_task_.end(), task) - first_task_.begin() - 1;
    const int first = (task - first_task_[unit]) * task_tokens_;
    const int last = std::min<int>(first + task_tokens_, a_.lengths[unit]);
    const int d = a_.head_size, group = a_.group;
    const QueryParts<E, 1> q(query(unit), group * d, Identity{});
    std::fill_n(values, group * d, 0.0f);
    std::fill_n(parts, group, Partial{-std::numeric_limits<float>::infinity(), 0});
    const E* tiles[2][kTile];
    int counts[2] = {std::min(kTile, last - first), 0};
    find(unit, first, counts[0], tiles[0]);
    for (int at = first, now = 0; at < last; at += kTile, now = 1 - now) {
      const int next = 1 - now;
      counts[next] = std::clamp(last - at - kTile, 0, kTile);
      find(unit, at + kTile, counts[next], tiles[next]);
      for (int g = 0; g < group; g += kHeadBlock)
        (this->*kFns[std::min(kHeadBlock, group - g) - 1])(
            q, g, tiles[now], counts[now], tiles[next], g == 0 ? counts[next] : 0, values + g * d,
            parts + g);
    }
  }

  // Adds a tile's tokens to N heads' parts; fetches the next tile meanwhile.
  template <int N>
  void attend_heads(const QueryParts<E, 1>& q, int g, const E* const* rows, int count,
                    const E* const* ahead, int ahead_count, float* values, Partial* parts) const {
    const int d = a_.head_size;
    alignas(64) float weights[N][kTile];
    for (int t = 0; t < kTile; t += 4) {
      for (int i = t; i < std::min(t + 4, ahead_count); ++i)
        for (size_t b = 0; b < 2 * d * sizeof(E); b += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(ahead[i]) + b);
      if (t >= count) continue;
      const E* four[4];
      for (int i = 0; i < 4; ++i) four[i] = rows[std::min(t + i, count - 1)];
      Floats acc[N][4];
      products<E, 1, N, 4>(q, int64_t(g) * d, four, d, acc);
      KVR_UNROLL for (int h = 0; h < N; ++h) {
        const Quad scores = sum_four(acc[h][0], acc[h][1], acc[h][2], acc[h][3]) * a_.scale;
        std::memcpy(weights[h] + t, &scores, sizeof scores);
      }
    }
    KVR_UNROLL for (int h = 0; h < N; ++h) {
      const float correction = weigh(weights[h], count, parts[h]);
      if (correction == 1) continue;
      float* value = values + h * d;
      for (int c = 0; c < d; c += kWidth) {
        const Floats x = load_as<Floats>(value + c) * correction;
        std::memcpy(value + c, &x, sizeof x);
      }
    }
    constexpr int kSlice = kAccumulators * 3 / 2 / N < 4 ? kAccumulators * 3 / 2 / N : 4;
    int c = 0;
    for (; c + kSlice * kWidth <= d; c += kSlice * kWidth)
      add_values<N, kSlice>(rows, count, weights, c, values);
    for (; c < d; c += kWidth) add_values<N, 1>(rows, count, weights, c, values);
  }

  // Scores -> weights, zero behind the last; returns what earlier weights are to be multiplied with.
  static float weigh(float* scores, int count, Partial& part) {
    const float lowest = -std::numeric_limits<float>::infinity();
    std::fill(scores + count, scores + kTile, lowest);
    Floats tops = load_as<Floats>(scores);
    for (int t = kWidth; t < kTile; t += kWidth) tops = max(tops, load_as<Floats>(scores + t));
    float top = part.top;
    for (int i = 0; i < kWidth; ++i) top = std::max(top, tops[i]);
    Floats total = {};
    for (int t = 0; t < kTile; t += kWidth) {
      const Floats weight = exp_nonpositive(load_as<Floats>(scores + t) - top);
      std::memcpy(scores + t, &weight, sizeof weight);
      total += weight;
    }
    const float correction = part.top == top ? 1 : std::exp(part.top - top);
    part = {top, part.total * correction + sum(total)};
    return correction;
  }

  // Values of V vectors of channels from the c-th on, times the weights.
  template <int N, int V>
  void add_values(const E* const* rows, int count, const float (&weights)[N][kTile], int c,
                  float* values) const {
    const int d = a_.head_size;
    Floats acc[N][V];
    KVR_UNROLL for (int h = 0; h < N; ++h)
      KVR_UNROLL for (int v = 0; v < V; ++v)
        acc[h][v] = load_as<Floats>(values + h * d + c + v * kWidth);
    for (int t = 0; t < count; ++t)
      KVR_UNROLL for (int v = 0; v < V; ++v) {
        const Floats x = E::load(rows[t] + d + c + v * kWidth);
        KVR_UNROLL for (int h = 0; h < N; ++h) acc[h][v] += x * weights[h][t];
      }
    KVR_UNROLL for (int h = 0; h < N; ++h)
      KVR_UNROLL for (int v = 0; v < V; ++v)
        std::memcpy(values + h * d + c + v * kWidth, &acc[h][v], sizeof(Floats));
  }

  // The parts of a query head.
  void merge(int unit, int g, const float* values, const Partial* parts) const {
    const int d = a_.head_size, group = a_.group;
    const int first = first_task_[unit], last = first_task_[unit + 1];
    float top = -std::numeric_limits<float>::infinity(), total = 0;
    for (int task = first; task < last; ++task)
      top = std::max(top, parts[task * group + g].top);
    for (int task = first; task < last; ++task) {
      const Partial& part = parts[task * group + g];
      total += part.total * std::exp(part.top - top);
    }
    const int64_t head = int64_t(unit % a_.kv_heads) * group + g, row = unit / a_.kv_heads;
    E* out = static_cast<E*>(a_.out) + row * a_.out_stride + head * d;
    for (int c = 0; c < d; c += kWidth) {
      Floats all = {};
      for (int task = first; task < last; ++task)
        all += load_as<Floats>(values + (int64_t(task) * group + g) * d + c) *
               (std::exp(parts[task * group + g].top - top) / total);
      store_rounded<E>(out + c, all);
    }
    if (a_.lse != nullptr) a_.lse[row * a_.kv_heads * group + head] = top + std::log(total);
  }

  const Attention& a_;
  const int units_;
  int task_tokens_;
  std::vector<int> first_task_;
  bool parallel_;
};

void attend(const Attention& a) {
  switch (a.dtype) {
    case DType::kBFloat16: return Attending<BFloat16>(a).run();
    case DType::kFloat16: return Attending<Float16>(a).run();
    case DType::kFloat32: return Attending<Float32>(a).run();
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
