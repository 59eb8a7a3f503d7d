/* peer.h - links to processes that proved they belong here and that still live.
 *
 * Sits on a transport.  Every new link goes through the handshake first
 * (proto/handshake.h); nothing else is parsed before.  Then each side pings the
 * other when it has been silent, and a peer not heard of within the deadline is
 * lost, however healthy its socket looks.  Heartbeats belong to the wire
 * thread, which never loads and never computes, so a slow disk delays none.
 *
 * Who wants to compare times keeps a clock map of every peer: then the same
 * pings go more often, whether the link is silent or not, and a few at once when
 * it came up or when asked to.
 *
 *   PING  sent u64                                             8 bytes, little-endian
 *   PONG  sent u64, received u64, replied u64, asleep u64      32 bytes
 *
 * Thread:  owner (the wire thread).
 * Memory:  open() allocates, close() frees.
 */
#ifndef CLUSTER_PEER_H
#define CLUSTER_PEER_H

#include <stddef.h>
#include <stdint.h>

#include "cluster/clock_map.h"
#include "cluster/transport.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/handshake.h"

#ifdef __cplusplus
extern "C" {
#endif

struct peer_table;

struct peer_events {
    void *ctx;
    /* The handshake is done, on a link we opened or one that came in. */
    void (*up)(void *ctx, transport_link link, enum fl_party party, const char *address);
    /* Types 16 and up only.  Valid for the call. */
    void (*received)(void *ctx, transport_link link, uint16_t type, const void *header,
                     size_t header_size, const void *data, size_t size);
    void (*sent)(void *ctx, transport_link link, uint64_t cookie);
    /* Lost, refused or closed.  Reported for every link we opened, up or not, and for every link
     * that was up; `text` is a sentence. */
    void (*down)(void *ctx, transport_link link, fl_status why, const char *text);
};

struct peer_config {
    struct transport *transport; /* borrowed until close */
    struct fl_clock clock;
    enum fl_party party;
    const struct fl_pool_key *key; /* NULL: none; borrowed until close */
    uint64_t ping_ns;              /* silence before a ping; 0: 1 s */
    uint64_t lost_ns;              /* silence before a peer is lost; 0: 5 s */
    uint64_t shake_ns;             /* time for the whole handshake; 0: 5 s */
    struct peer_events events;
    uint64_t clock_ns; /* keep clock maps, with a ping so often; 0: none */
    /* A pong was taken into the map, with events.ctx; NULL: not wanted.  The link may be closed. */
    void (*ponged)(void *ctx, transport_link link, enum clock_map_news news);
};

FL_MUST_CHECK fl_status peer_open(const struct peer_config *config, struct peer_table **out);
void peer_close(struct peer_table *peers);

/* Open a link; up() or down() follows. */
FL_MUST_CHECK fl_status peer_connect(struct peer_table *peers, const struct fl_address *address,
                                     transport_link *out);

/* As transport send(); FL_AGAIN also while the handshake is under way. */
FL_MUST_CHECK fl_status peer_send(struct peer_table *peers, transport_link link, uint16_t type,
                                  const void *header, size_t header_size, const void *data,
                                  size_t size, uint64_t cookie);

/* Close a link; down() follows with FL_CANCELLED. */
void peer_close_link(struct peer_table *peers, transport_link link);

/* Progress the transport and the deadlines.  *out_next_ns: when to call again at the latest. */
unsigned peer_poll(struct peer_table *peers, uint64_t *out_next_ns);

/* Smallest round trip seen on a link in ns, 0 when none yet. */
uint64_t peer_round_trip_ns(const struct peer_table *peers, transport_link link);

/* The map of the clock at the other end, valid until the next poll; NULL for a link that is not up,
 * and without clock_ns.  It maps nothing as long as no ping was answered. */
const struct clock_map *peer_clock(const struct peer_table *peers, transport_link link);

/* Ping a few times one after the other, so that what has just happened can be mapped as well as the
 * link allows: peer_clock()->certain_ns says until when. */
void peer_ping_burst(struct peer_table *peers, transport_link link);

#ifdef __cplusplus
}
#endif
#endif
