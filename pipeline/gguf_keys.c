#include "pipeline/gguf_keys.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_SIZE_MAX = 65535 }; /* of a key's name, as the specification has it */

static uint64_t load_u64(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static const struct {
    const char *name;
    size_t size; /* 0: not a fixed one */
} type_info[] = {
    [GGUF_UINT8] = {"an integer", 1},  [GGUF_INT8] = {"an integer", 1},
    [GGUF_UINT16] = {"an integer", 2}, [GGUF_INT16] = {"an integer", 2},
    [GGUF_UINT32] = {"an integer", 4}, [GGUF_INT32] = {"an integer", 4},
    [GGUF_FLOAT32] = {"a number", 4},  [GGUF_BOOL] = {"true or false", 1},
    [GGUF_STRING] = {"a string", 0},   [GGUF_ARRAY] = {"an array", 0},
    [GGUF_UINT64] = {"an integer", 8}, [GGUF_INT64] = {"an integer", 8},
    [GGUF_FLOAT64] = {"a number", 8},
};

static fl_status check_type(const struct gguf_cursor *cursor, const struct gguf_key *key,
                            uint32_t type)
{
    if (type > GGUF_FLOAT64) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: key %s has the unknown value type %" PRIu32 "; types are 0 to %d",
                       cursor->path, gguf_show(key->name).text, type, GGUF_FLOAT64);
    }
    return FL_OK;
}

/* Step over the strings of an array; their lengths are all that is looked at. */
static fl_status walk_strings(struct gguf_cursor *cursor, uint32_t count)
{
    struct gguf_string string;
    for (uint32_t i = 0; i < count; i++) {
        FL_TRY(gguf_cursor_string(cursor, GGUF_STRING_SIZE_MAX, "a string in an array", &string));
    }
    return FL_OK;
}

static fl_status parse_array(struct gguf_cursor *cursor, struct gguf_key *key)
{
    uint32_t element = 0;
    uint64_t count = 0;
    FL_TRY(gguf_cursor_u32(cursor, &element));
    FL_TRY(check_type(cursor, key, element));
    FL_TRY(gguf_cursor_u64(cursor, &count));
    if (element == GGUF_ARRAY) {
        return FL_FAIL(FL_UNSUPPORTED, "%s: key %s is an array of arrays, which no model needs",
                       cursor->path, gguf_show(key->name).text);
    }
    if (count > GGUF_ARRAY_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE,
                       "%s: key %s is an array of %" PRIu64 " elements; at most %d are allowed",
                       cursor->path, gguf_show(key->name).text, count, GGUF_ARRAY_COUNT_MAX);
    }
    key->element = (enum gguf_type)element;
    key->count = (uint32_t)count;
    key->value = cursor->base + cursor->at;
    if (element == GGUF_STRING) {
        return walk_strings(cursor, key->count);
    }
    const size_t size = key->count * type_info[element].size;
    FL_TRY(gguf_cursor_need(cursor, size));
    cursor->at += size;
    return FL_OK;
}

static fl_status parse_key(struct gguf_cursor *cursor, struct gguf_key *key)
{
    uint32_t type = 0;
    FL_TRY(gguf_cursor_string(cursor, KEY_SIZE_MAX, "a key", &key->name));
    if (key->name.size == 0) {
        return FL_FAIL(FL_MALFORMED, "%s: the key at byte %zu has no name", cursor->path,
                       cursor->at - sizeof(uint64_t));
    }
    FL_TRY(gguf_cursor_u32(cursor, &type));
    FL_TRY(check_type(cursor, key, type));
    key->type = key->element = (enum gguf_type)type;
    key->count = 1;
    key->value = cursor->base + cursor->at;
    if (type == GGUF_ARRAY) {
        return parse_array(cursor, key);
    }
    if (type == GGUF_STRING) {
        return walk_strings(cursor, 1);
    }
    FL_TRY(gguf_cursor_need(cursor, type_info[type].size));
    cursor->at += type_info[type].size;
    return FL_OK;
}

static int key_compare(const void *a, const void *b)
{
    return gguf_string_compare(((const struct gguf_key *)a)->name,
                               ((const struct gguf_key *)b)->name);
}

fl_status gguf_keys_read(struct gguf_keys *keys, struct gguf_cursor *cursor, uint64_t count)
{
    keys->path = cursor->path;
    if (count > GGUF_KEY_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "%s: claims %" PRIu64 " keys; at most %d are allowed",
                       keys->path, count, GGUF_KEY_COUNT_MAX);
    }
    keys->list = calloc(count != 0 ? count : 1, sizeof(*keys->list));
    if (keys->list == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory for %" PRIu64 " keys", keys->path, count);
    }
    for (keys->count = 0; keys->count < count; keys->count++) {
        FL_TRY(parse_key(cursor, &keys->list[keys->count]));
    }
    qsort(keys->list, keys->count, sizeof(*keys->list), key_compare);
    for (uint32_t i = 1; i < keys->count; i++) {
        if (key_compare(&keys->list[i - 1], &keys->list[i]) == 0) {
            return FL_FAIL(FL_MALFORMED, "%s: key %s is there twice", keys->path,
                           gguf_show(keys->list[i].name).text);
        }
    }
    return FL_OK;
}

const struct gguf_key *gguf_keys_find(const struct gguf_keys *keys, const char *name)
{
    const struct gguf_key wanted = {.name = gguf_string_of(name)};
    return keys->count == 0
               ? NULL
               : bsearch(&wanted, keys->list, keys->count, sizeof(wanted), key_compare);
}

/* An integer of any type as sign and magnitude; false when the element is no integer. */
static bool load_integer(enum gguf_type type, const unsigned char *at, bool *negative,
                         uint64_t *magnitude)
{
    int64_t value = 0;
    uint64_t bits = 0;
    if (type == GGUF_STRING || type == GGUF_ARRAY || type == GGUF_FLOAT32 || type == GGUF_FLOAT64) {
        return false;
    }
    memcpy(&bits, at, type_info[type].size);
    switch (type) {
    case GGUF_INT8: value = (int64_t)(bits << 56) >> 56; break;
    case GGUF_INT16: value = (int16_t)bits; break;
    case GGUF_INT32: value = (int32_t)bits; break;
    case GGUF_INT64: value = (int64_t)bits; break;
    case GGUF_UINT8:
    case GGUF_UINT16:
    case GGUF_UINT32:
    case GGUF_UINT64:
    case GGUF_BOOL:
    case GGUF_FLOAT32:
    case GGUF_FLOAT64:
    case GGUF_STRING:
    case GGUF_ARRAY: break;
    }
    *negative = value < 0;
    *magnitude = value < 0 ? -(uint64_t)value : bits;
    return true;
}

static bool load_float(enum gguf_type type, const unsigned char *at, float *out)
{
    bool negative;
    uint64_t magnitude;
    if (type == GGUF_FLOAT32) {
        memcpy(out, at, sizeof(*out));
        return true;
    }
    if (type == GGUF_FLOAT64) {
        double value;
        memcpy(&value, at, sizeof(value));
        *out = (float)value;
        return true;
    }
    if (type == GGUF_BOOL || !load_integer(type, at, &negative, &magnitude)) {
        return false;
    }
    *out = negative ? -(float)magnitude : (float)magnitude;
    return true;
}

static fl_status wrong_kind(const struct gguf_keys *keys, const struct gguf_key *key,
                            const char *want)
{
    const char *got = type_info[key->type].name;
    return FL_FAIL(FL_MALFORMED, "%s: key %s is %s; it must be %s", keys->path,
                   gguf_show(key->name).text, got, want);
}

void gguf_keys_free(struct gguf_keys *keys)
{
    free(keys->list);
    *keys = (struct gguf_keys){0};
}

fl_status gguf_keys_uint(const struct gguf_keys *keys, const char *name, uint64_t max,
                         uint64_t *out)
{
    const struct gguf_key *key = gguf_keys_find(keys, name);
    bool negative;
    uint64_t magnitude;
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (key->type == GGUF_BOOL || !load_integer(key->type, key->value, &negative, &magnitude)) {
        return wrong_kind(keys, key, "an integer");
    }
    if (negative || magnitude > max) {
        return FL_FAIL(FL_MALFORMED, "%s: key %s is %s%" PRIu64 "; it must be 0 to %" PRIu64,
                       keys->path, name, negative ? "-" : "", magnitude, max);
    }
    *out = magnitude;
    return FL_OK;
}

fl_status gguf_keys_float(const struct gguf_keys *keys, const char *name, float *out)
{
    const struct gguf_key *key = gguf_keys_find(keys, name);
    float value;
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (!load_float(key->type, key->value, &value)) {
        return wrong_kind(keys, key, "a number");
    }
    if (!isfinite(value)) {
        return FL_FAIL(FL_MALFORMED, "%s: key %s is %f; it must be finite", keys->path, name,
                       (double)value);
    }
    *out = value;
    return FL_OK;
}

fl_status gguf_keys_bool(const struct gguf_keys *keys, const char *name, bool *out)
{
    const struct gguf_key *key = gguf_keys_find(keys, name);
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (key->type != GGUF_BOOL) {
        return wrong_kind(keys, key, "true or false");
    }
    if (key->value[0] > 1) {
        return FL_FAIL(FL_MALFORMED, "%s: key %s holds %d; true is 1, false is 0", keys->path, name,
                       key->value[0]);
    }
    *out = key->value[0] == 1;
    return FL_OK;
}

/* The string whose length is at `at`; its bounds were checked when the header was read. */
static const unsigned char *take_string(const unsigned char *at, struct gguf_string *out)
{
    const size_t size = (size_t)load_u64(at);
    *out = (struct gguf_string){.data = (const char *)at + sizeof(uint64_t), .size = size};
    return at + sizeof(uint64_t) + size;
}

fl_status gguf_keys_string(const struct gguf_keys *keys, const char *name, struct gguf_string *out)
{
    const struct gguf_key *key = gguf_keys_find(keys, name);
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (key->type != GGUF_STRING) {
        return wrong_kind(keys, key, "a string");
    }
    (void)take_string(key->value, out);
    return FL_OK;
}

static fl_status array_find(const struct gguf_keys *keys, const char *name,
                            const struct gguf_key **out)
{
    const struct gguf_key *key = gguf_keys_find(keys, name);
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (key->type != GGUF_ARRAY) {
        return wrong_kind(keys, key, "an array");
    }
    *out = key;
    return FL_OK;
}

fl_status gguf_keys_array(const struct gguf_keys *keys, const char *name, enum gguf_type *out_type,
                          uint32_t *out_count)
{
    const struct gguf_key *key = NULL;
    FL_TRY(array_find(keys, name, &key));
    FL_ASSERT(key != NULL);
    *out_type = key->element;
    *out_count = key->count;
    return FL_OK;
}

/* The array `name`, of `count` elements whose kind is right when `fits`. */
static fl_status elements_find(const struct gguf_keys *keys, const char *name, uint32_t count,
                               const char *want, bool (*fits)(enum gguf_type),
                               const struct gguf_key **out)
{
    const char *path = keys->path;
    FL_TRY(array_find(keys, name, out));
    FL_ASSERT(*out != NULL);
    if (!fits((*out)->element)) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: key %s is an array of which each element is %s; it must "
                       "hold %s",
                       path, name, type_info[(*out)->element].name, want);
    }
    if ((*out)->count != count) {
        return FL_FAIL(FL_MALFORMED, "%s: key %s has %" PRIu32 " elements; it must have %" PRIu32,
                       path, name, (*out)->count, count);
    }
    return FL_OK;
}

static bool is_string(enum gguf_type type)
{
    return type == GGUF_STRING;
}

static bool is_number(enum gguf_type type)
{
    return type != GGUF_STRING && type != GGUF_BOOL;
}

static bool is_integer(enum gguf_type type)
{
    return type != GGUF_STRING && type != GGUF_FLOAT32 && type != GGUF_FLOAT64;
}

fl_status gguf_keys_strings(const struct gguf_keys *keys, const char *name, struct gguf_string *out,
                            uint32_t count)
{
    const struct gguf_key *key = NULL;
    FL_TRY(elements_find(keys, name, count, "strings", is_string, &key));
    const unsigned char *at = key->value;
    for (uint32_t i = 0; i < count; i++) {
        at = take_string(at, &out[i]);
    }
    return FL_OK;
}

fl_status gguf_keys_floats(const struct gguf_keys *keys, const char *name, float *out,
                           uint32_t count)
{
    const struct gguf_key *key = NULL;
    FL_TRY(elements_find(keys, name, count, "numbers", is_number, &key));
    const size_t size = type_info[key->element].size;
    for (uint32_t i = 0; i < count; i++) {
        if (!load_float(key->element, key->value + i * size, &out[i]) || isnan(out[i])) {
            return FL_FAIL(FL_MALFORMED, "%s: element %" PRIu32 " of key %s is not a number",
                           keys->path, i, name);
        }
    }
    return FL_OK;
}

fl_status gguf_keys_uints(const struct gguf_keys *keys, const char *name, uint32_t max,
                          uint32_t *out, uint32_t count)
{
    const struct gguf_key *key = NULL;
    FL_TRY(elements_find(keys, name, count, "integers", is_integer, &key));
    const size_t size = type_info[key->element].size;
    for (uint32_t i = 0; i < count; i++) {
        bool negative = false;
        uint64_t magnitude = 0;
        (void)load_integer(key->element, key->value + i * size, &negative, &magnitude);
        if (negative || magnitude > max) {
            return FL_FAIL(FL_MALFORMED,
                           "%s: element %" PRIu32 " of key %s is %s%" PRIu64
                           "; it must be 0 to %" PRIu32,
                           keys->path, i, name, negative ? "-" : "", magnitude, max);
        }
        out[i] = (uint32_t)magnitude;
    }
    return FL_OK;
}
