#include "pipeline/run_trace.h"

#include <stddef.h>

uint64_t run_trace_now(const struct run_trace *trace)
{
    return trace != NULL ? fl_clock_now(&trace->clock) : 0;
}

uint64_t run_trace_open(struct run_trace *trace, enum fl_phase phase, uint64_t plan_id,
                        uint64_t start_ns, uint64_t bytes)
{
    if (trace == NULL) {
        return 0;
    }
    const uint64_t now = run_trace_now(trace);
    const struct fl_span span = {
        .start_ns = start_ns,
        .end_ns = now,
        .busy_ns = now - start_ns,
        .plan_id = plan_id,
        .bytes = bytes,
        .piece = FL_SPAN_NO_PIECE,
        .phase = phase,
    };
    fl_span_ring_put(trace->spans, &span);
    trace->busy_ns = now;
    return now;
}

void run_trace_join(struct run_trace *trace, const struct run_times *run, uint64_t request_id,
                    uint32_t position, uint32_t rows, uint64_t ready_ns)
{
    if (trace == NULL) {
        return;
    }
    const uint64_t now = run_trace_now(trace);
    const bool was_busy = trace->busy_ns > ready_ns && ready_ns != 0;
    const struct fl_span span = {
        .start_ns = was_busy ? trace->busy_ns : now,
        .end_ns = now,
        .plan_id = run->plan_id,
        .request_id = request_id,
        .run = run->number,
        .cause_ns = ready_ns,
        .piece = FL_SPAN_NO_PIECE,
        .position = position,
        .rows = rows,
        .phase = FL_PHASE_JOIN,
        .cause = ready_ns == 0 ? FL_CAUSE_NONE
                 : was_busy    ? FL_CAUSE_BUSY
                               : FL_CAUSE_INPUT,
    };
    fl_span_ring_put(trace->spans, &span);
}

/* Of what a task had to wait for, the last.  A task that follows another of its run finds the
 * thread busy until its input is there: that is the input's doing. */
static void find_cause(const struct run_trace *trace, const struct run_times *run,
                       const struct run_task *task, struct fl_span *span)
{
    span->cause = run->input_ns != 0 ? FL_CAUSE_INPUT : FL_CAUSE_NONE;
    span->cause_ns = run->input_ns;
    if (task->weights_ns > span->cause_ns) {
        span->cause = FL_CAUSE_WEIGHTS;
        span->cause_ns = task->weights_ns;
    }
    if (trace->busy_ns > span->cause_ns) {
        span->cause = FL_CAUSE_BUSY;
        span->cause_ns = trace->busy_ns;
    }
}

static void add_decode(struct run_times *run, const struct fl_span *task)
{
    struct fl_span *whole = &run->whole;
    if (whole->phase == FL_PHASE_UNKNOWN) {
        *whole = *task;
        whole->phase = FL_PHASE_DECODE;
        whole->piece = FL_SPAN_NO_PIECE;
        return;
    }
    whole->end_ns = task->end_ns;
    whole->busy_ns += task->busy_ns;
    whole->bytes += task->bytes;
}

void run_trace_task(struct run_trace *trace, struct run_times *run, const struct run_task *task)
{
    if (trace == NULL) {
        return;
    }
    const uint64_t end_ns = task->end_ns != 0 ? task->end_ns : run_trace_now(trace);
    struct fl_span span = {
        .start_ns = task->start_ns,
        .end_ns = end_ns,
        .busy_ns = end_ns - task->start_ns,
        .plan_id = run->plan_id,
        .request_id = run->request_id,
        .run = run->number,
        .bytes = task->bytes,
        .piece = task->piece,
        .position = run->position,
        .rows = task->rows,
        .phase = task->phase,
    };
    find_cause(trace, run, task, &span);
    if (run->prefill) {
        fl_span_ring_put(trace->spans, &span);
    } else {
        add_decode(run, &span);
    }
    run->input_ns = end_ns;
    trace->busy_ns = end_ns;
}

void run_trace_end(struct run_trace *trace, struct run_times *run)
{
    if (trace != NULL && run->whole.phase != FL_PHASE_UNKNOWN) {
        fl_span_ring_put(trace->spans, &run->whole);
        run->whole.phase = FL_PHASE_UNKNOWN;
    }
}
