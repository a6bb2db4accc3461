// The threads that read ahead of the model: one small pool per process.
//
// They may run on all cores of the model's OpenMP threads, and on no others. vLLM binds each thread of
// its model to a core of its own, also the thread that starts the readers; and a process may be bound
// to some cores from outside (taskset, numactl, a container).
//
// A forked child has a pool of its own, which starts at its first job. fork() waits for all submitted
// jobs, so the child finds them done.
#pragma once

#include <functional>

namespace kvr {

// The number of threads that read.
int reader_threads();
// Starts the threads if this process has none yet. Throws std::system_error if none can be made.
void start_readers();
// Runs `job` on one of the threads, and starts them if necessary. Jobs do not throw.
void submit(std::function<void()> job);

}  // namespace kvr
