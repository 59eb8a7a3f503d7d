#include "pipeline/stage_task.h"

#include <inttypes.h>
#include <math.h>

#include "pipeline/stage_request.h"
#include "pipeline/stage_run.h"

/* When the piece could be used. */
static uint64_t weights_ns(const struct stage *stage, uint32_t piece)
{
    return stage->plan->no_overlap ? stage->all_there_ns
                                   : weight_store_published_ns(stage->weights, piece);
}

static void trace_embed(struct stage *stage, struct run *run, uint64_t start_ns, bool has_table,
                        uint64_t ready_ns)
{
    const struct run_task task = {
        .phase = FL_PHASE_EMBED,
        .piece = stage->embed_piece,
        .rows = run->row_count,
        .bytes = (uint64_t)run->row_count * stage->shape->width * sizeof(float),
        .start_ns = start_ns,
        .weights_ns = has_table ? weights_ns(stage, stage->embed_piece) : 0,
    };
    run->times.input_ns = stage_later(ready_ns, run->times.input_ns);
    run_trace_task(stage->trace, &run->times, &task);
}

static void fail_run(struct stage *stage, struct run *run, fl_status status)
{
    for (uint32_t i = 0; i < run->segment_count; i++) {
        const uint32_t index = run->segments[i].request;
        if (index != RUN_DEAD) {
            stage_request_fail(&stage->requests[index], status);
            stage_request_forget(stage, index);
        }
    }
}

/* Fill the run's x with the embeddings of its tokens. */
static fl_status embed_run(struct stage *stage, struct run *run)
{
    uint64_t ready_ns = 0;
    const uint64_t start_ns = run_trace_now(stage->trace);
    fl_status status =
        weight_store_embed(stage->weights, run->ids, run->row_count, stage->host_rows);
    const bool has_table = status == FL_OK;
    if (!has_table) {
        status = stage->embed.read(stage->embed.ctx, run->ids, run->row_count, stage->host_rows,
                                   &ready_ns);
    }
    if (status == FL_AGAIN) {
        return FL_AGAIN;
    }
    if (status != FL_OK) {
        fail_run(stage, run, status);
        return FL_OK;
    }
    const struct forward_rows rows = run_rows(run);
    stage->device->ops->copy_in(stage->device, run->x, stage->host_rows,
                                (size_t)run->row_count * stage->shape->width * sizeof(float));
    forward_scale_embedding(stage->forward, &rows);
    run->has_input = true;
    trace_embed(stage, run, start_ns, has_table, ready_ns);
    return FL_OK;
}

static uint32_t history_token(void *ctx, uint32_t position)
{
    const struct stage *stage = ((void **)ctx)[0];
    const struct stage_request *request = ((void **)ctx)[1];
    return kv_cache_token(stage->kv, request->sequence, position);
}

static enum fl_finish finish_of(const struct stage_request *request, uint32_t index,
                                uint32_t position, uint32_t id)
{
    for (uint32_t i = 0; i < request->stop_count; i++) {
        if (request->stop_tokens[i] == id) {
            return FL_FINISH_STOP;
        }
    }
    /* Without a position of its own the token cannot be followed by another. */
    return index + 1 >= request->max_tokens || position >= request->position_max ? FL_FINISH_LENGTH
                                                                                 : FL_FINISH_NONE;
}

/* Sample the token that follows `position` from stage->host_logits, and put it out. */
static fl_status sample(struct stage *stage, struct stage_request *request, uint32_t position)
{
    const struct fl_sampling *sampling = &request->sampling;
    const float *logits = stage->host_logits;
    const void *ctx[2] = {stage, request};
    const struct sampler_history history = {history_token, ctx, position + 1};
    uint32_t id;
    FL_TRY(sampler_pick(stage->sampler, logits, sampling, &history, position + 1, &id));

    struct fl_token *token = outbox_add_token(stage->outbox);
    token->plan_id = stage->plan->plan_id;
    token->request_id = request->id;
    token->index = position + 1 - request->prompt_count;
    token->position = position + 1;
    token->id = id;
    token->finish = finish_of(request, token->index, token->position, id);
    if (token->index == 0) {
        token->logit_count =
            sampler_top(stage->sampler, logits, sampling->top_logits, token->logits);
    }
    if (sampling->logprobs > 0) {
        token->logprob_count =
            sampler_top(stage->sampler, logits, sampling->logprobs, token->logprobs);
        sampler_logprobs(stage->sampler, logits, id, &token->logprob, token->logprobs,
                         token->logprob_count);
    }
    if (token->finish == FL_FINISH_NONE) {
        if (stage->is_first) {
            return stage_take_token(stage, token, run_trace_now(stage->trace));
        }
        kv_cache_set_token(stage->kv, request->sequence, token->position, id);
    }
    return FL_OK;
}

/* Logits of some of the run's sampled rows, and a token from each.  *out_logits_ns: when the logits
 * were there. */
static fl_status run_head_rows(struct stage *stage, const struct piece_weights *weights,
                               struct run *run, const uint32_t *segments, uint32_t count,
                               uint64_t *out_logits_ns)
{
    uint32_t indexes[FORWARD_HEAD_ROW_MAX];
    const size_t vocabulary = stage->shape->vocabulary;
    const struct forward_rows rows = run_rows(run);
    for (uint32_t i = 0; i < count; i++) {
        const struct run_segment *segment = &run->segments[segments[i]];
        indexes[i] = segment->row + segment->rows - 1;
    }
    const float *logits = forward_head(stage->forward, weights, &rows, indexes, count);
    *out_logits_ns = run_trace_now(stage->trace);
    for (uint32_t i = 0; i < count; i++) {
        const struct run_segment *segment = &run->segments[segments[i]];
        struct stage_request *request = &stage->requests[segment->request];
        stage->device->ops->copy_out(stage->device, stage->host_logits, logits + i * vocabulary,
                                     vocabulary * sizeof(float));
        const fl_status status = sample(stage, request, run->positions[indexes[i]]);
        if (fl_status_scope(status) == FL_SCOPE_REQUEST ||
            fl_status_scope(status) == FL_SCOPE_CALL) {
            stage_request_fail(request, status);
        } else if (status != FL_OK) {
            return status;
        }
    }
    return FL_OK;
}

/* A task on a piece, up to now or to `end_ns`. */
static void trace_piece(struct stage *stage, struct run *run, uint32_t piece, uint32_t rows,
                        uint64_t start_ns, uint64_t end_ns)
{
    const struct fl_piece *ref = &stage->plan->manifest.pieces[piece];
    const struct run_task task = {
        .phase = ref->kind == FL_PIECE_HEAD ? FL_PHASE_HEAD : FL_PHASE_PREFILL,
        .piece = piece,
        .rows = rows,
        .bytes = fl_piece_size(ref),
        .start_ns = start_ns,
        .end_ns = end_ns,
        .weights_ns = weights_ns(stage, piece),
    };
    run_trace_task(stage->trace, &run->times, &task);
}

/* The head up to its last logits; what follows is sampling. */
static void trace_head(struct stage *stage, struct run *run, uint64_t start_ns, uint64_t logits_ns)
{
    const uint32_t rows = run_sample_count(run);
    const struct run_task sampling = {
        .phase = FL_PHASE_SAMPLE,
        .piece = FL_SPAN_NO_PIECE,
        .rows = rows,
        .start_ns = logits_ns,
    };
    trace_piece(stage, run, stage->chain[run->piece], rows, start_ns, logits_ns);
    run_trace_task(stage->trace, &run->times, &sampling);
}

static fl_status run_head(struct stage *stage, const struct piece_weights *weights, struct run *run)
{
    uint32_t segments[FORWARD_HEAD_ROW_MAX];
    const uint64_t start_ns = run_trace_now(stage->trace);
    uint64_t logits_ns = start_ns;
    const uint32_t batch = forward_head_rows(stage->forward);
    FL_ASSERT(batch <= FORWARD_HEAD_ROW_MAX);
    uint32_t count = 0;
    for (uint32_t i = 0; i < run->segment_count; i++) {
        if (run_wants_sample(&run->segments[i])) {
            segments[count++] = i;
        }
        if (count == batch) {
            FL_TRY(run_head_rows(stage, weights, run, segments, count, &logits_ns));
            count = 0;
        }
    }
    if (count > 0) {
        FL_TRY(run_head_rows(stage, weights, run, segments, count, &logits_ns));
    }
    trace_head(stage, run, start_ns, logits_ns);
    return FL_OK;
}

/* After the last layer: a row that is not finite ends its request.  Rounding to 8 bits would turn it
 * into zeros later, and a wrong token would look like any other. */
static void check_rows(struct stage *stage, const struct run *run)
{
    const size_t width = stage->shape->width;
    stage->device->ops->copy_out(stage->device, stage->host_rows, run->x,
                                 run->row_count * width * sizeof(float));
    for (uint32_t i = 0; i < run->segment_count; i++) {
        const struct run_segment segment = run->segments[i];
        const float *rows = stage->host_rows + segment.row * width;
        bool finite = true;
        for (size_t j = 0; j < segment.rows * width; j++) {
            finite = finite && isfinite(rows[j]);
        }
        if (segment.request != RUN_DEAD && !finite) {
            stage_request_fail(
                &stage->requests[segment.request],
                FL_FAIL(FL_MALFORMED,
                        "the model gave numbers that are not finite at positions %" PRIu32
                        " to %" PRIu32
                        "; its weights are damaged or of a kind this build computes wrongly",
                        segment.position, segment.position + segment.rows - 1));
            stage_request_forget(stage, segment.request);
        }
    }
}

fl_status stage_task_run(struct stage *stage, struct run *run)
{
    if (!run->has_input) {
        return embed_run(stage, run);
    }
    if (stage_run_is_at_head(stage, run) &&
        outbox_token_room(stage->outbox) < run_sample_count(run)) {
        return FL_AGAIN;
    }
    const uint32_t piece = stage->chain[run->piece];
    const struct fl_piece *ref = &stage->plan->manifest.pieces[piece];
    const struct piece_weights *weights;
    FL_TRY(weight_store_acquire(stage->weights, piece, &weights));
    const uint64_t start_ns = run_trace_now(stage->trace);
    const struct forward_rows rows = run_rows(run);
    fl_status status = FL_OK;
    if (ref->kind == FL_PIECE_ATTENTION) {
        const struct kv_layer kv = kv_cache_layer(stage->kv, ref->layer - stage->layer_first);
        forward_attention(stage->forward, weights, ref->layer, &kv, &rows);
    } else if (ref->kind == FL_PIECE_FFN) {
        forward_ffn(stage->forward, weights, ref->layer, &rows);
    } else {
        status = run_head(stage, weights, run);
    }
    weight_store_release(stage->weights, piece);
    run->piece++;
    if (run->piece == stage->chain_count - (stage->is_last ? 1 : 0)) {
        check_rows(stage, run);
    }
    if (ref->kind != FL_PIECE_HEAD) {
        trace_piece(stage, run, piece, run->row_count, start_ns, 0);
    }
    return status;
}
