#include "coordinator/trace.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "coordinator/placement.h"
#include "proto/base/log.h"

void trace_arrived(struct coordinator *coordinator, struct request *request)
{
    const struct placement *placement = placement_find(coordinator, request->model_name);
    uint64_t total = 0;
    request->class_ = FL_CLASS_COLD;
    if (placement == NULL) {
        return;
    }
    request->resident_plan_id = placement->plan_id;
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        const struct placement_stage *stage = &placement->stages[i];
        const bool whole = stage->pieces_done == stage->pieces_total;
        request->resident_bytes[i] = whole ? stage->bytes_total : stage->bytes_done;
    }
    if (placement_ready(placement)) {
        request->class_ = FL_CLASS_WARM;
    } else if (placement_bytes(placement, &total) > 0) {
        request->class_ = FL_CLASS_PARTIAL;
    }
}

/* What the coordinator did for it, up to the first token. */
static void add_own(struct timeline *timeline, const struct request *request)
{
    const struct placement *placement = request->placement;
    struct fl_span *span =
        timeline_own(timeline, FL_PHASE_OPEN, request->arrived_ns, request->opened_ns);
    span->lane = FL_LANE_WORKER;
    span = timeline_own(timeline, FL_PHASE_PLAN, placement->plan_ns, placement->planned_ns);
    span->request_id = 0;
    uint64_t sent_ns = placement->planned_ns;
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        span = timeline_own(timeline, FL_PHASE_SEND, sent_ns, placement->stages[i].sent_ns);
        span->request_id = 0;
        span->position = i;
        sent_ns = placement->stages[i].sent_ns;
    }
    if (request->tokenised_ns != 0) {
        span =
            timeline_own(timeline, FL_PHASE_TOKENISE, request->tokenise_ns, request->tokenised_ns);
        span->rows = request->prompt_count;
        span->lane = FL_LANE_WORKER;
    }
    if (request->queued_ns != 0) {
        span = timeline_own(timeline, FL_PHASE_QUEUE, request->queued_ns, request->admit_ns);
        span->busy_ns = 0;
        span->cause = FL_CAUSE_KV;
        span->cause_ns = request->admit_ns;
    }
    sent_ns = request->admit_ns;
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        span = timeline_own(timeline, FL_PHASE_SEND, sent_ns, request->admit_sent_ns[i]);
        span->position = i;
        sent_ns = request->admit_sent_ns[i];
    }
    (void)timeline_own(timeline, FL_PHASE_RETURN, request->token_ns, request->first_ns);
}

static void add_stage(struct timeline_stage *stage, const struct fl_stage_summary *summary,
                      const struct placement_stage *placed, const struct request *request,
                      uint32_t index)
{
    const bool known = request->resident_plan_id == request->placement->plan_id;
    *stage = (struct timeline_stage){.incarnation = placed->node->incarnation,
                                     .summary = *summary,
                                     .bytes = placed->bytes_total,
                                     .resident_bytes = known ? request->resident_bytes[index] : 0};
    snprintf(stage->node, sizeof(stage->node), "%s", placed->node->name);
    stage->summary.node = stage->node;
}

void trace_begin(struct coordinator *coordinator, struct request *request)
{
    const struct placement *placement = request->placement;
    struct fl_stage_summary stages[FL_STAGE_COUNT_MAX];
    struct timeline *timeline = timeline_start(coordinator->timelines, placement->stage_count);
    if (timeline == NULL) {
        fl_log(FL_LOG_WARN, "request %" PRIu64 " gets no timeline: no memory", request->serial);
        return;
    }
    timeline->id = request->serial;
    timeline->plan_id = placement->plan_id;
    timeline->request_id = request->request_id;
    timeline->begin_ns = request->arrived_ns;
    timeline->token_ns = request->token_ns;
    timeline->end_ns = request->first_ns;
    timeline->prompt_count = request->prompt_count;
    snprintf(timeline->model, sizeof(timeline->model), "%s", request->model_name);
    (void)placement_stages(placement, stages);
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        add_stage(&timeline->stages[i], &stages[i], &placement->stages[i], request, i);
    }
    add_own(timeline, request);
    request->timeline = timeline;
    /* Pings go first, so that a clock is known as well as it can be when the spans come. */
    struct fl_cluster_message message = {.kind = FL_MESSAGE_TRACE};
    message.as.trace = (struct fl_trace){placement->plan_id, request->request_id};
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        struct roster_node *node = placement->stages[i].node;
        if (node->link != 0) {
            peer_ping_burst(coordinator->peers, node->link);
        }
        roster_send(coordinator->roster, node, &message);
    }
}

void trace_take(struct coordinator *coordinator, const struct roster_node *node,
                const struct fl_spans *spans)
{
    struct request *request = coordinator->requests;
    while (request != NULL &&
           (request->timeline == NULL || request->timeline->plan_id != spans->plan_id ||
            request->timeline->request_id != spans->request_id)) {
        request = request->next;
    }
    for (uint32_t i = 0; request != NULL && i < request->timeline->stage_count; i++) {
        struct timeline_stage *stage = &request->timeline->stages[i];
        if (stage->incarnation == node->incarnation && strcmp(stage->node, node->name) == 0) {
            timeline_take(coordinator->timelines, request->timeline, i, spans,
                          peer_clock(coordinator->peers, node->link));
            stage->slept_ns = node->slept_ns;
            return;
        }
    }
    fl_log(FL_LOG_DEBUG, "node %s sent spans of request %" PRIu64 ", which nobody waits for",
           node->name, spans->request_id);
}

const struct timeline *trace_keep(struct coordinator *coordinator, struct request *request)
{
    struct timeline *timeline = request->timeline;
    if (timeline != NULL) {
        request->timeline = NULL;
        timeline_keep(coordinator->timelines, timeline);
        request->class_ = timeline->class_;
    }
    return timeline;
}
