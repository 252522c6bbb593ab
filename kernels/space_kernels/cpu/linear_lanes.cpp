// The matmul by vector instructions.

#include "linear.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace KIND {

namespace {

// There are 32 vector registers, 16 with AVX2.
constexpr int SUMS = VECTORS == 1 ? 24 : VECTORS == 2 ? 8 : 6;
constexpr int MOST = VECTORS == 1 ? 12 : SUMS;              // maximum rows of a tile
constexpr int USUAL = VECTORS == 1 && PARTS == 2 ? 12 : 6;  // and if there are several tiles
constexpr int GROUP = 4;                                    // panels that all tiles visit before the next ones

// Panels that are summed at once.
constexpr int panels_of(int64_t rows) { return 4 * rows <= SUMS ? 4 : 2 * rows <= SUMS ? 2 : 1; }

// Prefetches during the sums: the given number of cache lines per panel, with this stride. From null: the panels
// themselves, a little ahead, and near their end the next ones.
struct Next {
    const char* from;
    int64_t lines, apart;
};

// Writes the sums of a tile to `to`, in rows of `count` panels.
//
// The rows of a tile are interleaved by pairs: pair 0 of each row, pair 1 of each row, … So they form one stream, and
// rows with a power-of-two stride do not evict each other from the cache.
template <int ROWS, int PANELS>
inline void sum_up(const bf16* panels, int64_t steps, const Laid* x, Next next, Lanes* to, int count) {
    constexpr int64_t AHEAD = VECTORS == 1 ? 4096 : 8192 / PANELS;  // prefetch distance in bytes, to the second cache
    constexpr int64_t EARLY = AHEAD / int64_t(STEP * sizeof(bf16));
    const bf16* weight[PANELS];
    for (int j = 0; j < PANELS; ++j) weight[j] = panels + j * steps * STEP;
    Lanes sum[ROWS][PANELS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < PANELS; ++j) sum[i][j] = zeros();
    auto multiply = [&](auto part, int64_t k) __attribute__((always_inline)) {
        constexpr int PART = decltype(part)::value;
        Column columns[PANELS];
#pragma GCC unroll 4
        for (int j = 0; j < PANELS; ++j) columns[j] = column<PART>(weight[j] + k * STEP);
#pragma GCC unroll 24
        for (int i = 0; i < ROWS; ++i) {
            const auto one = number<PART>(x + (k * ROWS + i) * 2);
#pragma GCC unroll 4
            for (int j = 0; j < PANELS; ++j) sum[i][j] = multiplied(sum[i][j], columns[j], one);
        }
    };
    auto go = [&](int64_t from, int64_t behind, int64_t ahead) __attribute__((always_inline)) {
        for (int64_t k = from; k < behind; ++k) {
            if (!next.from) {
#pragma GCC unroll 4
                for (int j = 0; j < PANELS; ++j) __builtin_prefetch(weight[j] + (k + ahead) * STEP, 0, 1);
            } else if (k < PANELS * next.lines) {
                __builtin_prefetch(next.from + k % PANELS * next.apart + k / PANELS * 64, 0, 2);
            }
            multiply(std::integral_constant<int, 0>(), k);
            if constexpr (PARTS == 2) multiply(std::integral_constant<int, 1>(), k);
        }
    };
    const int64_t turn = std::max<int64_t>(0, steps - EARLY);
    go(0, turn, EARLY);
    go(turn, steps, (PANELS - 1) * steps + EARLY);
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < PANELS; ++j) to[i * count + j] = sum[i][j];
}

template <int PANELS, int ROWS = std::min(MOST, SUMS / PANELS)>
void sum_up_of(int64_t rows, const bf16* panels, int64_t steps, const Laid* x, Next next, Lanes* to, int count) {
    if (rows == ROWS) return sum_up<ROWS, PANELS>(panels, steps, x, next, to, count);
    if constexpr (ROWS > 1) sum_up_of<PANELS, ROWS - 1>(rows, panels, steps, x, next, to, count);
}

void sum_up_of(int64_t rows, const bf16* panels, int64_t steps, const Laid* x, Next next, Lanes* to, int count) {
    const int width = std::min(count, panels_of(rows));
    for (int j = 0; j < count; j += width) {
        const bf16* here = panels + j * steps * STEP;
        if (width == 4)
            sum_up_of<4>(rows, here, steps, x, next, to + j, count);
        else if (width == 2)
            sum_up_of<2>(rows, here, steps, x, next, to + j, count);
        else
            sum_up_of<1>(rows, here, steps, x, next, to + j, count);
        if (next.from) next.from += width * next.apart;
    }
}

thread_local std::vector<Laid> laid_low;  // of the gated rows of each tile

// Interleaves rows by pairs, padded with zeros up to `steps` pairs.
void lay_out(const bf16* x, int64_t stride, int64_t rows, int64_t inputs, int64_t steps, Laid* to) {
    for (int64_t i = 0; i < rows; ++i) {
        const bf16* from = x + i * stride;
        Laid* out = to + 2 * i;
        for (int64_t k = 0; k < inputs / 2; ++k) lay_pair(from + 2 * k, out + 2 * rows * k);
        for (int64_t k = inputs / 2; k < steps; ++k) out[2 * rows * k] = out[2 * rows * k + 1] = 0;
    }
}

}  // namespace

void add_deltas_by_lanes(const Matmul& p, Lanes* sum, int64_t row, int64_t rows, int64_t panel, int count) {
    Lanes delta[MOST];
    each_gated(p, row, rows, [&](const GatedRows& run, int64_t first, int64_t num_gated) {
        for (int j = 0; j < count; ++j) {
            const DeltaPanel& b = run.delta->b[panel + j];
            if (!b.inputs) continue;
            const Laid* low = laid_low.data() + run.column * p.rows + first * run.width + b.from * num_gated;
            sum_up_of<1>(num_gated, b.weight, b.inputs / 2, low, {nullptr, 0, 0}, delta, 1);
            for (int64_t i = 0; i < num_gated; ++i) {
                Lanes& one = sum[(first - row + i) * count + j];
                one = add(one, delta[i]);
            }
        }
    });
}

void lay_out_low(const Matmul& p, const int64_t* bounds, int64_t num_tiles) {
    if (!p.num_gated) return;
    if (int64_t(laid_low.size()) < p.rows * p.low_stride) laid_low.resize(p.rows * p.low_stride);
    for (int64_t n = 0; n < num_tiles; ++n)
        each_gated(p, bounds[n], bounds[n + 1] - bounds[n], [&](const GatedRows& run, int64_t first, int64_t num_gated) {
            const int64_t ranks = run.delta->a.outputs;
            Laid* to = laid_low.data() + run.column * p.rows + first * run.width;
            lay_out(p.low + first * p.low_stride + run.column, p.low_stride, num_gated, ranks, ranks / 2, to);
        });
}

// Four panels stay in the cache while all row tiles use them; the next four are prefetched meanwhile.
//
//            panels 0..3          panels 4..7
//  rows 0..5 | tile | fetch 4      | tile | fetch 8
//  rows 6..9 | tile | to 7         | tile | to 11
//
// Few rows form one tile, and nothing is read twice.
void multiply_by_lanes(const Linear& w, const Matmul& p, int64_t first, int64_t last, bool fresh) {
    static thread_local std::vector<Laid> laid_out;
    static thread_local std::vector<int64_t> bounds;
    Lanes sums[MOST * GROUP];
    if (!p.rows || first == last) return;
    const bool one_tile = p.rows <= MOST;
    const int64_t num_tiles = one_tile ? 1 : (p.rows + USUAL - 1) / USUAL;
    const int together = one_tile ? std::max(2, panels_of(p.rows)) : GROUP;
    const int64_t steps = padded(w.inputs) / 2, width = 2 * steps;
    if (fresh) {
        if (int64_t(laid_out.size()) < p.rows * width) laid_out.resize(p.rows * width);
        bounds.assign(num_tiles + 1, 0);
    }
    for (int64_t n = 0; fresh && n < num_tiles; ++n) {  // evenly, so that no tile has a single row
        const int64_t row = bounds[n], rows = (p.rows - row + num_tiles - n - 1) / (num_tiles - n);
        bounds[n + 1] = row + rows;
        lay_out(p.x + row * p.x_stride, p.x_stride, rows, w.inputs, steps, laid_out.data() + row * width);
    }
    if (fresh) lay_out_low(p, bounds.data(), num_tiles);
    const int64_t size = steps * STEP;  // of a panel
    for (int64_t panel = first; panel < last;) {
        const int64_t left = last - panel;
        const int count = left >= together ? together : left >= 2 ? 2 : 1;
        const bf16* here = (const bf16*)w.weight + panel * size;
        if (one_tile) {
            sum_up_of(p.rows, here, steps, laid_out.data(), {nullptr, 0, 0}, sums, count);
            finish(w, p, sums, 0, p.rows, panel, count);
            panel += count;
            continue;
        }
        const bool is_last = panel + count >= w.panels;  // of all panels; otherwise the next piece usually follows
        const int64_t apart = size * int64_t(sizeof(bf16)), lines = is_last ? 0 : apart / 64;
        const char* next = (const char*)(here + count * size);
        for (int64_t n = 0; n < num_tiles; ++n) {
            const int64_t row = bounds[n], rows = bounds[n + 1] - row;
            const int64_t from = lines * n / num_tiles, to = lines * (n + 1) / num_tiles;
            const Laid* x = laid_out.data() + row * width;
            sum_up_of(rows, here, steps, x, {next + 64 * from, to - from, apart}, sums, count);
            finish(w, p, sums, row, rows, panel, count);
        }
        panel += count;
    }
}

}  // namespace KIND
