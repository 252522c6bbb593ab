#include "linear.h"

#include <algorithm>
#include <vector>

namespace KIND {

namespace {

constexpr int64_t AHEAD = 32;  // steps of a panel fetched before they are needed

// The rows of a tile lie pair by pair: pair 0 of each row, pair 1 of each row, … So they are one stream, and rows that
// are a power of two apart do not push each other out of the cache.
// `next`: what comes afterwards, fetched meanwhile; null: the panels themselves are fetched a little ahead, and towards
// their end those behind them.
template <int ROWS, int PANELS>
inline void tile(const Linear& w, const Product& p, const bf16* x, int64_t row, int64_t panel, const char* next,
                 int64_t next_bytes) {
    const int64_t steps = w.inputs / 2;
    const bf16* weight[PANELS];
    for (int j = 0; j < PANELS; ++j) weight[j] = w.weight + (panel + j) * steps * 2 * LANES;
    Lanes sum[ROWS][PANELS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < PANELS; ++j) sum[i][j] = zeros();
    const int64_t lines = next_bytes / 64, turn = std::max<int64_t>(0, steps - AHEAD);
    auto go = [&](int64_t from, int64_t to, int64_t ahead) __attribute__((always_inline)) {
        for (int64_t k = from; k < to; ++k) {
            Pairs column[PANELS];
#pragma GCC unroll 4
            for (int j = 0; j < PANELS; ++j) {
                column[j] = pairs(weight[j] + k * 2 * LANES);
                if (!next) __builtin_prefetch(weight[j] + (k + ahead) * 2 * LANES);
            }
            if (k < lines) __builtin_prefetch(next + 64 * k, 0, 2);
#pragma GCC unroll 24
            for (int i = 0; i < ROWS; ++i) {
                Pairs pair = same_pair(x + (k * ROWS + i) * 2);
#pragma GCC unroll 4
                for (int j = 0; j < PANELS; ++j) sum[i][j] = dot(sum[i][j], column[j], pair);
            }
        }
    };
    go(0, turn, AHEAD);
    go(turn, steps, (PANELS - 1) * steps + AHEAD);
    if (w.bias)
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j < PANELS; ++j) sum[i][j] = add(sum[i][j], load(w.bias + (panel + j) * LANES));
    if (p.then == Then::SWIGLU) {
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j + 1 < PANELS; j += 2) {
                bf16* y = (bf16*)p.y + (row + i) * p.y_stride + (panel + j) / 2 * LANES;
                store(y, mul(silu(sum[i][j]), sum[i][j + 1]));
            }
        return;
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < PANELS; ++j) {
            const int64_t place = (row + i) * p.y_stride + (panel + j) * LANES;
            const int64_t real = w.outputs - (panel + j) * LANES;
            if (real >= LANES) {
                if (p.then == Then::ADD) sum[i][j] = add(sum[i][j], load(p.other + place));
                if (p.wide)
                    store((float*)p.y + place, sum[i][j]);
                else
                    store((bf16*)p.y + place, sum[i][j]);
                continue;
            }
            float lane[LANES];
            store(lane, sum[i][j]);
            for (int64_t n = 0; n < real; ++n) {
                float value = p.then == Then::ADD ? lane[n] + widen(p.other[place + n]) : lane[n];
                if (p.wide)
                    ((float*)p.y)[place + n] = value;
                else
                    ((bf16*)p.y)[place + n] = round(value);
            }
        }
}

constexpr int BLOCK = 6;   // rows of a tile of four panels
constexpr int WIDE = 12;   // and of two

template <int PANELS, int ROWS = PANELS == 4 ? BLOCK : WIDE>
void tile_of(int64_t rows, const Linear& w, const Product& p, const bf16* x, int64_t row, int64_t panel,
             const char* next, int64_t next_bytes) {
    if (rows == ROWS) return tile<ROWS, PANELS>(w, p, x, row, panel, next, next_bytes);
    if constexpr (ROWS > 1) tile_of<PANELS, ROWS - 1>(rows, w, p, x, row, panel, next, next_bytes);
}

// Rows [row, row + rows) pair by pair.
void lay_out(const Product& p, int64_t row, int64_t rows, int64_t inputs, bf16* to) {
    for (int64_t i = 0; i < rows; ++i) {
        const char* from = (const char*)(p.x + (row + i) * p.x_stride);
        char* out = (char*)to + 4 * i;
        for (int64_t k = 0; k < inputs / 2; ++k) std::memcpy(out + 4 * rows * k, from + 4 * k, 4);
    }
}

}  // namespace

// four panels stay in the cache while all rows go through them; the next four are fetched meanwhile
//
//            panels 0..3          panels 4..7
//  rows 0..5 | tile | fetch 4      | tile | fetch 8
//  rows 6..9 | tile | to 7         | tile | to 11
//
// up to twelve rows are one tile of two panels, and nothing is read twice
void multiply(const Linear& w, const Product& p, int64_t first, int64_t last) {
    static thread_local std::vector<bf16> laid_out;
    if (!p.rows || first == last) return;
    const int64_t most = p.rows <= BLOCK ? BLOCK : WIDE;
    const bool one_tile = p.rows <= most;
    const int64_t num_tiles = one_tile ? 1 : (p.rows + BLOCK - 1) / BLOCK;
    const int64_t together = p.rows > BLOCK && one_tile ? 2 : 4;  // panels
    if (int64_t(laid_out.size()) < p.rows * w.inputs) laid_out.resize(p.rows * w.inputs);
    std::vector<int64_t> bounds(num_tiles + 1);
    for (int64_t n = 0; n < num_tiles; ++n) {  // evenly: no tile of one row behind those of six
        bounds[n + 1] = bounds[n] + (p.rows - bounds[n] + num_tiles - n - 1) / (num_tiles - n);
        lay_out(p, bounds[n], bounds[n + 1] - bounds[n], w.inputs, laid_out.data() + bounds[n] * w.inputs);
    }
    const int64_t bytes = w.inputs * LANES * 2;  // of a panel
    for (int64_t panel = first; panel < last;) {
        const int64_t left = last - panel, count = left >= together ? together : left >= 2 ? 2 : 1;
        const char* next = one_tile ? nullptr : (const char*)w.weight + (panel + count) * bytes;
        const int64_t ahead = one_tile ? 0 : std::min<int64_t>(4, left - count) * bytes;
        for (int64_t n = 0; n < num_tiles; ++n) {
            const int64_t row = bounds[n], rows = bounds[n + 1] - row;
            const int64_t from = ahead * n / num_tiles / 64 * 64, to = ahead * (n + 1) / num_tiles / 64 * 64;
            const bf16* x = laid_out.data() + row * w.inputs;
            const char* part = next ? next + from : nullptr;
            if (count == 4)
                tile_of<4>(rows, w, p, x, row, panel, part, to - from);
            else if (count == 2)
                tile_of<2>(rows, w, p, x, row, panel, part, to - from);
            else
                tile_of<1>(rows, w, p, x, row, panel, part, to - from);
        }
        panel += count;
    }
}

void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* panels) {
    const int64_t steps = (inputs + 1) / 2;
    for (int64_t n = 0; n < (outputs + LANES - 1) / LANES * LANES; ++n)
        for (int64_t k = 0; k < 2 * steps; ++k) {
            const bool real = n < outputs && k < inputs;
            panels[((n / LANES * steps + k / 2) * LANES + n % LANES) * 2 + k % 2] = real ? weight[n * inputs + k] : 0;
        }
}

}  // namespace KIND
