#include "proto/client/input_text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/utf8.h"
#include "proto/client_message.h"

fl_status input_text_check(const char *what, const char *text, size_t size)
{
    const size_t valid = fl_utf8_valid_size(text, size);
    if (valid < size) {
        return FL_FAIL(FL_INVALID, "%s is not UTF-8 at byte %zu (0x%02x)", what, valid,
                       (unsigned)(unsigned char)text[valid]);
    }
    return FL_OK;
}

/* Reads at most one byte more than the limit: enough to know that it is over it. */
static fl_status read_stream(FILE *stream, const char *what, char *text, size_t *out_size)
{
    const size_t size = fread(text, 1, (size_t)FL_PROMPT_SIZE_MAX + 1, stream);
    if (ferror(stream)) {
        return FL_FAIL(FL_IO, "%s cannot be read: %s", what, strerror(errno));
    }
    if (size > FL_PROMPT_SIZE_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "%s has more than %d bytes, which is the limit", what,
                       FL_PROMPT_SIZE_MAX);
    }
    FL_TRY(input_text_check(what, text, size));
    text[size] = '\0';
    *out_size = size;
    return FL_OK;
}

fl_status input_text_read(const char *path, char **out, size_t *out_size)
{
    const int from_stdin = path == NULL || strcmp(path, "-") == 0;
    const char *what = from_stdin ? "standard input" : path;
    FILE *stream = from_stdin ? stdin : fopen(path, "rb");
    if (stream == NULL) {
        return FL_FAIL(FL_NOT_FOUND, "%s cannot be opened: %s", path, strerror(errno));
    }
    char *text = malloc((size_t)FL_PROMPT_SIZE_MAX + 2);
    const fl_status status = text == NULL ? FL_FAIL(FL_NO_MEMORY, "no memory for %s", what)
                                          : read_stream(stream, what, text, out_size);
    if (!from_stdin) {
        fclose(stream);
    }
    if (status != FL_OK) {
        free(text);
        return status;
    }
    *out = text;
    return FL_OK;
}
