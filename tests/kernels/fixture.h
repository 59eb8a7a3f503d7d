/* fixture.h - random matrices and activations for the kernel tests.
 *
 * Random file blocks keep their scales in a range where products stay finite:
 * an f16's exponent bits are limited, everything else is any bit.
 */
#ifndef TESTS_KERNELS_FIXTURE_H
#define TESTS_KERNELS_FIXTURE_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

static const enum fl_dtype all_dtypes[] = {
#define XX(name, value, length, size) FL_DTYPE_##name,
    FL_DTYPE_MAP(XX)
#undef XX
};
enum { DTYPE_COUNT = sizeof(all_dtypes) / sizeof(all_dtypes[0]) };

/* xorshift64*: a sequence per seed. */
static inline uint32_t random_u32(uint64_t *seed)
{
    uint64_t x = *seed;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *seed = x;
    return (uint32_t)(x * UINT64_C(0x2545f4914f6cdd1d) >> 32);
}

/* Uniform in [-1, 1). */
static inline float random_float(uint64_t *seed)
{
    return (float)((double)(int32_t)random_u32(seed) * 0x1p-31);
}

static inline void *test_alloc(size_t size)
{
    void *memory = aligned_alloc(64, (size + 63) / 64 * 64 + 64);
    if (memory == NULL) {
        abort();
    }
    return memory;
}

/* A finite f16 of magnitude 2^-14 .. 2^-7, either sign, or one time in 16 zero or subnormal. */
static inline void random_f16(uint64_t *seed, uint8_t *at)
{
    const uint32_t r = random_u32(seed);
    const uint32_t exponent = r % 16 == 0 ? 0 : 1 + (r >> 8) % 7;
    const uint16_t bits = (uint16_t)((r >> 16 & 0x83ff) | exponent << 10);
    memcpy(at, &bits, sizeof(bits));
}

/* One row as a file would have it. */
static inline void random_row(enum fl_dtype dtype, uint32_t columns, uint64_t *seed, uint8_t *row)
{
    size_t size = 0;
    if (fl_dtype_row_size(dtype, columns, &size) != FL_OK) {
        abort();
    }
    const size_t block = fl_dtype_block_size(dtype);
    for (size_t i = 0; i < size; i++) {
        row[i] = (uint8_t)(random_u32(seed) >> 13);
    }
    for (size_t at = 0; at < size; at += block) {
        const float value = random_float(seed);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        switch (dtype) {
        case FL_DTYPE_F32: memcpy(row + at, &value, 4); break;
        case FL_DTYPE_BF16: memcpy(row + at, (const uint8_t *)&bits + 2, 2); break;
        case FL_DTYPE_F16:
        case FL_DTYPE_Q4_0:
        case FL_DTYPE_Q5_0:
        case FL_DTYPE_Q8_0: random_f16(seed, row + at); break;
        case FL_DTYPE_Q4_1:
        case FL_DTYPE_Q5_1:
        case FL_DTYPE_Q4_K:
        case FL_DTYPE_Q5_K:
            random_f16(seed, row + at);
            random_f16(seed, row + at + 2);
            break;
        case FL_DTYPE_Q6_K: random_f16(seed, row + at + 208); break;
        }
    }
}

struct test_matrix {
    struct matrix packed;
    uint8_t *raw;
    uint8_t *data;
    size_t row_size;
};

static inline void test_matrix_init(struct test_matrix *m, enum fl_dtype dtype, uint32_t rows,
                                    uint32_t columns, uint64_t *seed)
{
    if (fl_dtype_row_size(dtype, columns, &m->row_size) != FL_OK) {
        abort();
    }
    m->raw = test_alloc(m->row_size * rows);
    m->data = test_alloc(matrix_packed_size(dtype, rows, columns));
    for (uint32_t n = 0; n < rows; n++) {
        random_row(dtype, columns, seed, m->raw + n * m->row_size);
    }
    matrix_pack_rows(dtype, columns, m->raw, 0, rows, m->data);
    m->packed = (struct matrix){m->data, dtype, rows, columns};
}

static inline void test_matrix_free(struct test_matrix *m)
{
    free(m->raw);
    free(m->data);
}

struct test_rows {
    struct activations x;
    float *f32;
};

static inline void test_rows_init(struct test_rows *r, uint32_t rows, uint32_t columns,
                                  uint64_t *seed)
{
    const size_t count = (size_t)rows * columns;
    r->f32 = test_alloc(count * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        r->f32[i] = random_float(seed);
    }
    r->x = (struct activations){
        .f32 = r->f32,
        .q8 = {.q = test_alloc(count),
               .scale = test_alloc(count / Q8_BLOCK * sizeof(float)),
               .sums = test_alloc(count / 16 * sizeof(int16_t))},
        .rows = rows,
        .columns = columns,
    };
}

static inline void test_rows_free(struct test_rows *r)
{
    free(r->f32);
    free(r->x.q8.q);
    free(r->x.q8.scale);
    free(r->x.q8.sums);
}

/* Rows `first` .. of the same activations. */
static inline struct activations test_rows_view(const struct activations *x, uint32_t first,
                                                uint32_t rows)
{
    struct activations view = *x;
    view.f32 = x->f32 + (size_t)first * x->columns;
    view.q8.q = x->q8.q + (size_t)first * x->columns;
    view.q8.scale = x->q8.scale + (size_t)first * (x->columns / Q8_BLOCK);
    view.q8.sums = x->q8.sums + (size_t)first * (x->columns / 16);
    view.rows = rows;
    return view;
}

#endif
