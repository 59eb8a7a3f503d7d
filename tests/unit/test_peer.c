/* Peers over the in-process network: handshake, heartbeats, strangers, order; all on its clock. */
#include "cluster/peer.h"

#include <stdbool.h>
#include <stdlib.h>

#include "cluster/transport_local.h"
#include "proto/base/log.h"
#include "tests/harness.h"

enum { SIDES = 4, NUMBERS = 256 };

struct side {
    struct transport *transport;
    struct peer_table *peers;
    unsigned up;
    enum fl_party party;
    transport_link link; /* the last that came up */
    unsigned received;
    unsigned wrong;
    uint32_t next;
    unsigned sent;
    unsigned down;
    fl_status why;
    char text[256];
    uint64_t down_ns;
    unsigned closed; /* of a raw side: the transport's events */
};

struct world {
    struct local_network *network;
    struct side sides[SIDES];
    unsigned count;
    uint64_t seed;
};

static struct world world; /* of the case that runs */

static uint64_t now_ns(void)
{
    const struct fl_clock clock = local_network_clock(world.network);
    return fl_clock_now(&clock);
}

static void on_up(void *ctx, transport_link link, enum fl_party party, const char *address)
{
    struct side *side = ctx;
    side->up++;
    side->link = link;
    side->party = party;
    side->wrong += address == NULL;
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct side *side = ctx;
    (void)link, (void)header, (void)header_size;
    side->received++;
    uint32_t number = 0;
    side->wrong += type != FL_WIRE_CONTROL || size < sizeof(number);
    memcpy(&number, data, sizeof(number));
    side->wrong += number != side->next++;
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    struct side *side = ctx;
    (void)link, (void)cookie;
    side->sent++;
}

static void on_down(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct side *side = ctx;
    (void)link;
    side->down++;
    side->why = why;
    side->down_ns = now_ns();
    snprintf(side->text, sizeof(side->text), "%s", text);
}

static void raw_accepted(void *ctx, transport_link link, const char *peer)
{
    (void)ctx, (void)link, (void)peer;
}

static void raw_received(void *ctx, transport_link link, uint16_t type, const void *header,
                         size_t header_size, const void *data, size_t size)
{
    (void)link, (void)type, (void)header, (void)header_size, (void)data, (void)size;
    ((struct side *)ctx)->received++;
}

static void raw_closed(void *ctx, transport_link link, fl_status why, const char *text)
{
    (void)link, (void)why, (void)text;
    ((struct side *)ctx)->closed++;
}

static void world_open(uint64_t seed)
{
    memset(&world, 0, sizeof(world));
    world.seed = seed;
    const struct local_network_config config = {
        .seed = seed, .delay_min_ns = 50 * FL_NS_PER_US, .delay_max_ns = 3 * FL_NS_PER_MS};
    CHECK_EQ(local_network_open(&config, &world.network), FL_OK);
}

static struct side *side_add_with(enum fl_party party, const struct fl_pool_key *key,
                                  uint64_t clock_ns)
{
    struct side *side = &world.sides[world.count++];
    CHECK_EQ(transport_local_open(world.network, &side->transport), FL_OK);
    const struct peer_config config = {
        .transport = side->transport,
        .clock = local_network_clock(world.network),
        .party = party,
        .key = key,
        .events = {side, on_up, on_received, on_sent, on_down},
        .clock_ns = clock_ns,
    };
    CHECK_EQ(peer_open(&config, &side->peers), FL_OK);
    return side;
}

static struct side *side_add(enum fl_party party, const struct fl_pool_key *key)
{
    return side_add_with(party, key, 0);
}

/* A process that speaks to the transport without the peer layer. */
static struct side *raw_add(void)
{
    struct side *side = &world.sides[world.count++];
    CHECK_EQ(transport_local_open(world.network, &side->transport), FL_OK);
    const struct transport_events events = {.ctx = side,
                                            .accepted = raw_accepted,
                                            .received = raw_received,
                                            .sent = on_sent,
                                            .closed = raw_closed};
    side->transport->ops->set_events(side->transport, &events);
    return side;
}

static void world_close(void)
{
    for (unsigned i = 0; i < world.count; i++) {
        peer_close(world.sides[i].peers);
        world.sides[i].transport->ops->close(world.sides[i].transport);
    }
    local_network_close(world.network);
}

/* Run the network for that long; `deaf` (or NULL) is not polled. */
static void run_but(uint64_t duration_ns, const struct side *deaf)
{
    const uint64_t end = now_ns() + duration_ns;
    for (;;) {
        uint64_t next = end;
        unsigned happened = 0;
        for (unsigned i = 0; i < world.count; i++) {
            struct side *side = &world.sides[i];
            uint64_t due = UINT64_MAX;
            if (side == deaf) {
                continue;
            }
            if (side->peers != NULL) {
                happened += peer_poll(side->peers, &due);
                next = due < next ? due : next;
            } else {
                happened += side->transport->ops->progress(side->transport);
            }
        }
        if (happened > 0) {
            continue;
        }
        if (now_ns() >= end) {
            return;
        }
        const uint64_t event = local_network_next_event_ns(world.network);
        next = event < next ? event : next;
        /* What a deaf side has not taken stays due: step over it. */
        local_network_advance(world.network, next > now_ns() ? next : now_ns() + FL_NS_PER_MS);
    }
}

static void run(uint64_t duration_ns)
{
    run_but(duration_ns, NULL);
}

static transport_link join(struct side *from, struct side *to)
{
    struct fl_address address;
    transport_link link = 0;
    to->transport->ops->address(to->transport, &address);
    CHECK_EQ(peer_connect(from->peers, &address, &link), FL_OK);
    return link;
}

static fl_status say(struct side *side, transport_link link, uint32_t number)
{
    return peer_send(side->peers, link, FL_WIRE_CONTROL, NULL, 0, &number, sizeof(number), 0);
}

static void test_up(void)
{
    struct fl_pool_key key;
    fl_pool_key_make(&key);
    world_open(1);
    struct side *a = side_add(FL_PARTY_NODE, &key);
    struct side *b = side_add(FL_PARTY_COORDINATOR, &key);
    const transport_link link = join(a, b);
    CHECK_EQ(say(a, link, 0), FL_AGAIN); /* not before the handshake is done */
    run(FL_NS_PER_S / 10);
    CHECK_EQ(a->up, 1);
    CHECK_EQ(b->up, 1);
    CHECK_EQ(a->party, FL_PARTY_COORDINATOR);
    CHECK_EQ(b->party, FL_PARTY_NODE);
    CHECK(a->link == link);
    for (uint32_t i = 0; i < 100; i++) {
        CHECK_EQ(say(a, link, i), FL_OK);
        CHECK_EQ(say(b, b->link, i), FL_OK);
    }
    run(FL_NS_PER_S / 10);
    CHECK_EQ(a->received, 100);
    CHECK_EQ(b->received, 100);
    CHECK_EQ(a->wrong + b->wrong, 0);
    CHECK(peer_round_trip_ns(a->peers, link) >= 100 * FL_NS_PER_US);
    CHECK(peer_round_trip_ns(a->peers, link) <= 6 * FL_NS_PER_MS);
    CHECK_EQ(peer_round_trip_ns(a->peers, 12345), 0);
    world_close();
}

static void test_idle_is_healthy(void)
{
    world_open(2);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    join(a, b);
    run(10 * 60 * FL_NS_PER_S);
    CHECK_EQ(a->up, 1);
    CHECK_EQ(a->down + b->down, 0);
    CHECK_EQ(a->received + b->received, 0); /* pings are not the caller's business */
    world_close();
}

static void test_silence(void)
{
    world_open(3);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    join(a, b);
    run(FL_NS_PER_S);
    local_network_cut(world.network, a->transport, b->transport);
    const uint64_t cut_ns = now_ns();
    run(10 * FL_NS_PER_S);
    CHECK_EQ(a->down, 1);
    CHECK_EQ(b->down, 1);
    CHECK_EQ(a->why, FL_LINK_LOST);
    CHECK(strstr(a->text, "no word from") != NULL);
    CHECK(a->down_ns - cut_ns >= 4 * FL_NS_PER_S && a->down_ns - cut_ns <= 6 * FL_NS_PER_S);
    CHECK_EQ(say(a, a->link, 0), FL_LINK_LOST);
    /* And again after the cut is healed. */
    local_network_heal(world.network, a->transport, b->transport);
    run(FL_NS_PER_S);
    join(a, b);
    run(FL_NS_PER_S);
    CHECK_EQ(a->up, 2);
    CHECK_EQ(b->up, 2);
    world_close();
}

static void test_short_cut(void)
{
    world_open(4);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    const transport_link link = join(a, b);
    run(FL_NS_PER_S);
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(say(a, link, i), FL_OK);
        if (i == 5) {
            local_network_cut(world.network, a->transport, b->transport);
        }
        run(FL_NS_PER_MS);
    }
    run(2 * FL_NS_PER_S);
    CHECK(b->received < 20);
    local_network_heal(world.network, a->transport, b->transport);
    CHECK_EQ(say(a, link, 20), FL_OK);
    run(FL_NS_PER_S);
    CHECK_EQ(b->received, 21);
    CHECK_EQ(b->wrong, 0);
    CHECK_EQ(a->down + b->down, 0);
    world_close();
}

static void test_killed(void)
{
    world_open(5);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    join(a, b);
    run(FL_NS_PER_S);
    local_network_kill(world.network, b->transport);
    run_but(FL_NS_PER_S / 10, b);
    CHECK_EQ(a->down, 1);
    CHECK_EQ(a->why, FL_LINK_LOST);
    world_close();
}

/* A process that was held up does not take its peers for lost: they were not silent. */
static void test_held_up(void)
{
    world_open(6);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    join(a, b);
    run(FL_NS_PER_S);
    run_but(4 * FL_NS_PER_S, a);
    run(FL_NS_PER_S);
    CHECK_EQ(a->down + b->down, 0);
    run_but(20 * FL_NS_PER_S, a); /* now b has every reason */
    CHECK_EQ(b->down, 1);
    run(FL_NS_PER_S);
    CHECK_EQ(a->down, 1);
    world_close();
}

static void test_other_key(void)
{
    struct fl_pool_key key, other;
    fl_pool_key_make(&key);
    fl_pool_key_make(&other);
    const struct fl_pool_key *keys[3] = {&other, NULL, &key};
    for (int i = 0; i < 3; i++) {
        world_open(7);
        struct side *a = side_add(FL_PARTY_NODE, keys[i]);
        struct side *b = side_add(FL_PARTY_COORDINATOR, i < 2 ? &key : NULL);
        join(a, b);
        run(FL_NS_PER_S);
        CHECK_EQ(a->up + b->up, 0);
        CHECK_EQ(a->down, 1);
        CHECK_EQ(a->why, FL_DENIED);
        CHECK(strstr(a->text, "key") != NULL);
        CHECK_EQ(b->down, 0); /* it never knew of the link */
        world_close();
    }
}

static void raw_send(struct side *side, transport_link link, uint16_t type, const void *data,
                     size_t size)
{
    CHECK_EQ(side->transport->ops->send(side->transport, link, type, NULL, 0, data, size, 0),
             FL_OK);
}

static transport_link raw_join(struct side *from, struct side *to)
{
    struct fl_address address;
    transport_link link = 0;
    to->transport->ops->address(to->transport, &address);
    CHECK_EQ(from->transport->ops->connect(from->transport, &address, &link), FL_OK);
    return link;
}

static void test_strangers(void)
{
    static const unsigned char garbage[300] = {0x07, 'f', 'l', 'h', 1, 0, 9};
    world_open(8);
    struct side *a = raw_add();
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    /* Speaks before the handshake; garbage in the handshake; a ping; an empty record. */
    raw_send(a, raw_join(a, b), FL_WIRE_CONTROL, "x", 1);
    raw_send(a, raw_join(a, b), FL_WIRE_HANDSHAKE, garbage, sizeof(garbage));
    raw_send(a, raw_join(a, b), FL_WIRE_HANDSHAKE, garbage, 8);
    raw_send(a, raw_join(a, b), FL_WIRE_PING, garbage, 8);
    raw_send(a, raw_join(a, b), FL_WIRE_HANDSHAKE, NULL, 0);
    run(FL_NS_PER_S);
    CHECK_EQ(a->closed, 5);
    CHECK_EQ(a->received, 5); /* a refusal each */
    CHECK_EQ(b->up + b->down + b->received, 0);
    world_close();
}

static void test_silent_stranger(void)
{
    world_open(9);
    struct side *a = raw_add();
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    raw_join(a, b);
    run(4 * FL_NS_PER_S);
    CHECK_EQ(a->closed, 0);
    run(2 * FL_NS_PER_S);
    CHECK_EQ(a->closed, 1);
    CHECK_EQ(b->up + b->down, 0);
    world_close();
}

static void test_many_strangers(void)
{
    world_open(10);
    struct side *a = raw_add();
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    struct side *c = side_add(FL_PARTY_NODE, NULL);
    for (int i = 0; i < 100; i++) {
        raw_join(a, b);
    }
    run(FL_NS_PER_S);
    CHECK_EQ(a->closed, 100 - 32);
    run(5 * FL_NS_PER_S);
    CHECK_EQ(a->closed, 100);
    join(c, b);
    run(FL_NS_PER_S);
    CHECK_EQ(c->up, 1);
    world_close();
}

/* An answerer that never says anything. */
static void test_no_answer(void)
{
    world_open(11);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = raw_add();
    join(a, b);
    run(4 * FL_NS_PER_S);
    CHECK_EQ(a->down, 0);
    run(2 * FL_NS_PER_S);
    CHECK_EQ(a->down, 1);
    CHECK_EQ(a->why, FL_DEADLINE);
    CHECK(strstr(a->text, "no answer") != NULL);
    world_close();
}

static void test_nobody(void)
{
    world_open(12);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    struct fl_address address;
    transport_link link = 0;
    b->transport->ops->address(b->transport, &address);
    local_network_kill(world.network, b->transport);
    CHECK_EQ(peer_connect(a->peers, &address, &link), FL_OK);
    run_but(FL_NS_PER_S, b);
    CHECK_EQ(a->down, 1);
    CHECK_EQ(a->why, FL_LINK_LOST);
    address.bytes[0] = 200;
    CHECK_EQ(peer_connect(a->peers, &address, &link), FL_INVALID);
    world_close();
}

/* After the handshake, too, the peer layer's own messages must be well formed. */
static void test_own_malformed(void)
{
    static const struct {
        uint16_t type;
        size_t header_size;
        size_t size;
    } wrong[] = {{FL_WIRE_PING, 7, 0},
                 {FL_WIRE_PING, 8, 1},
                 {FL_WIRE_PONG, 8, 0},
                 {FL_WIRE_PONG, 31, 0},
                 {FL_WIRE_PONG, 16, 0},
                 {FL_WIRE_PONG, 32, 1},
                 {5, 0, 0},
                 {FL_WIRE_HANDSHAKE, 0, 40},
                 {15, 8, 8}};
    static const unsigned char bytes[64];
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        world_open(13);
        struct side *a = side_add(FL_PARTY_NODE, NULL);
        struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
        const transport_link link = join(a, b);
        run(FL_NS_PER_S);
        CHECK_EQ(a->transport->ops->send(a->transport, link, wrong[i].type, bytes,
                                         wrong[i].header_size, bytes, wrong[i].size, 0),
                 FL_OK);
        run(FL_NS_PER_S);
        CHECK_EQ(b->down, 1);
        CHECK_EQ(b->why, FL_PROTOCOL);
        CHECK_EQ(a->down, 1);
        world_close();
    }
}

/* An answer to no ping, or a second one to the same, tells nothing. */
static void test_false_pong(void)
{
    unsigned char pong[32] = {0};
    world_open(17);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add_with(FL_PARTY_COORDINATOR, NULL, FL_NS_PER_S);
    const transport_link link = join(a, b);
    run(3 * FL_NS_PER_S);
    const struct clock_map *map = peer_clock(b->peers, b->link);
    CHECK(map != NULL && map->sample_count >= 8);
    CHECK(peer_clock(a->peers, link) == NULL); /* it keeps none */
    const uint32_t samples = map->sample_count;
    const uint64_t recent = now_ns() - FL_NS_PER_MS;
    for (uint64_t sent = 0; sent <= recent; sent += recent) {
        memcpy(pong, &sent, sizeof(sent));
        CHECK_EQ(a->transport->ops->send(a->transport, link, FL_WIRE_PONG, pong, sizeof(pong), NULL,
                                         0, 0),
                 FL_OK);
    }
    run(20 * FL_NS_PER_MS);
    CHECK(map->sample_count <= samples + 1);
    CHECK_EQ(map->step_count, 0);
    CHECK_EQ(a->down + b->down, 0);
    world_close();
}

/* Who lives but does not answer pings has a map that maps nothing. */
static void test_no_pong(void)
{
    uint64_t got = 0;
    uint64_t error = 0;
    world_open(18);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add_with(FL_PARTY_COORDINATOR, NULL, FL_NS_PER_S);
    join(a, b);
    while (b->up == 0) {
        run(FL_NS_PER_MS / 10);
    }
    run_but(2 * FL_NS_PER_S, a);
    const struct clock_map *map = peer_clock(b->peers, b->link);
    CHECK(map != NULL);
    CHECK_EQ(map->sample_count, 0);
    CHECK_EQ(clock_map_to_local(map, 1, &got, &error), FL_AGAIN);
    CHECK_EQ(b->down, 0);
    run_but(4 * FL_NS_PER_S, a); /* and who says nothing at all is lost, as ever */
    CHECK_EQ(b->down, 1);
    CHECK(peer_clock(b->peers, b->link) == NULL);
    world_close();
}

static void test_close(void)
{
    world_open(14);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    const transport_link link = join(a, b);
    run(FL_NS_PER_S);
    CHECK_EQ(say(a, link, 0), FL_OK);
    peer_close_link(a->peers, link);
    peer_close_link(a->peers, link);
    CHECK_EQ(say(a, link, 1), FL_LINK_LOST);
    run(FL_NS_PER_S);
    CHECK_EQ(b->received, 1); /* what was queued has left */
    CHECK_EQ(a->down, 1);
    CHECK_EQ(a->why, FL_CANCELLED);
    CHECK_EQ(b->down, 1);
    CHECK_EQ(b->why, FL_LINK_LOST);
    CHECK(strstr(b->text, "closed") != NULL);
    world_close();
}

static void test_back_pressure(void)
{
    world_open(15);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    const transport_link link = join(a, b);
    run(FL_NS_PER_S);
    uint32_t count = 0;
    while (count < 10000 && say(a, link, count) == FL_OK) {
        count++;
    }
    CHECK(count > 16 && count < 10000);
    run(FL_NS_PER_S);
    CHECK_EQ(b->received, count);
    CHECK_EQ(say(a, link, count), FL_OK);
    world_close();
}

static void test_cookies(void)
{
    static unsigned char data[8 << 10];
    world_open(16);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    const transport_link link = join(a, b);
    run(FL_NS_PER_S);
    for (uint64_t cookie = 1; cookie <= 3; cookie++) {
        CHECK_EQ(peer_send(a->peers, link, FL_WIRE_CONTROL, NULL, 0, data, sizeof(data), cookie),
                 FL_OK);
    }
    CHECK_EQ(a->sent, 0);
    run(FL_NS_PER_S);
    CHECK_EQ(a->sent, 3);
    CHECK_EQ(b->received, 3);
    world_close();
}

/* What a run looks like from outside, as one number. */
static uint64_t story(uint64_t seed)
{
    world_open(seed);
    struct side *a = side_add(FL_PARTY_NODE, NULL);
    struct side *b = side_add(FL_PARTY_COORDINATOR, NULL);
    const transport_link link = join(a, b);
    uint64_t hash = 0;
    for (uint32_t i = 0; i < 50; i++) {
        (void)!say(a, link, i);
        run(FL_NS_PER_MS);
        hash = hash * 31 + b->received;
        const uint64_t next = local_network_next_event_ns(world.network);
        hash = hash * 31 + next % 1000003;
    }
    hash = hash * 31 + peer_round_trip_ns(a->peers, link);
    world_close();
    return hash;
}

static void test_replay(void)
{
    CHECK(story(21) == story(21));
    CHECK(story(22) == story(22));
    CHECK(story(21) != story(22));
}

static const struct test_case cases[] = {
    {"peer: two with the same key come up and talk in order", test_up},
    {"peer: a link without traffic stays healthy", test_idle_is_healthy},
    {"peer: a peer not heard of for five seconds is lost, and may come back", test_silence},
    {"peer: a short cut delays messages and loses none", test_short_cut},
    {"peer: a killed process is noticed at once", test_killed},
    {"peer: who was held up himself blames nobody", test_held_up},
    {"peer: a missing or other key is told to who connects", test_other_key},
    {"peer: who speaks before the handshake is refused and dropped", test_strangers},
    {"peer: who says nothing is dropped after five seconds", test_silent_stranger},
    {"peer: a crowd of strangers does not keep others out", test_many_strangers},
    {"peer: no answer to a handshake ends the link with a sentence", test_no_answer},
    {"peer: an address where nobody is ends the link", test_nobody},
    {"peer: malformed messages of the layer's own end the link", test_own_malformed},
    {"peer: an answer to no ping tells nothing of a clock", test_false_pong},
    {"peer: the clock of who answers no pings is not known", test_no_pong},
    {"peer: closing delivers what was queued and tells both", test_close},
    {"peer: a full queue says FL_AGAIN", test_back_pressure},
    {"peer: cookies come back when the data is free", test_cookies},
    {"peer: a seed replays a run exactly", test_replay},
};

int main(int argc, char **argv)
{
    fl_log_init("", FL_LOG_ERROR);
    return test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
