// Low-rank factors of the keys: every key is the mean and a few directions, in parts of its own. The
// score is the logarithm of the mass of the keys so approximated.
//
// Record: low_rank_record.h.
#pragma once

#include "index/low_rank_build.h"
#include "index/low_rank_score.h"

namespace kvr {
namespace KVR_ISA {

template <class E>
struct LowRank : IndexOf<E> {
  static constexpr const char* kParameters = "rank";
  static void score(const ScoreTask<E>& t) {
    const LowRankScorer scorer(t);
    by_blocks(t, t.index.scored_bytes(), [&](int head, int first, int last, float*) {
      scorer.add_up(head, first, last);
    });
    for (int head = 0; head < t.heads; ++head)
      for (int g = 0; g < t.group; ++g)
        scorer.finish(head, g, t.out + head * t.unit_stride + g * t.stride + t.begin * t.index.spans());
  }
  static void build(const BuildTask<E>& t) {
    thread_local LowRankBuilder builder;
    builder.build(t.index, t.keys, t.record);
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
