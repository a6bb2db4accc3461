// The tasks of scoring and building the records of an index. Every kind of index is a struct with
//
//   static void score(const ScoreTask<E>&);         a stretch of a context, for some KV heads
//   static void score_tokens(const ScoreTask<E>&);  the same token by token, where an index can
//   static void build(const BuildTask<E>&);         one record, of the keys of its tokens
//   static constexpr const char* kParameters        names of its numbers, with spaces between them
//
// for elements E of the KV cache. It derives from IndexOf<E>, which has what the struct leaves out.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kGroupBlock = 8;      // query heads scored together
constexpr int kAccumulators = kWidth == 16 ? 16 : 8;  // sums of scores that fit in registers
constexpr int kBlock = 4;           // entries of a KV head scored before those of the next head
constexpr int kAhead = 8;           // entries to fetch ahead; a multiple of kBlock

// The records of a request's context, in order. The records of all KV heads lie side by side.
struct Records {
  const Index& index;
  const int32_t* pages;  // ids
  int shift;             // log2 of the entries per page
  int span_shift;        // log2 of the pages per entry

  Records(const Index& index, const int32_t* pages)
      : index(index), pages(pages), shift(__builtin_ctz(index.parts())),
        span_shift(__builtin_ctz(index.spans())) {}
  int64_t entry(int j) const {
    const int64_t page = pages[(j << span_shift) >> shift] >> span_shift;
    return (page << shift) + (j & ((1 << shift) - 1));
  }
  const uint8_t* at(int j, int head) const { return index.record(entry(j), head); }
};

// Scores entries [begin, end) of a context: out[head * unit_stride + g * stride + j]; or their tokens:
// out[head * unit_stride + g * stride + j * entry_tokens + t]. An entry of several pages has a score for
// each: out[head * unit_stride + g * stride + j * spans + page].
template <class E>
struct ScoreTask {
  const Index& index;
  Records records;
  const E* query;      // [heads * group, head_size]
  int first_head, heads, group;
  float scale;
  int begin, end;
  float* out;          // output of first_head
  int64_t unit_stride, stride;
  bool means;          // whether means of values are read, too, after the scores
};

// Builds a record of the keys of its tokens.
template <class E>
struct BuildTask {
  const Index& index;
  const float* keys;   // [head_size, entry_tokens]
  uint8_t* record;
};

template <class E>
using ScoreFn = void (*)(const ScoreTask<E>&);
template <class E>
using BuildFn = void (*)(const BuildTask<E>&);

template <class E>
struct IndexOf {
  static constexpr const char* kParameters = "";
  static constexpr ScoreFn<E> score_tokens = nullptr;
  static constexpr BuildFn<E> build = nullptr;
};

// Calls score(head, first, last, output of the head) for blocks of entries, and for all heads of a
// block before the next block, so the index is read in the order in which it lies in memory. Meanwhile
// it fetches the next records into the second-level cache: the first level allows too few misses at
// once to hide the latency of memory.
template <class E, class Score>
inline void by_blocks(const ScoreTask<E>& t, int head_bytes, const Score& score) {
  if (t.means) head_bytes = t.index.record_bytes;
  for (int first = t.begin - kAhead; first < t.end; first += kBlock) {
    for (int head = 0; head < t.heads; ++head) {
      const int next = first + kAhead;
      for (int j = next; j < std::min(next + kBlock, t.end); ++j) {
        const char* ahead = reinterpret_cast<const char*>(t.records.at(j, t.first_head + head));
        for (int b = 0; b < head_bytes; b += 64) __builtin_prefetch(ahead + b, 0, 2);
      }
      if (first < t.begin) continue;
      score(head, first, std::min(first + kBlock, t.end), t.out + head * t.unit_stride);
    }
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
