/* mailbox.h - records from one thread to another, in order, in bounded memory.
 *
 * A ring of bytes.  The writer reserves room for a record, fills it in and
 * posts it; the reader looks at the front and pops it.  Records are contiguous
 * and aligned to 8 bytes.  A mailbox between two threads of a node is as large
 * as the credits of its peers allow: a full one means that a peer keeps to
 * none, or that the writer has to wait, as its owner decides.  An empty one
 * begins at its front again: pages that were never full are never touched.
 *
 *     writer ── reserve, post ──► [ record ][ record ][   ] ── front, pop ──► reader
 *
 * Thread:  reserve(), post() from one writer; front(), pop() from one reader.  No locks.
 * Memory:  open() allocates, close() frees; nothing else does.
 * Units:   sizes in bytes.
 */
#ifndef NODE_MAILBOX_H
#define NODE_MAILBOX_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

struct mailbox;

enum {
    MAILBOX_OVERHEAD = 16, /* bytes a record takes beside its own, alignment included */
    MAILBOX_SIZE_MIN = 256,
};

/* `size` is rounded up to a multiple of 8.  FL_NO_MEMORY. */
FL_MUST_CHECK fl_status mailbox_open(size_t size, struct mailbox **out);
void mailbox_close(struct mailbox *mailbox);

/* Room for a record of `size` bytes, or NULL when it does not fit now.  Any record of up to half
 * the mailbox's size less MAILBOX_OVERHEAD fits an empty one.  A second reserve() replaces the first. */
void *mailbox_reserve(struct mailbox *mailbox, uint32_t kind, size_t size);

/* Hand the reserved record to the reader. */
void mailbox_post(struct mailbox *mailbox);

/* The oldest record, or NULL when there is none.  Valid until pop(). */
void *mailbox_front(struct mailbox *mailbox, uint32_t *out_kind, size_t *out_size);
void mailbox_pop(struct mailbox *mailbox);

/* Bytes taken now; a snapshot, from either thread. */
size_t mailbox_used(const struct mailbox *mailbox);

#endif
