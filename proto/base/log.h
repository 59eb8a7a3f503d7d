/* log.h - one line per event on stderr.
 *
 * Lines are lower case, noun first, `key value` without `=`.  Levels by
 * frequency: info once per process, plan or session, debug per object, trace
 * per step.  The level is set once, before threads start.
 *
 * Thread:  any; a line is one write(), so lines of two threads do not mix.
 * Memory:  none; a line longer than FL_LOG_LINE_MAX is cut.
 */
#ifndef PROTO_BASE_LOG_H
#define PROTO_BASE_LOG_H

#include <stdbool.h>

#include "proto/base/check.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FL_LOG_LINE_MAX = 1024 };

/* SILENT is for fl_log_init() alone: fuzzers provoke errors by the million. */
enum fl_log_level {
    FL_LOG_SILENT = -1,
    FL_LOG_ERROR,
    FL_LOG_WARN,
    FL_LOG_INFO,
    FL_LOG_DEBUG,
    FL_LOG_TRACE,
};

/* Lines above `level` are dropped.  `program` (borrowed for ever, "" for none) starts each line. */
void fl_log_init(const char *program, enum fl_log_level level);

/* The level that `name` is (error, warn, info, debug, trace); false when it is none. */
bool fl_log_level_named(const char *name, enum fl_log_level *out);

/* The level FIRSTLIGHT_LOG names else `fallback`. */
enum fl_log_level fl_log_level_from_env(enum fl_log_level fallback);

void fl_log(enum fl_log_level level, const char *format, ...) FL_PRINTF(2, 3);

#ifdef __cplusplus
}
#endif
#endif
