/* What a stage does with requests, rows and tokens; that its numbers do not depend on how it is run is
 * test_stage_identity.c. */
#include "pipeline/stage.h"

#include <math.h>
#include <stdlib.h>

#include "tests/harness.h"
#include "tests/support/model_writer.h"
#include "tests/support/stage_chain.h"
#include "tests/support/temp_folder.h"

enum { CONTEXT = 64, PLAN_ID = 7 };

static struct temp_folder folder;
static char path[TEMP_PATH_MAX];
static struct stage_chain *chain;
static uint32_t prompt[CONTEXT + 1];

static struct stage_chain_config two_stages(void)
{
    return (struct stage_chain_config){
        .path = path,
        .stage_count = 2,
        .chunk_rows = 8,
        .context = CONTEXT,
        .sequence_max = 4,
        .threads = 1,
    };
}

static struct stage_chain_config one_stage(void)
{
    struct stage_chain_config config = two_stages();
    config.stage_count = 1;
    return config;
}

static void open_chain(struct model_spec spec, struct stage_chain_config config)
{
    temp_folder_make(&folder);
    temp_folder_path(&folder, "tiny.gguf", path);
    CHECK_EQ(model_write(&spec, path), FL_OK);
    CHECK_EQ(stage_chain_open(&config, &chain), FL_OK);
    for (uint32_t i = 0; i <= CONTEXT; i++) {
        prompt[i] = (i * 37 + 11) % stage_chain_manifest(chain)->shape.vocabulary;
    }
}

static void close_chain(void)
{
    stage_chain_close(chain);
    temp_folder_remove(&folder);
}

static struct model_spec tiny(void)
{
    return model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q8_0);
}

static void open_ready(void)
{
    open_chain(tiny(), two_stages());
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
}

static struct stage_chain_request request_of(uint32_t prompt_count, uint32_t max_tokens)
{
    static uint64_t sequence_id;
    return (struct stage_chain_request){
        .sequence_id = ++sequence_id,
        .prompt = prompt,
        .prompt_count = prompt_count,
        .max_tokens = max_tokens,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .top_logits = 4},
    };
}

static void run(struct stage_chain_request *request)
{
    CHECK_EQ(stage_chain_admit(chain, request), FL_OK);
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
}

/* One stage alone: run what can run, and what it says first then. */
static void run_dry(struct stage *stage)
{
    while (stage_step(stage) == FL_OK) {
    }
}

static struct fl_failure next_failure(struct stage *stage)
{
    struct stage_output output;
    CHECK_EQ(stage_poll(stage, &output), FL_OK);
    CHECK_EQ(output.kind, STAGE_OUTPUT_FAILURE);
    return output.failure;
}

/* ---- ends ---- */

static void fills_the_context(void)
{
    open_ready();
    static const struct {
        uint32_t prompt;
        uint32_t tokens;
    } want[] = {{CONTEXT, 1}, {CONTEXT - 1, 2}, {CONTEXT - 5, 6}, {1, 20}};
    for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
        struct stage_chain_request request = request_of(want[i].prompt, 20);
        run(&request);
        CHECK_EQ(request.count, want[i].tokens);
        CHECK_EQ(request.finish, FL_FINISH_LENGTH);
        stage_chain_end(chain, &request, 0);
    }
    close_chain();
}

static void stops_at_end_tokens(void)
{
    /* The chain 5 -> 6 -> 7 -> 9 -> 8; 9 and 3 end the text. */
    static const uint32_t after[] = {0, 0, 0, 0, 0, 6, 7, 9, 8, 8};
    struct model_spec spec = model_spec_scripted(TOKEN_TABLE_BPE, NULL, 0, after, 10);
    open_chain(spec, one_stage());
    prompt[0] = 5;
    struct stage_chain_request request = request_of(1, 10);
    request.stop_count = 2;
    request.stop_tokens[0] = 3;
    request.stop_tokens[1] = 9;
    CHECK_EQ(stage_chain_answer(chain, &request), FL_OK);
    CHECK_EQ(request.count, 3);
    CHECK_EQ(request.tokens[0], 6);
    CHECK_EQ(request.tokens[2], 9);
    CHECK_EQ(request.finish, FL_FINISH_STOP);
    CHECK_EQ(request.top[0].id, 6);
    CHECK_EQ(request.top_count, 4);
    request.stop_count = 0;
    CHECK_EQ(stage_chain_answer(chain, &request), FL_OK);
    CHECK_EQ(request.count, 10);
    CHECK_EQ(request.tokens[9], 8);
    CHECK_EQ(request.finish, FL_FINISH_LENGTH);
    close_chain();
}

/* ---- the sliding window ---- */

static void answer_within(uint32_t window, uint32_t prompt_count,
                          struct stage_chain_request *request)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q8_0);
    spec.window = window;
    open_chain(spec, one_stage());
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
    *request = request_of(prompt_count, 3);
    request->sampling.logprobs = 1;
    run(request);
    CHECK_EQ(request->count, 3);
    close_chain();
}

/* As long as all positions are within it, a window changes nothing; one more, and it does. */
static void a_window_cuts_one_position_beyond_it(void)
{
    enum { WINDOW = 8 };
    for (uint32_t prompt_count = WINDOW - 1; prompt_count <= WINDOW + 1; prompt_count++) {
        static struct stage_chain_request narrow, wide;
        answer_within(WINDOW, prompt_count, &narrow);
        answer_within(CONTEXT, prompt_count, &wide);
        const bool same = memcmp(narrow.top, wide.top, 4 * sizeof(wide.top[0])) == 0;
        CHECK_EQ(same, prompt_count <= WINDOW);
        /* Token n follows prompt_count + n positions. */
        for (uint32_t n = 0; n < 3 && prompt_count + n <= WINDOW; n++) {
            CHECK_EQ(narrow.tokens[n], wide.tokens[n]);
            CHECK(narrow.logprobs[n] == wide.logprobs[n]);
        }
        const uint32_t beyond = prompt_count <= WINDOW ? WINDOW + 1 - prompt_count : 0;
        CHECK(narrow.logprobs[beyond] != wide.logprobs[beyond]);
    }
}

/* ---- weights ---- */

/* Steps of the first stage that ran something. */
static uint32_t count_steps(void)
{
    uint32_t count = 0;
    while (stage_step(stage_chain_stage(chain, 0)) == FL_OK) {
        count++;
    }
    return count;
}

static void computes_what_weights_allow(void)
{
    open_chain(tiny(), one_stage());
    struct stage_chain_request request = request_of(20, 1);
    CHECK_EQ(stage_chain_admit(chain, &request), FL_OK);
    /* Three runs of 8, 8 and 4 rows are formed and get their embeddings. */
    CHECK_EQ(count_steps(), 6);
    CHECK_EQ(stage_chain_load(chain, 0, 2), FL_OK); /* FFN 0: of no use yet */
    CHECK_EQ(count_steps(), 0);
    CHECK_EQ(stage_chain_load(chain, 0, 1), FL_OK); /* ATTENTION 0: now both pieces, three runs */
    CHECK_EQ(count_steps(), 6);
    CHECK_EQ(stage_chain_load(chain, 0, 3), FL_OK);
    CHECK_EQ(count_steps(), 3);
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
    CHECK_EQ(count_steps(), 3 * 3 + 1); /* the head for the last run alone */
    close_chain();
}

static void no_overlap_waits_for_all(void)
{
    struct stage_chain_config config = one_stage();
    config.no_overlap = true;
    open_chain(tiny(), config);
    struct stage_chain_request request = request_of(20, 1);
    CHECK_EQ(stage_chain_admit(chain, &request), FL_OK);
    while (stage_chain_missing(chain) > 0) {
        uint32_t stage, piece;
        CHECK_EQ(count_steps(), 0);
        stage_chain_missing_at(chain, 0, &stage, &piece);
        CHECK_EQ(stage_chain_load(chain, stage, piece), FL_OK);
    }
    CHECK_EQ(count_steps(), 3 + 3 + 3 * 6 + 1);
    close_chain();
}

/* ---- requests ---- */

static struct fl_admit admit_of(uint64_t request_id, const uint32_t *tokens)
{
    return (struct fl_admit){
        .plan_id = PLAN_ID,
        .request_id = request_id,
        .sequence_id = request_id,
        .position_max = 20,
        .prompt_count = 10,
        .max_tokens = 5,
        .token_count = 10,
        .tokens = (uint32_t *)(uintptr_t)tokens,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
    };
}

static void bad_admits_are_refused(void)
{
    open_ready();
    struct stage *stage = stage_chain_stage(chain, 0);
    const uint32_t vocabulary = stage_chain_manifest(chain)->shape.vocabulary;
    uint32_t bad_tokens[10] = {0, vocabulary};
    struct fl_admit bad[12];
    const char *says[12];
    for (uint32_t i = 0; i < 12; i++) {
        bad[i] = admit_of(i + 1, prompt);
    }
    says[0] = "is for plan 8; this is plan 7", bad[0].plan_id = 8;
    says[1] = "keeps 10", bad[1].keep = 10;
    says[2] = "of 0 prompt tokens", bad[2].prompt_count = 0;
    says[3] = "may fill 9 positions", bad[3].position_max = 9;
    says[4] = "max tokens 0", bad[4].max_tokens = 0;
    says[5] = "33 stop tokens", bad[5].stop_count = FL_STOP_TOKEN_MAX + 1;
    says[6] = "has 9 tokens", bad[6].token_count = 9;
    says[7] = "token 1 is", bad[7].tokens = bad_tokens;
    says[8] = "top-p is 0", bad[8].sampling.top_p = 0;
    says[9] = "the context has 64", bad[9].position_max = 65;
    says[10] = "should keep 3", bad[10].keep = 3;
    says[11] = "temperature is nan", bad[11].sampling.temperature = NAN;
    for (uint32_t i = 0; i < 12; i++) {
        CHECK_EQ(stage_admit(stage, &bad[i], 0), FL_INVALID);
        CHECK(strstr(fl_last_error(), says[i]) != NULL);
    }
    struct fl_admit good = admit_of(20, prompt);
    CHECK_EQ(stage_admit(stage, &good, 0), FL_OK);
    good.sequence_id = 21;
    CHECK_EQ(stage_admit(stage, &good, 0), FL_INVALID); /* the id again */
    good.request_id = 21;
    good.sequence_id = 20;
    CHECK_EQ(stage_admit(stage, &good, 0), FL_INVALID); /* the sequence is in use */
    CHECK(strstr(fl_last_error(), "in use by request 20") != NULL);
    for (uint64_t id = 22; id < 25; id++) {
        good = admit_of(id, prompt);
        CHECK_EQ(stage_admit(stage, &good, 0), FL_OK);
    }
    good = admit_of(30, prompt);
    CHECK_EQ(stage_admit(stage, &good, 0), FL_BUSY);
    for (uint64_t id = 20; id < 30; id++) {
        stage_end(stage, &(struct fl_end){.plan_id = PLAN_ID, .request_id = id});
    }
    CHECK_EQ(stage_kv_blocks_free(stage), 8);
    close_chain();
}

static void refused_request_leaves_the_stage_well(void)
{
    struct stage_chain_config config = two_stages();
    config.kv_block_count = 2;
    open_chain(tiny(), config);
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
    struct stage_chain_request first = request_of(20, 4);
    struct stage_chain_request second = request_of(40, 4);
    CHECK_EQ(stage_chain_admit(chain, &first), FL_OK);
    CHECK_EQ(stage_chain_admit(chain, &second), FL_NO_MEMORY);
    CHECK(strstr(fl_last_error(), "too full for 44 positions; 32 would fit now") != NULL);
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    CHECK_EQ(first.count, 4);
    stage_chain_end(chain, &first, 0);
    run(&second);
    CHECK_EQ(second.count, 4);
    close_chain();
}

static void keeps_and_drops(void)
{
    open_ready();
    struct stage_chain_request turn = request_of(40, 4);
    run(&turn);
    stage_chain_end(chain, &turn, 1000); /* 43 positions are there: two blocks */
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(stage_kv_blocks_free(stage_chain_stage(chain, i)), 6);
    }
    turn.keep = 44; /* one too many */
    turn.prompt_count = 50;
    CHECK_EQ(stage_chain_admit(chain, &turn), FL_INVALID);
    const struct fl_drop drop = {.plan_id = PLAN_ID, .sequence_id = turn.sequence_id};
    for (uint32_t i = 0; i < 2; i++) {
        stage_drop(stage_chain_stage(chain, i), &drop);
        stage_drop(stage_chain_stage(chain, i), &drop); /* late: ignored */
        CHECK_EQ(stage_kv_blocks_free(stage_chain_stage(chain, i)), 8);
    }
    /* A drop in the middle of a request ends it. */
    turn.keep = 0;
    CHECK_EQ(stage_chain_admit(chain, &turn), FL_OK);
    CHECK_EQ(stage_chain_pump(chain), FL_OK);
    for (uint32_t i = 0; i < 2; i++) {
        stage_drop(stage_chain_stage(chain, i), &drop);
        CHECK_EQ(stage_kv_blocks_free(stage_chain_stage(chain, i)), 8);
    }
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    CHECK_EQ(turn.count, 0);
    close_chain();
}

static void cancelled_prefill_keeps_what_it_computed(void)
{
    open_ready();
    struct stage_chain_request turn = request_of(60, 4);
    CHECK_EQ(stage_chain_admit(chain, &turn), FL_OK);
    for (uint32_t i = 0; i < 6; i++) {
        CHECK_EQ(stage_chain_pump(chain), FL_OK);
    }
    stage_chain_end(chain, &turn, 60); /* not all of them were computed */
    turn.keep = 59;
    CHECK_EQ(stage_chain_admit(chain, &turn), FL_INVALID);
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    turn.keep = 0;
    run(&turn);
    CHECK_EQ(turn.count, 4);
    close_chain();
}

/* ---- rows ---- */

static void rows_wait_for_their_admit(void)
{
    open_ready();
    struct stage_chain_request alone = request_of(20, 3);
    run(&alone);
    stage_chain_end(chain, &alone, 0);
    struct stage_chain_request request = request_of(20, 3);
    stage_chain_prepare(chain, &request);
    CHECK_EQ(stage_chain_admit_at(chain, 0, &request), FL_OK);
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    CHECK_EQ(request.count, 0);
    CHECK_EQ(stage_chain_admit_at(chain, 1, &request), FL_OK);
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    CHECK_EQ(request.count, 3);
    CHECK(memcmp(request.tokens, alone.tokens, 3 * sizeof(request.tokens[0])) == 0);
    CHECK(memcmp(request.top, alone.top, 4 * sizeof(request.top[0])) == 0);
    close_chain();
}

static void late_rows_give_their_credit_back(void)
{
    open_ready();
    for (uint32_t round = 0; round < 20; round++) {
        struct stage_chain_request request = request_of(60, 3);
        CHECK_EQ(stage_chain_admit(chain, &request), FL_OK);
        for (uint32_t i = 0; i < round; i++) {
            CHECK_EQ(stage_chain_pump(chain), FL_OK);
        }
        /* The last stage hears of the end first; rows still come from the other. */
        const struct fl_end end = {.plan_id = PLAN_ID, .request_id = request.request_id};
        stage_end(stage_chain_stage(chain, 1), &end);
        CHECK_EQ(stage_chain_settle(chain), FL_OK);
        stage_chain_end(chain, &request, 0);
    }
    struct stage_chain_request request = request_of(60, 3);
    run(&request);
    CHECK_EQ(request.count, 3);
    close_chain();
}

static void credit_bounds_the_inbox(void)
{
    struct stage_chain_config config = two_stages();
    config.chunk_rows = 1;
    config.sequence_max = 1;
    open_chain(tiny(), config);
    /* The second stage has no weights: its inbox fills, the rest waits at the first. */
    for (uint32_t piece = 0; piece < stage_chain_plan(chain, 0)->manifest.piece_count; piece++) {
        CHECK_EQ(stage_chain_load(chain, 0, piece), FL_OK);
    }
    struct stage_chain_request request = request_of(60, 2);
    CHECK_EQ(stage_chain_admit(chain, &request), FL_OK);
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    CHECK(stage_chain_rows_waiting_peak(chain) > 0 && stage_chain_rows_waiting_peak(chain) < 20);
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    CHECK_EQ(request.count, 2);
    close_chain();
}

static void foreign_rows_are_refused(void)
{
    open_ready();
    struct stage *stage = stage_chain_stage(chain, 1);
    const uint32_t width = stage_chain_manifest(chain)->shape.width;
    static float rows[64 * 4096];
    const struct fl_admit admit = admit_of(1, prompt);
    CHECK_EQ(stage_admit(stage, &admit, 0), FL_OK);
    const struct fl_activation_header right = {
        .plan_id = PLAN_ID, .request_id = 1, .rows = 4, .width = width};
    struct fl_activation_header bad[] = {right, right, right, right, right, right, right, right};
    bad[0].plan_id = 8;
    bad[1].width = width + 1;
    bad[2].rows = 0;
    bad[3].rows = FL_CHUNK_MAX + 1;
    bad[4].position = 1; /* 0 is next */
    bad[5].rows = 21;    /* beyond position_max */
    bad[6].flags = FL_ACTIVATION_SAMPLE;
    bad[7].position = UINT32_MAX;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_EQ(stage_take_activations(stage, &bad[i], rows, 0), FL_PROTOCOL);
    }
    CHECK_EQ(stage_take_activations(stage_chain_stage(chain, 0), &right, rows, 0), FL_PROTOCOL);
    const struct fl_token token = {.plan_id = PLAN_ID, .request_id = 1, .position = 10};
    CHECK_EQ(stage_take_token(stage, &token, 0), FL_PROTOCOL);
    CHECK_EQ(stage_take_activations(stage, &right, rows, 0), FL_OK);
    CHECK_EQ(stage_take_activations(stage, &right, rows, 0), FL_PROTOCOL); /* the same again */

    /* More than the credit: requests to come may fill it, not pass it. */
    struct fl_activation_header future = right;
    future.request_id = 9;
    uint32_t sent = 4;
    fl_status status;
    while ((status = stage_take_activations(stage, &future, rows, 0)) == FL_OK) {
        sent += 4;
        future.position += 4;
    }
    CHECK_EQ(status, FL_PROTOCOL);
    CHECK_EQ(sent, stage_credit_rows(stage) / 4 * 4);
    close_chain();
}

static void gaps_before_the_admit_fail_the_request(void)
{
    open_ready();
    struct stage *stage = stage_chain_stage(chain, 1);
    static float rows[64 * 4096];
    struct fl_activation_header header = {.plan_id = PLAN_ID,
                                          .request_id = 1,
                                          .position = 2,
                                          .rows = 4,
                                          .width = stage_chain_manifest(chain)->shape.width};
    CHECK_EQ(stage_take_activations(stage, &header, rows, 0), FL_OK);
    const struct fl_admit admit = admit_of(1, prompt);
    CHECK_EQ(stage_admit(stage, &admit, 0), FL_OK);
    run_dry(stage);
    const struct fl_failure failure = next_failure(stage);
    CHECK_EQ(failure.request_id, 1);
    CHECK_EQ(failure.code, FL_PROTOCOL);
    CHECK(strstr(failure.text, "position 2; position 0 is next") != NULL);
    struct stage_output output;
    CHECK_EQ(stage_poll(stage, &output), FL_OK);
    CHECK_EQ(output.kind, STAGE_OUTPUT_CREDIT);
    CHECK_EQ(output.credit_rows, 4);
    CHECK_EQ(stage_poll(stage, &output), FL_AGAIN);
    close_chain();
}

static void numbers_that_are_none_fail_the_request(void)
{
    open_ready();
    struct stage *stage = stage_chain_stage(chain, 1);
    static float rows[16 * 4096];
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        rows[i] = NAN;
    }
    const struct fl_admit admit = admit_of(1, prompt);
    CHECK_EQ(stage_admit(stage, &admit, 0), FL_OK);
    const struct fl_activation_header header = {
        .plan_id = PLAN_ID,
        .request_id = 1,
        .rows = 10,
        .width = stage_chain_manifest(chain)->shape.width,
        .flags = FL_ACTIVATION_SAMPLE,
    };
    CHECK_EQ(stage_take_activations(stage, &header, rows, 0), FL_OK);
    run_dry(stage);
    CHECK_EQ(next_failure(stage).code, FL_MALFORMED);
    stage_end(stage, &(struct fl_end){.plan_id = PLAN_ID, .request_id = 1});
    CHECK_EQ(stage_kv_blocks_free(stage), 8);
    close_chain();
}

static void foreign_tokens_are_refused(void)
{
    open_ready();
    struct stage *stage = stage_chain_stage(chain, 0);
    struct stage_chain_request request = request_of(10, 5);
    CHECK_EQ(stage_chain_admit(chain, &request), FL_OK);
    const struct fl_token right = {
        .plan_id = PLAN_ID, .request_id = request.request_id, .position = 10};
    CHECK_EQ(stage_take_token(stage, &right, 0), FL_PROTOCOL); /* its prompt has not run */
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    struct fl_token bad = right;
    bad.position = 14;
    bad.id = stage_chain_manifest(chain)->shape.vocabulary;
    CHECK_EQ(stage_take_token(stage, &bad, 0), FL_PROTOCOL);
    bad.id = 1;
    bad.position = 12;
    CHECK_EQ(stage_take_token(stage, &bad, 0), FL_PROTOCOL);
    struct fl_token late = right;
    late.request_id = 99;
    CHECK_EQ(stage_take_token(stage, &late, 0), FL_OK);
    late = right;
    late.plan_id = 3;
    CHECK_EQ(stage_take_token(stage, &late, 0), FL_OK);
    close_chain();
}

/* ---- opening ---- */

static fl_status read_fails(void *ctx, const uint32_t *ids, uint32_t count, float *out,
                            uint64_t *out_ready_ns)
{
    (void)ctx, (void)ids, (void)count, (void)out, (void)out_ready_ns;
    return FL_FAIL(FL_IO, "the disk is gone");
}

static void failed_embedding_fails_its_requests(void)
{
    struct stage_chain_config config = two_stages();
    open_chain(tiny(), config);
    const struct fl_plan *plan = stage_chain_plan(chain, 0);
    const struct device_host_config host = {.threads = 1};
    struct device *device;
    struct weight_store *weights;
    struct stage *stage;
    CHECK_EQ(device_host_open(&host, &device), FL_OK);
    CHECK_EQ(weight_store_open(&plan->manifest, device, &weights), FL_OK);
    const struct stage_config stage_config = {
        .plan = plan, .device = device, .weights = weights, .embed = {.read = read_fails}};
    CHECK_EQ(stage_open(&stage_config, &stage), FL_OK);
    const struct fl_admit admit = admit_of(1, prompt);
    CHECK_EQ(stage_admit(stage, &admit, 0), FL_OK);
    run_dry(stage);
    const struct fl_failure failure = next_failure(stage);
    CHECK_EQ(failure.code, FL_IO);
    CHECK(strcmp(failure.text, "the disk is gone") == 0);
    struct stage_output output;
    CHECK_EQ(stage_poll(stage, &output), FL_AGAIN);
    stage_end(stage, &(struct fl_end){.plan_id = PLAN_ID, .request_id = 1});
    CHECK_EQ(stage_kv_blocks_free(stage), 8);

    /* A loader that fails breaks the stage. */
    const struct fl_admit next = admit_of(2, prompt);
    CHECK_EQ(stage_admit(stage, &next, 0), FL_OK);
    weight_store_fail(weights, FL_CORRUPT);
    fl_status status;
    while ((status = stage_step(stage)) == FL_OK) {
    }
    CHECK(status == FL_CORRUPT || status == FL_AGAIN);
    stage_close(stage);
    weight_store_close(weights);
    device->ops->close(device);
    close_chain();
}

static void bad_plans_are_refused(void)
{
    open_chain(tiny(), two_stages());
    struct fl_plan plans[9];
    struct fl_stage places[9][2];
    for (uint32_t i = 0; i < 9; i++) {
        plans[i] = *stage_chain_plan(chain, 1);
        memcpy(places[i], plans[i].stages, sizeof(places[i]));
        plans[i].stages = places[i];
    }
    plans[0].chunk_rows = 0;
    plans[1].context = 0;
    plans[2].sequence_max = STAGE_SEQUENCE_MAX + 1;
    plans[3].kv_block_count = 0;
    plans[4].stage_index = 2;
    places[5][1].layer_first = 400;
    places[6][1].layer_count = 0;
    places[7][1].has_head = false;
    plans[8].manifest.piece_count--;
    const struct device_host_config host = {.threads = 1};
    struct device *device;
    CHECK_EQ(device_host_open(&host, &device), FL_OK);
    for (uint32_t i = 0; i < 9; i++) {
        struct stage *stage;
        const struct stage_config config = {.plan = &plans[i], .device = device};
        CHECK_EQ(stage_open(&config, &stage), FL_INVALID);
        CHECK(strncmp(fl_last_error(), "plan: ", 6) == 0);
    }
    CHECK(stage_kv_memory(&plans[5]) == UINT64_MAX && stage_buffer_memory(&plans[5]) == UINT64_MAX);
    device->ops->close(device);
    close_chain();
}

static const struct test_case cases[] = {
    {"stage: the context is filled to the last position", fills_the_context},
    {"stage: any of several end tokens stops, and is the last token", stops_at_end_tokens},
    {"stage: a window cuts one position beyond it", a_window_cuts_one_position_beyond_it},
    {"stage: computes what its weights allow, and nothing twice", computes_what_weights_allow},
    {"stage: without overlap nothing runs before the last piece", no_overlap_waits_for_all},
    {"stage: bad requests are refused with a sentence", bad_admits_are_refused},
    {"stage: a request that does not fit leaves the others alone",
     refused_request_leaves_the_stage_well},
    {"stage: positions are kept until they are dropped", keeps_and_drops},
    {"stage: a cancelled prefill keeps what it had computed",
     cancelled_prefill_keeps_what_it_computed},
    {"stage: rows of a request to come wait for it", rows_wait_for_their_admit},
    {"stage: rows of an ended request give their credit back", late_rows_give_their_credit_back},
    {"stage: a slow stage fills its inbox and no more", credit_bounds_the_inbox},
    {"stage: rows out of place or beyond the credit are refused", foreign_rows_are_refused},
    {"stage: a gap in rows that came early fails the request",
     gaps_before_the_admit_fail_the_request},
    {"stage: logits that are no numbers fail the request alone",
     numbers_that_are_none_fail_the_request},
    {"stage: tokens out of place are refused", foreign_tokens_are_refused},
    {"stage: an embedding that cannot be read fails the requests that asked",
     failed_embedding_fails_its_requests},
    {"stage: a plan that contradicts itself is refused", bad_plans_are_refused},
};

TEST_MAIN(cases)
