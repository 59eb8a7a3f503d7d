#include "pipeline/stage.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "pipeline/stage_plan.h"
#include "pipeline/stage_run.h"
#include "pipeline/stage_state.h"
#include "pipeline/stage_task.h"

/* ---- open and close ---- */

static fl_status open_buffers(struct stage *stage)
{
    const struct fl_plan *plan = stage->plan;
    const uint32_t width = stage->shape->width;
    const struct forward_config forward = stage_plan_forward_config(plan, stage->device);
    const struct outbox_config outbox = stage_plan_outbox_config(plan);

    stage->chain = calloc(plan->manifest.piece_count, sizeof(*stage->chain));
    stage->requests = calloc(plan->sequence_max, sizeof(*stage->requests));
    stage->host_rows = calloc(stage_plan_row_max(plan), width * sizeof(float));
    stage->host_logits = calloc(stage->shape->vocabulary, sizeof(float));
    if (stage->chain == NULL || stage->requests == NULL || stage->host_rows == NULL ||
        stage->host_logits == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a stage: %" PRIu64 " bytes are wanted",
                       stage_buffer_memory(plan));
    }
    for (uint32_t i = 0; i < STAGE_RUN_MAX; i++) {
        FL_TRY(run_open(stage->device, stage_plan_row_max(plan), width, &stage->runs[i]));
    }
    FL_TRY(forward_open(&forward, &stage->forward));
    FL_TRY(outbox_open(&outbox, &stage->outbox));
    if (!stage->is_first) {
        FL_TRY(inbox_open(stage_plan_credit_rows(plan), width, &stage->inbox));
    }
    return stage->is_last ? sampler_open(stage->shape->vocabulary, &stage->sampler) : FL_OK;
}

static fl_status open_parts(struct stage *stage, uint64_t begun_ns)
{
    const struct fl_plan *plan = stage->plan;
    const struct kv_cache_config kv = stage_plan_kv_config(plan, stage->device);
    const uint64_t start_ns = begun_ns != 0 ? begun_ns : run_trace_now(stage->trace);
    FL_TRY(open_buffers(stage));
    const uint64_t kv_ns =
        run_trace_open(stage->trace, FL_PHASE_MEMORY, plan->plan_id, start_ns,
                       weight_store_memory(&plan->manifest) + stage_buffer_memory(plan));
    FL_TRY(kv_cache_open(&kv, &stage->kv));
    (void)run_trace_open(stage->trace, FL_PHASE_KV, plan->plan_id, kv_ns, stage_kv_memory(plan));
    return FL_OK;
}

fl_status stage_open(const struct stage_config *config, struct stage **out)
{
    FL_TRY(stage_plan_check(config->plan));
    FL_ASSERT(!stage_plan_is_first(config->plan) || config->embed.read != NULL);
    struct stage *stage = calloc(1, sizeof(*stage));
    if (stage == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a stage: %zu bytes are wanted", sizeof(*stage));
    }
    *stage = (struct stage){
        .plan = config->plan,
        .shape = &config->plan->manifest.shape,
        .device = config->device,
        .weights = config->weights,
        .embed = config->embed,
        .trace = config->trace,
        .is_first = stage_plan_is_first(config->plan),
        .is_last = stage_plan_is_last(config->plan),
        .layer_first = config->plan->stages[config->plan->stage_index].layer_first,
    };
    const fl_status status = open_parts(stage, config->begun_ns);
    if (status != FL_OK) {
        stage_close(stage);
        return status;
    }
    for (uint32_t i = 0; i < config->plan->manifest.piece_count; i++) {
        if (config->plan->manifest.pieces[i].kind != FL_PIECE_EMBED) {
            stage->chain[stage->chain_count++] = i;
        } else {
            stage->embed_piece = i;
        }
    }
    *out = stage;
    return FL_OK;
}

void stage_close(struct stage *stage)
{
    if (stage == NULL) {
        return;
    }
    sampler_close(stage->sampler);
    inbox_close(stage->inbox);
    kv_cache_close(stage->kv);
    outbox_close(stage->outbox);
    forward_close(stage->forward);
    for (uint32_t i = 0; i < STAGE_RUN_MAX; i++) {
        run_close(stage->device, stage->shape->width, &stage->runs[i]);
    }
    free(stage->host_logits);
    free(stage->host_rows);
    free(stage->requests);
    free(stage->chain);
    free(stage);
}

uint32_t stage_credit_rows(const struct stage *stage)
{
    return stage_plan_credit_rows(stage->plan);
}

uint32_t stage_kv_blocks_free(const struct stage *stage)
{
    return kv_cache_blocks_free(stage->kv);
}

/* ---- the next task ---- */

/* FL_AGAIN until every piece was published once (plan.no_overlap). */
static fl_status wait_for_all(struct stage *stage)
{
    for (uint32_t i = 0; !stage->all_there && i < stage->plan->manifest.piece_count; i++) {
        const struct piece_weights *weights;
        FL_TRY(weight_store_acquire(stage->weights, i, &weights));
        weight_store_release(stage->weights, i);
        stage->all_there_ns =
            stage_later(stage->all_there_ns, weight_store_published_ns(stage->weights, i));
    }
    stage->all_there = true;
    return FL_OK;
}

fl_status stage_step(struct stage *stage)
{
    FL_TRY(stage->device->ops->poll(stage->device));
    if (stage->plan->no_overlap) {
        FL_TRY(wait_for_all(stage));
    }
    if (stage_run_retire(stage)) {
        return FL_OK;
    }
    uint32_t limit = UINT32_MAX; /* the piece that the runs before have not passed */
    bool inputs = true;          /* the runs before have theirs */
    for (uint64_t n = stage->run_first; n < stage->run_end; n++) {
        struct run *run = &stage->runs[n % STAGE_RUN_MAX];
        if (stage_run_is_complete(stage, run)) {
            continue;
        }
        const bool free = run->has_input ? run->piece < limit : inputs;
        const fl_status status = free ? stage_task_run(stage, run) : FL_AGAIN;
        if (status != FL_AGAIN) {
            (void)stage_run_retire(stage);
            return status;
        }
        limit = run->piece;
        inputs = run->has_input;
    }
    return stage_run_form(stage) ? FL_OK : FL_AGAIN;
}

/* ---- output ---- */

static bool poll_failure(struct stage *stage, struct stage_output *out)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        struct stage_request *request = &stage->requests[i];
        if (request->used && request->failure_unsaid) {
            request->failure_unsaid = false;
            out->kind = STAGE_OUTPUT_FAILURE;
            out->failure = (struct fl_failure){
                .plan_id = stage->plan->plan_id,
                .request_id = request->id,
                .code = request->failure_code,
            };
            memcpy(out->failure.text, request->failure, sizeof(request->failure));
            return true;
        }
    }
    return false;
}

static bool poll_activations(struct stage *stage, struct stage_output *out)
{
    struct run_segment segment;
    if (outbox_take(stage->outbox, &segment, &out->rows, &out->buffer) != FL_OK) {
        return false;
    }
    out->kind = STAGE_OUTPUT_ACTIVATIONS;
    out->header = (struct fl_activation_header){
        .plan_id = stage->plan->plan_id,
        .request_id = stage->requests[segment.request].id,
        .position = segment.position,
        .rows = segment.rows,
        .width = stage->shape->width,
        .flags = segment.sample ? FL_ACTIVATION_SAMPLE : 0,
    };
    return true;
}

fl_status stage_poll(struct stage *stage, struct stage_output *out)
{
    *out = (struct stage_output){0};
    if (stage->is_last && outbox_take_token(stage->outbox, &out->token) == FL_OK) {
        out->kind = STAGE_OUTPUT_TOKEN;
        return FL_OK;
    }
    if (poll_activations(stage, out) || poll_failure(stage, out)) {
        return FL_OK;
    }
    out->credit_rows = stage->is_first ? 0 : inbox_take_credit(stage->inbox);
    out->kind = STAGE_OUTPUT_CREDIT;
    return out->credit_rows > 0 ? FL_OK : FL_AGAIN;
}

void stage_return(struct stage *stage, uint32_t buffer)
{
    outbox_return(stage->outbox, buffer);
}
