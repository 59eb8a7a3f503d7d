/* jsonl.h - reads reference data: one JSON object a line, strings that may hold U+0000.
 *
 * No tree is built.  A value is the slice of text that spells it; the
 * functions below take slices apart.  They return false for anything that is
 * not what was asked for, which a test treats as a broken file.
 *
 * Thread:  any.
 * Memory:  open() reads the file whole; slices point into it until close().
 */
#ifndef TESTS_SUPPORT_JSONL_H
#define TESTS_SUPPORT_JSONL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct jsonl {
    char *data;
    size_t size;
    size_t at;
};

struct jsonl_slice {
    const char *data;
    size_t size;
};

bool jsonl_open(struct jsonl *file, const char *path);
void jsonl_close(struct jsonl *file);

/* The next line; false at the end. */
bool jsonl_next(struct jsonl *file, struct jsonl_slice *line);

/* A field of an object, an element of an array. */
bool jsonl_field(struct jsonl_slice object, const char *key, struct jsonl_slice *out);
bool jsonl_element(struct jsonl_slice array, size_t index, struct jsonl_slice *out);

/* A string as UTF-8 into buffer[max]; not terminated. */
bool jsonl_string(struct jsonl_slice value, char *buffer, size_t max, size_t *out_size);
bool jsonl_bool(struct jsonl_slice value, bool *out);

/* An array of numbers without sign and fraction. */
bool jsonl_uints(struct jsonl_slice value, uint32_t *out, size_t max, size_t *out_count);

#endif
