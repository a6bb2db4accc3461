// The threads that read ahead of the model: one small pool per process.
//
// They run wherever the OpenMP threads of the thread that starts them may run. vLLM binds each
// thread of its model to a core of its own, the one that starts the readers included, and a process
// may be kept to some cores from outside (taskset, numactl, a container); the readers keep to all
// cores that are the model's, and to these only.
//
// A forked child has a pool of its own, started at its first job. fork() waits for the jobs that
// have been submitted, so the child finds them done.
#pragma once

#include <functional>

namespace kvr {

// How many threads read.
int reader_threads();
// Starts them if this process has none yet. Throws std::system_error where no thread can be made.
void start_readers();
// Runs `job` on one of them; starts them first where need be, with the same error. Jobs do not throw.
void submit(std::function<void()> job);

}  // namespace kvr
