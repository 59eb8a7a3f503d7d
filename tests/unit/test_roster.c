/* test_roster.c - who may join, under which name, and what reaches them. */
#include <stdlib.h>

#include "coordinator/roster.h"
#include "tests/harness.h"

/* A wire that takes what `capacity` allows, and remembers kinds and closings. */
static struct bench {
    struct roster *roster;
    uint64_t now_ns;
    uint32_t capacity; /* messages it still takes */
    fl_status failure; /* instead of FL_OK, when set */
    uint32_t sent_count;
    enum fl_message_kind kinds[64];
    char text[FL_ERROR_TEXT_MAX];
    uint32_t closed_count;
    transport_link closed[128];
} bench;

static unsigned char block[1 << 20];

static uint64_t bench_now(void *ctx)
{
    return ((const struct bench *)ctx)->now_ns;
}

static fl_status bench_send(void *ctx, transport_link link, uint16_t type, const void *header,
                            size_t header_size, const void *data, size_t size, uint64_t cookie)
{
    struct bench *wire = ctx;
    (void)link;
    (void)header;
    (void)header_size;
    (void)cookie;
    if (wire->failure != FL_OK) {
        return wire->failure;
    }
    if (wire->capacity == 0) {
        return FL_AGAIN;
    }
    wire->capacity--;
    struct fl_arena arena;
    struct fl_cluster_message message;
    fl_arena_init(&arena, block, sizeof(block));
    if (type == FL_WIRE_CONTROL &&
        fl_cluster_message_unpack(data, size, &arena, &message) == FL_OK) {
        wire->kinds[wire->sent_count++ % 64] = message.kind;
        if (message.kind == FL_MESSAGE_FAILURE) {
            snprintf(wire->text, sizeof(wire->text), "%s", message.as.failure.text);
        }
    }
    return FL_OK;
}

static void bench_close(void *ctx, transport_link link)
{
    struct bench *wire = ctx;
    wire->closed[wire->closed_count++ % 128] = link;
}

static void open_bench(void)
{
    roster_close(bench.roster);
    bench = (struct bench){.now_ns = 1, .capacity = 1000000};
    const struct roster_wire wire = {&bench, bench_send, bench_close};
    CHECK_EQ(roster_open(&wire, (struct fl_clock){.now_ns = bench_now, .ctx = &bench}, 42,
                         &bench.roster),
             FL_OK);
}

static struct fl_join join_of(const char *name, uint64_t incarnation)
{
    struct fl_join join = {.incarnation = incarnation,
                           .address = {.kind = FL_ADDRESS_SOCKET, .size = 11},
                           .memory_budget = 1 << 30,
                           .threads = 2,
                           .isa = "avx2"};
    memcpy(join.address.bytes, "127.0.0.1:1", 11);
    snprintf(join.name, sizeof(join.name), "%s", name);
    return join;
}

static struct roster_node *join(transport_link link, const char *name, uint64_t incarnation)
{
    struct roster_node *node = NULL;
    const struct fl_join wanted = join_of(name, incarnation);
    roster_link_up(bench.roster, link, "127.0.0.1:5000");
    CHECK_EQ(roster_join(bench.roster, link, &wanted, &node), FL_OK);
    return node;
}

static void a_node_joins_and_is_welcomed(void)
{
    open_bench();
    struct roster_node *node = join(1, "box1", 100);
    CHECK_EQ(bench.sent_count, 1);
    CHECK_EQ(bench.kinds[0], FL_MESSAGE_WELCOME);
    CHECK(roster_by_link(bench.roster, 1) == node);
    CHECK_EQ(roster_ready_count(bench.roster), 1);
    CHECK_EQ(node->memory_budget, 1 << 30);
    CHECK(strcmp(node->where, "127.0.0.1:5000") == 0);
}

static void a_living_name_is_not_given_twice(void)
{
    open_bench();
    struct roster_node *first = join(1, "box1", 100);
    const struct fl_join second = join_of("box1", 200);
    struct roster_node *node = NULL;
    roster_link_up(bench.roster, 2, "10.0.0.2:5000");
    CHECK_EQ(roster_join(bench.roster, 2, &second, &node), FL_BUSY);
    CHECK(node == NULL);
    CHECK_EQ(bench.kinds[1], FL_MESSAGE_FAILURE);
    CHECK(strstr(bench.text, "'box1' is taken") != NULL && strstr(bench.text, "--name") != NULL);
    CHECK_EQ(bench.closed_count, 1);
    CHECK_EQ(bench.closed[0], 2);
    CHECK(roster_link_down(bench.roster, 2) == NULL);
    CHECK(roster_by_link(bench.roster, 1) == first);
}

static void a_restarted_node_is_another_one(void)
{
    open_bench();
    struct roster_node *node = join(1, "box1", 100);
    node->memory_used = 5;
    CHECK(roster_link_down(bench.roster, 1) == node);
    CHECK_EQ(node->state, ROSTER_LOST);
    CHECK_EQ(roster_ready_count(bench.roster), 0);
    CHECK(roster_link_down(bench.roster, 1) == NULL);
    const struct fl_join again = join_of("box1", 200);
    CHECK(roster_former(bench.roster, &again) == NULL);
    struct roster_node *second = join(2, "box1", 200);
    CHECK_EQ(second->incarnation, 200);
    CHECK_EQ(second->memory_used, 0);
    CHECK_EQ(roster_ready_count(bench.roster), 1);
}

static void a_process_that_comes_back_over_a_new_link_takes_its_place(void)
{
    open_bench();
    struct roster_node *node = join(1, "box1", 100);
    const struct fl_join again = join_of("box1", 100);
    CHECK(roster_former(bench.roster, &again) == node);
    CHECK(join(2, "box1", 100) == node);
    CHECK_EQ(node->link, 2);
    CHECK_EQ(bench.closed[0], 1);
    CHECK(roster_link_down(bench.roster, 1) == NULL); /* the late news changes nothing */
    CHECK_EQ(roster_ready_count(bench.roster), 1);
}

static void join_is_said_once(void)
{
    open_bench();
    join(1, "box1", 100);
    const struct fl_join again = join_of("box2", 100);
    struct roster_node *node = NULL;
    CHECK_EQ(roster_join(bench.roster, 1, &again, &node), FL_PROTOCOL);
    CHECK_EQ(bench.closed[0], 1);
}

static void the_number_of_nodes_is_bounded(void)
{
    open_bench();
    char name[FL_NAME_MAX];
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        snprintf(name, sizeof(name), "n%u", i);
        join(i + 1, name, i + 1);
    }
    const struct fl_join extra = join_of("extra", 900);
    struct roster_node *node = NULL;
    roster_link_up(bench.roster, 900, "x");
    CHECK_EQ(roster_join(bench.roster, 900, &extra, &node), FL_TOO_LARGE);
    CHECK(strstr(bench.text, "64") != NULL);
    /* A lost one makes room. */
    CHECK(roster_link_down(bench.roster, 7) != NULL);
    join(901, "extra", 900);
    CHECK_EQ(roster_ready_count(bench.roster), ROSTER_NODE_MAX);
}

static void links_that_never_join_are_closed(void)
{
    open_bench();
    roster_link_up(bench.roster, 9, "somebody");
    CHECK(roster_poll(bench.roster) <= bench.now_ns + 5 * FL_NS_PER_S);
    CHECK_EQ(bench.closed_count, 0);
    bench.now_ns += 5 * FL_NS_PER_S;
    roster_poll(bench.roster);
    CHECK_EQ(bench.closed_count, 1);
    CHECK_EQ(bench.closed[0], 9);
    CHECK_EQ(roster_poll(bench.roster), UINT64_MAX);
    for (transport_link i = 0; i < ROSTER_PENDING_MAX + 1; i++) {
        roster_link_up(bench.roster, 100 + i, "crowd");
    }
    CHECK_EQ(bench.closed_count, 2);
    CHECK_EQ(bench.closed[1], 100 + ROSTER_PENDING_MAX);
}

static void messages_wait_in_order_and_not_for_ever(void)
{
    open_bench();
    struct roster_node *node = join(1, "box1", 100);
    bench.sent_count = 0;
    bench.capacity = 0;
    struct fl_cluster_message message = {.kind = FL_MESSAGE_UNPLAN};
    message.as.unplan.plan_id = 1;
    roster_send(bench.roster, node, &message);
    message = (struct fl_cluster_message){.kind = FL_MESSAGE_DROP};
    message.as.drop = (struct fl_drop){1, 1};
    bench.capacity = 1; /* must not overtake */
    roster_send(bench.roster, node, &message);
    CHECK_EQ(node->out_count, 2);
    CHECK_EQ(roster_send_data(bench.roster, node, FL_WIRE_FETCH_DATA, NULL, 0, "x", 1, 5),
             FL_AGAIN);
    roster_poll(bench.roster);
    CHECK_EQ(node->out_count, 1);
    bench.capacity = 10;
    roster_poll(bench.roster);
    CHECK_EQ(node->out_count, 0);
    CHECK_EQ(bench.kinds[0], FL_MESSAGE_UNPLAN);
    CHECK_EQ(bench.kinds[1], FL_MESSAGE_DROP);
    bench.capacity = 0;
    for (uint32_t i = 0; i < ROSTER_OUT_MAX; i++) {
        roster_send(bench.roster, node, &message);
    }
    CHECK_EQ(bench.closed_count, 0);
    roster_send(bench.roster, node, &message);
    CHECK_EQ(bench.closed_count, 1);
    CHECK(roster_link_down(bench.roster, 1) == node);
    CHECK_EQ(node->out_count, 0);
    roster_send(bench.roster, node, &message); /* to a lost one: nothing happens */
    CHECK_EQ(node->out_count, 0);
}

static void a_wire_that_fails_closes_the_link(void)
{
    open_bench();
    struct roster_node *node = join(1, "box1", 100);
    bench.failure = FL_LINK_LOST;
    struct fl_cluster_message message = {.kind = FL_MESSAGE_UNPLAN};
    message.as.unplan.plan_id = 1;
    roster_send(bench.roster, node, &message);
    CHECK_EQ(bench.closed_count, 1);
    roster_close(bench.roster);
    bench.roster = NULL;
}

/* A pong by which that machine has been suspended for so long since it booted. */
static void pong(transport_link link, struct clock_map *map, uint64_t their_asleep_ns)
{
    bench.now_ns += FL_NS_PER_S;
    const struct clock_map_sample sample = {.sent_ns = bench.now_ns - 1000,
                                            .received_ns = bench.now_ns + 77,
                                            .replied_ns = bench.now_ns + 78,
                                            .returned_ns = bench.now_ns,
                                            .their_asleep_ns = their_asleep_ns};
    roster_ponged(bench.roster, link, map, clock_map_take(map, &sample));
}

static void a_suspend_is_counted_also_when_the_link_did_not_outlast_it(void)
{
    struct clock_map map;
    open_bench();
    clock_map_init(&map, 0);
    struct roster_node *node = join(1, "box1", 100);
    CHECK(!node->clock_known);
    pong(1, &map, 5 * FL_NS_PER_S); /* before it joined: none of ours */
    CHECK(node->clock_known);
    CHECK_EQ(node->slept_ns, 0);
    pong(1, &map, 5 * FL_NS_PER_S + 3000); /* two clocks are not read at once */
    CHECK_EQ(node->slept_ns, 0);
    pong(1, &map, 8 * FL_NS_PER_S);
    CHECK_EQ(node->slept_ns, 3 * FL_NS_PER_S);
    pong(1, &map, 8 * FL_NS_PER_S);
    CHECK_EQ(node->slept_ns, 3 * FL_NS_PER_S);
    pong(9, &map, 99 * FL_NS_PER_S); /* of a link that has not joined */
    CHECK(roster_link_down(bench.roster, 1) == node);
    clock_map_init(&map, 0); /* the new link's */
    CHECK(join(2, "box1", 100) == node);
    CHECK(!node->clock_known);
    CHECK_EQ(node->slept_ns, 3 * FL_NS_PER_S);
    pong(2, &map, 42 * FL_NS_PER_S);
    CHECK_EQ(node->slept_ns, 37 * FL_NS_PER_S);
    CHECK(node->clock_known);
    /* Another process starts from nothing. */
    CHECK(roster_link_down(bench.roster, 2) == node);
    clock_map_init(&map, 0);
    CHECK(join(3, "box1", 200) == node);
    pong(3, &map, 60 * FL_NS_PER_S);
    CHECK_EQ(node->slept_ns, 0);
}

static void a_node_that_answers_no_pings_is_named_once(void)
{
    struct clock_map map;
    open_bench();
    clock_map_init(&map, 0);
    struct roster_node *mute = join(1, "mute", 100);
    struct roster_node *node = join(2, "box2", 200);
    pong(2, &map, 0);
    roster_poll(bench.roster);
    CHECK(!mute->clock_missed);
    bench.now_ns += 5 * FL_NS_PER_S;
    roster_poll(bench.roster);
    CHECK(mute->clock_missed && !mute->clock_known && !node->clock_missed);
    CHECK_EQ(mute->state, ROSTER_READY); /* it works all the same */
}

static const struct test_case cases[] = {
    {"roster: a node joins and is welcomed", a_node_joins_and_is_welcomed},
    {"roster: a living name is not given twice", a_living_name_is_not_given_twice},
    {"roster: a restarted node is another one", a_restarted_node_is_another_one},
    {"roster: a process that comes back over a new link takes its place",
     a_process_that_comes_back_over_a_new_link_takes_its_place},
    {"roster: join is said once", join_is_said_once},
    {"roster: the number of nodes is bounded", the_number_of_nodes_is_bounded},
    {"roster: links that never join are closed", links_that_never_join_are_closed},
    {"roster: messages wait in order and not for ever", messages_wait_in_order_and_not_for_ever},
    {"roster: a wire that fails closes the link", a_wire_that_fails_closes_the_link},
    {"roster: a suspend is counted, also when the link did not outlast it",
     a_suspend_is_counted_also_when_the_link_did_not_outlast_it},
    {"roster: a node that answers no pings is named once",
     a_node_that_answers_no_pings_is_named_once},
};

TEST_MAIN(cases)
