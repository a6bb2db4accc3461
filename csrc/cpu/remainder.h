// What the entries that a step leaves out hold together: a part of the softmax, by the mean of each
// entry's values and the attention that the index estimates. All entries are added up as they are
// scored, while their records are at hand. What the step attends to is subtracted afterwards, and so is
// what gets too much of the attention.
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

// What some items of a KV head hold together. An item is what has a score and a mean: an entry or, of
// an entry of several pages, a page. The sum of a query head has the means, by their masses
// [head_size], and then the masses themselves. Items without a mean are left out.
class MeanSums {
 public:
  static int size(int head_size) { return head_size + 1; }

  MeanSums(const Records& records, int head) : records_(records), head_(head), d_(records.index.head_size) {}

  void fetch(int item) const {
    for (int b = 0; b < d_ + 2; b += 64) __builtin_prefetch(field(item) + b, 0, 3);
  }

  // out[g * out_stride] becomes the sum of a query head; masses[g * stride + item].
  void sum(const std::vector<int32_t>& items, int group, const float* masses, int64_t stride, float* out,
           int64_t out_stride) const {
    using Fn = decltype(&MeanSums::sum_heads<1>);
    static constexpr Fn kFns[kHeads] = {&MeanSums::sum_heads<1>, &MeanSums::sum_heads<2>,
                                        &MeanSums::sum_heads<3>, &MeanSums::sum_heads<4>};
    for (int g = 0; g < group; g += kHeads)
      (this->*kFns[std::min(kHeads, group - g) - 1])(items, masses + g * stride, stride,
                                                     out + g * out_stride, out_stride);
  }

 private:
  static constexpr int kHeads = 4;
  static constexpr int kVectors = kWidth == 16 ? 4 : 2;  // of channels together; more have no registers

  const uint8_t* field(int item) const {
    const int entry = item >> records_.span_shift, span = item & ((1 << records_.span_shift) - 1);
    return records_.at(entry, head_) + records_.index.scored_bytes() + span * records_.index.mean_bytes();
  }

  template <int N>
  void sum_heads(const std::vector<int32_t>& items, const float* masses, int64_t stride, float* out,
                 int64_t out_stride) const {
    const int count = items.size();
    thread_local std::vector<const int8_t*> means;
    thread_local std::vector<float> weights;  // [count, N]
    means.resize(count);
    weights.resize(count * N);
    float totals[N] = {};
    for (int i = 0; i < count; ++i) means[i] = reinterpret_cast<const int8_t*>(field(items[i])) + 2;
    for (int i = 0; i < count; ++i) {
      const float scale = value_scale(means[i] - 2);
      const bool some = scale < std::numeric_limits<float>::infinity();
      KVR_UNROLL for (int g = 0; g < N; ++g) {
        const float mass = some ? masses[g * stride + items[i]] : 0;
        totals[g] += mass;
        weights[i * N + g] = some ? mass * scale : 0;
      }
    }
    int c = 0;
    for (; c + kVectors * kWidth <= d_; c += kVectors * kWidth)
      sum_channels<N, kVectors>(means, weights.data(), c, out, out_stride);
    for (; c < d_; c += kWidth) sum_channels<N, 1>(means, weights.data(), c, out, out_stride);
    for (int g = 0; g < N; ++g) out[g * out_stride + d_] = totals[g];
  }

  template <int N, int V>
  static void sum_channels(const std::vector<const int8_t*>& means, const float* weights, int c, float* out,
                           int64_t out_stride) {
    Floats sums[N][V];
    KVR_UNROLL for (int g = 0; g < N; ++g)
      KVR_UNROLL for (int v = 0; v < V; ++v) sums[g][v] = Floats{};
    for (const int8_t* mean : means) {
      KVR_UNROLL for (int v = 0; v < V; ++v) {
        const Floats x = __builtin_convertvector(whole(mean + c + v * kWidth), Floats);
        KVR_UNROLL for (int g = 0; g < N; ++g) sums[g][v] += x * weights[g];
      }
      weights += N;
    }
    KVR_UNROLL for (int g = 0; g < N; ++g)
      KVR_UNROLL for (int v = 0; v < V; ++v)
        std::memcpy(out + g * out_stride + c + v * kWidth, &sums[g][v], sizeof(Floats));
  }

  const Records& records_;
  const int head_, d_;
};

// What a KV head's stretches of scores add up to, less what its step attends to.
class Remainder {
 public:
  // Takes the shares of the n items, by each query head, before they are pooled; see pool_shares. And the
  // sums of the stretches [group, stretches], of `size` each.
  void take(const float* scores, int64_t stride, int group, int n, int stretch, int stretches,
            const Mass* masses, const float* sums, int size) {
    width_ = (n + kWidth - 1) / kWidth * kWidth;
    items_ = n;
    size_ = size;
    shares_.resize(int64_t(group) * width_);
    totals_.resize(group);
    sums_.assign(group * size, 0);
    for (int g = 0; g < group; ++g) {
      const Mass* of_head = masses + int64_t(g) * stretches;
      const Total total = total_of(of_head, n, stretch);
      totals_[g] = total.log();
      for (int i = 0; i * stretch < n; ++i) {
        const float factor = of_head[i].relative_to(total.top) / total.sum;
        const float* part = sums + (int64_t(g) * stretches + i) * size;
        for (int c = 0; c < size; ++c) sums_[g * size + c] += part[c] * factor;
        for (int j = i * stretch; j < std::min((i + 1) * stretch, width_); j += kWidth) {
          const Floats p = load_as<Floats>(scores + g * stride + j) * factor;
          std::memcpy(shares_.data() + int64_t(g) * width_ + j, &p, sizeof p);
        }
      }
    }
  }

  // Leaves the items of pages that the step does not attend to, and that have a share below the gate. A
  // share is the mean over the query heads. out [group, head_size] becomes the mean of their values, and
  // lse [group] the logarithm of their attention, but at most kMostOfAttended of what the index estimates
  // for the items that the step attends to. Where they have less than kLeastShare of the attention, there
  // is no remainder.
  void leave(const Records& records, int head, const std::vector<int32_t>& attended, float gate, float* out,
             float* lse) {
    const int group = totals_.size(), d = records.index.head_size;
    const MeanSums sums(records, head);
    less_.clear();
    listed_.assign(width_, 0);
    const auto subtract = [&](int item) {
      if (item >= items_ || listed_[item]) return;
      listed_[item] = 1;
      less_.push_back(item);
      sums.fetch(item);
    };
    for (const int page : attended)
      for (int part = 0; part < 1 << records.shift; ++part) subtract((page << records.shift) + part);
    const size_t reached = less_.size();
    for (int j = 0; j < items_; j += kWidth) {
      Floats share = {};
      for (int g = 0; g < group; ++g) share += load_as<Floats>(shares_.data() + int64_t(g) * width_ + j);
      if (!any_above(share, gate * group)) continue;
      for (int i = 0; i < kWidth; ++i)
        if (share[i] > gate * group) subtract(j + i);
    }
    subtracted_.resize(sums_.size());
    sums.sum(less_, group, shares_.data(), width_, subtracted_.data(), size_);
    for (int g = 0; g < group; ++g) {
      const float* all = sums_.data() + g * size_;
      const float* less = subtracted_.data() + g * size_;
      const float mass = all[d] - less[d];
      const bool some = mass > kLeastShare;
      float most = 0;
      for (size_t i = 0; i < reached; ++i) most += shares_[int64_t(g) * width_ + less_[i]];
      most *= kMostOfAttended;
      lse[g] = some ? totals_[g] + std::log(std::min(mass, most)) : -std::numeric_limits<float>::infinity();
      for (int c = 0; c < d; ++c) out[g * d + c] = some ? (all[c] - less[c]) / mass : 0;
    }
  }

 private:
  static constexpr float kLeastShare = 1e-5f;  // which the rounding of sums does not reach
  static constexpr float kMostOfAttended = 0.4f;

  int width_ = 0, items_ = 0, size_ = 0;
  std::vector<float> shares_, totals_, sums_, subtracted_;
  std::vector<int32_t> less_;
  std::vector<uint8_t> listed_;
};

}  // namespace KVR_ISA
}  // namespace kvr
