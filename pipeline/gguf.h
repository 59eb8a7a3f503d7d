/* gguf.h - reads the header of a GGUF model file.
 *
 * Opens single files and split ones (`NAME-00001-of-0000N.gguf`), versions 2
 * and 3, little-endian.  Only the header is read, never a byte of weights.
 * Every count and length is held against a limit before it is used; a file
 * that breaks one is refused with a sentence.
 *
 * Thread:  owner; an open file is constant.
 * Memory:  open() allocates, close() frees; strings and arrays point into the
 *          header and live until close().  Strings may hold NUL bytes.
 * Units:   offsets from the start of the file, in bytes.
 * Source:  ggml/docs/gguf.md.
 */
#ifndef PIPELINE_GGUF_H
#define PIPELINE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pipeline/gguf_string.h"
#include "proto/base/status.h"
#include "proto/dtype.h"
#include "proto/model_shape.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GGUF_KEY_COUNT_MAX = 65536,
    GGUF_TENSOR_COUNT_MAX = 65536,
    GGUF_STRING_SIZE_MAX = 16 << 20, /* one string; templates and merges stay far below */
    GGUF_ARRAY_COUNT_MAX = 16 << 20,
    GGUF_HEADER_SIZE_MAX = 512 << 20,
    GGUF_TENSOR_NAME_MAX = 64,
};

struct gguf;

enum gguf_type {
    GGUF_UINT8,
    GGUF_INT8,
    GGUF_UINT16,
    GGUF_INT16,
    GGUF_UINT32,
    GGUF_INT32,
    GGUF_FLOAT32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_UINT64,
    GGUF_INT64,
    GGUF_FLOAT64,
};

struct gguf_tensor {
    struct gguf_string name;
    uint32_t dtype;     /* GGUF's number; may be one that fl_dtype_known() denies */
    uint32_t dim_count; /* 1 .. 4 */
    uint64_t dims[4];   /* dims[0] is the fastest; unused ones are 1 */
    uint32_t file;
    uint64_t offset; /* from the start of that file */
    uint64_t size;   /* bytes; 0 for an unknown dtype */
};

/* `path` names the file, or the first part of a split model.
 * FL_NOT_FOUND, FL_IO, FL_MALFORMED (not GGUF, damaged, truncated, overlapping or misaligned
 * tensors), FL_UNSUPPORTED (version, big-endian), FL_TOO_LARGE, FL_NO_MEMORY. */
FL_MUST_CHECK fl_status gguf_open(const char *path, struct gguf **out);

/* The same from memory, for tests: one file whose weights are not there; `file_size` is what the
 * file's size would be.  `data` is borrowed until close. */
FL_MUST_CHECK fl_status gguf_parse(const void *data, size_t size, uint64_t file_size,
                                   struct gguf **out);
void gguf_close(struct gguf *gguf);

uint32_t gguf_file_count(const struct gguf *gguf);
const char *gguf_file_path(const struct gguf *gguf, uint32_t file);
uint64_t gguf_file_size(const struct gguf *gguf, uint32_t file);

/* Whether the open file `fd` is what gguf_open() read, neither replaced nor written to since.  FL_IO
 * when it is not.  Ask after reading: what was read before is then of this model. */
FL_MUST_CHECK fl_status gguf_file_check(const struct gguf *gguf, uint32_t file, int fd);

uint32_t gguf_tensor_count(const struct gguf *gguf);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *gguf, uint32_t index);
/* NULL when there is none. */
const struct gguf_tensor *gguf_tensor_find(const struct gguf *gguf, const char *name);

/* Values by key.  FL_NOT_FOUND (not logged) when the key is missing, FL_MALFORMED when it is of
 * another kind or out of range.  Integers are read from any integer type that holds the value;
 * floats from FLOAT32 and FLOAT64 and integers. */
bool gguf_has(const struct gguf *gguf, const char *key);
bool gguf_is_array(const struct gguf *gguf, const char *key);
FL_MUST_CHECK fl_status gguf_get_uint(const struct gguf *gguf, const char *key, uint64_t max,
                                      uint64_t *out);
FL_MUST_CHECK fl_status gguf_get_float(const struct gguf *gguf, const char *key, float *out);
FL_MUST_CHECK fl_status gguf_get_bool(const struct gguf *gguf, const char *key, bool *out);
FL_MUST_CHECK fl_status gguf_get_string(const struct gguf *gguf, const char *key,
                                        struct gguf_string *out);

/* Arrays.  Elements of strings are found by walking once: gguf_strings() fills out [count]. */
FL_MUST_CHECK fl_status gguf_array_count(const struct gguf *gguf, const char *key,
                                         enum gguf_type *out_type, uint32_t *out_count);
FL_MUST_CHECK fl_status gguf_strings(const struct gguf *gguf, const char *key,
                                     struct gguf_string *out, uint32_t count);
FL_MUST_CHECK fl_status gguf_floats(const struct gguf *gguf, const char *key, float *out,
                                    uint32_t count);
/* From any integer type (or BOOL); FL_MALFORMED when a value is negative or above `max`. */
FL_MUST_CHECK fl_status gguf_uints(const struct gguf *gguf, const char *key, uint32_t max,
                                   uint32_t *out, uint32_t count);

#ifdef __cplusplus
}
#endif
#endif
