/* test_sequence_table.c - who gets which KV blocks, and whose are taken away. */
#include <stdlib.h>

#include "coordinator/sequence_table.h"
#include "tests/harness.h"

enum { BLOCK = 32, BLOCKS = 10, SEQUENCES = 3 };

struct evictions {
    uint64_t ids[16];
    uint32_t count;
};

static struct sequence_table table;
static struct evictions evictions;
static uint64_t now;

static void evicted(void *ctx, uint64_t id)
{
    struct evictions *seen = ctx;
    if (seen->count < 16) {
        seen->ids[seen->count++] = id;
    }
}

static void open_table(void)
{
    sequence_table_close(&table);
    evictions = (struct evictions){0};
    const struct sequence_table_config config = {.block_positions = BLOCK,
                                                 .block_count = BLOCKS,
                                                 .sequence_max = SEQUENCES,
                                                 .evicted = evicted,
                                                 .ctx = &evictions};
    CHECK_EQ(sequence_table_open(&table, &config), FL_OK);
}

/* `count` tokens that begin with first, first + 1, .. */
static const uint32_t *run_of(uint32_t first, uint32_t count)
{
    static uint32_t tokens[1024];
    for (uint32_t i = 0; i < count; i++) {
        tokens[i] = first + i;
    }
    return tokens;
}

static struct sequence *take(uint32_t first, uint32_t count, uint32_t position_max)
{
    struct sequence *sequence = NULL;
    CHECK_EQ(
        sequence_table_take(&table, run_of(first, count), count, position_max, ++now, &sequence),
        FL_OK);
    return sequence;
}

/* A conversation of `count` tokens that is kept; returns its id. */
static uint64_t keep(uint32_t first, uint32_t count)
{
    struct sequence *sequence = take(first, count, count);
    const uint64_t id = sequence->id;
    sequence_table_give(&table, sequence, count, ++now);
    return id;
}

static void blocks_are_rounded_up(void)
{
    open_table();
    CHECK_EQ(sequence_table_blocks(&table, 0), 0);
    CHECK_EQ(sequence_table_blocks(&table, 1), 1);
    CHECK_EQ(sequence_table_blocks(&table, BLOCK), 1);
    CHECK_EQ(sequence_table_blocks(&table, BLOCK + 1), 2);
    CHECK_EQ(sequence_table_blocks(&table, UINT32_MAX), (UINT32_MAX / BLOCK) + 1);
}

static void a_next_turn_continues_its_conversation(void)
{
    open_table();
    const uint64_t id = keep(1, 40);
    CHECK_EQ(table.block_used, 2);
    struct sequence *sequence = take(1, 50, 100);
    CHECK_EQ(sequence->id, id);
    CHECK_EQ(sequence->token_count, 40);
    CHECK_EQ(sequence->blocks, 4);
    CHECK_EQ(table.block_used, 4);
    CHECK_EQ(memcmp(sequence->tokens, run_of(1, 50), 50 * sizeof(uint32_t)), 0);
}

static void the_last_prompt_token_is_always_computed(void)
{
    open_table();
    const uint64_t id = keep(1, 40);
    struct sequence *same = take(1, 40, 60);
    CHECK_EQ(same->id, id);
    CHECK_EQ(same->token_count, 39);
    sequence_table_give(&table, same, 60, ++now);
    /* Shorter than what is held, and wholly in it: asked again. */
    struct sequence *again = take(1, 5, 20);
    CHECK_EQ(again->id, id);
    CHECK_EQ(again->token_count, 4);
}

static void an_edited_history_is_cut_where_it_parts(void)
{
    open_table();
    const uint64_t id = keep(1, 40);
    uint32_t edited[50];
    memcpy(edited, run_of(1, 50), sizeof(edited));
    edited[25] = 9999;
    struct sequence *sequence = NULL;
    CHECK_EQ(sequence_table_take(&table, edited, 50, 60, ++now, &sequence), FL_OK);
    CHECK_EQ(sequence->id, id);
    CHECK_EQ(sequence->token_count, 25);
}

static void another_conversation_with_the_same_opening_keeps_its_own(void)
{
    open_table();
    const uint64_t id = keep(1, 40);
    uint32_t other[30];
    memcpy(other, run_of(1, 30), sizeof(other));
    other[10] = 7777;
    struct sequence *sequence = NULL;
    CHECK_EQ(sequence_table_take(&table, other, 30, 40, ++now, &sequence), FL_OK);
    CHECK(sequence->id != id);
    CHECK_EQ(sequence->token_count, 0);
    CHECK_EQ(evictions.count, 0);
    CHECK_EQ(sequence_table_kept(&table), 1);
}

static void the_longest_unused_conversation_goes_first(void)
{
    open_table();
    const uint64_t first = keep(100, 96);
    const uint64_t second = keep(1000, 96);
    CHECK_EQ(table.block_used, 6);
    take(5000, 150, 160); /* 5 blocks, 4 are free */
    CHECK_EQ(evictions.count, 1);
    CHECK_EQ(evictions.ids[0], first);
    (void)second;
    CHECK_EQ(table.block_used, 8);
    CHECK_EQ(sequence_table_kept(&table), 1);
}

static void a_slot_is_made_free_too(void)
{
    open_table();
    const uint64_t first = keep(100, 10);
    keep(200, 10);
    keep(300, 10);
    struct sequence *fourth = take(400, 10, 20);
    CHECK_EQ(evictions.count, 1);
    CHECK_EQ(evictions.ids[0], first);
    CHECK(fourth->id > first);
}

static void nothing_is_evicted_in_vain(void)
{
    open_table();
    keep(100, 64);
    take(200, 100, 7 * BLOCK);
    struct sequence *sequence = NULL;
    CHECK_EQ(sequence_table_take(&table, run_of(900, 10), 10, 4 * BLOCK, ++now, &sequence),
             FL_AGAIN);
    CHECK_EQ(evictions.count, 0);
    CHECK_EQ(sequence_table_kept(&table), 1);
}

static void busy_sequences_are_neither_matched_nor_evicted(void)
{
    open_table();
    struct sequence *busy[SEQUENCES];
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        busy[i] = take(1, 20, 30);
        CHECK_EQ(busy[i]->token_count, 0);
    }
    struct sequence *sequence = NULL;
    CHECK_EQ(sequence_table_take(&table, run_of(1, 20), 20, 30, ++now, &sequence), FL_AGAIN);
    sequence_table_give(&table, busy[1], 0, ++now);
    CHECK_EQ(table.block_used, 2);
    CHECK_EQ(sequence_table_take(&table, run_of(1, 20), 20, 30, ++now, &sequence), FL_OK);
}

static void what_can_never_fit_is_told_apart(void)
{
    open_table();
    struct sequence *sequence = NULL;
    CHECK_EQ(sequence_table_take(&table, run_of(1, 20), 20, BLOCKS * BLOCK + 1, ++now, &sequence),
             FL_TOO_LARGE);
    CHECK_EQ(sequence_table_take(&table, run_of(1, 20), 20, BLOCKS * BLOCK, ++now, &sequence),
             FL_OK);
    CHECK_EQ(table.block_used, BLOCKS);
}

static void accounts_add_up_over_many_turns(void)
{
    open_table();
    uint32_t seed = 1;
    struct sequence *busy[2] = {NULL, NULL};
    for (uint32_t i = 0; i < 5000; i++) {
        seed = seed * 1664525u + 1013904223u;
        struct sequence **slot = &busy[seed >> 31];
        if (*slot != NULL) {
            sequence_table_give(&table, *slot, (seed >> 8) % ((*slot)->capacity + 1), ++now);
            *slot = NULL;
            continue;
        }
        const uint32_t count = 1 + (seed >> 8) % 100;
        const uint32_t first = (seed >> 20) % 4 * 1000;
        const fl_status status = sequence_table_take(&table, run_of(first, count), count,
                                                     count + (seed >> 16) % 100, ++now, slot);
        CHECK(status == FL_OK || status == FL_AGAIN);
        CHECK(status == FL_AGAIN || (*slot)->token_count < count);
        uint32_t used = 0;
        for (uint32_t k = 0; k < SEQUENCES; k++) {
            used += table.slots[k].blocks;
        }
        CHECK_EQ(table.block_used, used);
        CHECK(used <= BLOCKS);
    }
    sequence_table_close(&table);
}

static const struct test_case cases[] = {
    {"sequence_table: blocks are rounded up", blocks_are_rounded_up},
    {"sequence_table: a next turn continues its conversation",
     a_next_turn_continues_its_conversation},
    {"sequence_table: the last prompt token is always computed",
     the_last_prompt_token_is_always_computed},
    {"sequence_table: an edited history is cut where it parts",
     an_edited_history_is_cut_where_it_parts},
    {"sequence_table: another conversation with the same opening keeps its own",
     another_conversation_with_the_same_opening_keeps_its_own},
    {"sequence_table: the longest unused conversation goes first",
     the_longest_unused_conversation_goes_first},
    {"sequence_table: a slot is made free, too", a_slot_is_made_free_too},
    {"sequence_table: nothing is evicted in vain", nothing_is_evicted_in_vain},
    {"sequence_table: busy sequences are neither matched nor evicted",
     busy_sequences_are_neither_matched_nor_evicted},
    {"sequence_table: what can never fit is told apart", what_can_never_fit_is_told_apart},
    {"sequence_table: accounts add up over many turns", accounts_add_up_over_many_turns},
};

TEST_MAIN(cases)
