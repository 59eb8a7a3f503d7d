/* test_exposed_chain.c - from spans that a case lays out to the chain it must give.
 *
 * Times are milliseconds.  Stages are laid out as nodes record them; a chain is
 * compared as text: phase, where ("c" is the coordinator), from and to.
 */
#include "coordinator/exposed_chain.h"
#include "coordinator/exposed_phases.h"

#include <stdbool.h>
#include <stdlib.h>

#include "tests/harness.h"

enum { STAGE_MAX = 3, SPAN_MAX = 600, TEXT_MAX = 4096, REQUEST = 7, PROMPT = 16 };
#define MS UINT64_C(1000000)

static struct fl_span spans[STAGE_MAX][SPAN_MAX];
static struct fl_span own[16];
static struct exposed_stage stages[STAGE_MAX];
static struct exposed_chain_config config;
static struct exposed_segment segments[FL_TIMELINE_SEGMENT_MAX];
static uint32_t segment_count;

/* ---- laying out ---- */

static void begin(uint32_t stage_count, uint64_t begin_ms, uint64_t token_ms, uint64_t end_ms)
{
    for (uint32_t i = 0; i < STAGE_MAX; i++) {
        stages[i] = (struct exposed_stage){.spans = spans[i], .whole = true};
    }
    config = (struct exposed_chain_config){.begin_ns = begin_ms * MS,
                                           .token_ns = token_ms * MS,
                                           .end_ns = end_ms * MS,
                                           .request_id = REQUEST,
                                           .prompt_count = PROMPT,
                                           .stage_count = stage_count,
                                           .stages = stages,
                                           .own = own};
}

static struct fl_span *put(uint32_t stage, enum fl_lane lane, enum fl_phase phase, uint64_t start,
                           uint64_t end)
{
    CHECK(stages[stage].span_count < SPAN_MAX);
    struct fl_span *span = &spans[stage][stages[stage].span_count++];
    *span = (struct fl_span){.start_ns = start * MS,
                             .end_ns = end * MS,
                             .busy_ns = (end - start) * MS,
                             .plan_id = 1,
                             .piece = FL_SPAN_NO_PIECE,
                             .phase = phase,
                             .lane = lane};
    return span;
}

static struct fl_span *put_own(enum fl_phase phase, uint64_t start, uint64_t end)
{
    struct fl_span *span = &own[config.own_count++];
    *span = (struct fl_span){.start_ns = start * MS,
                             .end_ns = end * MS,
                             .busy_ns = (end - start) * MS,
                             .request_id = REQUEST,
                             .piece = FL_SPAN_NO_PIECE,
                             .phase = phase,
                             .lane = FL_LANE_MAIN};
    return span;
}

/* The coordinator's SEND of PLAN or ADMIT to a stage. */
static void put_order(uint32_t stage, uint64_t request_id, uint64_t start, uint64_t end)
{
    struct fl_span *span = put_own(FL_PHASE_SEND, start, end);
    span->request_id = request_id;
    span->position = stage;
}

/* PLAN, ADMIT (rows 0) or activations arrive. */
static void put_receive(uint32_t stage, uint64_t request_id, uint32_t position, uint32_t rows,
                        uint64_t at)
{
    struct fl_span *span = put(stage, FL_LANE_WIRE, FL_PHASE_RECEIVE, at, at);
    span->request_id = request_id;
    span->position = position;
    span->rows = rows;
}

static struct fl_span *put_send(uint32_t stage, uint32_t position, uint32_t rows, uint64_t start,
                                uint64_t end)
{
    struct fl_span *span = put(stage, FL_LANE_WIRE, FL_PHASE_SEND, start, end);
    span->request_id = REQUEST;
    span->position = position;
    span->rows = rows;
    span->bytes = 100;
    return span;
}

static void put_join(uint32_t stage, uint64_t run, uint64_t request_id, uint32_t position,
                     uint32_t rows, uint64_t rows_at, uint64_t at)
{
    struct fl_span *span = put(stage, FL_LANE_COMPUTE, FL_PHASE_JOIN, at, at);
    span->run = run;
    span->request_id = request_id;
    span->position = position;
    span->rows = rows;
    span->cause = FL_CAUSE_INPUT;
    span->cause_ns = rows_at * MS;
}

static struct fl_span *put_task(uint32_t stage, enum fl_phase phase, uint64_t run, uint32_t piece,
                                enum fl_cause cause, uint64_t cause_at, uint64_t start,
                                uint64_t end)
{
    struct fl_span *span = put(stage, FL_LANE_COMPUTE, phase, start, end);
    span->run = run;
    span->request_id = REQUEST;
    span->piece = piece;
    span->cause = cause;
    span->cause_ns = cause_at * MS;
    return span;
}

static void put_sample(uint32_t stage, uint64_t run, uint64_t start, uint64_t end)
{
    (void)put_task(stage, FL_PHASE_SAMPLE, run, FL_SPAN_NO_PIECE, FL_CAUSE_INPUT, start, start,
                   end);
}

/* A task that began when the one before, or its rows, gave it its input. */
static void put_next(uint32_t stage, enum fl_phase phase, uint64_t run, uint32_t piece,
                     uint64_t start, uint64_t end)
{
    (void)put_task(stage, phase, run, piece, FL_CAUSE_INPUT, start, start, end);
}

/* The whole prompt in one run of the first stage; its rows are there since 9. */
static void put_prompt(uint64_t run, uint64_t formed)
{
    put_join(0, run, REQUEST, 0, PROMPT, 9, formed);
}

/* A piece read for all of its interval but `verify` and `repack`. */
static void put_piece(uint32_t stage, uint32_t piece, uint64_t start, uint64_t end, uint64_t verify,
                      uint64_t repack)
{
    struct fl_span *span = put(stage, FL_LANE_LOADER, FL_PHASE_READ, start, end);
    span->busy_ns = (end - start - verify - repack) * MS;
    span->piece = piece;
    span->bytes = 1000;
    span->source = FL_SOURCE_DISK;
    span = put(stage, FL_LANE_LOADER, FL_PHASE_VERIFY, start, end);
    span->busy_ns = verify * MS;
    span->piece = piece;
    span = put(stage, FL_LANE_LOADER, FL_PHASE_REPACK, start, end);
    span->busy_ns = repack * MS;
    span->piece = piece;
}

/* ---- comparing ---- */

static void write_chain(char *out)
{
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < segment_count; i++) {
        const struct exposed_segment *segment = &segments[i];
        char where[16] = "c";
        if (segment->stage != EXPOSED_CHAIN_COORDINATOR) {
            snprintf(where, sizeof(where), "%" PRIu32, segment->stage);
        }
        CHECK(used < TEXT_MAX - 128);
        used += (size_t)snprintf(
            out + used, TEXT_MAX - used, "%s%s@%s%s%s %.4g-%.4g", i > 0 ? ", " : "",
            fl_phase_name(segment->phase), where, segment->cause != FL_CAUSE_NONE ? " for " : "",
            segment->cause != FL_CAUSE_NONE ? fl_cause_name(segment->cause) : "",
            (double)segment->start_ns / (double)MS, (double)segment->end_ns / (double)MS);
    }
}

/* Ordered, without a gap, from t0 to the first token. */
static bool is_whole(void)
{
    uint64_t at = config.begin_ns;
    for (uint32_t i = 0; i < segment_count; i++) {
        if (segments[i].start_ns != at || segments[i].end_ns <= at) {
            return false;
        }
        at = segments[i].end_ns;
    }
    return at == config.end_ns;
}

static void expect(const char *want)
{
    char got[TEXT_MAX];
    segment_count = exposed_chain_find(&config, segments);
    write_chain(got);
    if (strcmp(got, want) != 0) {
        printf("  got  %s\n  want %s\n", got, want);
    }
    CHECK(strcmp(got, want) == 0);
    CHECK(is_whole());
}

/* A request's beginning: opened 0-2, planned 2-3, PLAN sent 3-4, tokenised 4-5, ADMIT sent 5-6. */
static void put_start(void)
{
    (void)put_own(FL_PHASE_OPEN, 0, 2);
    (void)put_own(FL_PHASE_PLAN, 2, 3);
    for (uint32_t i = 0; i < config.stage_count; i++) {
        put_order(i, 0, 3, 4);
    }
    (void)put_own(FL_PHASE_TOKENISE, 4, 5);
    for (uint32_t i = 0; i < config.stage_count; i++) {
        put_order(i, REQUEST, 5, 6);
        put_receive(i, 0, 0, 0, 5);
        put_receive(i, REQUEST, 0, 0, 7);
        (void)put(i, FL_LANE_COMPUTE, FL_PHASE_MEMORY, 6, 8);
        (void)put(i, FL_LANE_COMPUTE, FL_PHASE_KV, 8, 9);
    }
}

/* A request whose stages open cold, and whose last stage sends the token at `sent`: it arrives 5
 * later and its text leaves another 1 later.  What the stages do in between is the case's. */
static void begin_opened(uint32_t stage_count, uint64_t sent)
{
    begin(stage_count, 0, sent + 5, sent + 6);
    put_start();
    (void)put_send(stage_count - 1, PROMPT, 1, sent, sent + 1);
}

#define OPENED "open@c 0-2, plan@c 2-3, send@c 3-5, wake@0 5-6, memory@0 6-8, kv@0 8-9, "

/* The chain of a request that begin_opened() began, when it leads to the first stage's opening:
 * `middle` is what comes after that and before the token is sent. */
static void expect_opened(const char *middle)
{
    char want[TEXT_MAX];
    const uint64_t token = config.token_ns / MS;
    snprintf(want, sizeof(want),
             OPENED "%s, send@%" PRIu32 " %" PRIu64 "-%" PRIu64 ", return@c %" PRIu64 "-%" PRIu64,
             middle, config.stage_count - 1, token - 5, token, token, token + 1);
    expect(want);
}

/* Pieces 1 and 2 and the head, 3, of one stage; the run waits for each. */
static void put_cold(void)
{
    begin_opened(1, 86);
    put_prompt(1, 9);
    (void)put_task(0, FL_PHASE_EMBED, 1, 0, FL_CAUSE_WEIGHTS, 12, 12, 13);
    put_piece(0, 1, 10, 30, 2, 3);
    put_piece(0, 2, 30, 50, 2, 3);
    put_piece(0, 3, 50, 80, 5, 5);
    struct fl_span *rows = put(0, FL_LANE_LOADER, FL_PHASE_EMBED, 10, 12);
    rows->bytes = 64;
    (void)put_task(0, FL_PHASE_PREFILL, 1, 1, FL_CAUSE_WEIGHTS, 30, 30, 33);
    (void)put_task(0, FL_PHASE_PREFILL, 1, 2, FL_CAUSE_WEIGHTS, 50, 51, 53);
    (void)put_task(0, FL_PHASE_HEAD, 1, 3, FL_CAUSE_WEIGHTS, 80, 81, 85);
    put_sample(0, 1, 85, 86);
}

static void a_cold_stage(void)
{
    put_cold();
    expect_opened("wake@0 9-10, read@0 10-23, embed@0 23-25, verify@0 25-27, repack@0 27-30, "
                  "read@0 30-45, verify@0 45-47, repack@0 47-50, read@0 50-70, verify@0 70-75, "
                  "repack@0 75-80, wake@0 80-81, head@0 81-85, sample@0 85-86");
}

static void phases_add_up(void)
{
    struct exposed_phase phases[FL_PHASE_COUNT];
    put_cold();
    segment_count = exposed_chain_find(&config, segments);
    exposed_phases_sum(&config, segments, segment_count, phases);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < FL_PHASE_COUNT; i++) {
        sum += phases[i].exposed_ns;
    }
    CHECK_EQ(sum, 92 * MS);
    CHECK_EQ(phases[FL_PHASE_PREFILL].exposed_ns, 0);
    CHECK_EQ(phases[FL_PHASE_PREFILL].hidden_ns, 5 * MS);
    CHECK_EQ(phases[FL_PHASE_TOKENISE].hidden_ns, MS);
    CHECK_EQ(phases[FL_PHASE_READ].bytes, 3000);
    CHECK_EQ(phases[FL_PHASE_VERIFY].hidden_ns, 0);
    CHECK_EQ(phases[FL_PHASE_EMBED].bytes, 64);
    CHECK_EQ(phases[FL_PHASE_JOIN].bytes, 0);
}

static void a_warm_request(void)
{
    begin(1, 1000, 1030, 1031);
    put_start(); /* all of it long ago */
    put_piece(0, 1, 10, 30, 2, 3);
    put_piece(0, 2, 30, 50, 2, 3);
    config.own_count = 0;
    (void)put_own(FL_PHASE_TOKENISE, 1001, 1003);
    put_order(0, REQUEST, 1003, 1004);
    put_receive(0, REQUEST, 0, 0, 1005);
    put_join(0, 9, REQUEST, 0, PROMPT, 1006, 1006);
    put_next(0, FL_PHASE_EMBED, 9, 0, 1006, 1007);
    put_next(0, FL_PHASE_PREFILL, 9, 1, 1007, 1015);
    put_next(0, FL_PHASE_PREFILL, 9, 2, 1015, 1025);
    put_sample(0, 9, 1025, 1026);
    (void)put_send(0, PROMPT, 1, 1026, 1028);
    expect("wake@c 1000-1001, tokenise@c 1001-1003, send@c 1003-1005, wake@0 1005-1006, "
           "embed@0 1006-1007, prefill@0 1007-1025, sample@0 1025-1026, "
           "send@0 1026-1030, return@c 1030-1031");
}

/* Three stages; the prompt in two chunks, rows 0-7 and 8-15.  The middle one is slow to compute. */
static void put_three(void)
{
    begin_opened(3, 95);
    put_join(0, 1, REQUEST, 0, 8, 9, 9);
    put_next(0, FL_PHASE_PREFILL, 1, 1, 9, 19);
    put_join(0, 2, REQUEST, 8, 8, 9, 19);
    (void)put_send(0, 0, 8, 19, 20);
    (void)put_task(0, FL_PHASE_PREFILL, 2, 1, FL_CAUSE_BUSY, 19, 19, 29);
    (void)put_send(0, 8, 8, 29, 30);
    put_receive(1, REQUEST, 0, 8, 22);
    put_receive(1, REQUEST, 8, 8, 32);
    put_join(1, 1, REQUEST, 0, 8, 22, 23);
    put_next(1, FL_PHASE_PREFILL, 1, 0, 23, 53);
    put_join(1, 2, REQUEST, 8, 8, 32, 53);
    (void)put_send(1, 0, 8, 53, 54);
    (void)put_task(1, FL_PHASE_PREFILL, 2, 0, FL_CAUSE_BUSY, 53, 53, 83);
    (void)put_send(1, 8, 8, 83, 84);
    put_receive(2, REQUEST, 0, 8, 56);
    put_receive(2, REQUEST, 8, 8, 86);
    put_join(2, 1, REQUEST, 0, 8, 56, 56);
    put_next(2, FL_PHASE_PREFILL, 1, 0, 56, 60);
    put_join(2, 2, REQUEST, 8, 8, 86, 86);
    put_next(2, FL_PHASE_PREFILL, 2, 0, 86, 90);
    put_next(2, FL_PHASE_HEAD, 2, 1, 90, 94);
    put_sample(2, 2, 94, 95);
}

#define THREE_LAST "send@1 83-86, prefill@2 86-90, head@2 90-94, sample@2 94-95"

static void three_stages_with_chunks(void)
{
    put_three();
    expect_opened("prefill@0 9-19, send@0 19-22, wake@1 22-23, prefill@1 23-83, " THREE_LAST);
}

static void a_stage_bound_by_weights(void)
{
    put_three();
    for (uint32_t i = 0; i < stages[1].span_count; i++) {
        if (spans[1][i].run == 2 && spans[1][i].phase == FL_PHASE_PREFILL) {
            spans[1][i].start_ns = 70 * MS;
            spans[1][i].cause = FL_CAUSE_WEIGHTS;
            spans[1][i].cause_ns = 69 * MS;
            spans[1][i].piece = 4;
        }
    }
    put_piece(1, 3, 10, 40, 0, 0);
    put_piece(1, 4, 40, 69, 0, 9);
    put_piece(1, 5, 69, 120, 0, 0); /* goes on beyond the token */
    expect("open@c 0-2, plan@c 2-3, send@c 3-5, wake@1 5-6, memory@1 6-8, kv@1 8-9, "
           "wake@1 9-10, read@1 10-60, repack@1 60-69, wake@1 69-70, prefill@1 70-83, " THREE_LAST
           ", send@2 95-100, return@c 100-101");
}

static void without_overlap_the_last_piece_counts(void)
{
    begin_opened(1, 91);
    put_piece(0, 1, 10, 30, 0, 0);
    put_piece(0, 2, 30, 80, 0, 0);
    put_prompt(1, 81); /* not formed before */
    (void)put_task(0, FL_PHASE_EMBED, 1, 0, FL_CAUSE_WEIGHTS, 80, 81, 82);
    put_next(0, FL_PHASE_PREFILL, 1, 1, 82, 85);
    put_next(0, FL_PHASE_PREFILL, 1, 2, 85, 90);
    put_sample(0, 1, 90, 91);
    expect_opened("wake@0 9-10, read@0 10-80, wake@0 80-81, embed@0 81-82, prefill@0 82-90, "
                  "sample@0 90-91");
}

static void the_work_of_others_is_a_queue(void)
{
    begin_opened(1, 91);
    put_piece(0, 1, 10, 30, 0, 0);
    put_join(0, 1, 3, 0, 8, 20, 20); /* another's */
    put_task(0, FL_PHASE_PREFILL, 1, 1, FL_CAUSE_WEIGHTS, 30, 30, 60)->request_id = 3;
    put_prompt(2, 25);
    (void)put_task(0, FL_PHASE_PREFILL, 2, 1, FL_CAUSE_BUSY, 60, 61, 85);
    put_sample(0, 2, 85, 91);
    expect_opened("wake@0 9-10, read@0 10-30, queue@0 for busy 30-60, wake@0 60-61, "
                  "prefill@0 61-85, sample@0 85-91");
}

/* A run with rows of several requests names none: its JOINs tell. */
static void a_run_of_several_requests_is_ones_own(void)
{
    begin_opened(1, 91);
    put_join(0, 1, 3, 40, 1, 20, 25);
    put_join(0, 1, REQUEST, 0, 8, 20, 25);
    put_task(0, FL_PHASE_PREFILL, 1, 1, FL_CAUSE_INPUT, 25, 25, 60)->request_id = 0;
    put_join(0, 2, REQUEST, 8, 8, 20, 26);
    (void)put_task(0, FL_PHASE_PREFILL, 2, 1, FL_CAUSE_BUSY, 60, 60, 85);
    put_sample(0, 2, 85, 91);
    expect_opened("wake@0 9-25, prefill@0 25-85, sample@0 85-91");
}

static void a_full_cache_is_a_queue(void)
{
    begin(1, 0, 30, 31);
    (void)put_own(FL_PHASE_TOKENISE, 0, 2);
    put_own(FL_PHASE_QUEUE, 2, 20)->cause = FL_CAUSE_KV;
    put_order(0, REQUEST, 20, 21);
    put_receive(0, REQUEST, 0, 0, 22);
    put_join(0, 1, REQUEST, 0, PROMPT, 22, 22);
    put_next(0, FL_PHASE_PREFILL, 1, 1, 22, 28);
    (void)put_send(0, PROMPT, 1, 28, 29);
    expect("tokenise@c 0-2, queue@c for kv 2-20, send@c 20-22, prefill@0 22-28, "
           "send@0 28-30, return@c 30-31");
}

static void a_send_that_waited_for_its_link(void)
{
    put_three();
    for (uint32_t i = 0; i < stages[1].span_count; i++) {
        if (spans[1][i].phase == FL_PHASE_SEND && spans[1][i].position == 8) {
            spans[1][i].start_ns = 70 * MS;
            spans[1][i].cause = FL_CAUSE_LINK;
            spans[1][i].cause_ns = 82 * MS;
        }
    }
    (void)put(1, FL_LANE_WIRE, FL_PHASE_LINK, 6, 82);
    expect("open@c 0-2, plan@c 2-3, send@c 3-5, wake@1 5-6, link@1 6-82, send@1 82-86, "
           "prefill@2 86-90, head@2 90-94, sample@2 94-95, send@2 95-100, "
           "return@c 100-101");
}

/* Stage 1 had no room for the second chunk until its first run was formed, which waited for a
 * piece. */
static void a_send_that_waited_for_credit(void)
{
    begin_opened(2, 95);
    put_join(0, 1, REQUEST, 0, 8, 9, 9);
    put_next(0, FL_PHASE_PREFILL, 1, 1, 9, 19);
    (void)put_send(0, 0, 8, 19, 20);
    put_join(0, 2, REQUEST, 8, 8, 9, 19);
    (void)put_task(0, FL_PHASE_PREFILL, 2, 1, FL_CAUSE_BUSY, 19, 19, 29);
    struct fl_span *late = put_send(0, 8, 8, 29, 72);
    late->cause = FL_CAUSE_CREDIT;
    late->cause_ns = 71 * MS;
    put_receive(1, REQUEST, 0, 8, 22);
    put_receive(1, REQUEST, 8, 8, 74);
    (void)put(1, FL_LANE_COMPUTE, FL_PHASE_DECODE, 20, 70);
    put_join(1, 1, REQUEST, 0, 8, 22, 70);
    put_next(1, FL_PHASE_PREFILL, 1, 0, 70, 73);
    put_join(1, 2, REQUEST, 8, 8, 74, 75);
    put_next(1, FL_PHASE_PREFILL, 2, 0, 75, 90);
    put_sample(1, 2, 90, 95);
    expect_opened("prefill@0 9-19, send@0 19-22, queue@1 for busy 22-70, "
                  "send@0 for credit 70-71, send@0 71-74, wake@1 74-75, prefill@1 75-90, "
                  "sample@1 90-95");
    /* A node that does not say when it made room: the sender waited, nobody knows for what. */
    begin_opened(2, 95);
    put_join(0, 2, REQUEST, 8, 8, 9, 19);
    put_next(0, FL_PHASE_PREFILL, 2, 1, 19, 29);
    late = put_send(0, 8, 8, 29, 72);
    late->cause = FL_CAUSE_CREDIT;
    late->cause_ns = 71 * MS;
    stages[1].span_count = 0;
    stages[1].whole = false;
    expect(OPENED "wake@0 9-19, prefill@0 19-29, send@0 for credit 29-71, send@0 71-72, "
                  "unknown@1 72-100, return@c 100-101");
}

static void rows_of_the_embedding_are_waited_for(void)
{
    begin_opened(1, 50);
    put_prompt(1, 9);
    put(0, FL_LANE_LOADER, FL_PHASE_EMBED, 12, 40)->bytes = 64;
    (void)put_task(0, FL_PHASE_EMBED, 1, 0, FL_CAUSE_WEIGHTS, 41, 41, 42);
    put_next(0, FL_PHASE_PREFILL, 1, 1, 42, 50);
    expect_opened("wake@0 9-12, embed@0 12-40, wake@0 40-41, embed@0 41-42, prefill@0 42-50");
}

/* As nodes record it: rows that the loader read are a run's input. */
static void rows_of_the_embedding_wait_for_the_loader(void)
{
    begin_opened(1, 50);
    put_prompt(1, 9);
    put_piece(0, 0, 9, 70, 0, 10); /* it is in the middle of this one */
    (void)put(0, FL_LANE_LOADER, FL_PHASE_EMBED, 30, 40);
    (void)put_task(0, FL_PHASE_EMBED, 1, 0, FL_CAUSE_INPUT, 40, 41, 42);
    put_next(0, FL_PHASE_PREFILL, 1, 1, 42, 50);
    expect_opened("read@0 9-30, embed@0 30-40, wake@0 40-41, embed@0 41-42, prefill@0 42-50");
    /* It read the rows of another request's run before. */
    (void)put(0, FL_LANE_LOADER, FL_PHASE_EMBED, 20, 25);
    expect_opened("queue@0 for busy 9-30, embed@0 30-40, wake@0 40-41, embed@0 41-42, "
                  "prefill@0 42-50");
}

/* The second of two requests that wait for a model hears of it when it is planned already. */
static void a_model_that_another_request_opened_is_waited_for(void)
{
    begin_opened(1, 50);
    for (uint32_t i = 0; i < config.own_count; i++) {
        own[i].end_ns += own[i].phase == FL_PHASE_OPEN ? 4 * MS : 0;
    }
    put_prompt(1, 9);
    put_next(0, FL_PHASE_PREFILL, 1, 1, 9, 50);
    expect_opened("prefill@0 9-50");
}

/* Tasks of other requests are not told: only that there were some. */
static void rows_that_no_run_had_room_for_are_a_queue(void)
{
    begin_opened(1, 50);
    put_prompt(7, 30);
    stages[0].spans[stages[0].span_count - 1].cause = FL_CAUSE_BUSY;
    put_next(0, FL_PHASE_PREFILL, 7, 1, 30, 50);
    expect_opened("queue@0 for busy 9-30, prefill@0 30-50");
}

static void a_stage_that_says_nothing_is_unknown(void)
{
    put_three();
    stages[1].span_count = 0;
    stages[1].whole = false;
    expect_opened("prefill@0 9-29, send@0 29-30, unknown@1 30-86, prefill@2 86-90, "
                  "head@2 90-94, sample@2 94-95");
    put_three();
    stages[2].span_count = 0;
    expect(OPENED "prefill@0 9-19, send@0 19-22, wake@1 22-23, prefill@1 23-83, send@1 83-84, "
                  "unknown@2 84-100, return@c 100-101");
    put_three();
    stages[0].span_count = stages[1].span_count = stages[2].span_count = 0;
    expect("open@c 0-2, plan@c 2-3, send@c 3-4, tokenise@c 4-5, send@c 5-6, "
           "unknown@2 6-100, return@c 100-101");
    config.own_count = 0;
    expect("unknown@c 0-100, return@c 100-101");
}

static void spans_that_were_lost_are_unknown(void)
{
    put_three();
    uint32_t kept = 0;
    for (uint32_t i = 0; i < stages[1].span_count; i++) {
        const bool lost = spans[1][i].phase == FL_PHASE_PREFILL && spans[1][i].run == 1;
        spans[1][kept] = spans[1][i];
        kept += !lost;
    }
    stages[1].span_count = kept;
    stages[1].whole = false;
    /* What the thread did before the second run is not there; its rows came at 32. */
    expect_opened("prefill@0 9-29, send@0 29-32, unknown@1 32-53, prefill@1 53-83, " THREE_LAST);
}

static void clocks_that_contradict_each_other(void)
{
    put_three();
    for (uint32_t i = 0; i < stages[1].span_count; i++) {
        spans[1][i].start_ns += 5 * MS; /* received in the future of what followed */
        spans[1][i].end_ns += 5 * MS;
        spans[1][i].cause_ns += spans[1][i].cause_ns > 0 ? 5 * MS : 0;
    }
    expect_opened("prefill@0 9-19, send@0 19-27, wake@1 27-28, prefill@1 28-86, "
                  "prefill@2 86-90, head@2 90-94, sample@2 94-95");
    put_three();
    for (uint32_t i = 0; i < stages[1].span_count; i++) {
        spans[1][i].start_ns -= spans[1][i].start_ns < 9 * MS ? spans[1][i].start_ns : 9 * MS;
        spans[1][i].end_ns -= spans[1][i].end_ns < 9 * MS ? spans[1][i].end_ns : 9 * MS;
        spans[1][i].cause_ns -= spans[1][i].cause_ns < 9 * MS ? spans[1][i].cause_ns : 9 * MS;
    }
    segment_count = exposed_chain_find(&config, segments);
    CHECK(is_whole());
}

static void nothing_happens_in_no_time(void)
{
    begin(1, 5, 5, 5);
    CHECK_EQ(exposed_chain_find(&config, segments), 0);
    put_three();
    for (uint32_t stage = 0; stage < 3; stage++) { /* as on a clock that stands still */
        for (uint32_t i = 0; i < stages[stage].span_count; i++) {
            spans[stage][i].start_ns = spans[stage][i].end_ns = 10 * MS;
            spans[stage][i].cause_ns = spans[stage][i].cause_ns > 0 ? 10 * MS : 0;
        }
    }
    segment_count = exposed_chain_find(&config, segments);
    CHECK(is_whole());
}

static void more_segments_than_there_is_room_for(void)
{
    enum { COUNT = 3 * FL_TIMELINE_SEGMENT_MAX };
    begin(1, 0, 20000, 20001);
    struct fl_span *many = calloc(COUNT + 2, sizeof(*many));
    CHECK(many != NULL);
    for (uint32_t i = 0; i < COUNT; i++) {
        many[i] = (struct fl_span){.start_ns = 100 * MS + i * MS + i % 7,
                                   .end_ns = 101 * MS + i * MS - i % 5 * 100000,
                                   .request_id = REQUEST,
                                   .run = 1,
                                   .piece = i,
                                   .phase = i % 2 == 0 ? FL_PHASE_PREFILL : FL_PHASE_HEAD,
                                   .lane = FL_LANE_COMPUTE};
    }
    many[COUNT] = (struct fl_span){.start_ns = 50 * MS,
                                   .end_ns = 50 * MS,
                                   .request_id = REQUEST,
                                   .run = 1,
                                   .rows = PROMPT,
                                   .phase = FL_PHASE_JOIN,
                                   .lane = FL_LANE_COMPUTE};
    many[COUNT + 1] = (struct fl_span){.start_ns = 19000 * MS,
                                       .end_ns = 19001 * MS,
                                       .request_id = REQUEST,
                                       .phase = FL_PHASE_SEND,
                                       .lane = FL_LANE_WIRE};
    stages[0].spans = many;
    stages[0].span_count = COUNT + 2;
    segment_count = exposed_chain_find(&config, segments);
    const bool whole = is_whole();
    free(many);
    CHECK(whole);
    CHECK(segment_count > FL_TIMELINE_SEGMENT_MAX / 4 && segment_count <= FL_TIMELINE_SEGMENT_MAX);
}

/* Source: splitmix64, Steele, Lea, Flood 2014. */
static uint64_t draw(uint64_t *state, uint64_t count)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (z ^ (z >> 31)) % count;
}

static struct fl_span draw_span(uint64_t *state, bool own_span)
{
    /* Few values, so that spans meet: the same times, runs, pieces and rows. */
    const uint64_t start = draw(state, 20) == 0 ? draw(state, UINT64_MAX) : draw(state, 40) * MS;
    const uint64_t longest = UINT64_MAX - start < 9 * MS ? UINT64_MAX - start : 9 * MS;
    const uint64_t end = start + draw(state, longest + 1);
    return (struct fl_span){
        .start_ns = start,
        .end_ns = end,
        .busy_ns = draw(state, 9) == 0 ? draw(state, UINT64_MAX) : (end - start) / 2,
        .request_id = draw(state, 3) == 0 ? draw(state, 3) : REQUEST,
        .run = draw(state, 4),
        .bytes = draw(state, 9) == 0 ? UINT64_MAX : draw(state, 1000),
        .cause_ns = draw(state, 4) == 0 ? 0 : draw(state, 50) * MS,
        .piece = draw(state, 5) == 0 ? FL_SPAN_NO_PIECE : (uint32_t)draw(state, 4),
        .position = draw(state, 9) == 0 ? UINT32_MAX : (uint32_t)draw(state, PROMPT),
        .rows = draw(state, 9) == 0 ? UINT32_MAX : (uint32_t)draw(state, 17),
        .phase = own_span && draw(state, 2) == 0 ? FL_PHASE_SEND
                                                 : (enum fl_phase)draw(state, FL_PHASE_COUNT),
        .lane = (enum fl_lane)draw(state, FL_LANE_COUNT),
        .cause = (enum fl_cause)draw(state, FL_CAUSE_COUNT)};
}

static void garbage_gives_a_whole_chain(void)
{
    uint64_t reached = 0; /* phases met, so that the garbage is known to lead somewhere */
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        uint64_t state = seed;
        struct exposed_phase phases[FL_PHASE_COUNT];
        begin(1 + (uint32_t)draw(&state, STAGE_MAX), draw(&state, 20), draw(&state, 60), 60);
        for (uint32_t i = 0; i < config.stage_count; i++) {
            stages[i].span_count = (uint32_t)draw(&state, seed % 10 == 0 ? SPAN_MAX : 60);
            stages[i].error_ns = draw(&state, 3) * MS;
            stages[i].whole = draw(&state, 2) != 0;
            for (uint32_t j = 0; j < stages[i].span_count; j++) {
                spans[i][j] = draw_span(&state, false);
            }
        }
        config.own_count = (uint32_t)draw(&state, 16);
        for (uint32_t i = 0; i < config.own_count; i++) {
            own[i] = draw_span(&state, true);
        }
        segment_count = exposed_chain_find(&config, segments);
        if (!is_whole()) {
            printf("  seed %" PRIu64 "\n", seed);
        }
        CHECK(is_whole());
        exposed_phases_sum(&config, segments, segment_count, phases);
        uint64_t sum = 0;
        for (uint32_t i = 0; i < FL_PHASE_COUNT; i++) {
            sum += phases[i].exposed_ns;
        }
        CHECK_EQ(sum, config.end_ns - config.begin_ns);
        for (uint32_t i = 0; i < segment_count; i++) {
            reached |= UINT64_C(1) << segments[i].phase;
        }
    }
    CHECK(reached >> FL_PHASE_READ & 1);
    CHECK(reached >> FL_PHASE_PREFILL & 1);
    CHECK(reached >> FL_PHASE_LINK & 1);
    CHECK(reached >> FL_PHASE_KV & 1);
    CHECK(reached >> FL_PHASE_QUEUE & 1);
}

static const struct test_case cases[] = {
    {"exposed_chain: a cold stage is its disk, and what could not be hidden behind it",
     a_cold_stage},
    {"exposed_chain: exposed times sum to the whole, hidden ones are what ran beside",
     phases_add_up},
    {"exposed_chain: what an earlier request loaded is not in a warm one's chain", a_warm_request},
    {"exposed_chain: three stages with chunks, bound by the slowest", three_stages_with_chunks},
    {"exposed_chain: a stage bound by its weights leads to its disk", a_stage_bound_by_weights},
    {"exposed_chain: without overlap the last piece counts", without_overlap_the_last_piece_counts},
    {"exposed_chain: the work of other requests is a queue", the_work_of_others_is_a_queue},
    {"exposed_chain: a run of several requests is each one's own",
     a_run_of_several_requests_is_ones_own},
    {"exposed_chain: a full KV cache is a queue with a cause", a_full_cache_is_a_queue},
    {"exposed_chain: a send that waited for its link leads to the link",
     a_send_that_waited_for_its_link},
    {"exposed_chain: a send that waited for credit leads to the receiver",
     a_send_that_waited_for_credit},
    {"exposed_chain: rows of the embedding are waited for", rows_of_the_embedding_are_waited_for},
    {"exposed_chain: rows of the embedding wait for the loader",
     rows_of_the_embedding_wait_for_the_loader},
    {"exposed_chain: a model that another request opened is waited for",
     a_model_that_another_request_opened_is_waited_for},
    {"exposed_chain: rows that no run had room for are a queue",
     rows_that_no_run_had_room_for_are_a_queue},
    {"exposed_chain: a stage that says nothing is unknown, the others are not",
     a_stage_that_says_nothing_is_unknown},
    {"exposed_chain: spans that were lost are unknown", spans_that_were_lost_are_unknown},
    {"exposed_chain: clocks that contradict each other give no gap",
     clocks_that_contradict_each_other},
    {"exposed_chain: nothing happens in no time", nothing_happens_in_no_time},
    {"exposed_chain: more segments than there is room for melt together",
     more_segments_than_there_is_room_for},
    {"exposed_chain: garbage gives a whole chain that ends", garbage_gives_a_whole_chain},
};

int main(int argc, char **argv)
{
    return test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
