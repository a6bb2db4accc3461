// What all products with quantised weights share: their types, and how results are stored.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kQuad = 4;  // inputs of an output that lie side by side
constexpr int kBlock = QuantisedLayer::kBlock;
constexpr int kPanel = QuantisedLayer::kPanel;
constexpr int64_t kSerialProducts = 1 << 15;  // work below which waking the other threads costs more

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

// Products<E, bits>::multiply of the layer's types.
template <template <class E, int kBits> class Products>
inline void multiply_by(const QuantisedLayer& l) {
  const auto of = [&l](auto element) {
    using E = decltype(element);
    return l.bits == 8 ? Products<E, 8>::multiply(l) : Products<E, 4>::multiply(l);
  };
  switch (l.dtype) {
    case DType::kBFloat16: return of(BFloat16{});
    case DType::kFloat16: return of(Float16{});
    case DType::kFloat32: return of(Float32{});
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
