#include "cluster/door.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "proto/base/log_throttle.h"
#include "proto/base/spare_descriptor.h"

enum {
    FRAME_HEADER = 2,
    FRAME_MAX = FRAME_HEADER + DOOR_RECORD_MAX,
    TICKET_SIZE = 8,
    TEXT_MAX = 256,
    PEER_MAX = 128,
    EVENT_BATCH = 32,
};

enum visit_state {
    VISIT_FREE,
    VISIT_CONNECTING,
    VISIT_SHAKING,
    VISIT_WAIT_PASS, /* the handshake is done */
    VISIT_ADMITTED,
};

struct visit {
    enum visit_state state;
    bool opener;
    int fd;
    door_visit id;
    uint64_t ticket;
    uint64_t deadline_ns; /* until admitted */
    struct fl_handshake handshake;
    int error; /* errno of the last target; valid when none is left */
    size_t target_next;
    size_t target_count;
    struct fl_network_socket targets[FL_NETWORK_RESOLVED_MAX];
    char peer[PEER_MAX];
    size_t used; /* bytes in `in` */
    unsigned char in[FRAME_MAX];
};

struct door {
    struct door_config config;
    int listener;
    int epoll;
    int spare; /* a descriptor to turn a visitor away with when none is left */
    struct fl_log_throttle turned_away;
    uint64_t now_ns; /* of the poll under way */
    uint64_t counter;
    size_t strangers;
    size_t pending; /* visits with a deadline */
    struct visit visits[DOOR_VISIT_MAX];
};

static uint64_t get_u64(const unsigned char *in)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) {
        value |= (uint64_t)in[i] << (8 * i);
    }
    return value;
}

static bool is_pending(const struct visit *visit)
{
    return visit->state != VISIT_FREE && visit->state != VISIT_ADMITTED;
}

static bool is_stranger(const struct visit *visit)
{
    return !visit->opener && is_pending(visit);
}

static struct visit *visit_take(struct door *door)
{
    for (size_t i = 0; i < DOOR_VISIT_MAX; i++) {
        struct visit *visit = &door->visits[i];
        if (visit->state == VISIT_FREE) {
            *visit = (struct visit){.fd = -1, .id = ++door->counter * DOOR_VISIT_MAX + i};
            return visit;
        }
    }
    return NULL;
}

static void visit_free(struct door *door, struct visit *visit)
{
    door->strangers -= is_stranger(visit);
    door->pending -= is_pending(visit);
    if (visit->fd >= 0) {
        close(visit->fd); /* leaves the epoll set with it */
    }
    visit->fd = -1;
    visit->state = VISIT_FREE;
}

static void visit_gone(struct door *door, struct visit *visit, fl_status why, const char *text)
{
    const bool told = visit->opener || visit->state == VISIT_ADMITTED;
    const door_visit id = visit->id;
    visit_free(door, visit);
    if (told) {
        door->config.events.gone(door->config.events.ctx, id, why, text);
    } else {
        fl_log(FL_LOG_DEBUG, "visitor %s turned away: %s", visit->peer, text);
    }
}

/* `id` is the visit's, 0 for the listening socket. */
static bool watch(struct door *door, int fd, door_visit id, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = id};
    return epoll_ctl(door->epoll, EPOLL_CTL_ADD, fd, &event) == 0 ||
           epoll_ctl(door->epoll, EPOLL_CTL_MOD, fd, &event) == 0;
}

/* Records are few and small: a socket that does not take one at once is of no use. */
static bool put_frame(struct visit *visit, const void *record, size_t size)
{
    unsigned char frame[FRAME_MAX];
    frame[0] = (unsigned char)size;
    frame[1] = (unsigned char)(size >> 8);
    memcpy(frame + FRAME_HEADER, record, size);
    return send(visit->fd, frame, FRAME_HEADER + size, MSG_NOSIGNAL | MSG_DONTWAIT) ==
           (ssize_t)(FRAME_HEADER + size);
}

static bool put_pass(struct door *door, struct visit *visit)
{
    unsigned char record[DOOR_RECORD_MAX];
    for (int i = 0; i < TICKET_SIZE; i++) {
        record[i] = (unsigned char)(visit->opener ? 0 : visit->ticket >> (8 * i));
    }
    memcpy(record + TICKET_SIZE, door->config.pass, door->config.pass_size);
    return put_frame(visit, record, TICKET_SIZE + door->config.pass_size);
}

/* Try the next target of a visit; false when there is none left. */
static bool try_next(struct door *door, struct visit *visit)
{
    const int one = 1;
    while (visit->target_next < visit->target_count) {
        const struct fl_network_socket *target = &visit->targets[visit->target_next++];
        if (visit->fd >= 0) {
            close(visit->fd);
        }
        visit->fd =
            socket(target->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (visit->fd < 0) {
            visit->error = errno;
            continue;
        }
        (void)setsockopt(visit->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        if ((connect(visit->fd, (const struct sockaddr *)&target->storage, target->size) == 0 ||
             errno == EINPROGRESS) &&
            watch(door, visit->fd, visit->id, EPOLLOUT)) {
            visit->state = VISIT_CONNECTING;
            return true;
        }
        visit->error = errno;
    }
    return false;
}

static void connect_failed(struct door *door, struct visit *visit, int error)
{
    visit->error = error;
    if (!try_next(door, visit)) {
        char text[TEXT_MAX];
        snprintf(text, sizeof(text), "cannot reach %s: %s", visit->peer, strerror(visit->error));
        visit_gone(door, visit, FL_LINK_LOST, text);
    }
}

static void connected(struct door *door, struct visit *visit)
{
    int error = 0;
    socklen_t size = sizeof(error);
    if (getsockopt(visit->fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
        error = errno;
    }
    unsigned char hello[FL_HANDSHAKE_RECORD_MAX];
    size_t hello_size = 0;
    if (error != 0) {
        connect_failed(door, visit, error);
        return;
    }
    fl_handshake_init(&visit->handshake, door->config.party, true, door->config.key);
    fl_handshake_hello(&visit->handshake, hello, &hello_size);
    visit->state = VISIT_SHAKING;
    visit->used = 0;
    if (!watch(door, visit->fd, visit->id, EPOLLIN) || !put_frame(visit, hello, hello_size)) {
        connect_failed(door, visit, ECONNRESET);
    }
}

static void admit(struct door *door, struct visit *visit, const unsigned char *record, size_t size)
{
    if (size <= TICKET_SIZE) {
        visit_gone(door, visit, FL_PROTOCOL, "an address of no bytes was given at the door");
        return;
    }
    door->strangers -= is_stranger(visit);
    door->pending -= is_pending(visit);
    visit->state = VISIT_ADMITTED;
    if (visit->opener) {
        visit->ticket = get_u64(record);
    }
    const door_visit id = visit->id;
    const struct door_events *events = &door->config.events;
    events->admitted(events->ctx, id, visit->opener, visit->ticket, record + TICKET_SIZE,
                     size - TICKET_SIZE, visit->peer);
    /* Only now: who holds the ticket uses it at once, and must find us ready. */
    if (visit->state == VISIT_ADMITTED && visit->id == id && !visit->opener &&
        !put_pass(door, visit)) {
        visit_gone(door, visit, FL_LINK_LOST, "connection lost at the door");
    }
}

static void take_record(struct door *door, struct visit *visit, const unsigned char *record,
                        size_t size)
{
    unsigned char answer[FL_HANDSHAKE_RECORD_MAX];
    size_t answer_size = 0;
    /* Said with the peer's name: below of a stranger, by whoever knocked of the other side. */
    const enum fl_log_level level = fl_fail_log_at(FL_LOG_DEBUG);
    const fl_status status =
        fl_handshake_take(&visit->handshake, record, size, answer, &answer_size);
    (void)fl_fail_log_at(level);
    char text[TEXT_MAX] = "";
    const bool refused = status != FL_OK && status != FL_AGAIN;
    if (refused) {
        snprintf(text, sizeof(text), "%.64s: %.180s", visit->peer, fl_last_error());
    }
    if (refused && !visit->opener && fl_log_throttle_pass(&door->turned_away, door->now_ns)) {
        fl_log(FL_LOG_WARN, "visitor turned away: %s", text);
    }
    bool told = answer_size == 0 || put_frame(visit, answer, answer_size);
    if (refused) {
        visit_gone(door, visit, status, text);
        return;
    }
    if (visit->opener && status == FL_AGAIN) {
        told = told && put_pass(door, visit); /* with the proof: it saves a round trip */
    }
    if (!told) {
        visit_gone(door, visit, FL_LINK_LOST, "connection lost during the handshake");
    } else if (status == FL_OK) {
        visit->state = VISIT_WAIT_PASS;
    }
}

/* Handle one frame if it is whole; false when not, or when the visit is over. */
static bool take_frame(struct door *door, struct visit *visit)
{
    if (visit->used < FRAME_HEADER) {
        return false;
    }
    const size_t size = (size_t)(visit->in[0] | visit->in[1] << 8);
    if (size > DOOR_RECORD_MAX || (visit->state == VISIT_SHAKING && visit->used > FRAME_HEADER &&
                                   visit->in[FRAME_HEADER] != 0x07)) {
        char text[TEXT_MAX];
        snprintf(text, sizeof(text), "%s does not speak firstlight", visit->peer);
        visit_gone(door, visit, FL_PROTOCOL, text);
        return false;
    }
    if (visit->used < FRAME_HEADER + size) {
        return false;
    }
    const door_visit id = visit->id;
    if (visit->state == VISIT_SHAKING) {
        take_record(door, visit, visit->in + FRAME_HEADER, size);
    } else {
        admit(door, visit, visit->in + FRAME_HEADER, size);
    }
    if (visit->state == VISIT_FREE || visit->id != id) {
        return false;
    }
    visit->used -= FRAME_HEADER + size;
    memmove(visit->in, visit->in + FRAME_HEADER + size, visit->used);
    return true;
}

static void read_visit(struct door *door, struct visit *visit)
{
    char text[TEXT_MAX];
    const ssize_t got =
        recv(visit->fd, visit->in + visit->used, sizeof(visit->in) - visit->used, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (got <= 0) {
        snprintf(text, sizeof(text), "connection to %s lost: %s", visit->peer,
                 got == 0 ? "the other side has ended" : strerror(errno));
        visit_gone(door, visit, FL_LINK_LOST, text);
        return;
    }
    visit->used += (size_t)got;
    const door_visit id = visit->id;
    while (visit->state != VISIT_ADMITTED && take_frame(door, visit)) {
    }
    if (visit->state == VISIT_ADMITTED && visit->id == id && visit->used > 0) {
        snprintf(text, sizeof(text), "%s spoke at the door after it was admitted", visit->peer);
        visit_gone(door, visit, FL_PROTOCOL, text);
    }
}

static void accept_one(struct door *door, uint64_t now_ns)
{
    struct fl_network_socket from = {.size = sizeof(from.storage)};
    const int fd = accept4(door->listener, (struct sockaddr *)&from.storage, &from.size,
                           SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        /* Gone again, or no descriptors left: the visitor will try again. */
        if (fl_spare_descriptor_refuse(&door->spare, door->listener, errno) &&
            fl_log_throttle_pass(&door->turned_away, now_ns)) {
            fl_log(FL_LOG_WARN, "visitor turned away: no file descriptor is left (ulimit -n)");
        }
        return;
    }
    struct visit *visit = door->strangers < DOOR_STRANGER_MAX ? visit_take(door) : NULL;
    if (visit == NULL) {
        fl_log(FL_LOG_DEBUG, "visitor turned away: too many at the door");
        close(fd);
        return;
    }
    const int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    char text[FL_NETWORK_TEXT_MAX];
    fl_network_socket_text(&from, text);
    snprintf(visit->peer, sizeof(visit->peer), "%.*s", PEER_MAX - 1, text);
    visit->fd = fd;
    visit->state = VISIT_SHAKING;
    visit->deadline_ns = now_ns + door->config.wait_ns;
    door->strangers++;
    door->pending++;
    fl_random_bytes(&visit->ticket, sizeof(visit->ticket));
    fl_handshake_init(&visit->handshake, door->config.party, false, door->config.key);
    if (!watch(door, fd, visit->id, EPOLLIN)) {
        visit_free(door, visit);
    }
}

static void check_deadlines(struct door *door, uint64_t now_ns, uint64_t *next_ns)
{
    char text[TEXT_MAX];
    for (size_t i = 0; door->pending > 0 && i < DOOR_VISIT_MAX; i++) {
        struct visit *visit = &door->visits[i];
        if (!is_pending(visit)) {
            continue;
        }
        if (visit->deadline_ns == 0) {
            connect_failed(door, visit, visit->error);
        } else if (now_ns >= visit->deadline_ns) {
            snprintf(text, sizeof(text), "no answer from %s within %.1f s", visit->peer,
                     (double)door->config.wait_ns / (double)FL_NS_PER_S);
            visit_gone(door, visit, FL_DEADLINE, text);
        } else if (visit->deadline_ns < *next_ns) {
            *next_ns = visit->deadline_ns;
        }
    }
}

unsigned door_poll(struct door *door, uint64_t now_ns, uint64_t *next_ns)
{
    struct epoll_event events[EVENT_BATCH];
    door->now_ns = now_ns;
    const int count = epoll_wait(door->epoll, events, EVENT_BATCH, 0);
    for (int i = 0; i < count; i++) {
        const door_visit id = events[i].data.u64;
        struct visit *visit = &door->visits[id % DOOR_VISIT_MAX];
        if (id == 0) {
            accept_one(door, now_ns);
        } else if (visit->id != id || visit->state == VISIT_FREE) {
            continue; /* ended by an event before it */
        } else if (visit->state == VISIT_CONNECTING) {
            connected(door, visit);
        } else {
            read_visit(door, visit);
        }
    }
    check_deadlines(door, now_ns, next_ns);
    const uint64_t due_ns =
        fl_log_throttle_poll(&door->turned_away, now_ns, FL_LOG_WARN, "visitors turned away");
    *next_ns = due_ns < *next_ns ? due_ns : *next_ns;
    return count > 0 ? (unsigned)count : 0;
}

door_visit door_knock(struct door *door, const struct fl_network_socket *targets, size_t count,
                      const char *text)
{
    FL_ASSERT(count > 0 && count <= FL_NETWORK_RESOLVED_MAX);
    struct visit *visit = visit_take(door);
    if (visit == NULL) {
        return 0;
    }
    const struct fl_clock clock = fl_clock_monotonic();
    visit->opener = true;
    visit->state = VISIT_CONNECTING;
    visit->deadline_ns = fl_clock_now(&clock) + door->config.wait_ns;
    visit->target_count = count;
    memcpy(visit->targets, targets, count * sizeof(targets[0]));
    snprintf(visit->peer, sizeof(visit->peer), "%.*s", PEER_MAX - 1, text);
    door->pending++;
    if (!try_next(door, visit)) {
        visit->deadline_ns = 0; /* refused on the spot: the next poll reports it */
    }
    return visit->id;
}

void door_leave(struct door *door, door_visit id)
{
    struct visit *visit = &door->visits[id % DOOR_VISIT_MAX];
    if (id != 0 && visit->state != VISIT_FREE && visit->id == id) {
        visit_free(door, visit);
    }
}

int door_fd(const struct door *door)
{
    return door->epoll;
}

void door_address(const struct door *door, struct fl_network_socket *out)
{
    *out = (struct fl_network_socket){.size = sizeof(out->storage)};
    (void)getsockname(door->listener, (struct sockaddr *)&out->storage, &out->size);
}

/* A listening socket, or -1 with errno set. */
static int listen_on(const struct fl_network_socket *place)
{
    const int fd = socket(place->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    /* A restarted process must get its port back while old connections linger. */
    const int one = 1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, (const struct sockaddr *)&place->storage, place->size) != 0 ||
        listen(fd, SOMAXCONN) != 0) {
        const int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

fl_status door_open(const struct door_config *config, struct door **out)
{
    FL_ASSERT(config->pass_size > 0 && config->pass_size <= DOOR_PASS_MAX);
    struct door *door = calloc(1, sizeof(*door));
    if (door == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a door of %zu bytes", sizeof(*door));
    }
    door->config = *config;
    door->listener = -1;
    door->spare = fl_spare_descriptor_open();
    door->epoll = epoll_create1(EPOLL_CLOEXEC);
    int error = door->epoll < 0 ? errno : 0;
    for (size_t i = 0; error == 0 && door->listener < 0 && i < config->listen_count; i++) {
        door->listener = listen_on(&config->listen[i]);
        if (door->listener < 0 && (errno == EADDRINUSE || i + 1 == config->listen_count)) {
            error = errno; /* in use on one family: the other would only hide the mistake */
        }
    }
    if (error == 0 && !watch(door, door->listener, 0, EPOLLIN)) {
        error = errno;
    }
    if (error != 0) {
        door_close(door);
        return error == EADDRINUSE
                   ? FL_FAIL(FL_BUSY,
                             "cannot listen on %s: the port is in use; stop the other process or "
                             "choose another port",
                             config->listen_text)
                   : FL_FAIL(FL_INVALID, "cannot listen on %s: %s", config->listen_text,
                             strerror(error));
    }
    *out = door;
    return FL_OK;
}

void door_close(struct door *door)
{
    if (door == NULL) {
        return;
    }
    for (size_t i = 0; i < DOOR_VISIT_MAX; i++) {
        if (door->visits[i].state != VISIT_FREE) {
            visit_free(door, &door->visits[i]);
        }
    }
    fl_spare_descriptor_close(&door->spare);
    if (door->listener >= 0) {
        close(door->listener);
    }
    if (door->epoll >= 0) {
        close(door->epoll);
    }
    free(door);
}
