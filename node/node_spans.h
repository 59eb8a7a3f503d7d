/* node_spans.h - the timeline of one node: a ring of spans for each of its threads.
 *
 * Each thread writes its own; the wire thread reads all three when the
 * coordinator asks where a request's time went.
 *
 * Thread:  a ring as span_ring.h says; collect() from the wire thread.
 * Memory:  open() allocates, close() frees; collect() fills a buffer that open() made.
 */
#ifndef NODE_NODE_SPANS_H
#define NODE_NODE_SPANS_H

#include <stdint.h>

#include "proto/span_ring.h"

enum {
    NODE_SPANS_WIRE = 4096, /* a power of two each */
    NODE_SPANS_COMPUTE = 8192,
    NODE_SPANS_LOADER = 4096,
};

struct node_spans {
    struct fl_span_ring *wire;
    struct fl_span_ring *compute;
    struct fl_span_ring *loader;
    uint32_t found_max;
    struct fl_span *found; /* [found_max]: the last answer of collect() */
};

/* FL_NO_MEMORY, and close() is still due. */
FL_MUST_CHECK fl_status node_spans_open(struct node_spans *spans);
void node_spans_close(struct node_spans *spans);

/* Spans of the plan: those of its opening, its loading and its links, those of the request, and the
 * tasks of runs that the request joined.  They come into `found`, those of a ring in order of their
 * start; returns how many there are, 0 when no span names the request.  *out_lost: spans that were
 * overwritten and may have been among those since the request came. */
uint32_t node_spans_collect(struct node_spans *spans, uint64_t plan_id, uint64_t request_id,
                            uint64_t *out_lost);

#endif
