// The indexes that have kernels; a kind is the place in their list.
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

// One line per index: its name in Python, and its struct.
#define KVR_INDEXES(X)               \
  X(min_max, MinMax)                 \
  X(mean, Mean)                      \
  X(mean_std, MeanStd)               \
  X(bounding, Bounding)              \
  X(representative, Representative)  \
  X(one_bit, OneBit)                 \
  X(low_rank, LowRank)               \
  X(landmark, Landmark)              \
  X(exact, Exact)

#define KVR_NAMES(name, Struct) {#name, Struct<Float32>::kParameters},
constexpr IndexNames kIndexNames[] = {KVR_INDEXES(KVR_NAMES){nullptr, nullptr}};
#undef KVR_NAMES

// Null: an index does not score tokens, or its records are not built of float keys.
template <class E>
struct IndexFunctions {
  ScoreFn<E> score = nullptr, score_tokens = nullptr;
  BuildFn<E> build = nullptr;
};

// The functions of an index of this kind; of others none.
template <class E>
inline IndexFunctions<E> functions_of(int32_t kind) {
#define KVR_FUNCTIONS(name, Struct) {Struct<E>::score, Struct<E>::score_tokens, Struct<E>::build},
  static constexpr IndexFunctions<E> kFunctions[] = {KVR_INDEXES(KVR_FUNCTIONS)};
#undef KVR_FUNCTIONS
  return kind < 0 ? IndexFunctions<E>{} : kFunctions[kind];
}

}  // namespace KVR_ISA
}  // namespace kvr
