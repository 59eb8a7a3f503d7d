/* json_output.h - JSON on a stream, written front to back.
 *
 * Commas and quotes are its business, nesting the caller's.  Texts have a
 * length, because an answer may hold NUL, and single-precision numbers are
 * printed so that they read back to the same bits: neither is what a library
 * of C strings and doubles does.
 *
 * Thread:  owner.
 * Memory:  none.
 */
#ifndef PROTO_CLIENT_JSON_OUTPUT_H
#define PROTO_CLIENT_JSON_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

struct json_output {
    FILE *stream;
    bool comma; /* the next value follows another */
};

/* `key` is NULL inside an array and at the top. */
void json_open(struct json_output *json, const char *key, char bracket); /* '{' or '[' */
void json_close(struct json_output *json, char bracket);                 /* '}' or ']' */
void json_text(struct json_output *json, const char *key, const char *text, size_t size);
void json_string(struct json_output *json, const char *key, const char *text);
void json_whole(struct json_output *json, const char *key, uint64_t value);
void json_bool(struct json_output *json, const char *key, bool value);
void json_real(struct json_output *json, const char *key, double value); /* three decimals */
void json_nano(struct json_output *json, const char *key, double value); /* six decimals */
void json_null(struct json_output *json, const char *key);
void json_single(struct json_output *json, const char *key, float value); /* every bit */

#ifdef __cplusplus
}
#endif
#endif
