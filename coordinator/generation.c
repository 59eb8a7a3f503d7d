#include "coordinator/generation.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/placement.h"
#include "coordinator/prompt.h"
#include "coordinator/request.h"
#include "coordinator/trace.h"
#include "proto/base/log.h"

_Static_assert((int)VOCABULARY_END_COUNT_MAX <= (int)FL_STOP_TOKEN_MAX,
               "the last stage is told every token that ends an answer");

enum { RETRY_MS = 1000 };

#define PROGRESS_INTERVAL_NS (50 * FL_NS_PER_MS)
#define SPANS_DEADLINE_NS    (300 * FL_NS_PER_MS) /* what DONE waits for them */

fl_status generation_take(struct request *request, const struct fl_generate *wanted)
{
    for (uint32_t i = 0; i < wanted->stop_count; i++) {
        const struct fl_text *stop = &wanted->stops[i];
        if (stop->size == 0 || stop->size > sizeof(request->stops[i].data)) {
            return FL_FAIL(FL_INVALID, "stop string %" PRIu32 " has %zu bytes; it has 1 to %zu",
                           i + 1, stop->size, sizeof(request->stops[i].data));
        }
        memcpy(request->stops[i].data, stop->data, stop->size);
        request->stops[i].size = (uint32_t)stop->size;
    }
    request->stop_count = wanted->stop_count;
    request->special = wanted->special;
    request->no_bos = wanted->no_bos;
    request->ignore_end = wanted->ignore_end;
    request->max_tokens = wanted->max_tokens;
    request->sampling = wanted->sampling;
    snprintf(request->chat_family, sizeof(request->chat_family), "%s",
             wanted->chat_template != NULL ? wanted->chat_template : "");
    return prompt_take(request, wanted);
}

/* ---- admission ---- */

static fl_status open_stream(struct request *request)
{
    struct gguf_string stops[FL_STOP_STRING_MAX];
    for (uint32_t i = 0; i < request->stop_count; i++) {
        stops[i] = (struct gguf_string){request->stops[i].data, request->stops[i].size};
    }
    return text_stream_init(&request->stream, request->model->tokenizer, stops, request->stop_count,
                            TOKENIZER_HIDE_SPECIAL);
}

static fl_status check_tokens(const struct request *request)
{
    const uint32_t vocabulary = model_manifest(request->model->model)->shape.vocabulary;
    for (uint32_t i = 0; i < request->prompt_count; i++) {
        if (request->tokens[i] >= vocabulary) {
            return FL_FAIL(FL_INVALID,
                           "token %" PRIu32 " of the prompt is %" PRIu32 "; model '%s' has tokens "
                           "0 .. %" PRIu32,
                           i + 1, request->tokens[i], request->model_name, vocabulary - 1);
        }
    }
    return FL_OK;
}

/* Settles how many positions the request may fill. */
static fl_status size_request(struct request *request)
{
    const struct placement *placement = request->placement;
    const uint32_t context = placement->context;
    const uint32_t prompt = request->prompt_count;
    const uint64_t kv_positions =
        (uint64_t)placement->kv_block_count * placement->sequences.config.block_positions;
    if (prompt == 0) {
        return FL_FAIL(FL_INVALID,
                       "the prompt is empty, and model '%s' adds no token of its own; "
                       "give some text",
                       request->model_name);
    }
    if (prompt >= context) {
        return FL_FAIL(FL_TOO_LARGE,
                       "the prompt has %" PRIu32 " tokens and the context %" PRIu32
                       ": at most %" PRIu32 " fit with one token of answer; shorten it, or start "
                       "the coordinator with --context %" PRIu32,
                       prompt, context, context - 1, prompt + 1);
    }
    const uint64_t wanted = (uint64_t)prompt + request->max_tokens;
    if (wanted > context) {
        return FL_FAIL(FL_TOO_LARGE,
                       "a prompt of %" PRIu32 " tokens and an answer of %" PRIu32 " need %" PRIu64
                       " positions and the context has %" PRIu32 ": at most %" PRIu32
                       " new tokens fit",
                       prompt, request->max_tokens, wanted, context, context - prompt);
    }
    if (prompt >= kv_positions || wanted > kv_positions) {
        return FL_FAIL(FL_TOO_LARGE,
                       "a prompt of %" PRIu32 " tokens and an answer of %" PRIu32 " need %" PRIu64
                       " positions of KV cache and the KV budget holds %" PRIu64
                       "; start the coordinator with a larger --kv-budget",
                       prompt, request->max_tokens, wanted, kv_positions);
    }
    if (request->max_tokens == 0) {
        const uint64_t most = kv_positions < context ? kv_positions : context;
        request->max_tokens = (uint32_t)most - prompt;
    }
    request->position_max = prompt + request->max_tokens;
    return FL_OK;
}

static void tell_queued(struct coordinator *coordinator, const struct request *request)
{
    char cause[160];
    uint32_t running = 0;
    uint32_t ahead = 0;
    for (const struct request *other = coordinator->requests; other != NULL; other = other->next) {
        const bool same = other->placement == request->placement;
        running += same && other->state == REQUEST_RUNNING;
        ahead += same && other->state == REQUEST_QUEUED && other->serial < request->serial;
    }
    snprintf(cause, sizeof(cause),
             "the KV cache is held by %" PRIu32 " running requests; %" PRIu32
             " wait before this one",
             running, ahead);
    struct fl_client_event event = {.kind = FL_EVENT_PROGRESS,
                                    .as.progress = {.phase = "queue", .cause = cause}};
    request_event(coordinator, request, &event);
}

/* The answer to TOKENIZE. */
static void tell_tokens(struct coordinator *coordinator, struct request *request)
{
    struct fl_client_event event = {
        .kind = FL_EVENT_TOKENS,
        .as.tokens = {.count = request->prompt_count, .ids = request->tokens}};
    request_event(coordinator, request, &event);
    request_free(coordinator, request);
}

static void prompt_ready(struct coordinator *coordinator, struct request *request)
{
    if (request->kind == FL_REQUEST_TOKENIZE) {
        tell_tokens(coordinator, request);
        return;
    }
    fl_status status = check_tokens(request);
    if (status == FL_OK) {
        status = size_request(request);
    }
    if (status != FL_OK) {
        request_fail(coordinator, request, status, fl_last_error(), 0);
        return;
    }
    const uint64_t serial = request->serial;
    request->state = REQUEST_QUEUED;
    generation_admit(coordinator, request->placement);
    request = request_by_serial(coordinator, serial);
    if (request == NULL || request->state != REQUEST_QUEUED) {
        return;
    }
    if (request_count(coordinator, REQUEST_QUEUED) > coordinator->config.settings.queue) {
        status = request_queue_full(coordinator);
        request_fail(coordinator, request, status, fl_last_error(), RETRY_MS);
    } else {
        request->queued_ns = state_now(coordinator);
        tell_queued(coordinator, request);
    }
}

void generation_model_ready(struct coordinator *coordinator, struct request *request)
{
    fl_status status = FL_OK;
    request->opened_ns = state_now(coordinator);
    if (request->kind == FL_REQUEST_GENERATE) {
        status = open_stream(request);
        if (status == FL_OK) {
            /* The nodes begin to load while the prompt becomes tokens. */
            status = placement_get(coordinator, request->model, &request->placement);
        }
    }
    if (status != FL_OK) {
        request_fail(coordinator, request, status, fl_last_error(), 0);
    } else if (request->tokens != NULL) {
        prompt_ready(coordinator, request);
    } else {
        prompt_tokenise(coordinator, request, prompt_ready);
    }
}

/* ADMIT to every stage; the tokens only to the first and the last. */
static void send_admit(struct coordinator *coordinator, struct request *request)
{
    struct placement *placement = request->placement;
    const struct vocabulary *vocabulary = tokenizer_vocabulary(request->model->tokenizer);
    struct fl_cluster_message message = {.kind = FL_MESSAGE_ADMIT};
    struct fl_admit *admit = &message.as.admit;
    *admit = (struct fl_admit){.plan_id = placement->plan_id,
                               .request_id = request->request_id,
                               .sequence_id = request->sequence->id,
                               .keep = request->cached,
                               .position_max = request->position_max,
                               .prompt_count = request->prompt_count,
                               .max_tokens = request->max_tokens,
                               .sampling = request->sampling};
    for (uint32_t i = 0; !request->ignore_end && i < vocabulary->end_count; i++) {
        admit->stop_tokens[admit->stop_count++] = vocabulary->ends[i];
    }
    for (uint32_t i = 0; i < placement->stage_count; i++) {
        const bool wants = i == 0 || i == placement->stage_count - 1;
        admit->token_count = wants ? request->prompt_count : 0;
        admit->tokens = wants ? request->sequence->tokens : NULL;
        roster_send(coordinator->roster, placement->stages[i].node, &message);
        request->admit_sent_ns[i] = state_now(coordinator);
    }
}

static void tell_admitted(struct coordinator *coordinator, const struct request *request)
{
    struct fl_stage_summary stages[FL_STAGE_COUNT_MAX];
    struct fl_client_event event = {
        .kind = FL_EVENT_ADMITTED,
        .as.admitted = {.class_ = request->class_,
                        .prompt_tokens = request->prompt_count,
                        .cached_tokens = request->cached,
                        .stage_count = placement_stages(request->placement, stages),
                        .stages = stages}};
    request_event(coordinator, request, &event);
}

static struct request *first_queued(struct coordinator *coordinator,
                                    const struct placement *placement)
{
    for (struct request *request = coordinator->requests; request != NULL;
         request = request->next) {
        if (request->placement == placement && request->state == REQUEST_QUEUED) {
            return request;
        }
    }
    return NULL;
}

void generation_admit(struct coordinator *coordinator, struct placement *placement)
{
    struct request *request;
    while (!placement->dropping && (request = first_queued(coordinator, placement)) != NULL) {
        struct sequence *sequence = NULL;
        const fl_status status =
            sequence_table_take(&placement->sequences, request->tokens, request->prompt_count,
                                request->position_max, state_now(coordinator), &sequence);
        if (status == FL_AGAIN) {
            return;
        }
        if (status != FL_OK) {
            /* Before it fails: failing admits others, and must not meet it again. */
            request->state = REQUEST_TOKENISING;
            request_fail(coordinator, request, status, fl_last_error(), 0);
            continue;
        }
        free(request->tokens);
        request->tokens = NULL;
        request->sequence = sequence;
        request->cached = sequence->token_count;
        request->state = REQUEST_RUNNING;
        request->request_id = coordinator->next_request_id++;
        request->admit_ns = state_now(coordinator);
        placement->used_ns = request->admit_ns;
        send_admit(coordinator, request);
        tell_admitted(coordinator, request);
    }
}

/* ---- tokens and the end ---- */

/* Positions of the sequence whose KV every stage holds: a token's is there once the next token was
 * sampled; before the first one only what was kept is sure. */
static uint32_t valid_positions(const struct request *request)
{
    return request->token_count > 0 ? request->prompt_count + request->token_count - 1
                                    : request->cached;
}

void generation_release(struct coordinator *coordinator, struct request *request)
{
    struct sequence *sequence = request->sequence;
    if (sequence == NULL) {
        return;
    }
    struct placement *placement = request->placement;
    const uint32_t keep = valid_positions(request);
    const uint64_t sequence_id = sequence->id;
    struct fl_cluster_message message = {.kind = FL_MESSAGE_END};
    message.as.end = (struct fl_end){placement->plan_id, request->request_id, keep};
    placement_send(placement, &message);
    if (keep == 0) {
        message = (struct fl_cluster_message){.kind = FL_MESSAGE_DROP};
        message.as.drop = (struct fl_drop){placement->plan_id, sequence_id};
        placement_send(placement, &message);
    }
    placement->used_ns = state_now(coordinator);
    sequence_table_give(&placement->sequences, sequence, keep, placement->used_ns);
    request->sequence = NULL;
}

/* Sends the text and the token that it came with, which may be none. */
static void send_text(struct coordinator *coordinator, const struct request *request,
                      struct gguf_string text, const struct fl_token *token)
{
    struct fl_token_detail detail = {0};
    struct fl_client_event event = {.kind = FL_EVENT_TEXT};
    event.as.text.text = (struct fl_text){text.data, text.size};
    if (token != NULL) {
        detail = (struct fl_token_detail){.id = token->id,
                                          .logprob = token->logprob,
                                          .top_count = token->logprob_count,
                                          .top = token->logprobs};
        event.as.text.token_count = 1;
        event.as.text.tokens = &detail;
    }
    request_event(coordinator, request, &event);
}

/* One line per answer. */
static void log_done(const struct request *request, const struct fl_client_event *event)
{
    char exposed[160] = "";
    int used = 0;
    for (uint32_t i = 0; i < event->as.done.phase_count && i < 2; i++) {
        const struct fl_phase_summary *phase = &event->as.done.phases[i];
        used += snprintf(exposed + used, sizeof(exposed) - (size_t)used, "%s %s %.1f ms",
                         i == 0 ? ", of it" : ",", phase->phase, phase->exposed_ms);
    }
    fl_log(FL_LOG_INFO,
           "request %" PRIu64 " ended: model %s finish %s class %s prompt %" PRIu32
           " tokens %" PRIu32 " ttft %.1f ms%s",
           request->serial, request->model_name, fl_finish_name(request->finish),
           fl_class_name(event->as.done.class_), request->prompt_count, request->output_count,
           event->as.done.ttft_ms, exposed);
}

/* Where the time to the first token went; with a timeline, stages and class as they were then. */
static void tell_times(struct coordinator *coordinator, struct request *request,
                       struct fl_client_event *event, struct fl_stage_summary *stages,
                       struct fl_phase_summary *phases)
{
    if (request->token_count > 0) {
        event->as.done.ttft_ms =
            (double)(request->first_ns - request->arrived_ns) / (double)FL_NS_PER_MS;
    }
    const struct timeline *timeline = trace_keep(coordinator, request);
    if (timeline != NULL) {
        event->as.done.class_ = timeline->class_;
        event->as.done.timeline_id = timeline->id;
        event->as.done.predicted_ms = timeline->predicted_ms;
        event->as.done.phase_count = timeline_phases(timeline, phases);
        event->as.done.stage_count = timeline->stage_count;
        for (uint32_t i = 0; i < timeline->stage_count; i++) {
            stages[i] = timeline->stages[i].summary;
        }
    } else if (request->token_count > 0) {
        phases[0] = (struct fl_phase_summary){.phase = fl_phase_name(FL_PHASE_UNKNOWN),
                                              .exposed_ms = event->as.done.ttft_ms};
        event->as.done.phase_count = 1; /* no memory for more */
    }
}

/* DONE, and nothing is left. */
static void end(struct coordinator *coordinator, struct request *request)
{
    struct placement *placement = request->placement;
    struct fl_stage_summary stages[FL_STAGE_COUNT_MAX];
    struct fl_phase_summary phases[FL_PHASE_COUNT];
    const double span_s = (double)(request->last_ns - request->first_ns) / (double)FL_NS_PER_S;
    const uint32_t steps = request->token_count > 1 ? request->token_count - 1 : 0;
    struct fl_client_event event = {
        .kind = FL_EVENT_DONE,
        .as.done = {.finish = request->finish,
                    .class_ = request->class_,
                    .prompt_tokens = request->prompt_count,
                    .cached_tokens = request->cached,
                    .output_tokens = request->output_count,
                    .decode_tok_s = span_s > 0 ? steps / span_s : 0,
                    .stage_count = placement != NULL ? placement_stages(placement, stages) : 0,
                    .stages = stages,
                    .logit_count = request->logit_count,
                    .logits = request->logits,
                    .phases = phases}};
    tell_times(coordinator, request, &event, stages, phases);
    log_done(request, &event);
    request_event(coordinator, request, &event);
    request_free(coordinator, request);
}

static void finish(struct coordinator *coordinator, struct request *request, enum fl_finish how)
{
    struct gguf_string rest = {0};
    if (request->sequence != NULL) {
        (void)text_stream_finish(&request->stream, &rest);
        if (rest.size > 0) {
            send_text(coordinator, request, rest, NULL);
        }
    }
    struct placement *placement = request->placement;
    request->finish = how;
    /* The nodes first: what they hold is free for the next one while the client reads. */
    generation_release(coordinator, request);
    const bool wanted = how != FL_FINISH_CANCELLED && !request->muted;
    if (wanted && request->timeline != NULL && !timeline_answered(request->timeline)) {
        request->state = REQUEST_ENDING;
        request->placement = NULL; /* it may go any time */
        request->deadline_ns = state_now(coordinator) + SPANS_DEADLINE_NS;
    } else {
        end(coordinator, request);
    }
    if (placement != NULL) {
        generation_admit(coordinator, placement);
    }
}

uint64_t generation_end_answered(struct coordinator *coordinator, uint64_t now)
{
    uint64_t next_ns = UINT64_MAX;
    struct request *next;
    for (struct request *request = coordinator->requests; request != NULL; request = next) {
        next = request->next;
        if (request->state != REQUEST_ENDING) {
            continue;
        }
        if (request->deadline_ns <= now || timeline_answered(request->timeline)) {
            end(coordinator, request);
        } else {
            next_ns = request->deadline_ns < next_ns ? request->deadline_ns : next_ns;
        }
    }
    return next_ns;
}

void generation_cancel(struct coordinator *coordinator, struct request *request)
{
    if (request->state == REQUEST_ENDING) {
        end(coordinator, request);
    } else {
        finish(coordinator, request, FL_FINISH_CANCELLED);
    }
}

static struct request *find_running(struct coordinator *coordinator,
                                    const struct placement *placement, uint64_t request_id)
{
    for (struct request *request = coordinator->requests; request != NULL;
         request = request->next) {
        if (request->placement == placement && request->state == REQUEST_RUNNING &&
            request->request_id == request_id) {
            return request;
        }
    }
    return NULL;
}

static void keep_logits(struct request *request, const struct fl_token *token)
{
    if (token->logit_count == 0 || request->logits != NULL) {
        return;
    }
    request->logits = malloc(token->logit_count * sizeof(*request->logits));
    if (request->logits != NULL) {
        memcpy(request->logits, token->logits, token->logit_count * sizeof(*request->logits));
        request->logit_count = token->logit_count;
    }
}

/* False when the token is not the one that is due. */
static bool take_token(struct coordinator *coordinator, struct request *request,
                       const struct fl_token *token)
{
    const uint32_t position = request->prompt_count + token->index;
    if (token->index != request->token_count || position >= request->sequence->capacity) {
        return false;
    }
    request->sequence->tokens[position] = token->id;
    request->token_count++;
    request->last_ns = state_now(coordinator);
    if (request->token_count == 1) {
        request->first_ns = request->last_ns;
        request->token_ns = request->last_ns;
        keep_logits(request, token);
    }
    return true;
}

void generation_token(struct coordinator *coordinator, struct placement *placement,
                      const struct fl_token *token)
{
    struct request *request = find_running(coordinator, placement, token->request_id);
    if (request == NULL) {
        return; /* late: the request ended here meanwhile */
    }
    if (!take_token(coordinator, request, token)) {
        request_fail(coordinator, request, FL_PROTOCOL,
                     "the last stage sent tokens out of order; send the request again", RETRY_MS);
        return;
    }
    if (token->finish == FL_FINISH_STOP) {
        if (request->token_count == 1) {
            trace_begin(coordinator, request);
        }
        finish(coordinator, request, FL_FINISH_STOP);
        return;
    }
    request->output_count++;
    /* An end token that is to be ignored prints nothing, and must not close the stream. */
    struct gguf_string text = {0};
    enum text_stream_state state = TEXT_STREAM_OPEN;
    if (!request->ignore_end || !tokenizer_is_end(request->model->tokenizer, token->id)) {
        state = text_stream_push(&request->stream, token->id, &text);
    }
    send_text(coordinator, request, text, token);
    if (request->token_count == 1) {
        request->first_ns = state_now(coordinator);
        request->last_ns = request->first_ns;
        trace_begin(coordinator, request);
    }
    if (state == TEXT_STREAM_STOPPED) {
        finish(coordinator, request, FL_FINISH_STOP);
    } else if (token->finish != FL_FINISH_NONE) {
        finish(coordinator, request, token->finish);
    }
}

void generation_failure(struct coordinator *coordinator, struct placement *placement,
                        const struct roster_node *node, const struct fl_failure *failure)
{
    struct request *request = find_running(coordinator, placement, failure->request_id);
    if (request != NULL) {
        char text[STATE_TEXT_MAX];
        state_failure_text(node, failure, text);
        request_fail(coordinator, request, (fl_status)failure->code, text, 0);
    }
}

void generation_progress(struct coordinator *coordinator, struct placement *placement)
{
    const uint64_t now = state_now(coordinator);
    const bool ready = placement_ready(placement);
    if (!ready && now - placement->progress_ns < PROGRESS_INTERVAL_NS) {
        return;
    }
    placement->progress_ns = now;
    struct fl_client_event event = {.kind = FL_EVENT_PROGRESS,
                                    .as.progress = {.phase = "load", .cause = ""}};
    event.as.progress.bytes_done = placement_bytes(placement, &event.as.progress.bytes_total);
    struct request *next;
    for (struct request *request = coordinator->requests; request != NULL; request = next) {
        next = request->next;
        const bool waits = request->placement == placement && request->token_count == 0;
        if (waits && event.as.progress.bytes_total > 0) {
            request_event(coordinator, request, &event);
        }
        if (waits && ready && request->state == REQUEST_LOADING) {
            struct fl_client_event loaded = {.kind = FL_EVENT_LOADED};
            request_event(coordinator, request, &loaded);
            request_free(coordinator, request);
        }
    }
}
