// Products of many tokens with weights of 8 or 4 bits, by AMX, in bfloat16: tokens are rounded to it, and so
// are weights, once for all tokens, with the scale and the offset of their group. Those of layers without
// groups are whole numbers, which it holds. Sums are float32.
#include "quantised.h"

#include "amx/tiles.h"
#include "room.h"

namespace kvr {
namespace avx512 {
void multiply_quantised(const QuantisedLayer&);  // quantised.cpp
}  // namespace avx512
namespace KVR_ISA {

static_assert(kPanel == kWidth && kTileRows == kWidth && kBlock == 2 * kWidth);

constexpr int64_t kFewest = 16;            // tokens; fewer take less time in 8 bits, without tiles
constexpr int64_t kAtOnceBytes = 1 << 20;  // of tokens, which stay in the second cache
constexpr int64_t kLeastAtOnce = 128;      // tokens that a weight is rounded for
constexpr int kDeep = 8;                   // blocks whose rounded weights stay in the first cache
constexpr int kSide = 2;                   // tiles of tokens, and panels, that meet in registers
constexpr int kTileFloats = kTileRows * kPanel;
constexpr int kTileHalves = 2 * kTileFloats;

constexpr TileShapes kShapes = TileShapes{}.with(0, 8, kTileRows, kBlock * sizeof(BFloat16));

// Tiles meet inputs in pairs: of four that lie side by side the first and the third, and the others.
inline __m512i in_pairs(__m512i of_token) {
  alignas(64) static constexpr uint16_t kOrder[kBlock] = {
      0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
      16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31};
  return _mm512_permutexvar_epi16(load_as<__m512i>(kOrder), of_token);
}

// Tokens in bfloat16.
class Tokens {
 public:
  int64_t blocks;
  BFloat16* values;  // [tokens / kTileRows, blocks, kTileRows, kBlock]; inputs are padded by zeros

  void resize(int64_t tokens, int64_t inputs) {
    blocks = (inputs + kBlock - 1) / kBlock;
    values = values_.of((tokens + kTileRows - 1) / kTileRows * blocks * kTileHalves);
  }

  const BFloat16* tile(int64_t token, int64_t block) const {
    return values + (token / kTileRows * blocks + block) * kTileHalves;
  }

  // The layer's token, as that of a row.
  template <class E>
  void round_token(const QuantisedLayer& l, int64_t token, int64_t row) {
    const E* x = static_cast<const E*>(l.x) + token * l.inputs;
    BFloat16* to = values + row / kTileRows * blocks * kTileHalves + row % kTileRows * kBlock;
    for (int64_t left = l.inputs; left > 0; left -= kBlock, x += kBlock, to += kTileHalves) {
      E padded[kBlock];
      const E* from = x;
      if (left < kBlock) {
        std::memset(reinterpret_cast<void*>(padded), 0, sizeof padded);
        from = std::copy_n(x, left, padded) - left;
      }
      const auto halves = _mm512_cvtne2ps_pbh((__m512)E::load(from + kWidth), (__m512)E::load(from));
      const __m512i pairs = in_pairs((__m512i)halves);
      std::memcpy(to, &pairs, sizeof pairs);
    }
  }

 private:
  Room<BFloat16> values_;
};

// The weights of a panel in bfloat16.
template <int kBits>
class Widening {
 public:
  static constexpr int kBytes = kBlock * kPanel * kBits / 8;  // of a block

  Widening(const QuantisedLayer& layer, int64_t blocks, int64_t panel)
      : l_(layer), weights_(layer.weights + panel * blocks * kBytes) {
    if (l_.groups) groups_ = static_cast<const Float16*>(l_.groups) + panel * l_.num_groups() * 2 * kPanel;
  }

  const int8_t* block(int64_t block) const { return weights_ + block * kBytes; }

  // A tile; `ahead` is as much memory that is read next.
  void widen(int64_t block, const int8_t* ahead, __m512i* to) const {
    Floats scale = splat(1), offset = {};
    if (groups_) {
      const Float16* const group = groups_ + block * kBlock / l_.group * 2 * kPanel;
      scale = Float16::load(group);
      offset = Float16::load(group + kPanel);
    }
    offset -= scale * kBias;
    const int8_t* from = this->block(block);
    for (int i = 0; i < kBytes; i += sizeof(__m512i)) {
      __builtin_prefetch(ahead + i, 0, 2);
      const __m512i words = load_as<__m512i>(from + i);
      *to++ = pair<0>(words, scale, offset);
      *to++ = pair<8>(words, scale, offset);
      if constexpr (kBits == 4) {  // low halves of bytes are of the first inputs
        *to++ = pair<4>(words, scale, offset);
        *to++ = pair<12>(words, scale, offset);
      }
    }
  }

 private:
  static constexpr float kBias = kBits == 8 ? 384 : 16;  // what number() adds

  // The numbers whose first bit is the words' bit `at`, as the mantissas of floats whose unit they are; the
  // sign of 8 bits, as a whole number's, has its opposite.
  template <int at>
  static Floats number(__m512i words) {
    constexpr int kFirst = 23 - kBits;
    constexpr int kLeft = kFirst - at;
    constexpr int kMask = ((1 << kBits) - 1) << kFirst;
    constexpr int kOne = (127 + kBits) << 23 | (kBits == 8 ? 1 << 22 : 0);
    __m512i bits;
    if constexpr (kLeft >= 0) bits = _mm512_slli_epi32(words, kLeft);
    else bits = _mm512_srli_epi32(words, -kLeft);
    return (Floats)_mm512_xor_si512(_mm512_and_si512(bits, _mm512_set1_epi32(kMask)), _mm512_set1_epi32(kOne));
  }

  // Of numbers from bit `at` on, and 16 bits beyond; rounded to nearest.
  template <int at>
  static __m512i pair(__m512i words, Floats scale, Floats offset) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const auto first = (__m512i)(number<at>(words) * scale + offset);
    const auto second = (__m512i)(number<at + 16>(words) * scale + offset);
    constexpr __mmask32 kSecond = 0xaaaaaaaa;
    return _mm512_mask_mov_epi16(_mm512_srli_epi32(_mm512_add_epi32(first, half), 16), kSecond,
                                 _mm512_add_epi32(second, half));
  }

  const QuantisedLayer& l_;
  const int8_t* const weights_;
  const Float16* groups_ = nullptr;
};

// kSide panels, the last of which may be missing: the first stands in for it.
template <class E, int kBits>
class Panels {
  using Weights = Widening<kBits>;

 public:
  Panels(const QuantisedLayer& layer, const Tokens& x, int64_t first_token, int64_t panel)
      : l_(layer), x_(x), first_token_(first_token), output_(panel * kPanel),
        both_(output_ + kPanel < layer.outputs),
        weights_{{layer, x.blocks, panel}, {layer, x.blocks, panel + both_}} {}

  void multiply(int64_t tokens) const {
    thread_local Room<float> room;
    float* const sums = room.of((tokens + kTileRows) * kSide * kPanel);
    alignas(64) __m512i weights[kDeep][kSide][kTileRows];
    for (int64_t first = 0; first < x_.blocks; first += kDeep) {
      const int64_t deep = std::min<int64_t>(kDeep, x_.blocks - first);
      widen(first, deep, weights);
      Tiles::seen();
      for (int64_t token = 0; token < tokens; token += kSide * kTileRows) {
        const auto step = tokens - token > kTileRows ? &Panels::add<kSide> : &Panels::add<1>;
        (this->*step)(token, first, deep, weights[0][0], sums + token * kSide * kPanel);
      }
    }
    Tiles::seen();
    for (int64_t token = 0; token < tokens; ++token) store(token, sums);
  }

 private:
  void widen(int64_t first, int64_t deep, __m512i (*to)[kSide][kTileRows]) const {
    const bool last = first + deep == x_.blocks;
    for (int p = 0; p < kSide; ++p) {
      const int8_t* const ahead = weights_[p].block(last ? kSide * x_.blocks : first + deep);
      for (int64_t b = 0; b < deep; ++b)
        weights_[p].widen(first + b, ahead + b * Weights::kBytes, to[b][p]);
    }
  }

  // The products of blocks from `first` on with T tiles of tokens. sums: [T, kSide] tiles
  template <int T>
  void add(int64_t token, int64_t first, int64_t deep, const __m512i* weights, float* sums) const {
    constexpr int kRow = kPanel * sizeof(float);
    if (first) {
      _tile_loadd(0, sums, kRow);
      _tile_loadd(1, sums + kTileFloats, kRow);
      if constexpr (T > 1) {
        _tile_loadd(2, sums + 2 * kTileFloats, kRow);
        _tile_loadd(3, sums + 3 * kTileFloats, kRow);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const BFloat16* x = x_.tile(token, first);
    for (int64_t b = 0; b < deep; ++b, x += kTileHalves, weights += kSide * kTileRows) {
      _tile_loadd(4, x, kRow);
      _tile_loadd(6, weights, kRow);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + kTileRows, kRow);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (T > 1) {
        _tile_loadd(5, x + x_.blocks * kTileHalves, kRow);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, kRow);
    _tile_stored(1, sums + kTileFloats, kRow);
    if constexpr (T > 1) {
      _tile_stored(2, sums + 2 * kTileFloats, kRow);
      _tile_stored(3, sums + 3 * kTileFloats, kRow);
    }
  }

  void store(int64_t token, const float* sums) const {
    const float* from = sums + token / kTileRows * kSide * kTileFloats + token % kTileRows * kPanel;
    store_result<E>(l_, first_token_ + token, output_, load_as<Floats>(from));
    if (both_) store_result<E>(l_, first_token_ + token, output_ + kPanel, load_as<Floats>(from + kTileFloats));
  }

  const QuantisedLayer& l_;
  const Tokens& x_;
  const int64_t first_token_, output_;
  const bool both_;
  const Weights weights_[kSide];
};

template <class E, int kBits>
struct Products {
  static void multiply(const QuantisedLayer& l) {
    thread_local Tokens own;
    Tokens& x = own;  // of the calling thread
    const int64_t panels = (l.outputs + kPanel - 1) / kPanel;
    constexpr int64_t kRows = kSide * kTileRows;
    const int64_t fit = kAtOnceBytes / (l.inputs * sizeof(BFloat16)) / kRows * kRows;
    const int64_t at_once = std::max(fit, kLeastAtOnce);
    x.resize(std::min(l.tokens, at_once), l.inputs);
    for (int64_t first = 0; first < l.tokens; first += at_once) {
      const int64_t tokens = std::min(at_once, l.tokens - first);
      const bool parallel = l.outputs * tokens * l.inputs > kSerialProducts;
#pragma omp parallel if (parallel)
      {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) x.round_token<E>(l, first + t, t);
        const Tiles tiles(kShapes);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < panels; i += kSide) Panels<E, kBits>(l, x, first, i).multiply(tokens);
      }
    }
  }
};

void multiply_quantised(const QuantisedLayer& layer) {
  if (layer.tokens < kFewest) return avx512::multiply_quantised(layer);
  multiply_by<Products>(layer);
}

}  // namespace KVR_ISA
}  // namespace kvr
