/* What of three rings belongs to a request, and what is missed when they went round. */
#include "node/node_spans.h"

#include "tests/harness.h"

enum { PLAN = 5, REQUEST = 9 };

static struct node_spans rings;
static uint64_t lost;

static void put(struct fl_span_ring *ring, enum fl_phase phase, uint64_t request_id, uint64_t run,
                uint64_t at_ns)
{
    const struct fl_span span = {
        .start_ns = at_ns,
        .end_ns = at_ns + 5,
        .plan_id = PLAN,
        .request_id = request_id,
        .run = run,
        .phase = phase,
        .piece = FL_SPAN_NO_PIECE,
    };
    fl_span_ring_put(ring, &span);
}

/* The request's ADMIT, at 1000. */
static void begin(void)
{
    CHECK_EQ(node_spans_open(&rings), FL_OK);
    put(rings.wire, FL_PHASE_RECEIVE, 0, 0, 500);
    put(rings.wire, FL_PHASE_RECEIVE, REQUEST, 0, 1000);
}

static uint32_t collect(void)
{
    lost = 77;
    return node_spans_collect(&rings, PLAN, REQUEST, &lost);
}

static void what_names_neither_is_left_out(void)
{
    begin();
    put(rings.compute, FL_PHASE_MEMORY, 0, 0, 600);
    put(rings.compute, FL_PHASE_JOIN, REQUEST, 3, 1100);
    put(rings.compute, FL_PHASE_JOIN, 8, 3, 1100);    /* another request in the same run */
    put(rings.compute, FL_PHASE_EMBED, 0, 3, 1110);   /* their task */
    put(rings.compute, FL_PHASE_PREFILL, 0, 2, 1120); /* a run of others */
    put(rings.compute, FL_PHASE_PREFILL, 0, 3, 1130);
    put(rings.compute, FL_PHASE_PREFILL, 8, 4, 1140);
    put(rings.compute, FL_PHASE_DECODE, REQUEST, 5, 1150);
    put(rings.compute, FL_PHASE_DECODE, 0, 6, 1160);
    put(rings.loader, FL_PHASE_EMBED, 0, 0, 1105);
    put(rings.loader, FL_PHASE_READ, 0, 0, 700); /* ended later, began earlier */
    const struct fl_span other = {.plan_id = 6, .phase = FL_PHASE_READ, .request_id = REQUEST};
    fl_span_ring_put(rings.loader, &other);
    static const enum fl_phase want[] = {FL_PHASE_RECEIVE, FL_PHASE_RECEIVE, FL_PHASE_MEMORY,
                                         FL_PHASE_JOIN,    FL_PHASE_EMBED,   FL_PHASE_PREFILL,
                                         FL_PHASE_DECODE,  FL_PHASE_READ,    FL_PHASE_EMBED};
    CHECK_EQ(collect(), 9);
    CHECK_EQ(lost, 0);
    for (uint32_t i = 0; i < 9; i++) {
        CHECK_EQ(rings.found[i].phase, want[i]);
    }
    CHECK_EQ(rings.found[7].lane, FL_LANE_LOADER);
    node_spans_close(&rings);
}

static void a_request_that_nothing_names_is_unknown(void)
{
    begin();
    put(rings.compute, FL_PHASE_MEMORY, 0, 0, 600);
    CHECK_EQ(node_spans_collect(&rings, PLAN, REQUEST + 1, &lost), 0);
    CHECK_EQ(node_spans_collect(&rings, PLAN, 0, &lost), 0);
    CHECK_EQ(node_spans_collect(&rings, PLAN + 1, REQUEST, &lost), 0);
    CHECK_EQ(collect(), 3);
    node_spans_close(&rings);
}

static void what_was_overwritten_counts_when_it_could_matter(void)
{
    begin();
    /* Long ago, much was decoded; all that is missing had ended before the request came. */
    for (uint32_t i = 0; i < NODE_SPANS_COMPUTE + 100; i++) {
        put(rings.compute, FL_PHASE_DECODE, 4, i + 1, 600 + i / 100);
    }
    CHECK_EQ(collect(), 2);
    CHECK_EQ(lost, 0);
    put(rings.compute, FL_PHASE_JOIN, REQUEST, 100000, 2000);
    put(rings.compute, FL_PHASE_PREFILL, REQUEST, 100000, 2010);
    CHECK_EQ(collect(), 4);
    CHECK_EQ(lost, 0);
    /* Then a long answer pushes the prompt's own spans out. */
    for (uint32_t i = 0; i < NODE_SPANS_COMPUTE; i++) {
        put(rings.compute, FL_PHASE_DECODE, REQUEST, 100001 + i, 3000 + i);
    }
    CHECK_EQ(collect(), 2 + NODE_SPANS_COMPUTE);
    CHECK_EQ(lost, NODE_SPANS_COMPUTE + 102);
    node_spans_close(&rings);
}

static void a_request_whose_arrival_was_overwritten_has_lost_spans(void)
{
    begin();
    put(rings.compute, FL_PHASE_JOIN, REQUEST, 1, 1010);
    for (uint32_t i = 0; i < NODE_SPANS_WIRE; i++) {
        put(rings.wire, FL_PHASE_RECEIVE, 4, 0, 2000 + i);
    }
    CHECK_EQ(collect(), 1);
    CHECK_EQ(lost, 2);
    node_spans_close(&rings);
}

static const struct test_case cases[] = {
    {"node_spans: a request's are those that name it, its runs, or its plan's opening",
     what_names_neither_is_left_out},
    {"node_spans: a request that nothing names is unknown",
     a_request_that_nothing_names_is_unknown},
    {"node_spans: what was overwritten counts when it could matter",
     what_was_overwritten_counts_when_it_could_matter},
    {"node_spans: a request whose arrival was overwritten has lost spans",
     a_request_whose_arrival_was_overwritten_has_lost_spans},
};

TEST_MAIN(cases)
