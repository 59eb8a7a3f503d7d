#include "proto/base/utf8.h"

uint32_t fl_utf8_size(unsigned char lead)
{
    if (lead < 0x80) {
        return 1;
    }
    if (lead >= 0xc2 && lead <= 0xdf) {
        return 2;
    }
    if (lead >= 0xe0 && lead <= 0xef) {
        return 3;
    }
    return lead >= 0xf0 && lead <= 0xf4 ? 4 : 0;
}

bool fl_utf8_continues(unsigned char lead, uint32_t index, unsigned char next)
{
    unsigned char low = 0x80;
    unsigned char high = 0xbf;
    if (index == 1) { /* the second byte rules out long forms, surrogates and > U+10FFFF */
        low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : low;
        high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : high;
    }
    return next >= low && next <= high;
}

size_t fl_utf8_valid_size(const void *data, size_t size)
{
    const unsigned char *bytes = data;
    size_t at = 0;
    while (at < size) {
        if (bytes[at] < 0x80) {
            at++;
            continue;
        }
        const uint32_t want = fl_utf8_size(bytes[at]);
        if (want == 0 || want > size - at) {
            return at;
        }
        for (uint32_t i = 1; i < want; i++) {
            if (!fl_utf8_continues(bytes[at], i, bytes[at + i])) {
                return at;
            }
        }
        at += want;
    }
    return size;
}

size_t fl_utf8_clean_size(const char *text, size_t size)
{
    const size_t valid = fl_utf8_valid_size(text, size);
    size_t at = 0;
    while (at < valid && (unsigned char)text[at] >= 0x20 && text[at] != 0x7f) {
        at++;
    }
    return at;
}

void fl_utf8_clean(char *text, size_t size)
{
    for (size_t at = fl_utf8_clean_size(text, size); at < size;
         at += fl_utf8_clean_size(text + at, size - at)) {
        text[at++] = '?';
    }
}
