/* stage_plan.h - what a plan means for one of its stages: checks and sizes.
 *
 * The planner's sums and the stage's allocations come from the same functions,
 * so that what was planned is what is taken.
 *
 * Thread:  any; plans are constant.
 */
#ifndef PIPELINE_STAGE_PLAN_H
#define PIPELINE_STAGE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "pipeline/forward.h"
#include "pipeline/kv_cache.h"
#include "pipeline/outbox.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

/* FL_INVALID with a sentence: a count out of range, or pieces that are not those of its layers.
 * The rest was checked when the plan came (fl_manifest_check). */
FL_MUST_CHECK fl_status stage_plan_check(const struct fl_plan *plan);

bool stage_plan_is_first(const struct fl_plan *plan);
bool stage_plan_is_last(const struct fl_plan *plan);

/* Rows of one run: every session's decode row and a chunk of prompts, so that neither starves. */
uint32_t stage_plan_row_max(const struct fl_plan *plan);

/* Rows the previous stage may have under way; 0 for the first stage. */
uint32_t stage_plan_credit_rows(const struct fl_plan *plan);

/* How the stage's parts are to be opened; `device` may be NULL where only sizes are asked for. */
struct kv_cache_config stage_plan_kv_config(const struct fl_plan *plan, struct device *device);
struct forward_config stage_plan_forward_config(const struct fl_plan *plan, struct device *device);
struct outbox_config stage_plan_outbox_config(const struct fl_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
