// Rows of a table, from blocks to bfloat16. A number is that of the gguf package, in float32, rounded once.

#include "table.h"

#include <cmath>
#include <cstring>

#include "bytes.h"

namespace KIND {

namespace {

constexpr int SIZE = 32, SHARED = 8;  // numbers of a group, and groups of a block of the K types

// As `round`, for numbers that are not NaN, without its branch: compilers make vector instructions of it.
bf16 nearest(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return from_half(bits);
}

// Writes scale·(number - offset) of `count` numbers.
void scaled(const uint8_t* numbers, int count, int offset, float scale, bf16* to) {
    for (int i = 0; i < count; ++i) to[i] = nearest(float(int(numbers[i]) - offset) * scale);
}

// Writes scale·number + least of a group.
void scaled(const uint8_t* numbers, float scale, float least, bf16* to) {
    for (int i = 0; i < SIZE; ++i) to[i] = nearest(float(numbers[i]) * scale + least);
}

// The low halves of sixteen bytes, then the high ones.
void halves(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < SIZE / 2; ++i) to[i] = from[i] & 15, to[SIZE / 2 + i] = from[i] >> 4;
}

void q4_0(const uint8_t* block, bf16* to) {
    uint8_t numbers[SIZE];
    halves(block + 2, numbers);
    scaled(numbers, SIZE, 8, half_at(block), to);
}

void q4_1(const uint8_t* block, bf16* to) {
    uint8_t numbers[SIZE];
    halves(block + 4, numbers);
    scaled(numbers, half_at(block), half_at(block + 2), to);
}

void q5_0(const uint8_t* block, bf16* to) {
    uint8_t numbers[SIZE];
    halves(block + 6, numbers);
    for (int i = 0; i < SIZE; ++i) numbers[i] |= (block[2 + i / 8] >> i % 8 & 1) << 4;
    scaled(numbers, SIZE, 16, half_at(block), to);
}

void q8_0(const uint8_t* block, bf16* to) {
    const float scale = half_at(block);
    for (int i = 0; i < SIZE; ++i) to[i] = nearest(float(int8_t(block[2 + i])) * scale);
}

// A block of Q4_K, or of Q5_K, whose numbers have a fifth bit at `high`.
void k_with_min(const uint8_t* block, const uint8_t* high, const uint8_t* low, bf16* to) {
    const float scale = half_at(block), least = half_at(block + 2);
    const uint8_t* packed = block + 4;  // twelve bytes: eight steps of each, of six bits
    for (int g = 0; g < SHARED; ++g, to += SIZE) {
        const int j = g % 4;
        const int step = g < 4 ? packed[j] & 63 : (packed[8 + j] & 15) | packed[j] >> 6 << 4;
        const int least_step = g < 4 ? packed[4 + j] & 63 : packed[8 + j] >> 4 | packed[4 + j] >> 6 << 4;
        uint8_t numbers[SIZE];
        for (int i = 0; i < SIZE; ++i) {
            const uint8_t pair = low[g / 2 * SIZE + i];
            numbers[i] = uint8_t((g % 2 ? pair >> 4 : pair & 15) | (high ? (high[i] >> g & 1) << 4 : 0));
        }
        scaled(numbers, scale * float(step), -(least * float(least_step)), to);
    }
}

void q4_k(const uint8_t* block, bf16* to) { k_with_min(block, nullptr, block + 16, to); }

void q5_k(const uint8_t* block, bf16* to) { k_with_min(block, block + 16, block + 48, to); }

void q6_k(const uint8_t* block, bf16* to) {
    const uint8_t *low = block, *high = block + 128, *steps = block + 192;
    const float scale = half_at(block + 208);
    for (int g = 0; g < SHARED; ++g, to += SIZE) {
        const int half = g / 4, part = g % 4;
        uint8_t numbers[SIZE];
        for (int i = 0; i < SIZE; ++i) {
            const uint8_t pair = low[64 * half + part % 2 * SIZE + i];
            numbers[i] = uint8_t((part / 2 ? pair >> 4 : pair & 15) | (high[SIZE * half + i] >> 2 * part & 3) << 4);
        }
        for (int i = 0; i < 2; ++i)
            scaled(numbers + SIZE / 2 * i, SIZE / 2, 32, scale * float(int8_t(steps[2 * g + i])), to + SIZE / 2 * i);
    }
}

void mxfp4(const uint8_t* block, bf16* to) {
    constexpr int8_t DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const float scale = std::ldexp(1.0f, int(block[0]) - 128);  // half of the block's, for numbers are doubled
    uint8_t numbers[SIZE];
    halves(block + 1, numbers);
    for (int i = 0; i < SIZE; ++i) to[i] = nearest(float(DOUBLED[numbers[i]]) * scale);
}

template <typename Block>
void each_block(const Table& table, int64_t row, int64_t numbers, int64_t bytes, const Block& block, bf16* to) {
    const uint8_t* from = table.rows + row * table.stride;
    for (int64_t i = 0; i < table.width; i += numbers, from += bytes) block(from, to + i);
}

}  // namespace

void look_up(const Table& table, int64_t row, bf16* to) {
    switch (table.type) {
        case Type::BF16: std::memcpy(to, table.rows + row * table.stride, table.width * sizeof(bf16)); return;
        case Type::Q4_0: return each_block(table, row, SIZE, 18, q4_0, to);
        case Type::Q4_1: return each_block(table, row, SIZE, 20, q4_1, to);
        case Type::Q5_0: return each_block(table, row, SIZE, 22, q5_0, to);
        case Type::Q8_0: return each_block(table, row, SIZE, 34, q8_0, to);
        case Type::Q4_K: return each_block(table, row, SIZE * SHARED, 144, q4_k, to);
        case Type::Q5_K: return each_block(table, row, SIZE * SHARED, 176, q5_k, to);
        case Type::Q6_K: return each_block(table, row, SIZE * SHARED, 210, q6_k, to);
        case Type::MXFP4: return each_block(table, row, SIZE, 17, mxfp4, to);
    }
}

}  // namespace KIND
