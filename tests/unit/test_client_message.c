/* Client messages: requests and events there and back, wrong fields, cut and bent bytes. */
#include "proto/client_message.h"

#include <stdbool.h>
#include <stdlib.h>

#include "tests/harness.h"

static unsigned char arena_memory[1 << 22];
static unsigned char scratch_memory[1 << 22];
static unsigned char packed[1 << 21];

static struct fl_client_request request_out;
static struct fl_client_event event_out;

static bool same_text(struct fl_text a, struct fl_text b)
{
    return a.size == b.size && memcmp(a.data, b.data, a.size) == 0;
}

static bool same_float(float a, float b)
{
    return memcmp(&a, &b, sizeof(a)) == 0;
}

static struct fl_text text(const char *data, size_t size)
{
    return (struct fl_text){.data = data, .size = size};
}

static size_t pack_request(const struct fl_client_request *request)
{
    struct fl_arena scratch;
    fl_arena_init(&scratch, scratch_memory, sizeof(scratch_memory));
    size_t size = 0;
    CHECK_EQ(fl_client_request_pack(request, &scratch, packed, sizeof(packed), &size), FL_OK);
    return size;
}

static fl_status unpack_request(const void *data, size_t size)
{
    struct fl_arena arena;
    fl_arena_init(&arena, arena_memory, sizeof(arena_memory));
    return fl_client_request_unpack(data, size, &arena, &request_out);
}

static void request_round_trip(const struct fl_client_request *request)
{
    const size_t size = pack_request(request);
    CHECK_EQ(unpack_request(packed, size), FL_OK);
    CHECK_EQ(request_out.version, FL_CLIENT_VERSION);
    CHECK(request_out.id == request->id);
    CHECK_EQ(request_out.kind, request->kind);
}

/* Refused as a request, with its id, by a sentence that holds `word`. */
static void request_refused(const struct fl_client_request *request, const char *word)
{
    const size_t size = pack_request(request);
    CHECK_EQ(unpack_request(packed, size), FL_INVALID);
    CHECK(request_out.id == request->id);
    if (strstr(fl_last_error(), word) == NULL) {
        printf("  \"%s\" does not name \"%s\"\n", fl_last_error(), word);
        CHECK(false);
    }
}

static size_t pack_event(const struct fl_client_event *event)
{
    struct fl_arena scratch;
    fl_arena_init(&scratch, scratch_memory, sizeof(scratch_memory));
    size_t size = 0;
    CHECK_EQ(fl_client_event_pack(event, &scratch, packed, sizeof(packed), &size), FL_OK);
    return size;
}

static fl_status unpack_event(const void *data, size_t size)
{
    struct fl_arena arena;
    fl_arena_init(&arena, arena_memory, sizeof(arena_memory));
    return fl_client_event_unpack(data, size, &arena, &event_out);
}

static void event_round_trip(const struct fl_client_event *event)
{
    const size_t size = pack_event(event);
    CHECK_EQ(unpack_event(packed, size), FL_OK);
    CHECK(event_out.id == event->id);
    CHECK_EQ(event_out.kind, event->kind);
}

static void event_refused(const struct fl_client_event *event, const char *word)
{
    const size_t size = pack_event(event);
    CHECK_EQ(unpack_event(packed, size), FL_PROTOCOL);
    if (strstr(fl_last_error(), word) == NULL) {
        printf("  \"%s\" does not name \"%s\"\n", fl_last_error(), word);
        CHECK(false);
    }
}

/* ---- requests ---- */

static struct fl_client_request make(enum fl_request_kind kind)
{
    return (struct fl_client_request){
        .version = FL_CLIENT_VERSION, .id = UINT64_MAX - (uint64_t)kind, .kind = kind};
}

static struct fl_client_request good_generate(void)
{
    struct fl_client_request request = make(FL_REQUEST_GENERATE);
    request.as.generate = (struct fl_generate){
        .model = "SmolLM2-135M-Instruct.Q4_1",
        .prompt = text("Gr\xc3\xbc\xc3\x9f\0e", 8),
        .chat_template = "chatml",
        .special = true,
        .no_bos = true,
        .ignore_end = true,
        .max_tokens = 17,
        .sampling = {.temperature = 0.1f,
                     .top_k = 5,
                     .top_p = 0.9f,
                     .min_p = 0.01f,
                     .repetition_penalty = 1.3f,
                     .penalty_window = 64,
                     .seed = UINT64_MAX,
                     .top_logits = 10,
                     .logprobs = 2},
        .stop_count = 2,
        .stops = {{"\n\n", 2}, {"a\0b", 3}},
    };
    return request;
}

static void test_generate(void)
{
    const struct fl_client_request in = good_generate();
    request_round_trip(&in);
    const struct fl_generate *got = &request_out.as.generate;
    const struct fl_generate *want = &in.as.generate;
    CHECK(strcmp(got->model, want->model) == 0);
    CHECK(same_text(got->prompt, want->prompt));
    CHECK_EQ(got->token_count, 0);
    CHECK_EQ(got->message_count, 0);
    CHECK(strcmp(got->chat_template, "chatml") == 0);
    CHECK(got->special && got->no_bos && got->ignore_end);
    CHECK_EQ(got->max_tokens, 17);
    CHECK(same_float(got->sampling.temperature, 0.1f));
    CHECK_EQ(got->sampling.top_k, 5);
    CHECK(same_float(got->sampling.top_p, 0.9f));
    CHECK(same_float(got->sampling.min_p, 0.01f));
    CHECK(same_float(got->sampling.repetition_penalty, 1.3f));
    CHECK_EQ(got->sampling.penalty_window, 64);
    CHECK(got->sampling.seed == UINT64_MAX);
    CHECK_EQ(got->sampling.top_logits, 10);
    CHECK_EQ(got->sampling.logprobs, 2);
    CHECK_EQ(got->stop_count, 2);
    CHECK(same_text(got->stops[0], want->stops[0]));
    CHECK(same_text(got->stops[1], want->stops[1]));
}

static void test_generate_inputs(void)
{
    struct fl_client_request in = good_generate();
    in.as.generate.prompt = text("", 0); /* empty is not the same as none */
    request_round_trip(&in);
    CHECK(request_out.as.generate.prompt.data != NULL);
    CHECK_EQ(request_out.as.generate.prompt.size, 0);

    uint32_t tokens[] = {0, 1, FL_VOCABULARY_MAX - 1};
    in.as.generate.prompt = (struct fl_text){0};
    in.as.generate.tokens = tokens;
    in.as.generate.token_count = 3;
    request_round_trip(&in);
    CHECK(request_out.as.generate.prompt.data == NULL);
    CHECK_EQ(request_out.as.generate.token_count, 3);
    CHECK(memcmp(request_out.as.generate.tokens, tokens, sizeof(tokens)) == 0);

    struct fl_chat_message messages[] = {
        {"system", {"Be brief.", 9}}, {"user", {"", 0}}, {"assistant", {"\xf0\x9f\x99\x82", 4}}};
    in.as.generate.token_count = 0;
    in.as.generate.messages = messages;
    in.as.generate.message_count = 3;
    request_round_trip(&in);
    CHECK_EQ(request_out.as.generate.message_count, 3);
    for (size_t i = 0; i < 3; i++) {
        CHECK(strcmp(request_out.as.generate.messages[i].role, messages[i].role) == 0);
        CHECK(same_text(request_out.as.generate.messages[i].content, messages[i].content));
    }
}

/* What a program that sets nothing but the model and the prompt gets. */
static void test_generate_defaults(void)
{
    struct fl_client_request in = make(FL_REQUEST_GENERATE);
    in.as.generate.model = "m";
    in.as.generate.prompt = text("x", 1);
    request_round_trip(&in);
    const struct fl_generate *got = &request_out.as.generate;
    CHECK(same_float(got->sampling.temperature, 0.f));
    CHECK(same_float(got->sampling.top_p, 1.f));
    CHECK(same_float(got->sampling.repetition_penalty, 1.f));
    CHECK(strcmp(got->chat_template, "") == 0);

    /* The same without any sampling message: kind generate, model "m", prompt "x". */
    static const unsigned char bare[] = {8, 1, 16, 5, 26, 6, 10, 1, 'm', 18, 1, 'x'};
    CHECK_EQ(unpack_request(bare, sizeof(bare)), FL_OK);
    CHECK_EQ(request_out.id, 5);
    CHECK(same_float(request_out.as.generate.sampling.top_p, 1.f));
}

static void test_other_requests(void)
{
    struct fl_client_request in = make(FL_REQUEST_CANCEL);
    in.as.cancel.id = 44;
    request_round_trip(&in);
    CHECK_EQ(request_out.as.cancel.id, 44);

    in = make(FL_REQUEST_TOKENIZE);
    in.as.tokenize = (struct fl_tokenize){
        .model = "m", .text = text("a\0b", 3), .special = true, .no_bos = true};
    request_round_trip(&in);
    CHECK(strcmp(request_out.as.tokenize.model, "m") == 0);
    CHECK(same_text(request_out.as.tokenize.text, in.as.tokenize.text));
    CHECK(request_out.as.tokenize.special && request_out.as.tokenize.no_bos);

    static const enum fl_request_kind by_model[] = {FL_REQUEST_PLAN, FL_REQUEST_LOAD,
                                                    FL_REQUEST_UNLOAD};
    for (size_t i = 0; i < 3; i++) {
        in = make(by_model[i]);
        in.as.by_model.model = "tiny llama (new)";
        request_round_trip(&in);
        CHECK(strcmp(request_out.as.by_model.model, in.as.by_model.model) == 0);
    }
    in = make(FL_REQUEST_MODELS);
    request_round_trip(&in);
    in = make(FL_REQUEST_STATUS);
    request_round_trip(&in);
    in = make(FL_REQUEST_TIMELINE);
    in.as.timeline.id = UINT64_MAX;
    request_round_trip(&in);
    CHECK(request_out.as.timeline.id == UINT64_MAX);
}

static void test_bad_input(void)
{
    struct fl_client_request in = good_generate();
    in.as.generate.prompt = (struct fl_text){0};
    request_refused(&in, "none of prompt, tokens and messages");
    in = good_generate();
    uint32_t tokens[] = {FL_VOCABULARY_MAX};
    in.as.generate.tokens = tokens;
    in.as.generate.token_count = 1;
    request_refused(&in, "token 1048576");
    tokens[0] = 1;
    request_refused(&in, "more than one of prompt");
    in = good_generate();
    in.as.generate.prompt = text("abc\xc3", 4);
    request_refused(&in, "prompt is not UTF-8 at byte 3 (0xc3)");
    in.as.generate.prompt = text("\xed\xa0\x80", 3);
    request_refused(&in, "prompt is not UTF-8 at byte 0");
    struct fl_chat_message message = {"tool", {"x", 1}};
    in = good_generate();
    in.as.generate.prompt = (struct fl_text){0};
    in.as.generate.messages = &message;
    in.as.generate.message_count = 1;
    request_refused(&in, "role 'tool'");
    message = (struct fl_chat_message){"user", {"\x80", 1}};
    request_refused(&in, "content is not UTF-8");
}

static void test_a_prompt_has_a_limit(void)
{
    static char long_text[FL_PROMPT_SIZE_MAX + 1];
    memset(long_text, 'x', sizeof(long_text));
    struct fl_client_request in = good_generate();
    in.as.generate.prompt = text(long_text, FL_PROMPT_SIZE_MAX);
    request_round_trip(&in);
    in.as.generate.prompt = text(long_text, FL_PROMPT_SIZE_MAX + 1);
    request_refused(&in, "prompt has 1048577 bytes, the limit is 1048576");
    /* All messages of a conversation together. */
    struct fl_chat_message messages[] = {{"user", {long_text, FL_PROMPT_SIZE_MAX}},
                                         {"assistant", {"x", 1}}};
    in.as.generate.prompt = (struct fl_text){0};
    in.as.generate.messages = messages;
    in.as.generate.message_count = 2;
    request_refused(&in, "more than 1048576 bytes together");
    in.as.generate.message_count = 1;
    request_round_trip(&in);
}

/* With just the memory a coordinator keeps for such a request. */
static fl_status unpack_tightly(size_t size)
{
    struct fl_arena arena;
    CHECK(fl_client_request_arena(size) <= sizeof(arena_memory));
    fl_arena_init(&arena, arena_memory, fl_client_request_arena(size));
    return fl_client_request_unpack(packed, size, &arena, &request_out);
}

static void test_counts_have_limits_that_are_named(void)
{
    static struct fl_chat_message messages[3000];
    struct fl_client_request in = good_generate();
    for (size_t i = 0; i < sizeof(messages) / sizeof(messages[0]); i++) {
        messages[i] = (struct fl_chat_message){"user", {"a", i % 2}};
    }
    in.as.generate.prompt = (struct fl_text){0};
    in.as.generate.messages = messages;
    for (uint32_t count = 1; count <= FL_CHAT_MESSAGE_MAX; count = 2 * count) {
        in.as.generate.message_count = count;
        CHECK_EQ(unpack_tightly(pack_request(&in)), FL_OK);
        CHECK_EQ(request_out.as.generate.message_count, count);
    }
    in.as.generate.message_count = FL_CHAT_MESSAGE_MAX + 1;
    request_refused(&in, "has 1025 messages, the limit is 1024");
    in.as.generate.message_count = 3000;
    request_refused(&in, "has 3000 messages, the limit is 1024");
    CHECK_EQ(unpack_tightly(pack_request(&in)), FL_INVALID);
}

static void test_stops_by_the_thousand(void)
{
    struct fl_client_request in = good_generate();
    in.as.generate.stop_count = 0;
    const size_t before = pack_request(&in);
    /* The request is the last field, and a length of two bytes is its first. */
    size_t size = before;
    size_t at = 0;
    while (!(packed[at] == 0x1a && at + 2 + packed[at + 1] == before)) {
        CHECK(at++ < before);
    }
    const size_t inside = before - at - 2;
    memmove(packed + at + 4, packed + at + 2, inside);
    size += 2;
    for (uint32_t i = 0; i < 9000; i++) {
        memcpy(packed + size, "Z\001x", 3);
        size += 3;
    }
    const size_t length = size - at - 4;
    packed[at + 1] = (unsigned char)(0x80 | (length & 0x7f));
    packed[at + 2] = (unsigned char)(0x80 | (length >> 7 & 0x7f));
    packed[at + 3] = (unsigned char)(length >> 14);
    CHECK_EQ(unpack_tightly(size), FL_INVALID);
    CHECK(request_out.id == in.id);
    CHECK(strstr(fl_last_error(), "9000 stop texts, the limit is 8") != NULL);
}

static void test_unknown_fields_by_the_thousand(void)
{
    struct fl_client_request in = make(FL_REQUEST_STATUS);
    size_t size = pack_request(&in);
    for (uint32_t i = 0; i < 200000; i++) {
        memcpy(packed + size, "\xf8\x07\x01", 3);
        size += 3;
    }
    struct fl_arena arena;
    fl_arena_init(&arena, arena_memory, sizeof(arena_memory));
    CHECK_EQ(fl_client_request_unpack(packed, size, &arena, &request_out), FL_PROTOCOL);
    CHECK(strstr(fl_last_error(), "too many parts") != NULL);
}

static void test_bad_fields(void)
{
    struct fl_client_request in = good_generate();
    in.as.generate.model = "";
    request_refused(&in, "model is empty");
    in.as.generate.model = "../secret";
    request_refused(&in, "'../secret'");
    in.as.generate.model = "a\nb";
    request_refused(&in, "model");
    in = good_generate();
    in.as.generate.stops[0] = text("", 0);
    request_refused(&in, "stop 0 is empty");
    in.as.generate.stops[0] = text("\xff", 1);
    request_refused(&in, "stop is not UTF-8");
    static char big[FL_STOP_STRING_SIZE_MAX + 1];
    memset(big, 'x', sizeof(big));
    in.as.generate.stops[0] = text(big, sizeof(big));
    request_refused(&in, "stop has 257 bytes, the limit is 256");
    in = good_generate();
    in.as.generate.chat_template = "a-name-that-is-much-too-long-for-a-family";
    request_refused(&in, "chat_template");
    in = good_generate();
    in.as.generate.sampling.temperature = __builtin_nanf("");
    request_refused(&in, "temperature");
    in = good_generate();
    in.as.generate.sampling.top_p = 1.5f;
    request_refused(&in, "top_p 1.5 is outside 0 to 1");
    in = good_generate();
    in.as.generate.sampling.logprobs = 1000;
    request_refused(&in, "logprobs 1000");
    in = make(FL_REQUEST_LOAD);
    in.as.by_model.model = ".hidden";
    request_refused(&in, "model");
}

static void test_version(void)
{
    struct fl_client_request in = make(FL_REQUEST_STATUS);
    in.version = 2;
    const size_t size = pack_request(&in);
    CHECK_EQ(unpack_request(packed, size), FL_UNSUPPORTED);
    CHECK(request_out.id == in.id);
    CHECK(strstr(fl_last_error(), "version 2") != NULL);
    /* An id and a version, and nothing to do. */
    static const unsigned char bare[] = {8, 1, 16, 5};
    CHECK_EQ(unpack_request(bare, sizeof(bare)), FL_INVALID);
    CHECK_EQ(request_out.id, 5);
    CHECK(strstr(fl_last_error(), "no kind") != NULL);
    CHECK_EQ(unpack_request("GET / HTTP/1.1\r\n", 16), FL_PROTOCOL);
    CHECK_EQ(unpack_request("", 0), FL_PROTOCOL);
}

/* ---- events ---- */

static struct fl_stage_summary stages[] = {
    {"a", 0, 9, UINT64_C(1) << 33, 5, 6},
    {"b", 10, 10, 1, 2, 3},
};
static struct fl_top tops[] = {{0, 20.25f}, {7, -1e-8f}};

static bool same_stages(const struct fl_stage_summary *got, uint32_t count)
{
    bool same = count == 2;
    for (uint32_t i = 0; same && i < count; i++) {
        same = strcmp(got[i].node, stages[i].node) == 0 &&
               got[i].first_layer == stages[i].first_layer &&
               got[i].last_layer == stages[i].last_layer &&
               got[i].shard_bytes == stages[i].shard_bytes &&
               got[i].kv_bytes == stages[i].kv_bytes &&
               got[i].memory_budget == stages[i].memory_budget;
    }
    return same;
}

static struct fl_client_event event(enum fl_event_kind kind)
{
    return (struct fl_client_event){.id = 1000 + (uint64_t)kind, .kind = kind};
}

static struct fl_phase_summary phases[] = {
    {"read", 3.5, 10.25, UINT64_C(1) << 40},
    {"prefill", 1, 0, 0},
};

static struct fl_client_event good_timeline(void)
{
    static struct fl_segment_summary segments[] = {
        {"queue", "coordinator", "busy with other requests", 0, 1.5, 0},
        {"read", "box-1", "", 1.5, 3, 4096},
    };
    static struct fl_timeline_node nodes[] = {
        {"box-1", true, -12.5, 3.25, true, 0.25, 1, 1000, 900, "buffered", 40, 7, 2400, 3600, 5}};
    static struct fl_timeline_span spans[] = {{"prefill", "box-1", "compute", "", "weights",
                                               "layer 3 attention", -1, 2.5, 3.5, -0.5, 6, 7, 8,
                                               9}};
    struct fl_client_event in = event(FL_EVENT_TIMELINE);
    in.as.timeline = (struct fl_timeline){.id = 7,
                                          .model = "m",
                                          .class_ = FL_CLASS_COLD,
                                          .ttft_ms = 4.5,
                                          .predicted_ms = 4,
                                          .prompt_tokens = 16,
                                          .complete = true,
                                          .segment_count = 2,
                                          .segments = segments,
                                          .phase_count = 2,
                                          .phases = phases,
                                          .node_count = 1,
                                          .nodes = nodes,
                                          .span_count = 1,
                                          .spans = spans};
    return in;
}

static bool same_phases(const struct fl_phase_summary *got, uint32_t count)
{
    bool same = count == 2;
    for (uint32_t i = 0; same && i < count; i++) {
        same = strcmp(got[i].phase, phases[i].phase) == 0 &&
               got[i].exposed_ms == phases[i].exposed_ms &&
               got[i].hidden_ms == phases[i].hidden_ms && got[i].bytes == phases[i].bytes;
    }
    return same;
}

static struct fl_client_event good_done(void)
{
    struct fl_client_event in = event(FL_EVENT_DONE);
    in.as.done.finish = FL_FINISH_CANCELLED;
    in.as.done.class_ = FL_CLASS_PARTIAL;
    in.as.done.prompt_tokens = 1;
    in.as.done.cached_tokens = 2;
    in.as.done.output_tokens = 3;
    in.as.done.ttft_ms = 12.125;
    in.as.done.timeline_id = 77;
    in.as.done.predicted_ms = 11.5;
    in.as.done.phase_count = 2;
    in.as.done.phases = phases;
    in.as.done.decode_tok_s = 99.5;
    in.as.done.stage_count = 2;
    in.as.done.stages = stages;
    in.as.done.logit_count = 2;
    in.as.done.logits = tops;
    return in;
}

static void test_done(void)
{
    const struct fl_client_event in = good_done();
    event_round_trip(&in);
    CHECK_EQ(event_out.as.done.finish, FL_FINISH_CANCELLED);
    CHECK_EQ(event_out.as.done.class_, FL_CLASS_PARTIAL);
    CHECK_EQ(event_out.as.done.prompt_tokens, 1);
    CHECK_EQ(event_out.as.done.cached_tokens, 2);
    CHECK_EQ(event_out.as.done.output_tokens, 3);
    CHECK(event_out.as.done.ttft_ms == 12.125);
    CHECK_EQ(event_out.as.done.timeline_id, 77);
    CHECK(event_out.as.done.predicted_ms == 11.5);
    CHECK(same_phases(event_out.as.done.phases, event_out.as.done.phase_count));
    CHECK(event_out.as.done.decode_tok_s == 99.5);
    CHECK(same_stages(event_out.as.done.stages, event_out.as.done.stage_count));
    CHECK_EQ(event_out.as.done.logit_count, 2);
    CHECK(memcmp(event_out.as.done.logits, tops, sizeof(tops)) == 0);
}

static struct fl_client_event good_text(void)
{
    static struct fl_token_detail tokens[] = {{5, -0.25f, 2, tops}, {6, -1.f, 0, NULL}};
    struct fl_client_event in = event(FL_EVENT_TEXT);
    in.as.text.text = text("\0\xe2\x82\xac", 4);
    in.as.text.token_count = 2;
    in.as.text.tokens = tokens;
    return in;
}

static void test_text(void)
{
    const struct fl_client_event in = good_text();
    event_round_trip(&in);
    CHECK(same_text(event_out.as.text.text, in.as.text.text));
    CHECK_EQ(event_out.as.text.token_count, 2);
    CHECK_EQ(event_out.as.text.tokens[0].id, 5);
    CHECK(same_float(event_out.as.text.tokens[0].logprob, -0.25f));
    CHECK_EQ(event_out.as.text.tokens[0].top_count, 2);
    CHECK(memcmp(event_out.as.text.tokens[0].top, tops, sizeof(tops)) == 0);
    CHECK_EQ(event_out.as.text.tokens[1].id, 6);
    CHECK_EQ(event_out.as.text.tokens[1].top_count, 0);
}

static void test_course(void)
{
    struct fl_client_event in = event(FL_EVENT_ADMITTED);
    in.as.admitted.class_ = FL_CLASS_WARM;
    in.as.admitted.prompt_tokens = 11;
    in.as.admitted.cached_tokens = 12;
    in.as.admitted.stage_count = 2;
    in.as.admitted.stages = stages;
    event_round_trip(&in);
    CHECK_EQ(event_out.as.admitted.class_, FL_CLASS_WARM);
    CHECK_EQ(event_out.as.admitted.prompt_tokens, 11);
    CHECK_EQ(event_out.as.admitted.cached_tokens, 12);
    CHECK(same_stages(event_out.as.admitted.stages, event_out.as.admitted.stage_count));

    in = event(FL_EVENT_PROGRESS);
    in.as.progress.phase = "queue";
    in.as.progress.cause = "2 requests before this one";
    in.as.progress.bytes_done = 3;
    in.as.progress.bytes_total = UINT64_C(1) << 40;
    event_round_trip(&in);
    CHECK(strcmp(event_out.as.progress.phase, "queue") == 0);
    CHECK(strcmp(event_out.as.progress.cause, in.as.progress.cause) == 0);
    CHECK_EQ(event_out.as.progress.bytes_done, 3);
    CHECK_EQ(event_out.as.progress.bytes_total, UINT64_C(1) << 40);

    in = event(FL_EVENT_ERROR);
    in.as.error.code = FL_NODE_LOST;
    in.as.error.text = "node box-2 is lost";
    in.as.error.retry_ms = 1000;
    event_round_trip(&in);
    CHECK_EQ(event_out.as.error.code, FL_NODE_LOST);
    CHECK(strcmp(event_out.as.error.text, in.as.error.text) == 0);
    CHECK_EQ(event_out.as.error.retry_ms, 1000);

    in = event(FL_EVENT_LOADED);
    event_round_trip(&in);
    in = event(FL_EVENT_UNLOADED);
    event_round_trip(&in);

    uint32_t ids[] = {1, 0, UINT32_MAX};
    in = event(FL_EVENT_TOKENS);
    in.as.tokens.count = 3;
    in.as.tokens.ids = ids;
    event_round_trip(&in);
    CHECK_EQ(event_out.as.tokens.count, 3);
    CHECK(memcmp(event_out.as.tokens.ids, ids, sizeof(ids)) == 0);
}

static void test_models_and_plan(void)
{
    struct fl_model_summary models[] = {{"a b", UINT64_C(1) << 35, "llama", "", true},
                                        {"broken", 3, "", "the file ends at byte 3", false}};
    struct fl_client_event in = event(FL_EVENT_MODELS);
    in.as.models.count = 2;
    in.as.models.models = models;
    event_round_trip(&in);
    CHECK_EQ(event_out.as.models.count, 2);
    for (size_t i = 0; i < 2; i++) {
        const struct fl_model_summary *got = &event_out.as.models.models[i];
        CHECK(strcmp(got->name, models[i].name) == 0);
        CHECK(got->bytes == models[i].bytes);
        CHECK(strcmp(got->architecture, models[i].architecture) == 0);
        CHECK(strcmp(got->problem, models[i].problem) == 0);
        CHECK_EQ(got->loaded, models[i].loaded);
    }
    in = event(FL_EVENT_PLAN);
    in.as.plan.model = "m";
    in.as.plan.total_bytes = 77;
    in.as.plan.context = 2048;
    in.as.plan.kv_positions = 4096;
    in.as.plan.stage_count = 2;
    in.as.plan.stages = stages;
    in.as.plan.note = "box-3 left out: 10 MiB free";
    event_round_trip(&in);
    CHECK(strcmp(event_out.as.plan.model, "m") == 0);
    CHECK_EQ(event_out.as.plan.total_bytes, 77);
    CHECK_EQ(event_out.as.plan.context, 2048);
    CHECK_EQ(event_out.as.plan.kv_positions, 4096);
    CHECK(same_stages(event_out.as.plan.stages, event_out.as.plan.stage_count));
    CHECK(strcmp(event_out.as.plan.note, in.as.plan.note) == 0);
}

static struct fl_client_event good_status(void)
{
    static struct fl_node_summary nodes[] = {
        {"a", "ready", "127.0.0.1:1", "avx512", 8, 1, 2, 0.125, true, -9e15, 3.5, 34000},
        {.name = "b", .state = "lost", .address = "", .isa = ""}};
    static struct fl_plan_stage_summary parts[] = {{"a", 0, 3, 4, 5, 6, 7}};
    static struct fl_loaded_summary loaded[] = {{"m", "loading", 1, 2, 3, 4, 5, 6, 1, parts}};
    struct fl_client_event in = event(FL_EVENT_STATUS);
    in.as.status.version = "0.1.0";
    in.as.status.uptime_s = 3600.5;
    in.as.status.node_count = 2;
    in.as.status.nodes = nodes;
    in.as.status.loaded_count = 1;
    in.as.status.loaded = loaded;
    return in;
}

static void test_status(void)
{
    const struct fl_client_event in = good_status();
    event_round_trip(&in);
    CHECK(strcmp(event_out.as.status.version, "0.1.0") == 0);
    CHECK(event_out.as.status.uptime_s == 3600.5);
    CHECK_EQ(event_out.as.status.node_count, 2);
    const struct fl_node_summary *node = event_out.as.status.nodes;
    CHECK(strcmp(node->name, "a") == 0);
    CHECK(strcmp(node->state, "ready") == 0);
    CHECK(strcmp(node->address, "127.0.0.1:1") == 0);
    CHECK(strcmp(node->isa, "avx512") == 0);
    CHECK_EQ(node->threads, 8);
    CHECK_EQ(node->memory_budget, 1);
    CHECK_EQ(node->memory_used, 2);
    CHECK(node->heartbeat_ms == 0.125);
    CHECK(node->clock_known && node->clock_offset_us == -9e15 && node->clock_error_us == 3.5);
    CHECK(node->slept_ms == 34000);
    CHECK(strcmp(node[1].state, "lost") == 0);
    CHECK(!node[1].clock_known);
    CHECK_EQ(event_out.as.status.loaded_count, 1);
    const struct fl_loaded_summary *loaded = event_out.as.status.loaded;
    CHECK(strcmp(loaded->model, "m") == 0);
    CHECK(strcmp(loaded->state, "loading") == 0);
    CHECK_EQ(loaded->context, 1);
    CHECK_EQ(loaded->kv_blocks_total, 2);
    CHECK_EQ(loaded->kv_blocks_used, 3);
    CHECK_EQ(loaded->sequences_kept, 4);
    CHECK_EQ(loaded->requests_running, 5);
    CHECK_EQ(loaded->requests_queued, 6);
    CHECK_EQ(loaded->stage_count, 1);
    CHECK(strcmp(loaded->stages[0].node, "a") == 0);
    CHECK_EQ(loaded->stages[0].first_layer, 0);
    CHECK_EQ(loaded->stages[0].last_layer, 3);
    CHECK_EQ(loaded->stages[0].pieces_done, 4);
    CHECK_EQ(loaded->stages[0].pieces_total, 5);
    CHECK_EQ(loaded->stages[0].bytes_done, 6);
    CHECK_EQ(loaded->stages[0].bytes_total, 7);
}

static void test_timeline(void)
{
    const struct fl_client_event in = good_timeline();
    event_round_trip(&in);
    const struct fl_timeline *got = &event_out.as.timeline;
    const struct fl_timeline *want = &in.as.timeline;
    CHECK_EQ(got->id, 7);
    CHECK(strcmp(got->model, "m") == 0);
    CHECK_EQ(got->class_, FL_CLASS_COLD);
    CHECK(got->ttft_ms == 4.5 && got->predicted_ms == 4 && got->complete);
    CHECK_EQ(got->prompt_tokens, 16);
    CHECK_EQ(got->segment_count, 2);
    for (int i = 0; i < 2; i++) {
        const struct fl_segment_summary *a = &got->segments[i];
        const struct fl_segment_summary *b = &want->segments[i];
        CHECK(strcmp(a->phase, b->phase) == 0 && strcmp(a->node, b->node) == 0);
        CHECK(strcmp(a->cause, b->cause) == 0);
        CHECK(a->start_ms == b->start_ms && a->ms == b->ms && a->bytes == b->bytes);
    }
    CHECK(same_phases(got->phases, got->phase_count));
    CHECK_EQ(got->node_count, 1);
    const struct fl_timeline_node *node = got->nodes;
    CHECK(strcmp(node->node, "box-1") == 0 && strcmp(node->regime, "buffered") == 0);
    CHECK(node->clock_known && node->clock_offset_us == -12.5 && node->clock_error_us == 3.25);
    CHECK(node->residency_known && node->page_cache_before == 0.25 && node->page_cache_after == 1);
    CHECK(node->shard_bytes == 1000 && node->medium_bytes == 900);
    CHECK(node->process_ms == 40 && node->slept_ms == 7);
    CHECK(node->mhz_before == 2400 && node->mhz_after == 3600 && node->spans_lost == 5);
    CHECK_EQ(got->span_count, 1);
    const struct fl_timeline_span *span = got->spans;
    CHECK(strcmp(span->phase, "prefill") == 0 && strcmp(span->node, "box-1") == 0);
    CHECK(strcmp(span->lane, "compute") == 0 && strcmp(span->source, "") == 0);
    CHECK(strcmp(span->cause, "weights") == 0 && strcmp(span->piece, "layer 3 attention") == 0);
    CHECK(span->start_ms == -1 && span->end_ms == 2.5 && span->busy_ms == 3.5);
    CHECK(span->cause_ms == -0.5 && span->bytes == 6 && span->run == 7);
    CHECK(span->position == 8 && span->rows == 9);
}

static void test_bad_timelines(void)
{
    struct fl_client_event in = good_timeline();
    struct fl_timeline_node node = in.as.timeline.nodes[0];
    in.as.timeline.nodes = &node;
    node.page_cache_before = 1.5;
    event_refused(&in, "page_cache_before");
    in = good_timeline();
    struct fl_timeline_span span = in.as.timeline.spans[0];
    in.as.timeline.spans = &span;
    span.start_ms = __builtin_nan("");
    event_refused(&in, "span start_ms");
    span.start_ms = 0;
    span.piece = "\xff";
    event_refused(&in, "span piece");
    in = good_timeline();
    in.as.timeline.ttft_ms = -1;
    event_refused(&in, "ttft_ms");
    struct fl_phase_summary many[FL_PHASE_COUNT + 1];
    for (int i = 0; i < FL_PHASE_COUNT + 1; i++) {
        many[i] = phases[0];
    }
    in = good_done();
    in.as.done.phases = many;
    in.as.done.phase_count = FL_PHASE_COUNT + 1;
    event_refused(&in, "phase count");
}

static void test_bad_events(void)
{
    struct fl_client_event in = good_done();
    in.as.done.finish = (enum fl_finish)9;
    event_refused(&in, "finish 9");
    in = good_done();
    in.as.done.class_ = (enum fl_class)4;
    event_refused(&in, "response_class 4");
    in = good_done();
    in.as.done.ttft_ms = __builtin_nan("");
    event_refused(&in, "ttft_ms");
    in = good_done();
    in.as.done.decode_tok_s = -1;
    event_refused(&in, "decode_tok_s");
    struct fl_stage_summary upside_down = {"a", 5, 4, 0, 0, 0};
    in = good_done();
    in.as.done.stages = &upside_down;
    in.as.done.stage_count = 1;
    event_refused(&in, "last_layer 4");
    in = good_text();
    in.as.text.text = text("\xe2\x82", 2);
    event_refused(&in, "text is not UTF-8");
    in = event(FL_EVENT_PROGRESS);
    in.as.progress.bytes_done = 2;
    in.as.progress.bytes_total = 1;
    event_refused(&in, "bytes_done");
    static const unsigned char bare[] = {8, 7};
    CHECK_EQ(unpack_event(bare, sizeof(bare)), FL_PROTOCOL);
    CHECK(strstr(fl_last_error(), "request 7") != NULL);
}

/* ---- foreign bytes ---- */

static size_t pack_sample(int which)
{
    switch (which) {
    case 0: {
        const struct fl_client_request in = good_generate();
        return pack_request(&in);
    }
    case 1: {
        const struct fl_client_event in = good_done();
        return pack_event(&in);
    }
    case 2: {
        const struct fl_client_event in = good_text();
        return pack_event(&in);
    }
    case 3: {
        const struct fl_client_event in = good_timeline();
        return pack_event(&in);
    }
    default: {
        const struct fl_client_event in = good_status();
        return pack_event(&in);
    }
    }
}

static void test_cut(void)
{
    for (int which = 0; which < 5; which++) {
        const size_t size = pack_sample(which);
        for (size_t cut = 0; cut < size; cut++) {
            unsigned char *copy = malloc(cut + 1);
            memcpy(copy, packed, cut);
            const fl_status status =
                which == 0 ? unpack_request(copy, cut) : unpack_event(copy, cut);
            free(copy);
            CHECK(status != FL_OK);
        }
    }
}

static void test_bent(void)
{
    uint32_t random = 4711;
    for (int round = 0; round < 20000; round++) {
        const size_t size = pack_sample(round % 5);
        for (int flips = 0; flips < 1 + round % 3; flips++) {
            random = random * 1664525 + 1013904223;
            packed[(random >> 8) % size] ^= (unsigned char)(1U << (random & 7));
        }
        if (round % 5 == 0) {
            (void)!unpack_request(packed, size);
        } else {
            const fl_status status = unpack_event(packed, size);
            CHECK(status == FL_OK || status == FL_PROTOCOL || status == FL_NO_MEMORY);
        }
    }
}

static void test_names(void)
{
    CHECK(strcmp(fl_class_name(FL_CLASS_COLD), "cold") == 0);
    CHECK(strcmp(fl_class_name(FL_CLASS_PARTIAL), "partial") == 0);
    CHECK(strcmp(fl_class_name(FL_CLASS_WARM), "warm") == 0);
    CHECK(strcmp(fl_class_name((enum fl_class)77), "unknown") == 0);
    CHECK(strcmp(fl_finish_name(FL_FINISH_STOP), "stop") == 0);
    CHECK(strcmp(fl_finish_name(FL_FINISH_LENGTH), "length") == 0);
    CHECK(strcmp(fl_finish_name(FL_FINISH_CANCELLED), "cancelled") == 0);
    CHECK(strcmp(fl_finish_name((enum fl_finish)77), "none") == 0);
}

static const struct test_case cases[] = {
    {"client_message: generate comes back with every field, NUL in texts included", test_generate},
    {"client_message: prompt, tokens and messages each come back", test_generate_inputs},
    {"client_message: sampling left out means greedy", test_generate_defaults},
    {"client_message: the other requests come back with every field", test_other_requests},
    {"client_message: wrong inputs are refused with the request's id", test_bad_input},
    {"client_message: a prompt has a limit, all messages together too", test_a_prompt_has_a_limit},
    {"client_message: counts have limits that are named", test_counts_have_limits_that_are_named},
    {"client_message: stops by the thousand are counted before they are taken",
     test_stops_by_the_thousand},
    {"client_message: unknown fields by the thousand are refused in words",
     test_unknown_fields_by_the_thousand},
    {"client_message: wrong fields are refused by name", test_bad_fields},
    {"client_message: another version is refused by name, garbage as garbage", test_version},
    {"client_message: done comes back with every field", test_done},
    {"client_message: text comes back with every field", test_text},
    {"client_message: the other events of a request come back", test_course},
    {"client_message: models and plan come back with every field", test_models_and_plan},
    {"client_message: status comes back with every field", test_status},
    {"client_message: timeline comes back with every field", test_timeline},
    {"client_message: timelines with wrong fields are refused", test_bad_timelines},
    {"client_message: events with wrong fields are refused", test_bad_events},
    {"client_message: a message cut anywhere is refused", test_cut},
    {"client_message: bent bytes are refused or give a checked message", test_bent},
    {"client_message: names of classes and finishes", test_names},
};

TEST_MAIN(cases)
