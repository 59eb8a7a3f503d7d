#include "pipeline/stage_plan.h"

#include <inttypes.h>

#include "pipeline/inbox.h"
#include "pipeline/run.h"
#include "pipeline/sampler.h"
#include "pipeline/stage.h"

enum {
    THREADS_ASSUMED = 16, /* of a device, where only the plan is known */
    REQUEST_SIZE = 1024,  /* bytes of a request's state, about */
};

bool stage_plan_is_first(const struct fl_plan *plan)
{
    return plan->stage_index == 0;
}

bool stage_plan_is_last(const struct fl_plan *plan)
{
    return plan->stage_index + 1 == plan->stage_count;
}

uint32_t stage_plan_row_max(const struct fl_plan *plan)
{
    return plan->chunk_rows + plan->sequence_max;
}

uint32_t stage_plan_credit_rows(const struct fl_plan *plan)
{
    return stage_plan_is_first(plan) ? 0 : 2 * stage_plan_row_max(plan);
}

struct kv_cache_config stage_plan_kv_config(const struct fl_plan *plan, struct device *device)
{
    const struct fl_stage *own = &plan->stages[plan->stage_index];
    return (struct kv_cache_config){
        .device = device,
        .layer_count = own->layer_count,
        .head_count_kv = plan->manifest.shape.head_count_kv + own->layer_first,
        .head_size = plan->manifest.shape.head_size,
        .block_count = plan->kv_block_count,
        .sequence_max = plan->sequence_max,
        .context = plan->context,
    };
}

struct forward_config stage_plan_forward_config(const struct fl_plan *plan, struct device *device)
{
    const struct fl_stage *own = &plan->stages[plan->stage_index];
    return (struct forward_config){
        .shape = &plan->manifest.shape,
        .device = device,
        .layer_first = own->layer_first,
        .layer_count = own->layer_count,
        .has_head = stage_plan_is_last(plan),
        .row_max = stage_plan_row_max(plan),
        .context = plan->context,
        .activations_f32 = plan->activations_f32,
    };
}

struct outbox_config stage_plan_outbox_config(const struct fl_plan *plan)
{
    return (struct outbox_config){
        .slot_rows = stage_plan_is_last(plan) ? 0 : stage_plan_row_max(plan),
        .width = plan->manifest.shape.width,
        .token_count = stage_plan_is_last(plan) ? 2 * plan->sequence_max : 0,
    };
}

/* The stage and its layers are there, so that sizes can be asked for. */
static bool has_place(const struct fl_plan *plan)
{
    if (plan->stage_index >= plan->stage_count) {
        return false;
    }
    const struct fl_stage *own = &plan->stages[plan->stage_index];
    const uint32_t layers = plan->manifest.shape.layer_count;
    return layers <= FL_LAYER_COUNT_MAX && own->layer_count >= 1 && own->layer_count <= layers &&
           own->layer_first <= layers - own->layer_count;
}

uint64_t stage_kv_memory(const struct fl_plan *plan)
{
    uint64_t size;
    if (!has_place(plan)) {
        return UINT64_MAX;
    }
    const struct kv_cache_config config = stage_plan_kv_config(plan, NULL);
    return __builtin_add_overflow(kv_cache_memory(&config), kv_cache_table_memory(&config), &size)
               ? UINT64_MAX
               : size;
}

uint64_t stage_buffer_memory(const struct fl_plan *plan)
{
    if (!has_place(plan)) {
        return UINT64_MAX;
    }
    const struct forward_config forward = stage_plan_forward_config(plan, NULL);
    const struct outbox_config outbox = stage_plan_outbox_config(plan);
    const struct fl_model_shape *shape = &plan->manifest.shape;
    const uint64_t rows = (uint64_t)stage_plan_row_max(plan) * shape->width * sizeof(float);
    uint64_t size = (uint64_t)plan->sequence_max * REQUEST_SIZE + rows;
    size += STAGE_RUN_MAX * run_memory(stage_plan_row_max(plan), shape->width);
    size += forward_memory(&forward, THREADS_ASSUMED) + outbox_memory(&outbox);
    size +=
        stage_plan_is_first(plan) ? 0 : inbox_memory(stage_plan_credit_rows(plan), shape->width);
    size += stage_plan_is_last(plan)
                ? sampler_memory(shape->vocabulary) + (uint64_t)shape->vocabulary * sizeof(float)
                : 0;
    return size;
}

/* ---- checks ---- */

static fl_status check_limit(const char *what, uint32_t value, uint32_t min, uint32_t max)
{
    if (value < min || value > max) {
        return FL_FAIL(FL_INVALID, "plan: %s is %" PRIu32 "; it must be %" PRIu32 " to %" PRIu32,
                       what, value, min, max);
    }
    return FL_OK;
}

/* The stage's pieces, as its place in the plan makes them. */
static fl_status check_pieces(const struct fl_plan *plan)
{
    const struct fl_manifest *manifest = &plan->manifest;
    const struct fl_stage *own = &plan->stages[plan->stage_index];
    const uint32_t embeds = stage_plan_is_first(plan) ? 1 : 0;
    const uint32_t heads = stage_plan_is_last(plan) ? 1 : 0;
    bool right = own->has_embed == (embeds == 1) && own->has_head == (heads == 1) &&
                 manifest->piece_count == embeds + 2 * own->layer_count + heads;
    for (uint32_t i = 0; right && i < manifest->piece_count; i++) {
        const struct fl_piece *piece = &manifest->pieces[i];
        const uint32_t place = i - embeds;
        if (i < embeds) {
            right = piece->kind == FL_PIECE_EMBED;
        } else if (place == 2 * own->layer_count) {
            right = piece->kind == FL_PIECE_HEAD;
        } else {
            right = piece->kind == (place % 2 == 0 ? FL_PIECE_ATTENTION : FL_PIECE_FFN) &&
                    piece->layer == own->layer_first + place / 2;
        }
    }
    if (!right) {
        return FL_FAIL(
            FL_INVALID,
            "plan: the pieces of stage %" PRIu32 " are not those of layers %" PRIu32 " to %" PRIu32,
            plan->stage_index, own->layer_first, own->layer_first + own->layer_count - 1);
    }
    return FL_OK;
}

fl_status stage_plan_check(const struct fl_plan *plan)
{
    FL_TRY(check_limit("stage count", plan->stage_count, 1, FL_STAGE_COUNT_MAX));
    FL_TRY(check_limit("stage index", plan->stage_index, 0, plan->stage_count - 1));
    FL_TRY(check_limit("rows of a chunk", plan->chunk_rows, 1, FL_CHUNK_MAX));
    FL_TRY(check_limit("context", plan->context, 1, FL_CONTEXT_MAX));
    FL_TRY(check_limit("number of sequences", plan->sequence_max, 1, STAGE_SEQUENCE_MAX));
    FL_TRY(check_limit("number of KV blocks", plan->kv_block_count, 1, INT32_MAX));
    const struct fl_stage *own = &plan->stages[plan->stage_index];
    const uint32_t layers = plan->manifest.shape.layer_count;
    FL_TRY(check_limit("layer count of a stage", own->layer_count, 1, layers));
    FL_TRY(check_limit("first layer of a stage", own->layer_first, 0, layers - own->layer_count));
    return check_pieces(plan);
}
