#include "proto/client/plain_text.h"

#include <stdio.h>

#include "proto/base/utf8.h"

const char *plain_text(const char *text, char *out, size_t size)
{
    const int wanted = snprintf(out, size, "%s", text);
    /* A cut may have gone through a character. */
    const size_t stored = wanted < 0 ? 0 : (size_t)wanted < size ? (size_t)wanted : size - 1;
    out[fl_utf8_valid_size(out, stored)] = '\0';
    for (char *c = out; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            *c = '?';
        }
    }
    return out;
}
