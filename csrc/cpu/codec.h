// Encodes units in few bytes: keys by channel within the page, values by token. The specification is
// vllm_kvretrieval/retrieval/codec.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace kvr {

// Python has the numbers from bindings.cpp.
enum class Codec : int32_t {
  kRaw = 0, kK8V4 = 1, kK4V4 = 2, kK2V2 = 3, kK4V4Sparse = 4, kK2V2Sparse = 5, kCount = 6
};

constexpr int32_t kMostRows = 512;  // rows of the keys of a unit, and of its values
constexpr int64_t kMostPositions = 1 << 16;  // elements of which outliers have a position of 16 bits

inline bool is_sparse(Codec codec) {
  return codec == Codec::kK4V4Sparse || codec == Codec::kK2V2Sparse;
}

// Units in the layout kTransposed, and their encoded bytes.
struct UnitCoding {
  Codec codec;
  DType dtype;
  int32_t page_size, head_size;  // multiples of 16, up to kMostRows
  void* units;                   // [count, 2 * page_size * head_size]
  uint8_t* encoded;              // [count, encoded_bytes]
  int64_t count;
};

inline int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The number of outliers in `rows` rows of n elements, of keys or of values.
inline int outlier_count(int64_t rows, int64_t n) {
  return static_cast<int>(std::min(rows * n / 64, rows));
}

// The encoded bytes of one unit.
inline int64_t encoded_bytes(Codec codec, DType dtype, int64_t page_size, int64_t head_size) {
  const int64_t elements = page_size * head_size, words = 2 * (2 * head_size + page_size);
  const int64_t outliers = outlier_count(head_size, page_size) + outlier_count(page_size, head_size);
  const int64_t lists = outliers * (2 + element_bytes(dtype));
  switch (codec) {
    case Codec::kK8V4: return 2 * (head_size + page_size) + elements + elements / 2;
    case Codec::kK4V4: return words + elements;
    case Codec::kK2V2: return words + elements / 2;
    case Codec::kK4V4Sparse: return words + elements + lists;
    case Codec::kK2V2Sparse: return words + elements / 2 + lists;
    default: return 2 * elements * element_bytes(dtype);
  }
}

}  // namespace kvr
