#include "node/courier.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "node/courier_state.h"
#include "node/courier_trace.h"
#include "node/node.h"
#include "node/stage_link.h"
#include "proto/base/log.h"

static const uint64_t retry_first_ns = 200 * FL_NS_PER_MS;
static const uint64_t retry_max_ns = 2 * FL_NS_PER_S;
static const uint64_t complain_ns = 30 * FL_NS_PER_S;
/* A box that lost power and came back finds its name taken by its former self until the
 * coordinator's heartbeats find that one gone. */
static const uint64_t name_ns = 10 * FL_NS_PER_S;
static const uint64_t progress_ns = 50 * FL_NS_PER_MS;

/* Plans -------------------------------------------------------------------------------------- */

static void plan_close(struct courier *courier, struct courier_plan *entry)
{
    const struct compute_plan_order unplan = {.plan = entry->plan};
    entry->closing = true;
    entry->rows = NULL;
    stage_link_return_queue(courier, entry);
    /* Orders of a coordinator may fill the inbox; this one waits in courier_poll() then. */
    entry->unplanned = courier_order(courier, COMPUTE_UNPLAN, &unplan, sizeof(unplan), NULL, 0);
}

static void close_all_plans(struct courier *courier)
{
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        if (courier->plans[i].plan != NULL && !courier->plans[i].closing) {
            plan_close(courier, &courier->plans[i]);
        }
    }
    memset(courier->held, 0, sizeof(courier->held));
}

static void plan_gone(struct courier_plan *entry)
{
    node_plan_free(entry->plan);
    free(entry->queue);
    free(entry->tokens);
    *entry = (struct courier_plan){.plan = NULL};
}

static fl_status plan_check(const struct fl_plan *plan)
{
    const uint64_t rows_size =
        (uint64_t)plan->chunk_rows * plan->manifest.shape.width * sizeof(float);
    if (plan->stage_count > 1 && rows_size > TRANSPORT_MESSAGE_MAX - TRANSPORT_HEADER_MAX) {
        return FL_FAIL(FL_TOO_LARGE,
                       "plan %" PRIu64 ": chunks of %" PRIu32 " rows of width %" PRIu32
                       " are over the %d bytes of a message",
                       plan->plan_id, plan->chunk_rows, plan->manifest.shape.width,
                       TRANSPORT_MESSAGE_MAX);
    }
    return fl_manifest_check(&plan->manifest);
}

static fl_status plan_begin(struct courier *courier, const struct fl_plan *plan)
{
    FL_TRY(plan_check(plan));
    struct courier_plan *entry = NULL;
    for (uint32_t i = 0; i < NODE_PLAN_MAX && entry == NULL; i++) {
        entry = courier->plans[i].plan == NULL ? &courier->plans[i] : NULL;
    }
    if (entry == NULL) {
        return FL_FAIL(FL_BUSY, "node %s holds %d plans already", courier->config.join.name,
                       NODE_PLAN_MAX);
    }
    struct node_plan *copy = NULL;
    FL_TRY(node_plan_make(plan, &copy));
    const struct compute_plan_order begin = {.plan = copy};
    *entry = (struct courier_plan){.plan = copy};
    bool good = true;
    if (courier_has_stage_after(copy)) {
        entry->queue = calloc(COMPUTE_OUTPUT_MAX, sizeof(*entry->queue));
        good = entry->queue != NULL;
    } else if (plan->stage_count > 1) {
        entry->tokens = calloc(plan->sequence_max, sizeof(*entry->tokens));
        good = entry->tokens != NULL;
    }
    if (!good || !courier_order(courier, COMPUTE_PLAN, &begin, sizeof(begin), NULL, 0)) {
        plan_gone(entry);
        return FL_FAIL(FL_NO_MEMORY, "node %s: no memory for the plan", courier->config.join.name);
    }
    if (plan->stage_count > 1) {
        entry->link_ns = courier_now(courier);
        entry->out = stage_link_open(courier, courier_stage_after(copy));
        if (entry->out == 0) {
            node_plan_fail(copy, FL_NODE_LOST, fl_last_error());
        }
    }
    stage_link_take_held(courier, entry);
    return FL_OK;
}

/* Messages of the coordinator ----------------------------------------------------------------- */

static void on_plan(struct courier *courier, const struct fl_plan *plan)
{
    if (plan->plan_id <= courier->plan_last) {
        courier_intruder(courier, courier->coordinator, "it used a plan id twice");
        return;
    }
    courier->plan_last = plan->plan_id;
    courier_trace_plan(courier, plan->plan_id, courier_now(courier));
    const fl_status status = plan_begin(courier, plan);
    if (status != FL_OK) {
        char text[FL_ERROR_TEXT_MAX];
        snprintf(text, sizeof(text), "%.500s", fl_last_error());
        (void)!courier_say_failure(courier, plan->plan_id, 0, status, text);
    }
}

static void on_welcome(struct courier *courier, const struct fl_welcome *welcome)
{
    if (courier->joined) {
        courier_intruder(courier, courier->coordinator, "it welcomed this node twice");
        return;
    }
    courier->joined = true;
    courier->incarnation = welcome->coordinator;
    courier->retry_wait_ns = retry_first_ns;
    courier->complained_ns = 0;
    courier->refused_ns = 0;
    fl_log(FL_LOG_INFO, "node %s joined memory %.1f GiB threads %" PRIu32 " isa %s",
           courier->config.join.name,
           (double)courier->config.join.memory_budget / (1024.0 * 1024.0 * 1024.0),
           courier->config.join.threads, courier->config.join.isa);
}

static void on_coordinator_failure(struct courier *courier, const struct fl_failure *failure)
{
    const uint64_t now = courier_now(courier);
    if (!courier->joined && failure->code == FL_BUSY && courier->config.rejoin &&
        (courier->refused_ns == 0 || now < courier->refused_ns + name_ns)) {
        if (courier->refused_ns == 0) {
            fl_log(FL_LOG_WARN, "%s; trying for some seconds", failure->text);
            courier->refused_ns = now;
        }
    } else if (!courier->joined) {
        courier_finish(courier, FL_DENIED, failure->text);
    } else {
        fl_log(FL_LOG_WARN, "coordinator says: %s", failure->text);
    }
}

static bool order_admit(struct courier *courier, const struct fl_admit *admit)
{
    const struct compute_admit order = {.admit = *admit, .arrived_ns = courier_now(courier)};
    courier_trace_admit(courier, admit, order.arrived_ns);
    return courier_order(courier, COMPUTE_ADMIT, &order, sizeof(order), admit->tokens,
                         admit->token_count * sizeof(admit->tokens[0]));
}

static void on_coordinator_message(struct courier *courier,
                                   const struct fl_cluster_message *message)
{
    bool fits = true;
    switch (message->kind) {
    case FL_MESSAGE_WELCOME: on_welcome(courier, &message->as.welcome); break;
    case FL_MESSAGE_FAILURE: on_coordinator_failure(courier, &message->as.failure); break;
    case FL_MESSAGE_PLAN: on_plan(courier, &message->as.plan); break;
    case FL_MESSAGE_UNPLAN: {
        struct courier_plan *entry = courier_find_plan(courier, message->as.unplan.plan_id);
        if (entry != NULL) {
            plan_close(courier, entry);
        }
        break;
    }
    case FL_MESSAGE_ADMIT: fits = order_admit(courier, &message->as.admit); break;
    case FL_MESSAGE_END:
        fits =
            courier_order(courier, COMPUTE_END, &message->as.end, sizeof(message->as.end), NULL, 0);
        break;
    case FL_MESSAGE_DROP:
        fits = courier_order(courier, COMPUTE_DROP, &message->as.drop, sizeof(message->as.drop),
                             NULL, 0);
        break;
    case FL_MESSAGE_TRACE: courier_trace_ask(courier, &message->as.trace); break;
    case FL_MESSAGE_JOIN:
    case FL_MESSAGE_TOKEN:
    case FL_MESSAGE_PROGRESS:
    case FL_MESSAGE_LINK:
    case FL_MESSAGE_CREDIT:
    case FL_MESSAGE_FETCH:
    case FL_MESSAGE_SPANS:
        courier_intruder(courier, courier->coordinator, "a message that coordinators do not send");
        break;
    }
    if (!fits) {
        courier_intruder(courier, courier->coordinator, "more orders than a node can hold");
    }
}

static void on_fetch_data(struct courier *courier, transport_link link, const void *header_bytes,
                          size_t header_size, const void *data, size_t size)
{
    struct fl_fetch_header header;
    if (link != courier->coordinator ||
        fl_fetch_header_unpack(header_bytes, header_size, &header) != FL_OK ||
        fetch_queue_deliver(courier->config.fetches, &header, data, size) != FL_OK) {
        courier_intruder(courier, link, "bytes of a model file that were not asked for");
    }
}

/* Events of the peers ------------------------------------------------------------------------- */

static void on_up(void *ctx, transport_link link, enum fl_party party, const char *address)
{
    struct courier *courier = ctx;
    if (link == courier->coordinator) {
        if (party != FL_PARTY_COORDINATOR) {
            courier_finish(courier, FL_PROTOCOL,
                           "what answers there is another node, not a coordinator");
            return;
        }
        struct fl_cluster_message message = {.kind = FL_MESSAGE_JOIN,
                                             .as.join = courier->config.join};
        courier->coordinator_up = true;
        if (courier_say_coordinator(courier, &message) != FL_OK) {
            peer_close_link(courier->peers, link);
        }
    } else if (party != FL_PARTY_NODE) {
        courier_intruder(courier, link, "only other nodes have business here");
    } else {
        fl_log(FL_LOG_DEBUG, "link %" PRIu64 " to node at %s is up", link, address);
    }
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct courier *courier = ctx;
    if (type == FL_WIRE_ACTIVATIONS) {
        stage_link_activations(courier, link, header, header_size, data, size);
        return;
    }
    if (type == FL_WIRE_FETCH_DATA) {
        on_fetch_data(courier, link, header, header_size, data, size);
        return;
    }
    /* Messages may be answered while they are looked at: they get the upper part of the scratch
     * memory, answers are packed in the lower. */
    struct fl_arena arena;
    struct fl_cluster_message message;
    fl_arena_init(&arena, courier->scratch.base + COURIER_ANSWER_SIZE, COURIER_UNPACK_SIZE);
    if (type != FL_WIRE_CONTROL ||
        fl_cluster_message_unpack(data, size, &arena, &message) != FL_OK) {
        courier_intruder(courier, link,
                         type == FL_WIRE_CONTROL ? fl_last_error() : "an unknown message");
    } else if (link == courier->coordinator) {
        on_coordinator_message(courier, &message);
    } else {
        stage_link_message(courier, link, &message);
    }
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    (void)link;
    stage_link_sent(ctx, cookie);
}

static void coordinator_down(struct courier *courier, fl_status why, const char *text)
{
    const uint64_t now = courier_now(courier);
    const bool was_up = courier->coordinator_up;
    courier->coordinator = 0;
    courier->coordinator_up = false;
    courier->joined = false;
    courier->plan_last = 0;
    close_all_plans(courier);
    courier_trace_reset(courier);
    fetch_queue_reset(courier->config.fetches);
    if (courier->final != FL_OK) {
        return; /* refused; that was said */
    }
    if (!was_up && (why == FL_DENIED || why == FL_PROTOCOL || why == FL_UNSUPPORTED)) {
        courier_finish(courier, why, text);
        return;
    }
    if (!courier->config.rejoin) {
        courier_finish(courier, FL_END, "the coordinator is gone");
        return;
    }
    if (courier->refused_ns != 0) {
        courier->retry_ns = now + retry_max_ns / 2; /* it was said why */
        return;
    }
    if (was_up) {
        fl_log(FL_LOG_WARN, "coordinator lost: %s; its plans are dropped, joining again", text);
        courier->retry_wait_ns = retry_first_ns;
    } else if (courier->complained_ns == 0 || now >= courier->complained_ns + complain_ns) {
        fl_log(FL_LOG_WARN, "coordinator cannot be reached: %s; trying until it can", text);
        courier->complained_ns = now;
    }
    courier->retry_ns = now + courier->retry_wait_ns;
    courier->retry_wait_ns =
        courier->retry_wait_ns * 2 < retry_max_ns ? courier->retry_wait_ns * 2 : retry_max_ns;
}

static void on_down(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct courier *courier = ctx;
    if (link == courier->coordinator) {
        coordinator_down(courier, why, text);
    } else {
        stage_link_down(courier, link, text);
    }
}

/* Results of compute -------------------------------------------------------------------------- */

/* True when the record is dealt with, false when its link's queue is full. */
static bool forward_sampled(struct courier *courier, struct compute_sampled *sampled)
{
    struct courier_plan *entry = courier_plan_entry(courier, sampled->plan);
    if (entry->closing) {
        courier->half_sent = false; /* what follows is another record */
        return true;
    }
    /* Stage 0 first: it has the next token to compute, while nobody's work waits for the text. */
    if (!courier->half_sent && entry->tokens != NULL &&
        !stage_link_pass_token(courier, entry, &sampled->token)) {
        return false;
    }
    courier->half_sent = true;
    struct fl_cluster_message message = {.kind = FL_MESSAGE_TOKEN, .as.token = sampled->token};
    struct fl_token *token = &message.as.token;
    token->logprobs = (struct fl_top *)(sampled + 1);
    token->logits = token->logprobs + token->logprob_count;
    if (courier_say_coordinator(courier, &message) == FL_AGAIN) {
        return false;
    }
    courier_trace_token_sent(courier, sampled);
    courier->half_sent = false;
    return true;
}

static bool forward_credit(struct courier *courier, const struct compute_credit *credit)
{
    const struct courier_plan *entry = courier_plan_entry(courier, credit->plan);
    if (entry->closing || entry->in == 0) {
        return true;
    }
    const struct fl_cluster_message message = {
        .kind = FL_MESSAGE_CREDIT,
        .as.credit = {.plan_id = entry->plan->plan.plan_id, .rows = credit->rows},
    };
    return courier_say(courier, entry->in, &message) != FL_AGAIN;
}

static void forward_activations(struct courier *courier,
                                const struct compute_activations *activations)
{
    struct courier_plan *entry = courier_plan_entry(courier, activations->plan);
    if (entry->closing || entry->out == 0) {
        courier_return_buffer(courier, activations->plan, activations->buffer);
        return;
    }
    FL_ASSERT(entry->queue_count < COMPUTE_OUTPUT_MAX); /* compute waits for returns before */
    entry->queue[(entry->queue_first + entry->queue_count++) % COMPUTE_OUTPUT_MAX] = *activations;
}

static void take_opened(struct courier *courier, const struct compute_opened *opened)
{
    struct courier_plan *entry = courier_plan_entry(courier, opened->plan);
    if (!entry->closing) {
        entry->opened = true;
        entry->rows = opened->rows;
        entry->credit_rows = opened->credit_rows;
    }
}

static bool take_result(struct courier *courier, uint32_t kind, void *record)
{
    switch ((enum compute_result)kind) {
    case COMPUTE_OPENED: take_opened(courier, record); return true;
    case COMPUTE_CLOSED:
        plan_gone(courier_plan_entry(courier, ((struct compute_plan_order *)record)->plan));
        return true;
    case COMPUTE_ACTIVATIONS: forward_activations(courier, record); return true;
    case COMPUTE_SAMPLED: return forward_sampled(courier, record);
    case COMPUTE_CREDIT: return forward_credit(courier, record);
    case COMPUTE_FAILURE: {
        const struct fl_failure *failure = record;
        return courier_find_plan(courier, failure->plan_id) == NULL ||
               courier_say_failure(courier, failure->plan_id, failure->request_id,
                                   (fl_status)failure->code, failure->text) != FL_AGAIN;
    }
    case COMPUTE_INTRUDER: {
        const struct courier_plan *entry =
            courier_plan_entry(courier, ((struct compute_plan_order *)record)->plan);
        if (!entry->closing && entry->in != 0) {
            courier_intruder(courier, entry->in, "activations that do not fit the plan");
        }
        return true;
    }
    }
    return true;
}

static void send_results(struct courier *courier)
{
    /* Compute may wait for room; it is not woken for every record. */
    const bool was_full = mailbox_used(courier->outbox) > COMPUTE_OUTBOX_SIZE / 4;
    uint32_t kind;
    size_t size;
    for (void *record; (record = mailbox_front(courier->outbox, &kind, &size)) != NULL;) {
        if (!take_result(courier, kind, record)) {
            break;
        }
        mailbox_pop(courier->outbox);
    }
    if (was_full) {
        wake_signal(courier->config.compute_wake);
    }
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        struct courier_plan *entry = &courier->plans[i];
        if (entry->plan != NULL && !entry->closing) {
            stage_link_send(courier, entry);
        }
    }
}

/* What is due --------------------------------------------------------------------------------- */

/* Returns when there may be more to tell. */
static uint64_t tell_progress(struct courier *courier, struct courier_plan *entry, uint64_t now)
{
    struct node_plan *plan = entry->plan;
    /* Pairs with the release in node_plan_fail(). */
    const fl_status failed = (fl_status)atomic_load_explicit(&plan->failed, memory_order_acquire);
    if (failed != FL_OK && !entry->failure_told) {
        entry->failure_told = courier_say_failure(courier, plan->plan.plan_id, 0, failed,
                                                  plan->failure_text) != FL_AGAIN;
    }
    /* Pairs with the release in the loader. */
    const uint32_t pieces = atomic_load_explicit(&plan->pieces_done, memory_order_acquire);
    if (pieces == entry->pieces_told) {
        return UINT64_MAX;
    }
    if (pieces < plan->pieces_total && now < entry->told_ns + progress_ns) {
        return entry->told_ns + progress_ns;
    }
    struct fl_cluster_message message = {
        .kind = FL_MESSAGE_PROGRESS,
        .as.progress =
            {
                .plan_id = plan->plan.plan_id,
                .pieces_done = pieces,
                .pieces_total = plan->pieces_total,
                .bytes_total = plan->bytes_total,
                .bytes_file = atomic_load_explicit(&plan->bytes_file, memory_order_relaxed),
                .bytes_cache = atomic_load_explicit(&plan->bytes_cache, memory_order_relaxed),
                .bytes_fetched = atomic_load_explicit(&plan->bytes_fetched, memory_order_relaxed),
            },
    };
    struct fl_progress *progress = &message.as.progress;
    progress->bytes_done = progress->bytes_file + progress->bytes_cache + progress->bytes_fetched;
    if (courier_say_coordinator(courier, &message) != FL_AGAIN) {
        entry->pieces_told = pieces;
        entry->told_ns = now;
    }
    return UINT64_MAX;
}

static void send_fetches(struct courier *courier)
{
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FETCH};
    while (courier->joined && fetch_queue_next(courier->config.fetches, &message.as.fetch)) {
        if (courier_say_coordinator(courier, &message) != FL_OK) {
            return;
        }
        fetch_queue_sent(courier->config.fetches, message.as.fetch.transfer_id);
    }
}

static uint64_t poll_plans(struct courier *courier, uint64_t now)
{
    uint64_t next = UINT64_MAX;
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        struct courier_plan *entry = &courier->plans[i];
        if (entry->plan == NULL) {
            continue;
        }
        if (entry->closing) {
            if (!entry->unplanned) {
                plan_close(courier, entry); /* once more: the inbox was full */
            }
            continue;
        }
        stage_link_greet(courier, entry);
        stage_link_send(courier, entry);
        stage_link_send_tokens(courier, entry);
        const uint64_t due = tell_progress(courier, entry, now);
        next = due < next ? due : next;
    }
    stage_link_expire_held(courier, now);
    return next;
}

static uint64_t connect_coordinator(struct courier *courier, uint64_t now)
{
    if (courier->coordinator != 0 || courier->final != FL_OK) {
        return UINT64_MAX;
    }
    if (now < courier->retry_ns) {
        return courier->retry_ns;
    }
    transport_link link = 0;
    /* A name that does not resolve for hours is said now and then by coordinator_down(). */
    const enum fl_log_level level = fl_fail_log_at(FL_LOG_DEBUG);
    const fl_status status = peer_connect(courier->peers, &courier->config.coordinator, &link);
    (void)fl_fail_log_at(level);
    if (status != FL_OK) {
        coordinator_down(courier, FL_LINK_LOST, fl_last_error());
        return courier->retry_ns;
    }
    courier->coordinator = link;
    return UINT64_MAX;
}

fl_status courier_poll(struct courier *courier, uint64_t *out_next_ns)
{
    uint64_t next = 0;
    const uint64_t connect_ns = connect_coordinator(courier, courier_now(courier));
    /* What others wait for leaves first.  Once more after: the poll may have made room for more. */
    send_results(courier);
    (void)peer_poll(courier->peers, &next);
    next = connect_ns < next ? connect_ns : next;
    send_results(courier);
    const uint64_t plans_ns = poll_plans(courier, courier_now(courier));
    next = plans_ns < next ? plans_ns : next;
    send_fetches(courier);
    if (courier_trace_answer(courier)) {
        next = courier_now(courier); /* at once */
    }
    if (courier->coordinator == 0 && courier->retry_ns < next) {
        next = courier->retry_ns;
    }
    *out_next_ns = next;
    return courier->final;
}

const char *courier_text(const struct courier *courier)
{
    return courier->text;
}

void courier_leave(struct courier *courier)
{
    courier_finish(courier, FL_CANCELLED, "stopped");
    if (courier->coordinator == 0) {
        return;
    }
    if (courier->joined) {
        /* Best effort: the link closes either way. */
        (void)!courier_say_failure(courier, 0, 0, FL_CANCELLED, "stopped on purpose");
    }
    peer_close_link(courier->peers, courier->coordinator);
}

bool courier_left(const struct courier *courier)
{
    return courier->coordinator == 0;
}

bool courier_joined(const struct courier *courier)
{
    return courier->joined;
}

void courier_census(struct courier *courier, struct node_census *out)
{
    for (uint32_t i = 0; i < out->plan_count; i++) {
        const struct courier_plan *entry = courier_find_plan(courier, out->plans[i].plan_id);
        out->plans[i].credit = entry != NULL ? entry->credit : 0;
    }
}

fl_status courier_open(const struct courier_config *config, struct courier **out)
{
    struct courier *courier = calloc(1, sizeof(*courier));
    unsigned char *scratch = malloc((size_t)COURIER_ANSWER_SIZE + COURIER_UNPACK_SIZE);
    unsigned char *packed = malloc(COURIER_PACK_SIZE);
    if (courier == NULL || scratch == NULL || packed == NULL) {
        free(courier);
        free(scratch);
        free(packed);
        return FL_FAIL(FL_NO_MEMORY, "courier: no memory");
    }
    courier->config = *config;
    courier->inbox = compute_inbox(config->compute);
    courier->returns = compute_returns(config->compute);
    courier->outbox = compute_outbox(config->compute);
    courier->retry_wait_ns = retry_first_ns;
    courier->ready_ns = courier_now(courier);
    courier->packed = packed;
    fl_arena_init(&courier->scratch, scratch, COURIER_ANSWER_SIZE);
    const struct peer_config peer_config = {
        .transport = config->transport,
        .clock = config->clock,
        .party = FL_PARTY_NODE,
        .key = config->key,
        .events = {.ctx = courier,
                   .up = on_up,
                   .received = on_received,
                   .sent = on_sent,
                   .down = on_down},
    };
    const fl_status status = peer_open(&peer_config, &courier->peers);
    if (status != FL_OK) {
        courier_close(courier);
        return status;
    }
    *out = courier;
    return FL_OK;
}

void courier_close(struct courier *courier)
{
    if (courier == NULL) {
        return;
    }
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        if (courier->plans[i].plan != NULL) {
            plan_gone(&courier->plans[i]);
        }
    }
    peer_close(courier->peers);
    free(courier->scratch.base);
    free(courier->packed);
    free(courier);
}
