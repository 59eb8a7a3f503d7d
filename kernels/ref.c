/* ref.c - the operations as plain loops; the definition of right.
 *
 * Written to be checked by eye against the formulas in kernels.h.  Nothing is
 * made faster here; speed lives in the other backends, which repeat the same
 * roundings in the same order.
 */
#include <math.h>

#include "kernels/attention_span.h"
#include "kernels/kernels.h"
#include "kernels/matrix_block.h"
#include "kernels/parts.h"
#include "kernels/scalar_math.h"

enum { LANES = ATTENTION_LANES };

/* The sum of 16 partial sums: lane l gets lane l + 8, then l + 4, l + 2, l + 1. */
static float lanes_sum(float lanes[LANES])
{
    for (int step = LANES / 2; step > 0; step /= 2) {
        for (int l = 0; l < step; l++) {
            lanes[l] = lanes[l] + lanes[l + step];
        }
    }
    return lanes[0];
}

/* Sum of a[i] * b[i]; lane i % 16 takes element i. */
static float dot(const float *a, const float *b, uint32_t count)
{
    float lanes[LANES] = {0};
    for (uint32_t i = 0; i < count; i++) {
        lanes[i % LANES] = fmaf(a[i], b[i], lanes[i % LANES]);
    }
    return lanes_sum(lanes);
}

struct norm_job {
    const float *x, *gain;
    float epsilon;
    uint32_t rows, columns, parts;
    float *out;
};

static void norm_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct norm_job *job = ctx;
    (void)thread;
    const uint32_t end = parts_first(part + 1, job->parts, job->rows);
    for (size_t t = parts_first(part, job->parts, job->rows); t < end; t++) {
        const float *x = job->x + t * job->columns; /* [D] */
        float *out = job->out + t * job->columns;   /* [D] */
        const float mean = dot(x, x, job->columns) / (float)job->columns;
        const float factor = 1.0f / sqrtf(mean + job->epsilon);
        for (uint32_t d = 0; d < job->columns; d++) {
            out[d] = x[d] * factor * job->gain[d];
        }
    }
}

static void rms_norm(void *stream, const float *x, const float *gain, float epsilon, uint32_t rows,
                     uint32_t columns, float *out)
{
    struct norm_job job = {x, gain, epsilon, rows, columns, 0, out};
    job.parts = parts_count(stream, rows, (uint64_t)rows * columns * 2);
    cpu_pool_run(stream, job.parts, norm_part, &job);
}

struct quantize_job {
    const struct activations *x;
    uint32_t parts;
};

/* A block that is too small for 127 / amax to be finite counts as zero. */
static void quantize_block(const float *x, int8_t *q, float *scale, int16_t sums[2])
{
    float amax = 0.0f;
    for (int i = 0; i < Q8_BLOCK; i++) {
        const float magnitude = fabsf(x[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    const float inverse = amax >= Q8_AMAX_MIN ? 127.0f / amax : 0.0f;
    *scale = amax >= Q8_AMAX_MIN ? amax / 127.0f : 0.0f;
    int sum[2] = {0, 0};
    for (int i = 0; i < Q8_BLOCK; i++) {
        const float scaled = x[i] * inverse;
        const float low = scaled > -127.0f ? scaled : -127.0f; /* a NaN becomes -127 */
        const float clamped = low < 127.0f ? low : 127.0f;
        q[i] = (int8_t)lrintf(clamped);
        sum[i / 16] += q[i];
    }
    sums[0] = (int16_t)sum[0];
    sums[1] = (int16_t)sum[1];
}

static void quantize_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct quantize_job *job = ctx;
    const struct activations *x = job->x;
    (void)thread;
    const uint32_t end = parts_first(part + 1, job->parts, x->rows);
    for (size_t t = parts_first(part, job->parts, x->rows); t < end; t++) {
        for (size_t b = 0; b < x->columns / Q8_BLOCK; b++) {
            const size_t block = t * (x->columns / Q8_BLOCK) + b;
            quantize_block(x->f32 + block * Q8_BLOCK, x->q8.q + block * Q8_BLOCK,
                           x->q8.scale + block, x->q8.sums + block * 2);
        }
    }
}

static void quantize(void *stream, const struct activations *x)
{
    FL_ASSERT(x->columns % Q8_BLOCK == 0);
    struct quantize_job job = {x, 0};
    job.parts = parts_count(stream, x->rows, (uint64_t)x->rows * x->columns * 2);
    cpu_pool_run(stream, job.parts, quantize_part, &job);
}

struct matmul_job {
    const struct matrix *w;
    const struct activations *x;
    enum activation_mode mode;
    uint32_t groups, parts;
    float *out;
};

/* One output with 8-bit activations. */
static float product_q8(const struct matrix *w, const struct activations *x, uint32_t n, size_t t)
{
    const int8_t *q = x->q8.q + t * x->columns;
    const float *scale = x->q8.scale + t * (x->columns / Q8_BLOCK);
    const int16_t *sums = x->q8.sums + t * (x->columns / 16);
    /* Q6_K changes its scale every 16 columns, the others every 32. */
    const uint32_t step = w->dtype == FL_DTYPE_Q6_K ? MATRIX_HALF_BLOCK : MATRIX_BLOCK;
    float acc = 0.0f;
    for (uint32_t b = 0; b < w->columns / MATRIX_BLOCK; b++) {
        struct matrix_block block;
        matrix_block_of_packed(w, n, b, &block);
        for (uint32_t first = 0; first < MATRIX_BLOCK; first += step) {
            int32_t sum = 0;
            for (uint32_t i = first; i < first + step; i++) {
                sum += block.q[i] * q[(size_t)b * MATRIX_BLOCK + i];
            }
            acc = fmaf((float)sum, block.scale[first / MATRIX_HALF_BLOCK] * scale[b], acc);
        }
        if (matrix_has_min(w->dtype)) {
            const float a_sum = (float)(sums[2 * b] + sums[2 * b + 1]);
            acc = fmaf(a_sum, block.min * scale[b], acc);
        }
    }
    return acc;
}

/* One output with float activations. */
static float product_f32(const struct matrix *w, const struct activations *x, uint32_t n, size_t t)
{
    const float *a = x->f32 + t * x->columns;
    float acc = 0.0f;
    if (!matrix_is_quantised(w->dtype)) {
        for (uint32_t k = 0; k < w->columns; k++) {
            acc = fmaf(matrix_element(w, n, k), a[k], acc);
        }
        return acc;
    }
    for (uint32_t b = 0; b < w->columns / MATRIX_BLOCK; b++) {
        struct matrix_block block;
        matrix_block_of_packed(w, n, b, &block);
        for (size_t i = 0; i < MATRIX_BLOCK; i++) {
            const float scaled = (float)block.q[i] * block.scale[i / MATRIX_HALF_BLOCK];
            acc = fmaf(scaled + block.min, a[(size_t)b * MATRIX_BLOCK + i], acc);
        }
    }
    return acc;
}

static void matmul_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct matmul_job *job = ctx;
    const struct matrix *w = job->w;
    const bool q8 = job->mode == ACTIVATION_Q8 && matrix_is_quantised(w->dtype);
    (void)thread;
    const uint32_t first = parts_first(part, job->parts, job->groups) * MATRIX_ROW_GROUP;
    const uint32_t end = parts_first(part + 1, job->parts, job->groups) * MATRIX_ROW_GROUP;
    for (uint32_t n = first; n < end && n < w->rows; n++) {
        for (size_t t = 0; t < job->x->rows; t++) {
            job->out[t * w->rows + n] =
                q8 ? product_q8(w, job->x, n, t) : product_f32(w, job->x, n, t);
        }
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

struct rope_job {
    const struct rope_table *table;
    const uint32_t *positions;
    uint32_t rows, heads, head_size, parts;
    float *x;
};

static void rope_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct rope_job *job = ctx;
    const struct rope_table *table = job->table;
    const uint32_t pairs = table->rope_dim / 2;
    (void)thread;
    const uint32_t end = parts_first(part + 1, job->parts, job->rows);
    for (size_t t = parts_first(part, job->parts, job->rows); t < end; t++) {
        for (uint32_t i = 0; i < pairs; i++) {
            double sine, cosine;
            math_sincos((double)job->positions[t] * (double)table->inverse_frequency[i], &sine,
                        &cosine);
            const float s = (float)sine * table->scale;
            const float c = (float)cosine * table->scale;
            const uint32_t first = table->neox ? i : 2 * i;
            const uint32_t second = table->neox ? i + pairs : 2 * i + 1;
            for (uint32_t h = 0; h < job->heads; h++) {
                float *head = job->x + (t * job->heads + h) * job->head_size; /* [E] */
                const float a = head[first];
                const float b = head[second];
                head[first] = fmaf(a, c, -(b * s));
                head[second] = fmaf(a, s, b * c);
            }
        }
    }
}

static void rope(void *stream, const struct rope_table *table, const uint32_t *positions,
                 uint32_t rows, uint32_t heads, uint32_t head_size, float *x)
{
    FL_ASSERT(table->rope_dim % 2 == 0 && table->rope_dim <= head_size);
    struct rope_job job = {table, positions, rows, heads, head_size, 0, x};
    job.parts = parts_count(stream, rows, (uint64_t)rows * table->rope_dim * (heads + 16));
    cpu_pool_run(stream, job.parts, rope_part, &job);
}

/* Keys or values of (block of the position, KV head g, position): [E]. */
static size_t kv_offset(const struct attention_shape *shape, const struct attention_row *row,
                        uint32_t position, uint32_t g)
{
    const size_t page =
        (size_t)row->blocks[position / KV_BLOCK_POSITIONS] * shape->head_count_kv + g;
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

/* One head of one row: q, out [E]; scores [position - first + 1]. */
static void attend(const struct attention_job *job, const struct attention_row *row, uint32_t h,
                   const float *q, float *scores, float *out)
{
    const struct attention_shape *shape = job->shape;
    const uint32_t g = h / (shape->head_count / shape->head_count_kv);
    const uint32_t first = attention_first(shape, row->position);
    float max = -INFINITY;
    for (uint32_t p = first; p <= row->position; p++) {
        const float *key = job->layer->keys + kv_offset(shape, row, p, g);
        const float score = dot(q, key, shape->head_size) * shape->scale;
        scores[p - first] = score;
        max = score > max ? score : max;
    }
    float lanes[LANES] = {0};
    for (uint32_t p = first; p <= row->position; p++) {
        scores[p - first] = math_exp(scores[p - first] - max);
        lanes[p % LANES] = lanes[p % LANES] + scores[p - first];
    }
    const float inverse = 1.0f / lanes_sum(lanes);
    for (uint32_t e = 0; e < shape->head_size; e++) {
        float acc = 0.0f;
        for (uint32_t p = first; p <= row->position; p++) {
            const float *value = job->layer->values + kv_offset(shape, row, p, g);
            acc = fmaf(scores[p - first], value[e], acc);
        }
        out[e] = acc * inverse;
    }
}

static void attention_part(void *ctx, uint32_t part, uint32_t thread)
{
    const struct attention_job *job = ctx;
    const uint32_t heads = job->shape->head_count;
    const uint32_t end = parts_first(part + 1, job->parts, job->row_count * heads);
    for (uint32_t i = parts_first(part, job->parts, job->row_count * heads); i < end; i++) {
        const size_t at = (size_t)i * job->shape->head_size;
        attend(job, &job->rows[i / heads], i % heads, job->q + at,
               job->scratch + thread * job->scratch_stride, job->out + at);
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

static void silu_mul(void *stream, const float *gate, const float *up, size_t count, float *out)
{
    (void)stream;
    for (size_t i = 0; i < count; i++) {
        out[i] = math_silu(gate[i]) * up[i];
    }
}

static void gelu_mul(void *stream, const float *gate, const float *up, size_t count, float *out)
{
    (void)stream;
    for (size_t i = 0; i < count; i++) {
        out[i] = math_gelu(gate[i]) * up[i];
    }
}

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

const struct kernel_ops kernel_ops_scalar = {
    .name = "scalar",
    .rms_norm = rms_norm,
    .quantize = quantize,
    .matmul = matmul,
    .rope = rope,
    .kv_store = kv_store,
    .attention = attention,
    .silu_mul = silu_mul,
    .gelu_mul = gelu_mul,
    .add = add,
    .scale = scale,
};
