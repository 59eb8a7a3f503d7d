#include "node/stage_link.h"

#include <stdio.h>
#include <string.h>

#include "node/courier_trace.h"

static const uint64_t held_ns = 30 * FL_NS_PER_S;

void stage_link_return_queue(struct courier *courier, struct courier_plan *entry)
{
    for (; entry->queue_count > 0; entry->queue_count--) {
        courier_return_buffer(courier, entry->plan, entry->queue[entry->queue_first].buffer);
        entry->queue_first = (entry->queue_first + 1) % COMPUTE_OUTPUT_MAX;
    }
}

transport_link stage_link_open(struct courier *courier, const struct fl_stage *stage)
{
    struct courier_neighbour *unused = NULL;
    for (uint32_t i = 0; i < COURIER_NEIGHBOUR_MAX; i++) {
        struct courier_neighbour *neighbour = &courier->neighbours[i];
        if (neighbour->link != 0 && neighbour->incarnation == stage->incarnation) {
            return neighbour->link;
        }
        unused = neighbour->link == 0 && unused == NULL ? neighbour : unused;
    }
    transport_link link = 0;
    if (unused == NULL) {
        (void)FL_FAIL(FL_TOO_LARGE, "node %s: links to %d other nodes are open already",
                      stage->node, COURIER_NEIGHBOUR_MAX);
    } else if (peer_connect(courier->peers, &stage->address, &link) == FL_OK) {
        *unused = (struct courier_neighbour){.incarnation = stage->incarnation, .link = link};
    }
    return link;
}

/* What a peer's LINK says, held against the plan it names. */
static void take_link(struct courier *courier, struct courier_plan *entry, transport_link link,
                      const struct fl_link *said)
{
    const struct fl_plan *plan = &entry->plan->plan;
    const uint32_t before = courier_index_before(entry->plan);
    if (plan->stage_count == 1 || said->from_stage != before ||
        said->incarnation != plan->stages[before].incarnation) {
        courier_intruder(courier, link, "it claims to be a stage that it is not");
        return;
    }
    entry->in = link;
    entry->credited = false;
}

void stage_link_take_held(struct courier *courier, struct courier_plan *entry)
{
    for (uint32_t i = 0; i < COURIER_HELD_MAX; i++) {
        struct courier_held *held = &courier->held[i];
        if (held->link != 0 && held->said.plan_id == entry->plan->plan.plan_id) {
            take_link(courier, entry, held->link, &held->said);
            held->link = 0;
        }
    }
}

void stage_link_expire_held(struct courier *courier, uint64_t now_ns)
{
    for (uint32_t i = 0; i < COURIER_HELD_MAX; i++) {
        struct courier_held *held = &courier->held[i];
        if (held->link != 0 && now_ns >= held->deadline_ns) {
            held->link = 0;
        }
    }
}

static void on_link(struct courier *courier, transport_link link, const struct fl_link *said)
{
    struct courier_plan *entry = courier_find_plan(courier, said->plan_id);
    if (entry != NULL) {
        take_link(courier, entry, link, said);
        return;
    }
    /* While we have no coordinator, ids of the next one may be anything. */
    if (courier->joined && said->plan_id <= courier->plan_last) {
        return; /* a plan that is over here */
    }
    for (uint32_t i = 0; i < COURIER_HELD_MAX; i++) {
        if (courier->held[i].link == 0) {
            courier->held[i] = (struct courier_held){
                .link = link, .said = *said, .deadline_ns = courier_now(courier) + held_ns};
            return;
        }
    }
    courier_intruder(courier, link, "too many links for plans that are not here");
}

static void on_credit(struct courier *courier, transport_link link, const struct fl_credit *credit)
{
    struct courier_plan *entry = courier_find_plan(courier, credit->plan_id);
    if (entry == NULL) {
        return;
    }
    if (entry->out != link || !courier_has_stage_after(entry->plan)) {
        courier_intruder(courier, link, "credit from a stage that gets no activations");
        return;
    }
    if (entry->starved) {
        entry->starved = false;
        entry->fed_ns = courier_now(courier);
    }
    entry->credit += credit->rows; /* 64 bits: nobody lives to see it wrap */
}

static void on_token(struct courier *courier, transport_link link, const struct fl_token *token)
{
    const struct courier_plan *entry = courier_find_plan(courier, token->plan_id);
    if (entry == NULL) {
        return;
    }
    if (entry->in != link || entry->plan->plan.stage_index != 0) {
        courier_intruder(courier, link, "a token from a stage that samples none for this one");
        return;
    }
    struct compute_token order = {.token = *token, .arrived_ns = courier_now(courier)};
    order.token.logprob_count = 0;
    order.token.logprobs = NULL;
    order.token.logit_count = 0;
    order.token.logits = NULL;
    if (!courier_order(courier, COMPUTE_TOKEN, &order, sizeof(order), NULL, 0)) {
        courier_intruder(courier, link, "more tokens than a node can hold");
    }
}

void stage_link_message(struct courier *courier, transport_link link,
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
    case FL_MESSAGE_FETCH:
    case FL_MESSAGE_TRACE:
    case FL_MESSAGE_SPANS:
        courier_intruder(courier, link, "a message that nodes do not send");
        break;
    }
}

void stage_link_activations(struct courier *courier, transport_link link, const void *header_bytes,
                            size_t header_size, const void *data, size_t size)
{
    struct fl_activation_header header;
    if (fl_activation_header_unpack(header_bytes, header_size, &header) != FL_OK) {
        courier_intruder(courier, link, fl_last_error());
        return;
    }
    const struct courier_plan *entry = courier_find_plan(courier, header.plan_id);
    if (entry == NULL) {
        return; /* late */
    }
    if (entry->in != link || entry->rows == NULL ||
        header.width != entry->plan->plan.manifest.shape.width ||
        size != (uint64_t)header.rows * header.width * sizeof(float)) {
        courier_intruder(courier, link,
                         "activations of another size, or from another stage, than planned");
        return;
    }
    struct compute_rows *room = mailbox_reserve(entry->rows, COMPUTE_ROWS, sizeof(*room) + size);
    if (room == NULL) {
        courier_intruder(courier, link, "activations beyond the credit that was given");
        return;
    }
    const uint64_t now = courier_now(courier);
    courier_trace_rows(courier, &header, size, now);
    *room = (struct compute_rows){.header = header, .arrived_ns = now};
    memcpy(room + 1, data, size);
    mailbox_post(entry->rows);
    wake_signal(courier->config.compute_wake);
}

static struct courier_parcel *unused_parcel(struct courier *courier, uint64_t *out_cookie)
{
    for (uint32_t i = 0; i < COURIER_PARCEL_MAX; i++) {
        const uint32_t index = (courier->parcel_next + i) % COURIER_PARCEL_MAX;
        if (courier->parcels[index].plan == NULL) {
            courier->parcel_next = index + 1;
            *out_cookie = index + 1;
            return &courier->parcels[index];
        }
    }
    return NULL;
}

void stage_link_send(struct courier *courier, struct courier_plan *entry)
{
    while (entry->queue_count > 0 && entry->linked) {
        const struct compute_activations *front = &entry->queue[entry->queue_first];
        uint64_t cookie = 0;
        struct courier_parcel *parcel = unused_parcel(courier, &cookie);
        entry->starved = front->header.rows > entry->credit;
        if (entry->starved || parcel == NULL) {
            return;
        }
        unsigned char header[FL_ACTIVATION_HEADER_SIZE];
        fl_activation_header_pack(&front->header, header);
        const size_t size = (size_t)front->header.rows * front->header.width * sizeof(float);
        *parcel = (struct courier_parcel){
            .plan = entry->plan, .link = entry->out, .buffer = front->buffer};
        const fl_status status = peer_send(courier->peers, entry->out, FL_WIRE_ACTIVATIONS, header,
                                           sizeof(header), front->rows, size, cookie);
        if (status != FL_OK) {
            parcel->plan = NULL;
            return; /* full, or lost: down() follows */
        }
        courier_trace_rows_sent(courier, entry, front, size);
        entry->credit -= front->header.rows;
        entry->queue_first = (entry->queue_first + 1) % COMPUTE_OUTPUT_MAX;
        entry->queue_count--;
    }
}

void stage_link_send_tokens(struct courier *courier, struct courier_plan *entry)
{
    while (entry->token_count > 0) {
        const struct fl_cluster_message message = {.kind = FL_MESSAGE_TOKEN,
                                                   .as.token = entry->tokens[entry->token_first]};
        if (entry->out != 0 &&
            (!entry->linked || courier_say(courier, entry->out, &message) == FL_AGAIN)) {
            return; /* stage 0 takes tokens from whom it knows by his LINK */
        }
        entry->token_first = (entry->token_first + 1) % entry->plan->plan.sequence_max;
        entry->token_count--;
    }
}

bool stage_link_pass_token(struct courier *courier, struct courier_plan *entry,
                           const struct fl_token *token)
{
    const uint32_t room = entry->plan->plan.sequence_max;
    if (entry->token_count == room) {
        return false;
    }
    struct fl_token *kept = &entry->tokens[(entry->token_first + entry->token_count++) % room];
    *kept = *token;
    kept->logprob_count = 0;
    kept->logit_count = 0;
    stage_link_send_tokens(courier, entry);
    return true;
}

void stage_link_greet(struct courier *courier, struct courier_plan *entry)
{
    const struct fl_plan *plan = &entry->plan->plan;
    if (!entry->linked && entry->out != 0) {
        const struct fl_cluster_message message = {
            .kind = FL_MESSAGE_LINK,
            .as.link = {.plan_id = plan->plan_id,
                        .from_stage = plan->stage_index,
                        .incarnation = courier->config.join.incarnation},
        };
        entry->linked = courier_say(courier, entry->out, &message) == FL_OK;
        if (entry->linked) {
            courier_trace_linked(courier, entry);
        }
    }
    if (!entry->credited && entry->in != 0 && entry->opened && plan->stage_index > 0) {
        const struct fl_cluster_message message = {
            .kind = FL_MESSAGE_CREDIT,
            .as.credit = {.plan_id = plan->plan_id, .rows = entry->credit_rows},
        };
        entry->credited = courier_say(courier, entry->in, &message) == FL_OK;
    }
}

void stage_link_sent(struct courier *courier, uint64_t cookie)
{
    FL_ASSERT(cookie >= 1 && cookie <= COURIER_PARCEL_MAX);
    struct courier_parcel *parcel = &courier->parcels[cookie - 1];
    FL_ASSERT(parcel->plan != NULL);
    courier_return_buffer(courier, parcel->plan, parcel->buffer);
    parcel->plan = NULL;
}

void stage_link_down(struct courier *courier, transport_link link, const char *text)
{
    for (uint32_t i = 0; i < COURIER_PARCEL_MAX; i++) {
        struct courier_parcel *parcel = &courier->parcels[i];
        if (parcel->plan != NULL && parcel->link == link) {
            courier_return_buffer(courier, parcel->plan, parcel->buffer);
            parcel->plan = NULL;
        }
    }
    for (uint32_t i = 0; i < COURIER_NEIGHBOUR_MAX; i++) {
        if (courier->neighbours[i].link == link) {
            courier->neighbours[i].link = 0;
        }
    }
    for (uint32_t i = 0; i < COURIER_HELD_MAX; i++) {
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
                                           ? courier_stage_after(entry->plan)
                                           : &plan->stages[courier_index_before(entry->plan)];
        if (!entry->closing) {
            char what[FL_ERROR_TEXT_MAX];
            snprintf(what, sizeof(what), "node %s: link to node %s lost: %.200s",
                     courier->config.join.name, other->node, text);
            node_plan_fail(entry->plan, FL_NODE_LOST, what);
            stage_link_return_queue(courier, entry);
        }
        entry->in = entry->in == link ? 0 : entry->in;
        entry->out = entry->out == link ? 0 : entry->out;
    }
}
