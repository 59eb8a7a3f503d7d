#include "coordinator/sequence_table.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

fl_status sequence_table_open(struct sequence_table *table,
                              const struct sequence_table_config *config)
{
    FL_ASSERT(config->block_positions > 0 && config->sequence_max > 0);
    struct sequence *slots = calloc(config->sequence_max, sizeof(*slots));
    if (slots == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "sequences: no memory for a table of %" PRIu32,
                       config->sequence_max);
    }
    *table = (struct sequence_table){.config = *config, .slots = slots, .next_id = 1};
    return FL_OK;
}

static void free_slot(struct sequence_table *table, struct sequence *sequence)
{
    table->block_used -= sequence->blocks;
    /* The analyzer does not see that a slot has no id any more, and would free it twice. */
    free(sequence->tokens); /* NOLINT(clang-analyzer-unix.Malloc) */
    *sequence = (struct sequence){0};
}

void sequence_table_close(struct sequence_table *table)
{
    for (uint32_t i = 0; table->slots != NULL && i < table->config.sequence_max; i++) {
        free(table->slots[i].tokens);
    }
    free(table->slots);
    *table = (struct sequence_table){0};
}

uint32_t sequence_table_blocks(const struct sequence_table *table, uint32_t positions)
{
    const uint32_t size = table->config.block_positions;
    return positions / size + (positions % size != 0);
}

static uint32_t common_prefix(const struct sequence *sequence, const uint32_t *prompt,
                              uint32_t count)
{
    const uint32_t limit = sequence->token_count < count ? sequence->token_count : count;
    uint32_t same = 0;
    while (same < limit && sequence->tokens[same] == prompt[same]) {
        same++;
    }
    return same;
}

/* The kept sequence worth continuing: one that holds the whole prompt (asked again), or that keeps
 * at least half of what it holds.  One that shares less is another conversation with the same
 * opening: cutting it would cost its owner more than it saves here. */
static struct sequence *find_match(struct sequence_table *table, const uint32_t *prompt,
                                   uint32_t count, uint32_t *out_keep)
{
    struct sequence *best = NULL;
    uint32_t best_keep = 0;
    for (uint32_t i = 0; i < table->config.sequence_max; i++) {
        struct sequence *sequence = &table->slots[i];
        if (sequence->id == 0 || sequence->busy) {
            continue;
        }
        const uint32_t same = common_prefix(sequence, prompt, count - 1);
        const bool worth = same == count - 1 || same >= sequence->token_count / 2;
        if (same > best_keep && worth) {
            best = sequence;
            best_keep = same;
        }
    }
    *out_keep = best_keep;
    return best;
}

static struct sequence *find_free(struct sequence_table *table)
{
    for (uint32_t i = 0; i < table->config.sequence_max; i++) {
        if (table->slots[i].id == 0) {
            return &table->slots[i];
        }
    }
    return NULL;
}

static struct sequence *find_oldest(struct sequence_table *table, const struct sequence *but)
{
    struct sequence *oldest = NULL;
    for (uint32_t i = 0; i < table->config.sequence_max; i++) {
        struct sequence *sequence = &table->slots[i];
        if (sequence->id != 0 && !sequence->busy && sequence != but &&
            (oldest == NULL || sequence->used_ns < oldest->used_ns)) {
            oldest = sequence;
        }
    }
    return oldest;
}

/* True when evicting kept sequences can make room: nothing is evicted in vain. */
static bool can_make_room(const struct sequence_table *table, uint32_t blocks)
{
    uint32_t busy_blocks = 0;
    uint32_t busy_count = 0;
    for (uint32_t i = 0; i < table->config.sequence_max; i++) {
        const struct sequence *sequence = &table->slots[i];
        busy_blocks += sequence->busy ? sequence->blocks : 0;
        busy_count += sequence->busy;
    }
    return busy_count < table->config.sequence_max &&
           blocks <= table->config.block_count - busy_blocks;
}

static void evict(struct sequence_table *table, struct sequence *sequence)
{
    const uint64_t id = sequence->id;
    free_slot(table, sequence);
    table->config.evicted(table->config.ctx, id);
}

/* Evicts until `blocks` more are free, and a slot when none was matched. */
static struct sequence *make_room(struct sequence_table *table, struct sequence *match,
                                  uint32_t blocks)
{
    const uint32_t held = match != NULL ? match->blocks : 0;
    while (table->config.block_count - table->block_used + held < blocks) {
        struct sequence *oldest = find_oldest(table, match);
        FL_ASSERT(oldest != NULL); /* can_make_room() said so */
        evict(table, oldest);
    }
    if (match != NULL) {
        return match;
    }
    if (find_free(table) == NULL) {
        evict(table, find_oldest(table, NULL));
    }
    return find_free(table);
}

fl_status sequence_table_take(struct sequence_table *table, const uint32_t *prompt, uint32_t count,
                              uint32_t position_max, uint64_t now_ns, struct sequence **out)
{
    FL_ASSERT(count > 0 && position_max >= count);
    const uint32_t blocks = sequence_table_blocks(table, position_max);
    if (blocks > table->config.block_count) {
        return FL_TOO_LARGE;
    }
    if (!can_make_room(table, blocks)) {
        return FL_AGAIN;
    }
    uint32_t *tokens = malloc(position_max * sizeof(*tokens));
    if (tokens == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "sequence: no memory for %" PRIu32 " tokens", position_max);
    }
    uint32_t keep = 0;
    struct sequence *match = find_match(table, prompt, count, &keep);
    struct sequence *sequence = make_room(table, match, blocks);
    if (match == NULL) {
        sequence->id = table->next_id++;
    }
    free(sequence->tokens); /* NOLINT(clang-analyzer-unix.Malloc): as above */
    memcpy(tokens, prompt, count * sizeof(*tokens));
    sequence->tokens = tokens;
    sequence->capacity = position_max;
    sequence->token_count = keep;
    sequence->busy = true;
    sequence->used_ns = now_ns;
    table->block_used += blocks;
    table->block_used -= sequence->blocks;
    sequence->blocks = blocks;
    *out = sequence;
    return FL_OK;
}

void sequence_table_give(struct sequence_table *table, struct sequence *sequence, uint32_t keep,
                         uint64_t now_ns)
{
    FL_ASSERT(sequence->busy && keep <= sequence->capacity);
    if (keep == 0) {
        free_slot(table, sequence);
        return;
    }
    const uint32_t blocks = sequence_table_blocks(table, keep);
    table->block_used -= sequence->blocks - blocks;
    sequence->blocks = blocks;
    sequence->token_count = keep;
    sequence->busy = false;
    sequence->used_ns = now_ns;
}

uint32_t sequence_table_kept(const struct sequence_table *table)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < table->config.sequence_max; i++) {
        count += table->slots[i].id != 0 && !table->slots[i].busy;
    }
    return count;
}
