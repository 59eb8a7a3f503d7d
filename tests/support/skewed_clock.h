/* skewed_clock.h - a machine's clock whose truth a test knows.
 *
 * It starts anywhere, runs at one rate after another, and stands still while
 * its machine is suspended.  True time is the test's own.
 *
 * Thread:  owner.
 * Memory:  a plain struct; no allocation.
 * Units:   nanoseconds; rates in 1e-9 more than true time.
 */
#ifndef TESTS_SUPPORT_SKEWED_CLOCK_H
#define TESTS_SUPPORT_SKEWED_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

enum { SKEWED_CLOCK_PIECE_MAX = 64 };

struct skewed_clock_piece {
    uint64_t from_ns;    /* true time */
    long double reading; /* then, less the origin */
    int64_t ppb;
    bool asleep;
};

struct skewed_clock {
    uint64_t origin; /* the reading at true time 0 */
    uint32_t count;
    struct skewed_clock_piece pieces[SKEWED_CLOCK_PIECE_MAX];
};

void skewed_clock_init(struct skewed_clock *clock, uint64_t origin, int64_t ppb);

/* From `from_ns` on, which is after all changes so far, another rate; or a suspend, after which it
 * goes on as before.  False when there is no room for more, or it is not after them. */
bool skewed_clock_change(struct skewed_clock *clock, uint64_t from_ns, int64_t ppb);
bool skewed_clock_sleep(struct skewed_clock *clock, uint64_t from_ns, uint64_t span_ns);

uint64_t skewed_clock_at(const struct skewed_clock *clock, uint64_t true_ns);
bool skewed_clock_sleeps(const struct skewed_clock *clock, uint64_t true_ns);
/* How long it has slept until then. */
uint64_t skewed_clock_asleep(const struct skewed_clock *clock, uint64_t true_ns);

#endif
