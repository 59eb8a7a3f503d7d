#include "proto/client/json_output.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static void put_quoted(FILE *stream, const char *text, size_t size)
{
    fputc('"', stream);
    for (size_t i = 0; i < size; i++) {
        const unsigned char c = (unsigned char)text[i];
        switch (c) {
        case '"': fputs("\\\"", stream); break;
        case '\\': fputs("\\\\", stream); break;
        case '\n': fputs("\\n", stream); break;
        case '\r': fputs("\\r", stream); break;
        case '\t': fputs("\\t", stream); break;
        default:
            if (c < 0x20 || c == 0x7f) {
                fprintf(stream, "\\u%04x", (unsigned)c);
            } else {
                fputc(c, stream);
            }
        }
    }
    fputc('"', stream);
}

/* What stands before a value. */
static void begin(struct json_output *json, const char *key)
{
    if (json->comma) {
        fputc(',', json->stream);
    }
    if (key != NULL) {
        put_quoted(json->stream, key, strlen(key));
        fputc(':', json->stream);
    }
    json->comma = true;
}

void json_open(struct json_output *json, const char *key, char bracket)
{
    begin(json, key);
    fputc(bracket, json->stream);
    json->comma = false;
}

void json_close(struct json_output *json, char bracket)
{
    fputc(bracket, json->stream);
    json->comma = true;
}

void json_text(struct json_output *json, const char *key, const char *text, size_t size)
{
    begin(json, key);
    put_quoted(json->stream, text, size);
}

void json_string(struct json_output *json, const char *key, const char *text)
{
    json_text(json, key, text, strlen(text));
}

void json_whole(struct json_output *json, const char *key, uint64_t value)
{
    begin(json, key);
    fprintf(json->stream, "%" PRIu64, value);
}

void json_bool(struct json_output *json, const char *key, bool value)
{
    begin(json, key);
    fputs(value ? "true" : "false", json->stream);
}

void json_real(struct json_output *json, const char *key, double value)
{
    begin(json, key);
    fprintf(json->stream, "%.3f", value);
}

void json_nano(struct json_output *json, const char *key, double value)
{
    begin(json, key);
    fprintf(json->stream, "%.6f", value);
}

void json_null(struct json_output *json, const char *key)
{
    begin(json, key);
    fputs("null", json->stream);
}

void json_single(struct json_output *json, const char *key, float value)
{
    begin(json, key);
    fprintf(json->stream, "%.9g", (double)value);
}
