#include "coordinator/timeline.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"

/* Of a shard: less is nothing, for everybody reads headers and samples. */
enum { COLD_SHARE = 100 };

struct timeline_table {
    struct timeline *kept; /* the latest first */
    uint32_t kept_count;
    uint32_t open_count;                                      /* started and not kept yet */
    uint64_t span_count;                                      /* of all */
    struct exposed_segment segments[FL_TIMELINE_SEGMENT_MAX]; /* of the chain being found */
};

static const uint64_t span_count_max = TIMELINE_SPAN_SIZE_MAX / sizeof(struct fl_span);

fl_status timeline_table_open(struct timeline_table **out)
{
    struct timeline_table *table = calloc(1, sizeof(*table));
    if (table == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for timelines");
    }
    *out = table;
    return FL_OK;
}

static void drop_spans(struct timeline_table *table, struct timeline *timeline)
{
    for (uint32_t i = 0; i < timeline->stage_count; i++) {
        struct timeline_stage *stage = &timeline->stages[i];
        table->span_count -= stage->span_count;
        free(stage->spans);
        stage->spans = NULL;
        stage->span_count = 0;
    }
}

static void close_timeline(struct timeline_table *table, struct timeline *timeline)
{
    drop_spans(table, timeline);
    free(timeline->stages);
    free(timeline->own);
    free(timeline->segments);
    free(timeline);
}

void timeline_table_close(struct timeline_table *table)
{
    if (table == NULL) {
        return;
    }
    FL_ASSERT(table->open_count == 0);
    while (table->kept != NULL) {
        struct timeline *timeline = table->kept;
        table->kept = timeline->next;
        close_timeline(table, timeline);
    }
    FL_ASSERT(table->span_count == 0);
    free(table);
}

size_t timeline_span_size(const struct timeline_table *table)
{
    return (size_t)table->span_count * sizeof(struct fl_span);
}

/* Collecting --------------------------------------------------------------------------------- */

struct timeline *timeline_start(struct timeline_table *table, uint32_t stage_count)
{
    FL_ASSERT(stage_count >= 1 && stage_count <= FL_STAGE_COUNT_MAX);
    struct timeline *timeline = calloc(1, sizeof(*timeline));
    if (timeline == NULL) {
        return NULL;
    }
    timeline->stages = calloc(stage_count, sizeof(*timeline->stages));
    timeline->own = calloc(TIMELINE_OWN_MAX, sizeof(*timeline->own));
    if (timeline->stages == NULL || timeline->own == NULL) {
        close_timeline(table, timeline);
        return NULL;
    }
    timeline->stage_count = stage_count;
    table->open_count++;
    return timeline;
}

struct fl_span *timeline_own(struct timeline *timeline, enum fl_phase phase, uint64_t start_ns,
                             uint64_t end_ns)
{
    FL_ASSERT(timeline->own_count < TIMELINE_OWN_MAX);
    struct fl_span *span = &timeline->own[timeline->own_count++];
    end_ns = end_ns > start_ns ? end_ns : start_ns;
    *span = (struct fl_span){.start_ns = start_ns,
                             .end_ns = end_ns,
                             .busy_ns = end_ns - start_ns,
                             .plan_id = timeline->plan_id,
                             .request_id = timeline->request_id,
                             .piece = FL_SPAN_NO_PIECE,
                             .phase = phase,
                             .lane = FL_LANE_MAIN};
    return span;
}

/* Makes the oldest timelines pay for `count` more spans; how many of them fit. */
static uint32_t make_room(struct timeline_table *table, uint32_t count)
{
    while (table->span_count + count > span_count_max) {
        struct timeline *oldest = NULL;
        for (struct timeline *at = table->kept; at != NULL; at = at->next) {
            for (uint32_t i = 0; i < at->stage_count; i++) {
                oldest = at->stages[i].span_count > 0 ? at : oldest;
            }
        }
        if (oldest == NULL) {
            return (uint32_t)(span_count_max - table->span_count);
        }
        drop_spans(table, oldest);
    }
    return count;
}

/* From a node's clock to ours over one request: a line through two moments, so that what happened
 * on one thread keeps its order. */
struct clock_line {
    uint64_t remote_ns; /* at our local_ns */
    uint64_t local_ns;
    double slope; /* of our clock by theirs, before that moment; it is 1 after it */
};

static bool find_line(const struct clock_map *map, const struct timeline *timeline,
                      struct timeline_stage *stage, struct clock_line *out)
{
    uint64_t begin_ns = 0;
    uint64_t error_ns = 0;
    stage->clock_known =
        map != NULL && clock_map_offset(map, timeline->end_ns, &stage->clock_offset_ns,
                                        &stage->clock_error_ns) == FL_OK;
    if (!stage->clock_known) {
        return false;
    }
    *out = (struct clock_line){.remote_ns = timeline->end_ns + (uint64_t)stage->clock_offset_ns,
                               .local_ns = timeline->end_ns,
                               .slope = 1};
    /* Farther back the clocks may have drifted apart. */
    if (clock_map_to_remote(map, timeline->begin_ns, &begin_ns, &error_ns) == FL_OK &&
        begin_ns < out->remote_ns) {
        const double slope =
            (double)(timeline->end_ns - timeline->begin_ns) / (double)(out->remote_ns - begin_ns);
        const double most = 1e-6 * CLOCK_MAP_DRIFT_PPM;
        out->slope = slope > 1 - most && slope < 1 + most ? slope : 1;
        stage->clock_error_ns = error_ns > stage->clock_error_ns ? error_ns : stage->clock_error_ns;
    }
    return true;
}

static uint64_t to_local(const struct clock_line *line, uint64_t remote_ns)
{
    if (remote_ns >= line->remote_ns) {
        const uint64_t after_ns = remote_ns - line->remote_ns;
        return after_ns < UINT64_MAX - line->local_ns ? line->local_ns + after_ns : UINT64_MAX;
    }
    const double before_ns = (double)(line->remote_ns - remote_ns) * line->slope;
    return before_ns < (double)line->local_ns ? line->local_ns - (uint64_t)before_ns : 0;
}

static uint32_t span_count(const struct timeline *timeline)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < timeline->stage_count; i++) {
        count += timeline->stages[i].span_count;
    }
    return count;
}

static void take_spans(struct timeline_table *table, struct timeline *timeline,
                       struct timeline_stage *stage, const struct fl_spans *spans,
                       const struct clock_line *line)
{
    const uint32_t held = timeline->own_count + span_count(timeline);
    const uint32_t left = FL_TIMELINE_SPAN_MAX > held ? FL_TIMELINE_SPAN_MAX - held : 0;
    uint32_t count = spans->span_count < left ? spans->span_count : left;
    count = make_room(table, count);
    struct fl_span *grown = NULL;
    if (count > 0) {
        grown = realloc(stage->spans, (stage->span_count + count) * sizeof(*grown));
        count = grown != NULL ? count : 0;
    }
    stage->spans = grown != NULL ? grown : stage->spans;
    stage->spans_lost += spans->span_count - count;
    for (uint32_t i = 0; i < count; i++) {
        struct fl_span span = spans->spans[i];
        if (span.plan_id == timeline->plan_id || span.plan_id == 0) {
            span.start_ns = to_local(line, span.start_ns);
            span.end_ns = to_local(line, span.end_ns);
            span.cause_ns = span.cause_ns != 0 ? to_local(line, span.cause_ns) : 0;
            stage->spans[stage->span_count++] = span;
            table->span_count++;
        }
    }
}

void timeline_take(struct timeline_table *table, struct timeline *timeline, uint32_t index,
                   const struct fl_spans *spans, const struct clock_map *map)
{
    FL_ASSERT(index < timeline->stage_count && !timeline->kept);
    struct timeline_stage *stage = &timeline->stages[index];
    struct clock_line line = {0};
    if (stage->answered) {
        return;
    }
    if (!find_line(map, timeline, stage, &line)) {
        stage->spans_lost += spans->span_count;
    } else if (spans->span_count > 0) {
        take_spans(table, timeline, stage, spans, &line);
    }
    if (spans->lost > stage->overwritten) { /* each of its messages says it anew */
        const uint64_t more = spans->lost - stage->overwritten;
        const uint64_t most = UINT64_MAX - stage->spans_lost;
        stage->overwritten = spans->lost;
        stage->spans_lost += more < most ? more : most;
    }
    stage->start = spans->start;
    stage->answered = spans->last;
}

bool timeline_answered(const struct timeline *timeline)
{
    for (uint32_t i = 0; i < timeline->stage_count; i++) {
        if (!timeline->stages[i].answered) {
            return false;
        }
    }
    return true;
}

/* Keeping ------------------------------------------------------------------------------------ */

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static enum fl_class find_class(const struct timeline *timeline)
{
    uint64_t total = 0;
    uint64_t memory = 0;
    uint64_t found = 0;
    for (uint32_t i = 0; i < timeline->stage_count; i++) {
        const struct timeline_stage *stage = &timeline->stages[i];
        const uint64_t resident = least(stage->resident_bytes, stage->bytes);
        const uint64_t cached =
            stage->start.residency_known ? least(stage->start.page_cache_before, stage->bytes) : 0;
        total += stage->bytes;
        memory += resident;
        found += cached > resident ? cached : resident;
    }
    if (memory == total) {
        return FL_CLASS_WARM;
    }
    return found == 0 || found < total / COLD_SHARE ? FL_CLASS_COLD : FL_CLASS_PARTIAL;
}

static void find_chain(struct timeline_table *table, struct timeline *timeline)
{
    struct exposed_stage stages[FL_STAGE_COUNT_MAX];
    timeline->complete = true;
    for (uint32_t i = 0; i < timeline->stage_count; i++) {
        const struct timeline_stage *stage = &timeline->stages[i];
        const bool whole = stage->answered && stage->clock_known && stage->spans_lost == 0;
        stages[i] = (struct exposed_stage){.spans = stage->spans,
                                           .span_count = stage->span_count,
                                           .error_ns = stage->clock_error_ns,
                                           .whole = whole};
        timeline->complete = timeline->complete && whole;
    }
    const struct exposed_chain_config config = {.begin_ns = timeline->begin_ns,
                                                .token_ns = timeline->token_ns,
                                                .end_ns = timeline->end_ns,
                                                .request_id = timeline->request_id,
                                                .prompt_count = timeline->prompt_count,
                                                .stage_count = timeline->stage_count,
                                                .stages = stages,
                                                .own = timeline->own,
                                                .own_count = timeline->own_count};
    const uint32_t count = exposed_chain_find(&config, table->segments);
    exposed_phases_sum(&config, table->segments, count, timeline->phases);
    timeline->segments = malloc((count > 0 ? count : 1) * sizeof(*timeline->segments));
    if (timeline->segments != NULL) {
        memcpy(timeline->segments, table->segments, count * sizeof(*timeline->segments));
        timeline->segment_count = count;
    }
}

void timeline_keep(struct timeline_table *table, struct timeline *timeline)
{
    FL_ASSERT(!timeline->kept && table->open_count > 0);
    find_chain(table, timeline);
    timeline->class_ = find_class(timeline);
    timeline->kept = true;
    table->open_count--;
    timeline->next = table->kept;
    table->kept = timeline;
    if (++table->kept_count <= FL_TIMELINE_KEPT) {
        return;
    }
    struct timeline **last = &table->kept;
    while ((*last)->next != NULL) {
        last = &(*last)->next;
    }
    close_timeline(table, *last);
    *last = NULL;
    table->kept_count--;
}

/* Asking ------------------------------------------------------------------------------------- */

fl_status timeline_find(const struct timeline_table *table, uint64_t id,
                        const struct timeline **out)
{
    uint64_t first = UINT64_MAX;
    uint64_t last = 0;
    for (const struct timeline *at = table->kept; at != NULL; at = at->next) {
        if (at->id == id || id == 0) {
            *out = at;
            return FL_OK;
        }
        first = at->id < first ? at->id : first;
        last = at->id > last ? at->id : last;
    }
    if (table->kept == NULL) {
        return FL_FAIL(FL_NOT_FOUND,
                       "no timeline is there yet: no request has got a token since the coordinator "
                       "started");
    }
    return FL_FAIL(FL_NOT_FOUND,
                   "no timeline has the id %" PRIu64 ": the last %" PRIu32
                   " are kept, with ids from %" PRIu64 " to %" PRIu64
                   "; an answer's last line tells its id, and without one the latest is shown",
                   id, table->kept_count, first, last);
}

double timeline_ttft_ms(const struct timeline *timeline)
{
    return (double)(timeline->end_ns - timeline->begin_ns) / (double)FL_NS_PER_MS;
}

static int by_exposed(const void *a, const void *b)
{
    const struct fl_phase_summary *left = a;
    const struct fl_phase_summary *right = b;
    if (left->exposed_ms != right->exposed_ms) {
        return left->exposed_ms > right->exposed_ms ? -1 : 1;
    }
    if (left->hidden_ms != right->hidden_ms) {
        return left->hidden_ms > right->hidden_ms ? -1 : 1;
    }
    return strcmp(left->phase, right->phase);
}

uint32_t timeline_phases(const struct timeline *timeline,
                         struct fl_phase_summary out[FL_PHASE_COUNT])
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < FL_PHASE_COUNT; i++) {
        const struct exposed_phase *phase = &timeline->phases[i];
        if (phase->exposed_ns > 0 || phase->hidden_ns > 0) {
            out[count++] = (struct fl_phase_summary){
                .phase = fl_phase_name((enum fl_phase)i),
                .exposed_ms = (double)phase->exposed_ns / (double)FL_NS_PER_MS,
                .hidden_ms = (double)phase->hidden_ns / (double)FL_NS_PER_MS,
                .bytes = phase->bytes};
        }
    }
    qsort(out, count, sizeof(*out), by_exposed);
    return count;
}
