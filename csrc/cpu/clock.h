// The time, to measure how long steps wait.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvr {

inline int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace kvr
