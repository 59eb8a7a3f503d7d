/* wire.h - frames on a byte stream: 4 bytes of little-endian length, then that many bytes.
 *
 * How clients and the coordinator talk.  The reader is fed whatever the socket
 * gave and hands out whole frames; it meets a limit before it believes a
 * length, and never holds more than one frame and what came behind it.  The
 * writer collects frames that a socket has not taken yet.  Neither knows
 * sockets.
 *
 *   recv() ──► space, filled ──► next ──► frame        put ──► bytes ──► send(), sent
 *
 * Thread:  owner.
 * Memory:  both grow on demand, the reader to its limit and 4 bytes, the writer to its limit; they
 *          shrink back when empty.  init() allocates nothing; free() gives everything back.
 */
#ifndef PROTO_WIRE_H
#define PROTO_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FL_FRAME_HEADER_SIZE = 4,
    FL_FRAME_MAX = 8 << 20, /* the usual limit on one frame */
};

struct fl_frame_reader {
    size_t frame_max;
    size_t size;  /* bytes allocated */
    size_t used;  /* bytes held */
    size_t taken; /* bytes at the front that next() has handed out */
    unsigned char *bytes;
};

struct fl_frame_writer {
    size_t size_max;
    size_t size;
    size_t used;
    size_t taken; /* bytes at the front that were sent */
    unsigned char *bytes;
};

/* frame_max: largest frame without its header, 1 .. FL_FRAME_MAX. */
void fl_frame_reader_init(struct fl_frame_reader *reader, size_t frame_max);
void fl_frame_reader_free(struct fl_frame_reader *reader);

/* Another limit from the next frame on: a stranger's frames are shorter than a friend's. */
void fl_frame_reader_limit(struct fl_frame_reader *reader, size_t frame_max);

/* Where the next bytes go: at least one byte of room on FL_OK.  Invalidates frames handed out.
 * FL_NO_MEMORY; FL_PROTOCOL when the frame under way is over the limit. */
FL_MUST_CHECK fl_status fl_frame_reader_space(struct fl_frame_reader *reader, unsigned char **out,
                                              size_t *out_size);
/* That many bytes were put there. */
void fl_frame_reader_filled(struct fl_frame_reader *reader, size_t size);

/* The next whole frame, valid until the next space() or next().  FL_AGAIN when none is whole,
 * FL_PROTOCOL with a sentence when its length is over the limit: the stream is of no use from then
 * on.  Call it until it says FL_AGAIN before the next space(). */
FL_MUST_CHECK fl_status fl_frame_reader_next(struct fl_frame_reader *reader,
                                             const unsigned char **out, size_t *out_size);

/* True when a frame began that is not whole. */
bool fl_frame_reader_partial(const struct fl_frame_reader *reader);

/* The length a header holds. */
uint32_t fl_frame_header_get(const unsigned char header[FL_FRAME_HEADER_SIZE]);
void fl_frame_header_put(unsigned char header[FL_FRAME_HEADER_SIZE], uint32_t size);

/* size_max: bytes that may wait to be sent. */
void fl_frame_writer_init(struct fl_frame_writer *writer, size_t size_max);
void fl_frame_writer_free(struct fl_frame_writer *writer);

/* Room for one frame of `size` bytes, its header in front written; the caller fills *out before
 * anything else is done with the writer.  FL_BUSY when too much waits already (the reader on the
 * other side is too slow), FL_NO_MEMORY. */
FL_MUST_CHECK fl_status fl_frame_writer_put(struct fl_frame_writer *writer, size_t size,
                                            unsigned char **out);

/* What waits to be sent; *out_size 0 when nothing does. */
void fl_frame_writer_bytes(const struct fl_frame_writer *writer, const unsigned char **out,
                           size_t *out_size);
/* That many bytes of it were. */
void fl_frame_writer_sent(struct fl_frame_writer *writer, size_t size);

#ifdef __cplusplus
}
#endif
#endif
