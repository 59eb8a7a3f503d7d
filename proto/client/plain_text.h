/* plain_text.h - foreign text for a terminal: no control characters.
 *
 * Thread:  any.
 */
#ifndef PROTO_CLIENT_PLAIN_TEXT_H
#define PROTO_CLIENT_PLAIN_TEXT_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A copy of `text` in out [size], cut when it is longer, control characters as '?'; returns out. */
const char *plain_text(const char *text, char *out, size_t size);

#ifdef __cplusplus
}
#endif
#endif
