// Vectors of sixteen float32 lanes, and the dot product of bfloat16 pairs into them, for each kind of processor.
//
// Each source file is compiled once per kind, with its flags; everything is in that kind's own namespace.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__)
#define KIND amx_bf16
#elif defined(__AVX512BF16__)
#define KIND avx512_bf16
#elif defined(__AVX512VNNI__)
#define KIND avx512_vnni
#elif defined(__AVX512F__)
#define KIND avx512
#elif defined(__AVX2__)
#define KIND avx2
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define KIND neon_bf16
#endif

// 1: bfloat16 weights are multiplied by AMX, which takes denormals for 0; all else is as with AVX-512.
#if defined(__AMX_BF16__)
#define TILES 1
#else
#define TILES 0
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace KIND {

using bf16 = uint16_t;

constexpr int LANES = 16;

static inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline bf16 round(float x) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16(bits >> 16 | 0x40);
    return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)

constexpr int VECTORS = 1;  // registers that sixteen lanes take

struct Lanes {
    __m512 v;
};
struct Pairs {  // 16 pairs of bfloat16
    __m512i v;
};

static inline Lanes zeros() { return {_mm512_setzero_ps()}; }
static inline Lanes same(float x) { return {_mm512_set1_ps(x)}; }
static inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
static inline Lanes load(const bf16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline void store(bf16* p, Lanes a) {
    // not vcvtneps2bf16: it flushes denormals to zero
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    __mmask16 none = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, none, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
static inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Lanes whole(Lanes a) { return {_mm512_roundscale_ps(a.v, 0x08)}; }
static inline Lanes two_to(Lanes a) {  // a: an integer
    return {_mm512_scalef_ps(_mm512_set1_ps(1.0f), a.v)};
}
static inline Lanes finite(Lanes a) {  // 0 for values that are not finite
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(a.v), _mm512_set1_ps(INFINITY), _CMP_LT_OQ), a.v)};
}

static inline Pairs pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
static inline Pairs same_pair(const bf16* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return {_mm512_set1_epi32(bits)};
}
static inline void store_pairs(bf16* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
// interleaves 16 numbers of each
static inline Pairs beside(const bf16* first, const bf16* second) {
    __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)first));
    __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)second));
    return {_mm512_or_si512(a, _mm512_slli_epi32(b, 16))};
}

#if defined(__AVX512BF16__)

// sum[i] + a[2i]·b[2i] + a[2i+1]·b[2i+1], in one fixed order
static inline Lanes dot(Lanes sum, Pairs a, Pairs b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}

#else

static inline Lanes firsts(Pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
static inline Lanes seconds(Pairs a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(int(0xffff0000))))};
}

#endif

#elif defined(__AVX2__)

constexpr int VECTORS = 2;

struct Lanes {
    __m256 low, high;
};
struct Pairs {
    __m256i low, high;
};

#define BOTH(f) {f(a.low, b.low), f(a.high, b.high)}
static inline Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline Lanes same(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Lanes a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
static inline __m256 widen8(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline Lanes load(const bf16* p) { return {widen8(p), widen8(p + 8)}; }
static inline void store8(bf16* p, __m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    __m256i none = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), none);
    rounded = _mm256_srli_epi32(rounded, 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
static inline void store(bf16* p, Lanes a) {
    store8(p, a.low);
    store8(p + 8, a.high);
}
static inline Lanes add(Lanes a, Lanes b) { return BOTH(_mm256_add_ps); }
static inline Lanes sub(Lanes a, Lanes b) { return BOTH(_mm256_sub_ps); }
static inline Lanes mul(Lanes a, Lanes b) { return BOTH(_mm256_mul_ps); }
static inline Lanes div(Lanes a, Lanes b) { return BOTH(_mm256_div_ps); }
static inline Lanes max(Lanes a, Lanes b) { return BOTH(_mm256_max_ps); }
static inline Lanes min(Lanes a, Lanes b) { return BOTH(_mm256_min_ps); }
#undef BOTH
static inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline Lanes whole(Lanes a) {
    return {_mm256_round_ps(a.low, 0x08), _mm256_round_ps(a.high, 0x08)};
}
static inline __m256 two_to8(__m256 a) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_max_epi32(exponent, _mm256_setzero_si256()), 23));
}
static inline Lanes two_to(Lanes a) { return {two_to8(a.low), two_to8(a.high)}; }
static inline __m256 finite8(__m256 a) {
    __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
    return _mm256_and_ps(a, _mm256_cmp_ps(size, _mm256_set1_ps(INFINITY), _CMP_LT_OQ));
}
static inline Lanes finite(Lanes a) { return {finite8(a.low), finite8(a.high)}; }

static inline Pairs pairs(const bf16* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
}
static inline Pairs same_pair(const bf16* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    __m256i all = _mm256_set1_epi32(bits);
    return {all, all};
}
static inline void store_pairs(bf16* p, Pairs a) {
    _mm256_storeu_si256((__m256i*)p, a.low);
    _mm256_storeu_si256((__m256i*)(p + 16), a.high);
}
static inline __m256i beside8(const bf16* first, const bf16* second) {
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)first));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)second));
    return _mm256_or_si256(a, _mm256_slli_epi32(b, 16));
}
static inline Pairs beside(const bf16* first, const bf16* second) {
    return {beside8(first, second), beside8(first + 8, second + 8)};
}
static inline __m256 firsts8(__m256i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
static inline __m256 seconds8(__m256i a) {
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(int(0xffff0000))));
}
static inline Lanes firsts(Pairs a) { return {firsts8(a.low), firsts8(a.high)}; }
static inline Lanes seconds(Pairs a) { return {seconds8(a.low), seconds8(a.high)}; }

#else

constexpr int VECTORS = 4;

struct Lanes {
    float32x4_t v[4];
};
struct Pairs {
    bfloat16x8_t v[4];
};

#define EACH(expression)                                  \
    Lanes r;                                              \
    for (int i = 0; i < 4; ++i) r.v[i] = expression;      \
    return r
static inline Lanes same(float x) { EACH(vdupq_n_f32(x)); }
static inline Lanes zeros() { return same(0.0f); }
static inline Lanes load(const float* p) { EACH(vld1q_f32(p + 4 * i)); }
static inline void store(float* p, Lanes a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
static inline Lanes load(const bf16* p) { EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
static inline void store(bf16* p, Lanes a) {
    for (int i = 0; i < 4; ++i) {
        uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]);
        uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));
        rounded = vbslq_u32(vceqq_f32(a.v[i], a.v[i]), rounded, vdupq_n_u32(0x7fc00000));
        vst1_u16(p + 4 * i, vshrn_n_u32(rounded, 16));
    }
}
static inline Lanes add(Lanes a, Lanes b) { EACH(vaddq_f32(a.v[i], b.v[i])); }
static inline Lanes sub(Lanes a, Lanes b) { EACH(vsubq_f32(a.v[i], b.v[i])); }
static inline Lanes mul(Lanes a, Lanes b) { EACH(vmulq_f32(a.v[i], b.v[i])); }
static inline Lanes div(Lanes a, Lanes b) { EACH(vdivq_f32(a.v[i], b.v[i])); }
static inline Lanes max(Lanes a, Lanes b) { EACH(vmaxq_f32(a.v[i], b.v[i])); }
static inline Lanes min(Lanes a, Lanes b) { EACH(vminq_f32(a.v[i], b.v[i])); }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
static inline Lanes whole(Lanes a) { EACH(vrndnq_f32(a.v[i])); }
static inline Lanes two_to(Lanes a) {
    EACH(vreinterpretq_f32_s32(
        vshlq_n_s32(vmaxq_s32(vaddq_s32(vcvtq_s32_f32(a.v[i]), vdupq_n_s32(127)), vdupq_n_s32(0)), 23)));
}
static inline Lanes finite(Lanes a) {
    EACH(vreinterpretq_f32_u32(
        vandq_u32(vreinterpretq_u32_f32(a.v[i]), vcltq_f32(vabsq_f32(a.v[i]), vdupq_n_f32(INFINITY)))));
}
static inline Pairs pairs(const bf16* p) {
    Pairs r;
    for (int i = 0; i < 4; ++i) r.v[i] = vreinterpretq_bf16_u16(vld1q_u16(p + 8 * i));
    return r;
}
static inline Pairs same_pair(const bf16* p) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    Pairs r;
    for (int i = 0; i < 4; ++i) r.v[i] = vreinterpretq_bf16_u32(vdupq_n_u32(bits));
    return r;
}
static inline void store_pairs(bf16* p, Pairs a) {
    for (int i = 0; i < 4; ++i) vst1q_u16(p + 8 * i, vreinterpretq_u16_bf16(a.v[i]));
}
static inline Pairs beside(const bf16* first, const bf16* second) {
    Pairs r;
    for (int i = 0; i < 4; ++i) {
        uint16x4_t a = vld1_u16(first + 4 * i), b = vld1_u16(second + 4 * i);
        uint16x4x2_t both = vzip_u16(a, b);
        r.v[i] = vreinterpretq_bf16_u16(vcombine_u16(both.val[0], both.val[1]));
    }
    return r;
}
static inline Lanes dot(Lanes sum, Pairs a, Pairs b) { EACH(vbfdotq_f32(sum.v[i], a.v[i], b.v[i])); }
#undef EACH

#endif

#if defined(__x86_64__) && !defined(__AVX512BF16__)
#define WIDENS  // no instruction multiplies pairs: the two numbers are multiplied separately
static inline Lanes dot(Lanes sum, Pairs a, Pairs b) {
    return fma(firsts(a), firsts(b), fma(seconds(a), seconds(b), sum));
}
#endif

// Multiplies a column of sixteen pairs by one pair: in one part, or in two if no instruction multiplies pairs (the
// second number of each pair, then the first). All parts together equal `dot`. Pairs used often are kept prepared.
#if defined(WIDENS)
using Laid = float;
using Column = Lanes;
constexpr int PARTS = 2;
template <int PART>
static inline Lanes number(const float* pair) {
    return same(pair[1 - PART]);
}
template <int PART>
static inline Lanes column(const float* p) {
    return load(p + PART * LANES);
}
template <int PART>
static inline Lanes column(const bf16* p) {
    return PART == 0 ? seconds(pairs(p)) : firsts(pairs(p));
}
static inline Lanes multiplied(Lanes sum, Lanes column, Lanes number) { return fma(column, number, sum); }
static inline void lay_pair(const bf16* from, float* to) { to[0] = widen(from[0]), to[1] = widen(from[1]); }
static inline void lay_column(Pairs a, float* to) { store(to, seconds(a)), store(to + LANES, firsts(a)); }
static inline void lay_column(const bf16* first, const bf16* second, float* to) {
    store(to, load(second)), store(to + LANES, load(first));
}
// Rounds sixteen numbers to bfloat16 and widens them again.
static inline Lanes lay_rounded(Lanes a, float* to) {
    bf16 rounded[LANES];
    store(rounded, a);
    const Lanes back = load(rounded);
    store(to, back);
    return back;
}
// Equals `dot` of the two interleaved.
static inline Lanes dot_beside(Lanes sum, const bf16* first, const bf16* second, const float* pair) {
    return fma(load(first), number<1>(pair), fma(load(second), number<0>(pair), sum));
}
#else
using Laid = bf16;
using Column = Pairs;
constexpr int PARTS = 1;
template <int PART>
static inline Pairs number(const bf16* pair) {
    return same_pair(pair);
}
template <int PART>
static inline Pairs column(const bf16* p) {
    return pairs(p);
}
static inline Lanes multiplied(Lanes sum, Pairs column, Pairs number) { return dot(sum, column, number); }
static inline void lay_pair(const bf16* from, bf16* to) { std::memcpy(to, from, 4); }
static inline Lanes lay_rounded(Lanes a, bf16* to) {
    store(to, a);
    return load(to);
}
static inline Lanes dot_beside(Lanes sum, const bf16* first, const bf16* second, const bf16* pair) {
    return dot(sum, beside(first, second), same_pair(pair));
}
#endif
static inline void lay_column(Pairs a, bf16* to) { store_pairs(to, a); }
static inline void lay_column(const bf16* first, const bf16* second, bf16* to) {
    store_pairs(to, beside(first, second));
}

// Adds the lanes in a fixed order: i and i + 8, then i and i + 4, ….
#if defined(__x86_64__)
#if defined(__AVX512F__)
static inline __m256 lower(Lanes a) { return _mm512_castps512_ps256(a.v); }
static inline __m256 upper(Lanes a) { return _mm512_extractf32x8_ps(a.v, 1); }
#else
static inline __m256 lower(Lanes a) { return a.low; }
static inline __m256 upper(Lanes a) { return a.high; }
#endif
static inline float total(Lanes a) {
    const __m256 eight = _mm256_add_ps(lower(a), upper(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float greatest(Lanes a) {
    const __m256 eight = _mm256_max_ps(lower(a), upper(a));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
static inline float total(Lanes a) {
    float lane[LANES];
    store(lane, a);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}
static inline float greatest(Lanes a) {
    float lane[LANES];
    store(lane, a);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}
#endif

// e^x to about two units in the last place; 0 below -87, e^88 above 88.
static inline Lanes exp(Lanes x) {
    Lanes bounded = min(max(x, same(-87.3f)), same(88.0f));
    Lanes n = whole(mul(bounded, same(1.44269504f)));
    Lanes r = fma(n, same(-0.693359375f), bounded);
    r = fma(n, same(2.12194440e-4f), r);
    Lanes p = same(1.9875691500e-4f);
    p = fma(p, r, same(1.3981999507e-3f));
    p = fma(p, r, same(8.3334519073e-3f));
    p = fma(p, r, same(4.1665795894e-2f));
    p = fma(p, r, same(1.6666665459e-1f));
    p = fma(p, r, same(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), same(1.0f));
    return mul(p, two_to(n));
}

static inline Lanes silu(Lanes x) { return div(x, add(same(1.0f), exp(sub(zeros(), x)))); }

}  // namespace KIND
