/* stage.h - a contiguous range of layers, and everything that flows through it.
 *
 * A stage takes requests (admit), then rows: tokens on the first stage,
 * activations on the others.  step() runs one task: one run of rows through one
 * piece.  A run is formed of whatever has arrived, decode rows first, up to the
 * plan's chunk; results do not depend on how.  The lowest (run, piece) whose
 * weights are there goes first; a run never overtakes an earlier one.  When a
 * run leaves the last piece, its rows are an output: activations for the next
 * stage, or on the last one a sampled token.
 *
 *   take_*() ─► inbox ─► run ─► piece 0 .. n-1 ─► output ─► poll()
 *
 * The stage starts no thread and does no I/O: a node's compute thread calls it
 * in a loop, the simulator and the tests from theirs.
 *
 * Requests and order between links: see proto/cluster_message.h.  Rows for a
 * request above every admitted id wait in the inbox; rows of ended ones are
 * dropped.  Rows in the inbox are covered by credits: the sender may have
 * `stage_credit_rows()` rows under way, and gets back what CREDIT outputs say.
 *
 * With a trace the stage records what each run waited for (pipeline/run_trace.h);
 * `arrived_ns` of what it takes is when the wire had it, on the trace's clock, 0
 * when that is not known.
 *
 * Thread:  owner (the compute thread).
 * Memory:  open() takes everything from the device and malloc; steps allocate nothing.
 * Shapes:  D model width; rows are [rows, D] f32.
 */
#ifndef PIPELINE_STAGE_H
#define PIPELINE_STAGE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"
#include "pipeline/run_trace.h"
#include "pipeline/weight_store.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    STAGE_RUN_MAX = 4,        /* runs under way at once */
    STAGE_SEQUENCE_MAX = 256, /* largest plan.sequence_max */
};

struct stage;

/* Embedding rows of the first stage before its table is in memory.
 * read() fills out [count, D] and returns FL_OK, or starts reading and returns FL_AGAIN: the stage
 * asks again with the same ids, unless the requests that wanted them ended meanwhile: then the next
 * call may be for others.  An error ends the requests that asked.  *out_ready_ns gets when the rows
 * were there, if the source knows. */
struct embedding_source {
    fl_status (*read)(void *ctx, const uint32_t *ids, uint32_t count, float *out,
                      uint64_t *out_ready_ns);
    void *ctx;
};

struct stage_config {
    const struct fl_plan *plan;   /* borrowed until close */
    struct device *device;        /* borrowed until close */
    struct weight_store *weights; /* borrowed until close */
    struct embedding_source
        embed;               /* first stage only; used while weight_store_embed() says AGAIN */
    struct run_trace *trace; /* the thread's, borrowed until close; NULL: nothing is recorded */
    uint64_t begun_ns;       /* when the plan's memory began to be taken; 0: with open() */
};

/* Bytes of KV cache and of buffers that a plan's stage takes beside its weights. */
uint64_t stage_kv_memory(const struct fl_plan *plan);
uint64_t stage_buffer_memory(const struct fl_plan *plan);

/* FL_NO_MEMORY with the number wanted. */
FL_MUST_CHECK fl_status stage_open(const struct stage_config *config, struct stage **out);
void stage_close(struct stage *stage);

/* Rows the previous stage may have under way at first. */
uint32_t stage_credit_rows(const struct stage *stage);

/* A request starts or, with `keep`, continues its sequence.  What is refused (FL_INVALID, FL_NO_MEMORY
 * when the KV blocks are not there, FL_BUSY over sequence_max) is the coordinator's error: the stage
 * is unharmed. */
FL_MUST_CHECK fl_status stage_admit(struct stage *stage, const struct fl_admit *admit,
                                    uint64_t arrived_ns);
/* Unknown requests and sequences are late and ignored. */
void stage_end(struct stage *stage, const struct fl_end *end);
void stage_drop(struct stage *stage, const struct fl_drop *drop);

/* Rows from the previous stage, copied.  FL_PROTOCOL: beyond the credit, wrong width, out of place. */
FL_MUST_CHECK fl_status stage_take_activations(struct stage *stage,
                                               const struct fl_activation_header *header,
                                               const float *rows, uint64_t arrived_ns);
/* First stage: a token sampled on a last stage elsewhere. */
FL_MUST_CHECK fl_status stage_take_token(struct stage *stage, const struct fl_token *token,
                                         uint64_t arrived_ns);

/* Run one task.  FL_AGAIN when none is runnable: weights, rows, or room for outputs are missing.
 * FL_DEVICE and other failures break the stage. */
FL_MUST_CHECK fl_status stage_step(struct stage *stage);

enum stage_output_kind {
    STAGE_OUTPUT_ACTIVATIONS, /* send to the next stage, then stage_return() the buffer */
    STAGE_OUTPUT_TOKEN,   /* send to the coordinator, and to the first stage if it is elsewhere */
    STAGE_OUTPUT_CREDIT,  /* tell the previous stage */
    STAGE_OUTPUT_FAILURE, /* a request failed here: tell the coordinator */
};

struct stage_output {
    enum stage_output_kind kind;
    struct fl_activation_header header; /* ACTIVATIONS: one segment of a run */
    const float *rows;                  /* [header.rows, D], host memory */
    uint32_t buffer;                    /* for stage_return() */
    struct fl_token token;              /* TOKEN; arrays valid until the next stage_poll() */
    uint32_t credit_rows;               /* CREDIT */
    struct fl_failure failure;          /* FAILURE */
};

/* The next output, FL_AGAIN when there is none. */
FL_MUST_CHECK fl_status stage_poll(struct stage *stage, struct stage_output *out);

/* The rows of an ACTIVATIONS output were sent (each output returns its buffer once). */
void stage_return(struct stage *stage, uint32_t buffer);

/* KV blocks not reserved, for status. */
uint32_t stage_kv_blocks_free(const struct stage *stage);

#ifdef __cplusplus
}
#endif
#endif
