// Argmax, top-k and sampling over the vocabulary.

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

// How each row is sampled from its logits, in the order of sampling/sampler.py.
struct Sampling {
    const bool* sampled;      // false: the greatest logit, and nothing below matters
    const float* divisors;    // the temperature
    const int64_t* top_k;     // the k most probable ids are kept; 0: all
    const double* top_p;      // of these, the first that together reach this share of them; 1: all
    const double* log_min_p;  // of these, those whose logit is at most this far (<= 0) below the greatest
    const int64_t *keys, *positions;  // of the noise (sampling/noise.py)
};

// Each row's argmax of logit / temperature plus noise over the ids that are kept, and whether it is valid as above. A
// row's result depends on nothing but its logits and parameters; all kinds give the same.
void sample(const Logits& logits, const Sampling& sampling, int64_t* ids, bool* valid, int num_threads);

// The noise of some ids at a position.
void noise_of(int64_t key, int64_t position, const int64_t* ids, int64_t count, float* noise);

}  // namespace KIND
