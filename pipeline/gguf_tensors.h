/* gguf_tensors.h - the tensors of a model's files: where each lies, and by name.
 *
 * Read file by file behind the keys, then indexed once.  A tensor that is
 * misaligned, beyond the end of its file, there twice or upon another is
 * refused with a sentence.
 *
 * Thread:  owner; constant once indexed.
 * Memory:  read() and index() allocate, free() frees; names point into the headers.
 */
#ifndef PIPELINE_GGUF_TENSORS_H
#define PIPELINE_GGUF_TENSORS_H

#include <stdint.h>

#include "pipeline/gguf.h"
#include "pipeline/gguf_cursor.h"
#include "pipeline/gguf_keys.h"
#include "proto/base/status.h"

struct gguf_tensors {
    struct gguf_tensor *list; /* [count], in file order */
    uint32_t count;
    const struct gguf_tensor **by_name; /* [count], sorted */
};

/* Read `count` tensors of file number `file`, whose keys were read.  What fails midway is freed by
 * gguf_tensors_free(). */
FL_MUST_CHECK fl_status gguf_tensors_read(struct gguf_tensors *tensors, struct gguf_cursor *cursor,
                                          const struct gguf_keys *keys, uint64_t count,
                                          uint32_t file);

/* All files were read; `paths` are theirs, for error sentences. */
FL_MUST_CHECK fl_status gguf_tensors_index(struct gguf_tensors *tensors, const char *const *paths);
void gguf_tensors_free(struct gguf_tensors *tensors);

/* NULL when there is none. */
const struct gguf_tensor *gguf_tensors_find(const struct gguf_tensors *tensors, const char *name);

#endif
