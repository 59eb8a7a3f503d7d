/* gguf_buffer.h - a GGUF header written by hand, right or wrong.
 *
 * put_*() append in file order: header, keys, tensors, padding.  The counts in
 * the header follow by themselves; a test that wants a malformed file patches
 * `data` afterwards, or puts bytes of its own.
 *
 * Memory:  grows by realloc; gguf_buffer_free() ends it.
 */
#ifndef TESTS_SUPPORT_GGUF_BUFFER_H
#define TESTS_SUPPORT_GGUF_BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pipeline/gguf.h"

struct gguf_buffer {
    unsigned char *data;
    size_t size;
    size_t capacity;
};

/* Where the header's fields lie. */
enum { GGUF_AT_VERSION = 4, GGUF_AT_TENSOR_COUNT = 8, GGUF_AT_KEY_COUNT = 16 };

void gguf_buffer_free(struct gguf_buffer *buffer);

void gguf_put(struct gguf_buffer *buffer, const void *bytes, size_t size);
void gguf_put_u32(struct gguf_buffer *buffer, uint32_t value);
void gguf_put_u64(struct gguf_buffer *buffer, uint64_t value);
void gguf_put_string(struct gguf_buffer *buffer, struct gguf_string string); /* length and bytes */
void gguf_patch_u32(struct gguf_buffer *buffer, size_t at, uint32_t value);
void gguf_patch_u64(struct gguf_buffer *buffer, size_t at, uint64_t value);

/* Magic, version, and both counts at 0. */
void gguf_put_header(struct gguf_buffer *buffer, uint32_t version);

/* A key's name and type; the value is up to the caller.  Counts the key. */
void gguf_put_key(struct gguf_buffer *buffer, const char *key, uint32_t type);

void gguf_put_key_uint(struct gguf_buffer *buffer, const char *key, enum gguf_type type,
                       uint64_t value);
void gguf_put_key_float(struct gguf_buffer *buffer, const char *key, float value);
void gguf_put_key_bool(struct gguf_buffer *buffer, const char *key, bool value);
void gguf_put_key_text(struct gguf_buffer *buffer, const char *key, const char *text);
void gguf_put_key_string(struct gguf_buffer *buffer, const char *key, struct gguf_string string);
void gguf_put_key_strings(struct gguf_buffer *buffer, const char *key,
                          const struct gguf_string *strings, uint32_t count);
void gguf_put_key_floats(struct gguf_buffer *buffer, const char *key, const float *values,
                         uint32_t count);
void gguf_put_key_uints(struct gguf_buffer *buffer, const char *key, enum gguf_type type,
                        const uint32_t *values, uint32_t count);

/* A tensor's line; `offset` counts from the start of the data.  Counts the tensor. */
void gguf_put_tensor(struct gguf_buffer *buffer, const char *name, uint32_t dim_count,
                     const uint64_t *dims, uint32_t dtype, uint64_t offset);

/* Zeros up to a multiple of `alignment`. */
void gguf_put_padding(struct gguf_buffer *buffer, size_t alignment);

#endif
