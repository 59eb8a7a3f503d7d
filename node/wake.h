/* wake.h - rouses a thread that sleeps until another has something for it.
 *
 * The sleeper looks for work, finds none, and waits; wake_signal() from any
 * thread ends the wait, also one that has not begun yet.  A signal to a thread
 * that is awake costs one atomic exchange and no system call.
 *
 * Thread:  signal() from any; the rest from the sleeper.
 * Memory:  a plain struct and one file descriptor.
 */
#ifndef NODE_WAKE_H
#define NODE_WAKE_H

#include <stdatomic.h>
#include <stdint.h>

#include "proto/base/status.h"

struct wake {
    int fd; /* readable once signalled */
    _Atomic int signalled;
};

#define WAKE_FOREVER UINT64_MAX

FL_MUST_CHECK fl_status wake_open(struct wake *wake);
void wake_close(struct wake *wake);

void wake_signal(struct wake *wake);

/* Take the signal back before looking for work: what comes after it ends the next wait. */
void wake_clear(struct wake *wake);

/* Sleep until signalled or until `timeout_ns` passed; look for `spin_ns` first without sleeping. */
void wake_wait(struct wake *wake, uint64_t timeout_ns, uint64_t spin_ns);

#endif
