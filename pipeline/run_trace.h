/* run_trace.h - what a compute thread records of its runs.
 *
 * A run that holds prompt rows is written down task by task, each with the
 * dependency that came last: its piece's weights, its input, or the thread
 * itself, which was at another task.  From a first token one walks back along
 * these.  A run of decode rows only is one span, so that a long answer costs
 * little and does not push the prompt out of the ring.
 *
 *   begin, join ─► (task_begin ─ task)* ─► end
 *
 * Thread:  owner (the compute thread); one trace serves all its stages.
 * Memory:  none; the ring is borrowed.
 * Units:   nanoseconds of the clock that is handed in; 0: not known.
 */
#ifndef PIPELINE_RUN_TRACE_H
#define PIPELINE_RUN_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/clock.h"
#include "proto/span_ring.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of one thread. */
struct run_trace {
    struct fl_span_ring *spans;
    struct fl_clock clock;
    uint64_t busy_ns; /* when the thread's last task ended */
};

/* Of one run. */
struct run_times {
    uint64_t plan_id;
    uint64_t number;     /* of its stage, from 1 */
    uint64_t request_id; /* 0: several */
    uint64_t input_ns;   /* when the next task's input was there */
    uint32_t position;   /* of the first row */
    uint32_t rows;
    bool prefill;         /* it holds prompt rows */
    struct fl_span whole; /* of decode rows: the one span there will be */
};

struct run_task {
    enum fl_phase phase;
    uint32_t piece; /* FL_SPAN_NO_PIECE */
    uint32_t rows;
    uint64_t bytes; /* of weights as they lie in the file, or of rows */
    uint64_t start_ns;
    uint64_t end_ns;     /* 0: now */
    uint64_t weights_ns; /* when its weights were there; 0: it needs none */
};

/* All take NULL and do nothing then; now() is 0. */
uint64_t run_trace_now(const struct run_trace *trace);

/* A plan's memory or KV cache was taken since `start_ns`; returns when it was. */
uint64_t run_trace_open(struct run_trace *trace, enum fl_phase phase, uint64_t plan_id,
                        uint64_t start_ns, uint64_t bytes);

/* Rows of a request's prompt joined the run now; they could have been used at `ready_ns`. */
void run_trace_join(struct run_trace *trace, const struct run_times *run, uint64_t request_id,
                    uint32_t position, uint32_t rows, uint64_t ready_ns);

/* A task of the run is over, and its output is the input of the next. */
void run_trace_task(struct run_trace *trace, struct run_times *run, const struct run_task *task);

/* The run is over: one of decode rows becomes a span. */
void run_trace_end(struct run_trace *trace, struct run_times *run);

#ifdef __cplusplus
}
#endif
#endif
