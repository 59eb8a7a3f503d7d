/* gguf_cursor.h - walks a GGUF header front to back and reads it as it goes.
 *
 * The memory behind `base` is reserved for the longest header allowed, so that
 * what was read never moves; pages that were not read cost nothing.
 *
 * Thread:  owner.
 * Memory:  `path` and `base` are borrowed.
 */
#ifndef PIPELINE_GGUF_CURSOR_H
#define PIPELINE_GGUF_CURSOR_H

#include <stddef.h>
#include <stdint.h>

#include "pipeline/gguf.h"
#include "pipeline/gguf_string.h"
#include "proto/base/status.h"

enum { GGUF_CURSOR_READ_SIZE = 64 << 10 };

struct gguf_cursor {
    const char *path; /* for error sentences */
    uint64_t file_size;
    int fd; /* -1: everything is there */
    unsigned char *base;
    size_t limit;  /* bytes that may be read: the file's size or GGUF_HEADER_SIZE_MAX */
    size_t filled; /* bytes that are there */
    size_t at;
    size_t read_size; /* of the next read; GGUF_CURSOR_READ_SIZE at first, then more */
};

FL_MUST_CHECK fl_status gguf_cursor_fill(struct gguf_cursor *cursor, size_t size);

/* Make the next `size` bytes readable. */
FL_MUST_CHECK static inline fl_status gguf_cursor_need(struct gguf_cursor *cursor, size_t size)
{
    return size <= cursor->filled - cursor->at ? FL_OK : gguf_cursor_fill(cursor, size);
}

FL_MUST_CHECK fl_status gguf_cursor_u32(struct gguf_cursor *cursor, uint32_t *out);
FL_MUST_CHECK fl_status gguf_cursor_u64(struct gguf_cursor *cursor, uint64_t *out);

/* A length and that many bytes.  `what` is for the error sentence. */
FL_MUST_CHECK fl_status gguf_cursor_string(struct gguf_cursor *cursor, uint64_t size_max,
                                           const char *what, struct gguf_string *out);

#endif
