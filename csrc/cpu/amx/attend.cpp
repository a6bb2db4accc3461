// Attention of rows that decode, over keys and values laid out for AMX, in bfloat16: the heads of a KV head
// are the rows of a tile, and keys and values are tiles as the cache has them. Nothing is fetched ahead: the
// processor foresees reads of whole pages, and gains nothing by being asked.
#include "amx/tiles.h"
#include "decode/attending.h"

namespace kvr {
namespace avx512_bf16 {
void attend(const Attention&);  // attend.cpp
}  // namespace avx512_bf16
namespace KVR_ISA {

constexpr int kChannels = 2 * kTileRows;  // of a tile of keys
constexpr int kFour = 4;                  // tiles of sums
constexpr int kMostHeadSize = 512;

// Adds tokens of a unit's list to the parts of query heads.
class AmxAdder {
 public:
  using E = BFloat16;
  static constexpr int kAtOnce = 128;  // tokens whose logits are computed before their values are read
  static constexpr int channel_place(int c) { return c; }

  AmxAdder(const Attention& a, int unit, int columns) : a_(a), list_(a, unit), unit_(unit), columns_(columns) {}

  // Adds a span of tokens to `count` heads, whose queries lie side by side.
  void add(const E* asked, int count, Span span, float* values, Partial* parts) const {
    for (int g = 0; g < count; g += kTileRows) {
      const int heads = std::min(kTileRows, count - g);
      const Tiles tiles(TileShapes{}
                            .with(0, 5, heads, kLine)           // sums, and queries
                            .with(5, 6, kTileRows, kLine)       // keys
                            .with(6, 7, heads, 2 * kTogether)   // weights
                            .with(7, 8, kTogether / 2, kLine));  // values
      for (int at = span.first; at < span.last; at += kAtOnce)
        add_block(asked + int64_t(g) * a_.head_size, g, heads, at, std::min(kAtOnce, span.last - at),
                  values + g * columns_, parts + g);
    }
  }

 private:
  static constexpr int kGroups = kAtOnce / kTogether;
  // kTogether tokens that lie side by side.
  struct Group {
    const E *keys, *values;
    int64_t apart;  // from the values of 16 channels to those of the next
  };

  void add_block(const E* asked, int g, int heads, int first, int tokens, float* values, Partial* parts) const {
    alignas(64) float logits[kTileRows][kAtOnce];
    Group groups[kGroups];
    const int count = (tokens + kTogether - 1) / kTogether;
    for (int i = 0; i < count; ++i) groups[i] = group_of(first + i * kTogether);
    for (int i = count; i % kFour != 0; ++i) groups[i] = groups[count - 1];
    for (int i = 0; i < count; i += kFour) multiply_keys(asked, groups + i, logits[0] + i * kTogether);
    for (int h = 0; h < heads; ++h) {
      float* wanted = a_.weights == nullptr ? nullptr : weights_of(a_, unit_, g + h) + first;
      weigh(logits[h], tokens, values + h * columns_, parts[h], wanted);
    }
    alignas(64) E copy[kMostHeadSize * kTogether];
    if (const int listed = tokens % kTogether; listed != 0) leave_out(listed, groups[count - 1], copy);
    // Weights are where the logits were.
    const int steps = a_.head_size / kTogether;
    for (int c = 0; c < steps; c += kFour)
      multiply_values(logits[0], groups, count, c, std::min(kFour, steps - c), values + c * kTogether);
  }

  Group group_of(int t) const {
    const int shift = __builtin_ctz(a_.run);
    const int64_t d = a_.head_size, p = a_.page_size;
    const int64_t token = (list_[t >> shift] << shift) + (t & (a_.run - 1));
    const E* unit = static_cast<const E*>(a_.cache) + token / p * 2 * p * d;
    return {unit + token % p * d, unit + p * d + token % p * kTogether, p * kTogether};
  }

  // Has zeros in place of a group's values from a token on: they may be anything, and so would be their
  // products with weights of zero.
  void leave_out(int from, Group& group, E* copy) const {
    constexpr int kWords = kTogether / 2 * kTogether;  // of two tokens, for 16 channels
    for (int c = 0; c < a_.head_size / kTogether; ++c)
      for (int i = 0; i < kWords; ++i) {
        const int token = i / kTogether * 2;
        const auto word = load_as<uint32_t>(group.values + c * group.apart + 2 * i);
        const uint32_t seen = token >= from ? 0 : token + 1 == from ? 0xffff : ~0u;
        const uint32_t left = word & seen;
        std::memcpy(copy + (c * kWords + i) * 2, &left, sizeof left);
      }
    group.values = copy;
    group.apart = 2 * kWords;
  }

  // The products of all heads' queries with the keys of four groups.
  void multiply_keys(const E* asked, const Group* groups, float* out) const {
    const int row = a_.head_size * sizeof(E);
    Tiles::seen();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < a_.head_size; c += kChannels) {
      const int64_t at = int64_t(c) * kTogether;
      _tile_loadd(4, asked + c, row);
      _tile_loadd(5, groups[0].keys + at, kLine);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, groups[1].keys + at, kLine);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, groups[2].keys + at, kLine);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, groups[3].keys + at, kLine);
      _tile_dpbf16ps(3, 4, 5);
    }
    constexpr int kRow = kAtOnce * sizeof(float);
    _tile_stored(0, out, kRow);
    _tile_stored(1, out + kTogether, kRow);
    _tile_stored(2, out + 2 * kTogether, kRow);
    _tile_stored(3, out + 3 * kTogether, kRow);
  }

  // Replaces the products of a head by weights.
  void weigh(float* x, int tokens, float* values, Partial& part, float* wanted) const {
    const prompt::Logits logits{a_.scale * kLog2E, a_.softcap * kLog2E};
    const int padded = prompt::round_up(tokens, kTogether);
    Floats tops = splat(kLeastLogit);
    for (int t = 0; t < padded; t += kWidth) {
      const Floats raw = load_as<Floats>(x + t);
      Floats logit = a_.softcap > 0 ? logits.of<true>(raw) : logits.of<false>(raw);
      if (t + kWidth > tokens)
        for (int i = tokens - t; i < kWidth; ++i) logit[i] = kLeastLogit;
      std::memcpy(x + t, &logit, sizeof logit);
      tops = max(logit, tops);
    }
    if (wanted != nullptr) std::copy_n(x, tokens, wanted);
    float top = tops[0];
    for (int i = 1; i < kWidth; ++i) top = std::max(top, tops[i]);
    if (!part.begun || top - part.reference > kMostAbove)
      refer_anew(top - part.reference, part, values, columns_);
    auto* weights = reinterpret_cast<prompt::PairProduct::Weight*>(x);
    for (int t = 0; t < padded; t += kWidth) {
      Floats w[1] = {load_as<Floats>(x + t) - part.reference};
      prompt::exp2_of<5>(w);
      if (t + kWidth > tokens)
        for (int i = tokens - t; i < kWidth; ++i) w[0][i] = 0;
      part.masses += w[0];
      part.totals += prompt::PairProduct::rounded(w[0], weights + t);
    }
  }

  // Adds the weighted values of groups, in some channels from 16 * c on.
  void multiply_values(const float* weights, const Group* groups, int count, int c, int steps, float* out) const {
    const int bytes = columns_ * sizeof(float);
    Tiles::seen();
    _tile_loadd(0, out, bytes);
    _tile_loadd(1, out + kTogether, bytes);
    if (steps > 2) {
      _tile_loadd(2, out + 2 * kTogether, bytes);
      _tile_loadd(3, out + 3 * kTogether, bytes);
    }
    for (int i = 0; i < count; ++i) {
      const int64_t apart = groups[i].apart;
      const E* from = groups[i].values + c * apart;
      _tile_loadd(6, reinterpret_cast<const uint16_t*>(weights) + i * kTogether, kAtOnce * sizeof(float));
      _tile_loadd(7, from, kLine);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, from + apart, kLine);
      _tile_dpbf16ps(1, 6, 7);
      if (steps > 2) {
        _tile_loadd(7, from + 2 * apart, kLine);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, from + 3 * apart, kLine);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + kTogether, bytes);
    if (steps > 2) {
      _tile_stored(2, out + 2 * kTogether, bytes);
      _tile_stored(3, out + 3 * kTogether, bytes);
    }
  }

  const Attention& a_;
  const List list_;
  const int unit_, columns_;
};

void attend(const Attention& a) {
  if (a.dtype != DType::kBFloat16 || a.layout != KeyLayout::kAmx || a.head_size % kChannels || a.head_size > kMostHeadSize)
    return avx512_bf16::attend(a);
  Attending<AmxAdder>(a).run();
}

}  // namespace KVR_ISA
}  // namespace kvr
