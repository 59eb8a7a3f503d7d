/* model.h - a model file understood: what to compute, and where its weights lie.
 *
 * Turns a GGUF header into a manifest: the shape (sizes and constants of the
 * computation) and the pieces in order of use.  What this build would compute
 * wrongly is refused by name here, before a byte of weights is read: other
 * architectures, element types, tensors or metadata that change the result.
 *
 *   gguf ──► model ──► manifest of the whole ──► manifest of one stage
 *
 * Architectures: llama (RoPE scaling none, linear, yarn, longrope and factors
 * from the file), gemma3.  Heads tied or untied.
 *
 * Thread:  owner; an open model is constant.
 * Memory:  open() allocates, close() frees; what the getters return lives until close().
 * Units:   sizes in bytes.
 * Source:  ggml/docs/gguf.md for the keys; Gemma 3 Technical Report, arXiv:2503.19786;
 *          LongRoPE, arXiv:2402.13753.
 */
#ifndef PIPELINE_MODEL_H
#define PIPELINE_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "pipeline/gguf.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"

#ifdef __cplusplus
extern "C" {
#endif

struct model;

/* `path` names the file, or the first part of a split model.  The model's name is the file's, without
 * ".gguf" and "-00001-of-0000N".  What gguf_open() returns; FL_UNSUPPORTED, FL_MALFORMED and FL_TOO_LARGE
 * for what this build does not compute. */
FL_MUST_CHECK fl_status model_open(const char *path, struct model **out);

/* The same from a parsed header.  Takes ownership of `gguf` on FL_OK.  The identity stays 0. */
FL_MUST_CHECK fl_status model_from_gguf(struct gguf *gguf, const char *name, struct model **out);

/* NULL is allowed. */
void model_close(struct model *model);

/* All pieces: EMBED, ATTENTION 0, FFN 0, ATTENTION 1, .., HEAD. */
const struct fl_manifest *model_manifest(const struct model *model);
const struct gguf *model_gguf(const struct model *model);

/* A stage's share of a model. */
struct model_range {
    uint32_t layer_first;
    uint32_t layer_count; /* 1 or more */
    bool has_embed;       /* only with layer_first 0 */
    bool has_head;        /* only with the last layer */
};

/* The manifest of one stage; its pieces are borrowed from `whole`.  With a tied head, HEAD refers to
 * token_embd's bytes.  FL_INVALID when the range does not fit the model. */
FL_MUST_CHECK fl_status model_stage_manifest(const struct fl_manifest *whole,
                                             const struct model_range *range,
                                             struct fl_manifest *out);

#ifdef __cplusplus
}
#endif
#endif
