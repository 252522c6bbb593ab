// AMX: eight tile registers of up to sixteen rows of 64 bytes.

#pragma once

#include "isa.h"

#if TILES

namespace KIND {

// The registers while this lives: 0 to 3 are for sums, 4 and 5 for inputs, with `rows` rows; 6 and 7 are for weights. A row
// of inputs has `bytes` bytes, four of which meet one of the rows of weights.
//
// Some compilers do not know that tile instructions read memory: write what they load before constructing this, or
// before `written()`.
class TileConfig {
   public:
    explicit TileConfig(int64_t rows, int64_t bytes = 64) {
        struct alignas(64) {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } config = {};
        config.palette = 1;
        for (int i = 0; i < 8; ++i) {
            config.bytes[i] = uint16_t(i == 4 || i == 5 ? bytes : 64);
            config.rows[i] = uint8_t(i < 6 ? rows : bytes / 4);
        }
        written();
        _tile_loadconfig(&config);
        written();
    }
    ~TileConfig() { _tile_release(); }
    TileConfig(const TileConfig&) = delete;

    static void written() { asm volatile("" ::: "memory"); }
};

}  // namespace KIND

#endif
