#include "proto/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/log.h"
#include "proto/base/utf8.h"

enum { LAST_ERROR_SIZE = 512 };

static _Thread_local char last_error[LAST_ERROR_SIZE];
static _Thread_local enum fl_log_level fail_level = FL_LOG_ERROR;

const char *fl_status_text(fl_status status)
{
    switch (status) {
#define XX(name, value, scope, text) \
    case FL_##name: return text;
        FL_STATUS_MAP(XX)
#undef XX
    }
    return "unknown status";
}

enum fl_scope fl_status_scope(fl_status status)
{
    switch (status) {
#define XX(name, value, scope, text) \
    case FL_##name: return FL_SCOPE_##scope;
        FL_STATUS_MAP(XX)
#undef XX
    }
    return FL_SCOPE_PROCESS;
}

const char *fl_last_error(void)
{
    return last_error;
}

enum fl_log_level fl_fail_log_at(enum fl_log_level level)
{
    const enum fl_log_level former = fail_level;
    fail_level = level;
    return former;
}

fl_status fl_fail(fl_status code, const char *file, int line, const char *format, ...)
{
    FL_ASSERT(fl_status_scope(code) != FL_SCOPE_NONE);

    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof(last_error), format, args);
    va_end(args);
    fl_utf8_clean(last_error, strlen(last_error)); /* it may quote a file or a peer, or be cut */

    fl_log(FL_LOG_DEBUG, "%s raised at %s:%d", fl_status_text(code), file, line);
    fl_log(fl_status_scope(code) == FL_SCOPE_PROCESS ? FL_LOG_ERROR : fail_level, "%s", last_error);
    return code;
}
