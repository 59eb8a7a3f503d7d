/* matrix_layout.h - where things lie in a packed matrix.
 *
 * A matrix is a run of groups of 16 rows.  F32, F16 and BF16 hold [K, 16]
 * elements per group.  Quantised types hold blocks of 32 columns x 16 rows, the
 * K types super blocks of 8 of them:
 *
 *   nibbles, 256 B   four registers of 64 B; lane r of register j are 4 bytes of row r: byte i
 *                    has column 4j + i in its low and column 16 + 4j + i in its high half
 *   fifth bits, 64 B lane r is a word of row r: bit j of byte i belongs to column 4j + i
 *   pairs, 128 B     (Q6_K) lane r of register h: bits 2m of byte i belong to column
 *                    4 (4h + m) + i
 *   int8, 512 B      (Q8_0) lane r of register j: byte i is column 4j + i
 *   scales           [16] f16, one per row; K types: [16] bytes per block (Q6_K: half block)
 *
 * so that a register of quants is an operand of VPDPBUSD (or VPMADDUBSW, half of it) and one
 * lane is one row.
 *
 * Thread:  any; constants.
 * Units:   offsets in bytes.
 */
#ifndef KERNELS_MATRIX_LAYOUT_H
#define KERNELS_MATRIX_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/matrix_block.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LAYOUT_REGISTER = 64,   /* 16 lanes of 4 bytes */
    LAYOUT_NIBBLES = 256,   /* of a block */
    LAYOUT_BITS = 64,       /* fifth bits of a block */
    LAYOUT_PAIRS = 128,     /* upper bit pairs of a block */
    LAYOUT_F16_SCALES = 32, /* 16 rows */
    LAYOUT_U8_SCALES = 16,

    /* Q4_K and Q5_K super blocks */
    LAYOUT_K_D = 0,
    LAYOUT_K_DMIN = LAYOUT_K_D + LAYOUT_F16_SCALES,
    LAYOUT_K_SCALES = LAYOUT_K_DMIN + LAYOUT_F16_SCALES,
    LAYOUT_K_MINS = LAYOUT_K_SCALES + 8 * LAYOUT_U8_SCALES,
    LAYOUT_K_QUANTS = LAYOUT_K_MINS + 8 * LAYOUT_U8_SCALES,

    /* Q6_K super blocks */
    LAYOUT_6_D = 0,
    LAYOUT_6_SCALES = LAYOUT_6_D + LAYOUT_F16_SCALES,
    LAYOUT_6_QUANTS = LAYOUT_6_SCALES + 16 * LAYOUT_U8_SCALES,
};

/* Where the parts of one block are, from the start of its group. */
struct layout_block {
    size_t quants; /* nibbles, or int8 */
    size_t bits;   /* fifth bits or pairs, where the type has them */
    size_t d;      /* [16] f16 */
    size_t m;      /* [16] f16: minima (Q4_1, Q5_1) or dmin (K types) */
    size_t scales; /* [16] bytes, K types; Q6_K: [2][16] */
    size_t mins;   /* [16] bytes, Q4_K and Q5_K */
};

/* Bytes of 16 rows x one block (K types: super block; unquantised: one column). */
static inline size_t layout_unit_size(enum fl_dtype dtype)
{
    switch (dtype) {
    case FL_DTYPE_F32: return 64;
    case FL_DTYPE_F16:
    case FL_DTYPE_BF16: return 32;
    case FL_DTYPE_Q4_0: return LAYOUT_NIBBLES + LAYOUT_F16_SCALES;
    case FL_DTYPE_Q4_1: return LAYOUT_NIBBLES + 2 * LAYOUT_F16_SCALES;
    case FL_DTYPE_Q5_0: return LAYOUT_NIBBLES + LAYOUT_BITS + LAYOUT_F16_SCALES;
    case FL_DTYPE_Q5_1: return LAYOUT_NIBBLES + LAYOUT_BITS + 2 * LAYOUT_F16_SCALES;
    case FL_DTYPE_Q8_0: return 2 * LAYOUT_NIBBLES + LAYOUT_F16_SCALES;
    case FL_DTYPE_Q4_K: return LAYOUT_K_QUANTS + 8 * LAYOUT_NIBBLES;
    case FL_DTYPE_Q5_K: return LAYOUT_K_QUANTS + 8 * (LAYOUT_NIBBLES + LAYOUT_BITS);
    case FL_DTYPE_Q6_K: return LAYOUT_6_QUANTS + 8 * (LAYOUT_NIBBLES + LAYOUT_PAIRS);
    }
    return 0;
}

/* Columns of a unit. */
static inline uint32_t layout_unit_columns(enum fl_dtype dtype)
{
    switch (dtype) {
    case FL_DTYPE_F32:
    case FL_DTYPE_F16:
    case FL_DTYPE_BF16: return 1;
    case FL_DTYPE_Q4_K:
    case FL_DTYPE_Q5_K:
    case FL_DTYPE_Q6_K: return MATRIX_SUPER_BLOCK;
    case FL_DTYPE_Q4_0:
    case FL_DTYPE_Q4_1:
    case FL_DTYPE_Q5_0:
    case FL_DTYPE_Q5_1:
    case FL_DTYPE_Q8_0: return MATRIX_BLOCK;
    }
    return 1;
}

/* Bytes of a group of 16 rows. */
static inline size_t layout_group_size(enum fl_dtype dtype, uint32_t columns)
{
    return columns / layout_unit_columns(dtype) * layout_unit_size(dtype);
}

/* The parts of block `block` of a quantised type. */
static inline struct layout_block layout_block_at(enum fl_dtype dtype, uint32_t block)
{
    struct layout_block at = {0, 0, 0, 0, 0, 0};
    const size_t at_unit = block % 8; /* of a K-quant's */
    if (dtype == FL_DTYPE_Q4_K || dtype == FL_DTYPE_Q5_K) {
        const size_t super = block / 8 * layout_unit_size(dtype);
        const size_t quants = LAYOUT_NIBBLES + (dtype == FL_DTYPE_Q5_K ? LAYOUT_BITS : 0);
        at.d = super + LAYOUT_K_D;
        at.m = super + LAYOUT_K_DMIN;
        at.scales = super + LAYOUT_K_SCALES + at_unit * LAYOUT_U8_SCALES;
        at.mins = super + LAYOUT_K_MINS + at_unit * LAYOUT_U8_SCALES;
        at.quants = super + LAYOUT_K_QUANTS + at_unit * quants;
        at.bits = at.quants + LAYOUT_NIBBLES;
    } else if (dtype == FL_DTYPE_Q6_K) {
        const size_t super = block / 8 * layout_unit_size(dtype);
        at.d = super + LAYOUT_6_D;
        at.scales = super + LAYOUT_6_SCALES + at_unit * 2 * LAYOUT_U8_SCALES;
        at.quants = super + LAYOUT_6_QUANTS + at_unit * (LAYOUT_NIBBLES + LAYOUT_PAIRS);
        at.bits = at.quants + LAYOUT_NIBBLES;
    } else {
        at.quants = block * layout_unit_size(dtype);
        at.bits = at.quants + LAYOUT_NIBBLES;
        at.d = at.bits;
        if (dtype == FL_DTYPE_Q5_0 || dtype == FL_DTYPE_Q5_1) {
            at.d += LAYOUT_BITS;
        } else if (dtype == FL_DTYPE_Q8_0) {
            at.d += LAYOUT_NIBBLES;
        }
        at.m = at.d + LAYOUT_F16_SCALES;
    }
    return at;
}

#ifdef __cplusplus
}
#endif
#endif
