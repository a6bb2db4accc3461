// Attention of some query heads of a KV head to the tokens of a tile: logits, weights, and sums of
// values.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "decode/tiles.h"
#include "index/linear.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kHeadBlock = kWidth == 16 ? 8 : 4;  // query heads that are computed together
constexpr float kMostAbove = 16;  // powers of two by which a logit may exceed its head's reference
constexpr float kLeastLogit = -1e30f;

// The result of a query head for some of its tokens. Values are weighted by 2^(logit - reference), and
// not yet divided by the sum of these weights. The reference changes only if a logit exceeds it by far.
struct Partial {
  Floats totals;  // sums of the weights that the values are multiplied by
  Floats masses;  // sums of the weights before they are rounded
  float reference;
  bool begun;
};

// Raises a part's reference.
inline void refer_anew(float by, Partial& part, float* values, int columns) {
  part.reference += by;
  if (part.begun) {
    const float factor = std::exp2(-by);
    for (int c = 0; c < columns; ++c) values[c] *= factor;
    part.totals *= factor;
    part.masses *= factor;
  }
  part.begun = true;
}

// The query heads of a unit, in blocks that are computed together.
inline int heads_together(int group) {
  const int blocks = (group + kHeadBlock - 1) / kHeadBlock;
  return (group + blocks - 1) / blocks;
}

// The queries of a unit for keys of pages: [words of a key][heads] for each block of them.
template <class P>
struct PageQueries {
  using Word = typename P::Word;
  PageQueries(const typename P::Element* q, int group, int d) : words_(d / P::kDepth) {
    thread_local std::vector<Word> buffer;
    buffer.resize(group * words_);
    const int together = heads_together(group);
    for (int g = 0; g < group; ++g) {
      const int first = g / together * together, heads = std::min(together, group - first);
      P::pack(q + int64_t(g) * d, d, heads, buffer.data() + first * words_ + g - first);
    }
    all_ = buffer.data();
  }
  const Word* of(int g) const { return all_ + g * words_; }

 private:
  const int words_;
  const Word* all_;
};

// The same for keys in a token-major cache.
template <class P>
struct RowQueries : QueryParts<typename P::Element, 1> {
  RowQueries(const typename P::Element* q, int group, int d)
      : QueryParts<typename P::Element, 1>(q, group * d, Identity{}) {}
};

// N query heads of a unit, from the g-th on.
template <class Tile, int N>
struct Heads {
  using E = typename Tile::E;
  using P = typename Tile::P;
  using Word = typename P::Word;
  using Panel = decltype(P::load(nullptr));
  using Weight = typename P::Weight;
  static constexpr int kVectors = kTile / kWidth;
  // Sums of two vectors each: as many as hide their latency, and leave room in registers.
  static constexpr int kPairs = N * 4 <= kAccumulators && kVectors >= 4 ? 2 : 1;
  static constexpr int kPasses = kVectors / (2 * kPairs);
  static constexpr int kSlices = N * 4 <= (kWidth == 16 ? 16 : 8) ? 2 : 1;  // the same, of channels

  int head_size;
  float scale;     // times log2(e)
  float cap;       // soft cap of logits, times log2(e); 0: none
  float* values;   // [N, columns]
  int columns;
  Partial* parts;  // [N]
  float* wanted;   // [N, wanted_stride]; receives the logits; null: nothing does
  int64_t wanted_stride;

  // Adds a tile. Fetches the next one, evenly, since a burst would hold up the loads.
  template <class Queries>
  void add(const Queries& q, int g, const Tile& tile, const Tile& next) const {
    alignas(64) float x[N][kTile];
    Floats top = score(q, g, tile, next, x);
    if (cap > 0) top = cap_logits(x);
    if (tile.count < kTile)
      for (int h = 0; h < N; ++h)
        for (int t = tile.count; t < kTile; ++t) x[h][Tile::token_place(t)] = kLeastLogit;
    if (!parts[0].begun || any_above(top, kMostAbove)) refer_anew(x);
    if (wanted != nullptr)
      for (int h = 0; h < N; ++h)
        for (int t = 0; t < tile.count; ++t)
          wanted[h * wanted_stride + t] = x[h][Tile::token_place(t)] + parts[h].reference;
    KVR_UNROLL for (int h = 0; h < N; ++h) weigh(x[h], tile.count, parts[h]);
    int c = 0;
    for (; c + kSlices * kTwo <= head_size; c += kSlices * kTwo)
      add_values<kSlices, Rest::kBehind>(tile, next, x, c);
    if constexpr (kSlices > 1)
      for (; c + kTwo <= head_size; c += kTwo) add_values<1, Rest::kBehind>(tile, next, x, c);
    if constexpr (kTwo > kTogether)
      if (c < head_size) add_values<1, Rest::kNone>(tile, next, x, c);
  }

 private:
  // Computes logits less references, in the tile's order of tokens. Returns the highest, by column.
  Floats score(const PageQueries<P>& queries, int g, const Tile& tile, const Tile& next,
               float (&x)[N][kTile]) const {
    const int steps = head_size / P::kDepth;
    Floats top = splat(kLeastLogit);
    for (int pass = 0; pass < kPasses; ++pass) {
      const Word* q = queries.of(g);
      Floats acc[N][2 * kPairs];
      KVR_UNROLL for (int h = 0; h < N; ++h)
        KVR_UNROLL for (int v = 0; v < 2 * kPairs; ++v) acc[h][v] = Floats{};
#pragma GCC unroll 2
      for (int c = 0; c < steps; ++c, q += N) {
        next.template fetch_keys<kPasses>(pass * steps + c);
        KVR_UNROLL for (int k = 0; k < kPairs; ++k) {
          Panel keys[2];
          tile.keys_of(c, pass * kPairs + k, keys);
          KVR_UNROLL for (int v = 0; v < 2; ++v)
            KVR_UNROLL for (int h = 0; h < N; ++h) P::add(acc[h][2 * k + v], q[h], keys[v]);
        }
      }
      KVR_UNROLL for (int h = 0; h < N; ++h)
        KVR_UNROLL for (int v = 0; v < 2 * kPairs; ++v) {
          const Floats logits = acc[h][v] * scale - parts[h].reference;
          top = max(logits, top);
          std::memcpy(x[h] + (pass * 2 * kPairs + v) * kWidth, &logits, sizeof logits);
        }
    }
    return top;
  }

  Floats score(const RowQueries<P>& q, int g, const Tile& tile, const Tile&,
               float (&x)[N][kTile]) const {
    const int d = head_size;
    for (int t = 0; t < tile.count; t += 4) {
      const E* four[4];
      for (int i = 0; i < 4; ++i) four[i] = tile.keys[std::min(t + i, tile.count - 1)];
      Floats acc[N][4];
      products<E, 1, N, 4>(q, int64_t(g) * d, four, d, acc);
      KVR_UNROLL for (int h = 0; h < N; ++h) {
        const Quad logits =
            sum_four(acc[h][0], acc[h][1], acc[h][2], acc[h][3]) * scale - parts[h].reference;
        std::memcpy(x[h] + t, &logits, sizeof logits);
      }
    }
    Floats top = splat(kLeastLogit);
    for (int h = 0; h < N; ++h)
      for (int t = 0; t < tile.count; t += kWidth) top = max(load_as<Floats>(x[h] + t), top);
    return top;
  }

  // Caps logits less references. Returns the highest, by column.
  __attribute__((noinline)) Floats cap_logits(float (&x)[N][kTile]) const {
    const prompt::Logits capped{1, cap};
    Floats top = splat(kLeastLogit);
    for (int h = 0; h < N; ++h)
      for (int t = 0; t < kTile; t += kWidth) {
        const Floats logits = load_as<Floats>(x[h] + t) + parts[h].reference;
        const Floats less = capped.of<true>(logits) - parts[h].reference;
        top = max(less, top);
        std::memcpy(x[h] + t, &less, sizeof less);
      }
    return top;
  }

  // Sets new references for heads whose logits are too high, or that see their first tokens.
  __attribute__((noinline)) void refer_anew(float (&x)[N][kTile]) const {
    for (int h = 0; h < N; ++h) {
      Partial& part = parts[h];
      Floats tops = splat(kLeastLogit);
      for (int t = 0; t < kTile; t += kWidth) tops = max(load_as<Floats>(x[h] + t), tops);
      float top = tops[0];
      for (int i = 1; i < kWidth; ++i) top = std::max(top, tops[i]);
      if (part.begun && top <= kMostAbove) continue;
      for (int t = 0; t < kTile; ++t) x[h][t] -= top;
      kvr::KVR_ISA::refer_anew(top, part, values + h * columns, columns);
    }
  }

  // Replaces logits by weights; by zero behind the last token.
  static void weigh(float* x, int count, Partial& part) {
    Floats w[kVectors];
    KVR_UNROLL for (int v = 0; v < kVectors; ++v) w[v] = load_as<Floats>(x + v * kWidth);
    prompt::exp2_of<5>(w);
    if (count < kTile)
      for (int t = count; t < kTile; ++t) {
        const int at = Tile::token_place(t);
        w[at / kWidth][at % kWidth] = 0;
      }
    Weight* to = reinterpret_cast<Weight*>(x);
    Floats total = {}, mass = {};
    KVR_UNROLL for (int v = 0; v < kVectors; ++v) {
      mass += w[v];
      total += P::rounded(w[v], to + v * kWidth);
    }
    part.masses += mass;
    part.totals += total;
  }

  // Adds the weighted values of S times two vectors of channels, from the c-th on.
  template <int S, Rest rest>
  void add_values(const Tile& tile, const Tile& next, const float (&x)[N][kTile], int c) const {
    Floats acc[N][2 * S];
    KVR_UNROLL for (int h = 0; h < N; ++h)
      KVR_UNROLL for (int v = 0; v < 2 * S; ++v)
        acc[h][v] = load_as<Floats>(values + h * columns + c + v * kWidth);
#pragma GCC unroll 2
    for (int t = 0; t < tile.count; t += P::kDepth) {
      next.template fetch_values<S * kTwo>(c, t);
      const int at = Tile::token_place(t);
      Word weights[N];
      KVR_UNROLL for (int h = 0; h < N; ++h)
        weights[h] = P::weight(reinterpret_cast<const Weight*>(x[h]) + at);
      KVR_UNROLL for (int s = 0; s < S; ++s) {
        Panel panel[2];
        tile.template values_of<rest>(t, c + s * kTwo, panel);
        KVR_UNROLL for (int v = 0; v < 2; ++v)
          KVR_UNROLL for (int h = 0; h < N; ++h) P::add(acc[h][2 * s + v], weights[h], panel[v]);
      }
    }
    KVR_UNROLL for (int h = 0; h < N; ++h)
      KVR_UNROLL for (int v = 0; v < 2 * S; ++v)
        std::memcpy(values + h * columns + c + v * kWidth, &acc[h][v], sizeof(Floats));
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
