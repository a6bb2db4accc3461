// Attention of rows that decode, over lists of tokens or pages; compiled once per instruction set.
#include <utility>

#include "decode/attending.h"
#include "decode/tiles.h"
#include "kernels.h"

namespace kvr {
namespace KVR_ISA {

// Adds tokens of a unit's list to the parts of query heads, tile by tile.
template <class Tile>
class TileAdder {
  using P = typename Tile::P;
  using Queries = std::conditional_t<Tile::kRows, RowQueries<P>, PageQueries<P>>;

 public:
  using E = typename Tile::E;
  static constexpr int kAtOnce = kTile;
  static constexpr int channel_place(int c) { return Tile::channel_place(c); }

  TileAdder(const Attention& a, int unit, int columns) : a_(a), list_(a, unit), unit_(unit), columns_(columns) {}

  // Adds a span of tokens to `count` heads, whose queries lie side by side.
  void add(const E* asked, int count, Span span, float* values, Partial* parts) const {
    const int together = heads_together(count);
    const Queries q(asked, count, a_.head_size);
    Tile tile(a_, list_, span.first, std::min(kTile, span.last - span.first));
    tile.fetch_all();
    for (int at = span.first; at < span.last; at += kTile) {
      const Tile next(a_, list_, at + kTile, std::clamp(span.fetched - at - kTile, 0, kTile));
      for (int g = 0; g < count; g += together)
        add(std::min(together, count - g), q, g, tile, g == 0 ? next : tile, values, parts,
            a_.weights == nullptr ? nullptr : weights_of(a_, unit_, g) + at);
      tile = next;
    }
  }

 private:
  // Adds a tile's tokens to the parts of some heads from the g-th on.
  void add(int heads, const Queries& q, int g, const Tile& tile, const Tile& next, float* values,
           Partial* parts, float* wanted) const {
    using Fn = decltype(&TileAdder::add_to<1>);
    static constexpr auto kFns = functions<Fn>(std::make_index_sequence<kHeadBlock>{});
    (this->*kFns.of[heads - 1])(q, g, tile, next, values + g * columns_, parts + g, wanted);
  }
  template <class Fn>
  struct Functions {
    Fn of[kHeadBlock];
  };
  template <class Fn, size_t... i>
  static constexpr Functions<Fn> functions(std::index_sequence<i...>) {
    return {{&TileAdder::add_to<i + 1>...}};
  }
  template <int N>
  void add_to(const Queries& q, int g, const Tile& tile, const Tile& next, float* values,
              Partial* parts, float* wanted) const {
    Heads<Tile, N>{a_.head_size, a_.scale * kLog2E, a_.softcap * kLog2E, values, columns_, parts, wanted, a_.weight_stride}
        .add(q, g, tile, next);
  }

  const Attention& a_;
  const List list_;
  const int unit_, columns_;
};

template <class E, KeyLayout layout>
static void attend_to_pages(const Attention& a) {
  if (a.run >= kTile) return Attending<TileAdder<PageTile<E, layout, true>>>(a).run();
  return Attending<TileAdder<PageTile<E, layout, false>>>(a).run();
}

template <class E>
static void attend_of(const Attention& a) {
  switch (a.layout) {
    case KeyLayout::kRows: return Attending<TileAdder<RowTile<E>>>(a).run();
    case KeyLayout::kTransposed: return attend_to_pages<E, KeyLayout::kTransposed>(a);
    case KeyLayout::kAmx:  // of 2 bytes, as its caller has checked
      if constexpr (sizeof(E) == 2) return Attending<TileAdder<PageTile<E, KeyLayout::kAmx, false>>>(a).run();
  }
}

void attend(const Attention& a) {
  switch (a.dtype) {
    case DType::kBFloat16: return attend_of<BFloat16>(a);
    case DType::kFloat16: return attend_of<Float16>(a);
    case DType::kFloat32: return attend_of<Float32>(a);
  }
}

}  // namespace KVR_ISA
}  // namespace kvr
