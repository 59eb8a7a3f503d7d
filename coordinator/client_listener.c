#include "coordinator/client_listener.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { LISTEN_BACKLOG = 64 };

/* True when somebody answers on a Unix socket. */
static bool unix_answers(const struct sockaddr_un *name)
{
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const bool answers =
        fd >= 0 && (connect(fd, (const struct sockaddr *)name, sizeof(*name)) == 0 ||
                    errno == EAGAIN || errno == EINPROGRESS);
    if (fd >= 0) {
        close(fd);
    }
    return answers;
}

static fl_status listen_unix(const char *path, int fd)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof(name.sun_path), "%s", path);
    struct stat found;
    if (lstat(path, &found) == 0) {
        if (!S_ISSOCK(found.st_mode)) {
            return FL_FAIL(FL_INVALID, "%s exists and is not a socket; choose another path", path);
        }
        if (unix_answers(&name)) {
            return FL_FAIL(FL_BUSY, "unix:%s is in use by another coordinator", path);
        }
        unlink(path); /* left behind by one that is gone */
    }
    const mode_t before = umask(0177);
    const int bound = bind(fd, (const struct sockaddr *)&name, sizeof(name));
    const int error = errno;
    umask(before);
    if (bound != 0) {
        return FL_FAIL(FL_IO, "cannot listen on unix:%s: %s", path, strerror(error));
    }
    return FL_OK;
}

static fl_status listen_tcp(const char *text, const struct fl_network_socket *name, int fd)
{
    const int on = 1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, (const struct sockaddr *)&name->storage, name->size) == 0) {
        return FL_OK;
    }
    if (errno == EADDRINUSE) {
        return FL_FAIL(FL_BUSY,
                       "port in use: another program listens on %s; stop it, or choose another "
                       "port with --client-listen",
                       text);
    }
    return FL_FAIL(FL_IO, "cannot listen on %s: %s", text, strerror(errno));
}

/* The one socket address of a TCP listener. */
static fl_status resolve(const char *text, const struct fl_network_address *address,
                         const struct fl_pool_key *key, struct fl_network_socket *out)
{
    size_t count = 0;
    FL_TRY(fl_network_address_resolve(address, out, 1, &count));
    if (key == NULL && !fl_network_socket_is_loopback(out)) {
        return FL_FAIL(FL_DENIED,
                       "%s is reached from other machines: that needs a pool key "
                       "(firstlight keygen --out FILE, then --key-file FILE)",
                       text);
    }
    return FL_OK;
}

fl_status client_listener_open(const char *text, const struct fl_pool_key *key,
                               struct client_listener *out)
{
    struct fl_network_address address;
    FL_TRY(fl_network_address_parse(text, strlen(text), &address));
    struct fl_network_socket name = {.storage.ss_family = AF_UNIX};
    if (!address.is_unix) {
        FL_TRY(resolve(text, &address, key, &name));
    }
    const int kind = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
    const int fd = socket(name.storage.ss_family, kind, 0);
    if (fd < 0) {
        return FL_FAIL(FL_IO, "no socket for %s: %s", text, strerror(errno));
    }
    fl_status status =
        address.is_unix ? listen_unix(address.path, fd) : listen_tcp(text, &name, fd);
    if (status == FL_OK && listen(fd, LISTEN_BACKLOG) != 0) {
        status = FL_FAIL(FL_BUSY, "cannot listen on %s: %s", text, strerror(errno));
    }
    if (status != FL_OK) {
        close(fd);
        return status;
    }
    out->fd = fd;
    out->is_unix = address.is_unix;
    snprintf(out->path, sizeof(out->path), "%s", address.path);
    if (address.is_unix) {
        snprintf(out->text, sizeof(out->text), "unix:%s", address.path);
        return FL_OK;
    }
    struct fl_network_socket bound = {.size = sizeof(bound.storage)};
    (void)getsockname(fd, (struct sockaddr *)&bound.storage, &bound.size);
    fl_network_socket_text(&bound, out->text);
    return FL_OK;
}

void client_listener_close(struct client_listener *listener)
{
    close(listener->fd);
    if (listener->is_unix) {
        unlink(listener->path);
    }
}
