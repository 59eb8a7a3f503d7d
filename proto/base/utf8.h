/* utf8.h - UTF-8 as Unicode defines it: shortest form, no surrogates, nothing above U+10FFFF.
 *
 * Thread:  any.
 * Memory:  none.
 * Source:  RFC 3629; The Unicode Standard, section 3.9, table 3-7 and "maximal subpart".
 */
#ifndef PROTO_BASE_UTF8_H
#define PROTO_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of the character that `lead` starts: 1 .. 4, or 0 when no character starts so. */
uint32_t fl_utf8_size(unsigned char lead);

/* Whether `next` may stand at `index` (1 .. 3) of the character that `lead` starts. */
bool fl_utf8_continues(unsigned char lead, uint32_t index, unsigned char next);

/* Bytes of data [size] that are whole, valid characters from its start: `size` when all is. */
size_t fl_utf8_valid_size(const void *data, size_t size);

/* The same, up to the first control character. */
size_t fl_utf8_clean_size(const char *text, size_t size);

/* Make text one line of UTF-8 that any terminal and any protocol takes: control characters and
 * bytes that are no character become '?'. */
void fl_utf8_clean(char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
