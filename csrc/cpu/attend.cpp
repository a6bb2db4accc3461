// Attention of single tokens over lists of tokens or pages; compiled once per instruction set.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "index/linear.h"
#include "kernels.h"
#include "keys.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kTile = 32;            // tokens whose keys are read before their values
constexpr int kTogether = 16;        // tokens of a page whose keys are read together, transposed
constexpr int kVectors = kTogether / kWidth;
constexpr int kGroups = kWidth == 16 ? 2 : 1;  // of these at a time: as many sums as hide their latency
constexpr int kHeadBlock = 4;        // query heads together
constexpr int kLeastTask = 256;      // tokens
constexpr int kMostTasks = 32;       // of a list
constexpr int kSerialTokens = 256;   // work below which waking the other threads costs more

template <class T>
inline void fetch(const T* p, int count) {
  for (size_t b = 0; b < count * sizeof(T); b += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + b);
}

// What a (row, KV head) attends to.
struct List {
  const int32_t* entries;
  int scale, offset;  // pages -> units of a KV head

  List(const Attention& a, int unit)
      : entries(a.entries + (a.per_head ? unit : unit / a.kv_heads) * a.entries_stride),
        scale(a.per_head ? 1 : a.kv_heads),
        offset(a.per_head ? 0 : unit % a.kv_heads) {}
  int64_t operator[](int i) const { return int64_t(entries[i]) * scale + offset; }
};

// Tokens in a cache of rows: each key before its value.
template <class E>
struct RowTile {
  static constexpr KeyLayout kLayout = KeyLayout::kRows;
  const E* keys[kTile];
  int count;

  RowTile(const Attention& a, const List& list, int first, int tokens) : count(tokens) {
    const int shift = __builtin_ctz(a.run);
    for (int t = first; t < first + tokens; ++t) {
      const int64_t token = (list[t >> shift] << shift) + (t & (a.run - 1));
      keys[t - first] = static_cast<const E*>(a.cache) + token * 2 * a.head_size;
    }
  }
  const E* value(int t, int d) const { return keys[t] + d; }
};

// Tokens of pages that hold their keys together, and then their values.
template <class E, KeyLayout layout>
struct PageTile {
  static constexpr KeyLayout kLayout = layout;
  const E* keys[kTile / kTogether];    // of the first channels
  const E* values[kTile / kTogether];
  int count;

  PageTile(const Attention& a, const List& list, int first, int tokens) : count(tokens) {
    constexpr bool kWords = layout == KeyLayout::kAmx;
    const int shift = __builtin_ctz(a.run);
    const int64_t d = a.head_size, p = a.page_size;
    for (int i = 0; i < kTile / kTogether; ++i) {
      const int t = first + std::min(i * kTogether, std::max(tokens - 1, 0) / kTogether * kTogether);
      const int64_t token =
          tokens > 0 ? (list[t >> shift] << shift) + (t & (a.run - 1)) : 0;
      const E* unit = static_cast<const E*>(a.cache) + token / p * 2 * p * d;
      keys[i] = unit + token % p * (kWords ? d : 1);
      values[i] = unit + p * d + token % p * (kWords ? kTogether : d);
    }
  }
  const E* value(int t, int d) const { return values[t / kTogether] + t % kTogether * d; }
};

template <class E>
using TransposedTile = PageTile<E, KeyLayout::kTransposed>;
// Keys are words of two channels, [16 tokens] by [head_size / 2]; values of two tokens, [16 channels]
// by [8] by [head_size / 16], where the latter are as far apart as a page has room for.
template <class E>
using WordTile = PageTile<E, KeyLayout::kAmx>;

// The queries of a unit, as scoring needs them.
template <class E>
struct RowQueries : QueryParts<E, 1> {
  RowQueries(const E* q, int n) : QueryParts<E, 1>(q, n, Identity{}) {}
};
template <class E>
struct PageQueries {
  const E* given;
  const float* all;
  PageQueries(const E* q, int n) : given(q) {
    thread_local std::vector<float> buffer;
    buffer.resize(n);
    to_floats(q, n, buffer.data());
    all = buffer.data();
  }
};

// Of a query head over some of its tokens: values are weighted by the exponentials of scores less
// `top`, and not yet divided by their sum.
struct Partial {
  float top, total;
};

// Splits the lists into tasks, each by its own length, and puts the parts together: what a row gets
// depends neither on other rows nor on the number of threads.
template <class E, template <class> class Tile_, template <class> class Queries_>
class Attending {
  using Tile = Tile_<E>;
  using Queries = Queries_<E>;

 public:
  explicit Attending(const Attention& a) : a_(a), units_(a.rows * a.kv_heads) {
    int64_t tokens = 0;
    first_task_.resize(units_ + 1);
    for (int u = 0; u < units_; ++u) {
      tokens += a.lengths[u];
      first_task_[u + 1] = first_task_[u] + (a.lengths[u] - 1) / task_tokens(u) + 1;
    }
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
        attend_to(task, values + int64_t(task) * group * d, parts + int64_t(task) * group);
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
    return (share + kTile - 1) / kTile * kTile;
  }

  void attend_to(int task, float* values, Partial* parts) const {
    using Fn = decltype(&Attending::attend_heads<1>);
    static constexpr Fn kFns[kHeadBlock] = {&Attending::attend_heads<1>, &Attending::attend_heads<2>,
                                            &Attending::attend_heads<3>, &Attending::attend_heads<4>};
    const int unit =
        std::upper_bound(first_task_.begin(), first_task_.end(), task) - first_task_.begin() - 1;
    const int first = (task - first_task_[unit]) * task_tokens(unit);
    const int last = std::min<int>(first + task_tokens(unit), a_.lengths[unit]);
    const int d = a_.head_size, group = a_.group;
    const Queries q(query(unit), group * d);
    std::fill_n(values, group * d, 0.0f);
    std::fill_n(parts, group, Partial{-std::numeric_limits<float>::infinity(), 0});
    const List list(a_, unit);
    Tile tile(a_, list, first, std::min(kTile, last - first));
    if constexpr (Tile::kLayout == KeyLayout::kRows)
      for (int t = 0; t < tile.count; ++t) fetch(tile.keys[t], 2 * d);
    for (int at = first; at < last; at += kTile) {
      const Tile next(a_, list, at + kTile, std::clamp(last - at - kTile, 0, kTile));
      for (int g = 0; g < group; g += kHeadBlock)
        (this->*kFns[std::min(kHeadBlock, group - g) - 1])(
            q, g, tile, next, values + g * d, parts + g,
            a_.weights == nullptr ? nullptr : weights_of(unit, g) + at);
      tile = next;
    }
  }

  float* weights_of(int unit, int g) const {
    return a_.weights + (int64_t(unit) * a_.group + g) * a_.weight_stride;
  }

  // Adds a tile's tokens to the parts of N heads from the g-th on; the first ones fetch the next tile.
  // Writes the tokens' scores, where they are wanted.
  template <int N>
  void attend_heads(const Queries& q, int g, const Tile& tile, const Tile& next, float* values,
                    Partial* parts, float* wanted) const {
    const int d = a_.head_size;
    alignas(64) float weights[N][kTile];
    score<N>(q, g, tile, next, weights);
    if (wanted != nullptr)
      for (int h = 0; h < N; ++h)
        std::copy_n(weights[h], tile.count, wanted + h * a_.weight_stride);
    KVR_UNROLL for (int h = 0; h < N; ++h) {
      const float correction = weigh(weights[h], tile.count, parts[h]);
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
      add_values<N, kSlice>(tile, weights, c, values);
    for (; c < d; c += kWidth) add_values<N, 1>(tile, weights, c, values);
  }

  // Scores of a tile's tokens, and of others behind them.
  template <int N>
  void score(const Queries& q, int g, const Tile& tile, const Tile& next,
             float (&scores)[N][kTile]) const {
    const int d = a_.head_size;
    if constexpr (Tile::kLayout == KeyLayout::kAmx) {
      for (int i = 0; i < kTile / kTogether; i += kGroups)
        score_words<N>(q, g, tile, next, i, scores);
    } else if constexpr (Tile::kLayout == KeyLayout::kTransposed) {
      const float* queries = q.all + g * d;
      for (int i = 0; i < kTile / kTogether; i += kGroups) {
        const E *keys[kGroups], *ahead[kGroups], *values_ahead[kGroups];
        Floats acc[N][kGroups][kVectors];
        KVR_UNROLL for (int k = 0; k < kGroups; ++k) {
          const bool more = g == 0 && next.count > (i + k) * kTogether;
          keys[k] = tile.keys[i + k];
          ahead[k] = more ? next.keys[i + k] : keys[k];
          values_ahead[k] = more ? next.values[i + k] : tile.values[i + k];
          KVR_UNROLL for (int h = 0; h < N; ++h)
            KVR_UNROLL for (int v = 0; v < kVectors; ++v) acc[h][k][v] = Floats{};
        }
        for (int c = 0, at = 0; c < d; ++c, at += a_.page_size)
          KVR_UNROLL for (int k = 0; k < kGroups; ++k) {
            __builtin_prefetch(ahead[k] + at);
            __builtin_prefetch(values_ahead[k] + c * kTogether);
            KVR_UNROLL for (int v = 0; v < kVectors; ++v) {
              const Floats x = E::load(keys[k] + at + v * kWidth);
              KVR_UNROLL for (int h = 0; h < N; ++h) acc[h][k][v] += x * queries[h * d + c];
            }
          }
        KVR_UNROLL for (int h = 0; h < N; ++h)
          KVR_UNROLL for (int k = 0; k < kGroups; ++k)
            KVR_UNROLL for (int v = 0; v < kVectors; ++v) {
              const Floats x = acc[h][k][v] * a_.scale;
              std::memcpy(scores[h] + (i + k) * kTogether + v * kWidth, &x, sizeof x);
            }
      }
    } else {
      for (int t = 0; t < kTile; t += 4) {
        for (int i = t; g == 0 && i < std::min(t + 4, next.count); ++i) fetch(next.keys[i], 2 * d);
        if (t >= tile.count) continue;
        const E* four[4];
        for (int i = 0; i < 4; ++i) four[i] = tile.keys[std::min(t + i, tile.count - 1)];
        Floats acc[N][4];
        products<E, 1, N, 4>(q, int64_t(g) * d, four, d, acc);
        KVR_UNROLL for (int h = 0; h < N; ++h) {
          const Quad sums = sum_four(acc[h][0], acc[h][1], acc[h][2], acc[h][3]) * a_.scale;
          std::memcpy(scores[h] + t, &sums, sizeof sums);
        }
      }
    }
  }

  // Scores of kGroups stretches of tokens from the i-th on, whose keys are words.
  template <int N>
  void score_words(const Queries& q, int g, const Tile& tile, const Tile& next, int i,
                   float (&scores)[N][kTile]) const {
    const int d = a_.head_size;
    constexpr int kWords = kTogether * 2;  // elements of all tokens' words of two channels
    Floats acc[N][kGroups][kVectors] = {};
    for (int c = 0; c < d / 2; ++c)
      KVR_UNROLL for (int k = 0; k < kGroups; ++k) {
        if (g == 0 && next.count > (i + k) * kTogether) {
          __builtin_prefetch(next.keys[i + k] + c * kWords);
          __builtin_prefetch(next.values[i + k] + (c / 8 * a_.page_size + c % 8 * 2) * kTogether);
        }
        KVR_UNROLL for (int v = 0; v < kVectors; ++v) {
          const E* words = tile.keys[i + k] + c * kWords + v * 2 * kWidth;
#if defined(__AVX512BF16__)
          if constexpr (E::kLanes == 2 * kWidth) {
            const auto keys = load_as<typename E::Lanes>(words);
            KVR_UNROLL for (int h = 0; h < N; ++h) {
              const auto both = load_as<int32_t>(q.given + (g + h) * d + 2 * c);
              E::add_products(acc[h][k][v], (typename E::Lanes)_mm512_set1_epi32(both), keys);
            }
            continue;
          }
#endif
          Floats low, high;
          take_apart(words, low, high);
          KVR_UNROLL for (int h = 0; h < N; ++h) {
            const float* query = q.all + (g + h) * d + 2 * c;
            acc[h][k][v] += low * query[0];
            acc[h][k][v] += high * query[1];
          }
        }
      }
    KVR_UNROLL for (int h = 0; h < N; ++h)
      KVR_UNROLL for (int k = 0; k < kGroups; ++k)
        KVR_UNROLL for (int v = 0; v < kVectors; ++v) {
          const Floats x = acc[h][k][v] * a_.scale;
          std::memcpy(scores[h] + (i + k) * kTogether + v * kWidth, &x, sizeof x);
        }
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
  void add_values(const Tile& tile, const float (&weights)[N][kTile], int c, float* values) const {
    const int d = a_.head_size;
    Floats acc[N][V];
    KVR_UNROLL for (int h = 0; h < N; ++h)
      KVR_UNROLL for (int v = 0; v < V; ++v)
        acc[h][v] = load_as<Floats>(values + h * d + c + v * kWidth);
    if constexpr (Tile::kLayout == KeyLayout::kAmx) {
      const auto add_two = [&](int t, auto second) {
        const E* words = tile.values[t / kTogether] + t % kTogether * kTogether;
        KVR_UNROLL for (int v = 0; v < V; ++v) {
          const int channel = c + v * kWidth, block = channel / kTogether;
          Floats low, high;
          take_apart(words + block * a_.page_size * kTogether + channel % kTogether * 2, low, high);
          KVR_UNROLL for (int h = 0; h < N; ++h) {
            acc[h][v] += low * weights[h][t];
            if constexpr (second) acc[h][v] += high * weights[h][t + 1];
          }
        }
      };
      int t = 0;
      for (; t + 1 < tile.count; t += 2) add_two(t, std::true_type{});
      if (t < tile.count) add_two(t, std::false_type{});
    } else {
      for (int t = 0; t < tile.count; ++t)
        KVR_UNROLL for (int v = 0; v < V; ++v) {
          const Floats x = E::load(tile.value(t, d) + c + v * kWidth);
          KVR_UNROLL for (int h = 0; h < N; ++h) acc[h][v] += x * weights[h][t];
        }
    }
    KVR_UNROLL for (int h = 0; h < N; ++h)
      KVR_UNROLL for (int v = 0; v < V; ++v)
        std::memcpy(values + h * d + c + v * kWidth, &acc[h][v], sizeof(Floats));
  }

  // Scores -> weights.
  static void exponentiate(float* scores, int count, float lse) {
    for (int t = 0; t < count; t += kWidth) {
      const int some = std::min(kWidth, count - t);
      Floats x = {};
      std::memcpy(&x, scores + t, some * sizeof(float));
      x = exp_nonpositive(min(x - lse, splat(0)));
      std::memcpy(scores + t, &x, some * sizeof(float));
    }
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
    const float lse = top + std::log(total);
    if (a_.lse != nullptr) a_.lse[row * a_.kv_heads * group + head] = lse;
    if (a_.weights != nullptr) exponentiate(weights_of(unit, g), a_.lengths[unit], lse);
  }

  const Attention& a_;
  const int units_;
  std::vector<int> first_task_;
  bool parallel_;
};

template <class E>
static void attend_of(const Attention& a) {
  switch (a.layout) {
    case KeyLayout::kRows: return Attending<E, RowTile, RowQueries>(a).run();
    case KeyLayout::kTransposed: return Attending<E, TransposedTile, PageQueries>(a).run();
    case KeyLayout::kAmx:  // of 2 bytes, as its caller has checked
      if constexpr (sizeof(E) == 2) return Attending<E, WordTile, PageQueries>(a).run();
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
