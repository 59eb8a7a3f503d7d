#include "cluster/transport.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/ucx.h"
#include "proto/base/clock.h"
#include "proto/network_address.h"
#include "proto/pool_key.h"

enum {
    QUEUE_COUNT_MAX = 256, /* messages of one link that have not left */
    QUEUE_BYTES_MAX = 16 << 20,
    OPEN_TRIES = 10, /* while network devices come and go */
};

static const uint64_t door_wait_ns = 5 * FL_NS_PER_S; /* from a TCP connection to a link */

static struct ucx *ucx_of(struct transport *transport)
{
    return (struct ucx *)(void *)transport;
}

static unsigned ucx_progress(struct transport *transport)
{
    struct ucx *ucx = ucx_of(transport);
    const uint64_t now = ucx_now_ns();
    bool door_calls;
    unsigned count = ucx_workers_progress(ucx, now, &door_calls);
    if (ucx->more_out) {
        ucx_pipes_pump(ucx);
    }
    if (now >= ucx->next_look_ns) {
        ucx->next_look_ns = UINT64_MAX;
        ucx->attention = true;
    }
    if (ucx->door != NULL && (ucx->attention || door_calls)) {
        count += door_poll(ucx->door, now, &ucx->next_look_ns);
    }
    count += ucx_report_sent(ucx);
    if (ucx->attention) {
        count += ucx_look_after(ucx, now);
    }
    return count;
}

static fl_status ucx_arm(struct transport *transport)
{
    struct ucx *ucx = ucx_of(transport);
    if (ucx->attention || ucx->more_out || ucx->done.first != NULL) {
        return FL_AGAIN;
    }
    return ucx_workers_arm(ucx);
}

static int ucx_fd(struct transport *transport)
{
    return ucx_of(transport)->fd;
}

static void ucx_set_events(struct transport *transport, const struct transport_events *events)
{
    ucx_of(transport)->events = *events;
}

static void ucx_address(struct transport *transport, struct fl_address *out)
{
    *out = ucx_of(transport)->address;
}

static fl_status connect_socket(struct ucx *ucx, const struct fl_address *address,
                                transport_link *out)
{
    struct fl_network_address place;
    struct fl_network_socket targets[FL_NETWORK_RESOLVED_MAX];
    size_t count = 0;
    if (ucx->door == NULL || address->size > FL_ADDRESS_MAX) {
        return FL_FAIL(FL_INVALID, "a socket address of %u bytes is of no use here",
                       (unsigned)address->size);
    }
    FL_TRY(fl_network_address_parse((const char *)address->bytes, address->size, &place));
    if (place.is_unix || place.port == 0) {
        return FL_FAIL(FL_INVALID, "cannot connect to \"%.*s\": HOST:PORT with a port is needed",
                       (int)(address->size < 64 ? address->size : 64),
                       (const char *)address->bytes);
    }
    FL_TRY(fl_network_address_resolve(&place, targets, FL_NETWORK_RESOLVED_MAX, &count));
    struct ucx_link *link = ucx_link_take(ucx, LINK_OPENING, NULL);
    if (link != NULL) {
        snprintf(link->peer, sizeof(link->peer), "%.*s",
                 (int)(address->size < 100 ? address->size : 100), (const char *)address->bytes);
        link->visit = door_knock(ucx->door, targets, count, link->peer);
    }
    if (link == NULL || link->visit == 0) {
        if (link != NULL) {
            link->state = LINK_FREE;
        }
        return FL_FAIL(FL_TOO_LARGE, "%d links are open, which is the limit", TRANSPORT_LINK_MAX);
    }
    ucx->attention = true; /* it may have been refused on the spot */
    *out = link->id;
    return FL_OK;
}

static fl_status connect_worker(struct ucx *ucx, const struct fl_address *address,
                                transport_link *out)
{
    if (ucx->door != NULL || address->size <= UCX_BLOB_PROCESS_SIZE ||
        address->size > FL_ADDRESS_MAX) {
        return FL_FAIL(FL_INVALID, "a worker's address of %u bytes is of no use here",
                       (unsigned)address->size);
    }
    const char *why = "";
    struct ucx_pipe *pipe = ucx_pipe_to(ucx, address->bytes, &why);
    if (pipe == NULL) {
        return FL_FAIL(FL_INVALID, "cannot make an endpoint to a worker's address: %s", why);
    }
    struct ucx_link *link = ucx_link_take(ucx, LINK_OPENING, pipe);
    if (link == NULL) {
        return FL_FAIL(FL_TOO_LARGE, "%d links are open, which is the limit", TRANSPORT_LINK_MAX);
    }
    memcpy(link->peer, pipe->peer, sizeof(link->peer));
    ucx_pipe_post_own(pipe, UCX_AM_KNOCK, UCX_KNOCK_MAGIC, link->token, 0, UCX_KNOCK_SIZE);
    *out = link->id;
    return FL_OK;
}

static fl_status ucx_connect(struct transport *transport, const struct fl_address *address,
                             transport_link *out)
{
    struct ucx *ucx = ucx_of(transport);
    switch (address->kind) {
    case FL_ADDRESS_SOCKET: return connect_socket(ucx, address, out);
    case FL_ADDRESS_WORKER: return connect_worker(ucx, address, out);
    case FL_ADDRESS_LOCAL: break;
    }
    return FL_FAIL(FL_INVALID, "address kind %d cannot be reached over UCX", (int)address->kind);
}

static fl_status ucx_send(struct transport *transport, transport_link id, uint16_t type,
                          const void *header, size_t header_size, const void *data, size_t size,
                          uint64_t cookie)
{
    struct ucx *ucx = ucx_of(transport);
    FL_ASSERT(header_size <= TRANSPORT_HEADER_MAX && size <= TRANSPORT_MESSAGE_MAX - header_size);
    FL_ASSERT(cookie != 0 || size <= TRANSPORT_COPY_MAX);
    struct ucx_link *link = ucx_link_find(ucx, id);
    if (link == NULL || (link->state != LINK_OPENING && link->state != LINK_OPEN)) {
        return FL_LINK_LOST;
    }
    if (link->queue_count >= QUEUE_COUNT_MAX ||
        (link->queue_count > 0 && link->queue_bytes + size > QUEUE_BYTES_MAX)) {
        return FL_AGAIN;
    }
    struct ucx_send *send = ucx_send_take(ucx);
    if (send == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory to queue a message to %s", link->peer);
    }
    send->data = data;
    if (cookie == 0 && size > 0 && !ucx_send_copy(ucx, send, data, size)) {
        ucx_send_give(ucx, send);
        return FL_FAIL(FL_NO_MEMORY, "no memory to copy a message of %zu bytes", size);
    }
    send->link = id;
    send->cookie = cookie;
    send->size = size;
    send->header_size = UCX_WIRE_HEADER_SIZE + header_size;
    ucx_put_u16(send->header + 12, type);
    ucx_put_u16(send->header + 14, (uint16_t)header_size);
    ucx_put_u32(send->header + 16, (uint32_t)size);
    if (header_size > 0) {
        memcpy(send->header + UCX_WIRE_HEADER_SIZE, header, header_size);
    }
    link->queue_count++;
    link->queue_bytes += size;
    if (link->state == LINK_OPENING) {
        ucx_list_push(&link->waiting, send);
    } else {
        ucx_link_post(link, send);
    }
    return FL_OK;
}

static void ucx_close_link(struct transport *transport, transport_link id)
{
    struct ucx *ucx = ucx_of(transport);
    struct ucx_link *link = ucx_link_find(ucx, id);
    if (link == NULL) {
        return;
    }
    if (link->state == LINK_OPENING) {
        ucx_link_end(link, ucx, FL_CANCELLED, "closed here");
    } else if (link->state == LINK_OPEN) {
        ucx_link_close(ucx, link);
    }
}

static void ucx_drop_link(struct transport *transport, transport_link id)
{
    struct ucx *ucx = ucx_of(transport);
    struct ucx_link *link = ucx_link_find(ucx, id);
    if (link == NULL || link->state == LINK_DEAD) {
        return;
    }
    struct ucx_pipe *pipe = link->pipe;
    if (link->state == LINK_OPEN) {
        ucx_pipe_post_own(pipe, UCX_AM_BYE, link->remote_token, 0, 0, UCX_BYE_SIZE);
    }
    ucx_link_end(link, ucx, FL_CANCELLED, "dropped here");
    if (pipe != NULL) {
        ucx_pipe_retire(pipe);
    }
    if (pipe != NULL && pipe->busy) {
        ucx_pipe_cut(pipe);
    }
}

static void ucx_close(struct transport *transport)
{
    if (transport == NULL) {
        return;
    }
    struct ucx *ucx = ucx_of(transport);
    if (ucx->outbox != NULL) {
        ucx_pipes_close(ucx); /* only the outbox works from here on: no message comes any more */
    }
    /* After the pipes: a link that ends while they close still leaves its visit. */
    door_close(ucx->door);
    ucx_workers_close(ucx);
    ucx_sends_free(ucx);
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        free(ucx->links[i].assembly.data);
    }
    free(ucx->bounce);
    free(ucx);
}

static const struct transport_ops ucx_ops = {
    .name = "ucx",
    .set_events = ucx_set_events,
    .address = ucx_address,
    .connect = ucx_connect,
    .send = ucx_send,
    .close_link = ucx_close_link,
    .drop_link = ucx_drop_link,
    .progress = ucx_progress,
    .fd = ucx_fd,
    .arm = ucx_arm,
    .close = ucx_close,
};

/* open(). */

/* The name of the network device that has this IPv4 address, false for none or 0.0.0.0. */
static bool device_of(const struct fl_network_socket *place, char out[IF_NAMESIZE])
{
    struct sockaddr_in wanted;
    struct ifaddrs *list = NULL;
    if (fl_network_socket_is_loopback(place)) {
        snprintf(out, IF_NAMESIZE, "lo");
        return true;
    }
    if (place->storage.ss_family != AF_INET || getifaddrs(&list) != 0) {
        return false;
    }
    memcpy(&wanted, &place->storage, sizeof(wanted));
    bool found = false;
    for (const struct ifaddrs *device = list; device != NULL && !found; device = device->ifa_next) {
        struct sockaddr_in has;
        if (device->ifa_addr != NULL && device->ifa_addr->sa_family == AF_INET) {
            memcpy(&has, device->ifa_addr, sizeof(has));
            found = has.sin_addr.s_addr == wanted.sin_addr.s_addr;
            snprintf(out, IF_NAMESIZE, "%s", device->ifa_name);
        }
    }
    freeifaddrs(list);
    return found;
}

/* Whether a device other than loopback has an IPv4 address and a cable. */
static bool network_is_up(void)
{
    struct ifaddrs *list = NULL;
    bool up = false;
    if (getifaddrs(&list) != 0) {
        return true; /* UCX will say what is wrong */
    }
    for (const struct ifaddrs *device = list; device != NULL; device = device->ifa_next) {
        const unsigned wanted = IFF_UP | IFF_RUNNING;
        up = up || (device->ifa_addr != NULL && device->ifa_addr->sa_family == AF_INET &&
                    (device->ifa_flags & (wanted | IFF_LOOPBACK)) == wanted);
    }
    freeifaddrs(list);
    return up;
}

/* Where to listen, and by which device. */
struct place {
    struct fl_network_socket sockets[FL_NETWORK_RESOLVED_MAX];
    size_t count;             /* 0: nowhere */
    char device[IF_NAMESIZE]; /* "": any */
};

/* FL_AGAIN: there is no network yet. */
static fl_status find_place(const struct transport_ucx_config *config, struct place *out)
{
    struct fl_network_address address;
    *out = (struct place){.count = 0};
    if (config->listen == NULL) {
        return FL_OK;
    }
    FL_TRY(fl_network_address_parse(config->listen, strlen(config->listen), &address));
    if (address.is_unix) {
        return FL_FAIL(FL_INVALID, "cannot listen on \"%.64s\": nodes need HOST:PORT",
                       config->listen);
    }
    FL_TRY(
        fl_network_address_resolve(&address, out->sockets, FL_NETWORK_RESOLVED_MAX, &out->count));
    if (!device_of(&out->sockets[0], out->device)) {
        out->device[0] = '\0';
    }
    return fl_network_socket_is_loopback(&out->sockets[0]) || network_is_up() ? FL_OK : FL_AGAIN;
}

static fl_status open_door(struct ucx *ucx, const struct transport_ucx_config *config,
                           const struct place *place)
{
    const struct door_config door = {
        .listen = place->sockets,
        .listen_count = place->count,
        .listen_text = config->listen,
        .party = config->party != 0 ? config->party : FL_PARTY_NODE,
        .key = config->key,
        .pass = ucx->inbox_address.bytes,
        .pass_size = ucx->inbox_address.size,
        .wait_ns = door_wait_ns,
        .events = {.ctx = ucx, .admitted = ucx_link_admitted, .gone = ucx_link_gone},
    };
    FL_TRY(door_open(&door, &ucx->door));
    FL_TRY(ucx_worker_watch(ucx, door_fd(ucx->door), UCX_READY_DOOR));
    struct fl_network_socket bound;
    char text[FL_NETWORK_TEXT_MAX];
    door_address(ucx->door, &bound);
    fl_network_socket_text(&bound, text);
    ucx->address = (struct fl_address){.kind = FL_ADDRESS_SOCKET, .size = (uint32_t)strlen(text)};
    memcpy(ucx->address.bytes, text, strlen(text));
    return FL_OK;
}

static fl_status open_all(struct ucx *ucx, const struct transport_ucx_config *config,
                          const struct place *place, bool last_try)
{
    FL_TRY(ucx_workers_open(ucx, place->device, &config->data_ports, last_try));
    ucx->address = ucx->inbox_address;
    return config->listen != NULL ? open_door(ucx, config, place) : FL_OK;
}

/* FL_AGAIN: a network device went away meanwhile. */
static fl_status open_once(const struct transport_ucx_config *config, const struct place *place,
                           bool last_try, struct transport **out)
{
    struct ucx *ucx = calloc(1, sizeof(*ucx));
    if (ucx == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a transport of %zu bytes", sizeof(*ucx));
    }
    ucx->transport.ops = &ucx_ops;
    ucx->next_look_ns = UINT64_MAX;
    ucx->fd = -1;
    ucx->timer = -1;
    ucx_list_init(&ucx->done);
    fl_random_bytes(&ucx->process, sizeof(ucx->process));
    const fl_status status = open_all(ucx, config, place, last_try);
    if (status != FL_OK) {
        ucx_close(&ucx->transport);
        return status;
    }
    *out = &ucx->transport;
    return FL_OK;
}

fl_status transport_ucx_open(const struct transport_ucx_config *config, struct transport **out)
{
    fl_status status = FL_AGAIN;
    for (int tries = 1; status == FL_AGAIN && tries <= OPEN_TRIES; tries++) {
        struct place place; /* anew: it may have been the one that went away */
        FL_TRY(find_place(config, &place));
        status = open_once(config, &place, tries == OPEN_TRIES, out);
    }
    return status;
}
