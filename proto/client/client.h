/* client.h - a connection to a coordinator, for programs written in C.
 *
 *   struct fl_client *client;
 *   fl_client_open(NULL, &client);              FIRSTLIGHT_ADDR, or this machine
 *   fl_client_send(client, &request, &id);      any number, answered side by side
 *   while (fl_client_next(client, -1, &event) == FL_OK) ...   events of all requests
 *   fl_client_close(client);                    cancels what is still under way
 *
 * What to send and what comes back is in client_message.h; docs/protocol.md
 * has the whole story.  Every failure has a sentence in fl_last_error().
 *
 * Thread:  owner (one thread at a time).
 * Memory:  open() allocates, close() frees.  At most FL_CLIENT_MEMORY_MAX bytes,
 *          of which only what messages need is ever touched.
 * Units:   times in ms.
 */
#ifndef PROTO_CLIENT_CLIENT_H
#define PROTO_CLIENT_CLIENT_H

#include <stdint.h>

#include "proto/base/status.h"
#include "proto/client_message.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FL_CLIENT_ADDRESS_DEFAULT "127.0.0.1:7411"

enum { FL_CLIENT_MEMORY_MAX = 64 << 20 };

struct fl_client;

struct fl_client_config {
    const char *address;  /* "host:port", "[v6]:port" or "unix:/path"; NULL: FIRSTLIGHT_ADDR */
    const char *key_file; /* pool key; NULL: FIRSTLIGHT_KEY_FILE; "" or unset: none */
    int connect_ms;       /* for connecting and shaking hands; 0: 10 s */
};

/* Connect, and prove to hold the pool key where there is one.  `config` NULL: all defaults.
 * FL_LINK_LOST when nobody answers, FL_DENIED when the key is missing or wrong, FL_INVALID for an
 * address that is none, FL_DEADLINE, FL_PROTOCOL when it is no coordinator. */
FL_MUST_CHECK fl_status fl_client_open(const struct fl_client_config *config,
                                       struct fl_client **out);

/* Send a request; its version and id are filled in here, and *out_id says which id it got (NULL:
 * not wanted).  FL_TOO_LARGE above FL_CLIENT_MESSAGE_MAX; FL_LINK_LOST, FL_DEADLINE when the
 * coordinator does not take it. */
FL_MUST_CHECK fl_status fl_client_send(struct fl_client *client,
                                       const struct fl_client_request *request, uint64_t *out_id);

/* Ask to cancel a request; it ends with DONE(cancelled), or how it would have ended anyway. */
FL_MUST_CHECK fl_status fl_client_cancel(struct fl_client *client, uint64_t id);

/* The next event of any request, valid until the next call.  Waits timeout_ms (-1: for ever).
 * FL_AGAIN: none came in time, or a signal did.  FL_LINK_LOST when the coordinator closed the
 * connection, FL_PROTOCOL when it does not speak the protocol: then only close() is left. */
FL_MUST_CHECK fl_status fl_client_next(struct fl_client *client, int timeout_ms,
                                       struct fl_client_event *out);

/* Readable when next() may have something, for programs with a loop of their own.  Call next()
 * with timeout 0 until FL_AGAIN before waiting on it. */
int fl_client_fd(const struct fl_client *client);

void fl_client_close(struct fl_client *client);

#ifdef __cplusplus
}
#endif
#endif
