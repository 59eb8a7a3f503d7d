/* courier_state.h - what the parts of the courier share.
 *
 * Private to node/courier*.c and node/stage_link.c: courier.c is the link to
 * the coordinator and the turn of everything, stage_link.c the links between
 * stages.  Both work on one table of plans; here is that table, and the few
 * things both say and do.
 *
 * Thread:  owner (the wire thread).
 * Memory:  courier_open() allocates, courier_close() frees.
 */
#ifndef NODE_COURIER_STATE_H
#define NODE_COURIER_STATE_H

#include "cluster/peer.h"
#include "node/courier.h"
#include "node/node_plan.h"
#include "proto/base/arena.h"

enum {
    COURIER_UNPACK_SIZE = 4 * FL_CLUSTER_MESSAGE_MAX,
    COURIER_PACK_SIZE = 1 << 20,                 /* a node's own messages are small */
    COURIER_ANSWER_SIZE = 4 * COURIER_PACK_SIZE, /* scratch memory to pack one */
    COURIER_NEIGHBOUR_MAX = 64,
    COURIER_HELD_MAX = 32,
    COURIER_PARCEL_MAX = 512, /* activations whose data the transport still reads */
    COURIER_PROMPT_MAX = 1024,
    COURIER_TRACE_MAX = 512, /* not yet answered: the first tokens of many requests come together */
};

/* A node we opened a link to; kept as long as the link lives, plans come and go. */
struct courier_neighbour {
    uint64_t incarnation;
    transport_link link; /* 0: free */
};

/* A LINK that came before its plan. */
struct courier_held {
    transport_link link; /* 0: free */
    struct fl_link said;
    uint64_t deadline_ns;
};

struct courier_parcel {
    struct node_plan *plan; /* NULL: free */
    transport_link link;
    uint32_t buffer;
};

/* How long the prompt of a request is, by its id: rows beyond are decoded ones. */
struct courier_prompt {
    uint64_t plan_id;
    uint64_t request_id;
    uint32_t prompt_count;
};

/* TRACEs, and how far the first is answered. */
struct courier_answers {
    uint32_t count;
    struct fl_trace asked[COURIER_TRACE_MAX];
    bool begun;
    uint32_t found; /* spans of the answer, */
    uint32_t sent;  /* and of these */
    uint64_t lost;
    struct fl_start_record start; /* its plan may be gone before all is said */
};

struct courier_plan {
    struct node_plan *plan; /* NULL: free */
    bool closing;           /* only compute's CLOSED is awaited */
    bool unplanned;         /* compute was told */
    bool opened;
    struct mailbox *rows; /* what the stage before sends; NULL before OPENED and on stage 0 */
    uint32_t credit_rows; /* the stage before may have under way */
    transport_link in;    /* from the stage before (of stage 0: from the last); 0: not yet */
    bool credited;        /* `in` was told credit_rows */
    transport_link out;   /* to the stage after (of the last: to stage 0); 0: none or lost */
    bool linked;          /* `out` was told LINK */
    uint64_t link_ns;     /* when we began to open `out`, */
    uint64_t linked_ns;   /* and when it was told LINK */
    uint64_t credit;      /* rows we may send */
    bool starved;         /* the queue's front has too little of it */
    uint64_t fed_ns;      /* when that ended last */
    uint32_t queue_first; /* activations that wait for credit: a ring */
    uint32_t queue_count;
    struct compute_activations *queue; /* [COMPUTE_OUTPUT_MAX] on stages that have one after */
    uint32_t token_first;              /* tokens that wait for the link to stage 0: a ring */
    uint32_t token_count;
    struct fl_token *tokens; /* [plan.sequence_max], without lists, on the last of several stages */
    uint32_t pieces_told;
    uint64_t told_ns;
    bool failure_told;
};

struct courier {
    struct courier_config config;
    struct peer_table *peers;
    struct mailbox *inbox;
    struct mailbox *returns;
    struct mailbox *outbox;

    transport_link coordinator; /* 0: none now */
    bool coordinator_up;
    bool joined;
    uint64_t incarnation; /* of the coordinator, once welcomed */
    uint64_t retry_ns;    /* when to connect again */
    uint64_t retry_wait_ns;
    uint64_t complained_ns; /* 0: not since the link was last up */
    uint64_t refused_ns;    /* first told that our name is taken; 0: not since we last joined */
    uint64_t plan_last;     /* highest plan id seen from this coordinator */
    fl_status final;        /* FL_OK: go on */
    char text[COURIER_TEXT_MAX];

    bool half_sent; /* of the outbox's front, a token: stage 0 has it, or will */
    struct courier_plan plans[NODE_PLAN_MAX];
    struct courier_neighbour neighbours[COURIER_NEIGHBOUR_MAX];
    struct courier_held held[COURIER_HELD_MAX];
    struct courier_parcel parcels[COURIER_PARCEL_MAX];
    uint32_t parcel_next;

    uint64_t ready_ns; /* when this node could begin to join */
    struct courier_prompt prompts[COURIER_PROMPT_MAX];
    struct courier_answers answers;

    struct fl_arena scratch; /* COURIER_UNPACK_SIZE, touched as far as messages need it */
    unsigned char *packed;   /* [COURIER_PACK_SIZE] */
};

uint64_t courier_now(const struct courier *courier);

/* The end of the node; the first reason counts. */
void courier_finish(struct courier *courier, fl_status status, const char *text);

/* A peer broke the rules; its link goes, we stay. */
void courier_intruder(struct courier *courier, transport_link link, const char *what);

/* FL_AGAIN: the link's queue is full; FL_LINK_LOST: it is over. */
FL_MUST_CHECK fl_status courier_say(struct courier *courier, transport_link link,
                                    const struct fl_cluster_message *message);
FL_MUST_CHECK fl_status courier_say_coordinator(struct courier *courier,
                                                const struct fl_cluster_message *message);
FL_MUST_CHECK fl_status courier_say_failure(struct courier *courier, uint64_t plan_id,
                                            uint64_t request_id, fl_status code, const char *text);

/* Hand an order to compute; false when it does not fit, which is its sender's fault. */
bool courier_order(struct courier *courier, enum compute_order kind, const void *record,
                   size_t size, const void *more, size_t more_size);

/* Give an activation buffer back to compute. */
void courier_return_buffer(struct courier *courier, struct node_plan *plan, uint32_t buffer);

/* NULL when that plan is not here, or is being closed. */
struct courier_plan *courier_find_plan(struct courier *courier, uint64_t plan_id);
/* The entry of a plan that compute names: it is there. */
struct courier_plan *courier_plan_entry(struct courier *courier, const struct node_plan *plan);

/* The neighbours of this node's stage; the last stage's next one is the first: it sends tokens. */
const struct fl_stage *courier_stage_after(const struct node_plan *plan);
uint32_t courier_index_before(const struct node_plan *plan);
bool courier_has_stage_after(const struct node_plan *plan);

#endif
