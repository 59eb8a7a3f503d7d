/* test_coordinator_timeline.c - timelines of a coordinator whose nodes only pretend.
 *
 * What nodes answer, late or never, and what becomes of DONE and of memory then.
 */
#include <math.h>

#include "tests/support/coordinator_bench.h"

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-6 * (fabs(a) + fabs(b)) + 1e-9;
}

static const struct seen_event *ask_timeline(uint64_t timeline_id)
{
    struct fl_client_request request = {.kind = FL_REQUEST_TIMELINE};
    request.as.timeline.id = timeline_id;
    ask(1, &request);
    return last_event(request.id);
}

static uint32_t count_events(uint64_t id, enum fl_event_kind kind)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < bench.event_count; i++) {
        count += bench.events[i].id == id && bench.events[i].kind == kind;
    }
    return count;
}

/* A request that takes its time until its only token; returns its id. */
static uint64_t answer_one(uint32_t last_node)
{
    const uint64_t id = generate("hello", 1, NULL);
    local_network_advance(bench.network, bench_now() + 40 * FL_NS_PER_MS);
    sample(last_node, 0, 'a', FL_FINISH_LENGTH);
    return id;
}

static void done_tells_phases_that_sum_to_the_ttft(void)
{
    open_bench(2, PLAIN);
    const uint64_t id = answer_one(1);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_TRACE), 1);
    CHECK_EQ(told_count(&bench.nodes[1], FL_MESSAGE_TRACE), 1);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_TRACE)->request_id,
             last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->request_id);
    const struct seen_event *done = last_event(id);
    CHECK_EQ(done->kind, FL_EVENT_DONE);
    CHECK(done->ttft_ms >= 40 && done->phase_count >= 1);
    CHECK(near(done->exposed_ms, done->ttft_ms));
    CHECK(done->timeline_id > 0);
    const struct seen_event *timeline = ask_timeline(done->timeline_id);
    CHECK_EQ(timeline->kind, FL_EVENT_TIMELINE);
    CHECK_EQ(timeline->timeline_id, done->timeline_id);
    CHECK(timeline->complete); /* they answered; that they had recorded nothing is their affair */
    CHECK(near(timeline->exposed_ms, done->ttft_ms));
    CHECK_EQ(timeline->stage_count, 2);
    CHECK_EQ(timeline->class_, done->class_);
    CHECK_EQ(ask_timeline(0)->timeline_id, done->timeline_id);
}

/* What a node recorded of the request under way; its clock is the coordinator's. */
static void record(uint32_t node, struct fl_span *spans, uint32_t count)
{
    const struct told *admit = last_told(&bench.nodes[node], FL_MESSAGE_ADMIT);
    for (uint32_t i = 0; i < count; i++) {
        spans[i].plan_id = admit->plan_id;
        spans[i].request_id = admit->request_id;
    }
    bench.nodes[node].spans = spans;
    bench.nodes[node].span_count = count;
}

static void spans_of_nodes_become_the_chain(void)
{
    open_bench(1, PLAIN);
    const uint64_t id = generate("hello", 1, NULL);
    const uint64_t now = bench_now();
    const uint32_t prompt = last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->prompt_count;
    struct fl_span spans[] = {
        {.start_ns = now, .end_ns = now, .phase = FL_PHASE_RECEIVE, .lane = FL_LANE_WIRE},
        {.start_ns = now,
         .end_ns = now,
         .rows = prompt,
         .run = 1,
         .phase = FL_PHASE_JOIN,
         .lane = FL_LANE_COMPUTE},
        {.start_ns = now,
         .end_ns = now + 30 * FL_NS_PER_MS,
         .busy_ns = 30 * FL_NS_PER_MS,
         .run = 1,
         .piece = 1,
         .phase = FL_PHASE_PREFILL,
         .lane = FL_LANE_COMPUTE},
        {.start_ns = now + 30 * FL_NS_PER_MS,
         .end_ns = now + 30 * FL_NS_PER_MS,
         .phase = FL_PHASE_SEND,
         .lane = FL_LANE_WIRE},
        {.start_ns = now, .end_ns = now, .phase = FL_PHASE_MEMORY, .lane = FL_LANE_COMPUTE},
    };
    const uint32_t count = sizeof(spans) / sizeof(spans[0]);
    record(0, spans, count);
    spans[4].plan_id++; /* of another plan: none of this request's business */
    local_network_advance(bench.network, now + 40 * FL_NS_PER_MS);
    sample(0, 0, 'a', FL_FINISH_LENGTH);
    const struct seen_event *done = last_event(id);
    CHECK(near(done->exposed_ms, done->ttft_ms));
    CHECK(near(done->unknown_ms, 0));
    const struct seen_event *timeline = ask_timeline(0);
    CHECK(timeline->complete);
    CHECK(near(timeline->unknown_ms, 0));
    /* OPEN, PLAN, two SENDs, TOKENISE, RETURN of the coordinator. */
    CHECK_EQ(timeline->span_count, count - 1 + 6);
}

static void done_waits_for_a_silent_node_and_nothing_else_does(void)
{
    struct coordinator_settings settings = PLAIN;
    settings.sequences = 1;
    open_bench(2, settings);
    const uint64_t first = generate("hello", 2, NULL);
    const uint64_t second = generate("other", 2, NULL);
    bench.nodes[0].silent = true;
    sample(1, 0, 'a', FL_FINISH_NONE);
    CHECK_EQ(last_event(second)->kind, FL_EVENT_PROGRESS); /* it waits in line */
    sample(1, 1, 'b', FL_FINISH_LENGTH);
    CHECK_EQ(count_events(first, FL_EVENT_DONE), 0);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_END), 1);
    CHECK_EQ(last_event(second)->kind, FL_EVENT_ADMITTED); /* the KV cache is free already */
    wait_for(290 * FL_NS_PER_MS);
    CHECK_EQ(count_events(first, FL_EVENT_DONE), 0);
    wait_for(20 * FL_NS_PER_MS);
    CHECK_EQ(count_events(first, FL_EVENT_DONE), 1);
    const struct seen_event *done = last_event(first);
    CHECK_EQ(done->finish, FL_FINISH_LENGTH);
    CHECK_EQ(done->output_tokens, 2);
    CHECK_EQ(done->stage_count, 2);
    CHECK(near(done->exposed_ms, done->ttft_ms));
    CHECK(!ask_timeline(done->timeline_id)->complete);
}

static void a_late_answer_ends_the_wait(void)
{
    open_bench(1, PLAIN);
    bench.nodes[0].silent = true;
    const uint64_t id = answer_one(0);
    CHECK_EQ(count_events(id, FL_EVENT_DONE), 0);
    const struct told *trace = last_told(&bench.nodes[0], FL_MESSAGE_TRACE);
    answer_trace(&bench.nodes[0],
                 (struct fl_trace){.plan_id = trace->plan_id, .request_id = trace->request_id});
    settle();
    CHECK_EQ(count_events(id, FL_EVENT_DONE), 1);
    CHECK(ask_timeline(0)->complete);
    /* Once more, and of requests that nobody knows. */
    answer_trace(&bench.nodes[0],
                 (struct fl_trace){.plan_id = trace->plan_id, .request_id = trace->request_id});
    answer_trace(&bench.nodes[0], (struct fl_trace){.plan_id = 99, .request_id = 98});
    settle();
    CHECK(bench.nodes[0].up);
    CHECK_EQ(count_events(id, FL_EVENT_DONE), 1);
}

static void whatever_happens_while_done_waits_the_answer_is_done(void)
{
    for (int what = 0; what < 5; what++) {
        open_bench(2, PLAIN);
        bench.nodes[0].silent = bench.nodes[1].silent = true;
        const uint64_t id = answer_one(1);
        CHECK_EQ(count_events(id, FL_EVENT_DONE), 0);
        if (what == 0) { /* its node dies */
            leave(1);
            settle();
            wait_for(310 * FL_NS_PER_MS);
        } else if (what == 1) { /* its model is unloaded */
            CHECK_EQ(last_event(by_model(FL_REQUEST_UNLOAD, "m"))->kind, FL_EVENT_UNLOADED);
            wait_for(310 * FL_NS_PER_MS);
        } else if (what == 2) { /* it is cancelled, too late */
            struct fl_client_request cancel = {.kind = FL_REQUEST_CANCEL};
            cancel.as.cancel.id = id;
            ask(1, &cancel);
        } else if (what == 3) { /* the coordinator stops */
            coordinator_end_requests(bench.coordinator, "the coordinator is stopping");
        } else { /* its client goes */
            coordinator_client_gone(bench.coordinator, 1);
            wait_for(310 * FL_NS_PER_MS);
            CHECK_EQ(count_events(id, FL_EVENT_DONE), 0);
            continue;
        }
        const struct seen_event *done = last_event(id);
        CHECK_EQ(done->kind, FL_EVENT_DONE);
        CHECK_EQ(done->finish, FL_FINISH_LENGTH);
        CHECK(near(done->exposed_ms, done->ttft_ms));
        CHECK_EQ(count_events(id, FL_EVENT_DONE), 1);
    }
}

static void cancelled_and_failed_requests_never_wait(void)
{
    open_bench(1, PLAIN);
    bench.nodes[0].silent = true;
    uint64_t id = generate("hello", 5, NULL);
    sample(0, 0, 'a', FL_FINISH_NONE);
    struct fl_client_request cancel = {.kind = FL_REQUEST_CANCEL};
    cancel.as.cancel.id = id;
    ask(1, &cancel);
    const struct seen_event *done = last_event(id);
    CHECK_EQ(done->kind, FL_EVENT_DONE);
    CHECK_EQ(done->finish, FL_FINISH_CANCELLED);
    CHECK(near(done->exposed_ms, done->ttft_ms));
    CHECK_EQ(ask_timeline(done->timeline_id)->kind, FL_EVENT_TIMELINE);
    id = generate("hello", 5, NULL);
    sample(0, 0, 'a', FL_FINISH_NONE);
    sample(0, 7, 'a', FL_FINISH_NONE); /* out of order */
    CHECK_EQ(last_event(id)->kind, FL_EVENT_ERROR);
    CHECK(ask_timeline(0)->timeline_id > done->timeline_id); /* it had a token */
    id = generate("hello", 5, NULL);
    cancel.as.cancel.id = id;
    ask(1, &cancel);
    CHECK_EQ(last_event(id)->phase_count, 0);
    CHECK_EQ(last_event(id)->timeline_id, 0);
}

static void how_long_a_node_took_to_start_is_told_when_it_is_known(void)
{
    open_bench(1, PLAIN);
    bench.nodes[0].start = (struct fl_start_record){.exec_ns = FL_NS_PER_S,
                                                    .ready_ns = FL_NS_PER_S + 7 * FL_NS_PER_MS};
    (void)answer_one(0);
    CHECK(near(ask_timeline(0)->process_ms, 7));
    bench.nodes[0].start.exec_ns = 0;
    (void)answer_one(0);
    CHECK(near(ask_timeline(0)->process_ms, 0));
}

static void an_unknown_timeline_is_refused_with_the_range(void)
{
    open_bench(1, PLAIN);
    struct fl_client_request request = {.kind = FL_REQUEST_TIMELINE};
    ask(1, &request);
    expect_error(request.id, FL_NOT_FOUND, "no request has got a token");
    const uint64_t id = last_event(answer_one(0))->timeline_id;
    request.as.timeline.id = id + 100;
    ask(1, &request);
    char range[64];
    snprintf(range, sizeof(range), "ids from %" PRIu64 " to %" PRIu64, id, id);
    expect_error(request.id, FL_NOT_FOUND, range);
    snprintf(range, sizeof(range), "id %" PRIu64 ":", id + 100);
    expect_error(request.id, FL_NOT_FOUND, range);
}

static void classes_say_what_was_found(void)
{
    static const struct {
        uint64_t cached; /* of 1000 bytes, on each node */
        bool known;
        enum fl_class want;
    } rows[] = {
        {0, true, FL_CLASS_COLD},       {9, true, FL_CLASS_COLD}, {10, true, FL_CLASS_PARTIAL},
        {1000, true, FL_CLASS_PARTIAL}, /* in the page cache is not in memory */
        {1000, false, FL_CLASS_COLD},   /* by memory alone: what it says of the cache is a guess */
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        open_bench(2, PLAIN);
        const uint64_t id = generate("hello", 1, NULL);
        CHECK_EQ(last_event(id)->class_, FL_CLASS_COLD);
        for (uint32_t node = 0; node < 2; node++) {
            const uint64_t bytes =
                (uint64_t)last_told(&bench.nodes[node], FL_MESSAGE_PLAN)->piece_count *
                BENCH_PIECE_SIZE;
            bench.nodes[node].start =
                (struct fl_start_record){.shard_bytes = bytes,
                                         .residency_known = rows[i].known,
                                         .page_cache_before = bytes * rows[i].cached / 1000};
        }
        load_all();
        sample(1, 0, 'a', FL_FINISH_LENGTH);
        CHECK_EQ(last_event(id)->class_, rows[i].want);
    }
    /* Everything is there now, whatever the caches were before. */
    CHECK_EQ(last_event(answer_one(1))->class_, FL_CLASS_WARM);
    /* A request that comes while another's loading goes on. */
    open_bench(2, PLAIN);
    (void)generate("other", 1, NULL);
    load_progress(0, 1);
    const uint64_t id = generate("hello", 1, NULL);
    load_all();
    sample(1, 0, 'a', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(id)->class_, FL_CLASS_PARTIAL);
    /* The same, when nothing had come in yet but the file lay in the page cache. */
    open_bench(1, PLAIN);
    (void)generate("other", 1, NULL);
    const uint64_t early = generate("hello", 1, NULL);
    bench.nodes[0].start = (struct fl_start_record){
        .shard_bytes = 1000, .residency_known = true, .page_cache_before = 1000};
    load_all();
    sample(0, 0, 'a', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(early)->class_, FL_CLASS_PARTIAL);
}

static const struct test_case cases[] = {
    {"timeline: done tells phases that sum to the ttft", done_tells_phases_that_sum_to_the_ttft},
    {"timeline: the spans of nodes become the chain", spans_of_nodes_become_the_chain},
    {"timeline: done waits for a silent node, and nothing else does",
     done_waits_for_a_silent_node_and_nothing_else_does},
    {"timeline: a late answer ends the wait", a_late_answer_ends_the_wait},
    {"timeline: whatever happens while done waits, the answer is done",
     whatever_happens_while_done_waits_the_answer_is_done},
    {"timeline: cancelled and failed requests never wait",
     cancelled_and_failed_requests_never_wait},
    {"timeline: how long a node took to start is told when it is known",
     how_long_a_node_took_to_start_is_told_when_it_is_known},
    {"timeline: an unknown one is refused with the range that is kept",
     an_unknown_timeline_is_refused_with_the_range},
    {"timeline: classes say what was found", classes_say_what_was_found},
};

int main(int argc, char **argv)
{
    const int result = test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
    close_bench();
    return result;
}
