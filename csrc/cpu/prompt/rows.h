// The rows of a task, and their softmax. Logits are relative to a reference of their row, which changes
// only if a logit exceeds it by far. In exact arithmetic the result does not depend on the reference.
#pragma once

#include <algorithm>
#include <cmath>

#include "prompt/product.h"

namespace kvr {
namespace KVR_ISA {
namespace prompt {

constexpr float kBound = 16;  // powers of two by which a logit may exceed its row's reference
constexpr float kLowest = -1e30f;

// The results of rows for some of their tokens. Values are weighted by 2^(logit - reference), and not
// yet divided by the sum of these weights. A row that has seen no token has a sum of 0.
struct Part {
  float* out;         // [rows, columns]
  float* references;  // [rows]
  float* sums;        // [rows]
};

// The rows of a task. Copies of the last row fill the last block.
template <class P>
struct Rows {
  int count;
  typename P::Word* queries;  // as Block packs them
  int* begins;    // [count]; place in the list of the first token that a row sees; not decreasing
  int* limits;    // [count]; place behind the last token that a row sees; not decreasing
  float* sums;    // [count, kWidth]; sums of the current part
  int* unseen;    // [count / kMicro]; rows of the block that have seen no token of the part
};

// Tokens of a tile.
struct Span {
  int begin, end;
  bool empty() const { return begin >= end; }
};

// Those that some row of a block sees, from a multiple of kColumns on.
template <class P>
inline Span seen_by_block(const Rows<P>& rows, int row, int first, int tokens) {
  return {std::max(rows.begins[row] - first, 0) / kColumns * kColumns,
          std::min(rows.limits[row + P::kMicro - 1] - first, tokens)};
}

// Those of a span that one row sees.
template <class P>
inline Span seen_by_row(const Rows<P>& rows, int row, int first, const Span& span) {
  return {std::max(rows.begins[row] - first, span.begin), std::min(rows.limits[row] - first, span.end)};
}

// Sets new references for rows whose logits are too high, or that see their first tokens.
template <class P>
__attribute__((noinline)) void refer_anew(const Rows<P>& rows, int row, const Span& span, int first,
                                          float* logits, const Part& part, int columns) {
  for (int r = 0; r < P::kMicro; ++r) {
    const auto [begin, end] = seen_by_row(rows, row + r, first, span);
    if (begin >= end) continue;
    float* x = logits + r * kTile;
    float top = kLowest;
    for (int t = begin; t < end; ++t) top = x[t] > top ? x[t] : top;
    float* out = part.out + int64_t(row + r) * columns;
    float* sums = rows.sums + (row + r) * kWidth;
    const bool fresh = part.sums[row + r] == 0;
    if (!fresh && top <= kBound) continue;
    for (int t = begin; t < end; ++t) x[t] -= top;
    part.references[row + r] += top;
    if (fresh) {
      part.sums[row + r] = 1;  // marks that the row has begun, until the part is finished
      --rows.unseen[row / P::kMicro];
      continue;
    }
    const float factor = std::exp2(-top);
    for (int c = 0; c < columns; ++c) out[c] *= factor;
    for (int i = 0; i < kWidth; ++i) sums[i] *= factor;
  }
}

// Replaces the logits of a block of rows by weights; by zero for tokens that a row does not see.
template <class P>
inline void weigh(const Rows<P>& rows, int row, const Span& span, int first, float* logits) {
  const int padded = round_up(span.end, kColumns);
  for (int r = 0; r < P::kMicro; ++r) {
    const float* x = logits + r * kTile;
    auto* weights = reinterpret_cast<typename P::Weight*>(logits + r * kTile);
    const Span seen = seen_by_row(rows, row + r, first, span);
    const int begin = seen.begin, end = seen.end;
    float* sums = rows.sums + (row + r) * kWidth;
    Floats total = load_as<Floats>(sums);
    const auto some = [&](int t) {  // some tokens of a vector
      Floats w[1] = {load_as<Floats>(x + t)};
      exp2_of<P::kDegree>(w);
      for (int i = 0; i < kWidth; ++i)
        if (t + i < begin || t + i >= end) w[0][i] = 0;
      total += P::rounded(w[0], weights + t);
    };
    int t = span.begin;
    for (; t < padded && t < begin; t += kWidth) some(t);
    for (; t + 4 * kWidth <= end; t += 4 * kWidth) {
      Floats w[4];
      KVR_UNROLL for (int i = 0; i < 4; ++i) w[i] = load_as<Floats>(x + t + i * kWidth);
      exp2_of<P::kDegree>(w);
      KVR_UNROLL for (int i = 0; i < 4; ++i) w[i] = P::rounded(w[i], weights + t + i * kWidth);
      total += (w[0] + w[1]) + (w[2] + w[3]);
    }
    for (; t < padded; t += kWidth) some(t);
    std::memcpy(sums, &total, sizeof total);
  }
}

}  // namespace prompt
}  // namespace KVR_ISA
}  // namespace kvr
