#include "linear.h"

#include <algorithm>
#include <vector>

namespace KIND {

namespace {

constexpr int64_t AHEAD = 2048;  // bytes of a panel fetched before they are needed
constexpr int64_t STEP = 2 * LANES;  // weights of a panel that a step takes

// Steps of a panel: of codes there are always two together.
template <typename Weight>
constexpr int64_t steps_of(int64_t inputs) {
    return sizeof(Weight) == 1 ? (inputs + 3) / 4 * 2 : inputs / 2;
}

// The rows of a tile lie pair by pair: pair 0 of each row, pair 1 of each row, … So they are one stream, and rows that
// are a power of two apart do not push each other out of the cache.
// `next`: what comes afterwards, fetched meanwhile; null: the panels themselves are fetched a little ahead, and towards
// their end those behind them.
// `panels`: those from `panel` on.
template <typename Weight, int ROWS, int PANELS>
inline void tile(const Linear& w, const Weight* panels, const Product& p, const bf16* x, int64_t row, int64_t panel,
                 const char* next, int64_t next_bytes) {
    constexpr int64_t EARLY = AHEAD / int64_t(STEP * sizeof(Weight));
    const int64_t steps = steps_of<Weight>(w.inputs);
    const Weight* weight[PANELS];
    for (int j = 0; j < PANELS; ++j) weight[j] = panels + j * steps * STEP;
    Lanes sum[ROWS][PANELS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < PANELS; ++j) sum[i][j] = zeros();
    const int64_t lines = next_bytes / 64, turn = std::max<int64_t>(0, steps - EARLY);
    auto go = [&](int64_t from, int64_t to, int64_t ahead) __attribute__((always_inline)) {
        if constexpr (sizeof(Weight) == 1) {
            for (int64_t k = from; k < to; k += 2)
#pragma GCC unroll 4
                for (int j = 0; j < PANELS; ++j) {
                    const Two columns = two_steps(weight[j] + k * STEP);
                    __builtin_prefetch(weight[j] + (k + ahead) * STEP);
#pragma GCC unroll 24
                    for (int i = 0; i < ROWS; ++i) {
                        sum[i][j] = dot(sum[i][j], columns.first, same_pair(x + (k * ROWS + i) * 2));
                        sum[i][j] = dot(sum[i][j], columns.second, same_pair(x + ((k + 1) * ROWS + i) * 2));
                    }
                }
            return;
        }
        for (int64_t k = from; k < to; ++k) {
            Pairs column[PANELS];
#pragma GCC unroll 4
            for (int j = 0; j < PANELS; ++j) {
                column[j] = pairs((const bf16*)weight[j] + k * STEP);
                if (!next) __builtin_prefetch(weight[j] + (k + ahead) * STEP);
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
    go(0, turn, EARLY);
    go(turn, steps, (PANELS - 1) * steps + EARLY);
    if (w.scale)
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j < PANELS; ++j) sum[i][j] = mul(sum[i][j], load(w.scale + (panel + j) * LANES));
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

template <typename Weight, int PANELS, int ROWS = PANELS == 4 ? BLOCK : WIDE>
void tile_of(int64_t rows, const Linear& w, const Weight* panels, const Product& p, const bf16* x, int64_t row,
             int64_t panel, const char* next, int64_t next_bytes) {
    if (rows == ROWS) return tile<Weight, ROWS, PANELS>(w, panels, p, x, row, panel, next, next_bytes);
    if constexpr (ROWS > 1)
        tile_of<Weight, PANELS, ROWS - 1>(rows, w, panels, p, x, row, panel, next, next_bytes);
}

template <typename Weight>
void tile_of(int64_t count, int64_t rows, const Linear& w, const Weight* panels, const Product& p, const bf16* x,
             int64_t row, int64_t panel, const char* next, int64_t next_bytes) {
    if (count == 4)
        tile_of<Weight, 4>(rows, w, panels, p, x, row, panel, next, next_bytes);
    else if (count == 2)
        tile_of<Weight, 2>(rows, w, panels, p, x, row, panel, next, next_bytes);
    else
        tile_of<Weight, 1>(rows, w, panels, p, x, row, panel, next, next_bytes);
}

// Rows [row, row + rows) pair by pair, with zeros behind them up to `steps` pairs.
void lay_out(const Product& p, int64_t row, int64_t rows, int64_t inputs, int64_t steps, bf16* to) {
    for (int64_t i = 0; i < rows; ++i) {
        const char* from = (const char*)(p.x + (row + i) * p.x_stride);
        char* out = (char*)to + 4 * i;
        for (int64_t k = 0; k < inputs / 2; ++k) std::memcpy(out + 4 * rows * k, from + 4 * k, 4);
        for (int64_t k = inputs / 2; k < steps; ++k) std::memset(out + 4 * rows * k, 0, 4);
    }
}

// Codes as bfloat16.
void widen(const Code* panels, int64_t steps, bf16* to) {
    for (int64_t k = 0; k < steps; k += 2) {
        const Two columns = two_steps(panels + k * STEP);
        store_pairs(to + k * STEP, columns.first), store_pairs(to + (k + 1) * STEP, columns.second);
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
//
// for more than one tile codes become bfloat16 once, for all of them
template <typename Weight>
void multiply_by(const Linear& w, const Product& p, int64_t first, int64_t last) {
    static thread_local std::vector<bf16> laid_out, widened;
    if (!p.rows || first == last) return;
    const int64_t most = p.rows <= BLOCK ? BLOCK : WIDE;
    const bool one_tile = p.rows <= most;
    const int64_t num_tiles = one_tile ? 1 : (p.rows + BLOCK - 1) / BLOCK;
    const int64_t together = p.rows > BLOCK && one_tile ? 2 : 4;  // panels
    const int64_t steps = steps_of<Weight>(w.inputs), width = 2 * steps;
    if (int64_t(laid_out.size()) < p.rows * width) laid_out.resize(p.rows * width);
    std::vector<int64_t> bounds(num_tiles + 1);
    for (int64_t n = 0; n < num_tiles; ++n) {  // evenly: no tile of one row behind those of six
        bounds[n + 1] = bounds[n] + (p.rows - bounds[n] + num_tiles - n - 1) / (num_tiles - n);
        lay_out(p, bounds[n], bounds[n + 1] - bounds[n], w.inputs, steps, laid_out.data() + bounds[n] * width);
    }
    const int64_t size = steps * STEP;  // of a panel
    if (sizeof(Weight) == 1 && !one_tile && int64_t(widened.size()) < 4 * size) widened.resize(4 * size);
    for (int64_t panel = first; panel < last;) {
        const int64_t left = last - panel, count = left >= together ? together : left >= 2 ? 2 : 1;
        const Weight* here = (const Weight*)w.weight + panel * size;
        if (one_tile) {
            tile_of<Weight>(count, p.rows, w, here, p, laid_out.data(), 0, panel, nullptr, 0);
            panel += count;
            continue;
        }
        const bf16* wide = (const bf16*)here;
        Linear of_wide = w;
        if constexpr (sizeof(Weight) == 1) {
            widen(here, count * steps, widened.data());
            wide = widened.data(), of_wide.inputs = width;
        }
        const char* next = (const char*)(here + count * size);
        const int64_t ahead = std::min<int64_t>(4, left - count) * size * sizeof(Weight);
        for (int64_t n = 0; n < num_tiles; ++n) {
            const int64_t row = bounds[n], rows = bounds[n + 1] - row;
            const int64_t from = ahead * n / num_tiles / 64 * 64, to = ahead * (n + 1) / num_tiles / 64 * 64;
            const bf16* x = laid_out.data() + row * width;
            tile_of<bf16>(count, rows, of_wide, wide, p, x, row, panel, next + from, to - from);
        }
        panel += count;
    }
}

void multiply(const Linear& w, const Product& p, int64_t first, int64_t last) {
    if (w.scale)
        multiply_by<Code>(w, p, first, last);
    else
        multiply_by<bf16>(w, p, first, last);
}

void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* panels) {
    const int64_t steps = (inputs + 1) / 2;
    for (int64_t n = 0; n < (outputs + LANES - 1) / LANES * LANES; ++n)
        for (int64_t k = 0; k < 2 * steps; ++k) {
            const bool real = n < outputs && k < inputs;
            panels[((n / LANES * steps + k / 2) * LANES + n % LANES) * 2 + k % 2] = real ? weight[n * inputs + k] : 0;
        }
}

void pack(const int8_t* weight, int64_t outputs, int64_t inputs, Code* panels) {
    const int64_t steps = steps_of<Code>(inputs);
    for (int64_t n = 0; n < (outputs + LANES - 1) / LANES * LANES; ++n)
        for (int64_t k = 0; k < 2 * steps; ++k) {
            const bool real = n < outputs && k < inputs;
            Code* two = panels + (n / LANES * steps + k / 4 * 2) * STEP;
            two[place_of(k / 2 % 2, n % LANES, k % 2)] = code_of(real ? weight[n * inputs + k] : 0);
        }
}

}  // namespace KIND
