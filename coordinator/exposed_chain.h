/* exposed_chain.h - what the user waited for: the way back from the first token.
 *
 * Of all that happened between a request's arrival (t0) and its first token only
 * some was waited for.  Starting at the token, every step asks what came last
 * before this could begin: a task waited for its piece, its rows or its thread, a
 * message for a link or for room at its receiver.  What is found is laid end to
 * end, backwards, until t0 is reached:
 *
 *   t0 ─ tokenise ─ send ─ wake ─ read ─ verify ─ repack ─ ... ─ prefill ─ head ─ sample ─ send ─ return
 *
 * The segments are in order, leave no gap, and sum to end_ns - begin_ns exactly,
 * whatever the spans say.  Times from several machines may contradict each other
 * by as much as their clocks are known, and nodes may send none, too few, or
 * nonsense: a step never goes forward in time nor beyond t0, and what nobody
 * explains is UNKNOWN.
 *
 * A gap is WAKE between a cause and its effect on one thread, SEND between a
 * message sent and received, UNKNOWN otherwise.  One of less than 20 us on one
 * thread belongs to what follows.
 *
 * Which span is which (see span.h): RECEIVE of PLAN has no request, of ADMIT a
 * request and no rows, of activations both.  The coordinator's SEND of PLAN and
 * ADMIT likewise, with the stage in `position`.
 *
 * This file takes the steps; what they look at is exposed_search.h, what they
 * explain grows in exposed_segments.h, and exposed_phases.h sums it up.
 *
 * Thread:  any; no I/O, no allocation.
 * Units:   nanoseconds of the coordinator's clock; spans of nodes were mapped to it.
 */
#ifndef COORDINATOR_EXPOSED_CHAIN_H
#define COORDINATOR_EXPOSED_CHAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/client_message.h"
#include "proto/span.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EXPOSED_CHAIN_COORDINATOR UINT32_MAX

struct exposed_stage {
    struct fl_span *spans; /* [span_count]; find() sorts them */
    uint32_t span_count;
    uint64_t error_ns; /* a time may be this wrong */
    bool whole;        /* no span is missing */
};

struct exposed_chain_config {
    uint64_t begin_ns; /* t0 */
    uint64_t token_ns; /* the first token reached the coordinator */
    uint64_t end_ns;   /* and its text left */
    uint64_t request_id;
    uint32_t prompt_count;
    uint32_t stage_count;
    struct exposed_stage *stages; /* [stage_count] */
    struct fl_span *own;          /* [own_count]: the coordinator's; sorted too */
    uint32_t own_count;
};

struct exposed_segment {
    uint64_t start_ns;
    uint64_t end_ns; /* later than start_ns */
    uint64_t bytes;
    uint32_t stage; /* or EXPOSED_CHAIN_COORDINATOR */
    enum fl_phase phase;
    enum fl_cause cause; /* QUEUE: BUSY is other requests' work; SEND: what was waited for */
};

/* Walks; out [FL_TIMELINE_SEGMENT_MAX] in order of time.  Returns their count, 0 only when
 * begin_ns == end_ns.  Sorts the spans. */
uint32_t exposed_chain_find(const struct exposed_chain_config *config, struct exposed_segment *out);

#ifdef __cplusplus
}
#endif
#endif
