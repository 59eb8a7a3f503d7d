#include "cluster/peer.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/log.h"

enum {
    STRANGER_MAX = 32, /* links that came in and have not proved who they are */
    TEXT_MAX = 256,
    PING_SIZE = 8, /* headers, all of them; see peer.h */
    PONG_SIZE = 32,
    PING_MAX = 8, /* under way on one link and remembered */
    BURST = 8,    /* pings, each after the answer to the one before */
    TYPE_OWN_MAX = 15,
};

static const uint64_t ping_default_ns = FL_NS_PER_S;
static const uint64_t lost_default_ns = 5 * FL_NS_PER_S;
static const uint64_t shake_default_ns = 5 * FL_NS_PER_S;
static const uint64_t poll_max_ns = FL_NS_PER_S; /* the transport has deadlines of its own */

enum peer_state { PEER_FREE, PEER_SHAKING, PEER_UP, PEER_CLOSING };

struct peer {
    enum peer_state state;
    transport_link link;
    bool outgoing;
    bool was_up;
    fl_status why; /* of PEER_CLOSING: what down() will say */
    uint64_t shake_deadline_ns;
    uint64_t heard_ns;         /* when the last message came */
    uint64_t spoke_ns;         /* when the last message went */
    uint64_t clock_due_ns;     /* when the clock map wants the next ping */
    uint64_t pinged[PING_MAX]; /* clock of the pings under way, 0: none */
    unsigned ping_count;       /* so far */
    unsigned burst;            /* pings still to follow one another */
    uint64_t round_trip_ns;
    struct fl_handshake handshake;
    char address[TRANSPORT_TEXT_MAX];
    char text[TEXT_MAX];
};

struct peer_table {
    struct peer_config config;
    uint64_t polled_ns;
    size_t high;              /* slots at and above it are free */
    struct clock_map *clocks; /* [TRANSPORT_LINK_MAX], one per slot; NULL: none are kept */
    struct peer peers[TRANSPORT_LINK_MAX];
};

static uint64_t now_of(const struct peer_table *peers)
{
    return fl_clock_now(&peers->config.clock);
}

static const struct transport_ops *ops_of(const struct peer_table *peers)
{
    return peers->config.transport->ops;
}

static const struct peer *look_up(const struct peer_table *peers, transport_link link)
{
    for (size_t i = 0; i < peers->high; i++) {
        if (peers->peers[i].state != PEER_FREE && peers->peers[i].link == link) {
            return &peers->peers[i];
        }
    }
    return NULL;
}

static struct peer *find(struct peer_table *peers, transport_link link)
{
    const struct peer *peer = look_up(peers, link);
    return peer != NULL ? &peers->peers[peer - peers->peers] : NULL;
}

/* NULL when none are kept. */
static struct clock_map *clock_of(const struct peer_table *peers, const struct peer *peer)
{
    return peers->clocks != NULL ? &peers->clocks[peer - peers->peers] : NULL;
}

static struct peer *take(struct peer_table *peers, transport_link link, bool outgoing)
{
    size_t i = 0;
    while (i < TRANSPORT_LINK_MAX && peers->peers[i].state != PEER_FREE) {
        i++;
    }
    FL_ASSERT(i < TRANSPORT_LINK_MAX); /* the transport has no more links than that */
    if (i >= peers->high) {
        peers->high = i + 1;
    }
    const uint64_t now = now_of(peers);
    struct peer *peer = &peers->peers[i];
    *peer = (struct peer){
        .state = PEER_SHAKING,
        .link = link,
        .outgoing = outgoing,
        .shake_deadline_ns = now + peers->config.shake_ns,
        .heard_ns = now,
        .spoke_ns = now,
    };
    fl_handshake_init(&peer->handshake, peers->config.party, outgoing, peers->config.key);
    return peer;
}

static void give(struct peer_table *peers, struct peer *peer)
{
    peer->state = PEER_FREE;
    while (peers->high > 0 && peers->peers[peers->high - 1].state == PEER_FREE) {
        peers->high--;
    }
}

/* From now on the link only waits for its closed(). */
static void end(struct peer *peer, fl_status why, const char *text)
{
    peer->state = PEER_CLOSING;
    peer->why = why;
    snprintf(peer->text, sizeof(peer->text), "%s", text);
}

static void drop(struct peer_table *peers, struct peer *peer, fl_status why, const char *text)
{
    end(peer, why, text);
    ops_of(peers)->drop_link(peers->config.transport, peer->link);
}

/* The peer broke the rules; say so once and drop it. */
static void drop_broken(struct peer_table *peers, struct peer *peer, const char *what)
{
    char text[TEXT_MAX];
    const fl_status why = FL_FAIL(FL_PROTOCOL, "peer %s: %s", peer->address, what);
    snprintf(text, sizeof(text), "%.200s", fl_last_error());
    drop(peers, peer, why, text);
}

static fl_status tell(struct peer_table *peers, struct peer *peer, uint16_t type,
                      const void *header, size_t header_size, const void *data, size_t size)
{
    peer->spoke_ns = now_of(peers);
    return ops_of(peers)->send(peers->config.transport, peer->link, type, header, header_size, data,
                               size, 0);
}

static void put_u64(unsigned char *out, uint64_t value)
{
    for (int i = 0; i < 8; i++) {
        out[i] = (unsigned char)(value >> (8 * i));
    }
}

static uint64_t get_u64(const unsigned char *in)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) {
        value |= (uint64_t)in[i] << (8 * i);
    }
    return value;
}

/* A full queue needs no ping: whatever is in it will be heard. */
static void ping(struct peer_table *peers, struct peer *peer)
{
    const uint64_t now = now_of(peers);
    unsigned char header[PING_SIZE];
    put_u64(header, now);
    peer->clock_due_ns = now + peers->config.clock_ns;
    if (tell(peers, peer, FL_WIRE_PING, header, sizeof(header), NULL, 0) == FL_OK) {
        peer->pinged[peer->ping_count++ % PING_MAX] = now;
    }
}

/* Its readings are the first and the last thing done with a ping. */
static void pong(struct peer_table *peers, struct peer *peer, const unsigned char *pinged)
{
    unsigned char header[PONG_SIZE];
    memcpy(header, pinged, PING_SIZE);
    put_u64(header + 8, peer->heard_ns);
    put_u64(header + 24, fl_clock_asleep(&peers->config.clock));
    put_u64(header + 16, now_of(peers));
    (void)!tell(peers, peer, FL_WIRE_PONG, header, sizeof(header), NULL, 0);
}

/* True once for every ping sent, so that nobody answers one that was not. */
static bool take_pinged(struct peer *peer, uint64_t pinged_ns)
{
    for (size_t i = 0; i < PING_MAX; i++) {
        if (pinged_ns != 0 && peer->pinged[i] == pinged_ns) {
            peer->pinged[i] = 0;
            return true;
        }
    }
    return false;
}

static void map_clock(struct peer_table *peers, struct peer *peer, const unsigned char *header)
{
    const struct clock_map_sample sample = {.sent_ns = get_u64(header),
                                            .received_ns = get_u64(header + 8),
                                            .replied_ns = get_u64(header + 16),
                                            .returned_ns = peer->heard_ns,
                                            .asleep_ns = fl_clock_asleep(&peers->config.clock),
                                            .their_asleep_ns = get_u64(header + 24)};
    const enum clock_map_news news = clock_map_take(clock_of(peers, peer), &sample);
    if (peer->burst > 0) {
        peer->burst--;
        ping(peers, peer);
    }
    if (peers->config.ponged != NULL) {
        peers->config.ponged(peers->config.events.ctx, peer->link, news);
    }
}

static void take_pong(struct peer_table *peers, struct peer *peer, const unsigned char *header)
{
    const uint64_t pinged_ns = get_u64(header);
    if (!take_pinged(peer, pinged_ns) || peer->heard_ns < pinged_ns) {
        return;
    }
    const uint64_t round_trip = peer->heard_ns - pinged_ns;
    if (peer->round_trip_ns == 0 || round_trip < peer->round_trip_ns) {
        peer->round_trip_ns = round_trip > 0 ? round_trip : 1;
    }
    if (peers->clocks != NULL) {
        map_clock(peers, peer, header);
    }
}

static void go_up(struct peer_table *peers, struct peer *peer)
{
    peer->state = PEER_UP;
    peer->was_up = true;
    const transport_link link = peer->link;
    const struct peer_events *events = &peers->config.events;
    if (peers->clocks != NULL) {
        clock_map_init(clock_of(peers, peer), fl_clock_asleep(&peers->config.clock));
        peer->burst = BURST - 1;
    }
    ping(peers, peer); /* exercises the link, and tells its round trip */
    events->up(events->ctx, link, peer->handshake.peer_party, peer->address);
}

static void take_record(struct peer_table *peers, struct peer *peer, const void *data, size_t size)
{
    unsigned char answer[FL_HANDSHAKE_RECORD_MAX];
    size_t answer_size = 0;
    const fl_status status = fl_handshake_take(&peer->handshake, data, size, answer, &answer_size);
    char text[TEXT_MAX] = "";
    if (status != FL_OK && status != FL_AGAIN) {
        snprintf(text, sizeof(text), "%.200s", fl_last_error());
    }
    fl_status told = FL_OK;
    if (answer_size > 0) {
        told = tell(peers, peer, FL_WIRE_HANDSHAKE, NULL, 0, answer, answer_size);
    }
    if (status != FL_OK && status != FL_AGAIN) {
        end(peer, status, text);
        ops_of(peers)->close_link(peers->config.transport, peer->link); /* after the answer */
    } else if (told != FL_OK) {
        drop(peers, peer, FL_LINK_LOST, "connection lost during the handshake");
    } else if (status == FL_OK) {
        go_up(peers, peer);
    }
}

static void take_own(struct peer_table *peers, struct peer *peer, uint16_t type, const void *header,
                     size_t header_size, size_t size)
{
    if (type == FL_WIRE_PING && header_size == PING_SIZE && size == 0) {
        pong(peers, peer, header);
    } else if (type == FL_WIRE_PONG && header_size == PONG_SIZE && size == 0) {
        take_pong(peers, peer, header);
    } else {
        char what[TEXT_MAX];
        snprintf(what, sizeof(what), "message of type %u with %zu and %zu bytes is malformed",
                 (unsigned)type, header_size, size);
        drop_broken(peers, peer, what);
    }
}

static void on_accepted(void *ctx, transport_link link, const char *address)
{
    struct peer_table *peers = ctx;
    size_t strangers = 0;
    for (size_t i = 0; i < peers->high; i++) {
        const struct peer *peer = &peers->peers[i];
        strangers += peer->state == PEER_SHAKING && !peer->outgoing;
    }
    struct peer *peer = take(peers, link, false);
    snprintf(peer->address, sizeof(peer->address), "%s", address);
    if (strangers >= STRANGER_MAX) {
        fl_log(FL_LOG_WARN, "link from %s dropped: %d others have not yet said who they are",
               address, STRANGER_MAX);
        drop(peers, peer, FL_BUSY, "too many links without a handshake");
    }
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct peer_table *peers = ctx;
    struct peer *peer = find(peers, link);
    if (peer == NULL || peer->state == PEER_CLOSING) {
        return;
    }
    peer->heard_ns = now_of(peers);
    if (peer->state == PEER_SHAKING) {
        /* Whatever else it is, it is no record, and is answered as such. */
        const bool is_record = type == FL_WIRE_HANDSHAKE && header_size == 0;
        take_record(peers, peer, data, is_record ? size : 0);
    } else if (type <= TYPE_OWN_MAX) {
        take_own(peers, peer, type, header, header_size, size);
    } else {
        const struct peer_events *events = &peers->config.events;
        events->received(events->ctx, link, type, header, header_size, data, size);
    }
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    struct peer_table *peers = ctx;
    const struct peer_events *events = &peers->config.events;
    events->sent(events->ctx, link, cookie);
}

static void on_closed(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct peer_table *peers = ctx;
    struct peer *found = find(peers, link);
    if (found == NULL) {
        return;
    }
    const struct peer peer = *found;
    give(peers, found);
    if (peer.outgoing || peer.was_up) {
        const bool ours = peer.state == PEER_CLOSING;
        const struct peer_events *events = &peers->config.events;
        events->down(events->ctx, link, ours ? peer.why : why, ours ? peer.text : text);
    }
}

fl_status peer_open(const struct peer_config *config, struct peer_table **out)
{
    struct peer_table *peers = calloc(1, sizeof(*peers));
    if (peers == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a table of peers (%zu bytes)", sizeof(*peers));
    }
    peers->config = *config;
    if (config->clock_ns > 0) {
        peers->clocks = calloc(TRANSPORT_LINK_MAX, sizeof(*peers->clocks));
        if (peers->clocks == NULL) {
            free(peers);
            return FL_FAIL(FL_NO_MEMORY, "no memory for the clocks of peers (%zu bytes)",
                           TRANSPORT_LINK_MAX * sizeof(struct clock_map));
        }
    }
    if (config->ping_ns == 0) {
        peers->config.ping_ns = ping_default_ns;
    }
    if (config->lost_ns == 0) {
        peers->config.lost_ns = lost_default_ns;
    }
    if (config->shake_ns == 0) {
        peers->config.shake_ns = shake_default_ns;
    }
    peers->polled_ns = now_of(peers);
    const struct transport_events events = {
        .ctx = peers,
        .accepted = on_accepted,
        .received = on_received,
        .sent = on_sent,
        .closed = on_closed,
    };
    ops_of(peers)->set_events(config->transport, &events);
    *out = peers;
    return FL_OK;
}

void peer_close(struct peer_table *peers)
{
    if (peers != NULL) {
        free(peers->clocks);
    }
    free(peers);
}

fl_status peer_connect(struct peer_table *peers, const struct fl_address *address,
                       transport_link *out)
{
    transport_link link = 0;
    FL_TRY(ops_of(peers)->connect(peers->config.transport, address, &link));
    struct peer *peer = take(peers, link, true);
    if (address->kind == FL_ADDRESS_SOCKET) {
        snprintf(peer->address, sizeof(peer->address), "%.*s",
                 (int)(address->size < 100 ? address->size : 100), (const char *)address->bytes);
    } else {
        snprintf(peer->address, sizeof(peer->address), "link %" PRIu64, link);
    }
    unsigned char hello[FL_HANDSHAKE_RECORD_MAX];
    size_t size = 0;
    fl_handshake_hello(&peer->handshake, hello, &size);
    const fl_status status = tell(peers, peer, FL_WIRE_HANDSHAKE, NULL, 0, hello, size);
    if (status != FL_OK && status != FL_LINK_LOST) { /* lost: closed() tells */
        drop(peers, peer, status, "the handshake cannot be sent");
    }
    *out = link;
    return FL_OK;
}

fl_status peer_send(struct peer_table *peers, transport_link link, uint16_t type,
                    const void *header, size_t header_size, const void *data, size_t size,
                    uint64_t cookie)
{
    FL_ASSERT(type > TYPE_OWN_MAX);
    struct peer *peer = find(peers, link);
    if (peer == NULL || peer->state == PEER_CLOSING) {
        return FL_LINK_LOST;
    }
    if (peer->state == PEER_SHAKING) {
        return FL_AGAIN;
    }
    FL_TRY(ops_of(peers)->send(peers->config.transport, link, type, header, header_size, data, size,
                               cookie));
    peer->spoke_ns = now_of(peers);
    return FL_OK;
}

void peer_close_link(struct peer_table *peers, transport_link link)
{
    struct peer *peer = find(peers, link);
    if (peer == NULL || peer->state == PEER_CLOSING) {
        return;
    }
    end(peer, FL_CANCELLED, "closed here");
    ops_of(peers)->close_link(peers->config.transport, link);
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Returns when to look at this peer again. */
static uint64_t check(struct peer_table *peers, struct peer *peer, uint64_t now)
{
    char text[TEXT_MAX];
    if (peer->state == PEER_SHAKING) {
        if (now < peer->shake_deadline_ns) {
            return peer->shake_deadline_ns;
        }
        snprintf(text, sizeof(text), "no answer from %s within %.1f s", peer->address,
                 (double)peers->config.shake_ns / (double)FL_NS_PER_S);
        drop(peers, peer, FL_DEADLINE, text);
        return UINT64_MAX;
    }
    if (peer->state != PEER_UP) {
        return UINT64_MAX;
    }
    if (now >= peer->heard_ns + peers->config.lost_ns) {
        snprintf(text, sizeof(text), "no word from %s for %.1f s", peer->address,
                 (double)(now - peer->heard_ns) / (double)FL_NS_PER_S);
        drop(peers, peer, FL_LINK_LOST, text);
        return UINT64_MAX;
    }
    const bool clock_due = peers->clocks != NULL && now >= peer->clock_due_ns;
    if (clock_due || now >= peer->spoke_ns + peers->config.ping_ns) {
        ping(peers, peer);
    }
    const uint64_t clock_ns = peers->clocks != NULL ? peer->clock_due_ns : UINT64_MAX;
    return min_u64(clock_ns, min_u64(peer->spoke_ns + peers->config.ping_ns,
                                     peer->heard_ns + peers->config.lost_ns));
}

unsigned peer_poll(struct peer_table *peers, uint64_t *out_next_ns)
{
    unsigned count = ops_of(peers)->progress(peers->config.transport);
    uint64_t now = now_of(peers);
    /* When this process itself was held up, what the others said meanwhile may not be read yet. */
    const uint64_t asleep = now - peers->polled_ns;
    const uint64_t grace = asleep > peers->config.lost_ns / 2 ? asleep : 0;
    uint64_t next = now + poll_max_ns;
    bool dropped = false;
    for (size_t i = 0; i < peers->high; i++) {
        struct peer *peer = &peers->peers[i];
        if (peer->state == PEER_FREE) {
            continue;
        }
        peer->heard_ns = min_u64(peer->heard_ns + grace, now);
        const enum peer_state before = peer->state;
        next = min_u64(next, check(peers, peer, now));
        dropped = dropped || peer->state != before;
    }
    if (dropped) {
        count += ops_of(peers)->progress(peers->config.transport);
    }
    peers->polled_ns = now;
    *out_next_ns = next;
    return count;
}

uint64_t peer_round_trip_ns(const struct peer_table *peers, transport_link link)
{
    const struct peer *peer = look_up(peers, link);
    return peer != NULL ? peer->round_trip_ns : 0;
}

const struct clock_map *peer_clock(const struct peer_table *peers, transport_link link)
{
    const struct peer *peer = look_up(peers, link);
    return peer != NULL && peer->state == PEER_UP ? clock_of(peers, peer) : NULL;
}

void peer_ping_burst(struct peer_table *peers, transport_link link)
{
    struct peer *peer = find(peers, link);
    if (peer == NULL || peer->state != PEER_UP || peers->clocks == NULL) {
        return;
    }
    if (peer->burst == 0) {
        ping(peers, peer);
    }
    peer->burst = BURST - 1;
}
