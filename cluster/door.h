/* door.h - the plain TCP port where processes of a pool meet.
 *
 * UCX takes whoever reaches its listener at his word: a few stray bytes from a
 * port scanner end the process in an assertion, and a worker's address is
 * unpacked without a look.  So UCX opens no public port here.  Who wants a
 * link knocks at a door of ours, proves that he holds the pool key
 * (proto/handshake.h), and only then are the workers' addresses exchanged.
 *
 *   opener                                       answerer
 *   TCP connect, HELLO ──►          ◄── CHALLENGE
 *   PROOF, PASS(worker address) ──► ◄── WELCOME
 *                                                admitted()
 *   admitted()                      ◄── PASS(ticket, worker address)
 *   ... the connection stays, silent, for as long as the link ...
 *   gone() when it ends: a killed process is noticed at once, whatever carries the data
 *
 * Records are framed by two bytes of little-endian length, at most DOOR_RECORD_MAX.
 *
 * Thread:  owner (the wire thread).
 * Memory:  open() allocates everything, about a megabyte.
 */
#ifndef CLUSTER_DOOR_H
#define CLUSTER_DOOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cluster_message.h"
#include "proto/handshake.h"
#include "proto/network_address.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    DOOR_VISIT_MAX = 320,
    DOOR_STRANGER_MAX = 32, /* that came in and are not admitted */
    DOOR_PASS_MAX = FL_ADDRESS_MAX,
    DOOR_RECORD_MAX = DOOR_PASS_MAX + 16,
};

struct door;
typedef uint64_t door_visit; /* 0 is none; never used twice */

struct door_events {
    void *ctx;
    /* Valid for the call.  `ticket` is the same number on both sides, and a secret of theirs. */
    void (*admitted)(void *ctx, door_visit visit, bool opener, uint64_t ticket, const void *pass,
                     size_t size, const char *peer);
    /* A visit that we opened, or that was admitted, is over. */
    void (*gone)(void *ctx, door_visit visit, fl_status why, const char *text);
};

struct door_config {
    const struct fl_network_socket *listen; /* [listen_count]: the first that works */
    size_t listen_count;
    const char *listen_text; /* for sentences */
    enum fl_party party;
    const struct fl_pool_key *key; /* NULL: none; borrowed until close */
    const void *pass;              /* our worker's address; borrowed until close */
    size_t pass_size;              /* 1 .. DOOR_PASS_MAX */
    uint64_t wait_ns;              /* for the whole visit until admitted */
    struct door_events events;
};

/* FL_BUSY for a port in use, FL_INVALID for an address that is not of this machine. */
FL_MUST_CHECK fl_status door_open(const struct door_config *config, struct door **out);
void door_close(struct door *door);

/* The address it listens on. */
void door_address(const struct door *door, struct fl_network_socket *out);

/* Visit the first of `targets` that answers.  `text` names them in sentences.  Returns 0 when too
 * many visits are open; a failure otherwise arrives as gone(). */
door_visit door_knock(struct door *door, const struct fl_network_socket *targets, size_t count,
                      const char *text);

/* End a visit; no gone() follows. */
void door_leave(struct door *door, door_visit id);

/* Do what can be done without waiting; returns how many things happened.  Lowers *next_ns to when
 * the next deadline is due. */
unsigned door_poll(struct door *door, uint64_t now_ns, uint64_t *next_ns);

/* Readable when door_poll() has something to do, deadlines apart. */
int door_fd(const struct door *door);

#ifdef __cplusplus
}
#endif
#endif
