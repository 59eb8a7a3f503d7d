#include "proto/base/clock.h"

#include <stddef.h>
#include <time.h>

static uint64_t monotonic_now_ns(void *ctx)
{
    (void)ctx;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * FL_NS_PER_S + (uint64_t)now.tv_nsec;
}

struct fl_clock fl_clock_monotonic(void)
{
    return (struct fl_clock){.now_ns = monotonic_now_ns, .ctx = NULL};
}
