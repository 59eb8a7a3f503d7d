/* sampling_message.h - how a token is chosen and what stood beside it, in both protocols.
 *
 * Sampling and Top belong to client.proto; a coordinator hands the first on to
 * the nodes, and the second from them to the client, so cluster.proto uses the
 * same messages.
 *
 * Thread:  any.
 * Memory:  build() and take() put what they make into the arena.
 */
#ifndef PROTO_SAMPLING_MESSAGE_H
#define PROTO_SAMPLING_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

struct Firstlight__Sampling;
struct Firstlight__Top;

FL_MUST_CHECK fl_status fl_sampling_message_build(const struct fl_sampling *sampling,
                                                  struct fl_arena *arena,
                                                  struct Firstlight__Sampling **out);
/* Every field as it was sent, within its limits; FL_PROTOCOL. */
FL_MUST_CHECK fl_status fl_sampling_message_take(const struct Firstlight__Sampling *message,
                                                 struct fl_sampling *out);

FL_MUST_CHECK fl_status fl_sampling_message_build_top(const struct fl_top *top, uint32_t count,
                                                      struct fl_arena *arena,
                                                      struct Firstlight__Top ***out);
/* `field` names the list in a sentence.  FL_PROTOCOL. */
FL_MUST_CHECK fl_status fl_sampling_message_take_top(const char *field,
                                                     struct Firstlight__Top *const *message,
                                                     size_t count, struct fl_arena *arena,
                                                     struct fl_top **out);

#ifdef __cplusplus
}
#endif
#endif
