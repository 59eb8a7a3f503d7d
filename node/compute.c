#include "node/compute.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "node/embedding_reader.h"
#include "node/node.h"
#include "pipeline/outbox.h"
#include "pipeline/stage.h"
#include "pipeline/stage_plan.h"
#include "pipeline/weight_store.h"
#include "proto/base/log.h"

enum { RETURNS_SIZE = NODE_PLAN_MAX * COMPUTE_OUTPUT_MAX * 32 };

struct compute_plan {
    struct node_plan *plan; /* NULL: free */
    struct stage *stage;    /* NULL: it could not be opened */
    struct weight_store *weights;
    struct embedding_reader *embed;
    struct mailbox *rows;
    struct loader_job job;
    bool submitted; /* to the loader */
    bool broken;    /* steps no more */
    bool closing;
    uint64_t memory;      /* of the budget */
    uint32_t outstanding; /* ACTIVATIONS not yet returned */
    uint32_t credit_owed; /* rows that came free, and were not yet told */
};

struct compute {
    struct compute_config config;
    struct mailbox *inbox;
    struct mailbox *returns;
    struct mailbox *outbox;
    bool posted;              /* since the last events.posted() */
    _Atomic int needs_return; /* it sleeps until a buffer comes back */
    uint64_t memory_used;
    struct run_trace trace;
    struct compute_plan plans[NODE_PLAN_MAX];
};

fl_status compute_open(const struct compute_config *config, struct compute **out)
{
    struct compute *compute = calloc(1, sizeof(*compute));
    if (compute == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "compute: no memory");
    }
    compute->config = *config;
    compute->trace = (struct run_trace){.spans = config->spans, .clock = config->clock};
    fl_status status = mailbox_open(COMPUTE_INBOX_SIZE, &compute->inbox);
    if (status == FL_OK) {
        status = mailbox_open(RETURNS_SIZE, &compute->returns);
    }
    if (status == FL_OK) {
        status = mailbox_open(COMPUTE_OUTBOX_SIZE, &compute->outbox);
    }
    if (status != FL_OK) {
        compute_close(compute);
        return status;
    }
    *out = compute;
    return FL_OK;
}

struct mailbox *compute_inbox(struct compute *compute)
{
    return compute->inbox;
}

struct mailbox *compute_returns(struct compute *compute)
{
    return compute->returns;
}

struct mailbox *compute_outbox(struct compute *compute)
{
    return compute->outbox;
}

bool compute_needs_return(struct compute *compute)
{
    /* An exchange in both threads, so that they have an order: either this one sees that compute
     * waits, or compute sees the record that was posted before.  Pairs with may_sleep(). */
    return atomic_exchange_explicit(&compute->needs_return, 0, memory_order_acq_rel) != 0;
}

static struct run_trace *trace_of(struct compute *compute)
{
    return compute->config.spans != NULL ? &compute->trace : NULL;
}

/* A coordinator that was restarted may use an id again while its former plan is being closed. */
static struct compute_plan *find(struct compute *compute, uint64_t plan_id)
{
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        struct compute_plan *entry = &compute->plans[i];
        if (entry->plan != NULL && !entry->closing && entry->plan->plan.plan_id == plan_id) {
            return entry;
        }
    }
    return NULL;
}

static struct compute_plan *entry_of(struct compute *compute, const struct node_plan *plan)
{
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        if (compute->plans[i].plan == plan) {
            return &compute->plans[i];
        }
    }
    FL_ASSERT(false && "the wire thread names plans that are open");
    return NULL;
}

/* Whatever record comes next, it fits. */
static bool outbox_has_room(struct compute *compute)
{
    const size_t sampled =
        sizeof(struct compute_sampled) + 2 * (size_t)FL_TOP_MAX * sizeof(struct fl_top);
    const size_t largest =
        sampled > sizeof(struct fl_failure) ? sampled : sizeof(struct fl_failure);
    return mailbox_reserve(compute->outbox, COMPUTE_FAILURE, largest) != NULL;
}

/* Post a record that has a fixed size; false when the outbox is full. */
static bool post(struct compute *compute, enum compute_result kind, const void *record, size_t size)
{
    void *room = mailbox_reserve(compute->outbox, (uint32_t)kind, size);
    if (room == NULL) {
        return false;
    }
    memcpy(room, record, size);
    mailbox_post(compute->outbox);
    compute->posted = true;
    return true;
}

/* Plans -------------------------------------------------------------------------------------- */

static void plan_release(struct compute *compute, struct compute_plan *entry)
{
    stage_close(entry->stage);
    weight_store_close(entry->weights);
    embedding_reader_close(entry->embed);
    mailbox_close(entry->rows);
    compute->memory_used -= entry->memory;
    *entry = (struct compute_plan){.plan = NULL};
}

void compute_close(struct compute *compute)
{
    if (compute == NULL) {
        return;
    }
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        if (compute->plans[i].plan != NULL) {
            plan_release(compute, &compute->plans[i]);
        }
    }
    mailbox_close(compute->inbox);
    mailbox_close(compute->returns);
    mailbox_close(compute->outbox);
    free(compute);
}

/* A plan that cannot go on here; the wire thread tells the coordinator. */
static void plan_break(struct compute *compute, struct compute_plan *entry, fl_status status,
                       const char *what)
{
    char text[FL_ERROR_TEXT_MAX];
    snprintf(text, sizeof(text), "node %s: %s%.400s", node_plan_stage(entry->plan)->node, what,
             fl_last_error());
    entry->broken = true;
    node_plan_fail(entry->plan, status, text);
    compute->posted = true;
}

static fl_status memory_check(const struct compute *compute, const struct fl_plan *plan,
                              uint64_t *out_memory)
{
    const double mib = 1024.0 * 1024.0;
    const uint64_t weights = weight_store_memory(&plan->manifest);
    const uint64_t kv = stage_kv_memory(plan);
    const uint64_t buffers = stage_buffer_memory(plan);
    const uint64_t left = compute->config.memory_budget > compute->memory_used
                              ? compute->config.memory_budget - compute->memory_used
                              : 0;
    if (weights > left || kv > left - weights || buffers > left - weights - kv) {
        return FL_FAIL(FL_NO_MEMORY,
                       "model %s wants %.1f MiB of weights, %.1f MiB of KV cache and %.1f MiB of "
                       "buffers, but %.1f MiB of the memory budget of %.1f MiB are free",
                       plan->manifest.name, (double)weights / mib, (double)kv / mib,
                       (double)buffers / mib, (double)left / mib,
                       (double)compute->config.memory_budget / mib);
    }
    *out_memory = weights + kv + buffers;
    return FL_OK;
}

/* Room for all the rows that the previous stage may send before it gets credit again. */
static fl_status rows_open(struct compute_plan *entry)
{
    const struct fl_plan *plan = &entry->plan->plan;
    const size_t width = plan->manifest.shape.width * sizeof(float);
    const size_t overhead = sizeof(struct compute_rows) + MAILBOX_OVERHEAD;
    const size_t credit = stage_credit_rows(entry->stage);
    /* One run's rows may be skipped where the ring ends, and a record fills at most half of it. */
    const size_t run = plan->chunk_rows * width + overhead;
    const size_t wanted = credit * (width + overhead) + run;
    return mailbox_open(wanted > 2 * run + MAILBOX_OVERHEAD ? wanted : 2 * (run + MAILBOX_OVERHEAD),
                        &entry->rows);
}

static fl_status plan_open(struct compute *compute, struct compute_plan *entry)
{
    const struct fl_plan *plan = &entry->plan->plan;
    const uint64_t begun_ns = run_trace_now(trace_of(compute));
    uint64_t memory = 0;
    FL_TRY(memory_check(compute, plan, &memory));
    compute->memory_used += memory;
    entry->memory = memory;
    FL_TRY(weight_store_open(&plan->manifest, compute->config.device, &entry->weights));
    struct stage_config config = {
        .plan = plan,
        .device = compute->config.device,
        .weights = entry->weights,
        .trace = trace_of(compute),
        .begun_ns = begun_ns,
    };
    if (node_plan_stage(entry->plan)->has_embed) {
        const struct embedding_reader_config embed_config = {
            .manifest = &plan->manifest,
            .rows_max = stage_plan_row_max(plan),
            .fetches = compute->config.fetches,
            .loader_wake = compute->config.loader_wake,
            .compute_wake = compute->config.compute_wake,
        };
        FL_TRY(embedding_reader_open(&embed_config, &entry->embed));
        config.embed =
            (struct embedding_source){.read = embedding_reader_read, .ctx = entry->embed};
    }
    FL_TRY(stage_open(&config, &entry->stage));
    if (plan->stage_index > 0) {
        FL_TRY(rows_open(entry));
    }
    entry->job =
        (struct loader_job){.plan = entry->plan, .weights = entry->weights, .embed = entry->embed};
    loader_submit(compute->config.loader, &entry->job);
    entry->submitted = true;
    const struct compute_opened opened = {
        .plan = entry->plan, .rows = entry->rows, .credit_rows = stage_credit_rows(entry->stage)};
    FL_ASSERT(post(compute, COMPUTE_OPENED, &opened, sizeof(opened)));
    return FL_OK;
}

static void take_plan(struct compute *compute, struct node_plan *plan)
{
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        struct compute_plan *entry = &compute->plans[i];
        if (entry->plan == NULL) {
            entry->plan = plan;
            const fl_status status = plan_open(compute, entry);
            if (status != FL_OK) {
                plan_break(compute, entry, status, "");
            }
            return;
        }
    }
    FL_ASSERT(false && "the wire thread counts plans");
}

static void take_unplan(struct compute *compute, struct node_plan *plan)
{
    struct compute_plan *entry = entry_of(compute, plan);
    entry->closing = true;
    if (entry->submitted) {
        loader_abandon(compute->config.loader, &entry->job);
    }
}

/* True when the plan is gone. */
static bool try_close(struct compute *compute, struct compute_plan *entry)
{
    if (entry->outstanding > 0 || (entry->submitted && !loader_released(&entry->job)) ||
        !outbox_has_room(compute)) {
        return false;
    }
    /* Close first: with CLOSED the wire thread frees the plan that the stage borrows. */
    const struct compute_plan_order closed = {.plan = entry->plan};
    plan_release(compute, entry);
    FL_ASSERT(post(compute, COMPUTE_CLOSED, &closed, sizeof(closed)));
    return true;
}

/* Orders ------------------------------------------------------------------------------------- */

static void request_fail(struct compute *compute, const struct compute_plan *entry,
                         uint64_t request_id, fl_status status)
{
    struct fl_failure failure = {
        .plan_id = entry->plan->plan.plan_id, .request_id = request_id, .code = (uint32_t)status};
    snprintf(failure.text, sizeof(failure.text), "node %s: %.400s",
             node_plan_stage(entry->plan)->node, fl_last_error());
    if (!post(compute, COMPUTE_FAILURE, &failure, sizeof(failure))) {
        fl_log(FL_LOG_WARN, "request %" PRIu64 " failed and the outbox is full", request_id);
    }
}

static void take_order(struct compute *compute, uint32_t kind, void *record)
{
    struct compute_plan *entry;
    switch ((enum compute_order)kind) {
    case COMPUTE_PLAN: take_plan(compute, ((struct compute_plan_order *)record)->plan); return;
    case COMPUTE_UNPLAN: take_unplan(compute, ((struct compute_plan_order *)record)->plan); return;
    case COMPUTE_ADMIT: {
        struct compute_admit *order = record;
        struct fl_admit *admit = &order->admit;
        admit->tokens = (uint32_t *)(order + 1);
        entry = find(compute, admit->plan_id);
        if (entry != NULL && !entry->broken) {
            const fl_status status = stage_admit(entry->stage, admit, order->arrived_ns);
            if (status != FL_OK) {
                request_fail(compute, entry, admit->request_id, status);
            }
        }
        return;
    }
    case COMPUTE_END:
        entry = find(compute, ((struct fl_end *)record)->plan_id);
        if (entry != NULL && !entry->broken) {
            stage_end(entry->stage, record);
        }
        return;
    case COMPUTE_DROP:
        entry = find(compute, ((struct fl_drop *)record)->plan_id);
        if (entry != NULL && !entry->broken) {
            stage_drop(entry->stage, record);
        }
        return;
    case COMPUTE_TOKEN: {
        const struct compute_token *order = record;
        entry = find(compute, order->token.plan_id);
        if (entry != NULL && !entry->broken &&
            stage_take_token(entry->stage, &order->token, order->arrived_ns) != FL_OK) {
            request_fail(compute, entry, order->token.request_id, FL_PROTOCOL);
        }
        return;
    }
    case COMPUTE_RETURN:
    case COMPUTE_ROWS: break;
    }
    FL_ASSERT(false && "an order in the wrong mailbox");
}

static bool take_orders(struct compute *compute)
{
    bool busy = false;
    uint32_t kind;
    size_t size;
    for (void *record; outbox_has_room(compute) &&
                       (record = mailbox_front(compute->inbox, &kind, &size)) != NULL;) {
        take_order(compute, kind, record);
        mailbox_pop(compute->inbox);
        busy = true;
    }
    return busy;
}

static bool take_returns(struct compute *compute)
{
    bool busy = false;
    uint32_t kind;
    size_t size;
    for (const struct compute_return *record;
         (record = mailbox_front(compute->returns, &kind, &size)) != NULL;) {
        struct compute_plan *entry = entry_of(compute, record->plan);
        FL_ASSERT(entry->outstanding > 0);
        stage_return(entry->stage, record->buffer);
        entry->outstanding--;
        mailbox_pop(compute->returns);
        busy = true;
    }
    return busy;
}

static bool take_rows(struct compute *compute, struct compute_plan *entry)
{
    bool busy = false;
    uint32_t kind;
    size_t size;
    for (const struct compute_rows *order;
         entry->rows != NULL && !entry->broken &&
         (order = mailbox_front(entry->rows, &kind, &size)) != NULL;) {
        const fl_status status = stage_take_activations(
            entry->stage, &order->header, (const float *)(order + 1), order->arrived_ns);
        mailbox_pop(entry->rows);
        busy = true;
        if (status != FL_OK) {
            const struct compute_plan_order intruder = {.plan = entry->plan};
            (void)post(compute, COMPUTE_INTRUDER, &intruder, sizeof(intruder));
            plan_break(compute, entry, status, "activations: ");
        }
    }
    return busy;
}

/* Results ------------------------------------------------------------------------------------ */

static bool post_token(struct compute *compute, struct compute_plan *entry,
                       const struct fl_token *token)
{
    const size_t logprobs = token->logprob_count * sizeof(token->logprobs[0]);
    const size_t logits = token->logit_count * sizeof(token->logits[0]);
    struct compute_sampled *sampled =
        mailbox_reserve(compute->outbox, COMPUTE_SAMPLED, sizeof(*sampled) + logprobs + logits);
    if (sampled == NULL) {
        return false;
    }
    *sampled = (struct compute_sampled){
        .plan = entry->plan, .token = *token, .posted_ns = run_trace_now(trace_of(compute))};
    unsigned char *lists = (unsigned char *)(sampled + 1);
    if (logprobs > 0) {
        memcpy(lists, token->logprobs, logprobs);
    }
    if (logits > 0) {
        memcpy(lists + logprobs, token->logits, logits);
    }
    mailbox_post(compute->outbox);
    compute->posted = true;
    return true;
}

/* Credit is told by half windows: a decoded token would otherwise cost a message back for its one
 * row.  The other half is never less than the largest message, so the sender can always go on. */
static bool post_credit(struct compute *compute, struct compute_plan *entry, uint32_t rows)
{
    const struct compute_credit credit = {.plan = entry->plan, .rows = entry->credit_owed + rows};
    if (credit.rows < stage_credit_rows(entry->stage) / 2) {
        entry->credit_owed = credit.rows;
        return true;
    }
    entry->credit_owed = 0;
    return post(compute, COMPUTE_CREDIT, &credit, sizeof(credit));
}

static bool post_output(struct compute *compute, struct compute_plan *entry,
                        const struct stage_output *output)
{
    switch (output->kind) {
    case STAGE_OUTPUT_ACTIVATIONS: {
        const struct compute_activations activations = {.plan = entry->plan,
                                                        .header = output->header,
                                                        .rows = output->rows,
                                                        .buffer = output->buffer,
                                                        .posted_ns =
                                                            run_trace_now(trace_of(compute))};
        entry->outstanding++;
        return post(compute, COMPUTE_ACTIVATIONS, &activations, sizeof(activations));
    }
    case STAGE_OUTPUT_TOKEN: return post_token(compute, entry, &output->token);
    case STAGE_OUTPUT_CREDIT: return post_credit(compute, entry, output->credit_rows);
    case STAGE_OUTPUT_FAILURE:
        return post(compute, COMPUTE_FAILURE, &output->failure, sizeof(output->failure));
    }
    return false;
}

static bool post_outputs(struct compute *compute, struct compute_plan *entry)
{
    bool busy = false;
    struct stage_output output;
    while (entry->outstanding < COMPUTE_OUTPUT_MAX && outbox_has_room(compute) &&
           stage_poll(entry->stage, &output) == FL_OK) {
        FL_ASSERT(post_output(compute, entry, &output));
        busy = true;
    }
    return busy;
}

static bool plan_step(struct compute *compute, struct compute_plan *entry)
{
    if (entry->closing) {
        return try_close(compute, entry);
    }
    bool busy = take_rows(compute, entry);
    if (entry->broken) {
        return busy;
    }
    const fl_status status = stage_step(entry->stage);
    if (status == FL_OK) {
        busy = true;
    } else if (status != FL_AGAIN) {
        plan_break(compute, entry, status, "");
    }
    return post_outputs(compute, entry) || busy;
}

static void tell_posted(struct compute *compute)
{
    if (compute->posted) {
        compute->posted = false;
        compute->config.events.posted(compute->config.events.ctx);
    }
}

/* Nothing to do: false when a buffer came back in the last moment that something waits for. */
static bool may_sleep(struct compute *compute)
{
    int needs = 0;
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        const struct compute_plan *entry = &compute->plans[i];
        needs |= entry->plan != NULL && entry->outstanding > 0 &&
                 (entry->closing || entry->outstanding >= OUTBOX_SLOTS);
    }
    /* Pairs with compute_needs_return(). */
    (void)atomic_exchange_explicit(&compute->needs_return, needs, memory_order_acq_rel);
    return needs == 0 || mailbox_used(compute->returns) == 0;
}

bool compute_step(struct compute *compute)
{
    bool busy = take_returns(compute);
    busy = take_orders(compute) || busy;
    tell_posted(compute);
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        if (compute->plans[i].plan != NULL) {
            busy = plan_step(compute, &compute->plans[i]) || busy;
            tell_posted(compute);
        }
    }
    return busy || !may_sleep(compute);
}

void compute_census(const struct compute *compute, struct node_census *out)
{
    out->memory += compute->memory_used;
    out->mail_size += mailbox_used(compute->inbox) + mailbox_used(compute->returns) +
                      mailbox_used(compute->outbox);
    for (uint32_t i = 0; i < NODE_PLAN_MAX; i++) {
        const struct compute_plan *entry = &compute->plans[i];
        if (entry->plan == NULL) {
            continue;
        }
        const struct fl_plan *plan = &entry->plan->plan;
        out->mail_size += entry->rows != NULL ? mailbox_used(entry->rows) : 0;
        out->buffer_count += entry->outstanding;
        out->plans[out->plan_count++] = (struct node_plan_census){
            .plan_id = plan->plan_id,
            .stage_index = plan->stage_index,
            .stage_count = plan->stage_count,
            .kv_blocks = plan->kv_block_count,
            .kv_blocks_free =
                entry->stage != NULL ? stage_kv_blocks_free(entry->stage) : plan->kv_block_count,
            .credit_rows = entry->rows != NULL ? stage_credit_rows(entry->stage) : 0,
            .credit_owed = entry->credit_owed};
    }
}
