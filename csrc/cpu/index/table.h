// The indexes by their kind.
#pragma once

#include "index/bounding.h"
#include "index/exact.h"
#include "index/landmark.h"
#include "index/low_rank.h"
#include "index/mean.h"
#include "index/mean_std.h"
#include "index/min_max.h"
#include "index/one_bit.h"
#include "index/representative.h"

namespace kvr {
namespace KVR_ISA {

template <class E>
using ScoreFn = void (*)(const ScoreTask<E>&);
template <class E>
using BuildFn = void (*)(const BuildTask<E>&);

template <class E>
inline ScoreFn<E> score_fn_of(IndexKind kind) {
  static constexpr ScoreFn<E> kFns[static_cast<int>(IndexKind::kCount)] = {
      MinMax<E>::score, Mean<E>::score, MeanStd<E>::score, Bounding<E>::score,
      Representative<E>::score, OneBit<E>::score, LowRank<E>::score, Landmark<E>::score,
      Exact<E>::score, nullptr};
  return kFns[static_cast<int>(kind)];
}

// Null if an index scores entries only.
template <class E>
inline ScoreFn<E> token_score_fn_of(IndexKind kind) {
  switch (kind) {
    case IndexKind::kOneBit: return OneBit<E>::score_tokens;
    case IndexKind::kExact: return Exact<E>::score_tokens;
    default: return nullptr;
  }
}

template <class E>
inline BuildFn<E> build_fn_of(IndexKind kind) {
  static constexpr BuildFn<E> kFns[static_cast<int>(IndexKind::kCount)] = {
      MinMax<E>::build, Mean<E>::build, MeanStd<E>::build, Bounding<E>::build,
      Representative<E>::build, OneBit<E>::build, LowRank<E>::build, Landmark<E>::build,
      nullptr, nullptr};
  return kFns[static_cast<int>(kind)];
}

}  // namespace KVR_ISA
}  // namespace kvr
