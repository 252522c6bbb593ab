// The matmul by AMX: a tile of up to sixteen rows by 32 inputs, times one of 32 inputs by sixteen outputs, which is how
// panels are stored, is added to a tile of float32 sums.
//
// The sums of a row take its own inputs only, in the same order by the same instructions for every number of rows. All
// tiles of rows have the same height; the last one may have rows that nothing reads.

#include "linear.h"

#if TILES

#include <vector>

#include "tiles.h"

namespace KIND {

namespace {

constexpr int64_t DEPTH = 32;            // inputs of a tile
constexpr int64_t TILE = DEPTH * LANES;  // weights of a tile
constexpr int64_t AHEAD = 4 * TILE;      // prefetch distance, to the first cache
constexpr int64_t FAR = 16 * TILE;       // and to the second, where several tiles of rows take longer
constexpr int SUM_TILES = 4;             // tiles of sums

// Numbers from an address that tiles are quickly loaded from.
class Aligned {
   public:
    bf16* of(int64_t size) {
        if (int64_t(numbers.size()) < size + DEPTH) numbers.resize(size + DEPTH);
        return (bf16*)((uintptr_t(numbers.data()) + 63) / 64 * 64);
    }

   private:
    std::vector<bf16> numbers;
};

// A thread's rows of the present job, in tiles.
struct RowTiles {
    Aligned all, low;
    int64_t num_tiles, height, steps;  // tiles of rows, rows of each, and tiles of inputs
};
RowTiles& thread_tiles() {
    static thread_local RowTiles rows;
    return rows;
}

// Copies rows into tiles, one tile of inputs after the other, padded with 0.
void lay_out(const Matmul& p, int64_t inputs, RowTiles& rows) {
    rows.num_tiles = (p.rows + LANES - 1) / LANES;
    if (rows.num_tiles > SUM_TILES) rows.num_tiles += rows.num_tiles % 2;
    rows.height = (p.rows + rows.num_tiles - 1) / rows.num_tiles;
    rows.steps = padded(inputs) / DEPTH;
    const int64_t size = rows.height * DEPTH;
    bf16* to = rows.all.of(rows.num_tiles * rows.steps * size);
    for (int64_t row = 0; row < p.rows; ++row) {
        bf16* out = to + row / rows.height * rows.steps * size + row % rows.height * DEPTH;
        const bf16* from = p.x + row * p.x_stride;
        for (int64_t k = 0; k < inputs; k += DEPTH, out += size) {
            const int64_t count = std::min(DEPTH, inputs - k);
            if (count < DEPTH) std::memset(out, 0, DEPTH * sizeof(bf16));
            std::memcpy(out, from + k, count * sizeof(bf16));
        }
    }
    if (!p.num_gated) return;
    bf16* low = rows.low.of(rows.num_tiles * rows.height * p.low_stride);
    std::memcpy(low, p.low, p.rows * p.low_stride * sizeof(bf16));
}

template <int LOCALITY = 3>
inline void fetch(const bf16* weight) {
    for (int64_t i = 0; i < TILE; i += 32) __builtin_prefetch(weight + i, 0, LOCALITY);
}

// Adds the products of one tile of rows and four panels, `size` apart, to the sums 0 .. 3. The panels are
// prefetched a little ahead, and near their end the next four.
void add_four(const bf16* weight, int64_t size, const bf16* x, int64_t height, int64_t steps) {
    for (int64_t k = 0; k < steps; ++k, weight += TILE, x += height * DEPTH) {
        _tile_loadd(4, x, 2 * DEPTH);
        const bf16* next = weight + AHEAD + ((k + 1) * TILE + AHEAD > size ? 3 * size : 0);
        for (int j = 0; j < 4; ++j) fetch(next + j * size);
        _tile_loadd(6, weight, 2 * DEPTH);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight + size, 2 * DEPTH);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, weight + 2 * size, 2 * DEPTH);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, weight + 3 * size, 2 * DEPTH);
        _tile_dpbf16ps(3, 4, 7);
    }
}

// As add_four, for one or two tiles of rows and one or two panels: sums 0 and 1, and of the second tile 2 and 3.
// Prefetches from `next` unless it is null.
template <bool TWO_TILES, bool TWO_PANELS>
void add_two(const bf16* weight, int64_t size, const bf16* next, const bf16* x, int64_t height, int64_t steps) {
    const bf16* second = x + steps * height * DEPTH;
    for (int64_t k = 0; k < steps; ++k, weight += TILE) {
        _tile_loadd(6, weight, 2 * DEPTH);
        if constexpr (TWO_PANELS) _tile_loadd(7, weight + size, 2 * DEPTH);
        if (next) {
            fetch(next + k * TILE);
            if constexpr (TWO_PANELS) fetch(next + k * TILE + size);
        }
        _tile_loadd(4, x + k * height * DEPTH, 2 * DEPTH);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (TWO_PANELS) _tile_dpbf16ps(1, 4, 7);
        if constexpr (TWO_TILES) {
            _tile_loadd(5, second + k * height * DEPTH, 2 * DEPTH);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (TWO_PANELS) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Panels [panel, panel + count), by up to sixteen rows.
void multiply_one_tile(const Linear& w, const Matmul& p, RowTiles& rows, int64_t panel, int count, float* sums) {
    const int64_t size = rows.steps * TILE;
    const bf16* weight = (const bf16*)w.weight + panel * size;
    const bf16* x = rows.all.of(0);
    zero_sums();
    if (count == 4)
        add_four(weight, size, x, rows.height, rows.steps);
    else if (count == 2)
        add_two<false, true>(weight, size, weight + AHEAD, x, rows.height, rows.steps);
    else
        add_two<false, false>(weight, size, weight + AHEAD, x, rows.height, rows.steps);
    const int64_t width = count * LANES;
    _tile_stored(0, sums, 4 * width);
    if (count > 1) _tile_stored(1, sums + LANES, 4 * width);
    if (count > 2) {
        _tile_stored(2, sums + 2 * LANES, 4 * width);
        _tile_stored(3, sums + 3 * LANES, 4 * width);
    }
    finish(w, p, (Lanes*)sums, 0, p.rows, panel, count);
}

// Adds the products of NUM tiles of rows, `apart` from each other, and one panel to the sums 0 .. 3.
template <int NUM>
void add_column(const bf16* weight, const bf16* x, int64_t apart, int64_t height, int64_t steps) {
    for (int64_t k = 0; k < steps; ++k, weight += TILE, x += height * DEPTH) {
        _tile_loadd(6, weight, 2 * DEPTH);
        fetch<2>(weight + FAR);
        _tile_loadd(4, x, 2 * DEPTH);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + apart, 2 * DEPTH);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (NUM > 2) {
            _tile_loadd(4, x + 2 * apart, 2 * DEPTH);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (NUM > 3) {
            _tile_loadd(5, x + 3 * apart, 2 * DEPTH);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
}

// Panels [panel, panel + count), one or two, by two to four tiles of rows: the weights are read once, one after the
// other.
void multiply_four_tiles(const Linear& w, const Matmul& p, RowTiles& rows, int64_t panel, int count, float* sums) {
    const int64_t size = rows.steps * TILE, apart = rows.steps * rows.height * DEPTH, width = count * LANES;
    const bf16* x = rows.all.of(0);
    for (int j = 0; j < count; ++j) {
        const bf16* weight = (const bf16*)w.weight + (panel + j) * size;
        zero_sums();
        if (rows.num_tiles == 2)
            add_column<2>(weight, x, apart, rows.height, rows.steps);
        else if (rows.num_tiles == 3)
            add_column<3>(weight, x, apart, rows.height, rows.steps);
        else
            add_column<4>(weight, x, apart, rows.height, rows.steps);
        float* to = sums + j * LANES;
        const int64_t below = rows.height * width;
        _tile_stored(0, to, 4 * width);
        _tile_stored(1, to + below, 4 * width);
        if (rows.num_tiles > 2) _tile_stored(2, to + 2 * below, 4 * width);
        if (rows.num_tiles > 3) _tile_stored(3, to + 3 * below, 4 * width);
    }
    finish(w, p, (Lanes*)sums, 0, p.rows, panel, count);
}

// Panels [panel, panel + count), one or two, by more rows: two tiles at a time.
void multiply_in_pairs(const Linear& w, const Matmul& p, RowTiles& rows, int64_t panel, int count, float* sums) {
    const int64_t size = rows.steps * TILE, height = rows.height, width = count * LANES;
    const bf16* here = (const bf16*)w.weight + panel * size;
    for (int64_t tile = 0; tile < rows.num_tiles; tile += 2) {
        const bf16* x = rows.all.of(0) + tile * rows.steps * height * DEPTH;
        const bf16* next = tile == 0 ? here + AHEAD : tile == 2 ? here + 2 * size : nullptr;
        zero_sums();
        if (count == 2)
            add_two<true, true>(here, size, next, x, height, rows.steps);
        else
            add_two<true, false>(here, size, next, x, height, rows.steps);
        float* below = sums + height * width;
        _tile_stored(0, sums, 4 * width);
        _tile_stored(2, below, 4 * width);
        if (count == 2) {
            _tile_stored(1, sums + LANES, 4 * width);
            _tile_stored(3, below + LANES, 4 * width);
        }
        finish(w, p, (Lanes*)sums, tile * height, std::min(2 * height, p.rows - tile * height), panel, count);
    }
}

}  // namespace

void add_deltas_by_tiles(const Matmul& p, Lanes* sum, int64_t row, int64_t num_rows, int64_t panel, int count) {
    alignas(64) float part[SUM_TILES][LANES * LANES];
    RowTiles& rows = thread_tiles();
    for (int64_t begin = row; begin < row + num_rows; begin += rows.height) {
        const int64_t height = std::min(rows.height, row + num_rows - begin);
        const bf16* low = rows.low.of(0) + begin * p.low_stride;
        each_gated(p, begin, height, [&](const GatedRows& run, int64_t first, int64_t num_gated) {
            const DeltaPanel* b = run.delta->b + panel;
            zero_sums();
#define ADD_PANEL(J)                                                             \
    for (int64_t k = 0; J < count && k < b[J].inputs; k += DEPTH) {              \
        _tile_loadd(4, low + run.column + b[J].from + k, 2 * p.low_stride);                   \
        _tile_loadd(6, b[J].weight + k * LANES, 2 * DEPTH);                      \
        _tile_dpbf16ps(J, 4, 6);                                                 \
    }
            ADD_PANEL(0) ADD_PANEL(1) ADD_PANEL(2) ADD_PANEL(3)
#undef ADD_PANEL
            _tile_stored(0, part[0], 4 * LANES);
            _tile_stored(1, part[1], 4 * LANES);
            _tile_stored(2, part[2], 4 * LANES);
            _tile_stored(3, part[3], 4 * LANES);
            for (int64_t i = first - begin; i < first - begin + num_gated; ++i)
                for (int j = 0; j < count; ++j) {
                    Lanes& one = sum[(begin - row + i) * count + j];
                    if (b[j].inputs) one = add(one, load(part[j] + i * LANES));
                }
        });
    }
}

void multiply_by_tiles(const Linear& w, const Matmul& p, int64_t first, int64_t last, bool fresh) {
    if (!p.rows || first == last) return;
    RowTiles& rows = thread_tiles();
    if (fresh) lay_out(p, w.inputs, rows);
    const TileConfig tiles(rows.height);
    alignas(64) float sums[SUM_TILES * LANES * 2 * LANES];
    const bool few = rows.num_tiles == 1;
    for (int64_t panel = first; panel < last;) {
        const int64_t left = last - panel;
        const int count = few && left >= SUM_TILES ? SUM_TILES : left >= 2 ? 2 : 1;
        const auto multiply = few                         ? multiply_one_tile
                              : rows.num_tiles <= SUM_TILES ? multiply_four_tiles
                                                            : multiply_in_pairs;
        multiply(w, p, rows, panel, count, sums);
        panel += count;
    }
}

}  // namespace KIND

#endif
