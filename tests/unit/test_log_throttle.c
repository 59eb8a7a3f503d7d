/* Lines that strangers cause: the first is said, the rest counted. */
#include "proto/base/log_throttle.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "tests/harness.h"

/* What one poll() writes to stderr. */
static uint64_t poll_into(struct fl_log_throttle *throttle, uint64_t now_ns, char *text,
                          size_t size)
{
    int ends[2];
    const int before = dup(STDERR_FILENO);
    CHECK(before >= 0 && pipe(ends) == 0);
    CHECK(dup2(ends[1], STDERR_FILENO) >= 0);
    close(ends[1]);
    const uint64_t next_ns = fl_log_throttle_poll(throttle, now_ns, FL_LOG_WARN, "knocks");
    CHECK(dup2(before, STDERR_FILENO) >= 0); /* the writing end is closed with it */
    close(before);
    const ssize_t got = read(ends[0], text, size - 1);
    close(ends[0]);
    text[got > 0 ? got : 0] = '\0';
    return next_ns;
}

static void test_flood(void)
{
    struct fl_log_throttle throttle = {0};
    char text[256];
    uint64_t now = 5;
    CHECK(fl_log_throttle_pass(&throttle, now));
    CHECK_EQ(poll_into(&throttle, now, text, sizeof(text)), UINT64_MAX);
    for (int i = 0; i < 700; i++) {
        CHECK(!fl_log_throttle_pass(&throttle, now += 10 * FL_NS_PER_MS));
    }
    const uint64_t due = poll_into(&throttle, now, text, sizeof(text));
    CHECK_EQ(due, 5 + 10 * FL_NS_PER_S);
    CHECK(strcmp(text, "") == 0);
    CHECK(!fl_log_throttle_pass(&throttle, due + 1)); /* the count comes first */
    CHECK_EQ(poll_into(&throttle, due + 1, text, sizeof(text)), UINT64_MAX);
    CHECK(strstr(text, "knocks: 701 more in 10 s\n") != NULL);
    /* It goes on: no line but the next count. */
    CHECK(!fl_log_throttle_pass(&throttle, due + 2));
    CHECK_EQ(poll_into(&throttle, due + 2, text, sizeof(text)), due + 1 + 10 * FL_NS_PER_S);
    CHECK_EQ(poll_into(&throttle, due + 1 + 10 * FL_NS_PER_S, text, sizeof(text)), UINT64_MAX);
    CHECK(strstr(text, "knocks: 1 more") != NULL);
}

static void test_seldom(void)
{
    struct fl_log_throttle throttle = {0};
    char text[256];
    for (uint64_t now = 0; now < 100 * FL_NS_PER_S; now += 11 * FL_NS_PER_S) {
        CHECK(fl_log_throttle_pass(&throttle, now));
        CHECK_EQ(poll_into(&throttle, now, text, sizeof(text)), UINT64_MAX);
        CHECK(strcmp(text, "") == 0);
    }
}

static const struct test_case cases[] = {
    {"log_throttle: of a flood the first line is said and the rest counted", test_flood},
    {"log_throttle: lines that are seldom are all said", test_seldom},
};

TEST_MAIN(cases)
