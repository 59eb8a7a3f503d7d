#include "coordinator/summary.h"

#include <stdlib.h>
#include <string.h>

#include "coordinator/placement.h"
#include "coordinator/request.h"

/* Placements shown at most; there are seldom more than a few. */
enum { LOADED_MAX = 64 };

static const char *node_state(const struct coordinator *coordinator, const struct roster_node *node)
{
    if (node->state == ROSTER_LOST) {
        return "lost";
    }
    for (const struct placement *placement = coordinator->placements; placement != NULL;
         placement = placement->next) {
        for (uint32_t i = 0; i < placement->stage_count; i++) {
            const struct placement_stage *stage = &placement->stages[i];
            if (stage->node == node && stage->pieces_done < stage->pieces_total) {
                return "loading";
            }
        }
    }
    return "ready";
}

static int by_name(const void *a, const void *b)
{
    const struct fl_node_summary *left = a;
    const struct fl_node_summary *right = b;
    return strcmp(left->name, right->name);
}

static void describe_clock(const struct coordinator *coordinator, const struct roster_node *node,
                           struct fl_node_summary *out)
{
    int64_t offset_ns = 0;
    uint64_t error_ns = 0;
    const struct clock_map *map =
        node->link != 0 ? peer_clock(coordinator->peers, node->link) : NULL;
    out->slept_ms = (double)node->slept_ns / (double)FL_NS_PER_MS;
    out->clock_known = map != NULL && clock_map_offset(map, state_now(coordinator), &offset_ns,
                                                       &error_ns) == FL_OK;
    if (out->clock_known) {
        out->clock_offset_us = (double)offset_ns / (double)FL_NS_PER_US;
        out->clock_error_us = (double)error_ns / (double)FL_NS_PER_US;
    }
}

static uint32_t describe_nodes(struct coordinator *coordinator, struct fl_node_summary *out)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        const struct roster_node *node = roster_at(coordinator->roster, i);
        if (node->state == ROSTER_FREE) {
            continue;
        }
        const uint64_t round_trip =
            node->link != 0 ? peer_round_trip_ns(coordinator->peers, node->link) : 0;
        out[count] =
            (struct fl_node_summary){.name = node->name,
                                     .state = node_state(coordinator, node),
                                     .address = node->where,
                                     .isa = node->isa,
                                     .threads = node->threads,
                                     .memory_budget = node->memory_budget,
                                     .memory_used = node->memory_used,
                                     .heartbeat_ms = (double)round_trip / (double)FL_NS_PER_MS};
        describe_clock(coordinator, node, &out[count++]);
    }
    qsort(out, count, sizeof(*out), by_name);
    return count;
}

static void count_requests(const struct placement *placement, struct fl_loaded_summary *out)
{
    for (const struct request *request = placement->coordinator->requests; request != NULL;
         request = request->next) {
        if (request->placement == placement && request->kind == FL_REQUEST_GENERATE) {
            out->requests_running += request->state == REQUEST_RUNNING;
            out->requests_queued += request->state != REQUEST_RUNNING;
        }
    }
}

static void describe_loaded(const struct placement *placement, struct fl_plan_stage_summary *stages,
                            struct fl_loaded_summary *out)
{
    *out = (struct fl_loaded_summary){.model = placement->model->name,
                                      .state = placement_ready(placement) ? "ready" : "loading",
                                      .context = placement->context,
                                      .kv_blocks_total = placement->kv_block_count,
                                      .kv_blocks_used = placement->sequences.block_used,
                                      .sequences_kept = sequence_table_kept(&placement->sequences),
                                      .stage_count = placement->stage_count,
                                      .stages = stages};
    count_requests(placement, out);
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        const struct placement_stage *stage = &placement->stages[i];
        stages[i] = (struct fl_plan_stage_summary){.node = stage->node->name,
                                                   .first_layer = stage->layer_first,
                                                   .last_layer =
                                                       stage->layer_first + stage->layer_count - 1,
                                                   .pieces_done = stage->pieces_done,
                                                   .pieces_total = stage->pieces_total,
                                                   .bytes_done = stage->bytes_done,
                                                   .bytes_total = stage->bytes_total};
    }
}

void summary_send_status(struct coordinator *coordinator, const struct request *request)
{
    struct fl_node_summary nodes[ROSTER_NODE_MAX];
    struct fl_loaded_summary loaded[LOADED_MAX];
    struct fl_plan_stage_summary *stages =
        calloc((size_t)LOADED_MAX * FL_STAGE_COUNT_MAX, sizeof(*stages));
    uint32_t count = 0;
    for (struct placement *placement = coordinator->placements;
         stages != NULL && placement != NULL && count < LOADED_MAX; placement = placement->next) {
        describe_loaded(placement, stages + (size_t)count * FL_STAGE_COUNT_MAX, &loaded[count]);
        count++;
    }
    const uint64_t uptime_ns = state_now(coordinator) - coordinator->started_ns;
    struct fl_client_event event = {
        .kind = FL_EVENT_STATUS,
        .as.status = {.version = FL_VERSION,
                      .uptime_s = (double)uptime_ns / (double)FL_NS_PER_S,
                      .node_count = describe_nodes(coordinator, nodes),
                      .nodes = nodes,
                      .loaded_count = count,
                      .loaded = loaded}};
    request_event(coordinator, request, &event);
    free(stages);
}

void summary_send_models(struct coordinator *coordinator, const struct request *request,
                         const struct model_file *files, uint32_t count)
{
    struct fl_model_summary *models = calloc(count > 0 ? count : 1, sizeof(*models));
    if (models == NULL) {
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        models[i] =
            (struct fl_model_summary){.name = files[i].name,
                                      .bytes = files[i].size,
                                      .architecture = files[i].architecture,
                                      .problem = files[i].problem,
                                      .loaded = placement_find(coordinator, files[i].name) != NULL};
    }
    struct fl_client_event event = {.kind = FL_EVENT_MODELS,
                                    .as.models = {.count = count, .models = models}};
    request_event(coordinator, request, &event);
    free(models);
}
