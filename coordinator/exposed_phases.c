#include "coordinator/exposed_phases.h"

#include <string.h>

#include "coordinator/exposed_segments.h"

enum { OWN_RUN_MAX = 8 };

/* The request's runs under way; a stage has a few at once. */
struct own_runs {
    uint64_t runs[OWN_RUN_MAX];
    uint32_t next;
};

static bool has_run(const struct own_runs *own, uint64_t run)
{
    for (uint32_t i = 0; i < OWN_RUN_MAX; i++) {
        if (own->runs[i] == run) {
            return run != 0;
        }
    }
    return false;
}

static void add_busy(const struct exposed_chain_config *config, const struct fl_span *span,
                     struct exposed_phase *out)
{
    const uint64_t start = span->start_ns > config->begin_ns ? span->start_ns : config->begin_ns;
    const uint64_t end = span->end_ns < config->end_ns ? span->end_ns : config->end_ns;
    if (start > end || span->phase == FL_PHASE_JOIN || span->phase == FL_PHASE_RECEIVE) {
        return;
    }
    const uint64_t whole = span->end_ns - span->start_ns;
    const uint64_t busy = span->busy_ns < whole ? span->busy_ns : whole;
    const uint64_t within = exposed_segments_share(busy, end - start, whole);
    out->hidden_ns += within < UINT64_MAX - out->hidden_ns ? within : UINT64_MAX - out->hidden_ns;
    out->bytes += exposed_segments_share(span->bytes, end - start, whole);
}

static void add_stage(const struct exposed_chain_config *config, const struct exposed_stage *stage,
                      struct exposed_phase out[FL_PHASE_COUNT])
{
    struct own_runs own = {0};
    for (uint32_t i = 0; i < stage->span_count; i++) {
        const struct fl_span *span = &stage->spans[i];
        if (span->phase == FL_PHASE_JOIN && span->request_id == config->request_id) {
            own.runs[own.next++ % OWN_RUN_MAX] = span->run;
        }
        const bool task = span->lane == FL_LANE_COMPUTE && span->run != 0;
        const bool ours = span->request_id == config->request_id ||
                          (span->request_id == 0 && (!task || has_run(&own, span->run)));
        if (ours && (unsigned)span->phase < FL_PHASE_COUNT) {
            add_busy(config, span, &out[span->phase]);
        }
    }
}

void exposed_phases_sum(const struct exposed_chain_config *config,
                        const struct exposed_segment *segments, uint32_t count,
                        struct exposed_phase out[FL_PHASE_COUNT])
{
    memset(out, 0, FL_PHASE_COUNT * sizeof(*out));
    for (uint32_t i = 0; i < config->stage_count; i++) {
        add_stage(config, &config->stages[i], out);
    }
    for (uint32_t i = 0; i < config->own_count; i++) {
        if ((unsigned)config->own[i].phase < FL_PHASE_COUNT) {
            add_busy(config, &config->own[i], &out[config->own[i].phase]);
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        out[segments[i].phase].exposed_ns += segments[i].end_ns - segments[i].start_ns;
    }
    /* Exposed time is not hidden; waiting for a medium or a wire is exposed and not busy. */
    for (uint32_t i = 0; i < FL_PHASE_COUNT; i++) {
        const uint64_t busy = out[i].hidden_ns;
        out[i].hidden_ns = busy > out[i].exposed_ns ? busy - out[i].exposed_ns : 0;
    }
}
