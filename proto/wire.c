#include "proto/wire.h"

#include <stdlib.h>
#include <string.h>

enum { BUFFER_FIRST = 16 << 10, BUFFER_KEEP = 64 << 10 };

uint32_t fl_frame_header_get(const unsigned char header[FL_FRAME_HEADER_SIZE])
{
    return (uint32_t)header[0] | (uint32_t)header[1] << 8 | (uint32_t)header[2] << 16 |
           (uint32_t)header[3] << 24;
}

void fl_frame_header_put(unsigned char header[FL_FRAME_HEADER_SIZE], uint32_t size)
{
    for (int i = 0; i < FL_FRAME_HEADER_SIZE; i++) {
        header[i] = (unsigned char)(size >> (8 * i));
    }
}

/* Move what is left to the front; give a large buffer back when nothing is. */
static void compact(unsigned char **bytes, size_t *size, size_t *used, size_t *taken)
{
    *used -= *taken;
    if (*used == 0 && *size > BUFFER_KEEP) {
        free(*bytes);
        *bytes = NULL;
        *size = 0;
    } else if (*used > 0 && *taken > 0) {
        memmove(*bytes, *bytes + *taken, *used);
    }
    *taken = 0;
}

/* Make room for `need` bytes in all, doubling up to `max`. */
static fl_status grow(unsigned char **bytes, size_t *size, size_t need, size_t max)
{
    FL_ASSERT(need <= max);
    if (need <= *size) {
        return FL_OK;
    }
    size_t wanted = *size > 0 ? *size : BUFFER_FIRST;
    while (wanted < need) {
        wanted *= 2;
    }
    wanted = wanted < max ? wanted : max;
    unsigned char *grown = realloc(*bytes, wanted);
    if (grown == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for %zu bytes of messages", wanted);
    }
    *bytes = grown;
    *size = wanted;
    return FL_OK;
}

void fl_frame_reader_init(struct fl_frame_reader *reader, size_t frame_max)
{
    FL_ASSERT(frame_max > 0 && frame_max <= FL_FRAME_MAX);
    *reader = (struct fl_frame_reader){.frame_max = frame_max};
}

void fl_frame_reader_limit(struct fl_frame_reader *reader, size_t frame_max)
{
    FL_ASSERT(frame_max > 0 && frame_max <= FL_FRAME_MAX);
    reader->frame_max = frame_max;
}

void fl_frame_reader_free(struct fl_frame_reader *reader)
{
    free(reader->bytes);
    fl_frame_reader_init(reader, reader->frame_max);
}

/* Bytes of the frame at the front, header included; just a header's when that is not whole. */
static fl_status front_size(const struct fl_frame_reader *reader, size_t *out)
{
    *out = FL_FRAME_HEADER_SIZE;
    if (reader->used - reader->taken < FL_FRAME_HEADER_SIZE) {
        return FL_OK;
    }
    const uint32_t size = fl_frame_header_get(reader->bytes + reader->taken);
    if (size > reader->frame_max) {
        return FL_FAIL(FL_PROTOCOL, "message of %u bytes is over the limit of %zu", (unsigned)size,
                       reader->frame_max);
    }
    *out = FL_FRAME_HEADER_SIZE + size;
    return FL_OK;
}

fl_status fl_frame_reader_space(struct fl_frame_reader *reader, unsigned char **out,
                                size_t *out_size)
{
    size_t frame = 0;
    FL_TRY(front_size(reader, &frame));
    compact(&reader->bytes, &reader->size, &reader->used, &reader->taken);
    /* Whole frames that nobody took leave no room only when the caller forgot next(). */
    const size_t max = FL_FRAME_HEADER_SIZE + reader->frame_max;
    FL_ASSERT(reader->used < max);
    const size_t small = max < BUFFER_FIRST ? max : BUFFER_FIRST;
    /* Doubling as bytes arrive: a length alone reserves nothing. */
    size_t need = reader->used + 1;
    need = need > small ? need : small;
    FL_ASSERT(reader->used < frame || reader->used < max);
    FL_TRY(grow(&reader->bytes, &reader->size, need, max));
    *out = reader->bytes + reader->used;
    *out_size = reader->size - reader->used;
    return FL_OK;
}

void fl_frame_reader_filled(struct fl_frame_reader *reader, size_t size)
{
    FL_ASSERT(size <= reader->size - reader->used);
    reader->used += size;
}

fl_status fl_frame_reader_next(struct fl_frame_reader *reader, const unsigned char **out,
                               size_t *out_size)
{
    size_t frame = 0;
    FL_TRY(front_size(reader, &frame));
    const size_t held = reader->used - reader->taken;
    if (held < FL_FRAME_HEADER_SIZE || held < frame) {
        if (held == 0) {
            compact(&reader->bytes, &reader->size, &reader->used, &reader->taken);
        }
        return FL_AGAIN;
    }
    *out = reader->bytes + reader->taken + FL_FRAME_HEADER_SIZE;
    *out_size = frame - FL_FRAME_HEADER_SIZE;
    reader->taken += frame;
    return FL_OK;
}

bool fl_frame_reader_partial(const struct fl_frame_reader *reader)
{
    return reader->used > reader->taken;
}

void fl_frame_writer_init(struct fl_frame_writer *writer, size_t size_max)
{
    *writer = (struct fl_frame_writer){.size_max = size_max};
}

void fl_frame_writer_free(struct fl_frame_writer *writer)
{
    free(writer->bytes);
    fl_frame_writer_init(writer, writer->size_max);
}

fl_status fl_frame_writer_put(struct fl_frame_writer *writer, size_t size, unsigned char **out)
{
    const size_t waiting = writer->used - writer->taken;
    if (size > UINT32_MAX || size + FL_FRAME_HEADER_SIZE > writer->size_max - waiting ||
        waiting > writer->size_max) {
        return FL_FAIL(FL_BUSY,
                       "%zu bytes wait for a slow reader, %zu more are over the limit of %zu",
                       waiting, size, writer->size_max);
    }
    if (writer->size - writer->used < FL_FRAME_HEADER_SIZE + size) {
        compact(&writer->bytes, &writer->size, &writer->used, &writer->taken);
        FL_TRY(grow(&writer->bytes, &writer->size, waiting + FL_FRAME_HEADER_SIZE + size,
                    writer->size_max));
    }
    fl_frame_header_put(writer->bytes + writer->used, (uint32_t)size);
    *out = writer->bytes + writer->used + FL_FRAME_HEADER_SIZE;
    writer->used += FL_FRAME_HEADER_SIZE + size;
    return FL_OK;
}

void fl_frame_writer_bytes(const struct fl_frame_writer *writer, const unsigned char **out,
                           size_t *out_size)
{
    *out_size = writer->used - writer->taken;
    *out = *out_size > 0 ? writer->bytes + writer->taken : NULL;
}

void fl_frame_writer_sent(struct fl_frame_writer *writer, size_t size)
{
    FL_ASSERT(size <= writer->used - writer->taken);
    writer->taken += size;
    if (writer->taken == writer->used) {
        compact(&writer->bytes, &writer->size, &writer->used, &writer->taken);
    }
}
