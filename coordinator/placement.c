#include "coordinator/placement.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/generation.h"
#include "coordinator/request.h"
#include "pipeline/planner.h"
#include "proto/base/log.h"

enum { LEAST_POSITIONS = 256 }; /* of KV cache: with fewer no useful request fits */

struct placement *placement_find(struct coordinator *coordinator, const char *name)
{
    for (struct placement *placement = coordinator->placements; placement != NULL;
         placement = placement->next) {
        if (strcmp(placement->model->name, name) == 0) {
            return placement;
        }
    }
    return NULL;
}

struct placement *placement_by_id(struct coordinator *coordinator, uint64_t plan_id)
{
    for (struct placement *placement = coordinator->placements; placement != NULL;
         placement = placement->next) {
        if (placement->plan_id == plan_id) {
            return placement;
        }
    }
    return NULL;
}

uint32_t placement_request_count(const struct placement *placement)
{
    uint32_t count = 0;
    for (const struct request *request = placement->coordinator->requests; request != NULL;
         request = request->next) {
        count += request->placement == placement;
    }
    return count;
}

uint64_t placement_bytes(const struct placement *placement, uint64_t *out_total)
{
    uint64_t done = 0;
    uint64_t total = 0;
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        done += placement->stages[i].bytes_done;
        total += placement->stages[i].bytes_total;
    }
    *out_total = total;
    return done;
}

bool placement_ready(const struct placement *placement)
{
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        if (placement->stages[i].pieces_done < placement->stages[i].pieces_total) {
            return false;
        }
    }
    return true;
}

void placement_send(struct placement *placement, const struct fl_cluster_message *message)
{
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        roster_send(placement->coordinator->roster, placement->stages[i].node, message);
    }
}

void placement_progress(struct placement *placement, const struct roster_node *node,
                        const struct fl_progress *progress)
{
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        struct placement_stage *stage = &placement->stages[i];
        if (stage->node == node) {
            stage->pieces_done = progress->pieces_done;
            stage->pieces_total = progress->pieces_total;
            stage->bytes_done = progress->bytes_done;
            stage->bytes_total = progress->bytes_total;
        }
    }
}

uint32_t placement_stages(const struct placement *placement, struct fl_stage_summary *out)
{
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        const struct placement_stage *stage = &placement->stages[i];
        out[i] =
            (struct fl_stage_summary){.node = stage->node->name,
                                      .first_layer = stage->layer_first,
                                      .last_layer = stage->layer_first + stage->layer_count - 1,
                                      .shard_bytes = stage->shard_bytes,
                                      .kv_bytes = stage->kv_bytes,
                                      .memory_budget = stage->node->memory_budget};
    }
    return placement->stage_count;
}

/* ---- planning ---- */

/* A plan as the planner made it, and the nodes it speaks of. */
struct draft {
    uint32_t node_count;
    struct roster_node *nodes[ROSTER_NODE_MAX]; /* in order of name */
    struct planner_node planner_nodes[ROSTER_NODE_MAX];
    uint32_t context;
    struct planner_plan plan;
};

static int by_name(const void *a, const void *b)
{
    const struct roster_node *const *left = a;
    const struct roster_node *const *right = b;
    return strcmp((*left)->name, (*right)->name);
}

static void collect_nodes(struct coordinator *coordinator, struct draft *draft)
{
    draft->node_count = 0;
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        struct roster_node *node = roster_at(coordinator->roster, i);
        if (node->state == ROSTER_READY && !node->leaving) {
            draft->nodes[draft->node_count++] = node;
        }
    }
    qsort(draft->nodes, draft->node_count, sizeof(draft->nodes[0]), by_name);
}

/* True when no request has the placement: it may make room. */
static bool is_idle(const struct placement *placement)
{
    return placement_request_count(placement) == 0;
}

/* Memory of a node that idle models would give back. */
static uint64_t idle_memory(const struct coordinator *coordinator, const struct roster_node *node)
{
    uint64_t memory = 0;
    for (const struct placement *placement = coordinator->placements; placement != NULL;
         placement = placement->next) {
        for (uint32_t i = 0; i < placement->stage_count; i++) {
            memory += placement->stages[i].node == node && is_idle(placement)
                          ? placement->stages[i].memory
                          : 0;
        }
    }
    return memory;
}

enum draft_memory { DRAFT_FREE, DRAFT_WITHOUT_IDLE };

/* A plan with KV for `positions` at least, or for the whole context when that is less. */
static fl_status make_draft(struct coordinator *coordinator, const struct catalog_model *model,
                            enum draft_memory memory, uint32_t positions, struct draft *draft)
{
    const struct coordinator_settings *settings = &coordinator->config.settings;
    const struct fl_manifest *manifest = model_manifest(model->model);
    collect_nodes(coordinator, draft);
    if (draft->node_count == 0) {
        struct fl_address address;
        coordinator->config.transport->ops->address(coordinator->config.transport, &address);
        const bool has_port = address.kind == FL_ADDRESS_SOCKET;
        return FL_FAIL(FL_NOT_FOUND,
                       "no node has joined; start one with: firstlight-node --join %.*s",
                       has_port ? (int)address.size : (int)sizeof("HOST:PORT") - 1,
                       has_port ? (const char *)address.bytes : "HOST:PORT");
    }
    uint32_t split[ROSTER_NODE_MAX] = {0};
    if (settings->split_count > draft->node_count) {
        return FL_FAIL(FL_INVALID,
                       "--split cuts the model in %" PRIu32 " and %" PRIu32 " nodes have joined; "
                       "start more, or split it in fewer",
                       settings->split_count, draft->node_count);
    }
    for (uint32_t i = 0; i < draft->node_count; i++) {
        const struct roster_node *node = draft->nodes[i];
        uint64_t used = node->memory_used;
        if (memory == DRAFT_WITHOUT_IDLE) {
            used -= idle_memory(coordinator, node);
        }
        draft->planner_nodes[i] = (struct planner_node){
            .name = node->name,
            .memory_size = node->memory_budget > used ? node->memory_budget - used : 0,
            .kv_size_max = settings->kv_budget};
        split[i] = i < settings->split_count ? settings->split[i] : 0;
    }
    const uint32_t most = manifest->shape.context;
    draft->context = settings->context < most ? settings->context : most;
    const struct planner_request wanted = {
        .manifest = manifest,
        .nodes = draft->planner_nodes,
        .node_count = draft->node_count,
        .context_min = positions < draft->context ? positions : draft->context,
        .chunk_rows = settings->chunk,
        .split = settings->split_count > 0 ? split : NULL};
    return planner_plan(&wanted, &draft->plan);
}

static struct placement *find_oldest_idle(struct coordinator *coordinator)
{
    struct placement *oldest = NULL;
    for (struct placement *placement = coordinator->placements; placement != NULL;
         placement = placement->next) {
        if (is_idle(placement) && (oldest == NULL || placement->used_ns < oldest->used_ns)) {
            oldest = placement;
        }
    }
    return oldest;
}

/* A draft with KV for `positions`, unloading what nobody uses as long as it does not fit. */
static fl_status make_room(struct coordinator *coordinator, const struct catalog_model *model,
                           uint32_t positions, struct draft *draft)
{
    for (;;) {
        const fl_status status = make_draft(coordinator, model, DRAFT_FREE, positions, draft);
        struct placement *oldest = find_oldest_idle(coordinator);
        if (status != FL_NO_MEMORY || oldest == NULL) {
            return status;
        }
        /* Nothing is unloaded in vain. */
        struct draft *trial = malloc(sizeof(*trial));
        const bool helps = trial != NULL && make_draft(coordinator, model, DRAFT_WITHOUT_IDLE,
                                                       positions, trial) == FL_OK;
        free(trial);
        if (!helps) {
            return status;
        }
        fl_log(FL_LOG_INFO, "model %s unloaded to make room for %s", oldest->model->name,
               model->name);
        placement_drop(coordinator, oldest, FL_CANCELLED, "the model made room for another", 0);
    }
}

/* KV for one whole context where it fits; else for as much of it as does, in halves. */
static fl_status find_draft(struct coordinator *coordinator, const struct catalog_model *model,
                            bool dry_run, struct draft *draft)
{
    fl_status status = FL_OK;
    uint32_t positions = coordinator->config.settings.context;
    do {
        status = dry_run ? make_draft(coordinator, model, DRAFT_WITHOUT_IDLE, positions, draft)
                         : make_room(coordinator, model, positions, draft);
        positions /= 2;
    } while (status == FL_NO_MEMORY && positions >= LEAST_POSITIONS);
    return status;
}

/* ---- loading ---- */

static void forget_sequence(void *ctx, uint64_t sequence_id)
{
    struct placement *placement = ctx;
    struct fl_cluster_message message = {.kind = FL_MESSAGE_DROP};
    message.as.drop = (struct fl_drop){placement->plan_id, sequence_id};
    placement_send(placement, &message);
}

static uint64_t file_bytes(const struct fl_manifest *manifest)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        bytes += fl_piece_size(&manifest->pieces[i]);
    }
    return bytes;
}

static fl_status stage_manifest(const struct catalog_model *model,
                                const struct planner_stage *stage, struct fl_manifest *out)
{
    const struct model_range range = {.layer_first = stage->layer_first,
                                      .layer_count = stage->layer_count,
                                      .has_embed = stage->has_embed,
                                      .has_head = stage->has_head};
    return model_stage_manifest(model_manifest(model->model), &range, out);
}

static fl_status send_plan(struct coordinator *coordinator, struct placement *placement,
                           const struct draft *draft)
{
    const struct coordinator_settings *settings = &coordinator->config.settings;
    struct fl_stage *stages = calloc(placement->stage_count, sizeof(*stages));
    if (stages == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a plan of %" PRIu32 " stages",
                       placement->stage_count);
    }
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        const struct planner_stage *stage = &draft->plan.stages[i];
        const struct roster_node *node = draft->nodes[stage->node];
        stages[i] = (struct fl_stage){.incarnation = node->incarnation,
                                      .address = node->address,
                                      .layer_first = stage->layer_first,
                                      .layer_count = stage->layer_count,
                                      .has_embed = stage->has_embed,
                                      .has_head = stage->has_head};
        snprintf(stages[i].node, sizeof(stages[i].node), "%s", node->name);
    }
    fl_status status = FL_OK;
    for (uint32_t i = 0; status == FL_OK && i < placement->stage_count; i++) {
        struct fl_cluster_message message = {.kind = FL_MESSAGE_PLAN};
        struct fl_plan *plan = &message.as.plan;
        plan->plan_id = placement->plan_id;
        plan->stage_index = i;
        plan->stage_count = placement->stage_count;
        plan->stages = stages;
        plan->chunk_rows = settings->chunk;
        plan->context = placement->context;
        plan->kv_block_count = placement->kv_block_count;
        plan->sequence_max = settings->sequences;
        plan->activations_f32 = settings->activations_f32;
        plan->no_overlap = settings->no_overlap;
        status = stage_manifest(placement->model, &draft->plan.stages[i], &plan->manifest);
        if (status == FL_OK) {
            placement->stages[i].pieces_total = plan->manifest.piece_count;
            placement->stages[i].bytes_total = file_bytes(&plan->manifest);
            roster_send(coordinator->roster, placement->stages[i].node, &message);
            placement->stages[i].sent_ns = state_now(coordinator);
        }
    }
    free(stages);
    return status;
}

static fl_status open_placement(struct coordinator *coordinator, struct catalog_model *model,
                                const struct draft *draft, struct placement **out)
{
    struct placement *placement = calloc(1, sizeof(*placement));
    if (placement == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a plan");
    }
    *placement = (struct placement){.plan_id = coordinator->next_plan_id++,
                                    .model = model,
                                    .context = draft->context,
                                    .kv_block_count = draft->plan.kv_block_count,
                                    .stage_count = draft->plan.stage_count,
                                    .coordinator = coordinator,
                                    .used_ns = state_now(coordinator)};
    const struct sequence_table_config sequences = {.block_positions = PLANNER_KV_BLOCK_POSITIONS,
                                                    .block_count = placement->kv_block_count,
                                                    .sequence_max =
                                                        coordinator->config.settings.sequences,
                                                    .evicted = forget_sequence,
                                                    .ctx = placement};
    const fl_status status = sequence_table_open(&placement->sequences, &sequences);
    if (status != FL_OK) {
        free(placement);
        return status;
    }
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        const struct planner_stage *stage = &draft->plan.stages[i];
        const uint64_t memory = stage->shard_size + stage->kv_size + stage->overhead_size;
        placement->stages[i] = (struct placement_stage){.node = draft->nodes[stage->node],
                                                        .layer_first = stage->layer_first,
                                                        .layer_count = stage->layer_count,
                                                        .shard_bytes = stage->shard_size,
                                                        .kv_bytes = stage->kv_size,
                                                        .memory = memory};
        draft->nodes[stage->node]->memory_used += memory;
    }
    catalog_keep(model);
    placement->next = coordinator->placements;
    coordinator->placements = placement;
    *out = placement;
    return FL_OK;
}

fl_status placement_get(struct coordinator *coordinator, struct catalog_model *model,
                        struct placement **out)
{
    *out = placement_find(coordinator, model->name);
    if (*out != NULL) {
        return FL_OK;
    }
    struct draft *draft = malloc(sizeof(*draft));
    if (draft == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory to plan model '%s'", model->name);
    }
    struct placement *placement = NULL;
    const uint64_t plan_ns = state_now(coordinator);
    fl_status status = find_draft(coordinator, model, false, draft);
    if (status == FL_OK) {
        status = open_placement(coordinator, model, draft, &placement);
    }
    if (status == FL_OK) {
        placement->plan_ns = plan_ns;
        placement->planned_ns = state_now(coordinator);
        status = send_plan(coordinator, placement, draft);
        if (status != FL_OK) {
            placement_drop(coordinator, placement, status, fl_last_error(), 0);
        }
    }
    free(draft);
    if (status == FL_OK) {
        fl_log(FL_LOG_INFO,
               "model %s planned on %" PRIu32 " nodes, context %" PRIu32 ", kv positions %" PRIu64,
               model->name, placement->stage_count, placement->context,
               (uint64_t)placement->kv_block_count * PLANNER_KV_BLOCK_POSITIONS);
        *out = placement;
    }
    return status;
}

void placement_drop(struct coordinator *coordinator, struct placement *placement, fl_status code,
                    const char *text, uint32_t retry_ms)
{
    placement->dropping = true;
    for (struct request *request = coordinator->requests; request != NULL;) {
        if (request->placement != placement) {
            request = request->next;
            continue;
        }
        request_fail(coordinator, request, code, text, retry_ms);
        request = coordinator->requests; /* the list has changed */
    }
    struct fl_cluster_message message = {.kind = FL_MESSAGE_UNPLAN};
    message.as.unplan.plan_id = placement->plan_id;
    placement_send(placement, &message);
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        struct placement_stage *stage = &placement->stages[i];
        const bool there = stage->node->memory_used >= stage->memory;
        stage->node->memory_used -= there ? stage->memory : stage->node->memory_used;
    }
    for (struct placement **at = &coordinator->placements; *at != NULL; at = &(*at)->next) {
        if (*at == placement) {
            *at = placement->next;
            break;
        }
    }
    sequence_table_close(&placement->sequences);
    catalog_release(coordinator->catalog, placement->model);
    free(placement);
}

void placement_drop_node(struct coordinator *coordinator, struct roster_node *node,
                         const char *text)
{
    struct placement *next;
    for (struct placement *placement = coordinator->placements; placement != NULL;
         placement = next) {
        next = placement->next;
        bool has = false;
        for (uint32_t i = 0; i < placement->stage_count; i++) {
            has = has || placement->stages[i].node == node;
        }
        if (has) {
            placement_drop(coordinator, placement, FL_NODE_LOST, text, 1);
        }
    }
}

/* ---- a plan without loading ---- */

static void describe_left_out(const struct draft *draft, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < draft->plan.left_out_count && used < size; i++) {
        const struct planner_left_out *left_out = &draft->plan.left_out[i];
        const char *name = draft->nodes[left_out->node]->name;
        int written;
        if (left_out->missing_size > 0) {
            written = snprintf(out + used, size - used,
                               "%snode %s is left out: it lacks %.1f MiB for a single layer",
                               i > 0 ? "; " : "", name,
                               (double)left_out->missing_size / (double)(1 << 20));
        } else {
            written = snprintf(out + used, size - used,
                               "%snode %s is left out: there are layers for fewer nodes, or the "
                               "split says so",
                               i > 0 ? "; " : "", name);
        }
        used += written > 0 ? (size_t)written : 0;
    }
}

static void send_dry_run(struct coordinator *coordinator, const struct request *request,
                         const struct draft *draft)
{
    struct fl_stage_summary stages[FL_STAGE_COUNT_MAX];
    char note[STATE_TEXT_MAX];
    describe_left_out(draft, note, sizeof(note));
    struct fl_client_event event = {
        .kind = FL_EVENT_PLAN,
        .as.plan = {.model = request->model_name,
                    .context = draft->context,
                    .kv_positions = draft->plan.kv_block_count * PLANNER_KV_BLOCK_POSITIONS,
                    .stage_count = draft->plan.stage_count,
                    .stages = stages,
                    .note = note}};
    for (uint32_t i = 0; i < draft->plan.stage_count; i++) {
        const struct planner_stage *stage = &draft->plan.stages[i];
        const struct roster_node *node = draft->nodes[stage->node];
        stages[i] =
            (struct fl_stage_summary){.node = node->name,
                                      .first_layer = stage->layer_first,
                                      .last_layer = stage->layer_first + stage->layer_count - 1,
                                      .shard_bytes = stage->shard_size,
                                      .kv_bytes = stage->kv_size,
                                      .memory_budget = node->memory_budget};
        event.as.plan.total_bytes += stage->shard_size;
    }
    request_event(coordinator, request, &event);
}

static void send_loaded(struct coordinator *coordinator, const struct request *request,
                        const struct placement *placement)
{
    struct fl_stage_summary stages[FL_STAGE_COUNT_MAX];
    struct fl_client_event event = {
        .kind = FL_EVENT_PLAN,
        .as.plan = {.model = request->model_name,
                    .context = placement->context,
                    .kv_positions = placement->kv_block_count * PLANNER_KV_BLOCK_POSITIONS,
                    .stage_count = placement_stages(placement, stages),
                    .stages = stages,
                    .note = "loaded like this"}};
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        event.as.plan.total_bytes += stages[i].shard_bytes;
    }
    request_event(coordinator, request, &event);
}

fl_status placement_dry_run(struct coordinator *coordinator, struct catalog_model *model,
                            struct request *request)
{
    const struct placement *placement = placement_find(coordinator, model->name);
    if (placement != NULL) {
        send_loaded(coordinator, request, placement);
        return FL_OK;
    }
    struct draft *draft = malloc(sizeof(*draft));
    if (draft == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory to plan model '%s'", model->name);
    }
    const fl_status status = find_draft(coordinator, model, true, draft);
    if (status == FL_OK) {
        send_dry_run(coordinator, request, draft);
    }
    free(draft);
    return status;
}
