// Which tokens a step drops of those that a layer has kept. Few numbers per token, so one build
// serves every instruction set.
#include "dropping.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace kvr {

namespace {

constexpr float kSpared = std::numeric_limits<float>::infinity();

// The ratings of a row's tokens after the step, the new one last: of one set of weights.
void rate(const TokenDropping& d, int row, int set, int count, const float* before, float* rating) {
  const int last = d.seq_lens[row] - 1;
  const int64_t first = (int64_t(row) * d.sets + set) * d.heads_per_set;
  const float* weights = d.weights + first * d.weight_stride;
  if (d.rating == Rating::kPosition || d.rating == Rating::kStamp) {
    std::copy_n(before, count, rating);
    rating[count] = d.rating == Rating::kPosition ? last : 0;
    if (d.rating == Rating::kPosition) return;
    for (int h = 0; h < d.heads_per_set; ++h, weights += d.weight_stride)
      for (int i = 0; i <= count; ++i)
        if (weights[i] > d.stamped) rating[i] = std::max(rating[i], float(last));
    return;
  }
  std::copy_n(weights, count + 1, rating);
  for (int h = 1; h < d.heads_per_set; ++h) {
    weights += d.weight_stride;
    for (int i = 0; i <= count; ++i) rating[i] += weights[i];
  }
  if (d.rating == Rating::kSum)
    for (int i = 0; i < count; ++i) rating[i] += before[i];
}

// Place of the first of the tokens to drop. Where a budget has no room for more than what is spared,
// the sink stays before recent tokens: the earliest page behind it goes, or the last there is.
int victim_of(const TokenDropping& d, int count, int last, int recent, const int32_t* position,
              const float* rating) {
  float least = kSpared;
  int victim = 0;
  bool in_sink = true;  // the victim so far, a page that is spared
  for (int begin = 0; begin <= count;) {
    const int page = position[begin] / d.page;
    float best = -kSpared;
    int end = begin;
    for (; end <= count && position[end] / d.page == page; ++end) {
      const bool spared = position[end] < d.sink || position[end] > last - recent;
      best = std::max(best, spared ? kSpared : rating[end]);
    }
    if (best < least)
      least = best, victim = begin, in_sink = false;
    else if (in_sink)
      victim = begin, in_sink = position[begin] < d.sink;
    begin = end;
  }
  return victim;
}

}  // namespace

int32_t TokenDropping::recent_of(int32_t budget) const {
  const int64_t part = std::max<int64_t>(int64_t(double(budget) * recent_share), recent);
  return std::min<int64_t>(part, std::max(budget - sink, 0));
}

void drop_tokens(const TokenDropping& d) {
#pragma omp parallel for if (int64_t(d.rows) * d.kv_heads * d.most > 8192)
  for (int unit = 0; unit < d.rows * d.kv_heads; ++unit) {
    const int row = unit / d.kv_heads, head = unit % d.kv_heads;
    const int64_t seat = d.seats[row], place = (seat * d.kv_heads + head) * d.most;
    const int count = d.counts[seat * d.count_stride + head];
    const int budget = d.budgets[seat * d.budget_stride + head], last = d.seq_lens[row] - 1;
    thread_local std::vector<float> ratings;
    thread_local std::vector<int32_t> positions;
    ratings.resize(count + 1);
    positions.resize(count + 1);
    std::copy_n(d.chosen + place, count, positions.data());
    positions[count] = last;
    rate(d, row, d.sets == 1 ? 0 : head, count, d.ratings + place, ratings.data());
    int kept = count + 1;
    if (kept >= budget) {
      const int victim = victim_of(d, count, last, d.recent_of(budget), positions.data(), ratings.data());
      const int next = std::min(victim + d.page, kept);
      std::copy(positions.begin() + next, positions.end(), positions.begin() + victim);
      std::copy(ratings.begin() + next, ratings.end(), ratings.begin() + victim);
      kept -= next - victim;
    }
    kept = std::min(kept, d.most);
    std::copy_n(positions.data(), kept, d.chosen + place);
    std::copy_n(ratings.data(), kept, d.ratings + place);
  }
}

}  // namespace kvr
