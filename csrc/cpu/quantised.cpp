// Products with weights of 8 or 4 bits; compiled once per instruction set. Tokens are rounded to 8 bits,
// each block of kBlock inputs by a scale of its own, and whole numbers are multiplied.
#include "quantised.h"

namespace kvr {
namespace KVR_ISA {

#if defined(__AVX512VNNI__)
constexpr int kTokens = 8;                    // that share a read of weights; more have no registers
#else
constexpr int kTokens = 4;
#endif
constexpr int64_t kAtOnce = 256;  // tokens whose bytes stay in a near cache

// The sums of products of bytes, of a block of inputs. Weights are signed, or from 0 to 15.
template <bool kSigned>
struct Sums {
#if defined(__AVX512VNNI__)  // one factor has no sign: 128 is added to weights, and taken off again
  __m512i total;
  void start(int32_t sum) { total = _mm512_set1_epi32(kSigned ? -128 * sum : 0); }
  static __m512i prepared(Bytes w) {
    return kSigned ? _mm512_xor_si512((__m512i)w, _mm512_set1_epi8(-128)) : (__m512i)w;
  }
  void add(__m512i w, const int8_t* x) {
    total = _mm512_dpbusd_epi32(total, w, _mm512_set1_epi32(load_as<int32_t>(x)));
  }
  Floats floats() const { return (Floats)_mm512_cvtepi32_ps(total); }
#elif defined(__AVX2__)  // pairs of products have 16 bits: 2 * 128 * 127, or kBlock / 2 * 15 * 127 at most
  __m256i total;
  void start(int32_t) { total = _mm256_setzero_si256(); }
  static __m256i prepared(Bytes w) { return (__m256i)w; }
  void add(__m256i w, const int8_t* x) {
    const __m256i four = _mm256_set1_epi32(load_as<int32_t>(x));
    if constexpr (kSigned) {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four, w));
      total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    } else {
      total = _mm256_add_epi16(total, _mm256_maddubs_epi16(w, four));
    }
  }
  Floats floats() const {
    return _mm256_cvtepi32_ps(kSigned ? total : _mm256_madd_epi16(total, _mm256_set1_epi16(1)));
  }
#else
  Ints total;
  void start(int32_t) { total = Ints{}; }
  static Bytes prepared(Bytes w) { return w; }
  void add(Bytes w, const int8_t* x) {
    for (int i = 0; i < kWidth; ++i)
      for (int c = 0; c < kQuad; ++c) total[i] += w[kQuad * i + c] * x[c];
  }
  Floats floats() const { return __builtin_convertvector(total, Floats); }
#endif
};

// Of kWidth outputs from `output` on.
template <class E, int kBits, bool kGroups>
class Panel {
 public:
  Panel(const QuantisedLayer& layer, const Rounded<1>& x, int64_t first_token, int64_t output)
      : l_(layer), x_(x), first_token_(first_token), output_(output) {
    const int64_t panel = output / kPanel, lane = output % kPanel;
    weights_ = l_.weights + (panel * x.blocks * kBlock * kPanel * kBits / 8 + lane * kQuad);
    if (kGroups) groups_ = static_cast<const Float16*>(l_.groups) + panel * l_.num_groups() * 2 * kPanel + lane;
  }

  void multiply(int64_t tokens) const {
    using Fn = decltype(&Panel::some_tokens<1>);
    static constexpr Fn kFns[8] = {
        &Panel::some_tokens<1>, &Panel::some_tokens<2>, &Panel::some_tokens<3>,
        &Panel::some_tokens<4>, &Panel::some_tokens<std::min(5, kTokens)>,
        &Panel::some_tokens<std::min(6, kTokens)>, &Panel::some_tokens<std::min(7, kTokens)>,
        &Panel::some_tokens<std::min(8, kTokens)>};
    for (int64_t t = 0; t < tokens; t += kTokens)
      (this->*kFns[std::min<int64_t>(kTokens, tokens - t) - 1])(t);
  }

 private:
  using Block = Sums<kBits == 8>;

  // The sums of a block, of T tokens.
  template <int T>
  void add_block(int64_t block, int64_t token, Floats* totals) const {
    const int8_t* w = weights_ + block * kBlock * kPanel * kBits / 8;
    const int64_t place = token * x_.blocks + block;
    const int8_t* x = x_.values + place * kBlock;
    const int64_t row = x_.blocks * kBlock;
    Block all[T];
    KVR_UNROLL for (int t = 0; t < T; ++t) all[t].start(x_.sums[place + t * x_.blocks]);
    for (int i = 0; i < kBlock; i += kQuad * 8 / kBits, w += kQuad * kPanel) {
      const Bytes both = load_as<Bytes>(w);
      if constexpr (kBits == 8) {
        const auto factor = Block::prepared(both);
        KVR_UNROLL for (int t = 0; t < T; ++t) all[t].add(factor, x + t * row + i);
      } else {  // low halves are of the first inputs
        const auto low = Block::prepared(low_halves(both));
        const auto high = Block::prepared(high_halves(both));
        KVR_UNROLL for (int t = 0; t < T; ++t) {
          all[t].add(low, x + t * row + i);
          all[t].add(high, x + t * row + i + kQuad);
        }
      }
    }
    KVR_UNROLL for (int t = 0; t < T; ++t)
      totals[t] += all[t].floats() * x_.scales[place + t * x_.blocks];
  }

  template <int T>
  void some_tokens(int64_t token) const {
    Floats totals[T];
    KVR_UNROLL for (int t = 0; t < T; ++t) totals[t] = Floats{};
    if constexpr (!kGroups) {
      for (int64_t b = 0; b < x_.blocks; ++b) add_block<T>(b, token, totals);
    } else {
      const int64_t per_group = l_.group / kBlock;
      for (int64_t g = 0; g < l_.num_groups(); ++g) {
        Floats group[T];
        float offsets[T];
        KVR_UNROLL for (int t = 0; t < T; ++t) group[t] = Floats{}, offsets[t] = 0;
        const int64_t end = std::min((g + 1) * per_group, x_.blocks);
        for (int64_t b = g * per_group; b < end; ++b) {
          add_block<T>(b, token, group);
          KVR_UNROLL for (int t = 0; t < T; ++t) {
            const int64_t place = (token + t) * x_.blocks + b;
            offsets[t] += x_.scales[place] * x_.sums[place];
          }
        }
        const Floats scale = Float16::load(groups_ + g * 2 * kPanel);
        const Floats offset = Float16::load(groups_ + (g * 2 + 1) * kPanel);
        KVR_UNROLL for (int t = 0; t < T; ++t) {
          totals[t] += scale * group[t];
          totals[t] += offset * offsets[t];
        }
      }
    }
    KVR_UNROLL for (int t = 0; t < T; ++t)
      store_result<E>(l_, first_token_ + token + t, output_, totals[t]);
  }

  const QuantisedLayer& l_;
  const Rounded<1>& x_;
  const int64_t first_token_, output_;
  const int8_t* weights_;
  const Float16* groups_ = nullptr;
};

template <class E, int kBits, bool kGroups>
static void multiply_as(const QuantisedLayer& l) {
  thread_local Rounded<1> own;
  Rounded<1>& x = own;  // of the calling thread
  const int64_t lanes = (l.outputs + kWidth - 1) / kWidth;
  x.resize(std::min(l.tokens, kAtOnce), l.inputs);
  for (int64_t first = 0; first < l.tokens; first += kAtOnce) {
    const int64_t tokens = std::min(kAtOnce, l.tokens - first);
    const bool parallel = l.outputs * tokens * l.inputs > kSerialProducts;
#pragma omp parallel if (parallel)
    {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tokens; ++t) x.round_token<E>(l, first + t, t);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < lanes; ++i)
        Panel<E, kBits, kGroups>(l, x, first, i * kWidth).multiply(tokens);
    }
  }
}

template <class E>
static void multiply_of(const QuantisedLayer& l) {
  if (l.bits == 8) return l.groups ? multiply_as<E, 8, true>(l) : multiply_as<E, 8, false>(l);
  return l.groups ? multiply_as<E, 4, true>(l) : multiply_as<E, 4, false>(l);
}

void multiply_quantised(const QuantisedLayer& layer) {
  switch (layer.dtype) {
    case DType::kBFloat16: return multiply_of<BFloat16>(layer);
    case DType::kFloat16: return multiply_of<Float16>(layer);
    case DType::kFloat32: return multiply_of<Float32>(layer);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
