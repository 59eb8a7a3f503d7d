/* planner.h - cuts a model into stages, one for each node that gets one.
 *
 * Stages are contiguous and in the nodes' order.  Every node is used, unless
 * it cannot hold a single layer or there are more nodes than layers; then it
 * is left out, and the plan says so.  Among the cuts that fit, the one is taken
 * whose fullest node is the least full (bytes needed ÷ memory), and among
 * those the most even one.  The first stage's embedding takes its memory away
 * from the rest but is no load: its table is read after everything else, and a
 * prompt's rows by themselves (node/embedding_reader.h), so no token waits for
 * it.  The head is read before the first token and counts.  The same input
 * gives the same plan.
 *
 *   needed = shard (packed weights; the first stage's embedding, the last one's
 *            head; a tied head on the embedding's own node once)
 *          + KV cache for `context_min` positions
 *          + PLANNER_OVERHEAD_SIZE + buffers for `chunk_rows` rows
 *
 * What is left of a node's KV budget becomes more KV blocks; every stage has
 * the same number of them, so the least free one decides.
 *
 * Thread:  any; a pure function.
 * Memory:  arguments are borrowed for the call.
 * Units:   sizes in bytes, KV blocks of KV_BLOCK_POSITIONS positions.
 */
#ifndef PIPELINE_PLANNER_H
#define PIPELINE_PLANNER_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/cluster_message.h"
#include "proto/model_shape.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PLANNER_OVERHEAD_SIZE = 32 << 20, /* a stage's program, loader, wires and scratch */
    PLANNER_KV_BLOCK_COUNT_MAX = 1 << 20,
    PLANNER_KV_BLOCK_POSITIONS =
        32, /* positions of one KV block, for those who may not see kernels/ */
};

struct planner_node {
    const char *name;
    uint64_t memory_size; /* it may use for everything a stage needs */
    uint64_t kv_size_max; /* of that, for KV; 0: no more than context_min needs */
};

struct planner_request {
    const struct fl_manifest *manifest; /* of the whole model, checked */
    const struct planner_node *nodes;   /* [node_count], in pipeline order */
    uint32_t node_count;                /* 1 .. FL_STAGE_COUNT_MAX */
    uint32_t context_min;  /* positions there must be KV for, 1 .. the model's context */
    uint32_t chunk_rows;   /* 1 .. FL_CHUNK_MAX */
    const uint32_t *split; /* [node_count], layers of each node, 0: none; or NULL: choose */
};

struct planner_stage {
    uint32_t node; /* index into nodes */
    uint32_t layer_first;
    uint32_t layer_count;
    bool has_embed;
    bool has_head;
    uint64_t shard_size;    /* packed */
    uint64_t kv_size;       /* of the plan's KV blocks */
    uint64_t overhead_size; /* the rest */
};

struct planner_left_out {
    uint32_t node;
    uint64_t missing_size; /* for a single layer; 0: there are more nodes than layers, or the split
                              says so */
};

struct planner_plan {
    uint32_t stage_count;
    struct planner_stage stages[FL_STAGE_COUNT_MAX];
    uint32_t kv_block_count; /* on every stage */
    uint32_t left_out_count;
    struct planner_left_out left_out[FL_STAGE_COUNT_MAX];
};

/* FL_NO_MEMORY when the model does not fit, with a sentence that says how much is missing where;
 * FL_INVALID for a split that is none of this model; FL_TOO_LARGE for more context than the model
 * has; FL_NOT_FOUND without nodes. */
FL_MUST_CHECK fl_status planner_plan(const struct planner_request *request,
                                     struct planner_plan *out);

#ifdef __cplusplus
}
#endif
#endif
