// The tile registers of a thread: eight matrices of up to 16 rows of 64 bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvr {
namespace KVR_ISA {

constexpr int kTileRows = 16;

// How instructions take the registers; in memory as LDTILECFG has it.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Registers from one on up to another.
  constexpr TileShapes with(int from, int to, int count, int bytes) const {
    TileShapes more = *this;
    for (int i = from; i < to; ++i) more.rows[i] = count, more.row_bytes[i] = bytes;
    return more;
  }
};

// While it lives, the thread's tile registers have these shapes; it has no other kernel that uses them.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) {
    seen();
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Has everything in memory that the program has stored so far: GCC does not know that loads of tiles
  // read it.
  static void seen() { asm volatile("" ::: "memory"); }
};

}  // namespace KVR_ISA
}  // namespace kvr
