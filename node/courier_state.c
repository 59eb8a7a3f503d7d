#include "node/courier_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/log.h"

uint64_t courier_now(const struct courier *courier)
{
    return fl_clock_now(&courier->config.clock);
}

void courier_finish(struct courier *courier, fl_status status, const char *text)
{
    if (courier->final == FL_OK) {
        courier->final = status;
        snprintf(courier->text, sizeof(courier->text), "%s", text);
    }
}

void courier_intruder(struct courier *courier, transport_link link, const char *what)
{
    fl_log(FL_LOG_WARN, "link %" PRIu64 " closed: %s", link, what);
    peer_close_link(courier->peers, link);
}

fl_status courier_say(struct courier *courier, transport_link link,
                      const struct fl_cluster_message *message)
{
    size_t size = 0;
    fl_arena_reset(&courier->scratch);
    FL_TRY(fl_cluster_message_pack(message, &courier->scratch, courier->packed, COURIER_PACK_SIZE,
                                   &size));
    return peer_send(courier->peers, link, FL_WIRE_CONTROL, NULL, 0, courier->packed, size, 0);
}

fl_status courier_say_coordinator(struct courier *courier, const struct fl_cluster_message *message)
{
    return courier->coordinator_up ? courier_say(courier, courier->coordinator, message)
                                   : FL_LINK_LOST;
}

fl_status courier_say_failure(struct courier *courier, uint64_t plan_id, uint64_t request_id,
                              fl_status code, const char *text)
{
    struct fl_cluster_message message = {
        .kind = FL_MESSAGE_FAILURE,
        .as.failure = {.plan_id = plan_id, .request_id = request_id, .code = (uint32_t)code},
    };
    snprintf(message.as.failure.text, sizeof(message.as.failure.text), "%s", text);
    return courier_say_coordinator(courier, &message);
}

bool courier_order(struct courier *courier, enum compute_order kind, const void *record,
                   size_t size, const void *more, size_t more_size)
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

void courier_return_buffer(struct courier *courier, struct node_plan *plan, uint32_t buffer)
{
    struct compute_return *record =
        mailbox_reserve(courier->returns, COMPUTE_RETURN, sizeof(*record));
    FL_ASSERT(record != NULL); /* it has room for every buffer there is */
    *record = (struct compute_return){.plan = plan, .buffer = buffer};
    mailbox_post(courier->returns);
    if (compute_needs_return(courier->config.compute)) {
        wake_signal(courier->config.compute_wake);
    }
}

struct courier_plan *courier_find_plan(struct courier *courier, uint64_t plan_id)
{
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        struct courier_plan *entry = &courier->plans[i];
        if (entry->plan != NULL && !entry->closing && entry->plan->plan.plan_id == plan_id) {
            return entry;
        }
    }
    return NULL;
}

struct courier_plan *courier_plan_entry(struct courier *courier, const struct node_plan *plan)
{
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        if (courier->plans[i].plan == plan) {
            return &courier->plans[i];
        }
    }
    FL_ASSERT(false && "compute names plans that it was given");
    return NULL;
}

const struct fl_stage *courier_stage_after(const struct node_plan *plan)
{
    return &plan->plan.stages[(plan->plan.stage_index + 1) % plan->plan.stage_count];
}

uint32_t courier_index_before(const struct node_plan *plan)
{
    const uint32_t count = plan->plan.stage_count;
    return (plan->plan.stage_index + count - 1) % count;
}

bool courier_has_stage_after(const struct node_plan *plan)
{
    return plan->plan.stage_index + 1 < plan->plan.stage_count;
}
