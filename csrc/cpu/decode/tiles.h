// Tiles: kTile tokens of a list, and how their keys and values are read. Keys are vectors of tokens and
// values vectors of channels, two at a time, in the cheapest order of elements (see place).
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "keys.h"
#include "prompt/product.h"

namespace kvr {
namespace KVR_ISA {

constexpr int kTile = 32;      // tokens whose keys are read before their values
constexpr int kTogether = 16;  // in layouts of pages at least so many tokens lie side by side
constexpr int kTwo = 2 * kWidth;
constexpr int kLine = 64;      // bytes

// Fetches into the second-level cache: the first level allows too few misses at once to hide the
// latency of memory.
inline void fetch_line(const void* p) { __builtin_prefetch(p, 0, 2); }

template <class T>
inline void fetch(const T* p, int count) {
  for (size_t b = 0; b < count * sizeof(T); b += kLine)
    fetch_line(reinterpret_cast<const char*>(p) + b);
}

// Which lines step i fetches, at `lines` lines in every `steps` steps. They are spread evenly, since
// requests in a burst fill the queue of misses and hold up the loads behind them.
template <int lines, int steps, class Fetch>
inline void fetch_evenly(int i, const Fetch& fetch_one) {
  if constexpr (lines >= steps) {
    KVR_UNROLL for (int l = 0; l < lines / steps; ++l) fetch_one(i * (lines / steps) + l);
  } else if (i % (steps / lines) == 0) {
    fetch_one(i / (steps / lines));
  }
}

// The place of element i of two vectors of elements after they are loaded.
template <class E>
constexpr int place(int i) {
  const int first = i / kTwo * kTwo, at = i % kTwo;
  if (!std::is_same_v<E, BFloat16>) return i;
  if (prompt::ProductOf<E>::type::kDepth == 2) return first + at % 8 / 4 * kWidth + at / 8 * 4 + at % 4;
  return first + at % 2 * kWidth + at / 2;
}

// The second half of the elements of two vectors lies behind the first half, or elsewhere, or there is
// none.
enum class Rest { kBehind, kElsewhere, kNone };

// Loads elements of 2 bytes for two vectors.
template <Rest rest, class E>
inline Words halves_of(const E* p, [[maybe_unused]] const E* second) {
#if defined(__AVX512F__)
  if constexpr (rest != Rest::kBehind) {
    const __m512i low = _mm512_zextsi256_si512(load_as<__m256i>(p));
    if constexpr (rest == Rest::kNone) return (Words)low;
    return (Words)_mm512_inserti64x4(low, load_as<__m256i>(second), 1);
  }
#endif
  return load_as<Words>(p);
}

// Converts elements to two vectors, in the order of `place`. In bfloat16 these are the even and the odd
// elements, which takes a shift and a mask; the natural order would take shuffles as well.
template <Rest rest, class E>
inline void load_two(const E* p, const E* second, Floats (&x)[2]) {
  if constexpr (std::is_same_v<E, BFloat16>) {
    const Words both = halves_of<rest>(p, second);
    x[0] = (Floats)(both << 16);
    x[1] = (Floats)(both & 0xffff0000u);
  } else {
    x[0] = E::load(p);
    x[1] = rest == Rest::kNone ? Floats{} : E::load(rest == Rest::kBehind ? p + kWidth : second);
  }
}

#if defined(__AVX512BF16__)
// Converts elements of two channels, or of two tokens, to two vectors of pairs, as `place` orders them.
template <Rest rest>
inline void join_two(const BFloat16* p, const BFloat16* second, int64_t apart, Words (&x)[2]) {
  const auto a = (__m512i)halves_of<rest>(p, second);
  const auto b = (__m512i)halves_of<rest>(p + apart, second + apart);
  x[0] = (Words)_mm512_unpacklo_epi16(a, b);
  x[1] = (Words)_mm512_unpackhi_epi16(a, b);
}
#endif

// The tokens that a (row, KV head) attends to.
struct List {
  const int32_t* entries;
  int scale, offset;  // pages -> units of a KV head

  List(const Attention& a, int unit)
      : entries(a.entries + (a.per_head ? unit : unit / a.kv_heads) * a.entries_stride),
        scale(a.per_head ? 1 : a.kv_heads),
        offset(a.per_head ? 0 : unit % a.kv_heads) {}
  int64_t operator[](int i) const { return int64_t(entries[i]) * scale + offset; }
};

// The values of a token, and of the next one if the tile has it, from a channel on.
template <class E, Rest rest>
inline void load_values(const E* p, [[maybe_unused]] const E* next, Floats (&x)[2]) {
  load_two<rest>(p, p + kWidth, x);
}
#if defined(__AVX512BF16__)
template <class E, Rest rest>
inline void load_values(const E* p, const E* next, Words (&x)[2]) {
  join_two<rest>(p, p + kWidth, next - p, x);
}
#endif

// Tokens of a token-major cache, in which each key is followed by its value.
template <class E_>
struct RowTile {
  using E = E_;
  using P = typename prompt::ProductOf<E>::type;
  static constexpr bool kRows = true;
  const E* keys[kTile];
  int count, head_size;

  RowTile(const Attention& a, const List& list, int first, int tokens)
      : count(tokens), head_size(a.head_size) {
    const int shift = __builtin_ctz(a.run);
    for (int t = first; t < first + tokens; ++t) {
      const int64_t token = (list[t >> shift] << shift) + (t & (a.run - 1));
      keys[t - first] = static_cast<const E*>(a.cache) + token * 2 * a.head_size;
    }
  }

  static constexpr int token_place(int t) { return t; }
  static constexpr int channel_place(int c) { return place<E>(c); }

  template <Rest rest, class Panel>
  void values_of(int t, int c, Panel (&x)[2]) const {
    load_values<E, rest>(keys[t] + head_size + c, keys[std::min(t + 1, count - 1)] + head_size + c, x);
  }
  void fetch_all() const {
    for (int t = 0; t < count; ++t) fetch(keys[t], 2 * head_size);
  }
  // Rows are fetched from end to end, in their order, while the values of the tile before are added.
  template <int channels>
  void fetch_values(int c, int t) const {
    for (int i = t; i < std::min(t + P::kDepth, count); ++i) fetch(keys[i] + 2 * c, 2 * channels);
  }
};

// Tokens of pages, which hold all keys and then all values. The first kTogether tokens of a tile lie
// side by side, and so do the others. For AMX, keys are words of two channels, [16 tokens] by
// [head_size / 2], and values are words of two tokens, [16 channels] by [8] by [head_size / 16], where
// the last dimension has the stride of a whole page.
template <class E_, KeyLayout layout, bool side_by_side>
struct PageTile {
  using E = E_;
  using P = typename prompt::ProductOf<E>::type;
  static constexpr bool kRows = false;
  static constexpr bool kWords = layout == KeyLayout::kAmx;
  static constexpr int kLineElements = kLine / sizeof(E);
  // Lines of a channel of keys, or of words of two channels, that the tokens of the tile take.
  static constexpr int kKeyLines = kWords || (side_by_side && sizeof(E) == 2) ? 1 : 2;
  static constexpr int kValueLines = kTile / kLineElements;  // the same for values
  const E* keys[kTile / kTogether];  // keys of the first channels
  const E* values[kTile / kTogether];
  int count, head_size, page_size;

  PageTile(const Attention& a, const List& list, int first, int tokens)
      : count(tokens), head_size(a.head_size), page_size(a.page_size) {
    const int shift = __builtin_ctz(a.run);
    const int64_t d = a.head_size, p = a.page_size;
    for (int i = 0; i < kTile / kTogether; ++i) {
      const int last = std::max(tokens - 1, 0) / kTogether;
      const int t = first + (side_by_side ? i : std::min(i, last)) * kTogether;
      const int64_t token =
          tokens > 0 ? (list[t >> shift] << shift) + (t & (a.run - 1)) : 0;
      const E* unit = static_cast<const E*>(a.cache) + token / p * 2 * p * d;
      keys[i] = unit + token % p * (kWords ? d : 1);
      values[i] = unit + p * d + token % p * (kWords ? kTogether : d);
    }
  }

  static constexpr int token_place(int t) { return kWords ? t : place<E>(t); }
  static constexpr int channel_place(int c) { return kWords ? c : place<E>(c); }

  // The keys of step c, one channel or a pair, for the tokens of the i-th pair of vectors.
  template <class Panel>
  void keys_of(int c, int i, Panel (&x)[2]) const {
    const int at = i * kTwo;
    if constexpr (kWords) {
      KVR_UNROLL for (int v = 0; v < 2; ++v) {
        const int t = at + v * kWidth;
        x[v] = of_words(keys[t / kTogether] + c * P::kDepth / 2 * 2 * kTogether + t % kTogether * 2, c);
      }
    } else {
      const E* p = keys[at / kTogether] + at % kTogether + int64_t(c) * P::kDepth * page_size;
      constexpr bool behind = side_by_side || kTwo <= kTogether;
      constexpr Rest rest = behind ? Rest::kBehind : Rest::kElsewhere;
      const E* second = keys[(at + kWidth) / kTogether] + int64_t(c) * P::kDepth * page_size;
#if defined(__AVX512BF16__)
      if constexpr (P::kDepth == 2) return join_two<rest>(p, second, page_size, x);
      else
#endif
        load_two<rest>(p, second, x);
    }
  }

  // The values of token t, or of two tokens, from channel c on.
  template <Rest rest, class Panel>
  void values_of(int t, int c, Panel (&x)[2]) const {
    if constexpr (kWords) {
      KVR_UNROLL for (int v = 0; v < 2; ++v) {
        const int channel = c + (rest == Rest::kNone ? 0 : v * kWidth);
        const E* words = values[t / kTogether] + t % kTogether / 2 * 2 * kTogether +
                         channel / kTogether * page_size * kTogether + channel % kTogether * 2;
        x[v] = of_words(words, t);
        if constexpr (P::kDepth == 2)
          if (t + 1 == count) x[v] &= 0xffff;
      }
    } else {
      const E* p = values[t / kTogether] + t % kTogether * head_size + c;
      load_values<E, rest>(p, t + 1 < count ? p + head_size : p, x);
    }
  }

  void fetch_all() const {
    for (int i = 0; i < head_size * kKeyLines; ++i) fetch_line(key_line(i));
    for (int i = 0; i < head_size * kValueLines; ++i) fetch_line(value_line(i));
  }
  // Fetches the keys in step i of another tile's scores; each of `passes` reads a part of every key.
  template <int passes>
  void fetch_keys(int i) const {
    fetch_evenly<kKeyLines * P::kDepth, passes>(i, [&](int line) { fetch_line(key_line(line)); });
  }
  // What a step of another tile's values, token t from the c-th of some channels on, fetches.
  template <int channels>
  void fetch_values(int c, int t) const {
    fetch_evenly<channels * kValueLines * P::kDepth, kTile>(
        t / P::kDepth, [&](int line) { fetch_line(value_line(c * kValueLines + line)); });
  }

 private:
  const E* key_line(int i) const {
    if constexpr (kWords) return keys[i % 2] + i / 2 * (2 * kTogether);
    else if constexpr (kKeyLines == 1) return keys[0] + int64_t(i) * page_size;
    else return keys[i % 2] + int64_t(i / 2) * page_size;
  }
  const E* value_line(int i) const {
    if constexpr (kWords)
      return values[i % 2] + i / 2 % 8 * (2 * kTogether) + int64_t(i / 16) * page_size * kTogether;
    else if constexpr (side_by_side) return values[0] + i * kLineElements;
    else return values[i % 2] + i / 2 * kLineElements;
  }
  // Words of two elements, as they are or with one element of each.
  static auto of_words(const E* p, [[maybe_unused]] int i) {
    if constexpr (P::kDepth == 2) {
      return load_as<Words>(p);
    } else {
      Floats low, high;
      take_apart(p, low, high);
      return i % 2 ? high : low;
    }
  }
};

}  // namespace KVR_ISA
}  // namespace kvr
