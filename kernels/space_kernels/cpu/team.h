// A thread pool with work stealing, for machines that also run other programs.
//
//     share_out(num_threads, count, [&](int64_t first, int64_t last, bool fresh) { … units [first, last) … });
//
// The caller and num_threads - 1 helpers each have a part of the units. A thread takes ever smaller pieces from its own
// part, then from the other parts:
//
//     caller   [0 ....... | .... | .. )        helper 1   [ ....... | .... | .. )
//               1st piece   2nd    3rd                      not scheduled: others take its part from the end
//
// A helper that gets no CPU delays nothing, because the others do its part. Only a thread that is descheduled in the
// middle of a piece is waited for. Which thread does a unit varies, so a unit's result must not depend on it.

#pragma once

#include <cstdint>

#include "isa.h"

namespace KIND {

// Does units [first, last) of a job; fresh: this thread's first piece of the job.
using Piece = void (*)(const void* job, int64_t first, int64_t last, bool fresh);

// Returns when all units [0, count) have been done, each once. The caller does all of them itself while another thread
// uses the pool, or if no threads can be started. A piece must not throw, nor call share_out.
void share_out(int num_threads, int64_t count, Piece piece, const void* job);

template <typename Work>
void share_out(int num_threads, int64_t count, const Work& work) {
    share_out(
        num_threads, count,
        [](const void* job, int64_t first, int64_t last, bool fresh) { (*(const Work*)job)(first, last, fresh); },
        &work);
}

}  // namespace KIND
