// Elementwise parts of training, each of which reads its rows once from memory: loss, norms, gates and attention weights.

#pragma once

#include "isa.h"

namespace KIND {

// Rows of a loss between a teacher's distribution p and a student's q, both softmax(scale·logits).
struct Distillation {
    const bf16* teacher;  // [rows, V] logits
    bf16* student;        // [rows, V] logits; become the gradient of the loss by them (before `scale`) if `moves`
    int64_t rows, vocabulary;  // V: a multiple of 16
    float scale;
    float entropy;     // factor of -Σ p·log q
    float rejection;   // factor of 1 - Σ min(p, q)
    float surprisal;   // factor of -log Σ min(p, q)
    bool moves;
    float* crosses;    // [rows] -Σ p·log q
    float* accepted;   // [rows] Σ min(p, q)
};

void distill(const Distillation& loss, int num_threads);

// From scores and log-sums to attention weights, and from the weights' gradients to the scores': both in place.
void attention_back(bf16* scores, bf16* moves, const float* log_sums, int64_t rows, int64_t keys, float scale,
                    int num_threads);

// The gradient of RMSNorm by x [rows, width], for the one of its result.
void norm_back(const bf16* x, const bf16* weight, const bf16* move, int64_t rows, int64_t width, float eps, bf16* out,
               int num_threads);

// silu(gate)·up, and the gradients of both for the one of the product; `count` numbers, a multiple of 16.
void swiglu(const bf16* gate, const bf16* up, int64_t count, bf16* out, int num_threads);
void swiglu_back(const bf16* gate, const bf16* up, const bf16* move, int64_t count, bf16* of_gate, bf16* of_up,
                 int num_threads);

}  // namespace KIND
