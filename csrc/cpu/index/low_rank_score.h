// How queries score the records of a low-rank index.
//
// In whole numbers up to the logits of tokens: queries are rounded to 8 bits for the directions and
// to kMeanMost for the mean, on which all tokens of the entry depend; their products with the
// directions, times these' scales, to 8 bits again, in units of a power of two. Four entries go
// through each of the stages (low_rank_stages.h) together, since a stage waits for the one before.
#pragma once

#include <algorithm>
#include <vector>

#include "index/low_rank_stages.h"

namespace kvr {
namespace KVR_ISA {

constexpr float kFarthest = 100;  // powers of two; masses beyond it are summed anew

// 2^x within 2^-kFarthest and 2^kFarthest, relative error below 3e-6.
inline Floats mass_of(Floats x) {
  constexpr float kShift = 12582912;
  x = min(max(x, splat(-kFarthest)), splat(kFarthest));
  const Floats shifted = x + kShift, f = x - (shifted - kShift);
  Floats p = splat(9.5701003e-3f);
  p = p * f + 5.5917863e-2f;
  p = p * f + 2.4024744e-1f;
  p = p * f + 6.9312179e-1f;
  p = p * f + 9.9999928e-1f;
  return (Floats)((Words)p + ((Words)shifted << 23));
}

// log(x) for positive normal x, error below 1e-6.
inline Floats log_positive(Floats x) {
  constexpr int32_t kLeast = 0x3f3504f3;  // sqrt(1/2): mantissas are from there on
  const Ints bits = (Ints)x - kLeast;
  const Floats m = (Floats)((bits & 0x7fffff) + kLeast);
  const Floats s = (m - 1) / (m + 1), t = s * s;
  const Floats series = (((t / 9 + 1 / 7.0f) * t + 0.2f) * t + 1 / 3.0f) * t + 1;
  return __builtin_convertvector(bits >> 23, Floats) * kLn2 + 2 * s * series;
}

inline bool all_of(Ints conditions) {
  int64_t words[kWidth / 2];
  std::memcpy(words, &conditions, sizeof words);
  for (int i = 1; i < kWidth / 2; ++i) words[0] &= words[i];
  return words[0] == -1;
}

// Of a task's entries, for whatever elements the queries were of: the mass of each entry first, and
// the mean's part of its score; the logarithms of many at once then.
class LowRankScorer {
 public:
  static constexpr int kHeads = 4;      // query heads together; more have no registers
  static constexpr int kMostSpans = 2;  // pages of an entry

  template <class E>
  explicit LowRankScorer(const ScoreTask<E>& t)
      : index_(t.index), records_(t.records), fields_(t.index),
        queries_(float_queries(t, 1), t.heads * t.group, rank_of(t.index), t.index.head_size, t.scale),
        first_head_(t.first_head), group_(t.group), begin_(t.begin), count_(t.end - t.begin),
        stride_(padded(count_ + kBlock)), spans_(t.index.spans()) {
    thread_local std::vector<float> buffer;
    buffer.resize((1 + spans_) * t.heads * t.group * stride_);
    means_ = buffer.data();
    masses_ = means_ + t.heads * t.group * stride_;
  }

  // Of entries [first, last) of a KV head, at most kBlock.
  void add_up(int head, int first, int last) const {
    using Fn = decltype(&LowRankScorer::add_up_heads<1>);
    static constexpr Fn kFns[kHeads] = {
        &LowRankScorer::add_up_heads<1>, &LowRankScorer::add_up_heads<2>,
        &LowRankScorer::add_up_heads<3>, &LowRankScorer::add_up_heads<4>};
    for (int g = 0; g < group_; g += kHeads)
      (this->*kFns[std::min(kHeads, group_ - g) - 1])(head, head * group_ + g, first, last);
  }

  // Scores of all entries, or of their pages, for a query head of a KV head.
  void finish(int head, int g, float* out) const {
    for (int span = 0; span < spans_; ++span) finish_span(head, g, span, out + span);
  }

 private:
  const uint8_t* record(int at, int head) const {
    return records_.at(begin_ + at, first_head_ + head);
  }
  float* masses_of(int i, int span) const { return masses_ + (int64_t(i) * spans_ + span) * stride_; }

  void finish_span(int head, int g, int span, float* out) const {
    const int i = head * group_ + g, spans = spans_;
    const float* masses = masses_of(i, span);
    const float* means = means_ + i * stride_;
    for (int j = 0; j < count_; j += kWidth) {
      const int some = std::min(kWidth, count_ - j);
      const Floats mass = load_as<Floats>(masses + j);
      const Floats score = load_as<Floats>(means + j) + log_positive(mass);
      if (spans == 1) {
        std::memcpy(out + j, &score, some * sizeof(float));
      } else {
        for (int k = 0; k < some; ++k) out[(j + k) * spans] = score[k];
      }
      const Ints near = (mass > 0x1p-60f) & (mass < 0x1p99f);
      if (all_of(near)) continue;
      for (int k = 0; k < some; ++k)
        if (!near[k]) out[(j + k) * spans] = means[j + k] + far_mass(record(j + k, head), i, span);
    }
  }

  // For N query heads from the task's i-th on.
  template <int N>
  void add_up_heads(int head, int i, int first, int last) const {
    const int d = index_.head_size, n = index_.entry_tokens, count = last - first;
    const LowRankFields fields = fields_;  // nothing that is written below is part of these
    const RoundedQueries queries = queries_;
    const uint8_t* records[kBlock];
    alignas(64) int32_t totals[kBlock][N][kMostRank];
    Floats masses[kMostSpans][kBlock][N], means[kBlock][N];
    Along along[kBlock][N];
    Quad mean_scales = {};
    for (int e = 0; e < kBlock; ++e)
      KVR_UNROLL for (int g = 0; g < N; ++g) means[e][g] = Floats{};
    for (int e = 0; e < count; ++e) {
      records[e] = record(first - begin_ + e, head);
      mean_scales[e] = mean_scale_of(records[e]);
      along_mean<N>(records[e] + fields.mean, d, queries.halves(i), means[e]);
      products<N>(records[e], fields, d, queries, i, totals[e]);
    }
    for (int e = 0; e < count; ++e) round_products<N>(records[e], totals[e], along[e]);
    float units[N];
    KVR_UNROLL for (int g = 0; g < N; ++g) units[g] = queries.factors(i + g).directions;
    for (int span = 0; span < spans_; ++span)
      for (int e = count; e < kBlock; ++e)
        KVR_UNROLL for (int g = 0; g < N; ++g) masses[span][e][g] = Floats{};
    const int of_span = n / spans_;
    const bool halves = spans_ == 2 && of_span == 16;  // spans that are added up together
    for (int e = 0; e < count; ++e)
      for (int span = 0; span < (halves ? 1 : spans_); ++span) {
        Floats first_half[N] = {}, second_half[N] = {};
        for (int token = span * of_span; token < (span + 1) * of_span; token += kTokens)
          add_masses<N>(records[e] + fields.coefficients + token, n, fields.pairs,
                        std::min(kTokens, n - token), units, along[e], first_half, second_half);
        KVR_UNROLL for (int g = 0; g < N; ++g) {
          masses[span][e][g] = halves ? first_half[g] : first_half[g] + second_half[g];
          if (halves) masses[1][e][g] = second_half[g];
        }
      }
    for (int span = 0; span < spans_; ++span)
      KVR_UNROLL for (int g = 0; g < N; ++g) {
        const auto& of = masses[span];
        const Quad mass = sum_four(of[0][g], of[1][g], of[2][g], of[3][g]);
        std::memcpy(masses_of(i + g, span) + first - begin_, &mass, sizeof mass);
      }
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const Quad mean = sum_four(means[0][g], means[1][g], means[2][g], means[3][g]) * mean_scales *
                        queries.factors(i + g).mean;
      std::memcpy(means_ + (i + g) * stride_ + first - begin_, &mean, sizeof mean);
    }
  }

  // Adds the masses of at most kTokens tokens, relative to the mean's, for N query heads: of the first 16,
  // and of the others.
  template <int N>
  static void add_masses(const uint8_t* coefficients, int64_t stride, int pairs, int count,
                         const float (&units)[N], const Along (&along)[N], Floats (&totals)[N],
                         Floats (&others)[N]) {
    TokenSums<N> sums;
    sum_tokens<N>(coefficients, stride, pairs, count, along, sums);
    for (int t = 0; t < 16; t += kWidth)
      KVR_UNROLL for (int g = 0; g < N; ++g)
        totals[g] += mass_of(sums.at(g, t) * (along[g].unit * units[g]));
    if (count <= 16) return;
    for (int t = 16; t < kTokens; t += kWidth)
      KVR_UNROLL for (int g = 0; g < N; ++g)
        others[g] += mass_of(sums.at(g, t) * (along[g].unit * units[g]));
  }

  // Logarithm of the mass relative to the mean's, however far from it.
  float far_mass(const uint8_t* record, int i, int span) const {
    const int n = index_.entry_tokens, begin = span * n / spans_, end = (span + 1) * n / spans_;
    alignas(64) int32_t totals[1][kMostRank];
    Along along[1];
    products<1>(record, fields_, index_.head_size, queries_, i, totals);
    round_products<1>(record, totals, along);
    const float unit = along[0].unit * queries_.factors(i).directions * kLn2;
    thread_local std::vector<float> scores;
    scores.resize(padded(end - begin));
    for (int token = begin; token < end; token += kTokens) {
      TokenSums<1> sums;
      const int count = std::min(kTokens, end - token);
      sum_tokens<1>(record + fields_.coefficients + token, n, fields_.pairs, count, along, sums);
      for (int t = 0; t < count; t += kWidth) {
        const Floats some = sums.at(0, t) * unit;
        std::memcpy(scores.data() + token - begin + t, &some, sizeof some);
      }
    }
    return log_sum_exp(scores.data(), end - begin);
  }

  const Index& index_;
  const Records& records_;
  const LowRankFields fields_;
  const RoundedQueries queries_;
  const int first_head_, group_, begin_, count_;
  const int64_t stride_;
  const int spans_;  // scores of an entry
  float* masses_;  // [heads * group, spans, stride]; of the entries, relative to their means'
  float* means_;   // [heads * group, stride]; the means' scores
};

}  // namespace KVR_ISA
}  // namespace kvr
