#include "pipeline/outbox.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct outbox_slot {
    struct run_segment *segments; /* [slot_rows] */
    uint32_t segment_count;
    uint32_t taken; /* segments looked at by outbox_take() */
    uint32_t lent;  /* segments taken and not yet returned */
    float *rows;    /* [slot_rows, D] */
};

struct outbox {
    struct outbox_config config;
    /* Slots first .. end - 1 (counted for ever, slot n is n % OUTBOX_SLOTS) are in use. */
    uint64_t first;
    uint64_t end;
    struct outbox_slot slots[OUTBOX_SLOTS];
    uint64_t token_first; /* the same for tokens */
    uint64_t token_end;
    bool token_lent;         /* the oldest was taken; its arrays are still read */
    struct fl_token *tokens; /* [token_count] */
    struct fl_top *tops;     /* [token_count, 2, FL_TOP_MAX] */
};

uint64_t outbox_memory(const struct outbox_config *config)
{
    return sizeof(struct outbox) +
           OUTBOX_SLOTS * (uint64_t)config->slot_rows *
               (sizeof(struct run_segment) + sizeof(float) * config->width) +
           (uint64_t)config->token_count *
               (sizeof(struct fl_token) + (size_t)2 * FL_TOP_MAX * sizeof(struct fl_top));
}

static bool open_slots(struct outbox *outbox)
{
    const size_t rows = outbox->config.slot_rows;
    for (uint32_t i = 0; rows > 0 && i < OUTBOX_SLOTS; i++) {
        struct outbox_slot *slot = &outbox->slots[i];
        slot->segments = calloc(rows, sizeof(*slot->segments));
        slot->rows = calloc(rows, outbox->config.width * sizeof(*slot->rows));
        if (slot->segments == NULL || slot->rows == NULL) {
            return false;
        }
    }
    return true;
}

static bool open_tokens(struct outbox *outbox)
{
    const size_t count = outbox->config.token_count;
    if (count == 0) {
        return true;
    }
    outbox->tokens = calloc(count, sizeof(*outbox->tokens));
    outbox->tops = calloc(count, (size_t)2 * FL_TOP_MAX * sizeof(*outbox->tops));
    return outbox->tokens != NULL && outbox->tops != NULL;
}

fl_status outbox_open(const struct outbox_config *config, struct outbox **out)
{
    struct outbox *outbox = calloc(1, sizeof(*outbox));
    if (outbox != NULL) {
        outbox->config = *config;
        if (open_slots(outbox) && open_tokens(outbox)) {
            *out = outbox;
            return FL_OK;
        }
    }
    outbox_close(outbox);
    return FL_FAIL(FL_NO_MEMORY, "no memory for a stage's outputs: %" PRIu64 " bytes are wanted",
                   outbox_memory(config));
}

void outbox_close(struct outbox *outbox)
{
    if (outbox != NULL) {
        for (uint32_t i = 0; i < OUTBOX_SLOTS; i++) {
            free(outbox->slots[i].segments);
            free(outbox->slots[i].rows);
        }
        free(outbox->tokens);
        free(outbox->tops);
        free(outbox);
    }
}

/* Slots are reused in the order in which they were filled. */
static void reclaim(struct outbox *outbox)
{
    for (; outbox->first < outbox->end; outbox->first++) {
        const struct outbox_slot *slot = &outbox->slots[outbox->first % OUTBOX_SLOTS];
        if (slot->lent > 0 || slot->taken < slot->segment_count) {
            break;
        }
    }
}

float *outbox_slot(struct outbox *outbox)
{
    FL_ASSERT(outbox->config.slot_rows > 0);
    reclaim(outbox);
    return outbox->end - outbox->first < OUTBOX_SLOTS
               ? outbox->slots[outbox->end % OUTBOX_SLOTS].rows
               : NULL;
}

void outbox_push(struct outbox *outbox, const struct run *run)
{
    FL_ASSERT(outbox->end - outbox->first < OUTBOX_SLOTS);
    FL_ASSERT(run->segment_count <= outbox->config.slot_rows);
    struct outbox_slot *slot = &outbox->slots[outbox->end++ % OUTBOX_SLOTS];
    memcpy(slot->segments, run->segments, run->segment_count * sizeof(*slot->segments));
    slot->segment_count = run->segment_count;
    slot->taken = 0;
    slot->lent = 0;
}

fl_status outbox_take(struct outbox *outbox, struct run_segment *segment, const float **rows,
                      uint32_t *slot)
{
    for (uint64_t n = outbox->first; n < outbox->end; n++) {
        struct outbox_slot *from = &outbox->slots[n % OUTBOX_SLOTS];
        while (from->taken < from->segment_count) {
            const struct run_segment *next = &from->segments[from->taken++];
            if (next->request != RUN_DEAD) {
                from->lent++;
                *segment = *next;
                *rows = from->rows + (size_t)next->row * outbox->config.width;
                *slot = (uint32_t)(n % OUTBOX_SLOTS);
                return FL_OK;
            }
        }
    }
    return FL_AGAIN;
}

void outbox_return(struct outbox *outbox, uint32_t slot)
{
    FL_ASSERT(slot < OUTBOX_SLOTS && outbox->slots[slot].lent > 0);
    outbox->slots[slot].lent--;
}

void outbox_kill(struct outbox *outbox, uint32_t request)
{
    for (uint64_t n = outbox->first; n < outbox->end; n++) {
        struct outbox_slot *slot = &outbox->slots[n % OUTBOX_SLOTS];
        for (uint32_t i = slot->taken; i < slot->segment_count; i++) {
            if (slot->segments[i].request == request) {
                slot->segments[i].request = RUN_DEAD;
            }
        }
    }
}

uint32_t outbox_token_room(const struct outbox *outbox)
{
    return outbox->config.token_count - (uint32_t)(outbox->token_end - outbox->token_first);
}

struct fl_token *outbox_add_token(struct outbox *outbox)
{
    FL_ASSERT(outbox_token_room(outbox) > 0);
    const size_t index = outbox->token_end++ % outbox->config.token_count;
    struct fl_token *token = &outbox->tokens[index];
    struct fl_top *tops = outbox->tops + index * 2 * FL_TOP_MAX;
    *token = (struct fl_token){.logprobs = tops, .logits = tops + FL_TOP_MAX};
    return token;
}

fl_status outbox_take_token(struct outbox *outbox, struct fl_token *out)
{
    if (outbox->token_lent) {
        outbox->token_lent = false;
        outbox->token_first++;
    }
    if (outbox->token_first == outbox->token_end) {
        return FL_AGAIN;
    }
    outbox->token_lent = true;
    *out = outbox->tokens[outbox->token_first % outbox->config.token_count];
    return FL_OK;
}
