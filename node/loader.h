/* loader.h - brings the weights of a node's plans in, piece by piece.
 *
 * Plans are loaded in the order they arrive, their pieces in the order of use.
 * Each step moves one chunk (about a MiB) from disk or wire into the weight
 * store, which repacks it in place; a piece is published with its last row, and
 * the compute thread is woken.  Between chunks the loader first serves the
 * embedding rows that a prompt waits for, so a first stage computes long before
 * its table is there.  When nothing is left to load, fetched pieces are synced
 * into the shard cache.
 *
 * For the timeline a plan's loading is cut into pieces without gaps: one begins
 * when the one before it was published, the first with the job.  What of the
 * interval was checksums and repacking is recorded apart; the rest, waiting for
 * a slow wire included, is reading.
 *
 * Thread:  step() from the loader thread; submit(), abandon(), released() from the compute
 *          thread; open() and close() while neither runs.
 * Memory:  open() allocates; a job borrows what it names until it is released.
 */
#ifndef NODE_LOADER_H
#define NODE_LOADER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "node/embedding_reader.h"
#include "node/fetch_queue.h"
#include "node/host_meter.h"
#include "node/model_storage.h"
#include "node/node_plan.h"
#include "node/shard_cache.h"
#include "node/wake.h"
#include "pipeline/weight_store.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/span_ring.h"

struct loader;
struct piece_stream;

struct loader_config {
    const struct model_storage *storage; /* borrowed until close, as the rest */
    struct shard_cache *cache;           /* NULL: none */
    struct fetch_queue *fetches;
    struct fl_clock clock;
    struct wake *loader_wake;
    struct wake *compute_wake;
    struct wake *wire_wake;
    struct fl_span_ring *spans;     /* NULL: nothing is recorded */
    const struct host_meter *meter; /* NULL: none */
};

struct loader_job {
    struct node_plan *plan;
    struct weight_store *weights;
    struct embedding_reader *embed; /* NULL unless this is a first stage */

    _Atomic int abandoned; /* set by abandon() */
    _Atomic int released;  /* set when the loader has let go */

    /* The loader's own. */
    struct piece_stream *stream;
    uint32_t *order; /* [order_count] */
    uint32_t order_count;
    uint32_t tensor;   /* of the current piece: the next one to put, */
    uint32_t row;      /* and its next row */
    size_t staged;     /* bytes waiting in the staging buffer */
    uint64_t begin_ns; /* when it was begun */
    uint64_t piece_ns; /* when the current piece was, and of the time since: */
    uint64_t verify_ns;
    uint64_t repack_ns;
    uint64_t away_ns;        /* spent on embedding rows and other plans */
    uint64_t medium_bytes;   /* of the process, at the beginning */
    uint32_t after;          /* pieces that are there, of order, */
    uint64_t resident_after; /* and their bytes in the page cache then */
    bool after_unknown;
};

FL_MUST_CHECK fl_status loader_open(const struct loader_config *config, struct loader **out);
void loader_close(struct loader *loader);

/* Zero `job` but for its first three members, and leave it alone until it is released.
 * At most NODE_PLAN_MAX at once. */
void loader_submit(struct loader *loader, struct loader_job *job);

/* Stop loading; released() is true soon after. */
void loader_abandon(struct loader *loader, struct loader_job *job);
bool loader_released(const struct loader_job *job);

/* Do one thing.  FL_AGAIN when there is nothing to do until the loader is woken. */
FL_MUST_CHECK fl_status loader_step(struct loader *loader);

/* True while pieces of some plan are missing.  Thread: the loader thread. */
bool loader_busy(const struct loader *loader);

#endif
