/* cpu_ops.h - every operation but the matrix product, for one instruction set.
 *
 * Included by a file compiled for that set that has included simd_avx2.h or
 * simd_avx512.h; empty otherwise.  16 lanes are ref.c's 16 partial sums; each step is the one ref.c
 * takes for a lane, so results are equal to the last bit.  A lane that a row
 * does not reach adds a zero, which changes nothing.
 *
 * Thread:  any.
 */
#ifndef KERNELS_CPU_OPS_H
#define KERNELS_CPU_OPS_H

#include <math.h>

#include "kernels/attention_span.h"
#include "kernels/kernels.h"
#include "kernels/parts.h"
#include "kernels/scalar_math.h"

#if defined(__AVX2__)

enum {
    WIDE = ATTENTION_LANES,
    VALUE_COLUMNS = 64,      /* of an attention output kept in registers */
    ELEMENT_PART_SIZE = 512, /* smallest part of an element-wise operation */
};

static struct wide wide_exp(struct wide x)
{
    const struct wide low = wide_max(wide_set(EXP_MIN), x);
    const struct wide clamped = wide_min(wide_set(EXP_MAX), low);
    const struct wide rounded = wide_fma(clamped, wide_set(EXP_LOG2_E), wide_set(EXP_ROUNDER));
    const struct wide n = wide_sub(rounded, wide_set(EXP_ROUNDER));
    struct wide r = wide_fma(n, wide_set(-EXP_LN2_HIGH), clamped);
    r = wide_fma(n, wide_set(-EXP_LN2_LOW), r);
    struct wide p = wide_fma(wide_set(EXP_C7), r, wide_set(EXP_C6));
    p = wide_fma(p, r, wide_set(EXP_C5));
    p = wide_fma(p, r, wide_set(EXP_C4));
    p = wide_fma(p, r, wide_set(EXP_C3));
    p = wide_fma(p, r, wide_set(EXP_C2));
    p = wide_fma(wide_mul(p, r), r, r);
    p = wide_add(p, wide_set(1.0f));
    return wide_exp_scale(p, rounded);
}

/* ---- norms ---- */

static float wide_dot(const float *a, const float *b, uint32_t count)
{
    struct wide acc = wide_set(0.0f);
    uint32_t i = 0;
    for (; i + WIDE <= count; i += WIDE) {
        acc = wide_fma(wide_load(a + i), wide_load(b + i), acc);
    }
    if (i < count) {
        acc = wide_fma(wide_load_part(a + i, count - i), wide_load_part(b + i, count - i), acc);
    }
    return wide_sum(acc);
}

struct norm_job {
    const float *x, *gain;
    float epsilon;
    uint32_t rows, columns, parts;
    float *out;
};

static void norm_row(const struct norm_job *job, size_t t)
{
    const float *x = job->x + t * job->columns; /* [D] */
    float *out = job->out + t * job->columns;   /* [D] */
    const float mean = wide_dot(x, x, job->columns) / (float)job->columns;
    const struct wide factor = wide_set(1.0f / sqrtf(mean + job->epsilon));
    uint32_t d = 0;
    for (; d + WIDE <= job->columns; d += WIDE) {
        const struct wide scaled = wide_mul(wide_load(x + d), factor);
        wide_store(out + d, wide_mul(scaled, wide_load(job->gain + d)));
    }
    if (d < job->columns) {
        const uint32_t left = job->columns - d;
        const struct wide scaled = wide_mul(wide_load_part(x + d, left), factor);
        wide_store_part(out + d, wide_mul(scaled, wide_load_part(job->gain + d, left)), left);
    }
}

static void norm_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct norm_job *job = ctx;
    (void)thread;
    const uint32_t end = parts_first(part + 1, job->parts, job->rows);
    for (size_t t = parts_first(part, job->parts, job->rows); t < end; t++) {
        norm_row(job, t);
    }
}

static void rms_norm(void *stream, const float *x, const float *gain, float epsilon, uint32_t rows,
                     uint32_t columns, float *out)
{
    struct norm_job job = {x, gain, epsilon, rows, columns, 0, out};
    job.parts = parts_count(stream, rows, (uint64_t)rows * columns);
    cpu_pool_run(stream, job.parts, norm_part, &job);
}

/* ---- 8-bit activations ---- */

struct quantize_job {
    const struct activations *x;
    uint32_t parts;
};

static void quantize_block(const float *x, int8_t *q, float *scale, int16_t sums[2])
{
    const struct wide first = wide_load(x);
    const struct wide second = wide_load(x + WIDE);
    struct wide largest = wide_max(wide_abs(first), wide_set(0.0f));
    largest = wide_max(wide_abs(second), largest);
    const float amax = wide_largest(largest);
    const struct wide inverse = wide_set(amax >= Q8_AMAX_MIN ? 127.0f / amax : 0.0f);
    *scale = amax >= Q8_AMAX_MIN ? amax / 127.0f : 0.0f;
    for (int half = 0; half < 2; half++) {
        struct wide scaled = wide_mul(half == 0 ? first : second, inverse);
        scaled = wide_max(scaled, wide_set(-127.0f));
        scaled = wide_min(scaled, wide_set(127.0f));
        sums[half] = (int16_t)wide_store_int8(q + half * WIDE, scaled);
    }
}

/* Parts are runs of blocks, not of rows: one long row is worth several threads. */
static void quantize_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct quantize_job *job = ctx;
    const struct activations *x = job->x;
    const uint32_t blocks = x->rows * (x->columns / Q8_BLOCK);
    (void)thread;
    const uint32_t end = parts_first(part + 1, job->parts, blocks);
    for (size_t b = parts_first(part, job->parts, blocks); b < end; b++) {
        quantize_block(x->f32 + b * Q8_BLOCK, x->q8.q + b * Q8_BLOCK, x->q8.scale + b,
                       x->q8.sums + b * 2);
    }
}

static void quantize(void *stream, const struct activations *x)
{
    FL_ASSERT(x->columns % Q8_BLOCK == 0);
    struct quantize_job job = {x, 0};
    const uint32_t blocks = x->rows * (x->columns / Q8_BLOCK);
    job.parts = parts_count(stream, blocks, (uint64_t)blocks * Q8_BLOCK);
    cpu_pool_run(stream, job.parts, quantize_part, &job);
}

/* ---- rope ---- */

struct rope_job {
    const struct rope_table *table;
    const uint32_t *positions;
    uint32_t rows, heads, head_size, parts;
    float *x;
};

enum { ROPE_PAIRS_MAX = 256 };

/* Plain loops: the compiler vectorises them, and a lane of them is ref.c. */
static void rope_row(const struct rope_job *job, size_t t)
{
    const struct rope_table *table = job->table;
    const uint32_t pairs = table->rope_dim / 2;
    const double position = (double)job->positions[t];
    float s[ROPE_PAIRS_MAX], c[ROPE_PAIRS_MAX];
    for (uint32_t i = 0; i < pairs; i++) {
        double sine, cosine;
        math_sincos(position * (double)table->inverse_frequency[i], &sine, &cosine);
        s[i] = (float)sine * table->scale;
        c[i] = (float)cosine * table->scale;
    }
    for (uint32_t h = 0; h < job->heads; h++) {
        float *head = job->x + (t * job->heads + h) * job->head_size; /* [E] */
        if (table->neox) {
            for (uint32_t i = 0; i < pairs; i++) {
                const float a = head[i];
                const float b = head[i + pairs];
                head[i] = fmaf(a, c[i], -(b * s[i]));
                head[i + pairs] = fmaf(a, s[i], b * c[i]);
            }
        } else {
            for (uint32_t i = 0; i < pairs; i++) {
                const float a = head[2 * i];
                const float b = head[2 * i + 1];
                head[2 * i] = fmaf(a, c[i], -(b * s[i]));
                head[2 * i + 1] = fmaf(a, s[i], b * c[i]);
            }
        }
    }
}

static void rope_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct rope_job *job = ctx;
    (void)thread;
    const uint32_t end = parts_first(part + 1, job->parts, job->rows);
    for (size_t t = parts_first(part, job->parts, job->rows); t < end; t++) {
        rope_row(job, t);
    }
}

static void rope(void *stream, const struct rope_table *table, const uint32_t *positions,
                 uint32_t rows, uint32_t heads, uint32_t head_size, float *x)
{
    FL_ASSERT(table->rope_dim % 2 == 0 && table->rope_dim <= head_size);
    FL_ASSERT(table->rope_dim <= 2 * ROPE_PAIRS_MAX);
    struct rope_job job = {table, positions, rows, heads, head_size, 0, x};
    job.parts = parts_count(stream, rows, (uint64_t)rows * table->rope_dim * (heads + 16));
    cpu_pool_run(stream, job.parts, rope_part, &job);
}

/* ---- attention ---- */

/* Where keys or values of position `position` and KV head g are; a page's positions follow. */
static size_t kv_offset(const struct attention_shape *shape, const struct attention_row *row,
                        uint32_t position, uint32_t g)
{
    const size_t block = row->blocks[position / KV_BLOCK_POSITIONS];
    const size_t page = block * shape->head_count_kv + g;
    return (page * KV_BLOCK_POSITIONS + position % KV_BLOCK_POSITIONS) * shape->head_size;
}

static void kv_store(void *stream, const struct attention_shape *shape,
                     const struct attention_row *rows, uint32_t row_count, const float *k,
                     const float *v, const struct kv_layer *layer)
{
    (void)stream; /* a copy of a few kilobytes: not worth a second thread */
    const size_t size = shape->head_size * sizeof(float);
    for (size_t t = 0; t < row_count; t++) {
        for (uint32_t g = 0; g < shape->head_count_kv; g++) {
            const size_t from = (t * shape->head_count_kv + g) * shape->head_size;
            const size_t to = kv_offset(shape, &rows[t], rows[t].position, g);
            memcpy(layer->keys + to, k + from, size);
            memcpy(layer->values + to, v + from, size);
        }
    }
}

/* One head of one row.  Scores are kept from `base` on, a multiple of 16, so that the lane of a
 * position is that of its place. */
struct attention_head {
    const struct attention_shape *shape;
    const struct attention_row *row;
    const struct kv_layer *layer;
    uint32_t g, first, base;
    const float *q; /* [E] */
    float *scores;  /* [position - base + 1, rounded up to 16] */
};

/* Positions from `position` on that lie in one page, up to the row's own. */
static uint32_t page_run(const struct attention_head *head, uint32_t position)
{
    const uint32_t in_page = KV_BLOCK_POSITIONS - position % KV_BLOCK_POSITIONS;
    const uint32_t left = head->row->position + 1 - position;
    return in_page < left ? in_page : left;
}

/* Scores of four neighbouring keys: four sums at once, none waits for another. */
static void score_four(const float *q, const float *key, uint32_t head_size, float scale,
                       float *scores)
{
    struct wide acc[4] = {wide_set(0.0f), wide_set(0.0f), wide_set(0.0f), wide_set(0.0f)};
    uint32_t e = 0;
    for (; e + WIDE <= head_size; e += WIDE) {
        const struct wide x = wide_load(q + e);
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            acc[i] = wide_fma(x, wide_load(key + (size_t)i * head_size + e), acc[i]);
        }
    }
    if (e < head_size) {
        const uint32_t left = head_size - e;
        const struct wide x = wide_load_part(q + e, left);
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            const float *at = key + (size_t)i * head_size + e;
            acc[i] = wide_fma(x, wide_load_part(at, left), acc[i]);
        }
    }
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        scores[i] = wide_sum(acc[i]) * scale;
    }
}

static void attention_score(const struct attention_head *head)
{
    const struct attention_shape *shape = head->shape;
    for (uint32_t p = head->first; p <= head->row->position;) {
        const uint32_t run = page_run(head, p);
        const float *key = head->layer->keys + kv_offset(shape, head->row, p, head->g);
        float *scores = head->scores + (p - head->base);
        uint32_t i = 0;
        for (; i + 4 <= run; i += 4) {
            score_four(head->q, key + (size_t)i * shape->head_size, shape->head_size, shape->scale,
                       scores + i);
        }
        for (; i < run; i++) {
            const float *at = key + (size_t)i * shape->head_size;
            scores[i] = wide_dot(head->q, at, shape->head_size) * shape->scale;
        }
        p += run;
    }
}

/* Scores become weights; returns 1 / their sum. */
static float attention_softmax(const struct attention_head *head)
{
    const uint32_t count = head->row->position + 1 - head->base;
    const uint32_t padded = (count + WIDE - 1) / WIDE * WIDE;
    for (uint32_t i = 0; i < head->first - head->base; i++) {
        head->scores[i] = -INFINITY; /* e^-inf is 0 */
    }
    for (uint32_t i = count; i < padded; i++) {
        head->scores[i] = -INFINITY;
    }
    struct wide largest = wide_set(-INFINITY);
    for (uint32_t i = 0; i < padded; i += WIDE) {
        largest = wide_max(wide_load(head->scores + i), largest);
    }
    const struct wide max = wide_set(wide_largest(largest));
    struct wide sum = wide_set(0.0f);
    for (uint32_t i = 0; i < padded; i += WIDE) {
        const struct wide weight = wide_exp(wide_sub(wide_load(head->scores + i), max));
        wide_store(head->scores + i, weight);
        sum = wide_add(sum, weight);
    }
    return 1.0f / wide_sum(sum);
}

/* Columns e .. e + 16 * registers - 1 of the output (the last register may be cut to `last`). */
static ALWAYS_INLINE void attention_mix(const struct attention_head *head, float inverse,
                                        uint32_t e, int registers, uint32_t last, float *out)
{
    const struct attention_shape *shape = head->shape;
    struct wide acc[VALUE_COLUMNS / WIDE];
    UNROLL
    for (int i = 0; i < registers; i++) {
        acc[i] = wide_set(0.0f);
    }
    for (uint32_t p = head->first; p <= head->row->position;) {
        const uint32_t end = p + page_run(head, p);
        const float *value = head->layer->values + kv_offset(shape, head->row, p, head->g) + e;
        for (; p < end; p++, value += shape->head_size) {
            const struct wide weight = wide_set(head->scores[p - head->base]);
            UNROLL
            for (int i = 0; i < registers; i++) {
                const struct wide v =
                    last == WIDE ? wide_load(value + i * WIDE) : wide_load_part(value, last);
                acc[i] = wide_fma(weight, v, acc[i]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < registers; i++) {
        wide_store_part(out + e + (uint32_t)i * WIDE, wide_mul(acc[i], wide_set(inverse)), last);
    }
}

struct attention_job {
    const struct attention_shape *shape;
    const struct attention_row *rows;
    uint32_t row_count, parts;
    const float *q;
    const struct kv_layer *layer;
    float *scratch;
    size_t scratch_stride; /* floats per thread */
    float *out;
};

static void attend(const struct attention_job *job, uint32_t index, uint32_t thread)
{
    const struct attention_shape *shape = job->shape;
    const struct attention_row *row = &job->rows[index / shape->head_count];
    const uint32_t first = attention_first(shape, row->position);
    const struct attention_head head = {
        .shape = shape,
        .row = row,
        .layer = job->layer,
        .g = index % shape->head_count / (shape->head_count / shape->head_count_kv),
        .first = first,
        .base = first / WIDE * WIDE,
        .q = job->q + (size_t)index * shape->head_size,
        .scores = job->scratch + thread * job->scratch_stride,
    };
    float *out = job->out + (size_t)index * shape->head_size; /* [E] */
    attention_score(&head);
    const float inverse = attention_softmax(&head);
    uint32_t e = 0;
    for (; e + VALUE_COLUMNS <= shape->head_size; e += VALUE_COLUMNS) {
        attention_mix(&head, inverse, e, VALUE_COLUMNS / WIDE, WIDE, out);
    }
    for (; e + WIDE <= shape->head_size; e += WIDE) {
        attention_mix(&head, inverse, e, 1, WIDE, out);
    }
    if (e < shape->head_size) {
        attention_mix(&head, inverse, e, 1, shape->head_size - e, out);
    }
}

static void attention_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct attention_job *job = ctx;
    const uint32_t heads = job->row_count * job->shape->head_count;
    const uint32_t end = parts_first(part + 1, job->parts, heads);
    for (uint32_t i = parts_first(part, job->parts, heads); i < end; i++) {
        attend(job, i, thread);
    }
}

static void attention(void *stream, const struct attention_shape *shape,
                      const struct attention_row *rows, uint32_t row_count, const float *q,
                      const struct kv_layer *layer, void *scratch, float *out)
{
    struct attention_job job = {shape, rows, row_count, 0, q, layer, scratch, 0, out};
    uint64_t work = 0;
    job.scratch_stride = attention_stride(shape, rows, row_count, &work);
    job.parts = parts_count(stream, row_count * shape->head_count, work);
    cpu_pool_run(stream, job.parts, attention_part, &job);
}

/* ---- element by element ---- */

struct element_job {
    const float *a, *b;
    size_t count;
    uint32_t parts;
    float *out;
};

static struct wide silu_mul_of(struct wide gate, struct wide up)
{
    const struct wide below = wide_add(wide_set(1.0f), wide_exp(wide_negate(gate)));
    return wide_mul(wide_div(gate, below), up);
}

static struct wide gelu_mul_of(struct wide gate, struct wide up)
{
    const struct wide cube = wide_mul(wide_mul(wide_set(GELU_CUBE), gate), gate);
    const struct wide inner = wide_fma(cube, gate, gate);
    const struct wide power = wide_exp(wide_mul(wide_set(GELU_FACTOR), inner));
    return wide_mul(wide_div(gate, wide_add(wide_set(1.0f), power)), up);
}

/* out = of(a, b) from `first` to `end`. */
static ALWAYS_INLINE void elements_run(const struct element_job *job,
                                       struct wide (*of)(struct wide a, struct wide b),
                                       size_t first, size_t end)
{
    size_t i = first;
    for (; i + WIDE <= end; i += WIDE) {
        wide_store(job->out + i, of(wide_load(job->a + i), wide_load(job->b + i)));
    }
    if (i < end) {
        const uint32_t left = (uint32_t)(end - i);
        wide_store_part(job->out + i,
                        of(wide_load_part(job->a + i, left), wide_load_part(job->b + i, left)),
                        left);
    }
}

static void element_span(const struct element_job *job, uint32_t part, size_t *first, size_t *end)
{
    const uint32_t runs = (uint32_t)((job->count + ELEMENT_PART_SIZE - 1) / ELEMENT_PART_SIZE);
    *first = (size_t)parts_first(part, job->parts, runs) * ELEMENT_PART_SIZE;
    *end = (size_t)parts_first(part + 1, job->parts, runs) * ELEMENT_PART_SIZE;
    *end = *end < job->count ? *end : job->count;
}

static void silu_part(void *ctx, uint32_t part, uint32_t thread)
{
    size_t first, end;
    (void)thread;
    element_span(ctx, part, &first, &end);
    elements_run(ctx, silu_mul_of, first, end);
}

static void gelu_part(void *ctx, uint32_t part, uint32_t thread)
{
    size_t first, end;
    (void)thread;
    element_span(ctx, part, &first, &end);
    elements_run(ctx, gelu_mul_of, first, end);
}

static void element_wise(void *stream, struct element_job *job,
                         void (*part)(void *ctx, uint32_t index, uint32_t thread))
{
    const size_t runs = (job->count + ELEMENT_PART_SIZE - 1) / ELEMENT_PART_SIZE;
    FL_ASSERT(runs <= UINT32_MAX);
    job->parts = parts_count(stream, (uint32_t)runs, (uint64_t)job->count * 8);
    cpu_pool_run(stream, job->parts, part, job);
}

static void silu_mul(void *stream, const float *gate, const float *up, size_t count, float *out)
{
    struct element_job job = {.a = gate, .b = up, .count = count, .out = out};
    element_wise(stream, &job, silu_part);
}

static void gelu_mul(void *stream, const float *gate, const float *up, size_t count, float *out)
{
    struct element_job job = {.a = gate, .b = up, .count = count, .out = out};
    element_wise(stream, &job, gelu_part);
}

/* Memory-bound and short: one thread, vectorised by the compiler. */
static void add(void *stream, const float *y, size_t count, float *x)
{
    (void)stream;
    for (size_t i = 0; i < count; i++) {
        x[i] = x[i] + y[i];
    }
}

static void scale(void *stream, float factor, size_t count, float *x)
{
    (void)stream;
    for (size_t i = 0; i < count; i++) {
        x[i] = x[i] * factor;
    }
}

#endif
#endif
