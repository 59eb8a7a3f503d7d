/* client_server.h - the door that programs come in by.
 *
 * Listens on TCP addresses and Unix sockets, reads frames, answers with frames.
 * With a pool key, whoever comes over TCP proves to hold it before anything
 * else is parsed.  What a client does
 * wrong costs its own connection, with one sentence that says why; everything
 * it can make grow has a limit.
 *
 *   socket ─► frame ─► request() ─►  coordinator  ─► send() ─► out buffer ─► socket
 *
 * Thread:  owner (the main loop); nothing here waits.
 * Memory:  open() allocates; a client's buffers grow with what it sends and does not read, up to
 *          FL_CLIENT_MESSAGE_MAX and CLIENT_SERVER_OUT_MAX.
 */
#ifndef COORDINATOR_CLIENT_SERVER_H
#define COORDINATOR_CLIENT_SERVER_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/client_message.h"
#include "proto/pool_key.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CLIENT_SERVER_CLIENT_MAX = 256,
    CLIENT_SERVER_LISTENER_MAX = 8,
    CLIENT_SERVER_OUT_MAX = 16 << 20, /* bytes a client may leave unread */
};

struct client_server;

struct client_server_events {
    void *ctx;
    /* `request` is valid for the call. */
    void (*request)(void *ctx, uint64_t client, const struct fl_client_request *request);
    /* Follows for every client that made a request; no event reaches it any more. */
    void (*gone)(void *ctx, uint64_t client);
};

struct client_server_config {
    struct fl_clock clock;
    const struct fl_pool_key *key; /* NULL: none; borrowed until close */
    struct client_server_events events;
};

FL_MUST_CHECK fl_status client_server_open(const struct client_server_config *config,
                                           struct client_server **out);
void client_server_close(struct client_server *server);

/* Listens on one more address (client_listener.h, which says what can be wrong with it); FL_TOO_LARGE
 * beyond CLIENT_SERVER_LISTENER_MAX. */
FL_MUST_CHECK fl_status client_server_listen(struct client_server *server, const char *address);

/* The address of listener `index` as text, "" when there is none. */
const char *client_server_address(const struct client_server *server, uint32_t index);

/* Readable when poll() has something to do. */
int client_server_fd(const struct client_server *server);

/* Read, write, accept, and close what is overdue; returns when to call again at the latest. */
uint64_t client_server_poll(struct client_server *server);

/* Queue an event for a client's handle, and send what the socket takes.  Unknown clients are gone: ignored. */
void client_server_send(struct client_server *server, uint64_t handle,
                        const struct fl_client_event *event);

#ifdef __cplusplus
}
#endif
#endif
