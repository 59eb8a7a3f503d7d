#include "node/node_spans.h"

#include <stdlib.h>

/* Runs of a request that may be under way together; a run's tasks are over before more begin. */
enum { JOINED_MAX = 16 };

struct query {
    uint64_t plan_id;
    uint64_t request_id;
    uint64_t admitted_ns; /* 0: not seen */
    bool is_known;        /* a span names the request */
    uint32_t joined_next;
    uint64_t joined[JOINED_MAX]; /* the last runs that it joined; 0: none */
};

fl_status node_spans_open(struct node_spans *spans)
{
    *spans =
        (struct node_spans){.found_max = NODE_SPANS_WIRE + NODE_SPANS_COMPUTE + NODE_SPANS_LOADER};
    FL_TRY(fl_span_ring_open(FL_LANE_WIRE, NODE_SPANS_WIRE, &spans->wire));
    FL_TRY(fl_span_ring_open(FL_LANE_COMPUTE, NODE_SPANS_COMPUTE, &spans->compute));
    FL_TRY(fl_span_ring_open(FL_LANE_LOADER, NODE_SPANS_LOADER, &spans->loader));
    spans->found = malloc(spans->found_max * sizeof(spans->found[0]));
    if (spans->found == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for an answer of %u spans",
                       (unsigned)spans->found_max);
    }
    return FL_OK;
}

void node_spans_close(struct node_spans *spans)
{
    fl_span_ring_close(spans->wire);
    fl_span_ring_close(spans->compute);
    fl_span_ring_close(spans->loader);
    free(spans->found);
    *spans = (struct node_spans){.wire = NULL};
}

/* A plan's own, whatever the request. */
static bool is_of_plan(const struct fl_span *span)
{
    switch (span->phase) {
    case FL_PHASE_MEMORY:
    case FL_PHASE_KV:
    case FL_PHASE_LINK:
    case FL_PHASE_READ:
    case FL_PHASE_VERIFY:
    case FL_PHASE_REPACK:
    case FL_PHASE_COPY: return true;
    case FL_PHASE_EMBED: return span->lane == FL_LANE_LOADER;
    case FL_PHASE_RECEIVE: return span->request_id == 0;
    case FL_PHASE_UNKNOWN:
    case FL_PHASE_START:
    case FL_PHASE_OPEN:
    case FL_PHASE_PLAN:
    case FL_PHASE_TOKENISE:
    case FL_PHASE_QUEUE:
    case FL_PHASE_SEND:
    case FL_PHASE_WAKE:
    case FL_PHASE_JOIN:
    case FL_PHASE_PREFILL:
    case FL_PHASE_HEAD:
    case FL_PHASE_SAMPLE:
    case FL_PHASE_DECODE:
    case FL_PHASE_RETURN:
    case FL_PHASE_COUNT: break;
    }
    return false;
}

static bool is_joined(const struct query *query, uint64_t run)
{
    for (uint32_t i = 0; run != 0 && i < JOINED_MAX; i++) {
        if (query->joined[i] == run) {
            return true;
        }
    }
    return false;
}

static bool is_wanted(struct query *query, const struct fl_span *span)
{
    if (span->plan_id != query->plan_id) {
        return false;
    }
    if (query->request_id != 0 && span->request_id == query->request_id) {
        query->is_known = true;
        if (span->phase == FL_PHASE_RECEIVE && span->rows == 0) {
            query->admitted_ns = span->start_ns;
        } else if (span->phase == FL_PHASE_JOIN) {
            query->joined[query->joined_next++ % JOINED_MAX] = span->run;
        }
        return true;
    }
    return is_of_plan(span) || (span->phase != FL_PHASE_JOIN && is_joined(query, span->run));
}

static int by_start(const void *a, const void *b)
{
    const struct fl_span *left = a;
    const struct fl_span *right = b;
    if (left->start_ns != right->start_ns) {
        return left->start_ns < right->start_ns ? -1 : 1;
    }
    return (left->end_ns > right->end_ns) - (left->end_ns < right->end_ns);
}

/* Adds what is wanted of one ring.  Spans are written when they end: what was overwritten had ended
 * before the oldest that is left, and does not matter when that is before the request came. */
static uint32_t collect_ring(struct query *query, const struct fl_span_ring *ring,
                             struct node_spans *spans, uint32_t count, uint64_t *lost)
{
    struct fl_span span;
    uint64_t cursor = 0;
    uint64_t overwritten = 0;
    uint64_t oldest_ns = 0;
    const uint32_t first = count;
    while (count < spans->found_max && fl_span_ring_read(ring, &cursor, &overwritten, &span)) {
        oldest_ns = oldest_ns == 0 ? span.end_ns : oldest_ns;
        if (is_wanted(query, &span)) {
            spans->found[count++] = span;
        }
    }
    if (overwritten > 0 && (query->admitted_ns == 0 || oldest_ns > query->admitted_ns)) {
        *lost += overwritten;
    }
    if (count > first) {
        qsort(spans->found + first, count - first, sizeof(spans->found[0]), by_start);
    }
    return count;
}

uint32_t node_spans_collect(struct node_spans *spans, uint64_t plan_id, uint64_t request_id,
                            uint64_t *out_lost)
{
    struct query query = {.plan_id = plan_id, .request_id = request_id};
    uint64_t lost = 0;
    /* The wire first: it knows when the request came. */
    uint32_t count = collect_ring(&query, spans->wire, spans, 0, &lost);
    count = collect_ring(&query, spans->compute, spans, count, &lost);
    count = collect_ring(&query, spans->loader, spans, count, &lost);
    *out_lost = lost;
    return query.is_known ? count : 0;
}
