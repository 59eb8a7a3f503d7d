/* prompt.h - what a client asks with, on its way to token ids.
 *
 * A prompt is a text, messages for the model's chat template, or token ids; a
 * request has one of them.  Text and messages become ids on the worker, while the
 * nodes begin to load.
 *
 *   GENERATE, TOKENIZE ─ take() ─► request ─ tokenise() ─► worker ─► ready()
 *
 * Thread:  owner (the main loop).
 * Memory:  take() copies; tokenise() moves the text to the worker and keeps the model open.
 */
#ifndef COORDINATOR_PROMPT_H
#define COORDINATOR_PROMPT_H

#include "coordinator/state.h"

/* The ids are in the request's `tokens`. */
typedef void prompt_ready_fn(struct coordinator *coordinator, struct request *request);

/* Copy what the client sent: the prompt of a GENERATE, or the text of a TOKENIZE; `what` it is
 * called in errors.  FL_INVALID, FL_NO_MEMORY. */
FL_MUST_CHECK fl_status prompt_take(struct request *request, const struct fl_generate *wanted);
FL_MUST_CHECK fl_status prompt_take_text(struct request *request, const struct fl_text *text,
                                         const char *what);

/* Have the text or the messages of a request tokenised, whose model is open: ready() follows, or
 * the request fails, or it ended meanwhile. */
void prompt_tokenise(struct coordinator *coordinator, struct request *request,
                     prompt_ready_fn *ready);

#endif
