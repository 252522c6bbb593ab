// A matrix whose rows are looked up: bfloat16, or blocks of a GGUF, which are dequantised when they are read.

#pragma once

#include "isa.h"

namespace KIND {

// Types of a row, named as in a GGUF.
enum class Type : int { BF16 = 0, Q4_0 = 1, Q4_1 = 2, Q5_0 = 3, Q8_0 = 4, Q4_K = 5, Q5_K = 6, Q6_K = 7, MXFP4 = 8 };

struct Table {
    const uint8_t* rows;
    int64_t stride;  // bytes of a row
    int64_t width;   // numbers of a row; of the K types a multiple of 256, of other blocks of 32
    Type type;
};

// Writes a row's numbers, each rounded once, to `to` [width].
void look_up(const Table& table, int64_t row, bf16* to);

// Returns a row [width]: the table's own, or `room`, to which it is written.
inline const bf16* row_of(const Table& table, int64_t row, bf16* room) {
    if (table.type == Type::BF16) return (const bf16*)(table.rows + row * table.stride);
    look_up(table, row, room);
    return room;
}

}  // namespace KIND
