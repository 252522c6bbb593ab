// Argmax and top-k over the vocabulary.

#pragma once

#include "isa.h"

namespace KIND {

// N rows of V logits with a row stride.
struct Logits {
    float* values;
    int64_t rows, stride, vocabulary;
    const int64_t* banned;  // ids banned in every row: their logits become -inf
    int64_t num_banned;
};

// Each row's greatest id, ties to the lower id, and whether it is valid: no NaN, and the greatest logit is finite.
void argmax(const Logits& logits, int64_t* ids, bool* valid, int num_threads);

// Each row's `count` best ids, ascending, and an offset for each: -inf where the logit is, else 0. Ties: the lower ids.
void best_of(const Logits& logits, int64_t count, int64_t* ids, float* offsets, int num_threads);

}  // namespace KIND
