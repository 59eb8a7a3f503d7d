/* timeline_message.h - TIMELINE, and the phases of DONE, between plain and generated form.
 *
 * The largest of the events in client_event.c, in a file of its own.
 *
 * Thread:  any.
 * Memory:  from the arena; build() borrows strings.
 */
#ifndef PROTO_TIMELINE_MESSAGE_H
#define PROTO_TIMELINE_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/status.h"
#include "proto/client_message.h"

#ifdef __cplusplus
extern "C" {
#endif

struct Firstlight__Phase;
struct Firstlight__Timeline;

/* DONE has no more phases than there are names for. */
FL_MUST_CHECK fl_status fl_phase_message_build(const struct fl_phase_summary *phases,
                                               uint32_t count, struct fl_arena *arena,
                                               struct Firstlight__Phase ***out);
FL_MUST_CHECK fl_status fl_phase_message_take(struct Firstlight__Phase *const *message,
                                              size_t count, struct fl_arena *arena,
                                              struct fl_phase_summary **out);

FL_MUST_CHECK fl_status fl_timeline_message_build(const struct fl_timeline *timeline,
                                                  struct fl_arena *arena,
                                                  struct Firstlight__Timeline **out);
FL_MUST_CHECK fl_status fl_timeline_message_take(const struct Firstlight__Timeline *message,
                                                 struct fl_arena *arena, struct fl_timeline *out);

#ifdef __cplusplus
}
#endif
#endif
