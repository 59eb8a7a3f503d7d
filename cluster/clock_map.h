/* clock_map.h - where a moment on another machine's clock lies on ours.
 *
 * Every answered ping gives four readings, two of each clock:
 *
 *        sent ──────────────► returned        ours
 *           \                /
 *            received ─ replied               theirs
 *
 * Nothing arrives before it was sent.  So when our clock read `sent`, theirs
 * read at most `received`, and when ours read `returned`, theirs read at least
 * `replied`: their clock is between two hard lines, however unequal the ways
 * there and back were.  Between pings the lines are carried on at the allowance:
 * the most that two clocks drift apart.  What all pings allow together is kept
 * as a list of intervals of the offset (theirs less ours), each made as narrow
 * as its neighbours on both sides can make it; a conversion reads the interval
 * at its moment.  The middle is the answer, half the width its error, and the
 * truth is never outside, as long as the clocks keep to the allowance.
 *
 * Intervals that exclude each other mean that a clock stepped, or ran faster
 * than any should.  A machine that was suspended says so itself: its
 * CLOCK_BOOTTIME has run on while its CLOCK_MONOTONIC stood.  Either way what
 * was known is void; the map begins anew, and moments from before are not
 * mapped any more.  Moments before the first ping and after the last presume
 * that nobody stepped then: ping once more before converting what has just ended.
 *
 * Thread:  owner.
 * Memory:  a plain struct of fixed size; no allocation.
 * Units:   nanoseconds.  Times are modulo 2^64: a moment before our clock's zero wraps.
 * Source:  the two lines are Marzullo and Owicki, "Maintaining the time in a distributed system",
 *          PODC 1983; readings are named as in RFC 5905, section 8.  The allowance: adjtimex(2)
 *          steers the frequency by 500 ppm at most, and free-running crystals are within 100 ppm
 *          each; once steered, clocks are a few ppm apart.  Two that are steered to their limits
 *          against each other, or one that is being set (chrony moves a wrong clock at up to
 *          83333 ppm), break it: that shows as a step, or not at all below the error.
 */
#ifndef CLUSTER_CLOCK_MAP_H
#define CLUSTER_CLOCK_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CLOCK_MAP_DRIFT_PPM = 500,  /* the allowance */
    CLOCK_MAP_POINT_MAX = 1024, /* intervals kept; dense for the last minute, then coarser by age */
    CLOCK_MAP_TRIP_MAX_S = 60,  /* a slower ping says nothing */
    CLOCK_MAP_ASLEEP_MIN_MS = 10, /* less is the reading of two clocks, not a suspend */
};

struct clock_map_sample {
    uint64_t sent_ns; /* ours */
    uint64_t received_ns;
    uint64_t replied_ns;
    uint64_t returned_ns;     /* ours */
    uint64_t asleep_ns;       /* how long this machine has been suspended since it booted */
    uint64_t their_asleep_ns; /* and that one */
};

enum clock_map_news {
    CLOCK_MAP_TAKEN,
    CLOCK_MAP_REFUSED,    /* no clocks read like that; nothing has changed */
    CLOCK_MAP_STEPPED,    /* it contradicts what was known: begun anew with it */
    CLOCK_MAP_THEY_SLEPT, /* that machine was suspended: begun anew with it */
    CLOCK_MAP_SLEPT,      /* this one was, perhaps while the ping was under way: begun anew empty */
};

/* At our time `ns` the offset less the base was within low .. high. */
struct clock_map_point {
    uint64_t ns;
    int64_t low;
    int64_t high;
};

/* All fields are private but for reading those named. */
struct clock_map {
    uint32_t point_count;
    uint32_t sample_count; /* since it began, or began anew; 0: no mapping */
    uint32_t step_count;   /* times it began anew */
    uint32_t drift_ppm;
    uint64_t base;            /* an offset */
    uint64_t certain_ns;      /* our time: nobody had stepped until then */
    uint64_t begun_ns;        /* our time, since we slept: pings sent before say nothing */
    uint64_t their_begun_ns;  /* their time, since the last step */
    uint64_t asleep_ns;       /* as when it began, or began anew */
    uint64_t their_asleep_ns; /* likewise */
    bool met;                 /* their_asleep_ns is known */
    uint64_t slept_ns;        /* how long this machine slept while the map was kept */
    uint64_t they_slept_ns;   /* and that one */
    struct clock_map_point points[CLOCK_MAP_POINT_MAX]; /* by ns, none twice */
};

/* `asleep_ns`: how long this machine has been suspended until now. */
void clock_map_init(struct clock_map *map, uint64_t asleep_ns);

/* An answered ping.  Samples come in the order of returned_ns. */
enum clock_map_news clock_map_take(struct clock_map *map, const struct clock_map_sample *sample);

/* Their reading as ours, and how far off it may be either way.
 * FL_AGAIN before the first sample, FL_END for a moment before the last step, or absurdly far off. */
FL_MUST_CHECK fl_status clock_map_to_local(const struct clock_map *map, uint64_t remote_ns,
                                           uint64_t *out_local_ns, uint64_t *out_error_ns);

/* The inverse: our reading as theirs. */
FL_MUST_CHECK fl_status clock_map_to_remote(const struct clock_map *map, uint64_t local_ns,
                                            uint64_t *out_remote_ns, uint64_t *out_error_ns);

/* Theirs less ours at our time `local_ns`.  Otherwise as clock_map_to_local(). */
FL_MUST_CHECK fl_status clock_map_offset(const struct clock_map *map, uint64_t local_ns,
                                         int64_t *out_offset_ns, uint64_t *out_error_ns);

/* How much faster their clock runs than ours, the mean of the last ten minutes at most; the error is
 * as hard as the offset's.  FL_AGAIN until there is a second to look back on. */
FL_MUST_CHECK fl_status clock_map_drift(const struct clock_map *map, double *out_ppm,
                                        double *out_error_ppm);

enum clock_map_order { CLOCK_MAP_BEFORE = -1, CLOCK_MAP_UNORDERED = 0, CLOCK_MAP_AFTER = 1 };

/* Whether moment `a_ns` was before or after `b_ns`; NULL is our own clock.  On one clock any
 * difference counts and equal ones are unordered; across clocks one that both errors together
 * exceed.  What is not mapped is unordered. */
enum clock_map_order clock_map_compare(const struct clock_map *a, uint64_t a_ns,
                                       const struct clock_map *b, uint64_t b_ns);

#ifdef __cplusplus
}
#endif
#endif
