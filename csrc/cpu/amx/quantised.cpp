// Products of many tokens with weights of 8 or 4 bits, by AMX, in bfloat16: tokens are rounded to it, and so
// are weights, once for all tokens, with the scale and the offset of their group. Those of layers without
// groups are whole numbers, which it holds. Sums are float32.
#include "quantised.h"

#include <omp.h>

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

// The size of parts of a whole that are as few as can be, of `most` at most, and about as large.
inline int64_t even(int64_t whole, int64_t most) {
  const int64_t parts = (whole + most - 1) / most;
  return (whole + parts - 1) / parts;
}

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

// Weights in bfloat16.
template <int kBits>
class Widening {
 public:
  Widening(const QuantisedLayer& layer, int64_t blocks) : l_(layer), blocks_(blocks) {}

  // A tile; that which is read next may come from memory meanwhile.
  void widen(int64_t panel, int64_t block, const int8_t* next, __m512i* to) const {
    Floats scale = splat(1), offset = {};
    if (l_.groups) {
      const int64_t group = panel * l_.num_groups() + block * kBlock / l_.group;
      const Float16* const both = static_cast<const Float16*>(l_.groups) + group * 2 * kPanel;
      scale = Float16::load(both);
      offset = Float16::load(both + kPanel);
    }
    offset -= scale * kBias;
    const int8_t* const from = tile(panel, block);
    for (int i = 0; i < kBytes; i += sizeof(__m512i)) {
      __builtin_prefetch(next + i, 0, 2);
      const __m512i words = load_as<__m512i>(from + i);
      *to++ = pair<0>(words, scale, offset);
      *to++ = pair<8>(words, scale, offset);
      if constexpr (kBits == 4) {  // low halves of bytes are of the first inputs
        *to++ = pair<4>(words, scale, offset);
        *to++ = pair<12>(words, scale, offset);
      }
    }
  }

  const int8_t* tile(int64_t panel, int64_t block) const {
    return l_.weights + (panel * blocks_ + block) * kBytes;
  }

 private:
  static constexpr int kBytes = kBlock * kPanel * kBits / 8;
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
    constexpr int kAndXor = 0x6a;
    return (Floats)_mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(kMask), _mm512_set1_epi32(kOne),
                                             kAndXor);
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
  const int64_t blocks_;
};

// Some panels, kSide at a time, in passes of kDeep blocks or fewer. While tiles are multiplied, the weights
// of the next pass are rounded, some with each step: they need no tiles.
template <class E, int kBits>
class Panels {
 public:
  Panels(const QuantisedLayer& layer, const Tokens& x, int64_t first_token, int64_t tokens)
      : l_(layer), x_(x), first_token_(first_token), tokens_(tokens), deep_(even(x.blocks, kDeep)),
        widening_(layer, x.blocks) {}

  // From `begin` on, a multiple of kSide, up to `end`.
  void multiply(int64_t begin, int64_t end) const {
    thread_local Room<float> room;
    float* const sums = room.of((tokens_ + kTileRows) * kSide * kPanel);
    alignas(64) __m512i weights[2][kDeep * kSide * kTileRows];
    const int64_t rows = kSide * kTileRows, steps = (tokens_ + rows - 1) / rows;
    Pass now = pass(begin, 0), next = now;
    if (begin < end) widen(now, 0, now.tiles(), weights[0]);
    for (int which = 0; now.panel < end; which ^= 1, now = next) {
      next = after(now);
      const bool last = next.block == 0;
      for (int64_t step = 0; step < steps; ++step) {
        if (next.panel < end)
          widen(next, next.tiles() * step / steps, next.tiles() * (step + 1) / steps, weights[which ^ 1]);
        if (last && step) store(now.panel, (step - 1) * rows, sums);
        const int64_t token = step * rows;
        const auto add = tokens_ - token > kTileRows ? &Panels::add<kSide> : &Panels::add<1>;
        (this->*add)(now, token, weights[which], sums + token * kSide * kPanel);
      }
      if (last) store(now.panel, (steps - 1) * rows, sums);
    }
  }

 private:
  struct Pass {
    int64_t panel, block, blocks;  // the first ones; how many blocks
    int64_t tiles() const { return blocks * kSide; }
  };

  Pass pass(int64_t panel, int64_t block) const {
    if (block == x_.blocks) panel += kSide, block = 0;
    return {panel, block, std::min(deep_, x_.blocks - block)};
  }
  Pass after(const Pass& now) const { return pass(now.panel, now.block + now.blocks); }

  // Tiles of a pass, from one on up to another; a panel that is missing is the one before.
  void widen(const Pass& pass, int64_t first, int64_t last, __m512i* to) const {
    const Pass next = after(pass);
    const int64_t panels = (l_.outputs + kPanel - 1) / kPanel;
    for (int64_t i = first; i < last; ++i) {
      const int64_t block = i / kSide, side = i % kSide;
      widening_.widen(std::min(pass.panel + side, panels - 1), pass.block + block,
                      widening_.tile(next.panel + side, next.block + block), to + i * kTileRows);
    }
  }

  // The products of a pass with T tiles of tokens. sums: [T, kSide] tiles
  template <int T>
  void add(const Pass& pass, int64_t token, const __m512i* weights, float* sums) const {
    constexpr int kRow = kPanel * sizeof(float);
    Tiles::seen();
    if (pass.block) {
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
    const BFloat16* x = x_.tile(token, pass.block);
    for (int64_t b = 0; b < pass.blocks; ++b, x += kTileHalves, weights += kSide * kTileRows) {
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
    Tiles::seen();
  }

  // The results of kSide tiles of tokens, or of as many as there are.
  void store(int64_t panel, int64_t token, const float* sums) const {
    const int64_t end = std::min<int64_t>(token + kSide * kTileRows, tokens_);
    for (; token < end; ++token) {
      const float* from = sums + token / kTileRows * kSide * kTileFloats + token % kTileRows * kPanel;
      for (int64_t output = panel * kPanel; output < std::min((panel + kSide) * kPanel, l_.outputs);
           output += kPanel, from += kTileFloats)
        store_result<E>(l_, first_token_ + token, output, load_as<Floats>(from));
    }
  }

  const QuantisedLayer& l_;
  const Tokens& x_;
  const int64_t first_token_, tokens_, deep_;
  const Widening<kBits> widening_;
};

template <class E, int kBits>
struct Products {
  static void multiply(const QuantisedLayer& l) {
    thread_local Tokens own;
    Tokens& x = own;  // of the calling thread
    const int64_t pairs = (l.outputs + kSide * kPanel - 1) / (kSide * kPanel);
    constexpr int64_t kRows = kSide * kTileRows;
    const int64_t most = std::max<int64_t>(kAtOnceBytes / (l.inputs * sizeof(BFloat16)), kLeastAtOnce);
    const int64_t at_once = (even(l.tokens, most) + kRows - 1) / kRows * kRows;
    x.resize(std::min(l.tokens, at_once), l.inputs);
    for (int64_t first = 0; first < l.tokens; first += at_once) {
      const int64_t tokens = std::min(at_once, l.tokens - first);
      const bool parallel = l.outputs * tokens * l.inputs > kSerialProducts;
#pragma omp parallel if (parallel)
      {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) x.round_token<E>(l, first + t, t);
        const Tiles tiles(kShapes);
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        Panels<E, kBits>(l, x, first, tokens)
            .multiply(pairs * thread / threads * kSide, pairs * (thread + 1) / threads * kSide);
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
