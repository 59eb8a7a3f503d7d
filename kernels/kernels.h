/* kernels.h - the operations of a transformer layer, one table per backend.
 *
 * ref.c says what is right: plain scalar loops in the canonical order of
 * accumulation.  Every CPU backend equals it to the last bit, for any number
 * of rows at once and any number of threads (docs/decisions/0002-numbers.md).
 *
 * An operation queues its work on `stream` and returns; it neither allocates
 * nor fails (a device that can fail says so when it is next waited for).  On
 * the host `stream` is a struct cpu_pool * (cpu_pool.h), or NULL for the
 * calling thread alone, and the work is done on return.
 * Shapes were checked when the model was opened; here they are asserted.
 *
 * Thread:  any; the tables are constant.  Two calls share no scratch memory.
 * Memory:  arguments are borrowed until the work queued on `stream` is done.
 * Shapes:  T rows (tokens), D model width, K columns, N outputs, H heads, G KV heads, E head size;
 *          [slowest, .., fastest], dense, f32 unless said.
 */
#ifndef KERNELS_KERNELS_H
#define KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/matrix.h"
#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    Q8_BLOCK = 32,           /* activations are quantised in blocks of this many */
    KV_BLOCK_POSITIONS = 32, /* positions of one KV block (page) */
    ATTENTION_LANES = 16,    /* partial sums of a dot product and of a softmax */
};

/* A block whose largest magnitude is below this counts as zero: 127 / amax would overflow. */
#define Q8_AMAX_MIN 0x1p-119f

/* Activations quantised to 8 bits: per block of 32, q = round_even(x * (127 / amax)), scale = amax / 127.
 * K is a multiple of 32.  sums holds the integer sums of each half block of 16. */
struct q8_rows {
    int8_t *q;     /* [T, K] */
    float *scale;  /* [T, K / 32] */
    int16_t *sums; /* [T, K / 16] */
};

/* What a product with quantised weights rounds its activations to. */
enum activation_mode { ACTIVATION_Q8, ACTIVATION_F32 };

/* Both forms of the same activations; q8 is filled by quantize() and unused in f32 mode. */
struct activations {
    const float *f32; /* [T, K] */
    struct q8_rows q8;
    uint32_t rows;    /* T */
    uint32_t columns; /* K */
};

/* RoPE's angles: position p and pair i turn by p * inverse_frequency[i]; cos and sin are scaled. */
struct rope_table {
    const float *inverse_frequency; /* [rope_dim / 2] */
    float scale;                    /* of cos and sin: yarn's attention factor, else 1 */
    uint32_t rope_dim;              /* leading elements of each head that rotate */
    bool neox;                      /* pairs (i, i + rope_dim / 2); else (2i, 2i + 1) */
};

/* One row of a batch: where its sequence keeps its keys and values. */
struct attention_row {
    const uint32_t *blocks; /* KV blocks of the sequence, [position / KV_BLOCK_POSITIONS] */
    uint32_t position;      /* of this row; keys 0 .. position are there already */
};

/* One layer's keys and values: [block, G, KV_BLOCK_POSITIONS, E] each. */
struct kv_layer {
    float *keys;
    float *values;
};

struct attention_shape {
    uint32_t head_count;    /* H */
    uint32_t head_count_kv; /* G */
    uint32_t head_size;     /* E, a multiple of 16 or padded by the caller: 16 .. 512 */
    uint32_t window;        /* positions attended to, the current one included; 0: all */
    float scale;            /* of q . k */
};

struct kernel_ops {
    const char *name; /* "scalar", "avx2", "avx512" */

    /* out[t] = x[t] * gain / sqrt(mean(x[t]^2) + epsilon); x, out [T, D], out may be x; gain [D].
     * `T` may count heads: norms of q and k run over [T * H, E].
     * Source: Zhang and Sennrich, RMSNorm, arXiv:1910.07467. */
    void (*rms_norm)(void *stream, const float *x, const float *gain, float epsilon, uint32_t rows,
                     uint32_t columns, float *out);

    /* Fill x->q8 from x->f32.  Columns a multiple of 32. */
    void (*quantize)(void *stream, const struct activations *x);

    /* out[t, n] = sum over k of w[n, k] * x[t, k]; out [T, N].
     * ACTIVATION_Q8 with quantised weights: per block of 32 (Q6_K: 16) an exact integer dot, then
     *   acc = fmaf((float)dot, w_scale * a_scale, acc), then for types with a minimum
     *   acc = fmaf((float)a_sum, -+ w_min * a_scale, acc); blocks ascending, products rounded once.
     * ACTIVATION_F32, and weights that are F32, F16 or BF16 in either mode:
     *   acc = fmaf(w[n, k], x[t, k], acc), k ascending, w as matrix_dequantize_row() gives it.
     * Moves N x K weights once per call and 4 T (K + N) bytes. */
    void (*matmul)(void *stream, const struct matrix *w, const struct activations *x,
                   enum activation_mode mode, float *out);

    /* Rotate the heads of x [T, heads, E] in place; positions [T].
     * Source: Su et al., RoFormer, arXiv:2104.09864. */
    void (*rope)(void *stream, const struct rope_table *table, const uint32_t *positions,
                 uint32_t rows, uint32_t heads, uint32_t head_size, float *x);

    /* Put k, v [T, G, E] of each row where its sequence keeps position rows[t].position. */
    void (*kv_store)(void *stream, const struct attention_shape *shape,
                     const struct attention_row *rows, uint32_t row_count, const float *k,
                     const float *v, const struct kv_layer *layer);

    /* out[t, h] = softmax(scale * q[t, h] . K) V over the positions row t may see; q, out [T, H, E].
     * scratch: attention_scratch_size() bytes.  The order of every sum depends on the position
     * alone: dot products over ATTENTION_LANES partial sums, the softmax's sum over lanes
     * position % ATTENTION_LANES, values by ascending position.
     * Source: Vaswani et al., arXiv:1706.03762; paging as in Kwon et al., arXiv:2309.06180. */
    void (*attention)(void *stream, const struct attention_shape *shape,
                      const struct attention_row *rows, uint32_t row_count, const float *q,
                      const struct kv_layer *layer, void *scratch, float *out);

    /* out = silu(gate) * up, and out = gelu_tanh(gate) * up; `count` elements, out may be gate. */
    void (*silu_mul)(void *stream, const float *gate, const float *up, size_t count, float *out);
    void (*gelu_mul)(void *stream, const float *gate, const float *up, size_t count, float *out);

    /* x += y, and x *= factor; `count` elements. */
    void (*add)(void *stream, const float *y, size_t count, float *x);
    void (*scale)(void *stream, float factor, size_t count, float *x);
};

/* Scratch of attention() for sequences of up to `context` positions on `stream_threads` threads. */
size_t attention_scratch_size(uint32_t context, uint32_t stream_threads);

/* RoPE's inverse frequencies: out [rope_dim / 2], from the shape's constants and the file's
 * factors [rope_dim / 2] (NULL for none); `out_scale` gets the table's scale.  Scalings: linear,
 * yarn (Peng et al., arXiv:2309.00071), llama 3 and long (factors from the file).
 * `struct fl_rope` is in proto/model_shape.h. */
struct fl_rope;
void rope_inverse_frequencies(const struct fl_rope *rope, uint32_t rope_dim, const float *factors,
                              float *out, float *out_scale);

extern const struct kernel_ops kernel_ops_scalar; /* ref.c */
extern const struct kernel_ops kernel_ops_avx2;   /* needs AVX2, FMA, F16C */
extern const struct kernel_ops kernel_ops_avx512; /* needs AVX-512 F, BW, VL, DQ and VNNI */

/* The best table this CPU runs, or the one `name` asks for ("scalar", "avx2", "avx512"; NULL or
 * "auto": best).  FL_UNSUPPORTED when this CPU lacks it, FL_INVALID for another name. */
FL_MUST_CHECK fl_status kernel_ops_select(const char *name, const struct kernel_ops **out);

#ifdef __cplusplus
}
#endif
#endif
