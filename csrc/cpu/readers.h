// The threads that read ahead of the model; one small pool per process, started at first use.
#pragma once

#include <functional>

namespace kvr {

// How many threads read.
int reader_threads();
// Runs `job` on one of them. Jobs do not throw.
void submit(std::function<void()> job);

}  // namespace kvr
