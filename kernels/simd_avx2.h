/* simd_avx2.h - the registers cpu_ops.h is written on, as AVX2 has them.
 *
 * `wide` is 16 float lanes (the canonical partial sums); `vf` and `vi` are one
 * register, SIMD_LANES rows of a packed group.  Each function rounds exactly as
 * ref.c's scalar code does at the same place: minima and maxima keep the second
 * operand when one is a NaN.
 *
 * Empty unless the including file is compiled for AVX2.
 *
 * Thread:  any; plain values.
 */
#ifndef KERNELS_SIMD_AVX2_H
#define KERNELS_SIMD_AVX2_H

#include <stdint.h>
#include <string.h>

#include "kernels/scalar_math.h"
#include "kernels/unroll.h"

#ifdef __AVX2__

#    include <immintrin.h>

enum {
    SIMD_LANES = 8,
    SIMD_PARTS = 2,     /* registers per row group */
    SIMD_TILE_ROWS = 4, /* activations per pass over the weights */
};

/* Names for registers, so that cpu_ops.h reads the same for both. */
typedef __m256 vf;
typedef __m256i vi;

struct wide {
    __m256 low, high;
};

/* ---- one register ---- */

static inline vf vf_load(const float *at)
{
    return _mm256_loadu_ps(at);
}

static inline vf vf_load_f16(const uint8_t *at)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)at));
}

static inline vf vf_load_bf16(const uint8_t *at)
{
    const __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)at);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

static inline vf vf_load_u8(const uint8_t *at)
{
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)at);
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}

static inline vf vf_load_i8(const uint8_t *at)
{
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)at);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

static inline vf vf_set(float value)
{
    return _mm256_set1_ps(value);
}

static inline vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}

static inline vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline vf vf_negate(vf a)
{
    return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f));
}

static inline vf vf_from_int(vi a)
{
    return _mm256_cvtepi32_ps(a);
}

/* All ones in the first `count` lanes. */
static inline __m256i simd_mask(uint32_t count)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lanes);
}

/* The first `count` lanes; any count. */
static inline void vf_store(float *at, vf a, uint32_t count)
{
    if (count >= SIMD_LANES) {
        _mm256_storeu_ps(at, a);
    } else if (count > 0) {
        _mm256_maskstore_ps(at, simd_mask(count), a);
    }
}

static inline vi vi_load(const uint8_t *at)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)at);
}

static inline vi vi_set(int32_t value)
{
    return _mm256_set1_epi32(value);
}

static inline vi vi_and(vi a, vi b)
{
    return _mm256_and_si256(a, b);
}

static inline vi vi_or(vi a, vi b)
{
    return _mm256_or_si256(a, b);
}

static inline vi vi_add(vi a, vi b)
{
    return _mm256_add_epi32(a, b);
}

static inline vi vi_shift_left(vi a, int count)
{
    return _mm256_slli_epi32(a, count);
}

static inline vi vi_shift_right(vi a, int count)
{
    return _mm256_srli_epi32(a, count);
}

static inline vi vi_shift_right_signed(vi a, int count)
{
    return _mm256_srai_epi32(a, count);
}

static inline vi simd_broadcast_4(const void *at)
{
    int32_t word;
    memcpy(&word, at, sizeof(word));
    return _mm256_set1_epi32(word);
}

/* factor_0 * sums[0] + factor_1 * sums[1] in every lane. */
static inline vi simd_sums(const int16_t *sums, int16_t factor_0, int16_t factor_1)
{
    const uint32_t pair = (uint16_t)factor_0 | (uint32_t)(uint16_t)factor_1 << 16;
    return _mm256_madd_epi16(simd_broadcast_4(sums), _mm256_set1_epi32((int32_t)pair));
}

/* What a block's dots start from: the offset of its quants (8 bits: signed, none) times the
 * activations' sums. */
static inline vi simd_dot_start(const int16_t *sums, const int16_t offsets[2], int bits)
{
    (void)bits;
    const int none = offsets[0] == 0 && offsets[1] == 0;
    return none ? _mm256_setzero_si256() : simd_sums(sums, offsets[0], offsets[1]);
}

/* Step n of `count`: lane r of `dot` gains the products of 4 bytes of q and of a.
 * Quants are unsigned and below 2^bits, activations -127 .. 127: a pair of products is at most
 * 2 * 127 * (2^bits - 1), so 8 pairs of 4 bits, 4 of 5 bits or 2 of 6 bits add up below 2^15 in
 * `pairs` before they are widened.  8 bits are signed: |q| is the unsigned side and its sign moves
 * to a; a pair is at most 2 * 128 * 127 = 32512. */
static inline void simd_dot_step(vi *dot, vi *pairs, vi q, vi a, int n, int count, int bits)
{
    const int run = bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
    const __m256i product = bits == 8
                                ? _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(a, q))
                                : _mm256_maddubs_epi16(q, a);
    *pairs = n % run == 0 ? product : _mm256_add_epi16(*pairs, product);
    if (n % run == run - 1 || n == count - 1) {
        *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(*pairs, _mm256_set1_epi16(1)));
    }
}

static inline void simd_prefetch(const uint8_t *at)
{
    _mm_prefetch((const char *)at, _MM_HINT_T0);
}

/* ---- 16 lanes ---- */

static inline struct wide wide_set(float value)
{
    return (struct wide){_mm256_set1_ps(value), _mm256_set1_ps(value)};
}

static inline struct wide wide_load(const float *at)
{
    return (struct wide){_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}

/* The first `count` lanes (1 .. 16), zeros in the others. */
static inline struct wide wide_load_part(const float *at, uint32_t count)
{
    const struct wide out = {_mm256_maskload_ps(at, simd_mask(count)), _mm256_setzero_ps()};
    if (count <= 8) {
        return out;
    }
    return (struct wide){out.low, _mm256_maskload_ps(at + 8, simd_mask(count - 8))};
}

static inline void wide_store(float *at, struct wide a)
{
    _mm256_storeu_ps(at, a.low);
    _mm256_storeu_ps(at + 8, a.high);
}

static inline void wide_store_part(float *at, struct wide a, uint32_t count)
{
    vf_store(at, a.low, count);
    if (count > 8) {
        vf_store(at + 8, a.high, count - 8);
    }
}

static inline struct wide wide_add(struct wide a, struct wide b)
{
    return (struct wide){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

static inline struct wide wide_sub(struct wide a, struct wide b)
{
    return (struct wide){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}

static inline struct wide wide_mul(struct wide a, struct wide b)
{
    return (struct wide){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

static inline struct wide wide_div(struct wide a, struct wide b)
{
    return (struct wide){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

static inline struct wide wide_fma(struct wide a, struct wide b, struct wide c)
{
    return (struct wide){_mm256_fmadd_ps(a.low, b.low, c.low),
                         _mm256_fmadd_ps(a.high, b.high, c.high)};
}

static inline struct wide wide_max(struct wide a, struct wide b)
{
    return (struct wide){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

static inline struct wide wide_min(struct wide a, struct wide b)
{
    return (struct wide){_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}

static inline struct wide wide_negate(struct wide a)
{
    return (struct wide){vf_negate(a.low), vf_negate(a.high)};
}

static inline struct wide wide_abs(struct wide a)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (struct wide){_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}

/* Lane l takes lane l + 8, then l + 4, l + 2, l + 1. */
static inline float wide_sum(struct wide a)
{
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float wide_largest(struct wide a)
{
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* Lanes rounded to even as int8 (-127 .. 127) to `out`; returns their sum. */
static inline int32_t wide_store_int8(int8_t *out, struct wide a)
{
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i low = _mm256_castsi256_si128(ordered);
    const __m128i high = _mm256_extracti128_si256(ordered, 1);
    _mm_storeu_si128((__m128i *)(void *)out, _mm_packs_epi16(low, high));
    const __m128i fours = _mm_madd_epi16(_mm_add_epi16(low, high), _mm_set1_epi16(1));
    const __m128i twos = _mm_add_epi32(fours, _mm_srli_si128(fours, 8));
    return _mm_cvtsi128_si32(_mm_add_epi32(twos, _mm_srli_si128(twos, 4)));
}

/* math_exp()'s last step: p * 2^n, n in the low bits of `rounded`. */
static inline vf simd_exp_scale(vf p, vf rounded)
{
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(rounded),
                                       _mm256_castps_si256(_mm256_set1_ps(EXP_ROUNDER)));
    const __m256i half = _mm256_srai_epi32(n, 1);
    const __m256i scale_1 = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i rest = _mm256_sub_epi32(n, half);
    const __m256i scale_2 = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
    const __m256 once = _mm256_mul_ps(p, _mm256_castsi256_ps(scale_1));
    return _mm256_mul_ps(once, _mm256_castsi256_ps(scale_2));
}

static inline struct wide wide_exp_scale(struct wide p, struct wide rounded)
{
    return (struct wide){simd_exp_scale(p.low, rounded.low), simd_exp_scale(p.high, rounded.high)};
}

#endif
#endif
