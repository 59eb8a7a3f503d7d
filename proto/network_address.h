/* network_address.h - places on a network as people write them: "host:port".
 *
 * A host is a name, an IPv4 address, or an IPv6 address in brackets
 * ("[::1]:7411").  "unix:/path" is a socket in the file system.  A name that
 * has both kinds of address yields the IPv4 ones first: what listens on
 * "localhost" is then reached by everyone who says "localhost".
 *
 * Thread:  any.
 * Memory:  plain values; resolve() may wait for the resolver when the host is a name.
 */
#ifndef PROTO_NETWORK_ADDRESS_H
#define PROTO_NETWORK_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FL_NETWORK_HOST_MAX = 256,
    FL_NETWORK_PATH_MAX = 108,   /* sun_path of Linux */
    FL_NETWORK_TEXT_MAX = 320,   /* any address as text, with its NUL */
    FL_NETWORK_RESOLVED_MAX = 8, /* addresses of one name that are tried */
};

struct fl_network_address {
    bool is_unix;
    uint16_t port;
    char host[FL_NETWORK_HOST_MAX]; /* without brackets */
    char path[FL_NETWORK_PATH_MAX];
};

struct fl_network_socket {
    socklen_t size;
    struct sockaddr_storage storage;
};

/* False when the text is no address; says nothing.  For callers with a sentence of their own. */
bool fl_network_address_value(const char *text, size_t size, struct fl_network_address *out);

/* Parse text of `size` bytes.  FL_INVALID with a sentence that quotes it. */
FL_MUST_CHECK fl_status fl_network_address_parse(const char *text, size_t size,
                                                 struct fl_network_address *out);

/* The socket addresses to try, in order; at least one on FL_OK.  FL_INVALID when the host names
 * nothing. */
FL_MUST_CHECK fl_status fl_network_address_resolve(const struct fl_network_address *address,
                                                   struct fl_network_socket *out, size_t out_max,
                                                   size_t *out_count);

/* True for 127.0.0.0/8, ::1 and unix sockets: nobody else's machine reaches them. */
bool fl_network_socket_is_loopback(const struct fl_network_socket *socket);

/* Whether every address the text resolves to is loopback.  FL_INVALID as parse and resolve. */
FL_MUST_CHECK fl_status fl_network_text_is_loopback(const char *text, bool *out);

/* "127.0.0.1:7411", "[::1]:7411", "unix:/path"; out [FL_NETWORK_TEXT_MAX]. */
void fl_network_socket_text(const struct fl_network_socket *socket, char *out);

/* What others should use for a listener bound to `bound` ("0.0.0.0:7413"): the same, or, when its
 * host is a wildcard, this machine's address toward `host_port`.  out [FL_NETWORK_TEXT_MAX]. */
FL_MUST_CHECK fl_status fl_network_advertise(const char *bound, const char *host_port, char *out);

/* The address of this machine that packets to `host_port` leave from, without a port and without
 * sending any: where a node should listen so that those who reach that host reach it too.
 * out [FL_NETWORK_TEXT_MAX], IPv6 in brackets.  FL_INVALID, FL_NOT_FOUND when there is no route. */
FL_MUST_CHECK fl_status fl_network_source_toward(const char *host_port, char *out);

#ifdef __cplusplus
}
#endif
#endif
