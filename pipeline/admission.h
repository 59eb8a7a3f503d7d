/* admission.h - what the coordinator says of a request, checked by a stage.
 *
 * Thread:  any.
 * Memory:  none.
 */
#ifndef PIPELINE_ADMISSION_H
#define PIPELINE_ADMISSION_H

#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

/* FL_INVALID when it is of another plan, contradicts itself, or lacks the tokens that a first or
 * last stage needs. */
FL_MUST_CHECK fl_status admission_check(const struct fl_plan *plan, const struct fl_admit *admit);

#ifdef __cplusplus
}
#endif
#endif
