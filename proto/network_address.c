#include "proto/network_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

static const char unix_prefix[] = "unix:";

enum { QUOTE_MAX = 64 }; /* of foreign text in a sentence */

static bool has_control(const char *text, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if ((unsigned char)text[i] <= ' ' || text[i] == 0x7f) {
            return true;
        }
    }
    return false;
}

static bool parse_unix(const char *path, size_t size, struct fl_network_address *out)
{
    if (size == 0 || size >= FL_NETWORK_PATH_MAX || memchr(path, 0, size) != NULL) {
        return false;
    }
    *out = (struct fl_network_address){.is_unix = true};
    memcpy(out->path, path, size);
    return true;
}

static bool parse_port(const char *text, size_t size, uint16_t *out)
{
    uint32_t port = 0;
    if (size == 0 || size > 5) {
        return false;
    }
    for (size_t i = 0; i < size; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        port = port * 10 + (uint32_t)(text[i] - '0');
    }
    *out = (uint16_t)port;
    return port <= UINT16_MAX;
}

bool fl_network_address_value(const char *text, size_t size, struct fl_network_address *out)
{
    const size_t prefix = sizeof(unix_prefix) - 1;
    if (size >= prefix && memcmp(text, unix_prefix, prefix) == 0) {
        return parse_unix(text + prefix, size - prefix, out);
    }
    const char *colon = size > 0 ? memrchr(text, ':', size) : NULL;
    const char *host = text;
    size_t host_size = colon != NULL ? (size_t)(colon - text) : 0;
    if (host_size >= 2 && host[0] == '[' && host[host_size - 1] == ']') {
        host++;
        host_size -= 2;
    } else if (memchr(host, ':', host_size) != NULL) {
        return false; /* IPv6 without brackets: where does the port begin? */
    }
    struct fl_network_address address = {.is_unix = false};
    if (colon == NULL || host_size == 0 || host_size >= FL_NETWORK_HOST_MAX ||
        has_control(host, host_size) ||
        !parse_port(colon + 1, size - (size_t)(colon + 1 - text), &address.port)) {
        return false;
    }
    memcpy(address.host, host, host_size);
    *out = address;
    return true;
}

fl_status fl_network_address_parse(const char *text, size_t size, struct fl_network_address *out)
{
    char quote[QUOTE_MAX + 1];
    if (fl_network_address_value(text, size, out)) {
        return FL_OK;
    }
    size_t used = 0;
    for (; used < size && used < QUOTE_MAX; used++) {
        quote[used] = (unsigned char)text[used] < ' ' || text[used] == 0x7f ? '?' : text[used];
    }
    quote[used] = '\0';
    return FL_FAIL(FL_INVALID,
                   "address \"%s\" is not HOST:PORT with a port of 0 to 65535 "
                   "(IPv6 in brackets: [::1]:7411), nor unix:/PATH",
                   quote);
}

/* Append those of one family; 0 when there is no room or none of them. */
static size_t take_family(const struct addrinfo *list, int family, struct fl_network_socket *out,
                          size_t room)
{
    size_t count = 0;
    for (; list != NULL && count < room; list = list->ai_next) {
        if (list->ai_family == family && list->ai_addrlen <= sizeof(out->storage)) {
            out[count].size = list->ai_addrlen;
            memset(&out[count].storage, 0, sizeof(out->storage));
            memcpy(&out[count].storage, list->ai_addr, list->ai_addrlen);
            count++;
        }
    }
    return count;
}

fl_status fl_network_address_resolve(const struct fl_network_address *address,
                                     struct fl_network_socket *out, size_t out_max,
                                     size_t *out_count)
{
    if (address->is_unix) {
        struct sockaddr_un name = {.sun_family = AF_UNIX};
        snprintf(name.sun_path, sizeof(name.sun_path), "%s", address->path);
        memset(&out[0], 0, sizeof(out[0]));
        memcpy(&out[0].storage, &name, sizeof(name));
        out[0].size = sizeof(name);
        *out_count = 1;
        return FL_OK;
    }
    char port[8];
    snprintf(port, sizeof(port), "%u", (unsigned)address->port);
    const struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    const int error = getaddrinfo(address->host, port, &hints, &list);
    if (error != 0) {
        return FL_FAIL(FL_INVALID, "host \"%.64s\" does not resolve: %s", address->host,
                       gai_strerror(error));
    }
    size_t count = take_family(list, AF_INET, out, out_max);
    count += take_family(list, AF_INET6, out + count, out_max - count);
    freeaddrinfo(list);
    if (count == 0) {
        return FL_FAIL(FL_INVALID, "host \"%.64s\" has neither an IPv4 nor an IPv6 address",
                       address->host);
    }
    *out_count = count;
    return FL_OK;
}

bool fl_network_socket_is_loopback(const struct fl_network_socket *socket)
{
    if (socket->storage.ss_family == AF_UNIX) {
        return true;
    }
    if (socket->storage.ss_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, &socket->storage, sizeof(in));
        return ntohl(in.sin_addr.s_addr) >> 24 == 127;
    }
    struct sockaddr_in6 in6;
    memcpy(&in6, &socket->storage, sizeof(in6));
    return socket->storage.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&in6.sin6_addr);
}

fl_status fl_network_text_is_loopback(const char *text, bool *out)
{
    struct fl_network_address address;
    struct fl_network_socket sockets[FL_NETWORK_RESOLVED_MAX];
    size_t count = 0;
    FL_TRY(fl_network_address_parse(text, strlen(text), &address));
    FL_TRY(fl_network_address_resolve(&address, sockets, FL_NETWORK_RESOLVED_MAX, &count));
    *out = true;
    for (size_t i = 0; i < count; i++) {
        *out = *out && fl_network_socket_is_loopback(&sockets[i]);
    }
    return FL_OK;
}

/* The address alone, IPv6 in brackets; returns the port. */
static unsigned host_text(const struct sockaddr_storage *storage, char out[INET6_ADDRSTRLEN + 2])
{
    if (storage->ss_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, storage, sizeof(in));
        inet_ntop(AF_INET, &in.sin_addr, out, INET6_ADDRSTRLEN);
        return ntohs(in.sin_port);
    }
    struct sockaddr_in6 in6;
    memcpy(&in6, storage, sizeof(in6));
    out[0] = '[';
    inet_ntop(AF_INET6, &in6.sin6_addr, out + 1, INET6_ADDRSTRLEN);
    const size_t end = strlen(out);
    out[end] = ']';
    out[end + 1] = '\0';
    return ntohs(in6.sin6_port);
}

void fl_network_socket_text(const struct fl_network_socket *socket, char *out)
{
    char host[INET6_ADDRSTRLEN + 2] = "";
    if (socket->storage.ss_family == AF_UNIX) {
        struct sockaddr_un name;
        memcpy(&name, &socket->storage, sizeof(name));
        snprintf(out, FL_NETWORK_TEXT_MAX, "unix:%.*s", (int)sizeof(name.sun_path), name.sun_path);
    } else if (socket->storage.ss_family == AF_INET || socket->storage.ss_family == AF_INET6) {
        const unsigned port = host_text(&socket->storage, host);
        snprintf(out, FL_NETWORK_TEXT_MAX, "%s:%u", host, port);
    } else {
        snprintf(out, FL_NETWORK_TEXT_MAX, "unknown");
    }
}

/* Asks the routing table by connecting a datagram socket, which sends nothing. */
static bool source_toward(const struct fl_network_socket *target, char *out)
{
    const int fd = socket(target->storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return false;
    }
    struct sockaddr_storage source = {0};
    socklen_t size = sizeof(source);
    const bool found = connect(fd, (const struct sockaddr *)&target->storage, target->size) == 0 &&
                       getsockname(fd, (struct sockaddr *)&source, &size) == 0;
    close(fd);
    if (found) {
        char host[INET6_ADDRSTRLEN + 2];
        host_text(&source, host);
        snprintf(out, FL_NETWORK_TEXT_MAX, "%s", host);
    }
    return found;
}

fl_status fl_network_source_toward(const char *host_port, char *out)
{
    struct fl_network_address address;
    struct fl_network_socket sockets[FL_NETWORK_RESOLVED_MAX];
    size_t count = 0;
    FL_TRY(fl_network_address_parse(host_port, strlen(host_port), &address));
    if (address.is_unix) {
        return FL_FAIL(FL_INVALID, "address \"%.64s\" is not on a network: give HOST:PORT",
                       host_port);
    }
    if (address.port == 0) {
        address.port = 9; /* connect() wants one; any will do */
    }
    FL_TRY(fl_network_address_resolve(&address, sockets, FL_NETWORK_RESOLVED_MAX, &count));
    for (size_t i = 0; i < count; i++) {
        if (source_toward(&sockets[i], out)) {
            return FL_OK;
        }
    }
    return FL_FAIL(FL_NOT_FOUND, "no route from this machine to %.64s", host_port);
}

static bool is_wildcard(const struct fl_network_socket *socket)
{
    if (socket->storage.ss_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, &socket->storage, sizeof(in));
        return in.sin_addr.s_addr == htonl(INADDR_ANY);
    }
    struct sockaddr_in6 in6;
    memcpy(&in6, &socket->storage, sizeof(in6));
    return socket->storage.ss_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&in6.sin6_addr);
}

fl_status fl_network_advertise(const char *bound, const char *host_port, char *out)
{
    struct fl_network_address address;
    struct fl_network_socket sockets[FL_NETWORK_RESOLVED_MAX];
    size_t count = 0;
    FL_TRY(fl_network_address_parse(bound, strlen(bound), &address));
    FL_TRY(fl_network_address_resolve(&address, sockets, FL_NETWORK_RESOLVED_MAX, &count));
    if (!is_wildcard(&sockets[0])) {
        snprintf(out, FL_NETWORK_TEXT_MAX, "%s", bound);
        return FL_OK;
    }
    char host[FL_NETWORK_TEXT_MAX];
    FL_TRY(fl_network_source_toward(host_port, host));
    snprintf(out, FL_NETWORK_TEXT_MAX, "%.300s:%u", host, (unsigned)address.port);
    return FL_OK;
}
