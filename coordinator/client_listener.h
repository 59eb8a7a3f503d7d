/* client_listener.h - one address that programs come in by.
 *
 * Over TCP only loopback is open to everybody; an address that other machines
 * reach wants a pool key.  A Unix socket is guarded by its file mode, 0600; one
 * that a dead coordinator left behind makes way, anything else at its path does
 * not.
 *
 * Thread:  owner (the main loop).
 */
#ifndef COORDINATOR_CLIENT_LISTENER_H
#define COORDINATOR_CLIENT_LISTENER_H

#include <stdbool.h>

#include "proto/base/status.h"
#include "proto/network_address.h"
#include "proto/pool_key.h"

#ifdef __cplusplus
extern "C" {
#endif

struct client_listener {
    int fd; /* does not block */
    bool is_unix;
    char path[FL_NETWORK_PATH_MAX];
    char text[FL_NETWORK_TEXT_MAX]; /* with the port it really has */
};

/* "host:port" (port 0: any) or "unix:/path"; `key` NULL: there is none.  FL_BUSY when it is in use,
 * FL_INVALID when it is no address, FL_DENIED when other machines reach it and there is no key, FL_IO
 * with the system's reason. */
FL_MUST_CHECK fl_status client_listener_open(const char *address, const struct fl_pool_key *key,
                                             struct client_listener *out);

/* A Unix socket's file goes with it. */
void client_listener_close(struct client_listener *listener);

#ifdef __cplusplus
}
#endif
#endif
