// Low-rank factors of the keys: every key is the mean and a few directions, in parts of its own. The
// score is the logarithm of the mass of the keys so approximated.
//
// Record: scale of the mean, scales of the directions [rank] (floats); mean [head_size], 8 bits;
// directions [head_size / 8, rank, 4], 4 bits plus 8: byte (i, k, j) has channel 4 i + j of direction
// k below and head_size / 2 + 4 i + j above; coefficients [rank, entry_tokens / 16, 8], 4 bits plus 8:
// byte (k, i, j) has token 16 i + j below and 16 i + 8 + j above.
//
// Scoring is in whole numbers up to the products of query and directions, which come out side by
// side, a lane each: so are the directions in the record. Queries are rounded to 8 bits for them,
// and to kMeanMost for the mean, on which all tokens of the entry depend.
#pragma once

#include <cstring>
#include <vector>

#include "index/mean.h"
#include "index/principal.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvr {
namespace KVR_ISA {

constexpr float kNibbleMost = 7, kByteMost = 127, kMeanMost = 16383;
constexpr float kLeastScale = 1e-8f;  // of what is rounded
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr float kFarthest = 100;      // powers of two; masses beyond it are summed anew

// Bytes that the coefficients of a direction take.
constexpr int coefficient_bytes(int tokens) { return tokens / 2; }

// Where a record has its fields.
struct LowRankFields {
  int rank, mean, directions, coefficients;
  explicit LowRankFields(const Index& index)
      : rank(index.rank), mean(4 + 4 * rank), directions(mean + index.head_size),
        coefficients(directions + rank * index.head_size / 2) {}
};

inline float load_float(const uint8_t* p) { return load_as<float>(p); }

// Whole numbers nearest to x, below 2^22; a vector of floats of any width.
template <class V>
inline V rounded(V x) {
  constexpr float kShift = 12582912;
  return (x + kShift) - kShift;
}

inline float largest(Floats v) {
  float most = v[0];
  for (int i = 1; i < kWidth; ++i) most = std::max(most, v[i]);
  return most;
}

inline float largest_magnitude(const float* values, int n) {
  Floats most = {};
  for (int i = 0; i < n; i += kWidth) {
    const Floats x = load_as<Floats>(values + i);
    most = max(most, max(x, -x));
  }
  return largest(most);
}

// 2^x for |x| < 126, relative error below 3e-6.
inline Floats power_of_two(Floats x) {
  constexpr float kShift = 12582912;
  const Floats shifted = x + kShift, f = x - (shifted - kShift);
  Floats p = splat(9.5701003e-3f);
  p = p * f + 5.5917863e-2f;
  p = p * f + 2.4024744e-1f;
  p = p * f + 6.9312179e-1f;
  p = p * f + 9.9999928e-1f;
  return (Floats)((Words)p + ((Words)shifted << 23));
}

// log(x) for positive normal x, error below 1e-6.
inline Quad log_positive(Quad x) {
  using QuadInts = int32_t __attribute__((vector_size(16)));
  const QuadInts bits = (QuadInts)x - 0x3f3504f3;  // from sqrt(1/2) on
  const QuadInts exponent = bits >> 23;
  const Quad m = (Quad)((bits & 0x7fffff) + 0x3f3504f3);
  const Quad s = (m - 1) / (m + 1), t = s * s;
  const Quad series = (((t / 9 + 1 / 7.0f) * t + 0.2f) * t + 1 / 3.0f) * t + 1;
  return __builtin_convertvector(exponent, Quad) * kLn2 + 2 * s * series;
}

// The queries of a task in whole numbers.
class RoundedQueries {
 public:
  struct Factors {
    float directions;  // of products with them; of base 2
    float mean;
    float offset;      // of products with directions, which are kept less 8
  };

  template <class E>
  explicit RoundedQueries(const ScoreTask<E>& t) : d_(t.index.head_size) {
    thread_local std::vector<int8_t> bytes;
    thread_local std::vector<int16_t> halves;
    thread_local std::vector<Factors> factors;
    const float* query = float_queries(t, 1);
    const int count = t.heads * t.group;
    bytes.resize(count * d_);
    halves.resize(count * d_);
    factors.resize(count);
    for (int i = 0; i < count; ++i, query += d_) {
      const float most = largest_magnitude(query, d_);
      const float coarse = std::max(most / kByteMost, kLeastScale);
      const float fine = std::max(most / kMeanMost, kLeastScale);
      int total = 0;
      for (int c = 0; c < d_; c += kWidth) {
        const Floats x = load_as<Floats>(query + c);
        const Ints small = __builtin_convertvector(rounded(x / coarse), Ints);
        const Ints exact = __builtin_convertvector(rounded(x / fine), Ints);
        for (int k = 0; k < kWidth; ++k) {
          bytes[i * d_ + place(c + k)] = small[k];
          halves[i * d_ + c + k] = exact[k];
          total += static_cast<int8_t>(small[k]);
        }
      }
      factors[i] = {coarse * t.scale * kLog2E, fine * t.scale, 8.0f * total};
    }
    bytes_ = bytes.data();
    halves_ = halves.data();
    factors_ = factors.data();
  }

  // In the order of a direction's bytes, low halves before high ones, four by four.
  const int8_t* bytes(int i) const { return bytes_ + int64_t(i) * d_; }
  const int16_t* halves(int i) const { return halves_ + int64_t(i) * d_; }
  const Factors& factors(int i) const { return factors_[i]; }

 private:
  int place(int channel) const {
    const bool upper = channel >= d_ / 2;
    const int c = channel - upper * d_ / 2;
    return c / 4 * 8 + upper * 4 + c % 4;
  }

  const int d_;
  const int8_t* bytes_;
  const int16_t* halves_;
  const Factors* factors_;
};

#if defined(__AVX2__)

// Adds kRows rows' products with 8 directions, for N queries; no sum of theirs exceeds 16 bits.
template <int N, int kRows>
inline void add_rows(const uint8_t* row, int row_bytes, __m256i mask, const int8_t* q, int d,
                     __m256i (&totals)[N]) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i sums[N];
  KVR_UNROLL for (int r = 0; r < kRows; ++r, row += row_bytes, q += 8) {
    const __m256i pairs = _mm256_maskload_epi32(reinterpret_cast<const int*>(row), mask);
    const __m256i lower = _mm256_and_si256(pairs, low);
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low);
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const int8_t* words = q + g * d;
      const __m256i sum = _mm256_add_epi16(
          _mm256_maddubs_epi16(lower, _mm256_set1_epi32(load_as<int32_t>(words))),
          _mm256_maddubs_epi16(upper, _mm256_set1_epi32(load_as<int32_t>(words + 4))));
      sums[g] = r == 0 ? sum : _mm256_add_epi16(sums[g], sum);
    }
  }
  KVR_UNROLL for (int g = 0; g < N; ++g)
    totals[g] = _mm256_add_epi32(totals[g], _mm256_madd_epi16(sums[g], _mm256_set1_epi16(1)));
}

// Products of N queries with the directions, times their scales; of base 2.
template <int N>
inline void along_directions(const uint8_t* record, const LowRankFields& f, int d,
                             const RoundedQueries& queries, int first, float (&along)[N][kMostRank]) {
  const int row_bytes = 4 * f.rank, rows = d / 8;
  for (int k = 0; k < f.rank; k += 8) {
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(f.rank - k),
                                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const uint8_t* row = record + f.directions + 4 * k;
    const int8_t* q = queries.bytes(first);
    __m256i totals[N] = {};
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      add_rows<N, 4>(row + r * row_bytes, row_bytes, mask, q + 8 * r, d, totals);
    if (r < rows) add_rows<N, 2>(row + r * row_bytes, row_bytes, mask, q + 8 * r, d, totals);
    const __m256 scales =
        _mm256_maskload_ps(reinterpret_cast<const float*>(record + 4) + k, mask);
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const RoundedQueries::Factors& factors = queries.factors(first + g);
      const __m256 z = (_mm256_cvtepi32_ps(totals[g]) - factors.offset) * factors.directions * scales;
      std::memcpy(along[g] + k, &z, sizeof z);
    }
  }
}

// Products of N queries with the mean, in as many lanes as there are.
template <int N>
inline void along_mean(const uint8_t* mean, int d, const int16_t* q, Floats* out, int stride) {
  __m256i totals[N] = {};
  for (int c = 0; c < d; c += 16) {
    const __m256i x = _mm256_cvtepi8_epi16(load_as<__m128i>(mean + c));
    KVR_UNROLL for (int g = 0; g < N; ++g)
      totals[g] =
          _mm256_add_epi32(totals[g], _mm256_madd_epi16(x, load_as<__m256i>(q + g * d + c)));
  }
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    const __m256 sums = _mm256_cvtepi32_ps(totals[g]);
    out[g * stride] = Floats{};
    std::memcpy(out + g * stride, &sums, sizeof sums);
  }
}

// The coefficients, plus 8, of kWidth tokens; p has the bytes of 16, of which these are the `upper`
// half where a vector holds 8.
inline Floats coefficients(const uint8_t* p, [[maybe_unused]] bool upper) {
  const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i low = _mm_set1_epi8(15), shifted = _mm_srli_epi16(pairs, 4);
#if defined(__AVX512F__)
  const __m128i both =
      _mm_unpacklo_epi64(_mm_and_si128(pairs, low), _mm_and_si128(shifted, low));
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(both));
#else
  return (Floats)_mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_and_si128(upper ? shifted : pairs, low)));
#endif
}

#else

template <int N>
inline void along_directions(const uint8_t* record, const LowRankFields& f, int d,
                             const RoundedQueries& queries, int first, float (&along)[N][kMostRank]) {
  int totals[N][kMostRank] = {};
  const uint8_t* pair = record + f.directions;
  for (int c = 0; c < d; c += 8)
    for (int k = 0; k < f.rank; ++k, pair += 4)
      for (int g = 0; g < N; ++g) {
        const int8_t* q = queries.bytes(first + g) + c;
        for (int j = 0; j < 4; ++j) totals[g][k] += (pair[j] & 15) * q[j] + (pair[j] >> 4) * q[j + 4];
      }
  for (int g = 0; g < N; ++g) {
    const RoundedQueries::Factors& factors = queries.factors(first + g);
    for (int k = 0; k < f.rank; ++k)
      along[g][k] = (totals[g][k] - factors.offset) * factors.directions * load_float(record + 4 + 4 * k);
  }
}

template <int N>
inline void along_mean(const uint8_t* mean, int d, const int16_t* q, Floats* out, int stride) {
  for (int g = 0; g < N; ++g, q += d) {
    int total = 0;
    for (int c = 0; c < d; ++c) total += static_cast<int8_t>(mean[c]) * q[c];
    out[g * stride] = Floats{static_cast<float>(total)};
  }
}

// The coefficients, plus 8, of kWidth tokens, in the `upper` half of p's bytes or the lower.
inline Floats coefficients(const uint8_t* p, bool upper) {
  Floats v;
  for (int i = 0; i < kWidth; ++i) v[i] = p[i] >> 4 * upper & 15;
  return v;
}

#endif

// Adds the masses of T * kWidth of n tokens, relative to the mean's, for N query heads.
template <int N, int T>
inline void add_masses(const uint8_t* rows, int n, int rank, int token,
                       const float (&along)[N][kMostRank], Floats* totals, int stride) {
  Floats scores[N][T];
  KVR_UNROLL for (int g = 0; g < N; ++g) {
    float all = 0;
    for (int k = 0; k < rank; ++k) all += along[g][k];
    KVR_UNROLL for (int v = 0; v < T; ++v) scores[g][v] = splat(-8 * all);
  }
  for (int k = 0; k < rank; ++k, rows += coefficient_bytes(n)) {
    Floats x[T];
    KVR_UNROLL for (int v = 0; v < T; ++v) {
      const int first = token + v * kWidth;
      // In vectors of 8, an even number of them begins with the lower half.
      const bool upper = kWidth == 8 && T > 1 ? v % 2 : first / 8 % 2;
      x[v] = coefficients(rows + first / 16 * 8 + first % 8, upper);
    }
    KVR_UNROLL for (int g = 0; g < N; ++g)
      KVR_UNROLL for (int v = 0; v < T; ++v) scores[g][v] += x[v] * along[g][k];
  }
  KVR_UNROLL for (int g = 0; g < N; ++g)
    KVR_UNROLL for (int v = 0; v < T; ++v)
      totals[g * stride] +=
          power_of_two(min(max(scores[g][v], splat(-kFarthest)), splat(kFarthest)));
}

template <class E>
struct LowRank {
  static void score(const ScoreTask<E>& t) {
    using Fn = decltype(&score_heads<1>);
    static constexpr Fn kFns[kGroupBlock] = {score_heads<1>, score_heads<2>, score_heads<3>,
                                             score_heads<4>, score_heads<5>, score_heads<6>,
                                             score_heads<7>, score_heads<8>};
    const RoundedQueries queries(t);
    by_blocks(t, t.index.record_bytes, [&](int head, int first, int last, float* out) {
      for (int g = 0; g < t.group; g += kGroupBlock)
        kFns[std::min(kGroupBlock, t.group - g) - 1](queries, head * t.group + g, t, head, first,
                                                     last, out + g * t.stride);
    });
  }

  static void build(const BuildTask<E>& t) {
    const int d = t.index.head_size, n = t.index.entry_tokens, rank = t.index.rank, width = padded(n);
    const LowRankFields f(t.index);
    thread_local Principal principal;
    thread_local std::vector<float> buffer;
    buffer.resize(d + d * width + d * kMostRank + kMostRank * width);
    float* mean = buffer.data();
    float* rest = mean + d;
    float* directions = rest + d * width;
    float* parts = directions + d * kMostRank;
    for (int c = 0; c < d; ++c) {
      const float* row = t.keys + c * n;
      mean[c] = mean_of(row, n);
      for (int i = 0; i < n; ++i) rest[c * width + i] = row[i] - mean[c];
      std::fill(rest + c * width + n, rest + (c + 1) * width, 0.0f);
    }
    principal.find(rest, d, n, rank, directions);
    round_directions(directions, d, rank, t.record + f.directions);
    store_rounded_bytes(mean, d, t.record + f.mean, t.record);
    // The coefficients are for what has been rounded.
    const float mean_scale = load_float(t.record);
    for (int c = 0; c < d; ++c) {
      const float off = mean[c] - static_cast<int8_t>(t.record[f.mean + c]) * mean_scale;
      for (int i = 0; i < n; ++i) rest[c * width + i] += off;
    }
    fit_coefficients(directions, rest, d, width, rank, parts);
    for (int k = 0; k < rank; ++k)
      round_coefficients(parts + k * width, n,
                         t.record + f.coefficients + k * coefficient_bytes(n),
                         t.record + 4 + 4 * k);
  }

 private:
  // Of at most kBlock entries of a KV head, for N query heads from the task's i-th on.
  template <int N>
  static void score_heads(const RoundedQueries& queries, int i, const ScoreTask<E>& t, int head,
                          int first, int last, float* out) {
    // Vectors of tokens at a time, so that their scores have registers.
#ifndef KR
#define KR 12
#endif
    constexpr int kRegisters = kWidth == 16 ? 24 : KR;
    constexpr int kTogether = N * 4 <= kRegisters ? 4 : N * 2 <= kRegisters ? 2 : 1;
    const LowRankFields f(t.index);
    const int d = t.index.head_size, n = t.index.entry_tokens;
    float along[N][kMostRank];
    Floats masses[N][kBlock] = {}, means[N][kBlock] = {};
    Quad mean_scales = {};
    for (int e = 0; e < last - first; ++e) {
      const uint8_t* record = t.records.at(first + e, t.first_head + head);
      mean_scales[e] = load_float(record);
      along_mean<N>(record + f.mean, d, queries.halves(i), &means[0][e], kBlock);
      along_directions<N>(record, f, d, queries, i, along);
      const uint8_t* c = record + f.coefficients;
      int token = 0;
      for (; token + kTogether * kWidth <= n; token += kTogether * kWidth)
        add_masses<N, kTogether>(c, n, f.rank, token, along, &masses[0][e], kBlock);
      for (; token < n; token += kWidth)
        add_masses<N, 1>(c, n, f.rank, token, along, &masses[0][e], kBlock);
    }
    KVR_UNROLL for (int g = 0; g < N; ++g) {
      const Quad mass = sum_four(masses[g][0], masses[g][1], masses[g][2], masses[g][3]);
      const Quad mean = sum_four(means[g][0], means[g][1], means[g][2], means[g][3]) *
                        mean_scales * queries.factors(i + g).mean;
      const Quad scores = mean + log_positive(mass);
      float* to = out + g * t.stride + first;
      if (last - first == kBlock)
        std::memcpy(to, &scores, sizeof scores);
      else
        std::memcpy(to, &scores, (last - first) * sizeof(float));
      for (int e = 0; e < last - first; ++e)
        if (!(mass[e] > 0x1p-60f && mass[e] < 0x1p99f))
          to[e] = mean[e] + far_mass(t.records.at(first + e, t.first_head + head), t.index, queries,
                                     i + g);
    }
  }

  // Directions [d, kMostRank] -> whole numbers of each one's scale, there and in the record.
  static void round_directions(float* directions, int d, int rank, uint8_t* out) {
    constexpr int kVectors = kMostRank / kWidth;
    Floats most[kVectors] = {};
    for (int c = 0; c < d; ++c)
      for (int v = 0; v < kVectors; ++v) {
        const Floats x = load_as<Floats>(directions + c * kMostRank + v * kWidth);
        most[v] = max(most[v], max(x, -x));
      }
    for (Floats& m : most) m = kNibbleMost / max(m, splat(kLeastScale));
    const auto round = [&](int c, int v) {
      float* p = directions + c * kMostRank + v * kWidth;
      const Floats x = rounded(load_as<Floats>(p) * most[v]);
      store_floats(p, x);
      return __builtin_convertvector(x, Ints) + 8;
    };
    for (int c = 0; c < d / 2; ++c)
      for (int v = 0; v < kVectors; ++v) {
        const Ints pairs = (round(c, v) & 15) | (round(d / 2 + c, v) & 15) << 4;
        for (int k = v * kWidth; k < std::min((v + 1) * kWidth, rank); ++k)
          out[(c / 4 * rank + k) * 4 + c % 4] = pairs[k - v * kWidth];
      }
  }

  // Values as whole numbers of a scale.
  static void store_rounded_bytes(const float* values, int n, uint8_t* out, uint8_t* scale) {
    float most = 0;
    for (int i = 0; i < n; ++i) most = std::max(most, __builtin_fabsf(values[i]));
    const float unit = std::max(most / kByteMost, kLeastScale), inverse = 1 / unit;
    std::memcpy(scale, &unit, 4);
    for (int i = 0; i < n; ++i)
      out[i] = static_cast<int>(rounded(values[i] * inverse));
  }

  // Values of a direction as whole numbers of its scale.
  static void round_coefficients(const float* values, int n, uint8_t* out, uint8_t* scale) {
    float most = 0;
    for (int i = 0; i < n; ++i) most = std::max(most, __builtin_fabsf(values[i]));
    const float unit = std::max(most / kNibbleMost, kLeastScale), inverse = 1 / unit;
    std::memcpy(scale, &unit, 4);
    const auto whole = [&](int token) {
      return (static_cast<int>(rounded(values[token] * inverse)) + 8) & 15;
    };
    for (int i = 0; i < coefficient_bytes(n); ++i)
      out[i] = whole(i / 8 * 16 + i % 8) | whole(i / 8 * 16 + 8 + i % 8) << 4;
  }

  static int coefficient(const uint8_t* row, int token) {
    return (row[token / 16 * 8 + token % 8] >> token / 8 % 2 * 4 & 15) - 8;
  }

  // parts [rank, width]: of the directions, such that the rest is nearest to their sums.
  static void fit_coefficients(const float* directions, const float* rest, int d, int width, int rank,
                               float* parts) {
    float squares[kMostRank][kMostRank];
    outer_products(directions, kMostRank, rank, directions, kMostRank, kMostRank, d, squares[0],
                   kMostRank);
    outer_products(directions, kMostRank, rank, rest, width, width, d, parts, width);
    // Cholesky's factors of the squares, inverses in the diagonal; directions may be zero or alike.
    for (int k = 0; k < rank; ++k) {
      float left = squares[k][k] * 1.0005f;
      for (int j = 0; j < k; ++j) left -= squares[k][j] * squares[k][j];
      squares[k][k] = 1 / __builtin_sqrtf(std::max(left, 1e-3f));
      for (int i = k + 1; i < rank; ++i) {
        float x = squares[i][k];
        for (int j = 0; j < k; ++j) x -= squares[i][j] * squares[k][j];
        squares[i][k] = x * squares[k][k];
      }
    }
    for (int i = 0; i < width; i += kWidth) {
      float* column = parts + i;
      const auto part = [&](int k) { return load_as<Floats>(column + k * width); };
      for (int k = 0; k < rank; ++k) {
        Floats x = part(k);
        for (int j = 0; j < k; ++j) x -= part(j) * squares[k][j];
        store_floats(column + k * width, x * squares[k][k]);
      }
      for (int k = rank - 1; k >= 0; --k) {
        Floats x = part(k);
        for (int j = k + 1; j < rank; ++j) x -= part(j) * squares[j][k];
        store_floats(column + k * width, x * squares[k][k]);
      }
    }
  }

  // Logarithm of the mass relative to the mean's, however far from it.
  static float far_mass(const uint8_t* record, const Index& index, const RoundedQueries& queries,
                        int i) {
    const LowRankFields f(index);
    const int n = index.entry_tokens;
    float along[1][kMostRank];
    along_directions<1>(record, f, index.head_size, queries, i, along);
    thread_local std::vector<float> scores;
    scores.assign(padded(n), 0);
    for (int k = 0; k < f.rank; ++k)
      for (int token = 0; token < n; ++token)
        scores[token] += coefficient(record + f.coefficients + k * coefficient_bytes(n), token) *
                         (along[0][k] * kLn2);
    return log_sum_exp(scores.data(), n);
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
