#include "tests/support/jsonl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool jsonl_open(struct jsonl *file, const char *path)
{
    *file = (struct jsonl){0};
    FILE *stream = fopen(path, "rb");
    if (stream == NULL) {
        return false;
    }
    size_t capacity = 1 << 16;
    char *data = malloc(capacity);
    while (data != NULL) {
        file->size += fread(data + file->size, 1, capacity - file->size, stream);
        if (file->size < capacity) {
            break;
        }
        capacity *= 2;
        char *grown = realloc(data, capacity);
        if (grown == NULL) {
            free(data);
        }
        data = grown;
    }
    fclose(stream);
    file->data = data;
    return data != NULL;
}

void jsonl_close(struct jsonl *file)
{
    free(file->data);
    *file = (struct jsonl){0};
}

bool jsonl_next(struct jsonl *file, struct jsonl_slice *line)
{
    if (file->at >= file->size) {
        return false;
    }
    const char *begin = file->data + file->at;
    const char *end = memchr(begin, '\n', file->size - file->at);
    const size_t size = end == NULL ? file->size - file->at : (size_t)(end - begin);
    *line = (struct jsonl_slice){begin, size};
    file->at += size + 1;
    return true;
}

static const char *skip_space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n')) {
        at++;
    }
    return at;
}

/* Past a string whose opening quote is at `at`; NULL when it does not end. */
static const char *skip_string(const char *at, const char *end)
{
    for (at++; at < end; at++) {
        if (*at == '\\') {
            at++;
        } else if (*at == '"') {
            return at + 1;
        }
    }
    return NULL;
}

static const char *skip_value(const char *at, const char *end)
{
    int depth = 0;
    while (at < end) {
        if (*at == '"') {
            at = skip_string(at, end);
            if (at == NULL) {
                return NULL;
            }
        } else if (*at == '[' || *at == '{') {
            depth++;
            at++;
        } else if (*at == ']' || *at == '}') {
            if (depth-- == 0) {
                return at;
            }
            at++;
        } else if (*at == ',' && depth == 0) {
            return at;
        } else {
            at++;
        }
        if (depth == 0 && (at[-1] == '"' || at[-1] == ']' || at[-1] == '}')) {
            return at;
        }
    }
    return depth == 0 ? at : NULL;
}

bool jsonl_field(struct jsonl_slice object, const char *key, struct jsonl_slice *out)
{
    const char *end = object.data + object.size;
    const char *at = skip_space(object.data, end);
    if (at == end || *at++ != '{') {
        return false;
    }
    for (;;) {
        at = skip_space(at, end);
        if (at == end || *at != '"') {
            return false;
        }
        const char *name = at + 1;
        at = skip_string(at, end);
        if (at == NULL) {
            return false;
        }
        const size_t name_size = (size_t)(at - 1 - name);
        at = skip_space(at, end);
        if (at == end || *at++ != ':') {
            return false;
        }
        const char *value = skip_space(at, end);
        at = skip_value(value, end);
        if (at == NULL) {
            return false;
        }
        if (name_size == strlen(key) && memcmp(name, key, name_size) == 0) {
            *out = (struct jsonl_slice){value, (size_t)(at - value)};
            return true;
        }
        at = skip_space(at, end);
        if (at == end || *at++ != ',') {
            return false;
        }
    }
}

bool jsonl_element(struct jsonl_slice array, size_t index, struct jsonl_slice *out)
{
    const char *end = array.data + array.size;
    const char *at = skip_space(array.data, end);
    if (at == end || *at++ != '[') {
        return false;
    }
    for (size_t i = 0;; i++) {
        const char *value = skip_space(at, end);
        if (value == end || *value == ']') {
            return false;
        }
        at = skip_value(value, end);
        if (at == NULL) {
            return false;
        }
        if (i == index) {
            *out = (struct jsonl_slice){value, (size_t)(at - value)};
            return true;
        }
        at = skip_space(at, end);
        if (at == end || *at++ != ',') {
            return false;
        }
    }
}

static bool read_hex4(const char *at, const char *end, uint32_t *out)
{
    *out = 0;
    if (end - at < 4) {
        return false;
    }
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdef";
        const char lower = at[i] >= 'A' && at[i] <= 'F' ? (char)(at[i] + 32) : at[i];
        const char *digit = lower == '\0' ? NULL : strchr(digits, lower);
        if (digit == NULL) {
            return false;
        }
        *out = *out << 4 | (uint32_t)(digit - digits);
    }
    return true;
}

static size_t put_utf8(uint32_t point, char out[4])
{
    if (point < 0x80) {
        out[0] = (char)point;
        return 1;
    }
    if (point < 0x800) {
        out[0] = (char)(0xc0 | point >> 6);
        out[1] = (char)(0x80 | (point & 0x3f));
        return 2;
    }
    if (point < 0x10000) {
        out[0] = (char)(0xe0 | point >> 12);
        out[1] = (char)(0x80 | (point >> 6 & 0x3f));
        out[2] = (char)(0x80 | (point & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | point >> 18);
    out[1] = (char)(0x80 | (point >> 12 & 0x3f));
    out[2] = (char)(0x80 | (point >> 6 & 0x3f));
    out[3] = (char)(0x80 | (point & 0x3f));
    return 4;
}

/* What follows a backslash; moves *at past it.  Returns bytes put, 0 when it is no escape. */
static size_t read_escape(const char **at, const char *end, char out[4])
{
    static const char names[] = "\"\\/bfnrt";
    static const char bytes[] = "\"\\/\b\f\n\r\t";
    if (*at == end) {
        return 0;
    }
    const char name = *(*at)++;
    if (name != 'u') {
        const char *found = name == '\0' ? NULL : strchr(names, name);
        if (found == NULL) {
            return 0;
        }
        out[0] = bytes[found - names];
        return 1;
    }
    uint32_t point = 0;
    uint32_t low = 0;
    if (!read_hex4(*at, end, &point)) {
        return 0;
    }
    *at += 4;
    if (point >= 0xd800 && point <= 0xdbff) {
        if (end - *at < 6 || (*at)[0] != '\\' || (*at)[1] != 'u' ||
            !read_hex4(*at + 2, end, &low) || low < 0xdc00 || low > 0xdfff) {
            return 0;
        }
        *at += 6;
        point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
    }
    return put_utf8(point, out);
}

bool jsonl_string(struct jsonl_slice value, char *buffer, size_t max, size_t *out_size)
{
    const char *at = value.data + 1;
    const char *end = value.data + value.size - 1;
    size_t size = 0;
    if (value.size < 2 || value.data[0] != '"' || *end != '"') {
        return false;
    }
    while (at < end) {
        char bytes[4] = {*at};
        size_t count = 1;
        if (*at++ == '\\') {
            count = read_escape(&at, end, bytes);
        }
        if (count == 0 || max - size < count) {
            return false;
        }
        memcpy(buffer + size, bytes, count);
        size += count;
    }
    *out_size = size;
    return true;
}

bool jsonl_bool(struct jsonl_slice value, bool *out)
{
    *out = value.size == 4 && memcmp(value.data, "true", 4) == 0;
    return *out || (value.size == 5 && memcmp(value.data, "false", 5) == 0);
}

bool jsonl_uints(struct jsonl_slice value, uint32_t *out, size_t max, size_t *out_count)
{
    const char *end = value.data + value.size;
    const char *at = skip_space(value.data, end);
    size_t count = 0;
    if (at == end || *at++ != '[') {
        return false;
    }
    at = skip_space(at, end);
    while (at < end && *at != ']') {
        uint64_t number = 0;
        const char *digits = at;
        while (at < end && *at >= '0' && *at <= '9' && number <= UINT32_MAX) {
            number = number * 10 + (uint64_t)(*at++ - '0');
        }
        if (at == digits || number > UINT32_MAX || count == max) {
            return false;
        }
        out[count++] = (uint32_t)number;
        at = skip_space(at, end);
        if (at < end && *at == ',') {
            at = skip_space(at + 1, end);
        }
    }
    *out_count = count;
    return at < end;
}
