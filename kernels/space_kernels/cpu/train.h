// Elementwise operations of training, each in one pass over memory: loss, RMSNorm, SwiGLU and attention weights.

#pragma once

#include "isa.h"

namespace KIND {

// Rows of a loss between a teacher's distribution p and a student's q, both softmax(scale·logits).
struct Distillation {
    const bf16* teacher;  // [rows, V] logits
    bf16* student;        // [rows, V] logits; with `needs_gradient` replaced by the gradient by scale·logits
    int64_t rows, vocabulary;  // V: a multiple of 16
    float scale;
    float entropy;     // factor of -Σ p·log q
    float rejection;   // factor of 1 - Σ min(p, q)
    float surprisal;   // factor of -log Σ min(p, q)
    bool needs_gradient;
    float* cross_entropy;  // [rows] -Σ p·log q
    float* acceptance;     // [rows] Σ min(p, q)
};

void distill(const Distillation& loss, int num_threads);

// Replaces scores by the attention weights, and the gradient of the weights by that of the unscaled scores.
// `logsumexp` [rows]: of the scores.
void attention_backward(bf16* scores, bf16* grad_weights, const float* logsumexp, int64_t rows, int64_t keys,
                        float scale, int num_threads);

// RMSNorm's gradient by x [rows, width].
void norm_backward(const bf16* x, const bf16* weight, const bf16* grad_output, int64_t rows, int64_t width, float eps,
                   bf16* grad_x, int num_threads);

// silu(gate)·up, and its gradients by gate and up; `count` numbers, a multiple of 16.
void swiglu(const bf16* gate, const bf16* up, int64_t count, bf16* out, int num_threads);
void swiglu_backward(const bf16* gate, const bf16* up, const bf16* grad_output, int64_t count, bf16* grad_gate,
                     bf16* grad_up, int num_threads);

}  // namespace KIND
