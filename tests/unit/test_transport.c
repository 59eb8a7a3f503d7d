/* UCX between two transports of one process, and against a second process that is killed. */
#include "cluster/transport.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cluster/door.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "tests/harness.h"

enum { LINKS = 8, PATIENCE_MS = 5000 };

/* One process's side: what it was told. */
struct side {
    struct transport *transport;
    transport_link links[LINKS]; /* accepted */
    unsigned accepted;
    unsigned received;
    unsigned wrong; /* messages that were not what echo_fill() makes */
    uint16_t type;
    size_t header_size;
    unsigned char header[TRANSPORT_HEADER_MAX];
    size_t size;
    uint32_t next; /* the number the next message must carry */
    unsigned sent;
    uint64_t cookie;
    unsigned closed;
    fl_status why;
    char text[256];
    bool echo;
    bool close_on_message;
};

static uint64_t now_ns(void)
{
    const struct fl_clock clock = fl_clock_monotonic();
    return fl_clock_now(&clock);
}

static void on_accepted(void *ctx, transport_link link, const char *peer)
{
    struct side *side = ctx;
    if (side->accepted < LINKS) {
        side->links[side->accepted] = link;
    }
    side->wrong += peer == NULL || peer[0] == '\0';
    side->accepted++;
}

static void fill(unsigned char *data, size_t size, uint32_t number)
{
    for (size_t i = 0; i < size; i++) {
        data[i] = (unsigned char)(number + i * 7 + (i >> 8));
    }
}

static bool is_filled(const unsigned char *data, size_t size, uint32_t number)
{
    for (size_t i = 0; i < size; i++) {
        if (data[i] != (unsigned char)(number + i * 7 + (i >> 8))) {
            return false;
        }
    }
    return true;
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct side *side = ctx;
    side->received++;
    side->type = type;
    side->header_size = header_size;
    memcpy(side->header, header, header_size);
    side->size = size;
    side->wrong += (uintptr_t)header % 8 != 0 || (size > 0 && (uintptr_t)data % 8 != 0);
    if (header_size >= 4) {
        uint32_t number;
        memcpy(&number, header, sizeof(number));
        side->wrong += number != side->next++ || !is_filled(data, size, number);
    }
    if (side->echo) {
        const fl_status status =
            side->transport->ops->send(side->transport, link, type, header, header_size, data,
                                       size < TRANSPORT_COPY_MAX ? size : TRANSPORT_COPY_MAX, 0);
        side->wrong += status != FL_OK;
    }
    if (side->close_on_message) {
        side->transport->ops->close_link(side->transport, link);
    }
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    struct side *side = ctx;
    (void)link;
    side->sent++;
    side->cookie = cookie;
}

static void on_closed(void *ctx, transport_link link, fl_status why, const char *text)
{
    struct side *side = ctx;
    (void)link;
    side->closed++;
    side->why = why;
    snprintf(side->text, sizeof(side->text), "%s", text);
}

static void side_open(struct side *side, const char *listen)
{
    *side = (struct side){.transport = NULL};
    const struct transport_ucx_config config = {.listen = listen};
    CHECK_EQ(transport_ucx_open(&config, &side->transport), FL_OK);
    const struct transport_events events = {.ctx = side,
                                            .accepted = on_accepted,
                                            .received = on_received,
                                            .sent = on_sent,
                                            .closed = on_closed};
    side->transport->ops->set_events(side->transport, &events);
}

static void side_close(struct side *side)
{
    side->transport->ops->close(side->transport);
}

static unsigned progress(struct side *side)
{
    return side->transport->ops->progress(side->transport);
}

/* Progress both, waiting on their descriptors, until `*counter` reaches `want` or patience ends. */
static bool wait_for(struct side *a, struct side *b, const unsigned *counter, unsigned want)
{
    const uint64_t deadline = now_ns() + PATIENCE_MS * FL_NS_PER_MS;
    while (*counter < want && now_ns() < deadline) {
        const unsigned happened = progress(a) + (b != NULL ? progress(b) : 0);
        if (happened > 0 || a->transport->ops->arm(a->transport) != FL_OK ||
            (b != NULL && b->transport->ops->arm(b->transport) != FL_OK)) {
            continue;
        }
        struct pollfd fds[2] = {
            {.fd = a->transport->ops->fd(a->transport), .events = POLLIN},
            {.fd = b != NULL ? b->transport->ops->fd(b->transport) : -1, .events = POLLIN}};
        poll(fds, 2, 20);
    }
    return *counter >= want;
}

static transport_link side_connect(struct side *from, struct side *to)
{
    struct fl_address address;
    transport_link link = 0;
    to->transport->ops->address(to->transport, &address);
    CHECK_EQ(from->transport->ops->connect(from->transport, &address, &link), FL_OK);
    CHECK(link != 0);
    return link;
}

static fl_status send_number(struct side *side, transport_link link, uint32_t number,
                             const void *data, size_t size, uint64_t cookie)
{
    return side->transport->ops->send(side->transport, link, 17, &number, sizeof(number), data,
                                      size, cookie);
}

static void two_sides(struct side *a, struct side *b, const char *listen)
{
    side_open(a, listen);
    side_open(b, listen);
}

static void echo_over(const char *listen)
{
    struct side a, b;
    two_sides(&a, &b, listen);
    b.echo = true;
    const transport_link link = side_connect(&a, &b);
    static const size_t sizes[] = {0, 1, 7, 2304, 8191, 8192, 65537, 1 << 20, TRANSPORT_COPY_MAX};
    static unsigned char data[TRANSPORT_COPY_MAX];
    const unsigned count = sizeof(sizes) / sizeof(sizes[0]);
    for (uint32_t i = 0; i < count; i++) {
        fill(data, sizes[i], i);
        fl_status status;
        while ((status = send_number(&a, link, i, data, sizes[i], 0)) == FL_AGAIN) {
            progress(&a);
            progress(&b);
        }
        CHECK_EQ(status, FL_OK);
        memset(data, 0xee, sizes[i]); /* cookie 0: our copy is ours again at once */
    }
    CHECK(wait_for(&a, &b, &a.received, count));
    CHECK_EQ(b.received, count);
    CHECK_EQ(a.wrong + b.wrong, 0);
    CHECK_EQ(a.size, TRANSPORT_COPY_MAX);
    CHECK_EQ(a.type, 17);
    CHECK_EQ(b.accepted, 1);
    side_close(&a);
    side_close(&b);
}

static void test_echo_socket(void)
{
    echo_over("127.0.0.1:0");
}

static void test_echo_name(void)
{
    echo_over("localhost:0");
}

static void test_echo_ipv6(void)
{
    const int fd = socket(AF_INET6, SOCK_STREAM, 0);
    const struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const bool usable = fd >= 0 && bind(fd, (const struct sockaddr *)&any, sizeof(any)) == 0;
    if (fd >= 0) {
        close(fd);
    }
    if (!usable) {
        TEST_SKIP("this machine has no IPv6 loopback");
    }
    echo_over("[::1]:0");
}

static void test_echo_worker(void)
{
    echo_over(NULL);
}

static void test_worker_links(void)
{
    struct side a, b;
    two_sides(&a, &b, NULL);
    /* Both directions at once, then one of the links goes and the others stay. */
    const transport_link first = side_connect(&a, &b);
    const transport_link back = side_connect(&b, &a);
    const transport_link second = side_connect(&a, &b);
    CHECK_EQ(send_number(&a, second, 0, NULL, 0, 0), FL_OK);
    CHECK(wait_for(&a, &b, &b.received, 1));
    CHECK(wait_for(&a, &b, &a.accepted, 1));
    CHECK_EQ(b.accepted, 2);
    a.transport->ops->close_link(a.transport, first);
    CHECK(wait_for(&a, &b, &a.closed, 1));
    CHECK(wait_for(&a, &b, &b.closed, 1));
    CHECK_EQ(a.why, FL_CANCELLED);
    CHECK_EQ(b.why, FL_LINK_LOST);
    CHECK_EQ(send_number(&a, second, 1, NULL, 0, 0), FL_OK);
    CHECK_EQ(send_number(&b, back, 0, NULL, 0, 0), FL_OK);
    CHECK(wait_for(&a, &b, &b.received, 2));
    CHECK(wait_for(&a, &b, &a.received, 1));
    CHECK_EQ(a.wrong + b.wrong, 0);
    side_close(&a);
    side_close(&b);
}

static void test_largest(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    const transport_link link = side_connect(&a, &b);
    const size_t size = TRANSPORT_MESSAGE_MAX - sizeof(uint32_t);
    unsigned char *data = malloc(size);
    CHECK(data != NULL);
    fill(data, size, 0);
    CHECK_EQ(send_number(&a, link, 0, data, size, 99), FL_OK);
    CHECK(wait_for(&a, &b, &a.sent, 1));
    CHECK_EQ(a.cookie, 99);
    CHECK(wait_for(&a, &b, &b.received, 1));
    CHECK_EQ(b.size, size);
    CHECK_EQ(b.wrong, 0);
    free(data);
    side_close(&a);
    side_close(&b);
}

static void test_order(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    const transport_link link = side_connect(&a, &b);
    static unsigned char data[300000];
    for (uint32_t i = 0; i < 400; i++) {
        const size_t size = i % 7 == 0 ? sizeof(data) - i : i * 31 % 3000;
        fill(data, size, i);
        fl_status status;
        while ((status = send_number(&a, link, i, data, size, 0)) == FL_AGAIN) {
            progress(&a);
            progress(&b);
        }
        CHECK_EQ(status, FL_OK);
    }
    CHECK(wait_for(&a, &b, &b.received, 400));
    CHECK_EQ(b.wrong, 0);
    side_close(&a);
    side_close(&b);
}

static void test_back_pressure(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    const transport_link link = side_connect(&a, &b);
    static unsigned char data[1 << 20];
    fill(data, sizeof(data), 0);
    uint32_t queued = 0;
    while (queued < 100 && send_number(&a, link, queued, data, sizeof(data), queued + 1) == FL_OK) {
        queued++;
    }
    CHECK(queued >= 8 && queued < 100); /* by bytes */
    CHECK_EQ(send_number(&a, link, queued, data, sizeof(data), 1), FL_AGAIN);
    b.next = 0;
    CHECK(wait_for(&a, &b, &a.sent, queued));
    CHECK(wait_for(&a, &b, &b.received, queued));
    uint32_t small = 0;
    while (small < 1000 && send_number(&a, link, queued + small, NULL, 0, 0) == FL_OK) {
        small++;
    }
    CHECK(wait_for(&a, &b, &b.received, queued + small));
    CHECK_EQ(send_number(&a, link, queued + small, NULL, 0, 0), FL_OK);
    side_close(&a);
    side_close(&b);
}

static void test_opening_queue(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    const transport_link link = side_connect(&a, &b);
    uint32_t count = 0;
    while (count < 1000 && send_number(&a, link, count, NULL, 0, 0) == FL_OK) {
        count++;
    }
    CHECK(count >= 64 && count < 1000); /* by count, as nothing can leave yet */
    CHECK(wait_for(&a, &b, &b.received, count));
    CHECK_EQ(b.wrong, 0);
    side_close(&a);
    side_close(&b);
}

static void test_close_flushes(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    const transport_link link = side_connect(&a, &b);
    static unsigned char data[1 << 20];
    fill(data, sizeof(data), 0);
    CHECK_EQ(send_number(&a, link, 0, data, sizeof(data), 0), FL_OK);
    CHECK(wait_for(&a, &b, &b.accepted, 1));
    CHECK(wait_for(&a, &b, &b.received, 1));
    fill(data, sizeof(data), 1);
    CHECK_EQ(send_number(&a, link, 1, data, sizeof(data), 7), FL_OK);
    a.transport->ops->close_link(a.transport, link);
    CHECK_EQ(send_number(&a, link, 2, NULL, 0, 0), FL_LINK_LOST);
    const uint64_t start = now_ns();
    CHECK(wait_for(&a, &b, &a.closed, 1));
    CHECK(wait_for(&a, &b, &b.closed, 1));
    CHECK(now_ns() - start < FL_NS_PER_S);
    CHECK_EQ(b.received, 2);
    CHECK_EQ(a.why, FL_CANCELLED);
    CHECK_EQ(b.why, FL_LINK_LOST);
    CHECK(strstr(b.text, "closed") != NULL);
    side_close(&a);
    side_close(&b);
}

static void test_close_in_event(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    b.close_on_message = true;
    const transport_link link = side_connect(&a, &b);
    CHECK_EQ(send_number(&a, link, 0, NULL, 0, 0), FL_OK);
    CHECK(wait_for(&a, &b, &a.closed, 1));
    CHECK(wait_for(&a, &b, &b.closed, 1));
    CHECK_EQ(a.why, FL_LINK_LOST);
    CHECK_EQ(b.why, FL_CANCELLED);
    side_close(&a);
    side_close(&b);
}

static void test_drop(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    const transport_link link = side_connect(&a, &b);
    CHECK_EQ(send_number(&a, link, 0, NULL, 0, 0), FL_OK);
    CHECK(wait_for(&a, &b, &b.received, 1));
    static unsigned char data[1 << 20];
    CHECK_EQ(send_number(&a, link, 1, data, sizeof(data), 5), FL_OK);
    a.transport->ops->drop_link(a.transport, link);
    CHECK(wait_for(&a, NULL, &a.closed, 1)); /* without the peer's help */
    CHECK_EQ(a.why, FL_CANCELLED);
    CHECK(wait_for(&b, NULL, &b.closed, 1));
    CHECK_EQ(b.why, FL_LINK_LOST);
    side_close(&a);
    side_close(&b);
}

static void test_many_links(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    transport_link seen = 0;
    for (unsigned i = 0; i < 40; i++) { /* links come and go; numbers are not used twice */
        const transport_link link = side_connect(&a, &b);
        CHECK(link != seen);
        seen = link;
        b.next = 0;
        CHECK_EQ(send_number(&a, link, 0, NULL, 0, 0), FL_OK);
        CHECK(wait_for(&a, &b, &b.received, i + 1));
        a.transport->ops->close_link(a.transport, link);
        CHECK(wait_for(&a, &b, &a.closed, i + 1));
        CHECK(wait_for(&a, &b, &b.closed, i + 1));
    }
    CHECK_EQ(b.wrong, 0);
    side_close(&a);
    side_close(&b);
}

static void test_nobody_there(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    struct fl_address address;
    b.transport->ops->address(b.transport, &address);
    side_close(&b);
    transport_link link = 0;
    CHECK_EQ(a.transport->ops->connect(a.transport, &address, &link), FL_OK);
    (void)!send_number(&a, link, 0, NULL, 0, 0);
    CHECK(wait_for(&a, NULL, &a.closed, 1));
    CHECK_EQ(a.why, FL_LINK_LOST);
    CHECK(strstr(a.text, "cannot reach 127.0.0.1:") != NULL);
    side_close(&a);
}

static fl_status connect_text(struct side *side, const char *text)
{
    struct fl_address address = {.kind = FL_ADDRESS_SOCKET, .size = (uint32_t)strlen(text)};
    memcpy(address.bytes, text, strlen(text));
    transport_link link = 0;
    return side->transport->ops->connect(side->transport, &address, &link);
}

static void test_bad_addresses(void)
{
    struct side a;
    side_open(&a, "127.0.0.1:0");
    CHECK_EQ(connect_text(&a, "no port"), FL_INVALID);
    CHECK_EQ(connect_text(&a, "127.0.0.1:0"), FL_INVALID);
    CHECK_EQ(connect_text(&a, "127.0.0.1:65536"), FL_INVALID);
    CHECK_EQ(connect_text(&a, "unix:/tmp/x"), FL_INVALID);
    CHECK_EQ(connect_text(&a, "::1:7411"), FL_INVALID);
    CHECK_EQ(connect_text(&a, "host.invalid:7411"), FL_INVALID);
    struct fl_address worker = {.kind = FL_ADDRESS_WORKER, .size = 100};
    transport_link link = 0;
    CHECK_EQ(a.transport->ops->connect(a.transport, &worker, &link), FL_INVALID);
    worker.kind = FL_ADDRESS_LOCAL;
    CHECK_EQ(a.transport->ops->connect(a.transport, &worker, &link), FL_INVALID);
    CHECK_EQ(a.transport->ops->send(a.transport, 12345, 17, NULL, 0, NULL, 0, 0), FL_LINK_LOST);
    side_close(&a);
    struct transport *none = NULL;
    const struct transport_ucx_config config = {.listen = "192.0.2.1:0"};
    CHECK_EQ(transport_ucx_open(&config, &none), FL_INVALID);
    const struct transport_ucx_config on_unix = {.listen = "unix:/tmp/x"};
    CHECK_EQ(transport_ucx_open(&on_unix, &none), FL_INVALID);
}

static void address_text(struct side *side, char *out, size_t size)
{
    struct fl_address address;
    side->transport->ops->address(side->transport, &address);
    CHECK_EQ(address.kind, FL_ADDRESS_SOCKET);
    snprintf(out, size, "%.*s", (int)address.size, (const char *)address.bytes);
}

static void test_port_in_use(void)
{
    struct side a;
    char text[64];
    side_open(&a, "127.0.0.1:0");
    address_text(&a, text, sizeof(text));
    struct transport *second = NULL;
    const struct transport_ucx_config config = {.listen = text};
    CHECK_EQ(transport_ucx_open(&config, &second), FL_BUSY);
    CHECK(strstr(fl_last_error(), text) != NULL);
    side_close(&a);
}

static void test_listen_again(void)
{
    struct side a, b;
    char text[64];
    two_sides(&a, &b, "127.0.0.1:0");
    address_text(&b, text, sizeof(text));
    for (int i = 0; i < 3; i++) {
        const transport_link link = side_connect(&a, &b);
        a.closed = 0;
        CHECK_EQ(send_number(&a, link, 0, NULL, 0, 0), FL_OK);
        CHECK(wait_for(&a, &b, &b.received, 1));
        side_close(&b); /* with the connection open: its port lingers in TIME_WAIT */
        CHECK(wait_for(&a, NULL, &a.closed, 1));
        CHECK_EQ(a.why, FL_LINK_LOST);
        side_open(&b, text);
    }
    side_close(&a);
    side_close(&b);
}

/* Bytes from something that is no UCX. */
static int raw_connect(const char *text)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)strtoul(strchr(text, ':') + 1, NULL, 10))};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)&to, sizeof(to)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Throws bytes at every port this process listens on: the door, and those that UCX opens. */
static unsigned throw_at_all(const unsigned char *garbage, size_t size, int *fds, unsigned room)
{
    unsigned count = 0;
    for (int fd = 3; fd < 200 && count + 3 < room; fd++) {
        int listening = 0;
        socklen_t option = sizeof(listening);
        struct sockaddr_in at = {.sin_family = AF_UNSPEC};
        socklen_t at_size = sizeof(at);
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &option) != 0 || !listening ||
            getsockname(fd, (struct sockaddr *)&at, &at_size) != 0 || at.sin_family != AF_INET) {
            continue;
        }
        char text[32];
        snprintf(text, sizeof(text), ":%u", (unsigned)ntohs(at.sin_port));
        for (size_t part = 1; part <= 3; part++) {
            fds[count] = raw_connect(text);
            CHECK(fds[count] >= 0);
            (void)!send(fds[count++], garbage + part, (size - part) / (part * part), MSG_NOSIGNAL);
        }
    }
    return count;
}

static void test_garbage(void)
{
    struct side a, b;
    char text[64];
    two_sides(&a, &b, "127.0.0.1:0");
    address_text(&b, text, sizeof(text));
    unsigned char garbage[4096];
    uint32_t state = 1;
    int fds[24];
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++) {
        for (size_t k = 0; k < sizeof(garbage); k++) {
            state = state * 1664525 + 1013904223;
            garbage[k] = i == 0 ? 0 : i == 1 ? 0xff : (unsigned char)(state >> 24);
        }
        fds[i] = raw_connect(text);
        CHECK(fds[i] >= 0);
        const size_t size = i % 4 == 3 ? 0 : 1 + i * 170; /* some stay silent */
        (void)!send(fds[i], garbage, size, MSG_NOSIGNAL);
        for (int k = 0; k < 3; k++) {
            usleep(1000);
            progress(&b);
        }
    }
    int more[100];
    const unsigned more_count = throw_at_all(garbage, sizeof(garbage), more, 100);
    CHECK(more_count >= 9); /* two doors, and one at least of UCX */
    for (int k = 0; k < 20; k++) {
        usleep(1000);
        progress(&a);
        progress(&b);
    }
    for (unsigned i = 0; i < more_count; i++) {
        close(more[i]);
    }
    static const char http[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    (void)!send(fds[3], http, sizeof(http), MSG_NOSIGNAL);
    const transport_link link = side_connect(&a, &b);
    CHECK_EQ(send_number(&a, link, 0, NULL, 0, 0), FL_OK);
    CHECK(wait_for(&a, &b, &b.received, 1));
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++) {
        close(fds[i]);
    }
    CHECK_EQ(send_number(&a, link, 1, NULL, 0, 0), FL_OK);
    CHECK(wait_for(&a, &b, &b.received, 2));
    side_close(&a);
    side_close(&b);
}

static void on_let_in(void *ctx, door_visit visit, bool opener, uint64_t ticket, const void *pass,
                      size_t size, const char *peer)
{
    (void)visit, (void)opener, (void)ticket, (void)pass, (void)size, (void)peer;
    ++*(unsigned *)ctx;
}

static void on_left(void *ctx, door_visit visit, fl_status why, const char *text)
{
    (void)ctx, (void)visit, (void)why, (void)text;
}

/* The door of one process with the data port of another, who does not know the visitor: as behind a
 * firewall, nothing comes back. */
static void test_no_data_comes(void)
{
    struct side a;
    struct side c;
    struct fl_address inbox;
    struct fl_network_address loopback;
    struct fl_network_socket place[FL_NETWORK_RESOLVED_MAX];
    size_t count = 0;
    unsigned let_in = 0;
    side_open(&a, "127.0.0.1:0");
    side_open(&c, NULL);
    c.transport->ops->address(c.transport, &inbox);
    CHECK_EQ(fl_network_address_parse("127.0.0.1:0", 11, &loopback), FL_OK);
    CHECK_EQ(fl_network_address_resolve(&loopback, place, FL_NETWORK_RESOLVED_MAX, &count), FL_OK);
    const struct door_config config = {
        .listen = place,
        .listen_count = count,
        .listen_text = "127.0.0.1:0",
        .party = FL_PARTY_NODE,
        .pass = inbox.bytes,
        .pass_size = inbox.size,
        .wait_ns = 5 * FL_NS_PER_S,
        .events = {.ctx = &let_in, .admitted = on_let_in, .gone = on_left},
    };
    struct door *door = NULL;
    CHECK_EQ(door_open(&config, &door), FL_OK);
    char text[FL_NETWORK_TEXT_MAX];
    door_address(door, &place[0]);
    fl_network_socket_text(&place[0], text);
    struct fl_address address = {.kind = FL_ADDRESS_SOCKET, .size = (uint32_t)strlen(text)};
    memcpy(address.bytes, text, strlen(text));
    transport_link link = 0;
    CHECK_EQ(a.transport->ops->connect(a.transport, &address, &link), FL_OK);
    const uint64_t end = now_ns() + PATIENCE_MS * FL_NS_PER_MS;
    uint64_t next = UINT64_MAX;
    uint64_t met = UINT64_MAX;
    while (now_ns() < end && now_ns() < met) {
        (void)progress(&a);
        (void)progress(&c);
        (void)door_poll(door, now_ns(), &next);
        if (let_in > 0 && met == UINT64_MAX) {
            met = now_ns() + FL_NS_PER_S / 10; /* it has knocked by then */
        }
    }
    CHECK_EQ(let_in, 1);
    CHECK_EQ(a.closed, 0);
    door_close(door);
    CHECK(wait_for(&a, &c, &a.closed, 1));
    CHECK_EQ(a.why, FL_LINK_LOST);
    CHECK(strstr(a.text, "--data-ports") != NULL);
    CHECK_EQ(c.accepted, 0);
    side_close(&a);
    side_close(&c);
}

/* A boot may start us first: no device but loopback, and that one down. */
static void test_no_network(void)
{
    const pid_t pid = fork();
    if (pid == 0) {
        struct transport *none = NULL;
        const struct transport_ucx_config config = {.listen = "0.0.0.0:0"};
        _exit(unshare(CLONE_NEWNET) != 0                       ? 77
              : transport_ucx_open(&config, &none) == FL_AGAIN ? 0
                                                               : 1);
    }
    int status = 0;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) {
        printf("  only root can try this\n");
        return;
    }
    CHECK_EQ(WEXITSTATUS(status), 0);
}

/* UCX lists the machine's network devices with getifaddrs() and asks again as it opens each; this
 * one stands before the C library's.  From call `hidden_first` on there are none, `hidden_count`
 * times. */
static unsigned listings;
static unsigned hidden_first;
static unsigned hidden_count;

__attribute__((visibility("default"))) int list_devices(struct ifaddrs **out) __asm__("getifaddrs");

int list_devices(struct ifaddrs **out)
{
    int (*real)(struct ifaddrs **);
    *(void **)(void *)&real = dlsym(RTLD_NEXT, "getifaddrs");
    const int result = real(out);
    if (result == 0 && listings++ - hidden_first < hidden_count) {
        freeifaddrs(*out);
        *out = NULL;
    }
    return result;
}

static fl_status open_with_hidden(unsigned first, unsigned count)
{
    const struct transport_ucx_config config = {.listen = NULL};
    struct transport *transport = NULL;
    listings = 0;
    hidden_first = first;
    hidden_count = count;
    const fl_status status = transport_ucx_open(&config, &transport);
    hidden_count = 0;
    if (status == FL_OK) {
        transport->ops->close(transport);
    }
    return status;
}

/* A Wi-Fi that comes and goes, at any moment of opening.  How often UCX asks is no matter: real
 * devices may come and go meanwhile, too. */
static void test_device_that_vanishes(void)
{
    CHECK_EQ(open_with_hidden(0, 0), FL_OK);
    const unsigned asked = listings;
    CHECK(asked > 0);
    for (unsigned moment = 0; moment < asked; moment++) {
        CHECK_EQ(open_with_hidden(moment, 1), FL_OK);
    }
    CHECK_EQ(open_with_hidden(0, UINT_MAX), FL_INTERNAL);
    CHECK(strstr(fl_last_error(), "No such device") != NULL);
}

/* Two ports that are free now, one after the other. */
static struct transport_ports two_free_ports(void)
{
    for (uint16_t first = 30000; first < 60000; first = (uint16_t)(first + 2)) {
        const struct transport_ports ports = {first, (uint16_t)(first + 1)};
        if (transport_ports_check(&ports) == FL_OK) {
            return ports;
        }
    }
    return (struct transport_ports){0, 0};
}

static void test_data_ports(void)
{
    struct transport *first = NULL;
    struct transport *second = NULL;
    const struct transport_ucx_config config = {.listen = "127.0.0.1:0",
                                                .data_ports = two_free_ports()};
    CHECK(config.data_ports.last != 0);
    CHECK_EQ(transport_ports_check(&config.data_ports), FL_OK);
    CHECK_EQ(transport_ucx_open(&config, &first), FL_OK);
    CHECK_EQ(transport_ports_check(&config.data_ports), FL_BUSY); /* both are taken */
    CHECK_EQ(transport_ucx_open(&config, &second), FL_BUSY);      /* and nobody waits for them */
    CHECK(strstr(fl_last_error(), "only 0 can be had and a process needs 2") != NULL);
    first->ops->close(first);
}

/* The program run as `PROG --echo`: listens, prints where, echoes until it is killed. */
static int echo_main(void)
{
    struct side side = {.transport = NULL};
    const struct transport_ucx_config config = {.listen = "127.0.0.1:0"};
    if (transport_ucx_open(&config, &side.transport) != FL_OK) {
        return 1;
    }
    const struct transport_events events = {.ctx = &side,
                                            .accepted = on_accepted,
                                            .received = on_received,
                                            .sent = on_sent,
                                            .closed = on_closed};
    side.transport->ops->set_events(side.transport, &events);
    side.echo = true;
    struct fl_address address;
    side.transport->ops->address(side.transport, &address);
    printf("%.*s\n", (int)address.size, (const char *)address.bytes);
    fflush(stdout);
    const unsigned never = 0;
    (void)wait_for(&side, NULL, &never, 1);
    return 0;
}

static pid_t start_echo(char *address, size_t size)
{
    int fds[2];
    CHECK_EQ(pipe2(fds, O_CLOEXEC), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        dup2(fds[1], STDOUT_FILENO);
        execl("/proc/self/exe", "echo", "--echo", (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    CHECK(pid > 0);
    size_t used = 0;
    while (used + 1 < size && read(fds[0], address + used, 1) == 1 && address[used] != '\n') {
        used++;
    }
    address[used] = '\0';
    close(fds[0]);
    return pid;
}

static void test_killed_peer(void)
{
    struct side a;
    char text[64];
    const pid_t pid = start_echo(text, sizeof(text));
    side_open(&a, "127.0.0.1:0");
    struct fl_address address = {.kind = FL_ADDRESS_SOCKET, .size = (uint32_t)strlen(text)};
    memcpy(address.bytes, text, strlen(text));
    transport_link link = 0;
    CHECK_EQ(a.transport->ops->connect(a.transport, &address, &link), FL_OK);
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(send_number(&a, link, i, NULL, 0, 0), FL_OK);
        CHECK(wait_for(&a, NULL, &a.received, i + 1));
    }
    static unsigned char data[4 << 20];
    kill(pid, SIGSTOP); /* so that something is under way when it dies */
    CHECK_EQ(send_number(&a, link, 20, data, sizeof(data), 1), FL_OK);
    CHECK_EQ(send_number(&a, link, 21, data, sizeof(data), 2), FL_OK);
    progress(&a);
    const uint64_t start = now_ns();
    kill(pid, SIGKILL);
    CHECK(wait_for(&a, NULL, &a.closed, 1));
    CHECK(now_ns() - start < FL_NS_PER_S);
    CHECK_EQ(a.why, FL_LINK_LOST);
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    side_close(&a);
}

static uint64_t cpu_us(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 +
           (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void test_idle(void)
{
    struct side a, b;
    two_sides(&a, &b, "127.0.0.1:0");
    const transport_link link = side_connect(&a, &b);
    CHECK_EQ(send_number(&a, link, 0, NULL, 0, 0), FL_OK);
    CHECK(wait_for(&a, &b, &b.received, 1));
    const uint64_t before = cpu_us();
    for (int second = 0; second < 2; second++) {
        const uint64_t end = now_ns() + FL_NS_PER_S;
        while (now_ns() < end) {
            while (progress(&a) + progress(&b) > 0 || a.transport->ops->arm(a.transport) != FL_OK ||
                   b.transport->ops->arm(b.transport) != FL_OK) {
            }
            struct pollfd fds[2] = {{.fd = a.transport->ops->fd(a.transport), .events = POLLIN},
                                    {.fd = b.transport->ops->fd(b.transport), .events = POLLIN}};
            poll(fds, 2, 1000);
        }
    }
    const uint64_t used = cpu_us() - before;
    printf("  two idle transports used %" PRIu64 " us in 2 s\n", used);
    CHECK(used < 20000); /* two of them, 0.5 % of a core each */
    side_close(&a);
    side_close(&b);
}

static const struct test_case cases[] = {
    {"transport: a killed peer is noticed within a second", test_killed_peer},
    {"transport: messages of all sizes come back over a socket address", test_echo_socket},
    {"transport: a host name that has both kinds of address works", test_echo_name},
    {"transport: the listener may be on IPv6", test_echo_ipv6},
    {"transport: messages come back over a worker's address", test_echo_worker},
    {"transport: links between two workers cross, and end one by one", test_worker_links},
    {"transport: the largest message arrives, its data is free after sent()", test_largest},
    {"transport: messages of mixed sizes keep their order", test_order},
    {"transport: a full queue says FL_AGAIN and takes more once it drains", test_back_pressure},
    {"transport: what is sent before the link is open waits, within limits", test_opening_queue},
    {"transport: closing a link first delivers what was queued", test_close_flushes},
    {"transport: a link can be closed from within received()", test_close_in_event},
    {"transport: dropping a link needs no answer", test_drop},
    {"transport: links come and go, and no number is used twice", test_many_links},
    {"transport: an address where nobody listens ends the link with a sentence", test_nobody_there},
    {"transport: addresses that name nothing are refused", test_bad_addresses},
    {"transport: a port in use is named", test_port_in_use},
    {"transport: a listener gets its port back after a restart", test_listen_again},
    {"transport: who is let in and gets no data hears of data ports", test_no_data_comes},
    {"transport: without a network device it is too early", test_no_network},
    {"transport: a network device that goes away while it is opened is done without",
     test_device_that_vanishes},
    {"transport: data goes over the ports given, and too few are named", test_data_ports},
    {"transport: garbage and silence on the port harm nobody", test_garbage},
    {"transport: waiting costs nothing", test_idle},
};

int main(int argc, char **argv)
{
    fl_log_init("test_transport", fl_log_level_from_env(FL_LOG_WARN));
    if (argc > 1 && strcmp(argv[1], "--echo") == 0) {
        return echo_main();
    }
    return test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
