/* courier.h - the part of a node that talks: to the coordinator and to its neighbours.
 *
 * Joins the coordinator and joins again, for ever, when the link is lost; then
 * the plans of the lost one are dropped.  For each plan it opens a link to the
 * stage that follows (the last stage's is the first: it sends tokens), takes
 * the one from the stage before, sends activations as far as their receiver
 * gave credit, and passes what arrives on to compute.  It never reads a disk and
 * never computes, so heartbeats do not wait for either.
 *
 *   coordinator ◄──► courier ◄── mailboxes ──► compute, loader
 *   stage before ──►         ──► stage after
 *
 * A peer that breaks the rules loses its link and nothing else.
 *
 * Thread:  owner (the wire thread).
 * Memory:  open() allocates, close() frees; an admitted plan allocates once.
 */
#ifndef NODE_COURIER_H
#define NODE_COURIER_H

#include <stdbool.h>
#include <stdint.h>

#include "cluster/transport.h"
#include "node/compute.h"
#include "node/fetch_queue.h"
#include "node/node_spans.h"
#include "node/wake.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"
#include "proto/pool_key.h"

struct courier;

enum { COURIER_TEXT_MAX = 512 };

struct courier_config {
    struct transport *transport;   /* borrowed until close, as the rest */
    const struct fl_pool_key *key; /* NULL: none */
    struct fl_clock clock;
    struct fl_address coordinator;
    bool rejoin; /* false: a lost coordinator is the end (mpirun) */
    struct fl_join join;
    struct compute *compute;
    struct fetch_queue *fetches;
    struct wake *compute_wake;
    struct node_spans *spans; /* NULL: nothing is recorded, and answers to TRACE are empty */
    uint64_t exec_ns;         /* when the process began; 0: not known */
};

FL_MUST_CHECK fl_status courier_open(const struct courier_config *config, struct courier **out);

/* Links are closed; compute must have stopped and gives nothing back any more. */
void courier_close(struct courier *courier);

/* Send, receive, keep deadlines.  *out_next_ns: when to call again at the latest.
 * FL_END: the coordinator is gone and rejoin is off.  Any failure is final: the coordinator refused
 * this node, courier_text() says why. */
FL_MUST_CHECK fl_status courier_poll(struct courier *courier, uint64_t *out_next_ns);

const char *courier_text(const struct courier *courier);

/* Adds the credit to compute's part. */
struct node_census;
void courier_census(struct courier *courier, struct node_census *out);

/* True while the coordinator knows this node. */
bool courier_joined(const struct courier *courier);

/* Tell the coordinator that this node leaves on purpose, and close the link to it.  Polling goes on
 * until left() or until the caller has waited enough; poll() says FL_CANCELLED from now on. */
void courier_leave(struct courier *courier);
/* True when no link to a coordinator is there any more. */
bool courier_left(const struct courier *courier);

#endif
