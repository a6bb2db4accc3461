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

// An eighth of the mappings that Linux allows a process by default. At the limit it would be too late:
// then nothing can be mapped any more.
constexpr int kMostPlaces = 4096;

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

MappingGuard::MappingGuard(char* memory, int64_t bytes, int fd, bool scattered)
    : memory_(memory), system_page_(sysconf(_SC_PAGESIZE)),
      pages_((bytes + system_page_ - 1) / system_page_), fd_(fd), scattered_(scattered),
      missing_(new std::atomic<bool>[pages_]()) {
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

bool MappingGuard::put_zeros(int64_t first, int64_t end) noexcept {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(memory_ + first * system_page_, (end - first) * system_page_, PROT_READ | PROT_WRITE,
           flags, -1, 0) == MAP_FAILED)
    return false;
  for (int64_t page = first; page < end; ++page) missing_[page] = true;
  any_ = true;
  return true;
}

bool MappingGuard::put_file(int64_t first, int64_t end) noexcept {
  char* place = memory_ + first * system_page_;
  const int64_t bytes = (end - first) * system_page_;
  if (mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
           first * system_page_) == MAP_FAILED)
    return false;
  if (scattered_) madvise(place, bytes, MADV_RANDOM);  // else it would stay a mapping of its own
  return true;
}

bool MappingGuard::patch(const void* address) noexcept {
  const int64_t offset = static_cast<const char*>(address) - memory_;
  if (offset < 0 || offset >= pages_ * system_page_) return false;
  const int64_t page = offset / system_page_;
  const bool beside = (page > 0 && missing_[page - 1]) || (page + 1 < pages_ && missing_[page + 1]);
  const bool few = beside || places_.fetch_add(1) < kMostPlaces;
  return (few && put_zeros(page, page + 1)) || put_zeros(0, pages_);
}

std::vector<std::pair<int64_t, int64_t>> MappingGuard::take() {
  std::vector<std::pair<int64_t, int64_t>> missing;
  if (!any_.load(std::memory_order_relaxed) || !any_.exchange(false)) return missing;
  places_ = 0;
  for (int64_t first = 0, end; first < pages_; first = end + 1) {
    for (end = first; end < pages_ && missing_[end].exchange(false);) ++end;
    if (end == first) continue;
    missing.emplace_back(first * system_page_, end * system_page_);
    if (put_file(first, end)) continue;
    for (int64_t page = first; page < end; ++page) missing_[page] = true;
    ++places_;
    any_ = true;
  }
  return missing;
}

}  // namespace kvr
