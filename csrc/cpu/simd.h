// A vector of floats as wide as the instruction set that this file is compiled for.
// GCC's vector extension does the arithmetic; only fp16 conversion needs intrinsics.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

// Unrolls a loop completely and early, so that arrays of vectors become registers.
#define KVR_UNROLL _Pragma("GCC unroll 16")

namespace kvr {
// One namespace per instruction set: inline functions compiled for AVX-512 must never be merged
// with their portable twins by the linker.
namespace KVR_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kWidth)));
using Ints = int32_t __attribute__((vector_size(4 * kWidth)));
using Words = uint32_t __attribute__((vector_size(4 * kWidth)));
using Halves = uint16_t __attribute__((vector_size(2 * kWidth)));

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

template <class V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class To, class From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return load_as<To>(&x);
}

inline Floats splat(float x) { return Floats{} + x; }
#if defined(__AVX512F__)  // one instruction for what GCC makes two of
inline Floats max(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats min(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
#else
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
#endif

// Bytes or halves as whole numbers: one instruction for what GCC makes several of, or a loop.
inline Ints whole(const int8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(load_as<__m128i>(p));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(load_as<int8_t __attribute__((vector_size(kWidth)))>(p), Ints);
#endif
}
inline Ints whole(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(load_as<__m128i>(p));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(load_as<uint8_t __attribute__((vector_size(kWidth)))>(p), Ints);
#endif
}
inline Words whole(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32(load_as<__m256i>(p));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32(load_as<__m128i>(p));
#else
  return __builtin_convertvector(load_as<Halves>(p), Words);
#endif
}

// Whether an element is above the bound; NaN is not.
inline bool any_above(Floats x, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)splat(bound), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(x, splat(bound), _CMP_GT_OQ)) != 0;
#else
  for (int i = 0; i < kWidth; ++i)
    if (x[i] > bound) return true;
  return false;
#endif
}

using Quad = float __attribute__((vector_size(16)));

// The sum of v's quads.
inline Quad fold(Floats v) {
  Quad parts[kWidth / 4];
  std::memcpy(parts, &v, sizeof v);
  for (int i = 1; i < kWidth / 4; ++i) parts[0] += parts[i];
  return parts[0];
}

inline float sum(Floats v) {
  const Quad q = fold(v);
  return (q[0] + q[1]) + (q[2] + q[3]);
}

// The source of element i of two interleaved vectors, in units of `size` elements within quads.
constexpr int interleaved(int i, int size, bool upper) {
  const int unit = i % 4 / size;
  return unit % 2 * kWidth + i / 4 * 4 + (upper ? 2 : 0) + unit / 2 * size + i % size;
}

// Interleaves a and b and adds up the results: half of the work of summing both.
template <int size, size_t... i>
inline Floats interleave_add(Floats a, Floats b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, interleaved(i, size, false)...) +
         __builtin_shufflevector(a, b, interleaved(i, size, true)...);
}

// The sums of four vectors.
inline Quad sum_four(Floats a, Floats b, Floats c, Floats d) {
  constexpr auto all = std::make_index_sequence<kWidth>{};
  return fold(
      interleave_add<2>(interleave_add<1>(a, b, all), interleave_add<1>(c, d, all), all));
}

// Elements of the KV cache. A value of the type survives the conversion to float and back. Sums of
// products take kLanes elements at a time, as Lanes; the elements of the other factor are a Factor.

struct Float32;

// The conversion of elements to Lanes if floats are multiplied.
template <class E>
struct FloatLanes {
  using Factor = Float32;
  using Lanes = Floats;
  static constexpr int kLanes = kWidth;
  static Floats lanes(const E* p, int) { return E::load(p); }
  static void add_products(Floats& total, Floats a, Floats b) { total += a * b; }
};

struct Float32 : FloatLanes<Float32> {
  float value;
  static Floats load(const Float32* p) { return load_as<Floats>(p); }
  static void store(Float32* p, Floats v) { std::memcpy(p, &v, sizeof v); }
};

struct BFloat16
#if !defined(__AVX512BF16__)
    : FloatLanes<BFloat16>
#endif
{
  uint16_t bits;
  static Floats load(const BFloat16* p) { return (Floats)(whole(&p->bits) << 16); }
  static void store(BFloat16* p, Floats v) {
    Halves h = __builtin_convertvector((Words)v >> 16, Halves);
    std::memcpy(p, &h, sizeof h);
  }
#if defined(__AVX512BF16__)
  using Factor = BFloat16;
  using Lanes = __m512bh;
  static constexpr int kLanes = 32;
  static Lanes lanes(const BFloat16* p, int left) {  // head sizes may be odd multiples of 16
    return (Lanes)_mm512_maskz_loadu_epi16(left >= kLanes ? ~__mmask32{} : 0xffff, p);
  }
  static void add_products(Floats& total, Lanes a, Lanes b) {
    total = (Floats)_mm512_dpbf16_ps((__m512)total, a, b);
  }
#endif
};

struct Float16 : FloatLanes<Float16> {
  uint16_t bits;
#if defined(__AVX512F__)
  static Floats load(const Float16* p) {
    return (Floats)_mm512_cvtph_ps(load_as<__m256i>(p));
  }
  static void store(Float16* p, Floats v) {
    __m256i h = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &h, sizeof h);
  }
#elif defined(__F16C__)
  static Floats load(const Float16* p) {
    return (Floats)_mm256_cvtph_ps(load_as<__m128i>(p));
  }
  static void store(Float16* p, Floats v) {
    __m128i h = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &h, sizeof h);
  }
#else
  static Floats load(const Float16* p) {
    Floats v;
    for (int i = 0; i < kWidth; ++i) v[i] = to_float(p[i].bits);
    return v;
  }
  static void store(Float16* p, Floats v) {
    for (int i = 0; i < kWidth; ++i) p[i].bits = from_float(v[i]);
  }

 private:
  static float to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t rest = uint32_t(h & 0x7fff);
    if (rest >= 0x7c00) return bits_as<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // Scaling by 2^112 moves the exponent's bias and handles subnormals at once.
    const float magnitude = bits_as<float>(rest << 13) * 0x1p112f;
    return sign ? -magnitude : magnitude;
  }
  static uint16_t from_float(float f) {  // rounds to nearest
    uint32_t u = bits_as<uint32_t>(f);
    const uint16_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return sign | 0x7e00;
    if (u >= 0x477ff000) return sign | 0x7c00;  // 65520 and above
    if (u < 0x38800000)  // subnormal; 1/2 has as many bits behind the point as these
      return sign | (bits_as<uint32_t>(bits_as<float>(u) + 0.5f) - 0x3f000000);
    u -= 0x38000000;
    return sign | (u + 0xfff + (u >> 13 & 1)) >> 13;
  }
#endif
};

// Stores values that E may not hold exactly, rounded to nearest.
template <class E>
inline void store_rounded(E* p, Floats v) {
  E::store(p, v);
}
template <>
inline void store_rounded<BFloat16>(BFloat16* p, Floats v) {
  const Words bits = (Words)v;
  const Words rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  BFloat16::store(p, (Floats)(v == v ? rounded : bits | 0x10000u));
}

// exp(x) / 2^exponent, relative error below 2e-7, for |x| < 2^20 and x < (exponent + 1) * ln 2; about
// 2^-126 for smaller x. The exponent changes the result by a power of two, and not its digits.
inline Floats exp_below(Floats x, int exponent) {
  constexpr float kShift = 12582912;  // its low bits are zero, and the next float is larger by 1
  x = max(x, splat(exponent * 0.693147181f - 87.0f));
  const Floats shifted = x * 1.44269504f + kShift, whole = shifted - kShift;
  const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Floats)((Words)p + (((Words)shifted - uint32_t(exponent)) << 23));
}

// exp(x) for x <= 0, relative error below 2e-7; 0 far below the smallest normal float.
inline Floats exp_nonpositive(Floats x) { return exp_below(x, 0); }

// `n` elements, a multiple of kWidth, as floats times a factor.
template <class E>
inline void scaled_to(float* to, const E* from, int n, float factor) {
  for (int i = 0; i < n; i += kWidth) {
    const Floats x = E::load(from + i) * factor;
    std::memcpy(to + i, &x, sizeof x);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
