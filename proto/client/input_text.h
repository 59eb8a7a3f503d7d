/* input_text.h - a whole file or standard input as one text.
 *
 * Thread:  any.
 * Memory:  the text is malloc'ed; the caller frees it.
 */
#ifndef PROTO_CLIENT_INPUT_TEXT_H
#define PROTO_CLIENT_INPUT_TEXT_H

#include <stddef.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `path` NULL or "-": standard input.  Not empty pointer even when the text is; NUL-terminated
 * behind its size.  FL_NOT_FOUND, FL_IO; FL_TOO_LARGE above FL_PROMPT_SIZE_MAX; FL_INVALID when it
 * is not UTF-8. */
FL_MUST_CHECK fl_status input_text_read(const char *path, char **out, size_t *out_size);

/* FL_INVALID, with a sentence that calls it `what`, when text is not UTF-8. */
FL_MUST_CHECK fl_status input_text_check(const char *what, const char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
