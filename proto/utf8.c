#include "proto/utf8.h"

#include <stdint.h>

/* Bytes of the character at text [size], 0 when it is none. */
static size_t character_size(const unsigned char *text, size_t size)
{
    const unsigned char lead = text[0];
    if (lead < 0x80) {
        return 1;
    }
    if (lead < 0xc2 || lead > 0xf4) {
        return 0;
    }
    const size_t want = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (want > size) {
        return 0;
    }
    /* The second byte alone tells overlong forms, surrogates and what is above U+10FFFF. */
    const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (text[1] < low || text[1] > high) {
        return 0;
    }
    for (size_t i = 2; i < want; i++) {
        if ((text[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    return want;
}

size_t fl_utf8_valid_size(const void *data, size_t size)
{
    const unsigned char *text = data;
    size_t valid = 0;
    while (valid < size) {
        const size_t step = character_size(text + valid, size - valid);
        if (step == 0) {
            break;
        }
        valid += step;
    }
    return valid;
}
