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
#include "proto/wire.h"

enum {
    CONNECT_MS = 10000,
    SEND_MS = 30000, /* for the coordinator to take any byte at all */
    FRAME_MAX = FL_FRAME_HEADER_SIZE + FL_CLIENT_MESSAGE_MAX,
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

    struct fl_frame_reader reader;
    unsigned char *frame;   /* [FRAME_MAX], to be sent */
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

/* Length and message; the message lies at client->frame + FL_FRAME_HEADER_SIZE already. */
static fl_status send_frame(struct fl_client *client, size_t size)
{
    fl_frame_header_put(client->frame, (uint32_t)size);
    return send_bytes(client, client->frame, FL_FRAME_HEADER_SIZE + size);
}

/* The commonest wrong port is a web server's; as a length its answer would say nothing. */
static fl_status check_start(struct fl_client *client)
{
    const struct fl_frame_reader *reader = &client->reader;
    if (reader->used - reader->taken >= 4 &&
        memcmp(reader->bytes + reader->taken, "HTTP", 4) == 0) {
        return FL_FAIL(FL_PROTOCOL, "what answers at %s is a web server, no coordinator",
                       client->address);
    }
    return FL_OK;
}

/* Receive until a whole frame is there; it is valid until the next call. */
static fl_status receive_frame(struct fl_client *client, uint64_t deadline_ns,
                               const unsigned char **out, size_t *out_size)
{
    for (;;) {
        unsigned char *space = NULL;
        size_t room = 0;
        fl_status status = check_start(client);
        if (status == FL_OK) {
            status = fl_frame_reader_next(&client->reader, out, out_size);
        }
        if (status == FL_AGAIN) {
            status = fl_frame_reader_space(&client->reader, &space, &room);
        } else if (status == FL_OK) {
            return FL_OK;
        }
        if (status != FL_OK) {
            client->broken = status;
            return status;
        }
        const ssize_t got = recv(client->fd, space, room, 0);
        if (got > 0) {
            fl_frame_reader_filled(&client->reader, (size_t)got);
        } else if (got == 0) {
            client->broken = FL_LINK_LOST;
            return FL_FAIL(
                FL_LINK_LOST, "the coordinator at %s closed the connection%s", client->address,
                client->reader.used > client->reader.taken ? " in the middle of a message" : "");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            FL_TRY(wait_for(client->fd, POLLIN, deadline_ns));
        } else if (errno != EINTR) {
            return lost(client, errno);
        }
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
    memcpy(client->frame + FL_FRAME_HEADER_SIZE, record, size);
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
        const unsigned char *received = NULL;
        size_t size = 0;
        fl_status status = receive_frame(client, deadline_ns, &received, &size);
        if (status == FL_AGAIN && left_ms(deadline_ns) > 0) {
            continue;
        }
        if (status == FL_AGAIN) {
            return FL_FAIL(FL_DEADLINE, "what answers at %s did not take up the handshake in time",
                           client->address);
        }
        FL_TRY(status);
        status = fl_handshake_take(&handshake, received, size, record, &record_size);
        if (record_size > 0) {
            FL_TRY(send_record(client, record, record_size));
        }
        if (status != FL_AGAIN) {
            return status;
        }
    }
}

/* A coordinator with a key answers a client that came without one by refusing the handshake that
 * it did not begin. */
static fl_status take_refusal(struct fl_client *client)
{
    client->broken = FL_DENIED;
    return FL_FAIL(FL_DENIED,
                   "the coordinator at %s has a pool key: give the same key file with --key-file "
                   "or FIRSTLIGHT_KEY_FILE",
                   client->address);
}

/* ---- open and close ---- */

static bool allocate(struct fl_client *client)
{
    client->frame = malloc(FRAME_MAX);
    client->scratch = malloc(SCRATCH_SIZE);
    client->memory = malloc(EVENT_ARENA_SIZE);
    return client->frame != NULL && client->scratch != NULL && client->memory != NULL;
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
    fl_frame_reader_init(&client->reader, FL_CLIENT_MESSAGE_MAX);
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
    fl_frame_reader_free(&client->reader);
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
    FL_TRY(fl_client_request_pack(&numbered, &scratch, client->frame + FL_FRAME_HEADER_SIZE,
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
    const unsigned char *message = NULL;
    size_t size = 0;
    FL_TRY(receive_frame(client, deadline_in(timeout_ms), &message, &size));
    if (fl_handshake_is_record(message, size)) {
        return take_refusal(client);
    }
    struct fl_arena arena;
    fl_arena_init(&arena, client->memory, EVENT_ARENA_SIZE);
    client->broken = fl_client_event_unpack(message, size, &arena, out);
    return client->broken;
}
