/* clock.h - time, handed in, so that the simulator can turn it.
 *
 * Deadlines are absolute nanoseconds on the clock they were made with.
 *
 * Thread:  any.
 */
#ifndef PROTO_BASE_CLOCK_H
#define PROTO_BASE_CLOCK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FL_NS_PER_US UINT64_C(1000)
#define FL_NS_PER_MS UINT64_C(1000000)
#define FL_NS_PER_S  UINT64_C(1000000000)

struct fl_clock {
    uint64_t (*now_ns)(void *ctx); /* never goes back; starts anywhere */
    void *ctx;
    /* How long it has stood still because the machine was suspended; NULL: it never was. */
    uint64_t (*asleep_ns)(void *ctx);
};

/* CLOCK_MONOTONIC of this machine; asleep is what CLOCK_BOOTTIME is ahead of it. */
struct fl_clock fl_clock_monotonic(void);

static inline uint64_t fl_clock_now(const struct fl_clock *clock)
{
    return clock->now_ns(clock->ctx);
}

static inline uint64_t fl_clock_asleep(const struct fl_clock *clock)
{
    return clock->asleep_ns != 0 ? clock->asleep_ns(clock->ctx) : 0;
}

#ifdef __cplusplus
}
#endif
#endif
