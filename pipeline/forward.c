#include "pipeline/forward.h"

#include <inttypes.h>
#include <stdlib.h>

enum {
    LINE = 64,                 /* alignment of every buffer */
    LOGITS_SIZE_MAX = 8 << 20, /* bytes of logits at once, unless one row is more */
};

/* Sizes and, once there is memory, addresses of the scratch.  Attention and FFN take turns, so
 * their buffers share one place. */
struct scratch {
    float *normed; /* [T, D]: input of a piece's products, then the output of its last one */
    float *q;      /* [T, H * E] */
    float *k;      /* [T, G * E] */
    float *v;      /* [T, G * E] */
    float *mixed;  /* [T, H * E]: what attention gives */
    float *gate;   /* [T, F] */
    float *up;     /* [T, F] */
    float *logits; /* [head_rows, V] */
    struct q8_rows q8;
    void *attention;
    float *inverse_frequency[2]; /* [rope_dim / 2]: global, local */
};

struct forward {
    struct forward_config config;
    struct device *device;
    struct scratch scratch;
    struct rope_table rope[2]; /* global, local */
    bool rope_ready[2];
    uint32_t head_rows;
    unsigned char *memory;
    size_t memory_size;
};

struct widths {
    uint32_t queries; /* largest H * E */
    uint32_t keys;    /* largest G * E */
    uint32_t ffn;     /* largest F */
    uint32_t columns; /* largest K of a product */
};

static uint32_t max_of(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static struct widths widths_of(const struct forward_config *config)
{
    const struct fl_model_shape *shape = config->shape;
    struct widths widths = {.columns = shape->width};
    for (uint32_t i = 0; i < config->layer_count; i++) {
        const uint32_t layer = config->layer_first + i;
        widths.queries = max_of(widths.queries, shape->head_count[layer] * shape->head_size);
        widths.keys = max_of(widths.keys, shape->head_count_kv[layer] * shape->head_size);
        widths.ffn = max_of(widths.ffn, shape->ffn_width[layer]);
    }
    widths.columns = max_of(widths.columns, max_of(widths.queries, widths.ffn));
    return widths;
}

static uint32_t head_rows_of(const struct forward_config *config)
{
    const uint32_t fit = (uint32_t)(LOGITS_SIZE_MAX / sizeof(float)) / config->shape->vocabulary;
    return fit < 1 ? 1 : fit < FORWARD_HEAD_ROW_MAX ? fit : FORWARD_HEAD_ROW_MAX;
}

/* Take `size` bytes at *used, whole lines; NULL base only counts. */
static void *take(unsigned char *base, uint64_t *used, uint64_t size)
{
    unsigned char *place = base == NULL ? NULL : base + *used;
    *used += (size + LINE - 1) / LINE * LINE;
    return place;
}

/* Lay the scratch out from `base` on; returns its size. */
static uint64_t place_scratch(const struct forward_config *config, uint32_t threads,
                              unsigned char *base, struct scratch *out)
{
    const struct fl_model_shape *shape = config->shape;
    const struct widths widths = widths_of(config);
    const uint64_t rows = config->row_max;
    const uint64_t row = rows * sizeof(float);
    uint64_t used = 0;

    out->normed = take(base, &used, row * shape->width);
    out->q8.q = take(base, &used, rows * widths.columns);
    out->q8.scale = take(base, &used, row * (widths.columns / Q8_BLOCK));
    out->q8.sums = take(base, &used, rows * sizeof(int16_t) * (widths.columns / (Q8_BLOCK / 2)));
    out->attention = take(base, &used, attention_scratch_size(config->context, threads));
    for (int i = 0; i < 2; i++) {
        out->inverse_frequency[i] = take(base, &used, sizeof(float) * (shape->rope_dim / 2));
    }
    if (config->has_head) {
        out->logits =
            take(base, &used, sizeof(float) * (uint64_t)head_rows_of(config) * shape->vocabulary);
    }
    const uint64_t shared = used;
    out->q = take(base, &used, row * widths.queries);
    out->k = take(base, &used, row * widths.keys);
    out->v = take(base, &used, row * widths.keys);
    out->mixed = take(base, &used, row * widths.queries);
    const uint64_t attention_end = used;
    used = shared;
    out->gate = take(base, &used, row * widths.ffn);
    out->up = take(base, &used, row * widths.ffn);
    return used > attention_end ? used : attention_end;
}

uint64_t forward_memory(const struct forward_config *config, uint32_t threads)
{
    struct scratch unused = {0};
    return place_scratch(config, threads, NULL, &unused);
}

fl_status forward_open(const struct forward_config *config, struct forward **out)
{
    struct device *device = config->device;
    const uint64_t size = forward_memory(config, device->threads);
    struct forward *forward = calloc(1, sizeof(*forward));
    unsigned char *memory = device->ops->alloc(device, DEVICE_MEMORY_BUFFER, (size_t)size);
    if (forward == NULL || memory == NULL) {
        device->ops->free(device, memory, (size_t)size);
        free(forward);
        return FL_FAIL(FL_NO_MEMORY,
                       "no memory for runs of %" PRIu32 " rows: %" PRIu64 " bytes are wanted",
                       config->row_max, size);
    }
    *forward = (struct forward){
        .config = *config,
        .device = device,
        .head_rows = head_rows_of(config),
        .memory = memory,
        .memory_size = (size_t)size,
    };
    (void)place_scratch(config, device->threads, memory, &forward->scratch);
    *out = forward;
    return FL_OK;
}

void forward_close(struct forward *forward)
{
    if (forward != NULL) {
        forward->device->ops->free(forward->device, forward->memory, forward->memory_size);
        free(forward);
    }
}

uint32_t forward_head_rows(const struct forward *forward)
{
    return forward->head_rows;
}

/* ---- products ---- */

static bool is_quantised(const struct matrix *matrix)
{
    return matrix->dtype != FL_DTYPE_F32 && matrix->dtype != FL_DTYPE_F16 &&
           matrix->dtype != FL_DTYPE_BF16;
}

static enum activation_mode mode_of(const struct forward *forward)
{
    return forward->config.activations_f32 ? ACTIVATION_F32 : ACTIVATION_Q8;
}

/* The input of products with `matrices` (NULL ends them), quantised when one of them asks for it. */
static struct activations prepare(const struct forward *forward, const float *x, uint32_t rows,
                                  const struct matrix *first, const struct matrix *second,
                                  const struct matrix *third)
{
    const struct activations input = {
        .f32 = x,
        .q8 = forward->scratch.q8,
        .rows = rows,
        .columns = first->columns,
    };
    const bool wanted = is_quantised(first) || (second != NULL && is_quantised(second)) ||
                        (third != NULL && is_quantised(third));
    if (wanted && mode_of(forward) == ACTIVATION_Q8) {
        forward->device->kernels->quantize(forward->device->stream, &input);
    }
    return input;
}

static void multiply(const struct forward *forward, const struct matrix *matrix,
                     const struct activations *input, float *out)
{
    FL_ASSERT(matrix->columns == input->columns);
    forward->device->kernels->matmul(forward->device->stream, matrix, input, mode_of(forward), out);
}

/* RMSNorm of rows [rows, columns]; nothing without a gain. */
static void normalise(const struct forward *forward, const float *x, const float *gain,
                      uint32_t rows, uint32_t columns, float *out)
{
    if (gain != NULL) {
        forward->device->kernels->rms_norm(forward->device->stream, x, gain,
                                           forward->config.shape->norm_epsilon, rows, columns, out);
    }
}

/* x += post_norm(y): the end of a piece. */
static void add_residual(const struct forward *forward, const float *post_norm,
                         const struct forward_rows *rows, float *y)
{
    const uint32_t width = forward->config.shape->width;
    normalise(forward, y, post_norm, rows->count, width, y);
    forward->device->kernels->add(forward->device->stream, y, (size_t)rows->count * width, rows->x);
}

/* ---- pieces ---- */

void forward_scale_embedding(struct forward *forward, const struct forward_rows *rows)
{
    const struct fl_model_shape *shape = forward->config.shape;
    if (shape->embedding_scale != 1.0f) {
        forward->device->kernels->scale(forward->device->stream, shape->embedding_scale,
                                        (size_t)rows->count * shape->width, rows->x);
    }
}

/* The layer's table.  It is made when the first layer of its kind is met, because the factors come
 * with the weights; every layer of a model has the same. */
static const struct rope_table *rope_of(struct forward *forward,
                                        const struct piece_weights *weights, bool local)
{
    struct rope_table *table = &forward->rope[local];
    if (!forward->rope_ready[local]) {
        const struct fl_model_shape *shape = forward->config.shape;
        const struct fl_rope *rope = local ? &shape->rope_local : &shape->rope;
        const float *long_factors = weights->vector[FL_ROLE_ROPE_FACTORS_LONG];
        const float *factors = weights->vector[FL_ROLE_ROPE_FACTORS];
        if (long_factors != NULL && forward->config.context > rope->original_context) {
            factors = long_factors;
        }
        float scale;
        float *frequency = forward->scratch.inverse_frequency[local];
        rope_inverse_frequencies(rope, shape->rope_dim, local ? NULL : factors, frequency, &scale);
        *table = (struct rope_table){
            .inverse_frequency = frequency,
            .scale = scale,
            .rope_dim = shape->rope_dim,
            .neox = shape->architecture == FL_ARCHITECTURE_GEMMA3,
        };
        forward->rope_ready[local] = true;
    }
    return table;
}

/* q and k of the rows, with their norms, turned by their positions. */
static void turn_heads(struct forward *forward, const struct piece_weights *weights, uint32_t layer,
                       const struct forward_rows *rows)
{
    const struct fl_model_shape *shape = forward->config.shape;
    const struct kernel_ops *kernels = forward->device->kernels;
    const struct scratch *scratch = &forward->scratch;
    const uint32_t heads = shape->head_count[layer];
    const uint32_t heads_kv = shape->head_count_kv[layer];
    const struct rope_table *table =
        rope_of(forward, weights, fl_model_layer_is_local(shape, layer));

    normalise(forward, scratch->q, weights->vector[FL_ROLE_ATTN_Q_NORM], rows->count * heads,
              shape->head_size, scratch->q);
    normalise(forward, scratch->k, weights->vector[FL_ROLE_ATTN_K_NORM], rows->count * heads_kv,
              shape->head_size, scratch->k);
    kernels->rope(forward->device->stream, table, rows->positions, rows->count, heads,
                  shape->head_size, scratch->q);
    kernels->rope(forward->device->stream, table, rows->positions, rows->count, heads_kv,
                  shape->head_size, scratch->k);
}

void forward_attention(struct forward *forward, const struct piece_weights *weights, uint32_t layer,
                       const struct kv_layer *kv, const struct forward_rows *rows)
{
    const struct fl_model_shape *shape = forward->config.shape;
    const struct kernel_ops *kernels = forward->device->kernels;
    const struct scratch *scratch = &forward->scratch;
    const struct matrix *q = &weights->matrix[FL_ROLE_ATTN_Q];
    const struct matrix *k = &weights->matrix[FL_ROLE_ATTN_K];
    const struct matrix *v = &weights->matrix[FL_ROLE_ATTN_V];
    const struct matrix *output = &weights->matrix[FL_ROLE_ATTN_OUTPUT];
    const struct attention_shape attention = {
        .head_count = shape->head_count[layer],
        .head_count_kv = shape->head_count_kv[layer],
        .head_size = shape->head_size,
        .window = fl_model_layer_is_local(shape, layer) ? shape->window : 0,
        .scale = shape->attention_scale,
    };

    normalise(forward, rows->x, weights->vector[FL_ROLE_ATTN_NORM], rows->count, shape->width,
              scratch->normed);
    const struct activations input = prepare(forward, scratch->normed, rows->count, q, k, v);
    multiply(forward, q, &input, scratch->q);
    multiply(forward, k, &input, scratch->k);
    multiply(forward, v, &input, scratch->v);
    turn_heads(forward, weights, layer, rows);
    kernels->kv_store(forward->device->stream, &attention, rows->sequence, rows->count, scratch->k,
                      scratch->v, kv);
    kernels->attention(forward->device->stream, &attention, rows->sequence, rows->count, scratch->q,
                       kv, scratch->attention, scratch->mixed);

    const struct activations mixed =
        prepare(forward, scratch->mixed, rows->count, output, NULL, NULL);
    multiply(forward, output, &mixed, scratch->normed);
    add_residual(forward, weights->vector[FL_ROLE_ATTN_POST_NORM], rows, scratch->normed);
}

void forward_ffn(struct forward *forward, const struct piece_weights *weights, uint32_t layer,
                 const struct forward_rows *rows)
{
    const struct fl_model_shape *shape = forward->config.shape;
    const struct kernel_ops *kernels = forward->device->kernels;
    const struct scratch *scratch = &forward->scratch;
    const struct matrix *gate = &weights->matrix[FL_ROLE_FFN_GATE];
    const struct matrix *up = &weights->matrix[FL_ROLE_FFN_UP];
    const struct matrix *down = &weights->matrix[FL_ROLE_FFN_DOWN];

    normalise(forward, rows->x, weights->vector[FL_ROLE_FFN_NORM], rows->count, shape->width,
              scratch->normed);
    const struct activations input = prepare(forward, scratch->normed, rows->count, gate, up, NULL);
    multiply(forward, gate, &input, scratch->gate);
    multiply(forward, up, &input, scratch->up);
    const size_t count = (size_t)rows->count * shape->ffn_width[layer];
    if (shape->architecture == FL_ARCHITECTURE_GEMMA3) {
        kernels->gelu_mul(forward->device->stream, scratch->gate, scratch->up, count,
                          scratch->gate);
    } else {
        kernels->silu_mul(forward->device->stream, scratch->gate, scratch->up, count,
                          scratch->gate);
    }

    const struct activations hidden =
        prepare(forward, scratch->gate, rows->count, down, NULL, NULL);
    multiply(forward, down, &hidden, scratch->normed);
    add_residual(forward, weights->vector[FL_ROLE_FFN_POST_NORM], rows, scratch->normed);
}

const float *forward_head(struct forward *forward, const struct piece_weights *weights,
                          const struct forward_rows *rows, const uint32_t *indexes, uint32_t count)
{
    const size_t width = forward->config.shape->width;
    const struct scratch *scratch = &forward->scratch;
    const struct matrix *output = &weights->matrix[FL_ROLE_OUTPUT];
    FL_ASSERT(forward->config.has_head && count >= 1 && count <= forward->head_rows &&
              count <= forward->config.row_max);

    for (uint32_t i = 0; i < count; i++) {
        FL_ASSERT(indexes[i] < rows->count);
        normalise(forward, rows->x + indexes[i] * width, weights->vector[FL_ROLE_OUTPUT_NORM], 1,
                  (uint32_t)width, scratch->normed + i * width);
    }
    const struct activations input = prepare(forward, scratch->normed, count, output, NULL, NULL);
    multiply(forward, output, &input, scratch->logits);
    return scratch->logits;
}
