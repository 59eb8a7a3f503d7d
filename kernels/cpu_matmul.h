/* cpu_matmul.h - matrix products on packed weights, for one instruction set.
 *
 * Included by a file compiled for that set that has included simd_avx2.h or
 * simd_avx512.h; empty otherwise.  One lane is one output row, so every lane repeats ref.c's sums in
 * ref.c's order and the results are equal to the last bit.
 *
 * A tile is one row group times up to SIMD_TILE_ROWS
 * activations: weights are unpacked once per tile.  Bytes moved: the packed
 * weights once for every MATMUL_CHUNK_ROWS activations, the activations from
 * the cache once per group.
 *
 * Thread:  any.
 * Shapes:  T activations, N outputs, K columns, B = K / 32 blocks.
 */
#ifndef KERNELS_CPU_MATMUL_H
#define KERNELS_CPU_MATMUL_H

#include "kernels/kernels.h"
#include "kernels/matrix_layout.h"
#include "kernels/parts.h"

#if defined(__AVX2__)

enum {
    MATMUL_CHUNK_ROWS = 128,     /* activations that stay in the second-level cache */
    MATMUL_PREFETCH_SIZE = 2048, /* how far ahead of a single activation's pass */
    SIMD_REGISTER = LAYOUT_REGISTER / SIMD_PARTS, /* bytes */
    TILE_PARTS_MAX = 2 * SIMD_PARTS,              /* registers of two groups */
};

/* What is constant while a group is multiplied. */
struct product {
    const uint8_t *group; /* packed weights of 16 rows */
    size_t group_size;
    const struct activations *x;
    uint32_t first; /* activation the tile begins with */
    uint32_t n;     /* row the group begins with */
    uint32_t rows;  /* N */
    float *out;
};

/* One function per type: a block's weights as floats, out [32] registers. */
typedef void floats_fn(const uint8_t *group, uint32_t block, int part, vf *out);

static ALWAYS_INLINE int quant_bits(enum fl_dtype dtype)
{
    switch (dtype) {
    case FL_DTYPE_Q4_0:
    case FL_DTYPE_Q4_1:
    case FL_DTYPE_Q4_K: return 4;
    case FL_DTYPE_Q5_0:
    case FL_DTYPE_Q5_1:
    case FL_DTYPE_Q5_K: return 5;
    case FL_DTYPE_Q6_K: return 6;
    case FL_DTYPE_Q8_0:
    case FL_DTYPE_F32:
    case FL_DTYPE_F16:
    case FL_DTYPE_BF16: break;
    }
    return 8;
}

/* What a stored quant is too large by. */
static ALWAYS_INLINE int16_t quant_offset(enum fl_dtype dtype)
{
    return dtype == FL_DTYPE_Q4_0   ? 8
           : dtype == FL_DTYPE_Q5_0 ? 16
           : dtype == FL_DTYPE_Q6_K ? 32
                                    : 0;
}

/* Operand j of a block: lane r, byte i is column 4j + i of row r, as stored. */
static ALWAYS_INLINE vi block_operand(enum fl_dtype dtype, const uint8_t *group,
                                      const struct layout_block *at, int part, int j)
{
    const uint8_t *quants = group + at->quants + part * SIMD_REGISTER;
    const uint8_t *bits = group + at->bits + part * SIMD_REGISTER;
    if (dtype == FL_DTYPE_Q8_0) {
        return vi_load(quants + j * LAYOUT_REGISTER);
    }
    const vi stored = vi_load(quants + j % 4 * LAYOUT_REGISTER);
    const vi nibbles = vi_and(j < 4 ? stored : vi_shift_right(stored, 4), vi_set(0x0f0f0f0f));
    if (quant_bits(dtype) == 5) {
        const vi fifth = vi_load(bits);
        const vi moved = j < 4 ? vi_shift_left(fifth, 4 - j) : vi_shift_right(fifth, j - 4);
        return vi_or(nibbles, vi_and(moved, vi_set(0x10101010)));
    }
    if (quant_bits(dtype) == 6) {
        const vi pairs = vi_load(bits + j / 4 * LAYOUT_REGISTER);
        const int m = j % 4;
        const vi moved = m < 2 ? vi_shift_left(pairs, 4 - 2 * m) : vi_shift_right(pairs, 2 * m - 4);
        return vi_or(nibbles, vi_and(moved, vi_set(0x30303030)));
    }
    return nibbles;
}

/* Scales of columns 0 .. 15 and 16 .. 31, and the minimum where the type has one. */
static ALWAYS_INLINE void block_scales(enum fl_dtype dtype, const uint8_t *group,
                                       const struct layout_block *at, int part, vf scale[2],
                                       vf *min)
{
    const size_t halves = (size_t)part * SIMD_LANES * 2;
    const size_t bytes = (size_t)part * SIMD_LANES;
    const vf d = vf_load_f16(group + at->d + halves);
    scale[0] = d;
    scale[1] = d;
    *min = d;
    if (dtype == FL_DTYPE_Q4_1 || dtype == FL_DTYPE_Q5_1) {
        *min = vf_load_f16(group + at->m + halves);
    } else if (dtype == FL_DTYPE_Q4_K || dtype == FL_DTYPE_Q5_K) {
        scale[0] = vf_mul(d, vf_load_u8(group + at->scales + bytes));
        scale[1] = scale[0];
        const vf m = vf_load_f16(group + at->m + halves);
        *min = vf_negate(vf_mul(m, vf_load_u8(group + at->mins + bytes)));
    } else if (dtype == FL_DTYPE_Q6_K) {
        scale[0] = vf_mul(d, vf_load_i8(group + at->scales + bytes));
        scale[1] = vf_mul(d, vf_load_i8(group + at->scales + LAYOUT_U8_SCALES + bytes));
    }
}

static ALWAYS_INLINE void block_prefetch(enum fl_dtype dtype, const uint8_t *group,
                                         const struct layout_block *at)
{
    const size_t size = layout_unit_size(dtype) / (layout_unit_columns(dtype) / MATRIX_BLOCK);
    UNROLL
    for (size_t i = 0; i < size; i += 64) {
        simd_prefetch(group + at->quants + MATMUL_PREFETCH_SIZE + i);
    }
}

/* The group that register `part` of a tile belongs to. */
static ALWAYS_INLINE const uint8_t *part_group(const struct product *p, int part)
{
    return p->group + (size_t)(part / SIMD_PARTS) * p->group_size;
}

/* Exact dots of a block (Q6_K: of its half `half`) of `groups` neighbouring groups with `tile_rows`
 * activations.
 * Operand by operand: one is unpacked, used for all activations and forgotten. */
static ALWAYS_INLINE void block_dots(enum fl_dtype dtype, const struct product *p,
                                     const struct layout_block *at, size_t block, int groups,
                                     int tile_rows, int half,
                                     vi out[TILE_PARTS_MAX][SIMD_TILE_ROWS])
{
    const size_t blocks = p->x->columns / MATRIX_BLOCK;
    const int bits = quant_bits(dtype);
    const int count = dtype == FL_DTYPE_Q6_K ? 4 : 8;
    const int16_t offset = (int16_t)-quant_offset(dtype);
    const int16_t offsets[2] = {half == 1 ? 0 : offset, half == 0 ? 0 : offset};
    const int parts = groups * SIMD_PARTS;
    vi pairs[TILE_PARTS_MAX][SIMD_TILE_ROWS];
    UNROLL
    for (int t = 0; t < tile_rows; t++) {
        const int16_t *sums = p->x->q8.sums + (block + (size_t)t * blocks) * 2;
        const vi start = simd_dot_start(sums, offsets, bits);
        UNROLL
        for (int i = 0; i < parts; i++) {
            out[i][t] = start;
            pairs[i][t] = start;
        }
    }
    UNROLL
    for (int n = 0; n < count; n++) {
        /* 0, 4, 1, 5, ..: the low and the high nibbles of the same bytes follow each other. */
        const int j = dtype == FL_DTYPE_Q6_K ? half * 4 + n : n % 2 * 4 + n / 2;
        vi w[TILE_PARTS_MAX];
        UNROLL
        for (int i = 0; i < parts; i++) {
            w[i] = block_operand(dtype, part_group(p, i), at, i % SIMD_PARTS, j);
        }
        UNROLL
        for (int t = 0; t < tile_rows; t++) {
            const size_t a = (block + (size_t)t * blocks) * Q8_BLOCK + (size_t)j * 4;
            const vi quad = simd_broadcast_4(p->x->q8.q + a);
            UNROLL
            for (int i = 0; i < parts; i++) {
                simd_dot_step(&out[i][t], &pairs[i][t], w[i], quad, n, count, bits);
            }
        }
    }
}

static ALWAYS_INLINE void tile_store(const struct product *p, int part, uint32_t t, vf acc)
{
    const uint32_t n = p->n + (uint32_t)part * SIMD_LANES;
    const uint32_t count = n < p->rows ? p->rows - n : 0;
    vf_store(p->out + (size_t)(p->first + t) * p->rows + n, acc, count);
}

/* `tile_rows` activations times `groups` neighbouring groups, 8-bit. */
static ALWAYS_INLINE void tile_q8(enum fl_dtype dtype, const struct product *p, int groups,
                                  int tile_rows)
{
    const int parts = groups * SIMD_PARTS;
    const uint32_t blocks = p->x->columns / MATRIX_BLOCK;
    const int halves = dtype == FL_DTYPE_Q6_K ? 2 : 1;
    vf acc[TILE_PARTS_MAX][SIMD_TILE_ROWS];
    UNROLL
    for (int t = 0; t < tile_rows; t++) {
        UNROLL
        for (int i = 0; i < parts; i++) {
            acc[i][t] = vf_set(0.0f);
        }
    }
    for (uint32_t b = 0; b < blocks; b++) {
        const struct layout_block at = layout_block_at(dtype, b);
        const size_t block = (size_t)p->first * blocks + b;
        vf scale[TILE_PARTS_MAX][2], min[TILE_PARTS_MAX];
        if (tile_rows == 1) {
            UNROLL
            for (int i = 0; i < parts; i += SIMD_PARTS) {
                block_prefetch(dtype, part_group(p, i), &at);
            }
        }
        UNROLL
        for (int half = 0; half < halves; half++) {
            vi dots[TILE_PARTS_MAX][SIMD_TILE_ROWS];
            block_dots(dtype, p, &at, block, groups, tile_rows, halves == 2 ? half : -1, dots);
            UNROLL
            for (int i = 0; i < parts; i++) {
                block_scales(dtype, part_group(p, i), &at, i % SIMD_PARTS, scale[i], &min[i]);
                UNROLL
                for (int t = 0; t < tile_rows; t++) {
                    const vf a_scale = vf_set(p->x->q8.scale[block + (size_t)t * blocks]);
                    const vf both = vf_mul(scale[i][half], a_scale);
                    acc[i][t] = vf_fma(vf_from_int(dots[i][t]), both, acc[i][t]);
                }
            }
        }
        if (matrix_has_min(dtype)) {
            UNROLL
            for (int t = 0; t < tile_rows; t++) {
                const size_t row_block = block + (size_t)t * blocks;
                const vf sum = vf_from_int(simd_sums(p->x->q8.sums + row_block * 2, 1, 1));
                const vf a_scale = vf_set(p->x->q8.scale[row_block]);
                UNROLL
                for (int i = 0; i < parts; i++) {
                    acc[i][t] = vf_fma(sum, vf_mul(min[i], a_scale), acc[i][t]);
                }
            }
        }
    }
    UNROLL
    for (int t = 0; t < tile_rows; t++) {
        UNROLL
        for (int i = 0; i < parts; i++) {
            tile_store(p, i, (uint32_t)t, acc[i][t]);
        }
    }
}

/* The weights of a block as floats, [32] registers: what float activations are multiplied with. */
static ALWAYS_INLINE void block_floats(enum fl_dtype dtype, const uint8_t *group, uint32_t block,
                                       int part, vf out[MATRIX_BLOCK])
{
    const struct layout_block at = layout_block_at(dtype, block);
    const vi offset = vi_set(-quant_offset(dtype));
    vf scale[2], min;
    block_scales(dtype, group, &at, part, scale, &min);
    UNROLL
    for (int j = 0; j < MATRIX_BLOCK / 4; j++) {
        const vi operand = block_operand(dtype, group, &at, part, j);
        UNROLL
        for (int i = 0; i < 4; i++) {
            const vi word = vi_shift_left(operand, 24 - i * 8);
            const vi quant =
                dtype == FL_DTYPE_Q8_0 ? vi_shift_right_signed(word, 24) : vi_shift_right(word, 24);
            const vf w = vf_mul(vf_from_int(vi_add(quant, offset)), scale[j / 4]);
            out[4 * j + i] = matrix_has_min(dtype) ? vf_add(w, min) : w;
        }
    }
}

/* Float activations, columns ascending.  The types share this code: an unpacked block goes through
 * the first-level cache. */
static ALWAYS_INLINE void tile_f32(floats_fn *unpack, const struct product *p, int tile_rows,
                                   int part)
{
    const size_t columns = p->x->columns;
    const float *a = p->x->f32 + p->first * columns;
    vf acc[SIMD_TILE_ROWS];
    vf w[MATRIX_BLOCK];
    UNROLL
    for (int t = 0; t < tile_rows; t++) {
        acc[t] = vf_set(0.0f);
    }
    for (uint32_t b = 0; b < columns / MATRIX_BLOCK; b++) {
        unpack(p->group, b, part, w);
        for (int c = 0; c < MATRIX_BLOCK; c++) {
            UNROLL
            for (int t = 0; t < tile_rows; t++) {
                const size_t k = (size_t)b * MATRIX_BLOCK + (size_t)c;
                acc[t] = vf_fma(w[c], vf_set(a[(size_t)t * columns + k]), acc[t]);
            }
        }
    }
    UNROLL
    for (int t = 0; t < tile_rows; t++) {
        tile_store(p, part, (uint32_t)t, acc[t]);
    }
}

static ALWAYS_INLINE vf element_load(enum fl_dtype dtype, const uint8_t *at)
{
    return dtype == FL_DTYPE_F16    ? vf_load_f16(at)
           : dtype == FL_DTYPE_BF16 ? vf_load_bf16(at)
                                    : vf_load((const float *)(const void *)at);
}

/* F32, F16 and BF16 weights: `groups` neighbouring groups, as one sum alone would wait for itself. */
static ALWAYS_INLINE void tile_float(enum fl_dtype dtype, const struct product *p, int tile_rows,
                                     int groups)
{
    const size_t columns = p->x->columns;
    const size_t unit = layout_unit_size(dtype);
    const float *a = p->x->f32 + p->first * columns;
    vf acc[2][SIMD_PARTS][SIMD_TILE_ROWS];
    UNROLL
    for (int g = 0; g < groups; g++) {
        UNROLL
        for (int i = 0; i < SIMD_PARTS; i++) {
            UNROLL
            for (int t = 0; t < tile_rows; t++) {
                acc[g][i][t] = vf_set(0.0f);
            }
        }
    }
    for (size_t k = 0; k < columns; k++) {
        UNROLL
        for (int g = 0; g < groups; g++) {
            const uint8_t *at = p->group + (size_t)g * p->group_size + k * unit;
            UNROLL
            for (int i = 0; i < SIMD_PARTS; i++) {
                const vf w = element_load(dtype, at + (size_t)i * (unit / SIMD_PARTS));
                UNROLL
                for (int t = 0; t < tile_rows; t++) {
                    const vf x = vf_set(a[(size_t)t * columns + k]);
                    acc[g][i][t] = vf_fma(w, x, acc[g][i][t]);
                }
            }
        }
    }
    UNROLL
    for (int g = 0; g < groups; g++) {
        struct product at = *p;
        at.n += (uint32_t)g * MATRIX_ROW_GROUP;
        UNROLL
        for (int i = 0; i < SIMD_PARTS; i++) {
            UNROLL
            for (int t = 0; t < tile_rows; t++) {
                tile_store(&at, i, (uint32_t)t, acc[g][i][t]);
            }
        }
    }
}

static ALWAYS_INLINE bool is_float(enum fl_dtype dtype)
{
    return dtype == FL_DTYPE_F32 || dtype == FL_DTYPE_F16 || dtype == FL_DTYPE_BF16;
}

/* `tile_rows` activations times `groups` groups, with everything known to the compiler. */
static ALWAYS_INLINE void tile(enum fl_dtype dtype, const struct product *p, int groups,
                               int tile_rows)
{
    if (is_float(dtype)) {
        tile_float(dtype, p, tile_rows, groups);
    } else {
        tile_q8(dtype, p, groups, tile_rows);
    }
}

/* Activations p->first .. p->first + count - 1 times one group. */
static ALWAYS_INLINE void group_product(enum fl_dtype dtype, struct product *p, uint32_t count)
{
    uint32_t left = count;
    while (left >= SIMD_TILE_ROWS) {
        tile(dtype, p, 1, SIMD_TILE_ROWS);
        p->first += SIMD_TILE_ROWS;
        left -= SIMD_TILE_ROWS;
    }
    while (left >= 2) {
        tile(dtype, p, 1, 2);
        p->first += 2;
        left -= 2;
    }
    if (left > 0) {
        tile(dtype, p, 1, 1);
    }
}

/* `groups` groups from p->group on, for activations p->first .. p->first + count - 1. */
static ALWAYS_INLINE void groups_product(enum fl_dtype dtype, const struct product *p,
                                         uint32_t groups, uint32_t count)
{
    struct product at = *p;
    uint32_t g = 0;
    /* A single activation: two groups at once are two streams to read, more than one prefetcher
     * keeps busy, and share the loads of the activation. */
    if (count == 1) {
        for (; g + 2 <= groups; g += 2) {
            tile(dtype, &at, 2, 1);
            at.group += 2 * at.group_size;
            at.n += 2 * MATRIX_ROW_GROUP;
        }
    }
    for (; g < groups; g++) {
        at.first = p->first;
        group_product(dtype, &at, count);
        at.group += at.group_size;
        at.n += MATRIX_ROW_GROUP;
    }
}

/* The same for quantised weights and float activations. */
static void floats_product(floats_fn *unpack, const struct product *p, uint32_t groups,
                           uint32_t count)
{
    struct product at = *p;
    for (uint32_t g = 0; g < groups; g++) {
        for (int part = 0; part < SIMD_PARTS; part++) {
            uint32_t done = 0;
            for (; done + SIMD_TILE_ROWS <= count; done += SIMD_TILE_ROWS) {
                at.first = p->first + done;
                tile_f32(unpack, &at, SIMD_TILE_ROWS, part);
            }
            for (; done < count; done++) {
                at.first = p->first + done;
                tile_f32(unpack, &at, 1, part);
            }
        }
        at.group += at.group_size;
        at.n += MATRIX_ROW_GROUP;
    }
}

/* One function per type: the compiler sees it as a constant. */
#    define PRODUCT_OF(dtype)                                                                  \
        static __attribute__((noinline)) void product_##dtype(const struct product *p,         \
                                                              uint32_t groups, uint32_t count) \
        {                                                                                      \
            groups_product(FL_DTYPE_##dtype, p, groups, count);                                \
        }
PRODUCT_OF(F32)
PRODUCT_OF(F16)
PRODUCT_OF(BF16)
PRODUCT_OF(Q4_0)
PRODUCT_OF(Q4_1)
PRODUCT_OF(Q5_0)
PRODUCT_OF(Q5_1)
PRODUCT_OF(Q8_0)
PRODUCT_OF(Q4_K)
PRODUCT_OF(Q5_K)
PRODUCT_OF(Q6_K)
#    undef PRODUCT_OF

#    define FLOATS_OF(dtype)                                                                       \
        static __attribute__((noinline)) void floats_##dtype(const uint8_t *group, uint32_t block, \
                                                             int part, vf *out)                    \
        {                                                                                          \
            block_floats(FL_DTYPE_##dtype, group, block, part, out);                               \
        }
FLOATS_OF(Q4_0)
FLOATS_OF(Q4_1)
FLOATS_OF(Q5_0)
FLOATS_OF(Q5_1)
FLOATS_OF(Q8_0)
FLOATS_OF(Q4_K)
FLOATS_OF(Q5_K)
FLOATS_OF(Q6_K)
#    undef FLOATS_OF

static floats_fn *floats_of(enum fl_dtype dtype)
{
    switch (dtype) {
    case FL_DTYPE_Q4_0: return floats_Q4_0;
    case FL_DTYPE_Q4_1: return floats_Q4_1;
    case FL_DTYPE_Q5_0: return floats_Q5_0;
    case FL_DTYPE_Q5_1: return floats_Q5_1;
    case FL_DTYPE_Q8_0: return floats_Q8_0;
    case FL_DTYPE_Q4_K: return floats_Q4_K;
    case FL_DTYPE_Q5_K: return floats_Q5_K;
    case FL_DTYPE_Q6_K: return floats_Q6_K;
    case FL_DTYPE_F32:
    case FL_DTYPE_F16:
    case FL_DTYPE_BF16: break;
    }
    return NULL;
}

static void product_run(enum fl_dtype dtype, enum activation_mode mode, const struct product *p,
                        uint32_t groups, uint32_t count)
{
    if (mode == ACTIVATION_F32 && !is_float(dtype)) {
        floats_product(floats_of(dtype), p, groups, count);
        return;
    }
    switch (dtype) {
    case FL_DTYPE_F32: product_F32(p, groups, count); break;
    case FL_DTYPE_F16: product_F16(p, groups, count); break;
    case FL_DTYPE_BF16: product_BF16(p, groups, count); break;
    case FL_DTYPE_Q4_0: product_Q4_0(p, groups, count); break;
    case FL_DTYPE_Q4_1: product_Q4_1(p, groups, count); break;
    case FL_DTYPE_Q5_0: product_Q5_0(p, groups, count); break;
    case FL_DTYPE_Q5_1: product_Q5_1(p, groups, count); break;
    case FL_DTYPE_Q8_0: product_Q8_0(p, groups, count); break;
    case FL_DTYPE_Q4_K: product_Q4_K(p, groups, count); break;
    case FL_DTYPE_Q5_K: product_Q5_K(p, groups, count); break;
    case FL_DTYPE_Q6_K: product_Q6_K(p, groups, count); break;
    }
}

struct matmul_job {
    const struct matrix *w;
    const struct activations *x;
    enum activation_mode mode;
    uint32_t groups, parts;
    float *out;
};

static void matmul_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct matmul_job *job = ctx;
    const struct matrix *w = job->w;
    (void)thread;
    const uint32_t first = parts_first(part, job->parts, job->groups);
    const uint32_t end = parts_first(part + 1, job->parts, job->groups);
    const size_t group_size = layout_group_size(w->dtype, w->columns);
    struct product p = {
        .group = (const uint8_t *)w->data + first * group_size,
        .group_size = group_size,
        .x = job->x,
        .n = first * MATRIX_ROW_GROUP,
        .rows = w->rows,
        .out = job->out,
    };
    while (p.first < job->x->rows) {
        const uint32_t left = job->x->rows - p.first;
        const uint32_t count = left < MATMUL_CHUNK_ROWS ? left : MATMUL_CHUNK_ROWS;
        product_run(w->dtype, job->mode, &p, end - first, count);
        p.first += count;
    }
}

static void matmul(void *stream, const struct matrix *w, const struct activations *x,
                   enum activation_mode mode, float *out)
{
    FL_ASSERT(x->columns == w->columns);
    struct matmul_job job = {w, x,  mode, (w->rows + MATRIX_ROW_GROUP - 1) / MATRIX_ROW_GROUP,
                             0, out};
    job.parts = parts_count(stream, job.groups, (uint64_t)w->rows * w->columns * x->rows);
    cpu_pool_run(stream, job.parts, matmul_part, &job);
}

#endif
#endif
