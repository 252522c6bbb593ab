// Vectors of 64 bytes, and exact integer dot products of them: the same result on every kind of processor.

#pragma once

#include "isa.h"

namespace KIND {

constexpr int64_t VECTOR = 64;  // bytes of a vector: four numbers of each of sixteen lanes

static inline int32_t int_of(const int8_t* four) {
    int32_t bits;
    std::memcpy(&bits, four, 4);
    return bits;
}

// Floats of four bits, doubled, plus 12.
alignas(16) constexpr uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

#if defined(__x86_64__)
static inline uint16_t to_half(float x) { return uint16_t(_cvtss_sh(x, 0)); }  // to the nearest, ties to even
static inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
// Stores 32 codes, and the sums of the first 16 and of all.
static inline void store_codes(__m256i codes, int8_t* to, int32_t* sums) {
    _mm256_storeu_si256((__m256i*)to, codes);
    const __m256i raised = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));  // codes + 128
    const __m256i eights = _mm256_sad_epu8(raised, _mm256_setzero_si256());
    const __m128i first = _mm256_castsi256_si128(eights), second = _mm256_extracti128_si256(eights, 1);
    const __m128i halves = _mm_add_epi64(_mm_unpacklo_epi64(first, second), _mm_unpackhi_epi64(first, second));
    sums[0] = _mm_cvtsi128_si32(halves) - 16 * 128;
    sums[1] = sums[0] + _mm_extract_epi32(halves, 2) - 16 * 128;
}
static inline uint16_t most_of(__m256i sizes) {
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));  // of the complements
    return uint16_t(~_mm_extract_epi16(least, 0));
}
#else
static inline uint16_t to_half(float x) {
    const __fp16 half = __fp16(x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
static inline float from_half(uint16_t x) {
    __fp16 half;
    std::memcpy(&half, &x, 2);
    return float(half);
}
#endif

#if defined(__AVX512F__)

struct Bytes {
    __m512i v;
};
struct Ints {  // sixteen int32
    __m512i v;
};

static inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_bytes(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
static inline Bytes low_halves(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
static inline Bytes high_halves(Bytes a) {
    return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
static inline Bytes from_e2m1(Bytes a) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)E2M1)), a.v)};
}
static inline Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline Ints same_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline Lanes to_lanes(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline Lanes load_halves(const uint16_t* p) {  // float16
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
static inline Ints load_steps(const uint8_t* p) {  // sixteen int8
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))};
}
static inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline Ints mul(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
// The greatest size of 32 numbers, as bits; at least those of infinity if one is not finite.
static inline uint16_t most_of(const bf16* p) {
    const __m512i sizes = _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff));
    return most_of(_mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1)));
}
// Stores the nearest whole numbers to 32 numbers times `by`, at most 127 in size, and the sums of the first 16 and of all.
static inline void round_all(const bf16* p, float by, int8_t* to, int32_t* sums) {
    const __m512i first = _mm512_cvtps_epi32(mul(load(p), same(by)).v);
    const __m512i second = _mm512_cvtps_epi32(mul(load(p + LANES), same(by)).v);
    store_codes(_mm256_set_m128i(_mm512_cvtepi32_epi8(second), _mm512_cvtepi32_epi8(first)), to, sums);
}

#if defined(__AVX512VNNI__)
// sum + a[4i]·four[0] + … + a[4i+3]·four[3], a unsigned
static inline Ints dot_four(Ints sum, Bytes a, const int8_t* four) {
    // _mm512_dpbusd_epi32, which GCC 12 gives an instruction of its own for the broadcast
    const int8_t(&operand)[4] = *(const int8_t(*)[4])four;
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(a.v), "m"(operand));
    return sum;
}
#else
static inline __m512i dot_halves(__m512i a, __m512i four, int times) {  // a below 16: sums of two fit in sixteen bits
    return _mm512_madd_epi16(_mm512_maddubs_epi16(a, four), _mm512_set1_epi16(short(times)));
}
static inline Ints dot_four(Ints sum, Bytes a, const int8_t* four) {
    const __m512i all = _mm512_set1_epi32(int_of(four));
    const __m512i low = dot_halves(low_halves(a).v, all, 1), high = dot_halves(high_halves(a).v, all, 16);
    return {_mm512_add_epi32(sum.v, _mm512_add_epi32(low, high))};
}
#endif

#elif defined(__AVX2__)

struct Bytes {
    __m256i low, high;
};
struct Ints {
    __m256i low, high;
};

static inline Bytes load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
static inline __m256i low_halves8(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
static inline __m256i high_halves8(__m256i a) { return low_halves8(_mm256_srli_epi16(a, 4)); }
static inline Bytes low_halves(Bytes a) { return {low_halves8(a.low), low_halves8(a.high)}; }
static inline Bytes high_halves(Bytes a) { return {high_halves8(a.low), high_halves8(a.high)}; }
static inline Bytes from_e2m1(Bytes a) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)E2M1));
    return {_mm256_shuffle_epi8(table, a.low), _mm256_shuffle_epi8(table, a.high)};
}
static inline Ints same_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Lanes to_lanes(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
static inline Lanes load_halves(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline Ints load_steps(const uint8_t* p) {  // sixteen int8
    const __m128i all = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))};
}
static inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
static inline Ints mul(Ints a, Ints b) {
    return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
static inline __m256i load_sizes(const bf16* p) {
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi16(0x7fff));
}
// The greatest size of 32 numbers, as bits; at least those of infinity if one is not finite.
static inline uint16_t most_of(const bf16* p) {
    return most_of(_mm256_max_epu16(load_sizes(p), load_sizes(p + LANES)));
}
static inline __m128i round_half(const bf16* p, float by) {
    const Lanes a = mul(load(p), same(by));
    const __m256i first = _mm256_cvtps_epi32(a.low), second = _mm256_cvtps_epi32(a.high);
    const __m256i sixteen = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(sixteen), _mm256_extracti128_si256(sixteen, 1));
}
// Stores the nearest whole numbers to 32 numbers times `by`, at most 127 in size, and the sums of the first 16 and of all.
static inline void round_all(const bf16* p, float by, int8_t* to, int32_t* sums) {
    store_codes(_mm256_set_m128i(round_half(p + LANES, by), round_half(p, by)), to, sums);
}

#define SHORTS 1  // whether sums of products are kept in sixteen bits
struct Shorts {  // thirty-two int16: two of each lane
    __m256i low, high;
};

// A sum that is needed now. GCC 12 would compute all products of a group first, keep them on the stack, and add them up at
// the end, which takes a third more time.
template <typename Two>
static inline Two added_now(Two sum) {
    asm("" : "+x"(sum.low), "+x"(sum.high));
    return sum;
}
static inline Shorts add(Shorts a, Shorts b) {
    return added_now(Shorts{_mm256_add_epi16(a.low, b.low), _mm256_add_epi16(a.high, b.high)});
}
static inline Ints add(Ints sum, Shorts pairs) {
    const __m256i one = _mm256_set1_epi16(1);
    return added_now(add(sum, Ints{_mm256_madd_epi16(pairs.low, one), _mm256_madd_epi16(pairs.high, one)}));
}
static inline Bytes minus_128(Bytes a) {
    const __m256i sign = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(a.low, sign), _mm256_xor_si256(a.high, sign)};
}
// The sums of two products each, of numbers and int8, which must fit.
static inline Shorts pair_products(Bytes a, const int8_t* four) {
    const __m256i all = same_int(int_of(four)).low;
    return {_mm256_maddubs_epi16(a.low, all), _mm256_maddubs_epi16(a.high, all)};
}
static inline Shorts signed_pair_products(Bytes a, const int8_t* four) {  // a: int8
    const __m256i all = same_int(int_of(four)).low;
    return {_mm256_maddubs_epi16(_mm256_abs_epi8(a.low), _mm256_sign_epi8(all, a.low)),
            _mm256_maddubs_epi16(_mm256_abs_epi8(a.high), _mm256_sign_epi8(all, a.high))};
}

#else

struct Bytes {
    uint8x16_t v[4];
};
struct Ints {
    int32x4_t v[4];
};

#define EACH(type, expression)                       \
    type r;                                          \
    for (int i = 0; i < 4; ++i) r.v[i] = expression; \
    return r
static inline Bytes load_bytes(const uint8_t* p) { EACH(Bytes, vld1q_u8(p + 16 * i)); }
static inline Bytes low_halves(Bytes a) { EACH(Bytes, vandq_u8(a.v[i], vdupq_n_u8(15))); }
static inline Bytes high_halves(Bytes a) { EACH(Bytes, vshrq_n_u8(a.v[i], 4)); }
static inline Bytes from_e2m1(Bytes a) { EACH(Bytes, vqtbl1q_u8(vld1q_u8(E2M1), a.v[i])); }
static inline Ints same_int(int32_t x) { EACH(Ints, vdupq_n_s32(x)); }
static inline Lanes to_lanes(Ints a) { EACH(Lanes, vcvtq_f32_s32(a.v[i])); }
static inline Lanes load_halves(const uint16_t* p) {
    EACH(Lanes, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
static inline Ints load_steps(const uint8_t* p) {  // sixteen int8
    const int8x16_t all = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_s8(vget_high_s8(all));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
             vmovl_s16(vget_high_s16(high))}};
}
static inline Ints add(Ints a, Ints b) { EACH(Ints, vaddq_s32(a.v[i], b.v[i])); }
static inline Ints mul(Ints a, Ints b) { EACH(Ints, vmulq_s32(a.v[i], b.v[i])); }
// The greatest size of 32 numbers, as bits; at least those of infinity if one is not finite.
static inline uint16_t most_of(const bf16* p) {
    uint16x8_t most = vdupq_n_u16(0);
    for (int i = 0; i < 4; ++i) most = vmaxq_u16(most, vandq_u16(vld1q_u16(p + 8 * i), vdupq_n_u16(0x7fff)));
    return vmaxvq_u16(most);
}
// Stores the nearest whole numbers to 32 numbers times `by`, at most 127 in size, and the sums of the first 16 and of all.
static inline void round_all(const bf16* p, float by, int8_t* to, int32_t* sums) {
    for (int half = 0; half < 2; ++half) {
        const Lanes a = mul(load(p + half * LANES), same(by));
        for (int i = 0; i < 4; ++i) {
            const int32x4_t whole = vcvtnq_s32_f32(a.v[i]);
            const int16x4_t narrow = vmovn_s32(whole);
            const int8x8_t bytes = vmovn_s16(vcombine_s16(narrow, narrow));
            std::memcpy(to + half * LANES + 4 * i, &bytes, 4);
        }
    }
    sums[0] = vaddlvq_s8(vld1q_s8(to));
    sums[1] = sums[0] + vaddlvq_s8(vld1q_s8(to + LANES));
}
static inline int32x4_t pair_sums(uint8x8_t a, int16x8_t four) {  // a product is below 2^15
    return vpaddlq_s16(vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(a)), four));
}
// sum + a[4i]·four[0] + … + a[4i+3]·four[3], a unsigned
static inline Ints dot_four(Ints sum, Bytes a, const int8_t* four) {
    const int16x8_t all = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(int_of(four))));
    EACH(Ints, vaddq_s32(sum.v[i], vpaddq_s32(pair_sums(vget_low_u8(a.v[i]), all), pair_sums(vget_high_u8(a.v[i]), all))));
}
#undef EACH

#endif

// Sums, for each lane, of the products of a group's numbers, none above MOST, and codes, none above 127 in size.
#if SHORTS

// Those of pairs are kept in sixteen bits for as long as they fit in any case. Numbers of eight bits are taken as int8,
// SUBTRACTED less, so that two products fit.
template <int MOST>
struct Dots {
    static constexpr int SUBTRACTED = MOST == 255 ? 128 : 0;
    static constexpr int fitting(int pairs) {
        return pairs * 2 * 127 * (MOST == 255 ? 128 : MOST) <= 32767 ? pairs : fitting(pairs / 2);
    }
    static constexpr int TERMS = fitting(8);

    Ints sum;
    Shorts pairs;

    // Adds the products of four inputs, number `turn` of the group's eight.
    void add_products(int turn, Bytes numbers, const int8_t* four) {
        const Shorts more = SUBTRACTED ? signed_pair_products(minus_128(numbers), four) : pair_products(numbers, four);
        pairs = turn % TERMS ? add(pairs, more) : more;
        if (turn % TERMS == TERMS - 1) sum = add(sum, pairs);
    }
};

#else

template <int MOST>
struct Dots {
    static constexpr int SUBTRACTED = 0;

    Ints sum;

    void add_products(int, Bytes numbers, const int8_t* four) { sum = dot_four(sum, numbers, four); }
};

#endif

}  // namespace KIND
