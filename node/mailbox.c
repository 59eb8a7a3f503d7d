#include "node/mailbox.h"

#include <stdatomic.h>
#include <stdlib.h>

#define KIND_SKIP UINT32_MAX /* the rest up to the end of the ring holds nothing */

struct record {
    uint32_t kind;
    uint32_t size;
};

struct mailbox {
    size_t capacity;      /* of ring, a multiple of 8 */
    size_t reserved_at;   /* writer: where the reserved record begins, in bytes ever written */
    size_t reserved_next; /* writer: where it ends */
    size_t base;          /* the position that lies at ring[0]; see mailbox_reserve() */

    /* Bytes ever posted and ever popped; always 0 <= posted - popped <= capacity.  `posted` is
     * written by the writer only, `popped` by the reader only. */
    _Atomic size_t posted;
    _Atomic size_t popped;
    _Alignas(8) unsigned char ring[];
};

static size_t round_up(size_t size)
{
    return (size + 7) & ~(size_t)7;
}

fl_status mailbox_open(size_t size, struct mailbox **out)
{
    const size_t capacity = round_up(size < MAILBOX_SIZE_MIN ? MAILBOX_SIZE_MIN : size);
    struct mailbox *mailbox =
        aligned_alloc(_Alignof(struct mailbox) < 8 ? 8 : _Alignof(struct mailbox),
                      round_up(sizeof(*mailbox)) + capacity);
    if (mailbox == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "mailbox of %zu bytes: no memory", capacity);
    }
    mailbox->capacity = capacity;
    mailbox->reserved_at = 0;
    mailbox->reserved_next = 0;
    mailbox->base = 0;
    atomic_init(&mailbox->posted, 0);
    atomic_init(&mailbox->popped, 0);
    *out = mailbox;
    return FL_OK;
}

void mailbox_close(struct mailbox *mailbox)
{
    free(mailbox);
}

static size_t offset_of(const struct mailbox *mailbox, size_t position)
{
    return (position - mailbox->base) % mailbox->capacity;
}

static struct record *record_at(struct mailbox *mailbox, size_t position)
{
    return (struct record *)(void *)(mailbox->ring + offset_of(mailbox, position));
}

void *mailbox_reserve(struct mailbox *mailbox, uint32_t kind, size_t size)
{
    FL_ASSERT(kind != (uint32_t)KIND_SKIP);
    if (size > UINT32_MAX || size > mailbox->capacity / 2 - MAILBOX_OVERHEAD) {
        return NULL;
    }
    const size_t posted = atomic_load_explicit(&mailbox->posted, memory_order_relaxed);
    /* Room is free once popped; pairs with the release in mailbox_pop(). */
    const size_t popped = atomic_load_explicit(&mailbox->popped, memory_order_acquire);
    FL_ASSERT(posted - popped <= mailbox->capacity);

    /* An empty ring begins again at its front, so that no more memory is touched than was ever full.
     * The reader looks at `base` between what it acquires and what it releases only. */
    if (posted == popped) {
        mailbox->base = posted;
    }
    const size_t wanted = sizeof(struct record) + round_up(size);
    const size_t to_end = mailbox->capacity - offset_of(mailbox, posted);
    const size_t skipped = wanted > to_end ? to_end : 0;
    if (wanted + skipped > mailbox->capacity - (posted - popped)) {
        return NULL;
    }
    if (skipped != 0) {
        *record_at(mailbox, posted) = (struct record){.kind = (uint32_t)KIND_SKIP};
    }
    mailbox->reserved_at = posted + skipped;
    mailbox->reserved_next = posted + skipped + wanted;
    struct record *record = record_at(mailbox, mailbox->reserved_at);
    *record = (struct record){.kind = kind, .size = (uint32_t)size};
    return record + 1;
}

void mailbox_post(struct mailbox *mailbox)
{
    FL_ASSERT(mailbox->reserved_next >
              atomic_load_explicit(&mailbox->posted, memory_order_relaxed));
    /* Publishes the record's bytes; pairs with the acquire in mailbox_front(). */
    atomic_store_explicit(&mailbox->posted, mailbox->reserved_next, memory_order_release);
}

void *mailbox_front(struct mailbox *mailbox, uint32_t *out_kind, size_t *out_size)
{
    const size_t posted = atomic_load_explicit(&mailbox->posted, memory_order_acquire);
    size_t popped = atomic_load_explicit(&mailbox->popped, memory_order_relaxed);
    if (popped == posted) {
        return NULL;
    }
    struct record *record = record_at(mailbox, popped);
    if (record->kind == (uint32_t)KIND_SKIP) {
        popped += mailbox->capacity - offset_of(mailbox, popped);
        atomic_store_explicit(&mailbox->popped, popped, memory_order_release);
        FL_ASSERT(popped != posted); /* a skip is posted together with a record */
        record = record_at(mailbox, popped);
    }
    *out_kind = record->kind;
    *out_size = record->size;
    return record + 1;
}

void mailbox_pop(struct mailbox *mailbox)
{
    const size_t popped = atomic_load_explicit(&mailbox->popped, memory_order_relaxed);
    FL_ASSERT(popped != atomic_load_explicit(&mailbox->posted, memory_order_relaxed));
    const struct record *record = record_at(mailbox, popped);
    FL_ASSERT(record->kind != (uint32_t)KIND_SKIP); /* front() was called before */
    const size_t taken = sizeof(*record) + round_up(record->size);
    /* Frees the room; pairs with the acquire in mailbox_reserve(). */
    atomic_store_explicit(&mailbox->popped, popped + taken, memory_order_release);
}

size_t mailbox_used(const struct mailbox *mailbox)
{
    /* popped first: it never passes a `posted` that is read after it. */
    const size_t popped = atomic_load_explicit(&mailbox->popped, memory_order_acquire);
    return atomic_load_explicit(&mailbox->posted, memory_order_acquire) - popped;
}
