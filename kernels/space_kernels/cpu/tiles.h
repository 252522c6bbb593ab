// AMX: eight tile registers of up to sixteen rows of 64 bytes.

#pragma once

#include "isa.h"

#if TILES

namespace KIND {

// The registers while this lives: 0 to 5 have `rows` rows, 6 and 7 sixteen.
//
// Tile instructions of some compilers do not say that they read memory: what they read is written before this is made,
// or before `written()`.
class TileRows {
   public:
    explicit TileRows(int64_t rows) {
        struct alignas(64) {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } config = {};
        config.palette = 1;
        for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = uint8_t(i < 6 ? rows : 16);
        written();
        _tile_loadconfig(&config);
        written();
    }
    ~TileRows() { _tile_release(); }
    TileRows(const TileRows&) = delete;

    static void written() { asm volatile("" ::: "memory"); }
};

}  // namespace KIND

#endif
