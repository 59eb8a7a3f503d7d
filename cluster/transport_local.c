#include "cluster/transport_local.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/local_event.h"

enum {
    QUEUE_COUNT_MAX = 256, /* as over UCX */
    QUEUE_BYTES_MAX = 16 << 20,
    TEXT_MAX = 128,
    ADDRESS_SIZE = 8,
};

enum link_state { LINK_FREE, LINK_OPEN, LINK_CLOSING };

struct link {
    enum link_state state;
    transport_link id;
    uint32_t peer;            /* process */
    transport_link peer_link; /* 0: not known yet */
    uint64_t arrive_ns;       /* when the last message sent arrives */
    unsigned queue_count;     /* sent, not yet arrived */
    size_t queue_bytes;
};

struct process {
    struct transport transport; /* first */
    struct local_network *network;
    uint32_t number;
    bool alive;
    struct transport_events events;
    struct local_event_list coming; /* the earliest first */
    struct local_event_list held;   /* came while cut off, in order */
    struct link links[TRANSPORT_LINK_MAX];
};

struct local_network {
    struct local_network_config config;
    uint64_t now_ns;
    uint64_t random;
    uint64_t order;
    uint64_t link_counter;
    uint32_t process_count;
    struct process *processes[LOCAL_PROCESS_MAX]; /* NULL once closed */
    bool cut[LOCAL_PROCESS_MAX][LOCAL_PROCESS_MAX];
};

static struct process *process_of(struct transport *transport)
{
    return (struct process *)(void *)transport;
}

/* Source: splitmix64, Steele, Lea, Flood 2014. */
uint64_t local_network_random(struct local_network *network)
{
    uint64_t z = network->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static uint64_t delay_ns(struct local_network *network)
{
    const uint64_t span = network->config.delay_max_ns - network->config.delay_min_ns;
    return network->config.delay_min_ns +
           (span > 0 ? local_network_random(network) % (span + 1) : 0);
}

static uint64_t now_of(void *ctx)
{
    return ((struct local_network *)ctx)->now_ns;
}

struct fl_clock local_network_clock(struct local_network *network)
{
    return (struct fl_clock){.now_ns = now_of, .ctx = network};
}

/* Events. */

static struct local_event *event_new(struct process *from, const struct link *link,
                                     enum local_event_kind kind, uint64_t when_ns)
{
    struct local_event *event = local_event_new();
    event->kind = kind;
    event->when_ns = when_ns;
    event->order = ++from->network->order;
    event->from = from->number;
    event->from_link = link->id;
    return event;
}

/* The other end of a link's process, NULL when it is no more. */
static struct process *peer_of(struct process *process, const struct link *link)
{
    struct process *peer = process->network->processes[link->peer];
    return peer != NULL && peer->alive ? peer : NULL;
}

/* When what is sent now arrives: never before what was sent earlier on the link. */
static uint64_t arrival(struct process *process, struct link *link)
{
    const uint64_t when_ns = process->network->now_ns + delay_ns(process->network);
    if (when_ns > link->arrive_ns) {
        link->arrive_ns = when_ns;
    }
    return link->arrive_ns;
}

/* Links. */

static struct link *link_find(struct process *process, transport_link id)
{
    struct link *link = &process->links[id % TRANSPORT_LINK_MAX];
    return id != 0 && link->state != LINK_FREE && link->id == id ? link : NULL;
}

/* Our end of the link whose other end that is. */
static struct link *link_by_peer(struct process *process, uint32_t peer, transport_link peer_link)
{
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        struct link *link = &process->links[i];
        if (link->state != LINK_FREE && link->peer == peer && link->peer_link == peer_link) {
            return link;
        }
    }
    return NULL;
}

static struct link *link_take(struct process *process, uint32_t peer, transport_link peer_link)
{
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        struct link *link = &process->links[i];
        if (link->state == LINK_FREE) {
            *link = (struct link){.state = LINK_OPEN,
                                  .id = ++process->network->link_counter * TRANSPORT_LINK_MAX + i,
                                  .peer = peer,
                                  .peer_link = peer_link};
            return link;
        }
    }
    return NULL;
}

static void closed_at(struct process *process, struct link *link, uint64_t when_ns, fl_status why)
{
    struct local_event *event = event_new(process, link, LOCAL_EVENT_CLOSED, when_ns);
    event->why = why;
    local_event_list_push(&process->coming, event);
}

/* What came from the link and has not arrived never will: the event stays and does nothing. */
static void forget_messages(struct process *to, const struct process *from, const struct link *link)
{
    for (size_t i = 0; i < to->coming.count + to->held.count; i++) {
        struct local_event *event =
            i < to->coming.count ? to->coming.events[i] : to->held.events[i - to->coming.count];
        if (event->from == from->number && event->from_link == link->id &&
            event->kind == LOCAL_EVENT_MESSAGE) {
            event->kind = LOCAL_EVENT_SENT;
            event->cookie = 0;
        }
    }
}

/* What happens. */

static unsigned do_connect(struct process *process, const struct local_event *event)
{
    struct process *from = process->network->processes[event->from];
    struct link *link = link_take(process, event->from, event->from_link);
    struct link *theirs = from != NULL && from->alive ? link_find(from, event->from_link) : NULL;
    if (theirs == NULL) {
        if (link != NULL) {
            link->state = LINK_FREE;
        }
        return 0;
    }
    if (link == NULL) {
        closed_at(from, theirs, process->network->now_ns, FL_LINK_LOST);
        theirs->state = LINK_CLOSING;
        return 0;
    }
    theirs->peer_link = link->id;
    char text[TEXT_MAX];
    snprintf(text, sizeof(text), "local:%u", (unsigned)event->from);
    process->events.accepted(process->events.ctx, link->id, text);
    return 1;
}

static unsigned do_message(struct process *process, const struct local_event *event)
{
    struct process *from = process->network->processes[event->from];
    struct link *theirs = from != NULL ? link_find(from, event->from_link) : NULL;
    if (theirs != NULL) {
        theirs->queue_count--;
        theirs->queue_bytes -= event->size;
    }
    const struct link *link = link_by_peer(process, event->from, event->from_link);
    if (link == NULL || link->state != LINK_OPEN) {
        return 0;
    }
    process->events.received(process->events.ctx, link->id, event->type, event->header,
                             event->header_size, event->data, event->size);
    return 1;
}

static unsigned do_sent(struct process *process, const struct local_event *event)
{
    if (event->cookie == 0 || link_find(process, event->from_link) == NULL) {
        return 0;
    }
    /* Over a real network the change would have been sent, or not. */
    FL_ASSERT(event->size == 0 || memcmp(event->borrowed, event->data, event->size) == 0);
    process->events.sent(process->events.ctx, event->from_link, event->cookie);
    return 1;
}

static unsigned end_link(struct process *process, struct link *link, fl_status why,
                         const char *text)
{
    const transport_link id = link->id;
    link->state = LINK_FREE;
    process->events.closed(process->events.ctx, id, why, text);
    return 1;
}

static unsigned do_bye(struct process *process, const struct local_event *event)
{
    struct link *link = link_by_peer(process, event->from, event->from_link);
    if (link == NULL) {
        return 0;
    }
    char text[TEXT_MAX];
    snprintf(text, sizeof(text), "local:%u %s", (unsigned)event->from,
             event->why == FL_CANCELLED ? "closed the link" : "is gone");
    return end_link(process, link, link->state == LINK_CLOSING ? FL_CANCELLED : FL_LINK_LOST, text);
}

static unsigned do_closed(struct process *process, const struct local_event *event)
{
    struct link *link = link_find(process, event->from_link);
    if (link == NULL) {
        return 0;
    }
    char text[TEXT_MAX];
    snprintf(text, sizeof(text), "cannot reach local:%u", (unsigned)link->peer);
    return end_link(process, link, event->why, event->why == FL_CANCELLED ? "closed here" : text);
}

static unsigned happen(struct process *process, const struct local_event *event)
{
    switch (event->kind) {
    case LOCAL_EVENT_CONNECT: return do_connect(process, event);
    case LOCAL_EVENT_MESSAGE: return do_message(process, event);
    case LOCAL_EVENT_SENT: return do_sent(process, event);
    case LOCAL_EVENT_BYE: return do_bye(process, event);
    case LOCAL_EVENT_CLOSED: return do_closed(process, event);
    }
    return 0;
}

static unsigned local_progress(struct transport *transport)
{
    struct process *process = process_of(transport);
    unsigned count = 0;
    FL_ASSERT(process->alive);
    while (local_event_list_next_ns(&process->coming) <= process->network->now_ns) {
        struct local_event *event = local_event_list_pop(&process->coming);
        if (process->network->cut[event->from][process->number]) {
            local_event_list_append(&process->held, event);
            continue;
        }
        count += happen(process, event);
        local_event_free(event);
    }
    return count;
}

static void local_set_events(struct transport *transport, const struct transport_events *events)
{
    process_of(transport)->events = *events;
}

static void local_address(struct transport *transport, struct fl_address *out)
{
    const struct process *process = process_of(transport);
    *out = (struct fl_address){.kind = FL_ADDRESS_LOCAL, .size = ADDRESS_SIZE};
    memcpy(out->bytes, &process->number, sizeof(process->number));
}

/* The process of an address, which may have ended. */
static fl_status number_of(const struct local_network *network, const struct fl_address *address,
                           uint32_t *out)
{
    uint32_t number = 0;
    if (address->kind != FL_ADDRESS_LOCAL || address->size != ADDRESS_SIZE) {
        return FL_FAIL(FL_INVALID, "address kind %d of %u bytes is not one of this network",
                       (int)address->kind, (unsigned)address->size);
    }
    memcpy(&number, address->bytes, sizeof(number));
    if (number >= network->process_count) {
        return FL_FAIL(FL_INVALID, "address local:%u names no process", (unsigned)number);
    }
    *out = number;
    return FL_OK;
}

static fl_status local_connect(struct transport *transport, const struct fl_address *address,
                               transport_link *out)
{
    struct process *process = process_of(transport);
    uint32_t number = 0;
    FL_TRY(number_of(process->network, address, &number));
    struct link *link = link_take(process, number, 0);
    if (link == NULL) {
        return FL_FAIL(FL_TOO_LARGE, "%d links are open, which is the limit", TRANSPORT_LINK_MAX);
    }
    struct process *peer = peer_of(process, link);
    const uint64_t when_ns = arrival(process, link);
    if (peer == NULL) {
        closed_at(process, link, when_ns, FL_LINK_LOST);
    } else {
        local_event_list_push(&peer->coming,
                              event_new(process, link, LOCAL_EVENT_CONNECT, when_ns));
    }
    *out = link->id;
    return FL_OK;
}

static fl_status local_send(struct transport *transport, transport_link id, uint16_t type,
                            const void *header, size_t header_size, const void *data, size_t size,
                            uint64_t cookie)
{
    struct process *process = process_of(transport);
    FL_ASSERT(header_size <= TRANSPORT_HEADER_MAX && size <= TRANSPORT_MESSAGE_MAX - header_size);
    FL_ASSERT(cookie != 0 || size <= TRANSPORT_COPY_MAX);
    struct link *link = link_find(process, id);
    if (link == NULL || link->state != LINK_OPEN) {
        return FL_LINK_LOST;
    }
    if (link->queue_count >= QUEUE_COUNT_MAX ||
        (link->queue_count > 0 && link->queue_bytes + size > QUEUE_BYTES_MAX)) {
        return FL_AGAIN;
    }
    struct process *peer = peer_of(process, link);
    const uint64_t when_ns = arrival(process, link);
    for (int copy = 0; copy < 2; copy++) { /* one arrives, the other tells the sender */
        struct process *to = copy == 0 ? peer : process;
        if (to == NULL || (copy == 1 && cookie == 0)) {
            continue;
        }
        struct local_event *event =
            event_new(process, link, copy == 0 ? LOCAL_EVENT_MESSAGE : LOCAL_EVENT_SENT, when_ns);
        event->type = type;
        event->cookie = cookie;
        event->borrowed = data;
        local_event_fill(event, header, header_size, data, size);
        local_event_list_push(&to->coming, event);
    }
    if (peer != NULL) {
        link->queue_count++;
        link->queue_bytes += size;
    }
    return FL_OK;
}

/* Tell the other end; returns when it knows. */
static uint64_t say_bye(struct process *process, struct link *link, fl_status why)
{
    struct process *peer = peer_of(process, link);
    const uint64_t when_ns = arrival(process, link);
    if (peer != NULL) {
        struct local_event *event = event_new(process, link, LOCAL_EVENT_BYE, when_ns);
        event->why = why;
        local_event_list_push(&peer->coming, event);
    }
    return when_ns;
}

static void local_close_link(struct transport *transport, transport_link id)
{
    struct process *process = process_of(transport);
    struct link *link = link_find(process, id);
    if (link != NULL && link->state == LINK_OPEN) {
        link->state = LINK_CLOSING;
        closed_at(process, link, say_bye(process, link, FL_CANCELLED), FL_CANCELLED);
    }
}

static void local_drop_link(struct transport *transport, transport_link id)
{
    struct process *process = process_of(transport);
    struct link *link = link_find(process, id);
    if (link == NULL) {
        return;
    }
    struct process *peer = peer_of(process, link);
    if (peer != NULL) {
        forget_messages(peer, process, link);
    }
    if (link->state == LINK_OPEN) {
        (void)say_bye(process, link, FL_CANCELLED);
    }
    link->state = LINK_CLOSING;
    closed_at(process, link, process->network->now_ns, FL_CANCELLED);
}

static int local_fd(struct transport *transport)
{
    (void)transport;
    return -1;
}

static fl_status local_arm(struct transport *transport)
{
    const struct process *process = process_of(transport);
    return local_event_list_next_ns(&process->coming) <= process->network->now_ns ? FL_AGAIN
                                                                                  : FL_OK;
}

void local_network_kill(struct local_network *network, struct transport *transport)
{
    struct process *process = process_of(transport);
    FL_ASSERT(process->network == network);
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        struct link *link = &process->links[i];
        if (link->state != LINK_FREE) {
            (void)say_bye(process, link, FL_LINK_LOST);
            link->state = LINK_FREE;
        }
    }
    local_event_list_clear(&process->coming);
    local_event_list_clear(&process->held);
    process->alive = false;
}

static void local_close(struct transport *transport)
{
    if (transport == NULL) {
        return;
    }
    struct process *process = process_of(transport);
    if (process->alive) {
        local_network_kill(process->network, transport);
    }
    process->network->processes[process->number] = NULL;
    local_event_list_close(&process->coming);
    local_event_list_close(&process->held);
    free(process);
}

static const struct transport_ops local_ops = {
    .name = "local",
    .set_events = local_set_events,
    .address = local_address,
    .connect = local_connect,
    .send = local_send,
    .close_link = local_close_link,
    .drop_link = local_drop_link,
    .progress = local_progress,
    .fd = local_fd,
    .arm = local_arm,
    .close = local_close,
};

static fl_status open_as(struct local_network *network, uint32_t number, struct transport **out)
{
    struct process *process = calloc(1, sizeof(*process));
    if (process == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a transport of %zu bytes", sizeof(*process));
    }
    process->transport.ops = &local_ops;
    process->network = network;
    process->alive = true;
    process->number = number;
    network->processes[number] = process;
    *out = &process->transport;
    return FL_OK;
}

fl_status transport_local_open(struct local_network *network, struct transport **out)
{
    if (network->process_count == LOCAL_PROCESS_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "%d processes have been in this network, which is the limit",
                       LOCAL_PROCESS_MAX);
    }
    FL_TRY(open_as(network, network->process_count, out));
    network->process_count++;
    return FL_OK;
}

fl_status transport_local_reopen(struct local_network *network, const struct fl_address *address,
                                 struct transport **out)
{
    uint32_t number = 0;
    FL_TRY(number_of(network, address, &number));
    if (network->processes[number] != NULL) {
        return FL_FAIL(FL_BUSY, "address local:%u is in use", (unsigned)number);
    }
    return open_as(network, number, out);
}

/* The network. */

fl_status local_network_open(const struct local_network_config *config, struct local_network **out)
{
    if (config->delay_min_ns > config->delay_max_ns) {
        return FL_FAIL(FL_INVALID, "delay_min_ns %" PRIu64 " is above delay_max_ns %" PRIu64,
                       config->delay_min_ns, config->delay_max_ns);
    }
    struct local_network *network = calloc(1, sizeof(*network));
    if (network == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a network of %zu bytes", sizeof(*network));
    }
    network->config = *config;
    network->random = config->seed;
    network->now_ns = FL_NS_PER_S;
    *out = network;
    return FL_OK;
}

void local_network_close(struct local_network *network)
{
    for (uint32_t i = 0; network != NULL && i < network->process_count; i++) {
        FL_ASSERT(network->processes[i] == NULL);
    }
    free(network);
}

uint64_t local_network_next_event_ns(const struct local_network *network)
{
    uint64_t next = UINT64_MAX;
    for (uint32_t i = 0; i < network->process_count; i++) {
        const struct process *process = network->processes[i];
        if (process != NULL && local_event_list_next_ns(&process->coming) < next) {
            next = local_event_list_next_ns(&process->coming);
        }
    }
    return next;
}

void local_network_advance(struct local_network *network, uint64_t now_ns)
{
    if (now_ns > network->now_ns) {
        network->now_ns = now_ns;
    }
}

void local_network_cut(struct local_network *network, struct transport *a, struct transport *b)
{
    const uint32_t x = process_of(a)->number;
    const uint32_t y = process_of(b)->number;
    network->cut[x][y] = x != y;
    network->cut[y][x] = x != y;
}

/* What waited arrives now, in order, and everything sent later behind it. */
static void release_held(struct process *to, struct process *from)
{
    const uint64_t when_ns = to->network->now_ns + to->network->config.delay_max_ns;
    /* What was still under way goes to the back as well: no key of the heap may change in place. */
    while (to->coming.count > 0) {
        local_event_list_append(&to->held, local_event_list_pop(&to->coming));
    }
    size_t kept = 0;
    const size_t count = to->held.count;
    for (size_t i = 0; i < count; i++) {
        struct local_event *event = to->held.events[i];
        if (event->from == from->number && event->when_ns < when_ns) {
            event->when_ns = when_ns; /* ties go by the order in which they were sent */
        }
        if (to->network->cut[event->from][to->number]) {
            to->held.events[kept++] = event; /* cut off from another process too */
        } else {
            local_event_list_push(&to->coming, event);
        }
    }
    to->held.count = kept;
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        struct link *link = &from->links[i];
        if (link->state != LINK_FREE && link->peer == to->number && link->arrive_ns < when_ns) {
            link->arrive_ns = when_ns;
        }
    }
}

void local_network_heal(struct local_network *network, struct transport *a, struct transport *b)
{
    struct process *x = process_of(a);
    struct process *y = process_of(b);
    network->cut[x->number][y->number] = false;
    network->cut[y->number][x->number] = false;
    release_held(x, y);
    release_held(y, x);
}
