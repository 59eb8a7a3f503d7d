/* roster.h - which nodes there are, and the way to each of them.
 *
 * A link that passed the handshake is nobody until its JOIN came.  A node is
 * its name and its incarnation: a restarted process joins as another node, and
 * the former one's work is lost with it.  Two living nodes never share a name.
 *
 *   link up ──► pending ──JOIN──► ready ──link down──► lost ──JOIN──► ready
 *
 * Messages to a node leave in order.  What the wire does not take at once waits
 * here, up to ROSTER_OUT_MAX messages; a node that takes no more is hung up on.
 *
 * Thread:  owner (the main loop).
 * Memory:  open() allocates; messages that wait are allocated and freed when sent.
 */
#ifndef COORDINATOR_ROSTER_H
#define COORDINATOR_ROSTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cluster/clock_map.h"
#include "cluster/transport.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    ROSTER_NODE_MAX = FL_STAGE_COUNT_MAX,
    ROSTER_PENDING_MAX = 64,
    ROSTER_OUT_MAX = 4096,
};

/* What moves bytes: a peer table, or a test. */
struct roster_wire {
    void *ctx;
    fl_status (*send)(void *ctx, transport_link link, uint16_t type, const void *header,
                      size_t header_size, const void *data, size_t size, uint64_t cookie);
    void (*close)(void *ctx, transport_link link);
};

enum roster_state { ROSTER_FREE, ROSTER_READY, ROSTER_LOST };

struct roster_out;

struct roster_node {
    enum roster_state state;
    transport_link link;
    char name[FL_NAME_MAX];
    uint64_t incarnation;
    bool leaving; /* it said so: nothing is sent to it any more */
    struct fl_address address;
    uint64_t memory_budget;
    uint64_t memory_used; /* by plans; kept by placement */
    uint32_t threads;
    char isa[16];
    char where[TRANSPORT_TEXT_MAX]; /* the link's address as text */
    uint32_t fetch_count;           /* ranges being read or sent; kept by file_server */
    uint64_t joined_ns;             /* over this link */
    bool clock_known;               /* it answered a ping since then */
    bool clock_missed;              /* it did not for long, and that was said */
    bool asleep_known;
    uint64_t asleep_ns;           /* since its machine booted, as it said last */
    uint64_t slept_ns;            /* of it, since this process joined */
    struct roster_out *out_first; /* messages the wire did not take yet */
    struct roster_out *out_last;
    uint32_t out_count;
};

struct roster;

FL_MUST_CHECK fl_status roster_open(const struct roster_wire *wire, struct fl_clock clock,
                                    uint64_t incarnation, struct roster **out);
void roster_close(struct roster *roster);

/* A link came up; it has until ROSTER's deadline to say JOIN. */
void roster_link_up(struct roster *roster, transport_link link, const char *where);

/* JOIN on a link.  On FL_OK *out_node is ready and was welcomed.  A process that joins again over
 * a new link takes its former slot: roster_former() first.
 * FL_BUSY: the name is taken; FL_PROTOCOL: a second JOIN; FL_TOO_LARGE: no room.  The refusal was
 * sent and the link closed. */
FL_MUST_CHECK fl_status roster_join(struct roster *roster, transport_link link,
                                    const struct fl_join *join, struct roster_node **out_node);

/* A ready node whose process is the one that joins again, or NULL: its plans are to be dropped
 * before roster_join() takes its slot. */
struct roster_node *roster_former(struct roster *roster, const struct fl_join *join);

/* A link is over: the node that had it (now lost), or NULL. */
struct roster_node *roster_link_down(struct roster *roster, transport_link link);

/* A lost node is not to come back: it is listed no longer. */
void roster_forget(struct roster_node *node);

/* A pong came on a link and went into its clock map (see cluster/peer.h): suspends are counted and
 * told, also one that outlasted the link, when the same process joins again. */
void roster_ponged(struct roster *roster, transport_link link, const struct clock_map *map,
                   enum clock_map_news news);

/* The ready node on a link, or NULL. */
struct roster_node *roster_by_link(struct roster *roster, transport_link link);

/* Node `index` of ROSTER_NODE_MAX; free slots included. */
struct roster_node *roster_at(struct roster *roster, uint32_t index);
uint32_t roster_ready_count(const struct roster *roster);

/* Send a control message.  Failure closes the node's link (down() follows); to a node that is not
 * ready nothing is sent. */
void roster_send(struct roster *roster, struct roster_node *node,
                 const struct fl_cluster_message *message);

/* Send bytes that stay where they are until the wire is done with `cookie`.  FL_AGAIN: later. */
FL_MUST_CHECK fl_status roster_send_data(struct roster *roster, struct roster_node *node,
                                         uint16_t type, const void *header, size_t header_size,
                                         const void *data, size_t size, uint64_t cookie);

/* Close a node's link; down() follows. */
void roster_hang_up(struct roster *roster, struct roster_node *node);

/* Send what waits, close links that never joined, tell of nodes that answer no pings; returns when
 * to call again at the latest. */
uint64_t roster_poll(struct roster *roster);

#ifdef __cplusplus
}
#endif
#endif
