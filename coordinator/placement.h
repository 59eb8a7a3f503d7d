/* placement.h - which model lies on which nodes, in what cut.
 *
 * A plan is made over the nodes that are there when it is needed, within the
 * memory that loaded models leave; when it does not fit, models that nobody
 * uses make room, the longest unused first.  PLAN goes to every stage at once
 * and nobody waits for them to be ready.  A plan lives until it is unloaded,
 * makes room, or one of its nodes fails; nodes that come later do not change
 * it.
 *
 * Thread:  owner (the main loop).
 * Memory:  a placement is allocated when it is made and freed when it is dropped.
 */
#ifndef COORDINATOR_PLACEMENT_H
#define COORDINATOR_PLACEMENT_H

#include "coordinator/state.h"

/* The loaded plan of a model by name, or NULL. */
struct placement *placement_find(struct coordinator *coordinator, const char *name);
struct placement *placement_by_id(struct coordinator *coordinator, uint64_t plan_id);

/* The loaded plan, or a new one, sent to its nodes.  FL_NOT_FOUND without nodes, FL_NO_MEMORY with
 * the planner's sentence. */
FL_MUST_CHECK fl_status placement_get(struct coordinator *coordinator, struct catalog_model *model,
                                      struct placement **out);

/* The plan as it would be made now, in an event; nothing is loaded. */
FL_MUST_CHECK fl_status placement_dry_run(struct coordinator *coordinator,
                                          struct catalog_model *model, struct request *request);

/* End its requests with this error, tell the nodes that are left, free it. */
void placement_drop(struct coordinator *coordinator, struct placement *placement, fl_status code,
                    const char *text, uint32_t retry_ms);

/* Drop every plan that has a stage on this node. */
void placement_drop_node(struct coordinator *coordinator, struct roster_node *node,
                         const char *text);

/* A stage has loaded more; NULL when the message is none of this placement's. */
void placement_progress(struct placement *placement, const struct roster_node *node,
                        const struct fl_progress *progress);

/* Bytes there and bytes wanted, over all stages. */
uint64_t placement_bytes(const struct placement *placement, uint64_t *out_total);
bool placement_ready(const struct placement *placement);

/* Send to every stage. */
void placement_send(struct placement *placement, const struct fl_cluster_message *message);

/* Requests that have it. */
uint32_t placement_request_count(const struct placement *placement);

/* For events: out [FL_STAGE_COUNT_MAX]; returns the count. */
uint32_t placement_stages(const struct placement *placement, struct fl_stage_summary *out);

#endif
