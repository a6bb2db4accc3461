// The sums of a one-bit index (one_bit.h). Steps have 16 bits; where the instruction set multiplies
// bytes, they are split into a higher and a lower signed byte. The bits of tokens are bytes of 0 and 1.
#pragma once

#include "index/task.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kStepChannels = 32;  // their steps are stored together

// Stores queries * widths * factor, whole numbers below 2^15, for kStepChannels channels. Each word
// holds the higher or the lower bytes of four channels, or whole steps of two; see StepWords.
inline void store_steps(const float* queries, const float* widths, float factor, int8_t* to) {
#if defined(__AVX512F__)
  const auto numbers = [&](int c) {
    return _mm512_cvtps_epi32(
        (__m512)(load_as<Floats>(queries + c) * load_as<Floats>(widths + c) * factor));
  };
  const __m512i x = _mm512_packs_epi32(numbers(0), numbers(16));
  const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(128)), 8);
  const __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8);
  const __m512i bytes = _mm512_packs_epi16(high, low);
  std::memcpy(to, &bytes, sizeof bytes);
#elif defined(__AVX2__)
  const auto numbers = [&](int c) {
    const auto number = [&](int i) {
      return _mm256_cvtps_epi32(
          (__m256)(load_as<Floats>(queries + i) * load_as<Floats>(widths + i) * factor));
    };
    return _mm256_packs_epi32(number(c), number(c + 8));
  };
  const __m256i x = numbers(0), y = numbers(16), half = _mm256_set1_epi16(128);
  const auto high = [&](__m256i x) { return _mm256_srai_epi16(_mm256_add_epi16(x, half), 8); };
  const auto low = [](__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); };
  const __m256i bytes[2] = {_mm256_packs_epi16(high(x), high(y)), _mm256_packs_epi16(low(x), low(y))};
  std::memcpy(to, bytes, sizeof bytes);
#else
  constexpr float kShift = 12582912;  // of which the low bits are zero, and the next number's 1
  for (int c = 0; c < kStepChannels; ++c) {
    const float shifted = queries[c] * widths[c] * factor + kShift;
    const auto number = static_cast<int16_t>(bits_as<int32_t>(shifted));
    const int word = c % 2 * 8 + c / 4;  // whole steps of every other channel of four
    std::memcpy(to + 4 * word + c % 4 / 2 * 2, &number, sizeof number);
  }
#endif
}

// The stored steps of channels 4 k to 4 k + 3.
struct StepWords {
  int32_t high, low;
  StepWords(const int8_t* steps, int k) {
#if defined(__AVX512F__)
    const int first = k < 4 ? 4 * k : 4 * k - 15, second = first + 2;
#elif defined(__AVX2__)
    const int first = k % 2 * 4 + k / 2, second = first + 8;
#else
    const int first = k, second = first + 8;
#endif
    high = load_as<int32_t>(steps + 4 * first);
    low = load_as<int32_t>(steps + 4 * second);
  }
};

// The sums of steps of kWidth tokens.
class StepSums {
 public:
  // `set` has a word per token, a byte of 0 or 1 for each of four channels.
  void add(Words set, StepWords steps) {
#if defined(__AVX512F__)
    high_ = _mm512_dpbusd_epi32(high_, (__m512i)set, _mm512_set1_epi32(steps.high));
    low_ = _mm512_dpbusd_epi32(low_, (__m512i)set, _mm512_set1_epi32(steps.low));
#elif defined(__AVX2__)  // no byte exceeds its step, and all steps add up to kMost
    high_ = _mm256_add_epi16(
        high_, _mm256_maddubs_epi16((__m256i)set, _mm256_set1_epi32(steps.high)));
    low_ = _mm256_add_epi16(low_, _mm256_maddubs_epi16((__m256i)set, _mm256_set1_epi32(steps.low)));
#else
    sums_ += -(Sums)(set & 0x00010001u) & (Sums)(Ints{} + steps.high);
    sums_ += -(Sums)(set >> 8 & 0x00010001u) & (Sums)(Ints{} + steps.low);
#endif
  }

  Ints total() const {
#if defined(__AVX512F__)
    return ((Ints)high_ << 8) + (Ints)low_;
#elif defined(__AVX2__)
    const __m256i one = _mm256_set1_epi16(1);
    return ((Ints)_mm256_madd_epi16(high_, one) << 8) + (Ints)_mm256_madd_epi16(low_, one);
#else
    return ((Ints)sums_ << 16 >> 16) + ((Ints)sums_ >> 16);
#endif
  }

 private:
#if defined(__AVX512F__)
  __m512i high_ = _mm512_setzero_si512(), low_ = high_;
#elif defined(__AVX2__)
  __m256i high_ = _mm256_setzero_si256(), low_ = high_;
#else
  using Sums = int16_t __attribute__((vector_size(4 * kWidth)));
  Sums sums_ = {};
#endif
};

}  // namespace KVR_ISA
}  // namespace kvr
