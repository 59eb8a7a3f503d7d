#include "coordinator/text_stream.h"

#include <string.h>

#include "proto/base/utf8.h"

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

fl_status text_stream_init(struct text_stream *stream, const struct tokenizer *tokenizer,
                           const struct gguf_string *stops, size_t stop_count,
                           enum tokenizer_special special)
{
    if (stop_count > TEXT_STREAM_STOP_COUNT_MAX) {
        return FL_FAIL(FL_INVALID, "stop strings: %zu are given, at most %d are allowed",
                       stop_count, (int)TEXT_STREAM_STOP_COUNT_MAX);
    }
    for (size_t i = 0; i < stop_count; i++) {
        if (stops[i].size == 0 || stops[i].size > TEXT_STREAM_STOP_SIZE_MAX) {
            return FL_FAIL(FL_INVALID, "stop string %zu is %zu bytes long, 1 to %d are allowed",
                           i + 1, stops[i].size, (int)TEXT_STREAM_STOP_SIZE_MAX);
        }
        if (fl_utf8_valid_size(stops[i].data, stops[i].size) != stops[i].size) {
            return FL_FAIL(FL_INVALID, "stop string %zu is not UTF-8", i + 1);
        }
    }
    *stream = (struct text_stream){.tokenizer = tokenizer, .special = special};
    for (size_t i = 0; i < stop_count; i++) {
        memcpy(stream->stops[i].data, stops[i].data, stops[i].size);
        stream->stops[i].size = (uint32_t)stops[i].size;
    }
    stream->stop_count = (uint32_t)stop_count;
    return FL_OK;
}

static void append(struct text_stream *stream, const void *bytes, size_t size)
{
    FL_ASSERT(size <= sizeof(stream->buffer) - stream->size);
    memcpy(stream->buffer + stream->size, bytes, size);
    stream->size += size;
}

static void drop_partial(struct text_stream *stream)
{
    if (stream->partial_size > 0) {
        append(stream, replacement, sizeof(replacement) - 1);
        stream->partial_size = 0;
    }
}

/* One byte of the answer: completes a character, waits for more, or was never going to be one. */
static void take_byte(struct text_stream *stream, unsigned char byte)
{
    if (stream->partial_size > 0 &&
        !fl_utf8_continues(stream->partial[0], stream->partial_size, byte)) {
        drop_partial(stream);
    }
    if (stream->partial_size == 0 && fl_utf8_size(byte) == 0) {
        append(stream, replacement, sizeof(replacement) - 1);
        return;
    }
    stream->partial[stream->partial_size++] = byte;
    if (stream->partial_size == fl_utf8_size(stream->partial[0])) {
        append(stream, stream->partial, stream->partial_size);
        stream->partial_size = 0;
    }
}

/* How many bytes of `stop` stand at `at`, as far as the buffer goes; 0 when they differ. */
static size_t stop_match(const struct text_stream *stream, const struct text_stream_stop *stop,
                         size_t at)
{
    const size_t left = stream->size - at;
    const size_t size = left < stop->size ? left : stop->size;
    return memcmp(stream->buffer + at, stop->data, size) == 0 ? size : 0;
}

/* Where the stop string begins that is complete first, so that the answer does not depend on how
 * the text came in tokens; the buffer's size when there is none. */
static size_t find_stop(const struct text_stream *stream)
{
    size_t begin = stream->size;
    size_t end = SIZE_MAX;
    for (size_t at = 0; at < stream->size; at++) {
        for (uint32_t i = 0; i < stream->stop_count; i++) {
            const size_t size = stream->stops[i].size;
            if (stop_match(stream, &stream->stops[i], at) == size && at + size < end) {
                begin = at;
                end = at + size;
            }
        }
    }
    return begin;
}

/* Where text begins that may become a stop string; the buffer's size when there is none. */
static size_t find_held(const struct text_stream *stream)
{
    for (size_t at = 0; at < stream->size; at++) {
        for (uint32_t i = 0; i < stream->stop_count; i++) {
            if (stop_match(stream, &stream->stops[i], at) > 0) {
                return at;
            }
        }
    }
    return stream->size;
}

static void forget_emitted(struct text_stream *stream)
{
    stream->size -= stream->emitted;
    memmove(stream->buffer, stream->buffer + stream->emitted, stream->size);
    stream->emitted = 0;
}

/* Hand out what is certain, and what was held back when nothing more will come. */
static void emit(struct text_stream *stream, struct gguf_string *out)
{
    const size_t stop = find_stop(stream);
    if (stop < stream->size) {
        stream->state = TEXT_STREAM_STOPPED;
        stream->size = stop; /* the stop string and what follows are dropped */
        stream->partial_size = 0;
    }
    stream->emitted = stream->state == TEXT_STREAM_OPEN ? find_held(stream) : stream->size;
    *out = (struct gguf_string){.data = stream->buffer, .size = stream->emitted};
}

enum text_stream_state text_stream_push(struct text_stream *stream, uint32_t id,
                                        struct gguf_string *out)
{
    forget_emitted(stream);
    *out = (struct gguf_string){.data = stream->buffer, .size = 0};
    if (stream->state != TEXT_STREAM_OPEN) {
        return stream->state;
    }
    if (tokenizer_is_end(stream->tokenizer, id)) {
        return text_stream_finish(stream, out);
    }
    const struct gguf_string piece = tokenizer_piece(stream->tokenizer, id, stream->special);
    for (size_t i = 0; i < piece.size; i++) {
        take_byte(stream, (unsigned char)piece.data[i]);
    }
    emit(stream, out);
    return stream->state;
}

enum text_stream_state text_stream_finish(struct text_stream *stream, struct gguf_string *out)
{
    forget_emitted(stream);
    *out = (struct gguf_string){.data = stream->buffer, .size = 0};
    if (stream->state == TEXT_STREAM_OPEN) {
        drop_partial(stream);
        stream->state = TEXT_STREAM_ENDED; /* unless what was dropped completed a stop string */
        emit(stream, out);
    }
    return stream->state;
}
