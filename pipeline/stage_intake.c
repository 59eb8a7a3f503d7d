#include "pipeline/stage_intake.h"

#include <inttypes.h>

#include "pipeline/stage_request.h"

void stage_intake_claim(struct stage *stage, struct stage_request *request)
{
    for (uint32_t row = inbox_first(stage->inbox); row != INBOX_NONE;
         row = inbox_row(stage->inbox, row)->next) {
        const struct inbox_row *waiting = inbox_row(stage->inbox, row);
        if (waiting->request_id != request->id) {
            continue;
        }
        if (waiting->position != request->next_in || waiting->position >= request->position_max) {
            stage_request_fail(request,
                               FL_FAIL(FL_PROTOCOL,
                                       "request %" PRIu64 " got a row for position %" PRIu32
                                       "; position %" PRIu32 " is next",
                                       request->id, waiting->position, request->next_in));
            return;
        }
        request->next_in++;
    }
}

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
static fl_status check_place(const struct stage_request *request,
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
    const uint32_t index = stage_request_find(stage, header->request_id);
    struct stage_request *request = index == STAGE_REQUEST_NONE ? NULL : &stage->requests[index];
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
    const uint32_t index = stage_request_find(stage, token->request_id);
    if (token->plan_id != stage->plan->plan_id || index == STAGE_REQUEST_NONE ||
        stage->requests[index].failed || token->finish != FL_FINISH_NONE) {
        return FL_OK; /* late, or the last one: nothing follows it */
    }
    struct stage_request *request = &stage->requests[index];
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
