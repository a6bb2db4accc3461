// The stages of scoring in whole numbers, for N queries of a KV head together (low_rank_score.h):
//
//   products        with the directions of an entry
//   round_products  these, times the directions' scales, in 8 bits
//   sum_tokens      sums of them with the coefficients of tokens
//   along_mean      products with the mean
//
// The sums of the first three are the same whatever instructions make them.
#pragma once

#include <cstring>

#if defined(__AVX512F__)
#include "index/low_rank_stages_avx512.h"
#elif defined(__AVX2__)
#include "index/low_rank_stages_avx2.h"
#else
#include "index/low_rank_stages_portable.h"
#endif

#if defined(__AVX2__)

namespace kvr {
namespace KVR_ISA {

// Products of N queries, from the i-th on, with the directions.
template <int N>
inline void products(const uint8_t* record, const LowRankFields& f, int d,
                     const RoundedQueries& queries, int i, int32_t (&out)[N][kMostRank]) {
  const uint8_t* p = record + f.directions;
  const int8_t* q = queries.bytes(i);
  const int64_t stride = queries.stride();
  int offsets[N];
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    offsets[g] = queries.factors(i + g).offset;
    std::memset(out[g], 0, sizeof out[g]);
  }
  int first = 0;
  for (; first + 8 <= f.rank; first += 8) block_products<N, 8>(d, stride, offsets, p, q, out, first);
  if (f.rank & 4) block_products<N, 4>(d, stride, offsets, p, q, out, first);
  first += f.rank & 4;
  if (f.rank & 2) block_products<N, 2>(d, stride, offsets, p, q, out, first);
  first += f.rank & 2;
  if (f.rank & 1) block_products<N, 1>(d, stride, offsets, p, q, out, first);
}

}  // namespace KVR_ISA
}  // namespace kvr

#endif
