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
#include <unistd.h>

#include "coordinator/client_listener.h"
#include "proto/base/log.h"
#include "proto/base/log_throttle.h"
#include "proto/base/spare_descriptor.h"
#include "proto/handshake.h"
#include "proto/network_address.h"
#include "proto/wire.h"

#define AUTH_DEADLINE_NS  (5 * FL_NS_PER_S)
#define FRAME_DEADLINE_NS (30 * FL_NS_PER_S) /* for the rest of a frame that began */
#define CLOSE_DEADLINE_NS (1 * FL_NS_PER_S)  /* for the last sentence to be read */

enum {
    SLOT_BITS = 8,
    EVENT_BATCH = 64,
    PACK_SIZE = 256 << 10,
    SEGMENT_SIZE = 1024, /* of a timeline, packed or generated, names and causes included */
    SPAN_SIZE = 512,
    /* What a client may leave unread, the message that is too much, and the last words. */
    OUT_SIZE_MAX = CLIENT_SERVER_OUT_MAX + FL_CLIENT_MESSAGE_MAX + 2 * PACK_SIZE,
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
    struct fl_frame_reader in;
    struct fl_frame_writer out;
};

struct client_server {
    struct client_server_config config;
    int epoll;
    int spare; /* a descriptor to refuse a client with when none is left */
    struct fl_log_throttle refused;
    uint32_t listener_count;
    struct client_listener listeners[CLIENT_SERVER_LISTENER_MAX];
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
    fl_frame_reader_free(&client->in);
    fl_frame_writer_free(&client->out);
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
        client_listener_close(&server->listeners[i]);
    }
    fl_spare_descriptor_close(&server->spare);
    close(server->epoll);
    free(server->scratch);
    free(server->packed);
    free(server);
}

/* ---- listening ---- */

fl_status client_server_listen(struct client_server *server, const char *address)
{
    if (server->listener_count == CLIENT_SERVER_LISTENER_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "%s is one listen address too many: at most %d", address,
                       CLIENT_SERVER_LISTENER_MAX);
    }
    struct client_listener *listener = &server->listeners[server->listener_count];
    FL_TRY(client_listener_open(address, server->config.key, listener));
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
    fl_frame_reader_free(&client->in);
}

/* Bytes that the socket has not taken yet. */
static size_t unsent_size(const struct client *client)
{
    const unsigned char *bytes = NULL;
    size_t size = 0;
    fl_frame_writer_bytes(&client->out, &bytes, &size);
    return size;
}

static void shut_when_sent(struct client *client)
{
    if (client->state == CLIENT_CLOSING && unsent_size(client) == 0 && !client->shut) {
        client->shut = true;
        (void)shutdown(client->fd, SHUT_WR);
    }
}

/* Returns false when the connection is over. */
static bool write_out(struct client_server *server, struct client *client)
{
    const unsigned char *bytes = NULL;
    size_t size = 0;
    for (;;) {
        fl_frame_writer_bytes(&client->out, &bytes, &size);
        if (size == 0) {
            break;
        }
        const ssize_t sent = send(client->fd, bytes, size, MSG_NOSIGNAL);
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
        fl_frame_writer_sent(&client->out, (size_t)sent);
    }
    watch_out(server, client, false);
    shut_when_sent(client);
    return true;
}

/* Queues one frame.  Returns false when there is no memory for it. */
static bool queue_frame(struct client *client, const void *data, size_t size)
{
    unsigned char *frame = NULL;
    if (fl_frame_writer_put(&client->out, size, &frame) != FL_OK) {
        return false;
    }
    memcpy(frame, data, size);
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

static struct fl_client_event error_event(uint64_t id, fl_status code)
{
    return (struct fl_client_event){.id = id,
                                    .kind = FL_EVENT_ERROR,
                                    .as.error = {.code = (uint32_t)code, .text = fl_last_error()}};
}

/* The last words on a connection. */
static void refuse(struct client_server *server, struct client *client, uint64_t id, fl_status code)
{
    const struct fl_client_event event = error_event(id, code);
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
    const bool idle = unsent_size(client) == 0;
    const fl_status status = pack_and_queue(server, client, event);
    if (status != FL_OK) {
        refuse(server, client, event->id,
               FL_FAIL(FL_TOO_LARGE, "the answer does not fit one message of %d bytes",
                       FL_CLIENT_MESSAGE_MAX));
    } else if (unsent_size(client) > CLIENT_SERVER_OUT_MAX) {
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
        fl_frame_reader_limit(&client->in, FL_CLIENT_MESSAGE_MAX);
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
        const struct fl_client_event event = error_event(request.id, status);
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
        fl_frame_reader_limit(&client->in, FL_HANDSHAKE_RECORD_MAX);
        take_record(server, client, data, size);
    } else if (client->state == CLIENT_SHAKING) {
        refuse(server, client, 0,
               FL_FAIL(FL_DENIED, "this coordinator asks for the pool key: give --key-file FILE "
                                  "(or FIRSTLIGHT_KEY_FILE)"));
    } else {
        take_request(server, client, data, size);
    }
}

/* A frame whose length no frame has here. */
static void refuse_length(struct client_server *server, struct client *client)
{
    if (client->state == CLIENT_SHAKING) {
        refuse(server, client, 0,
               FL_FAIL(FL_DENIED, "this coordinator asks for the pool key first: give --key-file "
                                  "FILE (or FIRSTLIGHT_KEY_FILE)"));
        return;
    }
    refuse(server, client, 0,
           FL_FAIL(FL_PROTOCOL,
                   "the length of a frame is outside 1 .. %d bytes; this port speaks frames of "
                   "firstlight's client protocol",
                   FL_CLIENT_MESSAGE_MAX));
}

/* Takes every whole frame that has come. */
static void take_frames(struct client_server *server, struct client *client)
{
    while (client->state == CLIENT_OPEN || client->state == CLIENT_SHAKING) {
        const unsigned char *frame = NULL;
        size_t size = 0;
        const fl_status status = fl_frame_reader_next(&client->in, &frame, &size);
        if (status == FL_AGAIN) {
            break;
        }
        if (status != FL_OK || size == 0) {
            refuse_length(server, client);
            return;
        }
        take_frame(server, client, frame, size);
    }
    if (client->state == CLIENT_OPEN) {
        const bool partial = fl_frame_reader_partial(&client->in);
        const uint64_t now = fl_clock_now(&server->config.clock);
        client->deadline_ns = partial ? now + FRAME_DEADLINE_NS : UINT64_MAX;
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
    unsigned char *space = NULL;
    size_t room = 0;
    if (fl_frame_reader_space(&client->in, &space, &room) != FL_OK) {
        return false;
    }
    const ssize_t got = recv(client->fd, space, room, 0);
    if (got <= 0) {
        return got < 0 && (errno == EAGAIN || errno == EINTR);
    }
    fl_frame_reader_filled(&client->in, (size_t)got);
    take_frames(server, client);
    return true;
}

/* A line in the log, unless many came before. */
static void log_refused(struct client_server *server, const char *why)
{
    if (fl_log_throttle_pass(&server->refused, fl_clock_now(&server->config.clock))) {
        fl_log(FL_LOG_WARN, "client refused: %s", why);
    }
}

static void open_client(struct client_server *server, const struct client_listener *listener,
                        uint32_t slot, int fd)
{
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
    fl_frame_reader_init(&client->in, must_shake ? FL_HANDSHAKE_RECORD_MAX : FL_CLIENT_MESSAGE_MAX);
    fl_frame_writer_init(&client->out, OUT_SIZE_MAX);
    fl_handshake_init(&client->handshake, FL_PARTY_COORDINATOR, false, server->config.key);
}

static void accept_client(struct client_server *server, const struct client_listener *listener)
{
    const int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        if (fl_spare_descriptor_refuse(&server->spare, listener->fd, errno)) {
            log_refused(server, "no file descriptor is left (ulimit -n)");
        }
        return;
    }
    uint32_t slot = 0;
    while (slot < CLIENT_SERVER_CLIENT_MAX && server->clients[slot].state != CLIENT_FREE) {
        slot++;
    }
    if (slot == CLIENT_SERVER_CLIENT_MAX ||
        watch(server, fd, CLIENT_SERVER_LISTENER_MAX + slot) != FL_OK) {
        char why[64];
        snprintf(why, sizeof(why), "%d are connected, the limit", CLIENT_SERVER_CLIENT_MAX);
        log_refused(server, why);
        close(fd);
        return;
    }
    open_client(server, listener, slot, fd);
}

static void serve(struct client_server *server, struct client *client, uint32_t events)
{
    bool alive = true;
    if ((events & EPOLLIN) != 0 || (events & (EPOLLHUP | EPOLLERR)) != 0) {
        alive = read_in(server, client);
    }
    if (alive && (unsent_size(client) > 0 || client->state == CLIENT_CLOSING)) {
        alive = write_out(server, client);
    }
    if (!alive) {
        free_client(server, client);
    }
}

static uint64_t close_overdue(struct client_server *server)
{
    const uint64_t now = fl_clock_now(&server->config.clock);
    uint64_t next_ns = fl_log_throttle_poll(&server->refused, now, FL_LOG_WARN, "clients refused");
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
