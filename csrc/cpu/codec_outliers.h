// The outliers of rows, which a codec keeps as they are, and what is left of the rows. The
// specification is vllm_kvretrieval/retrieval/codec/sparse.py.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "codec.h"
#include "simd.h"
#include "topk.h"

namespace kvr {
namespace KVR_ISA {

constexpr float kMost = 0x1p120f;

// The lowest and the highest element of a row, and the elements that are so without them.
struct Ends {
  float low, high, next_low, next_high;
  bool encodable;
};

// The ends of n elements, a multiple of 16; the next ones are found only if they are asked for.
template <bool next, class E>
inline Ends ends_of(const E* row, int n) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Floats low = splat(kInfinity), high = -low, next_low = low, next_high = high;
  Ints encodable = splat(0) == splat(0);
  for (int i = 0; i < n; i += kWidth) {
    const Floats x = E::load(row + i);
    if constexpr (next) {
      next_low = min(next_low, max(low, x));
      next_high = max(next_high, min(high, x));
    }
    low = min(low, x);
    high = max(high, x);
    encodable &= (x <= splat(kMost)) & (x >= splat(-kMost));
  }
  Ends ends{low[0], high[0], next_low[0], next_high[0], encodable[0] != 0};
  for (int i = 1; i < kWidth; ++i) {
    if constexpr (next) {
      ends.next_low = std::min({ends.next_low, next_low[i], std::max(ends.low, low[i])});
      ends.next_high = std::max({ends.next_high, next_high[i], std::min(ends.high, high[i])});
    }
    ends.low = std::min(ends.low, low[i]);
    ends.high = std::max(ends.high, high[i]);
    ends.encodable &= encodable[i] != 0;
  }
  return ends;
}

// The first place of an element.
template <class E>
inline int place_of(float element, const E* row) {
  for (int first = 0;; first += kWidth) {
    const Ints same = E::load(row + first) == splat(element);
    for (int i = 0; i < kWidth; ++i)
      if (same[i]) return first + i;
  }
}

// Writes the list of the outliers of `rows` rows of n elements, and leaves their ends without them.
template <class E>
inline void take_outliers(const E* x, int rows, int n, Ends* ends, uint8_t* list) {
  const int count = outlier_count(rows, n);
  float worth[2 * kMostRows];
  int32_t taken[kMostRows];
  for (int r = 0; r < rows; ++r) {
    ends[r] = ends_of<true>(x + int64_t(r) * n, n);
    const Ends& e = ends[r];
    worth[2 * r] = e.encodable ? e.next_low - e.low + 0.0f : 0.0f;  // never a negative zero
    worth[2 * r + 1] = e.encodable ? e.high - e.next_high + 0.0f : 0.0f;
  }
  top_k(worth, 2 * rows, count, 0, taken);
  for (int i = 0; i < count; ++i) {
    const int row = taken[i] / 2;
    Ends& e = ends[row];
    float& end = taken[i] % 2 ? e.high : e.low;
    int place = row * n;
    E element[kWidth];
    if (e.encodable) {
      place += place_of(end, x + place);
      E::store(element, splat(end));  // which leaves zero without a sign
    } else {
      E::store(element, splat(std::numeric_limits<float>::quiet_NaN()));
    }
    end = taken[i] % 2 ? e.next_high : e.next_low;
    const auto position = static_cast<uint16_t>(place);
    std::memcpy(list + i * sizeof position, &position, sizeof position);
    std::memcpy(list + count * sizeof position + i * sizeof(E), element, sizeof(E));
  }
}

// Lays the outliers of a list over decoded rows.
template <class E>
inline void lay_outliers(const uint8_t* list, int rows, int n, E* x) {
  const int count = outlier_count(rows, n);
  for (int i = 0; i < count; ++i) {
    uint16_t position;
    std::memcpy(&position, list + i * sizeof position, sizeof position);
    if (position < rows * n)  // the file may hold anything
      std::memcpy(x + position, list + count * sizeof position + i * sizeof(E), sizeof(E));
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
