/* matrix_block.h - 32 columns of one row of a quantised matrix, as plain numbers.
 *
 * Both the file's layout and the packed one (matrix_layout.h) are read through
 * this: element c is q[c] * scale[c / 16] + min.  Types without a minimum have
 * min MATRIX_NO_MIN and their offset (8, 16, 32) already taken off q.  All products of a
 * type's own constants are exact in a float, so nothing is rounded here.
 *
 * Thread:  any; plain values.
 * Source:  ggml's block formats, as laid out below:
 *
 *   Q4_0  f16 d, 16 B: byte i = columns i (low nibble), i + 16 (high)        d * (q - 8)
 *   Q4_1  f16 d, f16 m, then as Q4_0                                         d * q + m
 *   Q5_0  f16 d, u32 fifth bits (bit c of column c), then as Q4_0            d * (q - 16)
 *   Q5_1  f16 d, f16 m, u32 fifth bits, then as Q4_0                         d * q + m
 *   Q8_0  f16 d, 32 int8                                                     d * q
 *   Q4_K  256 columns: f16 d, f16 dmin, 12 B with 8 scales and 8 minima of 6 bits, 128 B:
 *         32 bytes for 64 columns each, byte i = columns i (low), i + 32     d sc * q - dmin m
 *   Q5_K  as Q4_K with 32 B of fifth bits before the nibbles: byte i, bit s = column 32 s + i
 *   Q6_K  256 columns: 128 B low nibbles, 64 B upper bit pairs, 16 int8 scales, f16 d;
 *         per 128 columns, 64 and 32 B: block b of 32, column i has its nibble in byte
 *         32 (b % 2) + i (low for b < 2), its pair in bits 2b of byte i      d sc * (q - 32)
 */
#ifndef KERNELS_MATRIX_BLOCK_H
#define KERNELS_MATRIX_BLOCK_H

#include <stdint.h>

#include "kernels/matrix.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MATRIX_NO_MIN (-0.0f) /* adding it changes no float, not even a zero's sign */

enum { MATRIX_BLOCK = 32, MATRIX_HALF_BLOCK = 16, MATRIX_SUPER_BLOCK = 256 };

struct matrix_block {
    int8_t q[MATRIX_BLOCK];
    float scale[2]; /* of columns 0 .. 15 and 16 .. 31; they differ for Q6_K alone */
    float min;
};

/* True for the types that are read in blocks; F32, F16 and BF16 are not. */
int matrix_is_quantised(enum fl_dtype dtype);

/* True for the quantised types with a minimum per block. */
static inline int matrix_has_min(enum fl_dtype dtype)
{
    return dtype == FL_DTYPE_Q4_1 || dtype == FL_DTYPE_Q5_1 || dtype == FL_DTYPE_Q4_K ||
           dtype == FL_DTYPE_Q5_K;
}

/* Block `block` (columns 32 block ..) of a row as it lies in the file. */
void matrix_block_of_file(enum fl_dtype dtype, const void *raw_row, uint32_t block,
                          struct matrix_block *out);

/* The same block of row `row` of a packed matrix. */
void matrix_block_of_packed(const struct matrix *matrix, uint32_t row, uint32_t block,
                            struct matrix_block *out);

/* Element [row, column] of a packed F32, F16 or BF16 matrix. */
float matrix_element(const struct matrix *matrix, uint32_t row, uint32_t column);

/* Scale and minimum `index` (0 .. 7) of a Q4_K or Q5_K super block's 12 bytes. */
static inline void matrix_k_scale(const uint8_t *packed, uint32_t index, uint8_t *out_scale,
                                  uint8_t *out_min)
{
    if (index < 4) {
        *out_scale = packed[index] & 63;
        *out_min = packed[index + 4] & 63;
    } else {
        const uint32_t low = packed[index + 4];
        *out_scale = (uint8_t)((low & 15) | ((uint32_t)packed[index - 4] >> 6 << 4));
        *out_min = (uint8_t)(low >> 4 | ((uint32_t)packed[index] >> 6 << 4));
    }
}

#ifdef __cplusplus
}
#endif
#endif
