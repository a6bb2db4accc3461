// One bit per token and channel (FIER, section 3.2): a key is near its entry's minimum or its maximum
// in each channel. The score is the logarithm of the mass of the keys so rounded.
//
// Record: minimum [head_size], maximum [head_size], in the precision of the cache; bits
// [head_size, entry_tokens], a byte for 8 tokens, the first one lowest.
#pragma once

#include "index/tokens.h"

namespace kvr {
namespace KVR_ISA {

template <class E>
struct OneBit {
  static void score(const ScoreTask<E>& t) {
    const float* queries = float_queries(t, t.scale);
    const int d = t.index.head_size, n = t.index.entry_tokens;
    thread_local std::vector<float> scores, steps;
    scores.resize(padded(n));
    steps.resize(d);
    by_blocks(t, t.index.record_bytes, [&](int head, int first, int last, float* out) {
      for (int j = first; j < last; ++j) {
        const uint8_t* record = t.records.at(j, t.first_head + head);
        const float* q = queries + head * t.group * d;
        for (int g = 0; g < t.group; ++g, q += d) {
          score_tokens(record, d, n, q, steps.data(), scores.data());
          out[g * t.stride + j] = log_sum_exp(scores.data(), n);
        }
      }
    });
  }

  static void build(const BuildTask<E>& t) {
    const int d = t.index.head_size, n = t.index.entry_tokens;
    E* lo = reinterpret_cast<E*>(t.record);
    uint8_t* bits = t.record + 2 * d * sizeof(E);
    std::fill(bits, bits + d * n / 8, 0);
    for (int c = 0; c < d; c += kWidth) {
      Floats least, most;
      for (int k = 0; k < kWidth; ++k) {
        const float* row = t.keys + (c + k) * n;
        least[k] = *std::min_element(row, row + n);
        most[k] = *std::max_element(row, row + n);
        for (int i = 0; i < n; ++i)
          if (row[i] - least[k] > most[k] - row[i])
            bits[((c + k) * n + i) / 8] |= 1 << i % 8;
      }
      E::store(lo + c, least);
      E::store(lo + d + c, most);
    }
  }

 private:
  static void score_tokens(const uint8_t* record, int d, int n, const float* q, float* steps,
                           float* scores) {
    const E* lo = reinterpret_cast<const E*>(record);
    const uint8_t* bits = record + 2 * d * sizeof(E);
    Floats base = {};
    for (int c = 0; c < d; c += kWidth) {
      const Floats least = E::load(lo + c), x = load_as<Floats>(q + c);
      const Floats step = x * (E::load(lo + d + c) - least);
      std::memcpy(steps + c, &step, sizeof step);
      base += x * least;
    }
    const float start = sum(base);
    int i = 0;
    for (; i + 4 * kWidth <= n; i += 4 * kWidth) add_steps<4>(bits, d, n, i, start, steps, scores);
    for (; i < n; i += kWidth) add_steps<1>(bits, d, n, i, start, steps, scores);
  }

  // Scores of T * kWidth tokens from the i-th on.
  template <int T>
  static void add_steps(const uint8_t* bits, int d, int n, int i, float start, const float* steps,
                        float* scores) {
    Ints places;  // of the tokens' bits
    for (int k = 0; k < kWidth; ++k) places[k] = 1 << k;
    Floats totals[T];
    KVR_UNROLL for (int v = 0; v < T; ++v) totals[v] = splat(start);
    for (int c = 0; c < d; ++c, bits += n / 8) {
      const Ints step = (Ints)splat(steps[c]);
      KVR_UNROLL for (int v = 0; v < T; ++v) {
        const Ints word = Ints{} + bits_of(bits, i + v * kWidth, n);
        totals[v] += (Floats)(step & ((word & places) == places));
      }
    }
    std::memcpy(scores + i, totals, sizeof totals);
  }

  // Of kWidth tokens from the i-th on, as many as there are.
  static int bits_of(const uint8_t* row, int i, int n) {
    const int bits = row[i / 8];
    if (kWidth < 8) return bits >> i % 8;
    return kWidth > 8 && i + 8 < n ? bits | row[i / 8 + 1] << 8 : bits;
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
