/* request.h - what clients asked for, from arrival to the last event.
 *
 *   start ─► OPENING ─► TOKENISING ─► QUEUED ─► RUNNING ─► DONE     (generate)
 *                   └► LOADING ─► LOADED                            (load)
 *                   └► TOKENISING ─► TOKENS                         (tokenize)
 *                   └► PLAN                                         (plan)
 *
 * Thread:  owner (the main loop).
 * Memory:  one allocation per request plus its prompt, freed with its last event.
 */
#ifndef COORDINATOR_REQUEST_H
#define COORDINATOR_REQUEST_H

#include "coordinator/state.h"

/* Begin; events may come from inside. */
void request_start(struct coordinator *coordinator, uint64_t client,
                   const struct fl_client_request *wanted);

/* The catalog has a model, or why it has none: requests that waited go on. */
void request_model_ready(struct coordinator *coordinator, const char *name, fl_status status,
                         const char *text, struct catalog_model *model);

/* The request with this serial, or NULL when it ended meanwhile. */
struct request *request_by_serial(struct coordinator *coordinator, uint64_t serial);

/* Send an event about a request. */
void request_event(struct coordinator *coordinator, const struct request *request,
                   struct fl_client_event *event);

/* End with an error.  `text` may be fl_last_error(). */
void request_fail(struct coordinator *coordinator, struct request *request, fl_status code,
                  const char *text, uint32_t retry_ms);

/* End without a word; whatever it held on the nodes must be given back already. */
void request_free(struct coordinator *coordinator, struct request *request);

/* Requests to generate in one state, of all models. */
uint32_t request_count(const struct coordinator *coordinator, enum request_state state);

/* FL_BUSY, with the sentence that says so. */
FL_MUST_CHECK fl_status request_queue_full(const struct coordinator *coordinator);

#endif
