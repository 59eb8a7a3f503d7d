/* piece_stream.h - the bytes of a stage's pieces, in loading order, from wherever they are.
 *
 * A model file on this machine comes first; without one, each piece comes out of
 * the shard cache if it is there, else over the wire, and then goes into the
 * cache.  The reader sees chunks of up to SHARD_CHUNK_SIZE bytes, piece after
 * piece; several fetches are under way ahead of it, across pieces.
 *
 *      model folder ─┐
 *      shard cache ──┼─► next() ─► chunk, chunk, .. (piece 2) chunk, ..
 *      coordinator ──┘
 *
 * A cache entry that turns out to be damaged begins its piece again, over the
 * wire: a chunk with offset 0 always starts its piece from the beginning.
 *
 * How much of a piece was in the page cache is measured before anything is read:
 * of a model's own files when they are opened, before even their identity is
 * checked, of the cache when an entry is.
 *
 * Thread:  owner (the loader thread).
 * Memory:  open() allocates, close() frees and gives up what is under way.
 */
#ifndef NODE_PIECE_STREAM_H
#define NODE_PIECE_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "node/fetch_queue.h"
#include "node/model_storage.h"
#include "node/shard_cache.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"

struct piece_stream;

struct piece_stream_config {
    const struct fl_manifest *manifest; /* borrowed until close */
    const uint32_t *order;              /* [order_count] pieces in loading order; borrowed too */
    uint32_t order_count;
    const struct model_storage *storage;
    struct shard_cache *cache; /* NULL: none */
    struct fetch_queue *fetches;
    struct fl_clock clock;
};

enum piece_source { PIECE_SOURCE_FILE, PIECE_SOURCE_CACHE, PIECE_SOURCE_WIRE };

struct piece_chunk {
    uint32_t piece;
    uint64_t offset; /* of the chunk in its piece; 0 begins the piece */
    size_t size;
    bool last; /* of its piece */
    enum piece_source source;
    uint64_t verify_ns; /* spent on its checksum */
    uint64_t resident;  /* bytes of its piece that were in the page cache; 0 when not known */
};

/* FL_NO_MEMORY, FL_IO. */
FL_MUST_CHECK fl_status piece_stream_open(const struct piece_stream_config *config,
                                          struct piece_stream **out);
void piece_stream_close(struct piece_stream *stream);

/* Put the next chunk into dst [SHARD_CHUNK_SIZE].  FL_AGAIN while it is on the wire, FL_END after
 * the last piece, else why it cannot be had. */
FL_MUST_CHECK fl_status piece_stream_next(struct piece_stream *stream, void *dst,
                                          struct piece_chunk *out);

/* Bytes of all pieces looked at so far that were in the page cache before they were read; false when
 * that is not known of one of them. */
bool piece_stream_resident(const struct piece_stream *stream, uint64_t *out_bytes);
/* The same of the n-th piece of the order, now.  Fetched ones count as not there. */
bool piece_stream_resident_now(struct piece_stream *stream, uint32_t n, uint64_t *out_bytes);

/* The model's files on this machine, or NULL; valid until close. */
struct model_copy *piece_stream_copy(const struct piece_stream *stream);

#endif
