/* emulate_avx512.h - AVX-512 intrinsics on a CPU with AVX2, through SIMDe.
 *
 * Forced in front of kernels/cpu_avx512.c when the tests compile it a second
 * time.  Below are the few that SIMDe 0.7.2 or 0.7.4 lack.
 */
#ifndef TESTS_KERNELS_EMULATE_AVX512_H
#define TESTS_KERNELS_EMULATE_AVX512_H

#define SIMD_EMULATED
#define SIMDE_ENABLE_NATIVE_ALIASES
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#include <simde/x86/avx512.h>
#pragma GCC diagnostic pop
#include <math.h>
#include <string.h>

static inline __m512 emulate_cvtph_ps(__m256i a)
{
    float lanes[16];
    _mm256_storeu_ps(lanes, _mm256_cvtph_ps(_mm256_castsi256_si128(a)));
    _mm256_storeu_ps(lanes + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
    return _mm512_loadu_ps(lanes);
}

static inline __m512 emulate_maskz_loadu_ps(uint32_t mask, const float *at)
{
    float lanes[16];
    for (int i = 0; i < 16; i++) {
        lanes[i] = mask >> i & 1 ? at[i] : 0.0f;
    }
    return _mm512_loadu_ps(lanes);
}

static inline void emulate_mask_storeu_ps(float *at, uint32_t mask, __m512 a)
{
    float lanes[16];
    _mm512_storeu_ps(lanes, a);
    for (int i = 0; i < 16; i++) {
        if (mask >> i & 1) {
            at[i] = lanes[i];
        }
    }
}

static inline __m512 emulate_cvtepi32_ps(__m512i a)
{
    int32_t from[16];
    float lanes[16];
    _mm512_storeu_si512(from, a);
    for (int i = 0; i < 16; i++) {
        lanes[i] = (float)from[i];
    }
    return _mm512_loadu_ps(lanes);
}

static inline __m512i emulate_cvtps_epi32(__m512 a)
{
    float from[16];
    int32_t lanes[16];
    _mm512_storeu_ps(from, a);
    for (int i = 0; i < 16; i++) {
        lanes[i] = (int32_t)lrintf(from[i]);
    }
    return _mm512_loadu_si512(lanes);
}

static inline __m512i emulate_cvtepu8_epi32(__m128i a)
{
    uint8_t from[16];
    int32_t lanes[16];
    memcpy(from, &a, sizeof(from));
    for (int i = 0; i < 16; i++) {
        lanes[i] = from[i];
    }
    return _mm512_loadu_si512(lanes);
}

static inline __m512i emulate_cvtepi8_epi32(__m128i a)
{
    int8_t from[16];
    int32_t lanes[16];
    memcpy(from, &a, sizeof(from));
    for (int i = 0; i < 16; i++) {
        lanes[i] = from[i]; /* NOLINT(bugprone-signed-char-misuse): with its sign */
    }
    return _mm512_loadu_si512(lanes);
}

static inline __m512i emulate_cvtepu16_epi32(__m256i a)
{
    uint16_t from[16];
    int32_t lanes[16];
    memcpy(from, &a, sizeof(from));
    for (int i = 0; i < 16; i++) {
        lanes[i] = from[i];
    }
    return _mm512_loadu_si512(lanes);
}

static inline __m128i emulate_cvtepi32_epi8(__m512i a)
{
    int32_t from[16];
    int8_t lanes[16];
    __m128i out;
    _mm512_storeu_si512(from, a);
    for (int i = 0; i < 16; i++) {
        lanes[i] = (int8_t)from[i];
    }
    memcpy(&out, lanes, sizeof(out));
    return out;
}

static inline __m512i emulate_srai_epi32(__m512i a, unsigned count)
{
    int32_t lanes[16];
    _mm512_storeu_si512(lanes, a);
    for (int i = 0; i < 16; i++) {
        lanes[i] >>= count;
    }
    return _mm512_loadu_si512(lanes);
}

static inline int32_t emulate_reduce_add_epi32(__m512i a)
{
    int32_t lanes[16];
    int32_t sum = 0;
    _mm512_storeu_si512(lanes, a);
    for (int i = 0; i < 16; i++) {
        sum += lanes[i];
    }
    return sum;
}

/* Four products of an unsigned and a signed byte, added to each lane. */
static inline __m512i emulate_dpbusd_epi32(__m512i sum, __m512i a, __m512i b)
{
    uint8_t left[64];
    int8_t right[64];
    int32_t lanes[16];
    memcpy(left, &a, sizeof(left));
    memcpy(right, &b, sizeof(right));
    _mm512_storeu_si512(lanes, sum);
    for (int i = 0; i < 64; i++) {
        lanes[i / 4] += left[i] * right[i];
    }
    return _mm512_loadu_si512(lanes);
}

/* The compiler's names, as the kernels write them. */
/* NOLINTBEGIN(bugprone-reserved-identifier) */
#undef _mm512_madd_epi16 /* SIMDe's own alias takes four arguments */
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32(sum, a, b)     emulate_dpbusd_epi32(sum, a, b)
#define _mm512_cvtph_ps(a)                 emulate_cvtph_ps(a)
#define _mm512_maskz_loadu_ps(mask, at)    emulate_maskz_loadu_ps(mask, at)
#define _mm512_mask_storeu_ps(at, mask, a) emulate_mask_storeu_ps(at, mask, a)
#define _mm512_cvtepi32_ps(a)              emulate_cvtepi32_ps(a)
#define _mm512_cvtps_epi32(a)              emulate_cvtps_epi32(a)
#define _mm512_cvtepu8_epi32(a)            emulate_cvtepu8_epi32(a)
#define _mm512_cvtepi8_epi32(a)            emulate_cvtepi8_epi32(a)
#define _mm512_cvtepu16_epi32(a)           emulate_cvtepu16_epi32(a)
#define _mm512_cvtepi32_epi8(a)            emulate_cvtepi32_epi8(a)
#define _mm512_srai_epi32(a, count)        emulate_srai_epi32(a, count)
#define _mm512_reduce_add_epi32(a)         emulate_reduce_add_epi32(a)
/* NOLINTEND(bugprone-reserved-identifier) */

#endif
