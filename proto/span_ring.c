#include "proto/span_ring.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { WORD_COUNT = 10, COUNT_MIN = 16, COUNT_MAX = 1 << 20 };

/* A span as words, so that a reader that is overtaken reads old or new words, never half of one. */
struct slot {
    _Atomic uint64_t words[WORD_COUNT];
};

struct fl_span_ring {
    enum fl_lane lane;
    uint32_t count;
    _Atomic uint64_t begun; /* spans whose writing has begun */
    _Atomic uint64_t done;  /* spans written */
    struct slot slots[];    /* [count] */
};

fl_status fl_span_ring_open(enum fl_lane lane, uint32_t count, struct fl_span_ring **out)
{
    FL_ASSERT(count >= COUNT_MIN && count <= COUNT_MAX && (count & (count - 1)) == 0);
    struct fl_span_ring *ring = calloc(1, sizeof(*ring) + (size_t)count * sizeof(ring->slots[0]));
    if (ring == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a ring of %u spans", (unsigned)count);
    }
    ring->lane = lane;
    ring->count = count;
    *out = ring;
    return FL_OK;
}

void fl_span_ring_close(struct fl_span_ring *ring)
{
    free(ring);
}

static void to_words(const struct fl_span *span, enum fl_lane lane, uint64_t words[WORD_COUNT])
{
    const uint64_t kinds = (uint64_t)span->phase << 24 | (uint64_t)lane << 16 |
                           (uint64_t)span->source << 8 | (uint64_t)span->cause;
    const uint64_t all[WORD_COUNT] = {
        span->start_ns,
        span->end_ns,
        span->busy_ns,
        span->plan_id,
        span->request_id,
        span->run,
        span->bytes,
        span->cause_ns,
        (uint64_t)span->piece << 32 | span->position,
        (uint64_t)span->rows << 32 | kinds,
    };
    for (int i = 0; i < WORD_COUNT; i++) {
        words[i] = all[i];
    }
}

static void from_words(const uint64_t words[WORD_COUNT], struct fl_span *out)
{
    *out = (struct fl_span){
        .start_ns = words[0],
        .end_ns = words[1],
        .busy_ns = words[2],
        .plan_id = words[3],
        .request_id = words[4],
        .run = words[5],
        .bytes = words[6],
        .cause_ns = words[7],
        .piece = (uint32_t)(words[8] >> 32),
        .position = (uint32_t)words[8],
        .rows = (uint32_t)(words[9] >> 32),
        .phase = (enum fl_phase)(words[9] >> 24 & 0xff),
        .lane = (enum fl_lane)(words[9] >> 16 & 0xff),
        .source = (enum fl_source)(words[9] >> 8 & 0xff),
        .cause = (enum fl_cause)(words[9] & 0xff),
    };
}

void fl_span_ring_put(struct fl_span_ring *ring, const struct fl_span *span)
{
    if (ring == NULL) {
        return;
    }
    uint64_t words[WORD_COUNT];
    to_words(span, ring->lane, words);
    const uint64_t number = atomic_load_explicit(&ring->done, memory_order_relaxed);
    struct slot *slot = &ring->slots[number & (ring->count - 1)];
    atomic_store_explicit(&ring->begun, number + 1, memory_order_relaxed);
    for (int i = 0; i < WORD_COUNT; i++) {
        /* A reader that sees a new word sees `begun`, too: pairs with the acquire of read(). */
        atomic_store_explicit(&slot->words[i], words[i], memory_order_release);
    }
    atomic_store_explicit(&ring->done, number + 1, memory_order_release);
}

bool fl_span_ring_read(const struct fl_span_ring *ring, uint64_t *cursor, uint64_t *lost,
                       struct fl_span *out)
{
    /* Each round ends, or the writer has begun one more: after as many as the ring holds, all that
     * was there at first is read or lost. */
    for (uint32_t tries = 0; tries <= ring->count; tries++) {
        const uint64_t done = atomic_load_explicit(&ring->done, memory_order_acquire);
        /* What is being overwritten is lost, too: its writer may have been put aside in the middle. */
        const uint64_t begun = atomic_load_explicit(&ring->begun, memory_order_relaxed);
        const uint64_t oldest = begun > ring->count ? begun - ring->count : 0;
        if (*cursor < oldest) {
            *lost += oldest - *cursor;
            *cursor = oldest;
        }
        if (*cursor >= done) {
            return false;
        }
        const struct slot *slot = &ring->slots[*cursor & (ring->count - 1)];
        uint64_t words[WORD_COUNT];
        for (int i = 0; i < WORD_COUNT; i++) {
            words[i] = atomic_load_explicit(&slot->words[i], memory_order_acquire);
        }
        if (atomic_load_explicit(&ring->begun, memory_order_relaxed) <= *cursor + ring->count) {
            from_words(words, out);
            (*cursor)++;
            return true;
        }
    }
    return false;
}

uint64_t fl_span_ring_end(const struct fl_span_ring *ring)
{
    return atomic_load_explicit(&ring->done, memory_order_acquire);
}
