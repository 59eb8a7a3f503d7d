/* test_client_server.c - strangers at the door, over real sockets. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "coordinator/client_server.h"
#include "proto/handshake.h"
#include "tests/harness.h"

enum { ARENA_SIZE = 1 << 20 };

/* A server on a turned clock, and what reached it. */
static struct bench {
    struct client_server *server;
    struct fl_pool_key key;
    uint64_t now_ns;
    uint32_t request_count;
    uint32_t gone_count;
    uint64_t client;
    uint64_t id;
    enum fl_request_kind kind;
} bench;

static unsigned char arena_block[ARENA_SIZE];

static uint64_t bench_now(void *ctx)
{
    return ((const struct bench *)ctx)->now_ns;
}

static void on_request(void *ctx, uint64_t client, const struct fl_client_request *request)
{
    struct bench *seen = ctx;
    seen->request_count++;
    seen->client = client;
    seen->id = request->id;
    seen->kind = request->kind;
}

static void on_gone(void *ctx, uint64_t client)
{
    struct bench *seen = ctx;
    seen->gone_count += client == seen->client;
}

enum bench_key { WITHOUT_KEY, WITH_KEY };

static void open_bench(enum bench_key key)
{
    client_server_close(bench.server);
    bench = (struct bench){.now_ns = 1000};
    fl_pool_key_make(&bench.key);
    const struct client_server_config config = {
        .clock = {.now_ns = bench_now, .ctx = &bench},
        .key = key == WITH_KEY ? &bench.key : NULL,
        .events = {.ctx = &bench, .request = on_request, .gone = on_gone}};
    CHECK_EQ(client_server_open(&config, &bench.server), FL_OK);
    CHECK_EQ(client_server_listen(bench.server, "127.0.0.1:0"), FL_OK);
}

static int dial(void)
{
    const char *address = client_server_address(bench.server, 0);
    struct sockaddr_in name = {.sin_family = AF_INET};
    name.sin_port = htons((uint16_t)strtoul(strrchr(address, ':') + 1, NULL, 10));
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    CHECK(fd >= 0);
    CHECK_EQ(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)), 0);
    CHECK_EQ(connect(fd, (const struct sockaddr *)&name, sizeof(name)), 0);
    return fd;
}

/* Lets the server work until it has been quiet for a moment. */
static void turn(void)
{
    struct pollfd fd = {.fd = client_server_fd(bench.server), .events = POLLIN};
    for (int i = 0; i < 200 && poll(&fd, 1, 20) > 0; i++) {
        (void)client_server_poll(bench.server);
    }
    (void)client_server_poll(bench.server);
}

static void put(int fd, const void *data, size_t size)
{
    CHECK_EQ(send(fd, data, size, MSG_NOSIGNAL), (ssize_t)size);
}

static void put_length(int fd, uint32_t size)
{
    const unsigned char length[4] = {(unsigned char)size, (unsigned char)(size >> 8),
                                     (unsigned char)(size >> 16), (unsigned char)(size >> 24)};
    put(fd, length, sizeof(length));
}

static void put_frame(int fd, const void *data, size_t size)
{
    put_length(fd, (uint32_t)size);
    put(fd, data, size);
}

static size_t pack_status(uint64_t id, unsigned char *out, size_t size)
{
    struct fl_arena arena;
    fl_arena_init(&arena, arena_block, sizeof(arena_block));
    const struct fl_client_request request = {
        .version = FL_CLIENT_VERSION, .id = id, .kind = FL_REQUEST_STATUS};
    size_t used = 0;
    CHECK_EQ(fl_client_request_pack(&request, &arena, out, size, &used), FL_OK);
    return used;
}

static void ask_status(int fd, uint64_t id)
{
    unsigned char packed[256];
    put_frame(fd, packed, pack_status(id, packed, sizeof(packed)));
}

/* Reads exactly `size` bytes while the server turns; false at the end of the stream. */
static bool get(int fd, void *out, size_t size)
{
    unsigned char *at = out;
    for (int tries = 0; size > 0 && tries < 400; tries++) {
        const ssize_t got = recv(fd, at, size, MSG_DONTWAIT);
        if (got > 0) {
            at += got;
            size -= (size_t)got;
        } else if (got == 0 || errno != EAGAIN) {
            return false;
        } else {
            turn();
        }
    }
    return size == 0;
}

static size_t get_frame(int fd, unsigned char *out, size_t size)
{
    unsigned char length[4];
    if (!get(fd, length, sizeof(length))) {
        return 0;
    }
    const size_t wanted = length[0] | (size_t)length[1] << 8 | (size_t)length[2] << 16;
    CHECK(length[3] == 0 && wanted <= size);
    return get(fd, out, wanted) ? wanted : 0;
}

/* The next event; its strings live until the next call. */
static struct fl_client_event get_event(int fd)
{
    static unsigned char frame[64 << 10];
    static unsigned char block[ARENA_SIZE];
    struct fl_arena arena;
    struct fl_client_event event;
    const size_t size = get_frame(fd, frame, sizeof(frame));
    CHECK(size > 0);
    fl_arena_init(&arena, block, sizeof(block));
    CHECK_EQ(fl_client_event_unpack(frame, size, &arena, &event), FL_OK);
    return event;
}

/* One ERROR with this code and a sentence that holds `word`, then the end of the stream. */
static void expect_refusal(int fd, fl_status code, const char *word)
{
    const struct fl_client_event event = get_event(fd);
    CHECK_EQ(event.kind, FL_EVENT_ERROR);
    CHECK_EQ(event.as.error.code, code);
    CHECK(strstr(event.as.error.text, word) != NULL);
    unsigned char byte;
    CHECK(!get(fd, &byte, 1));
}

/* A well-behaved client is served beside whatever happened before. */
static void expect_service(void)
{
    const int fd = dial();
    const uint32_t before = bench.request_count;
    ask_status(fd, 77);
    turn();
    CHECK_EQ(bench.request_count, before + 1);
    CHECK_EQ(bench.id, 77);
    CHECK_EQ(bench.kind, FL_REQUEST_STATUS);
    const struct fl_client_event event = {.id = 77, .kind = FL_EVENT_LOADED};
    client_server_send(bench.server, bench.client, &event);
    CHECK_EQ(get_event(fd).kind, FL_EVENT_LOADED);
    close(fd);
    turn();
}

static void requests_come_in_pieces_and_together(void)
{
    open_bench(WITHOUT_KEY);
    const int fd = dial();
    unsigned char packed[256];
    const size_t size = pack_status(5, packed, sizeof(packed));
    unsigned char stream[1024];
    size_t used = 0;
    for (int i = 0; i < 3; i++) {
        stream[used] = (unsigned char)size;
        memset(stream + used + 1, 0, 3);
        memcpy(stream + used + 4, packed, size);
        used += size + 4;
    }
    for (size_t i = 0; i < size + 4; i++) {
        CHECK_EQ(bench.request_count, 0);
        put(fd, stream + i, 1);
        turn();
    }
    CHECK_EQ(bench.request_count, 1);
    put(fd, stream + size + 4, used - size - 4);
    turn();
    CHECK_EQ(bench.request_count, 3);
    close(fd);
    turn();
    CHECK_EQ(bench.gone_count, 1);
}

static void garbage_costs_one_connection(void)
{
    open_bench(WITHOUT_KEY);
    const int http = dial();
    put(http, "GET / HTTP/1.1\r\n\r\n", 18);
    expect_refusal(http, FL_PROTOCOL, "frame");
    close(http);
    const int noise = dial();
    put_frame(noise, "\xff\xff\xff\xff\xff", 5);
    expect_refusal(noise, FL_PROTOCOL, "");
    close(noise);
    expect_service();
}

static void lengths_outside_the_limits_are_refused(void)
{
    open_bench(WITHOUT_KEY);
    const uint32_t sizes[] = {0, FL_CLIENT_MESSAGE_MAX + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const int fd = dial();
        put_length(fd, sizes[i]);
        expect_refusal(fd, FL_PROTOCOL, "8388608");
        close(fd);
    }
    expect_service();
}

static void another_version_is_refused_by_name_and_the_connection_lives(void)
{
    open_bench(WITHOUT_KEY);
    const int fd = dial();
    put_frame(fd, "\x08\x63\x10\x07\x52\x00", 6); /* version 99, id 7, status */
    const struct fl_client_event event = get_event(fd);
    CHECK_EQ(event.kind, FL_EVENT_ERROR);
    CHECK_EQ(event.id, 7);
    CHECK_EQ(event.as.error.code, FL_UNSUPPORTED);
    CHECK(strstr(event.as.error.text, "99") != NULL);
    ask_status(fd, 8);
    turn();
    CHECK_EQ(bench.request_count, 1);
    close(fd);
}

static void half_a_frame_has_a_deadline_and_silence_has_none(void)
{
    open_bench(WITHOUT_KEY);
    const int half = dial();
    const int silent = dial();
    put_length(half, 100);
    put(half, "abc", 3);
    turn();
    bench.now_ns += 29 * FL_NS_PER_S;
    turn();
    unsigned char byte;
    CHECK(recv(half, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
    bench.now_ns += 2 * FL_NS_PER_S;
    turn();
    expect_refusal(half, FL_PROTOCOL, "30 s");
    bench.now_ns += 3600 * FL_NS_PER_S;
    turn();
    ask_status(silent, 1);
    turn();
    CHECK_EQ(bench.request_count, 1);
    close(half);
    close(silent);
}

static void clients_beyond_the_limit_are_turned_away(void)
{
    open_bench(WITHOUT_KEY);
    static int fds[CLIENT_SERVER_CLIENT_MAX];
    for (size_t i = 0; i < CLIENT_SERVER_CLIENT_MAX; i++) {
        fds[i] = dial();
        (void)client_server_poll(bench.server);
    }
    turn();
    const int extra = dial();
    turn();
    unsigned char byte;
    CHECK(!get(extra, &byte, 1));
    close(extra);
    close(fds[0]);
    turn();
    expect_service();
    for (size_t i = 1; i < CLIENT_SERVER_CLIENT_MAX; i++) {
        close(fds[i]);
    }
    turn();
}

static void a_client_that_does_not_read_is_hung_up_on(void)
{
    open_bench(WITHOUT_KEY);
    const int fd = dial();
    ask_status(fd, 1);
    turn();
    static char text[60 << 10];
    memset(text, 'x', sizeof(text));
    const struct fl_client_event event = {
        .id = 1, .kind = FL_EVENT_TEXT, .as.text.text = {text, sizeof(text)}};
    for (int i = 0; i < 600; i++) {
        client_server_send(bench.server, bench.client, &event);
    }
    turn();
    CHECK_EQ(bench.gone_count, 0); /* it gets a moment to read the reason */
    bench.now_ns += 2 * FL_NS_PER_S;
    turn();
    CHECK_EQ(bench.gone_count, 1);
    client_server_send(bench.server, bench.client, &event); /* to nobody: ignored */
    close(fd);
    expect_service();
}

/* The opener's side, to the end; returns what take() said last. */
static fl_status shake(int fd, const struct fl_pool_key *key)
{
    struct fl_handshake handshake;
    unsigned char record[FL_HANDSHAKE_RECORD_MAX];
    unsigned char answer[FL_HANDSHAKE_RECORD_MAX];
    size_t size = 0;
    fl_handshake_init(&handshake, FL_PARTY_CLIENT, true, key);
    fl_handshake_hello(&handshake, record, &size);
    put_frame(fd, record, size);
    for (;;) {
        const size_t got = get_frame(fd, record, sizeof(record));
        if (got == 0) {
            return FL_LINK_LOST;
        }
        const fl_status status = fl_handshake_take(&handshake, record, got, answer, &size);
        if (size > 0) {
            put_frame(fd, answer, size);
        }
        if (status != FL_AGAIN) {
            return status;
        }
    }
}

static void the_right_key_opens_the_door(void)
{
    open_bench(WITH_KEY);
    const int fd = dial();
    CHECK_EQ(shake(fd, &bench.key), FL_OK);
    ask_status(fd, 3);
    turn();
    CHECK_EQ(bench.request_count, 1);
    bench.now_ns += 100 * FL_NS_PER_S; /* an idle client may stay */
    turn();
    ask_status(fd, 4);
    turn();
    CHECK_EQ(bench.request_count, 2);
    close(fd);
}

static void a_wrong_or_missing_key_is_refused_in_words(void)
{
    open_bench(WITH_KEY);
    struct fl_pool_key wrong;
    fl_pool_key_make(&wrong);
    const int liar = dial();
    CHECK_EQ(shake(liar, &wrong), FL_DENIED);
    close(liar);
    const int keyless = dial();
    CHECK_EQ(shake(keyless, NULL), FL_DENIED);
    close(keyless);
    const int direct = dial();
    ask_status(direct, 1);
    expect_refusal(direct, FL_DENIED, "key");
    close(direct);
    const int large = dial();
    put_length(large, 5000); /* more than any record has */
    expect_refusal(large, FL_DENIED, "key");
    close(large);
    CHECK_EQ(bench.request_count, 0);
}

static void silence_before_the_key_is_not_waited_for(void)
{
    open_bench(WITH_KEY);
    const int fd = dial();
    turn();
    bench.now_ns += 6 * FL_NS_PER_S;
    turn();
    expect_refusal(fd, FL_DENIED, "5 s");
    close(fd);
}

static void a_client_with_a_key_is_told_when_there_is_none_here(void)
{
    open_bench(WITHOUT_KEY);
    const int fd = dial();
    CHECK_EQ(shake(fd, &bench.key), FL_DENIED);
    close(fd);
    expect_service();
}

static void other_machines_need_a_key(void)
{
    open_bench(WITHOUT_KEY);
    CHECK_EQ(client_server_listen(bench.server, "0.0.0.0:0"), FL_DENIED);
    CHECK(strstr(fl_last_error(), "keygen") != NULL);
    CHECK_EQ(client_server_listen(bench.server, client_server_address(bench.server, 0)), FL_BUSY);
    CHECK(strstr(fl_last_error(), "in use") != NULL);
    CHECK_EQ(client_server_listen(bench.server, "nonsense"), FL_INVALID);
}

static void unix_sockets_are_private_and_replace_stale_ones(void)
{
    open_bench(WITH_KEY);
    char folder[] = "/tmp/firstlight-test-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    char path[64];
    char address[80];
    snprintf(path, sizeof(path), "%s/s", folder);
    snprintf(address, sizeof(address), "unix:%s", path);
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    memcpy(name.sun_path, path, strlen(path) + 1);
    /* One that a dead coordinator left behind. */
    const int stale = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(bind(stale, (const struct sockaddr *)&name, sizeof(name)), 0);
    close(stale);
    CHECK_EQ(client_server_listen(bench.server, address), FL_OK);
    struct stat found;
    CHECK_EQ(stat(path, &found), 0);
    CHECK_EQ(found.st_mode & 0777, 0600);
    CHECK_EQ(client_server_listen(bench.server, address), FL_BUSY);
    /* No key is asked for: the file's mode says who may. */
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(fd, (const struct sockaddr *)&name, sizeof(name)), 0);
    ask_status(fd, 9);
    turn();
    CHECK_EQ(bench.request_count, 1);
    close(fd);
    client_server_close(bench.server);
    bench.server = NULL;
    CHECK(stat(path, &found) != 0);
    const int file = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    CHECK(file >= 0);
    close(file);
    open_bench(WITHOUT_KEY);
    CHECK_EQ(client_server_listen(bench.server, address), FL_INVALID);
    CHECK_EQ(stat(path, &found), 0);
    unlink(path);
    rmdir(folder);
    client_server_close(bench.server);
    bench.server = NULL;
}

static const struct test_case cases[] = {
    {"client_server: requests come in pieces and together", requests_come_in_pieces_and_together},
    {"client_server: garbage costs one connection", garbage_costs_one_connection},
    {"client_server: lengths outside the limits are refused",
     lengths_outside_the_limits_are_refused},
    {"client_server: another version is refused by name and the connection lives",
     another_version_is_refused_by_name_and_the_connection_lives},
    {"client_server: half a frame has a deadline and silence has none",
     half_a_frame_has_a_deadline_and_silence_has_none},
    {"client_server: clients beyond the limit are turned away",
     clients_beyond_the_limit_are_turned_away},
    {"client_server: a client that does not read is hung up on",
     a_client_that_does_not_read_is_hung_up_on},
    {"client_server: the right key opens the door", the_right_key_opens_the_door},
    {"client_server: a wrong or missing key is refused in words",
     a_wrong_or_missing_key_is_refused_in_words},
    {"client_server: silence before the key is not waited for",
     silence_before_the_key_is_not_waited_for},
    {"client_server: a client with a key is told when there is none here",
     a_client_with_a_key_is_told_when_there_is_none_here},
    {"client_server: other machines need a key, and a port is taken once",
     other_machines_need_a_key},
    {"client_server: unix sockets are private and replace stale ones",
     unix_sockets_are_private_and_replace_stale_ones},
};

TEST_MAIN(cases)
