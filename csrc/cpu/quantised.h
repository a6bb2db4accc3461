// What all products with quantised weights share: tokens in 8 bits, and how results are stored.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "room.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kQuad = 4;                      // inputs of an output that lie side by side
constexpr int kBlock = QuantisedLayer::kBlock;
constexpr int kPanel = QuantisedLayer::kPanel;
constexpr int64_t kSerialProducts = 1 << 15;  // work below which waking the other threads costs more

// kQuad weights of kWidth outputs.
using Bytes = int8_t __attribute__((vector_size(kQuad * kWidth)));

// Weights of 4 bits, from 0 to 15: those of the first inputs of a byte, and of the second.
inline Bytes low_halves(Bytes both) { return both & int8_t{15}; }
inline Bytes high_halves(Bytes both) {
  using Pairs = uint16_t __attribute__((vector_size(sizeof(Bytes))));
  return (Bytes)((Pairs)both >> 4) & int8_t{15};
}

inline Ints nearest(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32(x);
#else
  Ints v;
  for (int i = 0; i < kWidth; ++i) v[i] = static_cast<int32_t>(std::lrint(x[i]));
  return v;
#endif
}

// Tokens in 8 bits. `tile` tokens lie side by side, block after block.
template <int tile>
class Rounded {
 public:
  int64_t blocks;
  int8_t* values;  // [tokens / tile, blocks, tile, kBlock]; inputs are padded by zeros to whole blocks
  float* scales;   // [tokens / tile, blocks, tile]
  int32_t* sums;   // [tokens / tile, blocks, tile]; of values

  void resize(int64_t tokens, int64_t inputs) {
    blocks = (inputs + kBlock - 1) / kBlock;
    const int64_t places = (tokens + tile - 1) / tile * tile * blocks;
    values = values_.of(places * kBlock);
    scales = scales_.of(places);
    sums = sums_.of(places);
  }

  int64_t place(int64_t token, int64_t block) const {
    return (token / tile * blocks + block) * tile + token % tile;
  }

  // The layer's token, as that of a row.
  template <class E>
  void round_token(const QuantisedLayer& l, int64_t token, int64_t row) {
    const E* x = static_cast<const E*>(l.x) + token * l.inputs;
    float block[kBlock];
    E padded[kBlock];
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t left = l.inputs - b * kBlock;
      const E* from = x + b * kBlock;
      if (left < kBlock) {
        std::fill_n(reinterpret_cast<uint8_t*>(padded), sizeof padded, 0);
        std::copy_n(from, left, padded);
        from = padded;
      }
      for (int i = 0; i < kBlock; i += kWidth) {
        const Floats v = E::load(from + i);
        std::memcpy(block + i, &v, sizeof v);
      }
      round_block(place(row, b), block);
    }
  }

 private:
  // A block with a value that is not finite has a scale that is none, and so have its products.
  void round_block(int64_t at, const float* x) {
    Floats most = {}, odd = {};
    for (int i = 0; i < kBlock; i += kWidth) {
      const Floats v = load_as<Floats>(x + i);
      most = max(most, max(v, -v));
      odd += v * 0.0f;
    }
    float top = 0;
    for (int i = 0; i < kWidth; ++i) top = std::max(top, most[i]);
    const float inverse = top > 0 ? 127 / top : 0;
    scales[at] = top / 127 + sum(odd);
    int8_t* to = values + at * kBlock;
    Ints total = {};
    for (int i = 0; i < kBlock; i += kWidth) {
      const Ints v = nearest(load_as<Floats>(x + i) * inverse);
      total += v;
      const auto bytes = __builtin_convertvector(v, int8_t __attribute__((vector_size(kWidth))));
      std::memcpy(to + i, &bytes, sizeof bytes);
    }
    sums[at] = 0;
    for (int i = 0; i < kWidth; ++i) sums[at] += total[i];
  }

  Room<int8_t> values_;
  Room<float> scales_;
  Room<int32_t> sums_;
};

// The result of a token, for kWidth outputs from one on.
template <class E>
inline void store_result(const QuantisedLayer& l, int64_t token, int64_t output, Floats total) {
  E* to = static_cast<E*>(l.out) + token * l.outputs + output;
  const int64_t left = std::min<int64_t>(kWidth, l.outputs - output);
  const E* bias = l.bias ? static_cast<const E*>(l.bias) + output : nullptr;
  total *= load_as<Floats>(l.scales + output);
  if (left == kWidth) {
    if (bias) total += E::load(bias);
    return store_rounded<E>(to, total);
  }
  E values[kWidth] = {};
  if (bias) {
    std::copy_n(bias, left, values);
    total += E::load(values);
  }
  store_rounded<E>(values, total);
  std::copy_n(values, left, to);
}

}  // namespace KVR_ISA
}  // namespace kvr
