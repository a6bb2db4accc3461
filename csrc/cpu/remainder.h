// What the entries that a step leaves out hold together: a part of the softmax, by the mean of each
// entry's values and the attention that the index estimates.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "index/task.h"
#include "index/value_mean.h"
#include "pooling.h"

namespace kvr {
namespace KVR_ISA {

class Remainder {
 public:
  // Takes the shares of the n entries (of an entry of several pages, those of each), by each query head,
  // before they are pooled; see pool_shares.
  void take(const float* scores, int64_t stride, int group, int n, int stretch, int stretches,
            const Mass* masses) {
    width_ = (n + kWidth - 1) / kWidth * kWidth;
    entries_ = n;
    shares_.resize(int64_t(group) * width_);
    pooled_.assign(width_, 0);
    totals_.resize(group);
    for (int g = 0; g < group; ++g) {
      const Mass* of_head = masses + int64_t(g) * stretches;
      const Total total = total_of(of_head, n, stretch);
      totals_[g] = total.log();
      for (int i = 0; i * stretch < n; ++i) {
        const float factor = of_head[i].relative_to(total.top) / total.sum;
        const int last = std::min((i + 1) * stretch, width_);
        for (int j = i * stretch; j < last; j += kWidth) {
          const Floats p = load_as<Floats>(scores + g * stride + j) * factor;
          std::memcpy(shares_.data() + int64_t(g) * width_ + j, &p, sizeof p);
          const Floats all = load_as<Floats>(pooled_.data() + j) + p / static_cast<float>(group);
          std::memcpy(pooled_.data() + j, &all, sizeof all);
        }
      }
    }
  }

  // Adds up the entries that are not listed and have a share below the gate. A share is the mean over
  // the query heads. Those below kNegligible of an equal share are left out; together they have less than
  // that of the attention. out [group, head_size] becomes the mean of their values, and lse [group] the
  // logarithm of their attention.
  void add_up(const Records& records, int head, const std::vector<uint8_t>& listed, float gate, float* out,
              float* lse) {
    const int group = totals_.size(), shift = records.shift;
    const float least = kNegligible / std::max(entries_, 1);
    chosen_.resize(entries_);
    int count = 0;
    for (int j = 0; j < entries_; ++j) {
      chosen_[count] = j;
      count += (pooled_[j] >= least) & (pooled_[j] < gate) & !listed[j >> shift];
    }
    chosen_.resize(count);
    std::fill_n(out, group * records.index.head_size, 0.0f);
    sums_.assign(group, 0);
    for (size_t i = 0; i < chosen_.size(); i += kTogether) add_some(records, head, i, out);
    for (int g = 0; g < group; ++g) {
      const bool some = sums_[g] > 0;
      lse[g] = some ? totals_[g] + std::log(sums_[g]) : -std::numeric_limits<float>::infinity();
      for (int c = 0; some && c < records.index.head_size; ++c)
        out[g * records.index.head_size + c] /= sums_[g];
    }
  }

 private:
  static constexpr int kTogether = 4, kFetched = 16;
  static constexpr float kNegligible = 0.01f;
  using Bytes = int8_t __attribute__((vector_size(kWidth)));

  const uint8_t* field(const Records& records, int head, size_t i) const {
    const int j = chosen_[i], span = j & ((1 << records.span_shift) - 1);
    return records.at(j >> records.span_shift, head) + records.index.scored_bytes() +
           span * records.index.mean_bytes();
  }

  // kTogether of the chosen entries from the i-th on, or what is left.
  void add_some(const Records& records, int head, size_t i, float* out) {
    const int d = records.index.head_size, group = totals_.size();
    const int count = std::min<size_t>(kTogether, chosen_.size() - i);
    const uint8_t* fields[kTogether];
    float scales[kTogether];
    for (int k = 0; k < kTogether; ++k) {
      if (i + kFetched + k < chosen_.size()) {
        const uint8_t* ahead = field(records, head, i + kFetched + k);
        for (int b = 0; b < d + 2; b += 64) __builtin_prefetch(ahead + b, 0, 3);
      }
      fields[k] = field(records, head, i + std::min(k, count - 1));
      const float scale = value_scale(fields[k]);
      scales[k] = k < count && scale < std::numeric_limits<float>::infinity() ? scale : 0;
    }
    thread_local std::vector<float> weights;
    weights.resize(group * kTogether);
    for (int g = 0; g < group; ++g) {
      const float* shares = shares_.data() + int64_t(g) * width_;
      for (int k = 0; k < kTogether; ++k) {
        const float share = scales[k] > 0 ? shares[chosen_[i + std::min(k, count - 1)]] : 0;
        sums_[g] += share;
        weights[g * kTogether + k] = share * scales[k];
      }
    }
    for (int c = 0; c < d; c += kWidth) {
      Floats means[kTogether];
      KVR_UNROLL for (int k = 0; k < kTogether; ++k)
        means[k] = __builtin_convertvector(load_as<Bytes>(fields[k] + 2 + c), Floats);
      for (int g = 0; g < group; ++g) {
        Floats x = load_as<Floats>(out + g * d + c);
        KVR_UNROLL for (int k = 0; k < kTogether; ++k) x += means[k] * weights[g * kTogether + k];
        std::memcpy(out + g * d + c, &x, sizeof x);
      }
    }
  }

  int width_ = 0, entries_ = 0;
  std::vector<float> shares_, pooled_, totals_, sums_;
  std::vector<int32_t> chosen_;
};

}  // namespace KVR_ISA
}  // namespace kvr
