// The draft heads: small sequential steps that condition each draft on the token before it.

#pragma once

#include "linear.h"
#include "table.h"

namespace KIND {

struct DraftHead {
    Linear w1, w2;
    Table embedding, output;  // [vocabulary, hidden]
    int64_t hidden;
    float scale;    // s, of the embeddings
    bool low_rank;  // h + W2·(W1·(s·e)), else h + W2·silu(W1·[h ; s·e])
};

// S sequences of K masks with M candidates each.
struct Drafts {
    int64_t sequences, masks, candidates;
    const bf16* rows;      // [S, K, hidden]
    const int64_t* ids;    // [S, K, M] ascending
    const float* offsets;  // [S, K, M] added to the logits; -inf: impossible
    const float* divisor;  // [S] of the logits; null: 1
    const float* noise;    // [S, K, M] added after the division; null: none
    const int64_t* top_k;  // [S] candidates that are kept, the likeliest; null: nothing truncates
    const double* top_p;   // [S] of these, the first that together reach this share of them; 1: all
    const double* min_p;   // [S] of these, those at least this likely in comparison with the likeliest
    const int64_t* bonus;  // [S] the token before the first draft
    int64_t* chosen;       // [S, K]
};

void draft(const DraftHead& head, const Drafts& drafts, int num_threads);

// Drafts without masks: s' = s + W2·silu(W1·[s ; scale·e(previous)]), logits = output·s'.
struct RecurrentHead {
    Linear w1, w2;
    Table embedding;     // [vocabulary, hidden]
    Linear output;       // [D, hidden], the draft vocabulary's rows
    const int64_t* ids;  // [D] of these rows, ascending; null: row d is id d
    int64_t hidden, num_ids;  // D
    float scale;
};

// D logits a draft; the best of them is the draft, and the token before the next one.
struct RecurrentDrafts {
    int64_t sequences, drafts;
    bf16* states;             // [S, hidden] before the first draft; then behind the last one
    const int64_t* previous;  // [S] tokens before the first draft
    float* logits;            // [S, stride] of the last draft
    int64_t stride;           // at least the outputs, with their padding
    int64_t* chosen;          // [S, drafts]
};

void draft(const RecurrentHead& head, const RecurrentDrafts& drafts, int num_threads);

}  // namespace KIND
