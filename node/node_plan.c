#include "node/node_plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* With a tied head on the same stage the embedding is not loaded: its rows are the head's. */
static uint64_t bytes_to_load(const struct fl_manifest *manifest)
{
    bool has_head = false;
    uint64_t all = 0;
    uint64_t embed = 0;
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        const uint64_t size = fl_piece_size(&manifest->pieces[i]);
        has_head = has_head || manifest->pieces[i].kind == FL_PIECE_HEAD;
        embed += manifest->pieces[i].kind == FL_PIECE_EMBED ? size : 0;
        all += size;
    }
    return manifest->shape.tied_head && has_head ? all - embed : all;
}

fl_status node_plan_make(const struct fl_plan *plan, struct node_plan **out)
{
    const size_t stages_size = plan->stage_count * sizeof(plan->stages[0]);
    const size_t pieces_size = plan->manifest.piece_count * sizeof(plan->manifest.pieces[0]);
    struct node_plan *copy = calloc(1, sizeof(*copy));
    struct fl_stage *stages = malloc(stages_size);
    struct fl_piece *pieces = malloc(pieces_size);
    if (copy == NULL || stages == NULL || pieces == NULL) {
        free(copy);
        free(stages);
        free(pieces);
        return FL_FAIL(FL_NO_MEMORY, "plan of %zu bytes: no memory", stages_size + pieces_size);
    }
    copy->plan = *plan;
    copy->plan.stages = memcpy(stages, plan->stages, stages_size);
    copy->plan.manifest.pieces = memcpy(pieces, plan->manifest.pieces, pieces_size);
    copy->pieces_total = plan->manifest.piece_count;
    copy->bytes_total = bytes_to_load(&copy->plan.manifest);
    atomic_init(&copy->resident_unknown, 1);
    *out = copy;
    return FL_OK;
}

void node_plan_free(struct node_plan *plan)
{
    if (plan != NULL) {
        free(plan->plan.stages);
        free(plan->plan.manifest.pieces);
        free(plan);
    }
}

void node_plan_fail(struct node_plan *plan, fl_status code, const char *text)
{
    if (atomic_exchange_explicit(&plan->failure_taken, 1, memory_order_relaxed) != 0) {
        return;
    }
    snprintf(plan->failure_text, sizeof(plan->failure_text), "%s", text);
    /* Publishes the text; pairs with the acquire where the wire thread reads `failed`. */
    atomic_store_explicit(&plan->failed, (int)code, memory_order_release);
}
