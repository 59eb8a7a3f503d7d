#include "tests/support/skewed_clock.h"

#include <math.h>

static const struct skewed_clock_piece *piece_at(const struct skewed_clock *clock, uint64_t true_ns)
{
    uint32_t i = clock->count - 1;
    while (i > 0 && clock->pieces[i].from_ns > true_ns) {
        i--;
    }
    return &clock->pieces[i];
}

static long double since_origin(const struct skewed_clock *clock, uint64_t true_ns)
{
    const struct skewed_clock_piece *piece = piece_at(clock, true_ns);
    const long double span = (long double)(true_ns - piece->from_ns);
    return piece->asleep ? piece->reading
                         : piece->reading + span + span * (long double)piece->ppb / 1e9L;
}

void skewed_clock_init(struct skewed_clock *clock, uint64_t origin, int64_t ppb)
{
    *clock = (struct skewed_clock){.origin = origin, .count = 1};
    clock->pieces[0] = (struct skewed_clock_piece){.ppb = ppb};
}

static bool add(struct skewed_clock *clock, uint64_t from_ns, int64_t ppb, bool asleep)
{
    if (clock->count == SKEWED_CLOCK_PIECE_MAX ||
        clock->pieces[clock->count - 1].from_ns >= from_ns) {
        return false;
    }
    const long double reading = since_origin(clock, from_ns);
    clock->pieces[clock->count++] = (struct skewed_clock_piece){
        .from_ns = from_ns, .reading = reading, .ppb = ppb, .asleep = asleep};
    return true;
}

bool skewed_clock_change(struct skewed_clock *clock, uint64_t from_ns, int64_t ppb)
{
    return add(clock, from_ns, ppb, false);
}

bool skewed_clock_sleep(struct skewed_clock *clock, uint64_t from_ns, uint64_t span_ns)
{
    const int64_t ppb = clock->pieces[clock->count - 1].ppb;
    return clock->count + 1 < SKEWED_CLOCK_PIECE_MAX && span_ns > 0 &&
           add(clock, from_ns, ppb, true) && add(clock, from_ns + span_ns, ppb, false);
}

uint64_t skewed_clock_at(const struct skewed_clock *clock, uint64_t true_ns)
{
    return clock->origin + (uint64_t)floorl(since_origin(clock, true_ns));
}

bool skewed_clock_sleeps(const struct skewed_clock *clock, uint64_t true_ns)
{
    return piece_at(clock, true_ns)->asleep;
}

uint64_t skewed_clock_asleep(const struct skewed_clock *clock, uint64_t true_ns)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < clock->count; i++) {
        const struct skewed_clock_piece *piece = &clock->pieces[i];
        const uint64_t end = i + 1 < clock->count ? clock->pieces[i + 1].from_ns : true_ns;
        const uint64_t until = end < true_ns ? end : true_ns;
        sum += piece->asleep && until > piece->from_ns ? until - piece->from_ns : 0;
    }
    return sum;
}
