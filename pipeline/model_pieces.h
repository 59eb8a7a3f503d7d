/* model_pieces.h - a model file's tensors, cut into pieces in order of use.
 *
 * Each tensor belongs to a piece: one that none takes would change the result
 * by its absence, so it is refused.
 *
 * Thread:  any; the file is constant.
 * Memory:  the pieces are the manifest's.
 */
#ifndef PIPELINE_MODEL_PIECES_H
#define PIPELINE_MODEL_PIECES_H

#include "pipeline/gguf.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fill manifest->pieces [FL_PIECE_COUNT_MAX] for the shape that is there.  FL_UNSUPPORTED for tensors of
 * unknown types or names; which of the known ones must be there is fl_manifest_check()'s. */
FL_MUST_CHECK fl_status model_pieces_read(const struct gguf *gguf, struct fl_manifest *manifest);

#ifdef __cplusplus
}
#endif
#endif
