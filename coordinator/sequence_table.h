/* sequence_table.h - whose keys and values the stages of a plan hold.
 *
 * Every stage of a plan has the same number of KV blocks and does the same with
 * them, so one account here says what is free on all.  A sequence is a run of
 * tokens whose KV is held.  A request takes one: a kept sequence that begins as
 * its prompt does, cut where they part, or a new one.  When the request ends,
 * what is valid stays as a kept conversation until blocks are short, and then
 * the one unused for longest goes first.
 *
 *   take(prompt) ─► busy ─give(keep)─► kept ─► taken again, or evicted
 *
 * Matching is by tokens, so a history that was edited is right too: it parts
 * earlier.  The last token of a prompt is never matched, because its logits
 * are wanted.
 *
 * Thread:  owner (the main loop).
 * Memory:  open() allocates the table, take() the tokens of one sequence; together they stay
 *          below four bytes per KV position.
 * Units:   blocks of SEQUENCE_BLOCK_POSITIONS positions.
 */
#ifndef COORDINATOR_SEQUENCE_TABLE_H
#define COORDINATOR_SEQUENCE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct sequence {
    uint64_t id; /* 0: the slot is free */
    bool busy;
    uint32_t token_count; /* whose KV is valid; of a busy one: what was kept */
    uint32_t blocks;
    uint32_t capacity; /* of tokens */
    uint32_t *tokens;  /* [capacity]; of a busy one: the prompt, then what was generated */
    uint64_t used_ns;
};

struct sequence_table_config {
    uint32_t block_positions; /* positions of one block */
    uint32_t block_count;
    uint32_t sequence_max;
    /* A kept sequence was evicted: the stages may forget it. */
    void (*evicted)(void *ctx, uint64_t sequence_id);
    void *ctx;
};

struct sequence_table {
    struct sequence_table_config config;
    struct sequence *slots; /* [sequence_max] */
    uint32_t block_used;
    uint64_t next_id;
};

FL_MUST_CHECK fl_status sequence_table_open(struct sequence_table *table,
                                            const struct sequence_table_config *config);
void sequence_table_close(struct sequence_table *table);

/* Blocks that `positions` positions take. */
uint32_t sequence_table_blocks(const struct sequence_table *table, uint32_t positions);

/* A sequence for a request with this prompt that may fill `position_max` positions.
 * Its token_count (below `count`) are the prompt's tokens that need no prefill.
 * FL_AGAIN when requests under way hold what it needs, FL_TOO_LARGE when it can never fit. */
FL_MUST_CHECK fl_status sequence_table_take(struct sequence_table *table, const uint32_t *prompt,
                                            uint32_t count, uint32_t position_max, uint64_t now_ns,
                                            struct sequence **out);

/* The request is over: the KV of the first `keep` of sequence->tokens is valid; 0 frees it.
 * Tokens that the request generated were written to sequence->tokens by the caller, up to
 * `capacity`, which is its position_max. */
void sequence_table_give(struct sequence_table *table, struct sequence *sequence, uint32_t keep,
                         uint64_t now_ns);

/* Sequences kept for a next turn. */
uint32_t sequence_table_kept(const struct sequence_table *table);

#ifdef __cplusplus
}
#endif
#endif
