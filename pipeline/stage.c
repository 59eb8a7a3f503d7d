#include "pipeline/stage.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pipeline/admission.h"
#include "pipeline/forward.h"
#include "pipeline/inbox.h"
#include "pipeline/kv_cache.h"
#include "pipeline/outbox.h"
#include "pipeline/run.h"
#include "pipeline/sampler.h"
#include "pipeline/stage_plan.h"

#define NONE UINT32_MAX

/* A request admitted and not ended.  Its rows are, by position:
 *   0 .. next_run - 1        in the KV cache, or in a run
 *   next_run .. next_in - 1  in the inbox (first stage: known tokens) */
struct request {
    bool used;
    uint64_t id;
    uint64_t arrived_ns; /* its ADMIT, */
    uint64_t token_ns;   /* and, on the first stage, its last token */
    uint32_t sequence;   /* in the KV cache */
    uint32_t next_run;
    uint32_t next_in;
    uint32_t prompt_count;
    uint32_t position_max;
    uint32_t max_tokens;
    uint32_t stop_count;
    uint32_t stop_tokens[FL_STOP_TOKEN_MAX];
    struct fl_sampling sampling;
    bool failed;         /* its rows are dropped until it ends */
    bool failure_unsaid; /* `failure` is still to be polled */
    uint32_t failure_code;
    char failure[FL_ERROR_TEXT_MAX];
};

struct stage {
    const struct fl_plan *plan;
    const struct fl_model_shape *shape;
    struct device *device;
    struct weight_store *weights;
    struct embedding_source embed;
    bool is_first;
    bool is_last;
    uint32_t layer_first;
    bool all_there;        /* no_overlap: every piece was seen published, */
    uint64_t all_there_ns; /* the last of them then */
    struct run_trace *trace;
    uint32_t embed_piece; /* first stage: index of EMBED */

    uint32_t chain_count; /* pieces that compute, in order */
    uint32_t *chain;      /* [chain_count] indexes into the manifest */

    uint64_t admitted_max;    /* the highest request id met */
    struct request *requests; /* [sequence_max] */

    /* Runs run_first .. run_end - 1 (counted for ever, run n is n % STAGE_RUN_MAX) are under way. */
    uint64_t run_first;
    uint64_t run_end;
    struct run runs[STAGE_RUN_MAX];

    float *host_rows;   /* [row_max, D]: input of a run on its way to the device */
    float *host_logits; /* [V], last stage */
    struct inbox *inbox;
    struct outbox *outbox;
    struct kv_cache *kv;
    struct forward *forward;
    struct sampler *sampler;
};

static uint64_t max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

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

/* ---- requests ---- */

static uint32_t find_request(const struct stage *stage, uint64_t id)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        if (stage->requests[i].used && stage->requests[i].id == id) {
            return i;
        }
    }
    return NONE;
}

static uint32_t find_unused(const struct stage *stage)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        if (!stage->requests[i].used) {
            return i;
        }
    }
    return NONE;
}

/* The request that uses the sequence, or NONE. */
static uint32_t find_user(const struct stage *stage, uint32_t sequence)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        if (stage->requests[i].used && stage->requests[i].sequence == sequence) {
            return i;
        }
    }
    return NONE;
}

static void fail_request(struct request *request, fl_status status)
{
    if (!request->failed) {
        request->failed = true;
        request->failure_unsaid = true;
        request->failure_code = (uint32_t)status;
        snprintf(request->failure, sizeof(request->failure), "%s", fl_last_error());
    }
}

/* Rows that came before the request did: they must follow each other from `keep` on. */
static void claim_rows(struct stage *stage, struct request *request)
{
    for (uint32_t row = inbox_first(stage->inbox); row != INBOX_NONE;
         row = inbox_row(stage->inbox, row)->next) {
        const struct inbox_row *waiting = inbox_row(stage->inbox, row);
        if (waiting->request_id != request->id) {
            continue;
        }
        if (waiting->position != request->next_in || waiting->position >= request->position_max) {
            fail_request(request, FL_FAIL(FL_PROTOCOL,
                                          "request %" PRIu64 " got a row for position %" PRIu32
                                          "; position %" PRIu32 " is next",
                                          request->id, waiting->position, request->next_in));
            return;
        }
        request->next_in++;
    }
}

fl_status stage_admit(struct stage *stage, const struct fl_admit *admit, uint64_t arrived_ns)
{
    if (admit->request_id <= stage->admitted_max) {
        return FL_FAIL(FL_INVALID, "request id %" PRIu64 " is not above the last one, %" PRIu64,
                       admit->request_id, stage->admitted_max);
    }
    /* Also when it is refused: its rows must not wait for it. */
    stage->admitted_max = admit->request_id;
    FL_TRY(admission_check(stage->plan, admit));
    const uint32_t held = kv_cache_find(stage->kv, admit->sequence_id);
    if (held != KV_CACHE_NONE && find_user(stage, held) != NONE) {
        return FL_FAIL(FL_INVALID, "sequence %" PRIu64 " is in use by request %" PRIu64,
                       admit->sequence_id, stage->requests[find_user(stage, held)].id);
    }
    const uint32_t index = find_unused(stage);
    if (index == NONE) {
        return FL_FAIL(FL_BUSY, "all %" PRIu32 " sequences are in use", stage->plan->sequence_max);
    }
    uint32_t sequence;
    FL_TRY(kv_cache_reserve(stage->kv, admit->sequence_id, admit->keep, admit->position_max,
                            &sequence));
    struct request *request = &stage->requests[index];
    *request = (struct request){
        .used = true,
        .id = admit->request_id,
        .arrived_ns = arrived_ns,
        .sequence = sequence,
        .next_run = admit->keep,
        .next_in = admit->keep,
        .prompt_count = admit->prompt_count,
        .position_max = admit->position_max,
        .max_tokens = admit->max_tokens,
        .stop_count = admit->stop_count,
        .sampling = admit->sampling,
    };
    memcpy(request->stop_tokens, admit->stop_tokens, sizeof(request->stop_tokens));
    for (uint32_t i = 0; i < admit->token_count; i++) {
        kv_cache_set_token(stage->kv, sequence, i, admit->tokens[i]);
    }
    if (stage->is_first) {
        request->next_in = admit->prompt_count;
    } else {
        claim_rows(stage, request);
    }
    return FL_OK;
}

/* Drop the request's rows wherever they are; its blocks are free to be used by others after. */
static void forget_rows(struct stage *stage, uint32_t index)
{
    /* Work that is queued may still read the rows' tables. */
    while (stage->device->ops->poll(stage->device) == FL_AGAIN) {
    }
    for (uint64_t n = stage->run_first; n < stage->run_end; n++) {
        run_kill(&stage->runs[n % STAGE_RUN_MAX], index, kv_cache_spare(stage->kv));
    }
    outbox_kill(stage->outbox, index);
    for (uint32_t row = stage->is_first ? INBOX_NONE : inbox_first(stage->inbox);
         row != INBOX_NONE;) {
        const struct inbox_row waiting = *inbox_row(stage->inbox, row);
        if (waiting.request_id == stage->requests[index].id) {
            inbox_remove(stage->inbox, row);
        }
        row = waiting.next;
    }
}

static void end_request(struct stage *stage, uint32_t index, uint32_t keep)
{
    forget_rows(stage, index);
    kv_cache_trim(stage->kv, stage->requests[index].sequence, keep);
    stage->requests[index].used = false;
}

void stage_end(struct stage *stage, const struct fl_end *end)
{
    const uint32_t index = find_request(stage, end->request_id);
    if (end->plan_id == stage->plan->plan_id && index != NONE) {
        end_request(stage, index, end->keep);
    }
}

void stage_drop(struct stage *stage, const struct fl_drop *drop)
{
    const uint32_t sequence = kv_cache_find(stage->kv, drop->sequence_id);
    if (drop->plan_id != stage->plan->plan_id || sequence == KV_CACHE_NONE) {
        return;
    }
    const uint32_t index = find_user(stage, sequence);
    if (index != NONE) {
        end_request(stage, index, 0);
    } else {
        kv_cache_trim(stage->kv, sequence, 0);
    }
}

/* ---- input ---- */

static fl_status check_header(const struct stage *stage, const struct fl_activation_header *header)
{
    if (stage->is_first) {
        return FL_FAIL(FL_PROTOCOL, "activations came to the first stage; it takes tokens");
    }
    if (header->plan_id != stage->plan->plan_id || header->width != stage->shape->width ||
        header->rows == 0 || header->rows > FL_CHUNK_MAX ||
        header->position >= stage->plan->context ||
        header->rows > stage->plan->context - header->position) {
        return FL_FAIL(FL_PROTOCOL,
                       "activations of plan %" PRIu64 ": %" PRIu32 " rows of %" PRIu32
                       " from position %" PRIu32 " on; plan %" PRIu64 " has rows of %" PRIu32
                       " and positions up to %" PRIu32,
                       header->plan_id, header->rows, header->width, header->position,
                       stage->plan->plan_id, stage->shape->width, stage->plan->context);
    }
    return FL_OK;
}

/* Rows of an admitted request: the next ones, and sampled exactly from the prompt's last on. */
static fl_status check_place(const struct request *request,
                             const struct fl_activation_header *header)
{
    const uint32_t end = header->position + header->rows;
    const bool sample = (header->flags & FL_ACTIVATION_SAMPLE) != 0;
    if (header->position != request->next_in || end > request->position_max) {
        return FL_FAIL(FL_PROTOCOL,
                       "request %" PRIu64 " got rows for positions %" PRIu32 " to %" PRIu32
                       "; position %" PRIu32 " is next and %" PRIu32 " the end",
                       request->id, header->position, end - 1, request->next_in,
                       request->position_max);
    }
    if (sample != (end >= request->prompt_count) ||
        (header->position < request->prompt_count && end > request->prompt_count)) {
        return FL_FAIL(FL_PROTOCOL,
                       "request %" PRIu64 " got rows for positions %" PRIu32 " to %" PRIu32
                       " %s a sample; its prompt has %" PRIu32,
                       request->id, header->position, end - 1, sample ? "with" : "without",
                       request->prompt_count);
    }
    return FL_OK;
}

fl_status stage_take_activations(struct stage *stage, const struct fl_activation_header *header,
                                 const float *rows, uint64_t arrived_ns)
{
    FL_TRY(check_header(stage, header));
    const uint32_t index = find_request(stage, header->request_id);
    struct request *request = index == NONE ? NULL : &stage->requests[index];
    if (request != NULL && !request->failed) {
        FL_TRY(check_place(request, header));
    }
    FL_TRY(inbox_charge(stage->inbox, header->rows));
    const bool is_late = request == NULL && header->request_id <= stage->admitted_max;
    if (is_late || (request != NULL && request->failed)) {
        inbox_refuse(stage->inbox, header->rows);
        return FL_OK;
    }
    inbox_put(stage->inbox, header, rows, arrived_ns);
    if (request != NULL) {
        request->next_in += header->rows;
    }
    return FL_OK;
}

fl_status stage_take_token(struct stage *stage, const struct fl_token *token, uint64_t arrived_ns)
{
    if (!stage->is_first) {
        return FL_FAIL(FL_PROTOCOL, "a token came to stage %" PRIu32 "; only the first takes them",
                       stage->plan->stage_index);
    }
    const uint32_t index = find_request(stage, token->request_id);
    if (token->plan_id != stage->plan->plan_id || index == NONE || stage->requests[index].failed ||
        token->finish != FL_FINISH_NONE) {
        return FL_OK; /* late, or the last one: nothing follows it */
    }
    struct request *request = &stage->requests[index];
    if (token->position != request->next_in || request->next_run != request->next_in ||
        token->position >= request->position_max || token->id >= stage->shape->vocabulary) {
        return FL_FAIL(FL_PROTOCOL,
                       "request %" PRIu64 " got token %" PRIu32 " for position %" PRIu32
                       "; position %" PRIu32 " of %" PRIu32 " is next",
                       request->id, token->id, token->position, request->next_in,
                       request->position_max);
    }
    kv_cache_set_token(stage->kv, request->sequence, token->position, token->id);
    request->token_ns = arrived_ns;
    request->next_in++;
    return FL_OK;
}

/* ---- forming runs ---- */

/* Put the request's next row, which came at `arrived_ns`, into the run.  Rows that came before their
 * ADMIT could not be used earlier. */
static uint32_t add_row(struct stage *stage, struct run *run, uint32_t index, uint64_t arrived_ns)
{
    struct request *request = &stage->requests[index];
    const uint32_t position = request->next_run++;
    const bool sample = position + 1 >= request->prompt_count;
    const uint32_t row =
        run_add(run, index, position, kv_cache_blocks(stage->kv, request->sequence), sample);
    run_ready(run, max(arrived_ns, request->arrived_ns));
    return row;
}

/* The request with the lowest id above *id that has prompt rows to run, or NONE. */
static uint32_t next_prefill(const struct stage *stage, uint64_t id)
{
    uint32_t found = NONE;
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        const struct request *request = &stage->requests[i];
        if (request->used && !request->failed && request->id > id &&
            request->next_run < request->prompt_count &&
            (found == NONE || request->id < stage->requests[found].id)) {
            found = i;
        }
    }
    return found;
}

/* The same with its token, on the first stage. */
static void add_token_row(struct stage *stage, struct run *run, uint32_t index)
{
    const uint32_t row = add_row(stage, run, index, stage->requests[index].token_ns);
    run->ids[row] = kv_cache_token(stage->kv, stage->requests[index].sequence, run->positions[row]);
}

static void form_from_tokens(struct stage *stage, struct run *run)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        const struct request *request = &stage->requests[i];
        if (request->used && !request->failed && request->next_run >= request->prompt_count &&
            request->next_run < request->next_in) {
            add_token_row(stage, run, i);
        }
    }
    uint32_t room = stage->plan->chunk_rows;
    for (uint32_t i = next_prefill(stage, 0); i != NONE && room > 0;
         i = next_prefill(stage, stage->requests[i].id)) {
        const struct request *request = &stage->requests[i];
        for (; room > 0 && request->next_run < request->prompt_count; room--) {
            add_token_row(stage, run, i);
        }
    }
}

/* Move waiting rows into the run: those of decode steps, or up to a chunk of the others. */
static void form_from_inbox(struct stage *stage, struct run *run, bool decode)
{
    const size_t width = stage->shape->width;
    uint32_t room = decode ? stage->plan->sequence_max : stage->plan->chunk_rows;
    for (uint32_t row = inbox_first(stage->inbox); row != INBOX_NONE && room > 0;) {
        const struct inbox_row waiting = *inbox_row(stage->inbox, row);
        const uint32_t index = find_request(stage, waiting.request_id);
        const struct request *request = index == NONE ? NULL : &stage->requests[index];
        if (request != NULL && request->failed) {
            inbox_remove(stage->inbox, row);
        } else if (request != NULL && waiting.position == request->next_run &&
                   (waiting.position >= request->prompt_count) == decode) {
            const uint32_t to = add_row(stage, run, index, waiting.arrived_ns);
            memcpy(stage->host_rows + to * width, inbox_data(stage->inbox, row),
                   width * sizeof(float));
            inbox_remove(stage->inbox, row);
            room--;
        }
        row = waiting.next;
    }
}

/* Say whose rows the run holds and since when they could have been used. */
static void trace_run(struct stage *stage, struct run *run)
{
    struct run_times *times = &run->times;
    const uint64_t first_id = stage->requests[run->segments[0].request].id;
    *times = (struct run_times){
        .plan_id = stage->plan->plan_id,
        .number = stage->run_end + 1,
        .request_id = first_id,
        .position = run->segments[0].position,
        .rows = run->row_count,
    };
    for (uint32_t i = 0; i < run->segment_count; i++) {
        const struct run_segment *segment = &run->segments[i];
        const struct request *request = &stage->requests[segment->request];
        times->request_id = request->id == first_id ? times->request_id : 0;
        times->input_ns = max(segment->ready_ns, times->input_ns);
        if (segment->position < request->prompt_count) {
            times->prefill = true;
            run_trace_join(stage->trace, times, request->id, segment->position, segment->rows,
                           segment->ready_ns);
        }
    }
}

/* Start a run of what has arrived; false when there is nothing, or no room for one more. */
static bool form_run(struct stage *stage)
{
    if (stage->run_end - stage->run_first == STAGE_RUN_MAX) {
        return false;
    }
    struct run *run = &stage->runs[stage->run_end % STAGE_RUN_MAX];
    run_clear(run);
    if (stage->is_first) {
        form_from_tokens(stage, run);
    } else {
        form_from_inbox(stage, run, true);
        form_from_inbox(stage, run, false);
        run->has_input = true;
    }
    if (run->row_count == 0) {
        return false;
    }
    if (!stage->is_first) {
        stage->device->ops->copy_in(stage->device, run->x, stage->host_rows,
                                    (size_t)run->row_count * stage->shape->width * sizeof(float));
    }
    if (stage->trace != NULL) {
        trace_run(stage, run);
    }
    stage->run_end++;
    return true;
}

/* ---- one task ---- */

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
    run->times.input_ns = max(ready_ns, run->times.input_ns);
    run_trace_task(stage->trace, &run->times, &task);
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
        for (uint32_t i = 0; i < run->segment_count; i++) {
            const uint32_t index = run->segments[i].request;
            if (index != RUN_DEAD) {
                fail_request(&stage->requests[index], status);
                forget_rows(stage, index);
            }
        }
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
    const struct request *request = ((void **)ctx)[1];
    return kv_cache_token(stage->kv, request->sequence, position);
}

static enum fl_finish finish_of(const struct request *request, uint32_t index, uint32_t position,
                                uint32_t id)
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
static fl_status sample(struct stage *stage, struct request *request, uint32_t position)
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
    uint32_t indexes[64];
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
        struct request *request = &stage->requests[segment->request];
        stage->device->ops->copy_out(stage->device, stage->host_logits, logits + i * vocabulary,
                                     vocabulary * sizeof(float));
        const fl_status status = sample(stage, request, run->positions[indexes[i]]);
        if (fl_status_scope(status) == FL_SCOPE_REQUEST ||
            fl_status_scope(status) == FL_SCOPE_CALL) {
            fail_request(request, status);
        } else if (status != FL_OK) {
            return status;
        }
    }
    return FL_OK;
}

static bool wants_sample(const struct run_segment *segment)
{
    return segment->request != RUN_DEAD && segment->sample;
}

static uint32_t count_samples(const struct run *run)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < run->segment_count; i++) {
        count += wants_sample(&run->segments[i]) ? 1 : 0;
    }
    return count;
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
    const uint32_t rows = count_samples(run);
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
    uint32_t segments[64];
    const uint64_t start_ns = run_trace_now(stage->trace);
    uint64_t logits_ns = start_ns;
    const uint32_t batch = forward_head_rows(stage->forward);
    FL_ASSERT(batch <= 64);
    uint32_t count = 0;
    for (uint32_t i = 0; i < run->segment_count; i++) {
        if (wants_sample(&run->segments[i])) {
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

static bool is_head(const struct stage *stage, const struct run *run)
{
    return stage->is_last && run->piece + 1 == stage->chain_count;
}

/* Nothing is left to compute: all pieces are behind it, or nobody waits for the rest. */
static bool is_complete(const struct stage *stage, const struct run *run)
{
    return run->piece == stage->chain_count || run->live_count == 0 ||
           (is_head(stage, run) && count_samples(run) == 0);
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
            fail_request(
                &stage->requests[segment.request],
                FL_FAIL(FL_MALFORMED,
                        "the model gave numbers that are not finite at positions %" PRIu32
                        " to %" PRIu32
                        "; its weights are damaged or of a kind this build computes wrongly",
                        segment.position, segment.position + segment.rows - 1));
            forget_rows(stage, segment.request);
        }
    }
}

/* The run's next task.  FL_AGAIN when its weights, its input or room for its tokens are missing. */
static fl_status run_task(struct stage *stage, struct run *run)
{
    if (!run->has_input) {
        return embed_run(stage, run);
    }
    if (is_head(stage, run) && outbox_token_room(stage->outbox) < count_samples(run)) {
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

/* Let complete runs go, oldest first; false when none went. */
static bool retire_runs(struct stage *stage)
{
    bool any = false;
    for (; stage->run_first < stage->run_end; stage->run_first++) {
        struct run *run = &stage->runs[stage->run_first % STAGE_RUN_MAX];
        if (!is_complete(stage, run)) {
            break;
        }
        if (!stage->is_last && run->live_count > 0) {
            float *rows = outbox_slot(stage->outbox);
            if (rows == NULL) {
                break;
            }
            stage->device->ops->copy_out(stage->device, rows, run->x,
                                         (size_t)run->row_count * stage->shape->width *
                                             sizeof(float));
            outbox_push(stage->outbox, run);
        }
        for (uint32_t i = 0; i < run->segment_count; i++) {
            const struct run_segment *segment = &run->segments[i];
            if (segment->request != RUN_DEAD) {
                kv_cache_fill(stage->kv, stage->requests[segment->request].sequence,
                              segment->position + segment->rows);
            }
        }
        run_trace_end(stage->trace, &run->times);
        any = true;
    }
    return any;
}

/* FL_AGAIN until every piece was published once (plan.no_overlap). */
static fl_status wait_for_all(struct stage *stage)
{
    for (uint32_t i = 0; !stage->all_there && i < stage->plan->manifest.piece_count; i++) {
        const struct piece_weights *weights;
        FL_TRY(weight_store_acquire(stage->weights, i, &weights));
        weight_store_release(stage->weights, i);
        stage->all_there_ns =
            max(stage->all_there_ns, weight_store_published_ns(stage->weights, i));
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
    if (retire_runs(stage)) {
        return FL_OK;
    }
    uint32_t limit = UINT32_MAX; /* the piece that the runs before have not passed */
    bool inputs = true;          /* the runs before have theirs */
    for (uint64_t n = stage->run_first; n < stage->run_end; n++) {
        struct run *run = &stage->runs[n % STAGE_RUN_MAX];
        if (is_complete(stage, run)) {
            continue;
        }
        const bool free = run->has_input ? run->piece < limit : inputs;
        const fl_status status = free ? run_task(stage, run) : FL_AGAIN;
        if (status != FL_AGAIN) {
            (void)retire_runs(stage);
            return status;
        }
        limit = run->piece;
        inputs = run->has_input;
    }
    return form_run(stage) ? FL_OK : FL_AGAIN;
}

/* ---- output ---- */

static bool poll_failure(struct stage *stage, struct stage_output *out)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        struct request *request = &stage->requests[i];
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
