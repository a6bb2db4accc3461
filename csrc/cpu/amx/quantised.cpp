// Products of many tokens with weights of 8 or 4 bits, by AMX: a tile of weights is a block of inputs of
// kPanel outputs, and meets the same block of kTileRows tokens. Results are those of quantised.cpp, bit
// by bit: sums of a block are whole numbers, and floats are added in the same order.
#include "quantised.h"

#include "amx/tiles.h"

namespace kvr {
namespace avx512 {
void multiply_quantised(const QuantisedLayer&);  // quantised.cpp
}  // namespace avx512
namespace KVR_ISA {

static_assert(kPanel == kWidth && kTileRows == kWidth);

constexpr int64_t kFewest = 16;            // tokens; fewer take less time without tiles
constexpr int64_t kAtOnceBytes = 1 << 19;  // of tokens, which stay in a near cache
constexpr int kInTiles = 4;                // blocks whose sums are in tiles
constexpr int kSlots = 2 * kInTiles;       // the same in memory

// 0 to 3: sums; 4 and 5: tokens; 6 and 7: weights.
constexpr TileShapes kShapes = TileShapes{}
                                   .with(0, 4, kTileRows, sizeof(Ints))
                                   .with(4, 6, kTileRows, kBlock)
                                   .with(6, 8, kBlock / kQuad, sizeof(Bytes));

using Tokens = Rounded<kTileRows>;

// The sums of products of all blocks of a panel with all tiles of tokens, one after the other. No
// instruction waits for the one before: each tile of sums is stored kInTiles blocks after it was computed,
// and read from memory as many blocks later.
class Stream {
 public:
  Stream(const int8_t* x, const int8_t* weights, int64_t tiles, int64_t blocks)
      : x_(x), weights_(weights), blocks_(blocks), count_(tiles * blocks) {
    for (int i = 0; i < kSlots; ++i) advance();
  }

  // [kTileRows]; of the next block.
  const Ints* next() {
    const Ints* const sums = sums_[ahead_ % kSlots];
    advance();
    return sums;
  }

 private:
#define KVR_MULTIPLY(sums, x, weights)                     \
  _tile_stored(sums, to, sizeof(Ints));                    \
  _tile_zero(sums);                                        \
  _tile_loadd(x, x_ + place, kBlock);                      \
  _tile_loadd(weights, weights_ + weight_, sizeof(Bytes)); \
  _tile_dpbssd(sums, x, weights)

  void advance() {
    Ints* const to = sums_[(ahead_ + kInTiles) % kSlots];
    const int64_t place = std::min(ahead_, count_ - 1) * kTileRows * kBlock;
    switch (ahead_ % kInTiles) {
      case 0: KVR_MULTIPLY(0, 4, 6); break;
      case 1: KVR_MULTIPLY(1, 5, 7); break;
      case 2: KVR_MULTIPLY(2, 4, 6); break;
      default: KVR_MULTIPLY(3, 5, 7);
    }
    weight_ += kBlock * kPanel;
    if (weight_ == blocks_ * kBlock * kPanel) weight_ = 0;
    ++ahead_;
  }
#undef KVR_MULTIPLY

  const int8_t* const x_;
  const int8_t* const weights_;
  const int64_t blocks_, count_;
  int64_t ahead_ = 0, weight_ = 0;
  Ints sums_[kSlots][kTileRows];
};

// kPanel outputs.
template <class E, int kBits, bool kGroups>
class Panel {
 public:
  Panel(const QuantisedLayer& layer, const Tokens& x, int64_t first_token, int64_t panel)
      : l_(layer), x_(x), first_token_(first_token), output_(panel * kPanel) {
    weights_ = in_8_bits(l_.weights + panel * x.blocks * kBlock * kPanel * kBits / 8);
    if (kGroups) groups_ = static_cast<const Float16*>(l_.groups) + panel * l_.num_groups() * 2 * kPanel;
  }

  void multiply(int64_t tokens) const {
    Tiles::seen();
    Stream sums(x_.values, weights_, (tokens + kTileRows - 1) / kTileRows, x_.blocks);
    for (int64_t token = 0; token < tokens; token += kTileRows) {
      Floats totals[kTileRows];
      add_up(sums, token, totals);
      const int64_t some = std::min<int64_t>(kTileRows, tokens - token);
      for (int t = 0; t < some; ++t)
        store_result<E>(l_, first_token_ + token + t, output_, totals[t]);
    }
  }

 private:
  // Tiles take no weights of 4 bits.
  const int8_t* in_8_bits(const int8_t* weights) const {
    if constexpr (kBits == 8) return weights;
    thread_local Room<int8_t> room;
    int8_t* const wide = room.of(x_.blocks * kBlock * kPanel);
    int8_t* to = wide;
    for (int64_t i = 0; i < x_.blocks * kBlock; i += 2 * kQuad) {
      const Bytes both = load_as<Bytes>(weights + i * kPanel / 2);
      const Bytes halves[2] = {low_halves(both), high_halves(both)};
      std::memcpy(to, halves, sizeof halves);
      to += sizeof halves;
    }
    return wide;
  }

  void add_up(Stream& products, int64_t token, Floats* totals) const {
    const int64_t first = x_.place(token, 0);
    const float* scales = x_.scales + first;
    if constexpr (!kGroups) {
      Floats own[kTileRows] = {};
      for (int64_t b = 0; b < x_.blocks; ++b) add_block(products.next(), scales + b * kTileRows, own);
      KVR_UNROLL for (int t = 0; t < kTileRows; ++t) totals[t] = own[t];
      return;
    }
    const int32_t* sums = x_.sums + first;
    const int64_t per_group = l_.group / kBlock;
    for (int t = 0; t < kTileRows; ++t) totals[t] = Floats{};
    for (int64_t g = 0; g < l_.num_groups(); ++g) {
      Floats group[kTileRows] = {}, offsets = {};
      const int64_t end = std::min((g + 1) * per_group, x_.blocks);
      for (int64_t b = g * per_group; b < end; ++b) {
        const int64_t at = b * kTileRows;
        add_block(products.next(), scales + at, group);
        offsets += load_as<Floats>(scales + at) *
                   __builtin_convertvector(load_as<Ints>(sums + at), Floats);
      }
      const Floats scale = Float16::load(groups_ + g * 2 * kPanel);
      const Floats offset = Float16::load(groups_ + (g * 2 + 1) * kPanel);
      float of_tokens[kTileRows];
      std::memcpy(of_tokens, &offsets, sizeof offsets);
      KVR_UNROLL for (int t = 0; t < kTileRows; ++t) {
        totals[t] += scale * group[t];
        totals[t] += offset * of_tokens[t];
      }
    }
  }

  static void add_block(const Ints* sums, const float* scales, Floats (&to)[kTileRows]) {
    KVR_UNROLL for (int t = 0; t < kTileRows; ++t)
      to[t] += __builtin_convertvector(sums[t], Floats) * scales[t];
  }

  const QuantisedLayer& l_;
  const Tokens& x_;
  const int64_t first_token_, output_;
  const int8_t* weights_;
  const Float16* groups_ = nullptr;
};

template <class E, int kBits, bool kGroups>
static void multiply_as(const QuantisedLayer& l) {
  thread_local Tokens own;
  Tokens& x = own;  // of the calling thread
  const int64_t panels = (l.outputs + kPanel - 1) / kPanel;
  const int64_t at_once = std::max(kAtOnceBytes / l.inputs / kTileRows, int64_t{4}) * kTileRows;
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
      for (int64_t i = 0; i < panels; ++i) Panel<E, kBits, kGroups>(l, x, first, i).multiply(tokens);
    }
  }
}

template <class E>
static void multiply_of(const QuantisedLayer& l) {
  if (l.bits == 8) return l.groups ? multiply_as<E, 8, true>(l) : multiply_as<E, 8, false>(l);
  return l.groups ? multiply_as<E, 4, true>(l) : multiply_as<E, 4, false>(l);
}

void multiply_quantised(const QuantisedLayer& layer) {
  if (layer.tokens < kFewest) return avx512::multiply_quantised(layer);
  switch (layer.dtype) {
    case DType::kBFloat16: return multiply_of<BFloat16>(layer);
    case DType::kFloat16: return multiply_of<Float16>(layer);
    case DType::kFloat32: return multiply_of<Float32>(layer);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
