/* scalar_math.h - the few transcendental functions on the way to a token.
 *
 * A math library may pick another polynomial on another CPU or in another
 * release, and one bit is enough to change a token.  These use only + - * / and
 * fma, each rounded once as IEEE 754 says, so every CPU and every compiler give
 * the same bits.  The SIMD backends repeat math_exp() lane by lane, in the same
 * order, with the constants below.
 *
 * Accuracy (tests/kernels/test_scalar_math.c measures it): math_exp() within
 * 1.5 ulp; the double functions within 1e-14 relative, sine and cosine within
 * 2e-16 absolute for |x| up to 2e6.
 *
 * Thread:  any.
 * Source:  Cody and Waite, Software Manual for the Elementary Functions, 1980
 *          (range reduction); the polynomials are Taylor's.
 */
#ifndef KERNELS_SCALAR_MATH_H
#define KERNELS_SCALAR_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/half.h"

#ifdef __cplusplus
extern "C" {
#endif

/* exp(x) = 2^n * p(r), n = round(x / ln 2), |r| <= ln 2 / 2. */
#define EXP_MIN      (-105.0f) /* exp gives 0 from here down */
#define EXP_MAX      89.5f     /* and infinity from here up */
#define EXP_LOG2_E   0x1.715476p+0f
#define EXP_ROUNDER  0x1.8p23f /* adding it leaves round(x) in the low bits */
#define EXP_LN2_HIGH 0x1.62e4p-1f
#define EXP_LN2_LOW  0x1.7f7d1cp-20f
#define EXP_C2       (1.0f / 2)
#define EXP_C3       (1.0f / 6)
#define EXP_C4       (1.0f / 24)
#define EXP_C5       (1.0f / 120)
#define EXP_C6       (1.0f / 720)
#define EXP_C7       (1.0f / 5040)

/* gelu(x) = x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))), the tanh form rewritten. */
#define GELU_FACTOR (-0x1.988454p+0f) /* -2 sqrt(2 / pi) */
#define GELU_CUBE   0.044715f

/* e^x; 0 below EXP_MIN, infinity above EXP_MAX, NaN for NaN. */
float math_exp(float x);

/* x / (1 + e^-x), and GELU in its tanh form. */
float math_silu(float x);
float math_gelu(float x);

/* 2^x for |x| < 1000, log2 and ln of a positive normal number, base^exponent for base > 0. */
double math_exp2(double x);
double math_log2(double x);
double math_log(double x);
double math_pow(double base, double exponent);

/* Sine and cosine of x, |x| <= 2e6.  Without a branch, so that loops over it vectorise. */
static inline void math_sincos(double x, double *out_sin, double *out_cos)
{
    /* x = n * pi/2 + r; pi/2 in two parts of 53 bits each, so that fma loses nothing that counts. */
    const double rounder = 0x1.8p52;
    const double turns = fma(x, 0x1.45f306dc9c883p-1, rounder);
    uint64_t bits;
    memcpy(&bits, &turns, sizeof(bits));
    const double n = turns - rounder;
    double r = fma(n, -0x1.921fb54442d18p+0, x);
    r = fma(n, -0x1.1a62633145c07p-54, r);
    const double r2 = r * r;

    double s = fma(r2, -1.0 / 1307674368000.0, 1.0 / 6227020800.0);
    s = fma(s, r2, -1.0 / 39916800.0);
    s = fma(s, r2, 1.0 / 362880.0);
    s = fma(s, r2, -1.0 / 5040.0);
    s = fma(s, r2, 1.0 / 120.0);
    s = fma(s, r2, -1.0 / 6.0);
    s = fma(s * r2, r, r);

    double c = fma(r2, 1.0 / 20922789888000.0, -1.0 / 87178291200.0);
    c = fma(c, r2, 1.0 / 479001600.0);
    c = fma(c, r2, -1.0 / 3628800.0);
    c = fma(c, r2, 1.0 / 40320.0);
    c = fma(c, r2, -1.0 / 720.0);
    c = fma(c, r2, 1.0 / 24.0);
    c = fma(c, r2, -1.0 / 2.0);
    c = fma(c, r2, 1.0);

    /* Quadrants: odd ones swap, 2 and 3 negate the sine, 1 and 2 the cosine. */
    const uint64_t swap = 0 - (bits & 1);
    uint64_t s_bits, c_bits;
    memcpy(&s_bits, &s, sizeof(s_bits));
    memcpy(&c_bits, &c, sizeof(c_bits));
    const uint64_t sin_bits = ((c_bits & swap) | (s_bits & ~swap)) ^ ((bits & 2) << 62);
    const uint64_t cos_bits = ((s_bits & swap) | (c_bits & ~swap)) ^ (((bits + 1) & 2) << 62);
    memcpy(out_sin, &sin_bits, sizeof(*out_sin));
    memcpy(out_cos, &cos_bits, sizeof(*out_cos));
}

#ifdef __cplusplus
}
#endif
#endif
