// Threads that share out work, on a machine that may be busy with other things.
//
//     share_out(num_threads, count, [&](int64_t first, int64_t last, bool fresh) { … units [first, last) … });
//
// The caller and num_threads - 1 helpers each have a part of the units, take from it in ever smaller pieces, and then
// from the parts of the others:
//
//     caller   [0 ....... | .... | .. )        helper 1   [ ....... | .... | .. )
//               1st piece   2nd    3rd                      not there? its part is taken from the end
//
// A helper without a processor holds up nothing: its part is done by the others. Only a thread that loses its processor
// in the middle of a piece is waited for. Who does which unit is left to chance, so a unit's result may not depend on
// it; everything here that is shared out keeps to that.

#pragma once

#include <cstdint>

#include "isa.h"

namespace KIND {

// Does units [first, last) of a job; fresh: the first ones of this job that this thread does.
using Piece = void (*)(const void* job, int64_t first, int64_t last, bool fresh);

// Returns when all units [0, count) have been done, each once. While another thread shares something out, and where
// no threads can be had, the caller does them by itself. A piece must not throw, nor share out anything itself.
void share_out(int num_threads, int64_t count, Piece piece, const void* job);

template <typename Work>
void share_out(int num_threads, int64_t count, const Work& work) {
    share_out(
        num_threads, count,
        [](const void* job, int64_t first, int64_t last, bool fresh) { (*(const Work*)job)(first, last, fresh); },
        &work);
}

}  // namespace KIND
