// Channel-wise minimum and maximum of the keys (FreeKV, section 3.2; Quest): the score is an upper
// bound of q.k for every key that the record covers: relu(q).max + min(q, 0).min.
//
// Record: minimum [head_size], maximum [head_size]. It grows with every key, so an unfinished
// entry has a record, too. build.cpp makes it, which needs no float keys.
#pragma once

#include "index/linear.h"

namespace kvr {
namespace KVR_ISA {

template <class E>
struct MinMax : IndexOf<E> {
  static void score(const ScoreTask<E>& t) {
    score_linear<E, 2>(t, {t.query, t.heads * t.group * t.index.head_size, Split{}});
  }

 private:
  struct Split {
    void operator()(Floats x, Floats (&parts)[2]) const {
      parts[0] = min(x, Floats{});
      parts[1] = max(x, Floats{});
    }
  };
};

}  // namespace KVR_ISA
}  // namespace kvr
