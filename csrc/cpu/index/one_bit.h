// One bit per token and channel (FIER, section 3.2): a key is near its entry's minimum or its maximum
// in each channel. Scores of tokens are those of the keys so rounded; an entry's is the logarithm of
// their mass.
//
// A token's score is q.minimum plus the steps q[c] * (maximum[c] - minimum[c]) of the channels whose
// bit is set. Steps are added up in 16 bits, as multiples of a unit so small that they cannot
// overflow: keys are never unpacked, and a vector holds many tokens.
//
// Record: minimum [head_size], maximum [head_size], in the precision of the cache; bits
// [head_size, entry_tokens], a byte for 8 tokens, the first one lowest.
#pragma once

#include "index/tokens.h"

namespace kvr {
namespace KVR_ISA {

// Sums of as many tokens.
constexpr int kSums = 2 * kWidth;
using Sums = int16_t __attribute__((vector_size(4 * kWidth)));
using HalfSums = int16_t __attribute__((vector_size(2 * kWidth)));

// Which of kSums tokens have a bit set.
#if defined(__AVX512BW__)
inline Floats to_floats(HalfSums sums) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32((__m256i)sums));
}

struct BitMask {
  __mmask32 mask;
  explicit BitMask(uint32_t bits) : mask(bits) {}
  void add(Sums& sums, Sums step) const {
    sums = (Sums)_mm512_mask_add_epi16((__m512i)sums, mask, (__m512i)sums, (__m512i)step);
  }
};
#else
inline Floats to_floats(HalfSums sums) { return __builtin_convertvector(sums, Floats); }

struct BitMask {
  Sums mask;
  explicit BitMask(uint32_t bits) {
    Sums places;
    for (int i = 0; i < kSums; ++i) places[i] = static_cast<int16_t>(1 << i);
    mask = ((Sums{} + static_cast<int16_t>(bits)) & places) == places;
  }
  void add(Sums& sums, Sums step) const { sums += step & mask; }
};
#endif

// Of N queries of a KV head for one record: what all its tokens' scores begin with, and what the sums
// of their steps are multiples of.
template <int N>
struct OneBitStart {
  static constexpr float kMost = 32000;  // of the sum of all steps; rounding adds half a unit each

  float start[N], unit[N];

  // `whole` gets the steps, [N, head_size], as whole numbers, each in both halves of its place.
  template <class E>
  void prepare(const E* lo, int d, const float* q, float* steps, int32_t* whole) {
    Floats starts[N], norms[N];
    KVR_UNROLL for (int h = 0; h < N; ++h) starts[h] = norms[h] = Floats{};
    for (int c = 0; c < d; c += kWidth) {
      const Floats least = E::load(lo + c), width = E::load(lo + d + c) - least;
      KVR_UNROLL for (int h = 0; h < N; ++h) {
        const Floats x = load_as<Floats>(q + h * d + c), step = x * width;
        std::memcpy(steps + h * d + c, &step, sizeof step);
        starts[h] += x * least;
        norms[h] += (Floats)((Words)step & 0x7fffffffu);
      }
    }
    float inverse[N];
    KVR_UNROLL for (int h = 0; h < N; h += 2) {
      const int other = h + 1 < N ? h + 1 : h;
      const Quad sums = sum_four(starts[h], starts[other], norms[h], norms[other]);
      const Quad inverses = sums > 0 ? kMost / sums : Quad{};
      start[h] = sums[0], start[other] = sums[1];
      unit[h] = sums[2] * (1 / kMost), unit[other] = sums[3] * (1 / kMost);
      inverse[h] = inverses[2], inverse[other] = inverses[3];
    }
    constexpr float kShift = 12582912;  // of which the low bits are zero, and the next number's 1
    KVR_UNROLL for (int h = 0; h < N; ++h)
      for (int c = 0; c < d; c += kWidth) {
        const Words bits = (Words)(load_as<Floats>(steps + h * d + c) * inverse[h] + kShift);
        const Words pair = bits << 16 | (bits & 0xffffu);
        std::memcpy(whole + h * d + c, &pair, sizeof pair);
      }
  }
};

template <class E>
struct OneBit {
  static void score(const ScoreTask<E>& t) {
    const int n = t.index.entry_tokens;
    const int64_t stride = kBlock * padded(n);
    thread_local std::vector<float> scores;
    scores.resize(t.group * stride);
    score_blocks(t, [&](const uint8_t* const* records, int count, const float* q, float* out, int j) {
      score_tokens_of(records, count, t, q, scores.data(), padded(n), stride);
      for (int g = 0; g < t.group; ++g)
        for (int i = 0; i < count; ++i)
          out[g * t.stride + j + i] = log_sum_exp(scores.data() + g * stride + i * padded(n), n);
    });
  }

  static void score_tokens(const ScoreTask<E>& t) {
    const int n = t.index.entry_tokens;
    score_blocks(t, [&](const uint8_t* const* records, int count, const float* q, float* out, int j) {
      score_tokens_of(records, count, t, q, out + int64_t(j) * n, n, t.stride);
    });
  }

  static void build(const BuildTask<E>& t) {
    const int d = t.index.head_size, n = t.index.entry_tokens;
    E* lo = reinterpret_cast<E*>(t.record);
    uint8_t* bits = t.record + 2 * d * sizeof(E);
    for (int c = 0; c < d; c += kWidth) {
      Floats least, most;
      for (int k = 0; k < kWidth; ++k, bits += n / 8) {
        const float* row = t.keys + (c + k) * n;
        Eight low = load_as<Eight>(row), high = low;
        for (int i = 8; i < n; i += 8) {
          const Eight x = load_as<Eight>(row + i);
          low = x < low ? x : low;
          high = x > high ? x : high;
        }
        least[k] = low[0], most[k] = high[0];
        for (int i = 1; i < 8; ++i) {
          least[k] = std::min<float>(least[k], low[i]);
          most[k] = std::max<float>(most[k], high[i]);
        }
        for (int i = 0; i < n; i += 8) {
          const Eight x = load_as<Eight>(row + i);
          bits[i / 8] = bits_of(x - least[k] > most[k] - x);
        }
      }
      E::store(lo + c, least);
      E::store(lo + d + c, most);
    }
  }

 private:
  using Eight = float __attribute__((vector_size(32)));
  using EightInts = int32_t __attribute__((vector_size(32)));

  // The lowest bits of eight numbers.
  static uint8_t bits_of(EightInts numbers) {
#if defined(__AVX2__)
    return _mm256_movemask_ps((__m256)numbers);
#else
    int bits = 0;
    for (int i = 0; i < 8; ++i) bits |= (numbers[i] & 1) << i;
    return bits;
#endif
  }

  // Calls score(records, their number, queries, out of the head, number of the first).
  template <class Score>
  static void score_blocks(const ScoreTask<E>& t, const Score& score) {
    const float* queries = float_queries(t, t.scale);
    by_blocks(t, t.index.record_bytes, [&](int head, int first, int last, float* out) {
      const uint8_t* records[kBlock];
      for (int j = first; j < last; ++j) records[j - first] = t.records.at(j, t.first_head + head);
      score(records, last - first, queries + head * t.group * t.index.head_size, out, first);
    });
  }

  // Scores of the tokens of some records for the query heads of a KV head, out[g * stride]; those of
  // a record are so far from the one's before.
  static void score_tokens_of(const uint8_t* const* records, int count, const ScoreTask<E>& t,
                              const float* q, float* out, int distance, int64_t stride) {
    using Fn = decltype(&score_heads<1, 1>);
    constexpr int kMost = kSums / 8;  // bytes of a mask
    static constexpr Fn kFns[][kGroupBlock] = {
        {score_heads<1, 1>, score_heads<2, 1>, score_heads<3, 1>, score_heads<4, 1>,
         score_heads<5, 1>, score_heads<6, 1>, score_heads<7, 1>, score_heads<8, 1>},
        {score_heads<1, 2>, score_heads<2, 2>, score_heads<3, 2>, score_heads<4, 2>,
         score_heads<5, 2>, score_heads<6, 2>, score_heads<7, 2>, score_heads<8, 2>},
        {score_heads<1, 4>, score_heads<2, 4>, score_heads<3, 4>, score_heads<4, 4>,
         score_heads<5, 4>, score_heads<6, 4>, score_heads<7, 4>, score_heads<8, 4>}};
    const int d = t.index.head_size, n = t.index.entry_tokens;
    const int width = __builtin_ctz(std::min(kMost, n / 8));
    for (int g = 0; g < t.group; g += kGroupBlock)
      kFns[width][std::min(kGroupBlock, t.group - g) - 1](records, count, d, n, q + g * d,
                                                          out + g * stride, distance, stride);
  }

  // For N query heads, by masks of so many bytes. What needs one record's sums waits for them, so all
  // records are prepared first.
  template <int N, int bytes>
  static void score_heads(const uint8_t* const* records, int count, int d, int n, const float* q,
                          float* out, int distance, int64_t stride) {
    thread_local std::vector<float> steps;
    thread_local std::vector<int32_t> numbers;
    steps.resize(kBlock * N * d);
    numbers.resize(kBlock * N * d);
    OneBitStart<N> starts[kBlock];
    for (int i = 0; i < count; ++i)
      starts[i].prepare(reinterpret_cast<const E*>(records[i]), d, q, steps.data() + i * N * d,
                        numbers.data() + i * N * d);
    for (int i = 0; i < count; ++i)
      add_up<N, bytes>(records[i] + 2 * d * sizeof(E), starts[i], numbers.data() + i * N * d, d, n,
                       out + i * distance, stride);
  }

  // The steps of a record's tokens.
  template <int N, int bytes>
  static void add_up(const uint8_t* bits, const OneBitStart<N>& start, const int32_t* whole, int d,
                     int n, float* out, int64_t stride) {
    constexpr int kTokens = std::min(8 * bytes, kSums);
    for (int i = 0; i < n; i += kTokens) {
      const uint8_t* row = bits + i / 8;
      Sums sums[N] = {};
      for (int c = 0; c < d; ++c, row += n / 8) {
        uint32_t word = 0;
        std::memcpy(&word, row, kTokens / 8);
        const BitMask mask(word);
        KVR_UNROLL for (int h = 0; h < N; ++h) mask.add(sums[h], (Sums)(Ints{} + whole[h * d + c]));
      }
      KVR_UNROLL for (int h = 0; h < N; ++h) {
        float* to = out + h * stride + i;
        HalfSums halves[2];
        std::memcpy(halves, &sums[h], sizeof halves);
        KVR_UNROLL for (int k = 0; k * kWidth < kTokens; ++k) {
          const Floats score = to_floats(halves[k]) * start.unit[h] + start.start[h];
          std::memcpy(to + k * kWidth, &score, std::min(kWidth, kTokens) * sizeof(float));
        }
      }
    }
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
