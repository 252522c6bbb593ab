// The tile instructions of AMX by plain loops, included before each source of the kind `amx_bf16` where no processor has
// them. Products of bfloat16 are summed in another order than the instruction's.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

struct Tiles {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config;
    uint8_t tile[8][16][64];
};
inline thread_local Tiles tiles;

inline void load_config(const void* from) { std::memcpy(&tiles.config, from, 64); }
inline void release() { std::memset(&tiles, 0, sizeof(tiles)); }
inline void zero(int n) { std::memset(tiles.tile[n], 0, sizeof(tiles.tile[n])); }
inline void load(int n, const void* from, int64_t stride) {
    zero(n);
    for (int i = 0; i < tiles.config.rows[n]; ++i)
        std::memcpy(tiles.tile[n][i], (const char*)from + i * stride, tiles.config.bytes[n]);
}
inline void store(int n, void* to, int64_t stride) {
    for (int i = 0; i < tiles.config.rows[n]; ++i)
        std::memcpy((char*)to + i * stride, tiles.tile[n][i], tiles.config.bytes[n]);
}

// sum[m][n] += Σ product of the four bytes, or two bfloat16, k of row m of `a` and row k of `b`
template <typename Sum, typename Product>
inline void multiply(int sums, int a, int b, const Product& product) {
    for (int m = 0; m < tiles.config.rows[sums]; ++m)
        for (int n = 0; n < tiles.config.bytes[sums] / 4; ++n) {
            Sum sum;
            std::memcpy(&sum, tiles.tile[sums][m] + 4 * n, 4);
            for (int k = 0; k < tiles.config.bytes[a] / 4; ++k)
                sum += product(tiles.tile[a][m] + 4 * k, tiles.tile[b][k] + 4 * n);
            std::memcpy(tiles.tile[sums][m] + 4 * n, &sum, 4);
        }
}
inline void signed_by_unsigned(int sums, int a, int b) {
    multiply<int32_t>(sums, a, b, [](const uint8_t* x, const uint8_t* w) {
        int32_t sum = 0;
        for (int i = 0; i < 4; ++i) sum += int32_t(int8_t(x[i])) * int32_t(w[i]);
        return sum;
    });
}
inline float widen(const uint8_t* bf16) {
    const uint32_t bits = uint32_t(bf16[0]) << 16 | uint32_t(bf16[1]) << 24;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void pairs(int sums, int a, int b) {
    multiply<float>(sums, a, b, [](const uint8_t* x, const uint8_t* w) {
        return widen(x) * widen(w) + widen(x + 2) * widen(w + 2);
    });
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbsud emulated::signed_by_unsigned
#define _tile_dpbf16ps emulated::pairs
