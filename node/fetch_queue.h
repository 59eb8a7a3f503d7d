/* fetch_queue.h - bytes of a model file on their way from the coordinator.
 *
 * The loader asks for runs of bytes and takes them when they are here; the wire
 * thread sends the FETCH messages and delivers what FETCH_DATA brings.  A few
 * requests are under way at once, so that the link does not idle between two.
 * A damaged answer is asked for again, a few times.
 *
 *      loader: submit ─ poll .. poll ─ release        wire: next ─ sent ─ deliver
 *
 * Thread:  as the picture says; a mutex guards the slots.
 * Memory:  open() allocates, close() frees; a slot's buffer is touched when first used.
 */
#ifndef NODE_FETCH_QUEUE_H
#define NODE_FETCH_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "node/wake.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

struct fetch_queue;

enum {
    FETCH_STREAM_MAX = 4,                    /* requests of a load under way at once */
    FETCH_SLOT_COUNT = FETCH_STREAM_MAX + 1, /* and one for embedding rows */
    FETCH_PART_MAX = FL_PIECE_TENSOR_MAX,
};

/* Ranges of one file; they land at `offset` of the request's bytes, one after the other. */
struct fetch_part {
    uint32_t file;
    uint32_t range_count;
    const struct fl_range *ranges;
    uint32_t offset;
    uint32_t size; /* of the ranges together */
};

struct fetch_request {
    const struct fl_manifest *manifest;
    uint32_t part_count;
    struct fetch_part parts[FETCH_PART_MAX]; /* together at most FL_FETCH_SIZE_MAX bytes */
};

FL_MUST_CHECK fl_status fetch_queue_open(struct wake *loader_wake, struct wake *wire_wake,
                                         struct fetch_queue **out);
void fetch_queue_close(struct fetch_queue *queue);

/* Manifest and ranges are borrowed until release.  FL_AGAIN when no slot is free. */
FL_MUST_CHECK fl_status fetch_queue_submit(struct fetch_queue *queue,
                                           const struct fetch_request *request, uint32_t *out_slot);

/* FL_AGAIN while under way; FL_OK: `out` is valid until release; else why it failed. */
FL_MUST_CHECK fl_status fetch_queue_poll(struct fetch_queue *queue, uint32_t slot,
                                         const unsigned char **out);
void fetch_queue_release(struct fetch_queue *queue, uint32_t index);

/* The next message to send, or false.  Its pointers are valid until the next call of the queue by
 * the wire thread, and it is offered again until sent() is called. */
bool fetch_queue_next(struct fetch_queue *queue, struct fl_fetch *out);
void fetch_queue_sent(struct fetch_queue *queue, uint64_t transfer_id);

/* An answer came.  One that nobody waits for (any more) is dropped; FL_PROTOCOL when it is of
 * another size than asked for. */
FL_MUST_CHECK fl_status fetch_queue_deliver(struct fetch_queue *queue,
                                            const struct fl_fetch_header *header, const void *data,
                                            size_t size);

/* The coordinator is gone: everything under way fails with FL_LINK_LOST. */
void fetch_queue_reset(struct fetch_queue *queue);

#endif
