// The draft head: k small sequential steps that condition each draft on the token before it.

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

}  // namespace KIND
