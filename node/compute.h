/* compute.h - the part of a node that computes.
 *
 * Owns the stages of the node's plans and their weights, on one device.  The
 * wire thread posts what arrives into mailboxes; compute feeds it to the stages,
 * lets each run a task in turn, and posts what they produce back.  Rows of
 * activations travel to the wire by reference: their buffer comes home with a
 * RETURN once they are sent, and a plan is closed when all have.
 *
 *        inbox (control), rows of each plan ─► stages ─► outbox
 *        returns (buffers that were sent)  ─►
 *
 * A full inbox is the sender's fault: the coordinator asks for more than a node
 * can hold.  A full outbox makes the stages wait.
 *
 * Thread:  step() from the compute thread; the mailboxes as mailbox.h says, the other end being
 *          the wire thread's; open() and close() while neither runs.
 * Memory:  open() allocates, a plan allocates when it is opened; steps allocate nothing.
 */
#ifndef NODE_COMPUTE_H
#define NODE_COMPUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/device.h"
#include "node/fetch_queue.h"
#include "node/loader.h"
#include "node/mailbox.h"
#include "node/node_plan.h"
#include "node/wake.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"
#include "proto/span_ring.h"

struct compute;

enum {
    COMPUTE_INBOX_SIZE = 9 << 20, /* two prompts of the longest context, and change */
    COMPUTE_OUTBOX_SIZE = 1 << 20,
    COMPUTE_OUTPUT_MAX = 2048, /* ACTIVATIONS of one plan not yet returned */
};

/* To compute. */
enum compute_order {
    COMPUTE_PLAN,   /* struct compute_plan_order: open it */
    COMPUTE_UNPLAN, /* the same: close it, then say CLOSED */
    COMPUTE_ADMIT,  /* struct compute_admit, then its tokens */
    COMPUTE_END,    /* struct fl_end */
    COMPUTE_DROP,   /* struct fl_drop */
    COMPUTE_TOKEN,  /* struct compute_token */
    COMPUTE_RETURN, /* struct compute_return; in the returns mailbox */
    COMPUTE_ROWS,   /* struct compute_rows, then rows; in the plan's own mailbox */
};

struct compute_plan_order {
    struct node_plan *plan; /* borrowed until CLOSED */
};

/* arrived_ns: when the wire thread had it. */
struct compute_admit {
    struct fl_admit admit;
    uint64_t arrived_ns;
};

struct compute_token {
    struct fl_token token; /* without lists */
    uint64_t arrived_ns;
};

struct compute_rows {
    struct fl_activation_header header;
    uint64_t arrived_ns;
};

struct compute_return {
    struct node_plan *plan;
    uint32_t buffer;
};

/* From compute. */
enum compute_result {
    COMPUTE_OPENED,      /* struct compute_opened */
    COMPUTE_CLOSED,      /* struct compute_plan_order: nobody else knows the plan any more */
    COMPUTE_ACTIVATIONS, /* struct compute_activations */
    COMPUTE_SAMPLED,     /* struct compute_sampled, then logprobs, then logits */
    COMPUTE_CREDIT,      /* struct compute_credit */
    COMPUTE_FAILURE,     /* struct fl_failure, of one request */
    COMPUTE_INTRUDER,    /* struct compute_plan_order: its previous stage broke the protocol */
};

struct compute_opened {
    struct node_plan *plan;
    struct mailbox *rows; /* of COMPUTE_ROWS; NULL on a first stage; valid until UNPLAN is posted */
    uint32_t credit_rows;
};

struct compute_activations {
    struct node_plan *plan;
    struct fl_activation_header header;
    const float *rows; /* [header.rows, header.width], until the buffer is returned */
    uint32_t buffer;
    uint64_t posted_ns;
};

struct compute_sampled {
    struct node_plan *plan;
    struct fl_token token; /* list pointers are meaningless here */
    uint64_t posted_ns;
};

struct compute_credit {
    struct node_plan *plan;
    uint32_t rows;
};

/* Called by step() when there is something in the outbox, or a plan has failed. */
struct compute_events {
    void *ctx;
    void (*posted)(void *ctx);
};

struct compute_config {
    struct device *device; /* borrowed until close, as the rest */
    struct loader *loader;
    struct fetch_queue *fetches;
    struct wake *loader_wake;
    struct wake *compute_wake;
    struct compute_events events;
    struct fl_clock clock;
    struct fl_span_ring *spans; /* NULL: nothing is recorded */
    uint64_t memory_budget;     /* bytes of weights, KV and buffers of all plans together */
};

FL_MUST_CHECK fl_status compute_open(const struct compute_config *config, struct compute **out);
void compute_close(struct compute *compute);

/* Where the wire thread posts, and reads. */
struct mailbox *compute_inbox(struct compute *compute);
struct mailbox *compute_returns(struct compute *compute);
struct mailbox *compute_outbox(struct compute *compute);

/* After posting a RETURN: whether compute sleeps for want of it, and must be woken.  Most of the
 * time it has buffers left, and takes it back whenever it wakes next. */
bool compute_needs_return(struct compute *compute);

/* Adds all but the courier's part. */
struct node_census;
void compute_census(const struct compute *compute, struct node_census *out);

/* Go once round the mailboxes and the stages; false when there was nothing to do until woken. */
bool compute_step(struct compute *compute);

#endif
