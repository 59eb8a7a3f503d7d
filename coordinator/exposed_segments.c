#include "coordinator/exposed_segments.h"

#include <stdbool.h>

#include "proto/base/status.h"

enum { SEGMENT_MAX = FL_TIMELINE_SEGMENT_MAX, SEGMENT_KEEP = SEGMENT_MAX * 3 / 4 };

/* Melts short segments into their later neighbours until there is room; never two in a row, so that
 * a chain of like segments stays one. */
static void thin(struct exposed_segments *list)
{
    for (uint64_t least = 1000; list->count > SEGMENT_KEEP; least *= 2) {
        uint32_t excess = list->count - SEGMENT_KEEP;
        uint32_t kept = 1;
        bool melted = false;
        for (uint32_t i = 1; i < list->count; i++) {
            const struct exposed_segment *segment = &list->segments[i];
            melted = !melted && excess > 0 && segment->end_ns - segment->start_ns < least;
            if (melted) {
                list->segments[kept - 1].start_ns = segment->start_ns;
                excess--;
            } else {
                list->segments[kept++] = *segment;
            }
        }
        list->count = kept;
    }
}

void exposed_segments_begin(struct exposed_segments *list,
                            const struct exposed_chain_config *config, struct exposed_segment *out)
{
    *list = (struct exposed_segments){.config = config, .segments = out, .now_ns = config->end_ns};
}

/* The one added last; while there is none, where it will be. */
static struct exposed_segment *last_segment(struct exposed_segments *list)
{
    return &list->segments[list->count > 0 ? list->count - 1 : 0];
}

void exposed_segments_add(struct exposed_segments *list, struct exposed_segment segment)
{
    const uint64_t begin_ns = list->config->begin_ns;
    segment.start_ns = segment.start_ns > begin_ns ? segment.start_ns : begin_ns;
    segment.end_ns = list->now_ns;
    if (segment.start_ns >= segment.end_ns) {
        return;
    }
    struct exposed_segment *last = last_segment(list);
    if (list->count > 0 && last->phase == segment.phase && last->stage == segment.stage &&
        last->cause == segment.cause) {
        last->start_ns = segment.start_ns;
        last->bytes += segment.bytes;
    } else {
        if (list->count == SEGMENT_MAX) {
            thin(list);
        }
        list->segments[list->count++] = segment;
    }
    list->now_ns = segment.start_ns;
}

void exposed_segments_add_gap(struct exposed_segments *list, uint32_t stage, uint64_t start_ns)
{
    struct exposed_segment *last = last_segment(list);
    if (list->count > 0 && last->stage == stage && start_ns < list->now_ns &&
        list->now_ns - start_ns < EXPOSED_NEAR_NS && start_ns >= list->config->begin_ns) {
        last->start_ns = list->now_ns = start_ns;
        return;
    }
    const bool whole = stage == EXPOSED_CHAIN_COORDINATOR || list->config->stages[stage].whole;
    exposed_segments_add(
        list, (struct exposed_segment){.start_ns = start_ns,
                                       .stage = stage,
                                       .phase = whole ? FL_PHASE_WAKE : FL_PHASE_UNKNOWN});
}

uint64_t exposed_segments_share(uint64_t whole, uint64_t numerator, uint64_t denominator)
{
    if (numerator >= denominator) {
        return whole;
    }
    const uint64_t share = (uint64_t)((double)whole * ((double)numerator / (double)denominator));
    return share < whole ? share : whole;
}

uint64_t exposed_segments_bytes(const struct exposed_segments *list, const struct fl_span *span)
{
    const uint64_t begin_ns = list->config->begin_ns;
    const uint64_t start = span->start_ns > begin_ns ? span->start_ns : begin_ns;
    const uint64_t end = span->end_ns < list->now_ns ? span->end_ns : list->now_ns;
    return exposed_segments_share(span->bytes, end > start ? end - start : 0,
                                  span->end_ns - span->start_ns);
}

void exposed_segments_add_span(struct exposed_segments *list, const struct fl_span *span,
                               uint32_t stage)
{
    exposed_segments_add_gap(list, stage, span->end_ns);
    exposed_segments_add(list, (struct exposed_segment){.start_ns = span->start_ns,
                                                        .bytes = exposed_segments_bytes(list, span),
                                                        .stage = stage,
                                                        .phase = span->phase,
                                                        .cause = span->phase == FL_PHASE_QUEUE
                                                                     ? span->cause
                                                                     : FL_CAUSE_NONE});
}

/* Our own invariant, whatever anybody sent. */
static void check(const struct exposed_chain_config *config, const struct exposed_segment *out,
                  uint32_t count)
{
    uint64_t at = config->begin_ns;
    for (uint32_t i = 0; i < count; i++) {
        FL_ASSERT(out[i].start_ns == at && out[i].end_ns > at);
        at = out[i].end_ns;
    }
    FL_ASSERT(at == config->end_ns);
}

uint32_t exposed_segments_finish(struct exposed_segments *list)
{
    exposed_segments_add(list, (struct exposed_segment){.start_ns = list->config->begin_ns,
                                                        .stage = EXPOSED_CHAIN_COORDINATOR,
                                                        .phase = FL_PHASE_UNKNOWN});
    for (uint32_t i = 0; i < list->count / 2; i++) {
        const struct exposed_segment later = list->segments[i];
        list->segments[i] = list->segments[list->count - 1 - i];
        list->segments[list->count - 1 - i] = later;
    }
    check(list->config, list->segments, list->count);
    return list->count;
}
