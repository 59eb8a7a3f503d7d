/* test_spare_descriptor.c - a visitor is turned away although no descriptor is left. */
#include "proto/base/spare_descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/harness.h"

enum { TAKEN_MAX = 64 };

/* A listener on loopback with a visitor at the door. */
static void knock(int *out_listener, int *out_visitor)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(name);
    *out_listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    *out_visitor = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(*out_listener >= 0 && *out_visitor >= 0);
    CHECK_EQ(bind(*out_listener, (struct sockaddr *)&name, sizeof(name)), 0);
    CHECK_EQ(listen(*out_listener, 4), 0);
    CHECK_EQ(getsockname(*out_listener, (struct sockaddr *)&name, &size), 0);
    CHECK_EQ(connect(*out_visitor, (struct sockaddr *)&name, sizeof(name)), 0);
}

static void a_visitor_is_hung_up_on(void)
{
    struct rlimit former;
    int listener, visitor, taken[TAKEN_MAX];
    int taken_count = 0;
    knock(&listener, &visitor);
    int spare = fl_spare_descriptor_open();
    CHECK(spare >= 0);
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &former), 0);
    const struct rlimit low = {.rlim_cur = (rlim_t)spare + 8, .rlim_max = former.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    while (taken_count < TAKEN_MAX && (taken[taken_count] = dup(listener)) >= 0) {
        taken_count++;
    }
    const int fd = accept(listener, NULL, NULL);
    const int error = errno;
    const bool refused = fl_spare_descriptor_refuse(&spare, listener, error);
    char byte;
    const ssize_t got = read(visitor, &byte, 1);
    const int again = accept(listener, NULL, NULL);
    const bool other = fl_spare_descriptor_refuse(&spare, listener, EAGAIN);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &former), 0);
    while (taken_count > 0) {
        close(taken[--taken_count]);
    }
    close(listener);
    close(visitor);
    CHECK_EQ(fd, -1);
    CHECK_EQ(error, EMFILE);
    CHECK(refused);
    CHECK_EQ(got, 0);    /* the end, at once */
    CHECK_EQ(again, -1); /* nobody waits any more */
    CHECK(!other);
    CHECK(spare >= 0);
    fl_spare_descriptor_close(&spare);
    CHECK_EQ(spare, -1);
}

static const struct test_case cases[] = {
    {"spare_descriptor: a visitor is hung up on when none is left", a_visitor_is_hung_up_on},
};

TEST_MAIN(cases)
