#include "proto/message_field.h"

#include <inttypes.h>
#include <math.h>
#include <stdalign.h>
#include <string.h>

#include <protobuf-c/protobuf-c.h>

#include "proto/base/utf8.h"

enum { SHOWN_MAX = 64 }; /* bytes of a foreign text that a sentence quotes */

/* What protobuf-c allocates from; it says of a failed unpack neither why nor where. */
struct source {
    struct fl_arena *arena;
    bool is_empty;
};

static void *take(void *ctx, size_t size)
{
    struct source *source = ctx;
    void *memory = fl_arena_alloc(source->arena, size, alignof(max_align_t));
    source->is_empty = source->is_empty || memory == NULL;
    return memory;
}

static void give_back(void *ctx, void *memory)
{
    (void)ctx;
    (void)memory;
}

fl_status fl_field_parse(const struct ProtobufCMessageDescriptor *descriptor, const void *data,
                         size_t size, size_t size_max, struct fl_arena *arena,
                         struct ProtobufCMessage **out)
{
    if (size == 0) {
        return FL_FAIL(FL_PROTOCOL, "message is empty");
    }
    if (size > size_max) {
        return FL_FAIL(FL_TOO_LARGE, "message of %zu bytes is over the limit of %zu", size,
                       size_max);
    }
    struct source source = {.arena = arena};
    ProtobufCAllocator allocator = {.alloc = take, .free = give_back, .allocator_data = &source};
    *out = protobuf_c_message_unpack(descriptor, &allocator, size, data);
    if (*out != NULL) {
        return FL_OK;
    }
    if (source.is_empty) {
        /* Every message that keeps the limits fits four times its size: else it is the peer's. */
        return FL_FAIL(arena->size / 4 < size ? FL_NO_MEMORY : FL_PROTOCOL,
                       "message of %zu bytes has too many parts for the %zu bytes kept for it",
                       size, arena->size);
    }
    return FL_FAIL(FL_PROTOCOL, "%zu bytes are not a message of type %s", size, descriptor->name);
}

static bool take_varint(const unsigned char **at, const unsigned char *end, uint64_t *out)
{
    *out = 0;
    for (unsigned shift = 0; shift < 64 && *at < end; shift += 7) {
        const unsigned char byte = *(*at)++;
        *out |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            return true;
        }
    }
    return false;
}

/* Source: protobuf.dev/programming-guides/encoding. */
bool fl_field_next(const unsigned char **at, const unsigned char *end, struct fl_raw_field *out)
{
    uint64_t key = 0;
    uint64_t size = 0;
    if (!take_varint(at, end, &key) || key > UINT32_MAX) {
        return false;
    }
    *out = (struct fl_raw_field){.number = (uint32_t)(key >> 3)};
    switch (key & 7) {
    case 0: return take_varint(at, end, &out->value);
    case 1: size = 8; break;
    case 2:
        if (!take_varint(at, end, &size)) {
            return false;
        }
        out->data = *at;
        break;
    case 5: size = 4; break;
    default: return false;
    }
    if (size > (size_t)(end - *at)) {
        return false;
    }
    out->size = (size_t)size;
    *at += size;
    return true;
}

fl_status fl_field_serialise(const struct ProtobufCMessage *message, size_t size_max, void *out,
                             size_t size, size_t *out_size)
{
    const size_t need = protobuf_c_message_get_packed_size(message);
    if (need > size_max) {
        return FL_FAIL(FL_TOO_LARGE, "message of %zu bytes is over the limit of %zu", need,
                       size_max);
    }
    if (need > size) {
        return FL_FAIL(FL_TOO_LARGE, "message of %zu bytes does not fit a buffer of %zu", need,
                       size);
    }
    *out_size = protobuf_c_message_pack(message, out);
    FL_ASSERT(*out_size == need);
    return FL_OK;
}

fl_status fl_field_array(struct fl_arena *arena, size_t count, size_t element_size, void *out)
{
    void *array = NULL;
    if (count > 0) {
        if (count > SIZE_MAX / element_size) {
            return FL_FAIL(FL_NO_MEMORY, "message needs %zu elements of %zu bytes", count,
                           element_size);
        }
        array = fl_arena_alloc(arena, count * element_size, alignof(max_align_t));
        if (array == NULL) {
            return FL_FAIL(FL_NO_MEMORY, "message needs %zu bytes more than the %zu kept for it",
                           count * element_size, arena->size);
        }
    }
    memcpy(out, &array, sizeof(array)); /* `out` is the address of a pointer to the elements */
    return FL_OK;
}

void fl_field_borrow(const void *data, size_t size, struct ProtobufCBinaryData *out)
{
    /* protobuf-c does not write through the pointer when it packs. */
    *out = (ProtobufCBinaryData){.len = size, .data = (uint8_t *)(uintptr_t)data};
}

void fl_field_borrow_text(const char *text, struct ProtobufCBinaryData *out)
{
    fl_field_borrow(text, text == NULL ? 0 : strlen(text), out);
}

fl_status fl_field_range(const char *field, uint64_t value, uint64_t low, uint64_t high)
{
    if (value < low || value > high) {
        return FL_FAIL(FL_PROTOCOL, "%s %" PRIu64 " is outside %" PRIu64 " to %" PRIu64, field,
                       value, low, high);
    }
    return FL_OK;
}

fl_status fl_field_real(const char *field, double value, double low, double high)
{
    if (!isfinite(value) || value < low || value > high) {
        return FL_FAIL(FL_PROTOCOL, "%s %g is outside %g to %g", field, value, low, high);
    }
    return FL_OK;
}

/* Bytes of `data` that a sentence may quote: printable ASCII at its start. */
static int shown_size(const ProtobufCBinaryData *data)
{
    int shown = 0;
    while ((size_t)shown < data->len && shown < SHOWN_MAX && data->data[shown] >= ' ' &&
           data->data[shown] < 0x7f) {
        shown++;
    }
    return shown;
}

static fl_status check_text(const char *field, const ProtobufCBinaryData *data, size_t size_max)
{
    if (data->len >= size_max) {
        return FL_FAIL(FL_PROTOCOL, "%s has %zu bytes, the limit is %zu", field, data->len,
                       size_max - 1);
    }
    if (data->len > 0 && memchr(data->data, 0, data->len) != NULL) {
        return FL_FAIL(FL_PROTOCOL, "%s '%.*s' holds a NUL byte", field, shown_size(data),
                       (const char *)data->data);
    }
    const size_t valid = fl_utf8_valid_size(data->data, data->len);
    if (valid < data->len) {
        return FL_FAIL(FL_PROTOCOL, "%s is not UTF-8 at byte %zu (0x%02x)", field, valid,
                       data->data[valid]);
    }
    return FL_OK;
}

fl_status fl_field_copy(const char *field, const struct ProtobufCBinaryData *data, char *out,
                        size_t size)
{
    FL_TRY(check_text(field, data, size));
    if (data->len > 0) {
        memcpy(out, data->data, data->len);
    }
    out[data->len] = '\0';
    return FL_OK;
}

fl_status fl_field_text(struct fl_arena *arena, const char *field,
                        const struct ProtobufCBinaryData *data, size_t size_max, const char **out)
{
    if (data->len == 0) {
        *out = "";
        return FL_OK;
    }
    FL_TRY(check_text(field, data, size_max));
    char *copy = NULL;
    FL_TRY(fl_field_array(arena, data->len + 1, 1, (void *)&copy));
    FL_TRY(fl_field_copy(field, data, copy, data->len + 1));
    *out = copy;
    return FL_OK;
}

fl_status fl_field_name(const char *field, const struct ProtobufCBinaryData *data,
                        char out[FL_NAME_MAX])
{
    FL_TRY(check_text(field, data, FL_NAME_MAX));
    if (data->len == 0) {
        return FL_FAIL(FL_PROTOCOL, "%s is empty", field);
    }
    for (size_t i = 0; i < data->len; i++) {
        const unsigned char c = data->data[i];
        const bool fine = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                          (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
        if (!fine) {
            return FL_FAIL(FL_PROTOCOL, "%s '%.*s' may hold letters, digits, '.', '_' and '-' only",
                           field, shown_size(data), (const char *)data->data);
        }
    }
    return fl_field_copy(field, data, out, FL_NAME_MAX);
}

fl_status fl_field_model(const char *field, const struct ProtobufCBinaryData *data,
                         char out[FL_MODEL_NAME_MAX])
{
    FL_TRY(check_text(field, data, FL_MODEL_NAME_MAX));
    if (data->len == 0) {
        return FL_FAIL(FL_PROTOCOL, "%s is empty", field);
    }
    for (size_t i = 0; i < data->len; i++) {
        const unsigned char c = data->data[i];
        if (c == '/' || c < ' ' || c == 0x7f || (i == 0 && c == '.')) {
            return FL_FAIL(FL_PROTOCOL,
                           "%s '%.*s' is not a model's name: the file's name without folder and "
                           "without .gguf",
                           field, shown_size(data), (const char *)data->data);
        }
    }
    return fl_field_copy(field, data, out, FL_MODEL_NAME_MAX);
}
