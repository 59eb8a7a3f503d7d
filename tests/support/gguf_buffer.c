#include "tests/support/gguf_buffer.h"

#include <stdlib.h>
#include <string.h>

void gguf_buffer_free(struct gguf_buffer *buffer)
{
    free(buffer->data);
    *buffer = (struct gguf_buffer){0};
}

void gguf_put(struct gguf_buffer *buffer, const void *bytes, size_t size)
{
    if (size > buffer->capacity - buffer->size) {
        buffer->capacity = 2 * (buffer->size + size) + 1024;
        buffer->data = realloc(buffer->data, buffer->capacity);
        FL_ASSERT(buffer->data != NULL);
    }
    if (size != 0) {
        memcpy(buffer->data + buffer->size, bytes, size);
    }
    buffer->size += size;
}

void gguf_put_u32(struct gguf_buffer *buffer, uint32_t value)
{
    gguf_put(buffer, &value, sizeof(value));
}

void gguf_put_u64(struct gguf_buffer *buffer, uint64_t value)
{
    gguf_put(buffer, &value, sizeof(value));
}

void gguf_put_string(struct gguf_buffer *buffer, struct gguf_string string)
{
    gguf_put_u64(buffer, string.size);
    gguf_put(buffer, string.data, string.size);
}

static void put_text(struct gguf_buffer *buffer, const char *text)
{
    gguf_put_string(buffer, (struct gguf_string){.data = text, .size = strlen(text)});
}

void gguf_patch_u32(struct gguf_buffer *buffer, size_t at, uint32_t value)
{
    FL_ASSERT(at + sizeof(value) <= buffer->size);
    memcpy(buffer->data + at, &value, sizeof(value));
}

void gguf_patch_u64(struct gguf_buffer *buffer, size_t at, uint64_t value)
{
    FL_ASSERT(at + sizeof(value) <= buffer->size);
    memcpy(buffer->data + at, &value, sizeof(value));
}

static void count_up(struct gguf_buffer *buffer, size_t at)
{
    uint64_t count;
    FL_ASSERT(at + sizeof(count) <= buffer->size);
    memcpy(&count, buffer->data + at, sizeof(count));
    gguf_patch_u64(buffer, at, count + 1);
}

void gguf_put_header(struct gguf_buffer *buffer, uint32_t version)
{
    FL_ASSERT(buffer->size == 0);
    gguf_put(buffer, "GGUF", 4);
    gguf_put_u32(buffer, version);
    gguf_put_u64(buffer, 0);
    gguf_put_u64(buffer, 0);
}

void gguf_put_key(struct gguf_buffer *buffer, const char *key, uint32_t type)
{
    put_text(buffer, key);
    gguf_put_u32(buffer, type);
    count_up(buffer, GGUF_AT_KEY_COUNT);
}

static size_t integer_size(enum gguf_type type)
{
    static const size_t sizes[] = {
        [GGUF_UINT8] = 1, [GGUF_INT8] = 1, [GGUF_UINT16] = 2, [GGUF_INT16] = 2, [GGUF_UINT32] = 4,
        [GGUF_INT32] = 4, [GGUF_BOOL] = 1, [GGUF_UINT64] = 8, [GGUF_INT64] = 8, [GGUF_FLOAT64] = 0,
    };
    FL_ASSERT(sizes[type] != 0);
    return sizes[type];
}

void gguf_put_key_uint(struct gguf_buffer *buffer, const char *key, enum gguf_type type,
                       uint64_t value)
{
    gguf_put_key(buffer, key, type);
    gguf_put(buffer, &value, integer_size(type));
}

void gguf_put_key_float(struct gguf_buffer *buffer, const char *key, float value)
{
    gguf_put_key(buffer, key, GGUF_FLOAT32);
    gguf_put(buffer, &value, sizeof(value));
}

void gguf_put_key_bool(struct gguf_buffer *buffer, const char *key, bool value)
{
    gguf_put_key_uint(buffer, key, GGUF_BOOL, value);
}

void gguf_put_key_string(struct gguf_buffer *buffer, const char *key, struct gguf_string string)
{
    gguf_put_key(buffer, key, GGUF_STRING);
    gguf_put_string(buffer, string);
}

void gguf_put_key_text(struct gguf_buffer *buffer, const char *key, const char *text)
{
    gguf_put_key(buffer, key, GGUF_STRING);
    put_text(buffer, text);
}

static void put_array(struct gguf_buffer *buffer, const char *key, enum gguf_type element,
                      uint32_t count)
{
    gguf_put_key(buffer, key, GGUF_ARRAY);
    gguf_put_u32(buffer, element);
    gguf_put_u64(buffer, count);
}

void gguf_put_key_strings(struct gguf_buffer *buffer, const char *key,
                          const struct gguf_string *strings, uint32_t count)
{
    put_array(buffer, key, GGUF_STRING, count);
    for (uint32_t i = 0; i < count; i++) {
        gguf_put_string(buffer, strings[i]);
    }
}

void gguf_put_key_floats(struct gguf_buffer *buffer, const char *key, const float *values,
                         uint32_t count)
{
    put_array(buffer, key, GGUF_FLOAT32, count);
    gguf_put(buffer, values, count * sizeof(*values));
}

void gguf_put_key_uints(struct gguf_buffer *buffer, const char *key, enum gguf_type type,
                        const uint32_t *values, uint32_t count)
{
    put_array(buffer, key, type, count);
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t value = values[i];
        gguf_put(buffer, &value, integer_size(type));
    }
}

void gguf_put_tensor(struct gguf_buffer *buffer, const char *name, uint32_t dim_count,
                     const uint64_t *dims, uint32_t dtype, uint64_t offset)
{
    put_text(buffer, name);
    gguf_put_u32(buffer, dim_count);
    for (uint32_t i = 0; i < dim_count; i++) {
        gguf_put_u64(buffer, dims[i]);
    }
    gguf_put_u32(buffer, dtype);
    gguf_put_u64(buffer, offset);
    count_up(buffer, GGUF_AT_TENSOR_COUNT);
}

void gguf_put_padding(struct gguf_buffer *buffer, size_t alignment)
{
    static const unsigned char zeros[64];
    size_t padding = (alignment - buffer->size % alignment) % alignment;
    while (padding > 0) {
        const size_t size = padding < sizeof(zeros) ? padding : sizeof(zeros);
        gguf_put(buffer, zeros, size);
        padding -= size;
    }
}
