/* Frames of a byte stream in any pieces, their limits, and addresses as text. */
#include "proto/wire.h"

#include <stdbool.h>
#include <stdlib.h>

#include "proto/base/log.h"
#include "proto/network_address.h"
#include "tests/harness.h"

enum { LIMIT = 1000 };

/* Feed `size` bytes in pieces of `piece`, counting frames that hold what frame_fill() made. */
static fl_status feed(struct fl_frame_reader *reader, const unsigned char *bytes, size_t size,
                      size_t piece, uint32_t *frames)
{
    const unsigned char *frame = NULL;
    size_t frame_size = 0;
    fl_status status = FL_AGAIN;
    for (size_t used = 0; used < size;) {
        unsigned char *space = NULL;
        size_t room = 0;
        FL_TRY(fl_frame_reader_space(reader, &space, &room));
        CHECK(room > 0);
        size_t count = size - used < piece ? size - used : piece;
        count = count < room ? count : room;
        memcpy(space, bytes + used, count);
        used += count;
        fl_frame_reader_filled(reader, count);
        while ((status = fl_frame_reader_next(reader, &frame, &frame_size)) == FL_OK) {
            CHECK_EQ(frame_size, *frames * 37 % LIMIT);
            for (size_t i = 0; i < frame_size; i++) {
                CHECK_EQ(frame[i], (unsigned char)(*frames + i));
            }
            (*frames)++;
        }
        if (status != FL_AGAIN) {
            return status;
        }
    }
    return status;
}

static size_t fill(unsigned char *out, uint32_t frames)
{
    size_t used = 0;
    for (uint32_t k = 0; k < frames; k++) {
        const uint32_t size = k * 37 % LIMIT;
        fl_frame_header_put(out + used, size);
        for (uint32_t i = 0; i < size; i++) {
            out[used + FL_FRAME_HEADER_SIZE + i] = (unsigned char)(k + i);
        }
        used += FL_FRAME_HEADER_SIZE + size;
    }
    return used;
}

static void test_pieces(void)
{
    static unsigned char bytes[200 * (LIMIT + FL_FRAME_HEADER_SIZE)];
    static const size_t pieces[] = {1, 3, 4, 5, 64, 999, 100000};
    const size_t size = fill(bytes, 200);
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        struct fl_frame_reader reader;
        uint32_t frames = 0;
        fl_frame_reader_init(&reader, LIMIT);
        CHECK_EQ(feed(&reader, bytes, size, pieces[i], &frames), FL_AGAIN);
        CHECK_EQ(frames, 200);
        CHECK(reader.size <= LIMIT + FL_FRAME_HEADER_SIZE);
        fl_frame_reader_free(&reader);
    }
}

static void test_limit(void)
{
    struct fl_frame_reader reader;
    unsigned char *space = NULL;
    const unsigned char *frame = NULL;
    size_t size = 0;
    for (uint32_t over = 0; over <= 1; over++) {
        fl_frame_reader_init(&reader, LIMIT);
        CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), FL_OK);
        fl_frame_header_put(space, LIMIT + over);
        fl_frame_reader_filled(&reader, FL_FRAME_HEADER_SIZE);
        CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), over ? FL_PROTOCOL : FL_AGAIN);
        CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), over ? FL_PROTOCOL : FL_OK);
        CHECK(!over || strstr(fl_last_error(), "1001 bytes is over the limit of 1000") != NULL);
        fl_frame_reader_free(&reader);
    }
    fl_frame_reader_init(&reader, LIMIT);
    CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), FL_OK);
    fl_frame_header_put(space, UINT32_MAX);
    fl_frame_reader_filled(&reader, FL_FRAME_HEADER_SIZE);
    CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), FL_PROTOCOL);
    fl_frame_reader_free(&reader);
}

/* A length alone reserves no memory; a large frame's memory is given back. */
static void test_memory(void)
{
    struct fl_frame_reader reader;
    unsigned char *space = NULL;
    const unsigned char *frame = NULL;
    size_t size = 0;
    fl_frame_reader_init(&reader, FL_FRAME_MAX);
    CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), FL_OK);
    fl_frame_header_put(space, FL_FRAME_MAX);
    fl_frame_reader_filled(&reader, FL_FRAME_HEADER_SIZE);
    CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), FL_AGAIN);
    CHECK(reader.size < 100000);
    size_t fed = 0;
    while (fed < FL_FRAME_MAX) {
        CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), FL_OK);
        const size_t count = size < FL_FRAME_MAX - fed ? size : FL_FRAME_MAX - fed;
        memset(space, 7, count);
        fl_frame_reader_filled(&reader, count);
        fed += count;
        CHECK(reader.size <= FL_FRAME_MAX + FL_FRAME_HEADER_SIZE);
    }
    CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), FL_OK);
    CHECK_EQ(size, FL_FRAME_MAX);
    CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), FL_OK);
    CHECK(reader.size < 100000);
    fl_frame_reader_free(&reader);
    fl_frame_reader_free(&reader);
}

/* A stranger's frames are short until it has shaken hands; what came too early counts as well. */
static void test_limit_that_changes(void)
{
    static unsigned char bytes[LIMIT + 2 * FL_FRAME_HEADER_SIZE];
    struct fl_frame_reader reader;
    unsigned char *space = NULL;
    const unsigned char *frame = NULL;
    size_t size = 0;
    fl_frame_reader_init(&reader, 100);
    CHECK(!fl_frame_reader_partial(&reader));
    CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), FL_OK);
    fl_frame_header_put(space, 8);
    fl_frame_reader_filled(&reader, 2);
    CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), FL_AGAIN);
    CHECK(fl_frame_reader_partial(&reader));
    CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), FL_OK);
    fl_frame_header_put(bytes, 8);
    fl_frame_header_put(bytes + 12, 500);
    memcpy(space, bytes + 2, 40);
    fl_frame_reader_filled(&reader, 40);
    CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), FL_OK);
    CHECK_EQ(size, 8);
    CHECK(fl_frame_reader_partial(&reader));
    fl_frame_reader_limit(&reader, LIMIT);
    CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), FL_AGAIN);
    CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), FL_OK);
    CHECK(size >= 500 - 26);
    fl_frame_reader_filled(&reader, 500 - 26);
    fl_frame_reader_limit(&reader, 499);
    CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), FL_PROTOCOL);
    CHECK_EQ(fl_frame_reader_space(&reader, &space, &size), FL_PROTOCOL);
    fl_frame_reader_limit(&reader, 500);
    CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), FL_OK);
    CHECK_EQ(fl_frame_reader_next(&reader, &frame, &size), FL_AGAIN);
    CHECK(!fl_frame_reader_partial(&reader));
    fl_frame_reader_free(&reader);
}

static void test_writer(void)
{
    struct fl_frame_writer writer;
    struct fl_frame_reader reader;
    uint32_t frames = 0;
    unsigned char *room = NULL;
    const unsigned char *bytes = NULL;
    size_t size = 0;
    fl_frame_writer_init(&writer, 5000);
    fl_frame_reader_init(&reader, LIMIT);
    fl_frame_writer_bytes(&writer, &bytes, &size);
    CHECK_EQ(size, 0);
    for (uint32_t k = 0; k < 300;) {
        const uint32_t frame = k * 37 % LIMIT;
        const fl_status status = fl_frame_writer_put(&writer, frame, &room);
        if (status == FL_OK) {
            for (uint32_t i = 0; i < frame; i++) {
                room[i] = (unsigned char)(k + i);
            }
            k++;
            continue;
        }
        CHECK_EQ(status, FL_BUSY);
        fl_frame_writer_bytes(&writer, &bytes, &size); /* the socket takes a part */
        size = size / 3 + 1;
        CHECK_EQ(feed(&reader, bytes, size, 100000, &frames), FL_AGAIN);
        fl_frame_writer_sent(&writer, size);
    }
    fl_frame_writer_bytes(&writer, &bytes, &size);
    CHECK_EQ(feed(&reader, bytes, size, 100000, &frames), FL_AGAIN);
    fl_frame_writer_sent(&writer, size);
    CHECK_EQ(frames, 300);
    fl_frame_writer_bytes(&writer, &bytes, &size);
    CHECK_EQ(size, 0);
    CHECK_EQ(fl_frame_writer_put(&writer, 5000 - 4, &room), FL_OK);
    CHECK_EQ(fl_frame_writer_put(&writer, 0, &room), FL_BUSY);
    CHECK_EQ(fl_frame_writer_put(&writer, SIZE_MAX, &room), FL_BUSY);
    fl_frame_writer_free(&writer);
    fl_frame_reader_free(&reader);
}

static bool is_address(const char *text)
{
    struct fl_network_address address;
    return fl_network_address_value(text, strlen(text), &address);
}

static void test_addresses(void)
{
    struct fl_network_address address;
    CHECK_EQ(fl_network_address_parse("[::1]:7411", 10, &address), FL_OK);
    CHECK(strcmp(address.host, "::1") == 0 && address.port == 7411 && !address.is_unix);
    CHECK_EQ(fl_network_address_parse("box1.local:0xyz", 12, &address), FL_OK); /* not past size */
    CHECK(strcmp(address.host, "box1.local") == 0 && address.port == 0);
    CHECK_EQ(fl_network_address_parse("unix:/run/fl.sock", 17, &address), FL_OK);
    CHECK(address.is_unix && strcmp(address.path, "/run/fl.sock") == 0);
    CHECK(is_address("a:65535") && is_address("0.0.0.0:1"));
    static const char *const bad[] = {
        "",        ":",       ":7411", "host", "host:", "host:65536", "host:-1",
        "host: 1", "ho st:1", "::1:1", "[]:1", "unix:", "host:1a",    "host:000001"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK(!is_address(bad[i]));
    }
    CHECK_EQ(fl_network_address_parse("bad\nline", 8, &address), FL_INVALID);
    CHECK(strchr(fl_last_error(), '\n') == NULL);
    char large[400];
    memset(large, 'h', sizeof(large));
    memcpy(large + sizeof(large) - 3, ":1", 3);
    CHECK(!is_address(large));
    memcpy(large, "unix:/", 6);
    CHECK(!is_address(large));
}

static bool is_loopback(const char *text)
{
    bool loopback = false;
    CHECK_EQ(fl_network_text_is_loopback(text, &loopback), FL_OK);
    return loopback;
}

static void test_resolve(void)
{
    struct fl_network_address address;
    struct fl_network_socket sockets[FL_NETWORK_RESOLVED_MAX];
    char text[FL_NETWORK_TEXT_MAX];
    size_t count = 0;
    CHECK_EQ(fl_network_address_parse("localhost:7411", 14, &address), FL_OK);
    CHECK_EQ(fl_network_address_resolve(&address, sockets, FL_NETWORK_RESOLVED_MAX, &count), FL_OK);
    fl_network_socket_text(&sockets[0], text);
    CHECK_EQ(strcmp(text, "127.0.0.1:7411"), 0); /* IPv4 first */
    CHECK(fl_network_socket_is_loopback(&sockets[0]));
    CHECK(is_loopback("127.0.0.5:1"));
    CHECK(is_loopback("[::1]:1"));
    CHECK(is_loopback("unix:/x"));
    CHECK(!is_loopback("0.0.0.0:1"));
    CHECK(!is_loopback("[::]:1"));
    CHECK(!is_loopback("192.0.2.1:1"));
    bool loopback;
    CHECK_EQ(fl_network_text_is_loopback("nonsense", &loopback), FL_INVALID);
    CHECK_EQ(fl_network_source_toward("127.0.0.1:7411", text), FL_OK);
    CHECK_EQ(strcmp(text, "127.0.0.1"), 0);
    CHECK_EQ(fl_network_source_toward("unix:/x", text), FL_INVALID);
    CHECK_EQ(fl_network_advertise("0.0.0.0:7413", "127.0.0.1:7411", text), FL_OK);
    CHECK_EQ(strcmp(text, "127.0.0.1:7413"), 0);
    CHECK_EQ(fl_network_advertise("192.0.2.1:7413", "127.0.0.1:7411", text), FL_OK);
    CHECK_EQ(strcmp(text, "192.0.2.1:7413"), 0);
}

static const struct test_case cases[] = {
    {"wire: frames arrive whole whatever the pieces", test_pieces},
    {"wire: a frame over the limit is refused before it is held", test_limit},
    {"wire: a length reserves nothing, and large buffers are given back", test_memory},
    {"wire: the limit may change between frames", test_limit_that_changes},
    {"wire: the writer holds frames back within its limit", test_writer},
    {"network_address: texts are taken or refused", test_addresses},
    {"network_address: names resolve to IPv4 first, loopback is known", test_resolve},
};

int main(int argc, char **argv)
{
    fl_log_init("", FL_LOG_ERROR);
    return test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
