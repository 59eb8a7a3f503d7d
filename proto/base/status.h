/* status.h - the one error type of the project.
 *
 * Every function that can fail returns fl_status.  Three values are not
 * failures: FL_OK, FL_AGAIN ("not yet, call again") and FL_END ("no more").
 *
 * Codes are grouped by scope, the largest thing the failure has broken.
 * Recovery switches on the scope, not on the code:
 *
 *   NONE     nothing failed             go on
 *   CALL     nothing is broken          fix the argument
 *   REQUEST  one generation request     answer the client with an error
 *   LINK     one connection             reconnect, then resend from the last ack
 *   NODE     one machine                replan the pipeline without it
 *   PROCESS  this process               exit; the supervisor restarts it
 *
 * Values are pinned because they travel between machines: append, never
 * renumber, never reuse.
 *
 * The first function that knows what went wrong says so, once, with FL_FAIL;
 * its callers forward with FL_TRY and stay silent.
 *
 * Thread:  any; fl_last_error() is per thread.
 * Source:  scopes follow UCX's ucs_status_t (src/ucs/type/status.h), the list
 *          macro follows libuv's UV_ERRNO_MAP (include/uv.h).
 */
#ifndef PROTO_BASE_STATUS_H
#define PROTO_BASE_STATUS_H

#include "proto/base/check.h"
#include "proto/base/log.h"

#ifdef __cplusplus
extern "C" {
#endif

/* XX(name, value, scope, text) */
#define FL_STATUS_MAP(XX)                                 \
    XX(OK, 0, NONE, "ok")                                 \
    XX(AGAIN, 1, NONE, "not ready, call again")           \
    XX(END, 2, NONE, "no more to come")                   \
    XX(INVALID, 10, CALL, "invalid argument")             \
    XX(NO_MEMORY, 20, REQUEST, "memory budget exhausted") \
    XX(CANCELLED, 21, REQUEST, "request cancelled")       \
    XX(DEADLINE, 22, REQUEST, "deadline passed")          \
    XX(UNSUPPORTED, 23, REQUEST, "not supported")         \
    XX(MALFORMED, 24, REQUEST, "malformed data")          \
    XX(NOT_FOUND, 25, REQUEST, "not found")               \
    XX(TOO_LARGE, 26, REQUEST, "over a limit")            \
    XX(BUSY, 27, REQUEST, "busy, try again later")        \
    XX(LINK_LOST, 40, LINK, "connection lost")            \
    XX(PROTOCOL, 41, LINK, "malformed message")           \
    XX(DENIED, 42, LINK, "pool key missing or wrong")     \
    XX(IO, 60, NODE, "storage read failed")               \
    XX(DEVICE, 61, NODE, "device failed")                 \
    XX(CORRUPT, 62, NODE, "checksum mismatch")            \
    XX(NODE_LOST, 63, NODE, "node lost")                  \
    XX(INTERNAL, 90, PROCESS, "internal error")

typedef enum {
#define XX(name, value, scope, text) FL_##name = value,
    FL_STATUS_MAP(XX)
#undef XX
} fl_status;

enum fl_scope {
    FL_SCOPE_NONE,
    FL_SCOPE_CALL,
    FL_SCOPE_REQUEST,
    FL_SCOPE_LINK,
    FL_SCOPE_NODE,
    FL_SCOPE_PROCESS,
};

/* Static text for a status; never NULL, also for values this build does not know. */
const char *fl_status_text(fl_status status);

/* What a failure has broken.  A value unknown to this build counts as PROCESS. */
enum fl_scope fl_status_scope(fl_status status);

/* Text of the last FL_FAIL on this thread, "" if none.  Valid until the next FL_FAIL. */
const char *fl_last_error(void);

/* Report a failure once, at the place that detects it; evaluates to `code`.
 * The comma shows the compiler that a constant code is not FL_OK. */
#define FL_FAIL(code, ...) \
    ((void)fl_fail((code), __FILE__, __LINE__, __VA_ARGS__), (fl_status)(code))

fl_status fl_fail(fl_status code, const char *file, int line, const char *format, ...)
    FL_PRINTF(4, 5);

/* From now on this thread's failures are logged at `level` (at first FL_LOG_ERROR), those of scope
 * PROCESS excepted; returns the former level.  For work whose failures are answers: a client that
 * asks for a model that is not there hears of it, and the log need not look as if something broke. */
enum fl_log_level fl_fail_log_at(enum fl_log_level level);

/* Forward any status but FL_OK to the caller. */
#define FL_TRY(expr)                            \
    do {                                        \
        const fl_status fl_try_status = (expr); \
        if (fl_try_status != FL_OK) {           \
            return fl_try_status;               \
        }                                       \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
