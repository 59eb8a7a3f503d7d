/* node_plan.h - one plan on this node, shared by its three threads.
 *
 * The wire thread makes it of a PLAN message and frees it in the end; between,
 * the compute thread owns its stage and its weights, and the loader fills them.
 * The plan itself never changes.  What the loader reports it leaves in the
 * atomics below, for whoever wants to know.
 *
 * Thread:  plan and names constant; each field below says who writes it.
 * Memory:  make() copies the message's arrays; free() frees.
 */
#ifndef NODE_NODE_PLAN_H
#define NODE_NODE_PLAN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/cluster_message.h"

enum { NODE_PLAN_MAX = 8 };

struct node_plan {
    struct fl_plan plan; /* its arrays belong to it */

    /* Loader: bytes of pieces that are done, by where they came from. */
    _Atomic uint64_t bytes_file;
    _Atomic uint64_t bytes_cache;
    _Atomic uint64_t bytes_fetched;
    _Atomic uint32_t pieces_done;
    uint32_t pieces_total; /* constant, as bytes_total is */
    uint64_t bytes_total;

    /* Loader: how the shard was read; the first two and mhz_before early, the rest at the end. */
    _Atomic int resident_unknown; /* of a piece at least; 1 until one was measured */
    _Atomic uint64_t resident_before;
    _Atomic uint64_t resident_after;
    _Atomic uint64_t medium_bytes;
    _Atomic uint32_t mhz_before;
    _Atomic uint32_t mhz_after;

    /* Whoever fails first: compute or loader.  The text is written before `failed` is. */
    _Atomic int failure_taken;
    _Atomic int failed; /* fl_status */
    char failure_text[FL_ERROR_TEXT_MAX];
};

/* FL_NO_MEMORY. */
FL_MUST_CHECK fl_status node_plan_make(const struct fl_plan *plan, struct node_plan **out);
void node_plan_free(struct node_plan *plan);

/* The plan is broken on this node; the first caller's sentence stays.  Any thread. */
void node_plan_fail(struct node_plan *plan, fl_status code, const char *text);

/* The stage of this node. */
static inline const struct fl_stage *node_plan_stage(const struct node_plan *plan)
{
    return &plan->plan.stages[plan->plan.stage_index];
}

#endif
