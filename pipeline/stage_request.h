/* stage_request.h - the requests of a stage, from ADMIT to END.
 *
 * stage_admit(), stage_end() and stage_drop() are here too.  Requests are named
 * by their index in the stage's table.
 *
 * Thread:  owner (the stage's loop).
 * Memory:  none; the table is the stage's.
 */
#ifndef PIPELINE_STAGE_REQUEST_H
#define PIPELINE_STAGE_REQUEST_H

#include "pipeline/stage_state.h"

#define STAGE_REQUEST_NONE UINT32_MAX

/* STAGE_REQUEST_NONE when it is not here: not admitted yet, or ended. */
uint32_t stage_request_find(const struct stage *stage, uint64_t id);

/* It goes no further, for the reason fl_last_error() has; stage_poll() says so once.  Its rows are
 * dropped as they come until the coordinator ends it. */
void stage_request_fail(struct stage_request *request, fl_status status);

/* Drop the request's rows wherever they are; its blocks are free to be used by others after. */
void stage_request_forget(struct stage *stage, uint32_t index);

#endif
