#include "node/courier_trace.h"

#include <string.h>

static void put(const struct courier *courier, const struct fl_span *span)
{
    if (courier->config.spans != NULL) {
        fl_span_ring_put(courier->config.spans->wire, span);
    }
}

/* Recording ---------------------------------------------------------------------------------- */

void courier_trace_plan(struct courier *courier, uint64_t plan_id, uint64_t now_ns)
{
    const struct fl_span span = {
        .start_ns = now_ns,
        .end_ns = now_ns,
        .plan_id = plan_id,
        .piece = FL_SPAN_NO_PIECE,
        .phase = FL_PHASE_RECEIVE,
    };
    put(courier, &span);
}

void courier_trace_admit(struct courier *courier, const struct fl_admit *admit, uint64_t now_ns)
{
    courier->prompts[admit->request_id % COURIER_PROMPT_MAX] = (struct courier_prompt){
        .plan_id = admit->plan_id,
        .request_id = admit->request_id,
        .prompt_count = admit->prompt_count,
    };
    const struct fl_span span = {
        .start_ns = now_ns,
        .end_ns = now_ns,
        .plan_id = admit->plan_id,
        .request_id = admit->request_id,
        .bytes = admit->token_count * sizeof(admit->tokens[0]),
        .piece = FL_SPAN_NO_PIECE,
        .phase = FL_PHASE_RECEIVE,
    };
    put(courier, &span);
}

/* Rows that come before their ADMIT are a prompt's. */
static bool is_prompt(const struct courier *courier, const struct fl_activation_header *header)
{
    const struct courier_prompt *prompt =
        &courier->prompts[header->request_id % COURIER_PROMPT_MAX];
    return prompt->request_id != header->request_id || prompt->plan_id != header->plan_id ||
           header->position < prompt->prompt_count;
}

static struct fl_span span_of_rows(const struct fl_activation_header *header, uint64_t size)
{
    return (struct fl_span){
        .plan_id = header->plan_id,
        .request_id = header->request_id,
        .bytes = size,
        .piece = FL_SPAN_NO_PIECE,
        .position = header->position,
        .rows = header->rows,
    };
}

void courier_trace_rows(struct courier *courier, const struct fl_activation_header *header,
                        uint64_t size, uint64_t now_ns)
{
    if (is_prompt(courier, header)) {
        struct fl_span span = span_of_rows(header, size);
        span.start_ns = now_ns;
        span.end_ns = now_ns;
        span.phase = FL_PHASE_RECEIVE;
        put(courier, &span);
    }
}

void courier_trace_linked(struct courier *courier, struct courier_plan *entry)
{
    const uint64_t now = courier_now(courier);
    const struct fl_span span = {
        .start_ns = entry->link_ns,
        .end_ns = now,
        .busy_ns = now - entry->link_ns,
        .plan_id = entry->plan->plan.plan_id,
        .piece = FL_SPAN_NO_PIECE,
        .phase = FL_PHASE_LINK,
    };
    entry->linked_ns = now;
    put(courier, &span);
}

void courier_trace_rows_sent(struct courier *courier, const struct courier_plan *entry,
                             const struct compute_activations *activations, uint64_t size)
{
    if (!is_prompt(courier, &activations->header)) {
        return;
    }
    struct fl_span span = span_of_rows(&activations->header, size);
    span.start_ns = activations->posted_ns;
    span.end_ns = courier_now(courier);
    span.busy_ns = span.end_ns - span.start_ns;
    span.phase = FL_PHASE_SEND;
    if (entry->linked_ns > span.start_ns) {
        span.cause = FL_CAUSE_LINK;
        span.cause_ns = entry->linked_ns;
    }
    if (entry->fed_ns > span.start_ns && entry->fed_ns >= span.cause_ns) {
        span.cause = FL_CAUSE_CREDIT;
        span.cause_ns = entry->fed_ns;
    }
    put(courier, &span);
}

void courier_trace_token_sent(struct courier *courier, const struct compute_sampled *sampled)
{
    const struct fl_token *token = &sampled->token;
    if (token->index != 0) {
        return;
    }
    const uint64_t now = courier_now(courier);
    const struct fl_span span = {
        .start_ns = sampled->posted_ns,
        .end_ns = now,
        .busy_ns = now - sampled->posted_ns,
        .plan_id = token->plan_id,
        .request_id = token->request_id,
        .piece = FL_SPAN_NO_PIECE,
        .position = token->position,
        .rows = 1,
        .phase = FL_PHASE_SEND,
    };
    put(courier, &span);
}

/* Answering ---------------------------------------------------------------------------------- */

void courier_trace_ask(struct courier *courier, const struct fl_trace *trace)
{
    struct courier_answers *answers = &courier->answers;
    if (answers->count == COURIER_TRACE_MAX) {
        /* The oldest goes, but for the one that is being sent. */
        memmove(&answers->asked[1], &answers->asked[2],
                (COURIER_TRACE_MAX - 2) * sizeof(answers->asked[0]));
        answers->count--;
    }
    answers->asked[answers->count++] = *trace;
}

void courier_trace_reset(struct courier *courier)
{
    courier->answers = (struct courier_answers){.count = 0};
    memset(courier->prompts, 0, sizeof(courier->prompts));
}

static struct fl_start_record start_of(const struct courier *courier, const struct node_plan *plan)
{
    /* Each for itself: the loader may be writing them. */
    return (struct fl_start_record){
        .exec_ns = courier->config.exec_ns,
        .ready_ns = courier->ready_ns,
        .shard_bytes = plan->bytes_total,
        .residency_known = atomic_load_explicit(&plan->resident_unknown, memory_order_relaxed) == 0,
        .page_cache_before = atomic_load_explicit(&plan->resident_before, memory_order_relaxed),
        .page_cache_after = atomic_load_explicit(&plan->resident_after, memory_order_relaxed),
        .medium_bytes = atomic_load_explicit(&plan->medium_bytes, memory_order_relaxed),
        .mhz_before = atomic_load_explicit(&plan->mhz_before, memory_order_relaxed),
        .mhz_after = atomic_load_explicit(&plan->mhz_after, memory_order_relaxed),
    };
}

/* Take the front question's spans out of the rings. */
static void begin_answer(struct courier *courier)
{
    struct courier_answers *answers = &courier->answers;
    const struct fl_trace *trace = &answers->asked[0];
    const struct courier_plan *entry = courier_find_plan(courier, trace->plan_id);
    answers->begun = true;
    answers->sent = 0;
    answers->found = 0;
    answers->lost = 0;
    answers->start = (struct fl_start_record){.exec_ns = 0};
    if (entry != NULL) {
        answers->start = start_of(courier, entry->plan);
    }
    if (entry != NULL && courier->config.spans != NULL) {
        answers->found = node_spans_collect(courier->config.spans, trace->plan_id,
                                            trace->request_id, &answers->lost);
    }
    if (answers->found == 0 && answers->lost == 0) {
        answers->lost = 1; /* it was here, or nobody would ask */
    }
}

/* One message of the front answer; FL_AGAIN when the link is full. */
static fl_status say_some(struct courier *courier)
{
    struct courier_answers *answers = &courier->answers;
    const struct fl_trace *trace = &answers->asked[0];
    const uint32_t left = answers->found - answers->sent;
    const uint32_t count = left < FL_SPANS_MAX ? left : FL_SPANS_MAX;
    struct fl_cluster_message message = {
        .kind = FL_MESSAGE_SPANS,
        .as.spans =
            {
                .plan_id = trace->plan_id,
                .request_id = trace->request_id,
                .last = count == left,
                .lost = answers->lost,
                .start = answers->start,
                .span_count = count,
            },
    };
    if (count > 0) {
        message.as.spans.spans = courier->config.spans->found + answers->sent;
    }
    const fl_status status = courier_say_coordinator(courier, &message);
    if (status == FL_OK) {
        answers->sent += count;
        answers->begun = !message.as.spans.last;
    }
    return status;
}

bool courier_trace_answer(struct courier *courier)
{
    struct courier_answers *answers = &courier->answers;
    if (answers->count == 0) {
        return false;
    }
    if (!answers->begun) {
        begin_answer(courier);
    }
    const fl_status status = say_some(courier);
    if (status == FL_AGAIN) {
        return false; /* the link is full: with the next poll */
    }
    answers->begun = answers->begun && status == FL_OK; /* else nobody will have it */
    if (!answers->begun) {
        answers->count--;
        memmove(&answers->asked[0], &answers->asked[1], answers->count * sizeof(answers->asked[0]));
    }
    return answers->count > 0;
}
