/* timeline.h - where the time to a first token went, request by request.
 *
 * With its first token a request gets a timeline: what the coordinator did for
 * it, and the spans its stages send when they are asked (TRACE, SPANS).  When all
 * have answered, or nobody waits for them any longer, the exposed chain is found
 * and the timeline is kept, for whoever asks for it later.
 *
 *   start ─ own.. ─ take.. ─► keep ─► find
 *
 * The last FL_TIMELINE_KEPT are kept.  All spans together take at most
 * TIMELINE_SPAN_SIZE_MAX: beyond, the oldest timelines lose theirs (their chains
 * stay), and when there are none to lose, new spans are.
 *
 * Classes say what was found, not what was meant: the bytes of every shard that
 * were in its node's memory when the request came, or in the page cache when
 * loading began.
 *
 * Thread:  owner (the main loop).
 * Memory:  a timeline is allocated by start(), its spans as they come; the table frees them.
 * Units:   nanoseconds of the coordinator's clock, bytes.
 */
#ifndef COORDINATOR_TIMELINE_H
#define COORDINATOR_TIMELINE_H

#include <stdbool.h>
#include <stdint.h>

#include "cluster/clock_map.h"
#include "coordinator/exposed_chain.h"
#include "coordinator/exposed_phases.h"
#include "proto/base/status.h"
#include "proto/client_message.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TIMELINE_SPAN_SIZE_MAX = 16 << 20, TIMELINE_OWN_MAX = 8 + 2 * FL_STAGE_COUNT_MAX };

struct timeline_stage {
    char node[FL_NAME_MAX];
    uint64_t incarnation;
    struct fl_stage_summary summary; /* `node` is the one above */
    uint64_t bytes;                  /* of its shard, as progress counts them */
    uint64_t resident_bytes;         /* of these, in its memory at t0 */

    /* From its answer. */
    bool answered;
    bool clock_known;
    int64_t clock_offset_ns; /* its clock less ours */
    uint64_t clock_error_ns;
    uint64_t slept_ns;
    struct fl_start_record start; /* its times are the node's */
    uint64_t overwritten;         /* of the lost ones: before the node could send them */
    uint64_t spans_lost;
    uint32_t span_count; /* mapped to our clock */
    struct fl_span *spans;
};

struct timeline {
    struct timeline *next; /* kept ones, the latest first */
    uint64_t id;
    uint64_t plan_id;
    uint64_t request_id;
    char model[FL_MODEL_NAME_MAX];
    uint64_t begin_ns; /* t0 */
    uint64_t token_ns; /* the first token came */
    uint64_t end_ns;   /* its text left */
    uint32_t prompt_count;
    double predicted_ms; /* 0: there was no prediction */
    uint32_t stage_count;
    struct timeline_stage *stages; /* [stage_count] */
    uint32_t own_count;
    struct fl_span *own; /* [own_count] of TIMELINE_OWN_MAX */

    /* From keep() on. */
    bool kept;
    bool complete; /* nothing is missing */
    enum fl_class class_;
    uint32_t segment_count;
    struct exposed_segment *segments; /* [segment_count] */
    struct exposed_phase phases[FL_PHASE_COUNT];
};

struct timeline_table;

FL_MUST_CHECK fl_status timeline_table_open(struct timeline_table **out);
/* Timelines that were not kept must be: none is left out. */
void timeline_table_close(struct timeline_table *table);

/* A timeline to fill in, to be given to keep() in the end; NULL without memory.
 * stage_count: 1 .. FL_STAGE_COUNT_MAX. */
struct timeline *timeline_start(struct timeline_table *table, uint32_t stage_count);

/* Adds a span of the coordinator's; returns it. */
struct fl_span *timeline_own(struct timeline *timeline, enum fl_phase phase, uint64_t start_ns,
                             uint64_t end_ns);

/* What stage `index` answered.  `map` leads from its clock to ours; spans that it cannot place count as
 * lost, as do those beyond the limits.  After a stage's last message nothing is taken. */
void timeline_take(struct timeline_table *table, struct timeline *timeline, uint32_t index,
                   const struct fl_spans *spans, const struct clock_map *map);

/* True when every stage has answered. */
bool timeline_answered(const struct timeline *timeline);

/* Find chain, phases and class, and keep it; owned by the table from now on, until as many others
 * were kept. */
void timeline_keep(struct timeline_table *table, struct timeline *timeline);

/* The timeline, or for id 0 the latest.  FL_NOT_FOUND with a sentence. */
FL_MUST_CHECK fl_status timeline_find(const struct timeline_table *table, uint64_t id,
                                      const struct timeline **out);

/* The phases that took time, the most exposed first; returns their count.  The exposed ones sum to
 * timeline_ttft_ms(). */
uint32_t timeline_phases(const struct timeline *timeline,
                         struct fl_phase_summary out[FL_PHASE_COUNT]);
double timeline_ttft_ms(const struct timeline *timeline);

/* Bytes of spans held, of all timelines. */
size_t timeline_span_size(const struct timeline_table *table);

#ifdef __cplusplus
}
#endif
#endif
