/* forward.h - the forward pass of one piece: what a run of rows meets in it.
 *
 *   ATTENTION   x += post_norm(W_o attention(rope(norm(W_q y)), rope(norm(W_k y)), W_v y)), y = norm(x)
 *   FFN         x += post_norm(W_down (act(W_gate y) * (W_up y))), y = norm(x)
 *   HEAD        logits = W norm(x), for the rows that are to be sampled
 *
 * llama has no post norms and no norms of q and k, and act is SiLU; gemma3 has
 * them all, act is GELU (tanh form), and its local layers see a window and have
 * a RoPE of their own.  Which is which follows from the weights a piece has and
 * from the shape.
 *
 * All work is queued on the device's stream in order, so one scratch serves all
 * runs.  A row's numbers do not depend on the rows beside it.
 *
 * Thread:  owner (the stage's loop).
 * Memory:  open() takes it all, forward_memory() bytes on the device.
 * Shapes:  T rows; x [T, D]; logits [S, V] of S sampled rows.
 */
#ifndef PIPELINE_FORWARD_H
#define PIPELINE_FORWARD_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/device.h"
#include "pipeline/weight_store.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FORWARD_HEAD_ROW_MAX = 16 }; /* more rows make the head no cheaper per row */

struct forward;

struct forward_config {
    const struct fl_model_shape *shape; /* borrowed until close */
    struct device *device;              /* borrowed until close */
    uint32_t layer_first;
    uint32_t layer_count;
    bool has_head;
    uint32_t row_max; /* rows of one run */
    uint32_t context; /* positions a sequence may have */
    bool activations_f32;
};

/* The rows of a run. */
struct forward_rows {
    uint32_t count;
    const uint32_t *positions;            /* [count] */
    const struct attention_row *sequence; /* [count] */
    float *x;                             /* [count, D], device memory, updated in place */
};

/* `threads` as the device has; config->device is not looked at. */
uint64_t forward_memory(const struct forward_config *config, uint32_t threads);

/* FL_NO_MEMORY with the number wanted. */
FL_MUST_CHECK fl_status forward_open(const struct forward_config *config, struct forward **out);
void forward_close(struct forward *forward);

/* Embedding rows become the first layer's input. */
void forward_scale_embedding(struct forward *forward, const struct forward_rows *rows);

void forward_attention(struct forward *forward, const struct piece_weights *weights, uint32_t layer,
                       const struct kv_layer *kv, const struct forward_rows *rows);
void forward_ffn(struct forward *forward, const struct piece_weights *weights, uint32_t layer,
                 const struct forward_rows *rows);

/* Rows one forward_head() can take: bounded by the memory of their logits, and
 * FORWARD_HEAD_ROW_MAX. */
uint32_t forward_head_rows(const struct forward *forward);

/* Logits of rows indexes[0 .. count - 1] of x; device memory, valid until the next call. */
const float *forward_head(struct forward *forward, const struct piece_weights *weights,
                          const struct forward_rows *rows, const uint32_t *indexes, uint32_t count);

#ifdef __cplusplus
}
#endif
#endif
