#include "proto/base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/utf8.h"

static const char *log_program = "";
static enum fl_log_level log_level = FL_LOG_WARN;

static const char *const level_names[] = {"error", "warn", "info", "debug", "trace"};

void fl_log_init(const char *program, enum fl_log_level level)
{
    log_program = program;
    log_level = level;
}

bool fl_log_level_named(const char *name, enum fl_log_level *out)
{
    for (int level = FL_LOG_ERROR; level <= FL_LOG_TRACE; level++) {
        if (strcmp(name, level_names[level]) == 0) {
            *out = (enum fl_log_level)level;
            return true;
        }
    }
    return false;
}

enum fl_log_level fl_log_level_from_env(enum fl_log_level fallback)
{
    const char *wanted = getenv("FIRSTLIGHT_LOG");
    enum fl_log_level level = fallback;
    return wanted != NULL && fl_log_level_named(wanted, &level) ? level : fallback;
}

/* What vsnprintf stored, given what it wanted to store. */
static size_t stored(int wanted, size_t size)
{
    if (wanted < 0) {
        return 0;
    }
    return (size_t)wanted < size ? (size_t)wanted : size - 1;
}

void fl_log(enum fl_log_level level, const char *format, ...)
{
    if (level > log_level) {
        return;
    }
    char line[FL_LOG_LINE_MAX];
    const char *separator = log_program[0] != '\0' ? ": " : "";
    size_t used =
        stored(snprintf(line, sizeof(line), "%s%s%s: ", log_program, separator, level_names[level]),
               sizeof(line));
    va_list args;
    va_start(args, format);
    used += stored(vsnprintf(line + used, sizeof(line) - used, format, args), sizeof(line) - used);
    va_end(args);
    fl_utf8_clean(line, used); /* one event is one line, whatever a peer's text holds */
    line[used < sizeof(line) ? used++ : sizeof(line) - 1] = '\n';
    /* A log line that cannot be written has nowhere to be reported. */
    (void)!write(STDERR_FILENO, line, used);
}
