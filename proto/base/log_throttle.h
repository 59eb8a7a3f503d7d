/* log_throttle.h - one kind of line that strangers cause, said seldom.
 *
 * The first is logged as it is; those of the next ten seconds are counted, and
 * the count is one line, for as long as they keep coming.  Whoever knocks a
 * thousand times a second fills no disk and hides no other line.
 *
 * Thread:  owner.
 * Memory:  a zeroed struct is ready.
 */
#ifndef PROTO_BASE_LOG_THROTTLE_H
#define PROTO_BASE_LOG_THROTTLE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/log.h"

#ifdef __cplusplus
extern "C" {
#endif

struct fl_log_throttle {
    uint64_t quiet_until_ns;
    uint32_t hidden; /* not said since */
};

/* True when the line may be logged now; else it was counted. */
bool fl_log_throttle_pass(struct fl_log_throttle *throttle, uint64_t now_ns);

/* Logs "`what`: N more in 10 s" when that is due.  When to call again; UINT64_MAX: after a pass(). */
uint64_t fl_log_throttle_poll(struct fl_log_throttle *throttle, uint64_t now_ns,
                              enum fl_log_level level, const char *what);

#ifdef __cplusplus
}
#endif
#endif
