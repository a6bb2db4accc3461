// The stages of scoring in whole numbers, for N queries of a KV head together (low_rank_score.h):
//
//   products        with the directions of an entry
//   round_products  these, times the directions' scales, in 8 bits
//   sum_tokens      sums of them with the coefficients of tokens
//   along_mean      products with the mean
//
// The sums of the first three are the same whatever instructions make them.
#pragma once

#if defined(__AVX512F__)
#include "index/low_rank_stages_avx512.h"
#elif defined(__AVX2__)
#include "index/low_rank_stages_avx2.h"
#else
#include "index/low_rank_stages_portable.h"
#endif
