/* generation.h - requests that generate text.
 *
 * Admission reserves the KV blocks of prompt and answer on every stage at once;
 * who does not find them waits in line, and is told why.  Tokens come from the
 * last stage; text leaves in whole characters.  How a prompt becomes token ids is prompt.h.
 *
 * Thread:  owner (the main loop).
 */
#ifndef COORDINATOR_GENERATION_H
#define COORDINATOR_GENERATION_H

#include "coordinator/state.h"

/* Copy what the client sent.  FL_INVALID, FL_TOO_LARGE, FL_NO_MEMORY. */
FL_MUST_CHECK fl_status generation_take(struct request *request, const struct fl_generate *wanted);

/* The model is open: plan, and have the prompt tokenised. */
void generation_model_ready(struct coordinator *coordinator, struct request *request);

/* Admit those who wait, in order, while there is room. */
void generation_admit(struct coordinator *coordinator, struct placement *placement);

/* From the last stage. */
void generation_token(struct coordinator *coordinator, struct placement *placement,
                      const struct fl_token *token);

/* A stage failed at one request. */
void generation_failure(struct coordinator *coordinator, struct placement *placement,
                        const struct roster_node *node, const struct fl_failure *failure);

/* Give back what a request holds on the nodes, so that it can be freed. */
void generation_release(struct coordinator *coordinator, struct request *request);

/* DONE of those that have their answer, and whose spans are here or waited for until `now`; returns
 * when to call again at the latest. */
uint64_t generation_end_answered(struct coordinator *coordinator, uint64_t now);

/* End a request of any kind with DONE(cancelled); one that has its answer, with that.  A model that is being loaded goes on loading. */
void generation_cancel(struct coordinator *coordinator, struct request *request);

/* Tell those who wait for their first token how far loading is. */
void generation_progress(struct coordinator *coordinator, struct placement *placement);

#endif
