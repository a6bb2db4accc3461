// Keeps the process alive where part of a mapped file cannot be read. The kernel then sends SIGBUS
// to the thread that touched it; with a guard, zeros are mapped in the place of what is missing, the
// place is noted, and the thread goes on.
//
// The signal's handler is the process's: whoever installs another one after the first guard, as
// faulthandler.enable() does, replaces it, and then what is missing ends the process. The one that was
// there before is put back at the first fault outside all guarded mappings.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvr {

class MappingGuard {
 public:
  // memory: a shared mapping of all of the file, `bytes` long. It has to outlive the guard.
  MappingGuard(char* memory, int64_t bytes, int fd);
  ~MappingGuard();
  MappingGuard(const MappingGuard&) = delete;
  MappingGuard& operator=(const MappingGuard&) = delete;

  // False if the address is not in the mapping. Safe in a signal handler and in several threads.
  bool patch(const void* address) noexcept;
  // First bytes of the system pages that were missing since the last call. What is in their place is
  // given up: the file is mapped there again. Where that fails, the page is told again by the next
  // call, which tries once more: until then what is written there is lost.
  std::vector<int64_t> take();

 private:
  char* memory_;
  int64_t bytes_, system_page_;
  int fd_;
  std::unique_ptr<std::atomic<bool>[]> missing_;  // per system page
  std::atomic<bool> any_{false};
};

}  // namespace kvr
