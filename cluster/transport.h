/* transport.h - reliable, ordered messages between the processes of a cluster.
 *
 * A transport is a struct of functions, so that the same coordinator and node
 * run over UCX (transport_ucx.c) and inside one process for simulation and
 * tests (transport_local.c).  It moves messages and nothing else: who the peer
 * is, whether it may speak and whether it lives is decided one floor up, in
 * peer.h.
 *
 *   connect ──► link ◄── accepted          received(type, header, data)
 *   send(type, header, data, cookie) ...   sent(cookie)        closed(why)
 *
 * A link is a number that is never used twice.  Everything a transport reports
 * comes from progress(), on the owner's thread.  The owner waits on fd() after
 * arm() said FL_OK, together with whatever else it waits for; nothing spins.
 *
 * Thread:  owner (the wire thread).
 * Memory:  open() allocates buffers; `header` is copied by send(); `data` is
 *          borrowed until sent(cookie) or closed(), or copied when cookie is 0.
 * Units:   sizes in bytes, header and data together at most TRANSPORT_MESSAGE_MAX.
 */
#ifndef CLUSTER_TRANSPORT_H
#define CLUSTER_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#include "cluster/transport_ports.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"
#include "proto/handshake.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TRANSPORT_LINK_MAX = 256,
    TRANSPORT_HEADER_MAX = 64,
    TRANSPORT_MESSAGE_MAX = 8 << 20,
    TRANSPORT_COPY_MAX = 4 << 20, /* largest data of a message with cookie 0 */
    TRANSPORT_TEXT_MAX = 128,     /* a peer's address as text */
};

typedef uint64_t transport_link; /* 0 is no link */

struct transport_events {
    void *ctx;
    /* A peer connected to our listener or addressed our worker. */
    void (*accepted)(void *ctx, transport_link link, const char *peer);
    /* Valid for the call.  `header` and `data` are aligned to 8 bytes. */
    void (*received)(void *ctx, transport_link link, uint16_t type, const void *header,
                     size_t header_size, const void *data, size_t size);
    /* The data of a message with that cookie (never 0) may be used again. */
    void (*sent)(void *ctx, transport_link link, uint64_t cookie);
    /* The link is over: by the peer, by failure, or after close().  `text` says why in words.
     * Cookies not yet reported are released by this call: no sent() follows. */
    void (*closed)(void *ctx, transport_link link, fl_status why, const char *text);
};

struct transport {
    const struct transport_ops *ops;
};

struct transport_ops {
    const char *name; /* "ucx", "local" */

    /* Once, before anything else. */
    void (*set_events)(struct transport *transport, const struct transport_events *events);

    /* Where others reach this process: the listener's host:port, or the worker's address. */
    void (*address)(struct transport *transport, struct fl_address *out);

    /* Begins; FL_OK means "under way", failure arrives as closed().  FL_INVALID for an address
     * that names nothing, FL_TOO_LARGE when TRANSPORT_LINK_MAX links are open. */
    fl_status (*connect)(struct transport *transport, const struct fl_address *address,
                         transport_link *out);

    /* Queue a message.  FL_AGAIN when the link's queue is full: try after the next progress();
     * FL_LINK_LOST when the link is over (its closed() was or will be reported). */
    fl_status (*send)(struct transport *transport, transport_link link, uint16_t type,
                      const void *header, size_t header_size, const void *data, size_t size,
                      uint64_t cookie);

    /* End a link after what was queued has left, or after a short while; closed() follows. */
    void (*close_link)(struct transport *transport, transport_link link);

    /* End a link at once and give up what was queued; closed() follows with the next progress().
     * For peers that are believed dead, or that broke the rules. */
    void (*drop_link)(struct transport *transport, transport_link link);

    /* Do what can be done without waiting; returns how many things happened.  Also keeps the
     * transport's own deadlines, so call it at least once a second; not from within an event. */
    unsigned (*progress)(struct transport *transport);

    /* Readable when something happened since arm() said FL_OK.  FL_AGAIN: progress() first. */
    int (*fd)(struct transport *transport);
    fl_status (*arm)(struct transport *transport);

    void (*close)(struct transport *transport);
};

/* UCX over TCP, or over what the environment's UCX_TLS names.
 * `listen`: "host:port" (port 0: any), or NULL for none: then the address is the worker's, for
 * exchange over MPI.  With a key nobody gets past the listener without it.  The address reported is
 * the one bound, in figures; bound to 0.0.0.0 it is of no use to others (see
 * fl_network_source_toward).  What listens on loopback reaches loopback only.  The listener may be
 * on IPv6, but UCX 1.13 moves data over IPv4 only: machines need both, or IPv4.
 * FL_INVALID for a host that does not resolve, FL_BUSY for a port in use, FL_AGAIN while no network
 * device is up: UCX never uses one that comes up later; FL_BUSY also when the data ports are all in
 * use.  `data_ports` says more than UCX_TCP_PORT_RANGE in the environment. */
struct transport_ucx_config {
    const char *listen;
    enum fl_party party;               /* who we say we are; 0: a node */
    const struct fl_pool_key *key;     /* NULL: none; borrowed until close */
    struct transport_ports data_ports; /* where others' data comes in; 0 and 0: any ports */
};
FL_MUST_CHECK fl_status transport_ucx_open(const struct transport_ucx_config *config,
                                           struct transport **out);

#ifdef __cplusplus
}
#endif
#endif
