/* matrix.c - from the file's layout to the packed one (matrix_layout.h), and back row by row. */
#include "kernels/matrix.h"

#include <string.h>

#include "kernels/half.h"
#include "kernels/matrix_layout.h"

static uint32_t load_u32(const uint8_t *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof(word));
    return word;
}

static void store_u32(uint8_t *at, uint32_t word)
{
    memcpy(at, &word, sizeof(word));
}

size_t matrix_packed_size(enum fl_dtype dtype, uint32_t rows, uint32_t columns)
{
    const size_t groups = ((size_t)rows + MATRIX_ROW_GROUP - 1) / MATRIX_ROW_GROUP;
    const size_t size = groups * layout_group_size(dtype, columns);
    return (size + MATRIX_ALIGNMENT - 1) / MATRIX_ALIGNMENT * MATRIX_ALIGNMENT;
}

/* Bit 4j + i of `bits` becomes bit 8i + j: every step swaps two digits of the bit's number. */
static uint32_t fifth_bits_spread(uint32_t bits)
{
    uint32_t x = bits;
    /* Two perfect unshuffles: the two lowest digits of the number become the two highest. */
    for (int turn = 0; turn < 2; turn++) {
        uint32_t t = (x ^ x >> 1) & 0x22222222u;
        x ^= t ^ t << 1;
        t = (x ^ x >> 2) & 0x0c0c0c0cu;
        x ^= t ^ t << 2;
        t = (x ^ x >> 4) & 0x00f000f0u;
        x ^= t ^ t << 4;
        t = (x ^ x >> 8) & 0x0000ff00u;
        x ^= t ^ t << 8;
    }
    return x;
}

/* Where one row's parts of one block or super block go. */
struct pack_target {
    uint8_t *unit; /* of the packed group */
    uint32_t lane;
};

static void pack_f16(const struct pack_target *to, size_t offset, const uint8_t *from)
{
    memcpy(to->unit + offset + to->lane * 2, from, 2);
}

static void pack_nibbles(const struct pack_target *to, size_t offset, const uint8_t *from)
{
    for (uint32_t j = 0; j < 4; j++) {
        store_u32(to->unit + offset + j * LAYOUT_REGISTER + to->lane * 4, load_u32(from + j * 4));
    }
}

/* Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. */
static void pack_block(enum fl_dtype dtype, const uint8_t *raw, const struct pack_target *to)
{
    const struct layout_block at = layout_block_at(dtype, 0);
    const int has_min = dtype == FL_DTYPE_Q4_1 || dtype == FL_DTYPE_Q5_1;
    const int has_bits = dtype == FL_DTYPE_Q5_0 || dtype == FL_DTYPE_Q5_1;
    const uint8_t *from = raw;
    pack_f16(to, at.d, from);
    from += 2;
    if (has_min) {
        pack_f16(to, at.m, from);
        from += 2;
    }
    if (has_bits) {
        store_u32(to->unit + at.bits + to->lane * 4, fifth_bits_spread(load_u32(from)));
        from += 4;
    }
    pack_nibbles(to, at.quants, from);
    if (dtype == FL_DTYPE_Q8_0) {
        pack_nibbles(to, at.quants + LAYOUT_NIBBLES, from + 16);
    }
}

/* Q4_K, Q5_K. */
static void pack_k(enum fl_dtype dtype, const uint8_t *raw, const struct pack_target *to)
{
    const uint8_t *fifth_bits = raw + 16;
    const uint8_t *nibbles = raw + (dtype == FL_DTYPE_Q5_K ? 48 : 16);
    pack_f16(to, LAYOUT_K_D, raw);
    pack_f16(to, LAYOUT_K_DMIN, raw + 2);
    for (uint32_t sub = 0; sub < 8; sub++) {
        const struct layout_block at = layout_block_at(dtype, sub);
        matrix_k_scale(raw + 4, sub, to->unit + at.scales + to->lane,
                       to->unit + at.mins + to->lane);
        const uint8_t *from = nibbles + sub / 2 * 32;
        const uint32_t shift = sub % 2 * 4;
        uint8_t *lane = to->unit + at.quants + to->lane * 4;
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t low = load_u32(from + 4 * j) >> shift & 0x0f0f0f0fu;
            const uint32_t high = load_u32(from + 16 + 4 * j) >> shift & 0x0f0f0f0fu;
            store_u32(lane + j * LAYOUT_REGISTER, low | high << 4);
        }
        if (dtype == FL_DTYPE_Q5_K) {
            uint32_t bits = 0;
            for (uint32_t j = 0; j < 8; j++) {
                bits |= (load_u32(fifth_bits + 4 * j) >> sub & 0x01010101u) << j;
            }
            store_u32(to->unit + at.bits + to->lane * 4, bits);
        }
    }
}

static void pack_q6_k(const uint8_t *raw, const struct pack_target *to)
{
    pack_f16(to, LAYOUT_6_D, raw + 208);
    for (uint32_t sub = 0; sub < 8; sub++) {
        const struct layout_block at = layout_block_at(FL_DTYPE_Q6_K, sub);
        const uint8_t *nibbles = raw + sub / 4 * 64 + sub % 2 * 32;
        const uint8_t *pairs = raw + 128 + sub / 4 * 32;
        const uint32_t nibble_shift = sub % 4 / 2 * 4;
        const uint32_t pair_shift = sub % 4 * 2;
        uint8_t *lane = to->unit + at.quants + to->lane * 4;
        to->unit[at.scales + to->lane] = raw[192 + sub * 2];
        to->unit[at.scales + LAYOUT_U8_SCALES + to->lane] = raw[192 + sub * 2 + 1];
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t low = load_u32(nibbles + 4 * j) >> nibble_shift & 0x0f0f0f0fu;
            const uint32_t high = load_u32(nibbles + 16 + 4 * j) >> nibble_shift & 0x0f0f0f0fu;
            store_u32(lane + j * LAYOUT_REGISTER, low | high << 4);
        }
        for (uint32_t h = 0; h < 2; h++) {
            uint32_t word = 0;
            for (uint32_t m = 0; m < 4; m++) {
                const uint32_t pair = load_u32(pairs + 4 * (4 * h + m)) >> pair_shift;
                word |= (pair & 0x03030303u) << 2 * m;
            }
            store_u32(to->unit + at.bits + h * LAYOUT_REGISTER + to->lane * 4, word);
        }
    }
}

static void pack_unit(enum fl_dtype dtype, const uint8_t *raw, const struct pack_target *to)
{
    switch (dtype) {
    case FL_DTYPE_F32:
    case FL_DTYPE_F16:
    case FL_DTYPE_BF16: break; /* pack_elements() */
    case FL_DTYPE_Q4_0: pack_block(FL_DTYPE_Q4_0, raw, to); break;
    case FL_DTYPE_Q4_1: pack_block(FL_DTYPE_Q4_1, raw, to); break;
    case FL_DTYPE_Q5_0: pack_block(FL_DTYPE_Q5_0, raw, to); break;
    case FL_DTYPE_Q5_1: pack_block(FL_DTYPE_Q5_1, raw, to); break;
    case FL_DTYPE_Q8_0: pack_block(FL_DTYPE_Q8_0, raw, to); break;
    case FL_DTYPE_Q4_K: pack_k(FL_DTYPE_Q4_K, raw, to); break;
    case FL_DTYPE_Q5_K: pack_k(FL_DTYPE_Q5_K, raw, to); break;
    case FL_DTYPE_Q6_K: pack_q6_k(raw, to); break;
    }
}

/* F32, F16, BF16: a group's rows, `size` bytes an element (a constant, so that it is a move). */
static inline void pack_elements(const uint8_t *raw, size_t row_size, uint32_t lanes,
                                 uint32_t columns, size_t size, uint8_t *group)
{
    for (size_t k = 0; k < columns; k++) {
        uint8_t *unit = group + k * MATRIX_ROW_GROUP * size;
        for (size_t lane = 0; lane < lanes; lane++) {
            memcpy(unit + lane * size, raw + lane * row_size + k * size, size);
        }
    }
}

void matrix_pack_rows(enum fl_dtype dtype, uint32_t columns, const void *raw, uint32_t row_first,
                      uint32_t row_count, void *packed)
{
    FL_ASSERT(row_first % MATRIX_ROW_GROUP == 0);
    FL_ASSERT(columns % fl_dtype_block_length(dtype) == 0);
    const size_t block_size = fl_dtype_block_size(dtype);
    const uint32_t units = columns / layout_unit_columns(dtype);
    const size_t unit_size = layout_unit_size(dtype);
    const size_t group_size = units * unit_size;
    const size_t row_size = units * block_size;
    const uint8_t *from = raw;
    uint8_t *group = (uint8_t *)packed + row_first / MATRIX_ROW_GROUP * group_size;
    for (uint32_t row = 0; row < row_count; row += MATRIX_ROW_GROUP, group += group_size) {
        const uint32_t left = row_count - row;
        const uint32_t lanes = left < MATRIX_ROW_GROUP ? left : MATRIX_ROW_GROUP;
        if (lanes < MATRIX_ROW_GROUP) {
            memset(group, 0, group_size);
        }
        if (!matrix_is_quantised(dtype)) {
            const uint8_t *rows = from + row * row_size;
            if (block_size == 4) {
                pack_elements(rows, row_size, lanes, columns, 4, group);
            } else {
                pack_elements(rows, row_size, lanes, columns, 2, group);
            }
            continue;
        }
        for (uint32_t unit = 0; unit < units; unit++) {
            for (uint32_t lane = 0; lane < lanes; lane++) {
                const struct pack_target to = {group + unit * unit_size, lane};
                pack_unit(dtype, from + (row + lane) * row_size + unit * block_size, &to);
            }
        }
    }
}

static float load_f16(const uint8_t *at)
{
    uint16_t bits;
    memcpy(&bits, at, sizeof(bits));
    return f16_to_float(bits);
}

static const uint8_t *group_of(const struct matrix *matrix, uint32_t row)
{
    return (const uint8_t *)matrix->data +
           row / MATRIX_ROW_GROUP * layout_group_size(matrix->dtype, matrix->columns);
}

/* Column `c` of a block whose parts are at `at`: the bits as stored. */
static int packed_quant(enum fl_dtype dtype, const uint8_t *group, const struct layout_block *at,
                        uint32_t lane, uint32_t c)
{
    if (dtype == FL_DTYPE_Q8_0) {
        return ((const int8_t *)group)[at->quants + c / 4 * LAYOUT_REGISTER + lane * 4 + c % 4];
    }
    const uint32_t byte = group[at->quants + c % 16 / 4 * LAYOUT_REGISTER + lane * 4 + c % 4];
    uint32_t value = c < 16 ? byte & 15 : byte >> 4;
    if (dtype == FL_DTYPE_Q5_0 || dtype == FL_DTYPE_Q5_1 || dtype == FL_DTYPE_Q5_K) {
        value |= ((uint32_t)group[at->bits + lane * 4 + c % 4] >> c / 4 & 1) << 4;
    } else if (dtype == FL_DTYPE_Q6_K) {
        const uint32_t pairs = group[at->bits + c / 16 * LAYOUT_REGISTER + lane * 4 + c % 4];
        value |= (pairs >> c % 16 / 4 * 2 & 3) << 4;
    }
    return (int)value;
}

void matrix_block_of_packed(const struct matrix *matrix, uint32_t row, uint32_t block,
                            struct matrix_block *out)
{
    const enum fl_dtype dtype = matrix->dtype;
    const uint8_t *group = group_of(matrix, row);
    const uint32_t lane = row % MATRIX_ROW_GROUP;
    const struct layout_block at = layout_block_at(dtype, block);
    const float d = load_f16(group + at.d + lane * 2);
    int offset = 0;
    out->scale[0] = d;
    out->scale[1] = d;
    out->min = MATRIX_NO_MIN;
    switch (dtype) {
    case FL_DTYPE_Q4_0: offset = 8; break;
    case FL_DTYPE_Q5_0: offset = 16; break;
    case FL_DTYPE_Q4_1:
    case FL_DTYPE_Q5_1: out->min = load_f16(group + at.m + lane * 2); break;
    case FL_DTYPE_Q4_K:
    case FL_DTYPE_Q5_K:
        out->scale[0] = d * (float)group[at.scales + lane];
        out->scale[1] = out->scale[0];
        out->min = -(load_f16(group + at.m + lane * 2) * (float)group[at.mins + lane]);
        break;
    case FL_DTYPE_Q6_K:
        offset = 32;
        out->scale[0] = d * (float)((const int8_t *)group)[at.scales + lane];
        out->scale[1] = d * (float)((const int8_t *)group)[at.scales + LAYOUT_U8_SCALES + lane];
        break;
    case FL_DTYPE_Q8_0:
    case FL_DTYPE_F32:
    case FL_DTYPE_F16:
    case FL_DTYPE_BF16: break;
    }
    for (uint32_t c = 0; c < MATRIX_BLOCK; c++) {
        out->q[c] = (int8_t)(packed_quant(dtype, group, &at, lane, c) - offset);
    }
}

float matrix_element(const struct matrix *matrix, uint32_t row, uint32_t column)
{
    const uint8_t *unit = group_of(matrix, row) + (size_t)column * layout_unit_size(matrix->dtype);
    const size_t lane = row % MATRIX_ROW_GROUP;
    if (matrix->dtype == FL_DTYPE_F32) {
        return float_from_bits(load_u32(unit + lane * 4));
    }
    uint16_t bits;
    memcpy(&bits, unit + lane * 2, sizeof(bits));
    return matrix->dtype == FL_DTYPE_F16 ? f16_to_float(bits) : bf16_to_float(bits);
}

void matrix_row(const struct matrix *matrix, uint32_t row, float *out)
{
    FL_ASSERT(row < matrix->rows);
    if (!matrix_is_quantised(matrix->dtype)) {
        for (uint32_t k = 0; k < matrix->columns; k++) {
            out[k] = matrix_element(matrix, row, k);
        }
        return;
    }
    for (uint32_t block = 0; block < matrix->columns / MATRIX_BLOCK; block++) {
        struct matrix_block b;
        matrix_block_of_packed(matrix, row, block, &b);
        for (size_t i = 0; i < MATRIX_BLOCK; i++) {
            const float product = (float)b.q[i] * b.scale[i / MATRIX_HALF_BLOCK];
            out[(size_t)block * MATRIX_BLOCK + i] = product + b.min;
        }
    }
}
