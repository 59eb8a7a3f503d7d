/* utf8.h - UTF-8 as Unicode defines it: shortest form, no surrogates.
 *
 * Thread:  any.
 * Memory:  none.
 * Source:  The Unicode Standard, section 3.9, table 3-7 and "maximal subpart".
 */
#ifndef COORDINATOR_UTF8_H
#define COORDINATOR_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the character that `lead` starts: 1 .. 4, or 0 when no character starts so. */
uint32_t utf8_size(unsigned char lead);

/* Whether `next` may stand at `index` (1 .. 3) of the character that `lead` starts. */
bool utf8_continues(unsigned char lead, uint32_t index, unsigned char next);

/* Offset of the first byte that is not part of a character; `size` when there is none. */
size_t utf8_valid_size(const char *text, size_t size);

#endif
