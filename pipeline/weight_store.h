/* weight_store.h - the packed weights of one stage, arriving piece by piece.
 *
 * The loader puts rows as they come from disk or wire; each is repacked into
 * place at once, and a piece becomes visible when its last row is there.  The
 * compute side acquires a piece just before it runs it and releases it after:
 * FL_AGAIN means "still on its way".  Nothing ever waits for the whole shard.
 *
 *      loader:  next ─ put, put, .. ─ publish        compute:  acquire ─ release
 *
 * A piece may be dropped again when nobody holds it (the ring regime, later).
 * With a tied head on the same stage, EMBED has no memory of its own: its rows
 * are HEAD's.
 *
 * Thread:  next(), put(), publish(), fail() from one loader thread; acquire(), release() and
 *          the rest from the compute thread; counters from any.  No locks.
 * Memory:  open() takes device memory for every piece, close() returns it.
 */
#ifndef PIPELINE_WEIGHT_STORE_H
#define PIPELINE_WEIGHT_STORE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"
#include "kernels/matrix.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"

#ifdef __cplusplus
extern "C" {
#endif

struct weight_store;

/* One piece, ready to compute with.  Entries of roles the piece lacks are zero. */
struct piece_weights {
    struct matrix matrix[FL_ROLE_LAST + 1]; /* by role */
    const float *vector[FL_ROLE_LAST + 1];  /* by role; norms and factors as f32 */
};

/* Device bytes of a stage's pieces, packed.  A pure sum, for the planner too. */
uint64_t weight_store_memory(const struct fl_manifest *manifest);

/* `manifest` (a stage's) and `device` are borrowed until close.
 * FL_NO_MEMORY with the number of bytes that were wanted. */
FL_MUST_CHECK fl_status weight_store_open(const struct fl_manifest *manifest, struct device *device,
                                          struct weight_store **out);
void weight_store_close(struct weight_store *store);

/* The order in which to load: layers as they compute, then HEAD, then EMBED.
 * Writes the index of the `n`-th piece to load; FL_END after the last. */
FL_MUST_CHECK fl_status weight_store_order(const struct weight_store *store, uint32_t n,
                                           uint32_t *out_piece);

/* True when the piece has memory to be filled (false: EMBED of a tied head). */
int weight_store_has_memory(const struct weight_store *store, uint32_t piece);

/* Put rows row_first .. of tensor `tensor` of a piece, as they lie in the file.  row_first is a
 * multiple of MATRIX_ROW_GROUP, row_count too unless they are the tensor's last rows. */
void weight_store_put(struct weight_store *store, uint32_t piece, uint32_t tensor,
                      uint32_t row_first, uint32_t row_count, const void *raw);

/* All rows of the piece were put: make it visible.  `now_ns` says when, for the timeline. */
void weight_store_publish(struct weight_store *store, uint32_t piece, uint64_t now_ns);

/* Loading cannot go on: acquire() of pieces not published returns `status` from now on. */
void weight_store_fail(struct weight_store *store, fl_status status);

/* FL_AGAIN until published.  Valid until release. */
FL_MUST_CHECK fl_status weight_store_acquire(struct weight_store *store, uint32_t piece,
                                             const struct piece_weights **out);
void weight_store_release(struct weight_store *store, uint32_t piece);

/* What publish() was told of a piece that was acquired once. */
uint64_t weight_store_published_ns(const struct weight_store *store, uint32_t piece);

/* Embedding rows out of published weights (EMBED, or a tied HEAD): out [count, D], not scaled.
 * FL_AGAIN while neither is published. */
FL_MUST_CHECK fl_status weight_store_embed(const struct weight_store *store, const uint32_t *ids,
                                           uint32_t count, float *out);

/* Pieces published, and their bytes in the file.  EMBED of a tied head counts with HEAD, without
 * bytes of its own: at the end both equal the manifest's pieces and bytes_total(). */
uint32_t weight_store_pieces_done(const struct weight_store *store);
uint64_t weight_store_bytes_done(const struct weight_store *store);
uint64_t weight_store_bytes_total(const struct weight_store *store);

#ifdef __cplusplus
}
#endif
#endif
