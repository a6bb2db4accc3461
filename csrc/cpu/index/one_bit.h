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
    thread_local std::vector<float> scores;
    scores.resize(padded(n));
    by_blocks(t, t.index.record_bytes, [&](int head, int first, int last, float* out) {
      for (int j = first; j < last; ++j) {
        const uint8_t* record = t.records.at(j, t.first_head + head);
        const float* q = queries + head * t.group * d;
        for (int g = 0; g < t.group; ++g, q += d) {
          score_tokens(record, d, n, q, scores.data());
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
  static void score_tokens(const uint8_t* record, int d, int n, const float* q, float* scores) {
    const E* lo = reinterpret_cast<const E*>(record);
    const uint8_t* bits = record + 2 * d * sizeof(E);
    std::fill(scores, scores + padded(n), 0.0f);
    Floats base = {};
    Ints places;  // bit of each token within a byte, or a part of one as wide as a vector
    for (int i = 0; i < kWidth; ++i) places[i] = 1 << i % 8;
    for (int c = 0; c < d; c += kWidth) {
      const Floats least = E::load(lo + c), x = load_as<Floats>(q + c);
      const Floats steps = x * (E::load(lo + d + c) - least);
      base += x * least;
      for (int k = 0; k < kWidth; ++k) {
        const uint8_t* row = bits + (c + k) * n / 8;
        for (int i = 0; i < n; i += kWidth) {
          Ints bytes;
          for (int b = 0; b < kWidth; ++b) bytes[b] = i + b < n ? row[(i + b) / 8] : 0;
          if constexpr (kWidth < 8) bytes >>= i % 8;
          const Floats step = (Floats)((Ints)splat(steps[k]) & ((bytes & places) != 0));
          const Floats total = load_as<Floats>(scores + i) + step;
          std::memcpy(scores + i, &total, sizeof total);
        }
      }
    }
    const float all = sum(base);
    for (int i = 0; i < n; ++i) scores[i] += all;
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
