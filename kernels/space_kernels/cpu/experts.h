// A mixture of experts, each a feed-forward of a gate, an up and a down projection.

#pragma once

#include "network.h"

namespace KIND {

struct Experts {
    const Linear *gate_up, *down;  // [count]; gate_up: alternating panels of gate and up
    int64_t count, hidden, inner;
};

// Pairs of a row and one of its experts, P = rows·per_row, are sorted by expert; those of an expert lie together.
struct ExpertRows {
    const bf16* x;            // [rows, hidden]
    int64_t rows, per_row;
    const int64_t* experts;   // [rows, per_row], ascending in each row
    const float* weights;     // [rows, per_row]
    int64_t* places;          // [rows, per_row]: of each pair in the sorted order
    int64_t* bounds;          // [count + 1]: of each expert's pairs
    bf16 *gathered, *inner;   // [P, hidden], [P, inner]
    float* made;              // [P, hidden]
    bf16* y;                  // [rows, hidden]
};

// y = Σ over the row's experts, ascending, of weight · down(silu(gate(x)) · up(x)), summed in float32. Returns false,
// without computing, if an expert is out of range.
bool experts(const Experts& e, const ExpertRows& p, int num_threads);

}  // namespace KIND
