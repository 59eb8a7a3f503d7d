#include "pipeline/stage_request.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "pipeline/admission.h"
#include "pipeline/stage_intake.h"

uint32_t stage_request_find(const struct stage *stage, uint64_t id)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        if (stage->requests[i].used && stage->requests[i].id == id) {
            return i;
        }
    }
    return STAGE_REQUEST_NONE;
}

static uint32_t find_unused(const struct stage *stage)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        if (!stage->requests[i].used) {
            return i;
        }
    }
    return STAGE_REQUEST_NONE;
}

/* The request that uses the sequence, or STAGE_REQUEST_NONE. */
static uint32_t find_user(const struct stage *stage, uint32_t sequence)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        if (stage->requests[i].used && stage->requests[i].sequence == sequence) {
            return i;
        }
    }
    return STAGE_REQUEST_NONE;
}

void stage_request_fail(struct stage_request *request, fl_status status)
{
    if (!request->failed) {
        request->failed = true;
        request->failure_unsaid = true;
        request->failure_code = (uint32_t)status;
        snprintf(request->failure, sizeof(request->failure), "%s", fl_last_error());
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
    if (held != KV_CACHE_NONE && find_user(stage, held) != STAGE_REQUEST_NONE) {
        return FL_FAIL(FL_INVALID, "sequence %" PRIu64 " is in use by request %" PRIu64,
                       admit->sequence_id, stage->requests[find_user(stage, held)].id);
    }
    const uint32_t index = find_unused(stage);
    if (index == STAGE_REQUEST_NONE) {
        return FL_FAIL(FL_BUSY, "all %" PRIu32 " sequences are in use", stage->plan->sequence_max);
    }
    uint32_t sequence;
    FL_TRY(kv_cache_reserve(stage->kv, admit->sequence_id, admit->keep, admit->position_max,
                            &sequence));
    struct stage_request *request = &stage->requests[index];
    *request = (struct stage_request){
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
        stage_intake_claim(stage, request);
    }
    return FL_OK;
}

void stage_request_forget(struct stage *stage, uint32_t index)
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
    stage_request_forget(stage, index);
    kv_cache_trim(stage->kv, stage->requests[index].sequence, keep);
    stage->requests[index].used = false;
}

void stage_end(struct stage *stage, const struct fl_end *end)
{
    const uint32_t index = stage_request_find(stage, end->request_id);
    if (end->plan_id == stage->plan->plan_id && index != STAGE_REQUEST_NONE) {
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
    if (index != STAGE_REQUEST_NONE) {
        end_request(stage, index, 0);
    } else {
        kv_cache_trim(stage->kv, sequence, 0);
    }
}
