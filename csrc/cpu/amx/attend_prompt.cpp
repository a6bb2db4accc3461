// Attention of prompts in bfloat16, by AMX: register blocks are four tiles of sums.
#include "amx/tiles.h"
#include "prompt/prompting.h"

namespace kvr {
namespace avx512_bf16 {
void attend_prompt(const PromptAttention&);  // attend_prompt.cpp
}  // namespace avx512_bf16
namespace KVR_ISA {
namespace prompt {

// Both factors are tiles: 32 channels or tokens of 16 rows, and of 16 columns.
struct TileProduct : PairProduct {
  static constexpr int kMicro = 2 * kTileRows;
  static constexpr int kTokens = 2 * kTileRows;
};

template <>
struct Block<TileProduct> {
  using Word = TileProduct::Word;
  static constexpr int kWords = kTileRows;  // of each row of a tile
  static constexpr TileShapes kShapes = TileShapes{}.with(0, 8, kTileRows, kWords * sizeof(Word));
  struct Setup {
    Tiles tiles{kShapes};
  };

  // Queries are [rows, words].
  static void pack(const BFloat16* query, int d, int row, Word* queries) {
    std::copy_n(query, d, reinterpret_cast<BFloat16*>(queries) + int64_t(row) * d);
  }

  template <bool capped>
  static Floats multiply_keys(const Word* queries, const Word* panel, int steps, const Logits& logits,
                              const float* references, float* out, Floats top) {
    constexpr int kRow = kTile * sizeof(float);
    Tiles::seen();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < steps; c += kWords) {
      load_and_multiply(queries + c, queries + kTileRows * steps + c, steps * sizeof(Word),
                        panel + c * kColumns);
    }
    _tile_stored(0, out, kRow);
    _tile_stored(1, out + kWidth, kRow);
    _tile_stored(2, out + kTileRows * kTile, kRow);
    _tile_stored(3, out + kTileRows * kTile + kWidth, kRow);
    Floats tops[4] = {top, top, top, top};
    for (int r = 0; r < 2 * kTileRows; r += 2)
      KVR_UNROLL for (int i = 0; i < 4; ++i) {
        float* const to = out + (r + i / 2) * kTile + i % 2 * kWidth;
        const Floats x = logits.of<capped>(load_as<Floats>(to)) - references[r + i / 2];
        std::memcpy(to, &x, sizeof x);
        tops[i] = max(x, tops[i]);
      }
    return max(max(tops[0], tops[1]), max(tops[2], tops[3]));
  }

  static void multiply_values(const TileProduct::Weight* weights, const Word* panel, int steps,
                              float* out, int stride) {
    constexpr int kRow = kTile * sizeof(float);
    float* const low = out + kTileRows * stride;
    const int bytes = stride * sizeof(float);
    Tiles::seen();
    _tile_loadd(0, out, bytes);
    _tile_loadd(1, out + kWidth, bytes);
    _tile_loadd(2, low, bytes);
    _tile_loadd(3, low + kWidth, bytes);
    for (int t = 0; t < steps; t += kWords) {
      const auto* upper = weights + t * TileProduct::kDepth;
      load_and_multiply(upper, upper + kTileRows * kRow / sizeof *upper, kRow, panel + t * kColumns);
    }
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + kWidth, bytes);
    _tile_stored(2, low, bytes);
    _tile_stored(3, low + kWidth, bytes);
  }

  // Sums are those of multiply_values, whose order is that of tiles.
  static void multiply_values_of_row(int row, const TileProduct::Weight* weights, const Word* panel,
                                     int begin, int end, float* out, int stride) {
    const int first = begin / kColumns * kColumns / 2, last = (end + 1) / 2;  // words
    alignas(64) Word seen[kTile / 2 * kColumns] = {};
    for (int w = begin / 2; w < last; ++w) {
      const uint32_t mask = seen_of_word<TileProduct>(2 * w, begin, end);
      for (int c = 0; c < kColumns; ++c) seen[w * kColumns + c] = panel[w * kColumns + c] & mask;
    }
    alignas(64) float sums[TileProduct::kMicro * kColumns] = {};
    std::copy_n(out + row * stride, kColumns, sums + row * kColumns);
    multiply_values(weights + 2 * first, seen + first * kColumns, last - first, sums, kColumns);
    std::copy_n(sums + row * kColumns, kColumns, out + row * stride);
  }

 private:
  // Adds the products of two tiles of rows, which are `bytes` apart, and two of a panel.
  static void load_and_multiply(const void* upper, const void* lower, int bytes, const Word* panel) {
    _tile_loadd(4, upper, bytes);
    _tile_loadd(6, panel, kColumns * sizeof(Word));
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kWidth, kColumns * sizeof(Word));
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower, bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

}  // namespace prompt

void attend_prompt(const PromptAttention& a) {
  constexpr int kChannels = 2 * kTileRows;
  if (a.dtype != DType::kBFloat16 || a.head_size % kChannels) return avx512_bf16::attend_prompt(a);
  prompt::Prompting<prompt::TileProduct>(a).run();
}

}  // namespace KVR_ISA
}  // namespace kvr
