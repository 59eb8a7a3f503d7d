/* Any tokens and stop strings: what is said is UTF-8, and does not depend on how it comes.
 *
 * The oracle decodes all tokens at once, cuts the text at the first stop
 * string that is complete, and must equal what the stream said piece by piece.
 */
#include "coordinator/text_stream.h"

#include <stdlib.h>
#include <string.h>

#include "proto/base/log.h"
#include "proto/base/utf8.h"
#include "tests/support/vocabulary_fixture.h"

enum { STOPS = 2, TEXT_MAX = 1 << 20 };

static struct vocabulary_fixture fixture;
static char said[TEXT_MAX];
static char whole[TEXT_MAX];

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fl_log_init("", FL_LOG_ERROR);
    vocabulary_fixture_init(&fixture, TOKEN_TABLE_BPE);
    FL_ASSERT(vocabulary_fixture_open(&fixture) == FL_OK);
    return 0;
}

static size_t add(char *text, size_t size, struct gguf_string part)
{
    FL_ASSERT(part.size <= TEXT_MAX - size);
    FL_ASSERT(fl_utf8_valid_size(part.data, part.size) == part.size);
    memcpy(text + size, part.data, part.size);
    return size + part.size;
}

/* All that a stream says to these tokens. */
static size_t run(const struct gguf_string *stops, size_t stop_count, const uint8_t *ids,
                  size_t count, char *text, enum text_stream_state *state)
{
    struct text_stream stream;
    struct gguf_string part;
    size_t size = 0;
    FL_ASSERT(text_stream_init(&stream, fixture.tokenizer, stops, stop_count,
                               TOKENIZER_HIDE_SPECIAL) == FL_OK);
    for (size_t i = 0; i < count; i++) {
        (void)text_stream_push(&stream, ids[i] + (ids[i] < 8 ? 258u : 0u), &part);
        size = add(text, size, part);
    }
    *state = text_stream_finish(&stream, &part);
    return add(text, size, part);
}

static size_t cut_at_stop(const char *text, size_t size, const struct gguf_string *stops,
                          size_t stop_count)
{
    size_t begin = size;
    size_t end = SIZE_MAX;
    for (size_t i = 0; i < stop_count; i++) {
        const char *found = memmem(text, size, stops[i].data, stops[i].size);
        const size_t at = found == NULL ? SIZE_MAX : (size_t)(found - text);
        if (found != NULL &&
            (at + stops[i].size < end || (at + stops[i].size == end && at < begin))) {
            begin = at;
            end = at + stops[i].size;
        }
    }
    return begin;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct gguf_string stops[STOPS];
    enum text_stream_state state = TEXT_STREAM_OPEN;
    size_t stop_count = 0;
    for (; stop_count < STOPS && size > 0; stop_count++) {
        const size_t wanted = 1 + data[0] % 8;
        if (size - 1 < wanted || fl_utf8_valid_size(data + 1, wanted) != wanted) {
            break;
        }
        stops[stop_count] = (struct gguf_string){(const char *)data + 1, wanted};
        data += 1 + wanted;
        size -= 1 + wanted;
    }
    const size_t whole_size = run(NULL, 0, data, size, whole, &state);
    FL_ASSERT(state == TEXT_STREAM_ENDED);
    const size_t cut = cut_at_stop(whole, whole_size, stops, stop_count);
    const size_t said_size = run(stops, stop_count, data, size, said, &state);
    FL_ASSERT(said_size == cut && memcmp(said, whole, cut) == 0);
    FL_ASSERT((state == TEXT_STREAM_STOPPED) == (cut < whole_size));
    return 0;
}
