/* UCX under fire: peers that talk to one another and to this process are killed at random moments.
 * Nobody who was not killed may end, lose a message of a living peer, or see one that was not sent.
 *
 * FIRSTLIGHT_STRESS_S sets how long, in seconds; the default suits a test run.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cluster/transport.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "tests/harness.h"

enum {
    PEERS = 6,
    LINKS = 48,
    KILL_EVERY_MS = 40,
    DATA_MAX = 1 << 20,
    TYPE_DATA = 32,
    TYPE_MEET = 33, /* data: the address of another peer */
    TYPE_HERE = 34, /* data: the sender's own address */
};

struct talk {
    transport_link link;
    uint32_t next_in, next_out;
    char address[64]; /* once it said TYPE_HERE */
    int32_t pid;
};

struct party {
    struct transport *transport;
    struct talk talks[LINKS];
    uint64_t random;
    uint64_t received;
    uint64_t wrong;
    uint64_t closed;
    uint64_t gaps;
};

static unsigned char pattern[DATA_MAX + 256];

static uint64_t now_ns(void)
{
    const struct fl_clock clock = fl_clock_monotonic();
    return fl_clock_now(&clock);
}

static uint32_t random_below(struct party *party, uint32_t limit)
{
    party->random = party->random * UINT64_C(6364136223846793005) + 1442695040888963407;
    return (uint32_t)(party->random >> 33) % limit;
}

static struct talk *find_talk(struct party *party, transport_link link)
{
    for (size_t i = 0; i < LINKS; i++) {
        if (party->talks[i].link == link) {
            return &party->talks[i];
        }
    }
    return NULL;
}

static void add_talk(struct party *party, transport_link link)
{
    struct talk *talk = find_talk(party, 0);
    if (talk == NULL) {
        party->transport->ops->drop_link(party->transport, link);
        return;
    }
    *talk = (struct talk){.link = link};
}

static size_t random_size(struct party *party)
{
    switch (random_below(party, 40)) {
    case 0: return random_below(party, DATA_MAX);
    case 1:
    case 2: return random_below(party, 100000);
    case 3: return 0;
    default: return random_below(party, 6000);
    }
}

static void say_something(struct party *party, struct talk *talk)
{
    const size_t size = random_size(party);
    const fl_status status = party->transport->ops->send(party->transport, talk->link, TYPE_DATA,
                                                         &talk->next_out, sizeof(talk->next_out),
                                                         pattern + talk->next_out % 256, size, 0);
    talk->next_out += status == FL_OK;
}

static void meet(struct party *party, const void *data, size_t size)
{
    struct fl_address address = {.kind = FL_ADDRESS_SOCKET, .size = (uint32_t)size};
    transport_link link = 0;
    memcpy(address.bytes, data, size);
    if (party->transport->ops->connect(party->transport, &address, &link) == FL_OK) {
        add_talk(party, link);
    }
}

/* Acquaint a peer that has just come with all others. */
static void introduce(struct party *party, const struct talk *newcomer)
{
    for (size_t i = 0; i < LINKS; i++) {
        const struct talk *other = &party->talks[i];
        if (other != newcomer && other->link != 0 && other->address[0] != '\0') {
            (void)!party->transport->ops->send(party->transport, newcomer->link, TYPE_MEET, NULL, 0,
                                               other->address, strlen(other->address), 0);
        }
    }
}

static void on_accepted(void *ctx, transport_link link, const char *peer)
{
    (void)peer;
    add_talk(ctx, link);
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct party *party = ctx;
    struct talk *talk = find_talk(party, link);
    if (talk == NULL) {
        return;
    }
    party->received++;
    if (type == TYPE_MEET) {
        meet(party, data, size);
        return;
    }
    if (type == TYPE_HERE) {
        snprintf(talk->address, sizeof(talk->address), "%.*s", (int)size, (const char *)data);
        memcpy(&talk->pid, header, sizeof(talk->pid));
        introduce(party, talk);
        return;
    }
    uint32_t number = 0;
    party->wrong += header_size != sizeof(number);
    memcpy(&number, header, sizeof(number));
    party->wrong +=
        number != talk->next_in++ || (size > 0 && memcmp(data, pattern + number % 256, size) != 0);
    /* The worst moment: from within an event, and into links that may just have died. */
    say_something(party, talk);
    for (size_t i = 0; i < LINKS && number % 4 == 0; i++) {
        if (party->talks[i].link != 0 && random_below(party, 4) == 0) {
            say_something(party, &party->talks[i]);
        }
    }
    if (random_below(party, 2000) == 0) {
        party->transport->ops->drop_link(party->transport, link);
    }
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    (void)ctx, (void)link, (void)cookie;
}

static void on_closed(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct party *party = ctx;
    struct talk *talk = find_talk(party, link);
    /* A gap in what came is the end of a peer that was killed, and of no other. */
    const bool gap = strstr(text, "was due") != NULL;
    party->gaps += gap;
    if (why == FL_PROTOCOL || text[0] == '\0' ||
        (gap && talk != NULL && talk->pid != 0 && kill(talk->pid, 0) == 0)) {
        printf("  %s\n", text);
        fflush(stdout);
        party->wrong++;
    }
    party->closed++;
    if (talk != NULL) {
        talk->link = 0;
    }
    for (size_t i = 0; i < LINKS; i++) { /* news travel */
        if (party->talks[i].link != 0) {
            say_something(party, &party->talks[i]);
        }
    }
}

static fl_status party_open(struct party *party, uint64_t seed, struct fl_address *out)
{
    *party = (struct party){.random = seed * 77 + 1};
    const struct transport_ucx_config config = {.listen = "127.0.0.1:0"};
    FL_TRY(transport_ucx_open(&config, &party->transport));
    const struct transport_events events = {party, on_accepted, on_received, on_sent, on_closed};
    party->transport->ops->set_events(party->transport, &events);
    party->transport->ops->address(party->transport, out);
    for (size_t i = 0; i < sizeof(pattern); i++) {
        pattern[i] = (unsigned char)(i * 7 + (i >> 8));
    }
    return FL_OK;
}

static void turn(struct party *party)
{
    const struct transport_ops *ops = party->transport->ops;
    if (ops->progress(party->transport) == 0 && ops->arm(party->transport) == FL_OK) {
        struct pollfd fd = {.fd = ops->fd(party->transport), .events = POLLIN};
        poll(&fd, 1, 5);
        const uint32_t lucky = random_below(party, LINKS);
        if (party->talks[lucky].link != 0) {
            say_something(party, &party->talks[lucky]);
        }
    }
}

/* The program run as `PROG --peer ADDRESS SEED`. */
static int peer_main(const char *hub, const char *seed)
{
    struct party party;
    struct fl_address mine;
    if (party_open(&party, strtoull(seed, NULL, 10), &mine) != FL_OK) {
        return 3;
    }
    meet(&party, hub, strlen(hub));
    const int32_t pid = (int32_t)getpid();
    (void)!party.transport->ops->send(party.transport, party.talks[0].link, TYPE_HERE, &pid,
                                      sizeof(pid), mine.bytes, mine.size, 0);
    while (party.wrong == 0 && getppid() != 1) {
        turn(&party);
    }
    return 4;
}

static pid_t start_peer(const struct fl_address *hub, unsigned seed)
{
    char address[64];
    char number[16];
    snprintf(address, sizeof(address), "%.*s", (int)hub->size, (const char *)hub->bytes);
    snprintf(number, sizeof(number), "%u", seed);
    const pid_t pid = fork();
    if (pid == 0) {
        execl("/proc/self/exe", "peer", "--peer", address, number, (char *)NULL);
        _exit(127);
    }
    CHECK(pid > 0);
    return pid;
}

/* Nobody may have ended by itself. */
static void check_alive(const pid_t *peers)
{
    for (int i = 0; i < PEERS; i++) {
        int status = 0;
        const pid_t ended = waitpid(peers[i], &status, WNOHANG);
        if (ended != 0) {
            printf("  peer %d ended by itself: exit %d, signal %d\n", i,
                   WIFEXITED(status) ? WEXITSTATUS(status) : -1,
                   WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        }
        CHECK_EQ(ended, 0);
    }
}

static void stress(struct party *hub, const struct fl_address *address, pid_t *peers)
{
    const char *text = getenv("FIRSTLIGHT_STRESS_S");
    const uint64_t seconds = text != NULL ? strtoull(text, NULL, 10) : 4;
    const uint64_t end = now_ns() + seconds * FL_NS_PER_S;
    uint64_t next_kill = now_ns() + FL_NS_PER_S / 2;
    unsigned kills = 0;
    while (now_ns() < end) {
        turn(hub);
        CHECK_EQ(hub->wrong, 0);
        if (now_ns() < next_kill) {
            continue;
        }
        check_alive(peers);
        pid_t *victim = &peers[random_below(hub, PEERS)];
        kill(*victim, SIGKILL);
        CHECK_EQ(waitpid(*victim, NULL, 0), *victim);
        *victim = start_peer(address, ++kills + PEERS);
        next_kill = now_ns() + (1 + random_below(hub, 2 * KILL_EVERY_MS)) * FL_NS_PER_MS;
    }
    check_alive(peers);
    printf("  %u killed, %" PRIu64 " messages, %" PRIu64 " ends of links and %" PRIu64
           " gaps seen by the hub\n",
           kills, hub->received, hub->closed, hub->gaps);
    CHECK(kills >= seconds);
    CHECK(hub->received > 100 * seconds);
}

static void test_kills(void)
{
    static struct party hub;
    struct fl_address address;
    pid_t peers[PEERS];
    CHECK_EQ(party_open(&hub, (uint64_t)getpid(), &address), FL_OK);
    for (unsigned i = 0; i < PEERS; i++) {
        peers[i] = start_peer(&address, i);
    }
    stress(&hub, &address, peers);
    for (int i = 0; i < PEERS; i++) {
        kill(peers[i], SIGKILL);
        waitpid(peers[i], NULL, 0);
    }
    hub.transport->ops->close(hub.transport);
}

static const struct test_case cases[] = {
    {"transport: peers killed at random moments take nobody with them", test_kills},
};

int main(int argc, char **argv)
{
    fl_log_init("test_transport_kills", fl_log_level_from_env(FL_LOG_WARN));
    if (argc == 4 && strcmp(argv[1], "--peer") == 0) {
        return peer_main(argv[2], argv[3]);
    }
    return test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
