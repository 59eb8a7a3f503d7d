#include "coordinator/client_server.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/base/log.h"
#include "proto/base/spare_descriptor.h"
#include "proto/handshake.h"
#include "proto/network_address.h"
#include "proto/wire.h"

#define AUTH_DEADLINE_NS  (5 * FL_NS_PER_S)
#define FRAME_DEADLINE_NS (30 * FL_NS_PER_S) /* for the rest of a frame that began */
#define CLOSE_DEADLINE_NS (1 * FL_NS_PER_S)  /* for the last sentence to be read */

enum {
    SLOT_BITS = 8,
    IN_FIRST = 4096,
    OUT_FIRST = 16 << 10,
    OUT_KEEP = 256 << 10, /* an empty out buffer larger than this is given back */
    READ_ROUND = 64 << 10,
    EVENT_BATCH = 64,
    LISTEN_BACKLOG = 64,
    PACK_SIZE = 256 << 10,
    SEGMENT_SIZE = 1024, /* of a timeline, packed or generated, names and causes included */
    SPAN_SIZE = 512,
};

_Static_assert(CLIENT_SERVER_CLIENT_MAX == 1 << SLOT_BITS, "a handle's low bits are its slot");

enum client_state { CLIENT_FREE, CLIENT_SHAKING, CLIENT_OPEN, CLIENT_CLOSING };

struct client {
    enum client_state state;
    int fd;
    uint64_t handle;
    bool asked;           /* made a request: gone() is due */
    bool may_shake;       /* nothing but handshake records so far */
    bool shut;            /* our side of the socket is closed */
    bool wants_out;       /* EPOLLOUT is on */
    uint64_t deadline_ns; /* UINT64_MAX: none */
    struct fl_handshake handshake;
    unsigned char *in; /* [in_size]: a frame with its length, as far as it has come */
    size_t in_size;
    size_t in_used;
    unsigned char *out; /* [out_size]: bytes out_first .. out_used are to be sent */
    size_t out_size;
    size_t out_first;
    size_t out_used;
};

struct listener {
    int fd;
    bool is_unix;
    char path[FL_NETWORK_PATH_MAX];
    char text[FL_NETWORK_TEXT_MAX];
};

struct client_server {
    struct client_server_config config;
    int epoll;
    int spare; /* a descriptor to refuse a client with when none is left */
    uint32_t listener_count;
    struct listener listeners[CLIENT_SERVER_LISTENER_MAX];
    struct client clients[CLIENT_SERVER_CLIENT_MAX];
    uint64_t next_serial;
    void *scratch; /* [PACK_SIZE] for the mapper */
    void *packed;  /* [PACK_SIZE] */
};

/* What epoll hands back: a listener's index, or CLIENT_SERVER_LISTENER_MAX + a client's slot. */
static fl_status watch(struct client_server *server, int fd, uint32_t tag)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = tag};
    if (epoll_ctl(server->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        return FL_FAIL(FL_NO_MEMORY, "client socket cannot be watched: %s", strerror(errno));
    }
    return FL_OK;
}

static void watch_out(struct client_server *server, struct client *client, bool wants_out)
{
    if (client->wants_out == wants_out) {
        return;
    }
    const uint32_t tag = CLIENT_SERVER_LISTENER_MAX + (uint32_t)(client - server->clients);
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = tag};
    event.events |= wants_out ? EPOLLOUT : 0;
    (void)epoll_ctl(server->epoll, EPOLL_CTL_MOD, client->fd, &event);
    client->wants_out = wants_out;
}

fl_status client_server_open(const struct client_server_config *config, struct client_server **out)
{
    struct client_server *server = calloc(1, sizeof(*server));
    void *scratch = malloc(PACK_SIZE);
    void *packed = malloc(PACK_SIZE);
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    if (server == NULL || scratch == NULL || packed == NULL || epoll < 0) {
        free(server);
        free(scratch);
        free(packed);
        if (epoll >= 0) {
            close(epoll);
        }
        return FL_FAIL(FL_NO_MEMORY, "client server: no memory or no descriptor left");
    }
    *server = (struct client_server){.config = *config,
                                     .epoll = epoll,
                                     .spare = fl_spare_descriptor_open(),
                                     .next_serial = 1,
                                     .scratch = scratch,
                                     .packed = packed};
    *out = server;
    return FL_OK;
}

static void free_client(struct client_server *server, struct client *client)
{
    const uint64_t handle = client->handle;
    const bool asked = client->asked;
    close(client->fd);
    free(client->in);
    free(client->out);
    *client = (struct client){0};
    if (asked) {
        server->config.events.gone(server->config.events.ctx, handle);
    }
}

void client_server_close(struct client_server *server)
{
    if (server == NULL) {
        return;
    }
    for (uint32_t i = 0; i < CLIENT_SERVER_CLIENT_MAX; i++) {
        if (server->clients[i].state != CLIENT_FREE) {
            free_client(server, &server->clients[i]);
        }
    }
    for (uint32_t i = 0; i < server->listener_count; i++) {
        close(server->listeners[i].fd);
        if (server->listeners[i].is_unix) {
            unlink(server->listeners[i].path);
        }
    }
    fl_spare_descriptor_close(&server->spare);
    close(server->epoll);
    free(server->scratch);
    free(server->packed);
    free(server);
}

/* ---- listening ---- */

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
        return FL_FAIL(FL_INVALID, "cannot listen on unix:%s: %s", path, strerror(error));
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
    return FL_FAIL(FL_INVALID, "cannot listen on %s: %s", text, strerror(errno));
}

static fl_status bind_address(struct client_server *server, const char *text,
                              struct listener *listener)
{
    struct fl_network_address address;
    FL_TRY(fl_network_address_parse(text, strlen(text), &address));
    struct fl_network_socket name = {.storage.ss_family = AF_UNIX};
    size_t count = 0;
    if (!address.is_unix) {
        FL_TRY(fl_network_address_resolve(&address, &name, 1, &count));
        if (server->config.key == NULL && !fl_network_socket_is_loopback(&name)) {
            return FL_FAIL(FL_DENIED,
                           "%s is reached from other machines: that needs a pool key "
                           "(firstlight keygen --out FILE, then --key-file FILE)",
                           text);
        }
    }
    const int kind = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
    const int fd = socket(name.storage.ss_family, kind, 0);
    if (fd < 0) {
        return FL_FAIL(FL_INVALID, "no socket for %s: %s", text, strerror(errno));
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
    listener->fd = fd;
    listener->is_unix = address.is_unix;
    snprintf(listener->path, sizeof(listener->path), "%s", address.path);
    if (address.is_unix) {
        snprintf(listener->text, sizeof(listener->text), "unix:%s", address.path);
        return FL_OK;
    }
    struct fl_network_socket bound = {.size = sizeof(bound.storage)};
    (void)getsockname(fd, (struct sockaddr *)&bound.storage, &bound.size);
    fl_network_socket_text(&bound, listener->text);
    return FL_OK;
}

fl_status client_server_listen(struct client_server *server, const char *address)
{
    if (server->listener_count == CLIENT_SERVER_LISTENER_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "%s is one listen address too many: at most %d", address,
                       CLIENT_SERVER_LISTENER_MAX);
    }
    struct listener *listener = &server->listeners[server->listener_count];
    FL_TRY(bind_address(server, address, listener));
    server->listener_count++;
    return watch(server, listener->fd, server->listener_count - 1);
}

const char *client_server_address(const struct client_server *server, uint32_t index)
{
    return index < server->listener_count ? server->listeners[index].text : "";
}

int client_server_fd(const struct client_server *server)
{
    return server->epoll;
}

/* ---- sending ---- */

/* Ends our side once everything was sent, and gives the client a moment to read it.  gone() comes
 * with the end, from poll(), so that no sender sees its client vanish under it. */
static void begin_close(struct client_server *server, struct client *client)
{
    if (client->state == CLIENT_CLOSING) {
        return;
    }
    client->state = CLIENT_CLOSING;
    client->deadline_ns = fl_clock_now(&server->config.clock) + CLOSE_DEADLINE_NS;
    free(client->in);
    client->in = NULL;
    client->in_size = client->in_used = 0;
}

static void shut_when_sent(struct client *client)
{
    if (client->state == CLIENT_CLOSING && client->out_first == client->out_used && !client->shut) {
        client->shut = true;
        (void)shutdown(client->fd, SHUT_WR);
    }
}

/* Returns false when the connection is over. */
static bool write_out(struct client_server *server, struct client *client)
{
    while (client->out_first < client->out_used) {
        const ssize_t sent = send(client->fd, client->out + client->out_first,
                                  client->out_used - client->out_first, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) {
            continue;
        }
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            watch_out(server, client, true);
            return true;
        }
        if (sent < 0) {
            return false;
        }
        client->out_first += (size_t)sent;
    }
    client->out_first = client->out_used = 0;
    if (client->out_size > OUT_KEEP) {
        free(client->out);
        client->out = NULL;
        client->out_size = 0;
    }
    watch_out(server, client, false);
    shut_when_sent(client);
    return true;
}

/* Room for `size` more bytes in the out buffer. */
static bool reserve_out(struct client *client, size_t size)
{
    if (client->out_first > 0) {
        client->out_used -= client->out_first;
        memmove(client->out, client->out + client->out_first, client->out_used);
        client->out_first = 0;
    }
    size_t wanted = client->out_size > 0 ? client->out_size : OUT_FIRST;
    while (wanted < client->out_used + size) {
        wanted *= 2;
    }
    if (wanted > client->out_size) {
        unsigned char *grown = realloc(client->out, wanted);
        if (grown == NULL) {
            return false;
        }
        client->out = grown;
        client->out_size = wanted;
    }
    return true;
}

/* Queues one frame.  Returns false when there is no memory for it. */
static bool queue_frame(struct client *client, const void *data, size_t size)
{
    if (client->out_size - client->out_used < size + FL_FRAME_HEADER_SIZE &&
        !reserve_out(client, size + FL_FRAME_HEADER_SIZE)) {
        return false;
    }
    fl_frame_header_put(client->out + client->out_used, (uint32_t)size);
    memcpy(client->out + client->out_used + FL_FRAME_HEADER_SIZE, data, size);
    client->out_used += size + FL_FRAME_HEADER_SIZE;
    return true;
}

/* An upper bound for the packed event, generous. */
static size_t event_bound(const struct fl_client_event *event)
{
    switch (event->kind) {
    case FL_EVENT_TOKENS: return 4096 + (size_t)event->as.tokens.count * 5;
    case FL_EVENT_MODELS: return 4096 + (size_t)event->as.models.count * 2048;
    case FL_EVENT_TEXT: return PACK_SIZE + event->as.text.text.size;
    case FL_EVENT_STATUS:
        return PACK_SIZE + (size_t)event->as.status.loaded_count * FL_STAGE_COUNT_MAX * 256;
    case FL_EVENT_TIMELINE:
        return PACK_SIZE + (size_t)event->as.timeline.segment_count * SEGMENT_SIZE +
               (size_t)event->as.timeline.span_count * SPAN_SIZE;
    case FL_EVENT_ADMITTED:
    case FL_EVENT_PROGRESS:
    case FL_EVENT_DONE:
    case FL_EVENT_ERROR:
    case FL_EVENT_PLAN:
    case FL_EVENT_LOADED:
    case FL_EVENT_UNLOADED: break;
    }
    return PACK_SIZE;
}

static fl_status pack_and_queue(struct client_server *server, struct client *client,
                                const struct fl_client_event *event)
{
    const size_t bound = event_bound(event);
    const bool large = bound > PACK_SIZE;
    void *packed = large ? malloc(bound) : server->packed;
    void *scratch = large ? malloc(2 * bound) : server->scratch;
    size_t size = 0;
    fl_status status = FL_NO_MEMORY;
    if (packed != NULL && scratch != NULL) {
        struct fl_arena arena;
        fl_arena_init(&arena, scratch, large ? 2 * bound : PACK_SIZE);
        status = fl_client_event_pack(event, &arena, packed, large ? bound : PACK_SIZE, &size);
    }
    if (status == FL_OK && size > FL_CLIENT_MESSAGE_MAX) {
        status = FL_TOO_LARGE;
    }
    if (status == FL_OK && !queue_frame(client, packed, size)) {
        status = FL_NO_MEMORY;
    }
    if (large) {
        free(packed);
        free(scratch);
    }
    return status;
}

/* The last words on a connection. */
static void refuse(struct client_server *server, struct client *client, uint64_t id, fl_status code)
{
    const struct fl_client_event event = {
        .id = id,
        .kind = FL_EVENT_ERROR,
        .as.error = {.code = (uint32_t)code, .text = fl_last_error()}};
    (void)!pack_and_queue(server, client, &event);
    begin_close(server, client);
}

static struct client *find_client(struct client_server *server, uint64_t handle)
{
    struct client *client = &server->clients[handle & (CLIENT_SERVER_CLIENT_MAX - 1)];
    return client->state == CLIENT_OPEN && client->handle == handle ? client : NULL;
}

void client_server_send(struct client_server *server, uint64_t handle,
                        const struct fl_client_event *event)
{
    struct client *client = find_client(server, handle);
    if (client == NULL) {
        return;
    }
    const bool idle = client->out_first == client->out_used;
    const fl_status status = pack_and_queue(server, client, event);
    if (status != FL_OK) {
        refuse(server, client, event->id,
               FL_FAIL(FL_TOO_LARGE, "the answer does not fit one message of %d bytes",
                       FL_CLIENT_MESSAGE_MAX));
    } else if (client->out_used - client->out_first > CLIENT_SERVER_OUT_MAX) {
        refuse(server, client, event->id,
               FL_FAIL(FL_TOO_LARGE,
                       "the client left more than %d bytes unread; its requests are cancelled",
                       CLIENT_SERVER_OUT_MAX));
    }
    /* A connection found dead here is noticed by the next poll(), not inside the caller's step. */
    if (idle) {
        (void)!write_out(server, client);
    }
}

/* ---- receiving ---- */

static void take_record(struct client_server *server, struct client *client, const void *data,
                        size_t size)
{
    unsigned char answer[FL_HANDSHAKE_RECORD_MAX];
    size_t answer_size = 0;
    const fl_status status =
        fl_handshake_take(&client->handshake, data, size, answer, &answer_size);
    if (answer_size > 0 && !queue_frame(client, answer, answer_size)) {
        begin_close(server, client);
        return;
    }
    if (status == FL_OK) {
        client->state = CLIENT_OPEN;
        client->may_shake = false;
        client->deadline_ns = UINT64_MAX;
    } else if (status != FL_AGAIN) {
        begin_close(server, client);
    }
}

static void take_request(struct client_server *server, struct client *client, const void *data,
                         size_t size)
{
    const size_t arena_size = fl_client_request_arena(size);
    void *block = malloc(arena_size);
    struct fl_client_request request;
    if (block == NULL) {
        refuse(server, client, 0,
               FL_FAIL(FL_NO_MEMORY, "no memory for a request of %zu bytes", size));
        return;
    }
    struct fl_arena arena;
    fl_arena_init(&arena, block, arena_size);
    const fl_status status = fl_client_request_unpack(data, size, &arena, &request);
    if (status == FL_PROTOCOL || status == FL_NO_MEMORY) {
        refuse(server, client, 0, status);
    } else if (status != FL_OK) {
        /* A whole message with something wrong in it: the connection can go on. */
        const struct fl_client_event event = {
            .id = request.id,
            .kind = FL_EVENT_ERROR,
            .as.error = {.code = (uint32_t)status, .text = fl_last_error()}};
        client->may_shake = false;
        client_server_send(server, client->handle, &event);
    } else {
        client->may_shake = false;
        client->asked = true;
        server->config.events.request(server->config.events.ctx, client->handle, &request);
    }
    free(block);
}

static void take_frame(struct client_server *server, struct client *client, const void *data,
                       size_t size)
{
    const bool record = fl_handshake_is_record(data, size);
    if (record && client->may_shake) {
        client->state = CLIENT_SHAKING;
        take_record(server, client, data, size);
    } else if (client->state == CLIENT_SHAKING) {
        refuse(server, client, 0,
               FL_FAIL(FL_DENIED, "this coordinator asks for the pool key: give --key-file FILE "
                                  "(or FIRSTLIGHT_KEY_FILE)"));
    } else {
        take_request(server, client, data, size);
    }
}

/* The size of the frame that begins the in buffer; false when it is refused. */
static bool frame_size(struct client_server *server, struct client *client, size_t *out)
{
    const uint32_t size = fl_frame_header_get(client->in);
    const bool shaking = client->state == CLIENT_SHAKING;
    if (shaking && size > FL_HANDSHAKE_RECORD_MAX) {
        refuse(server, client, 0,
               FL_FAIL(FL_DENIED, "this coordinator asks for the pool key first: give --key-file "
                                  "FILE (or FIRSTLIGHT_KEY_FILE)"));
        return false;
    }
    if (size == 0 || size > FL_CLIENT_MESSAGE_MAX) {
        refuse(server, client, 0,
               FL_FAIL(FL_PROTOCOL,
                       "a frame of %" PRIu32 " bytes is outside 1 .. %d; this port speaks frames "
                       "of firstlight's client protocol",
                       size, FL_CLIENT_MESSAGE_MAX));
        return false;
    }
    *out = size;
    return true;
}

static bool reserve_in(struct client *client, size_t wanted)
{
    if (wanted <= client->in_size) {
        return true;
    }
    size_t grown_size = client->in_size > 0 ? client->in_size : IN_FIRST;
    while (grown_size < wanted) {
        grown_size *= 2;
    }
    unsigned char *grown = realloc(client->in, grown_size);
    if (grown == NULL) {
        return false;
    }
    client->in = grown;
    client->in_size = grown_size;
    return true;
}

/* Takes every whole frame out of the in buffer. */
static void take_frames(struct client_server *server, struct client *client)
{
    size_t taken = 0;
    while (client->state == CLIENT_OPEN || client->state == CLIENT_SHAKING) {
        size_t size = 0;
        memmove(client->in, client->in + taken, client->in_used - taken);
        client->in_used -= taken;
        if (client->in_used < FL_FRAME_HEADER_SIZE || !frame_size(server, client, &size) ||
            client->in_used < FL_FRAME_HEADER_SIZE + size) {
            break;
        }
        taken = FL_FRAME_HEADER_SIZE + size;
        take_frame(server, client, client->in + FL_FRAME_HEADER_SIZE, size);
    }
    if (client->state == CLIENT_OPEN) {
        const bool partial = client->in_used > 0;
        const uint64_t now = fl_clock_now(&server->config.clock);
        client->deadline_ns = partial ? now + FRAME_DEADLINE_NS : UINT64_MAX;
        if (!partial && client->in_size > OUT_KEEP) {
            free(client->in);
            client->in = NULL;
            client->in_size = 0;
        }
    }
}

/* Returns false when the connection is over. */
static bool read_in(struct client_server *server, struct client *client)
{
    if (client->state == CLIENT_CLOSING) {
        unsigned char ignored[4096];
        const ssize_t got = recv(client->fd, ignored, sizeof(ignored), 0);
        return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
    }
    /* As much as the frame still lacks, but no more memory than has come already. */
    size_t room = client->in_used < IN_FIRST ? IN_FIRST : client->in_used;
    room = room > READ_ROUND ? READ_ROUND : room;
    if (!reserve_in(client, client->in_used + room)) {
        return false;
    }
    const ssize_t got = recv(client->fd, client->in + client->in_used, room, 0);
    if (got <= 0) {
        return got < 0 && (errno == EAGAIN || errno == EINTR);
    }
    client->in_used += (size_t)got;
    take_frames(server, client);
    return true;
}

static void accept_client(struct client_server *server, const struct listener *listener)
{
    const int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        if (fl_spare_descriptor_refuse(&server->spare, listener->fd, errno)) {
            fl_log(FL_LOG_WARN, "client refused: no file descriptor is left (ulimit -n)");
        }
        return;
    }
    uint32_t slot = 0;
    while (slot < CLIENT_SERVER_CLIENT_MAX && server->clients[slot].state != CLIENT_FREE) {
        slot++;
    }
    if (slot == CLIENT_SERVER_CLIENT_MAX ||
        watch(server, fd, CLIENT_SERVER_LISTENER_MAX + slot) != FL_OK) {
        fl_log(FL_LOG_WARN, "client refused: %d are connected, the limit",
               CLIENT_SERVER_CLIENT_MAX);
        close(fd);
        return;
    }
    const int on = 1;
    if (!listener->is_unix) {
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    }
    struct client *client = &server->clients[slot];
    const bool must_shake = server->config.key != NULL && !listener->is_unix;
    *client = (struct client){.state = must_shake ? CLIENT_SHAKING : CLIENT_OPEN,
                              .fd = fd,
                              .handle = server->next_serial++ << SLOT_BITS | slot,
                              .may_shake = true,
                              .deadline_ns = UINT64_MAX};
    if (must_shake) {
        client->deadline_ns = fl_clock_now(&server->config.clock) + AUTH_DEADLINE_NS;
    }
    fl_handshake_init(&client->handshake, FL_PARTY_COORDINATOR, false, server->config.key);
}

static void serve(struct client_server *server, struct client *client, uint32_t events)
{
    bool alive = true;
    if ((events & EPOLLIN) != 0 || (events & (EPOLLHUP | EPOLLERR)) != 0) {
        alive = read_in(server, client);
    }
    if (alive && (client->out_first < client->out_used || client->state == CLIENT_CLOSING)) {
        alive = write_out(server, client);
    }
    if (!alive) {
        free_client(server, client);
    }
}

static uint64_t close_overdue(struct client_server *server)
{
    const uint64_t now = fl_clock_now(&server->config.clock);
    uint64_t next_ns = UINT64_MAX;
    for (uint32_t i = 0; i < CLIENT_SERVER_CLIENT_MAX; i++) {
        struct client *client = &server->clients[i];
        if (client->state == CLIENT_FREE) {
            continue;
        }
        if (client->deadline_ns <= now && client->state == CLIENT_CLOSING) {
            free_client(server, client);
            continue;
        }
        if (client->deadline_ns <= now) {
            refuse(server, client, 0,
                   client->state == CLIENT_SHAKING
                       ? FL_FAIL(FL_DENIED, "no proof of the pool key came within 5 s")
                       : FL_FAIL(FL_PROTOCOL, "a frame began and did not end within 30 s"));
            if (!write_out(server, client)) {
                free_client(server, client);
                continue;
            }
        }
        next_ns = client->deadline_ns < next_ns ? client->deadline_ns : next_ns;
    }
    return next_ns;
}

uint64_t client_server_poll(struct client_server *server)
{
    struct epoll_event events[EVENT_BATCH];
    const enum fl_log_level level = fl_fail_log_at(FL_LOG_DEBUG); /* clients hear of these */
    const int count = epoll_wait(server->epoll, events, EVENT_BATCH, 0);
    for (int i = 0; i < count; i++) {
        const uint32_t tag = events[i].data.u32;
        if (tag < CLIENT_SERVER_LISTENER_MAX) {
            accept_client(server, &server->listeners[tag]);
        } else if (server->clients[tag - CLIENT_SERVER_LISTENER_MAX].state != CLIENT_FREE) {
            serve(server, &server->clients[tag - CLIENT_SERVER_LISTENER_MAX], events[i].events);
        }
    }
    const uint64_t next_ns = close_overdue(server);
    (void)fl_fail_log_at(level);
    return next_ns;
}
