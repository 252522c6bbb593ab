// A Llama-like decoder from token ids to the final norm, in one call.

#pragma once

#include "attention.h"
#include "choice.h"
#include "draft.h"
#include "linear.h"
#include "table.h"

namespace KIND {

struct Layer {
    const bf16* attention_norm;  // [hidden]
    Linear query_key_value;
    const bf16 *query_norm, *key_norm;  // [dim], or null
    Linear output;
    const bf16* mlp_norm;
    Linear gate_up;  // alternating panels of gate and up
    Linear down;
    bf16 *key_pages, *value_pages;
    int64_t window;
};

// One adapter's deltas in one layer.
struct LayerDeltas {
    Delta query_key_value, output, gate_up, down;
};

// Rows [first, last) belong to an adapter's masks, numbers `masks` [last - first] of its embeddings; or, with no masks,
// to a LoRA, whose rows keep their own inputs. A mask row may be in one run of each.
struct GatedRun {
    int64_t first, last;
    const LayerDeltas* layers;
    int64_t column, width;  // of its A·x in `low`
    const int64_t* masks;  // or null
    const bf16* embeddings;  // [num_masks, hidden]
    int64_t num_masks;
};

struct Network {
    int64_t num_layers, num_ids, hidden, inner;
    Heads heads;
    float eps, scale;
    int64_t block_size;
    const Layer* layers;
    Table embedding;         // [num_ids, hidden]
    const bf16* norm;        // [hidden]
    const float *cos, *sin;  // [positions, dim/2]
};

struct Buffers {  // [rows, …]
    const int64_t* ids;
    bf16 *x, *normed, *fused, *attended, *inner;
    bf16* low;  // [rows, low_stride], zeros where there are gated rows
    int64_t low_stride;
    const GatedRun* gated;
    int64_t num_gated;
    // Layers whose inputs are wanted, and where those of chain rows go: [chain rows, num_tapped, hidden]. The number of
    // layers stands for the last one's output.
    const int64_t* tapped;
    int64_t num_tapped;
    bf16* taps;
};

// Writes the result to buffers.normed [rows, hidden]. Returns false, without computing, if an id or a mask is out of
// range.
bool forward(const Network& network, const Rows& rows, const Buffers& buffers, int num_threads);

// The next drafts of S sequences, from the masks of a step that verifies their present ones.
struct NextDrafts {
    const DraftHead* head;
    int64_t sequences;
    int64_t candidates, greedy_candidates;  // of each mask; the latter where all that draft are greedy
    int64_t most;                           // masks of a group at most
    const int64_t* bounds;  // [S + 1]: chain rows of sequence s: its root, then its drafts
    // By chain row, for the sequence whose last accepted row it is: which row is the mask of its next draft, and how many
    // masks there are from that one on; 0: it drafts nothing.
    const int64_t *masks, *num_masks;  // [chain rows]
    bool joined;            // one product of the head serves chain and mask rows; else the masks in use have their own
    const Sampling* sampling;  // by sequence; null: all are greedy. Its positions are unread
    float sharpness;           // of the draft head's logits where sampling draws
    int64_t* drafts;           // [S, most]
    int64_t* num_drafts;       // [S]
};

// `forward`, then the head of the chain rows into `logits`, and the id that each of these rows samples; without
// `sampling` its greatest. If all of them are valid, and `next` is not null, then the next drafts. `logits` has room for
// what else the head computes for them. Returns how many ids are valid (see argmax); -1, without computing, if an id or
// a mask is out of range.
int64_t forward_sampled(const Network& network, const Rows& rows, const Buffers& buffers, const Linear& head,
                        const Logits& logits, const Sampling* sampling, const NextDrafts* next, int64_t* ids,
                        bool* valid, int num_threads);

// The whole matmul, by num_threads threads; A·x of gated rows first.
void multiply(const Linear& w, const Matmul& p, int num_threads);

// A whole matmul for each head, by the linear of the same number; heads are shared out.
void multiply_each(const Linear* weights, const HeadRows& p, int num_threads);

// For all rows: norm queries and keys (unless null), apply the rotary embedding (unless cos is null), store chain rows.
// cos, sin [positions, dim/2]
void turn_and_store(const Rows& rows, const Heads& heads, const Attention& a, const bf16* query_norm,
                    const bf16* key_norm, float eps, const float* cos, const float* sin, int num_threads);

// Attention of every tile of rows and kv head.
void attend(const Rows& rows, const Heads& heads, const Attention& a, int num_threads);

// RMS norm of each row.
void norm(const bf16* x, const bf16* weight, int64_t num_rows, int64_t width, float eps, bf16* out, int num_threads);

// x / sqrt(mean(x²) + eps) · weight, in float32, rounded once.
void norm_row(const bf16* x, const bf16* weight, int64_t width, float eps, bf16* out);

// Rotate each pair (i, i + dim/2) of a head by its angle, in float32, rounded once.
void turn_head(bf16* head, const float* cos, const float* sin, int64_t dim);

}  // namespace KIND
