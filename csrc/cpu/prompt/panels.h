// Packs pages of the KV cache into panels: keys as [tokens / kColumns][words of a key][kColumns], and
// values as [channels / kColumns][words of a tile's tokens][kColumns]. The products behind are the same
// for all layouts and element types.
#pragma once

#include <utility>

#include "kernels.h"
#include "keys.h"
#include "prompt/product.h"

namespace kvr {
namespace KVR_ISA {
namespace prompt {

// Element i of what is left of vectors a and b when blocks of `size` elements trade places: those of
// the upper half pairs of a with those of the lower of b.
constexpr int traded(int i, int size, bool second) {
  const bool upper = i / size % 2;
  if (!second) return upper ? kWidth + i - size : i;
  return upper ? kWidth + i : i + size;
}

template <int size, size_t... i>
inline void trade(Words& a, Words& b, std::index_sequence<i...>) {
  const Words x = a, y = b;
  a = __builtin_shufflevector(x, y, traded(i, size, false)...);
  b = __builtin_shufflevector(x, y, traded(i, size, true)...);
}

template <int size>
inline void transpose_blocks(Words (&rows)[kWidth]) {
  KVR_UNROLL for (int r = 0; r < kWidth; ++r)
    if (r / size % 2 == 0) trade<size>(rows[r], rows[r + size], std::make_index_sequence<kWidth>{});
  if constexpr (size * 2 < kWidth) transpose_blocks<size * 2>(rows);
}

// kWidth vectors as a matrix.
inline void transpose(Words (&rows)[kWidth]) { transpose_blocks<1>(rows); }

// Loads kWidth adjacent words, of one element or of two elements each.
template <class P>
inline Words words_of(const typename P::Element* p) {
  if constexpr (P::kDepth == 2) return load_as<Words>(p);
  else return (Words)P::Element::load(p);
}

// Loads words of two elements from two places, or of one element from one.
template <class P>
inline Words join(const typename P::Element* p, [[maybe_unused]] const typename P::Element* second) {
  if constexpr (P::kDepth == 2)
    return whole(&p->bits) | whole(&second->bits) << 16;
  else return (Words)P::Element::load(p);
}

// The panels of a thread, for kTile tokens of one KV head.
template <class P>
struct Panels {
  using E = typename P::Element;
  using Word = typename P::Word;
  static constexpr int kTileWords = kTile / P::kDepth;

  int head_size, page_size;
  KeyLayout layout;
  Word *keys, *values;

  static int64_t key_words(int head_size) { return int64_t(kTile) * head_size / P::kDepth; }
  static int64_t value_words(int head_size) {
    return int64_t(kTileWords) * round_up(head_size, kColumns);
  }

  const Word* keys_of(int token) const {
    return keys + int64_t(token / kColumns) * (head_size / P::kDepth) * kColumns;
  }
  const Word* values_of(int channel) const {
    return values + int64_t(channel / kColumns) * kTileWords * kColumns;
  }

  // Packs `tokens` tokens of a (page, KV head), from its token `from` on, as those of the tile from
  // `first` on. All are multiples of 16, except at the end of the context. The rest of the last word
  // counts as zero.
  void take(const E* unit, int from, int first, int tokens) const {
    const int64_t d = head_size;
    const E* page_values = unit + d * page_size;
    switch (layout) {
      case KeyLayout::kTransposed:
        return take_transposed(unit + from, page_values + from * d, first, tokens);
      case KeyLayout::kRows: return take_rows(unit + 2 * from * d, first, tokens);
      case KeyLayout::kAmx:
        if constexpr (sizeof(E) == 2)
          return take_amx(unit + from * d, page_values + from * kAmxTokens, first, tokens);
    }
  }

  // Ends the values of a tile with `tokens` tokens by zeros, up to what a product takes.
  void end_values(int tokens) const {
    const int end = round_up(tokens, P::kTokens) / P::kDepth;
    for (int word = (tokens + P::kDepth - 1) / P::kDepth; word < end; ++word)
      for (int c = 0; c < head_size; c += kWidth) put_values(word, c, Words{});
  }

  // Whether a value of the tokens from `begin` up to `end` is infinite or NaN.
  bool any_infinite(int begin, int end) const {
    constexpr uint32_t kExponent = 0x7f800000;
    Ints found = {};
    for (int c = 0; c < head_size; c += kWidth)
      for (int t = begin / P::kDepth; t * P::kDepth < end; ++t) {
        const auto x = load_as<Words>(values_of(c) + t * kColumns + c % kColumns);
        found |= (x & kExponent) == kExponent;
        if constexpr (P::kDepth == 2) found |= (x << 16 & kExponent) == kExponent;
      }
    for (int i = 0; i < kWidth; ++i)
      if (found[i]) return true;
    return false;
  }

 private:
  void put_keys(int token, int word, Words x) const {
    Word* to = keys + (int64_t(token / kColumns) * (head_size / P::kDepth) + word) * kColumns;
    std::memcpy(to + token % kColumns, &x, sizeof x);
  }
  void put_values(int word, int channel, Words x) const {
    Word* to = values + (int64_t(channel / kColumns) * kTileWords + word) * kColumns;
    std::memcpy(to + channel % kColumns, &x, sizeof x);
  }

  // Packs the values of `tokens` tokens, which are `stride` elements apart.
  void take_values(const E* value, int64_t stride, int first, int tokens) const {
    alignas(64) static constexpr E kNothing[kWidth] = {};
    for (int t = 0; t < tokens; t += P::kDepth)
      for (int c = 0; c < head_size; c += kWidth) {
        const E* token = value + t * stride + c;
        put_values((first + t) / P::kDepth, c, join<P>(token, t + 1 < tokens ? token + stride : kNothing));
      }
  }

  void take_transposed(const E* page_keys, const E* page_values, int first, int tokens) const {
    for (int c = 0; c < head_size; c += P::kDepth)
      for (int t = 0; t < tokens; t += kWidth) {
        const E* key = page_keys + int64_t(c) * page_size + t;
        put_keys(first + t, c / P::kDepth, join<P>(key, key + page_size));
      }
    take_values(page_values, head_size, first, tokens);
  }

  void take_rows(const E* unit, int first, int tokens) const {
    const int64_t stride = 2 * head_size;
    for (int t = 0; t < tokens; t += kWidth)
      for (int c = 0; c < head_size; c += kWidth * P::kDepth) {
        Words rows[kWidth];
        for (int i = 0; i < kWidth; ++i) {
          const E* key = unit + std::min(t + i, tokens - 1) * stride + c;
          rows[i] = c + kWidth * P::kDepth <= head_size ? words_of<P>(key) : half_of(key);
        }
        transpose(rows);
        for (int i = 0; i < kWidth && c + i * P::kDepth < head_size; ++i)
          put_keys(first + t, c / P::kDepth + i, rows[i]);
      }
    take_values(unit + head_size, stride, first, tokens);
  }

  // Packs the last words of a key that ends within a vector.
  Words half_of(const E* key) const {
    Words half = {};
    std::memcpy(&half, key, head_size % (kWidth * P::kDepth) * sizeof(E));
    return half;
  }

  void take_amx(const E* page_keys, const E* page_values, int first, int tokens) const {
    for (int t = 0; t < tokens; t += kWidth)
      for (int c = 0; c < head_size; c += 2) {
        const int64_t stretch = t / kAmxTokens * kAmxTokens;
        const E* key = page_keys + stretch * head_size + c * kAmxTokens + t % kAmxTokens * 2;
        if constexpr (P::kDepth == 2) {
          put_keys(first + t, c / 2, load_as<Words>(key));
        } else {
          Floats low, high;
          take_apart(key, low, high);
          put_keys(first + t, c, (Words)low);
          put_keys(first + t, c + 1, (Words)high);
        }
      }
    for (int t = 0; t < tokens; t += 2)
      for (int c = 0; c < head_size; c += kWidth) {
        const E* words = page_values + int64_t(c / kAmxTokens) * page_size * kAmxTokens +
                         t * kAmxTokens + c % kAmxTokens * 2;
        const bool both = t + 1 < tokens;
        if constexpr (P::kDepth == 2) {
          const Words x = load_as<Words>(words);
          put_values((first + t) / 2, c, both ? x : x & 0xffffu);
        } else {
          Floats low, high;
          take_apart(words, low, high);
          put_values(first + t, c, (Words)low);
          if (both) put_values(first + t + 1, c, (Words)high);
        }
      }
  }
};

}  // namespace prompt
}  // namespace KVR_ISA
}  // namespace kvr
