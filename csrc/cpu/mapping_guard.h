// Keeps the process alive where part of a mapped file cannot be read. The kernel then sends SIGBUS
// to the thread that touched it; with a guard, zeros are mapped in the place of what is missing, the
// place is noted, and the thread goes on. Every such place makes two mappings more, of which the system
// allows a process so many (vm.max_map_count); where there are too many places, zeros take that of all
// of the file, and all of it counts as missing.
//
// The signal's handler is the process's: whoever installs another one after the first guard, as
// faulthandler.enable() does, replaces it, and then what is missing ends the process. The one that was
// there before is put back at the first fault outside all guarded mappings.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace kvr {

class MappingGuard {
 public:
  // memory: a shared mapping of all of the file, `bytes` long. It has to outlive the guard. scattered:
  // the system was told that it is read in scattered pieces (MADV_RANDOM).
  MappingGuard(char* memory, int64_t bytes, int fd, bool scattered);
  ~MappingGuard();
  MappingGuard(const MappingGuard&) = delete;
  MappingGuard& operator=(const MappingGuard&) = delete;

  // False if the address is not in the mapping. Safe in a signal handler and in several threads.
  bool patch(const void* address) noexcept;
  // The parts that were missing since the last call, in whole system pages: their first byte, and the
  // one behind them. What is in their place is given up: the file is mapped there again. Where that
  // fails, the part is told again by the next call, which tries once more: until then what is written
  // there is lost.
  std::vector<std::pair<int64_t, int64_t>> take();

 private:
  bool put_zeros(int64_t first, int64_t end) noexcept;  // in the place of these system pages
  bool put_file(int64_t first, int64_t end) noexcept;

  char* memory_;
  int64_t system_page_, pages_;
  int fd_;
  bool scattered_;
  std::unique_ptr<std::atomic<bool>[]> missing_;  // per system page
  std::atomic<bool> any_{false};
  std::atomic<int> places_{0};  // runs of them, or more
};

}  // namespace kvr
