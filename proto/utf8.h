/* utf8.h - is it UTF-8, and if not, from where on.
 *
 * Thread:  any.
 * Source:  RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
 */
#ifndef PROTO_UTF8_H
#define PROTO_UTF8_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of data [size] that are whole, valid UTF-8 characters from its start: `size` when all is. */
size_t fl_utf8_valid_size(const void *data, size_t size);

#ifdef __cplusplus
}
#endif
#endif
