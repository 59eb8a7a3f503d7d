/* wake.h - rouses a thread that sleeps until another has something for it.
 *
 * The sleeper takes the signal back, looks for work, finds none, and sleeps;
 * wake_signal() from any thread ends the sleep, also one that has not begun
 * yet.  A signal to a thread that is awake costs one atomic exchange and no
 * system call.  There are two ways to sleep: wait() for the signal alone, or
 * watch() and then poll() the descriptor together with others.
 *
 *     for (;;) { clear(); work(); wait(); }
 *     for (;;) { clear(); work(); if (watch()) { poll(fd, ..); if (fd is readable) drain(); } }
 *
 * Thread:  signal() from any; the rest from the sleeper.
 * Memory:  a plain struct and one file descriptor.
 */
#ifndef NODE_WAKE_H
#define NODE_WAKE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct wake {
    int fd;                /* readable once signalled while watched */
    _Atomic int32_t state; /* enum wake_state */
};

#define WAKE_FOREVER UINT64_MAX

FL_MUST_CHECK fl_status wake_open(struct wake *wake);
void wake_close(struct wake *wake);

void wake_signal(struct wake *wake);

/* Take the signal back before looking for work: what comes after it ends the next sleep. */
void wake_clear(struct wake *wake);

/* Sleep until signalled or until `timeout_ns` passed. */
void wake_wait(struct wake *wake, uint64_t timeout_ns);

/* False when signalled since clear(): do not sleep.  Else the next signal makes `fd` readable. */
bool wake_watch(struct wake *wake);
/* poll() found the descriptor readable: empty it, before clear(). */
void wake_drain(struct wake *wake);

#endif
