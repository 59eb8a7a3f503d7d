#include "coordinator/summary.h"

#include <inttypes.h>
#include <stdio.h>
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

/* ---- a timeline ---- */

enum { PIECE_NAME_MAX = 24 };

/* Everything a TIMELINE event points to. */
struct timeline_summary {
    struct fl_segment_summary *segments;
    struct fl_phase_summary phases[FL_PHASE_COUNT];
    struct fl_timeline_node nodes[FL_STAGE_COUNT_MAX];
    struct fl_timeline_span *spans;
    char (*pieces)[PIECE_NAME_MAX]; /* [piece_count], stage after stage */
};

static double milliseconds(const struct timeline *timeline, uint64_t ns)
{
    const uint64_t begin_ns = timeline->begin_ns;
    return ns >= begin_ns ? (double)(ns - begin_ns) / (double)FL_NS_PER_MS
                          : -(double)(begin_ns - ns) / (double)FL_NS_PER_MS;
}

static const char *segment_cause(const struct exposed_segment *segment)
{
    if (segment->phase == FL_PHASE_QUEUE && segment->cause == FL_CAUSE_BUSY) {
        return "busy with other requests";
    }
    if (segment->phase == FL_PHASE_QUEUE && segment->cause == FL_CAUSE_KV) {
        return "no KV cache was free";
    }
    if (segment->phase == FL_PHASE_SEND && segment->cause == FL_CAUSE_CREDIT) {
        return "the next stage had no room";
    }
    return segment->cause != FL_CAUSE_NONE ? fl_cause_name(segment->cause) : "";
}

static void describe_segments(const struct timeline *timeline, struct fl_segment_summary *out)
{
    for (uint32_t i = 0; i < timeline->segment_count; i++) {
        const struct exposed_segment *segment = &timeline->segments[i];
        const bool own = segment->stage == EXPOSED_CHAIN_COORDINATOR;
        out[i] = (struct fl_segment_summary){
            .phase = fl_phase_name(segment->phase),
            .node = own ? "coordinator" : timeline->stages[segment->stage].node,
            .cause = segment_cause(segment),
            .start_ms = milliseconds(timeline, segment->start_ns),
            .ms = (double)(segment->end_ns - segment->start_ns) / (double)FL_NS_PER_MS,
            .bytes = segment->bytes};
    }
}

static double share(uint64_t part, uint64_t whole)
{
    return whole == 0 ? 0 : part >= whole ? 1 : (double)part / (double)whole;
}

static void describe_timeline_node(const struct timeline_stage *stage, struct fl_timeline_node *out)
{
    const struct fl_start_record *start = &stage->start;
    const bool known = start->exec_ns != 0 && start->ready_ns > start->exec_ns;
    const uint64_t process_ns = known ? start->ready_ns - start->exec_ns : 0;
    *out = (struct fl_timeline_node){
        .node = stage->node,
        .clock_known = stage->clock_known,
        .clock_offset_us = (double)stage->clock_offset_ns / (double)FL_NS_PER_US,
        .clock_error_us = (double)stage->clock_error_ns / (double)FL_NS_PER_US,
        .residency_known = start->residency_known,
        .page_cache_before = share(start->page_cache_before, start->shard_bytes),
        .page_cache_after = share(start->page_cache_after, start->shard_bytes),
        .shard_bytes = start->shard_bytes,
        .medium_bytes = start->medium_bytes,
        .regime = start->direct ? "direct" : "buffered",
        .process_ms = (double)process_ns / (double)FL_NS_PER_MS,
        .slept_ms = (double)stage->slept_ns / (double)FL_NS_PER_MS,
        .mhz_before = start->mhz_before,
        .mhz_after = start->mhz_after,
        .spans_lost = stage->spans_lost};
}

/* Of a stage: the embedding on the first, two of each layer, the head on the last. */
static uint32_t piece_count(const struct timeline_stage *stage)
{
    return 2 * (stage->summary.last_layer - stage->summary.first_layer + 1) + 2;
}

static void name_piece(const struct timeline *timeline, uint32_t stage, uint32_t piece,
                       char out[PIECE_NAME_MAX])
{
    const struct fl_stage_summary *summary = &timeline->stages[stage].summary;
    const uint32_t before = stage == 0 ? 1 : 0;
    const uint32_t layers = summary->last_layer - summary->first_layer + 1;
    if (piece < before) {
        snprintf(out, PIECE_NAME_MAX, "embedding");
    } else if ((piece - before) / 2 < layers) {
        snprintf(out, PIECE_NAME_MAX, "layer %" PRIu32 " %s",
                 summary->first_layer + (piece - before) / 2,
                 (piece - before) % 2 == 0 ? "attention" : "ffn");
    } else {
        snprintf(out, PIECE_NAME_MAX, "head");
    }
}

static struct fl_timeline_span describe_span(const struct timeline *timeline,
                                             const struct fl_span *span, const char *node,
                                             const char *piece)
{
    return (struct fl_timeline_span){
        .phase = fl_phase_name(span->phase),
        .node = node,
        .lane = fl_lane_name(span->lane),
        .source = span->source != FL_SOURCE_NONE ? fl_source_name(span->source) : "",
        .cause = span->cause != FL_CAUSE_NONE ? fl_cause_name(span->cause) : "",
        .piece = piece,
        .start_ms = milliseconds(timeline, span->start_ns),
        .end_ms = milliseconds(timeline, span->end_ns),
        .busy_ms = (double)span->busy_ns / (double)FL_NS_PER_MS,
        .cause_ms = span->cause_ns != 0 ? milliseconds(timeline, span->cause_ns) : 0,
        .bytes = span->bytes,
        .run = span->run,
        .position = span->position,
        .rows = span->rows};
}

static int by_start(const void *a, const void *b)
{
    const struct fl_timeline_span *left = a;
    const struct fl_timeline_span *right = b;
    return (left->start_ms > right->start_ms) - (left->start_ms < right->start_ms);
}

static uint32_t describe_spans(const struct timeline *timeline, struct timeline_summary *out)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < timeline->own_count; i++) {
        out->spans[count++] = describe_span(timeline, &timeline->own[i], "coordinator", "");
    }
    char(*pieces)[PIECE_NAME_MAX] = out->pieces;
    for (uint32_t i = 0; i < timeline->stage_count; i++) {
        const struct timeline_stage *stage = &timeline->stages[i];
        for (uint32_t j = 0; j < piece_count(stage); j++) {
            name_piece(timeline, i, j, pieces[j]);
        }
        for (uint32_t j = 0; j < stage->span_count; j++) {
            const uint32_t piece = stage->spans[j].piece;
            out->spans[count++] = describe_span(timeline, &stage->spans[j], stage->node,
                                                piece < piece_count(stage) ? pieces[piece] : "");
        }
        pieces += piece_count(stage);
    }
    qsort(out->spans, count, sizeof(*out->spans), by_start);
    return count;
}

static fl_status send_timeline(struct coordinator *coordinator, const struct request *request,
                               const struct timeline *timeline, struct timeline_summary *summary)
{
    size_t span_count = timeline->own_count;
    size_t pieces = 0;
    for (uint32_t i = 0; i < timeline->stage_count; i++) {
        span_count += timeline->stages[i].span_count;
        pieces += piece_count(&timeline->stages[i]);
        describe_timeline_node(&timeline->stages[i], &summary->nodes[i]);
    }
    summary->segments = calloc(timeline->segment_count + 1, sizeof(*summary->segments));
    summary->spans = calloc(span_count + 1, sizeof(*summary->spans));
    summary->pieces = calloc(pieces + 1, sizeof(*summary->pieces));
    if (summary->segments == NULL || summary->spans == NULL || summary->pieces == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory to show a timeline of %zu spans", span_count);
    }
    describe_segments(timeline, summary->segments);
    struct fl_client_event event = {.kind = FL_EVENT_TIMELINE,
                                    .as.timeline = {.id = timeline->id,
                                                    .model = timeline->model,
                                                    .class_ = timeline->class_,
                                                    .ttft_ms = timeline_ttft_ms(timeline),
                                                    .predicted_ms = timeline->predicted_ms,
                                                    .prompt_tokens = timeline->prompt_count,
                                                    .complete = timeline->complete,
                                                    .segment_count = timeline->segment_count,
                                                    .segments = summary->segments,
                                                    .phases = summary->phases,
                                                    .node_count = timeline->stage_count,
                                                    .nodes = summary->nodes,
                                                    .spans = summary->spans}};
    event.as.timeline.phase_count = timeline_phases(timeline, summary->phases);
    event.as.timeline.span_count = describe_spans(timeline, summary);
    request_event(coordinator, request, &event);
    return FL_OK;
}

fl_status summary_send_timeline(struct coordinator *coordinator, const struct request *request,
                                const struct timeline *timeline)
{
    struct timeline_summary summary = {0};
    const fl_status status = send_timeline(coordinator, request, timeline, &summary);
    free(summary.segments);
    free(summary.spans);
    free(summary.pieces);
    return status;
}
