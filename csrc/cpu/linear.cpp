// Products of a few tokens with the weights of a linear layer, in the time that it takes to read these;
// compiled once per instruction set. Weights are converted two vectors at a time, in the cheapest order of
// elements, and so are the tokens.
#include <algorithm>
#include <vector>

#include "decode/tiles.h"
#include "kernels.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kTokens = 4;                    // that share a read of weights; more have no registers
constexpr int kOutputs = 16;                  // that a thread computes before it takes the next
constexpr int64_t kSerialProducts = 1 << 15;  // work below which waking the other threads costs more

template <class E>
class Product {
 public:
  // tokens: float [count, inputs]
  Product(const LinearLayer& layer, const float* tokens) : l_(layer), tokens_(tokens) {}

  // Of outputs [first, last); their weights stay in a near cache from some tokens to the next.
  void multiply(int64_t first, int64_t last) const {
    using Fn = decltype(&Product::some_tokens<1>);
    static constexpr Fn kFns[kTokens] = {&Product::some_tokens<1>, &Product::some_tokens<2>,
                                         &Product::some_tokens<3>, &Product::some_tokens<4>};
    for (int64_t t = 0; t < l_.tokens; t += kTokens)
      (this->*kFns[std::min<int64_t>(kTokens, l_.tokens - t) - 1])(t, first, last);
  }

  static float value(const E& element) {
    E values[kWidth] = {};
    values[0] = element;
    return E::load(values)[0];
  }

 private:
  // Of T tokens; enough outputs at once that additions need not wait for each other.
  template <int T>
  void some_tokens(int64_t token, int64_t first, int64_t last) const {
    constexpr int R = T <= 2 ? 8 / T : 2;
    for (; first + R <= last; first += R) sums<R, T>(first, token);
    for (; first < last; ++first) sums<1, T>(first, token);
  }

  // Each sum has a vector of its own: it is the same whatever R and T are.
  template <int R, int T>
  void sums(int64_t output, int64_t token) const {
    const int64_t n = l_.inputs, whole = n / kTwo * kTwo;
    const E* weights = static_cast<const E*>(l_.weights) + output * n;
    const float* x = tokens_ + token * n;
    Floats totals[R][T];
    KVR_UNROLL for (int r = 0; r < R; ++r)
      KVR_UNROLL for (int t = 0; t < T; ++t) totals[r][t] = Floats{};
    for (int64_t i = 0; i < whole; i += kTwo) {
      KVR_UNROLL for (int r = 0; r < R; ++r) {
        const E* p = weights + r * n + i;
        fetch_line(p + R * n);
        Floats of_output[2];
        load_two<Rest::kBehind>(p, p, of_output);
        KVR_UNROLL for (int half = 0; half < 2; ++half)
          KVR_UNROLL for (int t = 0; t < T; ++t)
            totals[r][t] += of_output[half] * load_as<Floats>(x + t * n + i + half * kWidth);
      }
    }
    KVR_UNROLL for (int r = 0; r < R; ++r)
      KVR_UNROLL for (int t = 0; t < T; ++t)
        store(output + r, token + t, sum(totals[r][t]) + rest(weights + r * n, x + t * n, whole));
  }

  // Of the inputs that fill no vector.
  float rest(const E* weights, const float* x, int64_t first) const {
    float total = 0;
    for (int64_t i = first; i < l_.inputs; ++i) total += value(weights[i]) * x[i];
    return total;
  }

  void store(int64_t output, int64_t token, float sum) const {
    if (l_.bias) sum += value(static_cast<const E*>(l_.bias)[output]);
    E values[kWidth];
    store_rounded<E>(values, splat(sum));
    static_cast<E*>(l_.out)[token * l_.outputs + output] = values[0];
  }

  const LinearLayer& l_;
  const float* tokens_;
};

template <class E>
static void multiply_of(const LinearLayer& l) {
  thread_local std::vector<float> tokens;
  const int64_t n = l.inputs, whole = n / kTwo * kTwo;
  tokens.resize(l.tokens * n);
  for (int64_t t = 0; t < l.tokens; ++t) {
    const E* x = static_cast<const E*>(l.x) + t * n;
    float* to = tokens.data() + t * n;
    for (int64_t i = 0; i < whole; i += kTwo) {
      Floats two[2];
      load_two<Rest::kBehind>(x + i, x + i, two);
      std::memcpy(to + i, two, sizeof two);
    }
    for (int64_t i = whole; i < n; ++i) to[i] = Product<E>::value(x[i]);
  }
  const Product<E> product(l, tokens.data());
  const int64_t parts = (l.outputs + kOutputs - 1) / kOutputs;
#pragma omp parallel for schedule(static) if (l.outputs * l.tokens * n > kSerialProducts)
  for (int64_t part = 0; part < parts; ++part)
    product.multiply(part * kOutputs, std::min((part + 1) * kOutputs, l.outputs));
}

void multiply(const LinearLayer& layer) {
  switch (layer.dtype) {
    case DType::kBFloat16: return multiply_of<BFloat16>(layer);
    case DType::kFloat16: return multiply_of<Float16>(layer);
    case DType::kFloat32: return multiply_of<Float32>(layer);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
