/* run.h - rows that go through the pieces together.
 *
 * A run is a batch of rows of one or more requests; a segment is the part of it
 * that belongs to one request, at consecutive positions.  A segment whose
 * request ended while the run was under way is dead: its rows are computed, into
 * the spare KV block, and thrown away.
 *
 * Thread:  owner (the stage's loop).
 * Memory:  run_open() takes it all.
 * Shapes:  x [row_max, D].
 */
#ifndef PIPELINE_RUN_H
#define PIPELINE_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/device.h"
#include "pipeline/forward.h"
#include "pipeline/run_trace.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RUN_DEAD UINT32_MAX

struct run_segment {
    uint32_t request; /* the stage's index of it, or RUN_DEAD */
    uint32_t position;
    uint32_t row; /* first row in the run */
    uint32_t rows;
    bool sample;       /* the last row's logits are wanted */
    uint64_t ready_ns; /* when the last of its rows could be used */
};

struct run {
    uint32_t row_count;
    uint32_t segment_count;
    uint32_t live_count; /* segments that are not dead */
    uint32_t piece;      /* next piece to go through, counted along the stage's chain */
    bool has_input;      /* x holds the first piece's input */
    struct run_times times;
    uint32_t row_max;
    struct run_segment *segments;   /* [row_max] */
    uint32_t *ids;                  /* [row_max]: tokens, on the first stage */
    uint32_t *positions;            /* [row_max] */
    struct attention_row *sequence; /* [row_max] */
    float *x;                       /* [row_max, D], device memory */
};

/* Bytes on host and device. */
uint64_t run_memory(uint32_t row_max, uint32_t width);
FL_MUST_CHECK fl_status run_open(struct device *device, uint32_t row_max, uint32_t width,
                                 struct run *out);
void run_close(struct device *device, uint32_t width, struct run *run);

/* Forget all rows. */
void run_clear(struct run *run);

/* One more row; returns its index.  It joins the last segment when it follows it. */
uint32_t run_add(struct run *run, uint32_t request, uint32_t position, const uint32_t *blocks,
                 bool sample);
/* When the row that was added last could be used. */
void run_ready(struct run *run, uint64_t ready_ns);

/* The request ended: its rows, if any, turn to the spare block. */
void run_kill(struct run *run, uint32_t request, const uint32_t *spare);

/* Somebody still waits for a token that follows the segment, and how many do for the run's. */
bool run_wants_sample(const struct run_segment *segment);
uint32_t run_sample_count(const struct run *run);

struct forward_rows run_rows(const struct run *run);

#ifdef __cplusplus
}
#endif
#endif
