// Attention of a SPACE step over paged keys and values, all rows of a step at once.
//
// A row goes through fixed blocks of 64 positions, ascending, each joined by an online softmax; a mask row then joins
// the masks of its group up to itself. Every sum of a row has one order of its own, so its result is the same bits
// whatever the other rows of the step.

#pragma once

#include "isa.h"

namespace KIND {

// The rows of a step, and what each of them sees.
struct Rows {
    int64_t num_rows;         // without padding
    const int64_t* owner;     // [rows] sequence
    const int64_t* offsets;   // [rows] position behind the sequence's first chain row
    const int64_t* reach;     // [rows] slots from there on that the row sees
    const int64_t* peers;     // [rows] first row of its mask group; -1: a chain row
    const int64_t* starts;    // [sequences] position of the first chain row
    const int64_t* pages;     // [sequences, most pages]
    int64_t most_pages;
    int64_t num_chain_rows;
    int64_t num_tiles;           // rows of one sequence that go through the keys together
    const int64_t* tile_rows;    // flat row numbers, tile after tile
    const int64_t* tile_bounds;  // [tiles + 1]
};

struct Heads {
    int64_t query, kv, dim;  // dim a multiple of 16, at most 256
};

struct Attention {
    bf16 *query, *key;  // rows of heads, so many elements apart
    const bf16* value;
    int64_t query_stride, kv_stride;
    bf16 *key_pages, *value_pages;  // [blocks, kv heads, block size, dim]
    int64_t block_size;
    bf16* out;  // [rows, query heads · dim]
    float scale;
    float softcap;   // 0: none
    int64_t window;  // 0: none
};

// Chain rows [first, last) write their keys and values; what is not finite is stored as 0.
void store_rows(const Rows& rows, const Heads& heads, const Attention& a, int64_t first, int64_t last);

// Item n of num_tiles · kv heads.
void attend_item(const Rows& rows, const Heads& heads, const Attention& a, int64_t item);

}  // namespace KIND
