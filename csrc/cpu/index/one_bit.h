// One bit per token and channel (FIER, section 3.2). The bit says whether the key is nearer to the
// minimum or to the maximum of its entry in this channel. The score of a token is q.k with the key
// rounded so; the score of an entry is the logarithm of the mass of its tokens.
//
// The score of a token is q.minimum plus the steps q[c] * (maximum[c] - minimum[c]) of the channels
// whose bit is set. Steps are multiples of a unit so small that they take 16 bits, as two numbers of 8
// bits for products of bytes. Keys are never unpacked.
//
// Record: minimum [head_size], maximum [head_size], in the precision of the cache; bits
// [head_size / 32, rounded up, entry_tokens, 4]: bit k of byte (i, t, j) belongs to channel
// 32 i + 4 k + j.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "index/one_bit_steps.h"
#include "index/tokens.h"

namespace kvr {
namespace KVR_ISA {

// For N queries of a KV head and kBlock records: the constant part of the scores of a record's tokens,
// and the unit of their steps. All records go through each stage together, since the next stage of a
// record waits for its sums.
template <int N>
struct OneBitStart {
  static constexpr float kMost = 32000;  // the sum of all steps; rounding adds up to half a unit each

  Quad start[N], unit[N];  // of the records

  // Queries and their magnitudes are [N, channels], where `channels` is a multiple of kStepChannels,
  // and channels from head_size on are zero. `widths` has room for `channels` floats per record. The
  // result is `steps`, [kBlock, N, 2 * channels].
  template <class E>
  void prepare(const uint8_t* const (&records)[kBlock], int d, int channels, const float* queries,
               const float* magnitudes, float* widths, int8_t* steps) {
    Floats starts[N][kBlock], norms[N][kBlock];
    KVR_UNROLL for (int e = 0; e < kBlock; ++e) {
      const E* lo = reinterpret_cast<const E*>(records[e]);
      Floats first[N], norm[N];
      KVR_UNROLL for (int h = 0; h < N; ++h) first[h] = norm[h] = Floats{};
      for (int c = 0; c < d; c += kWidth) {
        const Floats least = E::load(lo + c), width = E::load(lo + d + c) - least;
        std::memcpy(widths + e * channels + c, &width, sizeof width);
        KVR_UNROLL for (int h = 0; h < N; ++h) {
          first[h] += load_as<Floats>(queries + h * channels + c) * least;
          norm[h] += load_as<Floats>(magnitudes + h * channels + c) * width;
        }
      }
      std::fill(widths + e * channels + d, widths + (e + 1) * channels, 0.0f);
      KVR_UNROLL for (int h = 0; h < N; ++h) starts[h][e] = first[h], norms[h][e] = norm[h];
    }
    Quad inverse[N];
    KVR_UNROLL for (int h = 0; h < N; ++h) {
      const Quad norm = sum_four(norms[h][0], norms[h][1], norms[h][2], norms[h][3]);
      start[h] = sum_four(starts[h][0], starts[h][1], starts[h][2], starts[h][3]);
      inverse[h] = norm > 0 ? kMost / norm : Quad{};
      unit[h] = norm * (1 / kMost);
    }
    KVR_UNROLL for (int e = 0; e < kBlock; ++e)
      for (int c = 0; c < channels; c += kStepChannels)
        KVR_UNROLL for (int h = 0; h < N; ++h)
          store_steps(queries + h * channels + c, widths + e * channels + c, inverse[h][e],
                      steps + 2 * ((e * N + h) * channels + c));
  }
};

template <class E>
struct OneBit : IndexOf<E> {
  static void score(const ScoreTask<E>& t) {
    const int n = t.index.entry_tokens;
    const int64_t stride = kBlock * padded(n);
    thread_local std::vector<float> scores;
    scores.resize(t.group * stride);
    score_blocks(t, [&](const auto& records, int count, const float* q, float* out, int j) {
      score_tokens_of(records, count, t, q, scores.data(), padded(n), stride);
      for (int g = 0; g < t.group; ++g)
        for (int i = 0; i < count; ++i)
          out[g * t.stride + j + i] = log_sum_exp(scores.data() + g * stride + i * padded(n), n);
    });
  }

  static void score_tokens(const ScoreTask<E>& t) {
    const int n = t.index.entry_tokens;
    score_blocks(t, [&](const auto& records, int count, const float* q, float* out, int j) {
      score_tokens_of(records, count, t, q, out + int64_t(j) * n, n, t.stride);
    });
  }

  static void build(const BuildTask<E>& t) {
    const int d = t.index.head_size, n = t.index.entry_tokens;
    E* lo = reinterpret_cast<E*>(t.record);
    uint8_t* bits = t.record + 2 * d * sizeof(E);
    thread_local std::vector<uint8_t> planes;  // [4, tokens]
    for (int block = 0; block < d; block += kStepChannels, bits += 4 * n) {
      planes.assign(4 * n, 0);
      for (int c = block; c < std::min(block + kStepChannels, d); c += kWidth) {
        Floats least, most;
        for (int k = 0; k < kWidth; ++k) {
          const float* row = t.keys + (c + k) * n;
          extremes(row, n, least[k], most[k]);
          const float low = least[k], high = most[k];
          const int place = (c - block + k) / 4;
          uint8_t* plane = planes.data() + k % 4 * n;
          for (int i = 0; i < n; ++i) plane[i] |= (row[i] - low > high - row[i]) << place;
        }
        E::store(lo + c, least);
        E::store(lo + d + c, most);
      }
      for (int i = 0; i < n; ++i)
        for (int j = 0; j < 4; ++j) bits[4 * i + j] = planes[j * n + i];
    }
  }

 private:
  using Eight = float __attribute__((vector_size(32)));

  static int channels_of(int d) { return (d + kStepChannels - 1) / kStepChannels * kStepChannels; }

  static void extremes(const float* row, int n, float& least, float& most) {
    Eight low = load_as<Eight>(row), high = low;
    for (int i = 8; i < n; i += 8) {
      const Eight x = load_as<Eight>(row + i);
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    least = low[0], most = high[0];
    for (int i = 1; i < 8; ++i) {
      least = std::min<float>(least, low[i]);
      most = std::max<float>(most, high[i]);
    }
  }

  // Calls score(records, count of records, queries of the head, output of the head, first record).
  // The queries of a head, [group, channels], are followed by their magnitudes.
  template <class Score>
  static void score_blocks(const ScoreTask<E>& t, const Score& score) {
    const int d = t.index.head_size, channels = channels_of(d), size = t.group * channels;
    thread_local std::vector<float> queries;
    queries.assign(2 * t.heads * size, 0);
    for (int i = 0; i < t.heads * t.group; ++i) {
      float* q = queries.data() + i / t.group * 2 * size + i % t.group * channels;
      scaled_to(q, t.query + i * d, d, t.scale);
      for (int c = 0; c < d; ++c) q[size + c] = std::fabs(q[c]);
    }
    by_blocks(t, t.index.scored_bytes(), [&](int head, int first, int last, float* out) {
      const uint8_t* records[kBlock];  // repeats the last one if there are fewer
      for (int e = 0; e < kBlock; ++e)
        records[e] = t.records.at(std::min(first + e, last - 1), t.first_head + head);
      score(records, last - first, queries.data() + 2 * head * size, out, first);
    });
  }

  // Scores the tokens of `count` records for the query heads of a KV head, out[g * stride]. The scores
  // of adjacent records are `distance` apart.
  static void score_tokens_of(const uint8_t* const (&records)[kBlock], int count,
                              const ScoreTask<E>& t, const float* q, float* out, int distance,
                              int64_t stride) {
    using Fn = decltype(&score_heads<1, 8>);
    static constexpr Fn kFns[][kGroupBlock] = {
        {score_heads<1, 8>, score_heads<2, 8>, score_heads<3, 8>, score_heads<4, 8>,
         score_heads<5, 8>, score_heads<6, 8>, score_heads<7, 8>, score_heads<8, 8>},
        {score_heads<1, 16>, score_heads<2, 16>, score_heads<3, 16>, score_heads<4, 16>,
         score_heads<5, 16>, score_heads<6, 16>, score_heads<7, 16>, score_heads<8, 16>},
        {score_heads<1, 32>, score_heads<2, 32>, score_heads<3, 32>, score_heads<4, 32>,
         score_heads<5, 32>, score_heads<6, 32>, score_heads<7, 32>, score_heads<8, 32>}};
    const int width = __builtin_ctz(std::min(32, t.index.entry_tokens) / 8);
    const int channels = channels_of(t.index.head_size);
    for (int g = 0; g < t.group; g += kGroupBlock)
      kFns[width][std::min(kGroupBlock, t.group - g) - 1](
          records, count, t.index, q + g * channels, q + (t.group + g) * channels, out + g * stride,
          distance, stride);
  }

  // For N query heads, and entries of a multiple of `tokens` tokens.
  template <int N, int tokens>
  static void score_heads(const uint8_t* const (&records)[kBlock], int count, const Index& index,
                          const float* q, const float* magnitudes, float* out, int distance,
                          int64_t stride) {
    const int d = index.head_size, n = index.entry_tokens, channels = channels_of(d);
    thread_local std::vector<float> widths;
    thread_local std::vector<int8_t> steps;
    widths.resize(kBlock * channels);
    steps.resize(kBlock * N * 2 * channels);
    OneBitStart<N> starts;
    starts.template prepare<E>(records, d, channels, q, magnitudes, widths.data(), steps.data());
    constexpr int kTokens = std::min(tokens, (4 * N <= kAccumulators ? 2 : 1) * kWidth);
    for (int e = 0; e < count; ++e)
      for (int token = 0; token < n; token += kTokens)
        add_up<N, kTokens>(records[e] + 2 * d * sizeof(E) + 4 * token, starts, e,
                           steps.data() + e * N * 2 * channels, channels, n,
                           out + e * distance + token, stride);
  }

  // Scores `tokens` adjacent tokens of a record with n tokens.
  template <int N, int tokens>
  static void add_up(const uint8_t* row, const OneBitStart<N>& starts, int e, const int8_t* steps,
                     int channels, int n, float* out, int64_t stride) {
    constexpr int kVectors = std::max(1, tokens / kWidth), kEach = std::min(tokens, kWidth);
    StepSums sums[N][kVectors];
    for (int c = 0; c < channels; c += kStepChannels, row += 4 * n) {
      Words bits[kVectors] = {};
      KVR_UNROLL for (int v = 0; v < kVectors; ++v)
        std::memcpy(&bits[v], row + 4 * kWidth * v, 4 * kEach);
      KVR_UNROLL for (int k = 0; k < 8; ++k) {
        Words set[kVectors];  // of four channels
        KVR_UNROLL for (int v = 0; v < kVectors; ++v) set[v] = bits[v] >> k & 0x01010101u;
        KVR_UNROLL for (int h = 0; h < N; ++h) {
          const StepWords words(steps + 2 * (h * channels + c), k);
          KVR_UNROLL for (int v = 0; v < kVectors; ++v) sums[h][v].add(set[v], words);
        }
      }
    }
    KVR_UNROLL for (int h = 0; h < N; ++h)
      KVR_UNROLL for (int v = 0; v < kVectors; ++v) {
        const Floats total = __builtin_convertvector(sums[h][v].total(), Floats);
        const Floats score = total * starts.unit[h][e] + starts.start[h][e];
        std::memcpy(out + h * stride + v * kWidth, &score, kEach * sizeof(float));
      }
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
