// The recurrences of linear attention: the gated delta rule, Mamba-2's scan and Mamba's, row by row in float32.

#pragma once

#include "isa.h"

namespace KIND {

enum class Rule : int { DELTA = 0, SCAN = 1, CHANNELS = 2 };

// One sequence of a step, as recurrence/states.py lays it out: replayed rows, then chain rows; mask groups begin with
// the state of the chain row that they follow.
struct StateRun {
    int64_t slot, read, written;  // versions; read -1: the sequence begins with zeros
    int64_t replayed, num_replayed, chain, num_chain;
    int64_t num_final;  // chain rows behind which the state is kept
    int64_t group, num_groups;
};

struct StateGroup {
    int64_t behind, first, count;  // chain rows before the group, its first row, its rows
};

// Rows count from the replayed ones on; outputs from the step's own rows on.
struct Recurrence {
    const float* vectors;  // delta: q [N, groups, deep]; scan, channels: c
    const float* keys;     // delta: k [N, groups, deep]; scan, channels: b
    const float* values;   // [N, heads, wide]
    const float* gates;    // [N, 2, heads]: decay, then β or Δ; channels: Δ [N, heads, wide]
    float* state;          // [slots, 2, heads, …]: delta [deep, wide], scan and channels [wide, deep]
    float* out;            // [rows, heads, wide]
    int64_t heads, groups, deep, wide, num_replayed;
    const StateRun* runs;
    int64_t num_runs;
    const StateGroup* mask_groups;
    Rule rule;
    const float* rates;  // channels: A [heads, wide, deep], below zero
};

// All sequences and heads, shared out among threads. A head's arithmetic depends on its own rows alone.
void recur(const Recurrence& r, int num_threads);

}  // namespace KIND
