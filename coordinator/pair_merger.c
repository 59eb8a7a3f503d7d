#include "coordinator/pair_merger.h"

#include <stdlib.h>

#include "coordinator/token_list.h"

enum { KEPT_COUNT = 16384 }; /* symbols and candidates kept between texts */

struct pair_candidate {
    uint64_t key; /* priority, then index of the left symbol */
    uint32_t right;
    uint32_t size; /* of both together: tells a stale candidate */
    uint32_t id;   /* what they become */
};

void pair_merger_reset(struct pair_merger *merger)
{
    merger->count = 0;
    merger->heap_count = 0;
}

/* Room for more items in an array of *capacity. */
static fl_status grow(void **array, size_t *capacity, size_t item_size)
{
    const size_t wanted = *capacity < 64 ? 64 : *capacity * 2;
    void *grown = reallocarray(*array, wanted, item_size);
    if (grown == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "tokenizer: no memory for a text of %zu characters", wanted);
    }
    *array = grown;
    *capacity = wanted;
    return FL_OK;
}

fl_status pair_merger_add(struct pair_merger *merger, uint32_t offset, uint32_t size, uint32_t id)
{
    if (merger->count == merger->symbol_capacity) {
        void *array = merger->symbols;
        FL_TRY(grow(&array, &merger->symbol_capacity, sizeof(*merger->symbols)));
        merger->symbols = array;
    }
    const uint32_t index = (uint32_t)merger->count++;
    merger->symbols[index] = (struct pair_symbol){
        .offset = offset,
        .size = size,
        .id = id,
        .prev = index == 0 ? TOKEN_NONE : index - 1,
        .next = TOKEN_NONE,
    };
    if (index > 0) {
        merger->symbols[index - 1].next = index;
    }
    return FL_OK;
}

static fl_status heap_push(struct pair_merger *merger, struct pair_candidate item)
{
    if (merger->heap_count == merger->heap_capacity) {
        void *array = merger->heap;
        FL_TRY(grow(&array, &merger->heap_capacity, sizeof(*merger->heap)));
        merger->heap = array;
    }
    size_t at = merger->heap_count++;
    while (at > 0 && merger->heap[(at - 1) / 2].key > item.key) {
        merger->heap[at] = merger->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    merger->heap[at] = item;
    return FL_OK;
}

static struct pair_candidate heap_pop(struct pair_merger *merger)
{
    struct pair_candidate *heap = merger->heap;
    const struct pair_candidate top = heap[0];
    const struct pair_candidate last = heap[--merger->heap_count];
    const size_t count = merger->heap_count;
    size_t at = 0;
    for (size_t child = 1; child < count; child = at * 2 + 1) {
        if (child + 1 < count && heap[child + 1].key < heap[child].key) {
            child++;
        }
        if (last.key <= heap[child].key) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

static fl_status consider(struct pair_merger *merger, pair_rule_fn rule, const void *ctx,
                          uint32_t left, uint32_t right)
{
    uint32_t priority = 0;
    uint32_t id = 0;
    if (left == TOKEN_NONE || right == TOKEN_NONE) {
        return FL_OK;
    }
    const struct pair_symbol *a = &merger->symbols[left];
    const struct pair_symbol *b = &merger->symbols[right];
    merger->lookup_count++;
    if (!rule(ctx, a, b, &priority, &id)) {
        return FL_OK;
    }
    return heap_push(merger, (struct pair_candidate){.key = (uint64_t)priority << 32 | left,
                                                     .right = right,
                                                     .size = a->size + b->size,
                                                     .id = id});
}

fl_status pair_merger_run(struct pair_merger *merger, pair_rule_fn rule, const void *ctx)
{
    for (uint32_t i = 1; i < merger->count; i++) {
        FL_TRY(consider(merger, rule, ctx, i - 1, i));
    }
    while (merger->heap_count > 0) {
        const struct pair_candidate best = heap_pop(merger);
        const uint32_t left = (uint32_t)best.key;
        struct pair_symbol *a = &merger->symbols[left];
        struct pair_symbol *b = &merger->symbols[best.right];
        if (a->size == 0 || b->size == 0 || a->size + b->size != best.size) {
            continue;
        }
        a->size = best.size;
        a->id = best.id;
        a->next = b->next;
        b->size = 0;
        if (b->next != TOKEN_NONE) {
            merger->symbols[b->next].prev = left;
        }
        FL_TRY(consider(merger, rule, ctx, a->prev, left));
        FL_TRY(consider(merger, rule, ctx, left, a->next));
    }
    return FL_OK;
}

void pair_merger_trim(struct pair_merger *merger)
{
    if (merger->symbol_capacity > KEPT_COUNT || merger->heap_capacity > KEPT_COUNT) {
        const uint64_t lookup_count = merger->lookup_count;
        pair_merger_close(merger);
        merger->lookup_count = lookup_count;
    }
}

void pair_merger_close(struct pair_merger *merger)
{
    free(merger->symbols);
    free(merger->heap);
    *merger = (struct pair_merger){0};
}
