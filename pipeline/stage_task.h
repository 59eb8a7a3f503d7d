/* stage_task.h - one task: a run's rows through its next piece.
 *
 * Thread:  owner (the stage's loop).
 * Memory:  none; tasks allocate nothing.
 */
#ifndef PIPELINE_STAGE_TASK_H
#define PIPELINE_STAGE_TASK_H

#include "pipeline/stage_state.h"

/* The run's next task.  FL_AGAIN when its weights, its input or room for its tokens are missing. */
FL_MUST_CHECK fl_status stage_task_run(struct stage *stage, struct run *run);

#endif
