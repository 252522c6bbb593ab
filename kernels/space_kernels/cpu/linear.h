// x·Wᵀ for bfloat16 x, made for few rows: the weights are read once, as fast as memory gives them.
//
// W [out, in] lies in panels of 16 outputs:
//
//     panel 0: k0k1 of outputs 0..15 | k2k3 of outputs 0..15 | …     panel 1: …
//
// Weights are bfloat16, or whole numbers of eight bits and a scale for each output. Those become bfloat16 in registers,
// exactly, and what is summed up is multiplied by the scale. Their panels are of codes, two pairs of k together, in the
// order that this kind of processor likes; inputs up to a multiple of four are 0.
//
// Each output of each row has one sum, over ascending pairs of k from zero on. So a row's result is the same bits
// whatever the other rows, their number, and who computes it.

#pragma once

#include "isa.h"

namespace KIND {

enum class Then : int { NOTHING = 0, ADD = 1, SWIGLU = 2 };

// What a product is of, and where it goes.
struct Linear {
    const void* weight;  // panels: bf16, or codes where there is a scale
    const float* scale;  // [panels·16], or null
    const float* bias;   // [panels·16], or null
    int64_t panels;
    int64_t inputs;  // even
    int64_t outputs;  // of W that are real
};

struct Product {
    const bf16* x;  // [rows, inputs]
    int64_t rows, x_stride;
    void* y;  // [rows, …] bf16, or float32
    int64_t y_stride;
    bool wide;  // y is float32
    Then then;
    const bf16* other;  // what is added: [rows, y_stride]
};

// Panels [first, last) of the product. For SWIGLU panels are pairs, gate and up: both bounds are even. fresh: this thread
// has done none of its other panels yet, or something else since.
void multiply(const Linear& w, const Product& p, int64_t first, int64_t last, bool fresh);

// W [out, in] bfloat16 -> panels; missing outputs and inputs are 0.
void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* panels);

// The same of whole numbers.
void pack(const int8_t* weight, int64_t outputs, int64_t inputs, Code* panels);

}  // namespace KIND
