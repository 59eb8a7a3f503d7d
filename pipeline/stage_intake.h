/* stage_intake.h - rows and tokens that arrive for a stage's requests.
 *
 * stage_take_activations() and stage_take_token() are here.  Rows of a request
 * must follow each other; rows that come before their ADMIT are checked when
 * it comes.
 *
 * Thread:  owner (the stage's loop).
 * Memory:  none; rows are kept in the stage's inbox.
 */
#ifndef PIPELINE_STAGE_INTAKE_H
#define PIPELINE_STAGE_INTAKE_H

#include "pipeline/stage_state.h"

/* Rows that came before the request did: they must follow each other from `keep` on, or it fails. */
void stage_intake_claim(struct stage *stage, struct stage_request *request);

#endif
