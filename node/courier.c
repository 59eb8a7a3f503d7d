#include "node/courier.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/peer.h"
#include "node/node.h"
#include "node/node_plan.h"
#include "proto/base/arena.h"
#include "proto/base/log.h"

enum {
    UNPACK_SIZE = 4 * FL_CLUSTER_MESSAGE_MAX,
    PACK_SIZE = 1 << 20, /* a node's own messages are small */
    NEIGHBOUR_MAX = 64,
    HELD_MAX = 32,
    PARCEL_MAX = 512, /* activations whose data the transport still reads */
};

static const uint64_t retry_first_ns = 200 * FL_NS_PER_MS;
static const uint64_t retry_max_ns = 2 * FL_NS_PER_S;
static const uint64_t complain_ns = 30 * FL_NS_PER_S;
/* A box that lost power and came back finds its name taken by its former self until the
 * coordinator's heartbeats find that one gone. */
static const uint64_t name_ns = 10 * FL_NS_PER_S;
static const uint64_t held_ns = 30 * FL_NS_PER_S;
static const uint64_t progress_ns = 50 * FL_NS_PER_MS;

/* A node we opened a link to; kept as long as the link lives, plans come and go. */
struct neighbour {
    uint64_t incarnation;
    transport_link link; /* 0: free */
};

/* A LINK that came before its plan. */
struct held_link {
    transport_link link; /* 0: free */
    struct fl_link said;
    uint64_t deadline_ns;
};

struct parcel {
    struct node_plan *plan; /* NULL: free */
    transport_link link;
    uint32_t buffer;
};

struct courier_plan {
    struct node_plan *plan; /* NULL: free */
    bool closing;           /* only compute's CLOSED is awaited */
    bool unplanned;         /* compute was told */
    bool opened;
    struct mailbox *rows; /* what the stage before sends; NULL before OPENED and on stage 0 */
    uint32_t credit_rows; /* the stage before may have under way */
    transport_link in;    /* from the stage before (of stage 0: from the last); 0: not yet */
    bool credited;        /* `in` was told credit_rows */
    transport_link out;   /* to the stage after (of the last: to stage 0); 0: none or lost */
    bool linked;          /* `out` was told LINK */
    uint64_t credit;      /* rows we may send */
    uint32_t queue_first; /* activations that wait for credit: a ring */
    uint32_t queue_count;
    struct compute_activations *queue; /* [COMPUTE_OUTPUT_MAX] on stages that have one after */
    uint32_t pieces_told;
    uint64_t told_ns;
    bool failure_told;
};

struct courier {
    struct courier_config config;
    struct peer_table *peers;
    struct mailbox *inbox;
    struct mailbox *returns;
    struct mailbox *outbox;

    transport_link coordinator; /* 0: none now */
    bool coordinator_up;
    bool joined;
    uint64_t incarnation; /* of the coordinator, once welcomed */
    uint64_t retry_ns;    /* when to connect again */
    uint64_t retry_wait_ns;
    uint64_t complained_ns; /* 0: not since the link was last up */
    uint64_t refused_ns;    /* first told that our name is taken; 0: not since we last joined */
    uint64_t plan_last;     /* highest plan id seen from this coordinator */
    fl_status final;        /* FL_OK: go on */
    char text[COURIER_TEXT_MAX];

    bool half_sent; /* of the outbox's front, a token: the coordinator has it */
    struct courier_plan plans[NODE_PLAN_MAX];
    struct neighbour neighbours[NEIGHBOUR_MAX];
    struct held_link held[HELD_MAX];
    struct parcel parcels[PARCEL_MAX];
    uint32_t parcel_next;

    struct fl_arena scratch; /* UNPACK_SIZE, touched as far as messages need it */
    unsigned char *packed;   /* [PACK_SIZE] */
};

static uint64_t now_of(const struct courier *courier)
{
    return fl_clock_now(&courier->config.clock);
}

static void finish(struct courier *courier, fl_status status, const char *text)
{
    if (courier->final == FL_OK) {
        courier->final = status;
        snprintf(courier->text, sizeof(courier->text), "%s", text);
    }
}

/* A peer broke the rules; its link goes, we stay. */
static void intruder(struct courier *courier, transport_link link, const char *what)
{
    fl_log(FL_LOG_WARN, "link %" PRIu64 " closed: %s", link, what);
    peer_close_link(courier->peers, link);
}

/* FL_AGAIN: the link's queue is full; FL_LINK_LOST: it is over. */
static fl_status say(struct courier *courier, transport_link link,
                     const struct fl_cluster_message *message)
{
    size_t size = 0;
    fl_arena_reset(&courier->scratch);
    FL_TRY(fl_cluster_message_pack(message, &courier->scratch, courier->packed, PACK_SIZE, &size));
    return peer_send(courier->peers, link, FL_WIRE_CONTROL, NULL, 0, courier->packed, size, 0);
}

static fl_status say_coordinator(struct courier *courier, const struct fl_cluster_message *message)
{
    return courier->coordinator_up ? say(courier, courier->coordinator, message) : FL_LINK_LOST;
}

static fl_status say_failure(struct courier *courier, uint64_t plan_id, uint64_t request_id,
                             fl_status code, const char *text)
{
    struct fl_cluster_message message = {
        .kind = FL_MESSAGE_FAILURE,
        .as.failure = {.plan_id = plan_id, .request_id = request_id, .code = (uint32_t)code},
    };
    snprintf(message.as.failure.text, sizeof(message.as.failure.text), "%s", text);
    return say_coordinator(courier, &message);
}

/* Hand an order to compute; the coordinator's fault when it does not fit. */
static bool order(struct courier *courier, enum compute_order kind, const void *record, size_t size,
                  const void *more, size_t more_size)
{
    unsigned char *room = mailbox_reserve(courier->inbox, (uint32_t)kind, size + more_size);
    if (room == NULL) {
        return false;
    }
    memcpy(room, record, size);
    if (more_size > 0) {
        memcpy(room + size, more, more_size);
    }
    mailbox_post(courier->inbox);
    wake_signal(courier->config.compute_wake);
    return true;
}

static void return_buffer(struct courier *courier, struct node_plan *plan, uint32_t buffer)
{
    struct compute_return *record =
        mailbox_reserve(courier->returns, COMPUTE_RETURN, sizeof(*record));
    FL_ASSERT(record != NULL); /* it has room for every buffer there is */
    *record = (struct compute_return){.plan = plan, .buffer = buffer};
    mailbox_post(courier->returns);
    wake_signal(courier->config.compute_wake);
}

/* Plans -------------------------------------------------------------------------------------- */

static struct courier_plan *find_plan(struct courier *courier, uint64_t plan_id)
{
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        struct courier_plan *entry = &courier->plans[i];
        if (entry->plan != NULL && !entry->closing && entry->plan->plan.plan_id == plan_id) {
            return entry;
        }
    }
    return NULL;
}

static struct courier_plan *entry_of(struct courier *courier, const struct node_plan *plan)
{
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        if (courier->plans[i].plan == plan) {
            return &courier->plans[i];
        }
    }
    FL_ASSERT(!"compute names plans that it was given");
    return NULL;
}

static const struct fl_stage *stage_after(const struct node_plan *plan)
{
    return &plan->plan.stages[(plan->plan.stage_index + 1) % plan->plan.stage_count];
}

static uint32_t index_before(const struct node_plan *plan)
{
    const uint32_t count = plan->plan.stage_count;
    return (plan->plan.stage_index + count - 1) % count;
}

static bool has_stage_after(const struct node_plan *plan)
{
    return plan->plan.stage_index + 1 < plan->plan.stage_count;
}

static void return_queue(struct courier *courier, struct courier_plan *entry)
{
    for (; entry->queue_count > 0; entry->queue_count--) {
        return_buffer(courier, entry->plan, entry->queue[entry->queue_first].buffer);
        entry->queue_first = (entry->queue_first + 1) % COMPUTE_OUTPUT_MAX;
    }
}

static void plan_close(struct courier *courier, struct courier_plan *entry)
{
    const struct compute_plan_order unplan = {.plan = entry->plan};
    entry->closing = true;
    entry->rows = NULL;
    return_queue(courier, entry);
    /* Orders of a coordinator may fill the inbox; this one waits in courier_poll() then. */
    entry->unplanned = order(courier, COMPUTE_UNPLAN, &unplan, sizeof(unplan), NULL, 0);
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
    *entry = (struct courier_plan){.plan = NULL};
}

/* The link to that stage's node: one we have, or a new one.  0: it cannot be had, said why. */
static transport_link neighbour_link(struct courier *courier, const struct fl_stage *stage)
{
    struct neighbour *unused = NULL;
    for (uint32_t i = 0; i < NEIGHBOUR_MAX; i++) {
        struct neighbour *neighbour = &courier->neighbours[i];
        if (neighbour->link != 0 && neighbour->incarnation == stage->incarnation) {
            return neighbour->link;
        }
        unused = neighbour->link == 0 && unused == NULL ? neighbour : unused;
    }
    transport_link link = 0;
    if (unused == NULL) {
        (void)FL_FAIL(FL_TOO_LARGE, "node %s: links to %d other nodes are open already",
                      stage->node, NEIGHBOUR_MAX);
    } else if (peer_connect(courier->peers, &stage->address, &link) == FL_OK) {
        *unused = (struct neighbour){.incarnation = stage->incarnation, .link = link};
    }
    return link;
}

/* What a peer's LINK says, held against the plan it names. */
static void take_link(struct courier *courier, struct courier_plan *entry, transport_link link,
                      const struct fl_link *said)
{
    const struct fl_plan *plan = &entry->plan->plan;
    const uint32_t before = index_before(entry->plan);
    if (plan->stage_count == 1 || said->from_stage != before ||
        said->incarnation != plan->stages[before].incarnation) {
        intruder(courier, link, "it claims to be a stage that it is not");
        return;
    }
    entry->in = link;
    entry->credited = false;
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
    struct compute_activations *queue = NULL;
    const struct compute_plan_order begin = {.plan = copy};
    if (has_stage_after(copy)) {
        queue = calloc(COMPUTE_OUTPUT_MAX, sizeof(*queue));
    }
    if ((has_stage_after(copy) && queue == NULL) ||
        !order(courier, COMPUTE_PLAN, &begin, sizeof(begin), NULL, 0)) {
        node_plan_free(copy);
        free(queue);
        return FL_FAIL(FL_NO_MEMORY, "node %s: no memory for the plan", courier->config.join.name);
    }
    *entry = (struct courier_plan){.plan = copy, .queue = queue};
    if (plan->stage_count > 1) {
        entry->out = neighbour_link(courier, stage_after(copy));
        if (entry->out == 0) {
            node_plan_fail(copy, FL_NODE_LOST, fl_last_error());
        }
    }
    for (uint32_t i = 0; i < HELD_MAX; i++) {
        struct held_link *held = &courier->held[i];
        if (held->link != 0 && held->said.plan_id == plan->plan_id) {
            take_link(courier, entry, held->link, &held->said);
            held->link = 0;
        }
    }
    return FL_OK;
}

/* Messages of the coordinator ----------------------------------------------------------------- */

static void on_plan(struct courier *courier, const struct fl_plan *plan)
{
    if (plan->plan_id <= courier->plan_last) {
        intruder(courier, courier->coordinator, "it used a plan id twice");
        return;
    }
    courier->plan_last = plan->plan_id;
    const fl_status status = plan_begin(courier, plan);
    if (status != FL_OK) {
        char text[FL_ERROR_TEXT_MAX];
        snprintf(text, sizeof(text), "%.500s", fl_last_error());
        (void)!say_failure(courier, plan->plan_id, 0, status, text);
    }
}

static void on_welcome(struct courier *courier, const struct fl_welcome *welcome)
{
    if (courier->joined) {
        intruder(courier, courier->coordinator, "it welcomed this node twice");
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
    const uint64_t now = now_of(courier);
    if (!courier->joined && failure->code == FL_BUSY && courier->config.rejoin &&
        (courier->refused_ns == 0 || now < courier->refused_ns + name_ns)) {
        if (courier->refused_ns == 0) {
            fl_log(FL_LOG_WARN, "%s; trying for some seconds", failure->text);
            courier->refused_ns = now;
        }
    } else if (!courier->joined) {
        finish(courier, FL_DENIED, failure->text);
    } else {
        fl_log(FL_LOG_WARN, "coordinator says: %s", failure->text);
    }
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
        struct courier_plan *entry = find_plan(courier, message->as.unplan.plan_id);
        if (entry != NULL) {
            plan_close(courier, entry);
        }
        break;
    }
    case FL_MESSAGE_ADMIT:
        fits = order(courier, COMPUTE_ADMIT, &message->as.admit, sizeof(message->as.admit),
                     message->as.admit.tokens,
                     message->as.admit.token_count * sizeof(message->as.admit.tokens[0]));
        break;
    case FL_MESSAGE_END:
        fits = order(courier, COMPUTE_END, &message->as.end, sizeof(message->as.end), NULL, 0);
        break;
    case FL_MESSAGE_DROP:
        fits = order(courier, COMPUTE_DROP, &message->as.drop, sizeof(message->as.drop), NULL, 0);
        break;
    case FL_MESSAGE_JOIN:
    case FL_MESSAGE_TOKEN:
    case FL_MESSAGE_PROGRESS:
    case FL_MESSAGE_LINK:
    case FL_MESSAGE_CREDIT:
    case FL_MESSAGE_FETCH:
        intruder(courier, courier->coordinator, "a message that coordinators do not send");
        break;
    }
    if (!fits) {
        intruder(courier, courier->coordinator, "more orders than a node can hold");
    }
}

/* Messages of other nodes --------------------------------------------------------------------- */

static void on_link(struct courier *courier, transport_link link, const struct fl_link *said)
{
    struct courier_plan *entry = find_plan(courier, said->plan_id);
    if (entry != NULL) {
        take_link(courier, entry, link, said);
        return;
    }
    /* While we have no coordinator, ids of the next one may be anything. */
    if (courier->joined && said->plan_id <= courier->plan_last) {
        return; /* a plan that is over here */
    }
    for (uint32_t i = 0; i < HELD_MAX; i++) {
        if (courier->held[i].link == 0) {
            courier->held[i] = (struct held_link){
                .link = link, .said = *said, .deadline_ns = now_of(courier) + held_ns};
            return;
        }
    }
    intruder(courier, link, "too many links for plans that are not here");
}

static void on_credit(struct courier *courier, transport_link link, const struct fl_credit *credit)
{
    struct courier_plan *entry = find_plan(courier, credit->plan_id);
    if (entry == NULL) {
        return;
    }
    if (entry->out != link || !has_stage_after(entry->plan)) {
        intruder(courier, link, "credit from a stage that gets no activations");
        return;
    }
    entry->credit += credit->rows; /* 64 bits: nobody lives to see it wrap */
}

static void on_token(struct courier *courier, transport_link link, const struct fl_token *token)
{
    const struct courier_plan *entry = find_plan(courier, token->plan_id);
    if (entry == NULL) {
        return;
    }
    if (entry->in != link || entry->plan->plan.stage_index != 0) {
        intruder(courier, link, "a token from a stage that samples none for this one");
        return;
    }
    struct fl_token bare = *token;
    bare.logprob_count = 0;
    bare.logprobs = NULL;
    bare.logit_count = 0;
    bare.logits = NULL;
    if (!order(courier, COMPUTE_TOKEN, &bare, sizeof(bare), NULL, 0)) {
        intruder(courier, link, "more tokens than a node can hold");
    }
}

static void on_node_message(struct courier *courier, transport_link link,
                            const struct fl_cluster_message *message)
{
    switch (message->kind) {
    case FL_MESSAGE_LINK: on_link(courier, link, &message->as.link); break;
    case FL_MESSAGE_CREDIT: on_credit(courier, link, &message->as.credit); break;
    case FL_MESSAGE_TOKEN: on_token(courier, link, &message->as.token); break;
    case FL_MESSAGE_JOIN:
    case FL_MESSAGE_WELCOME:
    case FL_MESSAGE_PLAN:
    case FL_MESSAGE_UNPLAN:
    case FL_MESSAGE_ADMIT:
    case FL_MESSAGE_END:
    case FL_MESSAGE_DROP:
    case FL_MESSAGE_PROGRESS:
    case FL_MESSAGE_FAILURE:
    case FL_MESSAGE_FETCH: intruder(courier, link, "a message that nodes do not send"); break;
    }
}

static void on_activations(struct courier *courier, transport_link link, const void *header_bytes,
                           size_t header_size, const void *data, size_t size)
{
    struct fl_activation_header header;
    if (fl_activation_header_unpack(header_bytes, header_size, &header) != FL_OK) {
        intruder(courier, link, fl_last_error());
        return;
    }
    const struct courier_plan *entry = find_plan(courier, header.plan_id);
    if (entry == NULL) {
        return; /* late */
    }
    if (entry->in != link || entry->rows == NULL ||
        header.width != entry->plan->plan.manifest.shape.width ||
        size != (uint64_t)header.rows * header.width * sizeof(float)) {
        intruder(courier, link, "activations of another size, or from another stage, than planned");
        return;
    }
    unsigned char *room = mailbox_reserve(entry->rows, COMPUTE_ROWS, sizeof(header) + size);
    if (room == NULL) {
        intruder(courier, link, "activations beyond the credit that was given");
        return;
    }
    memcpy(room, &header, sizeof(header));
    memcpy(room + sizeof(header), data, size);
    mailbox_post(entry->rows);
    wake_signal(courier->config.compute_wake);
}

static void on_fetch_data(struct courier *courier, transport_link link, const void *header_bytes,
                          size_t header_size, const void *data, size_t size)
{
    struct fl_fetch_header header;
    if (link != courier->coordinator ||
        fl_fetch_header_unpack(header_bytes, header_size, &header) != FL_OK ||
        fetch_queue_deliver(courier->config.fetches, &header, data, size) != FL_OK) {
        intruder(courier, link, "bytes of a model file that were not asked for");
    }
}

/* Events of the peers ------------------------------------------------------------------------- */

static void on_up(void *ctx, transport_link link, enum fl_party party, const char *address)
{
    struct courier *courier = ctx;
    if (link == courier->coordinator) {
        if (party != FL_PARTY_COORDINATOR) {
            finish(courier, FL_PROTOCOL, "what answers there is another node, not a coordinator");
            return;
        }
        struct fl_cluster_message message = {.kind = FL_MESSAGE_JOIN,
                                             .as.join = courier->config.join};
        courier->coordinator_up = true;
        if (say_coordinator(courier, &message) != FL_OK) {
            peer_close_link(courier->peers, link);
        }
    } else if (party != FL_PARTY_NODE) {
        intruder(courier, link, "only other nodes have business here");
    } else {
        fl_log(FL_LOG_DEBUG, "link %" PRIu64 " to node at %s is up", link, address);
    }
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct courier *courier = ctx;
    if (type == FL_WIRE_ACTIVATIONS) {
        on_activations(courier, link, header, header_size, data, size);
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
    fl_arena_init(&arena, courier->scratch.base + PACK_SIZE * 4, UNPACK_SIZE);
    if (type != FL_WIRE_CONTROL ||
        fl_cluster_message_unpack(data, size, &arena, &message) != FL_OK) {
        intruder(courier, link, type == FL_WIRE_CONTROL ? fl_last_error() : "an unknown message");
    } else if (link == courier->coordinator) {
        on_coordinator_message(courier, &message);
    } else {
        on_node_message(courier, link, &message);
    }
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    struct courier *courier = ctx;
    (void)link;
    FL_ASSERT(cookie >= 1 && cookie <= PARCEL_MAX);
    struct parcel *parcel = &courier->parcels[cookie - 1];
    FL_ASSERT(parcel->plan != NULL);
    return_buffer(courier, parcel->plan, parcel->buffer);
    parcel->plan = NULL;
}

static void coordinator_down(struct courier *courier, fl_status why, const char *text)
{
    const uint64_t now = now_of(courier);
    const bool was_up = courier->coordinator_up;
    courier->coordinator = 0;
    courier->coordinator_up = false;
    courier->joined = false;
    courier->plan_last = 0;
    close_all_plans(courier);
    fetch_queue_reset(courier->config.fetches);
    if (courier->final != FL_OK) {
        return; /* refused; that was said */
    }
    if (!was_up && (why == FL_DENIED || why == FL_PROTOCOL || why == FL_UNSUPPORTED)) {
        finish(courier, why, text);
        return;
    }
    if (!courier->config.rejoin) {
        finish(courier, FL_END, "the coordinator is gone");
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

static void neighbour_down(struct courier *courier, transport_link link, const char *text)
{
    for (uint32_t i = 0; i < NEIGHBOUR_MAX; i++) {
        if (courier->neighbours[i].link == link) {
            courier->neighbours[i].link = 0;
        }
    }
    for (uint32_t i = 0; i < HELD_MAX; i++) {
        if (courier->held[i].link == link) {
            courier->held[i].link = 0;
        }
    }
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        struct courier_plan *entry = &courier->plans[i];
        if (entry->plan == NULL || (entry->in != link && entry->out != link)) {
            continue;
        }
        const struct fl_plan *plan = &entry->plan->plan;
        const struct fl_stage *other = entry->out == link
                                           ? stage_after(entry->plan)
                                           : &plan->stages[index_before(entry->plan)];
        if (!entry->closing) {
            char what[FL_ERROR_TEXT_MAX];
            snprintf(what, sizeof(what), "node %s: link to node %s lost: %.200s",
                     courier->config.join.name, other->node, text);
            node_plan_fail(entry->plan, FL_NODE_LOST, what);
            return_queue(courier, entry);
        }
        entry->in = entry->in == link ? 0 : entry->in;
        entry->out = entry->out == link ? 0 : entry->out;
    }
}

static void on_down(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct courier *courier = ctx;
    for (uint32_t i = 0; i < PARCEL_MAX; i++) {
        struct parcel *parcel = &courier->parcels[i];
        if (parcel->plan != NULL && parcel->link == link) {
            return_buffer(courier, parcel->plan, parcel->buffer);
            parcel->plan = NULL;
        }
    }
    if (link == courier->coordinator) {
        coordinator_down(courier, why, text);
    } else {
        neighbour_down(courier, link, text);
    }
}

/* Results of compute -------------------------------------------------------------------------- */

/* True when the record is dealt with, false when its link's queue is full. */
static bool forward_sampled(struct courier *courier, struct compute_sampled *sampled)
{
    const struct courier_plan *entry = entry_of(courier, sampled->plan);
    if (entry->closing) {
        return true;
    }
    struct fl_cluster_message message = {.kind = FL_MESSAGE_TOKEN, .as.token = sampled->token};
    struct fl_token *token = &message.as.token;
    token->logprobs = (struct fl_top *)(sampled + 1);
    token->logits = token->logprobs + token->logprob_count;
    if (!courier->half_sent && say_coordinator(courier, &message) == FL_AGAIN) {
        return false;
    }
    courier->half_sent = true;
    if (entry->plan->plan.stage_count > 1 && entry->out != 0) {
        token->logprob_count = 0;
        token->logit_count = 0;
        if (say(courier, entry->out, &message) == FL_AGAIN) {
            return false;
        }
    }
    courier->half_sent = false;
    return true;
}

static bool forward_credit(struct courier *courier, const struct compute_credit *credit)
{
    const struct courier_plan *entry = entry_of(courier, credit->plan);
    if (entry->closing || entry->in == 0) {
        return true;
    }
    const struct fl_cluster_message message = {
        .kind = FL_MESSAGE_CREDIT,
        .as.credit = {.plan_id = entry->plan->plan.plan_id, .rows = credit->rows},
    };
    return say(courier, entry->in, &message) != FL_AGAIN;
}

static void forward_activations(struct courier *courier,
                                const struct compute_activations *activations)
{
    struct courier_plan *entry = entry_of(courier, activations->plan);
    if (entry->closing || entry->out == 0) {
        return_buffer(courier, activations->plan, activations->buffer);
        return;
    }
    FL_ASSERT(entry->queue_count < COMPUTE_OUTPUT_MAX); /* compute waits for returns before */
    entry->queue[(entry->queue_first + entry->queue_count++) % COMPUTE_OUTPUT_MAX] = *activations;
}

static void take_opened(struct courier *courier, const struct compute_opened *opened)
{
    struct courier_plan *entry = entry_of(courier, opened->plan);
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
        plan_gone(entry_of(courier, ((struct compute_plan_order *)record)->plan));
        return true;
    case COMPUTE_ACTIVATIONS: forward_activations(courier, record); return true;
    case COMPUTE_SAMPLED: return forward_sampled(courier, record);
    case COMPUTE_CREDIT: return forward_credit(courier, record);
    case COMPUTE_FAILURE: {
        const struct fl_failure *failure = record;
        return find_plan(courier, failure->plan_id) == NULL ||
               say_failure(courier, failure->plan_id, failure->request_id, (fl_status)failure->code,
                           failure->text) != FL_AGAIN;
    }
    case COMPUTE_INTRUDER: {
        const struct courier_plan *entry =
            entry_of(courier, ((struct compute_plan_order *)record)->plan);
        if (!entry->closing && entry->in != 0) {
            intruder(courier, entry->in, "activations that do not fit the plan");
        }
        return true;
    }
    }
    return true;
}

static void take_results(struct courier *courier)
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
}

/* What is due --------------------------------------------------------------------------------- */

static struct parcel *unused_parcel(struct courier *courier, uint64_t *out_cookie)
{
    for (uint32_t i = 0; i < PARCEL_MAX; i++) {
        const uint32_t index = (courier->parcel_next + i) % PARCEL_MAX;
        if (courier->parcels[index].plan == NULL) {
            courier->parcel_next = index + 1;
            *out_cookie = index + 1;
            return &courier->parcels[index];
        }
    }
    return NULL;
}

static void send_queued(struct courier *courier, struct courier_plan *entry)
{
    while (entry->queue_count > 0 && entry->linked) {
        const struct compute_activations *front = &entry->queue[entry->queue_first];
        uint64_t cookie = 0;
        struct parcel *parcel = unused_parcel(courier, &cookie);
        if (front->header.rows > entry->credit || parcel == NULL) {
            return;
        }
        unsigned char header[FL_ACTIVATION_HEADER_SIZE];
        fl_activation_header_pack(&front->header, header);
        const size_t size = (size_t)front->header.rows * front->header.width * sizeof(float);
        *parcel = (struct parcel){.plan = entry->plan, .link = entry->out, .buffer = front->buffer};
        const fl_status status = peer_send(courier->peers, entry->out, FL_WIRE_ACTIVATIONS, header,
                                           sizeof(header), front->rows, size, cookie);
        if (status != FL_OK) {
            parcel->plan = NULL;
            return; /* full, or lost: down() follows */
        }
        entry->credit -= front->header.rows;
        entry->queue_first = (entry->queue_first + 1) % COMPUTE_OUTPUT_MAX;
        entry->queue_count--;
    }
}

/* LINK to the stage after, CREDIT to the stage before, as soon as they can be said. */
static void greet(struct courier *courier, struct courier_plan *entry)
{
    const struct fl_plan *plan = &entry->plan->plan;
    if (!entry->linked && entry->out != 0) {
        const struct fl_cluster_message message = {
            .kind = FL_MESSAGE_LINK,
            .as.link = {.plan_id = plan->plan_id,
                        .from_stage = plan->stage_index,
                        .incarnation = courier->config.join.incarnation},
        };
        entry->linked = say(courier, entry->out, &message) == FL_OK;
    }
    if (!entry->credited && entry->in != 0 && entry->opened && plan->stage_index > 0) {
        const struct fl_cluster_message message = {
            .kind = FL_MESSAGE_CREDIT,
            .as.credit = {.plan_id = plan->plan_id, .rows = entry->credit_rows},
        };
        entry->credited = say(courier, entry->in, &message) == FL_OK;
    }
}

/* Returns when there may be more to tell. */
static uint64_t tell_progress(struct courier *courier, struct courier_plan *entry, uint64_t now)
{
    struct node_plan *plan = entry->plan;
    /* Pairs with the release in node_plan_fail(). */
    const fl_status failed = (fl_status)atomic_load_explicit(&plan->failed, memory_order_acquire);
    if (failed != FL_OK && !entry->failure_told) {
        entry->failure_told =
            say_failure(courier, plan->plan.plan_id, 0, failed, plan->failure_text) != FL_AGAIN;
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
    if (say_coordinator(courier, &message) != FL_AGAIN) {
        entry->pieces_told = pieces;
        entry->told_ns = now;
    }
    return UINT64_MAX;
}

static void send_fetches(struct courier *courier)
{
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FETCH};
    while (courier->joined && fetch_queue_next(courier->config.fetches, &message.as.fetch)) {
        if (say_coordinator(courier, &message) != FL_OK) {
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
        greet(courier, entry);
        send_queued(courier, entry);
        const uint64_t due = tell_progress(courier, entry, now);
        next = due < next ? due : next;
    }
    for (uint32_t i = 0; i < HELD_MAX; i++) {
        struct held_link *held = &courier->held[i];
        if (held->link != 0 && now >= held->deadline_ns) {
            held->link = 0; /* its plan never came; the link itself may serve others */
        }
    }
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
    const fl_status status = peer_connect(courier->peers, &courier->config.coordinator, &link);
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
    const uint64_t connect_ns = connect_coordinator(courier, now_of(courier));
    (void)peer_poll(courier->peers, &next);
    next = connect_ns < next ? connect_ns : next;
    take_results(courier);
    const uint64_t plans_ns = poll_plans(courier, now_of(courier));
    next = plans_ns < next ? plans_ns : next;
    send_fetches(courier);
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
    finish(courier, FL_CANCELLED, "stopped");
    if (courier->coordinator == 0) {
        return;
    }
    if (courier->joined) {
        /* Best effort: the link closes either way. */
        (void)!say_failure(courier, 0, 0, FL_CANCELLED, "stopped on purpose");
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
        const struct courier_plan *entry = find_plan(courier, out->plans[i].plan_id);
        out->plans[i].credit = entry != NULL ? entry->credit : 0;
    }
}

fl_status courier_open(const struct courier_config *config, struct courier **out)
{
    struct courier *courier = calloc(1, sizeof(*courier));
    unsigned char *scratch = malloc(PACK_SIZE * 4 + UNPACK_SIZE);
    unsigned char *packed = malloc(PACK_SIZE);
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
    courier->packed = packed;
    fl_arena_init(&courier->scratch, scratch, PACK_SIZE * 4);
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
