#include "readers.h"

#include <pthread.h>
#include <sched.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvr {

namespace {

constexpr int kThreads = 4;  // mostly asleep in the kernel: more than cores does no harm

class Pool {
 public:
  explicit Pool(const cpu_set_t& cores) {
    for (int i = 0; i < kThreads; ++i) {
      try {
        std::thread reader([this] { run(); });
        pthread_setname_np(reader.native_handle(), "kvr-reader");
        pthread_setaffinity_np(reader.native_handle(), sizeof cores, &cores);
        reader.detach();
      } catch (const std::system_error&) {
        if (i == 0) throw;
        return;  // fewer will do
      }
    }
  }

  void submit(std::function<void()> job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
  }

  // Holds the pool still, with nothing left to do.
  void pause() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return jobs_.empty() && busy_ == 0; });
    lock.release();
  }
  void resume() { mutex_.unlock(); }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      ++busy_;
      lock.unlock();
      job();
      lock.lock();
      if (--busy_ == 0 && jobs_.empty()) idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<std::function<void()>> jobs_;
  int busy_ = 0;  // threads with a job
};

cpu_set_t cores_of_openmp() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
#pragma omp parallel
  {
    cpu_set_t own;
    CPU_ZERO(&own);
    sched_getaffinity(0, sizeof own, &own);
#pragma omp critical
    CPU_OR(&cores, &cores, &own);
  }
  return cores;
}

std::mutex starting;
Pool* pool = nullptr;  // never destroyed: its threads outlive every static

void before_fork() {
  starting.lock();
  if (pool != nullptr) pool->pause();
}

void after_fork_in_parent() {
  if (pool != nullptr) pool->resume();
  starting.unlock();
}

void after_fork_in_child() {
  pool = nullptr;  // its threads are the parent's
  starting.unlock();
}

Pool& started() {
  const std::lock_guard<std::mutex> lock(starting);
  if (pool == nullptr) {
    // The parent's answer serves a forked child, where GNU OpenMP cannot run in parallel.
    static const cpu_set_t cores = [] {
      pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
      return cores_of_openmp();
    }();
    pool = new Pool(cores);
  }
  return *pool;
}

}  // namespace

int reader_threads() { return kThreads; }

void start_readers() { started(); }

void submit(std::function<void()> job) { started().submit(std::move(job)); }

}  // namespace kvr
