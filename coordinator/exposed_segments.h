/* exposed_segments.h - a chain as it grows, from the first token back to t0.
 *
 * What was added explains the time from end_ns back to `now_ns`, without a gap.
 * Each addition explains from its start to now, and now moves there; one that
 * starts later than now explains nothing, and nothing goes beyond t0.  Like
 * follows like as one segment.
 *
 *   t0 ............ start ─── now ─── segment ─── .. ─── segment ─── end
 *
 * When there are too many, the shortest melt into their neighbours: the sum stays
 * exact.
 *
 * Thread:  any; no I/O, no allocation.
 * Memory:  `config` and the array are borrowed until finish().
 * Units:   nanoseconds of the coordinator's clock.
 */
#ifndef COORDINATOR_EXPOSED_SEGMENTS_H
#define COORDINATOR_EXPOSED_SEGMENTS_H

#include <stdint.h>

#include "coordinator/exposed_chain.h"
#include "proto/span.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Two readings of one clock around one event differ by less. */
#define EXPOSED_NEAR_NS UINT64_C(20000)

struct exposed_segments {
    const struct exposed_chain_config *config;
    struct exposed_segment *segments; /* [FL_TIMELINE_SEGMENT_MAX], the latest first */
    uint32_t count;
    uint64_t now_ns; /* what comes later is explained */
};

void exposed_segments_begin(struct exposed_segments *list,
                            const struct exposed_chain_config *config, struct exposed_segment *out);

/* Explains the time from segment.start_ns to now; its end_ns is not looked at. */
void exposed_segments_add(struct exposed_segments *list, struct exposed_segment segment);

/* Nobody says what this thread did from `start_ns` to now: WAKE, or where spans are missing, UNKNOWN.
 * A moment on the way from one task to the next belongs to the next. */
void exposed_segments_add_gap(struct exposed_segments *list, uint32_t stage, uint64_t start_ns);

/* A span, and the gap behind it. */
void exposed_segments_add_span(struct exposed_segments *list, const struct fl_span *span,
                               uint32_t stage);

/* Bytes of a span, as far as it lies before now and after t0. */
uint64_t exposed_segments_bytes(const struct exposed_segments *list, const struct fl_span *span);

/* What is left to t0 is UNKNOWN; puts the segments in order of time and returns their count. */
uint32_t exposed_segments_finish(struct exposed_segments *list);

/* Of `whole` the part that is to it as the numerator to the denominator; never more than `whole`. */
uint64_t exposed_segments_share(uint64_t whole, uint64_t numerator, uint64_t denominator);

#ifdef __cplusplus
}
#endif
#endif
