/* text_stream.h - generated ids to text, as they come.
 *
 *     text_stream_init(&stream, tokenizer, stops, stop_count, TOKENIZER_HIDE_SPECIAL);
 *     state = text_stream_push(&stream, id, &text);   for every id: show text
 *     text_stream_finish(&stream, &text);             once: show what was held back
 *
 * What a reader sees is always whole characters: bytes of one that is not
 * complete wait for the next token, and bytes that can no longer become one
 * turn into U+FFFD.  Text that could be the start of a stop string waits too,
 * until it is one (everything from there on is dropped) or cannot be.  End
 * tokens print nothing and close the stream.
 *
 * The first token keeps its leading space: it continues the prompt.
 *
 * Thread:  owner.
 * Memory:  fixed, inside the struct; the tokenizer is borrowed.  Text handed
 *          out is valid until the next call.
 */
#ifndef COORDINATOR_TEXT_STREAM_H
#define COORDINATOR_TEXT_STREAM_H

#include <stddef.h>
#include <stdint.h>

#include "coordinator/tokenizer.h"
#include "proto/base/status.h"

enum {
    TEXT_STREAM_STOP_COUNT_MAX = 8,
    TEXT_STREAM_STOP_SIZE_MAX = 256,
    /* held back, and one token whose every byte became U+FFFD */
    TEXT_STREAM_BUFFER_SIZE = TEXT_STREAM_STOP_SIZE_MAX + 3 * (VOCABULARY_TEXT_SIZE_MAX + 4),
};

enum text_stream_state {
    TEXT_STREAM_OPEN,
    TEXT_STREAM_ENDED,   /* by an end token, or finish() */
    TEXT_STREAM_STOPPED, /* by a stop string */
};

struct text_stream_stop {
    char data[TEXT_STREAM_STOP_SIZE_MAX];
    uint32_t size;
};

struct text_stream {
    const struct tokenizer *tokenizer;
    enum tokenizer_special special;
    enum text_stream_state state;
    struct text_stream_stop stops[TEXT_STREAM_STOP_COUNT_MAX];
    uint32_t stop_count;
    unsigned char partial[4]; /* [partial_size], a character that is not complete */
    uint32_t partial_size;
    size_t emitted; /* bytes of the buffer handed out by the last call */
    size_t size;    /* bytes in the buffer */
    char buffer[TEXT_STREAM_BUFFER_SIZE];
};

/* `stops` are copied.  FL_INVALID for too many, an empty, too long or broken one. */
FL_MUST_CHECK fl_status text_stream_init(struct text_stream *stream,
                                         const struct tokenizer *tokenizer,
                                         const struct gguf_string *stops, size_t stop_count,
                                         enum tokenizer_special special);

/* The text that has become certain with this token.  Once the stream is not open any more, tokens
 * give no text. */
enum text_stream_state text_stream_push(struct text_stream *stream, uint32_t id,
                                        struct gguf_string *out);

/* What was held back.  Returns STOPPED when a stop string ended the stream, else ENDED. */
enum text_stream_state text_stream_finish(struct text_stream *stream, struct gguf_string *out);

#endif
