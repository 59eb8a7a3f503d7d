#include "node/wake.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/clock.h"

fl_status wake_open(struct wake *wake)
{
    wake->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake->fd < 0) {
        return FL_FAIL(FL_NO_MEMORY, "event descriptor: %s", strerror(errno));
    }
    atomic_init(&wake->signalled, 0);
    return FL_OK;
}

void wake_close(struct wake *wake)
{
    if (wake->fd >= 0) {
        close(wake->fd);
        wake->fd = -1;
    }
}

void wake_signal(struct wake *wake)
{
    /* Both orders: what was done before the signal is seen after wake_clear(). */
    if (atomic_exchange_explicit(&wake->signalled, 1, memory_order_acq_rel) == 0) {
        const uint64_t one = 1;
        /* A full counter is readable too. */
        (void)!write(wake->fd, &one, sizeof(one));
    }
}

void wake_clear(struct wake *wake)
{
    /* Always read: a signaller may have raised the flag long before its write arrives.
     * First empty the descriptor, then the flag: the other way round a signal between the two
     * would be read away while the flag stays up, and every later signal would be lost. */
    uint64_t count;
    (void)!read(wake->fd, &count, sizeof(count));
    /* Pairs with the exchange in wake_signal(). */
    (void)atomic_exchange_explicit(&wake->signalled, 0, memory_order_acq_rel);
}

void wake_wait(struct wake *wake, uint64_t timeout_ns, uint64_t spin_ns)
{
    if (spin_ns != 0) {
        const struct fl_clock clock = fl_clock_monotonic();
        const uint64_t until = fl_clock_now(&clock) + spin_ns;
        do {
            for (int i = 0; i < 64; i++) {
                if (atomic_load_explicit(&wake->signalled, memory_order_relaxed) != 0) {
                    return;
                }
                __builtin_ia32_pause();
            }
        } while (fl_clock_now(&clock) < until);
    }
    struct pollfd poll_fd = {.fd = wake->fd, .events = POLLIN};
    const struct timespec timeout = {
        .tv_sec = (time_t)(timeout_ns / FL_NS_PER_S),
        .tv_nsec = (long)(timeout_ns % FL_NS_PER_S),
    };
    (void)ppoll(&poll_fd, 1, timeout_ns == WAKE_FOREVER ? NULL : &timeout, NULL);
}
