/* model_metadata.h - what a model file's keys say is to be computed.
 *
 * Keys that ask for a computation this build lacks are refused by name; those
 * it may leave out get their defaults here.
 *
 * Thread:  any; the file is constant.
 * Memory:  none.
 * Source:  ggml/docs/gguf.md for the keys; Gemma 3 Technical Report, arXiv:2503.19786;
 *          LongRoPE, arXiv:2402.13753.
 */
#ifndef PIPELINE_MODEL_METADATA_H
#define PIPELINE_MODEL_METADATA_H

#include "pipeline/gguf.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The shape, checked.  FL_UNSUPPORTED, FL_MALFORMED and FL_TOO_LARGE with the key's name. */
FL_MUST_CHECK fl_status model_metadata_read(const struct gguf *gguf, struct fl_model_shape *out);

#ifdef __cplusplus
}
#endif
#endif
