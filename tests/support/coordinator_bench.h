/* coordinator_bench.h - a coordinator among nodes that only pretend.
 *
 * The nodes are peers on the in-process network: they join, remember what they
 * are told, answer TRACE, and say what a case wants said.  The model is a
 * generated file, the worker is stepped here, the clock is the network's.  One
 * bench at a time; its functions check as harness.h does, so they are in here.
 */
#ifndef TESTS_SUPPORT_COORDINATOR_BENCH_H
#define TESTS_SUPPORT_COORDINATOR_BENCH_H

#include <stdbool.h>
#include <stdlib.h>

#include "cluster/peer.h"
#include "cluster/transport_local.h"
#include "coordinator/coordinator.h"
#include "proto/checksum.h"
#include "tests/harness.h"
#include "tests/support/model_writer.h"
#include "tests/support/temp_folder.h"

enum {
    NODE_MAX = 3,
    TOLD_MAX = 64,
    EVENT_MAX = 128,
    ARENA_SIZE = 4 << 20,
    TEXT_MAX = 512,
    BENCH_PIECE_SIZE = 1000
};

struct told {
    enum fl_message_kind kind;
    uint64_t plan_id;
    uint64_t request_id;
    uint64_t sequence_id;
    uint32_t keep;
    uint32_t token_count;
    uint32_t prompt_count;
    uint32_t position_max;
    uint32_t stop_count;
    uint32_t stop_tokens[FL_STOP_TOKEN_MAX];
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
    bool silent;                  /* answers no TRACE */
    struct fl_start_record start; /* of its answer, */
    uint32_t span_count;          /* and its spans */
    struct fl_span *spans;
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
    uint64_t timeline_id;
    double exposed_ms; /* of all phases together; of a timeline, of all segments */
    double unknown_ms; /* of it */
    uint32_t phase_count;
    uint32_t span_count;
    bool complete;
    double process_ms; /* of its first node */
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

static inline void on_up(void *ctx, transport_link link, enum fl_party party, const char *address)
{
    struct fake_node *node = ctx;
    (void)address;
    node->up = party == FL_PARTY_COORDINATOR && link == node->link;
}

static inline void say(struct fake_node *node, const struct fl_cluster_message *message);

static inline void answer_trace(struct fake_node *node, struct fl_trace trace)
{
    struct fl_cluster_message message = {.kind = FL_MESSAGE_SPANS};
    message.as.spans = (struct fl_spans){.plan_id = trace.plan_id,
                                         .request_id = trace.request_id,
                                         .last = true,
                                         .start = node->start,
                                         .span_count = node->span_count,
                                         .spans = node->spans};
    say(node, &message);
}

static inline void remember(struct fake_node *node, const struct fl_cluster_message *message)
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
        told->stop_count = message->as.admit.stop_count;
        memcpy(told->stop_tokens, message->as.admit.stop_tokens, sizeof(told->stop_tokens));
        break;
    case FL_MESSAGE_END:
        told->request_id = message->as.end.request_id;
        told->keep = message->as.end.keep;
        break;
    case FL_MESSAGE_DROP: told->sequence_id = message->as.drop.sequence_id; break;
    case FL_MESSAGE_TRACE:
        told->request_id = message->as.trace.request_id;
        told->plan_id = message->as.trace.plan_id;
        if (!node->silent) {
            answer_trace(node, message->as.trace);
        }
        break;
    default: break;
    }
}

static inline void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
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

static inline void on_down(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct fake_node *node = ctx;
    (void)why;
    (void)text;
    node->up = node->up && link != node->link;
}

static inline void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    (void)ctx;
    (void)link;
    (void)cookie;
}

/* Everybody works until nothing moves any more; the worker too. */
static inline void settle(void)
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

static inline void say(struct fake_node *node, const struct fl_cluster_message *message)
{
    static unsigned char packed[64 << 10];
    struct fl_arena arena;
    size_t size = 0;
    fl_arena_init(&arena, node_block, sizeof(node_block));
    CHECK_EQ(fl_cluster_message_pack(message, &arena, packed, sizeof(packed), &size), FL_OK);
    CHECK_EQ(peer_send(node->peers, node->link, FL_WIRE_CONTROL, NULL, 0, packed, size, 0), FL_OK);
}

static inline void join_as(uint32_t index, const char *name, uint64_t incarnation)
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

static inline void leave(uint32_t index)
{
    struct fake_node *node = &bench.nodes[index];
    if (node->transport != NULL) {
        peer_close(node->peers);
        node->transport->ops->close(node->transport);
        *node = (struct fake_node){0};
    }
}

static inline const struct told *last_told(const struct fake_node *node, enum fl_message_kind kind)
{
    for (uint32_t i = node->told_count; i > 0; i--) {
        if (node->told[i - 1].kind == kind) {
            return &node->told[i - 1];
        }
    }
    return NULL;
}

static inline uint32_t told_count(const struct fake_node *node, enum fl_message_kind kind)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < node->told_count; i++) {
        count += node->told[i].kind == kind;
    }
    return count;
}

/* ---- the client's side ---- */

static inline void see_timeline(const struct fl_timeline *timeline, struct seen_event *seen)
{
    seen->timeline_id = timeline->id;
    seen->class_ = timeline->class_;
    seen->ttft_ms = timeline->ttft_ms;
    seen->stage_count = timeline->node_count;
    seen->phase_count = timeline->phase_count;
    seen->span_count = timeline->span_count;
    seen->complete = timeline->complete;
    seen->process_ms = timeline->nodes[0].process_ms;
    for (uint32_t i = 0; i < timeline->segment_count; i++) {
        const struct fl_segment_summary *segment = &timeline->segments[i];
        seen->exposed_ms += segment->ms;
        seen->unknown_ms += strcmp(segment->phase, "unknown") == 0 ? segment->ms : 0;
    }
}

static inline void on_event(void *ctx, uint64_t client, const struct fl_client_event *event)
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
        seen->timeline_id = event->as.done.timeline_id;
        seen->phase_count = event->as.done.phase_count;
        for (uint32_t i = 0; i < seen->phase_count; i++) {
            const struct fl_phase_summary *phase = &event->as.done.phases[i];
            seen->exposed_ms += phase->exposed_ms;
            seen->unknown_ms += strcmp(phase->phase, "unknown") == 0 ? phase->exposed_ms : 0;
        }
        break;
    case FL_EVENT_TIMELINE: see_timeline(&event->as.timeline, seen); break;
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
static inline const struct seen_event *last_event(uint64_t id)
{
    for (uint32_t i = bench.event_count; i > 0; i--) {
        if (bench.events[i - 1].id == id) {
            return &bench.events[i - 1];
        }
    }
    return NULL;
}

static inline void expect_error(uint64_t id, fl_status code, const char *word)
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

static inline void close_bench(void)
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
static inline void open_bench(uint32_t nodes, struct coordinator_settings settings)
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

static inline void ask(uint64_t client, struct fl_client_request *request)
{
    request->version = FL_CLIENT_VERSION;
    request->id = bench.next_id++;
    coordinator_request(bench.coordinator, client, request);
    settle();
}

/* Returns the request's id. */
static inline uint64_t generate_of(const char *model, const char *prompt, uint32_t max_tokens,
                                   const char *stop)
{
    struct fl_client_request request = {.kind = FL_REQUEST_GENERATE};
    struct fl_generate *wanted = &request.as.generate;
    wanted->model = model;
    wanted->prompt = (struct fl_text){prompt, strlen(prompt)};
    wanted->max_tokens = max_tokens;
    if (stop != NULL) {
        wanted->stop_count = 1;
        wanted->stops[0] = (struct fl_text){stop, strlen(stop)};
    }
    ask(1, &request);
    return request.id;
}

static inline uint64_t generate(const char *prompt, uint32_t max_tokens, const char *stop)
{
    return generate_of("m", prompt, max_tokens, stop);
}

static inline uint64_t by_model(enum fl_request_kind kind, const char *model)
{
    struct fl_client_request request = {.kind = kind};
    request.as.by_model.model = model;
    ask(1, &request);
    return request.id;
}

/* The last stage samples `text`'s byte; the tiny tokenizer has one token for each. */
static inline void sample(uint32_t node, uint32_t index, char byte, enum fl_finish finish)
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

static inline uint64_t bench_now(void)
{
    const struct fl_clock clock = local_network_clock(bench.network);
    return fl_clock_now(&clock);
}

/* Everybody works until nothing moves, and so much later again. */
static inline void wait_for(uint64_t duration_ns)
{
    settle();
    local_network_advance(bench.network, bench_now() + duration_ns);
    settle();
}

static inline void load_progress(uint32_t node, uint32_t pieces_done)
{
    const struct told *plan = last_told(&bench.nodes[node], FL_MESSAGE_PLAN);
    struct fl_cluster_message message = {.kind = FL_MESSAGE_PROGRESS};
    message.as.progress =
        (struct fl_progress){.plan_id = plan->plan_id,
                             .pieces_done = pieces_done,
                             .pieces_total = plan->piece_count,
                             .bytes_done = (uint64_t)pieces_done * BENCH_PIECE_SIZE,
                             .bytes_total = (uint64_t)plan->piece_count * BENCH_PIECE_SIZE,
                             .bytes_file = (uint64_t)pieces_done * BENCH_PIECE_SIZE};
    say(&bench.nodes[node], &message);
    settle();
}

static inline void load_all(void)
{
    for (uint32_t i = 0; i < NODE_MAX; i++) {
        if (bench.nodes[i].up && last_told(&bench.nodes[i], FL_MESSAGE_PLAN) != NULL) {
            load_progress(i, last_told(&bench.nodes[i], FL_MESSAGE_PLAN)->piece_count);
        }
    }
}

static const struct coordinator_settings PLAIN = {.context = 64};

#endif
