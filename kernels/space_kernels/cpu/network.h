// A Llama-like decoder between the ids and the final norm, in one call.

#pragma once

#include "attention.h"
#include "linear.h"

namespace KIND {

struct Layer {
    const bf16* attention_norm;  // [hidden]
    Linear query_key_value;
    const bf16 *query_norm, *key_norm;  // [dim], or null
    Linear output;
    const bf16* mlp_norm;
    Linear gate_up;  // panels of gate and up in turn
    Linear down;
    bf16 *key_pages, *value_pages;
    int64_t window;
};

struct Network {
    int64_t num_layers, num_ids, hidden, inner;
    Heads heads;
    float eps, scale;
    int64_t block_size;
    const Layer* layers;
    const bf16 *embedding, *norm;  // [num_ids, hidden], [hidden]
    const float *cos, *sin;        // [positions, dim/2]
};

struct Buffers {  // [rows, …]
    const int64_t* ids;
    bf16 *x, *normed, *fused, *attended, *inner;
};

// buffers.normed [rows, hidden] is the result. False, and nothing done: some id is none of the embedding's.
bool forward(const Network& network, const Rows& rows, const Buffers& buffers, int num_threads);

// The whole product, by so many threads.
void multiply(const Linear& w, const Product& p, int num_threads);

// All rows: queries and keys normed (null: not) and turned (cos null: not), chain rows stored.
// cos, sin [positions, dim/2]
void turn_and_store(const Rows& rows, const Heads& heads, const Attention& a, const bf16* query_norm,
                    const bf16* key_norm, float eps, const float* cos, const float* sin, int num_threads);

// Every head of the KV cache, every tile of rows.
void attend(const Rows& rows, const Heads& heads, const Attention& a, int num_threads);

// Each row normed.
void norm(const bf16* x, const bf16* weight, int64_t num_rows, int64_t width, float eps, bf16* out, int num_threads);

// x / sqrt(mean(x²) + eps) · weight, in float32, rounded once.
void norm_row(const bf16* x, const bf16* weight, int64_t width, float eps, bf16* out);

// Each pair (i, i + dim/2) of a head turned by its angle, in float32, rounded once.
void turn_head(bf16* head, const float* cos, const float* sin, int64_t dim);

}  // namespace KIND
