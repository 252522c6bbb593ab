#include "attention.h"

#include <algorithm>
#include <vector>

namespace KIND {

namespace {

constexpr int BLOCK = 64;                // positions joined at once
constexpr int GROUPS = BLOCK / LANES;    // of 16 keys
constexpr float FLOOR = -1e30f;          // least running maximum: e^(FLOOR - anything seen) is 0

// 32 numbers: the first `n` of a load from (16 - n) are those of the front half
struct Fence {
    float one[2 * LANES], bound[2 * LANES];
    Fence() {
        for (int i = 0; i < 2 * LANES; ++i) one[i] = i < LANES, bound[i] = i < LANES ? INFINITY : -INFINITY;
    }
};
const Fence FENCE;

int within(int64_t n) { return int(std::clamp<int64_t>(n, 0, LANES)); }
Lanes ones_up_to(int64_t n) { return load(FENCE.one + LANES - within(n)); }
Lanes bound_up_to(int64_t n) { return load(FENCE.bound + LANES - within(n)); }

// What the query heads of one row have come to: greatest score, sum of weights, weighted values.
struct State {
    float peak, sum;
    float* out;      // [dim]
    const bf16* query;  // [dim]
};

// Keys of a block, so that 16 are one vector, and values in float32.
struct Block {
    bf16* keys;     // [16-groups][dim/2][16] pairs
    float* values;  // [keys][dim]
    int64_t count;
};

#if defined(__AVX512F__)
// 16 rows of 16 32-bit numbers, turned.
void turn(const bf16* const* from, int64_t at, int64_t count, bf16* to) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = i < count ? _mm512_loadu_si512(from[i] + at) : _mm512_setzero_si512();
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(to + 32 * i, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + 32 * (i + 4), _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_storeu_si512(to + 32 * (i + 8), _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
        _mm512_storeu_si512(to + 32 * (i + 12), _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
    }
}
constexpr int64_t TURNED = 32;  // elements of a key that are turned at once
#else
void turn(const bf16* const* from, int64_t at, int64_t count, bf16* to) {
    for (int64_t i = 0; i < 16; ++i) {
        const bf16* row = i < count ? from[i] + at : nullptr;
        for (int64_t k = 0; k < 8; ++k) {
            if (row)
                std::memcpy(to + (k * 16 + i) * 2, row + 2 * k, 4);
            else
                std::memset(to + (k * 16 + i) * 2, 0, 4);
        }
    }
}
constexpr int64_t TURNED = 16;
#endif

void fill(Block& block, const bf16* const* keys, const bf16* const* values, int64_t count, int64_t dim) {
    block.count = count;
    for (int64_t g = 0; g * LANES < count; ++g) {
        bf16* to = block.keys + g * LANES * dim;
        const int64_t left = count - g * LANES;
        int64_t at = 0;
        for (; at + TURNED <= dim; at += TURNED) turn(keys + g * LANES, at, left, to + at * LANES);
        for (; at < dim; at += 2)
            for (int64_t i = 0; i < LANES; ++i) {
                if (i < left)
                    std::memcpy(to + at * LANES + 2 * i, keys[g * LANES + i] + at, 4);
                else
                    std::memset(to + at * LANES + 2 * i, 0, 4);
            }
    }
    for (int64_t j = 0; j < count; ++j)
        for (int64_t d = 0; d < dim; d += LANES) store(block.values + j * dim + d, load(values[j] + d));
}

Lanes capped(Lanes s, float cap) {  // cap · tanh(s / cap)
    Lanes e = exp(mul(s, same(2.0f / cap)));
    return mul(same(cap), sub(same(1.0f), div(same(2.0f), add(e, same(1.0f)))));
}

// Scores of up to 4 rows against the block: [row][64], those outside [from, to) of a row -inf.
template <int N>
void score(const Block& block, State* const* states, const int64_t* from, const int64_t* to, const Attention& a,
           int64_t dim, float (*scores)[BLOCK]) {
    for (int64_t g = 0; g * LANES < block.count; ++g) {
        Lanes sum[N];
        for (int i = 0; i < N; ++i) sum[i] = zeros();
        const bf16* keys = block.keys + g * LANES * dim;
        for (int64_t d = 0; d < dim; d += 2) {
            Pairs column = pairs(keys + d * LANES);
            for (int i = 0; i < N; ++i) sum[i] = dot(sum[i], column, same_pair(states[i]->query + d));
        }
        for (int i = 0; i < N; ++i) {
            Lanes s = mul(sum[i], same(a.scale));
            if (a.softcap > 0) s = capped(s, a.softcap);
            s = min(s, bound_up_to(to[i] - g * LANES));
            if (from[i] > g * LANES) s = min(s, sub(zeros(), bound_up_to(from[i] - g * LANES)));
            store(scores[i] + g * LANES, s);
        }
    }
}

// out = out·shrink + Σ weight·value over [from, to), ascending: `WIDTH` vectors of it.
template <int WIDTH>
void weigh(State& state, const Block& block, const float* weights, int64_t from, int64_t to, float shrink, int64_t dim,
           int64_t at) {
    Lanes out[WIDTH];
    for (int i = 0; i < WIDTH; ++i) out[i] = mul(load(state.out + at + i * LANES), same(shrink));
    for (int64_t j = from; j < to; ++j) {
        Lanes weight = same(weights[j]);
        const float* value = block.values + j * dim + at;
        for (int i = 0; i < WIDTH; ++i) out[i] = fma(weight, load(value + i * LANES), out[i]);
    }
    for (int i = 0; i < WIDTH; ++i) store(state.out + at + i * LANES, out[i]);
}

void join(State& state, const Block& block, float* scores, int64_t from, int64_t to, int64_t dim) {
    if (from >= to) return;
    const int64_t first = from / LANES * LANES;
    Lanes top = same(FLOOR);
    for (int64_t j = first; j < to; j += LANES) top = max(top, load(scores + j));
    const float peak = std::max(state.peak, greatest(top));
    Lanes sum = zeros();
    for (int64_t j = first; j < to; j += LANES) {
        Lanes weight = mul(exp(sub(load(scores + j), same(peak))), ones_up_to(to - j));
        if (from > j) weight = mul(weight, sub(same(1.0f), ones_up_to(from - j)));
        store(scores + j, weight);
        sum = add(sum, weight);
    }
    float lane[LANES];
    store(lane, exp(same(state.peak - peak)));
    const float shrink = state.peak == FLOOR ? 0.0f : lane[0];
    state.sum = state.sum * shrink + total(sum);
    state.peak = peak;
    int64_t at = 0;
    for (; at + 4 * LANES <= dim; at += 4 * LANES) weigh<4>(state, block, scores, from, to, shrink, dim, at);
    for (; at + 2 * LANES <= dim; at += 2 * LANES) weigh<2>(state, block, scores, from, to, shrink, dim, at);
    for (; at < dim; at += LANES) weigh<1>(state, block, scores, from, to, shrink, dim, at);
}

struct Seen {
    int64_t from, to;
};

// All states through a block; `seen[i]` of state i.
void join_all(std::vector<State>& states, const std::vector<Seen>& seen, const Block& block, const Attention& a,
              int64_t dim) {
    float scores[4][BLOCK];
    State* few[4];
    int64_t from[4], to[4];
    int n = 0;
    auto flush = [&] {
        if (n == 4) score<4>(block, few, from, to, a, dim, scores);
        if (n == 3) score<3>(block, few, from, to, a, dim, scores);
        if (n == 2) score<2>(block, few, from, to, a, dim, scores);
        if (n == 1) score<1>(block, few, from, to, a, dim, scores);
        for (int i = 0; i < n; ++i) join(*few[i], block, scores[i], from[i], to[i], dim);
        n = 0;
    };
    for (size_t i = 0; i < states.size(); ++i) {
        if (seen[i].from >= seen[i].to) continue;
        few[n] = &states[i], from[n] = seen[i].from, to[n] = seen[i].to;
        if (++n == 4) flush();
    }
    flush();
}

struct Scratch {
    std::vector<bf16> keys, mask_keys;
    std::vector<float> values, out;
    std::vector<State> states;
    std::vector<Seen> seen;
};

}  // namespace

void store_rows(const Rows& rows, const Heads& heads, const Attention& a, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const int64_t sequence = rows.owner[row], position = rows.starts[sequence] + rows.offsets[row];
        const int64_t page = rows.pages[sequence * rows.most_pages + position / a.block_size];
        for (int64_t head = 0; head < heads.kv; ++head) {
            const int64_t to = ((page * heads.kv + head) * a.block_size + position % a.block_size) * heads.dim;
            const int64_t from = row * a.kv_stride + head * heads.dim;
            for (int64_t d = 0; d < heads.dim; d += LANES) {
                store(a.key_pages + to + d, finite(load(a.key + from + d)));
                store(a.value_pages + to + d, finite(load(a.value + from + d)));
            }
        }
    }
}

//            keys of the pages, 64 positions at a time          keys of a mask group
//  row c0    [0 .............. reach)
//  row c1    [0 ................ reach)
//  row m1    [0 .............. reach)                           [m1]
//  row m2    [0 .............. reach)                           [m1 m2]
void attend(const Rows& rows, const Heads& heads, const Attention& a, int64_t item) {
    static thread_local Scratch scratch;
    const int64_t tile = item / heads.kv, head = item % heads.kv, dim = heads.dim;
    const int64_t* members = rows.tile_rows + rows.tile_bounds[tile];
    const int64_t count = rows.tile_bounds[tile + 1] - rows.tile_bounds[tile];
    const int64_t sharing = heads.query / heads.kv;
    const int64_t sequence = rows.owner[members[0]], start = rows.starts[sequence];
    const int64_t* pages = rows.pages + sequence * rows.most_pages;

    scratch.keys.resize(BLOCK * dim), scratch.values.resize(BLOCK * dim);
    scratch.out.assign(count * sharing * dim, 0.0f);
    scratch.states.clear(), scratch.seen.resize(count * sharing);
    int64_t furthest = 0, oldest = INT64_MAX;
    for (int64_t m = 0; m < count; ++m) {
        const int64_t row = members[m];
        furthest = std::max(furthest, start + rows.reach[row]);
        oldest = std::min(oldest, a.window ? start + rows.offsets[row] + 1 - a.window : 0);
        for (int64_t q = 0; q < sharing; ++q)
            scratch.states.push_back({FLOOR, 0.0f, scratch.out.data() + (m * sharing + q) * dim,
                                      a.query + row * a.query_stride + (head * sharing + q) * dim});
    }
    Block block{scratch.keys.data(), scratch.values.data(), 0};
    const bf16 *keys[BLOCK], *values[BLOCK];
    for (int64_t begin = std::max<int64_t>(oldest, 0) / BLOCK * BLOCK; begin < furthest; begin += BLOCK) {
        const int64_t size = std::min<int64_t>(BLOCK, furthest - begin);
        for (int64_t j = 0; j < size; ++j) {
            const int64_t position = begin + j, page = pages[position / a.block_size];
            const int64_t at = ((page * heads.kv + head) * a.block_size + position % a.block_size) * dim;
            keys[j] = a.key_pages + at, values[j] = a.value_pages + at;
        }
        fill(block, keys, values, size, dim);
        for (int64_t m = 0; m < count; ++m) {
            const int64_t row = members[m];
            const int64_t first = a.window ? start + rows.offsets[row] + 1 - a.window : 0;
            const Seen seen{std::clamp<int64_t>(first - begin, 0, size),
                            std::clamp<int64_t>(start + rows.reach[row] - begin, 0, size)};
            for (int64_t q = 0; q < sharing; ++q) scratch.seen[m * sharing + q] = seen;
        }
        join_all(scratch.states, scratch.seen, block, a, dim);
    }
    for (int64_t m = 0; m < count;) {  // mask groups, one after the other; longer ones than a block in parts
        const int64_t group = rows.peers[members[m]];
        if (group < 0) {
            ++m;
            continue;
        }
        int64_t end = m;
        while (end < count && rows.peers[members[end]] == group) ++end;
        for (int64_t begin = group; begin <= members[end - 1]; begin += BLOCK) {
            const int64_t size = std::min<int64_t>(BLOCK, members[end - 1] + 1 - begin);
            scratch.mask_keys.resize(2 * BLOCK * dim);
            for (int64_t j = 0; j < size; ++j) {
                bf16 *key = scratch.mask_keys.data() + 2 * j * dim, *value = key + dim;
                for (int64_t d = 0; d < dim; d += LANES) {
                    store(key + d, finite(load(a.key + (begin + j) * a.kv_stride + head * dim + d)));
                    store(value + d, finite(load(a.value + (begin + j) * a.kv_stride + head * dim + d)));
                }
                keys[j] = key, values[j] = value;
            }
            fill(block, keys, values, size, dim);
            std::fill(scratch.seen.begin(), scratch.seen.end(), Seen{0, 0});
            for (int64_t i = m; i < end; ++i) {
                const int64_t row = members[i];  // positions of a group are consecutive
                const int64_t first = a.window ? row + 1 - a.window : 0;
                const Seen seen{std::clamp<int64_t>(first - begin, 0, size),
                                std::clamp<int64_t>(row + 1 - begin, 0, size)};
                for (int64_t q = 0; q < sharing; ++q) scratch.seen[i * sharing + q] = seen;
            }
            join_all(scratch.states, scratch.seen, block, a, dim);
        }
        m = end;
    }
    for (int64_t m = 0; m < count; ++m)
        for (int64_t q = 0; q < sharing; ++q) {
            const State& state = scratch.states[m * sharing + q];
            bf16* out = a.out + (members[m] * heads.query + head * sharing + q) * dim;
            const Lanes share = same(1.0f / state.sum);
            for (int64_t d = 0; d < dim; d += LANES) store(out + d, mul(load(state.out + d), share));
        }
}

}  // namespace KIND
