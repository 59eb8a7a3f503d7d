#include "pipeline/gguf_string.h"

#include <string.h>

struct gguf_string gguf_string_of(const char *text)
{
    return (struct gguf_string){.data = text, .size = strlen(text)};
}

bool gguf_string_is(struct gguf_string string, const char *text)
{
    return gguf_string_compare(string, gguf_string_of(text)) == 0;
}

int gguf_string_compare(struct gguf_string a, struct gguf_string b)
{
    const size_t common = a.size < b.size ? a.size : b.size;
    const int order = common != 0 ? memcmp(a.data, b.data, common) : 0;
    return order != 0 ? order : (a.size > b.size) - (a.size < b.size);
}

struct gguf_shown gguf_show(struct gguf_string string)
{
    struct gguf_shown shown = {.text = ""};
    const size_t size = string.size < GGUF_SHOWN_MAX ? string.size : GGUF_SHOWN_MAX;
    for (size_t i = 0; i < size; i++) {
        const unsigned char byte = (unsigned char)string.data[i];
        shown.text[i] = string.data[i];
        if (byte < 0x20 || byte == 0x7f) {
            shown.text[i] = '?';
        }
    }
    if (string.size > GGUF_SHOWN_MAX) {
        memcpy(shown.text + size, "...", 4);
    }
    return shown;
}
