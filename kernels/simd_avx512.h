/* simd_avx512.h - the registers cpu_ops.h is written on, as AVX-512 has them.
 *
 * The same functions as simd_avx2.h with one register of 16 lanes where that
 * has two of 8, and with VNNI's dot product.
 *
 * Empty unless the including file is compiled for AVX-512, or brings its own
 * intrinsics (the tests emulate them).
 *
 * Thread:  any; plain values.
 */
#ifndef KERNELS_SIMD_AVX512_H
#define KERNELS_SIMD_AVX512_H

#include <stdint.h>
#include <string.h>

#include "kernels/scalar_math.h"
#include "kernels/unroll.h"

#if defined(__AVX512VNNI__) || defined(SIMD_EMULATED)

#    ifndef SIMD_EMULATED
#        include <immintrin.h>
#    endif

enum {
    SIMD_LANES = 16,
    SIMD_PARTS = 1,     /* registers per row group */
    SIMD_TILE_ROWS = 6, /* activations per pass over the weights */
};

/* Names for registers, so that cpu_ops.h reads the same for both. */
typedef __m512 vf;
typedef __m512i vi;

struct wide {
    __m512 lanes;
};

/* ---- one register ---- */

static inline vf vf_load(const float *at)
{
    return _mm512_loadu_ps(at);
}

static inline vf vf_load_f16(const uint8_t *at)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)at));
}

static inline vf vf_load_bf16(const uint8_t *at)
{
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline vf vf_load_u8(const uint8_t *at)
{
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)at);
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

static inline vf vf_load_i8(const uint8_t *at)
{
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)at);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

static inline vf vf_set(float value)
{
    return _mm512_set1_ps(value);
}

static inline vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

static inline vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline vf vf_negate(vf a)
{
    return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f));
}

static inline vf vf_from_int(vi a)
{
    return _mm512_cvtepi32_ps(a);
}

/* The first `count` lanes; any count. */
static inline void vf_store(float *at, vf a, uint32_t count)
{
    if (count >= SIMD_LANES) {
        _mm512_storeu_ps(at, a);
    } else {
        _mm512_mask_storeu_ps(at, (__mmask16)((1u << count) - 1), a);
    }
}

static inline vi vi_load(const uint8_t *at)
{
    return _mm512_loadu_si512(at);
}

static inline vi vi_set(int32_t value)
{
    return _mm512_set1_epi32(value);
}

static inline vi vi_and(vi a, vi b)
{
    return _mm512_and_si512(a, b);
}

static inline vi vi_or(vi a, vi b)
{
    return _mm512_or_si512(a, b);
}

static inline vi vi_add(vi a, vi b)
{
    return _mm512_add_epi32(a, b);
}

static inline vi vi_shift_left(vi a, int count)
{
    return _mm512_slli_epi32(a, (unsigned)count);
}

static inline vi vi_shift_right(vi a, int count)
{
    return _mm512_srli_epi32(a, (unsigned)count);
}

static inline vi vi_shift_right_signed(vi a, int count)
{
    return _mm512_srai_epi32(a, (unsigned)count);
}

static inline vi simd_broadcast_4(const void *at)
{
    int32_t word;
    memcpy(&word, at, sizeof(word));
    return _mm512_set1_epi32(word);
}

/* factor_0 * sums[0] + factor_1 * sums[1] in every lane. */
static inline vi simd_sums(const int16_t *sums, int16_t factor_0, int16_t factor_1)
{
    const uint32_t pair = (uint16_t)factor_0 | (uint32_t)(uint16_t)factor_1 << 16;
    return _mm512_madd_epi16(simd_broadcast_4(sums), _mm512_set1_epi32((int32_t)pair));
}

/* What a block's dots start from: the offset of its quants times the activations' sums.  8 bits
 * are signed and used as q + 128. */
static inline vi simd_dot_start(const int16_t *sums, const int16_t offsets[2], int bits)
{
    const int none = bits != 8 && offsets[0] == 0 && offsets[1] == 0;
    return none        ? _mm512_setzero_si512()
           : bits == 8 ? simd_sums(sums, -128, -128)
                       : simd_sums(sums, offsets[0], offsets[1]);
}

/* Step n of `count`: lane r of `dot` gains the products of 4 bytes of q and of a. */
static inline void simd_dot_step(vi *dot, vi *pairs, vi q, vi a, int n, int count, int bits)
{
    (void)pairs;
    (void)n;
    (void)count;
    const vi quants = bits == 8 ? _mm512_xor_si512(q, _mm512_set1_epi32((int32_t)0x80808080u)) : q;
    *dot = _mm512_dpbusd_epi32(*dot, quants, a);
}

static inline void simd_prefetch(const uint8_t *at)
{
    _mm_prefetch((const char *)at, _MM_HINT_T0);
}

/* ---- 16 lanes ---- */

static inline struct wide wide_set(float value)
{
    return (struct wide){_mm512_set1_ps(value)};
}

static inline struct wide wide_load(const float *at)
{
    return (struct wide){_mm512_loadu_ps(at)};
}

/* The first `count` lanes (1 .. 16), zeros in the others. */
static inline struct wide wide_load_part(const float *at, uint32_t count)
{
    return (struct wide){_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), at)};
}

static inline void wide_store(float *at, struct wide a)
{
    _mm512_storeu_ps(at, a.lanes);
}

static inline void wide_store_part(float *at, struct wide a, uint32_t count)
{
    vf_store(at, a.lanes, count);
}

static inline struct wide wide_add(struct wide a, struct wide b)
{
    return (struct wide){_mm512_add_ps(a.lanes, b.lanes)};
}

static inline struct wide wide_sub(struct wide a, struct wide b)
{
    return (struct wide){_mm512_sub_ps(a.lanes, b.lanes)};
}

static inline struct wide wide_mul(struct wide a, struct wide b)
{
    return (struct wide){_mm512_mul_ps(a.lanes, b.lanes)};
}

static inline struct wide wide_div(struct wide a, struct wide b)
{
    return (struct wide){_mm512_div_ps(a.lanes, b.lanes)};
}

static inline struct wide wide_fma(struct wide a, struct wide b, struct wide c)
{
    return (struct wide){_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)};
}

static inline struct wide wide_max(struct wide a, struct wide b)
{
    return (struct wide){_mm512_max_ps(a.lanes, b.lanes)};
}

static inline struct wide wide_min(struct wide a, struct wide b)
{
    return (struct wide){_mm512_min_ps(a.lanes, b.lanes)};
}

static inline struct wide wide_negate(struct wide a)
{
    return (struct wide){vf_negate(a.lanes)};
}

static inline struct wide wide_abs(struct wide a)
{
    return (struct wide){_mm512_abs_ps(a.lanes)};
}

static inline __m256 simd_low(__m512 a)
{
    return _mm512_castps512_ps256(a);
}

static inline __m256 simd_high(__m512 a)
{
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
}

/* Lane l takes lane l + 8, then l + 4, l + 2, l + 1. */
static inline float wide_sum(struct wide a)
{
    const __m256 eight = _mm256_add_ps(simd_low(a.lanes), simd_high(a.lanes));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float wide_largest(struct wide a)
{
    const __m256 eight = _mm256_max_ps(simd_low(a.lanes), simd_high(a.lanes));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* Lanes rounded to even as int8 (-127 .. 127) to `out`; returns their sum. */
static inline int32_t wide_store_int8(int8_t *out, struct wide a)
{
    const __m512i rounded = _mm512_cvtps_epi32(a.lanes);
    _mm_storeu_si128((__m128i *)(void *)out, _mm512_cvtepi32_epi8(rounded));
    return _mm512_reduce_add_epi32(rounded);
}

/* math_exp()'s last step: p * 2^n, n in the low bits of `rounded`. */
static inline struct wide wide_exp_scale(struct wide p, struct wide rounded)
{
    const __m512i bias = _mm512_set1_epi32(127);
    const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(rounded.lanes),
                                       _mm512_castps_si512(_mm512_set1_ps(EXP_ROUNDER)));
    const __m512i half = _mm512_srai_epi32(n, 1);
    const __m512i scale_1 = _mm512_slli_epi32(_mm512_add_epi32(half, bias), 23);
    const __m512i rest = _mm512_sub_epi32(n, half);
    const __m512i scale_2 = _mm512_slli_epi32(_mm512_add_epi32(rest, bias), 23);
    const __m512 once = _mm512_mul_ps(p.lanes, _mm512_castsi512_ps(scale_1));
    return (struct wide){_mm512_mul_ps(once, _mm512_castsi512_ps(scale_2))};
}

#endif
#endif
