/* What stages record of their runs, on a clock that moves on whenever it is looked at: every reading
 * is another time, so that a cause can be told from any other. */
#include "pipeline/run_trace.h"

#include <stdlib.h>

#include "tests/harness.h"
#include "tests/support/model_writer.h"
#include "tests/support/stage_chain.h"
#include "tests/support/temp_folder.h"

enum { CONTEXT = 64, SPANS = 4096, CHUNK = 8, STAGES = 2 };

static struct temp_folder folder;
static char path[TEMP_PATH_MAX];
static struct stage_chain *chain;
static struct run_trace traces[STAGES];
static uint64_t ticks;
static uint32_t prompt[CONTEXT];
static struct fl_span spans[SPANS];
static uint32_t span_count;

static uint64_t tick(void *ctx)
{
    (void)ctx;
    return ++ticks;
}

static void open_chain(uint32_t stage_count, bool no_overlap)
{
    const struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q8_0);
    temp_folder_make(&folder);
    temp_folder_path(&folder, "tiny.gguf", path);
    CHECK_EQ(model_write(&spec, path), FL_OK);
    ticks = 1000;
    for (uint32_t i = 0; i < STAGES; i++) {
        traces[i] = (struct run_trace){.clock = {.now_ns = tick}};
        CHECK_EQ(fl_span_ring_open(FL_LANE_COMPUTE, SPANS, &traces[i].spans), FL_OK);
    }
    const struct stage_chain_config config = {
        .path = path,
        .stage_count = stage_count,
        .chunk_rows = CHUNK,
        .context = CONTEXT,
        .sequence_max = 4,
        .threads = 1,
        .no_overlap = no_overlap,
        .embed_late = true,
        .traces = traces,
    };
    CHECK_EQ(stage_chain_open(&config, &chain), FL_OK);
    for (uint32_t i = 0; i < CONTEXT; i++) {
        prompt[i] = (i * 37 + 11) % stage_chain_manifest(chain)->shape.vocabulary;
    }
}

static void close_chain(void)
{
    stage_chain_close(chain);
    for (uint32_t i = 0; i < STAGES; i++) {
        fl_span_ring_close(traces[i].spans);
    }
    temp_folder_remove(&folder);
}

static void rows_say_whether_the_thread_was_busy_when_they_came(void)
{
    struct run_trace trace = {.clock = {.now_ns = tick}, .busy_ns = 50};
    const struct run_times run = {.plan_id = 1, .number = 1};
    struct fl_span span;
    uint64_t cursor = 0;
    uint64_t lost = 0;
    ticks = 99;
    CHECK_EQ(fl_span_ring_open(FL_LANE_COMPUTE, 16, &trace.spans), FL_OK);
    run_trace_join(&trace, &run, 7, 0, 4, 40); /* there at 40, and a task ended at 50 */
    CHECK(fl_span_ring_read(trace.spans, &cursor, &lost, &span));
    CHECK_EQ(span.cause, FL_CAUSE_BUSY);
    CHECK(span.cause_ns == 40 && span.start_ns == 50 && span.end_ns == 100);
    run_trace_join(&trace, &run, 7, 0, 4, 60);
    CHECK(fl_span_ring_read(trace.spans, &cursor, &lost, &span));
    CHECK_EQ(span.cause, FL_CAUSE_INPUT);
    CHECK(span.cause_ns == 60 && span.start_ns == 101 && span.end_ns == 101);
    run_trace_join(&trace, &run, 7, 0, 4, 0); /* nobody knows */
    CHECK(fl_span_ring_read(trace.spans, &cursor, &lost, &span));
    CHECK_EQ(span.cause, FL_CAUSE_NONE);
    fl_span_ring_close(trace.spans);
}

static struct stage_chain_request request_of(uint32_t prompt_count, uint32_t max_tokens)
{
    static uint64_t sequence_id;
    return (struct stage_chain_request){
        .sequence_id = ++sequence_id,
        .prompt = prompt,
        .prompt_count = prompt_count,
        .max_tokens = max_tokens,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
    };
}

/* Everything the stage has recorded. */
static void read_spans(uint32_t stage)
{
    uint64_t cursor = 0;
    uint64_t lost = 0;
    span_count = 0;
    while (fl_span_ring_read(traces[stage].spans, &cursor, &lost, &spans[span_count])) {
        const struct fl_span *span = &spans[span_count++];
        CHECK_EQ(span->lane, FL_LANE_COMPUTE);
        CHECK(span->phase != FL_PHASE_UNKNOWN);
        CHECK(span->end_ns >= span->start_ns && span->busy_ns <= span->end_ns - span->start_ns);
        CHECK(span->cause_ns <= span->start_ns);
        CHECK((span->cause == FL_CAUSE_NONE) == (span->cause_ns == 0));
        CHECK_EQ(span->plan_id, 7);
    }
    CHECK_EQ(lost, 0);
}

/* The n-th span of a phase in a run (0: any), or NULL. */
static const struct fl_span *find_span(enum fl_phase phase, uint64_t run, uint32_t n)
{
    for (uint32_t i = 0; i < span_count; i++) {
        if (spans[i].phase == phase && (run == 0 || spans[i].run == run) && n-- == 0) {
            return &spans[i];
        }
    }
    return NULL;
}

static uint32_t count_spans(enum fl_phase phase, uint64_t run)
{
    uint32_t count = 0;
    while (find_span(phase, run, count) != NULL) {
        count++;
    }
    return count;
}

static void opening_is_memory_then_kv(void)
{
    open_chain(1, false);
    read_spans(0);
    CHECK_EQ(span_count, 2);
    CHECK_EQ(spans[0].phase, FL_PHASE_MEMORY);
    CHECK_EQ(spans[1].phase, FL_PHASE_KV);
    CHECK_EQ(spans[1].start_ns, spans[0].end_ns);
    CHECK_EQ(spans[1].bytes, stage_kv_memory(stage_chain_plan(chain, 0)));
    CHECK_EQ(spans[0].bytes, weight_store_memory(&stage_chain_plan(chain, 0)->manifest) +
                                 stage_buffer_memory(stage_chain_plan(chain, 0)));
    close_chain();
}

static void weights_that_come_last_are_the_cause(void)
{
    open_chain(1, false);
    struct stage_chain_request request = request_of(CHUNK, 1);
    const struct fl_manifest *manifest = &stage_chain_plan(chain, 0)->manifest;
    CHECK_EQ(stage_chain_admit(chain, &request), FL_OK);
    uint32_t piece;
    for (uint32_t n = 0; weight_store_order(stage_chain_weights(chain, 0), n, &piece) == FL_OK;
         n++) {
        CHECK_EQ(stage_chain_settle(chain), FL_OK); /* all that can be done before it comes */
        CHECK_EQ(stage_chain_load(chain, 0, piece), FL_OK);
    }
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    CHECK_EQ(request.count, 1);
    read_spans(0);
    const uint32_t pieces = count_spans(FL_PHASE_PREFILL, 1);
    CHECK_EQ(pieces, manifest->piece_count - 2); /* the table and the head are others */
    for (uint32_t n = 0; n < pieces; n++) {
        const struct fl_span *task = find_span(FL_PHASE_PREFILL, 1, n);
        CHECK_EQ(task->cause, FL_CAUSE_WEIGHTS);
        CHECK_EQ(task->cause_ns,
                 weight_store_published_ns(stage_chain_weights(chain, 0), task->piece));
        CHECK_EQ(task->piece, n + 1);
        CHECK_EQ(task->bytes, fl_piece_size(&manifest->pieces[task->piece]));
        CHECK_EQ(task->rows, CHUNK);
        CHECK_EQ(task->request_id, request.request_id);
    }
    const struct fl_span *head = find_span(FL_PHASE_HEAD, 1, 0);
    const struct fl_span *sample = find_span(FL_PHASE_SAMPLE, 1, 0);
    CHECK_EQ(head->cause, FL_CAUSE_WEIGHTS);
    CHECK_EQ(head->piece, manifest->piece_count - 1);
    CHECK_EQ(head->rows, 1);
    CHECK_EQ(sample->cause, FL_CAUSE_INPUT);
    CHECK_EQ(sample->cause_ns, head->end_ns);
    CHECK_EQ(sample->start_ns, head->end_ns);
    close_chain();
}

/* From the last span of a run back to its rows' arrival, without a gap in the causes. */
static void check_chain(uint64_t run)
{
    const struct fl_span *join = find_span(FL_PHASE_JOIN, run, 0);
    CHECK(join != NULL);
    uint64_t input_ns = 0;
    uint32_t tasks = 0;
    for (uint32_t i = 0; i < span_count; i++) {
        if (spans[i].run == run && spans[i].phase != FL_PHASE_JOIN) {
            CHECK_EQ(spans[i].cause, FL_CAUSE_INPUT);
            CHECK(tasks++ == 0 ? spans[i].cause_ns >= join->cause_ns
                               : spans[i].cause_ns == input_ns);
            input_ns = spans[i].end_ns;
        }
    }
    CHECK(tasks >= 3);
}

static void input_that_comes_last_is_the_cause(void)
{
    open_chain(2, false);
    struct stage_chain_request request = request_of(CHUNK, 1);
    CHECK_EQ(stage_chain_answer(chain, &request), FL_OK);
    read_spans(0);
    check_chain(1);
    /* The table is there: the prompt's arrival is the first task's input. */
    const struct fl_span *embed = find_span(FL_PHASE_EMBED, 1, 0);
    CHECK_EQ(embed->cause_ns, find_span(FL_PHASE_JOIN, 1, 0)->cause_ns);
    read_spans(1);
    check_chain(1);
    const struct fl_span *join = find_span(FL_PHASE_JOIN, 1, 0);
    CHECK_EQ(find_span(FL_PHASE_PREFILL, 1, 0)->cause_ns, join->cause_ns);
    CHECK_EQ(join->rows, CHUNK);
    CHECK_EQ(join->request_id, request.request_id);
    CHECK_EQ(join->cause, FL_CAUSE_INPUT);
    CHECK_EQ(count_spans(FL_PHASE_EMBED, 0), 0);
    CHECK_EQ(count_spans(FL_PHASE_HEAD, 1), 1);
    close_chain();
}

static void rows_that_a_reader_brings_are_the_embeddings_input(void)
{
    open_chain(2, false);
    struct stage_chain_request request = request_of(CHUNK, 1);
    CHECK_EQ(stage_chain_admit(chain, &request), FL_OK);
    CHECK_EQ(stage_chain_settle(chain), FL_OK); /* no weights at all: only the embedding runs */
    read_spans(0);
    const struct fl_span *join = find_span(FL_PHASE_JOIN, 1, 0);
    const struct fl_span *embed = find_span(FL_PHASE_EMBED, 1, 0);
    CHECK_EQ(count_spans(FL_PHASE_PREFILL, 0), 0);
    CHECK_EQ(embed->cause, FL_CAUSE_INPUT);
    CHECK(embed->cause_ns > join->cause_ns);
    CHECK(embed->cause_ns > join->end_ns); /* the source said when */
    close_chain();
}

static void a_thread_at_another_task_is_the_cause(void)
{
    open_chain(1, false);
    struct stage_chain_request request = request_of(2 * CHUNK + 3, 1);
    CHECK_EQ(stage_chain_answer(chain, &request), FL_OK);
    read_spans(0);
    CHECK_EQ(count_spans(FL_PHASE_JOIN, 0), 3);
    for (uint64_t run = 2; run <= 3; run++) {
        const struct fl_span *first = find_span(FL_PHASE_EMBED, run, 0);
        const uint32_t before = count_spans(FL_PHASE_PREFILL, run - 1);
        CHECK_EQ(first->cause, FL_CAUSE_BUSY);
        CHECK_EQ(first->cause_ns, find_span(FL_PHASE_PREFILL, run - 1, before - 1)->end_ns);
        /* All rows came with the ADMIT. */
        CHECK_EQ(find_span(FL_PHASE_JOIN, run, 0)->cause_ns,
                 find_span(FL_PHASE_JOIN, 1, 0)->cause_ns);
        CHECK_EQ(find_span(FL_PHASE_JOIN, run, 0)->position, (run - 1) * CHUNK);
    }
    CHECK_EQ(find_span(FL_PHASE_JOIN, 3, 0)->rows, 3);
    close_chain();
}

static void without_overlap_the_last_piece_is_the_cause(void)
{
    open_chain(1, true);
    struct stage_chain_request request = request_of(CHUNK, 1);
    CHECK_EQ(stage_chain_admit(chain, &request), FL_OK);
    uint32_t piece;
    uint64_t last_ns = 0;
    for (uint32_t n = 0; weight_store_order(stage_chain_weights(chain, 0), n, &piece) == FL_OK;
         n++) {
        CHECK_EQ(stage_chain_load(chain, 0, piece), FL_OK);
        last_ns = weight_store_published_ns(stage_chain_weights(chain, 0), piece);
    }
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    read_spans(0);
    const struct fl_span *embed = find_span(FL_PHASE_EMBED, 1, 0);
    CHECK_EQ(embed->cause, FL_CAUSE_WEIGHTS);
    CHECK_EQ(embed->cause_ns, last_ns);
    CHECK_EQ(embed->piece, 0);
    CHECK_EQ(find_span(FL_PHASE_PREFILL, 1, 0)->cause, FL_CAUSE_INPUT);
    close_chain();
}

static void every_request_of_a_run_joins_it(void)
{
    open_chain(1, false);
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
    struct stage_chain_request first = request_of(3, 1);
    struct stage_chain_request second = request_of(4, 1);
    CHECK_EQ(stage_chain_admit(chain, &first), FL_OK);
    CHECK_EQ(stage_chain_admit(chain, &second), FL_OK);
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    CHECK_EQ(first.count + second.count, 2);
    read_spans(0);
    CHECK_EQ(count_spans(FL_PHASE_JOIN, 1), 2);
    const struct fl_span *joins[2] = {find_span(FL_PHASE_JOIN, 1, 0),
                                      find_span(FL_PHASE_JOIN, 1, 1)};
    CHECK_EQ(joins[0]->request_id, first.request_id);
    CHECK_EQ(joins[1]->request_id, second.request_id);
    CHECK(joins[0]->rows == 3 && joins[1]->rows == 4);
    CHECK(joins[1]->cause_ns > joins[0]->cause_ns);
    const struct fl_span *embed = find_span(FL_PHASE_EMBED, 1, 0);
    CHECK_EQ(embed->cause_ns, joins[1]->cause_ns); /* the last of them */
    CHECK_EQ(find_span(FL_PHASE_PREFILL, 1, 0)->request_id, 0);
    CHECK_EQ(find_span(FL_PHASE_PREFILL, 1, 0)->rows, 7);
    CHECK_EQ(count_spans(FL_PHASE_SAMPLE, 1), 1);
    CHECK_EQ(find_span(FL_PHASE_SAMPLE, 1, 0)->rows, 2);
    close_chain();
}

static void a_run_of_decode_rows_is_one_span(void)
{
    open_chain(2, false);
    struct stage_chain_request request = request_of(5, 6);
    CHECK_EQ(stage_chain_answer(chain, &request), FL_OK);
    CHECK_EQ(request.count, 6);
    for (uint32_t stage = 0; stage < STAGES; stage++) {
        read_spans(stage);
        CHECK_EQ(count_spans(FL_PHASE_JOIN, 0), 1); /* of the prompt */
        CHECK_EQ(count_spans(FL_PHASE_DECODE, 0), 5);
        for (uint32_t n = 0; n < 5; n++) {
            const struct fl_span *span = find_span(FL_PHASE_DECODE, 0, n);
            CHECK_EQ(span->run, n + 2);
            CHECK_EQ(span->rows, 1);
            CHECK_EQ(span->position, 5 + n);
            CHECK_EQ(span->request_id, request.request_id);
            CHECK_EQ(span->piece, FL_SPAN_NO_PIECE);
            CHECK_EQ(span->cause, FL_CAUSE_INPUT);
            CHECK(span->busy_ns > 0 && span->bytes > 0);
        }
    }
    close_chain();
}

static void a_trace_changes_no_token(void)
{
    struct stage_chain_request with = request_of(20, 10);
    struct stage_chain_request without = request_of(20, 10);
    open_chain(2, false);
    CHECK_EQ(stage_chain_answer(chain, &with), FL_OK);
    stage_chain_close(chain);
    const struct stage_chain_config config = {.path = path,
                                              .stage_count = 2,
                                              .chunk_rows = CHUNK,
                                              .context = CONTEXT,
                                              .sequence_max = 4,
                                              .threads = 1};
    CHECK_EQ(stage_chain_open(&config, &chain), FL_OK);
    CHECK_EQ(stage_chain_answer(chain, &without), FL_OK);
    CHECK_EQ(with.count, 10);
    CHECK_EQ(without.count, 10);
    CHECK(memcmp(with.tokens, without.tokens, 10 * sizeof(with.tokens[0])) == 0);
    close_chain();
}

static const struct test_case cases[] = {
    {"run_trace: rows say whether the thread was busy when they came",
     rows_say_whether_the_thread_was_busy_when_they_came},
    {"run_trace: a plan's opening is memory, then KV cache", opening_is_memory_then_kv},
    {"run_trace: weights that come last are the cause", weights_that_come_last_are_the_cause},
    {"run_trace: an input that comes last is the cause, back to the rows' arrival",
     input_that_comes_last_is_the_cause},
    {"run_trace: rows that a reader brings are the embedding's input",
     rows_that_a_reader_brings_are_the_embeddings_input},
    {"run_trace: a thread that is at another task is the cause",
     a_thread_at_another_task_is_the_cause},
    {"run_trace: without overlap the last piece is the cause",
     without_overlap_the_last_piece_is_the_cause},
    {"run_trace: every request whose rows a run holds joins it", every_request_of_a_run_joins_it},
    {"run_trace: a run of decode rows is one span", a_run_of_decode_rows_is_one_span},
    {"run_trace: recording changes no token", a_trace_changes_no_token},
};

TEST_MAIN(cases)
