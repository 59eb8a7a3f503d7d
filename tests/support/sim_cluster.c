#include "tests/support/sim_cluster.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cluster/transport_local.h"
#include "coordinator/coordinator.h"
#include "kernels/device.h"
#include "node/model_folder.h"
#include "node/node.h"

enum {
    PART_COUNT = 2 + SIM_NODE_MAX * NODE_PART_COUNT, /* coordinator, worker, nodes' parts */
    ROUND_PAUSE_NS = 20000, /* at most, between rounds in which something happened */
    NOT_KEPT_MAX = 400,     /* bytes of a complaint */
};

/* Until everybody has noticed a fault, got over it, and joined again. */
static const uint64_t aftermath_ns = 15 * FL_NS_PER_S;
static const uint64_t plenty = UINT64_C(1) << 30;

struct box {
    struct sim_cluster *sim;
    uint64_t origin_ns; /* what this machine's clock is ahead of the network's */
    bool alive;
    struct transport *transport;
    struct device *device;
    struct model_folder folder;
    struct model_storage storage;
    struct shard_cache *cache;
    char cache_path[TEMP_PATH_MAX];
    struct node *node;
    fl_status status; /* of the last wire poll */
};

struct sim_cluster {
    struct sim_config config;
    uint64_t random;
    struct local_network *network;
    struct fl_clock clock;
    struct temp_folder caches;
    struct transport *transport; /* the coordinator's; NULL while there is none */
    struct coordinator *coordinator;
    struct fl_address address;
    struct box boxes[SIM_NODE_MAX];
    uint64_t incarnation;
    uint64_t gates[PART_COUNT]; /* when each may work again */
    uint32_t quiet;             /* rounds */
    bool cut[SIM_NODE_MAX + 1][SIM_NODE_MAX + 1];
    uint32_t faults;   /* so far */
    uint64_t fault_ns; /* when the last one began or ended */
    uint64_t next_id;
    uint32_t request_count;
    struct sim_request *requests; /* [SIM_REQUEST_MAX] */
    struct {
        bool wanted;
        uint32_t joined, clocks, loaded, running, kv_used, kv_total, kept;
        uint64_t memory;
    } status;
    const struct sim_request *timeline; /* whose timeline is asked for */
    char complaint[NOT_KEPT_MAX];
};

uint64_t sim_now(const struct sim_cluster *sim)
{
    return fl_clock_now(&sim->clock);
}

/* Source: splitmix64, Steele, Lea, Flood 2014. */
uint64_t sim_random(struct sim_cluster *sim, uint64_t count)
{
    uint64_t z = sim->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return count > 0 ? (z ^ (z >> 31)) % count : 0;
}

uint32_t sim_node_count(const struct sim_cluster *sim)
{
    return sim->config.node_count;
}

const char *sim_complaint(const struct sim_cluster *sim)
{
    return sim->complaint[0] != '\0' ? sim->complaint : NULL;
}

FL_PRINTF(2, 3) static void complain(struct sim_cluster *sim, const char *format, ...)
{
    char text[NOT_KEPT_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    printf("  seed %" PRIu64 " at %.6f s: %s\n", sim->config.seed,
           (double)sim_now(sim) / (double)FL_NS_PER_S, text);
    if (sim->complaint[0] == '\0') {
        memcpy(sim->complaint, text, sizeof(text));
    }
}

/* Clients ------------------------------------------------------------------------------------ */

static bool all_joined(const struct sim_cluster *sim)
{
    for (uint32_t i = 0; i < sim->config.node_count; i++) {
        if (sim->boxes[i].alive && !node_joined(sim->boxes[i].node)) {
            return false;
        }
    }
    return true;
}

static bool calm_now(const struct sim_cluster *sim)
{
    for (uint32_t i = 0; i < sim->config.node_count; i++) {
        if (!sim->boxes[i].alive) {
            return false;
        }
        for (uint32_t j = 0; j <= SIM_NODE_MAX; j++) {
            if (sim->cut[i][j]) {
                return false;
            }
        }
    }
    return sim->coordinator != NULL && all_joined(sim) &&
           (sim->faults == 0 || sim_now(sim) > sim->fault_ns + aftermath_ns);
}

static void fault(struct sim_cluster *sim)
{
    sim->faults++;
    sim->fault_ns = sim_now(sim);
}

static struct sim_request *request_of(struct sim_cluster *sim, uint64_t client, uint64_t id)
{
    for (uint32_t i = 0; i < sim->request_count; i++) {
        if (sim->requests[i].client == client && sim->requests[i].id == id) {
            return &sim->requests[i];
        }
    }
    return NULL;
}

static bool may_fail(const struct sim_cluster *sim, const struct sim_request *request)
{
    if (request->kind == FL_REQUEST_UNLOAD &&
        (request->code == FL_BUSY || request->code == FL_NOT_FOUND)) {
        return true; /* in use, or not loaded */
    }
    return !request->calm || request->turbulence != sim->faults;
}

static void take_error(struct sim_cluster *sim, struct sim_request *request,
                       const struct fl_client_event *event)
{
    request->end = SIM_FAILED;
    request->code = event->as.error.code;
    snprintf(request->text, sizeof(request->text), "%s", event->as.error.text);
    if (!may_fail(sim, request)) {
        complain(sim, "request %" PRIu64 " failed without a fault: %s", request->id, request->text);
    } else if (request->code == FL_NODE_LOST && strstr(request->text, "box") == NULL) {
        complain(sim, "the error of a lost node names none: %s", request->text);
    } else if (request->text[0] == '\0') {
        complain(sim, "an error without a sentence, code %" PRIu32, request->code);
    }
}

static bool differ(double a, double b)
{
    return fabs(a - b) > 1e-6 * (fabs(a) + fabs(b)) + 1e-9;
}

/* Where the time went is told in full, whatever else goes wrong. */
static void check_phases(struct sim_cluster *sim, struct sim_request *request,
                         const struct fl_client_event *event)
{
    double exposed_ms = 0;
    for (uint32_t i = 0; i < event->as.done.phase_count; i++) {
        exposed_ms += event->as.done.phases[i].exposed_ms;
    }
    request->timeline_id = event->as.done.timeline_id;
    request->ttft_ms = event->as.done.ttft_ms;
    request->undisturbed = request->calm && request->turbulence == sim->faults;
    if (differ(exposed_ms, request->ttft_ms)) {
        complain(sim, "request %" PRIu64 " waited %.6f ms and %.6f are told of", request->id,
                 request->ttft_ms, exposed_ms);
    }
    /* An end token is one, and makes no text. */
    if (request->answer.token_count > 0 && request->timeline_id == 0) {
        complain(sim, "request %" PRIu64 " has %" PRIu32 " tokens and no timeline", request->id,
                 request->answer.token_count);
    }
}

static void take_timeline(struct sim_cluster *sim, const struct fl_timeline *timeline)
{
    const struct sim_request *request = sim->timeline;
    double at_ms = 0;
    double unknown_ms = 0;
    sim->timeline = NULL;
    for (uint32_t i = 0; i < timeline->segment_count; i++) {
        const bool unknown = strcmp(timeline->segments[i].phase, "unknown") == 0;
        unknown_ms += unknown ? timeline->segments[i].ms : 0;
        if (differ(timeline->segments[i].start_ms, at_ms)) {
            complain(sim, "the chain of request %" PRIu64 " has a gap", request->id);
        }
        at_ms = timeline->segments[i].start_ms + timeline->segments[i].ms;
    }
    if (differ(at_ms, request->ttft_ms) || differ(timeline->ttft_ms, request->ttft_ms)) {
        complain(sim, "the chain of request %" PRIu64 " is %.6f ms of %.6f", request->id, at_ms,
                 request->ttft_ms);
    }
    if (!timeline->complete && request->undisturbed && !request->cancelled) {
        complain(sim, "request %" PRIu64 " has spans missing and no fault to blame", request->id);
    }
    if (timeline->complete && unknown_ms > 0) {
        complain(sim, "request %" PRIu64 " has all its spans and %.6f ms unknown of %.6f",
                 request->id, unknown_ms, request->ttft_ms);
    }
}

static void take_done(struct sim_cluster *sim, struct sim_request *request,
                      const struct fl_client_event *event)
{
    struct sim_answer *answer = &request->answer;
    request->end = SIM_DONE;
    request->cached_tokens = event->as.done.cached_tokens;
    request->stage_count = event->as.done.stage_count;
    request->class_ = event->as.done.class_;
    if (request->kind != FL_REQUEST_GENERATE) {
        request->end = SIM_OVER;
        if (!request->cancelled || event->as.done.finish != FL_FINISH_CANCELLED) {
            complain(sim, "request %" PRIu64 " is done and was no generation", request->id);
        }
        return;
    }
    check_phases(sim, request, event);
    answer->finish = event->as.done.finish;
    answer->output_tokens = event->as.done.output_tokens;
    answer->logit_count = event->as.done.logit_count;
    for (uint32_t i = 0; i < answer->logit_count && i < SIM_LOGITS; i++) {
        answer->logits[i] = event->as.done.logits[i];
    }
    if (request->question->answer.finish == FL_FINISH_NONE) {
        return; /* there is no right answer yet: this becomes it */
    }
    if (answer->finish == FL_FINISH_CANCELLED) {
        if (!request->cancelled) {
            complain(sim, "request %" PRIu64 " was cancelled by nobody", request->id);
        } else if (!sim_answer_begins(answer, &request->question->answer)) {
            complain(sim, "request %" PRIu64 " was cancelled in a wrong answer", request->id);
        }
    } else if (!sim_answer_equal(answer, &request->question->answer)) {
        complain(sim, "request %" PRIu64 " got a wrong answer to a question about %s", request->id,
                 request->question->model);
    }
}

static void take_text(struct sim_cluster *sim, struct sim_request *request,
                      const struct fl_client_event *event)
{
    struct sim_answer *answer = &request->answer;
    const struct fl_text *text = &event->as.text.text;
    if (answer->text_size + text->size > SIM_TEXT_MAX ||
        answer->token_count + event->as.text.token_count > SIM_CONTEXT) {
        complain(sim, "request %" PRIu64 " gets more than the context holds", request->id);
        return;
    }
    if (text->size > 0) {
        memcpy(answer->text + answer->text_size, text->data, text->size);
        answer->text_size += text->size;
    }
    for (uint32_t i = 0; i < event->as.text.token_count; i++) {
        const struct fl_token_detail *token = &event->as.text.tokens[i];
        const uint32_t at = answer->token_count++;
        answer->tokens[at] = token->id;
        answer->logprobs[at] = token->logprob;
        for (uint32_t j = 0; j < token->top_count && j < SIM_LOGPROBS; j++) {
            answer->tops[at][j] = token->top[j];
        }
    }
}

/* Nodes are called box1 and so on, and their clocks do not drift. */
static void check_clock(struct sim_cluster *sim, const struct fl_node_summary *node)
{
    const unsigned long number = strtoul(node->name + strlen("box"), NULL, 10);
    FL_ASSERT(number >= 1 && number <= sim->config.node_count);
    const double true_us = (double)sim->boxes[number - 1].origin_ns / 1e3;
    if (node->clock_known && fabs(node->clock_offset_us - true_us) > node->clock_error_us) {
        complain(sim, "the clock of %s is %.3f us ahead and not %.3f us, error %.3f us", node->name,
                 true_us, node->clock_offset_us, node->clock_error_us);
    }
    sim->status.clocks += node->clock_known;
}

static void take_status(struct sim_cluster *sim, const struct fl_client_event *event)
{
    sim->status.wanted = false;
    sim->status.joined = 0;
    sim->status.clocks = 0;
    sim->status.loaded = event->as.status.loaded_count;
    sim->status.memory = 0;
    sim->status.running = 0;
    sim->status.kv_used = 0;
    sim->status.kept = 0;
    for (uint32_t i = 0; i < event->as.status.node_count; i++) {
        const struct fl_node_summary *node = &event->as.status.nodes[i];
        sim->status.joined += strcmp(node->state, "lost") != 0;
        check_clock(sim, node);
        sim->status.memory += node->memory_used;
    }
    for (uint32_t i = 0; i < event->as.status.loaded_count; i++) {
        const struct fl_loaded_summary *loaded = &event->as.status.loaded[i];
        sim->status.running += loaded->requests_running + loaded->requests_queued;
        sim->status.kv_used += loaded->kv_blocks_used;
        sim->status.kept += loaded->sequences_kept;
        sim->status.kv_total += loaded->kv_blocks_total;
    }
}

static void on_event(void *ctx, uint64_t client, const struct fl_client_event *event)
{
    struct sim_cluster *sim = ctx;
    if (client == 0) {
        if (event->kind == FL_EVENT_STATUS) {
            take_status(sim, event);
        } else if (event->kind == FL_EVENT_TIMELINE && sim->timeline != NULL) {
            take_timeline(sim, &event->as.timeline);
        } else if (event->kind == FL_EVENT_ERROR && sim->timeline != NULL) {
            complain(sim, "%s", event->as.error.text);
            sim->timeline = NULL;
        }
        return;
    }
    struct sim_request *request = request_of(sim, client, event->id);
    if (request == NULL) {
        complain(sim, "an event for request %" PRIu64 ", which nobody sent", event->id);
        return;
    }
    if (request->end != SIM_PENDING) {
        complain(sim, "request %" PRIu64 " gets an event of kind %d after its end", request->id,
                 (int)event->kind);
        return;
    }
    request->ended_ns = sim_now(sim);
    switch ((int)event->kind) {
    case FL_EVENT_ADMITTED:
        if (request->admitted) {
            complain(sim, "request %" PRIu64 " was admitted twice", request->id);
        }
        request->admitted = true;
        break;
    case FL_EVENT_TEXT: take_text(sim, request, event); break;
    case FL_EVENT_DONE: take_done(sim, request, event); break;
    case FL_EVENT_ERROR: take_error(sim, request, event); break;
    case FL_EVENT_LOADED:
    case FL_EVENT_UNLOADED: request->end = SIM_OVER; break;
    default: break;
    }
}

static struct sim_request *request_new(struct sim_cluster *sim, uint64_t client,
                                       enum fl_request_kind kind)
{
    FL_ASSERT(sim->request_count < SIM_REQUEST_MAX && client != 0);
    struct sim_request *request = &sim->requests[sim->request_count++];
    *request = (struct sim_request){.kind = kind,
                                    .client = client,
                                    .id = sim->next_id++,
                                    .began_ns = sim_now(sim),
                                    .turbulence = sim->faults,
                                    .calm = calm_now(sim)};
    return request;
}

static void send(struct sim_cluster *sim, struct sim_request *request,
                 struct fl_client_request *message)
{
    message->version = FL_CLIENT_VERSION;
    message->id = request->id;
    message->kind = request->kind;
    if (sim->coordinator == NULL) {
        request->end = SIM_VANISHED; /* nobody listens at that address */
        return;
    }
    coordinator_request(sim->coordinator, request->client, message);
}

struct sim_request *sim_ask(struct sim_cluster *sim, uint64_t client,
                            const struct sim_question *question)
{
    struct sim_request *request = request_new(sim, client, FL_REQUEST_GENERATE);
    request->question = question;
    struct fl_client_request message = {.kind = FL_REQUEST_GENERATE};
    struct fl_generate *wanted = &message.as.generate;
    uint32_t tokens[SIM_CONTEXT];
    wanted->model = question->model;
    if (question->text != NULL) {
        wanted->prompt = (struct fl_text){question->text, strlen(question->text)};
    } else {
        memcpy(tokens, question->tokens, sizeof(tokens));
        wanted->tokens = tokens;
        wanted->token_count = question->token_count;
    }
    wanted->max_tokens = question->max_tokens;
    wanted->ignore_end = question->ignore_end;
    wanted->sampling = question->sampling;
    if (question->stop != NULL) {
        wanted->stops[wanted->stop_count++] =
            (struct fl_text){question->stop, strlen(question->stop)};
    }
    send(sim, request, &message);
    return request;
}

struct sim_request *sim_by_model(struct sim_cluster *sim, uint64_t client,
                                 enum fl_request_kind kind, const char *model)
{
    struct sim_request *request = request_new(sim, client, kind);
    struct fl_client_request message = {.as.by_model.model = model};
    send(sim, request, &message);
    return request;
}

void sim_cancel(struct sim_cluster *sim, struct sim_request *request)
{
    struct fl_client_request message = {.version = FL_CLIENT_VERSION,
                                        .id = sim->next_id++,
                                        .kind = FL_REQUEST_CANCEL,
                                        .as.cancel.id = request->id};
    if (sim->coordinator != NULL && request->end == SIM_PENDING) {
        request->cancelled = true;
        coordinator_request(sim->coordinator, request->client, &message);
        if (request->end == SIM_PENDING) {
            complain(sim, "request %" PRIu64 " goes on after it was cancelled", request->id);
        }
    }
}

void sim_vanish(struct sim_cluster *sim, uint64_t client)
{
    for (uint32_t i = 0; i < sim->request_count; i++) {
        struct sim_request *request = &sim->requests[i];
        if (request->client == client && request->end == SIM_PENDING) {
            request->end = SIM_VANISHED;
        }
    }
    if (sim->coordinator != NULL) {
        /* "No event follows": one would be a complaint now. */
        coordinator_client_gone(sim->coordinator, client);
    }
}

struct sim_request *sim_request_at(struct sim_cluster *sim, uint32_t index)
{
    return index < sim->request_count ? &sim->requests[index] : NULL;
}

uint32_t sim_request_count(const struct sim_cluster *sim)
{
    return sim->request_count;
}

/* Faults ------------------------------------------------------------------------------------- */

static struct transport *transport_at(const struct sim_cluster *sim, uint32_t place)
{
    return place == SIM_COORDINATOR ? sim->transport : sim->boxes[place].transport;
}

void sim_kill(struct sim_cluster *sim, uint32_t node)
{
    struct box *box = &sim->boxes[node];
    if (!box->alive) {
        return;
    }
    box->transport->ops->close(box->transport);
    node_close(box->node);
    box->device->ops->close(box->device);
    shard_cache_close(box->cache);
    box->transport = NULL;
    box->alive = false;
    for (uint32_t i = 0; i <= SIM_NODE_MAX; i++) {
        sim->cut[node][i] = sim->cut[i][node] = false;
    }
    fault(sim);
}

/* Every machine has a clock of its own, which began some time. */
static uint64_t box_now(void *ctx)
{
    const struct box *box = ctx;
    return sim_now(box->sim) + box->origin_ns;
}

static fl_status box_start(struct sim_cluster *sim, uint32_t node)
{
    struct box *box = &sim->boxes[node];
    /* Bits do not depend on it: a few compute as the definition does. */
    const struct device_host_config host = {.threads = 1,
                                            .isa = sim_random(sim, 24) == 0 ? "scalar" : "auto"};
    FL_TRY(transport_local_open(sim->network, &box->transport));
    FL_TRY(device_host_open(&host, &box->device));
    box->folder.path = sim->config.fetch ? NULL : sim->config.book->models.path;
    box->storage = model_folder_storage(&box->folder);
    box->storage.resident = NULL; /* what the page cache here holds says nothing of a box's disk */
    box->cache = NULL;
    box->status = FL_OK;
    if (sim->config.cache) {
        char name[16];
        snprintf(name, sizeof(name), "box%" PRIu32, node + 1);
        temp_folder_path(&sim->caches, name, box->cache_path);
        const struct shard_cache_config cache = {.folder = box->cache_path, .budget = plenty};
        FL_TRY(shard_cache_open(&cache, &box->cache));
    }
    struct node_config config = {.transport = box->transport,
                                 .clock = {.now_ns = box_now, .ctx = box},
                                 .device = box->device,
                                 .storage = &box->storage,
                                 .cache = box->cache,
                                 .coordinator = sim->address,
                                 .rejoin = true,
                                 .join = {.incarnation = ++sim->incarnation,
                                          .memory_budget = sim->config.memory_budget != 0
                                                               ? sim->config.memory_budget
                                                               : plenty,
                                          .threads = 1,
                                          .isa = "any"}};
    snprintf(config.join.name, sizeof(config.join.name), "box%" PRIu32, node + 1);
    box->transport->ops->address(box->transport, &config.join.address);
    FL_TRY(node_open(&config, &box->node));
    box->alive = true;
    return FL_OK;
}

void sim_start(struct sim_cluster *sim, uint32_t node)
{
    if (!sim->boxes[node].alive) {
        fault(sim);
        FL_ASSERT(box_start(sim, node) == FL_OK);
    }
}

bool sim_alive(const struct sim_cluster *sim, uint32_t node)
{
    return node == SIM_COORDINATOR ? sim->coordinator != NULL : sim->boxes[node].alive;
}

static fl_status coordinator_start(struct sim_cluster *sim)
{
    const struct coordinator_config config = {
        .clock = sim->clock,
        .transport = sim->transport,
        .settings = {.models_folder = sim->config.book->models.path,
                     .context = SIM_CONTEXT,
                     .chunk = sim->config.chunk,
                     .sequences = sim->config.sequences,
                     .kv_budget = sim->config.kv_budget},
        .ctx = sim,
        .event = on_event};
    return coordinator_open(&config, &sim->coordinator);
}

void sim_kill_coordinator(struct sim_cluster *sim)
{
    if (sim->coordinator == NULL) {
        return;
    }
    fault(sim);
    local_network_kill(sim->network, sim->transport);
    coordinator_close(sim->coordinator); /* what it says to clients counts as said */
    sim->transport->ops->close(sim->transport);
    sim->coordinator = NULL;
    sim->transport = NULL;
    for (uint32_t i = 0; i < sim->request_count; i++) {
        sim->requests[i].timeline_id = 0; /* gone with it */
        if (sim->requests[i].end == SIM_PENDING) {
            complain(sim, "request %" PRIu64 " outlives its coordinator", sim->requests[i].id);
            sim->requests[i].end = SIM_VANISHED;
        }
    }
}

void sim_start_coordinator(struct sim_cluster *sim)
{
    if (sim->coordinator == NULL) {
        fault(sim);
        FL_ASSERT(transport_local_reopen(sim->network, &sim->address, &sim->transport) == FL_OK);
        FL_ASSERT(coordinator_start(sim) == FL_OK);
    }
}

void sim_cut(struct sim_cluster *sim, uint32_t a, uint32_t b)
{
    if (a != b && transport_at(sim, a) != NULL && transport_at(sim, b) != NULL) {
        fault(sim);
        sim->cut[a][b] = sim->cut[b][a] = true;
        local_network_cut(sim->network, transport_at(sim, a), transport_at(sim, b));
    }
}

void sim_heal(struct sim_cluster *sim)
{
    for (uint32_t a = 0; a <= SIM_NODE_MAX; a++) {
        for (uint32_t b = 0; b < a; b++) {
            if (sim->cut[a][b]) {
                fault(sim);
                sim->cut[a][b] = sim->cut[b][a] = false;
                local_network_heal(sim->network, transport_at(sim, a), transport_at(sim, b));
            }
        }
    }
}

/* Time --------------------------------------------------------------------------------------- */

/* The coordinator, its worker, or a part of a node; true when something happened. */
static bool part_run(struct sim_cluster *sim, uint32_t part, uint64_t *next_ns)
{
    const uint64_t now = sim_now(sim);
    uint64_t *gate = &sim->gates[part];
    if (*gate > now) {
        *next_ns = *gate < *next_ns ? *gate : *next_ns;
        return false;
    }
    uint64_t pause = 0;
    uint64_t due = UINT64_MAX;
    bool busy = false;
    if (part < 2) {
        if (sim->coordinator != NULL && part == 0) {
            busy = coordinator_poll(sim->coordinator, &due) > 0;
        } else if (sim->coordinator != NULL) {
            busy = worker_step(coordinator_worker(sim->coordinator)) == FL_OK;
            pause = sim->config.worker_max_ns;
        }
    } else {
        struct box *box = &sim->boxes[(part - 2) / NODE_PART_COUNT];
        const enum node_part which = (enum node_part)((part - 2) % NODE_PART_COUNT);
        if (!box->alive || box->status != FL_OK) {
            return false;
        }
        if (which == NODE_WIRE) {
            box->status = node_wire_poll(box->node, &due);
            due = due != UINT64_MAX ? due - box->origin_ns : due;
            if (box->status != FL_OK) {
                complain(sim, "box%u gives up: %s", (unsigned)((part - 2) / NODE_PART_COUNT + 1),
                         node_text(box->node));
            }
        } else if (which == NODE_COMPUTE) {
            busy = node_compute_step(box->node);
            pause = sim->config.compute_max_ns;
        } else {
            busy = node_load_step(box->node);
            pause = sim->config.disk_max_ns;
        }
    }
    if (busy && pause > 0) {
        *gate = now + sim_random(sim, pause);
    }
    *next_ns = due < *next_ns ? due : *next_ns;
    return busy;
}

static bool round_run(struct sim_cluster *sim, bool everybody, uint64_t *next_ns)
{
    uint32_t order[PART_COUNT] = {0};
    const uint32_t count = 2 + sim->config.node_count * NODE_PART_COUNT;
    bool busy = false;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t j = (uint32_t)sim_random(sim, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (everybody || sim_random(sim, 4) > 0) {
            busy = part_run(sim, order[i], next_ns) || busy;
        }
    }
    return busy;
}

/* One round; the clock is turned when nothing moves any more. */
static void turn(struct sim_cluster *sim, uint64_t until_ns)
{
    uint64_t next_ns = until_ns;
    const bool everybody = sim->quiet > 0;
    if (round_run(sim, everybody, &next_ns)) {
        sim->quiet = 0;
        local_network_advance(sim->network, sim_now(sim) + sim_random(sim, ROUND_PAUSE_NS));
        return;
    }
    if (++sim->quiet < 3) {
        return;
    }
    sim->quiet = 0;
    const uint64_t event_ns = local_network_next_event_ns(sim->network);
    next_ns = event_ns < next_ns ? event_ns : next_ns;
    const uint64_t least = sim_now(sim) + 1000;
    local_network_advance(sim->network, next_ns > least ? next_ns : least);
}

void sim_run(struct sim_cluster *sim, uint64_t duration_ns)
{
    const uint64_t until_ns = sim_now(sim) + duration_ns;
    while (sim_now(sim) < until_ns && sim->complaint[0] == '\0') {
        turn(sim, until_ns);
    }
}

static bool pending(const struct sim_cluster *sim)
{
    for (uint32_t i = 0; i < sim->request_count; i++) {
        if (sim->requests[i].end == SIM_PENDING) {
            return true;
        }
    }
    return false;
}

/* What nodes hold when something is stuck. */
static void show(const struct sim_cluster *sim)
{
    for (uint32_t i = 0; i < sim->config.node_count; i++) {
        struct node_census census;
        if (!sim->boxes[i].alive) {
            continue;
        }
        node_census(sim->boxes[i].node, &census);
        printf("  box%" PRIu32 " mail %zu buffers %" PRIu32 "\n", i + 1, census.mail_size,
               census.buffer_count);
        for (uint32_t j = 0; j < census.plan_count; j++) {
            const struct node_plan_census *plan = &census.plans[j];
            printf("    plan %" PRIu64 " stage %" PRIu32 " of %" PRIu32 " kv %" PRIu32
                   " of %" PRIu32 " free, gave %" PRIu32 " rows, may send %" PRIu64 "\n",
                   plan->plan_id, plan->stage_index, plan->stage_count, plan->kv_blocks_free,
                   plan->kv_blocks, plan->credit_rows, plan->credit);
        }
    }
}

bool sim_settle(struct sim_cluster *sim, uint64_t limit_ns)
{
    const uint64_t until_ns = sim_now(sim) + limit_ns;
    while (sim->complaint[0] == '\0' && (pending(sim) || !all_joined(sim))) {
        if (sim_now(sim) >= until_ns) {
            for (uint32_t i = 0; i < sim->request_count; i++) {
                const struct sim_request *request = &sim->requests[i];
                if (request->end == SIM_PENDING) {
                    complain(sim, "request %" PRIu64 " (%s, kind %d, %" PRIu32 " tokens) is stuck",
                             request->id, request->admitted ? "admitted" : "not admitted",
                             (int)request->kind, request->answer.token_count);
                }
            }
            show(sim);
            if (!all_joined(sim)) {
                complain(sim, "a node does not join");
            }
            return false;
        }
        turn(sim, until_ns);
    }
    return sim->complaint[0] == '\0';
}

/* Leaks -------------------------------------------------------------------------------------- */

static void ask_status(struct sim_cluster *sim)
{
    const struct fl_client_request message = {
        .version = FL_CLIENT_VERSION, .id = sim->next_id++, .kind = FL_REQUEST_STATUS};
    sim->status.wanted = true;
    coordinator_request(sim->coordinator, 0, &message);
    if (sim->status.wanted) {
        complain(sim, "status is not answered at once");
    }
}

static void check_timelines(struct sim_cluster *sim)
{
    const uint32_t first =
        sim->request_count > FL_TIMELINE_KEPT ? sim->request_count - FL_TIMELINE_KEPT : 0;
    for (uint32_t i = first; i < sim->request_count; i++) {
        const struct fl_client_request message = {.version = FL_CLIENT_VERSION,
                                                  .id = sim->next_id++,
                                                  .kind = FL_REQUEST_TIMELINE,
                                                  .as.timeline.id = sim->requests[i].timeline_id};
        if (message.as.timeline.id == 0) {
            continue;
        }
        sim->timeline = &sim->requests[i];
        coordinator_request(sim->coordinator, 0, &message);
        if (sim->timeline != NULL) {
            complain(sim, "a timeline is not answered at once");
        }
    }
}

/* The credit that the stage after a plan's stage gave. */
static uint64_t credit_given(const struct node_census *censuses, uint32_t count, uint64_t plan_id,
                             uint32_t stage)
{
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t j = 0; j < censuses[i].plan_count; j++) {
            const struct node_plan_census *plan = &censuses[i].plans[j];
            if (plan->plan_id == plan_id && plan->stage_index == stage) {
                return plan->credit_rows - plan->credit_owed;
            }
        }
    }
    return UINT64_MAX;
}

static void check_plan(struct sim_cluster *sim, const struct node_census *censuses, uint32_t node,
                       const struct node_plan_census *plan)
{
    if (plan->kv_blocks - plan->kv_blocks_free > sim->status.kv_used) {
        complain(sim,
                 "box%" PRIu32 " holds %" PRIu32 " KV blocks where the coordinator counts %" PRIu32,
                 node + 1, plan->kv_blocks - plan->kv_blocks_free, sim->status.kv_used);
    }
    if (plan->stage_index + 1 < plan->stage_count) {
        const uint64_t given =
            credit_given(censuses, sim->config.node_count, plan->plan_id, plan->stage_index + 1);
        if (plan->credit != given) {
            complain(sim, "box%" PRIu32 " has a credit of %" PRIu64 " rows and was given %" PRIu64,
                     node + 1, plan->credit, given);
        }
    }
}

void sim_check_idle(struct sim_cluster *sim)
{
    sim_run(sim, 3 * FL_NS_PER_S); /* last words arrive */
    struct node_census censuses[SIM_NODE_MAX] = {{0}};
    ask_status(sim);
    if (sim->status.running > 0) {
        complain(sim, "%" PRIu32 " requests run and nobody waits for them", sim->status.running);
    }
    check_timelines(sim);
    if (sim->status.joined != sim->config.node_count) {
        complain(sim, "%" PRIu32 " of %" PRIu32 " nodes are there", sim->status.joined,
                 sim->config.node_count);
    }
    if (sim->status.clocks != sim->status.joined) {
        complain(sim, "the clocks of %" PRIu32 " of %" PRIu32 " nodes are known",
                 sim->status.clocks, sim->status.joined);
    }
    for (uint32_t i = 0; i < sim->config.node_count; i++) {
        if (sim->boxes[i].alive) {
            node_census(sim->boxes[i].node, &censuses[i]);
        }
    }
    for (uint32_t i = 0; i < sim->config.node_count; i++) {
        const struct node_census *census = &censuses[i];
        if (census->mail_size != 0 || census->buffer_count != 0) {
            complain(sim, "box%" PRIu32 " is idle with %zu bytes of mail and %" PRIu32 " buffers",
                     i + 1, census->mail_size, census->buffer_count);
        }
        if (census->plan_count > sim->status.loaded) {
            complain(sim, "box%" PRIu32 " holds %" PRIu32 " plans of %" PRIu32, i + 1,
                     census->plan_count, sim->status.loaded);
        }
        for (uint32_t j = 0; j < census->plan_count; j++) {
            check_plan(sim, censuses, i, &census->plans[j]);
        }
    }
}

void sim_check_empty(struct sim_cluster *sim)
{
    for (uint32_t i = 0; i < SIM_MODEL_COUNT; i++) {
        (void)sim_by_model(sim, 1, FL_REQUEST_UNLOAD, sim_models[i]);
    }
    (void)sim_settle(sim, 5 * FL_NS_PER_S);
    sim_run(sim, 5 * FL_NS_PER_S + 20 * sim->config.disk_max_ns);
    ask_status(sim);
    if (sim->status.loaded != 0 || sim->status.memory != 0 || sim->status.kv_used != 0) {
        complain(sim, "nothing is loaded and the coordinator counts %" PRIu64 " bytes",
                 sim->status.memory);
    }
    for (uint32_t i = 0; i < sim->config.node_count; i++) {
        struct node_census census;
        node_census(sim->boxes[i].node, &census);
        if (census.plan_count != 0 || census.memory != 0 || census.mail_size != 0) {
            complain(sim, "box%" PRIu32 " keeps %" PRIu32 " plans of %" PRIu64 " bytes", i + 1,
                     census.plan_count, census.memory);
        }
    }
}

/* Opening and closing ------------------------------------------------------------------------ */

static fl_status open_parts(struct sim_cluster *sim)
{
    const struct local_network_config network = {.seed = sim->config.seed,
                                                 .delay_min_ns = sim->config.delay_max_ns / 10,
                                                 .delay_max_ns = sim->config.delay_max_ns};
    FL_TRY(local_network_open(&network, &sim->network));
    sim->clock = local_network_clock(sim->network);
    FL_TRY(transport_local_open(sim->network, &sim->transport));
    sim->transport->ops->address(sim->transport, &sim->address);
    FL_TRY(coordinator_start(sim));
    for (uint32_t i = 0; i < sim->config.node_count; i++) {
        FL_TRY(box_start(sim, i));
    }
    return FL_OK;
}

fl_status sim_open(const struct sim_config *config, struct sim_cluster **out)
{
    FL_ASSERT(config->node_count >= 1 && config->node_count <= SIM_NODE_MAX);
    struct sim_cluster *sim = calloc(1, sizeof(*sim));
    FL_ASSERT(sim != NULL);
    sim->requests = calloc(SIM_REQUEST_MAX, sizeof(*sim->requests));
    FL_ASSERT(sim->requests != NULL);
    sim->config = *config;
    sim->random = config->seed ^ UINT64_C(0x5851f42d4c957f2d);
    sim->incarnation = 1000;
    sim->next_id = 1;
    for (uint32_t i = 0; i < SIM_NODE_MAX; i++) {
        sim->boxes[i].sim = sim;
        sim->boxes[i].origin_ns = (config->seed + i) * UINT64_C(0x9e3779b97f4a7c15) >> 12;
    }
    temp_folder_make(&sim->caches);
    *out = sim;
    return open_parts(sim);
}

void sim_close(struct sim_cluster *sim)
{
    if (sim == NULL) {
        return;
    }
    for (uint32_t i = 0; i < SIM_NODE_MAX; i++) {
        sim_kill(sim, i);
    }
    sim_kill_coordinator(sim);
    local_network_close(sim->network);
    temp_folder_remove(&sim->caches);
    free(sim->requests);
    free(sim);
}
