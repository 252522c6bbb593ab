// Choices over a vocabulary: the greatest logit of a row, and the ids of its greatest.

#pragma once

#include "isa.h"

namespace KIND {

// N rows of V logits, a stride apart.
struct Logits {
    float* values;
    int64_t rows, stride, vocabulary;
    const int64_t* banned;  // ids that no row may have: their logits become -inf
    int64_t num_banned;
};

// Each row's first greatest id, and whether it may be had: the row has no NaN, and its greatest logit is finite.
void choose(const Logits& logits, int64_t* ids, bool* usable, int num_threads);

// Each row's `count` best ids, ascending, and 0 for each, or -inf where its logit is; equal logits: the lower ids.
void best_of(const Logits& logits, int64_t count, int64_t* ids, float* offsets, int num_threads);

}  // namespace KIND
