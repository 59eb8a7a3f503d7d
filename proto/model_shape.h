/* model_shape.h - what a model is, as it travels in a plan.
 *
 * The coordinator reads the model file's header; nodes never do.  A node gets
 * the shape (sizes and constants of the computation) and the pieces of its
 * stage: which tensors, of what type, where in which file.
 *
 *   piece      what it holds, in this order                         stage
 *   EMBED      token_embd                                           first
 *   ATTENTION  norms, q, k, v, output projection of layer i         layer's
 *   FFN        norms, gate, up, down of layer i                     layer's
 *   HEAD       output norm, output matrix (or token_embd, tied)     last
 *
 * Thread:  plain values.
 * Memory:  arrays are borrowed from whoever filled the struct in.
 * Units:   offsets and sizes in bytes, offsets from the start of their file.
 */
#ifndef PROTO_MODEL_SHAPE_H
#define PROTO_MODEL_SHAPE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FL_LAYER_COUNT_MAX = 512,
    FL_WIDTH_MAX = 65536, /* model width, FFN width, heads x head size */
    FL_HEAD_COUNT_MAX = 512,
    FL_HEAD_SIZE_MAX = 512,
    FL_VOCABULARY_MAX = 1 << 20, /* tokens */
    FL_CONTEXT_MAX = 1 << 20,    /* positions */
    FL_FILE_COUNT_MAX = 64,      /* parts of a split model */
    FL_MODEL_NAME_MAX = 128,     /* bytes with the terminating NUL */
    FL_PIECE_TENSOR_MAX = 12,
    FL_PIECE_COUNT_MAX = 2 * FL_LAYER_COUNT_MAX + 2,
    FL_IDENTITY_SIZE = 16,
};

enum fl_architecture { FL_ARCHITECTURE_LLAMA = 1, FL_ARCHITECTURE_GEMMA3 = 2 };

enum fl_rope_scaling { FL_ROPE_NONE, FL_ROPE_LINEAR, FL_ROPE_YARN, FL_ROPE_LONG };

struct fl_rope {
    float freq_base;
    enum fl_rope_scaling scaling;
    float factor;              /* position scale is 1 / factor; 1 when there is no scaling */
    float attention_factor;    /* 0: derived from the scaling, as its paper does */
    uint32_t original_context; /* 0 when the file does not say */
    float yarn_beta_fast;      /* 32 unless the file says */
    float yarn_beta_slow;      /* 1 unless the file says */
};

struct fl_model_shape {
    enum fl_architecture architecture;
    uint32_t layer_count;
    uint32_t width;          /* D */
    uint32_t head_size;      /* E: of q and k and v alike */
    uint32_t vocabulary;     /* V */
    uint32_t context;        /* positions the model was trained for */
    uint32_t rope_dim;       /* leading elements of a head that rotate; even, <= head_size */
    uint32_t window;         /* positions a local layer attends to, current included; 0: all */
    uint32_t window_pattern; /* every n-th layer (n-1, 2n-1, ..) is global; 0: all are global */
    float norm_epsilon;
    float embedding_scale;     /* sqrt(D) for gemma3, else 1 */
    float attention_scale;     /* applied to q . k; 1 / sqrt(E) unless the file says */
    struct fl_rope rope;       /* global layers */
    struct fl_rope rope_local; /* layers with a window */
    bool tied_head;            /* HEAD uses token_embd */
    uint32_t head_count[FL_LAYER_COUNT_MAX];    /* H, per layer */
    uint32_t head_count_kv[FL_LAYER_COUNT_MAX]; /* G, divides H, per layer */
    uint32_t ffn_width[FL_LAYER_COUNT_MAX];     /* F, per layer */
};

/* True when the layer attends to `window` positions only. */
static inline bool fl_model_layer_is_local(const struct fl_model_shape *shape, uint32_t layer)
{
    return shape->window != 0 && shape->window_pattern != 0 &&
           (layer + 1) % shape->window_pattern != 0;
}

enum fl_tensor_role {
    FL_ROLE_TOKEN_EMBD = 1,    /* [V, D] */
    FL_ROLE_OUTPUT_NORM,       /* [D] */
    FL_ROLE_OUTPUT,            /* [V, D]; token_embd's bytes when the head is tied */
    FL_ROLE_ROPE_FACTORS,      /* [rope_dim / 2] f32: rope_freqs, or rope_factors_short */
    FL_ROLE_ROPE_FACTORS_LONG, /* [rope_dim / 2] f32 */
    FL_ROLE_ATTN_NORM,         /* [D] */
    FL_ROLE_ATTN_Q,            /* [H * E, D] */
    FL_ROLE_ATTN_K,            /* [G * E, D] */
    FL_ROLE_ATTN_V,            /* [G * E, D] */
    FL_ROLE_ATTN_OUTPUT,       /* [D, H * E] */
    FL_ROLE_ATTN_Q_NORM,       /* [E], gemma3 */
    FL_ROLE_ATTN_K_NORM,       /* [E], gemma3 */
    FL_ROLE_ATTN_POST_NORM,    /* [D], gemma3 */
    FL_ROLE_FFN_NORM,          /* [D] */
    FL_ROLE_FFN_GATE,          /* [F, D] */
    FL_ROLE_FFN_UP,            /* [F, D] */
    FL_ROLE_FFN_DOWN,          /* [D, F] */
    FL_ROLE_FFN_POST_NORM,     /* [D], gemma3 */
    FL_ROLE_LAST = FL_ROLE_FFN_POST_NORM,
};

struct fl_tensor_ref {
    enum fl_tensor_role role;
    enum fl_dtype dtype;
    uint32_t rows; /* 1 for a vector */
    uint32_t columns;
    uint32_t file; /* index into the model's files */
    uint64_t offset;
    uint64_t size; /* rows x row size: bounds were checked against the file */
};

enum fl_piece_kind { FL_PIECE_EMBED = 1, FL_PIECE_ATTENTION, FL_PIECE_FFN, FL_PIECE_HEAD };

struct fl_piece {
    enum fl_piece_kind kind;
    uint32_t layer; /* 0 for EMBED and HEAD */
    uint32_t tensor_count;
    struct fl_tensor_ref tensors[FL_PIECE_TENSOR_MAX];
};

struct fl_model_file {
    uint64_t size;
};

/* The model as a whole, or the part of it that one stage needs. */
struct fl_manifest {
    char name[FL_MODEL_NAME_MAX]; /* the file's name without .gguf */
    /* Says which bytes these are: XXH3-128 of file sizes and samples (model_identity.h). */
    unsigned char identity[FL_IDENTITY_SIZE];
    struct fl_model_shape shape;
    uint32_t file_count;
    struct fl_model_file files[FL_FILE_COUNT_MAX];
    uint32_t piece_count;
    struct fl_piece *pieces; /* [piece_count], in order of use */
};

/* GGUF's name of a role, without "blk.N." and ".weight"; "unknown" for a number this build lacks. */
const char *fl_tensor_role_name(enum fl_tensor_role role);

/* True for what is one row of F32, false for matrices of any type. */
bool fl_tensor_role_is_vector(enum fl_tensor_role role);

/* Rows and columns a tensor must have in `layer` (0 for EMBED and HEAD), by a checked shape. */
void fl_tensor_dimensions(const struct fl_model_shape *shape, enum fl_tensor_role role,
                          uint32_t layer, uint32_t *out_rows, uint32_t *out_columns);

/* Bytes of a piece in the file. */
uint64_t fl_piece_size(const struct fl_piece *piece);

/* Check a shape from outside: every field within its limit and consistent with the others.
 * FL_MALFORMED, with a sentence that names the field, its value and what would be right. */
FL_MUST_CHECK fl_status fl_model_shape_check(const struct fl_model_shape *shape);

/* Check a manifest from outside: its shape, the order of its pieces (whole layers without a gap, of
 * the model or of one stage), and every tensor's role (at home in its piece's kind, once, none
 * missing), type, dimensions (as the shape says), size and place inside its file. */
FL_MUST_CHECK fl_status fl_manifest_check(const struct fl_manifest *manifest);

#ifdef __cplusplus
}
#endif
#endif
