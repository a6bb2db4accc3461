// Products with weights of 8 or 4 bits; compiled once per instruction set. Tokens are rounded to 8 bits,
// each block of kBlock inputs by a scale of its own, and whole numbers are multiplied.
#include "quantised.h"

#include <cmath>

#include "room.h"

namespace kvr {
namespace KVR_ISA {

#if defined(__AVX512VNNI__)
constexpr int kTokens = 8;                    // that share a read of weights; more have no registers
#else
constexpr int kTokens = 4;
#endif
constexpr int64_t kAtOnce = 256;  // tokens whose bytes stay in a near cache

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

// Tokens in 8 bits.
class Rounded {
 public:
  int64_t blocks;
  int8_t* values;  // [tokens, blocks, kBlock]; inputs are padded by zeros to whole blocks
  float* scales;   // [tokens, blocks]
  int32_t* sums;   // [tokens, blocks]; of values

  void resize(int64_t tokens, int64_t inputs) {
    blocks = (inputs + kBlock - 1) / kBlock;
    const int64_t places = tokens * blocks;
    values = values_.of(places * kBlock);
    scales = scales_.of(places);
    sums = sums_.of(places);
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
      round_block(row * blocks + b, block);
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
  Panel(const QuantisedLayer& layer, const Rounded& x, int64_t first_token, int64_t output)
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
  const Rounded& x_;
  const int64_t first_token_, output_;
  const int8_t* weights_;
  const Float16* groups_ = nullptr;
};

template <class E, int kBits, bool kGroups>
static void multiply_as(const QuantisedLayer& l) {
  thread_local Rounded own;
  Rounded& x = own;  // of the calling thread
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

template <class E, int kBits>
struct Products {
  static void multiply(const QuantisedLayer& l) {
    l.groups ? multiply_as<E, kBits, true>(l) : multiply_as<E, kBits, false>(l);
  }
};

void multiply_quantised(const QuantisedLayer& layer) { multiply_by<Products>(layer); }

}  // namespace KVR_ISA
}  // namespace kvr
