/* gguf_keys.h - the metadata of one GGUF file: values by name.
 *
 * What gguf.h offers for a model, for one file of it.  Getters return
 * FL_NOT_FOUND (not logged) when the key is missing, FL_MALFORMED when it is of
 * another kind or out of range.
 *
 * Thread:  owner; constant once read.
 * Memory:  read() allocates a table, free() frees it; names and values point into the header.
 */
#ifndef PIPELINE_GGUF_KEYS_H
#define PIPELINE_GGUF_KEYS_H

#include <stdbool.h>
#include <stdint.h>

#include "pipeline/gguf.h"
#include "pipeline/gguf_cursor.h"
#include "proto/base/status.h"

struct gguf_key {
    struct gguf_string name;
    enum gguf_type type;        /* GGUF_ARRAY for arrays */
    enum gguf_type element;     /* the type itself for a scalar */
    uint32_t count;             /* 1 for a scalar */
    const unsigned char *value; /* the first element */
};

struct gguf_keys {
    const char *path;      /* the file's, for error sentences */
    struct gguf_key *list; /* [count], sorted by name */
    uint32_t count;
};

/* Read `count` keys.  What fails midway is freed by gguf_keys_free(). */
FL_MUST_CHECK fl_status gguf_keys_read(struct gguf_keys *keys, struct gguf_cursor *cursor,
                                       uint64_t count);
void gguf_keys_free(struct gguf_keys *keys);

/* NULL when there is none. */
const struct gguf_key *gguf_keys_find(const struct gguf_keys *keys, const char *name);

FL_MUST_CHECK fl_status gguf_keys_uint(const struct gguf_keys *keys, const char *name, uint64_t max,
                                       uint64_t *out);
FL_MUST_CHECK fl_status gguf_keys_float(const struct gguf_keys *keys, const char *name, float *out);
FL_MUST_CHECK fl_status gguf_keys_bool(const struct gguf_keys *keys, const char *name, bool *out);
FL_MUST_CHECK fl_status gguf_keys_string(const struct gguf_keys *keys, const char *name,
                                         struct gguf_string *out);
FL_MUST_CHECK fl_status gguf_keys_array(const struct gguf_keys *keys, const char *name,
                                        enum gguf_type *out_type, uint32_t *out_count);
FL_MUST_CHECK fl_status gguf_keys_strings(const struct gguf_keys *keys, const char *name,
                                          struct gguf_string *out, uint32_t count);
FL_MUST_CHECK fl_status gguf_keys_floats(const struct gguf_keys *keys, const char *name, float *out,
                                         uint32_t count);
FL_MUST_CHECK fl_status gguf_keys_uints(const struct gguf_keys *keys, const char *name,
                                        uint32_t max, uint32_t *out, uint32_t count);

#endif
