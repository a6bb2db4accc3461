// Keeps the process alive if part of a mapped file cannot be read. The kernel then sends SIGBUS to the
// thread that touched the part. With a guard, the part is noted, zeros are mapped in its place, and the
// thread goes on. Each such place takes two more mappings, and the system limits the mappings of a
// process (vm.max_map_count). If there are too many places, zeros replace the whole file, and all of
// it counts as missing.
//
// The process has one handler of the signal. A handler that is installed after the first guard, as
// faulthandler.enable() does, replaces ours; a missing part then ends the process. The handler from
// before the first guard is put back at the first fault outside all guarded mappings.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace kvr {

class MappingGuard {
 public:
  // memory: a shared mapping of the whole file, `bytes` long, which has to outlive the guard.
  // scattered: whether the system was told that it is read in scattered pieces (MADV_RANDOM).
  MappingGuard(char* memory, int64_t bytes, int fd, bool scattered);
  ~MappingGuard();
  MappingGuard(const MappingGuard&) = delete;
  MappingGuard& operator=(const MappingGuard&) = delete;

  // False if the address is not in the mapping. Safe in a signal handler and in several threads.
  bool patch(const void* address) noexcept;
  // The parts that were missing since the last call, in whole system pages: the first byte of each,
  // and the byte behind it. The file is mapped there again, and the zeros are given up. If that fails,
  // the next call returns the part again and tries once more; until then, writes there are lost.
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
  std::atomic<int> places_{0};  // at least the number of runs of missing pages
};

}  // namespace kvr
