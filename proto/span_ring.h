/* span_ring.h - the last spans of one thread.
 *
 * One thread writes, any one reads; when the ring is full the oldest span is
 * overwritten.  Writing is a handful of plain stores: always on, on every path.
 *
 *     writer ── put ──► [span][span][    ][span] ── read(cursor) ──► reader
 *
 * The reader keeps a cursor, the number of the next span to look at; one that
 * was overwritten meanwhile is skipped and counted.
 *
 * Thread:  put() from the writer; read() and end() from any, at the same time.  No locks.
 * Memory:  open() allocates, close() frees; nothing else does.
 */
#ifndef PROTO_SPAN_RING_H
#define PROTO_SPAN_RING_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/span.h"

#ifdef __cplusplus
extern "C" {
#endif

struct fl_span_ring;

/* `lane` is written into every span.  `count`: a power of two, 16 .. 1 << 20.  FL_NO_MEMORY. */
FL_MUST_CHECK fl_status fl_span_ring_open(enum fl_lane lane, uint32_t count,
                                          struct fl_span_ring **out);
void fl_span_ring_close(struct fl_span_ring *ring);

/* A NULL ring takes nothing: what runs without a timeline passes none. */
void fl_span_ring_put(struct fl_span_ring *ring, const struct fl_span *span);

/* The span numbered *cursor, or the first after it that is still there; *cursor moves past it and
 * *lost grows by those skipped.  false: none. */
bool fl_span_ring_read(const struct fl_span_ring *ring, uint64_t *cursor, uint64_t *lost,
                       struct fl_span *out);

/* Spans ever put. */
uint64_t fl_span_ring_end(const struct fl_span_ring *ring);

#ifdef __cplusplus
}
#endif
#endif
