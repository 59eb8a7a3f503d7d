#include "tests/support/stage_chain.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/matrix.h"
#include "pipeline/gguf.h"
#include "pipeline/model.h"

enum {
    LINK_MAX = 16384,  /* outputs waiting for credit on one link */
    ROWS_PER_PUT = 64, /* of a matrix, at once */
    PLAN_ID = 7,
};

/* What stage k has given out for stage k + 1 and may not send yet. */
struct waiting {
    struct fl_activation_header header;
    const float *rows;
    uint32_t buffer;
};

struct link {
    uint32_t credit;
    uint32_t first;
    uint32_t end;
    struct waiting *waiting; /* [LINK_MAX] ring */
};

struct chain_stage {
    struct fl_plan plan;
    struct device *device;
    struct weight_store *weights;
    struct stage *stage;
    bool *loaded;     /* [piece_count] */
    struct link link; /* to the next stage */
};

struct stage_chain {
    struct stage_chain_config config;
    struct model *model;
    int files[FL_FILE_COUNT_MAX];
    struct fl_stage places[STAGE_CHAIN_STAGES_MAX];
    struct chain_stage stages[STAGE_CHAIN_STAGES_MAX];
    uint64_t next_request;
    struct stage_chain_request *requests[STAGE_CHAIN_REQUESTS_MAX];
    uint32_t rows_waiting_peak;
    uint64_t embed_calls;
    uint64_t embed_ready_ns; /* late: when the rows were there */
};

static struct run_trace *trace_of(const struct stage_chain *chain, uint32_t stage)
{
    return chain->config.traces != NULL ? &chain->config.traces[stage] : NULL;
}

/* ---- files ---- */

static fl_status read_range(const struct stage_chain *chain, uint32_t file, uint64_t offset,
                            void *to, size_t size)
{
    const ssize_t got = pread(chain->files[file], to, size, (off_t)offset);
    if (got != (ssize_t)size) {
        return FL_FAIL(FL_IO, "read of %zu bytes at %" PRIu64 " gave %zd", size, offset, got);
    }
    return FL_OK;
}

static fl_status embed_read(void *ctx, const uint32_t *ids, uint32_t count, float *out,
                            uint64_t *out_ready_ns)
{
    struct stage_chain *chain = ctx;
    const struct fl_tensor_ref *table = &model_manifest(chain->model)->pieces[0].tensors[0];
    if (chain->config.embed_late && chain->embed_calls++ % 3 != 2) {
        chain->embed_ready_ns = run_trace_now(trace_of(chain, 0));
        return FL_AGAIN;
    }
    *out_ready_ns = chain->embed_ready_ns;
    size_t row_size;
    FL_TRY(fl_dtype_row_size(table->dtype, table->columns, &row_size));
    unsigned char *raw = malloc(row_size);
    fl_status status = raw == NULL ? FL_NO_MEMORY : FL_OK;
    for (uint32_t i = 0; i < count && status == FL_OK; i++) {
        status = read_range(chain, table->file, table->offset + ids[i] * (uint64_t)row_size, raw,
                            row_size);
        if (status == FL_OK) {
            matrix_dequantize_row(table->dtype, raw, table->columns,
                                  out + (size_t)i * table->columns);
        }
    }
    free(raw);
    return status;
}

static fl_status load_tensor(struct stage_chain *chain, uint32_t stage, uint32_t piece,
                             uint32_t tensor)
{
    const struct fl_tensor_ref *ref =
        &chain->stages[stage].plan.manifest.pieces[piece].tensors[tensor];
    size_t row_size;
    FL_TRY(fl_dtype_row_size(ref->dtype, ref->columns, &row_size));
    unsigned char *raw = malloc(row_size * ROWS_PER_PUT);
    fl_status status = raw == NULL ? FL_NO_MEMORY : FL_OK;
    for (uint32_t row = 0; row < ref->rows && status == FL_OK; row += ROWS_PER_PUT) {
        const uint32_t count = ref->rows - row < ROWS_PER_PUT ? ref->rows - row : ROWS_PER_PUT;
        status = read_range(chain, ref->file, ref->offset + (uint64_t)row * row_size, raw,
                            count * row_size);
        if (status == FL_OK) {
            weight_store_put(chain->stages[stage].weights, piece, tensor, row, count, raw);
        }
    }
    free(raw);
    return status;
}

fl_status stage_chain_load(struct stage_chain *chain, uint32_t stage, uint32_t piece)
{
    struct chain_stage *to = &chain->stages[stage];
    FL_ASSERT(!to->loaded[piece] && weight_store_has_memory(to->weights, piece));
    for (uint32_t i = 0; i < to->plan.manifest.pieces[piece].tensor_count; i++) {
        FL_TRY(load_tensor(chain, stage, piece, i));
    }
    weight_store_publish(to->weights, piece, run_trace_now(trace_of(chain, stage)));
    to->loaded[piece] = true;
    return FL_OK;
}

/* The n-th missing piece; returns how many there are up to it. */
static uint32_t walk_missing(const struct stage_chain *chain, uint32_t n, uint32_t *stage,
                             uint32_t *piece)
{
    uint32_t count = 0;
    for (uint32_t s = 0; s < chain->config.stage_count; s++) {
        const struct chain_stage *at = &chain->stages[s];
        for (uint32_t p = 0; p < at->plan.manifest.piece_count; p++) {
            if (!at->loaded[p] && weight_store_has_memory(at->weights, p)) {
                if (count++ == n) {
                    *stage = s;
                    *piece = p;
                    return count;
                }
            }
        }
    }
    return count;
}

uint32_t stage_chain_missing(const struct stage_chain *chain)
{
    uint32_t stage, piece;
    return walk_missing(chain, UINT32_MAX, &stage, &piece);
}

void stage_chain_missing_at(const struct stage_chain *chain, uint32_t n, uint32_t *stage,
                            uint32_t *piece)
{
    FL_ASSERT(walk_missing(chain, n, stage, piece) == n + 1);
}

fl_status stage_chain_load_all(struct stage_chain *chain)
{
    for (uint32_t s = 0; s < chain->config.stage_count; s++) {
        uint32_t piece;
        for (uint32_t n = 0; weight_store_order(chain->stages[s].weights, n, &piece) == FL_OK;
             n++) {
            if (!chain->stages[s].loaded[piece]) {
                FL_TRY(stage_chain_load(chain, s, piece));
            }
        }
    }
    return FL_OK;
}

/* ---- open and close ---- */

static void place_stages(struct stage_chain *chain)
{
    struct stage_chain_config *config = &chain->config;
    const uint32_t layers = model_manifest(chain->model)->shape.layer_count;
    uint32_t first = 0;
    for (uint32_t i = 0; i < config->stage_count; i++) {
        const uint32_t rest = config->stage_count - i;
        const uint32_t even = (layers - first + rest - 1) / rest;
        struct fl_stage *place = &chain->places[i];
        place->layer_first = first;
        place->layer_count = config->cuts[0] != 0 ? config->cuts[i] : even;
        place->has_embed = i == 0;
        place->has_head = i + 1 == config->stage_count;
        first += place->layer_count;
    }
    FL_ASSERT(first == layers);
}

static fl_status open_stage(struct stage_chain *chain, uint32_t index)
{
    const struct stage_chain_config *config = &chain->config;
    struct chain_stage *at = &chain->stages[index];
    const struct fl_stage *place = &chain->places[index];
    const uint32_t blocks = (config->context + KV_BLOCK_POSITIONS - 1) / KV_BLOCK_POSITIONS;
    at->plan = (struct fl_plan){
        .plan_id = PLAN_ID,
        .stage_index = index,
        .stage_count = config->stage_count,
        .stages = chain->places,
        .chunk_rows = config->chunk_rows,
        .context = config->context,
        .kv_block_count =
            config->kv_block_count != 0 ? config->kv_block_count : blocks * config->sequence_max,
        .sequence_max = config->sequence_max,
        .activations_f32 = config->activations_f32,
        .no_overlap = config->no_overlap,
    };
    const struct model_range range = {
        .layer_first = place->layer_first,
        .layer_count = place->layer_count,
        .has_embed = place->has_embed,
        .has_head = place->has_head,
    };
    FL_TRY(model_stage_manifest(model_manifest(chain->model), &range, &at->plan.manifest));
    at->loaded = calloc(at->plan.manifest.piece_count, sizeof(*at->loaded));
    at->link.waiting = calloc(LINK_MAX, sizeof(*at->link.waiting));
    if (at->loaded == NULL || at->link.waiting == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a chain");
    }
    const struct device_host_config device = {.threads = config->threads, .isa = config->isa};
    FL_TRY(device_host_open(&device, &at->device));
    FL_TRY(weight_store_open(&at->plan.manifest, at->device, &at->weights));
    const struct stage_config stage = {
        .plan = &at->plan,
        .device = at->device,
        .weights = at->weights,
        .embed = {.read = embed_read, .ctx = chain},
        .trace = trace_of(chain, index),
    };
    FL_TRY(stage_open(&stage, &at->stage));
    if (index > 0) {
        chain->stages[index - 1].link.credit = stage_credit_rows(at->stage);
    }
    return FL_OK;
}

static fl_status open_files(struct stage_chain *chain)
{
    const struct gguf *gguf = model_gguf(chain->model);
    for (uint32_t i = 0; i < gguf_file_count(gguf); i++) {
        chain->files[i] = open(gguf_file_path(gguf, i), O_RDONLY | O_CLOEXEC);
        if (chain->files[i] < 0) {
            return FL_FAIL(FL_IO, "open of %s: %s", gguf_file_path(gguf, i), strerror(errno));
        }
    }
    return FL_OK;
}

static fl_status open_parts(struct stage_chain *chain)
{
    FL_TRY(model_open(chain->config.path, &chain->model));
    FL_TRY(open_files(chain));
    place_stages(chain);
    for (uint32_t i = 0; i < chain->config.stage_count; i++) {
        FL_TRY(open_stage(chain, i));
    }
    return FL_OK;
}

fl_status stage_chain_open(const struct stage_chain_config *config, struct stage_chain **out)
{
    struct stage_chain *chain = calloc(1, sizeof(*chain));
    if (chain == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a chain");
    }
    chain->config = *config;
    chain->next_request = 1;
    memset(chain->files, -1, sizeof(chain->files));
    const fl_status status = open_parts(chain);
    if (status != FL_OK) {
        stage_chain_close(chain);
        return status;
    }
    *out = chain;
    return FL_OK;
}

void stage_chain_close(struct stage_chain *chain)
{
    if (chain == NULL) {
        return;
    }
    for (uint32_t i = 0; i < chain->config.stage_count; i++) {
        struct chain_stage *at = &chain->stages[i];
        stage_close(at->stage);
        weight_store_close(at->weights);
        if (at->device != NULL) {
            at->device->ops->close(at->device);
        }
        free(at->link.waiting);
        free(at->loaded);
    }
    for (uint32_t i = 0; i < FL_FILE_COUNT_MAX; i++) {
        if (chain->files[i] >= 0) {
            close(chain->files[i]);
        }
    }
    model_close(chain->model);
    free(chain);
}

const struct fl_manifest *stage_chain_manifest(const struct stage_chain *chain)
{
    return model_manifest(chain->model);
}

struct weight_store *stage_chain_weights(struct stage_chain *chain, uint32_t stage)
{
    return chain->stages[stage].weights;
}

struct stage *stage_chain_stage(struct stage_chain *chain, uint32_t stage)
{
    return chain->stages[stage].stage;
}

const struct fl_plan *stage_chain_plan(const struct stage_chain *chain, uint32_t stage)
{
    return &chain->stages[stage].plan;
}

uint32_t stage_chain_rows_waiting_peak(const struct stage_chain *chain)
{
    return chain->rows_waiting_peak;
}

/* ---- requests ---- */

void stage_chain_prepare(struct stage_chain *chain, struct stage_chain_request *request)
{
    request->request_id = chain->next_request++;
    request->count = 0;
    request->top_count = 0;
    request->finish = FL_FINISH_NONE;
    request->failure = FL_OK;
    chain->requests[request->request_id % STAGE_CHAIN_REQUESTS_MAX] = request;
}

fl_status stage_chain_admit_at(struct stage_chain *chain, uint32_t stage,
                               struct stage_chain_request *request)
{
    const struct fl_stage *place = &chain->places[stage];
    const uint64_t wanted = (uint64_t)request->prompt_count + request->max_tokens;
    const uint32_t most = wanted < chain->config.context ? (uint32_t)wanted : chain->config.context;
    const bool has_tokens = place->has_embed || place->has_head;
    uint32_t *tokens = malloc((request->prompt_count + 1) * sizeof(*tokens));
    if (tokens == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a prompt");
    }
    memcpy(tokens, request->prompt, request->prompt_count * sizeof(*tokens));
    struct fl_admit admit = {
        .plan_id = PLAN_ID,
        .request_id = request->request_id,
        .sequence_id = request->sequence_id,
        .keep = request->keep,
        .position_max = request->position_max != 0 ? request->position_max : most,
        .prompt_count = request->prompt_count,
        .max_tokens = request->max_tokens,
        .token_count = has_tokens ? request->prompt_count : 0,
        .tokens = tokens,
        .stop_count = request->stop_count,
        .sampling = request->sampling,
    };
    memcpy(admit.stop_tokens, request->stop_tokens, sizeof(admit.stop_tokens));
    const fl_status status =
        stage_admit(chain->stages[stage].stage, &admit, run_trace_now(trace_of(chain, stage)));
    free(tokens);
    return status;
}

fl_status stage_chain_admit(struct stage_chain *chain, struct stage_chain_request *request)
{
    stage_chain_prepare(chain, request);
    for (uint32_t i = 0; i < chain->config.stage_count; i++) {
        const fl_status status = stage_chain_admit_at(chain, i, request);
        if (status != FL_OK) {
            stage_chain_end(chain, request, 0);
            return status;
        }
    }
    return FL_OK;
}

void stage_chain_end(struct stage_chain *chain, struct stage_chain_request *request, uint32_t keep)
{
    const struct fl_end end = {.plan_id = PLAN_ID, .request_id = request->request_id, .keep = keep};
    for (uint32_t i = 0; i < chain->config.stage_count; i++) {
        stage_end(chain->stages[i].stage, &end);
    }
    chain->requests[request->request_id % STAGE_CHAIN_REQUESTS_MAX] = NULL;
}

/* ---- routing ---- */

static struct stage_chain_request *find_request(const struct stage_chain *chain, uint64_t id)
{
    struct stage_chain_request *request = chain->requests[id % STAGE_CHAIN_REQUESTS_MAX];
    return request != NULL && request->request_id == id ? request : NULL;
}

static void record_token(struct stage_chain *chain, const struct fl_token *token)
{
    struct stage_chain_request *request = find_request(chain, token->request_id);
    if (request == NULL) {
        return;
    }
    FL_ASSERT(token->index == request->count && request->count < STAGE_CHAIN_TOKENS_MAX);
    FL_ASSERT(token->position == request->prompt_count + token->index);
    request->logprobs[request->count] = token->logprob;
    request->tokens[request->count++] = token->id;
    request->finish = token->finish;
    if (token->index == 0) {
        request->top_count = token->logit_count;
        memcpy(request->top, token->logits, token->logit_count * sizeof(*token->logits));
    }
}

static void record_failure(struct stage_chain *chain, const struct fl_failure *failure)
{
    struct stage_chain_request *request = find_request(chain, failure->request_id);
    if (request != NULL) {
        request->failure = failure->code;
        memcpy(request->failure_text, failure->text, sizeof(request->failure_text));
    }
}

/* Send what the link's credit allows. */
static fl_status send_waiting(struct stage_chain *chain, uint32_t from)
{
    struct link *link = &chain->stages[from].link;
    uint32_t rows_waiting = 0;
    while (link->first != link->end) {
        const struct waiting *next = &link->waiting[link->first % LINK_MAX];
        if (next->header.rows > link->credit) {
            break;
        }
        link->credit -= next->header.rows;
        FL_TRY(stage_take_activations(chain->stages[from + 1].stage, &next->header, next->rows,
                                      run_trace_now(trace_of(chain, from + 1))));
        stage_return(chain->stages[from].stage, next->buffer);
        link->first++;
    }
    for (uint32_t i = link->first; i != link->end; i++) {
        rows_waiting += link->waiting[i % LINK_MAX].header.rows;
    }
    if (rows_waiting > chain->rows_waiting_peak) {
        chain->rows_waiting_peak = rows_waiting;
    }
    return FL_OK;
}

static fl_status route(struct stage_chain *chain, uint32_t from, const struct stage_output *output)
{
    struct link *link = &chain->stages[from].link;
    switch (output->kind) {
    case STAGE_OUTPUT_ACTIVATIONS:
        FL_ASSERT(link->end - link->first < LINK_MAX);
        link->waiting[link->end++ % LINK_MAX] =
            (struct waiting){output->header, output->rows, output->buffer};
        return send_waiting(chain, from);
    case STAGE_OUTPUT_TOKEN:
        record_token(chain, &output->token);
        return from > 0 ? stage_take_token(chain->stages[0].stage, &output->token,
                                           run_trace_now(trace_of(chain, 0)))
                        : FL_OK;
    case STAGE_OUTPUT_CREDIT:
        chain->stages[from - 1].link.credit += output->credit_rows;
        return send_waiting(chain, from - 1);
    case STAGE_OUTPUT_FAILURE: record_failure(chain, &output->failure); return FL_OK;
    }
    return FL_OK;
}

fl_status stage_chain_pump(struct stage_chain *chain)
{
    bool moved = false;
    for (uint32_t i = 0; i < chain->config.stage_count; i++) {
        fl_status status = stage_step(chain->stages[i].stage);
        if (status != FL_OK && status != FL_AGAIN) {
            return status;
        }
        moved = moved || status == FL_OK;
        struct stage_output output;
        while ((status = stage_poll(chain->stages[i].stage, &output)) == FL_OK) {
            moved = true;
            FL_TRY(route(chain, i, &output));
        }
        FL_ASSERT(status == FL_AGAIN);
    }
    return moved ? FL_OK : FL_AGAIN;
}

fl_status stage_chain_settle(struct stage_chain *chain)
{
    /* An embedding that comes late moves nothing twice in a row. */
    int idle = 0;
    while (idle < 4) {
        const fl_status status = stage_chain_pump(chain);
        if (status != FL_OK && status != FL_AGAIN) {
            return status;
        }
        idle = status == FL_OK ? 0 : idle + 1;
    }
    return FL_OK;
}

fl_status stage_chain_answer(struct stage_chain *chain, struct stage_chain_request *request)
{
    FL_TRY(stage_chain_load_all(chain));
    FL_TRY(stage_chain_admit(chain, request));
    FL_TRY(stage_chain_settle(chain));
    stage_chain_end(chain, request, 0);
    return FL_OK;
}
