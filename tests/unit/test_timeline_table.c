/* test_timeline_table.c - how many timelines and spans are kept, and what is dropped first. */
#include "coordinator/timeline.h"

#include <stdlib.h>

#include "proto/base/clock.h"
#include "tests/harness.h"

static struct timeline_table *table;
static struct clock_map map;
static struct fl_span spans[FL_SPANS_MAX];
static uint64_t next_id;

static void open_table(void)
{
    timeline_table_close(table);
    CHECK_EQ(timeline_table_open(&table), FL_OK);
    clock_map_init(&map, 0);
    next_id = 1;
    /* Their clock is 5 s ahead. */
    const struct clock_map_sample sample = {.sent_ns = FL_NS_PER_S,
                                            .received_ns = 6 * FL_NS_PER_S,
                                            .replied_ns = 6 * FL_NS_PER_S,
                                            .returned_ns = FL_NS_PER_S};
    CHECK_EQ(clock_map_take(&map, &sample), CLOCK_MAP_TAKEN);
    for (uint32_t i = 0; i < FL_SPANS_MAX; i++) {
        spans[i] = (struct fl_span){.start_ns = 6 * FL_NS_PER_S,
                                    .end_ns = 6 * FL_NS_PER_S + FL_NS_PER_MS,
                                    .busy_ns = FL_NS_PER_MS,
                                    .cause_ns = 6 * FL_NS_PER_S,
                                    .plan_id = 1,
                                    .phase = FL_PHASE_READ,
                                    .lane = FL_LANE_LOADER};
    }
}

static struct timeline *start(void)
{
    struct timeline *timeline = timeline_start(table, 2);
    CHECK(timeline != NULL);
    timeline->id = next_id++;
    timeline->plan_id = 1;
    timeline->request_id = timeline->id;
    timeline->begin_ns = FL_NS_PER_S;
    timeline->token_ns = timeline->end_ns = FL_NS_PER_S + 50 * FL_NS_PER_MS;
    timeline->prompt_count = 3;
    return timeline;
}

static void take(struct timeline *timeline, uint32_t stage, uint32_t count, uint64_t lost,
                 bool last)
{
    const struct fl_spans message = {
        .plan_id = 1, .last = last, .lost = lost, .span_count = count, .spans = spans};
    timeline_take(table, timeline, stage, &message, &map);
}

static void the_last_ones_are_kept(void)
{
    const struct timeline *found = NULL;
    open_table();
    CHECK_EQ(timeline_find(table, 0, &found), FL_NOT_FOUND);
    for (uint32_t i = 0; i < 3 * FL_TIMELINE_KEPT; i++) {
        struct timeline *timeline = start();
        take(timeline, 0, 10, 0, true);
        take(timeline, 1, 5, 0, true);
        CHECK(timeline_answered(timeline));
        timeline_keep(table, timeline);
        CHECK_EQ(timeline_find(table, 0, &found), FL_OK);
        CHECK_EQ(found->id, i + 1);
        CHECK(found->complete);
    }
    CHECK_EQ(timeline_find(table, 2 * FL_TIMELINE_KEPT + 1, &found), FL_OK);
    CHECK_EQ(timeline_find(table, 2 * FL_TIMELINE_KEPT, &found), FL_NOT_FOUND);
    CHECK(strstr(fl_last_error(), "ids from 129 to 192") != NULL);
    CHECK_EQ(timeline_span_size(table), FL_TIMELINE_KEPT * 15 * sizeof(struct fl_span));
}

static void times_of_a_node_are_ours(void)
{
    open_table();
    struct timeline *timeline = start();
    take(timeline, 0, 1, 0, true);
    const struct timeline_stage *stage = &timeline->stages[0];
    CHECK(stage->clock_known);
    CHECK_EQ(stage->clock_offset_ns, 5 * FL_NS_PER_S);
    CHECK_EQ(stage->spans[0].start_ns, FL_NS_PER_S);
    CHECK_EQ(stage->spans[0].end_ns, FL_NS_PER_S + FL_NS_PER_MS);
    CHECK_EQ(stage->spans[0].cause_ns, FL_NS_PER_S);
    /* A clock that nobody knows. */
    struct clock_map unknown;
    clock_map_init(&unknown, 0);
    const struct fl_spans message = {.plan_id = 1, .last = true, .span_count = 4, .spans = spans};
    timeline_take(table, timeline, 1, &message, &unknown);
    CHECK(!timeline->stages[1].clock_known);
    CHECK_EQ(timeline->stages[1].span_count, 0);
    CHECK_EQ(timeline->stages[1].spans_lost, 4);
    timeline_keep(table, timeline);
    CHECK(!timeline->complete);
    CHECK_EQ(timeline->phases[FL_PHASE_UNKNOWN].exposed_ns, 50 * FL_NS_PER_MS);
}

static void moments_of_any_clock_find_a_place(void)
{
    open_table();
    spans[0].start_ns = 0;
    spans[0].end_ns = UINT64_MAX;
    spans[0].cause_ns = 1;
    struct timeline *timeline = start();
    take(timeline, 0, 1, 0, true);
    const struct fl_span *span = &timeline->stages[0].spans[0];
    CHECK_EQ(span->start_ns, 0);
    CHECK(span->end_ns >= FL_NS_PER_S);
    CHECK_EQ(span->cause_ns, 0); /* before our clock began: not known */
    timeline_keep(table, timeline);
}

static void one_timeline_has_a_limit(void)
{
    open_table();
    struct timeline *timeline = start();
    const uint32_t rounds = FL_TIMELINE_SPAN_MAX / FL_SPANS_MAX;
    for (uint32_t i = 0; i < rounds; i++) {
        take(timeline, i % 2, FL_SPANS_MAX, i % 2 == 0 ? 2 : 0, false);
    }
    CHECK_EQ(timeline->stages[0].spans_lost, 2); /* every message says it */
    take(timeline, 0, 7, 3, true);
    take(timeline, 0, 7, 3, true); /* after its last word */
    CHECK_EQ(timeline->stages[0].spans_lost, 10);
    CHECK_EQ(timeline->stages[0].span_count + timeline->stages[1].span_count, FL_TIMELINE_SPAN_MAX);
    CHECK(!timeline_answered(timeline));
    timeline_keep(table, timeline);
    CHECK(!timeline->complete);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < FL_PHASE_COUNT; i++) {
        sum += timeline->phases[i].exposed_ns;
    }
    CHECK_EQ(sum, 50 * FL_NS_PER_MS);
}

/* What is shown of one is a single message, and the coordinator's own spans are in it. */
static void own_spans_count_against_the_limit(void)
{
    open_table();
    struct timeline *timeline = start();
    for (uint32_t i = 0; i < 5; i++) {
        (void)timeline_own(timeline, FL_PHASE_OPEN, FL_NS_PER_S, FL_NS_PER_S);
    }
    for (uint32_t i = 0; i < FL_TIMELINE_SPAN_MAX / FL_SPANS_MAX; i++) {
        take(timeline, 0, FL_SPANS_MAX, 0, false);
    }
    CHECK_EQ(timeline->stages[0].span_count, FL_TIMELINE_SPAN_MAX - 5);
    CHECK_EQ(timeline->stages[0].spans_lost, 5);
    timeline_keep(table, timeline);
}

static void however_many_are_lost_they_are_not_forgotten(void)
{
    open_table();
    struct timeline *timeline = start();
    take(timeline, 0, 3, UINT64_MAX, true);
    take(timeline, 1, 3, 1, false);
    take(timeline, 1, 3, UINT64_MAX, true);
    CHECK_EQ(timeline->stages[0].spans_lost, UINT64_MAX);
    CHECK_EQ(timeline->stages[1].spans_lost, UINT64_MAX);
    timeline_keep(table, timeline);
    CHECK(!timeline->complete);
}

static void the_oldest_lose_their_spans_first(void)
{
    open_table();
    const uint64_t most = TIMELINE_SPAN_SIZE_MAX / sizeof(struct fl_span);
    const uint64_t needed = most / (4 * FL_SPANS_MAX) + 2; /* of four messages each */
    CHECK(needed < FL_TIMELINE_KEPT);
    for (uint64_t i = 0; i < needed; i++) {
        struct timeline *timeline = start();
        for (uint32_t j = 0; j < 4; j++) {
            take(timeline, j % 2, FL_SPANS_MAX, 0, j >= 2);
        }
        timeline_keep(table, timeline);
        CHECK(timeline_span_size(table) <= TIMELINE_SPAN_SIZE_MAX);
    }
    const struct timeline *found = NULL;
    CHECK_EQ(timeline_find(table, 1, &found), FL_OK);
    CHECK_EQ(found->stages[0].span_count, 0);
    CHECK(found->complete); /* its chain was found with all of them */
    CHECK(found->segment_count > 0);
    CHECK_EQ(timeline_find(table, needed, &found), FL_OK);
    CHECK_EQ(found->stages[0].span_count, 2 * FL_SPANS_MAX);
}

/* As many requests at once as nodes can make noise for. */
static void what_is_being_collected_has_the_same_limit(void)
{
    enum { COUNT = 40 };
    struct timeline *open[COUNT];
    open_table();
    for (uint32_t i = 0; i < COUNT; i++) {
        open[i] = start();
    }
    for (uint32_t round = 0; round < FL_TIMELINE_SPAN_MAX / FL_SPANS_MAX + 1; round++) {
        for (uint32_t i = 0; i < COUNT; i++) {
            take(open[i], 0, FL_SPANS_MAX, 0, false);
        }
    }
    CHECK(timeline_span_size(table) <= TIMELINE_SPAN_SIZE_MAX);
    CHECK(timeline_span_size(table) > TIMELINE_SPAN_SIZE_MAX - sizeof(struct fl_span));
    CHECK(open[COUNT - 1]->stages[0].spans_lost > 0);
    for (uint32_t i = 0; i < COUNT; i++) {
        timeline_keep(table, open[i]);
    }
    struct timeline *timeline = start();
    take(timeline, 0, FL_SPANS_MAX, 0, true);
    CHECK_EQ(timeline->stages[0].span_count, FL_SPANS_MAX);
    timeline_keep(table, timeline);
}

static void phases_are_listed_by_what_they_cost(void)
{
    open_table();
    struct timeline *timeline = start();
    (void)timeline_own(timeline, FL_PHASE_TOKENISE, FL_NS_PER_S, FL_NS_PER_S + 9 * FL_NS_PER_MS);
    (void)timeline_own(timeline, FL_PHASE_OPEN, FL_NS_PER_S, FL_NS_PER_S + 5 * FL_NS_PER_MS);
    timeline_keep(table, timeline);
    struct fl_phase_summary phases[FL_PHASE_COUNT];
    const uint32_t count = timeline_phases(timeline, phases);
    CHECK_EQ(count, 3);
    CHECK(strcmp(phases[0].phase, "unknown") == 0);
    CHECK(strcmp(phases[1].phase, "tokenise") == 0);
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += phases[i].exposed_ms;
    }
    CHECK(sum > timeline_ttft_ms(timeline) * (1 - 1e-9));
    CHECK(sum < timeline_ttft_ms(timeline) * (1 + 1e-9));
}

static const struct test_case cases[] = {
    {"timeline: the last ones are kept, and the error names them", the_last_ones_are_kept},
    {"timeline: times of a node are ours, or not there", times_of_a_node_are_ours},
    {"timeline: moments of any clock find a place", moments_of_any_clock_find_a_place},
    {"timeline: one has a limit, what is beyond counts as lost", one_timeline_has_a_limit},
    {"timeline: the coordinator's own spans count against the limit",
     own_spans_count_against_the_limit},
    {"timeline: however many spans are lost, it is not complete",
     however_many_are_lost_they_are_not_forgotten},
    {"timeline: the oldest lose their spans first", the_oldest_lose_their_spans_first},
    {"timeline: what is being collected has the same limit",
     what_is_being_collected_has_the_same_limit},
    {"timeline: phases are listed by what they cost", phases_are_listed_by_what_they_cost},
};

int main(int argc, char **argv)
{
    const int result = test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
    if (result == 0) {
        timeline_table_close(table);
    }
    return result;
}
