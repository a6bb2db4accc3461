#include "readers.h"

#include <sched.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace kvr {

namespace {

constexpr int kThreads = 4;  // mostly asleep in the kernel: more than cores does no harm

class Pool {
 public:
  Pool() {
    for (int i = 0; i < kThreads; ++i) std::thread([this] { run(); }).detach();
  }

  void submit(std::function<void()> job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
  }

 private:
  void run() {
    // vLLM binds the thread that starts us to one core, which its model needs; any will do here.
    cpu_set_t all;
    CPU_ZERO(&all);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &all);
    sched_setaffinity(0, sizeof all, &all);
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
};

}  // namespace

int reader_threads() { return kThreads; }

void submit(std::function<void()> job) {
  static Pool* pool = new Pool;  // never destroyed: its threads outlive every static
  pool->submit(std::move(job));
}

}  // namespace kvr
