/* dequantize.c - rows as they lie in the file, as numbers (formats in matrix_block.h). */
#include <string.h>

#include "kernels/half.h"
#include "kernels/matrix_block.h"

static float read_f16(const uint8_t *at)
{
    uint16_t bits;
    memcpy(&bits, at, sizeof(bits));
    return f16_to_float(bits);
}

int matrix_is_quantised(enum fl_dtype dtype)
{
    return dtype != FL_DTYPE_F32 && dtype != FL_DTYPE_F16 && dtype != FL_DTYPE_BF16;
}

static void scales_set(struct matrix_block *out, float scale, float min)
{
    out->scale[0] = scale;
    out->scale[1] = scale;
    out->min = min;
}

/* Q4_0, Q4_1, Q5_0, Q5_1: 16 bytes of nibbles and 32 fifth bits. */
static void nibbles_read(const uint8_t *nibbles, uint32_t fifth_bits, int offset, int8_t *q)
{
    for (uint32_t i = 0; i < MATRIX_HALF_BLOCK; i++) {
        const uint32_t low = (nibbles[i] & 15u) | (fifth_bits >> i & 1) << 4;
        const uint32_t high = (uint32_t)nibbles[i] >> 4 | (fifth_bits >> (i + 16) & 1) << 4;
        q[i] = (int8_t)((int)low - offset);
        q[i + MATRIX_HALF_BLOCK] = (int8_t)((int)high - offset);
    }
}

/* Q4_K, Q5_K: `fifth_bits` is NULL for Q4_K; `sub` counts blocks of 32 in the super block. */
static void k_read(const uint8_t *super, const uint8_t *fifth_bits, const uint8_t *nibbles,
                   uint32_t sub, struct matrix_block *out)
{
    uint8_t scale, min;
    matrix_k_scale(super + 4, sub, &scale, &min);
    scales_set(out, read_f16(super) * (float)scale, -(read_f16(super + 2) * (float)min));
    for (uint32_t i = 0; i < MATRIX_BLOCK; i++) {
        const uint32_t byte = nibbles[sub / 2 * 32 + i];
        const uint32_t fifth = fifth_bits != NULL ? (uint32_t)fifth_bits[i] >> sub & 1 : 0;
        out->q[i] = (int8_t)((sub % 2 == 0 ? byte & 15 : byte >> 4) | fifth << 4);
    }
}

static void q6_k_read(const uint8_t *super, uint32_t sub, struct matrix_block *out)
{
    const uint8_t *low = super + sub / 4 * 64 + sub % 2 * 32;
    const uint8_t *pairs = super + 128 + sub / 4 * 32;
    const int8_t *scales = (const int8_t *)super + 192;
    const float d = read_f16(super + 208);
    for (uint32_t i = 0; i < MATRIX_BLOCK; i++) {
        const uint32_t nibble = sub % 4 < 2 ? low[i] & 15u : (uint32_t)low[i] >> 4;
        const uint32_t pair = (uint32_t)pairs[i] >> (sub % 4 * 2) & 3;
        out->q[i] = (int8_t)((int)(nibble | pair << 4) - 32);
    }
    out->scale[0] = d * (float)scales[sub * 2];
    out->scale[1] = d * (float)scales[sub * 2 + 1];
    out->min = MATRIX_NO_MIN;
}

void matrix_block_of_file(enum fl_dtype dtype, const void *raw_row, uint32_t block,
                          struct matrix_block *out)
{
    const uint32_t per_unit = fl_dtype_block_length(dtype) / MATRIX_BLOCK;
    const uint8_t *unit =
        (const uint8_t *)raw_row + (size_t)(block / per_unit) * fl_dtype_block_size(dtype);
    const uint32_t sub = block % per_unit;
    uint32_t bits = 0;
    switch (dtype) {
    case FL_DTYPE_Q4_0:
        scales_set(out, read_f16(unit), MATRIX_NO_MIN);
        nibbles_read(unit + 2, 0, 8, out->q);
        break;
    case FL_DTYPE_Q4_1:
        scales_set(out, read_f16(unit), read_f16(unit + 2));
        nibbles_read(unit + 4, 0, 0, out->q);
        break;
    case FL_DTYPE_Q5_0:
        memcpy(&bits, unit + 2, sizeof(bits));
        scales_set(out, read_f16(unit), MATRIX_NO_MIN);
        nibbles_read(unit + 6, bits, 16, out->q);
        break;
    case FL_DTYPE_Q5_1:
        memcpy(&bits, unit + 4, sizeof(bits));
        scales_set(out, read_f16(unit), read_f16(unit + 2));
        nibbles_read(unit + 8, bits, 0, out->q);
        break;
    case FL_DTYPE_Q8_0:
        scales_set(out, read_f16(unit), MATRIX_NO_MIN);
        memcpy(out->q, unit + 2, MATRIX_BLOCK);
        break;
    case FL_DTYPE_Q4_K: k_read(unit, NULL, unit + 16, sub, out); break;
    case FL_DTYPE_Q5_K: k_read(unit, unit + 16, unit + 48, sub, out); break;
    case FL_DTYPE_Q6_K: q6_k_read(unit, sub, out); break;
    case FL_DTYPE_F32:
    case FL_DTYPE_F16:
    case FL_DTYPE_BF16: FL_ASSERT(matrix_is_quantised(dtype));
    }
}

static void unquantised_row(enum fl_dtype dtype, const void *raw, uint32_t columns, float *out)
{
    if (dtype == FL_DTYPE_F32) {
        memcpy(out, raw, (size_t)columns * sizeof(*out));
        return;
    }
    for (size_t k = 0; k < columns; k++) {
        uint16_t bits;
        memcpy(&bits, (const uint8_t *)raw + k * sizeof(bits), sizeof(bits));
        out[k] = dtype == FL_DTYPE_F16 ? f16_to_float(bits) : bf16_to_float(bits);
    }
}

void matrix_dequantize_row(enum fl_dtype dtype, const void *raw, uint32_t columns, float *out)
{
    FL_ASSERT(columns % fl_dtype_block_length(dtype) == 0);
    if (!matrix_is_quantised(dtype)) {
        unquantised_row(dtype, raw, columns, out);
        return;
    }
    for (uint32_t block = 0; block < columns / MATRIX_BLOCK; block++) {
        struct matrix_block b;
        matrix_block_of_file(dtype, raw, block, &b);
        for (size_t i = 0; i < MATRIX_BLOCK; i++) {
            const float product = (float)b.q[i] * b.scale[i / MATRIX_HALF_BLOCK];
            out[(size_t)block * MATRIX_BLOCK + i] = product + b.min;
        }
    }
}
