/* Client library against a scripted coordinator in a child process: streams, errors, handshakes,
 * and servers that misbehave. */
#include "proto/client/client.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/handshake.h"
#include "tests/harness.h"

enum { LENGTH = 4, ROOM = 1 << 16, PATIENCE_MS = 20000 };

/* What the child does with the one connection it accepts. */
typedef void (*script_fn)(int fd);

static pid_t server = -1;
static char server_address[128];
static struct fl_client *client;

/* ---- the scripted coordinator; runs in the child ---- */

static void put(int fd, const void *data, size_t size)
{
    const char *bytes = data;
    while (size > 0) {
        const ssize_t sent = send(fd, bytes, size, MSG_NOSIGNAL);
        if (sent <= 0) {
            _exit(3);
        }
        bytes += sent;
        size -= (size_t)sent;
    }
}

static bool get(int fd, void *data, size_t size)
{
    return size == 0 || recv(fd, data, size, MSG_WAITALL) == (ssize_t)size;
}

static void put_frame(int fd, const void *data, size_t size)
{
    unsigned char length[LENGTH];
    for (int i = 0; i < LENGTH; i++) {
        length[i] = (unsigned char)(size >> (8 * i));
    }
    put(fd, length, sizeof(length));
    put(fd, data, size);
}

static size_t get_frame(int fd, unsigned char *out)
{
    unsigned char length[LENGTH];
    if (!get(fd, length, sizeof(length))) {
        _exit(4);
    }
    const size_t size = (size_t)length[0] | (size_t)length[1] << 8 | (size_t)length[2] << 16;
    if (size > ROOM || !get(fd, out, size)) {
        _exit(4);
    }
    return size;
}

static struct fl_client_request get_request(int fd)
{
    static unsigned char data[ROOM];
    static unsigned char memory[1 << 20];
    struct fl_client_request request;
    struct fl_arena arena;
    const size_t size = get_frame(fd, data);
    fl_arena_init(&arena, memory, sizeof(memory));
    if (fl_client_request_unpack(data, size, &arena, &request) != FL_OK) {
        _exit(5);
    }
    return request;
}

static size_t packed_event(const struct fl_client_event *event, unsigned char *out)
{
    static unsigned char memory[1 << 20];
    struct fl_arena scratch;
    size_t size = 0;
    fl_arena_init(&scratch, memory, sizeof(memory));
    if (fl_client_event_pack(event, &scratch, out, ROOM, &size) != FL_OK) {
        _exit(6);
    }
    return size;
}

static void put_event(int fd, const struct fl_client_event *event)
{
    unsigned char data[ROOM];
    put_frame(fd, data, packed_event(event, data));
}

static struct fl_client_event text_event(uint64_t id, const char *text)
{
    struct fl_client_event event = {.id = id, .kind = FL_EVENT_TEXT};
    event.as.text.text = (struct fl_text){.data = text, .size = strlen(text)};
    return event;
}

static struct fl_client_event done_event(uint64_t id, enum fl_finish finish)
{
    struct fl_client_event event = {.id = id, .kind = FL_EVENT_DONE};
    event.as.done.finish = finish;
    event.as.done.class_ = FL_CLASS_WARM;
    return event;
}

/* ---- both sides ---- */

static int listen_on_loopback(void)
{
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(address);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, size) == 0 && listen(fd, 1) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&address, &size) == 0);
    snprintf(server_address, sizeof(server_address), "127.0.0.1:%d", ntohs(address.sin_port));
    return fd;
}

static void serve(int listener, script_fn script)
{
    fflush(stdout);
    server = fork();
    CHECK(server >= 0);
    if (server == 0) {
        alarm(30); /* a child never outlives a test that went wrong by much */
        const int fd = accept(listener, NULL, NULL);
        if (fd >= 0) {
            script(fd);
        }
        _exit(0);
    }
    close(listener);
}

static fl_status connect_to_server(const char *key_file)
{
    const struct fl_client_config config = {
        .address = server_address,
        .key_file = key_file != NULL ? key_file : "",
        .connect_ms = 5000,
    };
    client = NULL;
    return fl_client_open(&config, &client);
}

static void start(script_fn script)
{
    serve(listen_on_loopback(), script);
    CHECK_EQ(connect_to_server(NULL), FL_OK);
}

/* Close, and see how the child ended. */
static int stop(void)
{
    int status = 0;
    fl_client_close(client);
    client = NULL;
    waitpid(server, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static struct fl_client_request generate_request(void)
{
    struct fl_client_request request = {.kind = FL_REQUEST_GENERATE};
    request.as.generate.model = "m";
    request.as.generate.prompt = (struct fl_text){.data = "hi", .size = 2};
    return request;
}

static uint64_t ask(void)
{
    const struct fl_client_request request = generate_request();
    uint64_t id = 0;
    CHECK_EQ(fl_client_send(client, &request, &id), FL_OK);
    return id;
}

/* ---- streams ---- */

static void script_stream(int fd)
{
    const struct fl_client_request request = get_request(fd);
    struct fl_client_event event = text_event(request.id, "Hello ");
    put_event(fd, &event);
    event = text_event(request.id, "world");
    put_event(fd, &event);
    event = done_event(request.id, FL_FINISH_STOP);
    put_event(fd, &event);
    unsigned char byte;
    (void)!recv(fd, &byte, 1, 0); /* until the client closes */
}

static void check_stream(void)
{
    const uint64_t id = ask();
    struct fl_client_event event;
    char text[64] = "";
    do {
        CHECK_EQ(fl_client_next(client, PATIENCE_MS, &event), FL_OK);
        CHECK_EQ(event.id, id);
        if (event.kind == FL_EVENT_TEXT) {
            strncat(text, event.as.text.text.data, event.as.text.text.size);
        }
    } while (event.kind != FL_EVENT_DONE);
    CHECK(strcmp(text, "Hello world") == 0);
    CHECK_EQ(event.as.done.finish, FL_FINISH_STOP);
    CHECK_EQ(fl_client_next(client, 0, &event), FL_AGAIN);
    CHECK_EQ(stop(), 0);
}

static void test_stream(void)
{
    start(script_stream);
    check_stream();
}

/* The same bytes, one at a time. */
static void script_drip(int fd)
{
    const struct fl_client_request request = get_request(fd);
    const struct fl_client_event events[] = {text_event(request.id, "Hello "),
                                             text_event(request.id, "world"),
                                             done_event(request.id, FL_FINISH_STOP)};
    for (size_t i = 0; i < 3; i++) {
        unsigned char data[ROOM];
        const size_t size = packed_event(&events[i], data + LENGTH);
        const unsigned char length[LENGTH] = {(unsigned char)size, 0, 0, 0};
        memcpy(data, length, LENGTH);
        for (size_t k = 0; k < LENGTH + size; k++) {
            put(fd, data + k, 1);
            usleep(300);
        }
    }
    unsigned char byte;
    (void)!recv(fd, &byte, 1, 0);
}

static void test_drip(void)
{
    start(script_drip);
    check_stream();
}

/* Events beyond the first buffer, as one flood. */
static void script_flood(int fd)
{
    const struct fl_client_request request = get_request(fd);
    static char large[60000];
    memset(large, 'x', sizeof(large) - 1);
    for (int i = 0; i < 40; i++) {
        const struct fl_client_event event = text_event(request.id, large);
        put_event(fd, &event);
    }
    const struct fl_client_event event = done_event(request.id, FL_FINISH_LENGTH);
    put_event(fd, &event);
}

static void test_flood(void)
{
    start(script_flood);
    (void)ask();
    struct fl_client_event event;
    size_t size = 0;
    for (;;) {
        CHECK_EQ(fl_client_next(client, PATIENCE_MS, &event), FL_OK);
        if (event.kind == FL_EVENT_DONE) {
            break;
        }
        size += event.as.text.text.size;
    }
    CHECK_EQ(size, 40 * 59999);
    CHECK_EQ(stop(), 0);
}

static void script_two(int fd)
{
    const struct fl_client_request first = get_request(fd);
    const struct fl_client_request second = get_request(fd);
    const struct fl_client_request cancel = get_request(fd);
    if (first.id == second.id || cancel.kind != FL_REQUEST_CANCEL ||
        cancel.as.cancel.id != first.id) {
        _exit(7);
    }
    struct fl_client_event event = done_event(second.id, FL_FINISH_STOP);
    put_event(fd, &event);
    event = done_event(first.id, FL_FINISH_CANCELLED);
    put_event(fd, &event);
    unsigned char byte;
    (void)!recv(fd, &byte, 1, 0);
}

static void test_two(void)
{
    start(script_two);
    const uint64_t first = ask();
    const uint64_t second = ask();
    CHECK_EQ(fl_client_cancel(client, first), FL_OK);
    struct fl_client_event event;
    CHECK_EQ(fl_client_next(client, PATIENCE_MS, &event), FL_OK);
    CHECK_EQ(event.id, second);
    CHECK_EQ(fl_client_next(client, PATIENCE_MS, &event), FL_OK);
    CHECK_EQ(event.id, first);
    CHECK_EQ(event.as.done.finish, FL_FINISH_CANCELLED);
    CHECK_EQ(stop(), 0);
}

static void script_error(int fd)
{
    const struct fl_client_request request = get_request(fd);
    struct fl_client_event event = {.id = request.id, .kind = FL_EVENT_ERROR};
    event.as.error.code = FL_NOT_FOUND;
    event.as.error.text = "there is no model m";
    event.as.error.retry_ms = 1500;
    put_event(fd, &event);
}

static void test_error(void)
{
    start(script_error);
    (void)ask();
    struct fl_client_event event;
    CHECK_EQ(fl_client_next(client, PATIENCE_MS, &event), FL_OK);
    CHECK_EQ(event.kind, FL_EVENT_ERROR);
    CHECK_EQ(event.as.error.code, FL_NOT_FOUND);
    CHECK_EQ(event.as.error.retry_ms, 1500);
    CHECK_EQ(stop(), 0);
}

/* ---- servers that misbehave ---- */

/* The next event fails so, with a sentence that holds `word`, and so does everything after. */
static void next_fails(fl_status want, const char *word)
{
    struct fl_client_event event;
    CHECK_EQ(fl_client_next(client, PATIENCE_MS, &event), want);
    if (strstr(fl_last_error(), word) == NULL) {
        printf("  \"%s\" does not hold \"%s\"\n", fl_last_error(), word);
        CHECK(false);
    }
    const struct fl_client_request request = generate_request();
    CHECK_EQ(fl_client_next(client, 0, &event), want); /* and it stays so */
    CHECK_EQ(fl_client_send(client, &request, NULL), want);
    (void)stop();
}

static void script_close_mid_frame(int fd)
{
    (void)get_request(fd);
    put(fd, "\x40\x00\x00\x00half", 8);
}

static void test_close_mid_frame(void)
{
    start(script_close_mid_frame);
    (void)ask();
    next_fails(FL_LINK_LOST, "in the middle of a message");
}

static void script_close(int fd)
{
    (void)get_request(fd);
}

static void test_close(void)
{
    start(script_close);
    (void)ask();
    next_fails(FL_LINK_LOST, "closed the connection");
}

static void script_http(int fd)
{
    (void)get_request(fd);
    const char *answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
    put(fd, answer, strlen(answer));
}

static void test_http(void)
{
    start(script_http);
    (void)ask();
    next_fails(FL_PROTOCOL, "a web server");
}

static void script_garbage(int fd)
{
    (void)get_request(fd);
    put_frame(fd, "\xff\xff\xff\xff\xff\xff", 6);
}

static void test_garbage(void)
{
    start(script_garbage);
    (void)ask();
    next_fails(FL_PROTOCOL, "not a message");
}

static void script_too_long(int fd)
{
    (void)get_request(fd);
    put(fd, "\x01\x00\x80\x00", 4); /* one byte over 8 MiB */
}

static void test_too_long(void)
{
    start(script_too_long);
    (void)ask();
    next_fails(FL_PROTOCOL, "8388609");
}

static void script_empty_frame(int fd)
{
    (void)get_request(fd);
    put(fd, "\0\0\0\0", 4);
}

static void test_empty_frame(void)
{
    start(script_empty_frame);
    (void)ask();
    next_fails(FL_PROTOCOL, "empty");
}

static void script_silent(int fd)
{
    (void)get_request(fd);
    put(fd, "\x05\x00", 2); /* half a length, then nothing */
    unsigned char byte;
    (void)!recv(fd, &byte, 1, 0);
}

static void test_silent(void)
{
    start(script_silent);
    (void)ask();
    struct fl_client_event event;
    CHECK_EQ(fl_client_next(client, 30, &event), FL_AGAIN);
    CHECK_EQ(fl_client_next(client, 0, &event), FL_AGAIN);
    CHECK_EQ(stop(), 0);
}

static void script_wait(int fd)
{
    unsigned char byte;
    (void)!recv(fd, &byte, 1, 0);
}

static void test_too_large(void)
{
    start(script_wait);
    struct fl_client_request request = generate_request();
    char *prompt = malloc(FL_CLIENT_MESSAGE_MAX + 1);
    memset(prompt, 'x', FL_CLIENT_MESSAGE_MAX + 1);
    request.as.generate.prompt.data = prompt;
    request.as.generate.prompt.size = FL_CLIENT_MESSAGE_MAX + 1;
    const fl_status status = fl_client_send(client, &request, NULL);
    free(prompt);
    CHECK_EQ(status, FL_TOO_LARGE);
    const struct fl_client_request small = generate_request();
    CHECK_EQ(fl_client_send(client, &small, NULL), FL_OK); /* nothing was sent in between */
    (void)stop();
}

/* ---- connecting ---- */

static void test_refused(void)
{
    close(listen_on_loopback()); /* a port nobody listens on */
    CHECK_EQ(connect_to_server(NULL), FL_LINK_LOST);
    CHECK(strstr(fl_last_error(), "firstlight-coordinator") != NULL);
    snprintf(server_address, sizeof(server_address), "unix:/nonexistent/socket");
    CHECK_EQ(connect_to_server(NULL), FL_LINK_LOST);
    static const char *const bad[] = {"nonsense", "host:99999", "[::1", ":", "unix:"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        snprintf(server_address, sizeof(server_address), "%s", bad[i]);
        CHECK_EQ(connect_to_server(NULL), FL_INVALID);
    }
}

static void test_unix(void)
{
    char folder[] = "/tmp/fl_client_XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/socket", folder);
    const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    const bool listening = listener >= 0 &&
                           bind(listener, (struct sockaddr *)&address, sizeof(address)) == 0 &&
                           listen(listener, 1) == 0;
    snprintf(server_address, sizeof(server_address), "unix:%s", address.sun_path);
    if (listening) {
        serve(listener, script_stream);
    }
    const fl_status status = listening ? connect_to_server(NULL) : FL_INTERNAL;
    unlink(address.sun_path);
    rmdir(folder);
    CHECK_EQ(status, FL_OK);
    check_stream();
}

/* localhost may name ::1 first, where nobody listens. */
static void test_every_address(void)
{
    serve(listen_on_loopback(), script_stream);
    char by_name[64];
    snprintf(by_name, sizeof(by_name), "localhost%s", strchr(server_address, ':'));
    snprintf(server_address, sizeof(server_address), "%s", by_name);
    CHECK_EQ(connect_to_server(NULL), FL_OK);
    check_stream();
}

static void test_environment(void)
{
    serve(listen_on_loopback(), script_stream);
    setenv("FIRSTLIGHT_ADDR", server_address, 1);
    unsetenv("FIRSTLIGHT_KEY_FILE");
    const fl_status status = fl_client_open(NULL, &client);
    unsetenv("FIRSTLIGHT_ADDR");
    CHECK_EQ(status, FL_OK);
    check_stream();
}

/* ---- pool key ---- */

static struct fl_pool_key pool_key;

static void answer_handshake(int fd, const struct fl_pool_key *key)
{
    struct fl_handshake handshake;
    unsigned char data[ROOM];
    unsigned char answer[FL_HANDSHAKE_RECORD_MAX];
    fl_handshake_init(&handshake, FL_PARTY_COORDINATOR, false, key);
    fl_status status;
    do {
        const size_t size = get_frame(fd, data);
        size_t answer_size = 0;
        status = fl_handshake_take(&handshake, data, size, answer, &answer_size);
        if (answer_size > 0) {
            put_frame(fd, answer, answer_size);
        }
    } while (status == FL_AGAIN);
    if (status != FL_OK) {
        _exit(8);
    }
}

static void script_with_key(int fd)
{
    answer_handshake(fd, &pool_key);
    script_stream(fd);
}

static void script_without_key(int fd)
{
    answer_handshake(fd, NULL);
    script_stream(fd);
}

static void script_other_key(int fd)
{
    struct fl_pool_key other;
    fl_pool_key_make(&other);
    answer_handshake(fd, &other);
}

/* A coordinator with a key that gets a request first. */
static void script_refuse(int fd)
{
    struct fl_handshake handshake;
    unsigned char data[ROOM];
    unsigned char answer[FL_HANDSHAKE_RECORD_MAX];
    size_t answer_size = 0;
    fl_handshake_init(&handshake, FL_PARTY_COORDINATOR, false, &pool_key);
    const size_t size = get_frame(fd, data);
    (void)!fl_handshake_take(&handshake, data, size, answer, &answer_size);
    put_frame(fd, answer, answer_size);
}

static fl_status connect_with_key(script_fn script)
{
    char path[] = "/tmp/fl_key_XXXXXX";
    char text[FL_KEY_TEXT_SIZE];
    fl_pool_key_make(&pool_key);
    fl_pool_key_text(&pool_key, text);
    serve(listen_on_loopback(), script);
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    const bool written = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    const fl_status status = written ? connect_to_server(path) : FL_INTERNAL;
    unlink(path);
    return status;
}

static void test_key(void)
{
    CHECK_EQ(connect_with_key(script_with_key), FL_OK);
    check_stream();
}

static void test_wrong_key(void)
{
    CHECK_EQ(connect_with_key(script_other_key), FL_DENIED);
    CHECK_EQ(stop(), 8);
    CHECK_EQ(connect_with_key(script_without_key), FL_DENIED);
    CHECK_EQ(stop(), 8);
    /* The key file itself. */
    CHECK_EQ(connect_to_server("/nonexistent/key"), FL_NOT_FOUND);
}

static void test_missing_key(void)
{
    fl_pool_key_make(&pool_key);
    start(script_refuse);
    (void)ask();
    next_fails(FL_DENIED, "--key-file");
}

static void test_no_handshake(void)
{
    CHECK_EQ(connect_with_key(script_close_mid_frame), FL_LINK_LOST);
    (void)stop();
}

static const struct test_case cases[] = {
    {"client: a stream arrives in order and ends with done", test_stream},
    {"client: a stream that drips byte by byte is the same stream", test_drip},
    {"client: a flood of large events arrives whole", test_flood},
    {"client: two requests share a connection, one is cancelled", test_two},
    {"client: an error event carries code, sentence and retry time", test_error},
    {"client: a connection closed inside a message is lost", test_close_mid_frame},
    {"client: a connection closed between messages is lost", test_close},
    {"client: a web server is told from a coordinator", test_http},
    {"client: garbage in a frame is a protocol error", test_garbage},
    {"client: a frame over the limit is refused before it is read", test_too_long},
    {"client: an empty frame is refused", test_empty_frame},
    {"client: silence ends at the deadline", test_silent},
    {"client: a request over the limit is refused, the next one works", test_too_large},
    {"client: nobody there is said with what to do about it", test_refused},
    {"client: unix sockets work", test_unix},
    {"client: every address of a name is tried", test_every_address},
    {"client: FIRSTLIGHT_ADDR says where", test_environment},
    {"client: the same key on both sides opens the door", test_key},
    {"client: another key, or none over there, is denied", test_wrong_key},
    {"client: coming without a key to a pool that has one is refused", test_missing_key},
    {"client: a server that does not shake hands is given up", test_no_handshake},
};

TEST_MAIN(cases)
