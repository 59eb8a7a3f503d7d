/* Node: whole nodes over the in-process transport, with a scripted coordinator, on a turned clock. */
#include "node/node.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "cluster/peer.h"
#include "cluster/transport_local.h"
#include "node/model_folder.h"
#include "pipeline/model.h"
#include "pipeline/stage.h"
#include "proto/checksum.h"
#include "tests/harness.h"
#include "tests/support/model_writer.h"
#include "tests/support/temp_folder.h"

enum files { WITH_FILES, WITHOUT_FILES };

enum { NODES_MAX = 3, TOKENS_MAX = 64, ROUNDS_MAX = 400000, SCRATCH = 1 << 20, SPANS_MAX = 4096 };

/* What a node answered to TRACE. */
struct trace {
    uint32_t message_count;
    uint32_t last_count;
    bool order_broken; /* something came after the last */
    uint64_t lost;
    struct fl_start_record start;
    uint32_t span_count;
    struct fl_span spans[SPANS_MAX];
};

struct box {
    struct transport *transport;
    struct device *device;
    struct model_folder folder;
    struct model_storage storage;
    struct node *node;
    struct fl_join join;
    transport_link link; /* at the coordinator; 0: not there */
    bool joined;
    fl_status status; /* of the last wire poll */
};

struct fixture {
    struct temp_folder temp;
    char path[TEMP_PATH_MAX];
    struct model *model;
    struct local_network *network;
    struct transport *transport; /* the coordinator's */
    struct peer_table *peers;
    struct fl_address address;
    uint32_t box_count;
    struct box boxes[NODES_MAX];

    const char *refusal; /* NULL: everyone is welcome */
    uint32_t token_count;
    uint32_t tokens[TOKENS_MAX];
    enum fl_finish finish;
    uint32_t failure_count;
    struct fl_failure failure; /* the last one */
    struct fl_progress progress;
    uint32_t fetch_count;
    struct trace *traces;   /* [NODES_MAX], by box */
    unsigned char *scratch; /* [2 x SCRATCH] */
};

/* The scripted coordinator ------------------------------------------------------------------- */

static void say(struct fixture *f, transport_link link, const struct fl_cluster_message *message)
{
    struct fl_arena arena;
    size_t size;
    fl_arena_init(&arena, f->scratch, SCRATCH);
    CHECK_EQ(fl_cluster_message_pack(message, &arena, f->scratch + SCRATCH, SCRATCH, &size), FL_OK);
    CHECK_EQ(peer_send(f->peers, link, FL_WIRE_CONTROL, NULL, 0, f->scratch + SCRATCH, size, 0),
             FL_OK);
}

static void serve_fetch(struct fixture *f, transport_link link, const struct fl_fetch *fetch)
{
    static unsigned char bytes[FL_FETCH_SIZE_MAX];
    unsigned char packed[FL_FETCH_HEADER_SIZE];
    size_t size = 0;
    const int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    for (uint32_t i = 0; fd >= 0 && i < fetch->range_count; i++) {
        size +=
            (size_t)pread(fd, bytes + size, fetch->ranges[i].size, (off_t)fetch->ranges[i].offset);
    }
    close(fd);
    const struct fl_fetch_header header = {.transfer_id = fetch->transfer_id,
                                           .size = (uint32_t)size,
                                           .checksum = fl_checksum64(bytes, size)};
    fl_fetch_header_pack(&header, packed);
    CHECK_EQ(peer_send(f->peers, link, FL_WIRE_FETCH_DATA, packed, sizeof(packed), bytes, size, 0),
             FL_OK);
    f->fetch_count++;
}

static void on_spans(struct fixture *f, transport_link link, const struct fl_spans *spans)
{
    for (uint32_t i = 0; i < f->box_count; i++) {
        struct trace *trace = &f->traces[i];
        if (f->boxes[i].link != link || trace->span_count + spans->span_count > SPANS_MAX) {
            continue;
        }
        trace->message_count++;
        trace->order_broken = trace->order_broken || trace->last_count > 0;
        trace->last_count += spans->last ? 1 : 0;
        trace->lost = spans->lost;
        trace->start = spans->start;
        for (uint32_t s = 0; s < spans->span_count; s++) {
            trace->spans[trace->span_count + s] = spans->spans[s];
        }
        trace->span_count += spans->span_count;
    }
}

static void on_join(struct fixture *f, transport_link link, const struct fl_join *join)
{
    struct fl_cluster_message answer = {.kind = FL_MESSAGE_WELCOME, .as.welcome.coordinator = 77};
    if (f->refusal != NULL) {
        answer =
            (struct fl_cluster_message){.kind = FL_MESSAGE_FAILURE, .as.failure.code = FL_DENIED};
        snprintf(answer.as.failure.text, sizeof(answer.as.failure.text), "%s", f->refusal);
    }
    for (uint32_t i = 0; i < f->box_count; i++) {
        if (f->boxes[i].join.incarnation == join->incarnation) {
            f->boxes[i].join = *join;
            f->boxes[i].link = link;
            f->boxes[i].joined = f->refusal == NULL;
        }
    }
    say(f, link, &answer);
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct fixture *f = ctx;
    static unsigned char memory[SCRATCH];
    struct fl_arena arena;
    struct fl_cluster_message message;
    (void)header;
    (void)header_size;
    fl_arena_init(&arena, memory, sizeof(memory));
    if (type != FL_WIRE_CONTROL ||
        fl_cluster_message_unpack(data, size, &arena, &message) != FL_OK) {
        return;
    }
    if (message.kind == FL_MESSAGE_JOIN) {
        on_join(f, link, &message.as.join);
    } else if (message.kind == FL_MESSAGE_FETCH) {
        serve_fetch(f, link, &message.as.fetch);
    } else if (message.kind == FL_MESSAGE_SPANS) {
        on_spans(f, link, &message.as.spans);
    } else if (message.kind == FL_MESSAGE_PROGRESS) {
        f->progress = message.as.progress;
    } else if (message.kind == FL_MESSAGE_FAILURE) {
        f->failure = message.as.failure;
        f->failure_count++;
    } else if (message.kind == FL_MESSAGE_TOKEN && f->token_count < TOKENS_MAX) {
        f->tokens[f->token_count++] = message.as.token.id;
        f->finish = message.as.token.finish;
    }
}

static void on_up(void *ctx, transport_link link, enum fl_party party, const char *address)
{
    (void)ctx, (void)link, (void)party, (void)address;
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    (void)ctx, (void)link, (void)cookie;
}

static void on_down(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct fixture *f = ctx;
    (void)why, (void)text;
    for (uint32_t i = 0; i < f->box_count; i++) {
        if (f->boxes[i].link == link) {
            f->boxes[i].link = 0;
            f->boxes[i].joined = false;
        }
    }
}

/* Boxes -------------------------------------------------------------------------------------- */

static void box_open(struct fixture *f, uint64_t memory, const char *models)
{
    struct box *box = &f->boxes[f->box_count++];
    const struct device_host_config host = {.threads = 1, .isa = "scalar"};
    CHECK_EQ(transport_local_open(f->network, &box->transport), FL_OK);
    CHECK_EQ(device_host_open(&host, &box->device), FL_OK);
    box->folder.path = models;
    box->storage = model_folder_storage(&box->folder);
    box->join = (struct fl_join){
        .incarnation = 100 + f->box_count, .memory_budget = memory, .threads = 1, .isa = "scalar"};
    snprintf(box->join.name, sizeof(box->join.name), "box%u", f->box_count);
    box->transport->ops->address(box->transport, &box->join.address);
    const struct node_config config = {
        .transport = box->transport,
        .clock = local_network_clock(f->network),
        .device = box->device,
        .storage = &box->storage,
        .coordinator = f->address,
        .rejoin = true,
        .join = box->join,
    };
    CHECK_EQ(node_open(&config, &box->node), FL_OK);
}

static void box_close(struct box *box)
{
    if (box->node != NULL) {
        box->transport->ops->close(box->transport);
        node_close(box->node);
        box->device->ops->close(box->device);
        box->node = NULL;
    }
}

static void begin(struct fixture *f, uint32_t boxes, uint64_t memory, enum files files)
{
    *f = (struct fixture){.box_count = 0};
    temp_folder_make(&f->temp);
    temp_folder_path(&f->temp, "tiny.gguf", f->path);
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    CHECK_EQ(model_write(&spec, f->path), FL_OK);
    CHECK_EQ(model_open(f->path, &f->model), FL_OK);
    f->scratch = malloc(2 * SCRATCH);
    f->traces = calloc(NODES_MAX, sizeof(f->traces[0]));
    CHECK(f->scratch != NULL && f->traces != NULL);
    const struct local_network_config config = {
        .seed = 1, .delay_min_ns = 10000, .delay_max_ns = 300000};
    CHECK_EQ(local_network_open(&config, &f->network), FL_OK);
    CHECK_EQ(transport_local_open(f->network, &f->transport), FL_OK);
    f->transport->ops->address(f->transport, &f->address);
    const struct peer_config peers = {
        .transport = f->transport,
        .clock = local_network_clock(f->network),
        .party = FL_PARTY_COORDINATOR,
        .events = {f, on_up, on_received, on_sent, on_down},
    };
    CHECK_EQ(peer_open(&peers, &f->peers), FL_OK);
    for (uint32_t i = 0; i < boxes; i++) {
        box_open(f, memory, files == WITH_FILES ? f->temp.path : NULL);
    }
}

static void end(struct fixture *f)
{
    for (uint32_t i = 0; i < f->box_count; i++) {
        box_close(&f->boxes[i]);
    }
    f->transport->ops->close(f->transport);
    peer_close(f->peers);
    local_network_close(f->network);
    model_close(f->model);
    free(f->scratch);
    free(f->traces);
    temp_folder_remove(&f->temp);
}

/* The coordinator's part of a round; then time goes on. */
static void coordinator_turn(struct fixture *f)
{
    uint64_t next;
    const struct fl_clock clock = local_network_clock(f->network);
    (void)peer_poll(f->peers, &next);
    local_network_advance(f->network, fl_clock_now(&clock) + 100 * FL_NS_PER_US);
}

static void round_all(struct fixture *f)
{
    uint64_t next;
    for (uint32_t i = 0; i < f->box_count; i++) {
        struct box *box = &f->boxes[i];
        if (box->node != NULL && box->status == FL_OK) {
            box->status = node_wire_poll(box->node, &next);
            (void)node_compute_step(box->node);
            (void)node_load_step(box->node);
        }
    }
    coordinator_turn(f);
}

static void rounds(struct fixture *f, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        round_all(f);
    }
}

/* Go on until `done`; false when it takes for ever. */
static bool run_until(struct fixture *f, bool (*done)(const struct fixture *f))
{
    for (int i = 0; i < ROUNDS_MAX; i++) {
        if (done(f)) {
            return true;
        }
        round_all(f);
    }
    return false;
}

static bool all_joined(const struct fixture *f)
{
    uint32_t joined = 0;
    for (uint32_t i = 0; i < f->box_count; i++) {
        joined += f->boxes[i].joined && node_joined(f->boxes[i].node);
    }
    return joined == f->box_count;
}

static bool answered(const struct fixture *f)
{
    return f->finish != FL_FINISH_NONE || f->failure_count > 0;
}

static bool failed(const struct fixture *f)
{
    return f->failure_count > 0;
}

static bool stopped(const struct fixture *f)
{
    return f->boxes[0].status != FL_OK;
}

static bool well_under_way(const struct fixture *f)
{
    return f->token_count >= 5;
}

/* A plan over the first `count` boxes. */
static void send_plan(struct fixture *f, uint64_t plan_id, uint32_t count, uint32_t chunk_rows)
{
    struct fl_stage stages[NODES_MAX];
    const struct fl_manifest *whole = model_manifest(f->model);
    const uint32_t layers = whole->shape.layer_count;
    memset(stages, 0, sizeof(stages));
    for (uint32_t i = 0; i < count; i++) {
        memcpy(stages[i].node, f->boxes[i].join.name, FL_NAME_MAX);
        stages[i].incarnation = f->boxes[i].join.incarnation;
        stages[i].address = f->boxes[i].join.address;
        stages[i].layer_first = i * layers / count;
        stages[i].layer_count = (i + 1) * layers / count - stages[i].layer_first;
        stages[i].has_embed = i == 0;
        stages[i].has_head = i + 1 == count;
    }
    for (uint32_t i = 0; i < count; i++) {
        struct fl_cluster_message message = {.kind = FL_MESSAGE_PLAN,
                                             .as.plan = {.plan_id = plan_id,
                                                         .stage_index = i,
                                                         .stage_count = count,
                                                         .stages = stages,
                                                         .chunk_rows = chunk_rows,
                                                         .context = 128,
                                                         .kv_block_count = 16,
                                                         .sequence_max = 4}};
        const struct model_range range = {.layer_first = stages[i].layer_first,
                                          .layer_count = stages[i].layer_count,
                                          .has_embed = stages[i].has_embed,
                                          .has_head = stages[i].has_head};
        CHECK_EQ(model_stage_manifest(whole, &range, &message.as.plan.manifest), FL_OK);
        say(f, f->boxes[i].link, &message);
    }
}

static void send_request(struct fixture *f, uint64_t plan_id, uint64_t request_id, uint32_t count,
                         uint32_t prompt_count, uint32_t max_tokens)
{
    uint32_t prompt[128];
    for (uint32_t i = 0; i < prompt_count; i++) {
        prompt[i] = 3 + i * 7 % 40;
    }
    for (uint32_t i = 0; i < count; i++) {
        const bool gets_tokens = i == 0 || i + 1 == count;
        const struct fl_cluster_message message = {
            .kind = FL_MESSAGE_ADMIT,
            .as.admit = {.plan_id = plan_id,
                         .request_id = request_id,
                         .sequence_id = request_id,
                         .position_max = prompt_count + max_tokens,
                         .prompt_count = prompt_count,
                         .max_tokens = max_tokens,
                         .token_count = gets_tokens ? prompt_count : 0,
                         .tokens = prompt,
                         .sampling = {.top_p = 1, .repetition_penalty = 1}}};
        say(f, f->boxes[i].link, &message);
    }
}

static void send_unplan(struct fixture *f, uint32_t box, uint64_t plan_id)
{
    const struct fl_cluster_message message = {.kind = FL_MESSAGE_UNPLAN,
                                               .as.unplan.plan_id = plan_id};
    say(f, f->boxes[box].link, &message);
}

/* Cases begin with one of these ---------------------------------------------------------------- */

/* Boxes that have joined. */
static void begin_joined(struct fixture *f, uint32_t boxes, enum files files)
{
    begin(f, boxes, 1 << 28, files);
    CHECK(run_until(f, all_joined));
}

/* A prompt in chunks, and how much is answered. */
struct question {
    uint32_t chunk_rows;
    uint32_t prompt_count;
    uint32_t max_tokens;
};

static const struct question usual = {.chunk_rows = 16, .prompt_count = 50, .max_tokens = 16};
static const struct question brief = {.chunk_rows = 16, .prompt_count = 5, .max_tokens = 2};
static const struct question long_winded = {.chunk_rows = 16, .prompt_count = 50, .max_tokens = 60};
static const struct question in_30_chunks = {.chunk_rows = 4, .prompt_count = 120, .max_tokens = 1};
static const struct question row_by_row = {.chunk_rows = 1, .prompt_count = 126, .max_tokens = 1};

/* A plan over the first `boxes`, and request 1 on it. */
static void ask(struct fixture *f, uint64_t plan_id, uint32_t boxes,
                const struct question *question)
{
    f->token_count = 0;
    f->finish = FL_FINISH_NONE;
    send_plan(f, plan_id, boxes, question->chunk_rows);
    send_request(f, plan_id, 1, boxes, question->prompt_count, question->max_tokens);
}

/* Boxes that have answered. */
static void begin_answered(struct fixture *f, uint64_t plan_id, uint32_t boxes,
                           const struct question *question)
{
    begin_joined(f, boxes, WITH_FILES);
    ask(f, plan_id, boxes, question);
    CHECK(run_until(f, answered));
}

/* Tokens that `count` boxes give to a prompt of 50 in chunks of `chunk_rows`. */
static void answer(uint32_t count, uint32_t chunk_rows, enum files files, uint32_t out[16],
                   uint32_t *out_fetches)
{
    const struct question question = {
        .chunk_rows = chunk_rows, .prompt_count = 50, .max_tokens = 16};
    struct fixture f;
    begin_joined(&f, count, files);
    ask(&f, 1, count, &question);
    const bool done = run_until(&f, answered);
    const uint32_t tokens = f.token_count;
    const enum fl_finish finish = f.finish;
    memcpy(out, f.tokens, 16 * sizeof(out[0]));
    if (out_fetches != NULL) {
        *out_fetches = f.fetch_count;
    }
    if (f.failure_count > 0) {
        printf("  failure: %s\n", f.failure.text);
    }
    end(&f);
    CHECK(done);
    CHECK_EQ(tokens, 16);
    CHECK_EQ(finish, FL_FINISH_LENGTH);
}

/* Cases -------------------------------------------------------------------------------------- */

static void three_nodes_in_any_chunks_answer_as_one_does(void)
{
    uint32_t alone[16];
    uint32_t together[16];
    answer(1, 64, WITH_FILES, alone, NULL);
    for (uint32_t count = 1; count <= 3; count++) {
        for (uint32_t chunk = 7; chunk <= 64; chunk += 19) {
            answer(count, chunk, WITH_FILES, together, NULL);
            CHECK(memcmp(alone, together, sizeof(alone)) == 0);
        }
    }
}

static void nodes_without_files_fetch_and_answer_the_same(void)
{
    uint32_t alone[16];
    uint32_t fetched[16];
    uint32_t fetches = 0;
    answer(1, 16, WITH_FILES, alone, &fetches);
    CHECK_EQ(fetches, 0);
    answer(3, 16, WITHOUT_FILES, fetched, &fetches);
    CHECK(fetches > 0);
    CHECK(memcmp(alone, fetched, sizeof(alone)) == 0);
}

static void a_refused_node_stops_with_the_coordinators_sentence(void)
{
    struct fixture f;
    begin(&f, 1, 1 << 28, WITH_FILES);
    f.refusal = "a node of the name box1 is here already";
    CHECK(run_until(&f, stopped));
    const fl_status status = f.boxes[0].status;
    char text[256];
    snprintf(text, sizeof(text), "%s", node_text(f.boxes[0].node));
    end(&f);
    CHECK_EQ(status, FL_DENIED);
    CHECK(strcmp(text, "a node of the name box1 is here already") == 0);
}

static void a_plan_over_the_memory_budget_is_refused_with_numbers(void)
{
    struct fixture f;
    begin(&f, 1, 100000, WITH_FILES);
    CHECK(run_until(&f, all_joined));
    send_plan(&f, 1, 1, 16);
    const bool told = run_until(&f, failed);
    const bool joined = node_joined(f.boxes[0].node);
    const struct fl_failure failure = f.failure;
    end(&f);
    printf("  says: %s\n", failure.text);
    CHECK(told);
    CHECK_EQ(failure.code, FL_NO_MEMORY);
    CHECK_EQ(failure.request_id, 0);
    CHECK(strstr(failure.text, "MiB") != NULL && strstr(failure.text, "box1") != NULL);
    CHECK(joined);
}

static void a_lost_coordinator_is_joined_again_and_its_plans_are_gone(void)
{
    struct fixture f;
    begin_joined(&f, 2, WITH_FILES);
    ask(&f, 5, 2, &usual);
    rounds(&f, 20);
    peer_close_link(f.peers, f.boxes[0].link);
    peer_close_link(f.peers, f.boxes[1].link);
    rounds(&f, 100);
    const bool again = run_until(&f, all_joined);
    f.failure_count = 0;
    ask(&f, 5, 2, &usual); /* a coordinator that was restarted counts from the start again */
    const bool done = run_until(&f, answered);
    const uint32_t tokens = f.token_count;
    end(&f);
    CHECK(again);
    CHECK(done);
    CHECK_EQ(tokens, 16);
}

static void a_lost_neighbour_is_named_and_the_node_lives_on(void)
{
    struct fixture f;
    begin_joined(&f, 3, WITH_FILES);
    ask(&f, 1, 3, &long_winded);
    CHECK(run_until(&f, well_under_way));
    const uint32_t tokens = f.token_count;
    local_network_kill(f.network, f.boxes[1].transport);
    f.boxes[1].status = FL_END; /* not polled any more */
    const bool told = run_until(&f, failed);
    const struct fl_failure failure = f.failure;
    rounds(&f, 100); /* the other survivor says so, too, in its own time */
    const uint32_t failures = f.failure_count;
    /* The survivors form the next plan. */
    send_unplan(&f, 0, 1);
    f.failure_count = 0;
    ask(&f, 2, 1, &usual);
    const bool done = run_until(&f, answered);
    const uint32_t tokens_after = f.token_count;
    end(&f);
    printf("  says: %s\n", failure.text);
    CHECK_EQ(tokens, 5);
    CHECK(told);
    CHECK_EQ(failure.code, FL_NODE_LOST);
    CHECK(strstr(failure.text, "box2") != NULL);
    CHECK_EQ(failures, 2);
    CHECK(done);
    CHECK_EQ(tokens_after, 16);
}

static bool both_began(const struct fixture *f)
{
    return f->token_count >= 2;
}

static bool both_ended(const struct fixture *f)
{
    return f->token_count >= 16;
}

/* The last stage's link to the first takes its time; who samples a token does not wait for it. */
static void a_token_that_waits_for_its_link_holds_nothing_back(void)
{
    struct fixture f;
    begin_joined(&f, 3, WITH_FILES);
    local_network_cut(f.network, f.boxes[2].transport, f.boxes[0].transport);
    send_plan(&f, 1, 3, 16);
    send_request(&f, 1, 1, 3, 20, 8);
    send_request(&f, 1, 2, 3, 40, 8);
    const bool began = run_until(&f, both_began);
    rounds(&f, 1000);
    const uint32_t before = f.token_count;
    local_network_heal(f.network, f.boxes[2].transport, f.boxes[0].transport);
    const bool ended = run_until(&f, both_ended);
    const uint32_t failures = f.failure_count;
    end(&f);
    CHECK(began);
    CHECK_EQ(before, 2); /* neither goes on without stage 0 */
    CHECK(ended);
    CHECK_EQ(failures, 0);
}

static void unplan_in_mid_load_frees_the_place_for_the_next(void)
{
    struct fixture f;
    begin_joined(&f, 2, WITHOUT_FILES);
    for (uint64_t plan = 1; plan <= 40; plan++) {
        send_plan(&f, plan, 2, 16);
        rounds(&f, plan);
        send_unplan(&f, 0, plan);
        send_unplan(&f, 1, plan);
        rounds(&f, 30);
    }
    const uint32_t failures = f.failure_count;
    ask(&f, 41, 2, &usual);
    const bool done = run_until(&f, answered);
    const uint32_t tokens = f.token_count;
    const struct fl_progress progress = f.progress;
    end(&f);
    CHECK_EQ(failures, 0);
    CHECK(done);
    CHECK_EQ(tokens, 16);
    CHECK_EQ(progress.plan_id, 41);
    CHECK_EQ(progress.bytes_done, progress.bytes_fetched);
}

static void what_a_stranger_sends_costs_only_his_link(void)
{
    struct fixture f;
    begin_joined(&f, 1, WITH_FILES);
    send_plan(&f, 1, 1, 16);
    /* The coordinator's peer table plays the stranger on a second link. */
    transport_link link;
    CHECK_EQ(peer_connect(f.peers, &f.boxes[0].join.address, &link), FL_OK);
    rounds(&f, 100);
    const struct fl_cluster_message unplan = {.kind = FL_MESSAGE_UNPLAN, .as.unplan.plan_id = 1};
    struct fl_arena arena;
    size_t size;
    fl_arena_init(&arena, f.scratch, SCRATCH);
    CHECK_EQ(fl_cluster_message_pack(&unplan, &arena, f.scratch + SCRATCH, SCRATCH, &size), FL_OK);
    /* He is no node, so his link may be gone already; then there is nothing to say. */
    (void)!peer_send(f.peers, link, FL_WIRE_CONTROL, NULL, 0, f.scratch + SCRATCH, size, 0);
    (void)!peer_send(f.peers, link, FL_WIRE_ACTIVATIONS, "x", 1, "y", 1, 0);
    rounds(&f, 100);
    const fl_status gone = peer_send(f.peers, link, FL_WIRE_CONTROL, NULL, 0, "z", 1, 0);
    send_request(&f, 1, 1, 1, 50, 16);
    const bool done = run_until(&f, answered);
    const uint32_t tokens = f.token_count;
    end(&f);
    CHECK_EQ(gone, FL_LINK_LOST);
    CHECK(done);
    CHECK_EQ(tokens, 16);
}

static void garbage_of_the_coordinator_loses_its_link_and_is_joined_again(void)
{
    struct fixture f;
    begin_joined(&f, 1, WITH_FILES);
    CHECK_EQ(peer_send(f.peers, f.boxes[0].link, FL_WIRE_CONTROL, NULL, 0, "\xff\xff\xff", 3, 0),
             FL_OK);
    rounds(&f, 100);
    const bool again = run_until(&f, all_joined);
    ask(&f, 1, 1, &usual);
    const bool done = run_until(&f, answered);
    end(&f);
    CHECK(again);
    CHECK(done);
}

/* Traces ------------------------------------------------------------------------------------- */

static bool traced(const struct fixture *f)
{
    for (uint32_t i = 0; i < f->box_count; i++) {
        if (f->traces[i].last_count == 0) {
            return false;
        }
    }
    return true;
}

static void forget_traces(struct fixture *f)
{
    memset(f->traces, 0, NODES_MAX * sizeof(f->traces[0]));
}

static void send_trace(struct fixture *f, uint32_t box, uint64_t plan_id, uint64_t request_id)
{
    const struct fl_cluster_message message = {
        .kind = FL_MESSAGE_TRACE, .as.trace = {.plan_id = plan_id, .request_id = request_id}};
    say(f, f->boxes[box].link, &message);
}

/* Ask every box, and wait for what it says. */
static void trace_all(struct fixture *f, uint64_t plan_id, uint64_t request_id)
{
    forget_traces(f);
    for (uint32_t i = 0; i < f->box_count; i++) {
        send_trace(f, i, plan_id, request_id);
    }
    CHECK(run_until(f, traced));
    rounds(f, 50);
    for (uint32_t i = 0; i < f->box_count; i++) {
        const struct trace *trace = &f->traces[i];
        CHECK_EQ(trace->last_count, 1);
        CHECK(!trace->order_broken);
        enum fl_lane lane = FL_LANE_NONE;
        uint64_t start_ns = 0;
        for (uint32_t s = 0; s < trace->span_count; s++) {
            start_ns = trace->spans[s].lane == lane ? start_ns : 0;
            lane = trace->spans[s].lane;
            CHECK(trace->spans[s].start_ns >= start_ns);
            CHECK_EQ(trace->spans[s].plan_id, plan_id);
            start_ns = trace->spans[s].start_ns;
        }
    }
}

static const struct fl_span *find_span(const struct trace *trace, enum fl_phase phase,
                                       enum fl_lane lane, uint32_t n)
{
    for (uint32_t i = 0; i < trace->span_count; i++) {
        const struct fl_span *span = &trace->spans[i];
        if (span->phase == phase && span->lane == lane && n-- == 0) {
            return span;
        }
    }
    return NULL;
}

static uint32_t count_spans(const struct trace *trace, enum fl_phase phase, enum fl_lane lane)
{
    uint32_t count = 0;
    while (find_span(trace, phase, lane, count) != NULL) {
        count++;
    }
    return count;
}

static void check_start(const struct fixture *f, const struct trace *trace)
{
    CHECK_EQ(trace->lost, 0);
    CHECK(trace->start.residency_known);
    CHECK_EQ(trace->start.page_cache_before, trace->start.shard_bytes);
    CHECK_EQ(trace->start.page_cache_after, trace->start.shard_bytes);
    CHECK(trace->start.shard_bytes > 0 && !trace->start.direct);
    CHECK(f->token_count > 0);
}

/* What both stages record, of a prompt of 50 in chunks of 16. */
static void check_stage(const struct trace *trace)
{
    CHECK_EQ(count_spans(trace, FL_PHASE_MEMORY, FL_LANE_COMPUTE), 1);
    CHECK_EQ(count_spans(trace, FL_PHASE_KV, FL_LANE_COMPUTE), 1);
    CHECK_EQ(count_spans(trace, FL_PHASE_JOIN, FL_LANE_COMPUTE), 4);
    CHECK(count_spans(trace, FL_PHASE_PREFILL, FL_LANE_COMPUTE) >= 8);
    CHECK(count_spans(trace, FL_PHASE_READ, FL_LANE_LOADER) >= 2);
    CHECK_EQ(count_spans(trace, FL_PHASE_READ, FL_LANE_LOADER),
             count_spans(trace, FL_PHASE_REPACK, FL_LANE_LOADER));
    CHECK_EQ(count_spans(trace, FL_PHASE_DECODE, FL_LANE_COMPUTE), 15);
    CHECK_EQ(count_spans(trace, FL_PHASE_LINK, FL_LANE_WIRE), 1);
}

static void a_trace_goes_from_the_token_back_to_the_prompt(void)
{
    struct fixture f;
    begin_answered(&f, 1, 2, &usual);
    trace_all(&f, 1, 1);
    const struct trace *first = &f.traces[0];
    const struct trace *last = &f.traces[1];
    check_start(&f, first);
    check_start(&f, last);
    check_stage(first);
    check_stage(last);

    /* The plan, then the request; they came before anything else. */
    for (int i = 0; i < 2; i++) {
        const struct fl_span *plan = find_span(&f.traces[i], FL_PHASE_RECEIVE, FL_LANE_WIRE, 0);
        const struct fl_span *admit = find_span(&f.traces[i], FL_PHASE_RECEIVE, FL_LANE_WIRE, 1);
        CHECK_EQ(plan->request_id, 0);
        CHECK_EQ(admit->request_id, 1);
        CHECK_EQ(admit->rows, 0);
        CHECK(find_span(&f.traces[i], FL_PHASE_MEMORY, FL_LANE_COMPUTE, 0)->start_ns >=
              plan->start_ns);
    }
    /* Rows: sent by one, received by the other, and joined there. */
    CHECK_EQ(count_spans(first, FL_PHASE_SEND, FL_LANE_WIRE), 4);
    CHECK_EQ(count_spans(last, FL_PHASE_RECEIVE, FL_LANE_WIRE), 2 + 4);
    uint32_t position = 0;
    for (uint32_t n = 0; n < 4; n++) {
        const struct fl_span *send = find_span(first, FL_PHASE_SEND, FL_LANE_WIRE, n);
        const struct fl_span *receive = find_span(last, FL_PHASE_RECEIVE, FL_LANE_WIRE, 2 + n);
        const struct fl_span *join = find_span(last, FL_PHASE_JOIN, FL_LANE_COMPUTE, n);
        CHECK_EQ(send->position, position);
        CHECK(receive->position == send->position && receive->rows == send->rows);
        CHECK(receive->bytes == send->bytes && receive->bytes > 0);
        CHECK(receive->start_ns > send->end_ns);
        CHECK_EQ(join->position, send->position);
        CHECK(join->cause == FL_CAUSE_INPUT || join->cause == FL_CAUSE_BUSY);
        CHECK_EQ(join->cause_ns, receive->start_ns);
        position += send->rows;
    }
    CHECK_EQ(position, 50);
    /* The first token, and no other. */
    const struct fl_span *sample = find_span(last, FL_PHASE_SAMPLE, FL_LANE_COMPUTE, 0);
    const struct fl_span *token = find_span(last, FL_PHASE_SEND, FL_LANE_WIRE, 0);
    CHECK_EQ(count_spans(last, FL_PHASE_SAMPLE, FL_LANE_COMPUTE), 1);
    CHECK_EQ(count_spans(last, FL_PHASE_SEND, FL_LANE_WIRE), 1);
    CHECK_EQ(token->position, 50);
    CHECK(token->start_ns >= sample->end_ns);
    CHECK_EQ(count_spans(first, FL_PHASE_HEAD, FL_LANE_COMPUTE), 0);
    end(&f);
}

static void rows_that_waited_say_for_what(void)
{
    struct fixture f;
    begin_joined(&f, 2, WITH_FILES);
    ask(&f, 1, 2, &in_30_chunks);
    /* The second box computes nothing yet, and gives no credit. */
    for (int i = 0; i < 3000; i++) {
        uint64_t next;
        CHECK_EQ(node_wire_poll(f.boxes[0].node, &next), FL_OK);
        CHECK_EQ(node_wire_poll(f.boxes[1].node, &next), FL_OK);
        (void)node_compute_step(f.boxes[0].node);
        (void)node_load_step(f.boxes[0].node);
        coordinator_turn(&f);
    }
    CHECK(run_until(&f, answered));
    CHECK_EQ(f.token_count, 1);
    trace_all(&f, 1, 1);
    const struct trace *trace = &f.traces[0];
    const struct fl_span *send = find_span(trace, FL_PHASE_SEND, FL_LANE_WIRE, 0);
    CHECK_EQ(send->cause, FL_CAUSE_CREDIT);
    CHECK(send->cause_ns > send->start_ns && send->cause_ns <= send->end_ns);
    CHECK(send->end_ns - send->start_ns > 100 * FL_NS_PER_MS);
    end(&f);
}

static void of_unknown_plans_and_requests_a_trace_says_nothing(void)
{
    struct fixture f;
    begin_answered(&f, 3, 1, &brief);
    static const struct fl_trace unknown[] = {{4, 1}, {3, 2}, {UINT64_MAX, UINT64_MAX}};
    for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
        trace_all(&f, unknown[i].plan_id, unknown[i].request_id);
        CHECK_EQ(f.traces[0].message_count, 1);
        CHECK_EQ(f.traces[0].span_count, 0);
        CHECK_EQ(f.traces[0].lost, 1);
    }
    trace_all(&f, 3, 1);
    CHECK(f.traces[0].span_count > 10);
    end(&f);
}

static void a_long_trace_comes_in_several_messages(void)
{
    struct fixture f;
    begin_answered(&f, 1, 1, &row_by_row);
    trace_all(&f, 1, 1);
    const struct trace *trace = &f.traces[0];
    const uint32_t pieces = 2 * model_manifest(f.model)->shape.layer_count;
    CHECK_EQ(count_spans(trace, FL_PHASE_JOIN, FL_LANE_COMPUTE), 126);
    CHECK_EQ(count_spans(trace, FL_PHASE_EMBED, FL_LANE_COMPUTE), 126);
    CHECK_EQ(count_spans(trace, FL_PHASE_PREFILL, FL_LANE_COMPUTE), 126 * pieces);
    CHECK(trace->span_count > FL_SPANS_MAX);
    CHECK_EQ(trace->message_count, (trace->span_count + FL_SPANS_MAX - 1) / FL_SPANS_MAX);
    end(&f);
}

/* Requests that were admitted together get their first tokens together. */
static void all_traces_that_come_together_are_answered(void)
{
    enum { COUNT = 256 };
    struct fixture f;
    begin_answered(&f, 1, 1, &brief);
    forget_traces(&f);
    for (uint32_t i = 0; i < COUNT; i++) {
        send_trace(&f, 0, 1, i + 50);
    }
    rounds(&f, 4 * COUNT);
    CHECK_EQ(f.traces[0].last_count, COUNT);
    trace_all(&f, 1, 1);
    CHECK(f.traces[0].span_count > 10);
    end(&f);
}

static void of_far_too_many_traces_the_oldest_are_dropped(void)
{
    struct fixture f;
    begin_answered(&f, 1, 1, &brief);
    forget_traces(&f);
    for (uint32_t round = 0; round < 50; round++) { /* as fast as the link takes them */
        for (uint32_t i = 0; i < 50; i++) {
            send_trace(&f, 0, 1, i + 50);
        }
        round_all(&f);
    }
    rounds(&f, 1000);
    CHECK(f.traces[0].last_count >= 512 && f.traces[0].last_count < 50 * 50);
    CHECK(node_joined(f.boxes[0].node));
    trace_all(&f, 1, 1);
    CHECK(f.traces[0].span_count > 10);
    end(&f);
}

/* The wire alone goes on until box 1 has answered a TRACE. */
static bool wire_answers(struct fixture *f)
{
    for (int i = 0; i < 10000 && f->traces[0].last_count == 0; i++) {
        uint64_t next = 0;
        CHECK_EQ(node_wire_poll(f->boxes[0].node, &next), FL_OK);
        coordinator_turn(f);
    }
    return f->traces[0].last_count == 1;
}

/* The coordinator counts on it: an answer without a word about what is missing is a whole one. */
static void of_a_plan_that_goes_meanwhile_something_is_lost(void)
{
    struct fixture f;
    begin_answered(&f, 1, 1, &row_by_row);
    /* In the middle of an answer: what it said of its start stays true. */
    forget_traces(&f);
    send_trace(&f, 0, 1, 1);
    while (f.traces[0].message_count == 0) {
        round_all(&f);
    }
    CHECK_EQ(f.traces[0].last_count, 0);
    const struct fl_start_record start = f.traces[0].start;
    CHECK(start.shard_bytes > 0);
    send_unplan(&f, 0, 1);
    CHECK(wire_answers(&f));
    CHECK_EQ(f.traces[0].start.shard_bytes, start.shard_bytes);
    CHECK_EQ(f.traces[0].lost, 0);
    /* And before it. */
    forget_traces(&f);
    send_trace(&f, 0, 1, 1);
    CHECK(wire_answers(&f));
    CHECK_EQ(f.traces[0].span_count, 0);
    CHECK(f.traces[0].lost > 0);
    end(&f);
}

static const struct test_case cases[] = {
    {"node: three nodes, in any chunks, answer as one does",
     three_nodes_in_any_chunks_answer_as_one_does},
    {"node: nodes without files fetch and answer the same",
     nodes_without_files_fetch_and_answer_the_same},
    {"node: a refused node stops with the coordinator's sentence",
     a_refused_node_stops_with_the_coordinators_sentence},
    {"node: a plan over the memory budget is refused with numbers",
     a_plan_over_the_memory_budget_is_refused_with_numbers},
    {"node: a lost coordinator is joined again, and its plans are gone",
     a_lost_coordinator_is_joined_again_and_its_plans_are_gone},
    {"node: a lost neighbour is named and the node lives on",
     a_lost_neighbour_is_named_and_the_node_lives_on},
    {"node: a token that waits for its link holds nothing back",
     a_token_that_waits_for_its_link_holds_nothing_back},
    {"node: unplan in mid load frees the place for the next",
     unplan_in_mid_load_frees_the_place_for_the_next},
    {"node: what a stranger sends costs only his link", what_a_stranger_sends_costs_only_his_link},
    {"node: a trace goes from the token back to the prompt",
     a_trace_goes_from_the_token_back_to_the_prompt},
    {"node: rows that waited to be sent say for what", rows_that_waited_say_for_what},
    {"node: of unknown plans and requests a trace says nothing",
     of_unknown_plans_and_requests_a_trace_says_nothing},
    {"node: a long trace comes in several messages", a_long_trace_comes_in_several_messages},
    {"node: all traces that come together are answered",
     all_traces_that_come_together_are_answered},
    {"node: of far too many traces the oldest are dropped",
     of_far_too_many_traces_the_oldest_are_dropped},
    {"node: of a plan that goes meanwhile something is lost",
     of_a_plan_that_goes_meanwhile_something_is_lost},
    {"node: garbage of the coordinator loses its link, and it is joined again",
     garbage_of_the_coordinator_loses_its_link_and_is_joined_again},
};

TEST_MAIN(cases)
