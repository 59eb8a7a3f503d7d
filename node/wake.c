#include "node/wake.h"

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/clock.h"

enum wake_state {
    WAKE_AWAKE, /* nobody has to be roused: work is looked for before the next sleep */
    WAKE_SIGNALLED,
    WAKE_ASLEEP,  /* in wait() */
    WAKE_WATCHED, /* in poll(), or about to be */
};

fl_status wake_open(struct wake *wake)
{
    wake->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake->fd < 0) {
        return FL_FAIL(FL_NO_MEMORY, "event descriptor: %s", strerror(errno));
    }
    atomic_init(&wake->state, WAKE_AWAKE);
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
    const int32_t before =
        atomic_exchange_explicit(&wake->state, WAKE_SIGNALLED, memory_order_acq_rel);
    if (before == WAKE_ASLEEP) {
        (void)syscall(SYS_futex, &wake->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    } else if (before == WAKE_WATCHED) {
        const uint64_t one = 1;
        /* A full counter is readable too. */
        (void)!write(wake->fd, &one, sizeof(one));
    }
}

void wake_clear(struct wake *wake)
{
    /* Pairs with the exchange in wake_signal(). */
    (void)atomic_exchange_explicit(&wake->state, WAKE_AWAKE, memory_order_acq_rel);
}

/* False when a signal came first. */
static bool fall_asleep(struct wake *wake, enum wake_state how)
{
    int32_t awake = WAKE_AWAKE;
    return atomic_compare_exchange_strong_explicit(&wake->state, &awake, how, memory_order_relaxed,
                                                   memory_order_relaxed);
}

void wake_wait(struct wake *wake, uint64_t timeout_ns)
{
    const struct timespec timeout = {
        .tv_sec = (time_t)(timeout_ns / FL_NS_PER_S),
        .tv_nsec = (long)(timeout_ns % FL_NS_PER_S),
    };
    if (fall_asleep(wake, WAKE_ASLEEP)) {
        /* Returns at once when the state has changed meanwhile; may return early, as poll() may. */
        (void)syscall(SYS_futex, &wake->state, FUTEX_WAIT_PRIVATE, WAKE_ASLEEP,
                      timeout_ns == WAKE_FOREVER ? NULL : &timeout, NULL, 0);
    }
}

bool wake_watch(struct wake *wake)
{
    return fall_asleep(wake, WAKE_WATCHED);
}

void wake_drain(struct wake *wake)
{
    /* A signaller may raise the state long before its write arrives.  Emptied before clear(), the
     * descriptor never holds back a signal; at worst it ends a later poll() for nothing. */
    uint64_t count;
    (void)!read(wake->fd, &count, sizeof(count));
}
