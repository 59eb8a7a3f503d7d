/* gguf_string.h - a string of a GGUF file, as it lies in the header.
 *
 * Thread:  plain values.
 * Memory:  borrowed from whoever holds the header.
 */
#ifndef PIPELINE_GGUF_STRING_H
#define PIPELINE_GGUF_STRING_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { GGUF_SHOWN_MAX = 72 };

struct gguf_string {
    const char *data; /* not terminated; may hold NUL */
    size_t size;
};

struct gguf_string gguf_string_of(const char *text);
bool gguf_string_is(struct gguf_string string, const char *text);

/* Order: by bytes, the shorter first. */
int gguf_string_compare(struct gguf_string a, struct gguf_string b);

/* As it may be printed in a sentence: cut, and without control characters. */
struct gguf_shown {
    char text[GGUF_SHOWN_MAX + 4];
};
struct gguf_shown gguf_show(struct gguf_string string);

#ifdef __cplusplus
}
#endif
#endif
