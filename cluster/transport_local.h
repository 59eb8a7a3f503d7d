/* transport_local.h - a network inside one process, on a clock that a simulation turns.
 *
 * Every process of a simulated cluster opens a transport here.  Messages take a
 * time drawn from the seed, links keep their order, and nothing moves until the
 * simulation advances the clock, so that a seed replays a run exactly:
 *
 *   for (;;) {
 *       poll every process                  (until none has anything to do)
 *       local_network_advance(network, the earliest of next_event_ns() and the processes' deadlines)
 *   }
 *
 * A link behaves like a TCP connection: what is sent arrives, in order, or the
 * link is lost.  Between processes that are cut off from each other messages
 * wait, and arrive after the cut is healed.
 *
 * Thread:  owner; one thread runs the whole network.
 * Memory:  grows with the messages under way.  Close the transports before the network.
 * Units:   nanoseconds of the network's clock, which starts at 1 s.
 */
#ifndef CLUSTER_TRANSPORT_LOCAL_H
#define CLUSTER_TRANSPORT_LOCAL_H

#include <stdbool.h>
#include <stdint.h>

#include "cluster/transport.h"
#include "proto/base/clock.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { LOCAL_PROCESS_MAX = 64 };

struct local_network;

struct local_network_config {
    uint64_t seed;
    uint64_t delay_min_ns; /* of a message; 0 and 0: no delay */
    uint64_t delay_max_ns;
};

FL_MUST_CHECK fl_status local_network_open(const struct local_network_config *config,
                                           struct local_network **out);
void local_network_close(struct local_network *network);

/* The network's clock; valid until close. */
struct fl_clock local_network_clock(struct local_network *network);

/* When the next message arrives somewhere, UINT64_MAX when none is under way. */
uint64_t local_network_next_event_ns(const struct local_network *network);

/* Turn the clock; it never goes back. */
void local_network_advance(struct local_network *network, uint64_t now_ns);

/* A process joins the network.  fd() is -1: the simulation knows when to poll.
 * FL_TOO_LARGE when LOCAL_PROCESS_MAX have been there. */
FL_MUST_CHECK fl_status transport_local_open(struct local_network *network, struct transport **out);

/* A process that was killed and closed is started again, where the others know it.  FL_INVALID when
 * nobody had that address, FL_BUSY when somebody has. */
FL_MUST_CHECK fl_status transport_local_reopen(struct local_network *network,
                                               const struct fl_address *address,
                                               struct transport **out);

/* The process is killed: its links end at the others as soon as they can hear of it, and it does
 * nothing more.  Only close() may be called on it then. */
void local_network_kill(struct local_network *network, struct transport *transport);

/* From now on nothing passes between two processes (or passes again). */
void local_network_cut(struct local_network *network, struct transport *a, struct transport *b);
void local_network_heal(struct local_network *network, struct transport *a, struct transport *b);

/* A number drawn from the seed, for what else a simulation decides. */
uint64_t local_network_random(struct local_network *network);

#ifdef __cplusplus
}
#endif
#endif
