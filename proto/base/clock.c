#include "proto/base/clock.h"

#include <time.h>

static uint64_t read_ns(clockid_t id)
{
    struct timespec now;
    clock_gettime(id, &now);
    return (uint64_t)now.tv_sec * FL_NS_PER_S + (uint64_t)now.tv_nsec;
}

static uint64_t monotonic_now_ns(void *ctx)
{
    (void)ctx;
    return read_ns(CLOCK_MONOTONIC);
}

/* Between the two readings the thread may have been put aside: then they are taken again. */
static uint64_t monotonic_asleep_ns(void *ctx)
{
    enum { TRIES = 5 };
    static const uint64_t quick_ns = 20 * FL_NS_PER_US;
    uint64_t asleep_ns = 0;
    uint64_t least_ns = UINT64_MAX;
    (void)ctx;
    for (int i = 0; i < TRIES && least_ns > quick_ns; i++) {
        const uint64_t before_ns = read_ns(CLOCK_MONOTONIC);
        const uint64_t boot_ns = read_ns(CLOCK_BOOTTIME);
        const uint64_t took_ns = read_ns(CLOCK_MONOTONIC) - before_ns;
        if (took_ns < least_ns) {
            least_ns = took_ns;
            asleep_ns = boot_ns > before_ns ? boot_ns - before_ns : 0;
        }
    }
    return asleep_ns;
}

struct fl_clock fl_clock_monotonic(void)
{
    return (struct fl_clock){.now_ns = monotonic_now_ns, .asleep_ns = monotonic_asleep_ns};
}
