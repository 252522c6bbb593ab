// Peak rates of this processor, as a baseline for benchmarks, and a test that each unit is done exactly once.

#include <algorithm>
#include <mutex>

#include "bytes.h"
#include "export.h"
#include "isa.h"
#include "team.h"
#include "tiles.h"

using namespace KIND;

extern "C" {

// Reads `count` floats sequentially; returns their sum, so that the compiler cannot drop the reads.
float EXPORT(read)(const float* from, int64_t count, int num_threads) {
    constexpr int64_t UNIT = 1024 * LANES;
    std::mutex turn;
    float sum = 0.0f;
    share_out(num_threads, (count + UNIT - 1) / UNIT, [&](int64_t first, int64_t last, bool) {
        const int64_t end = std::min(count, last * UNIT);
        Lanes part[8];
        for (Lanes& one : part) one = zeros();
        for (int64_t i = first * UNIT; i + 8 * LANES <= end; i += 8 * LANES)
            for (int n = 0; n < 8; ++n) {
                part[n] = add(part[n], load(from + i + n * LANES));
                __builtin_prefetch(from + i + n * LANES + 1024);
            }
        const std::lock_guard alone(turn);
        for (Lanes& one : part) sum += total(one);
    });
    return sum;
}

#if TILES

// Multiplies sixteen pairs the given number of times per thread, 256 at a time; returns 0.
float EXPORT(dots)(int64_t count, int num_threads) {
    share_out(num_threads, num_threads * ((count + 1023) / 1024), [&](int64_t first, int64_t last, bool) {
        const TileConfig tiles(16);
        for (int64_t i = first; i < last; ++i) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 6);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 6);
        }
    });
    return 0.0f;
}

#else

// Multiplies sixteen pairs the given number of times per thread, twelve at a time; returns the sum.
float EXPORT(dots)(int64_t count, int num_threads) {
    constexpr int64_t UNIT = 12 * 256;
    std::mutex turn;
    float sum = 0.0f;
    share_out(num_threads, num_threads * ((count + UNIT - 1) / UNIT), [&](int64_t first, int64_t last, bool) {
        bf16 one[2 * LANES];
        for (bf16& x : one) x = 0x3c00;
        Pairs a = pairs(one), b = same_pair(one);
        Lanes part[12];
        for (Lanes& each : part) each = zeros();
        for (int64_t i = 0; i < (last - first) * UNIT / 12; ++i)
#pragma GCC unroll 12
            for (int n = 0; n < 12; ++n) part[n] = dot(part[n], a, b);
        const std::lock_guard alone(turn);
        for (Lanes& each : part) sum += total(each);
    });
    return sum;
}

#endif

// As `dots`, of sixteen times four numbers of four bits and codes, by integers.
float EXPORT(integer_dots)(int64_t count, int num_threads) {
    constexpr int FOURS = 8;  // of a group
    constexpr int64_t UNIT = 12 * 256;
    std::mutex turn;
    float sum = 0.0f;
    share_out(num_threads, num_threads * ((count + UNIT - 1) / UNIT), [&](int64_t first, int64_t last, bool) {
        uint8_t one[VECTOR];
        int8_t four[4] = {1, 1, 1, 1};
        for (uint8_t& x : one) x = 1;
        const Bytes a = load_bytes(one);
        Dots<15> part[12];
#pragma GCC unroll 12
        for (int n = 0; n < 12; ++n) part[n].sum = same_int(0);
        for (int64_t i = 0; i < (last - first) * UNIT / 12 / FOURS; ++i)
#pragma GCC unroll 8
            for (int k = 0; k < FOURS; ++k)
#pragma GCC unroll 12
                for (int n = 0; n < 12; ++n) part[n].add_products(k, a, four);
        const std::lock_guard alone(turn);
#pragma GCC unroll 12
        for (int n = 0; n < 12; ++n) sum += total(to_lanes(part[n].sum));
    });
    return sum;
}

// Adds one to each of `count` numbers; each is one unit of work.
void EXPORT(mark)(int32_t* marks, int64_t count, int num_threads) {
    share_out(num_threads, count, [&](int64_t first, int64_t last, bool) {
        for (int64_t i = first; i < last; ++i) ++marks[i];
    });
}
}
