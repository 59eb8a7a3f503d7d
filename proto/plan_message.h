/* plan_message.h - the plan's part of cluster_message.c: stages, shape and pieces.
 *
 * Thread:  any.
 * Memory:  generated structs and arrays come from the arena; build() borrows the plan's.
 */
#ifndef PROTO_PLAN_MESSAGE_H
#define PROTO_PLAN_MESSAGE_H

#include "proto/base/arena.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

struct Firstlight__Cluster__Address;
struct Firstlight__Cluster__Plan;

FL_MUST_CHECK fl_status fl_plan_message_build(const struct fl_plan *plan, struct fl_arena *arena,
                                              struct Firstlight__Cluster__Plan **out);

/* FL_PROTOCOL, with a sentence, unless everything in it is right: the stages cover the model's
 * layers once and in order, and the pieces are exactly those of the stage it is for. */
FL_MUST_CHECK fl_status fl_plan_message_take(const struct Firstlight__Cluster__Plan *message,
                                             struct fl_arena *arena, struct fl_plan *out);

FL_MUST_CHECK fl_status fl_address_message_build(const struct fl_address *address,
                                                 struct fl_arena *arena,
                                                 struct Firstlight__Cluster__Address **out);
FL_MUST_CHECK fl_status fl_address_message_take(const struct Firstlight__Cluster__Address *message,
                                                struct fl_address *out);

#ifdef __cplusplus
}
#endif
#endif
