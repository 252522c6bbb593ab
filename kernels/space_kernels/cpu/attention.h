// Attention of a SPACE step over the paged KV cache, for all rows of a step at once.
//
// A row visits fixed blocks of 64 positions, ascending, each added by an online softmax; a mask row then adds the masks
// of its group up to itself. The order of every sum is fixed, so a row's bits do not depend on the other rows.

#pragma once

#include "isa.h"

namespace KIND {

// The rows of a step and the slots each of them sees.
struct Rows {
    int64_t num_rows;         // without padding
    const int64_t* owner;     // [rows] sequence
    const int64_t* offsets;   // [rows] position relative to the sequence's first chain row
    const int64_t* reach;     // [rows] slots, from that row on, that the row sees
    const int64_t* peers;     // [rows] first row of its mask group; -1: a chain row
    const int64_t* starts;    // [sequences] position of the first chain row
    const int64_t* pages;     // [sequences, most pages]
    int64_t most_pages;
    int64_t num_chain_rows;
    int64_t num_tiles;           // tiles: rows of one sequence that are processed together
    const int64_t* tile_rows;    // flat row numbers, tile after tile
    const int64_t* tile_bounds;  // [tiles + 1]
};

struct Heads {
    int64_t query, kv, dim, value_dim;  // dimensions: multiples of 16
};

struct Attention {
    bf16 *query, *key;  // rows of heads, with the strides below
    const bf16* value;
    int64_t query_stride, kv_stride, value_stride;
    bf16 *key_pages, *value_pages;  // [blocks, kv heads, block size, dim or value dim]; the same: latent attention,
                                    // whose values are the first numbers of the keys
    int64_t block_size;
    bf16* out;  // [rows, query heads · dim]
    float scale;
    float softcap;   // 0: none
    int64_t window;  // 0: none
    const float* slopes;  // [query heads] of linear biases (ALiBi); null: none
    float slope_factor;   // of a rounded bias
    int64_t bias;         // 0: slope·(key's position - own); 1: slope·position; 2: factor·bf16(slope·bf16(position))
    const float* sinks;  // [query heads]: scores that add to the sums of weights; null: none
    int64_t chunk;  // positions of a chunk, counted from 0, beyond which a row sees nothing; 0: none
};

// Store keys and values of chain rows [first, last); values that are not finite are stored as 0.
void store_rows(const Rows& rows, const Heads& heads, const Attention& a, int64_t first, int64_t last);

// Compute item n of num_tiles · kv heads · parts; parts: of the query heads that share keys.
void attend_item(const Rows& rows, const Heads& heads, const Attention& a, int64_t item, int64_t parts);

}  // namespace KIND
