// Copies of tokens and pages. Pure data movement, so one build serves every instruction set.
#include "staging.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace kvr {

namespace {

constexpr int64_t kSerialHeads = 256;  // keys below which waking the other threads costs more

// Rows of a page, [tokens, 2 * d] -> keys [d, stride] and values [tokens, d].
template <class Element>
void spread_rows(const char* page, int tokens, int d, char* keys, int64_t stride, char* values) {
  const auto* row = reinterpret_cast<const Element*>(page);
  auto* columns = reinterpret_cast<Element*>(keys);
  for (int t = 0; t < tokens; ++t, row += 2 * d) {
    for (int c = 0; c < d; ++c) columns[c * stride + t] = row[c];
    std::memcpy(values + t * d * sizeof(Element), row + d, d * sizeof(Element));
  }
}

using Words = uint32_t __attribute__((vector_size(16)));
using Halves = uint16_t __attribute__((vector_size(16)));

template <class V>
V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Four words of each of four rows -> four words of each of four columns.
void transpose_words(const char* rows, int64_t row_bytes, char* columns, int64_t column_bytes) {
  Words r[4];
  for (int i = 0; i < 4; ++i) r[i] = load<Words>(rows + i * row_bytes);
  const Words a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
  const Words b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const Words c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const Words d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  const Words out[4] = {
      __builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
      __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(columns + i * column_bytes, &out[i], sizeof out[i]);
}

// Rows of a page, [tokens, 2 * d] elements of 2 bytes -> its part of a block as AMX has it: keys as
// words of two channels, [tokens / 16, d / 2, 16 tokens]; values as words of two tokens,
// [d / 16, block's tokens / 2, 16 channels], from `values` on.
void spread_rows_amx(const char* page, int tokens, int d, char* keys, char* values,
                     int block_tokens) {
  constexpr int kTogether = 16;  // tokens, and channels
  const int64_t row = 4 * d;
  for (int first = 0; first < tokens; first += kTogether, keys += kTogether * 2 * d)
    for (int c = 0; c < d / 2; c += 4)
      for (int t = 0; t < kTogether; t += 4)
        transpose_words(page + (first + t) * row + c * 4, row, keys + (c * kTogether + t) * 4,
                        kTogether * 4);
  for (int t = 0; t < tokens; t += 2)
    for (int c = 0; c < d; c += 8) {
      const char* from = page + t * row + 2 * d + c * 2;
      const Halves a = load<Halves>(from), b = load<Halves>(from + row);
      const Halves out[2] = {__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11),
                             __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)};
      const int64_t word = (c / kTogether * (block_tokens / 2) + t / 2) * kTogether + c % kTogether;
      std::memcpy(values + word * 4, out, sizeof out);
    }
}

// A token's key and value -> their places in a (page, KV head), token-major.
void put_row(const CacheWrite& w, char* unit, int64_t t, const char* key, const char* value) {
  const int64_t size = int64_t(w.head_size) * w.element_size;
  std::memcpy(unit + t * 2 * size, key, size);
  std::memcpy(unit + t * 2 * size + size, value, size);
}

// The same where keys are [head_size, page_size].
template <class Element>
void put_column(const CacheWrite& w, char* unit, int64_t t, const char* key, const char* value) {
  const int64_t d = w.head_size, p = w.page_size;
  auto* to = reinterpret_cast<Element*>(unit);
  for (int c = 0; c < d; ++c) to[c * p + t] = reinterpret_cast<const Element*>(key)[c];
  std::memcpy(to + d * p + t * d, value, d * sizeof(Element));
}

// The same in the layout for AMX.
void put_words(const CacheWrite& w, char* unit, int64_t t, const char* key, const char* value) {
  constexpr int kTogether = 16;  // tokens, and channels
  const int64_t d = w.head_size, p = w.page_size;
  char* const keys = unit + (t / kTogether * d / 2 * kTogether + t % kTogether) * 4;
  for (int c = 0; c < d / 2; ++c) std::memcpy(keys + c * kTogether * 4, key + c * 4, 4);
  auto* const values = reinterpret_cast<uint16_t*>(unit + d * p * 2) + t / 2 * 2 * kTogether + t % 2;
  for (int c = 0; c < d; ++c)
    values[c / kTogether * p * kTogether + c % kTogether * 2] =
        reinterpret_cast<const uint16_t*>(value)[c];
}

// Tokens that are gathered before they are laid out: a line of a channel of 2 bytes each.
constexpr int kPiece = 32;

// A block of a list's tokens from `first` on; what the list has no tokens for is zeros.
void stage_block(const TokenStaging& s, int64_t list, int64_t first, char* to) {
  const int64_t row = 2 * int64_t(s.head_size) * s.element_size;
  const int64_t half = s.block_tokens * row / 2;
  const auto* source = static_cast<const char*>(s.source);
  const int32_t* entries = s.entries + list * s.stride;
  thread_local std::vector<char> piece;
  piece.resize(kPiece * row);
  for (int t = 0; t < s.block_tokens; t += kPiece) {
    const int64_t left = std::clamp<int64_t>(s.lengths[list] - first - t, 0, kPiece);
    for (int64_t i = 0; i < left; ++i)
      std::memcpy(piece.data() + i * row, source + entries[first + t + i] * row, row);
    std::fill(piece.begin() + left * row, piece.end(), 0);
    char* values = to + half + t * row / 2;
    if (s.to == KeyLayout::kAmx) {
      spread_rows_amx(piece.data(), kPiece, s.head_size, to + t * row / 2,
                      to + half + t * 2 * int64_t(16), s.block_tokens);
    } else {
      const auto spread = s.element_size == 4 ? spread_rows<uint32_t> : spread_rows<uint16_t>;
      spread(piece.data(), kPiece, s.head_size, to + t * s.element_size, s.block_tokens, values);
    }
  }
}

}  // namespace

void write_cache(const CacheWrite& w) {
  const auto* keys = static_cast<const char*>(w.keys);
  const auto* values = static_cast<const char*>(w.values);
  const int64_t size = int64_t(w.head_size) * w.element_size;
  const auto put = w.layout == KeyLayout::kRows  ? put_row
                   : w.layout == KeyLayout::kAmx ? put_words
                   : w.element_size == 4         ? put_column<uint32_t>
                                                 : put_column<uint16_t>;
#pragma omp parallel for schedule(static) if (w.num_tokens * w.kv_heads > kSerialHeads)
  for (int64_t t = 0; t < w.num_tokens; ++t) {
    const int64_t slot = w.slot_mapping[t];
    if (slot < 0) continue;
    const int64_t page = slot / w.page_size;
    for (int64_t h = 0; h < w.kv_heads; ++h)
      put(w, static_cast<char*>(w.cache) + (page * w.kv_heads + h) * w.page_size * 2 * size,
          slot % w.page_size, keys + t * w.key_stride * w.element_size + h * size,
          values + t * w.value_stride * w.element_size + h * size);
  }
}

void lay_out_unit(const char* unit, char* block, int64_t part, int64_t parts, int page_size,
                  int head_size, int element_size) {
  const int64_t row = int64_t(page_size) * element_size;  // of transposed keys
  const int64_t half = row * head_size;                   // a page's keys, or its values
  for (int c = 0; c < head_size; ++c)
    std::memcpy(block + (c * parts + part) * row, unit + c * row, row);
  std::memcpy(block + (parts + part) * half, unit + half, half);
}

void stage_pages(const PageStaging& s) {
  const int64_t row = int64_t(s.page_size) * s.element_size;     // of transposed keys
  const int64_t half = row * s.head_size;                        // a page's keys, or its values
  const int64_t block_half = half * s.pages_per_block;
  const auto* source = static_cast<const char*>(s.source);
  auto* target = static_cast<char*>(s.target);
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t i = 0; i < s.num_pages; ++i) {
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      const int64_t block = i / s.pages_per_block, part = i % s.pages_per_block;
      const char* from = source + (s.pages[i] * int64_t(s.kv_heads) + h) * 2 * half;
      char* to = target + (block * s.kv_heads + h) * 2 * block_half;
      const int block_tokens = s.page_size * s.pages_per_block;
      if (s.to == KeyLayout::kAmx) {
        spread_rows_amx(from, s.page_size, s.head_size, to + part * half,
                        to + block_half + part * s.page_size * 2 * int64_t(16), block_tokens);
        continue;
      }
      if (s.from == KeyLayout::kRows) {
        const auto spread = s.element_size == 4 ? spread_rows<uint32_t> : spread_rows<uint16_t>;
        spread(from, s.page_size, s.head_size, to + part * row,
               block_tokens, to + block_half + part * half);
        continue;
      }
      lay_out_unit(from, to, part, s.pages_per_block, s.page_size, s.head_size, s.element_size);
    }
  }
}

void stage_tokens(const TokenStaging& s) {
  const int64_t size = 2 * int64_t(s.block_tokens) * s.head_size * s.element_size;  // a head's block
  auto* target = static_cast<char*>(s.target);
  for (int64_t r = 0; r < s.rows; ++r) {
    const int64_t blocks = s.blocks_of(r);
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t h = 0; h < s.kv_heads; ++h)
        stage_block(s, r * s.kv_heads + h, b * s.block_tokens, target + (b * s.kv_heads + h) * size);
    target += blocks * s.kv_heads * size;
  }
}

}  // namespace kvr
