// Memory that threads keep between calls.
#pragma once

#include <cstddef>
#include <memory>

namespace kvr {
namespace KVR_ISA {

// Memory that grows, and begins at a border of cache lines.
template <class T>
class Room {
 public:
  T* of(size_t n) {
    if (n > size_) {
      lines_ = std::make_unique<Line[]>((n * sizeof(T) + sizeof(Line) - 1) / sizeof(Line));
      size_ = n;
    }
    return reinterpret_cast<T*>(lines_.get());
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::unique_ptr<Line[]> lines_;
  size_t size_ = 0;
};

}  // namespace KVR_ISA
}  // namespace kvr
