/* stop_signal.h - SIGTERM and SIGINT as something a loop can wait for.
 *
 * A program that serves ends between two steps, never in the middle of one: the
 * signals are blocked as the first thing main() does, wait there while the
 * program starts up, and are read from a descriptor by its loop.  So a signal
 * that comes while it still opens its doors ends it with status 0, too.
 *
 * Thread:  main, before other threads start: they inherit the mask.
 */
#ifndef PROTO_BASE_STOP_SIGNAL_H
#define PROTO_BASE_STOP_SIGNAL_H

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Holds SIGTERM and SIGINT back, and ignores SIGPIPE: a peer that went is an error of its socket. */
void fl_stop_signal_block(void);

/* *out: a descriptor, readable once a blocked signal has come; the caller closes it. */
FL_MUST_CHECK fl_status fl_stop_signal_open(int *out);

#ifdef __cplusplus
}
#endif
#endif
