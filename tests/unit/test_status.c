/* Failures are logged once, at the level the thread asked for; a log line is one line. */
#include "proto/base/status.h"

#include <string.h>
#include <unistd.h>

#include "tests/harness.h"

/* What fl_log() wrote to stderr while `run` ran. */
static void captured(void (*run)(void), char *out, size_t size)
{
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    const int before = dup(STDERR_FILENO);
    CHECK(before >= 0 && dup2(ends[1], STDERR_FILENO) >= 0);
    fl_log_init("", FL_LOG_INFO);
    run();
    fl_log_init("", FL_LOG_WARN);
    CHECK(dup2(before, STDERR_FILENO) >= 0);
    close(before);
    close(ends[1]);
    const ssize_t got = read(ends[0], out, size - 1);
    CHECK(got >= 0);
    out[got] = '\0';
    close(ends[0]);
}

static void fail_once(void)
{
    CHECK_EQ(FL_FAIL(FL_NOT_FOUND, "no model '%s'", "x"), FL_NOT_FOUND);
}

static void fail_inside_this_process(void)
{
    CHECK_EQ(FL_FAIL(FL_INTERNAL, "broken"), FL_INTERNAL);
}

static void quote_bytes(void)
{
    CHECK_EQ(FL_FAIL(FL_MALFORMED, "key '%s' is cut \xe2\x82\xac%.1s", "a\xff\xc0\xc3\xa9\x1b[m",
                     "\xc3\xa9"),
             FL_MALFORMED);
}

static void say_two_lines(void)
{
    fl_log(FL_LOG_INFO, "%s", "one\r\nerror: two\x1b[2J");
}

static void a_failure_is_an_error_unless_the_thread_asked_otherwise(void)
{
    char text[256];
    captured(fail_once, text, sizeof(text));
    CHECK(strcmp(text, "error: no model 'x'\n") == 0);

    CHECK_EQ(fl_fail_log_at(FL_LOG_DEBUG), FL_LOG_ERROR);
    captured(fail_once, text, sizeof(text));
    CHECK(strcmp(text, "") == 0);
    CHECK(strcmp(fl_last_error(), "no model 'x'") == 0);
    captured(fail_inside_this_process, text, sizeof(text));
    CHECK(strcmp(text, "error: broken\n") == 0);
    CHECK_EQ(fl_fail_log_at(FL_LOG_ERROR), FL_LOG_DEBUG);
}

static void a_log_line_is_one_line_whatever_it_quotes(void)
{
    char text[256];
    captured(say_two_lines, text, sizeof(text));
    CHECK(strcmp(text, "info: one??error: two?[2J\n") == 0);
}

static void an_error_is_utf8_whatever_it_quotes(void)
{
    char text[256];
    captured(quote_bytes, text, sizeof(text));
    CHECK(strcmp(text, "error: key 'a??\xc3\xa9?[m' is cut \xe2\x82\xac?\n") == 0);
    CHECK(strcmp(fl_last_error(), "key 'a??\xc3\xa9?[m' is cut \xe2\x82\xac?") == 0);
}

static const struct test_case cases[] = {
    {"status: a failure is an error unless the thread asked otherwise",
     a_failure_is_an_error_unless_the_thread_asked_otherwise},
    {"log: a line is one line whatever it quotes", a_log_line_is_one_line_whatever_it_quotes},
    {"status: an error is UTF-8, whatever it quotes", an_error_is_utf8_whatever_it_quotes},
};

TEST_MAIN(cases)
