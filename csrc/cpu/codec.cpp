// Encodes and decodes units; compiled once per instruction set, without contraction of products and
// sums, so that all of them choose the same codes.
#include "codec.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "codec_outliers.h"
#include "simd.h"

namespace kvr {
namespace KVR_ISA {

using Bytes = uint8_t __attribute__((vector_size(kWidth)));

constexpr float kLeastStep = 0x1p-100f;

// The magnitude rounded up to so many bits of mantissa.
static float keep_bits(float x, int mantissa) {
  const int drop = 23 - mantissa;
  return bits_as<float>((bits_as<uint32_t>(x) + ((1u << drop) - 1)) >> drop << drop);
}

struct Scale {
  float step, base;  // x = code * step + base
};

static float at_least(float step) { return step > kLeastStep ? step : kLeastStep; }

// The ways to encode a row, as retrieval/codec/rows.py has them.

struct Centred8 {
  static constexpr bool kSparse = false;
  static constexpr int kBits = 8, kLevels = 254, kWords = 1;
  static Scale of(float step) { return {step, -127 * step}; }
  static Scale fit(float low, float high) {
    return of(keep_bits(at_least((-low > high ? -low : high) / 127), 7));
  }
  static void pack(Scale s, uint16_t* words) { words[0] = bits_as<uint32_t>(s.step) >> 16; }
  static Scale unpack(const uint16_t* words) { return of(bits_as<float>(uint32_t(words[0]) << 16)); }
};

template <int bits>
struct FromLowest {
  static constexpr bool kSparse = false;
  static constexpr int kBits = bits, kLevels = (1 << bits) - 1, kWords = 2;
  static Scale fit(float low, float high) {
    const float nearer = bits_as<float>(bits_as<uint32_t>(low) & 0xffff0000u);
    const float base = nearer <= low ? nearer : keep_bits(low, 7);
    return {keep_bits(at_least((high - base) / kLevels), 7), base};
  }
  static void pack(Scale s, uint16_t* words) {
    words[0] = bits_as<uint32_t>(s.step) >> 16;
    words[1] = bits_as<uint32_t>(s.base) >> 16;
  }
  static Scale unpack(const uint16_t* words) {
    return {bits_as<float>(uint32_t(words[0]) << 16), bits_as<float>(uint32_t(words[1]) << 16)};
  }
};

template <int bits>
struct AroundZero {
  static constexpr bool kSparse = false;
  static constexpr int kBits = bits, kLevels = (1 << bits) - 1, kWords = 1;
  static Scale fit(float low, float high) {
    if (low > 0) low = 0;
    if (high < 0) high = 0;
    const float step = keep_bits(at_least((high - low) / kLevels), 4);
    return {step, -std::floor(-low / step + 0.5f) * step};
  }
  static void pack(Scale s, uint16_t* words) {
    const float zero = -s.base / s.step;
    words[0] = bits_as<uint32_t>(s.step) >> 19 << 4 | (zero == zero ? static_cast<uint32_t>(zero) : 0);
  }
  static Scale unpack(const uint16_t* words) {
    const float step = bits_as<float>(uint32_t(words[0]) >> 4 << 19);
    return {step, -static_cast<float>(words[0] & 15) * step};
  }
};

// A way to encode rows whose outliers are kept apart.
template <class R>
struct Sparse : R {
  static constexpr bool kSparse = true;
};

template <class R>
static Scale fit(const Ends& row) {
  if (!row.encodable) return {std::numeric_limits<float>::quiet_NaN(), 0};
  return R::fit(row.low + 0.0f, row.high);  // zero has no sign, whichever came first
}

// Bytes of words of `rows` rows, and of codes and outliers of as many rows of n.
template <class R>
static int64_t word_bytes(int rows) { return int64_t(2) * R::kWords * rows; }
template <class R>
static int64_t code_bytes(int rows, int n) { return int64_t(rows) * n * R::kBits / 8; }
template <class R, class E>
static int64_t list_bytes(int rows, int n) {
  return R::kSparse ? outlier_count(rows, n) * int64_t(2 + sizeof(E)) : 0;
}

template <class R, class E>
static void encode_rows(const E* x, int rows, int n, uint8_t* words, uint8_t* codes, uint8_t* list) {
  constexpr int kTogether = 8 / R::kBits;
  Ends ends[kMostRows];
  if constexpr (R::kSparse) {
    take_outliers(x, rows, n, ends, list);
  } else {
    for (int r = 0; r < rows; ++r) ends[r] = ends_of<false>(x + int64_t(r) * n, n);
  }
  float step[kMostRows], base[kMostRows];
  for (int r = 0; r < rows; ++r) {
    uint16_t packed[R::kWords];
    R::pack(fit<R>(ends[r]), packed);
    std::memcpy(words + word_bytes<R>(r), packed, sizeof packed);
    const Scale scale = R::unpack(packed);
    step[r] = 1 / scale.step;
    base[r] = scale.base;
  }
  const int apart = rows / kTogether;
  for (int r = 0; r < apart; ++r) {
    for (int i = 0; i < n; i += kWidth) {
      Ints all = {};
      for (int j = 0; j < kTogether; ++j) {
        const int row = r + j * apart;
        const Floats scaled = (E::load(x + int64_t(row) * n + i) - splat(base[row])) * step[row];
        const Floats code = min(max(scaled, splat(0)), splat(R::kLevels)) + 0.5f;
        all |= __builtin_convertvector(code, Ints) << (R::kBits * j);
      }
      const Bytes bytes = __builtin_convertvector(all, Bytes);
      std::memcpy(codes + int64_t(r) * n + i, &bytes, sizeof bytes);
    }
  }
}

template <class R, class E>
static void decode_rows(const uint8_t* words, const uint8_t* codes, const uint8_t* list, int rows,
                        int n, E* x) {
  constexpr int kTogether = 8 / R::kBits, kMask = (1 << R::kBits) - 1;
  const int apart = rows / kTogether;
  for (int r = 0; r < apart; ++r) {
    Scale scale[kTogether];
    for (int j = 0; j < kTogether; ++j) {
      uint16_t packed[R::kWords];
      std::memcpy(packed, words + word_bytes<R>(r + j * apart), sizeof packed);
      scale[j] = R::unpack(packed);
    }
    for (int i = 0; i < n; i += kWidth) {
      const Ints all = whole(codes + int64_t(r) * n + i);
      for (int j = 0; j < kTogether; ++j) {
        const Floats code = __builtin_convertvector(all >> (R::kBits * j) & kMask, Floats);
        store_rounded<E>(x + int64_t(r + j * apart) * n + i,
                         code * splat(scale[j].step) + splat(scale[j].base));
      }
    }
  }
  if constexpr (R::kSparse) lay_outliers(list, rows, n, x);
}

// Where the parts of an encoded unit begin.
template <class E, class K, class V>
struct Parts {
  Parts(uint8_t* encoded, int page_size, int head_size)
      : key_words(encoded), value_words(key_words + word_bytes<K>(head_size)),
        keys(value_words + word_bytes<V>(page_size)),
        values(keys + code_bytes<K>(head_size, page_size)),
        key_list(values + code_bytes<V>(page_size, head_size)),
        value_list(key_list + list_bytes<K, E>(head_size, page_size)) {}
  uint8_t *key_words, *value_words, *keys, *values, *key_list, *value_list;
};

template <class E, class K, class V>
static void code(const UnitCoding& c, bool encodes) {
  const int d = c.head_size, size = c.page_size;
  const int64_t bytes = encoded_bytes(c.codec, c.dtype, size, d);
  for (int64_t i = 0; i < c.count; ++i) {
    E* keys = static_cast<E*>(c.units) + i * 2 * size * d;
    E* values = keys + size * d;
    const Parts<E, K, V> parts(c.encoded + i * bytes, size, d);
    if (encodes) {
      encode_rows<K>(keys, d, size, parts.key_words, parts.keys, parts.key_list);
      encode_rows<V>(values, size, d, parts.value_words, parts.values, parts.value_list);
    } else {
      decode_rows<K>(parts.key_words, parts.keys, parts.key_list, d, size, keys);
      decode_rows<V>(parts.value_words, parts.values, parts.value_list, size, d, values);
    }
  }
}

template <class E>
static void code_of(const UnitCoding& c, bool encodes) {
  switch (c.codec) {
    case Codec::kK8V4: return code<E, Centred8, AroundZero<4>>(c, encodes);
    case Codec::kK4V4: return code<E, FromLowest<4>, AroundZero<4>>(c, encodes);
    case Codec::kK2V2: return code<E, FromLowest<2>, AroundZero<2>>(c, encodes);
    case Codec::kK4V4Sparse: return code<E, Sparse<FromLowest<4>>, Sparse<AroundZero<4>>>(c, encodes);
    case Codec::kK2V2Sparse: return code<E, Sparse<FromLowest<2>>, Sparse<AroundZero<2>>>(c, encodes);
    default: break;
  }
  const size_t bytes = c.count * encoded_bytes(c.codec, c.dtype, c.page_size, c.head_size);
  std::memcpy(encodes ? c.encoded : c.units, encodes ? c.units : c.encoded, bytes);
}

static void code_units(const UnitCoding& c, bool encodes) {
  switch (c.dtype) {
    case DType::kBFloat16: return code_of<BFloat16>(c, encodes);
    case DType::kFloat16: return code_of<Float16>(c, encodes);
    case DType::kFloat32: return code_of<Float32>(c, encodes);
  }
}

void encode_units(const UnitCoding& c) { code_units(c, true); }
void decode_units(const UnitCoding& c) { code_units(c, false); }

}  // namespace KVR_ISA
}  // namespace kvr
