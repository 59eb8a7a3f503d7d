/* Clock maps against clocks whose truth is known: offsets, drift, unequal ways, loss, suspends. */
#include "cluster/clock_map.h"

#include <math.h>
#include <stdbool.h>

#include "proto/base/clock.h"
#include "tests/harness.h"
#include "tests/support/skewed_clock.h"

enum {
    TRIALS = 2000,
    PINGS = 80,
    LOOKS = 6,                              /* at moments past and to come, after every ping */
    ALLOWANCE = CLOCK_MAP_DRIFT_PPM * 1000, /* ppb */
};

static uint64_t seed_state;

/* Source: splitmix64, Steele, Lea, Flood 2014. */
static uint64_t draw(uint64_t count)
{
    uint64_t z = seed_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return count > 0 ? (z ^ (z >> 31)) % count : z ^ (z >> 31);
}

/* ---- pings ---- */

struct world {
    struct skewed_clock ours;
    struct skewed_clock theirs;
    struct clock_map map;
    uint64_t now_ns;     /* true time */
    uint64_t certain_ns; /* true time when the last ping taken was sent */
    uint64_t seed;
};

static struct world world;

static void world_open(uint64_t our_origin, int64_t our_ppb, uint64_t their_origin,
                       int64_t their_ppb)
{
    world = (struct world){.now_ns = FL_NS_PER_S};
    skewed_clock_init(&world.ours, our_origin, our_ppb);
    skewed_clock_init(&world.theirs, their_origin, their_ppb);
    clock_map_init(&world.map, 0);
}

/* A ping now; time goes on until it has returned. */
static enum clock_map_news ping(uint64_t there_ns, uint64_t held_ns, uint64_t back_ns)
{
    const uint64_t sent = world.now_ns;
    const uint64_t received = sent + there_ns;
    const uint64_t replied = received + held_ns;
    const uint64_t returned = replied + back_ns;
    const struct clock_map_sample sample = {.sent_ns = skewed_clock_at(&world.ours, sent),
                                            .received_ns = skewed_clock_at(&world.theirs, received),
                                            .replied_ns = skewed_clock_at(&world.theirs, replied),
                                            .returned_ns = skewed_clock_at(&world.ours, returned),
                                            .asleep_ns = skewed_clock_asleep(&world.ours, returned),
                                            .their_asleep_ns =
                                                skewed_clock_asleep(&world.theirs, replied)};
    world.now_ns = returned;
    const enum clock_map_news news = clock_map_take(&world.map, &sample);
    if (news != CLOCK_MAP_REFUSED) {
        world.certain_ns = sent;
    }
    return news;
}

static uint64_t distance(uint64_t a, uint64_t b)
{
    return (int64_t)(a - b) < 0 ? b - a : a - b;
}

/* What the map says about a moment, against the truth.  Returns whether it said something. */
static bool look(uint64_t true_ns, uint64_t *out_error_ns)
{
    const uint64_t ours = skewed_clock_at(&world.ours, true_ns);
    const uint64_t theirs = skewed_clock_at(&world.theirs, true_ns);
    uint64_t got = 0;
    uint64_t error = 0;
    int64_t offset = 0;
    const fl_status there = clock_map_to_remote(&world.map, ours, &got, &error);
    if (there == FL_OK && distance(got, theirs) > error) {
        printf("  seed %" PRIu64 ": at %" PRIu64 " theirs is off by %" PRIu64 ", error %" PRIu64
               "\n",
               world.seed, true_ns, distance(got, theirs), error);
        CHECK(distance(got, theirs) <= error);
    }
    const fl_status back = clock_map_to_local(&world.map, theirs, &got, &error);
    if (back == FL_OK && distance(got, ours) > error) {
        printf("  seed %" PRIu64 ": at %" PRIu64 " ours is off by %" PRIu64 ", error %" PRIu64 "\n",
               world.seed, true_ns, distance(got, ours), error);
        CHECK(distance(got, ours) <= error);
    }
    CHECK(there == FL_OK || there == FL_END || there == FL_AGAIN);
    CHECK(back == FL_OK || back == FL_END || back == FL_AGAIN);
    if (there == FL_OK) {
        uint64_t same = 0;
        CHECK_EQ(clock_map_offset(&world.map, ours, &offset, &same), FL_OK);
        CHECK(distance((uint64_t)offset, theirs - ours) <= same);
        *out_error_ns = same;
    }
    return there == FL_OK && back == FL_OK;
}

/* ---- trials ---- */

enum way { WAY_EQUAL, WAY_UNEQUAL, WAY_JITTER, WAY_BURSTY, WAYS };

static uint64_t draw_way(enum way way, bool there)
{
    switch (way) {
    case WAY_EQUAL: return 50 * FL_NS_PER_US;
    case WAY_UNEQUAL: return there ? 20 * FL_NS_PER_US : 3 * FL_NS_PER_MS;
    case WAY_JITTER: return 30 * FL_NS_PER_US + draw(20 * FL_NS_PER_MS);
    case WAY_BURSTY: return draw(8) == 0 ? draw(900 * FL_NS_PER_MS) : 10000 + draw(100000);
    case WAYS: break;
    }
    return 0;
}

static int64_t draw_ppb(int64_t most)
{
    return (int64_t)draw((uint64_t)(2 * most + 1)) - most;
}

struct trial {
    enum way way;
    uint64_t gap_max_ns;
    uint64_t loss; /* one ping in so many, 0: none */
    bool changing; /* rates */
    bool sleepy;
    int64_t our_most; /* ppb */
    int64_t their_most;
};

static struct trial draw_trial(void)
{
    static const uint64_t gaps[] = {1000000, 250000000, 1000000000, 20000000000};
    struct trial trial = {.way = (enum way)draw(WAYS),
                          .gap_max_ns = gaps[draw(4)],
                          .loss = draw(2) * 3,
                          .changing = draw(2) != 0,
                          .sleepy = draw(3) == 0};
    /* Together they keep to the allowance: (1 + a) / (1 - a) - 1 is a little over 2 a. */
    const bool one_true = draw(2) == 0;
    trial.our_most = one_true ? 0 : ALLOWANCE / 2 - 200;
    trial.their_most = one_true ? ALLOWANCE : ALLOWANCE / 2 - 200;
    return trial;
}

static uint64_t draw_origin(void)
{
    switch (draw(5)) {
    case 0: return 0;
    case 1: return UINT64_C(1) << 62;
    case 2: return UINT64_MAX - draw(100 * FL_NS_PER_S);
    default: return draw(0) >> draw(64);
    }
}

/* Rates change and machines sleep while no ping is under way, or while one is. */
static void go_on(const struct trial *trial, uint64_t span_ns)
{
    if (trial->changing && draw(3) == 0) {
        const uint64_t when = world.now_ns + draw(span_ns + 1);
        (void)skewed_clock_change(&world.ours, when, draw_ppb(trial->our_most));
    }
    if (trial->changing && draw(3) == 0) {
        const uint64_t when = world.now_ns + draw(span_ns + 1);
        /* Now and then the worst for whoever believes in a steady drift. */
        const int64_t worst = draw(2) == 0 ? trial->their_most : -trial->their_most;
        (void)skewed_clock_change(&world.theirs, when,
                                  draw(2) == 0 ? draw_ppb(trial->their_most) : worst);
    }
    world.now_ns += span_ns;
}

static void look_around(uint64_t first_ns)
{
    uint64_t error = 0;
    for (uint32_t i = 0; i < LOOKS && world.certain_ns >= first_ns; i++) {
        const uint64_t when = first_ns + draw(world.certain_ns - first_ns + 1);
        if (!skewed_clock_sleeps(&world.ours, when) && !skewed_clock_sleeps(&world.theirs, when)) {
            (void)look(when, &error);
        }
    }
}

/* A ping that one of the two sleeps through is late, or it is too late and given up. */
static void ping_asleep(struct skewed_clock *sleeper, const struct trial *trial)
{
    const uint64_t there = draw_way(trial->way, true);
    const uint64_t back = draw_way(trial->way, false);
    uint64_t nap = 20 * FL_NS_PER_MS + draw(50 * FL_NS_PER_S);
    const uint64_t from = world.now_ns + draw(there + back);
    const bool sleeps = skewed_clock_sleep(sleeper, from, nap);
    nap = sleeps ? nap : 0;
    /* Who sleeps neither receives nor sends. */
    const bool waiting = sleeper == &world.theirs && from <= world.now_ns + there;
    (void)ping(there + (waiting ? nap : 0), 0, back + (waiting ? 0 : nap));
}

static void run_trial(uint64_t seed)
{
    seed_state = seed * UINT64_C(0x2545f4914f6cdd1d);
    const struct trial trial = draw_trial();
    world_open(draw_origin(), draw_ppb(trial.our_most), draw_origin(), draw_ppb(trial.their_most));
    world.seed = seed;
    uint64_t first_ns = 0;
    for (uint32_t i = 0; i < PINGS; i++) {
        if (trial.sleepy && draw(12) == 0) {
            ping_asleep(draw(2) == 0 ? &world.ours : &world.theirs, &trial);
        } else if (trial.loss != 0 && draw(trial.loss) == 0) {
            world.now_ns += FL_NS_PER_MS; /* lost: nothing is learnt */
        } else {
            const uint64_t there = draw_way(trial.way, true);
            const uint64_t held = draw(4) == 0 ? draw(5 * FL_NS_PER_MS) : draw(1000);
            (void)ping(there, held, draw_way(trial.way, false));
        }
        if (world.map.sample_count > 0) {
            /* A suspend before the first ping returned is one that nobody knows of. */
            first_ns = first_ns != 0 ? first_ns : world.now_ns;
            look_around(first_ns);
        }
        go_on(&trial, draw(trial.gap_max_ns));
        uint64_t error = 0;
        if (!trial.sleepy && !trial.changing && world.map.sample_count > 0) {
            CHECK(look(world.now_ns + draw(30 * FL_NS_PER_S), &error)); /* what is to come */
        }
    }
}

static void test_truth_is_inside(void)
{
    for (uint64_t seed = 1; seed <= TRIALS; seed++) {
        run_trial(seed);
    }
}

static void test_error_is_small(void)
{
    for (uint64_t seed = 1; seed <= 200; seed++) {
        seed_state = seed;
        world_open(draw_origin(), 0, draw_origin(), draw_ppb(ALLOWANCE));
        world.seed = seed;
        uint64_t least = UINT64_MAX; /* what the best ping so far allows now */
        for (uint32_t i = 0; i < 40; i++) {
            const uint64_t there = draw_way((enum way)(seed % WAYS), true);
            const uint64_t back = draw_way((enum way)(seed % WAYS), false);
            const uint64_t before = skewed_clock_at(&world.ours, world.now_ns);
            CHECK_EQ(ping(there, draw(1000), back), CLOCK_MAP_TAKEN);
            const uint64_t passed = skewed_clock_at(&world.ours, world.now_ns) - before;
            least += least == UINT64_MAX ? 0 : passed / 2000 + 2;
            const uint64_t now = (there + back) / 2 + (there + back) / 1000 + 8;
            least = now < least ? now : least;
            uint64_t error = 0;
            CHECK(look(world.now_ns, &error));
            CHECK(error <= least);
            CHECK(error > 0);
        }
    }
}

/* A quiet network: what eight pings give, and what a minute of pings gives. */
static void test_good_pings(void)
{
    uint64_t error = 0;
    double ppm = 0;
    double ppm_error = 0;
    world_open(5 * FL_NS_PER_S, 0, UINT64_C(1) << 62, 37000);
    for (uint32_t i = 0; i < 8; i++) {
        CHECK_EQ(ping(100000 + draw(1000), 500, 100000 + draw(1000)), CLOCK_MAP_TAKEN);
    }
    CHECK(look(world.now_ns, &error));
    CHECK(error <= 101 * FL_NS_PER_US); /* half the shortest round trip */
    CHECK_EQ(clock_map_drift(&world.map, &ppm, &ppm_error), FL_AGAIN);
    for (uint32_t i = 0; i < 240; i++) {
        world.now_ns += 250 * FL_NS_PER_MS;
        CHECK_EQ(ping(100000 + draw(1000), 500, 100000 + draw(1000)), CLOCK_MAP_TAKEN);
    }
    CHECK_EQ(clock_map_drift(&world.map, &ppm, &ppm_error), FL_OK);
    CHECK(fabs(ppm - 37) <= ppm_error);
    CHECK(ppm_error < 4);
    /* In the middle of it, too, with the pings of both sides. */
    CHECK(look(world.now_ns / 2, &error));
    CHECK(error <= 170 * FL_NS_PER_US);
}

/* The ways differ by 3 ms: half of a round trip is the error, and is needed. */
static void test_unequal_ways(void)
{
    uint64_t got = 0;
    uint64_t error = 0;
    world_open(0, 0, 77 * FL_NS_PER_S, 0);
    CHECK_EQ(ping(10000, 0, 3010000), CLOCK_MAP_TAKEN);
    const uint64_t ours = skewed_clock_at(&world.ours, world.now_ns);
    CHECK_EQ(clock_map_to_remote(&world.map, ours, &got, &error), FL_OK);
    const uint64_t off = distance(got, ours + 77 * FL_NS_PER_S);
    CHECK(off > 1400 * FL_NS_PER_US && off <= error);
    CHECK(error < 1520 * FL_NS_PER_US);
    /* The other way round once: both lines together are better than either ping. */
    CHECK_EQ(ping(3010000, 0, 10000), CLOCK_MAP_TAKEN);
    CHECK(look(world.now_ns, &error));
    CHECK(error < 15 * FL_NS_PER_US);
}

static void test_nothing_known(void)
{
    uint64_t got = 0;
    uint64_t error = 0;
    int64_t offset = 0;
    double ppm = 0;
    world_open(0, 0, 0, 0);
    CHECK_EQ(clock_map_to_local(&world.map, 1, &got, &error), FL_AGAIN);
    CHECK_EQ(clock_map_to_remote(&world.map, 1, &got, &error), FL_AGAIN);
    CHECK_EQ(clock_map_offset(&world.map, 1, &offset, &error), FL_AGAIN);
    CHECK_EQ(clock_map_drift(&world.map, &ppm, &ppm), FL_AGAIN);
    CHECK_EQ(clock_map_compare(&world.map, 1, NULL, 99 * FL_NS_PER_S), CLOCK_MAP_UNORDERED);
}

static void test_far_off(void)
{
    uint64_t got = 0;
    uint64_t error = 0;
    world_open(0, 0, 0, 0);
    CHECK_EQ(ping(1000, 0, 1000), CLOCK_MAP_TAKEN);
    CHECK_EQ(clock_map_to_local(&world.map, UINT64_C(1) << 63, &got, &error), FL_END);
    CHECK_EQ(clock_map_to_local(&world.map, UINT64_C(1) << 62, &got, &error), FL_END);
    CHECK_EQ(clock_map_to_remote(&world.map, UINT64_C(1) << 62, &got, &error), FL_END);
    /* A moment before our clock began wraps, and its distance is right. */
    CHECK_EQ(clock_map_to_local(&world.map, 0 - FL_NS_PER_S, &got, &error), FL_OK);
    CHECK(distance(got, 0 - FL_NS_PER_S) <= error);
    CHECK(error > 900 * FL_NS_PER_US); /* two seconds before the only ping */
}

static void test_nonsense(void)
{
    const struct clock_map_sample good = {
        .sent_ns = 10000, .received_ns = 500, .replied_ns = 600, .returned_ns = 12000};
    struct clock_map map;
    clock_map_init(&map, 0);
    struct clock_map_sample bad = good;
    bad.replied_ns = 400; /* before it was received */
    CHECK_EQ(clock_map_take(&map, &bad), CLOCK_MAP_REFUSED);
    bad = good;
    bad.replied_ns = 500 + 2100; /* held for longer than it was away */
    CHECK_EQ(clock_map_take(&map, &bad), CLOCK_MAP_REFUSED);
    bad = good;
    bad.sent_ns = 12001;
    CHECK_EQ(clock_map_take(&map, &bad), CLOCK_MAP_REFUSED);
    bad = good;
    bad.returned_ns = 10000 + 61 * FL_NS_PER_S;
    CHECK_EQ(clock_map_take(&map, &bad), CLOCK_MAP_REFUSED);
    CHECK_EQ(map.sample_count, 0);
    CHECK_EQ(clock_map_take(&map, &good), CLOCK_MAP_TAKEN);
    CHECK_EQ(clock_map_take(&map, &good), CLOCK_MAP_TAKEN); /* again: nothing new */
    bad = good;
    bad.returned_ns = 11999; /* older than the last */
    CHECK_EQ(clock_map_take(&map, &bad), CLOCK_MAP_REFUSED);
    CHECK_EQ(map.step_count, 0);
    /* Readings from everywhere never break it. */
    for (seed_state = 1; seed_state != 0 && map.step_count < 1000;) {
        struct clock_map_sample any = {.sent_ns = map.certain_ns + draw(1000),
                                       .received_ns = draw(0),
                                       .their_asleep_ns = draw(0)};
        any.returned_ns = any.sent_ns + 20000;
        any.replied_ns = any.received_ns + draw(20000);
        (void)clock_map_take(&map, &any);
        uint64_t got = 0;
        uint64_t error = 0;
        (void)!clock_map_to_local(&map, draw(0), &got, &error);
        (void)!clock_map_to_remote(&map, draw(0), &got, &error);
    }
}

static void test_step(void)
{
    uint64_t got = 0;
    uint64_t error = 0;
    world_open(0, 0, 40 * FL_NS_PER_S, 0);
    CHECK_EQ(ping(100000, 0, 100000), CLOCK_MAP_TAKEN);
    const uint64_t before = skewed_clock_at(&world.theirs, world.now_ns);
    CHECK_EQ(clock_map_to_local(&world.map, before, &got, &error), FL_OK);
    world.now_ns += FL_NS_PER_S;
    world.theirs.origin += 5 * FL_NS_PER_MS; /* more than a second can explain */
    CHECK_EQ(ping(100000, 0, 100000), CLOCK_MAP_STEPPED);
    CHECK_EQ(world.map.step_count, 1);
    CHECK(look(world.now_ns, &error));
    CHECK(error < 110 * FL_NS_PER_US);
    CHECK_EQ(clock_map_to_local(&world.map, before, &got, &error), FL_END);
    CHECK_EQ(clock_map_to_remote(&world.map, FL_NS_PER_S, &got, &error), FL_END);
}

static void test_they_sleep(void)
{
    uint64_t error = 0;
    world_open(0, 0, 40 * FL_NS_PER_S, 0);
    CHECK_EQ(ping(100000, 0, 100000), CLOCK_MAP_TAKEN);
    const uint64_t before = world.now_ns - 1000;
    (void)skewed_clock_sleep(&world.theirs, world.now_ns + FL_NS_PER_S, 34 * FL_NS_PER_S);
    world.now_ns += 36 * FL_NS_PER_S;
    CHECK_EQ(ping(100000, 0, 100000), CLOCK_MAP_THEY_SLEPT);
    CHECK_EQ(world.map.they_slept_ns, 34 * FL_NS_PER_S);
    CHECK_EQ(world.map.slept_ns, 0);
    CHECK(look(world.now_ns, &error));
    CHECK(error < 110 * FL_NS_PER_US);
    CHECK(!look(before, &error));
    CHECK_EQ(ping(100000, 0, 100000), CLOCK_MAP_TAKEN); /* told once */
}

static void test_we_sleep(void)
{
    uint64_t error = 0;
    world_open(0, 0, 40 * FL_NS_PER_S, 0);
    CHECK_EQ(ping(100000, 0, 100000), CLOCK_MAP_TAKEN);
    (void)skewed_clock_sleep(&world.ours, world.now_ns + 50000, 3 * FL_NS_PER_S);
    /* The answer came while we slept: it seems to have been quick. */
    CHECK_EQ(ping(100000, 0, 3 * FL_NS_PER_S), CLOCK_MAP_SLEPT);
    CHECK_EQ(world.map.slept_ns, 3 * FL_NS_PER_S);
    CHECK(!look(world.now_ns, &error));
    /* Another one that was under way with it. */
    const struct clock_map_sample late = {
        .sent_ns = skewed_clock_at(&world.ours, FL_NS_PER_S + 210000),
        .received_ns = skewed_clock_at(&world.theirs, FL_NS_PER_S + 240000),
        .replied_ns = skewed_clock_at(&world.theirs, FL_NS_PER_S + 240000),
        .returned_ns = skewed_clock_at(&world.ours, world.now_ns),
        .asleep_ns = 3 * FL_NS_PER_S};
    CHECK_EQ(clock_map_take(&world.map, &late), CLOCK_MAP_REFUSED);
    CHECK_EQ(ping(100000, 0, 100000), CLOCK_MAP_TAKEN);
    CHECK(look(world.now_ns, &error));
    /* A clock that is not a suspend: the readings of two clocks differ a little. */
    const struct clock_map_sample jitter = {
        .sent_ns = skewed_clock_at(&world.ours, world.now_ns),
        .received_ns = skewed_clock_at(&world.theirs, world.now_ns),
        .replied_ns = skewed_clock_at(&world.theirs, world.now_ns),
        .returned_ns = skewed_clock_at(&world.ours, world.now_ns),
        .asleep_ns = 3 * FL_NS_PER_S + 40000,
        .their_asleep_ns = 900000};
    CHECK_EQ(clock_map_take(&world.map, &jitter), CLOCK_MAP_TAKEN);
}

/* Hours of pings stay within the fixed room, and the old ones still bound what was then. */
static void test_history(void)
{
    uint64_t error = 0;
    world_open(9, 0, 12345678, 0);
    for (uint32_t i = 0; i < 20000; i++) {
        if (i % 320 == 0) {
            (void)skewed_clock_change(&world.theirs, world.now_ns, draw_ppb(ALLOWANCE));
        }
        world.now_ns += 250 * FL_NS_PER_MS;
        CHECK_EQ(ping(50000 + draw(50000), 0, 50000 + draw(50000)), CLOCK_MAP_TAKEN);
        CHECK(world.map.point_count <= CLOCK_MAP_POINT_MAX);
    }
    const uint64_t first = 2 * FL_NS_PER_S;
    uint64_t worst = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        CHECK(look(first + (world.now_ns - first) / 1000 * i, &error));
        worst = error > worst ? error : worst;
    }
    CHECK(worst < 10 * FL_NS_PER_MS);
    CHECK(look(world.now_ns - 20 * FL_NS_PER_S, &error));
    CHECK(error < 200 * FL_NS_PER_US);
}

static void test_order(void)
{
    struct clock_map other;
    world_open(0, 0, 40 * FL_NS_PER_S, 0);
    CHECK_EQ(ping(100000, 0, 100000), CLOCK_MAP_TAKEN);
    other = world.map;
    const struct clock_map *a = &world.map;
    const struct clock_map *b = &other;
    const uint64_t when = skewed_clock_at(&world.theirs, world.now_ns);
    CHECK_EQ(clock_map_compare(a, when, a, when), CLOCK_MAP_UNORDERED);
    CHECK_EQ(clock_map_compare(a, when, a, when + 1), CLOCK_MAP_BEFORE);
    CHECK_EQ(clock_map_compare(a, when + 1, a, when), CLOCK_MAP_AFTER);
    CHECK_EQ(clock_map_compare(a, when, b, when + 150000), CLOCK_MAP_UNORDERED);
    CHECK_EQ(clock_map_compare(a, when + 150000, b, when), CLOCK_MAP_UNORDERED);
    CHECK_EQ(clock_map_compare(a, when, b, when + 250000), CLOCK_MAP_BEFORE);
    CHECK_EQ(clock_map_compare(a, when + 250000, b, when), CLOCK_MAP_AFTER);
    const uint64_t ours = skewed_clock_at(&world.ours, world.now_ns);
    CHECK_EQ(clock_map_compare(NULL, ours, a, when + 50000), CLOCK_MAP_UNORDERED);
    CHECK_EQ(clock_map_compare(NULL, ours, a, when + 250000), CLOCK_MAP_BEFORE);
    CHECK_EQ(clock_map_compare(NULL, ours, NULL, ours - 1), CLOCK_MAP_AFTER);
}

static const struct test_case cases[] = {
    {"clock_map: the truth is inside, whatever the offsets, drifts, ways, losses and suspends",
     test_truth_is_inside},
    {"clock_map: the error is never more than the best ping and its age allow",
     test_error_is_small},
    {"clock_map: good pings give half the shortest round trip, and the drift", test_good_pings},
    {"clock_map: unequal ways cost half a round trip and no more", test_unequal_ways},
    {"clock_map: without an answered ping nothing is mapped", test_nothing_known},
    {"clock_map: moments absurdly far off are not mapped, those before zero wrap", test_far_off},
    {"clock_map: readings that no clock gives are refused and break nothing", test_nonsense},
    {"clock_map: a step begins the map anew, and moments before it are lost", test_step},
    {"clock_map: a suspend over there is counted once", test_they_sleep},
    {"clock_map: a suspend here makes the ping under way worthless", test_we_sleep},
    {"clock_map: hours of pings stay within fixed room", test_history},
    {"clock_map: across clocks only what exceeds both errors is ordered", test_order},
};

TEST_MAIN(cases)
