#include "kernels/scalar_math.h"

#include "proto/base/check.h"

float math_exp(float x)
{
    const float low = EXP_MIN > x ? EXP_MIN : x; /* written so that a NaN passes */
    const float clamped = EXP_MAX < low ? EXP_MAX : low;
    const float rounded = fmaf(clamped, EXP_LOG2_E, EXP_ROUNDER);
    const int32_t n = (int32_t)(float_bits(rounded) - float_bits(EXP_ROUNDER));
    const float n_float = rounded - EXP_ROUNDER;
    float r = fmaf(n_float, -EXP_LN2_HIGH, clamped);
    r = fmaf(n_float, -EXP_LN2_LOW, r);

    float p = fmaf(EXP_C7, r, EXP_C6);
    p = fmaf(p, r, EXP_C5);
    p = fmaf(p, r, EXP_C4);
    p = fmaf(p, r, EXP_C3);
    p = fmaf(p, r, EXP_C2);
    p = fmaf(p * r, r, r);
    p = p + 1.0f;

    /* 2^n in two factors: n may leave the range of normal exponents. */
    const int32_t half = n >> 1;
    const float scale_1 = float_from_bits((uint32_t)(half + 127) << 23);
    const float scale_2 = float_from_bits((uint32_t)(n - half + 127) << 23);
    return p * scale_1 * scale_2;
}

float math_silu(float x)
{
    return x / (1.0f + math_exp(-x));
}

float math_gelu(float x)
{
    const float cube = GELU_CUBE * x * x;
    const float inner = fmaf(cube, x, x);
    return x / (1.0f + math_exp(GELU_FACTOR * inner));
}

double math_exp2(double x)
{
    FL_ASSERT(x > -1000.0 && x < 1000.0);
    const double rounder = 0x1.8p52;
    const double rounded = x + rounder;
    uint64_t bits;
    memcpy(&bits, &rounded, sizeof(bits));
    const double r = (x - (rounded - rounder)) * 0x1.62e42fefa39efp-1; /* ln 2 */
    double p = 1.0;
    for (int i = 14; i >= 1; i--) {
        p = fma(p, r / i, 1.0); /* Taylor by Horner: 1 + r/1 (1 + r/2 (1 + ..)) */
    }
    const uint64_t scale_bits = (bits + 1023) << 52; /* the low bits of `bits` are round(x) */
    double scale;
    memcpy(&scale, &scale_bits, sizeof(scale));
    return p * scale;
}

double math_log2(double x)
{
    FL_ASSERT(x >= 0x1p-1022 && x <= 0x1.fffffffffffffp1023);
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    int exponent = (int)(bits >> 52) - 1023;
    const uint64_t m_bits = (bits & UINT64_C(0xfffffffffffff)) | UINT64_C(0x3ff0000000000000);
    double m;
    memcpy(&m, &m_bits, sizeof(m));
    if (m > 0x1.6a09e667f3bcdp+0) { /* sqrt 2 */
        m = m * 0.5;
        exponent++;
    }
    /* ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| <= 0.172 */
    const double s = (m - 1.0) / (m + 1.0);
    const double s2 = s * s;
    double p = 1.0 / 25.0;
    for (int i = 23; i >= 1; i -= 2) {
        p = fma(p, s2, 1.0 / i);
    }
    return fma(2.0 * s * p, 0x1.71547652b82fep+0, exponent);
}

double math_log(double x)
{
    return math_log2(x) * 0x1.62e42fefa39efp-1;
}

double math_pow(double base, double exponent)
{
    return math_exp2(math_log2(base) * exponent);
}
