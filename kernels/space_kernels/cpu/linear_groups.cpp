// The matmul by weights in groups: 32 inputs of an output share a scale, as in a GGUF's Q4_0, Q4_1 and Q8_0.
//
//     W[n, k] = scale[n, g]·(number[n, k] - offset) + min[n, g]        g = k / 32, number 0 .. 15 or 0 .. 255
//     W[n, k] = scale[n]·(number[n, k] - offset)                       INT8
//     W[n, k] = scale[n, h]·(number[n, k] - zero[n, h])                U4, as in AWQ and GPTQ
//     W[n, k] = scale[n, g]·(E2M1[number[n, k]] - 12)                  MXFP4: doubled floats of four bits
//     x[r, k] ≈ scale[r, g]·code[r, k]                                 code -127 .. 127, the nearest
//
// A panel has one block after the other:
//
//     scale of outputs 0 .. 15 | min of outputs 0 .. 15 | numbers of 32 inputs by 16 outputs       (float16, bytes)
//
// In the K forms eight groups share a scale and a min, which each multiplies by whole numbers of its own, its steps
// (Q6_K: by two, one for 16 inputs each). Eight blocks follow their scales and mins:
//
//     scale, min | steps of scale and min, numbers of 32 inputs | … of the next 32 inputs | …     (float16 | bytes)
//
// In the U4 forms one, two or four blocks follow the scales and zero points (bytes) that they share. A linear may have
// its inputs in the order of their groups (GPTQ's act-order): each row is put in it as it is rounded.
//
// Products of numbers and codes are summed exactly in integers, and groups in ascending order in float32. So a row's
// bits depend neither on the other rows, their number, or the thread, nor on the kind of processor.

#include "linear.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <type_traits>
#include <vector>

#include "bytes.h"
#include "team.h"
#include "tiles.h"

namespace KIND {

namespace {

constexpr int64_t SIZE = 32;        // inputs of a group
constexpr float FLOOR = 0x1p-100f;  // groups of smaller rows are 0
constexpr int SUMS = VECTORS == 1 ? 12 : VECTORS == 2 ? 4 : 3;
constexpr int TOGETHER = 4;  // panels that all tiles visit before the next ones
constexpr int64_t LEAST_NUMBERS = 8192;  // inputs that a thread rounds at least
// Prefetch distance in bytes, and into which cache. Few reads into the first one can be under way at a time: on Zen 4
// weights then come at 14 GB/s a thread, into the second one at 25.
constexpr int64_t AHEAD = TILES ? 2560 : 5120;
constexpr int LOCALITY = TILES ? 3 : 1;

constexpr int panels_of(int64_t rows) { return 4 * rows <= SUMS ? 4 : 2 * rows <= SUMS ? 2 : 1; }

template <Groups GROUPS>
struct Form {
    static constexpr Groups GROUPS_OF = GROUPS;
    static constexpr bool HAS_ZERO = GROUPS == Groups::U4_32;  // and of U4_64, U4_128
    static constexpr bool IS_E2M1 = GROUPS == Groups::MXFP4;
    static constexpr int BITS =
        GROUPS == Groups::Q4_0 || GROUPS == Groups::Q4_1 || GROUPS == Groups::Q4_K || HAS_ZERO || IS_E2M1 ? 4 : 8;
    static constexpr int MOST = IS_E2M1                  ? 24  // of the numbers
                                : BITS == 4              ? 15
                                : GROUPS == Groups::Q5_K ? 31
                                : GROUPS == Groups::Q6_K ? 63
                                                         : 255;
    static constexpr bool HAS_MIN = GROUPS == Groups::Q4_1 || GROUPS == Groups::Q4_K || GROUPS == Groups::Q5_K;
    static constexpr bool HAS_SCALE = GROUPS != Groups::INT8;
    static constexpr int OFFSET = GROUPS == Groups::Q8_0 || !HAS_SCALE ? 128
                                  : GROUPS == Groups::Q4_0 ? 8
                                  : IS_E2M1 ? 12
                                  : GROUPS == Groups::Q6_K ? 32
                                                           : 0;
    static constexpr bool IS_K = GROUPS == Groups::Q4_K || GROUPS == Groups::Q5_K || GROUPS == Groups::Q6_K;
    static constexpr int STEPS = IS_K ? GROUPS == Groups::Q6_K ? 2 : 1 : 0;  // of a group's scale
    static constexpr bool IS_SHARED = IS_K || HAS_ZERO;  // scales precede the blocks that share them
    static constexpr int64_t ZEROS = (HAS_SCALE + HAS_MIN) * LANES * 2;   // bytes of scales and mins
    static constexpr int64_t HALVES = ZEROS + HAS_ZERO * LANES;           // and of zero points
    static constexpr int64_t HEAD = IS_K ? (STEPS + HAS_MIN) * LANES : IS_SHARED ? 0 : HALVES;
    static constexpr int64_t BLOCK = HEAD + SIZE * LANES * BITS / 8;  // bytes of a block
    static constexpr int VECTORS_OF_BLOCK = (BLOCK - HEAD) / VECTOR;
    static constexpr int REST = OFFSET - Dots<MOST>::SUBTRACTED;  // of OFFSET: times the codes' sum

    // The numbers of a vector's low halves, or of its high ones.
    static Bytes low(Bytes packed) { return IS_E2M1 ? from_e2m1(low_halves(packed)) : low_halves(packed); }
    static Bytes high(Bytes packed) { return IS_E2M1 ? from_e2m1(high_halves(packed)) : high_halves(packed); }
    static Lanes scale(const uint16_t* from) { return IS_E2M1 ? load((const bf16*)from) : load_halves(from); }

    // Bytes before the block of a group, or of a panel. sharing: groups with one scale.
    static constexpr int64_t place(int64_t group, int64_t sharing) {
        return group * BLOCK + (IS_SHARED ? (group + sharing - 1) / sharing * HALVES : 0);
    }
};

// Groups with one scale.
constexpr int64_t sharing_of(Groups groups) {
    switch (groups) {
        case Groups::Q4_K: case Groups::Q5_K: case Groups::Q6_K: return 8;
        case Groups::U4_64: return 2;
        case Groups::U4_128: return 4;
        default: return 1;
    }
}

// Some rows, rounded group by group. One group of all rows, then the next.
struct Rounded {
    int8_t* codes;    // [groups, rows, 32]
    float* scale;     // [groups, rows]
    float* total;     // [groups, rows]: scale · sum of the codes
    int32_t* sum;     // [groups, rows, 2]: of the first 16 codes, and of all
};

// All rows of a matmul, rounded once for every thread: tile after tile, evenly, so that no tile has a single row.
struct RoundedRows {
    std::vector<int8_t> codes;  // and behind them as many as a tile register may hold of rows that nothing reads
    std::vector<float> scale, total;
    std::vector<int32_t> sum;
    std::vector<int64_t> bounds;
    int64_t groups = 0;

    void resize(int64_t rows, int64_t inputs) {
        groups = (inputs + SIZE - 1) / SIZE;
        if (const size_t count = rows * groups; scale.size() < count)
            codes.resize((count + LANES) * SIZE + VECTOR), scale.resize(count), total.resize(count), sum.resize(2 * count);
        const int64_t num_tiles = (rows + SUMS - 1) / SUMS;
        bounds.assign(num_tiles + 1, 0);
        for (int64_t n = 0; n < num_tiles; ++n)
            bounds[n + 1] = bounds[n] + (rows - bounds[n] + num_tiles - n - 1) / (num_tiles - n);
    }
    int64_t num_tiles() const { return int64_t(bounds.size()) - 1; }
    Rounded from(int64_t row) {
        const int64_t at = row * groups;
        int8_t* aligned = (int8_t*)((uintptr_t(codes.data()) + VECTOR - 1) / VECTOR * VECTOR);
        return {aligned + at * SIZE, scale.data() + at, total.data() + at, sum.data() + 2 * at};
    }
};

// Rounds one group of a row to codes, and sums them. If a number is not finite, the scale is NaN.
void round_group(const bf16* x, int8_t* codes, float* scale, int32_t* sum) {
    const float most = widen(most_of(x));
    if (!(most > FLOOR && most <= FLT_MAX)) {
        std::memset(codes, 0, SIZE);
        sum[0] = sum[1] = 0;
        *scale = most > FLOOR || most != most ? NAN : 0.0f;
        return;
    }
    *scale = most * (1.0f / 127.0f);
    round_all(x, 127.0f / most, codes, sum);
}

void round_row(const Linear& w, const Matmul& p, int64_t row, RoundedRows& rows) {
    const int64_t tile = std::upper_bound(rows.bounds.begin(), rows.bounds.end(), row) - rows.bounds.begin() - 1;
    const int64_t first = rows.bounds[tile], height = rows.bounds[tile + 1] - first;
    const Rounded to = rows.from(first);
    const bf16* x = p.x + row * p.x_stride;
    for (int64_t g = 0, at = row - first; g < rows.groups; ++g, at += height) {
        bf16 own[SIZE] = {};
        const int64_t count = std::min(SIZE, w.inputs - g * SIZE);
        if (w.order)
            for (int64_t k = 0; k < count; ++k) own[k] = x[w.order[g * SIZE + k]];
        else if (count < SIZE)
            std::memcpy(own, x + g * SIZE, count * sizeof(bf16));
        round_group(w.order || count < SIZE ? own : x + g * SIZE, to.codes + at * SIZE, to.scale + at, to.sum + 2 * at);
        to.total[at] = to.scale[at] * float(to.sum[2 * at + 1]);
    }
}

// Adds a group's product to the sum.
template <Groups GROUPS>
inline Lanes joined(Lanes sum, Ints product, Lanes scale, Lanes min, const Rounded& x, int64_t at) {
    const Lanes of_row = same(x.scale[at]);
    sum = fma(to_lanes(product), Form<GROUPS>::HAS_SCALE ? mul(scale, of_row) : of_row, sum);
    return Form<GROUPS>::HAS_MIN ? fma(min, same(x.total[at]), sum) : sum;
}

// Moves the products of a group's first 16 inputs, times their steps, to `first`, and begins those of the others.
template <int MOST, int ROWS, int PANELS>
inline void next_half(Dots<MOST> (&product)[ROWS][PANELS], Ints (&first)[ROWS][PANELS], const uint8_t* block, int64_t size,
                      int offset, const int32_t* sum) {
#pragma GCC unroll 4
    for (int j = 0; j < PANELS; ++j) {
        const Ints times = load_steps(block + j * size);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i) {
            first[i][j] = mul(product[i][j].sum, times);
            product[i][j].sum = same_int(-offset * (sum[2 * i + 1] - sum[2 * i]));
        }
    }
}

// Writes the sums of a tile of rows to `to`, in rows of `count` panels.
template <Groups GROUPS, int ROWS, int PANELS>
void sum_up(const uint8_t* panels, int64_t groups, int64_t sharing, Rounded x, Lanes* to, int count) {
    using F = Form<GROUPS>;
    if (F::IS_K) sharing = sharing_of(GROUPS);
    const int64_t size = F::place(groups, sharing);
    Lanes sum[ROWS][PANELS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < PANELS; ++j) sum[i][j] = zeros();
    const uint8_t *block = panels, *shared = panels;
    const int8_t* codes = x.codes;
    for (int64_t g = 0; g < groups; ++g, block += F::BLOCK, codes += ROWS * SIZE) {
        if (F::IS_SHARED && (g & (sharing - 1)) == 0) shared = block, block += F::HALVES;
        const uint8_t* next = block + AHEAD + (block + F::BLOCK + AHEAD > panels + size ? (PANELS - 1) * size : 0);
#pragma GCC unroll 4
        for (int j = 0; j < PANELS; ++j)
#pragma GCC unroll 9
            for (int64_t i = 0; i < F::BLOCK; i += VECTOR) __builtin_prefetch(next + j * size + i, 0, LOCALITY);
        Dots<F::MOST> product[ROWS][PANELS];
        Ints first[F::STEPS == 2 ? ROWS : 1][PANELS];
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < PANELS; ++j)
                product[i][j].sum = same_int((F::HAS_ZERO ? -1 : -F::REST) * x.sum[(g * ROWS + i) * 2 + (F::STEPS != 2)]);
        if constexpr (F::HAS_ZERO)
#pragma GCC unroll 4
            for (int j = 0; j < PANELS; ++j) {
                const Ints zero = load_steps(shared + j * size + F::ZEROS);
#pragma GCC unroll 12
                for (int i = 0; i < ROWS; ++i) product[i][j].sum = mul(product[i][j].sum, zero);
            }
#pragma GCC unroll 8
        for (int v = 0; v < F::VECTORS_OF_BLOCK; ++v) {
            if constexpr (F::STEPS == 2)
                if (v == F::VECTORS_OF_BLOCK / 2)
                    next_half(product, first, block, size, F::REST, x.sum + g * ROWS * 2);
#pragma GCC unroll 4
            for (int j = 0; j < PANELS; ++j) {
                const Bytes numbers = load_bytes(block + j * size + F::HEAD + v * VECTOR);
                if constexpr (F::BITS == 4) {
                    const Bytes low = F::low(numbers), high = F::high(numbers);
#pragma GCC unroll 12
                    for (int i = 0; i < ROWS; ++i)
                        product[i][j].add_products(2 * v, low, codes + i * SIZE + 4 * v);
#pragma GCC unroll 12
                    for (int i = 0; i < ROWS; ++i)
                        product[i][j].add_products(2 * v + 1, high, codes + i * SIZE + SIZE / 2 + 4 * v);
                } else {
#pragma GCC unroll 12
                    for (int i = 0; i < ROWS; ++i)
                        product[i][j].add_products(v, numbers, codes + i * SIZE + 4 * v);
                }
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < PANELS; ++j) {
            const uint8_t* steps = block + j * size;
            const uint16_t* halves = (const uint16_t*)((F::IS_SHARED ? shared : block) + j * size);
            Lanes scale = F::HAS_SCALE ? F::scale(halves) : zeros(), min = F::HAS_MIN ? load_halves(halves + LANES) : zeros();
            if (F::STEPS == 1) scale = mul(scale, to_lanes(load_steps(steps)));
            if (F::IS_K && F::HAS_MIN) min = mul(min, to_lanes(load_steps(steps + LANES)));
            if constexpr (F::STEPS == 2) {
                const Ints times = load_steps(steps + LANES);
#pragma GCC unroll 12
                for (int i = 0; i < ROWS; ++i) product[i][j].sum = add(first[i][j], mul(product[i][j].sum, times));
            }
#pragma GCC unroll 12
            for (int i = 0; i < ROWS; ++i)
                sum[i][j] = joined<GROUPS>(sum[i][j], product[i][j].sum, scale, min, x, g * ROWS + i);
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < PANELS; ++j) to[i * count + j] = sum[i][j];
}

template <Groups GROUPS, int PANELS, int ROWS = std::max(1, SUMS / PANELS)>
void sum_up_of(int64_t rows, const uint8_t* panels, int64_t groups, int64_t sharing, const Rounded& x, Lanes* to,
               int count) {
    if (rows == ROWS) return sum_up<GROUPS, ROWS, PANELS>(panels, groups, sharing, x, to, count);
    if constexpr (ROWS > 1) sum_up_of<GROUPS, PANELS, ROWS - 1>(rows, panels, groups, sharing, x, to, count);
}

template <Groups GROUPS>
void sum_up_of(int64_t rows, const uint8_t* panels, int64_t groups, int64_t sharing, const Rounded& x, Lanes* to,
               int count) {
    const int width = std::min(count, panels_of(rows));
    for (int j = 0; j < count; j += width) {
        const uint8_t* here = panels + j * Form<GROUPS>::place(groups, sharing);
        if (width == 4)
            sum_up_of<GROUPS, 4>(rows, here, groups, sharing, x, to + j, count);
        else if (width == 2)
            sum_up_of<GROUPS, 2>(rows, here, groups, sharing, x, to + j, count);
        else
            sum_up_of<GROUPS, 1>(rows, here, groups, sharing, x, to + j, count);
    }
}

#if TILES

constexpr int64_t LEAST_ROWS = 40;  // fewer are multiplied faster by vectors

// The least rows of a tile of so many or more, which are shared out evenly.
constexpr int least_height() {
    int64_t least = SUMS;
    for (int64_t rows = LEAST_ROWS; rows < LEAST_ROWS + 2 * SUMS; ++rows)
        least = std::min(least, rows / ((rows + SUMS - 1) / SUMS));
    return int(least);
}

constexpr int TURNS = 4;  // groups whose products are computed while those of as many others are added up

// Goes through the blocks of a panel.
template <Groups GROUPS>
struct Walk {
    using F = Form<GROUPS>;
    const uint8_t* block;
    int64_t sharing;
    const uint8_t* shared = nullptr;
    int64_t group = 0;

    void enter() {
        if (F::IS_SHARED && (group & (sharing - 1)) == 0) shared = block, block += F::HALVES;
    }
    void leave() { block += F::BLOCK, ++group; }
    const uint8_t* numbers() const { return block + F::HEAD; }
    void prefetch() const {
#pragma GCC unroll 9
        for (int64_t i = 0; i < F::BLOCK; i += VECTOR) __builtin_prefetch(block + AHEAD + i, 0, LOCALITY);
    }
};

// Writes a group's four-bit numbers in bytes: [32/4, 16 outputs, 4].
template <Groups GROUPS>
inline void unpack(const uint8_t* numbers, uint8_t* to) {
    using F = Form<GROUPS>;
#pragma GCC unroll 8
    for (int v = 0; v < F::VECTORS_OF_BLOCK; ++v) {
        const Bytes packed = load_bytes(numbers + v * VECTOR);
        store_bytes(to + v * VECTOR, F::low(packed));
        store_bytes(to + (F::VECTORS_OF_BLOCK + v) * VECTOR, F::high(packed));
    }
}

// Multiplies up to TURNS groups, each a tile of rows by one of numbers: codes are `size` apart.
inline void multiply_groups(int64_t num, const int8_t* codes, int64_t size, const uint8_t* const (&numbers)[TURNS]) {
#define MULTIPLY(TURN, CODES, NUMBERS)                \
    _tile_loadd(CODES, codes + TURN * size, SIZE);    \
    _tile_loadd(NUMBERS, numbers[TURN], VECTOR);      \
    _tile_zero(TURN);                                 \
    _tile_dpbsud(TURN, CODES, NUMBERS);
    MULTIPLY(0, 4, 6)
    if (num > 1) { MULTIPLY(1, 5, 7) }
    if (num > 2) { MULTIPLY(2, 4, 6) }
    if (num > 3) { MULTIPLY(3, 5, 7) }
#undef MULTIPLY
}

inline void store_products(int64_t num, int32_t (&to)[TURNS][LANES][LANES]) {
    TileConfig::written();
    _tile_stored(0, to[0], VECTOR);
    if (num > 1) _tile_stored(1, to[1], VECTOR);
    if (num > 2) _tile_stored(2, to[2], VECTOR);
    if (num > 3) _tile_stored(3, to[3], VECTOR);
    TileConfig::written();
}

// As `sum_up` for one panel, by tiles. Four-bit numbers are in `unpacked`, [groups, 32/4, 16, 4] bytes; fresh: they are
// written first.
template <Groups GROUPS, int ROWS>
void sum_up_tile(const uint8_t* panel, uint8_t* unpacked, bool fresh, int64_t groups, int64_t sharing, Rounded x,
                 Lanes* to, int count) {
    using F = Form<GROUPS>;
    if (F::IS_K) sharing = sharing_of(GROUPS);
    alignas(64) int32_t products[2][TURNS][LANES][LANES];
    Lanes sum[ROWS];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) sum[i] = zeros();
    Walk<GROUPS> ahead{panel, sharing}, added{panel, sharing};
    const uint8_t* numbers[TURNS];
    const auto prepare = [&](int64_t num) __attribute__((always_inline)) {
        for (int64_t n = 0; n < num; ++n) {
            if (F::BITS == 4) numbers[n] = unpacked + ahead.group * SIZE * LANES;
            if (F::BITS == 8 || fresh) {
                ahead.enter();
                ahead.prefetch();
                if (F::BITS == 8)
                    numbers[n] = ahead.numbers();
                else
                    unpack<GROUPS>(ahead.numbers(), unpacked + ahead.group * SIZE * LANES);
            }
            ahead.leave();
        }
    };
    const auto add_up = [&](int64_t num, const int32_t (&from)[TURNS][LANES][LANES]) __attribute__((always_inline)) {
        for (int64_t n = 0; n < num; ++n) {
            added.enter();
            const uint16_t* halves = (const uint16_t*)(F::IS_SHARED ? added.shared : added.block);
            Lanes scale = F::HAS_SCALE ? F::scale(halves) : zeros(), min = F::HAS_MIN ? load_halves(halves + LANES) : zeros();
            if (F::STEPS == 1) scale = mul(scale, to_lanes(load_steps(added.block)));
            if (F::IS_K && F::HAS_MIN) min = mul(min, to_lanes(load_steps(added.block + LANES)));
            const Ints zero = F::HAS_ZERO ? load_steps(added.shared + F::ZEROS) : same_int(0);
#pragma GCC unroll 12
            for (int i = 0; i < ROWS; ++i) {
                const int64_t at = added.group * ROWS + i;
                Ints one = load_ints(from[n][i]);
                if (F::OFFSET) one = add(one, same_int(-F::OFFSET * x.sum[2 * at + 1]));
                if (F::HAS_ZERO) one = add(one, mul(zero, same_int(-x.sum[2 * at + 1])));
                sum[i] = joined<GROUPS>(sum[i], one, scale, min, x, at);
            }
            added.leave();
        }
    };
    const auto turn = [&](int64_t first) { return std::min<int64_t>(TURNS, groups - first); };
    prepare(turn(0));
    for (int64_t g = 0; g < groups + TURNS; g += TURNS) {
        TileConfig::written();
        if (g < groups) multiply_groups(turn(g), x.codes + g * ROWS * SIZE, ROWS * SIZE, numbers);
        if (g + TURNS < groups) prepare(turn(g + TURNS));
        if (g) add_up(turn(g - TURNS), products[(g / TURNS + 1) % 2]);
        if (g < groups) store_products(turn(g), products[g / TURNS % 2]);
    }
    for (int i = 0; i < ROWS; ++i) to[i * count] = sum[i];
}

template <Groups GROUPS, int ROWS = SUMS>
void sum_up_tile_of(int64_t rows, const uint8_t* panel, uint8_t* unpacked, bool fresh, int64_t groups, int64_t sharing,
                    const Rounded& x, Lanes* to, int count) {
    if (rows == ROWS) return sum_up_tile<GROUPS, ROWS>(panel, unpacked, fresh, groups, sharing, x, to, count);
    if constexpr (ROWS > least_height())
        sum_up_tile_of<GROUPS, ROWS - 1>(rows, panel, unpacked, fresh, groups, sharing, x, to, count);
}

// As `multiply_by`: one or two panels at a time, whose numbers are unpacked once for all rows.
template <Groups GROUPS>
void multiply_by_int_tiles(const Linear& w, const Matmul& p, RoundedRows& rows, int64_t row, int64_t behind,
                           int64_t first, int64_t last) {
    static thread_local std::vector<uint8_t> unpacked;
    const int64_t sharing = sharing_of(w.groups), size = Form<GROUPS>::place(rows.groups, sharing);
    const int64_t room = rows.groups * SIZE * LANES;
    if (int64_t(unpacked.size()) < 2 * room + VECTOR) unpacked.resize(2 * room + VECTOR);
    uint8_t* aligned = (uint8_t*)((uintptr_t(unpacked.data()) + VECTOR - 1) / VECTOR * VECTOR);
    Lanes sums[2 * SUMS];
    const TileConfig tiles(rows.bounds[1], SIZE);
    for (int64_t panel = first; panel < last;) {
        const int count = last - panel >= 2 ? 2 : 1;
        bool fresh = true;
        for (int64_t n = 0; n < rows.num_tiles(); ++n) {
            const int64_t top = rows.bounds[n], height = rows.bounds[n + 1] - top;
            const int64_t from = std::max(row, top), to = std::min(behind, top + height);
            if (from >= to) continue;
            for (int j = 0; j < count; ++j) {
                const uint8_t* here = (const uint8_t*)w.weight + (panel + j) * size;
                sum_up_tile_of<GROUPS>(height, here, aligned + j * room, fresh, rows.groups, sharing, rows.from(top),
                                       sums + j, count);
            }
            fresh = false;
            finish(w, p, sums + (from - top) * count, from, to - from, panel, count);
        }
        panel += count;
    }
}

#endif

// Panels [first, last) by rows [row, behind). As `multiply_by` of the lanes: few rows form one tile; with several, four
// panels stay in the cache while all tiles use them.
template <Groups GROUPS>
void multiply_by(const Linear& w, const Matmul& p, RoundedRows& rows, int64_t row, int64_t behind, int64_t first,
                 int64_t last) {
#if TILES
    if constexpr (Form<GROUPS>::STEPS != 2)
        if (p.rows >= LEAST_ROWS) return multiply_by_int_tiles<GROUPS>(w, p, rows, row, behind, first, last);
#endif
    const int64_t sharing = sharing_of(w.groups), size = Form<GROUPS>::place(rows.groups, sharing);
    const int64_t num_tiles = rows.num_tiles();
    const int most = num_tiles > 1 ? TOGETHER : std::max(2, panels_of(rows.bounds[1]));
    Lanes sums[SUMS * TOGETHER];
    for (int64_t panel = first; panel < last;) {
        const int64_t left = last - panel;
        const int count = left >= most ? most : left >= 2 ? 2 : 1;
        for (int64_t n = 0; n < num_tiles; ++n) {
            const int64_t top = rows.bounds[n], height = rows.bounds[n + 1] - top;
            const int64_t from = std::max(row, top), to = std::min(behind, top + height);
            if (from >= to) continue;
            sum_up_of<GROUPS>(height, (const uint8_t*)w.weight + panel * size, rows.groups, sharing, rows.from(top), sums,
                              count);
            finish(w, p, sums + (from - top) * count, from, to - from, panel, count);
        }
        panel += count;
    }
}

// Quantises one group of weights to the nearest numbers.
template <Groups GROUPS>
void quantize_group(const float* w, uint8_t* numbers, uint16_t* scale, uint16_t* min) {
    using F = Form<GROUPS>;
    float least = w[0], most = w[0];
    for (int64_t k = 1; k < SIZE; ++k) least = std::min(least, w[k]), most = std::max(most, w[k]);
    float from = 0.0f, step;
    if (GROUPS == Groups::Q4_1) {
        *min = to_half(least), from = from_half(*min);
        step = (most - from) / 15.0f;
    } else if (GROUPS == Groups::Q4_0) {
        step = (-least > most ? least : most) / -8.0f;
    } else {
        step = std::max(-least, most) / 127.0f;
    }
    *scale = to_half(step);
    const float wide = from_half(*scale), divisor = wide == 0.0f ? 1.0f : wide;
    constexpr float END = F::BITS == 4 ? 15.0f : 255.0f;
    for (int64_t k = 0; k < SIZE; ++k) {
        const float number = std::nearbyint((w[k] - from) / divisor) + float(F::OFFSET);
        numbers[k] = uint8_t(number > 0.0f ? std::min(number, END) : 0.0f);
    }
}

template <Groups GROUPS>
void quantize_by(const bf16* weight, int64_t inputs, const Quantized& to, int64_t first, int64_t last) {
    const int64_t groups = (inputs + SIZE - 1) / SIZE;
    for (int64_t n = first; n < last; ++n)
        for (int64_t g = 0; g < groups; ++g) {
            float wide[SIZE] = {};
            for (int64_t k = 0; k < std::min(SIZE, inputs - g * SIZE); ++k)
                wide[k] = widen(weight[n * inputs + g * SIZE + k]);
            const int64_t at = n * groups + g;
            quantize_group<GROUPS>(wide, to.numbers + at * SIZE, to.scale + at, to.min + at);
        }
}

template <Groups GROUPS>
void pack_by(const GroupWeights& from, int64_t outputs, int64_t inputs, int64_t sharing, uint8_t* panels) {
    using F = Form<GROUPS>;
    const int64_t groups = (inputs + SIZE - 1) / SIZE, num_scales = (groups + sharing - 1) / sharing;
    const int64_t size = F::place(groups, sharing);
    std::memset(panels, 0, (outputs + LANES - 1) / LANES * size);
    for (int64_t n = 0; n < outputs; ++n)
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t lane = n % LANES, scale = n * num_scales + g / sharing;
            uint8_t* panel = panels + n / LANES * size;
            uint8_t* block = panel + F::place(g, sharing) + (F::IS_SHARED && g % sharing == 0 ? F::HALVES : 0);
            uint8_t* shared = F::IS_SHARED ? panel + F::place(g / sharing * sharing, sharing) : block;
            uint16_t* halves = (uint16_t*)shared;
            if (F::HAS_SCALE) halves[lane] = from.scale[scale];
            if (F::HAS_MIN) halves[LANES + lane] = from.min[scale];
            if (F::HAS_ZERO) shared[F::ZEROS + lane] = from.zero[scale];
            for (int i = 0; i < F::STEPS; ++i)
                block[i * LANES + lane] = from.scale_steps[(n * groups + g) * F::STEPS + i];
            if (F::IS_K && F::HAS_MIN) block[LANES + lane] = from.min_steps[n * groups + g];
            for (int64_t k = 0; k < SIZE; ++k) {
                const uint8_t number = from.numbers[(n * groups + g) * SIZE + k];
                const int64_t place = k % (SIZE * F::BITS / 8) / 4 * VECTOR + lane * 4 + k % 4;
                block[F::HEAD + place] |= uint8_t(F::BITS == 4 && k >= SIZE / 2 ? number << 4 : number);
            }
        }
}

// Calls work(Form<…>()) for a form.
template <typename Work>
auto with_form(Groups groups, const Work& work) {
    switch (groups) {
        case Groups::Q4_0: return work(Form<Groups::Q4_0>());
        case Groups::Q4_1: return work(Form<Groups::Q4_1>());
        case Groups::Q4_K: return work(Form<Groups::Q4_K>());
        case Groups::Q5_K: return work(Form<Groups::Q5_K>());
        case Groups::Q6_K: return work(Form<Groups::Q6_K>());
        case Groups::INT8: return work(Form<Groups::INT8>());
        case Groups::MXFP4: return work(Form<Groups::MXFP4>());
        case Groups::U4_32: case Groups::U4_64: case Groups::U4_128: return work(Form<Groups::U4_32>());
        default: return work(Form<Groups::Q8_0>());
    }
}

}  // namespace

namespace {

// Panels [first, last) by rows [row, behind), of several forms.
void multiply_by_forms(const Linear& w, const Matmul& p, RoundedRows& rows, int64_t row, int64_t behind, int64_t first,
                       int64_t last) {
    if (w.groups != Groups::MIXED) {
        with_form(w.groups, [&](auto form) {
            multiply_by<decltype(form)::GROUPS_OF>(w, p, rows, row, behind, first, last);
        });
        return;
    }
    for (auto part = (const LinearPart*)w.weight; part->weight; ++part) {
        const int64_t from = std::max(first, part->first), to = std::min(last, part[1].first);
        if (from >= to) continue;
        Linear one = w;
        one.groups = Groups(part->groups);
        one.weight = part->weight - part->first * panel_bytes(w.inputs, one.groups);  // its panels keep their numbers
        multiply_by_forms(one, p, rows, row, behind, from, to);
    }
}

}  // namespace

void multiply_by_groups(const Linear& w, const Matmul& p, int num_threads) {
    static thread_local RoundedRows of_caller;
    RoundedRows& rows = of_caller;
    if (!p.rows) return;
    rows.resize(p.rows, w.inputs);
    const int64_t unit = std::max<int64_t>(1, LEAST_NUMBERS / w.inputs);
    share_out(num_threads, (p.rows + unit - 1) / unit, [&](int64_t first, int64_t last, bool) {
        for (int64_t row = first * unit; row < std::min(p.rows, last * unit); ++row) round_row(w, p, row, rows);
    });
    for (int64_t n = 0; n < p.num_gated; ++n) {
        const auto& [row, behind, delta, column, width] = p.gated[n];
        const Linear& a = delta->a;
        if (a.groups == Groups::NONE) {
            multiply_low(p.gated[n], p, num_threads);
            continue;
        }
        Matmul low{p.x, p.rows, p.x_stride, p.low + column, p.low_stride, false, Then::NOTHING, nullptr, nullptr, 0, nullptr, 0};
        share_out(num_threads, a.panels, [&, row = row, behind = behind](int64_t first, int64_t last, bool) {
            multiply_by_forms(a, low, rows, row, behind, first, last);
        });
    }
    const int64_t least = rows.num_tiles() > 1 ? TOGETHER : 2;  // of a small linear, fewer share out more evenly
    share_out(num_threads, (w.panels + least - 1) / least, [&](int64_t first, int64_t last, bool fresh) {
        if (fresh) lay_out_low(p, rows.bounds.data(), rows.num_tiles());
        multiply_by_forms(w, p, rows, 0, p.rows, first * least, std::min(w.panels, last * least));
    });
}

int64_t panel_bytes(int64_t inputs, Groups groups) {
    return with_form(groups, [&](auto form) { return form.place((inputs + SIZE - 1) / SIZE, sharing_of(groups)); });
}

void quantize(const bf16* weight, int64_t inputs, Groups groups, const Quantized& to, int64_t first, int64_t last) {
    if (groups == Groups::Q4_0)
        quantize_by<Groups::Q4_0>(weight, inputs, to, first, last);
    else if (groups == Groups::Q4_1)
        quantize_by<Groups::Q4_1>(weight, inputs, to, first, last);
    else
        quantize_by<Groups::Q8_0>(weight, inputs, to, first, last);
}

void pack(const GroupWeights& weight, int64_t outputs, int64_t inputs, Groups groups, uint8_t* panels) {
    with_form(groups, [&](auto form) {
        pack_by<decltype(form)::GROUPS_OF>(weight, outputs, inputs, sharing_of(groups), panels);
    });
}

}  // namespace KIND
