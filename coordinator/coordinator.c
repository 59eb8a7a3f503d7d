#include "coordinator/coordinator.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/generation.h"
#include "coordinator/placement.h"
#include "coordinator/request.h"
#include "coordinator/state.h"
#include "coordinator/trace.h"
#include "proto/base/log.h"
#include "proto/pool_key.h"

enum {
    NODE_MESSAGE_MAX = 512 << 10, /* what a node may say at once; file ranges are the most */
    ARENA_SIZE = 4 * NODE_MESSAGE_MAX,
    PLAN_RANGE = 1 << 12, /* plan ids of one coordinator, or so */
    PLAN_RANGE_COUNT = 1 << 18,
    RETRY_MS = 1000,
};

/* Between two pings the error of a clock map grows by 500 ppm of half this time at most. */
static const uint64_t clock_ping_ns = 250 * FL_NS_PER_MS;

/* ---- what nodes say ---- */

static void take_join(struct coordinator *coordinator, transport_link link,
                      const struct fl_join *join)
{
    struct roster_node *former = roster_former(coordinator->roster, join);
    if (former != NULL && former->link != link) {
        char text[STATE_TEXT_MAX];
        snprintf(text, sizeof(text),
                 "node %s came back over a new connection and its work was lost; the request can "
                 "be sent again",
                 former->name);
        placement_drop_node(coordinator, former, text);
        file_server_link_down(coordinator->files, former->link);
    }
    struct roster_node *node = NULL;
    const enum fl_log_level level = fl_fail_log_at(FL_LOG_DEBUG); /* the node hears of it */
    const fl_status status = roster_join(coordinator->roster, link, join, &node);
    (void)fl_fail_log_at(level);
    if (status != FL_OK && join->incarnation != coordinator->refused_incarnation) {
        coordinator->refused_incarnation = join->incarnation;
        fl_log(FL_LOG_WARN, "node refused: %s", fl_last_error());
    }
    if (status == FL_OK) {
        fl_log(FL_LOG_INFO,
               "node %s joined from %s, memory %" PRIu64 " MiB, threads %" PRIu32
               ", isa %s, nodes %" PRIu32,
               node->name, node->where, node->memory_budget >> 20, node->threads, node->isa,
               roster_ready_count(coordinator->roster));
    }
}

static void take_failure(struct coordinator *coordinator, struct placement *placement,
                         const struct roster_node *node, const struct fl_failure *failure)
{
    fl_log(FL_LOG_WARN, "plan %" PRIu64 " failed on node %s: %s", placement->plan_id, node->name,
           failure->text);
    if (failure->request_id != 0) {
        generation_failure(coordinator, placement, node, failure);
        return;
    }
    char text[STATE_TEXT_MAX];
    state_failure_text(node, failure, text);
    /* A broken link or a lost neighbour: the next plan goes without it, so trying again helps. */
    const bool lost = failure->code == FL_LINK_LOST || failure->code == FL_NODE_LOST;
    placement_drop(coordinator, placement, (fl_status)failure->code, text, lost ? RETRY_MS : 0);
}

/* The end of its link follows.  Its plans go now: its neighbours will soon say that they lost it. */
static void take_leave(struct coordinator *coordinator, struct roster_node *node)
{
    char sentence[STATE_TEXT_MAX];
    node->leaving = true;
    fl_log(FL_LOG_INFO, "node %s left, nodes %" PRIu32, node->name,
           roster_ready_count(coordinator->roster) - 1);
    snprintf(sentence, sizeof(sentence),
             "node %s was stopped; the request can be sent again, it will be planned on the "
             "remaining nodes",
             node->name);
    placement_drop_node(coordinator, node, sentence);
}

static bool is_last_stage(const struct placement *placement, const struct roster_node *node)
{
    return placement->stages[placement->stage_count - 1].node == node;
}

static bool has_stage(const struct placement *placement, const struct roster_node *node)
{
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        if (placement->stages[i].node == node) {
            return true;
        }
    }
    return false;
}

/* Messages about a plan.  One that is gone, or not this node's, is late or none of its business. */
static void take_plan_message(struct coordinator *coordinator, struct roster_node *node,
                              const struct fl_cluster_message *message)
{
    uint64_t plan_id = 0;
    if (message->kind == FL_MESSAGE_FAILURE && message->as.failure.plan_id == 0) {
        take_leave(coordinator, node);
        return;
    }
    if (message->kind == FL_MESSAGE_TOKEN) {
        plan_id = message->as.token.plan_id;
    } else if (message->kind == FL_MESSAGE_PROGRESS) {
        plan_id = message->as.progress.plan_id;
    } else {
        plan_id = message->as.failure.plan_id;
    }
    struct placement *placement = placement_by_id(coordinator, plan_id);
    if (placement == NULL || !has_stage(placement, node)) {
        fl_log(FL_LOG_DEBUG, "node %s spoke of plan %" PRIu64 ", which is not there", node->name,
               plan_id);
        return;
    }
    if (message->kind == FL_MESSAGE_PROGRESS) {
        placement_progress(placement, node, &message->as.progress);
        generation_progress(coordinator, placement);
    } else if (message->kind == FL_MESSAGE_FAILURE) {
        take_failure(coordinator, placement, node, &message->as.failure);
    } else if (is_last_stage(placement, node)) {
        generation_token(coordinator, placement, &message->as.token);
    }
}

static void take_message(struct coordinator *coordinator, transport_link link,
                         const struct fl_cluster_message *message)
{
    if (message->kind == FL_MESSAGE_JOIN) {
        take_join(coordinator, link, &message->as.join);
        return;
    }
    struct roster_node *node = roster_by_link(coordinator->roster, link);
    if (node == NULL) {
        return; /* it has not joined, or its JOIN was refused */
    }
    switch (message->kind) {
    case FL_MESSAGE_TOKEN:
    case FL_MESSAGE_PROGRESS:
    case FL_MESSAGE_FAILURE: take_plan_message(coordinator, node, message); return;
    case FL_MESSAGE_FETCH: file_server_fetch(coordinator->files, node, &message->as.fetch); return;
    case FL_MESSAGE_SPANS: trace_take(coordinator, node, &message->as.spans); return;
    case FL_MESSAGE_JOIN:
    case FL_MESSAGE_WELCOME:
    case FL_MESSAGE_PLAN:
    case FL_MESSAGE_UNPLAN:
    case FL_MESSAGE_ADMIT:
    case FL_MESSAGE_END:
    case FL_MESSAGE_DROP:
    case FL_MESSAGE_LINK:
    case FL_MESSAGE_CREDIT:
    case FL_MESSAGE_TRACE: break;
    }
    fl_log(FL_LOG_WARN, "node %s closed: a node does not say message %d to a coordinator",
           node->name, (int)message->kind);
    roster_hang_up(coordinator->roster, node);
}

/* ---- events of the links ---- */

static void on_up(void *ctx, transport_link link, enum fl_party party, const char *address)
{
    struct coordinator *coordinator = ctx;
    if (party != FL_PARTY_NODE) {
        fl_log(FL_LOG_WARN, "link %s closed: this port is for nodes", address);
        peer_close_link(coordinator->peers, link);
        return;
    }
    roster_link_up(coordinator->roster, link, address);
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct coordinator *coordinator = ctx;
    (void)header;
    (void)header_size;
    struct fl_cluster_message message;
    fl_arena_reset(&coordinator->arena);
    fl_status status;
    if (type != FL_WIRE_CONTROL || size > NODE_MESSAGE_MAX) {
        status = FL_FAIL(FL_PROTOCOL,
                         "a message of type %u and %zu bytes is none that a node sends "
                         "to a coordinator",
                         (unsigned)type, size);
    } else {
        status = fl_cluster_message_unpack(data, size, &coordinator->arena, &message);
    }
    if (status != FL_OK) {
        fl_log(FL_LOG_WARN, "link closed: %s", fl_last_error());
        peer_close_link(coordinator->peers, link);
        return;
    }
    take_message(coordinator, link, &message);
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    struct coordinator *coordinator = ctx;
    (void)link;
    file_server_sent(coordinator->files, cookie);
}

static void on_down(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct coordinator *coordinator = ctx;
    (void)why;
    file_server_link_down(coordinator->files, link);
    struct roster_node *node = roster_link_down(coordinator->roster, link);
    if (node == NULL || coordinator->leaving) {
        return;
    }
    if (node->leaving) {
        roster_forget(node);
        return;
    }
    fl_log(FL_LOG_WARN, "node %s was lost: %s", node->name, text);
    char sentence[STATE_TEXT_MAX];
    snprintf(sentence, sizeof(sentence),
             "node %s was lost (%s); the request can be sent again, it will be planned on the "
             "remaining nodes",
             node->name, text);
    placement_drop_node(coordinator, node, sentence);
}

static void on_ponged(void *ctx, transport_link link, enum clock_map_news news)
{
    struct coordinator *coordinator = ctx;
    roster_ponged(coordinator->roster, link, peer_clock(coordinator->peers, link), news);
}

static fl_status wire_send(void *ctx, transport_link link, uint16_t type, const void *header,
                           size_t header_size, const void *data, size_t size, uint64_t cookie)
{
    struct coordinator *coordinator = ctx;
    return peer_send(coordinator->peers, link, type, header, header_size, data, size, cookie);
}

static void wire_close(void *ctx, transport_link link)
{
    struct coordinator *coordinator = ctx;
    peer_close_link(coordinator->peers, link);
}

static void on_model_ready(void *ctx, const char *name, fl_status status, const char *text,
                           struct catalog_model *model)
{
    request_model_ready(ctx, name, status, text, model);
}

/* ---- opening and closing ---- */

static void set_defaults(struct coordinator_settings *settings)
{
    settings->context = settings->context != 0 ? settings->context : COORDINATOR_CONTEXT;
    settings->kv_budget = settings->kv_budget != 0 ? settings->kv_budget : COORDINATOR_KV_BUDGET;
    settings->chunk = settings->chunk != 0 ? settings->chunk : COORDINATOR_CHUNK;
    settings->queue = settings->queue != 0 ? settings->queue : COORDINATOR_QUEUE;
    settings->sequences = settings->sequences != 0 ? settings->sequences : COORDINATOR_SEQUENCES;
}

static fl_status open_parts(struct coordinator *coordinator)
{
    const struct coordinator_config *config = &coordinator->config;
    const struct roster_wire wire = {.ctx = coordinator, .send = wire_send, .close = wire_close};
    FL_TRY(timeline_table_open(&coordinator->timelines));
    FL_TRY(worker_open(coordinator, &coordinator->worker));
    FL_TRY(roster_open(&wire, config->clock, coordinator->incarnation, &coordinator->roster));
    const struct catalog_config catalog = {.worker = coordinator->worker,
                                           .models_folder = config->settings.models_folder,
                                           .chat_family = config->settings.chat_family,
                                           .ctx = coordinator,
                                           .ready = on_model_ready};
    FL_TRY(catalog_open(&catalog, &coordinator->catalog));
    const struct file_server_config files = {.worker = coordinator->worker,
                                             .roster = coordinator->roster,
                                             .catalog = coordinator->catalog};
    FL_TRY(file_server_open(&files, &coordinator->files));
    const struct peer_config peers = {.transport = config->transport,
                                      .clock = config->clock,
                                      .party = FL_PARTY_COORDINATOR,
                                      .key = config->key,
                                      .events = {.ctx = coordinator,
                                                 .up = on_up,
                                                 .received = on_received,
                                                 .sent = on_sent,
                                                 .down = on_down},
                                      .clock_ns = clock_ping_ns,
                                      .ponged = on_ponged};
    return peer_open(&peers, &coordinator->peers);
}

fl_status coordinator_open(const struct coordinator_config *config, struct coordinator **out)
{
    struct coordinator *coordinator = calloc(1, sizeof(*coordinator));
    void *block = malloc(ARENA_SIZE);
    if (coordinator == NULL || block == NULL) {
        free(coordinator);
        free(block);
        return FL_FAIL(FL_NO_MEMORY, "coordinator: no memory");
    }
    *coordinator = (struct coordinator){.config = *config,
                                        .started_ns = fl_clock_now(&config->clock),
                                        .next_serial = 1,
                                        .next_plan_id = 1,
                                        .next_request_id = 1,
                                        .arena_block = block};
    set_defaults(&coordinator->config.settings);
    fl_arena_init(&coordinator->arena, block, ARENA_SIZE);
    fl_random_bytes(&coordinator->incarnation, sizeof(coordinator->incarnation));
    /* What nodes still say to each other about a former coordinator's plans is not about ours. */
    coordinator->next_plan_id += coordinator->incarnation % PLAN_RANGE_COUNT * PLAN_RANGE;
    const fl_status status = open_parts(coordinator);
    if (status != FL_OK) {
        coordinator_close(coordinator);
        return status;
    }
    *out = coordinator;
    return FL_OK;
}

void coordinator_end_requests(struct coordinator *coordinator, const char *text)
{
    (void)generation_end_answered(coordinator, UINT64_MAX);
    while (coordinator->placements != NULL) {
        placement_drop(coordinator, coordinator->placements, FL_CANCELLED, text, 0);
    }
    while (coordinator->requests != NULL) {
        request_fail(coordinator, coordinator->requests, FL_CANCELLED, text, 0);
    }
}

void coordinator_leave(struct coordinator *coordinator)
{
    coordinator->leaving = true;
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        roster_hang_up(coordinator->roster, roster_at(coordinator->roster, i));
    }
}

bool coordinator_alone(const struct coordinator *coordinator)
{
    return roster_ready_count(coordinator->roster) == 0;
}

void coordinator_close(struct coordinator *coordinator)
{
    if (coordinator == NULL) {
        return;
    }
    if (coordinator->roster != NULL) {
        coordinator_end_requests(coordinator, "the coordinator has stopped");
    }
    worker_close(coordinator->worker);
    file_server_close(coordinator->files);
    catalog_close(coordinator->catalog);
    peer_close(coordinator->peers);
    roster_close(coordinator->roster);
    timeline_table_close(coordinator->timelines);
    free(coordinator->arena_block);
    free(coordinator);
}

/* ---- from the outside ---- */

void coordinator_request(struct coordinator *coordinator, uint64_t client,
                         const struct fl_client_request *request)
{
    request_start(coordinator, client, request);
}

void coordinator_client_gone(struct coordinator *coordinator, uint64_t client)
{
    for (struct request *request = coordinator->requests; request != NULL;
         request = request->next) {
        request->muted = request->muted || request->client == client;
    }
    for (struct request *request = coordinator->requests; request != NULL;) {
        if (request->client != client) {
            request = request->next;
            continue;
        }
        generation_cancel(coordinator, request);
        request = coordinator->requests; /* the list has changed */
    }
}

unsigned coordinator_poll(struct coordinator *coordinator, uint64_t *out_next_ns)
{
    uint64_t next_ns = UINT64_MAX;
    const enum fl_log_level level = fl_fail_log_at(FL_LOG_DEBUG); /* clients hear of these */
    unsigned count = worker_collect(coordinator->worker);
    (void)fl_fail_log_at(level);
    count += peer_poll(coordinator->peers, &next_ns);
    const uint64_t roster_ns = roster_poll(coordinator->roster);
    const uint64_t files_ns = file_server_poll(coordinator->files, state_now(coordinator));
    next_ns = files_ns < next_ns ? files_ns : next_ns;
    const uint64_t ending_ns = generation_end_answered(coordinator, state_now(coordinator));
    next_ns = ending_ns < next_ns ? ending_ns : next_ns;
    *out_next_ns = roster_ns < next_ns ? roster_ns : next_ns;
    return count;
}

struct worker *coordinator_worker(struct coordinator *coordinator)
{
    return coordinator->worker;
}
