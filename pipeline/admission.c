#include "pipeline/admission.h"

#include <inttypes.h>

#include "pipeline/sampler.h"
#include "pipeline/stage_plan.h"

static fl_status check_tokens(const struct fl_plan *plan, const struct fl_admit *admit)
{
    const uint32_t vocabulary = plan->manifest.shape.vocabulary;
    const bool has_tokens = stage_plan_is_first(plan) || stage_plan_is_last(plan);
    const uint32_t wanted = has_tokens ? admit->prompt_count : 0;
    if (admit->token_count != wanted) {
        return FL_FAIL(FL_INVALID,
                       "request has %" PRIu32 " tokens for this stage; it needs %" PRIu32,
                       admit->token_count, wanted);
    }
    for (uint32_t i = 0; i < admit->token_count; i++) {
        if (admit->tokens[i] >= vocabulary) {
            return FL_FAIL(FL_INVALID,
                           "token %" PRIu32 " is %" PRIu32 "; the vocabulary has %" PRIu32, i,
                           admit->tokens[i], vocabulary);
        }
    }
    return FL_OK;
}

fl_status admission_check(const struct fl_plan *plan, const struct fl_admit *admit)
{
    if (admit->plan_id != plan->plan_id) {
        return FL_FAIL(FL_INVALID, "request is for plan %" PRIu64 "; this is plan %" PRIu64,
                       admit->plan_id, plan->plan_id);
    }
    if (admit->prompt_count == 0 || admit->keep >= admit->prompt_count ||
        admit->prompt_count > admit->position_max) {
        return FL_FAIL(FL_INVALID,
                       "request of %" PRIu32 " prompt tokens keeps %" PRIu32
                       " and may fill %" PRIu32
                       " positions; it must keep less than its prompt and fill no less",
                       admit->prompt_count, admit->keep, admit->position_max);
    }
    if (admit->max_tokens == 0 || admit->stop_count > FL_STOP_TOKEN_MAX) {
        return FL_FAIL(FL_INVALID,
                       "request has max tokens %" PRIu32 " and %" PRIu32
                       " stop tokens; it must be 1 or more and at most %d",
                       admit->max_tokens, admit->stop_count, FL_STOP_TOKEN_MAX);
    }
    FL_TRY(sampler_check(&admit->sampling));
    return check_tokens(plan, admit);
}
