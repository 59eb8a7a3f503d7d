/* pair_merger.h - joins neighbouring symbols, best pair first.
 *
 * The heart of both tokenizers.  A text starts as a chain of characters; a
 * rule says which neighbours may join, how urgently, and into which token.
 * The most urgent pair joins, its new neighbours are looked up, and so on
 * until no pair is left.  A heap of candidates over a linked chain makes this
 * n log n: candidates that a join has made stale are skipped when they surface.
 *
 * Thread:  owner.
 * Memory:  two arrays that grow with the longest text; trim() gives large
 *          ones back.
 * Source:  byte pair encoding, Sennrich et al., arXiv:1508.07909; candidates
 *          in a heap as in SentencePiece, Kudo & Richardson, arXiv:1808.06226.
 */
#ifndef COORDINATOR_PAIR_MERGER_H
#define COORDINATOR_PAIR_MERGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

struct pair_symbol {
    uint32_t offset; /* of its first byte in the text */
    uint32_t size;   /* bytes; 0 once it has been joined to its left neighbour */
    uint32_t id;     /* token, or TOKEN_NONE */
    uint32_t prev;   /* index of the neighbours, or TOKEN_NONE */
    uint32_t next;
};

struct pair_candidate;

/* Zeroed, it is ready. */
struct pair_merger {
    struct pair_symbol *symbols; /* [count] */
    size_t count;
    size_t symbol_capacity;
    struct pair_candidate *heap; /* [heap_count] */
    size_t heap_count;
    size_t heap_capacity;
    uint64_t lookup_count; /* calls of the rule, for tests of growth */
};

/* Whether `left` and `right` may join; the lowest `priority` joins first, ties leftmost. */
typedef bool (*pair_rule_fn)(const void *ctx, const struct pair_symbol *left,
                             const struct pair_symbol *right, uint32_t *out_priority,
                             uint32_t *out_id);

/* Forget the last text. */
void pair_merger_reset(struct pair_merger *merger);

/* Append a symbol to the chain.  FL_NO_MEMORY. */
FL_MUST_CHECK fl_status pair_merger_add(struct pair_merger *merger, uint32_t offset, uint32_t size,
                                        uint32_t id);

/* Join until the rule finds nothing more; what is left has size > 0.  FL_NO_MEMORY. */
FL_MUST_CHECK fl_status pair_merger_run(struct pair_merger *merger, pair_rule_fn rule,
                                        const void *ctx);

/* Give back arrays that an unusually long text has grown. */
void pair_merger_trim(struct pair_merger *merger);
void pair_merger_close(struct pair_merger *merger);

#endif
