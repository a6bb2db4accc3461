// The two products of attention, in blocks that fit in registers: queries times keys, and weights
// times values. Both factors are packed, so that the innermost loops read memory in order.
#pragma once

#include "simd.h"

namespace kvr {
namespace KVR_ISA {
namespace prompt {

// A register block is P::kMicro rows by kColumns tokens (logits) or channels (outputs). One of vectors
// leaves registers for two vectors of the panel and a broadcast.
constexpr int kVectorMicro = kWidth == 16 ? 12 : kWidth == 8 ? 6 : 4;
constexpr int kColumns = 2 * kWidth;
// Tokens of keys and values that are packed together.
#if defined(__AMX_BF16__)
constexpr int kTile = 64;  // larger register blocks have more logits, which stay in L1
#else
constexpr int kTile = 128;
#endif

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Products of floats. The cache's elements become floats when they are packed.
template <class E>
struct FloatProduct {
  using Element = E;
  using Word = float;             // an element of a packed panel
  using Weight = float;
  static constexpr int kMicro = kVectorMicro;
  static constexpr int kDepth = 1;  // channels or tokens that one word holds
  static constexpr int kTokens = 1;  // that a product with values takes at least
  static constexpr int kDegree = 5;  // degree of the polynomial for weights, accurate to 1e-7

  static Floats load(const Word* p) { return load_as<Floats>(p); }
  static void add(Floats& total, Word factor, Floats panel) { total += panel * factor; }

  // Converts a query to words, `stride` words apart.
  static void pack(const E* q, int d, int stride, Word* to) {
    for (int c = 0; c < d; c += kWidth) {
      const Floats x = E::load(q + c);
      for (int i = 0; i < kWidth; ++i) to[(c + i) * stride] = x[i];
    }
  }
  static Word weight(const Weight* weights) { return *weights; }
  static Floats rounded(Floats weights, Weight* to) {
    std::memcpy(to, &weights, sizeof weights);
    return weights;
  }
};

#if defined(__AVX512BF16__)
// Products of bfloat16, two at a time, with sums in float. Weights are rounded to bfloat16.
struct PairProduct {
  using Element = BFloat16;
  using Word = uint32_t;
  using Weight = uint16_t;
  static constexpr int kMicro = kVectorMicro;
  static constexpr int kDepth = 2;
  static constexpr int kTokens = 2;
  static constexpr int kDegree = 3;  // accurate to 8e-5, far below a weight's rounding

  static Words load(const Word* p) { return load_as<Words>(p); }
  static void add(Floats& total, Word factor, Words panel) {
    total = (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(factor),
                                     (__m512bh)panel);
  }
  static void pack(const BFloat16* q, int d, int stride, Word* to) {
    for (int c = 0; c < d; c += 2) to[c / 2 * stride] = load_as<Word>(q + c);
  }
  static Word weight(const Weight* weights) { return load_as<Word>(weights); }
  // The sum of the weights is made of rounded weights, too; else their rounding would not average out.
  static Floats rounded(Floats weights, Weight* to) {
    const auto bits = (__m256i)_mm512_cvtneps_pbh((__m512)weights);
    std::memcpy(to, &bits, sizeof bits);
    return (Floats)((Words)_mm512_cvtepu16_epi32(bits) << 16);
  }
};
#endif

template <class E>
struct ProductOf {
  using type = FloatProduct<E>;
};
#if defined(__AVX512BF16__)
template <>
struct ProductOf<BFloat16> {
  using type = PairProduct;
};
#endif

// The logits, as powers of two: x = products * scale, or cap * tanh(x / cap) if there is a cap.
struct Logits {
  float scale;  // times log2(e)
  float cap;    // times log2(e); 0: none

  template <bool capped>
  Floats of(Floats products) const;
};

constexpr float kTermsOf3[] = {5.517166480e-02f, 2.426111251e-01f, 6.932609677e-01f, 9.999280572e-01f};
constexpr float kTermsOf5[] = {1.327647129e-03f, 9.675540961e-03f, 5.550713092e-02f,
                               2.402212024e-01f, 6.931469440e-01f, 1.000000119f};

// 2^x for x < 128. The relative error is 7.5e-5 with degree 3, and 2e-7 with degree 5. Results below
// 2^-100 become about 2^-100. NaN stays NaN.
template <int degree, int n>
inline void exp2_of(Floats (&x)[n]) {
  constexpr float kShift = 12582912;  // its low bits are zero, and the next float is larger by 1
  constexpr const float* kTerms = degree == 3 ? kTermsOf3 : kTermsOf5;
  Floats shifted[n], p[n];
  KVR_UNROLL for (int i = 0; i < n; ++i) x[i] = max(splat(-100), x[i]);
  KVR_UNROLL for (int i = 0; i < n; ++i) shifted[i] = x[i] + kShift;
  KVR_UNROLL for (int i = 0; i < n; ++i) x[i] -= shifted[i] - kShift;
  KVR_UNROLL for (int i = 0; i < n; ++i) p[i] = x[i] * kTerms[0] + kTerms[1];
  KVR_UNROLL for (int k = 2; k <= degree; ++k)
    KVR_UNROLL for (int i = 0; i < n; ++i) p[i] = p[i] * x[i] + kTerms[k];
  KVR_UNROLL for (int i = 0; i < n; ++i)
    x[i] = (Floats)((Words)p[i] + ((Words)shifted[i] << 23));
}

template <bool capped>
inline Floats Logits::of(Floats products) const {
  if constexpr (!capped) return products * scale;
  // tanh(y) = 1 - 2 / (exp(2 y) + 1), where exp is limited to 2^60: tanh is 1 long before.
  const Floats y = products * (scale / cap) * 2.885390082f;
  Floats power[1] = {min(splat(60), y)};
  exp2_of<5>(power);
  return cap * (1.0f - 2.0f / (power[0] + 1.0f));
}

// The bits of a word of values, from token t on, that hold tokens of [begin, end).
template <class P>
inline uint32_t seen_of_word(int t, int begin, int end) {
  uint32_t seen = ~0u;
  if (P::kDepth == 2 && t < begin) seen = 0xffff0000u;
  if (P::kDepth == 2 && t + 1 == end) seen &= 0xffffu;
  return seen;
}

// The products of a register block.
template <class P>
struct Block {
  static constexpr int kMicro = P::kMicro;
  static constexpr int kRow = kTile * sizeof(float) / sizeof(typename P::Weight);
  struct Setup {};  // what a thread has while it multiplies

  // Packs a query as row `row` of the queries: [rows / kMicro, words, kMicro].
  static void pack(const typename P::Element* query, int d, int row, typename P::Word* queries) {
    const int64_t words = d / P::kDepth;
    P::pack(query, d, kMicro, queries + row / kMicro * words * kMicro + row % kMicro);
  }

  // Computes the logits of kMicro rows and kColumns tokens, less the references of the rows; rows are
  // kTile apart. Returns the highest of `top` and the logits, by column; ignores NaN.
  template <bool capped>
  static Floats multiply_keys(const typename P::Word* queries, const typename P::Word* panel, int steps,
                              const Logits& logits, const float* references, float* out, Floats top) {
    Floats acc[kMicro][2];
    KVR_UNROLL for (int r = 0; r < kMicro; ++r) acc[r][0] = acc[r][1] = Floats{};
    for (int c = 0; c < steps; ++c) {
      const auto low = P::load(panel + c * kColumns), high = P::load(panel + c * kColumns + kWidth);
      KVR_UNROLL for (int r = 0; r < kMicro; ++r) {
        const auto factor = queries[c * kMicro + r];
        P::add(acc[r][0], factor, low);
        P::add(acc[r][1], factor, high);
      }
    }
    KVR_UNROLL for (int r = 0; r < kMicro; ++r)
      KVR_UNROLL for (int v = 0; v < 2; ++v) {
        const Floats x = logits.of<capped>(acc[r][v]) - references[r];
        std::memcpy(out + r * kTile + v * kWidth, &x, sizeof x);
        top = max(x, top);
      }
    return top;
  }

  // Adds the values of `steps` words, in kColumns channels, times the weights of kMicro rows. The rows
  // of weights are 4 * kTile bytes apart, and the rows of outputs `stride` floats.
  static void multiply_values(const typename P::Weight* weights, const typename P::Word* panel,
                              int steps, float* out, int stride) {
    Floats acc[kMicro][2];
    KVR_UNROLL for (int r = 0; r < kMicro; ++r) {
      acc[r][0] = load_as<Floats>(out + r * stride);
      acc[r][1] = load_as<Floats>(out + r * stride + kWidth);
    }
    for (int t = 0; t < steps; ++t) {
      const auto low = P::load(panel + t * kColumns), high = P::load(panel + t * kColumns + kWidth);
      KVR_UNROLL for (int r = 0; r < kMicro; ++r) {
        const auto factor = P::weight(weights + r * kRow + t * P::kDepth);
        P::add(acc[r][0], factor, low);
        P::add(acc[r][1], factor, high);
      }
    }
    KVR_UNROLL for (int r = 0; r < kMicro; ++r) {
      std::memcpy(out + r * stride, &acc[r][0], sizeof(Floats));
      std::memcpy(out + r * stride + kWidth, &acc[r][1], sizeof(Floats));
    }
  }

  // Does the same for one row of the block, and leaves alone what tokens outside of [begin, end) have in
  // the first word and the last: a weight of zero times an infinite value would be NaN.
  static void multiply_values_of_row(int row, const typename P::Weight* weights,
                                     const typename P::Word* panel, int begin, int end, float* out,
                                     int stride) {
    weights += row * kRow;
    out += row * stride;
    Floats acc[2] = {load_as<Floats>(out), load_as<Floats>(out + kWidth)};
    for (int t = begin / P::kDepth * P::kDepth; t < end; t += P::kDepth) {
      const uint32_t seen = seen_of_word<P>(t, begin, end);
      for (int v = 0; v < 2; ++v) {
        const auto values = P::load(panel + t / P::kDepth * kColumns + v * kWidth);
        P::add(acc[v], P::weight(weights + t), (decltype(values))((Words)values & seen));
      }
    }
    std::memcpy(out, acc, sizeof acc);
  }
};

}  // namespace prompt
}  // namespace KVR_ISA
}  // namespace kvr
