/* half.h - the two 16-bit float formats as floats.
 *
 * Both conversions are exact, so every CPU agrees on them.  F16's quiet and
 * signalling NaNs stay NaNs.
 *
 * Thread:  any.
 * Source:  IEEE 754-2019 binary16; bfloat16 is the upper half of binary32.
 */
#ifndef KERNELS_HALF_H
#define KERNELS_HALF_H

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

static inline float float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float bf16_to_float(uint16_t bits)
{
    return float_from_bits((uint32_t)bits << 16);
}

static inline float f16_to_float(uint16_t bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 31u;
    const uint32_t fraction = bits & 0x3ffu;
    if (exponent == 31) {
        return float_from_bits(sign | 0x7f800000u | (fraction << 13) |
                               (fraction != 0 ? 0x400000u : 0));
    }
    if (exponent == 0) {
        const float magnitude = (float)fraction * 0x1p-24f; /* exact, subnormals and zero */
        return float_from_bits(sign | float_bits(magnitude));
    }
    return float_from_bits(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

#ifdef __cplusplus
}
#endif
#endif
