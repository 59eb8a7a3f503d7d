/* test_clock_sim.c - the clocks of a pool, mapped by pings over a slow, unequal network.
 *
 * One peer table plays the coordinator and keeps clock maps, others play nodes;
 * every machine has a clock of its own, which drifts, changes its rate, and
 * stands still while its machine sleeps.  Links are cut and healed, machines
 * lose each other and join again.  The truth is known, so every conversion of a
 * moment that the pings have reached is checked: it is inside the error, or it
 * is not given.  `test_clock_sim SEED` replays one story.
 */
#include <stdlib.h>

#include "cluster/peer.h"
#include "cluster/transport_local.h"
#include "proto/base/log.h"
#include "tests/harness.h"
#include "tests/support/skewed_clock.h"

enum { NODES = 3, MACHINES = NODES + 1, STORIES = 100, HALF_PPB = CLOCK_MAP_DRIFT_PPM * 500 - 200 };

struct machine {
    struct transport *transport;
    struct peer_table *peers;
    struct skewed_clock clock;
    bool wants_link;     /* a node: connect again */
    transport_link link; /* a node's to the coordinator; of the coordinator's own, 0 */
};

/* What the coordinator knows of one node. */
struct known {
    transport_link link; /* 0: it is not up */
    uint64_t since_ns;   /* true time when the first ping on it had returned, 0: not yet */
    uint64_t told_ns;    /* its suspends, as told */
};

static struct world {
    uint64_t seed;
    uint64_t random;
    uint64_t delay_max_ns;
    struct local_network *network;
    struct machine machines[MACHINES]; /* the last one is the coordinator */
    struct known known[NODES];
    uint32_t checked;   /* conversions inside the error */
    uint32_t void_;     /* not given */
    uint32_t suspended; /* told */
    uint32_t ups;
    uint64_t least_error_ns;
} world;

static struct machine *const coordinator = &world.machines[NODES];

static uint64_t draw(uint64_t count)
{
    uint64_t z = world.random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return count > 0 ? (z ^ (z >> 31)) % count : z ^ (z >> 31);
}

static uint64_t true_ns(void)
{
    const struct fl_clock clock = local_network_clock(world.network);
    return fl_clock_now(&clock);
}

static uint64_t machine_now(void *ctx)
{
    return skewed_clock_at(&((struct machine *)ctx)->clock, true_ns());
}

static uint64_t machine_asleep(void *ctx)
{
    return skewed_clock_asleep(&((struct machine *)ctx)->clock, true_ns());
}

/* ---- events ---- */

/* A node says which it is. */
static void on_up(void *ctx, transport_link link, enum fl_party party, const char *address)
{
    struct machine *machine = ctx;
    (void)party, (void)address;
    if (machine != coordinator) {
        const uint32_t number = (uint32_t)(machine - world.machines);
        CHECK_EQ(
            peer_send(machine->peers, link, FL_WIRE_CONTROL, NULL, 0, &number, sizeof(number), 0),
            FL_OK);
    }
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    uint32_t number = 0;
    (void)ctx, (void)type, (void)header, (void)header_size, (void)size;
    memcpy(&number, data, sizeof(number));
    world.known[number].link = link;
    world.known[number].since_ns = 0;
    world.ups++;
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    (void)ctx, (void)link, (void)cookie;
}

static void on_down(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct machine *machine = ctx;
    (void)why, (void)text;
    if (machine != coordinator) {
        machine->wants_link = true;
        return;
    }
    for (uint32_t i = 0; i < NODES; i++) {
        if (world.known[i].link == link) {
            world.known[i].link = 0;
        }
    }
}

static void on_ponged(void *ctx, transport_link link, enum clock_map_news news)
{
    (void)ctx;
    for (uint32_t i = 0; i < NODES; i++) {
        struct known *known = &world.known[i];
        if (known->link != link) {
            continue;
        }
        known->since_ns = known->since_ns != 0 ? known->since_ns : true_ns();
        world.suspended += news == CLOCK_MAP_THEY_SLEPT || news == CLOCK_MAP_SLEPT;
        if (news == CLOCK_MAP_THEY_SLEPT) {
            known->told_ns = peer_clock(coordinator->peers, link)->they_slept_ns;
        }
        if (news == CLOCK_MAP_REFUSED) {
            CHECK(coordinator->clock.count > 1); /* a ping under way when it slept, or for ages */
        }
    }
}

/* ---- the world ---- */

static void machine_open(struct machine *machine, enum fl_party party)
{
    CHECK_EQ(transport_local_open(world.network, &machine->transport), FL_OK);
    const bool keeps = party == FL_PARTY_COORDINATOR;
    const struct peer_config config = {
        .transport = machine->transport,
        .clock = {.now_ns = machine_now, .ctx = machine, .asleep_ns = machine_asleep},
        .party = party,
        .events = {machine, on_up, on_received, on_sent, on_down},
        .clock_ns = keeps ? 250 * FL_NS_PER_MS : 0,
        .ponged = keeps ? on_ponged : NULL,
    };
    CHECK_EQ(peer_open(&config, &machine->peers), FL_OK);
    machine->wants_link = !keeps;
}

static uint64_t draw_origin(void)
{
    /* Not where the clock of a machine would wrap: deadlines are absolute. */
    return draw(3) == 0 ? UINT64_C(1) << 62 : draw(0) >> (2 + draw(60));
}

static void world_open(uint64_t seed, uint64_t delay_max_ns)
{
    memset(&world, 0, sizeof(world));
    world.seed = seed;
    world.random = seed * UINT64_C(0x2545f4914f6cdd1d);
    world.delay_max_ns = delay_max_ns;
    world.least_error_ns = UINT64_MAX;
    const struct local_network_config config = {
        .seed = seed, .delay_min_ns = 10 * FL_NS_PER_US, .delay_max_ns = delay_max_ns};
    CHECK_EQ(local_network_open(&config, &world.network), FL_OK);
    for (uint32_t i = 0; i < MACHINES; i++) {
        const int64_t ppb = (int64_t)draw(2 * HALF_PPB + 1) - HALF_PPB;
        skewed_clock_init(&world.machines[i].clock, draw_origin(), ppb);
        machine_open(&world.machines[i], i < NODES ? FL_PARTY_NODE : FL_PARTY_COORDINATOR);
    }
}

static void world_close(void)
{
    for (uint32_t i = 0; i < MACHINES; i++) {
        peer_close(world.machines[i].peers);
        world.machines[i].transport->ops->close(world.machines[i].transport);
    }
    local_network_close(world.network);
}

static void poll_all(void)
{
    for (unsigned happened = 1; happened > 0;) {
        happened = 0;
        for (uint32_t i = 0; i < MACHINES; i++) {
            struct machine *machine = &world.machines[i];
            uint64_t next_ns = 0;
            if (skewed_clock_sleeps(&machine->clock, true_ns())) {
                continue;
            }
            if (machine->wants_link) {
                struct fl_address address;
                coordinator->transport->ops->address(coordinator->transport, &address);
                machine->wants_link =
                    peer_connect(machine->peers, &address, &machine->link) != FL_OK;
            }
            happened += peer_poll(machine->peers, &next_ns);
        }
    }
}

static void run(uint64_t span_ns)
{
    static const uint64_t step_ns = 10 * FL_NS_PER_MS;
    const uint64_t end_ns = true_ns() + span_ns;
    while (true_ns() < end_ns) {
        poll_all();
        const uint64_t event_ns = local_network_next_event_ns(world.network);
        uint64_t next_ns = true_ns() + 1 + draw(step_ns);
        /* What a sleeping machine does not take stays due: step over it. */
        next_ns = event_ns > true_ns() && event_ns < next_ns ? event_ns : next_ns;
        local_network_advance(world.network, next_ns < end_ns ? next_ns : end_ns);
    }
    poll_all();
}

/* ---- truth ---- */

static uint64_t distance(uint64_t a, uint64_t b)
{
    return (int64_t)(a - b) < 0 ? b - a : a - b;
}

static void inside(uint64_t got, uint64_t want, uint64_t error_ns, uint64_t when_ns)
{
    if (distance(got, want) > error_ns) {
        printf("  seed %" PRIu64 ", %.6f s at %.6f s: off by %" PRIu64 " ns, error %" PRIu64 "\n",
               world.seed, (double)when_ns / 1e9, (double)true_ns() / 1e9, distance(got, want),
               error_ns);
    }
    CHECK(distance(got, want) <= error_ns);
    world.checked++;
    world.least_error_ns = error_ns < world.least_error_ns ? error_ns : world.least_error_ns;
}

static void look(const struct clock_map *map, const struct skewed_clock *theirs, uint64_t when_ns)
{
    const struct skewed_clock *ours = &coordinator->clock;
    uint64_t got = 0;
    uint64_t error_ns = 0;
    if (skewed_clock_sleeps(ours, when_ns) || skewed_clock_sleeps(theirs, when_ns)) {
        return;
    }
    const uint64_t our_ns = skewed_clock_at(ours, when_ns);
    const uint64_t their_ns = skewed_clock_at(theirs, when_ns);
    if (clock_map_to_local(map, their_ns, &got, &error_ns) == FL_OK) {
        inside(got, our_ns, error_ns, when_ns);
    } else {
        world.void_++;
    }
    if (clock_map_to_remote(map, our_ns, &got, &error_ns) == FL_OK) {
        inside(got, their_ns, error_ns, when_ns);
    } else {
        world.void_++;
    }
}

/* Moments between the first ping over a link and the last one sent. */
static void look_around(void)
{
    for (uint32_t i = 0; i < NODES; i++) {
        const struct known *known = &world.known[i];
        if (known->link == 0 || known->since_ns == 0) {
            continue;
        }
        const struct clock_map *map = peer_clock(coordinator->peers, known->link);
        CHECK(map != NULL);
        for (uint32_t j = 0; j < 4; j++) {
            const uint64_t when_ns = known->since_ns + draw(true_ns() - known->since_ns + 1);
            const uint64_t our_ns = skewed_clock_at(&coordinator->clock, when_ns);
            if ((int64_t)(our_ns - map->certain_ns) <= 0) {
                look(map, &world.machines[i].clock, when_ns);
            }
        }
    }
}

/* ---- stories ---- */

static void disturb(void)
{
    struct machine *machine = &world.machines[draw(MACHINES)];
    struct machine *node = &world.machines[draw(NODES)];
    const uint64_t now = true_ns() + 1;
    switch (draw(5)) {
    case 0: /* shorter and longer than a link lasts */
        (void)skewed_clock_sleep(&machine->clock, now,
                                 FL_NS_PER_MS * (20 + draw(draw(2) == 0 ? 3000 : 20000)));
        break;
    case 1: local_network_cut(world.network, node->transport, coordinator->transport); break;
    case 2:
        for (uint32_t i = 0; i < NODES; i++) {
            local_network_heal(world.network, world.machines[i].transport, coordinator->transport);
        }
        break;
    default:
        if (!skewed_clock_sleeps(&machine->clock, now)) {
            (void)skewed_clock_change(&machine->clock, now,
                                      (int64_t)draw(2 * HALF_PPB + 1) - HALF_PPB);
        }
        break;
    }
}

static void story(uint64_t seed)
{
    static const uint64_t delays[] = {20000, 300000, 5000000, 200000000};
    world_open(seed, delays[seed % 4]);
    run(FL_NS_PER_S);
    for (uint32_t i = 0; i < 40; i++) {
        disturb();
        for (uint32_t j = 0; j < 4; j++) {
            run(draw(FL_NS_PER_S));
            look_around();
        }
    }
    CHECK(world.checked > 500);
    world_close();
}

static void test_stories(void)
{
    uint32_t suspended = 0;
    for (uint64_t seed = 1; seed <= STORIES; seed++) {
        story(seed);
        suspended += world.suspended;
    }
    CHECK(suspended > STORIES);
}

/* Nothing disturbs: what the error is then. */
static void test_calm(void)
{
    static const uint64_t delay_ns = 300 * FL_NS_PER_US;
    world_open(77, delay_ns);
    run(FL_NS_PER_S);
    CHECK_EQ(world.ups, NODES);
    for (uint32_t i = 0; i < 60; i++) {
        run(FL_NS_PER_S / 2);
        look_around();
        for (uint32_t k = 0; k < NODES; k++) {
            const struct clock_map *map = peer_clock(coordinator->peers, world.known[k].link);
            uint64_t error_ns = 0;
            int64_t offset_ns = 0;
            CHECK_EQ(map->step_count, 0);
            CHECK(map->sample_count >= 8);
            CHECK_EQ(clock_map_offset(map, machine_now(coordinator), &offset_ns, &error_ns), FL_OK);
            /* Half a round trip, and the allowance since the last ping. */
            CHECK(error_ns < delay_ns + 200 * FL_NS_PER_US);
        }
    }
    CHECK_EQ(world.void_, 0);
    CHECK(world.least_error_ns < delay_ns / 4); /* the best pings count, not the mean */
    world_close();
}

/* What has just ended can be mapped as soon as a burst is back. */
static void test_burst(void)
{
    static const uint64_t delay_ns = 300 * FL_NS_PER_US;
    world_open(78, delay_ns);
    run(10 * FL_NS_PER_S);
    for (uint32_t k = 0; k < NODES; k++) {
        const transport_link link = world.known[k].link;
        const struct clock_map *map = peer_clock(coordinator->peers, link);
        const uint64_t ended_ns = machine_now(coordinator);
        const uint32_t samples = map->sample_count;
        peer_ping_burst(coordinator->peers, link);
        run(20 * delay_ns);
        map = peer_clock(coordinator->peers, link);
        CHECK(map->sample_count >= samples + 8);
        CHECK(map->certain_ns >= ended_ns);
        run(5 * FL_NS_PER_S / 1000);
    }
    peer_ping_burst(coordinator->peers, 12345); /* no link: nothing */
    CHECK(peer_clock(coordinator->peers, 12345) == NULL);
    /* Who keeps no maps has none, and asks for none. */
    CHECK(peer_clock(world.machines[0].peers, world.machines[0].link) == NULL);
    peer_ping_burst(world.machines[0].peers, world.machines[0].link);
    world_close();
}

static void test_suspend_is_told(void)
{
    world_open(79, 300 * FL_NS_PER_US);
    run(5 * FL_NS_PER_S);
    const uint64_t before_ns = true_ns() - FL_NS_PER_S;
    CHECK(skewed_clock_sleep(&world.machines[1].clock, true_ns() + 1, 3400 * FL_NS_PER_MS));
    run(5 * FL_NS_PER_S);
    const struct clock_map *map = peer_clock(coordinator->peers, world.known[1].link);
    CHECK_EQ(world.ups, NODES); /* the link lasted */
    CHECK_EQ(world.known[1].told_ns, 3400 * FL_NS_PER_MS);
    CHECK_EQ(world.known[0].told_ns, 0);
    CHECK_EQ(map->step_count, 1);
    uint64_t got = 0;
    uint64_t error_ns = 0;
    const uint64_t their_ns = skewed_clock_at(&world.machines[1].clock, before_ns);
    CHECK_EQ(clock_map_to_local(map, their_ns, &got, &error_ns), FL_END);
    look(map, &world.machines[1].clock, true_ns() - FL_NS_PER_MS * 600);
    CHECK(world.checked > 0);
    world_close();
}

/* Three machines' moments, each told by its own clock. */
static void test_order(void)
{
    world_open(80, 300 * FL_NS_PER_US);
    run(5 * FL_NS_PER_S);
    const uint64_t when_ns = true_ns() - FL_NS_PER_S;
    const struct clock_map *a = peer_clock(coordinator->peers, world.known[0].link);
    const struct clock_map *b = peer_clock(coordinator->peers, world.known[1].link);
    const uint64_t a_ns = skewed_clock_at(&world.machines[0].clock, when_ns);
    const uint64_t soon = skewed_clock_at(&world.machines[1].clock, when_ns + 10000);
    const uint64_t later = skewed_clock_at(&world.machines[1].clock, when_ns + 2 * FL_NS_PER_MS);
    CHECK_EQ(clock_map_compare(a, a_ns, b, soon), CLOCK_MAP_UNORDERED);
    CHECK_EQ(clock_map_compare(a, a_ns, b, later), CLOCK_MAP_BEFORE);
    CHECK_EQ(clock_map_compare(b, later, a, a_ns), CLOCK_MAP_AFTER);
    world_close();
}

static const struct test_case cases[] = {
    {"clock sim: whatever happens, a moment that is mapped is inside its error", test_stories},
    {"clock sim: undisturbed, the error is that of the best pings", test_calm},
    {"clock sim: a burst makes what has just ended certain", test_burst},
    {"clock sim: a suspend is told, and the time before it is mapped no more",
     test_suspend_is_told},
    {"clock sim: across machines only what is certain is ordered", test_order},
};

static uint64_t replayed;

static void replay(void)
{
    story(replayed);
}

int main(int argc, char **argv)
{
    fl_log_init("", FL_LOG_ERROR);
    char *end = NULL;
    replayed = argc > 1 ? strtoull(argv[1], &end, 10) : 0;
    if (replayed != 0 && *end == '\0') {
        const struct test_case one = {"clock sim: one story", replay};
        return test_main(&one, 1, 1, argv);
    }
    return test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
