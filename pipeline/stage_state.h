/* stage_state.h - what the parts of a stage share.
 *
 * Private to pipeline/stage*.c.  A row's way through the files:
 *
 *   stage_request.c   requests: admitted, failed, ended
 *   stage_intake.c    rows and tokens that arrive for them
 *   stage_run.c       runs: formed of what has arrived, let go when complete
 *   stage_task.c      one task of a run: embedding, half a layer, head and samples
 *   stage.c           opens and closes it all, chooses the next task, gives the outputs
 *
 * Thread:  owner (the stage's loop).
 * Memory:  stage_open() allocates, stage_close() frees.
 * Shapes:  D model width, V vocabulary.
 */
#ifndef PIPELINE_STAGE_STATE_H
#define PIPELINE_STAGE_STATE_H

#include "pipeline/forward.h"
#include "pipeline/inbox.h"
#include "pipeline/kv_cache.h"
#include "pipeline/outbox.h"
#include "pipeline/run.h"
#include "pipeline/sampler.h"
#include "pipeline/stage.h"

/* A request admitted and not ended.  Its rows are, by position:
 *   0 .. next_run - 1        in the KV cache, or in a run
 *   next_run .. next_in - 1  in the inbox (first stage: known tokens) */
struct stage_request {
    bool used;
    uint64_t id;
    uint64_t arrived_ns; /* its ADMIT, */
    uint64_t token_ns;   /* and, on the first stage, its last token */
    uint32_t sequence;   /* in the KV cache */
    uint32_t next_run;
    uint32_t next_in;
    uint32_t prompt_count;
    uint32_t position_max;
    uint32_t max_tokens;
    uint32_t stop_count;
    uint32_t stop_tokens[FL_STOP_TOKEN_MAX];
    struct fl_sampling sampling;
    bool failed;         /* its rows are dropped until it ends */
    bool failure_unsaid; /* `failure` is still to be polled */
    uint32_t failure_code;
    char failure[FL_ERROR_TEXT_MAX];
};

struct stage {
    const struct fl_plan *plan;
    const struct fl_model_shape *shape;
    struct device *device;
    struct weight_store *weights;
    struct embedding_source embed;
    bool is_first;
    bool is_last;
    uint32_t layer_first;
    bool all_there;        /* no_overlap: every piece was seen published, */
    uint64_t all_there_ns; /* the last of them then */
    struct run_trace *trace;
    uint32_t embed_piece; /* first stage: index of EMBED */

    uint32_t chain_count; /* pieces that compute, in order */
    uint32_t *chain;      /* [chain_count] indexes into the manifest */

    uint64_t admitted_max;          /* the highest request id met */
    struct stage_request *requests; /* [sequence_max] */

    /* Runs run_first .. run_end - 1 (counted for ever, run n is n % STAGE_RUN_MAX) are under way. */
    uint64_t run_first;
    uint64_t run_end;
    struct run runs[STAGE_RUN_MAX];

    float *host_rows;   /* [row_max, D]: input of a run on its way to the device */
    float *host_logits; /* [V], last stage */
    struct inbox *inbox;
    struct outbox *outbox;
    struct kv_cache *kv;
    struct forward *forward;
    struct sampler *sampler;
};

/* What needs both is ready then. */
static inline uint64_t stage_later(uint64_t a_ns, uint64_t b_ns)
{
    return a_ns > b_ns ? a_ns : b_ns;
}

#endif
