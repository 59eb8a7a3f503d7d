#include "proto/client_message.h"

#include <inttypes.h>

#include "proto/client.pb-c.h"

#include "proto/base/utf8.h"
#include "proto/message_field.h"
#include "proto/sampling_message.h"
#include "proto/timeline_message.h"

enum {
    MODEL_COUNT_MAX = 4096,
    NODE_COUNT_MAX = 1024,
    LOADED_COUNT_MAX = 256,
};

/* ---- build: plain struct to generated struct ---- */

static fl_status build_stages(const struct fl_stage_summary *stages, uint32_t count,
                              struct fl_arena *arena, Firstlight__Stage ***out)
{
    FL_TRY(fl_field_array(arena, count, sizeof(**out), out));
    for (uint32_t i = 0; i < count; i++) {
        FL_FIELD_MAKE(arena, Firstlight__Stage, firstlight__stage, &(*out)[i]);
        Firstlight__Stage *stage = (*out)[i];
        fl_field_borrow_text(stages[i].node, &stage->node);
        stage->first_layer = stages[i].first_layer;
        stage->last_layer = stages[i].last_layer;
        stage->shard_bytes = stages[i].shard_bytes;
        stage->kv_bytes = stages[i].kv_bytes;
        stage->memory_budget = stages[i].memory_budget;
    }
    return FL_OK;
}

static fl_status build_text(const struct fl_client_event *event, struct fl_arena *arena,
                            Firstlight__Text **out)
{
    const uint32_t count = event->as.text.token_count;
    FL_FIELD_MAKE(arena, Firstlight__Text, firstlight__text, out);
    fl_field_borrow(event->as.text.text.data, event->as.text.text.size, &(*out)->text);
    (*out)->n_tokens = count;
    FL_TRY(fl_field_array(arena, count, sizeof(*(*out)->tokens), &(*out)->tokens));
    for (uint32_t i = 0; i < count; i++) {
        const struct fl_token_detail *token = &event->as.text.tokens[i];
        FL_FIELD_MAKE(arena, Firstlight__TokenDetail, firstlight__token_detail, &(*out)->tokens[i]);
        (*out)->tokens[i]->id = token->id;
        (*out)->tokens[i]->logprob = token->logprob;
        (*out)->tokens[i]->n_top = token->top_count;
        FL_TRY(fl_sampling_message_build_top(token->top, token->top_count, arena,
                                             &(*out)->tokens[i]->top));
    }
    return FL_OK;
}

static fl_status build_done(const struct fl_client_event *event, struct fl_arena *arena,
                            Firstlight__Done **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Done, firstlight__done, out);
    Firstlight__Done *done = *out;
    done->finish = (Firstlight__Finish)event->as.done.finish;
    done->response_class = (Firstlight__ResponseClass)event->as.done.class_;
    done->prompt_tokens = event->as.done.prompt_tokens;
    done->cached_tokens = event->as.done.cached_tokens;
    done->output_tokens = event->as.done.output_tokens;
    done->ttft_ms = event->as.done.ttft_ms;
    done->decode_tok_s = event->as.done.decode_tok_s;
    done->n_stages = event->as.done.stage_count;
    FL_TRY(build_stages(event->as.done.stages, event->as.done.stage_count, arena, &done->stages));
    done->timeline_id = event->as.done.timeline_id;
    done->predicted_ms = event->as.done.predicted_ms;
    done->n_phases = event->as.done.phase_count;
    FL_TRY(fl_phase_message_build(event->as.done.phases, event->as.done.phase_count, arena,
                                  &done->phases));
    done->n_logits = event->as.done.logit_count;
    return fl_sampling_message_build_top(event->as.done.logits, event->as.done.logit_count, arena,
                                         &done->logits);
}

static fl_status build_models(const struct fl_client_event *event, struct fl_arena *arena,
                              Firstlight__Models **out)
{
    const uint32_t count = event->as.models.count;
    FL_FIELD_MAKE(arena, Firstlight__Models, firstlight__models, out);
    (*out)->n_models = count;
    FL_TRY(fl_field_array(arena, count, sizeof(*(*out)->models), &(*out)->models));
    for (uint32_t i = 0; i < count; i++) {
        const struct fl_model_summary *model = &event->as.models.models[i];
        FL_FIELD_MAKE(arena, Firstlight__Model, firstlight__model, &(*out)->models[i]);
        fl_field_borrow_text(model->name, &(*out)->models[i]->name);
        (*out)->models[i]->bytes = model->bytes;
        fl_field_borrow_text(model->architecture, &(*out)->models[i]->architecture);
        fl_field_borrow_text(model->problem, &(*out)->models[i]->problem);
        (*out)->models[i]->loaded = model->loaded;
    }
    return FL_OK;
}

static fl_status build_plan(const struct fl_client_event *event, struct fl_arena *arena,
                            Firstlight__Plan **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Plan, firstlight__plan, out);
    fl_field_borrow_text(event->as.plan.model, &(*out)->model);
    (*out)->total_bytes = event->as.plan.total_bytes;
    (*out)->context = event->as.plan.context;
    (*out)->kv_positions = event->as.plan.kv_positions;
    fl_field_borrow_text(event->as.plan.note, &(*out)->note);
    (*out)->n_stages = event->as.plan.stage_count;
    return build_stages(event->as.plan.stages, event->as.plan.stage_count, arena, &(*out)->stages);
}

static fl_status build_nodes(const struct fl_client_event *event, struct fl_arena *arena,
                             Firstlight__Status *out)
{
    out->n_nodes = event->as.status.node_count;
    FL_TRY(fl_field_array(arena, out->n_nodes, sizeof(*out->nodes), &out->nodes));
    for (size_t i = 0; i < out->n_nodes; i++) {
        const struct fl_node_summary *node = &event->as.status.nodes[i];
        FL_FIELD_MAKE(arena, Firstlight__Node, firstlight__node, &out->nodes[i]);
        fl_field_borrow_text(node->name, &out->nodes[i]->name);
        fl_field_borrow_text(node->state, &out->nodes[i]->state);
        fl_field_borrow_text(node->address, &out->nodes[i]->address);
        fl_field_borrow_text(node->isa, &out->nodes[i]->isa);
        out->nodes[i]->threads = node->threads;
        out->nodes[i]->memory_budget = node->memory_budget;
        out->nodes[i]->memory_used = node->memory_used;
        out->nodes[i]->heartbeat_ms = node->heartbeat_ms;
        out->nodes[i]->clock_known = node->clock_known;
        out->nodes[i]->clock_offset_us = node->clock_offset_us;
        out->nodes[i]->clock_error_us = node->clock_error_us;
        out->nodes[i]->slept_ms = node->slept_ms;
    }
    return FL_OK;
}

static fl_status build_loaded(const struct fl_loaded_summary *loaded, struct fl_arena *arena,
                              Firstlight__LoadedModel **out)
{
    FL_FIELD_MAKE(arena, Firstlight__LoadedModel, firstlight__loaded_model, out);
    Firstlight__LoadedModel *message = *out;
    fl_field_borrow_text(loaded->model, &message->model);
    fl_field_borrow_text(loaded->state, &message->state);
    message->context = loaded->context;
    message->kv_blocks_total = loaded->kv_blocks_total;
    message->kv_blocks_used = loaded->kv_blocks_used;
    message->sequences_kept = loaded->sequences_kept;
    message->requests_running = loaded->requests_running;
    message->requests_queued = loaded->requests_queued;
    message->n_stages = loaded->stage_count;
    FL_TRY(fl_field_array(arena, loaded->stage_count, sizeof(*message->stages), &message->stages));
    for (uint32_t i = 0; i < loaded->stage_count; i++) {
        const struct fl_plan_stage_summary *stage = &loaded->stages[i];
        FL_FIELD_MAKE(arena, Firstlight__LoadedStage, firstlight__loaded_stage,
                      &message->stages[i]);
        fl_field_borrow_text(stage->node, &message->stages[i]->node);
        message->stages[i]->first_layer = stage->first_layer;
        message->stages[i]->last_layer = stage->last_layer;
        message->stages[i]->pieces_done = stage->pieces_done;
        message->stages[i]->pieces_total = stage->pieces_total;
        message->stages[i]->bytes_done = stage->bytes_done;
        message->stages[i]->bytes_total = stage->bytes_total;
    }
    return FL_OK;
}

static fl_status build_status(const struct fl_client_event *event, struct fl_arena *arena,
                              Firstlight__Status **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Status, firstlight__status, out);
    fl_field_borrow_text(event->as.status.version, &(*out)->version);
    (*out)->uptime_s = event->as.status.uptime_s;
    FL_TRY(build_nodes(event, arena, *out));
    const uint32_t count = event->as.status.loaded_count;
    (*out)->n_loaded = count;
    FL_TRY(fl_field_array(arena, count, sizeof(*(*out)->loaded), &(*out)->loaded));
    for (uint32_t i = 0; i < count; i++) {
        FL_TRY(build_loaded(&event->as.status.loaded[i], arena, &(*out)->loaded[i]));
    }
    return FL_OK;
}

static fl_status build_small(const struct fl_client_event *event, struct fl_arena *arena,
                             Firstlight__Event *out)
{
    if (event->kind == FL_EVENT_ADMITTED) {
        FL_FIELD_MAKE(arena, Firstlight__Admitted, firstlight__admitted, &out->admitted);
        out->admitted->response_class = (Firstlight__ResponseClass)event->as.admitted.class_;
        out->admitted->prompt_tokens = event->as.admitted.prompt_tokens;
        out->admitted->cached_tokens = event->as.admitted.cached_tokens;
        out->admitted->n_stages = event->as.admitted.stage_count;
        return build_stages(event->as.admitted.stages, event->as.admitted.stage_count, arena,
                            &out->admitted->stages);
    }
    if (event->kind == FL_EVENT_PROGRESS) {
        FL_FIELD_MAKE(arena, Firstlight__Progress, firstlight__progress, &out->progress);
        fl_field_borrow_text(event->as.progress.phase, &out->progress->phase);
        fl_field_borrow_text(event->as.progress.cause, &out->progress->cause);
        out->progress->bytes_done = event->as.progress.bytes_done;
        out->progress->bytes_total = event->as.progress.bytes_total;
        return FL_OK;
    }
    if (event->kind == FL_EVENT_ERROR) {
        FL_FIELD_MAKE(arena, Firstlight__Error, firstlight__error, &out->error);
        out->error->code = event->as.error.code;
        fl_field_borrow_text(event->as.error.text, &out->error->text);
        out->error->retry_ms = event->as.error.retry_ms;
        return FL_OK;
    }
    FL_ASSERT(event->kind == FL_EVENT_TOKENS);
    FL_FIELD_MAKE(arena, Firstlight__Tokens, firstlight__tokens, &out->tokens);
    out->tokens->n_ids = event->as.tokens.count;
    out->tokens->ids = event->as.tokens.ids;
    return FL_OK;
}

static fl_status build(const struct fl_client_event *event, struct fl_arena *arena,
                       Firstlight__Event *out)
{
    firstlight__event__init(out);
    out->id = event->id;
    /* Events are numbered as their fields are, which begin at 2. */
    out->kind_case = (Firstlight__Event__KindCase)(event->kind + 1);
    switch (event->kind) {
    case FL_EVENT_TEXT: return build_text(event, arena, &out->text);
    case FL_EVENT_DONE: return build_done(event, arena, &out->done);
    case FL_EVENT_MODELS: return build_models(event, arena, &out->models);
    case FL_EVENT_PLAN: return build_plan(event, arena, &out->plan);
    case FL_EVENT_STATUS: return build_status(event, arena, &out->status);
    case FL_EVENT_TIMELINE:
        return fl_timeline_message_build(&event->as.timeline, arena, &out->timeline);
    case FL_EVENT_LOADED:
        FL_FIELD_MAKE(arena, Firstlight__Empty, firstlight__empty, &out->loaded);
        return FL_OK;
    case FL_EVENT_UNLOADED:
        FL_FIELD_MAKE(arena, Firstlight__Empty, firstlight__empty, &out->unloaded);
        return FL_OK;
    case FL_EVENT_ADMITTED:
    case FL_EVENT_PROGRESS:
    case FL_EVENT_ERROR:
    case FL_EVENT_TOKENS: return build_small(event, arena, out);
    }
    return FL_FAIL(FL_INVALID, "event kind %d does not exist", (int)event->kind);
}

fl_status fl_client_event_pack(const struct fl_client_event *event, struct fl_arena *scratch,
                               void *out, size_t size, size_t *out_size)
{
    Firstlight__Event built;
    FL_TRY(build(event, scratch, &built));
    return fl_field_serialise(&built.base, FL_CLIENT_MESSAGE_MAX, out, size, out_size);
}

/* ---- take: generated struct to plain struct, every field checked ---- */

static fl_status take_stages(Firstlight__Stage *const *message, size_t count,
                             struct fl_arena *arena, struct fl_stage_summary **out)
{
    FL_TRY(fl_field_range("stage count", count, 0, FL_STAGE_COUNT_MAX));
    FL_TRY(fl_field_array(arena, count, sizeof(**out), out));
    for (size_t i = 0; i < count; i++) {
        FL_TRY(fl_field_text(arena, "stage node", &message[i]->node, FL_NAME_MAX, &(*out)[i].node));
        FL_TRY(fl_field_range("stage last_layer", message[i]->last_layer, message[i]->first_layer,
                              FL_LAYER_COUNT_MAX - 1));
        (*out)[i].first_layer = message[i]->first_layer;
        (*out)[i].last_layer = message[i]->last_layer;
        (*out)[i].shard_bytes = message[i]->shard_bytes;
        (*out)[i].kv_bytes = message[i]->kv_bytes;
        (*out)[i].memory_budget = message[i]->memory_budget;
    }
    return FL_OK;
}

static fl_status take_class(Firstlight__ResponseClass value, enum fl_class *out)
{
    FL_TRY(fl_field_range("response_class", (uint64_t)value, FL_CLASS_UNKNOWN, FL_CLASS_WARM));
    *out = (enum fl_class)value;
    return FL_OK;
}

static fl_status take_admitted(const Firstlight__Admitted *message, struct fl_arena *arena,
                               struct fl_client_event *out)
{
    FL_TRY(take_class(message->response_class, &out->as.admitted.class_));
    out->as.admitted.prompt_tokens = message->prompt_tokens;
    out->as.admitted.cached_tokens = message->cached_tokens;
    out->as.admitted.stage_count = (uint32_t)message->n_stages;
    return take_stages(message->stages, message->n_stages, arena, &out->as.admitted.stages);
}

static fl_status take_progress(const Firstlight__Progress *message, struct fl_arena *arena,
                               struct fl_client_event *out)
{
    FL_TRY(fl_field_text(arena, "progress phase", &message->phase, FL_FIELD_WORD_MAX,
                         &out->as.progress.phase));
    FL_TRY(fl_field_text(arena, "progress cause", &message->cause, FL_FIELD_SENTENCE_MAX,
                         &out->as.progress.cause));
    FL_TRY(fl_field_range("progress bytes_done", message->bytes_done, 0, message->bytes_total));
    out->as.progress.bytes_done = message->bytes_done;
    out->as.progress.bytes_total = message->bytes_total;
    return FL_OK;
}

static fl_status take_text(const Firstlight__Text *message, struct fl_arena *arena,
                           struct fl_client_event *out)
{
    const size_t valid = fl_utf8_valid_size(message->text.data, message->text.len);
    if (valid < message->text.len) {
        return FL_FAIL(FL_PROTOCOL, "text is not UTF-8 at byte %zu (0x%02x)", valid,
                       message->text.data[valid]);
    }
    out->as.text.text = (struct fl_text){
        .data = message->text.len > 0 ? (const char *)message->text.data : "",
        .size = message->text.len,
    };
    FL_TRY(fl_field_range("text token count", message->n_tokens, 0, FL_CONTEXT_MAX));
    out->as.text.token_count = (uint32_t)message->n_tokens;
    FL_TRY(fl_field_array(arena, message->n_tokens, sizeof(*out->as.text.tokens),
                          &out->as.text.tokens));
    for (size_t i = 0; i < message->n_tokens; i++) {
        const Firstlight__TokenDetail *token = message->tokens[i];
        FL_TRY(fl_field_real("token logprob", (double)token->logprob, -1e30, 1e30));
        struct fl_token_detail *detail = &out->as.text.tokens[i];
        detail->id = token->id;
        detail->logprob = token->logprob;
        detail->top_count = (uint32_t)token->n_top;
        FL_TRY(fl_sampling_message_take_top("token top", token->top, token->n_top, arena,
                                            &detail->top));
    }
    return FL_OK;
}

static fl_status take_done(const Firstlight__Done *message, struct fl_arena *arena,
                           struct fl_client_event *out)
{
    FL_TRY(
        fl_field_range("finish", (uint64_t)message->finish, FL_FINISH_NONE, FL_FINISH_CANCELLED));
    FL_TRY(take_class(message->response_class, &out->as.done.class_));
    FL_TRY(fl_field_real("ttft_ms", message->ttft_ms, 0, FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("decode_tok_s", message->decode_tok_s, 0, FL_FIELD_QUANTITY_MAX));
    out->as.done.finish = (enum fl_finish)message->finish;
    out->as.done.prompt_tokens = message->prompt_tokens;
    out->as.done.cached_tokens = message->cached_tokens;
    out->as.done.output_tokens = message->output_tokens;
    out->as.done.ttft_ms = message->ttft_ms;
    out->as.done.decode_tok_s = message->decode_tok_s;
    out->as.done.stage_count = (uint32_t)message->n_stages;
    FL_TRY(take_stages(message->stages, message->n_stages, arena, &out->as.done.stages));
    FL_TRY(fl_field_real("predicted_ms", message->predicted_ms, 0, FL_FIELD_QUANTITY_MAX));
    out->as.done.timeline_id = message->timeline_id;
    out->as.done.predicted_ms = message->predicted_ms;
    out->as.done.phase_count = (uint32_t)message->n_phases;
    FL_TRY(fl_phase_message_take(message->phases, message->n_phases, arena, &out->as.done.phases));
    out->as.done.logit_count = (uint32_t)message->n_logits;
    return fl_sampling_message_take_top("logits", message->logits, message->n_logits, arena,
                                        &out->as.done.logits);
}

static fl_status take_error(const Firstlight__Error *message, struct fl_arena *arena,
                            struct fl_client_event *out)
{
    out->as.error.code = message->code;
    out->as.error.retry_ms = message->retry_ms;
    return fl_field_text(arena, "error text", &message->text, FL_FIELD_SENTENCE_MAX,
                         &out->as.error.text);
}

static fl_status take_models(const Firstlight__Models *message, struct fl_arena *arena,
                             struct fl_client_event *out)
{
    FL_TRY(fl_field_range("model count", message->n_models, 0, MODEL_COUNT_MAX));
    out->as.models.count = (uint32_t)message->n_models;
    FL_TRY(fl_field_array(arena, message->n_models, sizeof(*out->as.models.models),
                          &out->as.models.models));
    for (size_t i = 0; i < message->n_models; i++) {
        const Firstlight__Model *model = message->models[i];
        struct fl_model_summary *summary = &out->as.models.models[i];
        FL_TRY(fl_field_text(arena, "model name", &model->name, FL_FIELD_SENTENCE_MAX,
                             &summary->name));
        FL_TRY(fl_field_text(arena, "model architecture", &model->architecture, FL_FIELD_WORD_MAX,
                             &summary->architecture));
        FL_TRY(fl_field_text(arena, "model problem", &model->problem, FL_FIELD_SENTENCE_MAX,
                             &summary->problem));
        summary->bytes = model->bytes;
        summary->loaded = model->loaded != 0;
    }
    return FL_OK;
}

static fl_status take_plan(const Firstlight__Plan *message, struct fl_arena *arena,
                           struct fl_client_event *out)
{
    FL_TRY(fl_field_text(arena, "plan model", &message->model, FL_MODEL_NAME_MAX,
                         &out->as.plan.model));
    FL_TRY(fl_field_text(arena, "plan note", &message->note, FL_FIELD_SENTENCE_MAX,
                         &out->as.plan.note));
    out->as.plan.total_bytes = message->total_bytes;
    out->as.plan.context = message->context;
    out->as.plan.kv_positions = message->kv_positions;
    out->as.plan.stage_count = (uint32_t)message->n_stages;
    return take_stages(message->stages, message->n_stages, arena, &out->as.plan.stages);
}

static fl_status take_node(const Firstlight__Node *message, struct fl_arena *arena,
                           struct fl_node_summary *out)
{
    FL_TRY(fl_field_text(arena, "node name", &message->name, FL_NAME_MAX, &out->name));
    FL_TRY(fl_field_text(arena, "node state", &message->state, FL_FIELD_WORD_MAX, &out->state));
    FL_TRY(fl_field_text(arena, "node address", &message->address, FL_ADDRESS_MAX, &out->address));
    FL_TRY(fl_field_text(arena, "node isa", &message->isa, FL_FIELD_WORD_MAX, &out->isa));
    FL_TRY(fl_field_real("node heartbeat_ms", message->heartbeat_ms, 0, FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("node clock_offset_us", message->clock_offset_us, -FL_FIELD_QUANTITY_MAX,
                         FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("node clock_error_us", message->clock_error_us, 0, FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("node slept_ms", message->slept_ms, 0, FL_FIELD_QUANTITY_MAX));
    out->threads = message->threads;
    out->memory_budget = message->memory_budget;
    out->memory_used = message->memory_used;
    out->heartbeat_ms = message->heartbeat_ms;
    out->clock_known = message->clock_known;
    out->clock_offset_us = message->clock_offset_us;
    out->clock_error_us = message->clock_error_us;
    out->slept_ms = message->slept_ms;
    return FL_OK;
}

static fl_status take_loaded_stage(const Firstlight__LoadedStage *message, struct fl_arena *arena,
                                   struct fl_plan_stage_summary *out)
{
    FL_TRY(fl_field_text(arena, "stage node", &message->node, FL_NAME_MAX, &out->node));
    FL_TRY(fl_field_range("stage last_layer", message->last_layer, message->first_layer,
                          FL_LAYER_COUNT_MAX - 1));
    out->first_layer = message->first_layer;
    out->last_layer = message->last_layer;
    out->pieces_done = message->pieces_done;
    out->pieces_total = message->pieces_total;
    out->bytes_done = message->bytes_done;
    out->bytes_total = message->bytes_total;
    return FL_OK;
}

static fl_status take_loaded(const Firstlight__LoadedModel *message, struct fl_arena *arena,
                             struct fl_loaded_summary *out)
{
    FL_TRY(fl_field_text(arena, "loaded model", &message->model, FL_MODEL_NAME_MAX, &out->model));
    FL_TRY(fl_field_text(arena, "loaded state", &message->state, FL_FIELD_WORD_MAX, &out->state));
    FL_TRY(fl_field_range("loaded stage count", message->n_stages, 0, FL_STAGE_COUNT_MAX));
    out->context = message->context;
    out->kv_blocks_total = message->kv_blocks_total;
    out->kv_blocks_used = message->kv_blocks_used;
    out->sequences_kept = message->sequences_kept;
    out->requests_running = message->requests_running;
    out->requests_queued = message->requests_queued;
    out->stage_count = (uint32_t)message->n_stages;
    FL_TRY(fl_field_array(arena, message->n_stages, sizeof(*out->stages), &out->stages));
    for (size_t i = 0; i < message->n_stages; i++) {
        FL_TRY(take_loaded_stage(message->stages[i], arena, &out->stages[i]));
    }
    return FL_OK;
}

static fl_status take_status(const Firstlight__Status *message, struct fl_arena *arena,
                             struct fl_client_event *out)
{
    FL_TRY(fl_field_text(arena, "version", &message->version, FL_FIELD_WORD_MAX,
                         &out->as.status.version));
    FL_TRY(fl_field_real("uptime_s", message->uptime_s, 0, FL_FIELD_QUANTITY_MAX));
    out->as.status.uptime_s = message->uptime_s;
    FL_TRY(fl_field_range("node count", message->n_nodes, 0, NODE_COUNT_MAX));
    out->as.status.node_count = (uint32_t)message->n_nodes;
    FL_TRY(fl_field_array(arena, message->n_nodes, sizeof(*out->as.status.nodes),
                          &out->as.status.nodes));
    for (size_t i = 0; i < message->n_nodes; i++) {
        FL_TRY(take_node(message->nodes[i], arena, &out->as.status.nodes[i]));
    }
    FL_TRY(fl_field_range("loaded count", message->n_loaded, 0, LOADED_COUNT_MAX));
    out->as.status.loaded_count = (uint32_t)message->n_loaded;
    FL_TRY(fl_field_array(arena, message->n_loaded, sizeof(*out->as.status.loaded),
                          &out->as.status.loaded));
    for (size_t i = 0; i < message->n_loaded; i++) {
        FL_TRY(take_loaded(message->loaded[i], arena, &out->as.status.loaded[i]));
    }
    return FL_OK;
}

static fl_status take_tokens(const Firstlight__Tokens *message, struct fl_client_event *out)
{
    /* A text has at most one token per byte, and a few that the model adds. */
    FL_TRY(fl_field_range("token count", message->n_ids, 0, FL_PROMPT_SIZE_MAX + 16));
    out->as.tokens.count = (uint32_t)message->n_ids;
    out->as.tokens.ids = message->ids; /* in the arena already */
    return FL_OK;
}

fl_status fl_client_event_unpack(const void *data, size_t size, struct fl_arena *arena,
                                 struct fl_client_event *out)
{
    *out = (struct fl_client_event){0};
    ProtobufCMessage *parsed = NULL;
    FL_TRY(fl_field_parse(&firstlight__event__descriptor, data, size, FL_CLIENT_MESSAGE_MAX, arena,
                          &parsed));
    const Firstlight__Event *message = (const Firstlight__Event *)parsed;
    out->id = message->id;
    if (message->kind_case == FIRSTLIGHT__EVENT__KIND__NOT_SET) {
        return FL_FAIL(FL_PROTOCOL,
                       "event of request %" PRIu64 " is of no kind that protocol version %d knows",
                       out->id, FL_CLIENT_VERSION);
    }
    out->kind = (enum fl_event_kind)(message->kind_case - 1);
    switch (out->kind) {
    case FL_EVENT_ADMITTED: return take_admitted(message->admitted, arena, out);
    case FL_EVENT_PROGRESS: return take_progress(message->progress, arena, out);
    case FL_EVENT_TEXT: return take_text(message->text, arena, out);
    case FL_EVENT_DONE: return take_done(message->done, arena, out);
    case FL_EVENT_ERROR: return take_error(message->error, arena, out);
    case FL_EVENT_TOKENS: return take_tokens(message->tokens, out);
    case FL_EVENT_MODELS: return take_models(message->models, arena, out);
    case FL_EVENT_PLAN: return take_plan(message->plan, arena, out);
    case FL_EVENT_LOADED:
    case FL_EVENT_UNLOADED: return FL_OK;
    case FL_EVENT_STATUS: return take_status(message->status, arena, out);
    case FL_EVENT_TIMELINE:
        return fl_timeline_message_take(message->timeline, arena, &out->as.timeline);
    }
    return FL_FAIL(FL_PROTOCOL, "event kind %d does not exist", (int)out->kind);
}
