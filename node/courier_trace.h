/* courier_trace.h - the wire's spans, and the answers to TRACE.
 *
 * Private to node/courier*.c and node/stage_link.c.  Of the wire is recorded
 * what a first token can wait for: the arrival of a plan, of a request and of
 * its prompt's rows, the link to the next stage, and the sending of prompt rows
 * and of a first token.  Decode rows and later tokens are not.
 *
 * The coordinator asks for a request's spans with TRACE.  The answer is taken
 * out of all three rings at once and sent a message with every poll, so that
 * tokens go between.  Of a request that nothing is left of, a span is lost.
 *
 * Thread:  owner (the wire thread).
 * Memory:  none of its own.
 */
#ifndef NODE_COURIER_TRACE_H
#define NODE_COURIER_TRACE_H

#include "node/courier_state.h"

/* What arrived at `now_ns`. */
void courier_trace_plan(struct courier *courier, uint64_t plan_id, uint64_t now_ns);
void courier_trace_admit(struct courier *courier, const struct fl_admit *admit, uint64_t now_ns);
void courier_trace_rows(struct courier *courier, const struct fl_activation_header *header,
                        uint64_t size, uint64_t now_ns);

/* The link to the stage after was told LINK. */
void courier_trace_linked(struct courier *courier, struct courier_plan *entry);

/* The transport has taken rows, or a token. */
void courier_trace_rows_sent(struct courier *courier, const struct courier_plan *entry,
                             const struct compute_activations *activations, uint64_t size);
void courier_trace_token_sent(struct courier *courier, const struct compute_sampled *sampled);

/* TRACE came; courier_trace_answer() sends one message, true when it could send another at once. */
void courier_trace_ask(struct courier *courier, const struct fl_trace *trace);
bool courier_trace_answer(struct courier *courier);
/* The coordinator that asked is gone. */
void courier_trace_reset(struct courier *courier);

#endif
