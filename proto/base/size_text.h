/* size_text.h - sizes as people write them: "512MiB", "1.5GiB", "20GB", "4096".
 *
 * KiB, MiB, GiB, TiB and the bare letters K, M, G, T are powers of 1024; kB, KB,
 * MB, GB, TB are powers of 1000; nothing or B is bytes.  A fraction is rounded
 * down to whole bytes.
 *
 * Thread:  any.
 */
#ifndef PROTO_BASE_SIZE_TEXT_H
#define PROTO_BASE_SIZE_TEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FL_SIZE_TEXT_MAX = 32 };

/* False when the text is no size; says nothing.  For callers with a sentence of their own. */
bool fl_size_text_value(const char *text, uint64_t *out);

/* FL_INVALID with a sentence that quotes the text; also over 2^62. */
FL_MUST_CHECK fl_status fl_size_text_parse(const char *text, uint64_t *out);

/* "512.0 MiB": for people, not for parse(); out [FL_SIZE_TEXT_MAX]. */
void fl_size_text_format(uint64_t size, char *out);

#ifdef __cplusplus
}
#endif
#endif
