#include "cluster/clock_map.h"

#include <float.h>
#include <stddef.h>
#include <string.h>

#include "proto/base/clock.h"

enum {
    MILLION = 1000000,
    READING_NS = 2, /* a reading is cut off to whole nanoseconds, on either side */
};

/* Offsets are kept relative to the base, and are small against this or mean a step. */
#define FAR_NS INT64_C(0x1000000000000000)

static const uint64_t trip_max_ns = CLOCK_MAP_TRIP_MAX_S * FL_NS_PER_S;
static const uint64_t asleep_min_ns = CLOCK_MAP_ASLEEP_MIN_MS * FL_NS_PER_MS;
static const uint64_t drift_window_ns = 600 * FL_NS_PER_S;

/* value * numerator / denominator, rounded up; both at most some millions. */
static uint64_t share(uint64_t value, uint64_t numerator, uint64_t denominator)
{
    return value / denominator * numerator +
           (value % denominator * numerator + denominator - 1) / denominator;
}

/* How far an offset can have moved. */
static int64_t grown(const struct clock_map *map, uint64_t span_ns)
{
    return (int64_t)share(span_ns, map->drift_ppm, MILLION);
}

/* For how long our clock has run at least, at most, while theirs ran so long. */
static int64_t span_least(const struct clock_map *map, int64_t theirs)
{
    return theirs - (int64_t)share((uint64_t)theirs, map->drift_ppm, MILLION + map->drift_ppm);
}

static int64_t span_most(const struct clock_map *map, int64_t theirs)
{
    return theirs + (int64_t)share((uint64_t)theirs, map->drift_ppm, MILLION - map->drift_ppm);
}

static int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

void clock_map_init(struct clock_map *map, uint64_t asleep_ns)
{
    /* The points are written before they are read. */
    memset(map, 0, offsetof(struct clock_map, points));
    map->drift_ppm = CLOCK_MAP_DRIFT_PPM;
    map->asleep_ns = asleep_ns;
}

static bool is_before(uint64_t a_ns, uint64_t b_ns)
{
    return (int64_t)(a_ns - b_ns) < 0;
}

static bool is_absurd(const struct clock_map *map, const struct clock_map_sample *sample)
{
    const uint64_t trip = sample->returned_ns - sample->sent_ns;
    const uint64_t held = sample->replied_ns - sample->received_ns;
    const bool late = map->point_count > 0 &&
                      is_before(sample->returned_ns, map->points[map->point_count - 1].ns);
    const bool stale = map->slept_ns > 0 && is_before(sample->sent_ns, map->begun_ns);
    return trip > trip_max_ns || late || stale ||
           held > trip + (uint64_t)grown(map, trip) + 2 * (uint64_t)READING_NS;
}

/* The offset when the ping returned, by this sample alone.  False: out of all proportion. */
static bool interval_of(const struct clock_map *map, const struct clock_map_sample *sample,
                        struct clock_map_point *out)
{
    const int64_t there = (int64_t)(sample->received_ns - sample->sent_ns - map->base);
    const int64_t back = (int64_t)(sample->replied_ns - sample->returned_ns - map->base);
    if (there > FAR_NS || there < -FAR_NS || back > FAR_NS || back < -FAR_NS) {
        return false;
    }
    *out = (struct clock_map_point){
        .ns = sample->returned_ns,
        .low = back - READING_NS,
        .high = there + grown(map, sample->returned_ns - sample->sent_ns) + READING_NS};
    return true;
}

/* Gives up the point that stands closest for its age, so that what is long ago is known more
 * coarsely, and never the first.  Nothing is lost where the others are: each is as narrow as all
 * points together make it. */
static void thin_out(struct clock_map *map)
{
    const uint64_t last_ns = map->points[map->point_count - 1].ns;
    uint32_t least = 1;
    double closest = DBL_MAX;
    for (uint32_t i = 1; i + 1 < map->point_count; i++) {
        const struct clock_map_point *point = &map->points[i];
        const double closeness =
            (double)(point[1].ns - point[-1].ns) / (double)(last_ns - point->ns + FL_NS_PER_S);
        if (closeness < closest) {
            closest = closeness;
            least = i;
        }
    }
    map->point_count--;
    memmove(&map->points[least], &map->points[least + 1],
            (map->point_count - least) * sizeof(map->points[0]));
}

/* What the last point says narrows those before it. */
static void look_back(struct clock_map *map)
{
    for (uint32_t i = map->point_count - 1; i > 0; i--) {
        const struct clock_map_point *later = &map->points[i];
        struct clock_map_point *point = &map->points[i - 1];
        const int64_t moved = grown(map, later->ns - point->ns);
        if (later->low - moved <= point->low && later->high + moved >= point->high) {
            return;
        }
        point->low = max_i64(point->low, later->low - moved);
        point->high = min_i64(point->high, later->high + moved);
    }
}

/* False when the point and what was known exclude each other. */
static bool add(struct clock_map *map, struct clock_map_point point)
{
    if (map->point_count > 0) {
        const struct clock_map_point *last = &map->points[map->point_count - 1];
        const int64_t moved = grown(map, point.ns - last->ns);
        if (point.low <= last->low - moved && point.high >= last->high + moved) {
            return true; /* nothing new */
        }
        point.low = max_i64(point.low, last->low - moved);
        point.high = min_i64(point.high, last->high + moved);
        if (point.low > point.high) {
            return false;
        }
        if (point.ns == last->ns) {
            map->point_count--;
        }
    }
    if (map->point_count == CLOCK_MAP_POINT_MAX) {
        thin_out(map);
    }
    map->points[map->point_count++] = point;
    look_back(map);
    return true;
}

static void forget(struct clock_map *map)
{
    map->point_count = 0;
    map->sample_count = 0;
    map->step_count++;
}

static void begin(struct clock_map *map, const struct clock_map_sample *sample)
{
    struct clock_map_point point;
    map->base = sample->received_ns - sample->sent_ns;
    map->their_begun_ns = sample->replied_ns;
    const bool near = interval_of(map, sample, &point);
    FL_ASSERT(near); /* the base is this sample's own, and the round trip is bounded */
    (void)add(map, point);
}

/* How much a machine's time asleep has grown, 0 when it has not. */
static uint64_t slept(uint64_t before_ns, uint64_t now_ns)
{
    return now_ns > before_ns && now_ns - before_ns >= asleep_min_ns ? now_ns - before_ns : 0;
}

static bool they_slept(struct clock_map *map, const struct clock_map_sample *sample)
{
    const uint64_t theirs = map->met ? slept(map->their_asleep_ns, sample->their_asleep_ns) : 0;
    if (!map->met || theirs > 0) {
        map->their_asleep_ns = sample->their_asleep_ns;
    }
    map->met = true;
    map->they_slept_ns += theirs;
    return theirs > 0;
}

enum clock_map_news clock_map_take(struct clock_map *map, const struct clock_map_sample *sample)
{
    struct clock_map_point point;
    if (is_absurd(map, sample)) {
        return CLOCK_MAP_REFUSED;
    }
    const uint64_t ours = slept(map->asleep_ns, sample->asleep_ns);
    if (ours > 0) {
        forget(map);
        map->begun_ns = sample->returned_ns;
        map->asleep_ns = sample->asleep_ns;
        map->slept_ns += ours;
        return CLOCK_MAP_SLEPT;
    }
    enum clock_map_news news = CLOCK_MAP_TAKEN;
    if (they_slept(map, sample)) {
        news = CLOCK_MAP_THEY_SLEPT;
    } else if (map->sample_count > 0 && (!interval_of(map, sample, &point) || !add(map, point))) {
        news = CLOCK_MAP_STEPPED;
    }
    if (news != CLOCK_MAP_TAKEN) {
        forget(map);
    }
    if (map->sample_count == 0) {
        begin(map, sample);
    }
    map->sample_count += map->sample_count < UINT32_MAX;
    map->certain_ns = sample->sent_ns;
    return news;
}

/* What the neighbours of our time `ns` allow the offset to be; FL_END before the last step. */
static fl_status interval_at(const struct clock_map *map, uint64_t ns, int64_t *out_low,
                             int64_t *out_high)
{
    if (map->sample_count == 0) {
        return FL_AGAIN;
    }
    const uint64_t last_ns = map->points[map->point_count - 1].ns;
    const int64_t when = (int64_t)(ns - last_ns);
    if (when > FAR_NS || when < -FAR_NS ||
        (map->step_count > 0 && is_before(ns, map->points[0].ns))) {
        return FL_END;
    }
    uint32_t first = 0; /* the first point not before `ns` */
    for (uint32_t end = map->point_count; first < end;) {
        const uint32_t middle = first + (end - first) / 2;
        if ((int64_t)(map->points[middle].ns - last_ns) < when) {
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    int64_t low = INT64_MIN;
    int64_t high = INT64_MAX;
    if (first < map->point_count) {
        const struct clock_map_point *point = &map->points[first];
        low = point->low - grown(map, point->ns - ns);
        high = point->high + grown(map, point->ns - ns);
    }
    if (first > 0) {
        const struct clock_map_point *point = &map->points[first - 1];
        low = max_i64(low, point->low - grown(map, ns - point->ns));
        high = min_i64(high, point->high + grown(map, ns - point->ns));
    }
    *out_low = low;
    *out_high = high;
    return FL_OK;
}

static int64_t middle_of(int64_t low, int64_t high)
{
    return low + (high - low) / 2;
}

static uint64_t error_of(int64_t low, int64_t high)
{
    return (uint64_t)(high - low + 1) / 2 + READING_NS;
}

fl_status clock_map_to_remote(const struct clock_map *map, uint64_t local_ns,
                              uint64_t *out_remote_ns, uint64_t *out_error_ns)
{
    int64_t low = 0;
    int64_t high = 0;
    FL_TRY(interval_at(map, local_ns, &low, &high));
    *out_remote_ns = local_ns + map->base + (uint64_t)middle_of(low, high);
    *out_error_ns = error_of(low, high);
    return FL_OK;
}

fl_status clock_map_offset(const struct clock_map *map, uint64_t local_ns, int64_t *out_offset_ns,
                           uint64_t *out_error_ns)
{
    uint64_t remote_ns = 0;
    FL_TRY(clock_map_to_remote(map, local_ns, &remote_ns, out_error_ns));
    *out_offset_ns = (int64_t)(remote_ns - local_ns);
    return FL_OK;
}

/* Their reading at the latest (or earliest) when ours was that of a point; both counted from the
 * last point, theirs less the base as well. */
static int64_t theirs_at(const struct clock_map *map, uint32_t index, bool latest)
{
    const struct clock_map_point *point = &map->points[index];
    const int64_t when = (int64_t)(point->ns - map->points[map->point_count - 1].ns);
    return when + (latest ? point->high : point->low);
}

/* Our time at the earliest (or latest) when theirs read `theirs`.  Their clock was at most at the
 * upper line, so it reached the reading no earlier than that line did; likewise the other way. */
static int64_t ours_when(const struct clock_map *map, int64_t theirs, bool earliest)
{
    const uint64_t last_ns = map->points[map->point_count - 1].ns;
    uint32_t first = 0; /* the first point at which the line has reached it */
    for (uint32_t end = map->point_count; first < end;) {
        const uint32_t middle = first + (end - first) / 2;
        if (theirs_at(map, middle, earliest) < theirs) {
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    int64_t found = earliest ? INT64_MIN : INT64_MAX;
    if (first < map->point_count) {
        const int64_t missed = theirs_at(map, first, earliest) - theirs;
        const int64_t when = (int64_t)(map->points[first].ns - last_ns);
        found = when - (earliest ? span_most(map, missed) : span_least(map, missed));
    }
    if (first > 0) {
        const int64_t passed = theirs - theirs_at(map, first - 1, earliest);
        const int64_t when = (int64_t)(map->points[first - 1].ns - last_ns);
        const int64_t other = when + (earliest ? span_least(map, passed) : span_most(map, passed));
        found = earliest ? max_i64(found, other) : min_i64(found, other);
    }
    return found;
}

fl_status clock_map_to_local(const struct clock_map *map, uint64_t remote_ns,
                             uint64_t *out_local_ns, uint64_t *out_error_ns)
{
    if (map->sample_count == 0) {
        return FL_AGAIN;
    }
    const uint64_t last_ns = map->points[map->point_count - 1].ns;
    const int64_t theirs = (int64_t)(remote_ns - map->base - last_ns);
    if (theirs > FAR_NS || theirs < -FAR_NS ||
        (map->step_count > 0 && is_before(remote_ns, map->their_begun_ns))) {
        return FL_END;
    }
    const int64_t low = ours_when(map, theirs, true);
    const int64_t high = ours_when(map, theirs, false);
    *out_local_ns = last_ns + (uint64_t)middle_of(low, high);
    *out_error_ns = error_of(low, high);
    return FL_OK;
}

fl_status clock_map_drift(const struct clock_map *map, double *out_ppm, double *out_error_ppm)
{
    if (map->sample_count == 0) {
        return FL_AGAIN;
    }
    const struct clock_map_point *last = &map->points[map->point_count - 1];
    const struct clock_map_point *first = map->points;
    while (last->ns - first->ns > drift_window_ns) {
        first++;
    }
    const uint64_t span_ns = last->ns - first->ns;
    if (span_ns < FL_NS_PER_S) {
        return FL_AGAIN;
    }
    const double least = (double)(last->low - first->high);
    const double most = (double)(last->high - first->low);
    *out_ppm = (least + most) / 2 / (double)span_ns * MILLION;
    *out_error_ppm = (most - least) / 2 / (double)span_ns * MILLION;
    return FL_OK;
}

enum clock_map_order clock_map_compare(const struct clock_map *a, uint64_t a_ns,
                                       const struct clock_map *b, uint64_t b_ns)
{
    uint64_t error_ns = 0;
    if (a != b) {
        uint64_t a_error_ns = 0;
        uint64_t b_error_ns = 0;
        if ((a != NULL && clock_map_to_local(a, a_ns, &a_ns, &a_error_ns) != FL_OK) ||
            (b != NULL && clock_map_to_local(b, b_ns, &b_ns, &b_error_ns) != FL_OK)) {
            return CLOCK_MAP_UNORDERED;
        }
        error_ns = a_error_ns + b_error_ns;
    }
    const int64_t after_ns = (int64_t)(a_ns - b_ns);
    if (after_ns > 0 && (uint64_t)after_ns > error_ns) {
        return CLOCK_MAP_AFTER;
    }
    if (after_ns < 0 && 0 - (uint64_t)after_ns > error_ns) {
        return CLOCK_MAP_BEFORE;
    }
    return CLOCK_MAP_UNORDERED;
}
