#include "pipeline/gguf_cursor.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

/* What is read beyond the header's end is of no use here, and is less than this. */
enum { READ_SIZE_MAX = 256 << 10 };

static uint32_t load_u32(const unsigned char *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static uint64_t load_u64(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

fl_status gguf_cursor_fill(struct gguf_cursor *cursor, size_t size)
{
    if (size > cursor->limit - cursor->at) {
        if (cursor->limit < cursor->file_size && cursor->fd >= 0) {
            return FL_FAIL(FL_TOO_LARGE, "%s: the header is longer than %d MiB", cursor->path,
                           GGUF_HEADER_SIZE_MAX >> 20);
        }
        return FL_FAIL(FL_MALFORMED,
                       "%s: the file ends at byte %zu, in the middle of its header: it was cut "
                       "short, copy or download it again",
                       cursor->path, cursor->limit);
    }
    while (cursor->filled < cursor->at + size) {
        size_t want = cursor->limit - cursor->filled;
        want = want < cursor->read_size ? want : cursor->read_size;
        const ssize_t got =
            pread(cursor->fd, cursor->base + cursor->filled, want, (off_t)cursor->filled);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return FL_FAIL(FL_IO, "%s: cannot be read at byte %zu: %s", cursor->path,
                           cursor->filled, strerror(errno));
        }
        if (got == 0) {
            return FL_FAIL(FL_MALFORMED, "%s: shrank to %zu bytes while it was read", cursor->path,
                           cursor->filled);
        }
        cursor->filled += (size_t)got;
        cursor->read_size =
            cursor->read_size < READ_SIZE_MAX ? 2 * cursor->read_size : cursor->read_size;
    }
    return FL_OK;
}

fl_status gguf_cursor_u32(struct gguf_cursor *cursor, uint32_t *out)
{
    FL_TRY(gguf_cursor_need(cursor, sizeof(*out)));
    *out = load_u32(cursor->base + cursor->at);
    cursor->at += sizeof(*out);
    return FL_OK;
}

fl_status gguf_cursor_u64(struct gguf_cursor *cursor, uint64_t *out)
{
    FL_TRY(gguf_cursor_need(cursor, sizeof(*out)));
    *out = load_u64(cursor->base + cursor->at);
    cursor->at += sizeof(*out);
    return FL_OK;
}

fl_status gguf_cursor_string(struct gguf_cursor *cursor, uint64_t size_max, const char *what,
                             struct gguf_string *out)
{
    uint64_t size = 0;
    FL_TRY(gguf_cursor_u64(cursor, &size));
    if (size > size_max) {
        return FL_FAIL(FL_TOO_LARGE,
                       "%s: %s at byte %zu has a length of %" PRIu64 " bytes; at most %" PRIu64
                       " are allowed",
                       cursor->path, what, cursor->at - sizeof(size), size, size_max);
    }
    FL_TRY(gguf_cursor_need(cursor, (size_t)size));
    *out =
        (struct gguf_string){.data = (const char *)cursor->base + cursor->at, .size = (size_t)size};
    cursor->at += (size_t)size;
    return FL_OK;
}
