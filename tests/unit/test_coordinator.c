/* test_coordinator.c - the whole coordinator against nodes that only pretend.
 *
 * The nodes are peers on the in-process network: they join, remember what they
 * are told and say what a case wants said.  The model is a generated file, the
 * worker is stepped here, the clock is the network's.
 */
#include <stdbool.h>
#include <stdlib.h>

#include "cluster/peer.h"
#include "cluster/transport_local.h"
#include "coordinator/coordinator.h"
#include "proto/checksum.h"
#include "tests/harness.h"
#include "tests/support/model_writer.h"
#include "tests/support/temp_folder.h"

enum { NODE_MAX = 3, TOLD_MAX = 64, EVENT_MAX = 128, ARENA_SIZE = 4 << 20, TEXT_MAX = 512 };

struct told {
    enum fl_message_kind kind;
    uint64_t plan_id;
    uint64_t request_id;
    uint64_t sequence_id;
    uint32_t keep;
    uint32_t token_count;
    uint32_t prompt_count;
    uint32_t position_max;
    uint32_t stage_index;
    uint32_t piece_count;
    struct fl_manifest manifest; /* of a PLAN, without pieces */
};

struct fake_node {
    struct transport *transport;
    struct peer_table *peers;
    transport_link link;
    bool up;
    bool welcomed;
    struct told told[TOLD_MAX];
    uint32_t told_count;
    char refusal[FL_ERROR_TEXT_MAX];
    struct fl_fetch_header fetched;
    unsigned char fetched_data[4096];
};

struct seen_event {
    uint64_t client;
    uint64_t id;
    enum fl_event_kind kind;
    uint32_t code;
    uint32_t retry_ms;
    char text[TEXT_MAX];
    uint32_t token_id;
    enum fl_finish finish;
    enum fl_class class_;
    uint32_t prompt_tokens, cached_tokens, output_tokens, stage_count, count;
    double ttft_ms;
};

static struct bench {
    struct temp_folder folder;
    struct local_network *network;
    struct transport *transport;
    struct coordinator *coordinator;
    struct fake_node nodes[NODE_MAX];
    struct seen_event events[EVENT_MAX];
    uint32_t event_count;
    uint64_t next_id;
} bench;

static unsigned char node_block[ARENA_SIZE];

/* ---- pretended nodes ---- */

static void on_up(void *ctx, transport_link link, enum fl_party party, const char *address)
{
    struct fake_node *node = ctx;
    (void)address;
    node->up = party == FL_PARTY_COORDINATOR && link == node->link;
}

static void remember(struct fake_node *node, const struct fl_cluster_message *message)
{
    CHECK(node->told_count < TOLD_MAX);
    struct told *told = &node->told[node->told_count++];
    *told = (struct told){.kind = message->kind};
    switch ((int)message->kind) {
    case FL_MESSAGE_WELCOME: node->welcomed = true; break;
    case FL_MESSAGE_FAILURE:
        snprintf(node->refusal, sizeof(node->refusal), "%s", message->as.failure.text);
        break;
    case FL_MESSAGE_PLAN:
        told->plan_id = message->as.plan.plan_id;
        told->stage_index = message->as.plan.stage_index;
        told->piece_count = message->as.plan.manifest.piece_count;
        told->manifest = message->as.plan.manifest;
        break;
    case FL_MESSAGE_UNPLAN: told->plan_id = message->as.unplan.plan_id; break;
    case FL_MESSAGE_ADMIT:
        told->plan_id = message->as.admit.plan_id;
        told->request_id = message->as.admit.request_id;
        told->sequence_id = message->as.admit.sequence_id;
        told->keep = message->as.admit.keep;
        told->token_count = message->as.admit.token_count;
        told->prompt_count = message->as.admit.prompt_count;
        told->position_max = message->as.admit.position_max;
        break;
    case FL_MESSAGE_END:
        told->request_id = message->as.end.request_id;
        told->keep = message->as.end.keep;
        break;
    case FL_MESSAGE_DROP: told->sequence_id = message->as.drop.sequence_id; break;
    default: break;
    }
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct fake_node *node = ctx;
    (void)link;
    if (type == FL_WIRE_FETCH_DATA) {
        CHECK_EQ(fl_fetch_header_unpack(header, header_size, &node->fetched), FL_OK);
        memcpy(node->fetched_data, data, size < 4096 ? size : 4096);
        return;
    }
    struct fl_arena arena;
    struct fl_cluster_message message;
    fl_arena_init(&arena, node_block, sizeof(node_block));
    CHECK_EQ(type, FL_WIRE_CONTROL);
    CHECK_EQ(fl_cluster_message_unpack(data, size, &arena, &message), FL_OK);
    remember(node, &message);
}

static void on_down(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct fake_node *node = ctx;
    (void)why;
    (void)text;
    node->up = node->up && link != node->link;
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    (void)ctx;
    (void)link;
    (void)cookie;
}

/* Everybody works until nothing moves any more; the worker too. */
static void settle(void)
{
    for (int quiet = 0; quiet < 2;) {
        uint64_t next_ns = UINT64_MAX;
        unsigned count = worker_step(coordinator_worker(bench.coordinator)) == FL_OK;
        count += coordinator_poll(bench.coordinator, &next_ns);
        for (int i = 0; i < NODE_MAX; i++) {
            count += bench.nodes[i].peers != NULL ? peer_poll(bench.nodes[i].peers, &next_ns) : 0;
        }
        next_ns = local_network_next_event_ns(bench.network);
        const bool moves = next_ns != UINT64_MAX;
        if (moves) {
            local_network_advance(bench.network, next_ns);
        }
        quiet = count == 0 && !moves ? quiet + 1 : 0;
    }
}

static void say(struct fake_node *node, const struct fl_cluster_message *message)
{
    static unsigned char packed[64 << 10];
    struct fl_arena arena;
    size_t size = 0;
    fl_arena_init(&arena, node_block, sizeof(node_block));
    CHECK_EQ(fl_cluster_message_pack(message, &arena, packed, sizeof(packed), &size), FL_OK);
    CHECK_EQ(peer_send(node->peers, node->link, FL_WIRE_CONTROL, NULL, 0, packed, size, 0), FL_OK);
}

static void join_as(uint32_t index, const char *name, uint64_t incarnation)
{
    struct fake_node *node = &bench.nodes[index];
    *node = (struct fake_node){0};
    struct fl_address address;
    CHECK_EQ(transport_local_open(bench.network, &node->transport), FL_OK);
    const struct peer_config config = {.transport = node->transport,
                                       .clock = local_network_clock(bench.network),
                                       .party = FL_PARTY_NODE,
                                       .events = {node, on_up, on_received, on_sent, on_down}};
    CHECK_EQ(peer_open(&config, &node->peers), FL_OK);
    bench.transport->ops->address(bench.transport, &address);
    CHECK_EQ(peer_connect(node->peers, &address, &node->link), FL_OK);
    settle();
    CHECK(node->up);
    struct fl_cluster_message message = {.kind = FL_MESSAGE_JOIN};
    struct fl_join *join = &message.as.join;
    join->incarnation = incarnation;
    join->memory_budget = UINT64_C(1) << 30;
    join->threads = 1;
    snprintf(join->name, sizeof(join->name), "%s", name);
    snprintf(join->isa, sizeof(join->isa), "scalar");
    node->transport->ops->address(node->transport, &join->address);
    say(node, &message);
    settle();
}

static void leave(uint32_t index)
{
    struct fake_node *node = &bench.nodes[index];
    if (node->transport != NULL) {
        peer_close(node->peers);
        node->transport->ops->close(node->transport);
        *node = (struct fake_node){0};
    }
}

static const struct told *last_told(const struct fake_node *node, enum fl_message_kind kind)
{
    for (uint32_t i = node->told_count; i > 0; i--) {
        if (node->told[i - 1].kind == kind) {
            return &node->told[i - 1];
        }
    }
    return NULL;
}

static uint32_t told_count(const struct fake_node *node, enum fl_message_kind kind)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < node->told_count; i++) {
        count += node->told[i].kind == kind;
    }
    return count;
}

/* ---- the client's side ---- */

static void on_event(void *ctx, uint64_t client, const struct fl_client_event *event)
{
    (void)ctx;
    CHECK(bench.event_count < EVENT_MAX);
    struct seen_event *seen = &bench.events[bench.event_count++];
    *seen = (struct seen_event){.client = client, .id = event->id, .kind = event->kind};
    switch ((int)event->kind) {
    case FL_EVENT_ADMITTED:
        seen->class_ = event->as.admitted.class_;
        seen->cached_tokens = event->as.admitted.cached_tokens;
        break;
    case FL_EVENT_PROGRESS:
        snprintf(seen->text, sizeof(seen->text), "%s %s", event->as.progress.phase,
                 event->as.progress.cause);
        break;
    case FL_EVENT_TEXT:
        snprintf(seen->text, sizeof(seen->text), "%.*s", (int)event->as.text.text.size,
                 event->as.text.text.data != NULL ? event->as.text.text.data : "");
        seen->token_id = event->as.text.token_count > 0 ? event->as.text.tokens[0].id : UINT32_MAX;
        break;
    case FL_EVENT_DONE:
        seen->finish = event->as.done.finish;
        seen->class_ = event->as.done.class_;
        seen->prompt_tokens = event->as.done.prompt_tokens;
        seen->cached_tokens = event->as.done.cached_tokens;
        seen->output_tokens = event->as.done.output_tokens;
        seen->stage_count = event->as.done.stage_count;
        seen->ttft_ms = event->as.done.ttft_ms;
        break;
    case FL_EVENT_ERROR:
        seen->code = event->as.error.code;
        seen->retry_ms = event->as.error.retry_ms;
        snprintf(seen->text, sizeof(seen->text), "%s", event->as.error.text);
        break;
    case FL_EVENT_TOKENS: seen->count = event->as.tokens.count; break;
    case FL_EVENT_MODELS:
        seen->count = event->as.models.count;
        snprintf(seen->text, sizeof(seen->text), "%s %s", event->as.models.models[0].name,
                 event->as.models.models[0].problem);
        break;
    case FL_EVENT_PLAN: seen->stage_count = event->as.plan.stage_count; break;
    case FL_EVENT_STATUS:
        seen->count = event->as.status.node_count;
        seen->stage_count = event->as.status.loaded_count;
        break;
    default: break;
    }
}

/* The last event of a request, or NULL. */
static const struct seen_event *last_event(uint64_t id)
{
    for (uint32_t i = bench.event_count; i > 0; i--) {
        if (bench.events[i - 1].id == id) {
            return &bench.events[i - 1];
        }
    }
    return NULL;
}

static void expect_error(uint64_t id, fl_status code, const char *word)
{
    const struct seen_event *event = last_event(id);
    CHECK(event != NULL);
    CHECK_EQ(event->kind, FL_EVENT_ERROR);
    if (strstr(event->text, word) == NULL) {
        printf("  '%s' lacks '%s'\n", event->text, word);
    }
    CHECK(strstr(event->text, word) != NULL);
    CHECK_EQ(event->code, code);
}

static void close_bench(void)
{
    if (bench.coordinator == NULL) {
        return;
    }
    coordinator_close(bench.coordinator);
    for (uint32_t i = 0; i < NODE_MAX; i++) {
        leave(i);
    }
    bench.transport->ops->close(bench.transport);
    local_network_close(bench.network);
    temp_folder_remove(&bench.folder);
    bench.coordinator = NULL;
}

/* A coordinator with `nodes` nodes and the models "m" (bpe, three layers) and "broken". */
static void open_bench(uint32_t nodes, struct coordinator_settings settings)
{
    close_bench();
    bench = (struct bench){.next_id = 1};
    temp_folder_make(&bench.folder);
    char path[TEMP_PATH_MAX];
    temp_folder_path(&bench.folder, "m.gguf", path);
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    CHECK_EQ(model_write(&spec, path), FL_OK);
    temp_folder_put(&bench.folder, "broken.gguf", "GGUF", 4);
    const struct local_network_config network = {
        .seed = 7, .delay_min_ns = 1000, .delay_max_ns = 2000};
    CHECK_EQ(local_network_open(&network, &bench.network), FL_OK);
    CHECK_EQ(transport_local_open(bench.network, &bench.transport), FL_OK);
    settings.models_folder = bench.folder.path;
    const struct coordinator_config config = {.clock = local_network_clock(bench.network),
                                              .transport = bench.transport,
                                              .settings = settings,
                                              .event = on_event};
    CHECK_EQ(coordinator_open(&config, &bench.coordinator), FL_OK);
    static const char *const names[NODE_MAX] = {"box1", "box2", "box3"};
    for (uint32_t i = 0; i < nodes; i++) {
        join_as(i, names[i], 100 + i);
        CHECK(bench.nodes[i].welcomed);
    }
}

static void ask(uint64_t client, struct fl_client_request *request)
{
    request->version = FL_CLIENT_VERSION;
    request->id = bench.next_id++;
    coordinator_request(bench.coordinator, client, request);
    settle();
}

/* Returns the request's id. */
static uint64_t generate(const char *prompt, uint32_t max_tokens, const char *stop)
{
    struct fl_client_request request = {.kind = FL_REQUEST_GENERATE};
    struct fl_generate *wanted = &request.as.generate;
    wanted->model = "m";
    wanted->prompt = (struct fl_text){prompt, strlen(prompt)};
    wanted->max_tokens = max_tokens;
    if (stop != NULL) {
        wanted->stop_count = 1;
        wanted->stops[0] = (struct fl_text){stop, strlen(stop)};
    }
    ask(1, &request);
    return request.id;
}

static uint64_t by_model(enum fl_request_kind kind, const char *model)
{
    struct fl_client_request request = {.kind = kind};
    request.as.by_model.model = model;
    ask(1, &request);
    return request.id;
}

/* The last stage samples `text`'s byte; the tiny tokenizer has one token for each. */
static void sample(uint32_t node, uint32_t index, char byte, enum fl_finish finish)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    struct token_table table;
    const char text[2] = {byte, 0};
    model_spec_tokens(&spec, &table);
    const struct told *admit = last_told(&bench.nodes[node], FL_MESSAGE_ADMIT);
    CHECK(admit != NULL);
    struct fl_cluster_message message = {.kind = FL_MESSAGE_TOKEN};
    message.as.token = (struct fl_token){
        .plan_id = admit->plan_id,
        .request_id = admit->request_id,
        .index = index,
        .position = admit->prompt_count + index,
        .id = finish == FL_FINISH_STOP ? table.eos : token_table_find(&table, text),
        .finish = finish};
    token_table_close(&table);
    say(&bench.nodes[node], &message);
    settle();
}

static void load_progress(uint32_t node, uint32_t pieces_done)
{
    const struct told *plan = last_told(&bench.nodes[node], FL_MESSAGE_PLAN);
    struct fl_cluster_message message = {.kind = FL_MESSAGE_PROGRESS};
    message.as.progress = (struct fl_progress){.plan_id = plan->plan_id,
                                               .pieces_done = pieces_done,
                                               .pieces_total = plan->piece_count,
                                               .bytes_done = pieces_done * 10,
                                               .bytes_total = plan->piece_count * 10,
                                               .bytes_file = pieces_done * 10};
    say(&bench.nodes[node], &message);
    settle();
}

static void load_all(void)
{
    for (uint32_t i = 0; i < NODE_MAX; i++) {
        if (bench.nodes[i].up && last_told(&bench.nodes[i], FL_MESSAGE_PLAN) != NULL) {
            load_progress(i, last_told(&bench.nodes[i], FL_MESSAGE_PLAN)->piece_count);
        }
    }
}

static const struct coordinator_settings PLAIN = {.context = 64};

/* ---- cases ---- */

static void without_nodes_the_error_says_how_to_start_one(void)
{
    open_bench(0, PLAIN);
    expect_error(generate("hello", 4, NULL), FL_NOT_FOUND, "firstlight-node --join");
}

static void plan_and_admit_go_out_at_once(void)
{
    open_bench(2, PLAIN);
    const uint64_t id = generate("hello", 4, NULL);
    for (uint32_t i = 0; i < 2; i++) {
        const struct told *plan = last_told(&bench.nodes[i], FL_MESSAGE_PLAN);
        CHECK(plan != NULL && plan->stage_index == i);
        CHECK(plan->piece_count >= 3);
        const struct told *admit = last_told(&bench.nodes[i], FL_MESSAGE_ADMIT);
        CHECK(admit != NULL); /* nobody said that a piece is loaded */
        CHECK_EQ(admit->prompt_count, admit->token_count);
        CHECK_EQ(admit->position_max, admit->prompt_count + 4);
        CHECK_EQ(admit->keep, 0);
    }
    CHECK_EQ(last_event(id)->kind, FL_EVENT_ADMITTED);
    CHECK_EQ(last_event(id)->class_, FL_CLASS_COLD);
    local_network_advance(bench.network, 1050 * FL_NS_PER_MS);
    sample(1, 0, 'a', FL_FINISH_NONE);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_TEXT);
    CHECK(strcmp(last_event(id)->text, "a") == 0);
    sample(1, 1, 'b', FL_FINISH_NONE);
    sample(1, 2, 0, FL_FINISH_STOP);
    const struct seen_event *done = last_event(id);
    CHECK_EQ(done->kind, FL_EVENT_DONE);
    CHECK_EQ(done->finish, FL_FINISH_STOP);
    CHECK_EQ(done->output_tokens, 2); /* the end token is not counted */
    CHECK_EQ(done->stage_count, 2);
    CHECK(done->ttft_ms > 1.0 && done->ttft_ms < 60.0);
    for (uint32_t i = 0; i < 2; i++) {
        const struct told *end = last_told(&bench.nodes[i], FL_MESSAGE_END);
        CHECK(end != NULL);
        CHECK_EQ(end->keep, done->prompt_tokens + 2);
    }
}

static void middle_stages_get_no_tokens(void)
{
    open_bench(3, PLAIN);
    generate("hello", 4, NULL);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->token_count > 0);
    CHECK_EQ(last_told(&bench.nodes[1], FL_MESSAGE_ADMIT)->token_count, 0);
    CHECK(last_told(&bench.nodes[1], FL_MESSAGE_ADMIT)->prompt_count > 0);
    CHECK(last_told(&bench.nodes[2], FL_MESSAGE_ADMIT)->token_count > 0);
}

static void the_next_turn_prefills_what_is_new(void)
{
    open_bench(1, PLAIN);
    uint64_t id = generate("hello", 4, NULL);
    const uint64_t sequence = last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->sequence_id;
    const uint32_t prompt = last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->prompt_count;
    sample(0, 0, 'x', FL_FINISH_NONE);
    sample(0, 1, 'y', FL_FINISH_NONE);
    sample(0, 2, 'z', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(id)->finish, FL_FINISH_LENGTH);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_END)->keep, prompt + 2);
    id = generate("helloxyzq", 4, NULL);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->sequence_id, sequence);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->keep, prompt + 2);
    CHECK_EQ(last_event(id)->cached_tokens, prompt + 2);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_PLAN), 1);
}

static void a_stop_string_ends_the_request_everywhere(void)
{
    open_bench(2, PLAIN);
    const uint64_t id = generate("hello", 20, "YZ");
    sample(1, 0, 'x', FL_FINISH_NONE);
    sample(1, 1, 'Y', FL_FINISH_NONE);
    CHECK(strcmp(last_event(id)->text, "") == 0); /* held back: it may be the stop string */
    sample(1, 2, 'Z', FL_FINISH_NONE);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE);
    CHECK_EQ(last_event(id)->finish, FL_FINISH_STOP);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_END) != NULL);
    const uint32_t events = bench.event_count;
    sample(1, 3, 'q', FL_FINISH_NONE); /* late: it was under way */
    CHECK_EQ(bench.event_count, events);
}

static void held_text_is_released_at_the_end(void)
{
    open_bench(1, PLAIN);
    const uint64_t id = generate("hello", 2, "YZ");
    sample(0, 0, 'x', FL_FINISH_NONE);
    sample(0, 1, 'Y', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE);
    CHECK(strcmp(bench.events[bench.event_count - 2].text, "Y") == 0);
    CHECK_EQ(bench.events[bench.event_count - 2].token_id, UINT32_MAX);
}

static void cancelling_ends_with_done_and_a_vanished_client_with_nothing(void)
{
    open_bench(1, PLAIN);
    const uint64_t id = generate("hello", 20, NULL);
    struct fl_client_request cancel = {.kind = FL_REQUEST_CANCEL};
    cancel.as.cancel.id = id;
    ask(2, &cancel); /* somebody else's */
    CHECK_EQ(last_event(id)->kind, FL_EVENT_ADMITTED);
    ask(1, &cancel);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE);
    CHECK_EQ(last_event(id)->finish, FL_FINISH_CANCELLED);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_END)->keep, 0);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_DROP), 1);
    generate("hello", 20, NULL);
    coordinator_client_gone(bench.coordinator, 1);
    settle();
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_END), 2);
}

static void a_cancelled_load_ends_with_done_and_the_model_goes_on_loading(void)
{
    open_bench(2, PLAIN);
    const uint64_t id = by_model(FL_REQUEST_LOAD, "m");
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_PLAN) != NULL);
    struct fl_client_request cancel = {.kind = FL_REQUEST_CANCEL};
    cancel.as.cancel.id = id;
    ask(1, &cancel);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE);
    CHECK_EQ(last_event(id)->finish, FL_FINISH_CANCELLED);
    CHECK_EQ(last_event(id)->stage_count, 2);
    load_all();
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE); /* and no LOADED behind it */
    const uint64_t again = by_model(FL_REQUEST_LOAD, "m");
    CHECK_EQ(last_event(again)->kind, FL_EVENT_LOADED);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_PLAN), 1);
}

static void refusals_carry_the_number_that_would_fit(void)
{
    open_bench(1, PLAIN);
    char prompt[200];
    memset(prompt, 'a', sizeof(prompt));
    prompt[199] = '\0';
    expect_error(generate(prompt, 4, NULL), FL_TOO_LARGE, "at most 63 fit");
    expect_error(generate("abcd", 100, NULL), FL_TOO_LARGE, "new tokens fit");
    expect_error(generate("\xff", 4, NULL), FL_INVALID, "UTF-8");
    const uint64_t id = generate("abcd", 0, NULL); /* what the context has left */
    CHECK_EQ(last_event(id)->kind, FL_EVENT_ADMITTED);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->position_max, 64);
    struct fl_client_request request = {.kind = FL_REQUEST_GENERATE};
    uint32_t tokens[] = {1, 1000000};
    request.as.generate.model = "m";
    request.as.generate.token_count = 2;
    request.as.generate.tokens = tokens;
    ask(1, &request);
    expect_error(request.id, FL_INVALID, "1000000");
    request.as.generate.token_count = 0;
    ask(1, &request);
    expect_error(request.id, FL_INVALID, "no prompt");
    request.as.generate.model = "";
    ask(1, &request);
    expect_error(request.id, FL_INVALID, "no model");
    expect_error(by_model(FL_REQUEST_LOAD, "nosuch"), FL_NOT_FOUND, "there is: broken, m");
    expect_error(by_model(FL_REQUEST_LOAD, "broken"), FL_MALFORMED, "");
}

static void the_queue_is_bounded_and_says_why(void)
{
    struct coordinator_settings settings = PLAIN;
    settings.sequences = 1;
    settings.queue = 1;
    open_bench(1, settings);
    const uint64_t first = generate("one", 20, NULL);
    const uint64_t second = generate("two", 20, NULL);
    CHECK_EQ(last_event(second)->kind, FL_EVENT_PROGRESS);
    CHECK(strstr(last_event(second)->text, "queue the KV cache") != NULL);
    const uint64_t third = generate("three", 20, NULL);
    expect_error(third, FL_BUSY, "queue is full");
    CHECK(last_event(third)->retry_ms > 0);
    sample(0, 0, 'x', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(first)->kind, FL_EVENT_DONE);
    CHECK_EQ(last_event(second)->kind, FL_EVENT_ADMITTED);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_DROP), 1); /* the first one's conversation */
}

static void a_lost_node_ends_its_requests_and_the_next_plan_goes_without_it(void)
{
    open_bench(2, PLAIN);
    const uint64_t id = generate("hello", 20, NULL);
    const uint64_t plan = last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->plan_id;
    sample(1, 0, 'x', FL_FINISH_NONE);
    leave(1);
    settle();
    expect_error(id, FL_NODE_LOST, "node box2 was lost");
    CHECK(last_event(id)->retry_ms > 0);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_UNPLAN)->plan_id, plan);
    const uint64_t next = generate("hello", 20, NULL);
    CHECK_EQ(last_event(next)->kind, FL_EVENT_ADMITTED);
    CHECK_EQ(last_event(next)->class_, FL_CLASS_COLD);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->plan_id > plan);
    sample(0, 0, 'x', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(next)->stage_count, 1);
}

static void failures_of_a_request_and_of_a_plan_are_told_apart(void)
{
    open_bench(2, PLAIN);
    const uint64_t first = generate("one", 20, NULL);
    const struct told admit = *last_told(&bench.nodes[0], FL_MESSAGE_ADMIT);
    const uint64_t second = generate("two", 20, NULL);
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FAILURE};
    message.as.failure = (struct fl_failure){.plan_id = admit.plan_id,
                                             .request_id = admit.request_id,
                                             .code = FL_NO_MEMORY,
                                             .text = "no blocks"};
    say(&bench.nodes[0], &message);
    settle();
    expect_error(first, FL_NO_MEMORY, "node box1: no blocks");
    CHECK_EQ(last_event(second)->kind, FL_EVENT_ADMITTED);
    message.as.failure.request_id = 0;
    message.as.failure.code = FL_IO;
    snprintf(message.as.failure.text, sizeof(message.as.failure.text), "disk gone");
    say(&bench.nodes[1], &message);
    settle();
    expect_error(second, FL_IO, "node box2: disk gone");
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_UNPLAN) != NULL);
    CHECK(last_told(&bench.nodes[1], FL_MESSAGE_UNPLAN) != NULL);
    /* A plan that is gone, and tokens from where none come from: nothing happens. */
    say(&bench.nodes[1], &message);
    settle();
    CHECK_EQ(last_event(generate("three", 20, NULL))->kind, FL_EVENT_ADMITTED);
}

static void classes_follow_what_is_loaded(void)
{
    open_bench(2, PLAIN);
    const uint64_t load = by_model(FL_REQUEST_LOAD, "m");
    CHECK_EQ(last_event(load)->kind, FL_EVENT_PROGRESS);
    load_progress(0, 1);
    CHECK_EQ(last_event(generate("one", 4, NULL))->class_, FL_CLASS_PARTIAL);
    load_all();
    CHECK_EQ(last_event(load)->kind, FL_EVENT_LOADED);
    CHECK_EQ(last_event(generate("two", 4, NULL))->class_, FL_CLASS_WARM);
    expect_error(by_model(FL_REQUEST_UNLOAD, "m"), FL_BUSY, "2 requests");
    coordinator_client_gone(bench.coordinator, 1);
    CHECK_EQ(last_event(by_model(FL_REQUEST_UNLOAD, "m"))->kind, FL_EVENT_UNLOADED);
    CHECK(last_told(&bench.nodes[1], FL_MESSAGE_UNPLAN) != NULL);
    expect_error(by_model(FL_REQUEST_UNLOAD, "m"), FL_NOT_FOUND, "not loaded");
    CHECK_EQ(last_event(generate("three", 4, NULL))->class_, FL_CLASS_COLD);
}

static void plans_status_models_and_tokens_are_shown(void)
{
    open_bench(2, PLAIN);
    uint64_t id = by_model(FL_REQUEST_PLAN, "m");
    CHECK_EQ(last_event(id)->kind, FL_EVENT_PLAN);
    CHECK_EQ(last_event(id)->stage_count, 2);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_PLAN) == NULL); /* nothing is loaded by it */
    id = by_model(FL_REQUEST_STATUS, NULL);
    CHECK_EQ(last_event(id)->count, 2);
    CHECK_EQ(last_event(id)->stage_count, 0);
    id = by_model(FL_REQUEST_MODELS, NULL);
    CHECK_EQ(last_event(id)->count, 2);
    CHECK(strncmp(last_event(id)->text, "broken ", 7) == 0 && strlen(last_event(id)->text) > 10);
    struct fl_client_request request = {.kind = FL_REQUEST_TOKENIZE};
    request.as.tokenize.model = "m";
    request.as.tokenize.text = (struct fl_text){"abc", 3};
    ask(1, &request);
    CHECK_EQ(last_event(request.id)->kind, FL_EVENT_TOKENS);
    CHECK(last_event(request.id)->count >= 1);
    request = (struct fl_client_request){.version = 99, .id = 1000, .kind = FL_REQUEST_STATUS};
    coordinator_request(bench.coordinator, 1, &request);
    expect_error(1000, FL_UNSUPPORTED, "99");
}

static void a_split_is_followed(void)
{
    struct coordinator_settings settings = PLAIN;
    settings.split_count = 2;
    settings.split[0] = 1;
    settings.split[1] = 2;
    open_bench(1, settings);
    expect_error(generate("one", 4, NULL), FL_INVALID, "1 nodes have joined");
    join_as(1, "box2", 55);
    generate("one", 4, NULL);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->piece_count, 3); /* embed and a layer */
    CHECK_EQ(last_told(&bench.nodes[1], FL_MESSAGE_PLAN)->piece_count, 5);
}

static void ranges_of_loaded_models_are_served(void)
{
    open_bench(1, PLAIN);
    generate("one", 4, NULL);
    struct fl_range ranges[] = {{0, 4}, {100, 60}};
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FETCH};
    struct fl_fetch *fetch = &message.as.fetch;
    *fetch = (struct fl_fetch){.transfer_id = 9, .model = "m", .range_count = 2, .ranges = ranges};
    const struct fl_manifest *manifest = &last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->manifest;
    memcpy(fetch->identity, manifest->identity, sizeof(fetch->identity));
    struct fake_node *node = &bench.nodes[0];
    say(node, &message);
    settle();
    CHECK_EQ(node->fetched.transfer_id, 9);
    CHECK_EQ(node->fetched.status, FL_OK);
    CHECK_EQ(node->fetched.size, 64);
    CHECK_EQ(memcmp(node->fetched_data, "GGUF", 4), 0);
    CHECK_EQ(node->fetched.checksum, fl_checksum64(node->fetched_data, 64));

    fetch->transfer_id = 10;
    ranges[1].offset = manifest->files[0].size - 10; /* beyond the end */
    say(node, &message);
    settle();
    CHECK_EQ(node->fetched.transfer_id, 10);
    CHECK_EQ(node->fetched.status, FL_INVALID);
    CHECK(strstr((const char *)node->fetched_data, "beyond its end") != NULL);

    fetch->transfer_id = 11;
    ranges[1].offset = 0;
    fetch->file = 1;
    say(node, &message);
    settle();
    CHECK_EQ(node->fetched.transfer_id, 11);
    CHECK_EQ(node->fetched.status, FL_INVALID);

    fetch->transfer_id = 12;
    fetch->file = 0;
    fetch->identity[0] ^= 1; /* another conversion of the model */
    say(node, &message);
    settle();
    CHECK_EQ(node->fetched.transfer_id, 12);
    CHECK_EQ(node->fetched.status, FL_NOT_FOUND);
}

static void a_file_cut_while_it_is_served_is_an_error_and_no_crash(void)
{
    open_bench(1, PLAIN);
    generate("one", 4, NULL);
    temp_folder_put(&bench.folder, "m.gguf", "GGUF", 4);
    struct fl_range range = {100, 60};
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FETCH};
    message.as.fetch =
        (struct fl_fetch){.transfer_id = 3, .model = "m", .range_count = 1, .ranges = &range};
    memcpy(message.as.fetch.identity,
           last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->manifest.identity, FL_IDENTITY_SIZE);
    say(&bench.nodes[0], &message);
    settle();
    CHECK_EQ(bench.nodes[0].fetched.transfer_id, 3);
    CHECK_EQ(bench.nodes[0].fetched.status, FL_IO);
    /* Unloaded and loaded again, the file is looked at anew. */
    coordinator_client_gone(bench.coordinator, 1);
    by_model(FL_REQUEST_UNLOAD, "m");
    const struct seen_event *event = last_event(generate("one", 4, NULL));
    CHECK_EQ(event->kind, FL_EVENT_ERROR);
}

static void the_same_name_twice_is_refused_with_a_sentence(void)
{
    open_bench(1, PLAIN);
    join_as(1, "box1", 999);
    CHECK(!bench.nodes[1].welcomed);
    CHECK(strstr(bench.nodes[1].refusal, "is taken") != NULL);
    CHECK(!bench.nodes[1].up);
    CHECK_EQ(last_event(generate("one", 4, NULL))->kind, FL_EVENT_ADMITTED);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT) != NULL);
}

/* Nodes outlive a coordinator, and so do their messages about its plans. */
static void another_coordinator_uses_other_plan_ids(void)
{
    open_bench(1, PLAIN);
    generate("one", 4, NULL);
    const uint64_t first = last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->plan_id;
    open_bench(1, PLAIN);
    generate("one", 4, NULL);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->plan_id != first);
}

static void stopping_tells_everybody(void)
{
    open_bench(1, PLAIN);
    const uint64_t id = generate("one", 4, NULL);
    coordinator_end_requests(bench.coordinator, "the coordinator is stopping");
    expect_error(id, FL_CANCELLED, "stopping");
    close_bench();
}

static const struct test_case cases[] = {
    {"coordinator: without nodes the error says how to start one",
     without_nodes_the_error_says_how_to_start_one},
    {"coordinator: plan and admit go out at once, before anything is loaded",
     plan_and_admit_go_out_at_once},
    {"coordinator: middle stages get no tokens", middle_stages_get_no_tokens},
    {"coordinator: the next turn prefills what is new", the_next_turn_prefills_what_is_new},
    {"coordinator: a stop string ends the request everywhere, late tokens are ignored",
     a_stop_string_ends_the_request_everywhere},
    {"coordinator: held text is released at the end", held_text_is_released_at_the_end},
    {"coordinator: cancelling ends with done and a vanished client with nothing",
     cancelling_ends_with_done_and_a_vanished_client_with_nothing},
    {"coordinator: a cancelled load ends with done and the model goes on loading",
     a_cancelled_load_ends_with_done_and_the_model_goes_on_loading},
    {"coordinator: refusals carry the number that would fit",
     refusals_carry_the_number_that_would_fit},
    {"coordinator: the queue is bounded and says why", the_queue_is_bounded_and_says_why},
    {"coordinator: a lost node ends its requests and the next plan goes without it",
     a_lost_node_ends_its_requests_and_the_next_plan_goes_without_it},
    {"coordinator: failures of a request and of a plan are told apart",
     failures_of_a_request_and_of_a_plan_are_told_apart},
    {"coordinator: classes follow what is loaded", classes_follow_what_is_loaded},
    {"coordinator: plans, status, models and tokens are shown",
     plans_status_models_and_tokens_are_shown},
    {"coordinator: a split is followed", a_split_is_followed},
    {"coordinator: ranges of loaded models are served", ranges_of_loaded_models_are_served},
    {"coordinator: a file cut while it is served is an error and no crash",
     a_file_cut_while_it_is_served_is_an_error_and_no_crash},
    {"coordinator: the same name twice is refused with a sentence",
     the_same_name_twice_is_refused_with_a_sentence},
    {"coordinator: another coordinator uses other plan ids",
     another_coordinator_uses_other_plan_ids},
    {"coordinator: stopping tells everybody", stopping_tells_everybody},
};

TEST_MAIN(cases)
