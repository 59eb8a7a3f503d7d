/* embedding_reader.h - embedding rows of a prompt before their table is in memory.
 *
 * The first stage asks for the rows of a run's tokens; the loader reads just
 * those, ahead of every piece, from the model's file here or from the
 * coordinator.  One request at a time; its rows wait until the stage asks again
 * with the same tokens.
 *
 * Thread:  read() from the compute thread, step() from the loader thread.
 * Memory:  open() allocates [rows_max, D] floats, close() frees.
 * Shapes:  D model width; rows are [count, D] f32, not scaled.
 */
#ifndef NODE_EMBEDDING_READER_H
#define NODE_EMBEDDING_READER_H

#include <stdbool.h>
#include <stdint.h>

#include "node/fetch_queue.h"
#include "node/model_storage.h"
#include "node/wake.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"
#include "proto/span.h"

struct embedding_reader;

struct embedding_reader_config {
    const struct fl_manifest *manifest; /* with an EMBED piece; borrowed until close */
    uint32_t rows_max;                  /* of one request */
    struct fetch_queue *fetches;
    struct wake *loader_wake;
    struct wake *compute_wake;
};

/* FL_NO_MEMORY; FL_INVALID when the manifest has no embedding. */
FL_MUST_CHECK fl_status embedding_reader_open(const struct embedding_reader_config *config,
                                              struct embedding_reader **out);
void embedding_reader_close(struct embedding_reader *reader);

/* As embedding_source.read() of pipeline/stage.h; `ctx` is the reader. */
fl_status embedding_reader_read(void *ctx, const uint32_t *ids, uint32_t count, float *out,
                                uint64_t *out_ready_ns);

/* Go on with the request, if there is one; `copy` NULL: over the wire.  FL_OK when one was answered:
 * out_span says how long it took and where the bytes came from.  FL_AGAIN when there is nothing to
 * do now. */
FL_MUST_CHECK fl_status embedding_reader_step(struct embedding_reader *reader,
                                              const struct model_storage *storage,
                                              struct model_copy *copy, const struct fl_clock *clock,
                                              struct fl_span *out_span);

/* Loading is over, well or not: give up what is under way.  Later requests fail with `status`. */
void embedding_reader_stop(struct embedding_reader *reader, fl_status status);

#endif
