#include "proto/client/client.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/handshake.h"
#include "proto/network_address.h"

enum {
    CONNECT_MS = 10000,
    SEND_MS = 30000, /* for the coordinator to take any byte at all */
    LENGTH_SIZE = 4,
    FRAME_MAX = LENGTH_SIZE + FL_CLIENT_MESSAGE_MAX,
    RECEIVE_FIRST = 64 << 10,
    EVENT_ARENA_SIZE = 4 * FL_CLIENT_MESSAGE_MAX,
    SCRATCH_SIZE = 2 << 20, /* a request of FL_CHAT_MESSAGE_MAX messages takes a tenth */
};
_Static_assert(2 * FRAME_MAX + EVENT_ARENA_SIZE + SCRATCH_SIZE <= FL_CLIENT_MEMORY_MAX,
               "the header promises this");

struct fl_client {
    int fd;
    fl_status broken; /* why the connection is of no more use, or FL_OK */
    uint64_t id_last;
    char address[FL_NETWORK_TEXT_MAX];

    /* Bytes received: a frame at `begin` that next() handed out is dropped at its next call. */
    unsigned char *received; /* [received_room] */
    size_t received_room;
    size_t begin;
    size_t end;

    unsigned char *frame;   /* [FRAME_MAX] */
    unsigned char *scratch; /* [SCRATCH_SIZE] */
    unsigned char *memory;  /* [EVENT_ARENA_SIZE] */
};

/* ---- time ---- */

/* An absolute deadline, or none for a negative timeout. */
static uint64_t deadline_in(int timeout_ms)
{
    if (timeout_ms < 0) {
        return UINT64_MAX;
    }
    const struct fl_clock clock = fl_clock_monotonic();
    return fl_clock_now(&clock) + (uint64_t)timeout_ms * FL_NS_PER_MS;
}

/* What poll() may wait until a deadline; rounded up, so that it does not wake early. */
static int left_ms(uint64_t deadline_ns)
{
    if (deadline_ns == UINT64_MAX) {
        return -1;
    }
    const struct fl_clock clock = fl_clock_monotonic();
    const uint64_t now = fl_clock_now(&clock);
    return now >= deadline_ns ? 0 : (int)((deadline_ns - now + FL_NS_PER_MS - 1) / FL_NS_PER_MS);
}

/* Wait for `events` on a socket.  FL_AGAIN when the deadline passed or a signal came. */
static fl_status wait_for(int fd, short events, uint64_t deadline_ns)
{
    struct pollfd waiting = {.fd = fd, .events = events};
    const int ready = poll(&waiting, 1, left_ms(deadline_ns));
    if (ready > 0) {
        return FL_OK;
    }
    if (ready == 0 || errno == EINTR) {
        return FL_AGAIN;
    }
    return FL_FAIL(FL_INTERNAL, "poll failed: %s", strerror(errno));
}

/* ---- bytes ---- */

static fl_status lost(struct fl_client *client, int error)
{
    client->broken = FL_LINK_LOST;
    return FL_FAIL(FL_LINK_LOST, "connection to the coordinator at %s is lost: %s", client->address,
                   strerror(error));
}

static fl_status send_bytes(struct fl_client *client, const unsigned char *data, size_t size)
{
    uint64_t deadline_ns = deadline_in(SEND_MS);
    while (size > 0) {
        const ssize_t sent = send(client->fd, data, size, MSG_NOSIGNAL);
        if (sent > 0) {
            data += sent;
            size -= (size_t)sent;
            deadline_ns = deadline_in(SEND_MS);
            continue;
        }
        if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            return lost(client, errno);
        }
        const fl_status status = wait_for(client->fd, POLLOUT, deadline_ns);
        if (status == FL_AGAIN && left_ms(deadline_ns) == 0) {
            client->broken = FL_DEADLINE; /* half a frame is out: nothing can follow it */
            return FL_FAIL(FL_DEADLINE, "the coordinator at %s took no byte of a request for %d s",
                           client->address, SEND_MS / 1000);
        }
        if (status != FL_AGAIN) {
            FL_TRY(status);
        }
    }
    return FL_OK;
}

/* Length and message; the message lies at client->frame + LENGTH_SIZE already. */
static fl_status send_frame(struct fl_client *client, size_t size)
{
    for (int i = 0; i < LENGTH_SIZE; i++) {
        client->frame[i] = (unsigned char)(size >> (8 * i));
    }
    return send_bytes(client, client->frame, LENGTH_SIZE + size);
}

/* Room for a whole frame of `size` bytes from `begin` on. */
static fl_status make_room(struct fl_client *client, size_t size)
{
    if (client->begin > 0) {
        memmove(client->received, client->received + client->begin, client->end - client->begin);
        client->end -= client->begin;
        client->begin = 0;
    }
    if (size > client->received_room) {
        unsigned char *larger = realloc(client->received, size);
        if (larger == NULL) {
            return FL_FAIL(FL_NO_MEMORY, "no memory for a message of %zu bytes", size);
        }
        client->received = larger;
        client->received_room = size;
    }
    return FL_OK;
}

/* The message of the frame at `begin`: *out_size bytes after its length.  FL_AGAIN when it is not
 * there yet; then there is room for the rest of it. */
static fl_status frame_at_begin(struct fl_client *client, size_t *out_size)
{
    const size_t have = client->end - client->begin;
    size_t need = LENGTH_SIZE;
    if (have >= LENGTH_SIZE) {
        const unsigned char *length = client->received + client->begin;
        const uint32_t size = (uint32_t)length[0] | (uint32_t)length[1] << 8 |
                              (uint32_t)length[2] << 16 | (uint32_t)length[3] << 24;
        if (size == 0 || size > FL_CLIENT_MESSAGE_MAX) {
            client->broken = FL_PROTOCOL;
            return FL_FAIL(FL_PROTOCOL,
                           "what answers at %s is no coordinator: it announces a message of "
                           "%" PRIu32 " bytes, the limit is %d",
                           client->address, size, FL_CLIENT_MESSAGE_MAX);
        }
        need += size;
        if (have >= need) {
            *out_size = size;
            return FL_OK;
        }
    }
    FL_TRY(make_room(client, need > RECEIVE_FIRST ? need : RECEIVE_FIRST));
    return FL_AGAIN;
}

/* Receive until a whole frame lies at `begin`. */
static fl_status receive_frame(struct fl_client *client, uint64_t deadline_ns, size_t *out_size)
{
    for (;;) {
        const fl_status status = frame_at_begin(client, out_size);
        if (status != FL_AGAIN) {
            return status;
        }
        const ssize_t got = recv(client->fd, client->received + client->end,
                                 client->received_room - client->end, 0);
        if (got > 0) {
            client->end += (size_t)got;
        } else if (got == 0) {
            client->broken = FL_LINK_LOST;
            return FL_FAIL(FL_LINK_LOST, "the coordinator at %s closed the connection%s",
                           client->address,
                           client->end > client->begin ? " in the middle of a message" : "");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            FL_TRY(wait_for(client->fd, POLLIN, deadline_ns));
        } else if (errno != EINTR) {
            return lost(client, errno);
        }
    }
}

static void drop_frame(struct fl_client *client, size_t size)
{
    client->begin += LENGTH_SIZE + size;
    if (client->begin == client->end) {
        client->begin = client->end = 0;
    }
}

/* ---- connecting ---- */

/* One address.  0, or the errno that says why not. */
static int connect_one(const struct fl_network_socket *to, uint64_t deadline_ns, int *out)
{
    const int family = to->storage.ss_family;
    const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return errno;
    }
    int error = 0;
    if (connect(fd, (const struct sockaddr *)&to->storage, to->size) != 0) {
        error = errno;
    }
    while (error == EINPROGRESS) {
        const fl_status status = wait_for(fd, POLLOUT, deadline_ns);
        if (status == FL_OK) {
            socklen_t size = sizeof(error);
            if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
                error = errno;
            }
        } else if (status != FL_AGAIN || left_ms(deadline_ns) == 0) {
            error = ETIMEDOUT;
        }
    }
    if (error != 0) {
        close(fd);
        return error;
    }
    if (family == AF_INET || family == AF_INET6) {
        const int on = 1; /* a request is one small frame: it must not wait for another */
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    }
    *out = fd;
    return 0;
}

/* All addresses of the name in turn: it may have one that nobody listens on. */
static fl_status connect_any(struct fl_client *client, const char *text, uint64_t deadline_ns)
{
    struct fl_network_address address;
    struct fl_network_socket sockets[FL_NETWORK_RESOLVED_MAX];
    size_t count = 0;
    FL_TRY(fl_network_address_parse(text, strlen(text), &address));
    FL_TRY(fl_network_address_resolve(&address, sockets, FL_NETWORK_RESOLVED_MAX, &count));
    int error = ENOENT;
    for (size_t i = 0; i < count; i++) {
        error = connect_one(&sockets[i], deadline_ns, &client->fd);
        if (error == 0) {
            fl_network_socket_text(&sockets[i], client->address);
            return FL_OK;
        }
    }
    return FL_FAIL(FL_LINK_LOST,
                   "no coordinator answers at %s (%s): start one with `firstlight-coordinator "
                   "--models DIR`, or say where it runs with --addr or FIRSTLIGHT_ADDR",
                   text, strerror(error));
}

/* ---- handshake ---- */

static fl_status send_record(struct fl_client *client, const unsigned char *record, size_t size)
{
    memcpy(client->frame + LENGTH_SIZE, record, size);
    return send_frame(client, size);
}

static fl_status shake_hands(struct fl_client *client, const struct fl_pool_key *key,
                             uint64_t deadline_ns)
{
    struct fl_handshake handshake;
    unsigned char record[FL_HANDSHAKE_RECORD_MAX];
    size_t record_size = 0;
    fl_handshake_init(&handshake, FL_PARTY_CLIENT, true, key);
    fl_handshake_hello(&handshake, record, &record_size);
    FL_TRY(send_record(client, record, record_size));
    for (;;) {
        size_t size = 0;
        fl_status status = receive_frame(client, deadline_ns, &size);
        if (status == FL_AGAIN && left_ms(deadline_ns) > 0) {
            continue;
        }
        if (status == FL_AGAIN) {
            return FL_FAIL(FL_DEADLINE, "what answers at %s did not take up the handshake in time",
                           client->address);
        }
        FL_TRY(status);
        status = fl_handshake_take(&handshake, client->received + client->begin + LENGTH_SIZE, size,
                                   record, &record_size);
        drop_frame(client, size);
        if (record_size > 0) {
            FL_TRY(send_record(client, record, record_size));
        }
        if (status != FL_AGAIN) {
            return status;
        }
    }
}

/* A coordinator with a key answers a client that came without one by refusing it. */
static fl_status take_refusal(struct fl_client *client, const unsigned char *record, size_t size)
{
    struct fl_handshake handshake;
    unsigned char answer[FL_HANDSHAKE_RECORD_MAX];
    size_t answer_size = 0;
    fl_handshake_init(&handshake, FL_PARTY_CLIENT, true, NULL);
    fl_handshake_hello(&handshake, answer, &answer_size);
    const fl_status status = fl_handshake_take(&handshake, record, size, answer, &answer_size);
    client->broken = status == FL_DENIED ? FL_DENIED : FL_PROTOCOL;
    if (status == FL_OK || status == FL_AGAIN) {
        return FL_FAIL(FL_PROTOCOL, "the coordinator at %s began a handshake nobody asked for",
                       client->address);
    }
    return status;
}

/* ---- open and close ---- */

static bool allocate(struct fl_client *client)
{
    client->received = malloc(RECEIVE_FIRST);
    client->received_room = RECEIVE_FIRST;
    client->frame = malloc(FRAME_MAX);
    client->scratch = malloc(SCRATCH_SIZE);
    client->memory = malloc(EVENT_ARENA_SIZE);
    return client->received != NULL && client->frame != NULL && client->scratch != NULL &&
           client->memory != NULL;
}

/* The first that is there and not empty. */
static const char *first_of(const char *given, const char *variable, const char *fallback)
{
    if (given == NULL) {
        given = getenv(variable);
    }
    return given != NULL && given[0] != '\0' ? given : fallback;
}

static fl_status open_connection(struct fl_client *client, const struct fl_client_config *config)
{
    const char *key_file = first_of(config->key_file, "FIRSTLIGHT_KEY_FILE", NULL);
    struct fl_pool_key key;
    if (key_file != NULL) {
        FL_TRY(fl_pool_key_read(key_file, &key)); /* before anybody is troubled */
    }
    const uint64_t deadline_ns =
        deadline_in(config->connect_ms > 0 ? config->connect_ms : CONNECT_MS);
    const char *address = first_of(config->address, "FIRSTLIGHT_ADDR", FL_CLIENT_ADDRESS_DEFAULT);
    FL_TRY(connect_any(client, address, deadline_ns));
    return key_file != NULL ? shake_hands(client, &key, deadline_ns) : FL_OK;
}

fl_status fl_client_open(const struct fl_client_config *config, struct fl_client **out)
{
    static const struct fl_client_config defaults;
    struct fl_client *client = calloc(1, sizeof(*client));
    if (client == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a connection");
    }
    client->fd = -1;
    const fl_status status = allocate(client)
                                 ? open_connection(client, config != NULL ? config : &defaults)
                                 : FL_FAIL(FL_NO_MEMORY, "no memory for a connection");
    if (status != FL_OK) {
        fl_client_close(client);
        return status;
    }
    *out = client;
    return FL_OK;
}

void fl_client_close(struct fl_client *client)
{
    if (client == NULL) {
        return;
    }
    if (client->fd >= 0) {
        close(client->fd);
    }
    free(client->received);
    free(client->frame);
    free(client->scratch);
    free(client->memory);
    free(client);
}

int fl_client_fd(const struct fl_client *client)
{
    return client->fd;
}

/* ---- requests and events ---- */

fl_status fl_client_send(struct fl_client *client, const struct fl_client_request *request,
                         uint64_t *out_id)
{
    if (client->broken != FL_OK) {
        return FL_FAIL(client->broken, "the connection to %s is of no more use: open a new one",
                       client->address);
    }
    struct fl_client_request numbered = *request;
    numbered.version = FL_CLIENT_VERSION;
    numbered.id = client->id_last + 1;
    struct fl_arena scratch;
    size_t size = 0;
    fl_arena_init(&scratch, client->scratch, SCRATCH_SIZE);
    FL_TRY(fl_client_request_pack(&numbered, &scratch, client->frame + LENGTH_SIZE,
                                  FL_CLIENT_MESSAGE_MAX, &size));
    FL_TRY(send_frame(client, size));
    client->id_last = numbered.id;
    if (out_id != NULL) {
        *out_id = numbered.id;
    }
    return FL_OK;
}

fl_status fl_client_cancel(struct fl_client *client, uint64_t id)
{
    const struct fl_client_request request = {.kind = FL_REQUEST_CANCEL, .as.cancel.id = id};
    return fl_client_send(client, &request, NULL);
}

fl_status fl_client_next(struct fl_client *client, int timeout_ms, struct fl_client_event *out)
{
    if (client->broken != FL_OK) {
        return FL_FAIL(client->broken, "the connection to %s is of no more use: open a new one",
                       client->address);
    }
    size_t size = 0;
    FL_TRY(receive_frame(client, deadline_in(timeout_ms), &size));
    const unsigned char *message = client->received + client->begin + LENGTH_SIZE;
    fl_status status;
    if (fl_handshake_is_record(message, size)) {
        status = take_refusal(client, message, size);
    } else {
        struct fl_arena arena;
        fl_arena_init(&arena, client->memory, EVENT_ARENA_SIZE);
        status = fl_client_event_unpack(message, size, &arena, out);
        if (status != FL_OK) {
            client->broken = status;
        }
    }
    drop_frame(client, size); /* the event lies in client->memory */
    return status;
}
