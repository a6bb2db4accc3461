#include "mapping_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <stdexcept>
#include <system_error>

namespace kvr {

namespace {

static_assert(std::atomic<bool>::is_always_lock_free);
static_assert(std::atomic<MappingGuard*>::is_always_lock_free);

std::array<std::atomic<MappingGuard*>, 16> guards;
struct sigaction previous;

void on_sigbus(int signal, siginfo_t* info, void*) {
  const int saved = errno;
  bool patched = false;
  if (info->si_code > 0)  // from the kernel, not from kill()
    for (auto& entry : guards)
      if (MappingGuard* guard = entry.load(); !patched && guard != nullptr)
        patched = guard->patch(info->si_addr);
  errno = saved;
  if (patched) return;
  // Not ours: whoever was there before us sees the fault again.
  sigaction(SIGBUS, &previous, nullptr);
  if (info->si_code <= 0) raise(signal);
}

void install() {
  struct sigaction action = {};
  action.sa_sigaction = on_sigbus;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGBUS, &action, &previous) != 0)
    throw std::system_error(errno, std::generic_category(), "SIGBUS cannot be handled");
}

}  // namespace

MappingGuard::MappingGuard(char* memory, int64_t bytes, int fd)
    : memory_(memory), bytes_(bytes), system_page_(sysconf(_SC_PAGESIZE)), fd_(fd),
      missing_(new std::atomic<bool>[(bytes + system_page_ - 1) / system_page_]()) {
  static std::once_flag installed;
  std::call_once(installed, install);
  for (auto& entry : guards)
    if (MappingGuard* none = nullptr; entry.compare_exchange_strong(none, this)) return;
  throw std::runtime_error("too many guarded mappings in one process");
}

MappingGuard::~MappingGuard() {
  for (auto& entry : guards)
    if (MappingGuard* self = this; entry.compare_exchange_strong(self, nullptr)) return;
}

bool MappingGuard::patch(const void* address) noexcept {
  const int64_t offset = static_cast<const char*>(address) - memory_;
  if (offset < 0 || offset >= bytes_) return false;
  const int64_t page = offset / system_page_;
  void* place = memory_ + page * system_page_;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  if (mmap(place, system_page_, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) return false;
  missing_[page] = true;
  any_ = true;
  return true;
}

std::vector<int64_t> MappingGuard::take() {
  std::vector<int64_t> missing;
  if (!any_.exchange(false)) return missing;
  bool again = false;
  for (int64_t page = 0; page * system_page_ < bytes_; ++page) {
    if (!missing_[page].exchange(false)) continue;
    const int64_t offset = page * system_page_;
    missing.push_back(offset);
    if (mmap(memory_ + offset, system_page_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
             offset) == MAP_FAILED)
      missing_[page] = again = true;
  }
  if (again) any_ = true;
  return missing;
}

}  // namespace kvr
