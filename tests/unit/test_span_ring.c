/* Span ring: every field comes back, the oldest go first, a reader beside a writer sees whole spans. */
#include "proto/span_ring.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "tests/harness.h"

static struct fl_span numbered(uint64_t n)
{
    return (struct fl_span){
        .start_ns = n,
        .end_ns = 2 * n,
        .busy_ns = n / 2,
        .plan_id = n + 1,
        .request_id = n + 2,
        .run = n + 3,
        .bytes = n + 4,
        .cause_ns = n + 5,
        .piece = (uint32_t)n,
        .position = (uint32_t)n + 6,
        .rows = (uint32_t)n + 7,
        .phase = (enum fl_phase)(n % FL_PHASE_COUNT),
        .source = (enum fl_source)(n % FL_SOURCE_COUNT),
        .cause = (enum fl_cause)(n % FL_CAUSE_COUNT),
    };
}

static bool is_numbered(const struct fl_span *span, uint64_t n)
{
    const struct fl_span want = numbered(n);
    return span->start_ns == want.start_ns && span->end_ns == want.end_ns &&
           span->busy_ns == want.busy_ns && span->plan_id == want.plan_id &&
           span->request_id == want.request_id && span->run == want.run &&
           span->bytes == want.bytes && span->cause_ns == want.cause_ns &&
           span->piece == want.piece && span->position == want.position &&
           span->rows == want.rows && span->phase == want.phase && span->lane == FL_LANE_WIRE &&
           span->source == want.source && span->cause == want.cause;
}

static void spans_come_back_in_order_with_every_field(void)
{
    struct fl_span_ring *ring;
    CHECK_EQ(fl_span_ring_open(FL_LANE_WIRE, 16, &ring), FL_OK);
    uint64_t cursor = 0;
    uint64_t lost = 0;
    struct fl_span span;
    CHECK(!fl_span_ring_read(ring, &cursor, &lost, &span));
    for (uint64_t n = 0; n < 16; n++) {
        const struct fl_span in = numbered(n * 1000003);
        fl_span_ring_put(ring, &in);
    }
    for (uint64_t n = 0; n < 16; n++) {
        CHECK(fl_span_ring_read(ring, &cursor, &lost, &span));
        CHECK(is_numbered(&span, n * 1000003));
    }
    CHECK(!fl_span_ring_read(ring, &cursor, &lost, &span));
    CHECK_EQ(lost, 0);
    CHECK_EQ(fl_span_ring_end(ring), 16);
    fl_span_ring_close(ring);
}

static void a_full_ring_loses_the_oldest_and_says_how_many(void)
{
    struct fl_span_ring *ring;
    CHECK_EQ(fl_span_ring_open(FL_LANE_WIRE, 16, &ring), FL_OK);
    for (uint64_t n = 0; n < 40; n++) {
        const struct fl_span in = numbered(n);
        fl_span_ring_put(ring, &in);
    }
    uint64_t cursor = 3;
    uint64_t lost = 0;
    struct fl_span span;
    CHECK(fl_span_ring_read(ring, &cursor, &lost, &span));
    CHECK(is_numbered(&span, 24));
    CHECK_EQ(lost, 21);
    CHECK_EQ(cursor, 25);
    fl_span_ring_close(ring);
}

static void without_a_ring_nothing_is_recorded(void)
{
    const struct fl_span span = numbered(1);
    fl_span_ring_put(NULL, &span);
    fl_span_ring_close(NULL);
}

enum { WRITTEN = 200000 };

struct busy_writer {
    struct fl_span_ring *ring;
    _Atomic int stop;
};

static void *write_all(void *ctx)
{
    for (uint64_t n = 0; n < WRITTEN; n++) {
        const struct fl_span in = numbered(n);
        fl_span_ring_put(ctx, &in);
    }
    return NULL;
}

static void a_reader_beside_the_writer_sees_whole_spans_only(void)
{
    struct fl_span_ring *ring;
    pthread_t writer;
    CHECK_EQ(fl_span_ring_open(FL_LANE_WIRE, 64, &ring), FL_OK);
    CHECK_EQ(pthread_create(&writer, NULL, write_all, ring), 0);
    uint64_t cursor = 0;
    uint64_t lost = 0;
    uint64_t seen = 0;
    uint64_t broken = 0;
    while (cursor < WRITTEN) {
        struct fl_span span;
        if (fl_span_ring_read(ring, &cursor, &lost, &span)) {
            seen++;
            broken += !is_numbered(&span, cursor - 1);
        }
    }
    pthread_join(writer, NULL);
    fl_span_ring_close(ring);
    CHECK_EQ(broken, 0);
    CHECK_EQ(seen + lost, WRITTEN);
}

static void *write_until_told(void *ctx)
{
    struct busy_writer *writer = ctx;
    for (uint64_t n = 0; atomic_load_explicit(&writer->stop, memory_order_relaxed) == 0; n++) {
        const struct fl_span in = numbered(n);
        fl_span_ring_put(writer->ring, &in);
    }
    return NULL;
}

/* Else an answer would lack spans, and say that nothing is missing. */
static void a_reader_that_is_overtaken_reads_on_to_what_was_there(void)
{
    struct busy_writer writer = {.stop = 0};
    pthread_t thread;
    uint64_t short_count = 0;
    CHECK_EQ(fl_span_ring_open(FL_LANE_WIRE, 16, &writer.ring), FL_OK);
    CHECK_EQ(pthread_create(&thread, NULL, write_until_told, &writer), 0);
    for (int i = 0; i < 20000; i++) {
        uint64_t cursor = 0;
        uint64_t lost = 0;
        struct fl_span span;
        const uint64_t end = fl_span_ring_end(writer.ring);
        while (cursor < end && fl_span_ring_read(writer.ring, &cursor, &lost, &span)) {
        }
        short_count += cursor < end;
    }
    atomic_store_explicit(&writer.stop, 1, memory_order_relaxed);
    pthread_join(thread, NULL);
    fl_span_ring_close(writer.ring);
    CHECK_EQ(short_count, 0);
}

static void every_kind_has_a_name(void)
{
    for (int i = 1; i < FL_PHASE_COUNT; i++) {
        CHECK(strcmp(fl_phase_name((enum fl_phase)i), "unknown") != 0);
    }
    CHECK(strcmp(fl_phase_name(FL_PHASE_COUNT), "unknown") == 0);
    for (int i = 1; i < FL_LANE_COUNT; i++) {
        CHECK(strcmp(fl_lane_name((enum fl_lane)i), "none") != 0);
    }
    for (int i = 1; i < FL_SOURCE_COUNT; i++) {
        CHECK(strcmp(fl_source_name((enum fl_source)i), "none") != 0);
    }
    for (int i = 1; i < FL_CAUSE_COUNT; i++) {
        CHECK(strcmp(fl_cause_name((enum fl_cause)i), "none") != 0);
    }
}

static const struct test_case cases[] = {
    {"span_ring: spans come back in order with every field",
     spans_come_back_in_order_with_every_field},
    {"span_ring: a full ring loses the oldest and says how many",
     a_full_ring_loses_the_oldest_and_says_how_many},
    {"span_ring: without a ring nothing is recorded", without_a_ring_nothing_is_recorded},
    {"span_ring: a reader beside the writer sees whole spans only",
     a_reader_beside_the_writer_sees_whole_spans_only},
    {"span_ring: a reader that is overtaken reads on to what was there",
     a_reader_that_is_overtaken_reads_on_to_what_was_there},
    {"span: every kind has a name", every_kind_has_a_name},
};

TEST_MAIN(cases)
