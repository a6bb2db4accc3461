// What queries are to a low-rank index, and the stages of scoring in whole numbers, for N queries of a
// KV head together (low_rank_score.h).
#pragma once

#include <algorithm>
#include <vector>

#include "index/low_rank_record.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvr {
namespace KVR_ISA {

constexpr float kMeanMost = 16383;
constexpr float kFarthest = 100;      // powers of two; masses beyond it are summed anew
constexpr int kTokens = 32;           // of an entry, whose masses are summed together
constexpr int kLeastExponent = 64 << 23, kExponents = 0x7f800000;

// The queries of a task in whole numbers.
class RoundedQueries {
 public:
  struct Factors {
    float directions;  // of products with them; of base 2
    float mean;
    int offset;        // of products with directions, which are kept plus 8
    float farthest;    // product with directions, the scales' too, that is kFarthest
  };

  // queries [count, head_size]
  RoundedQueries(const float* queries, int count, int rank, int d, float scale)
      : d_(d), stride_(0) {
    for_blocks(rank, [&](int, int width) { stride_ += vectors(width) * 64; });
    thread_local std::vector<int8_t> bytes;
    thread_local std::vector<int16_t> halves;
    thread_local std::vector<Factors> factors;
    bytes.assign(count * stride_, 0);
    halves.resize(count * d);
    factors.resize(count);
    std::vector<int8_t> small(d);
    for (int i = 0; i < count; ++i, queries += d) {
      const float most = largest_magnitude(queries, d);
      const float coarse = std::max(most / kByteMost, kLeastScale);
      const float fine = std::max(most / kMeanMost, kLeastScale);
      int total = 0;
      for (int c = 0; c < d; ++c) {
        const int whole = static_cast<int>(rounded(queries[c] / coarse));
        small[c] = whole;
        halves[i * d + c] = static_cast<int>(rounded(queries[c] / fine));
        total += static_cast<int8_t>(whole);
      }
      spread(small.data(), rank, bytes.data() + i * stride_);
      const float factor = coarse * scale * kLog2E;
      factors[i] = {factor, fine * scale, 8 * total, kFarthest / factor};
    }
    bytes_ = bytes.data();
    halves_ = halves.data();
    factors_ = factors.data();
  }

  // As lanes of a block of directions need them: per vector of these, lower halves and upper ones.
  const int8_t* bytes(int i) const { return bytes_ + int64_t(i) * stride_; }
  const int16_t* halves(int i) const { return halves_ + int64_t(i) * d_; }
  const Factors& factors(int i) const { return factors_[i]; }
  int64_t stride() const { return stride_; }

  // Of 8 lanes, that a block of directions takes.
  int vectors(int width) const { return (d_ / 8 * width + 7) / 8; }

 private:
  void spread(const int8_t* channels, int rank, int8_t* to) const {
    for_blocks(rank, [&](int, int width) {
      for (int v = 0; v < vectors(width); ++v, to += 64)
        for (int lane = 0; lane < 8; ++lane) {
          const int row = (8 * v + lane) / width;
          if (row >= d_ / 8) continue;
          std::memcpy(to + 4 * lane, channels + 4 * row, 4);
          std::memcpy(to + 32 + 4 * lane, channels + d_ / 2 + 4 * row, 4);
        }
    });
  }

  const int d_;
  int64_t stride_;
  const int8_t* bytes_;
  const int16_t* halves_;
  const Factors* factors_;
};

// A query's products with the directions of an entry, times their scales, in 8 bits.
struct Along {
  alignas(16) int8_t parts[kMostRank];
  float unit;     // less the query's factor
  int16_t start;  // of sums with coefficients, which are kept plus 8
  int16_t limit;  // of their magnitude, for kFarthest
};

constexpr float kNoLimit = 32767;

#if defined(__AVX2__)

// Adds products of N queries with a vector of a block's directions; no sum of four exceeds 16 bits.
template <int N>
inline void add_products(__m256i pairs, const int8_t* q, int64_t stride, __m256i (&sums)[N]) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i lower = _mm256_and_si256(pairs, low);
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low);
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const __m256i sum =
        _mm256_add_epi16(_mm256_maddubs_epi16(lower, load_as<__m256i>(q + g * stride)),
                         _mm256_maddubs_epi16(upper, load_as<__m256i>(q + g * stride + 32)));
    sums[g] = _mm256_add_epi16(sums[g], sum);
  }
}

// Products of N queries with a block of directions, of `bytes`, without the queries' offsets.
template <int N>
inline void along_block(const uint8_t* p, int bytes, const int8_t* q, int64_t stride,
                        __m256i (&totals)[N]) {
  KVR_UNROLL for (int g = 0; g < N; ++g) totals[g] = _mm256_setzero_si256();
  for (; bytes > 0; bytes -= 128) {
    __m256i sums[N];
    KVR_UNROLL for (int g = 0; g < N; ++g) sums[g] = _mm256_setzero_si256();
    if (bytes >= 128) {
#pragma GCC unroll 2  // unrolled, the vectors do not fit in registers
      for (int v = 0; v < 4; ++v, p += 32, q += 64)
        add_products<N>(load_as<__m256i>(p), q, stride, sums);
    } else {
      for (int left = bytes; left > 0; left -= 32, p += 32, q += 64) {
        const __m256i lanes = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
        const __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), lanes);
        add_products<N>(_mm256_maskload_epi32(reinterpret_cast<const int*>(p), some), q, stride,
                        sums);
      }
    }
    KVR_UNROLL for (int g = 0; g < N; ++g)
      totals[g] = _mm256_add_epi32(totals[g], _mm256_madd_epi16(sums[g], _mm256_set1_epi16(1)));
  }
}

// The sums of lanes that have the same direction.
template <int kDirections>
inline __m128i folded(__m256i totals) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(totals), _mm256_extracti128_si256(totals, 1));
  if (kDirections <= 2) x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  if (kDirections == 1) x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1));
  return x;
}

// Products of N queries with a block of directions; on to the next block.
template <int N, int kDirections>
inline void block_products(int d, int64_t stride, const int (&offsets)[N], const uint8_t*& p,
                           const int8_t*& q, int32_t (&out)[N][kMostRank], int first) {
  const int bytes = d / 2 * kDirections;
  __m256i totals[N];
  along_block<N>(p, bytes, q, stride, totals);
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    if constexpr (kDirections == 8) {
      const __m256i x = _mm256_sub_epi32(totals[g], _mm256_set1_epi32(offsets[g]));
      std::memcpy(out[g] + first, &x, 32);
    } else {
      const __m128i x = _mm_sub_epi32(folded<kDirections>(totals[g]), _mm_set1_epi32(offsets[g]));
      std::memcpy(out[g] + first, &x, 4 * kDirections);
    }
  }
  p += bytes;
  q += (bytes + 31) / 32 * 64;
}

// Products of N queries, from the i-th on, with the directions.
template <int N>
inline void products(const uint8_t* record, const LowRankFields& f, int d,
                     const RoundedQueries& queries, int i, int32_t (&out)[N][kMostRank]) {
  const uint8_t* p = record + f.directions;
  const int8_t* q = queries.bytes(i);
  const int64_t stride = queries.stride();
  int offsets[N];
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    offsets[g] = queries.factors(i + g).offset;
    for (int k = 0; k < kMostRank; k += 8) {
      const __m256i none = _mm256_setzero_si256();
      std::memcpy(out[g] + k, &none, sizeof none);
    }
  }
  int first = 0;
  for (; first + 8 <= f.rank; first += 8) block_products<N, 8>(d, stride, offsets, p, q, out, first);
  if (f.rank & 4) block_products<N, 4>(d, stride, offsets, p, q, out, first);
  first += f.rank & 4;
  if (f.rank & 2) block_products<N, 2>(d, stride, offsets, p, q, out, first);
  first += f.rank & 2;
  if (f.rank & 1) block_products<N, 1>(d, stride, offsets, p, q, out, first);
}

// Products with the directions -> along them, given their scales.
inline Along round_along(const int32_t* products, __m256 first_scales, __m256 last_scales,
                         float farthest) {
  const __m256 a = _mm256_cvtepi32_ps(load_as<__m256i>(products)) * first_scales;
  const __m256 b = _mm256_cvtepi32_ps(load_as<__m256i>(products + 8)) * last_scales;
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256 both = _mm256_max_ps(_mm256_and_ps(a, magnitude), _mm256_and_ps(b, magnitude));
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  most = _mm_max_ps(most, _mm_shuffle_ps(most, most, 0x4e));
  most = _mm_max_ps(most, _mm_shuffle_ps(most, most, 0xb1));
  const __m128i exponents = _mm_and_si128(_mm_castps_si128(most), _mm_set1_epi32(kExponents));
  const __m128i exponent = _mm_max_epi32(exponents, _mm_set1_epi32(kLeastExponent));
  const __m128i inverse = _mm_sub_epi32(_mm_set1_epi32(int(260u << 23)), exponent);
  const __m256 factor = _mm256_castsi256_ps(_mm256_broadcastsi128_si256(inverse));
  const __m256i x = _mm256_cvtps_epi32(a * factor), y = _mm256_cvtps_epi32(b * factor);
  const __m128i bytes = _mm_packs_epi16(
      _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)),
      _mm_packs_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
  const __m128i halves = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  const int total = _mm_cvtsi128_si32(_mm_add_epi32(halves, _mm_shuffle_epi32(halves, 0x4e)));
  Along along;
  std::memcpy(along.parts, &bytes, sizeof bytes);
  along.unit = bits_as<float>(_mm_cvtsi128_si32(_mm_sub_epi32(exponent, _mm_set1_epi32(6 << 23))));
  along.start = -8 * (total - 128 * kMostRank);
  const __m128 limit = _mm_mul_ss(_mm_set_ss(farthest), _mm_castsi128_ps(inverse));
  along.limit = _mm_cvttss_si32(_mm_min_ss(limit, _mm_set_ss(kNoLimit)));
  return along;
}

// The parts along the directions of an entry, from products with these.
template <int N>
inline void round_products(const uint8_t* record, const int32_t (&products)[N][kMostRank],
                           const RoundedQueries& queries, int i, Along (&along)[N]) {
  const __m256 mean = _mm256_set1_ps(mean_scale_of(record));
  const auto scales = [&](int first) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(
        reinterpret_cast<const __m128i*>(record + LowRankFields::kScales + first)));
    return mean * _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(bytes, kScaleShift),
                                                       _mm256_set1_epi32(kScaleBias)));
  };
  const __m256 first_scales = scales(0), last_scales = scales(8);
  KVR_UNROLL for (int g = 0; g < N; ++g)
    along[g] = round_along(products[g], first_scales, last_scales,
                           queries.factors(i + g).farthest);
}

// Sums of what N queries have along the directions with the coefficients of 32 tokens or, in the
// first half of them, 16, within limits.
template <int N>
inline void sum_tokens(const uint8_t* c, int64_t stride, int pairs, int count,
                       const Along (&along)[N], int16_t (&sums)[N][kTokens]) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i lower[N], upper[N];
  KVR_UNROLL for (int g = 0; g < N; ++g)
    lower[g] = upper[g] = _mm256_set1_epi16(along[g].start);
  for (int p = 0; p < pairs; ++p, c += stride) {
    const __m256i both = count == kTokens ? load_as<__m256i>(c)
                                          : _mm256_castsi128_si256(load_as<__m128i>(c));
    const __m256i a = _mm256_and_si256(both, low);
    const __m256i b = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const __m256i parts = _mm256_set1_epi16(load_as<int16_t>(along[g].parts + 2 * p));
      lower[g] = _mm256_add_epi16(lower[g], _mm256_maddubs_epi16(a, parts));
      upper[g] = _mm256_add_epi16(upper[g], _mm256_maddubs_epi16(b, parts));
    }
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const __m256i most = _mm256_set1_epi16(along[g].limit), least = _mm256_set1_epi16(-along[g].limit);
    const auto store = [&](int16_t* to, __m256i sum) {
      const __m256i within = _mm256_min_epi16(_mm256_max_epi16(sum, least), most);
      std::memcpy(to, &within, sizeof within);
    };
    // Of 16 tokens at once, since a load that two stores feed waits for both.
    store(sums[g], _mm256_permute2x128_si256(lower[g], upper[g], 0x20));
    if (count == kTokens) store(sums[g] + 16, _mm256_permute2x128_si256(lower[g], upper[g], 0x31));
  }
}

inline Floats floats_of(const int16_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(load_as<__m256i>(p)));
#else
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(load_as<__m128i>(p)));
#endif
}

// Products of N queries with the mean, in as many lanes as there are.
template <int N>
inline void along_mean(const uint8_t* mean, int d, const int16_t* q, Floats (&out)[N]) {
  __m256i totals[N];
  KVR_UNROLL for (int g = 0; g < N; ++g) totals[g] = _mm256_setzero_si256();
  for (int c = 0; c < d; c += 16) {
    const __m256i x = _mm256_cvtepi8_epi16(load_as<__m128i>(mean + c));
    KVR_UNROLL for (int g = 0; g < N; ++g)
      totals[g] =
          _mm256_add_epi32(totals[g], _mm256_madd_epi16(x, load_as<__m256i>(q + g * d + c)));
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const __m256 sums = _mm256_cvtepi32_ps(totals[g]);
    out[g] = Floats{};
    std::memcpy(&out[g], &sums, sizeof sums);
  }
}

#else

template <int N>
inline void products(const uint8_t* record, const LowRankFields& f, int d,
                     const RoundedQueries& queries, int i, int32_t (&out)[N][kMostRank]) {
  const uint8_t* p = record + f.directions;
  const int8_t* q = queries.bytes(i);
  for (int g = 0; g < N; ++g)
    for (int k = 0; k < kMostRank; ++k) out[g][k] = k < f.rank ? -queries.factors(i + g).offset : 0;
  for_blocks(f.rank, [&](int first, int width) {
    for (int at = 0; at < d / 8 * width; ++at, p += 4)
      for (int g = 0; g < N; ++g) {
        const int8_t* words = q + g * queries.stride() + at / 8 * 64 + at % 8 * 4;
        for (int j = 0; j < 4; ++j)
          out[g][first + at % width] += (p[j] & 15) * words[j] + (p[j] >> 4) * words[32 + j];
      }
    q += queries.vectors(width) * 64;
  });
}

template <int N>
inline void round_products(const uint8_t* record, const int32_t (&products)[N][kMostRank],
                           const RoundedQueries& queries, int i, Along (&along)[N]) {
  const uint8_t* scales = record + LowRankFields::kScales;
  for (int g = 0; g < N; ++g) {
    float parts[kMostRank], most = 0;
    for (int k = 0; k < kMostRank; ++k) {
      parts[k] = products[g][k] * (direction_scale(scales[k]) * mean_scale_of(record));
      most = std::max(most, __builtin_fabsf(parts[k]));
    }
    const int32_t exponent = std::max(bits_as<int32_t>(most) & kExponents, kLeastExponent);
    const float factor = bits_as<float>((260u << 23) - exponent);
    int total = 0;
    for (int k = 0; k < kMostRank; ++k) {
      const float part = rounded(parts[k] * factor);
      along[g].parts[k] = part > 127 ? 127 : part >= -128 ? static_cast<int>(part) : -128;
      total += along[g].parts[k];
    }
    along[g].unit = bits_as<float>(exponent - (6 << 23));
    along[g].start = -8 * total;
    along[g].limit =
        static_cast<int>(std::min(queries.factors(i + g).farthest * factor, kNoLimit));
  }
}

template <int N>
inline void sum_tokens(const uint8_t* c, int64_t stride, int pairs, int count,
                       const Along (&along)[N], int16_t (&sums)[N][kTokens]) {
  for (int g = 0; g < N; ++g)
    for (int t = 0; t < count; ++t) {
      const uint8_t* at = c + t / 16 * 16 + t % 8 * 2;
      int total = along[g].start;
      for (int p = 0; p < pairs; ++p, at += stride)
        for (int k = 0; k < 2; ++k)
          total += (at[k] >> t / 8 % 2 * 4 & 15) * along[g].parts[2 * p + k];
      sums[g][t] = std::clamp<int>(total, -along[g].limit, along[g].limit);
    }
}

template <int N>
inline void along_mean(const uint8_t* mean, int d, const int16_t* q, Floats (&out)[N]) {
  for (int g = 0; g < N; ++g, q += d) {
    int total = 0;
    for (int c = 0; c < d; ++c) total += static_cast<int8_t>(mean[c]) * q[c];
    out[g] = Floats{static_cast<float>(total)};
  }
}

inline Floats floats_of(const int16_t* p) {
  Floats v;
  for (int i = 0; i < kWidth; ++i) v[i] = p[i];
  return v;
}

#endif

}  // namespace KVR_ISA
}  // namespace kvr
