#include "attention.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace KIND {

namespace {

constexpr int BLOCK = 64;        // positions per step of the online softmax
constexpr int64_t FEW = 3;      // up to this many query rows keys and values are read without repacking

// Query rows processed together, so that a column is loaded once for all of them; and the format of columns: the
// smaller one if they are loaded repeatedly.
#if defined(__x86_64__)
constexpr int ABREAST = 4;
using Held = Laid;
#else
constexpr int ABREAST = 1;
using Held = bf16;
#endif
constexpr int SUMS = VECTORS == 2 ? 12 : 16;  // registers for sums: half of them, with AVX2 more

constexpr float FLOOR = -1e30f;  // smallest running maximum: e^(FLOOR - score) is 0

// 32 numbers: a load from (16 - n) begins with `n` of the first half
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

// The online softmax of one query head of one row: greatest score, sum of weights, weighted values.
struct State {
    float peak, sum;
    float* out;         // [value dim]
    const bf16* query;  // [dim]
    const Laid* laid;   // the query, prepared for multiplication
    float slope, position;
};

// A block of the pages, and its repacked form for many rows: 16 keys side by side, two values side by side.
struct Block {
    const bf16* key[BLOCK];
    const bf16* value[BLOCK + 1];  // after the last: zeros
    int64_t count;
    int64_t position;  // of its first key
    Held* keys;    // [16-groups][dim/2] columns, or null
    Held* values;  // [keys/2][value dim/16] columns, or null
};

#if defined(__AVX512F__)
// Transposes sixteen pairs of each of up to sixteen keys to columns.
void turn(const bf16* const* from, int64_t at, int64_t count, Held* to) {
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
        lay_column({_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88)}, to + 32 * i);
        lay_column({_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88)}, to + 32 * (i + 4));
        lay_column({_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd)}, to + 32 * (i + 8));
        lay_column({_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd)}, to + 32 * (i + 12));
    }
}
constexpr int64_t TURNED = 32;  // elements of a key transposed at once
#elif defined(__AVX2__)
// Writes a half of a column, for `multiplied`.
void lay_half(__m256i a, Held* to) {
    _mm256_storeu_ps(to, seconds8(a));
    _mm256_storeu_ps(to + LANES, firsts8(a));
}
// Transposes eight pairs of each of up to eight keys to halves of columns.
void turn_half(const bf16* const* from, int64_t at, int64_t count, Held* to) {
    __m256i r[8], t[8];
    for (int i = 0; i < 8; ++i)
        r[i] = i < count ? _mm256_loadu_si256((const __m256i*)(from[i] + at)) : _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        lay_half(_mm256_permute2x128_si256(r[i], r[i + 4], 0x20), to + 32 * i);
        lay_half(_mm256_permute2x128_si256(r[i], r[i + 4], 0x31), to + 32 * (i + 4));
    }
}
// The same of up to sixteen keys: columns.
void turn(const bf16* const* from, int64_t at, int64_t count, Held* to) {
    turn_half(from, at, count, to);
    turn_half(from + 8, at, count - 8, to + LANES / 2);
}
constexpr int64_t TURNED = 16;
#endif

// Repacks keys so that sixteen form one column.
void lay_out_keys(Block& block, int64_t dim) {
    for (int64_t first = 0; first < block.count; first += LANES) {
        Held* to = block.keys + first * dim;
        const int64_t left = block.count - first;
        int64_t at = 0;
#if defined(__AVX2__)
        for (; at + TURNED <= dim; at += TURNED) turn(block.key + first, at, left, to + at * LANES);
#endif
        bf16 pair[2 * LANES] = {};
        for (; at < dim; at += 2) {
            for (int64_t i = 0; i < std::min<int64_t>(left, LANES); ++i)
                std::memcpy(pair + 2 * i, block.key[first + i] + at, 4);
            lay_column(pairs(pair), to + at * LANES);
        }
    }
}

// Repacks values so that those of two keys form pairs; an odd last one is paired with zeros.
void lay_out_values(Block& block, int64_t dim) {
    for (int64_t j = 0; j < block.count; j += 2)
        for (int64_t d = 0; d < dim; d += LANES)
            lay_column(block.value[j] + d, block.value[j + 1] + d, block.values + j * dim + 2 * d);
}

Lanes capped(Lanes s, float cap) {  // cap · tanh(s / cap)
    Lanes e = exp(mul(s, same(2.0f / cap)));
    return mul(same(cap), sub(same(1.0f), div(same(2.0f), add(e, same(1.0f)))));
}

// A score is sixteen sums: of the pairs 0, 16, 32, … of query and key, of 1, 17, 33, … and so on. Groups of four are
// added as 0 and 2, 1 and 3, then these; and the four results in the same way. So a score has the same bits computed
// for sixteen keys side by side, one lane each, and for one key alone, one sum per lane.

// Scores of sixteen keys side by side for COUNT query rows.
template <int COUNT>
void score_beside(const Held* keys, const State* const* state, int64_t dim, Lanes* to) {
    Lanes four[4][COUNT];
#pragma GCC unroll 4
    for (int64_t n = 0; n < 4; ++n) {
        Lanes sum[4][COUNT];
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i)
#pragma GCC unroll 4
            for (int s = 0; s < COUNT; ++s) sum[i][s] = zeros();
        const auto multiply = [&](int64_t i, int64_t d) __attribute__((always_inline)) {
            const Column one = column<0>(keys + d * LANES);
#pragma GCC unroll 4
            for (int s = 0; s < COUNT; ++s) sum[i][s] = multiplied(sum[i][s], one, number<0>(state[s]->laid + d));
            if constexpr (PARTS == 2) {
                const Column other = column<PARTS - 1>(keys + d * LANES);
#pragma GCC unroll 4
                for (int s = 0; s < COUNT; ++s)
                    sum[i][s] = multiplied(sum[i][s], other, number<PARTS - 1>(state[s]->laid + d));
            }
        };
        if (4 * VECTORS * COUNT <= SUMS)
            for (int64_t from = 8 * n; from < dim; from += 2 * LANES)
#pragma GCC unroll 4
                for (int64_t i = 0; i < 4; ++i) multiply(i, from + 2 * i);
        else
#pragma GCC unroll 4
            for (int64_t i = 0; i < 4; ++i)
                for (int64_t d = 8 * n + 2 * i; d < dim; d += 2 * LANES) multiply(i, d);
#pragma GCC unroll 4
        for (int s = 0; s < COUNT; ++s) four[n][s] = add(add(sum[0][s], sum[2][s]), add(sum[1][s], sum[3][s]));
    }
#pragma GCC unroll 4
    for (int s = 0; s < COUNT; ++s) to[s] = add(add(four[0][s], four[2][s]), add(four[1][s], four[3][s]));
}

#if defined(__AVX512F__)
// Scores of sixteen keys without repacking; dim is a multiple of 32, and DIM if that is not 0. Same order of sums.
template <int64_t DIM>
Lanes score_alone(const bf16* const* key, const bf16* query, int64_t dim) {
    __m512 sum[16], half[8], quarter[4];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        Lanes one = zeros();
#pragma GCC unroll 4
        for (int64_t d = 0; d < (DIM ? DIM : dim); d += 2 * LANES) one = dot(one, pairs(key[i] + d), pairs(query + d));
        sum[i] = one.v;
    }
    for (int i = 0; i < 8; ++i)
        half[i] = _mm512_add_ps(_mm512_unpacklo_ps(sum[2 * i], sum[2 * i + 1]),
                                _mm512_unpackhi_ps(sum[2 * i], sum[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        __m512d a = _mm512_castps_pd(half[2 * i]), b = _mm512_castps_pd(half[2 * i + 1]);
        quarter[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));  // of 4 keys, in each fourth
    }
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[0], quarter[1], 0x44),
                             _mm512_shuffle_f32x4(quarter[0], quarter[1], 0xee));  // fourths 0+2, 1+3
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[2], quarter[3], 0x44),
                             _mm512_shuffle_f32x4(quarter[2], quarter[3], 0xee));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd))};
}
Lanes score_alone(const bf16* const* key, const bf16* query, int64_t dim) {
    return dim == 64    ? score_alone<64>(key, query, dim)
           : dim == 128 ? score_alone<128>(key, query, dim)
                        : score_alone<0>(key, query, dim);
}
constexpr bool CAN_SCORE_ALONE = true;
#else
Lanes score_alone(const bf16* const*, const bf16*, int64_t) { return zeros(); }
constexpr bool CAN_SCORE_ALONE = false;
#endif

struct Seen {
    int64_t from, to;
};

const float COUNTED[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

Lanes rounded(Lanes a) {  // to bfloat16
    bf16 narrow[LANES];
    store(narrow, a);
    return load(narrow);
}

// Adds the linear bias of sixteen keys, the first of which is at `position`.
Lanes biased(Lanes scores, const State& state, float position, const Attention& a) {
    const Lanes keys = add(same(position), load(COUNTED));
    if (a.bias == 0) return add(scores, mul(same(state.slope), sub(keys, same(state.position))));
    if (a.bias == 1) return add(scores, mul(same(state.slope), keys));
    return add(scores, mul(rounded(mul(same(state.slope), rounded(keys))), same(a.slope_factor)));
}

// Scores of COUNT rows for sixteen keys of the block from `first` on; -inf for keys that a row does not see.
template <int COUNT>
void score(const Block& block, const State* const* state, const Seen* seen, int64_t first, const Attention& a,
           int64_t dim, float (*scores)[BLOCK]) {
    Lanes found[COUNT];
    if (block.keys)
        score_beside<COUNT>(block.keys + first * dim, state, dim, found);
    else
        for (int i = 0; i < COUNT; ++i) found[i] = score_alone(block.key + first, state[i]->query, dim);
    for (int i = 0; i < COUNT; ++i) {
        Lanes s = mul(found[i], same(a.scale));
        if (a.softcap > 0) s = capped(s, a.softcap);
        if (a.slopes) s = biased(s, *state[i], float(block.position + first), a);
        if (seen[i].to < first + LANES) s = min(s, bound_up_to(seen[i].to - first));
        if (seen[i].from > first) s = min(s, sub(zeros(), bound_up_to(seen[i].from - first)));
        store(scores[i] + first, s);
    }
}

// out = out·shrink + Σ weight·value over the pairs of keys [from, to), ascending: WIDTH vectors of it, of COUNT rows.
template <int WIDTH, int COUNT>
void weigh(State* const* state, const Block& block, const Laid (*weights)[BLOCK], int64_t from, int64_t to,
           const float* shrink, int64_t dim, int64_t at) {
    Lanes out[COUNT][WIDTH];
    for (int s = 0; s < COUNT; ++s)
        for (int i = 0; i < WIDTH; ++i) out[s][i] = mul(load(state[s]->out + at + i * LANES), same(shrink[s]));
    auto multiply = [&](auto part, int64_t j) __attribute__((always_inline)) {
        constexpr int PART = decltype(part)::value;
        decltype(number<PART>(weights[0])) weight[COUNT];
#pragma GCC unroll 4
        for (int s = 0; s < COUNT; ++s) weight[s] = number<PART>(weights[s] + j);
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; ++i) {
            const Column values = column<PART>(block.values + j * dim + 2 * (at + i * LANES));
#pragma GCC unroll 4
            for (int s = 0; s < COUNT; ++s) out[s][i] = multiplied(out[s][i], values, weight[s]);
        }
    };
    if (block.values)
        for (int64_t j = from; j < to; j += 2) {
            multiply(std::integral_constant<int, 0>(), j);
            if constexpr (PARTS == 2) multiply(std::integral_constant<int, 1>(), j);
        }
    else
        for (int64_t j = from; j < to; j += 2)
#pragma GCC unroll 4
            for (int i = 0; i < WIDTH; ++i) {
                const int64_t d = at + i * LANES;
#pragma GCC unroll 4
                for (int s = 0; s < COUNT; ++s)
                    out[s][i] = dot_beside(out[s][i], block.value[j] + d, block.value[j + 1] + d, weights[s] + j);
            }
    for (int s = 0; s < COUNT; ++s)
        for (int i = 0; i < WIDTH; ++i) store(state[s]->out + at + i * LANES, out[s][i]);
}

// Adds the block to COUNT rows together; keys that a row does not see have weight 0.
template <int COUNT>
void join(State* const* state, const Seen* seen, const Block& block, const Attention& a, const Heads& heads) {
    const int64_t dim = heads.value_dim;
    float scores[COUNT][BLOCK], shrink[COUNT];
    Laid weights[COUNT][BLOCK];
    int64_t from = seen[0].from, to = seen[0].to;
    for (int i = 1; i < COUNT; ++i) from = std::min(from, seen[i].from), to = std::max(to, seen[i].to);
    const int64_t first = from / LANES * LANES;
    for (int64_t j = first; j < to; j += LANES) score<COUNT>(block, state, seen, j, a, heads.dim, scores);
    for (int i = 0; i < COUNT; ++i) {
        State& one = *state[i];
        Lanes top = same(FLOOR);
        for (int64_t j = first; j < to; j += LANES) top = max(top, load(scores[i] + j));
        const float peak = std::max(one.peak, greatest(top));
        Lanes sum = zeros();
        for (int64_t j = first; j < to; j += LANES) {
            Lanes weight = mul(exp(sub(load(scores[i] + j), same(peak))), ones_up_to(seen[i].to - j));
            if (seen[i].from > j) weight = mul(weight, sub(same(1.0f), ones_up_to(seen[i].from - j)));
            sum = add(sum, lay_rounded(weight, weights[i] + j));
        }
        float lane[LANES];
        store(lane, exp(same(one.peak - peak)));
        shrink[i] = one.peak == FLOOR ? 0.0f : lane[0];
        one.sum = one.sum * shrink[i] + total(sum);
        one.peak = peak;
    }
    const int64_t begin = from / 2 * 2;  // a masked partner has weight 0
    constexpr int WIDTH = 4 * VECTORS * COUNT <= SUMS ? 4 : 2 * VECTORS * COUNT <= SUMS ? 2 : 1;
    int64_t at = 0;
    if (WIDTH == 4)
        for (; at + 4 * LANES <= dim; at += 4 * LANES)
            weigh<4, COUNT>(state, block, weights, begin, to, shrink, dim, at);
    if (WIDTH >= 2)
        for (; at + 2 * LANES <= dim; at += 2 * LANES)
            weigh<2, COUNT>(state, block, weights, begin, to, shrink, dim, at);
    for (; at < dim; at += LANES) weigh<1, COUNT>(state, block, weights, begin, to, shrink, dim, at);
}

template <int COUNT>
void join_rest(int count, State* const* state, const Seen* seen, const Block& block, const Attention& a,
               const Heads& heads) {
    if constexpr (COUNT > 0) {
        if (count == COUNT) return join<COUNT>(state, seen, block, a, heads);
        join_rest<COUNT - 1>(count, state, seen, block, a, heads);
    }
}

// Adds the block to every state; state i sees `seen[i]` of it.
void join_all(std::vector<State>& states, const std::vector<Seen>& seen, Block& block, const Attention& a,
              const Heads& heads, const bf16* none) {
    block.value[block.count] = none;
    if (block.keys) lay_out_keys(block, heads.dim);
    if (block.values) lay_out_values(block, heads.value_dim);
    if (!block.keys)
        for (int64_t j = block.count; j % LANES; ++j) block.key[j] = none;
    State* abreast[ABREAST];
    Seen sight[ABREAST];
    int count = 0;
    for (size_t i = 0; i < states.size(); ++i) {
        if (seen[i].from >= seen[i].to) continue;
        abreast[count] = &states[i], sight[count] = seen[i];
        if (++count < ABREAST) continue;
        join<ABREAST>(abreast, sight, block, a, heads);
        count = 0;
    }
    join_rest<ABREAST - 1>(count, abreast, sight, block, a, heads);
}

bool is_latent(const Attention& a) { return a.key_pages == a.value_pages; }

// The first position that a row at `position` sees; without bound, 0.
int64_t first_seen(const Attention& a, int64_t position) {
    return a.window ? position + 1 - a.window : a.chunk ? position / a.chunk * a.chunk : 0;
}

// Prefetches a head's keys and values at positions [begin, end): a page is too short for the hardware prefetcher.
void fetch(const Heads& heads, const Attention& a, const int64_t* pages, int64_t head, int64_t begin, int64_t end) {
    while (begin < end) {
        const int64_t slot = begin % a.block_size, count = std::min(a.block_size - slot, end - begin);
        const int64_t at = (pages[begin / a.block_size] * heads.kv + head) * a.block_size + slot;
        for (int64_t i = 0; i < count * heads.dim; i += 32) __builtin_prefetch(a.key_pages + at * heads.dim + i);
        for (int64_t i = 0; i < count * heads.value_dim && !is_latent(a); i += 32)
            __builtin_prefetch(a.value_pages + at * heads.value_dim + i);
        begin += count;
    }
}

struct Scratch {
    std::vector<Held> keys, values;
    std::vector<Laid> queries;
    std::vector<bf16> mask_keys, none;
    std::vector<float> out;
    std::vector<State> states;
    std::vector<Seen> seen;
};

}  // namespace

void store_rows(const Rows& rows, const Heads& heads, const Attention& a, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const int64_t sequence = rows.owner[row], position = rows.starts[sequence] + rows.offsets[row];
        const int64_t page = rows.pages[sequence * rows.most_pages + position / a.block_size];
        for (int64_t head = 0; head < heads.kv; ++head) {
            const int64_t to = (page * heads.kv + head) * a.block_size + position % a.block_size;
            const bf16* key = a.key + row * a.kv_stride + head * heads.dim;
            for (int64_t d = 0; d < heads.dim; d += LANES)
                store(a.key_pages + to * heads.dim + d, finite(load(key + d)));
            const bf16* value = a.value + row * a.value_stride + head * heads.value_dim;
            for (int64_t d = 0; d < heads.value_dim && !is_latent(a); d += LANES)
                store(a.value_pages + to * heads.value_dim + d, finite(load(value + d)));
        }
    }
}

//            keys of the pages, 64 positions at a time          keys of a mask group
//  row c0    [0 .............. reach)
//  row c1    [0 ................ reach)
//  row m1    [0 .............. reach)                           [m1]
//  row m2    [0 .............. reach)                           [m1 m2]
void attend_item(const Rows& rows, const Heads& heads, const Attention& a, int64_t item, int64_t parts) {
    static thread_local Scratch scratch;
    const int64_t part = item % parts, tile = item / parts / heads.kv, head = item / parts % heads.kv;
    const int64_t dim = heads.dim, value_dim = heads.value_dim;
    const int64_t* members = rows.tile_rows + rows.tile_bounds[tile];
    const int64_t count = rows.tile_bounds[tile + 1] - rows.tile_bounds[tile];
    const int64_t all = heads.query / heads.kv, first_query = head * all + all * part / parts;
    const int64_t sharing = head * all + all * (part + 1) / parts - first_query;
    const int64_t sequence = rows.owner[members[0]], start = rows.starts[sequence];
    const int64_t* pages = rows.pages + sequence * rows.most_pages;

    scratch.keys.resize(BLOCK * dim), scratch.values.resize(BLOCK * value_dim), scratch.none.assign(dim + value_dim, 0);
    scratch.out.assign(count * sharing * value_dim, 0.0f);
    scratch.states.clear(), scratch.seen.resize(count * sharing), scratch.queries.resize(count * sharing * dim);
    int64_t furthest = 0, oldest = INT64_MAX;
    for (int64_t m = 0; m < count; ++m) {
        const int64_t row = members[m];
        furthest = std::max(furthest, start + rows.reach[row]);
        oldest = std::min(oldest, first_seen(a, start + rows.offsets[row]));
        for (int64_t q = 0; q < sharing; ++q) {
            const bf16* query = a.query + row * a.query_stride + (first_query + q) * dim;
            const int64_t place = m * sharing + q;
            Laid* laid = scratch.queries.data() + place * dim;
            for (int64_t d = 0; d < dim; d += 2) lay_pair(query + d, laid + d);
            const float slope = a.slopes ? a.slopes[first_query + q] : 0.0f;
            const float position = float(start + rows.offsets[row]);
            float* out = scratch.out.data() + place * value_dim;
            scratch.states.push_back({FLOOR, 0.0f, out, query, laid, slope, position});
        }
    }
    const bool many = count * sharing > FEW;
    const bool alone = CAN_SCORE_ALONE && !many && dim % (2 * LANES) == 0;
    Block block{{}, {}, 0, 0, alone ? nullptr : scratch.keys.data(), many ? scratch.values.data() : nullptr};
    const int64_t first_block = std::max<int64_t>(oldest, 0) / BLOCK * BLOCK;
    for (int64_t begin = first_block; begin < furthest; begin += BLOCK) {
        const int64_t size = std::min<int64_t>(BLOCK, furthest - begin);
        for (int64_t j = 0; j < size;) {  // page by page, or a part of a larger one
            const int64_t position = begin + j, page = pages[position / a.block_size], slot = position % a.block_size;
            const int64_t at = (page * heads.kv + head) * a.block_size + slot, step = is_latent(a) ? dim : value_dim;
            const bf16 *key = a.key_pages + at * dim, *value = a.value_pages + at * step;
            for (int64_t n = std::min(a.block_size - slot, size - j); n; --n, ++j, key += dim, value += step)
                block.key[j] = key, block.value[j] = value;
        }
        block.count = size, block.position = begin;
        if (begin + BLOCK < furthest)
            fetch(heads, a, pages, head, begin + BLOCK, std::min(begin + 2 * BLOCK, furthest));
        else if (head + 1 < heads.kv)  // usually the next item
            fetch(heads, a, pages, head + 1, first_block, std::min(first_block + BLOCK, furthest));
        for (int64_t m = 0; m < count; ++m) {
            const int64_t row = members[m];
            const int64_t first = first_seen(a, start + rows.offsets[row]);
            const Seen seen{std::clamp<int64_t>(first - begin, 0, size),
                            std::clamp<int64_t>(start + rows.reach[row] - begin, 0, size)};
            for (int64_t q = 0; q < sharing; ++q) scratch.seen[m * sharing + q] = seen;
        }
        join_all(scratch.states, scratch.seen, block, a, heads, scratch.none.data());
    }
    for (int64_t m = 0; m < count;) {  // mask groups in turn; those longer than a block in parts
        const int64_t group = rows.peers[members[m]];
        if (group < 0) {
            ++m;
            continue;
        }
        int64_t end = m;
        while (end < count && rows.peers[members[end]] == group) ++end;
        for (int64_t begin = group; begin <= members[end - 1]; begin += BLOCK) {
            const int64_t size = std::min<int64_t>(BLOCK, members[end - 1] + 1 - begin);
            scratch.mask_keys.resize(BLOCK * (dim + value_dim));
            for (int64_t j = 0; j < size; ++j) {
                bf16 *key = scratch.mask_keys.data() + j * (dim + value_dim), *value = is_latent(a) ? key : key + dim;
                for (int64_t d = 0; d < dim; d += LANES)
                    store(key + d, finite(load(a.key + (begin + j) * a.kv_stride + head * dim + d)));
                for (int64_t d = 0; d < value_dim && !is_latent(a); d += LANES)
                    store(value + d, finite(load(a.value + (begin + j) * a.value_stride + head * value_dim + d)));
                block.key[j] = key, block.value[j] = value;
            }
            block.count = size, block.position = start + rows.offsets[begin];
            std::fill(scratch.seen.begin(), scratch.seen.end(), Seen{0, 0});
            for (int64_t i = m; i < end; ++i) {
                const int64_t row = members[i], position = start + rows.offsets[row];
                const int64_t first = row - position + first_seen(a, position);  // positions of a group are consecutive
                const Seen seen{std::clamp<int64_t>(first - begin, 0, size),
                                std::clamp<int64_t>(row + 1 - begin, 0, size)};
                for (int64_t q = 0; q < sharing; ++q) scratch.seen[i * sharing + q] = seen;
            }
            join_all(scratch.states, scratch.seen, block, a, heads, scratch.none.data());
        }
        m = end;
    }
    for (int64_t m = 0; m < count; ++m)
        for (int64_t q = 0; q < sharing; ++q) {
            const State& state = scratch.states[m * sharing + q];
            bf16* out = a.out + (members[m] * heads.query + first_query + q) * value_dim;
            const float sink = a.sinks ? std::exp(a.sinks[first_query + q] - state.peak) : 0.0f;
            const Lanes share = same(1.0f / (state.sum + sink));
            // + 0: a masked partner may have set the sign of a zero
            for (int64_t d = 0; d < value_dim; d += LANES) store(out + d, add(mul(load(state.out + d), share), zeros()));
        }
}

}  // namespace KIND
