/* stage_run.h - the runs of a stage that are under way.
 *
 * They are formed of what has arrived, decode rows first, and let go in the
 * order they were formed.  What a run itself is: pipeline/run.h.
 *
 * Thread:  owner (the stage's loop).
 * Memory:  none; the runs are the stage's.
 */
#ifndef PIPELINE_STAGE_RUN_H
#define PIPELINE_STAGE_RUN_H

#include "pipeline/stage_state.h"

/* Start a run of what has arrived; false when there is nothing, or no room for one more. */
bool stage_run_form(struct stage *stage);

/* The run's next piece is the output head. */
bool stage_run_is_at_head(const struct stage *stage, const struct run *run);

/* Nothing is left to compute: all pieces are behind it, or nobody waits for the rest. */
bool stage_run_is_complete(const struct stage *stage, const struct run *run);

/* Let complete runs go, oldest first; false when none went. */
bool stage_run_retire(struct stage *stage);

#endif
