// Pools the scores of the query heads of a KV head, and finds the best pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

// Pooled scores below this cannot be told apart: exp_nonpositive makes all scores equal that are 87
// or more below the best score of a head, and scores just above that lose bits as they are weighted.
constexpr float kLeastScore = 0x1p-100f;

// Whether scores are pooled as they are. Otherwise each head's scores are pooled as shares of its total
// or of its best score, which are never negative.
inline bool is_raw(Pooling pooling) {
  return pooling == Pooling::kMax || pooling == Pooling::kSum;
}

// The higher number; NaN if either is NaN.
inline float higher(float a, float b) { return a > b || a != a ? a : b; }

inline float highest_of(const float* scores, int padded) {
  Floats top = load_as<Floats>(scores), other = top;
  int j = kWidth;
  for (; j + kWidth < padded; j += 2 * kWidth) {
    top = max(top, load_as<Floats>(scores + j));
    other = max(other, load_as<Floats>(scores + j + kWidth));
  }
  if (j < padded) top = max(top, load_as<Floats>(scores + j));
  top = max(top, other);
  float highest = top[0];
  for (int i = 1; i < kWidth; ++i) highest = std::max(highest, top[i]);
  return highest;
}

// A stretch of the scores of a query head: the highest score, and the sum of exp(score - reference).
// The references of stretches differ by multiples of ln 2, so equal scores of different stretches stay
// equal, unless they are so large that floats have no such precision.
struct Mass {
  float highest, total;

  bool ordinary() const { return std::fabs(highest) < (1 << 19); }
  int exponent() const { return static_cast<int>(std::lrint(highest * 1.44269504f)); }
  float reference() const { return ordinary() ? exponent() * 0.693147181f : highest; }
  // exp(reference() - other.reference())
  float relative_to(const Mass& other) const {
    if (ordinary() && other.ordinary()) return std::ldexp(1.0f, exponent() - other.exponent());
    return std::exp(reference() - other.reference());
  }
};

// Replaces scores[0..n) of a stretch by exp(score - reference). Overwrites what follows them up to a
// multiple of kWidth.
inline Mass exp_scores(float* scores, int n) {
  const int padded = (n + kWidth - 1) / kWidth * kWidth;
  std::fill(scores + n, scores + padded, -std::numeric_limits<float>::infinity());
  Mass mass = {highest_of(scores, padded), 0};
  const bool ordinary = mass.ordinary();
  const int exponent = ordinary ? mass.exponent() : 0;
  const float less = ordinary ? 0 : mass.highest, most = mass.highest - less;
  Floats total = {};
  for (int j = 0; j < padded; j += kWidth) {
    const Floats e = exp_below(min(load_as<Floats>(scores + j) - less, splat(most)), exponent);
    std::memcpy(scores + j, &e, sizeof e);
    total += e;
  }
  mass.total = sum(total);
  return mass;
}

// The sum of the stretches of a query head, relative to the one with the highest score.
struct Total {
  Mass top;
  float sum;

  float log() const { return top.reference() + std::log(sum); }
};

inline Total total_of(const Mass* stretches, int n, int stretch) {
  Total total = {stretches[0], 0};
  for (int i = 1; i * stretch < n; ++i)
    if (stretches[i].highest > total.top.highest) total.top = stretches[i];
  for (int i = 0; i * stretch < n; ++i)
    total.sum += stretches[i].total * stretches[i].relative_to(total.top);
  return total;
}

// Pools scores[g][0..n) into scores[0][0..n). exp_scores has replaced the scores of each stretch, and
// returned masses[g * stretches + i]. The result is the mean over the group of the softmax over j, or the
// highest of the group (kMaxSoftmax), or the sum over the group of exp(score - the highest score of the
// head) (kRelative). norms[g] becomes the logarithm of the divisor of the head. Overwrites what follows
// the scores of a row.
inline void pool_shares(float* scores, int64_t stride, int group, int n, int stretch, int stretches,
                        const Mass* masses, Pooling pooling, float* norms) {
  const bool relative = pooling == Pooling::kRelative, highest = pooling == Pooling::kMaxSoftmax;
  for (int g = 0; g < group; ++g) {
    const Mass* of_head = masses + int64_t(g) * stretches;
    const Total total = total_of(of_head, n, stretch);
    const Mass& top = total.top;
    norms[g] = relative ? top.highest : total.log();
    const float weight = relative ? std::exp(top.reference() - top.highest)
                                  : 1 / (total.sum * (highest ? 1 : group));
    for (int i = 0; i * stretch < n; ++i) {
      float* first = scores + i * stretch;
      const float* from = first + g * stride;
      const float factor = weight * of_head[i].relative_to(top);
      for (int j = 0; j < std::min(stretch, n - i * stretch); j += kWidth) {
        Floats p = load_as<Floats>(from + j) * factor;
        if (g > 0) p = highest ? max(p, load_as<Floats>(first + j)) : p + load_as<Floats>(first + j);
        std::memcpy(first + j, &p, sizeof p);
      }
    }
  }
}

// Pools scores[g][0..n) into scores[0][0..n): the highest score of the group, or the sum.
inline void pool_raw(float* scores, int64_t stride, int group, int n, bool highest) {
  for (int g = 1; g < group; ++g)
    for (int j = 0; j < n; ++j) {
      const float score = scores[g * stride + j];
      scores[j] = highest ? higher(scores[j], score) : scores[j] + score;
    }
}

// Replaces the scores of n entries by scores of their pages: the sum over a page's entries, or the
// highest score.
inline void pool_parts(float* scores, int n, int parts, bool highest) {
  for (int j = 0; j * parts < n; ++j) {
    float total = scores[j * parts];
    for (int i = j * parts + 1; i < std::min(n, (j + 1) * parts); ++i)
      total = highest ? higher(total, scores[i]) : total + scores[i];
    scores[j] = total;
  }
}

// The pooled score of one page, from scores[g * parts + part]; of a softmax the logarithm.
inline float pooled(Pooling pooling, const float* scores, int parts, int group, const float* norms) {
  float best = -std::numeric_limits<float>::infinity(), total = 0;
  if (is_raw(pooling)) {
    for (int part = 0; part < parts; ++part) {
      float pool = scores[part];
      for (int g = 1; g < group; ++g) {
        const float score = scores[g * parts + part];
        pool = pooling == Pooling::kMax ? higher(pool, score) : pool + score;
      }
      best = higher(best, pool);
    }
    return best;
  }
  for (int i = 0; i < group * parts; ++i) best = std::max(best, scores[i] - norms[i / parts]);
  for (int part = 0; part < parts; ++part) {
    float of_part = 0;
    for (int g = 0; g < group; ++g) {
      const float share = std::exp(scores[g * parts + part] - norms[g] - best);
      of_part = pooling == Pooling::kMaxSoftmax ? higher(of_part, share) : of_part + share;
    }
    total += of_part;
  }
  return best + std::log(total);
}

// The logarithms of the divisors of pool_shares, per query head, for scores[g][0..n).
inline void log_norms(const float* scores, int64_t stride, int group, int n, bool relative,
                      double* norms) {
  for (int g = 0; g < group; ++g) {
    const float* s = scores + g * stride;
    const double top = *std::max_element(s, s + n);
    double total = 0;
    for (int j = 0; j < n && !relative; ++j)
      if (s[j] - top > -40) total += std::exp(s[j] - top);
    norms[g] = relative ? top : top + std::log(total);
  }
}

// The logarithm of the score that pool_shares and pool_parts give to entries [begin, end) of a page.
inline double log_share(const float* scores, int64_t stride, int group, int begin, int end,
                        const double* norms, Pooling pooling) {
  double top = -std::numeric_limits<double>::infinity(), total = 0;
  for (int g = 0; g < group; ++g)
    for (int j = begin; j < end; ++j) top = std::max(top, scores[g * stride + j] - norms[g]);
  for (int j = begin; j < end; ++j) {
    double of_entry = 0;
    for (int g = 0; g < group; ++g) {
      const double log = scores[g * stride + j] - norms[g] - top;
      const double share = log > -40 ? std::exp(log) : 0;
      of_entry = pooling == Pooling::kMaxSoftmax ? std::max(of_entry, share) : of_entry + share;
    }
    total += of_entry;
  }
  return top + std::log(total);
}

// The k > 0 best of pages [first, last), in rising order: first those of `always`, then by log_share, which
// does not underflow however far apart the scores are. NaN counts least.
inline void top_k_of_logs(const float* scores, int64_t stride, int group, int n, int parts,
                          int first, int last, int k, Pooling pooling, const std::vector<int32_t>& always,
                          int32_t* out) {
  thread_local std::vector<double> norms, logs;
  thread_local std::vector<int32_t> order;
  norms.resize(group);
  log_norms(scores, stride, group, n, pooling == Pooling::kRelative, norms.data());
  logs.resize(last);
  for (int page = first; page < last; ++page) {
    const double log = log_share(scores, stride, group, page * parts,
                                 std::min(n, (page + 1) * parts), norms.data(), pooling);
    logs[page] = std::isnan(log) ? -std::numeric_limits<double>::infinity() : log;
  }
  for (const int32_t page : always) logs[page] = std::numeric_limits<double>::infinity();
  order.resize(last - first);
  std::iota(order.begin(), order.end(), first);
  std::nth_element(order.begin(), order.begin() + k, order.end(), [&](int32_t a, int32_t b) {
    return logs[a] != logs[b] ? logs[a] > logs[b] : a < b;
  });
  std::copy_n(order.begin(), k, out);
  std::sort(out, out + k);
}

}  // namespace KVR_ISA
}  // namespace kvr
