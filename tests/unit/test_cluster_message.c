/* Cluster messages: every kind there and back, every limit, cut and bent bytes. */
#include "proto/cluster_message.h"

#include <stdbool.h>
#include <stdlib.h>

#include "tests/harness.h"

enum { ARENA_SIZE = 1 << 20, WIDTH = 64, HEAD = 32, VOCABULARY = 256, FFN = 96, LAYERS = 2 };

static unsigned char arena_memory[ARENA_SIZE];
static unsigned char scratch_memory[ARENA_SIZE];
static unsigned char packed[1 << 16];

static struct fl_cluster_message out;

static fl_status unpack(const void *data, size_t size)
{
    struct fl_arena arena;
    fl_arena_init(&arena, arena_memory, sizeof(arena_memory));
    return fl_cluster_message_unpack(data, size, &arena, &out);
}

static size_t pack(const struct fl_cluster_message *message)
{
    struct fl_arena scratch;
    fl_arena_init(&scratch, scratch_memory, sizeof(scratch_memory));
    size_t size = 0;
    CHECK_EQ(fl_cluster_message_pack(message, &scratch, packed, sizeof(packed), &size), FL_OK);
    fl_arena_reset(&scratch);
    CHECK_EQ(fl_cluster_message_size(message, &scratch), size);
    return size;
}

/* Pack, unpack into `out`. */
static void round_trip(const struct fl_cluster_message *message)
{
    const size_t size = pack(message);
    CHECK_EQ(unpack(packed, size), FL_OK);
    CHECK_EQ(out.kind, message->kind);
}

/* Pack, and see that unpacking is refused with a sentence that names `word`. */
static void refused(const struct fl_cluster_message *message, const char *word)
{
    const size_t size = pack(message);
    CHECK_EQ(unpack(packed, size), FL_PROTOCOL);
    if (strstr(fl_last_error(), word) == NULL) {
        printf("  \"%s\" does not name \"%s\"\n", fl_last_error(), word);
        CHECK(false);
    }
}

/* ---- one good message of every kind ---- */

static struct fl_address socket_address(const char *text)
{
    struct fl_address address = {.kind = FL_ADDRESS_SOCKET, .size = (uint32_t)strlen(text)};
    memcpy(address.bytes, text, address.size);
    return address;
}

static struct fl_cluster_message good_join(void)
{
    struct fl_cluster_message message = {.kind = FL_MESSAGE_JOIN};
    message.as.join = (struct fl_join){
        .name = "box-1.local_A",
        .incarnation = UINT64_C(0xfedcba9876543210),
        .address = socket_address("192.168.1.7:7412"),
        .memory_budget = UINT64_C(1) << 40,
        .threads = 16,
        .isa = "avx512",
    };
    return message;
}

static struct fl_sampling good_sampling(void)
{
    return (struct fl_sampling){
        .temperature = 0.7f,
        .top_k = 40,
        .top_p = 0.95f,
        .min_p = 0.05f,
        .repetition_penalty = 1.1f,
        .penalty_window = 64,
        .seed = UINT64_MAX,
        .top_logits = FL_TOP_MAX,
        .logprobs = 3,
    };
}

static struct fl_cluster_message good_admit(void)
{
    static uint32_t tokens[] = {1, 0, FL_VOCABULARY_MAX - 1, 77};
    struct fl_cluster_message message = {.kind = FL_MESSAGE_ADMIT};
    message.as.admit = (struct fl_admit){
        .plan_id = 3,
        .request_id = UINT64_MAX,
        .sequence_id = 9,
        .keep = 3,
        .position_max = 20,
        .prompt_count = 4,
        .max_tokens = 16,
        .token_count = 4,
        .tokens = tokens,
        .stop_count = 2,
        .stop_tokens = {0, 106},
        .sampling = good_sampling(),
    };
    return message;
}

static struct fl_cluster_message good_token(void)
{
    static struct fl_top logprobs[] = {{5, -0.5f}, {6, -1.5f}};
    static struct fl_top logits[] = {{5, 12.25f}, {7, 0.f}, {0, -3e4f}};
    struct fl_cluster_message message = {.kind = FL_MESSAGE_TOKEN};
    message.as.token = (struct fl_token){
        .plan_id = 1,
        .request_id = 2,
        .index = 3,
        .position = 400,
        .id = 5,
        .finish = FL_FINISH_LENGTH,
        .logprob = -0.5f,
        .logprob_count = 2,
        .logprobs = logprobs,
        .logit_count = 3,
        .logits = logits,
    };
    return message;
}

static struct fl_cluster_message good_spans(void)
{
    static struct fl_span spans[] = {
        {.start_ns = 5,
         .end_ns = UINT64_MAX,
         .busy_ns = 7,
         .plan_id = 1,
         .request_id = 2,
         .run = 3,
         .bytes = UINT64_C(1) << 40,
         .cause_ns = 4,
         .piece = 0,
         .position = 8,
         .rows = 9,
         .phase = FL_PHASE_PREFILL,
         .lane = FL_LANE_COMPUTE,
         .source = FL_SOURCE_SHARD_CACHE,
         .cause = FL_CAUSE_KV},
        {.piece = FL_SPAN_NO_PIECE},
    };
    struct fl_cluster_message message = {.kind = FL_MESSAGE_SPANS};
    message.as.spans = (struct fl_spans){
        .plan_id = 1,
        .request_id = 2,
        .last = true,
        .lost = 3,
        .start = {.exec_ns = 4,
                  .ready_ns = 5,
                  .shard_bytes = 100,
                  .residency_known = true,
                  .page_cache_before = 6,
                  .page_cache_after = 100,
                  .medium_bytes = 7,
                  .direct = true,
                  .mhz_before = 2400,
                  .mhz_after = 3600},
        .span_count = 2,
        .spans = spans,
    };
    return message;
}

static struct fl_cluster_message good_fetch(void)
{
    static struct fl_range ranges[] = {{UINT64_C(5) << 32, 4096}, {0, FL_FETCH_SIZE_MAX - 4096}};
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FETCH};
    message.as.fetch = (struct fl_fetch){
        .transfer_id = 11,
        .model = "SmolLM2 (135M)",
        .identity = "0123456789abcde",
        .file = FL_FILE_COUNT_MAX - 1,
        .range_count = 2,
        .ranges = ranges,
    };
    return message;
}

/* Tensors of a small llama: vectors are F32, matrices Q8_0. */
static struct fl_tensor_ref tensor(enum fl_tensor_role role, uint32_t rows, uint32_t columns)
{
    const uint64_t size = rows == 1 ? UINT64_C(4) * columns : (uint64_t)rows * columns / 32 * 34;
    return (struct fl_tensor_ref){
        .role = role,
        .dtype = rows == 1 ? FL_DTYPE_F32 : FL_DTYPE_Q8_0,
        .rows = rows,
        .columns = columns,
        .offset = 4096 + 32768 * (uint64_t)role,
        .size = size,
    };
}

static struct fl_piece attention_piece(uint32_t layer)
{
    return (struct fl_piece){
        .kind = FL_PIECE_ATTENTION,
        .layer = layer,
        .tensor_count = 5,
        .tensors = {tensor(FL_ROLE_ATTN_NORM, 1, WIDTH), tensor(FL_ROLE_ATTN_Q, WIDTH, WIDTH),
                    tensor(FL_ROLE_ATTN_K, HEAD, WIDTH), tensor(FL_ROLE_ATTN_V, HEAD, WIDTH),
                    tensor(FL_ROLE_ATTN_OUTPUT, WIDTH, WIDTH)},
    };
}

static struct fl_piece ffn_piece(uint32_t layer)
{
    return (struct fl_piece){
        .kind = FL_PIECE_FFN,
        .layer = layer,
        .tensor_count = 4,
        .tensors = {tensor(FL_ROLE_FFN_NORM, 1, WIDTH), tensor(FL_ROLE_FFN_GATE, FFN, WIDTH),
                    tensor(FL_ROLE_FFN_UP, FFN, WIDTH), tensor(FL_ROLE_FFN_DOWN, WIDTH, FFN)},
    };
}

static struct fl_model_shape good_shape(void)
{
    struct fl_model_shape shape = {
        .architecture = FL_ARCHITECTURE_LLAMA,
        .layer_count = LAYERS,
        .width = WIDTH,
        .head_size = HEAD,
        .vocabulary = VOCABULARY,
        .context = 2048,
        .rope_dim = HEAD,
        .norm_epsilon = 1e-5f,
        .embedding_scale = 1.f,
        .attention_scale = 0.17677669f,
        .rope = {.freq_base = 1e5f,
                 .scaling = FL_ROPE_LINEAR,
                 .factor = 4.f,
                 .attention_factor = 1.25f,
                 .original_context = 512,
                 .yarn_beta_fast = 32.f,
                 .yarn_beta_slow = 1.f},
        .rope_local = {.freq_base = 1e4f,
                       .factor = 1.f,
                       .yarn_beta_fast = 32.f,
                       .yarn_beta_slow = 1.f},
    };
    for (uint32_t i = 0; i < LAYERS; i++) {
        shape.head_count[i] = 2;
        shape.head_count_kv[i] = 1;
        shape.ffn_width[i] = FFN;
    }
    return shape;
}

/* The plan for the second of two stages: layer 1 and the head. */
static struct fl_cluster_message good_plan(void)
{
    static struct fl_stage stages[2];
    static struct fl_piece pieces[3];
    stages[0] = (struct fl_stage){
        .node = "a",
        .incarnation = 1,
        .address = socket_address("[::1]:1"),
        .layer_count = 1,
        .has_embed = true,
    };
    stages[1] = (struct fl_stage){
        .node = "b",
        .incarnation = 2,
        .address = {.kind = FL_ADDRESS_WORKER, .size = FL_ADDRESS_MAX},
        .layer_first = 1,
        .layer_count = 1,
        .has_head = true,
    };
    pieces[0] = attention_piece(1);
    pieces[1] = ffn_piece(1);
    pieces[2] = (struct fl_piece){
        .kind = FL_PIECE_HEAD,
        .tensor_count = 2,
        .tensors = {tensor(FL_ROLE_OUTPUT_NORM, 1, WIDTH),
                    tensor(FL_ROLE_OUTPUT, VOCABULARY, WIDTH)},
    };
    struct fl_cluster_message message = {.kind = FL_MESSAGE_PLAN};
    message.as.plan = (struct fl_plan){
        .plan_id = 7,
        .stage_index = 1,
        .stage_count = 2,
        .stages = stages,
        .manifest = {.name = "tiny",
                     .identity = "fedcba987654321",
                     .shape = good_shape(),
                     .file_count = 2,
                     .files = {{.size = UINT64_C(6) << 32}, {.size = 1 << 20}},
                     .piece_count = 3,
                     .pieces = pieces},
        .chunk_rows = 256,
        .context = 2048,
        .kv_block_count = 64,
        .sequence_max = 8,
        .activations_f32 = true,
        .no_overlap = true,
    };
    return message;
}

static struct fl_cluster_message good_small(enum fl_message_kind kind)
{
    struct fl_cluster_message message = {.kind = kind};
    if (kind == FL_MESSAGE_WELCOME) {
        message.as.welcome.coordinator = 99;
    } else if (kind == FL_MESSAGE_UNPLAN) {
        message.as.unplan.plan_id = 4;
    } else if (kind == FL_MESSAGE_END) {
        message.as.end = (struct fl_end){.plan_id = 4, .request_id = 5, .keep = 6};
    } else if (kind == FL_MESSAGE_DROP) {
        message.as.drop = (struct fl_drop){.plan_id = 4, .sequence_id = 5};
    } else if (kind == FL_MESSAGE_PROGRESS) {
        message.as.progress = (struct fl_progress){4, 5, 6, 7, 8, 9, 10, 11};
    } else if (kind == FL_MESSAGE_FAILURE) {
        message.as.failure = (struct fl_failure){
            .plan_id = 4, .request_id = 5, .code = FL_IO, .text = "disk f\xc3\xbcll"};
    } else if (kind == FL_MESSAGE_LINK) {
        message.as.link = (struct fl_link){.plan_id = 4, .from_stage = 5, .incarnation = 6};
    } else if (kind == FL_MESSAGE_TRACE) {
        message.as.trace = (struct fl_trace){.plan_id = 4, .request_id = 5};
    } else {
        message.as.credit = (struct fl_credit){.plan_id = 4, .rows = 5};
    }
    return message;
}

static struct fl_cluster_message good(enum fl_message_kind kind)
{
    switch (kind) {
    case FL_MESSAGE_JOIN: return good_join();
    case FL_MESSAGE_PLAN: return good_plan();
    case FL_MESSAGE_ADMIT: return good_admit();
    case FL_MESSAGE_TOKEN: return good_token();
    case FL_MESSAGE_FETCH: return good_fetch();
    case FL_MESSAGE_WELCOME:
    case FL_MESSAGE_UNPLAN:
    case FL_MESSAGE_END:
    case FL_MESSAGE_DROP:
    case FL_MESSAGE_PROGRESS:
    case FL_MESSAGE_FAILURE:
    case FL_MESSAGE_LINK:
    case FL_MESSAGE_TRACE:
    case FL_MESSAGE_CREDIT: return good_small(kind);
    case FL_MESSAGE_SPANS: return good_spans();
    }
    return (struct fl_cluster_message){0};
}

static bool same_address(const struct fl_address *a, const struct fl_address *b)
{
    return a->kind == b->kind && a->size == b->size && memcmp(a->bytes, b->bytes, a->size) == 0;
}

static bool same_top(const struct fl_top *a, const struct fl_top *b, uint32_t count)
{
    return memcmp(a, b, count * sizeof(*a)) == 0;
}

/* ---- there and back ---- */

static void test_join(void)
{
    const struct fl_cluster_message in = good_join();
    round_trip(&in);
    CHECK(strcmp(out.as.join.name, in.as.join.name) == 0);
    CHECK(out.as.join.incarnation == in.as.join.incarnation);
    CHECK(same_address(&out.as.join.address, &in.as.join.address));
    CHECK(out.as.join.memory_budget == in.as.join.memory_budget);
    CHECK_EQ(out.as.join.threads, 16);
    CHECK(strcmp(out.as.join.isa, "avx512") == 0);
}

static void test_admit(void)
{
    const struct fl_cluster_message in = good_admit();
    round_trip(&in);
    const struct fl_admit *admit = &out.as.admit;
    CHECK_EQ(admit->plan_id, 3);
    CHECK(admit->request_id == UINT64_MAX);
    CHECK_EQ(admit->sequence_id, 9);
    CHECK_EQ(admit->keep, 3);
    CHECK_EQ(admit->position_max, 20);
    CHECK_EQ(admit->prompt_count, 4);
    CHECK_EQ(admit->max_tokens, 16);
    CHECK_EQ(admit->token_count, 4);
    CHECK(memcmp(admit->tokens, in.as.admit.tokens, 4 * sizeof(uint32_t)) == 0);
    CHECK_EQ(admit->stop_count, 2);
    CHECK_EQ(admit->stop_tokens[0], 0);
    CHECK_EQ(admit->stop_tokens[1], 106);
    const struct fl_sampling want = good_sampling();
    const struct fl_sampling *got = &admit->sampling;
    CHECK(memcmp(&got->temperature, &want.temperature, sizeof(float)) == 0);
    CHECK_EQ(got->top_k, want.top_k);
    CHECK(memcmp(&got->top_p, &want.top_p, sizeof(float)) == 0);
    CHECK(memcmp(&got->min_p, &want.min_p, sizeof(float)) == 0);
    CHECK(memcmp(&got->repetition_penalty, &want.repetition_penalty, sizeof(float)) == 0);
    CHECK_EQ(got->penalty_window, want.penalty_window);
    CHECK(got->seed == want.seed);
    CHECK_EQ(got->top_logits, want.top_logits);
    CHECK_EQ(got->logprobs, want.logprobs);
}

static void test_token(void)
{
    const struct fl_cluster_message in = good_token();
    round_trip(&in);
    const struct fl_token *token = &out.as.token;
    CHECK_EQ(token->plan_id, 1);
    CHECK_EQ(token->request_id, 2);
    CHECK_EQ(token->index, 3);
    CHECK_EQ(token->position, 400);
    CHECK_EQ(token->id, 5);
    CHECK_EQ(token->finish, FL_FINISH_LENGTH);
    CHECK(memcmp(&token->logprob, &in.as.token.logprob, sizeof(float)) == 0);
    CHECK_EQ(token->logprob_count, 2);
    CHECK(same_top(token->logprobs, in.as.token.logprobs, 2));
    CHECK_EQ(token->logit_count, 3);
    CHECK(same_top(token->logits, in.as.token.logits, 3));
}

static void test_spans(void)
{
    const struct fl_cluster_message in = good_spans();
    round_trip(&in);
    const struct fl_spans *got = &out.as.spans;
    CHECK_EQ(got->plan_id, 1);
    CHECK_EQ(got->request_id, 2);
    CHECK(got->last);
    CHECK_EQ(got->lost, 3);
    CHECK_EQ(got->start.exec_ns, 4);
    CHECK_EQ(got->start.ready_ns, 5);
    CHECK_EQ(got->start.shard_bytes, 100);
    CHECK(got->start.residency_known && got->start.direct);
    CHECK_EQ(got->start.page_cache_before, 6);
    CHECK_EQ(got->start.page_cache_after, 100);
    CHECK_EQ(got->start.medium_bytes, 7);
    CHECK_EQ(got->start.mhz_before, 2400);
    CHECK_EQ(got->start.mhz_after, 3600);
    CHECK_EQ(got->span_count, 2);
    const struct fl_span *span = &got->spans[0];
    const struct fl_span *want = &in.as.spans.spans[0];
    CHECK(span->start_ns == want->start_ns && span->end_ns == want->end_ns);
    CHECK(span->busy_ns == want->busy_ns && span->bytes == want->bytes);
    CHECK(span->plan_id == want->plan_id && span->request_id == want->request_id);
    CHECK(span->run == want->run && span->cause_ns == want->cause_ns);
    CHECK(span->piece == 0 && span->position == 8 && span->rows == 9);
    CHECK(span->phase == want->phase && span->lane == want->lane);
    CHECK(span->source == want->source && span->cause == want->cause);
    CHECK(got->spans[1].piece == FL_SPAN_NO_PIECE);
}

static void test_fetch(void)
{
    const struct fl_cluster_message in = good_fetch();
    round_trip(&in);
    const struct fl_fetch *fetch = &out.as.fetch;
    CHECK_EQ(fetch->transfer_id, 11);
    CHECK(strcmp(fetch->model, in.as.fetch.model) == 0);
    CHECK(memcmp(fetch->identity, in.as.fetch.identity, FL_IDENTITY_SIZE) == 0);
    CHECK_EQ(fetch->file, FL_FILE_COUNT_MAX - 1);
    CHECK_EQ(fetch->range_count, 2);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(fetch->ranges[i].offset == in.as.fetch.ranges[i].offset);
        CHECK_EQ(fetch->ranges[i].size, in.as.fetch.ranges[i].size);
    }
}

static void test_plan(void)
{
    const struct fl_cluster_message in = good_plan();
    round_trip(&in);
    const struct fl_plan *plan = &out.as.plan;
    const struct fl_plan *want = &in.as.plan;
    CHECK_EQ(plan->plan_id, 7);
    CHECK_EQ(plan->stage_index, 1);
    CHECK_EQ(plan->stage_count, 2);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(strcmp(plan->stages[i].node, want->stages[i].node) == 0);
        CHECK_EQ(plan->stages[i].incarnation, want->stages[i].incarnation);
        CHECK(same_address(&plan->stages[i].address, &want->stages[i].address));
        CHECK_EQ(plan->stages[i].layer_first, want->stages[i].layer_first);
        CHECK_EQ(plan->stages[i].layer_count, want->stages[i].layer_count);
        CHECK_EQ(plan->stages[i].has_embed, want->stages[i].has_embed);
        CHECK_EQ(plan->stages[i].has_head, want->stages[i].has_head);
    }
    CHECK_EQ(plan->chunk_rows, 256);
    CHECK_EQ(plan->context, 2048);
    CHECK_EQ(plan->kv_block_count, 64);
    CHECK_EQ(plan->sequence_max, 8);
    CHECK(plan->activations_f32);
    CHECK(plan->no_overlap);
    CHECK(strcmp(plan->manifest.name, "tiny") == 0);
    CHECK(memcmp(plan->manifest.identity, want->manifest.identity, FL_IDENTITY_SIZE) == 0);
    /* Neither struct has padding that a copy of fields could leave different. */
    CHECK(memcmp(&plan->manifest.shape, &want->manifest.shape, sizeof(struct fl_model_shape)) == 0);
    CHECK_EQ(plan->manifest.file_count, 2);
    CHECK(plan->manifest.files[0].size == UINT64_C(6) << 32);
    CHECK(plan->manifest.files[1].size == 1 << 20);
    CHECK_EQ(plan->manifest.piece_count, 3);
    CHECK(memcmp(plan->manifest.pieces, want->manifest.pieces, 3 * sizeof(struct fl_piece)) == 0);
}

static void test_small(void)
{
    struct fl_cluster_message in = good_small(FL_MESSAGE_WELCOME);
    round_trip(&in);
    CHECK_EQ(out.as.welcome.coordinator, 99);
    in = good_small(FL_MESSAGE_UNPLAN);
    round_trip(&in);
    CHECK_EQ(out.as.unplan.plan_id, 4);
    in = good_small(FL_MESSAGE_END);
    round_trip(&in);
    CHECK_EQ(out.as.end.plan_id, 4);
    CHECK_EQ(out.as.end.request_id, 5);
    CHECK_EQ(out.as.end.keep, 6);
    in = good_small(FL_MESSAGE_DROP);
    round_trip(&in);
    CHECK_EQ(out.as.drop.plan_id, 4);
    CHECK_EQ(out.as.drop.sequence_id, 5);
    in = good_small(FL_MESSAGE_PROGRESS);
    round_trip(&in);
    CHECK(memcmp(&out.as.progress, &in.as.progress, sizeof(in.as.progress)) == 0);
    in = good_small(FL_MESSAGE_FAILURE);
    round_trip(&in);
    CHECK_EQ(out.as.failure.plan_id, 4);
    CHECK_EQ(out.as.failure.request_id, 5);
    CHECK_EQ(out.as.failure.code, FL_IO);
    CHECK(strcmp(out.as.failure.text, in.as.failure.text) == 0);
    in = good_small(FL_MESSAGE_LINK);
    round_trip(&in);
    CHECK_EQ(out.as.link.plan_id, 4);
    CHECK_EQ(out.as.link.from_stage, 5);
    CHECK_EQ(out.as.link.incarnation, 6);
    in = good_small(FL_MESSAGE_CREDIT);
    round_trip(&in);
    CHECK_EQ(out.as.credit.plan_id, 4);
    CHECK_EQ(out.as.credit.rows, 5);
}

/* ---- refused ---- */

static void test_bad_join(void)
{
    struct fl_cluster_message in = good_join();
    in.as.join.name[0] = '\0';
    refused(&in, "node name");
    in = good_join();
    in.as.join.name[2] = '/';
    refused(&in, "node name");
    in = good_join();
    memset(in.as.join.name, 'a', sizeof(in.as.join.name)); /* no NUL: one byte too long */
    refused(&in, "node name");
    in = good_join();
    in.as.join.address.size = 0;
    refused(&in, "address size");
    in = good_join();
    in.as.join.address.kind = (enum fl_address_kind)4;
    refused(&in, "address kind");
    in = good_join();
    in.as.join.address.bytes[3] = '\0';
    refused(&in, "NUL");
    in = good_join();
    in.as.join.threads = 0;
    refused(&in, "threads");
    in = good_join();
    in.as.join.incarnation = 0;
    refused(&in, "incarnation");
    in = good_join();
    memset(in.as.join.isa, 'x', sizeof(in.as.join.isa));
    refused(&in, "isa");
}

static void test_bad_admit(void)
{
    struct fl_cluster_message in = good_admit();
    in.as.admit.keep = 4;
    refused(&in, "keep");
    in = good_admit();
    in.as.admit.position_max = 3;
    refused(&in, "position_max");
    in = good_admit();
    in.as.admit.position_max = FL_CONTEXT_MAX + 1;
    refused(&in, "position_max");
    in = good_admit();
    in.as.admit.token_count = 3;
    refused(&in, "3 tokens of a prompt of 4");
    in = good_admit();
    in.as.admit.prompt_count = 0;
    refused(&in, "prompt_count");
    in = good_admit();
    in.as.admit.max_tokens = 0;
    refused(&in, "max_tokens");
    in = good_admit();
    in.as.admit.request_id = 0;
    refused(&in, "request_id");
    in = good_admit();
    in.as.admit.stop_tokens[1] = FL_VOCABULARY_MAX;
    refused(&in, "stop token");
    static uint32_t tokens[] = {1, 2, 3, FL_VOCABULARY_MAX};
    in = good_admit();
    in.as.admit.tokens = tokens;
    refused(&in, "token 1048576");
}

static void test_bad_sampling(void)
{
    const float bad[] = {-0.5f, __builtin_nanf(""), __builtin_inff(),
                         FL_SAMPLING_FACTOR_MAX + 0.5f};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct fl_cluster_message in = good_admit();
        in.as.admit.sampling.temperature = bad[i];
        refused(&in, "temperature");
        in = good_admit();
        in.as.admit.sampling.top_p = bad[i];
        refused(&in, "top_p");
        in = good_admit();
        in.as.admit.sampling.min_p = bad[i];
        refused(&in, "min_p");
        in = good_admit();
        in.as.admit.sampling.repetition_penalty = bad[i];
        refused(&in, "repetition_penalty");
    }
    struct fl_cluster_message in = good_admit();
    in.as.admit.sampling.top_logits = FL_TOP_MAX + 1;
    refused(&in, "top_logits 129");
    in = good_admit();
    in.as.admit.sampling.logprobs = FL_TOP_MAX + 1;
    refused(&in, "logprobs");
}

static void test_bad_token(void)
{
    struct fl_cluster_message in = good_token();
    in.as.token.id = FL_VOCABULARY_MAX;
    refused(&in, "token id");
    in = good_token();
    in.as.token.finish = (enum fl_finish)4;
    refused(&in, "finish");
    in = good_token();
    in.as.token.logprob = __builtin_nanf("");
    refused(&in, "logprob");
    in = good_token();
    static struct fl_top many[FL_TOP_MAX + 1];
    in.as.token.logits = many;
    in.as.token.logit_count = FL_TOP_MAX + 1;
    refused(&in, "logits 129");
}

static void test_bad_fetch(void)
{
    static struct fl_range ranges[] = {{0, 4097}, {0, FL_FETCH_SIZE_MAX - 4096}};
    struct fl_cluster_message in = good_fetch();
    in.as.fetch.ranges = ranges;
    refused(&in, "range size");
    in = good_fetch();
    in.as.fetch.range_count = 0;
    refused(&in, "range count");
    in = good_fetch();
    in.as.fetch.file = FL_FILE_COUNT_MAX;
    refused(&in, "file 64");
    in = good_fetch();
    memcpy(in.as.fetch.model, "../etc/x", 9);
    refused(&in, "model");
    in = good_fetch();
    memcpy(in.as.fetch.model, "a\xff", 3);
    refused(&in, "UTF-8");
    static struct fl_range far[] = {{UINT64_MAX - 4, 8}};
    in = good_fetch();
    in.as.fetch.ranges = far;
    in.as.fetch.range_count = 1;
    refused(&in, "range offset");
}

static void test_bad_spans(void)
{
    static struct fl_span spans[2];
    struct fl_cluster_message in = good_spans();
    memcpy(spans, in.as.spans.spans, sizeof(spans));
    in.as.spans.spans = spans;
    spans[1].start_ns = 1;
    refused(&in, "span end");
    spans[1] = (struct fl_span){.end_ns = 5, .busy_ns = 6};
    refused(&in, "span busy time");
    spans[1] = (struct fl_span){.phase = FL_PHASE_COUNT};
    refused(&in, "span phase");
    spans[1] = (struct fl_span){.lane = FL_LANE_COUNT};
    refused(&in, "span lane");
    spans[1] = (struct fl_span){.source = FL_SOURCE_COUNT};
    refused(&in, "span source");
    spans[1] = (struct fl_span){.cause = FL_CAUSE_COUNT};
    refused(&in, "span cause");
    spans[1] = (struct fl_span){.piece = FL_PIECE_COUNT_MAX};
    refused(&in, "span piece");
    in = good_spans();
    in.as.spans.start.page_cache_before = 101;
    refused(&in, "page_cache_before");
    in = good_spans();
    in.as.spans.start.page_cache_after = 101;
    refused(&in, "page_cache_after");
    in = good_spans();
    in.as.spans.start.ready_ns = 3;
    refused(&in, "ready_ns");
    in = good_spans();
    in.as.spans.request_id = 0;
    refused(&in, "request_id");
}

static void test_bad_stages(void)
{
    struct fl_cluster_message in = good_plan();
    in.as.plan.stage_index = 0; /* then the pieces are another stage's */
    refused(&in, "piece 0 of stage 0");
    in = good_plan();
    in.as.plan.stage_index = 2;
    refused(&in, "stage_index");
    in = good_plan();
    in.as.plan.stages[1].layer_first = 0;
    refused(&in, "stage 1 begins at layer 0");
    in = good_plan();
    in.as.plan.stages[1].layer_count = 2;
    refused(&in, "stages hold 3 layers");
    in = good_plan();
    in.as.plan.stages[1].layer_count = 0;
    refused(&in, "layer_count");
    in = good_plan();
    in.as.plan.stages[0].has_head = true;
    refused(&in, "head");
    in = good_plan();
    in.as.plan.chunk_rows = FL_CHUNK_MAX + 1;
    refused(&in, "chunk_rows");
    in = good_plan();
    in.as.plan.context = 0;
    refused(&in, "context");
    in = good_plan();
    in.as.plan.kv_block_count = UINT32_MAX;
    refused(&in, "kv_block_count");
    in = good_plan();
    in.as.plan.sequence_max = 0;
    refused(&in, "sequence_max");
    in = good_plan();
    in.as.plan.plan_id = 0;
    refused(&in, "plan_id");
}

static void test_bad_manifest(void)
{
    struct fl_cluster_message in = good_plan();
    in.as.plan.manifest.piece_count = 2;
    refused(&in, "2 pieces, want 3");
    in = good_plan();
    in.as.plan.manifest.pieces[1].layer = 0;
    refused(&in, "piece 1");
    in = good_plan();
    in.as.plan.manifest.pieces[1].tensors[0].dtype = (enum fl_dtype)31;
    refused(&in, "type 31");
    in = good_plan();
    in.as.plan.manifest.pieces[1].tensors[0].role = (enum fl_tensor_role)(FL_ROLE_LAST + 1);
    refused(&in, "role");
    in = good_plan();
    in.as.plan.manifest.pieces[1].tensors[0].rows = 2;
    refused(&in, "ffn_norm");
    in = good_plan();
    in.as.plan.manifest.pieces[1].tensor_count = 0;
    refused(&in, "tensor count");
    in = good_plan();
    in.as.plan.manifest.shape.width = 0;
    refused(&in, "width");
    in = good_plan();
    in.as.plan.manifest.shape.layer_count = 0;
    refused(&in, "layer_count");
    in = good_plan();
    in.as.plan.manifest.shape.rope.factor = __builtin_nanf("");
    refused(&in, "factor");
    in = good_plan();
    in.as.plan.manifest.file_count = 0;
    refused(&in, "file count");
}

static void test_bad_small(void)
{
    struct fl_cluster_message in = good_small(FL_MESSAGE_PROGRESS);
    in.as.progress.pieces_done = in.as.progress.pieces_total + 1;
    refused(&in, "pieces_done");
    in = good_small(FL_MESSAGE_PROGRESS);
    in.as.progress.bytes_done = in.as.progress.bytes_total + 1;
    refused(&in, "bytes_done");
    in = good_small(FL_MESSAGE_FAILURE);
    in.as.failure.code = FL_OK;
    refused(&in, "failure code");
    in = good_small(FL_MESSAGE_FAILURE);
    in.as.failure.text[0] = '\x80';
    refused(&in, "UTF-8");
    in = good_small(FL_MESSAGE_LINK);
    in.as.link.from_stage = FL_STAGE_COUNT_MAX;
    refused(&in, "from_stage");
    in = good_small(FL_MESSAGE_END);
    in.as.end.keep = FL_CONTEXT_MAX + 1;
    refused(&in, "keep");
    in = good_small(FL_MESSAGE_WELCOME);
    in.as.welcome.coordinator = 0;
    refused(&in, "coordinator");
}

/* ---- foreign bytes ---- */

static void test_cut(void)
{
    for (int kind = FL_MESSAGE_JOIN; kind <= FL_MESSAGE_SPANS; kind++) {
        const struct fl_cluster_message in = good((enum fl_message_kind)kind);
        const size_t size = pack(&in);
        CHECK_EQ(unpack(packed, size), FL_OK);
        for (size_t cut = 0; cut < size; cut++) {
            /* A copy of exact size, so that the sanitizer sees a read beyond it. */
            unsigned char *copy = malloc(cut + 1);
            memcpy(copy, packed, cut);
            const fl_status status = unpack(copy, cut);
            free(copy);
            CHECK_EQ(status, FL_PROTOCOL);
        }
    }
}

static void test_bent(void)
{
    uint32_t random = 12345;
    for (int round = 0; round < 20000; round++) {
        const struct fl_cluster_message in =
            good((enum fl_message_kind)(FL_MESSAGE_JOIN + round % FL_MESSAGE_SPANS));
        const size_t size = pack(&in);
        for (int flips = 0; flips < 1 + round % 4; flips++) {
            random = random * 1664525 + 1013904223;
            packed[(random >> 8) % size] ^= (unsigned char)(1U << (random & 7));
        }
        const fl_status status = unpack(packed, size);
        CHECK(status == FL_OK || status == FL_PROTOCOL || status == FL_NO_MEMORY);
    }
}

static void test_foreign(void)
{
    CHECK_EQ(unpack("", 0), FL_PROTOCOL);
    /* A field that no kind has. */
    static const unsigned char unknown[] = {0xa2, 0x06, 0x01, 0x00};
    CHECK_EQ(unpack(unknown, sizeof(unknown)), FL_PROTOCOL);
    CHECK(strstr(fl_last_error(), "no kind") != NULL);
    /* Names with a NUL are not cut at it. */
    const struct fl_cluster_message in = good_join();
    const size_t size = pack(&in);
    unsigned char *name = memmem(packed, size, "box-1", 5);
    CHECK(name != NULL);
    name[3] = '\0';
    CHECK_EQ(unpack(packed, size), FL_PROTOCOL);
    CHECK(strstr(fl_last_error(), "NUL") != NULL);
}

static void test_limits(void)
{
    struct fl_arena arena;
    size_t size = 0;
    const struct fl_cluster_message in = good_plan();
    fl_arena_init(&arena, scratch_memory, sizeof(scratch_memory));
    CHECK_EQ(fl_cluster_message_pack(&in, &arena, packed, 100, &size), FL_TOO_LARGE);
    fl_arena_init(&arena, scratch_memory, 200);
    CHECK_EQ(fl_cluster_message_pack(&in, &arena, packed, sizeof(packed), &size), FL_NO_MEMORY);

    size = pack(&in);
    for (size_t room = 0; room < 2 * size; room += 97) {
        fl_arena_init(&arena, arena_memory, room);
        CHECK(fl_cluster_message_unpack(packed, size, &arena, &out) != FL_OK);
    }
    unsigned char *large = calloc(1, FL_CLUSTER_MESSAGE_MAX + 1);
    const fl_status status = unpack(large, FL_CLUSTER_MESSAGE_MAX + 1);
    free(large);
    CHECK_EQ(status, FL_TOO_LARGE);
}

/* A million empty ranges: refused within the arena that is always enough. */
static void test_crowd(void)
{
    const size_t count = 1000000;
    const size_t size = 2 * count + 5;
    const size_t room = (size_t)FL_CLUSTER_MESSAGE_MAX * 4;
    unsigned char *data = malloc(size);
    unsigned char *memory = malloc(room);
    data[0] = FL_MESSAGE_FETCH << 3 | 2;
    for (int i = 0; i < 4; i++) {
        data[1 + i] = (unsigned char)(((2 * count) >> (7 * i) & 0x7f) | (i < 3 ? 0x80 : 0));
    }
    for (size_t i = 0; i < count; i++) {
        data[5 + 2 * i] = 5 << 3 | 2;
        data[6 + 2 * i] = 0;
    }
    struct fl_arena arena;
    fl_arena_init(&arena, memory, room);
    const fl_status status = fl_cluster_message_unpack(data, size, &arena, &out);
    free(data);
    free(memory);
    CHECK_EQ(status, FL_PROTOCOL);
}

/* The longest prompt there can be fits the arena that is said to be enough. */
static void test_largest_prompt(void)
{
    struct fl_cluster_message in = good_admit();
    const size_t room = (size_t)FL_CLUSTER_MESSAGE_MAX * 4;
    uint32_t *tokens = malloc(FL_CONTEXT_MAX * sizeof(*tokens));
    unsigned char *data = malloc(FL_CLUSTER_MESSAGE_MAX);
    unsigned char *memory = malloc(room);
    for (uint32_t i = 0; i < FL_CONTEXT_MAX; i++) {
        tokens[i] = FL_VOCABULARY_MAX - 1;
    }
    in.as.admit.tokens = tokens;
    in.as.admit.token_count = in.as.admit.prompt_count = in.as.admit.position_max = FL_CONTEXT_MAX;
    struct fl_arena arena;
    size_t size = 0;
    fl_arena_init(&arena, memory, room);
    fl_status status = fl_cluster_message_pack(&in, &arena, data, FL_CLUSTER_MESSAGE_MAX, &size);
    if (status == FL_OK) {
        fl_arena_reset(&arena);
        status = fl_cluster_message_unpack(data, size, &arena, &out);
    }
    free(tokens);
    free(data);
    free(memory);
    CHECK_EQ(status, FL_OK);
    CHECK_EQ(out.as.admit.token_count, FL_CONTEXT_MAX);
}

/* ---- fixed headers ---- */

static void test_activation_header(void)
{
    const struct fl_activation_header in = {
        .plan_id = UINT64_C(0x1122334455667788),
        .request_id = 9,
        .position = FL_CONTEXT_MAX - FL_CHUNK_MAX,
        .rows = FL_CHUNK_MAX,
        .width = FL_WIDTH_MAX,
        .flags = FL_ACTIVATION_SAMPLE,
    };
    unsigned char bytes[FL_ACTIVATION_HEADER_SIZE + 1] = {0};
    struct fl_activation_header got;
    fl_activation_header_pack(&in, bytes);
    CHECK_EQ(fl_activation_header_unpack(bytes, FL_ACTIVATION_HEADER_SIZE, &got), FL_OK);
    CHECK(memcmp(&in, &got, sizeof(in)) == 0);
    CHECK_EQ(bytes[8], 0x88); /* little-endian on every machine */
    CHECK_EQ(bytes[15], 0x11);

    CHECK_EQ(fl_activation_header_unpack(bytes, FL_ACTIVATION_HEADER_SIZE - 1, &got), FL_PROTOCOL);
    CHECK_EQ(fl_activation_header_unpack(bytes, FL_ACTIVATION_HEADER_SIZE + 1, &got), FL_PROTOCOL);
    for (size_t i = 0; i < 8; i++) {
        bytes[i] ^= 1;
        CHECK_EQ(fl_activation_header_unpack(bytes, FL_ACTIVATION_HEADER_SIZE, &got), FL_PROTOCOL);
        bytes[i] ^= 1;
    }
    const struct fl_activation_header bad[] = {
        {.plan_id = 0, .request_id = 1, .rows = 1, .width = 1},
        {.plan_id = 1, .request_id = 0, .rows = 1, .width = 1},
        {.plan_id = 1, .request_id = 1, .rows = 0, .width = 1},
        {.plan_id = 1, .request_id = 1, .rows = FL_CHUNK_MAX + 1, .width = 1},
        {.plan_id = 1, .request_id = 1, .rows = 1, .width = 0},
        {.plan_id = 1, .request_id = 1, .rows = 1, .width = FL_WIDTH_MAX + 1},
        {.plan_id = 1, .request_id = 1, .rows = 1, .width = 1, .flags = 2},
        {.plan_id = 1, .request_id = 1, .rows = 1, .width = 1, .position = FL_CONTEXT_MAX},
        {.plan_id = 1, .request_id = 1, .rows = 1, .width = 1, .position = UINT32_MAX},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        fl_activation_header_pack(&bad[i], bytes);
        CHECK_EQ(fl_activation_header_unpack(bytes, FL_ACTIVATION_HEADER_SIZE, &got), FL_PROTOCOL);
    }
}

static void test_fetch_header(void)
{
    const struct fl_fetch_header in = {
        .transfer_id = UINT64_MAX - 1,
        .status = FL_NOT_FOUND,
        .size = FL_FETCH_SIZE_MAX,
        .checksum = UINT64_C(0x8000000000000001),
    };
    unsigned char bytes[FL_FETCH_HEADER_SIZE];
    struct fl_fetch_header got;
    fl_fetch_header_pack(&in, bytes);
    CHECK_EQ(fl_fetch_header_unpack(bytes, sizeof(bytes), &got), FL_OK);
    CHECK(memcmp(&in, &got, sizeof(in)) == 0);
    CHECK_EQ(fl_fetch_header_unpack(bytes, sizeof(bytes) - 1, &got), FL_PROTOCOL);
    bytes[0] ^= 1;
    CHECK_EQ(fl_fetch_header_unpack(bytes, sizeof(bytes), &got), FL_PROTOCOL);
    struct fl_fetch_header large = in;
    large.size = FL_FETCH_SIZE_MAX + 1;
    fl_fetch_header_pack(&large, bytes);
    CHECK_EQ(fl_fetch_header_unpack(bytes, sizeof(bytes), &got), FL_PROTOCOL);
}

static const struct test_case cases[] = {
    {"cluster_message: join comes back with every field", test_join},
    {"cluster_message: admit comes back with every field", test_admit},
    {"cluster_message: token comes back with every field", test_token},
    {"cluster_message: spans come back with every field", test_spans},
    {"cluster_message: fetch comes back with every field", test_fetch},
    {"cluster_message: plan comes back with every field", test_plan},
    {"cluster_message: small messages come back with every field", test_small},
    {"cluster_message: a join with a wrong field is refused by the field's name", test_bad_join},
    {"cluster_message: an admit with a wrong field is refused by the field's name", test_bad_admit},
    {"cluster_message: sampling that is not finite or out of range is refused", test_bad_sampling},
    {"cluster_message: a token with a wrong field is refused by the field's name", test_bad_token},
    {"cluster_message: a fetch with a wrong field is refused by the field's name", test_bad_fetch},
    {"cluster_message: spans with a wrong field are refused by the field's name", test_bad_spans},
    {"cluster_message: a plan whose stages do not add up is refused", test_bad_stages},
    {"cluster_message: a plan whose pieces are wrong is refused", test_bad_manifest},
    {"cluster_message: small messages with a wrong field are refused", test_bad_small},
    {"cluster_message: a message cut anywhere is refused", test_cut},
    {"cluster_message: bent bytes are refused or give a checked message", test_bent},
    {"cluster_message: foreign bytes are refused", test_foreign},
    {"cluster_message: buffers and arenas that are too small are reported", test_limits},
    {"cluster_message: a crowd of empty elements stays within the arena", test_crowd},
    {"cluster_message: the longest prompt fits the stated arena", test_largest_prompt},
    {"cluster_message: activation headers come back, wrong ones do not", test_activation_header},
    {"cluster_message: fetch headers come back, wrong ones do not", test_fetch_header},
};

TEST_MAIN(cases)
