/* trace.h - a request's timeline while it is being made.
 *
 * When a request comes, what its nodes have in memory is noted; with its first
 * token all of them are asked for their spans (TRACE), and what they send (SPANS)
 * is put into its timeline.  Nodes that answer late or never leave it incomplete.
 *
 * Thread:  owner (the main loop).
 */
#ifndef COORDINATOR_TRACE_H
#define COORDINATOR_TRACE_H

#include "coordinator/state.h"

/* A request to generate has come: what is resident, and its class as far as that says it. */
void trace_arrived(struct coordinator *coordinator, struct request *request);

/* Its first token has gone to the client: ask its stages. */
void trace_begin(struct coordinator *coordinator, struct request *request);

/* From a node.  What nobody asked for is dropped. */
void trace_take(struct coordinator *coordinator, const struct roster_node *node,
                const struct fl_spans *spans);

/* Give the request's timeline to those that are kept, as it is; NULL when there is none. */
const struct timeline *trace_keep(struct coordinator *coordinator, struct request *request);

#endif
