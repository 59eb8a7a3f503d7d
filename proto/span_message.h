/* span_message.h - SPANS between its plain and its generated form.
 *
 * The largest of the answers in cluster_message.c, in a file of its own.
 *
 * Thread:  any.
 * Memory:  from the arena.
 */
#ifndef PROTO_SPAN_MESSAGE_H
#define PROTO_SPAN_MESSAGE_H

#include "proto/base/arena.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

struct Firstlight__Cluster__Spans;

FL_MUST_CHECK fl_status fl_span_message_build(const struct fl_spans *spans, struct fl_arena *arena,
                                              struct Firstlight__Cluster__Spans **out);

/* Every span is checked: it ends when it begins or later, and its kinds exist. */
FL_MUST_CHECK fl_status fl_span_message_take(const struct Firstlight__Cluster__Spans *message,
                                             struct fl_arena *arena, struct fl_spans *out);

#ifdef __cplusplus
}
#endif
#endif
