// x·Wᵀ for bfloat16 x, optimised for few rows: the weights are read once, at memory speed.
//
// W [out, in] is stored in panels of 16 outputs:
//
//     panel 0: k0k1 of outputs 0..15 | k2k3 of outputs 0..15 | …     panel 1: …
//
// Weights are bfloat16, padded with 0; for those in fewer bits see linear_groups.cpp.
//
// Each output of each row is one sum over ascending pairs of k (AMX: over groups of sixteen pairs). So a row's bits do
// not depend on the other rows, their number, or the thread.
//
// Gated rows add an adapter's delta B·(A·x), a sum of its own, before the rounding. The other rows are computed as if
// there were none. B is block-diagonal where one matmul stands for several linears; only its blocks are stored.

#pragma once

#include <algorithm>

#include "isa.h"

namespace KIND {

constexpr int64_t STEP = 2 * LANES;  // weights of a panel per step, which is a pair of inputs

// Inputs of a panel: padded to a whole tile with AMX.
constexpr int64_t padded(int64_t inputs) {
    const int64_t multiple = TILES ? 32 : 2;
    return (inputs + multiple - 1) / multiple * multiple;
}

enum class Then : int { NOTHING = 0, ADD = 1, SWIGLU = 2 };

// Weights in groups of 32 inputs, named as in a GGUF: four or eight bits with a scale; Q4_1 with a minimum, too. The
// K forms have such a scale (and minimum) for eight groups, and a whole number by which each group multiplies it. MIXED:
// ranges of panels in several forms; the weight is their LinearPart[]. INT8: eight bits with a scale for each output,
// the linear's, which the sum of all groups is multiplied by. U4_n: four bits, with a scale and a zero point for n inputs.
// MXFP4: floats of four bits with a power of two as scale.
enum class Groups : int {
    NONE = 0, Q4_0 = 1, Q4_1 = 2, Q8_0 = 3, Q4_K = 4, Q5_K = 5, Q6_K = 6, MIXED = 7, INT8 = 8, U4_32 = 9, U4_64 = 10,
    U4_128 = 11, MXFP4 = 12
};

// The operands of a matmul and its destination.
struct Linear {
    const void* weight;  // panels: bf16, or groups
    const float* scale;  // of INT8 [panels·16], else null
    const float* bias;   // [panels·16], or null
    int64_t panels;
    int64_t inputs;  // even
    int64_t outputs;  // of W, without padding
    Groups groups;
    const int32_t* order;  // of weights in groups: the input at each place; null: as they come
};

// The panels up to the next part's first one; the last part ends with `first` = panels of the linear, and no weight.
struct LinearPart {
    const uint8_t* weight;
    int64_t first;
    int64_t groups;
};

// Unpacked weights in groups: float16 bits (of MXFP4 bfloat16), and a byte a number. Inputs are padded to whole groups.
struct GroupWeights {
    const uint8_t* numbers;      // [outputs, groups·32]
    const uint16_t *scale, *min;  // [outputs, scales of an output]; min: of Q4_1, Q4_K and Q5_K; INT8: null
    const uint8_t* scale_steps;  // of K forms [outputs, groups]; Q6_K: [outputs, groups·2] int8
    const uint8_t* min_steps;    // of Q4_K and Q5_K [outputs, groups]
    const uint8_t* zero;         // of U4 forms, as scale
};

// The columns of B that a panel of outputs has.
struct DeltaPanel {
    const bf16* weight;
    int64_t from, inputs;  // of A·x, both even; 0 inputs: no delta
};

struct Delta {
    Linear a;             // [ranks, inputs]; no panels: no delta
    const DeltaPanel* b;  // [panels of the linear]
};

// A run's A·x is in columns [column, column + width) of Matmul::low. Runs that share rows have columns of their own.
struct GatedRows {
    int64_t first, last;
    const Delta* delta;
    int64_t column, width;
};

struct Matmul {
    const bf16* x;  // [rows, inputs]
    int64_t rows, x_stride;
    void* y;  // [rows, …] bf16, or float32
    int64_t y_stride;
    bool wide;  // y is float32
    Then then;
    const bf16* other;  // the summand of ADD: [rows, y_stride]
    const GatedRows* gated;
    int64_t num_gated;
    bf16* low;  // [rows, low_stride]: A·x of gated rows
    int64_t low_stride;
};

// Rows of several heads, each of which has a linear of its own; strides between heads, and between rows.
struct HeadRows {
    const bf16* x;
    int64_t x_head, x_row;
    bf16* y;
    int64_t y_head, y_row;
    int64_t heads, rows;
};

// Compute panels [first, last) of weights that are not in groups, with A·x known. For SWIGLU panels are pairs, gate and
// up: both bounds are even. fresh: this is the thread's first piece of this job.
void multiply(const Linear& w, const Matmul& p, int64_t first, int64_t last, bool fresh);

// The gated rows among [row, row + rows), run by run.
template <typename Work>
void each_gated(const Matmul& p, int64_t row, int64_t rows, const Work& work) {
    for (int64_t n = 0; n < p.num_gated; ++n) {
        const GatedRows& run = p.gated[n];
        const int64_t first = std::max(row, run.first), last = std::min(row + rows, run.last);
        if (first < last && run.delta->a.panels) work(run, first, last - first);
    }
}

// A·x of a run of gated rows, by num_threads threads.
void multiply_low(const GatedRows& run, const Matmul& p, int num_threads);

// The whole matmul by weights in groups, by num_threads threads; A·x of gated rows first.
void multiply_by_groups(const Linear& w, const Matmul& p, int num_threads);

// By vector instructions, and by tiles (AMX): `multiply`, and its part that adds B·low to the sums of the gated rows among [row, row + rows), rows of `count` panels from `panel` on.
void multiply_by_lanes(const Linear& w, const Matmul& p, int64_t first, int64_t last, bool fresh);
void multiply_by_tiles(const Linear& w, const Matmul& p, int64_t first, int64_t last, bool fresh);
void add_deltas_by_lanes(const Matmul& p, Lanes* sum, int64_t row, int64_t rows, int64_t panel, int count);
void add_deltas_by_tiles(const Matmul& p, Lanes* sum, int64_t row, int64_t rows, int64_t panel, int count);

// Prepare the rows of A·x for add_deltas_by_lanes: tile n has rows [bounds[n], bounds[n + 1]).
void lay_out_low(const Matmul& p, const int64_t* bounds, int64_t num_tiles);

// Finish and store such sums.
void finish(const Linear& w, const Matmul& p, Lanes* sum, int64_t row, int64_t rows, int64_t panel, int count);

// Convert W [out, in] bfloat16 to panels, padded with 0.
void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* panels);

// Quantise outputs [first, last) of W [out, in] bfloat16 to the nearest weights in groups.
struct Quantized {  // as GroupWeights
    uint8_t* numbers;
    uint16_t *scale, *min;
};
void quantize(const bf16* weight, int64_t inputs, Groups groups, const Quantized& to, int64_t first, int64_t last);

// Convert weights in groups to panels, of so many bytes each.
void pack(const GroupWeights& weight, int64_t outputs, int64_t inputs, Groups groups, uint8_t* panels);
int64_t panel_bytes(int64_t inputs, Groups groups);

}  // namespace KIND
