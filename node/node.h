/* node.h - one machine of a pool, put together.
 *
 * Three parts that share nothing but mailboxes: the courier talks, compute runs
 * the stages, the loader brings their weights.  None of them starts a thread:
 * the program runs each in its own (main.c), the simulator all three from one
 * loop.  Transport, clock, device and storage are handed in.
 *
 *      wire thread          compute thread         loader thread
 *   node_wire_poll() ◄──► node_compute_step() ◄── node_load_step()
 *
 * Thread:  each step from its own; open() and close() while none runs.
 * Memory:  open() allocates, close() frees.
 */
#ifndef NODE_NODE_H
#define NODE_NODE_H

#include <stdbool.h>
#include <stdint.h>

#include "cluster/transport.h"
#include "kernels/device.h"
#include "node/host_meter.h"
#include "node/model_storage.h"
#include "node/node_plan.h"
#include "node/shard_cache.h"
#include "node/wake.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"
#include "proto/pool_key.h"

struct node;

/* Compute has something for the wire; called on its thread, from node_compute_step(). */
struct node_events {
    void *ctx;
    void (*posted)(void *ctx);
};

struct node_config {
    struct node_events events;   /* posted NULL: it signals the wire part's wake, and that is all */
    struct transport *transport; /* borrowed until close, as the rest; close it before the node */
    const struct fl_pool_key *key;
    struct fl_clock clock;
    struct device *device;
    const struct model_storage *storage;
    struct shard_cache *cache;      /* NULL: none */
    const struct host_meter *meter; /* NULL: none */
    uint64_t exec_ns;               /* when the process began; 0: not known */
    bool no_spans;                  /* nothing is recorded */
    struct fl_address coordinator;
    bool rejoin;
    struct fl_join join; /* who we are; memory_budget is kept to */
};

enum node_part { NODE_WIRE, NODE_COMPUTE, NODE_LOADER, NODE_PART_COUNT };

FL_MUST_CHECK fl_status node_open(const struct node_config *config, struct node **out);
void node_close(struct node *node);

/* As courier_poll(). */
FL_MUST_CHECK fl_status node_wire_poll(struct node *node, uint64_t *out_next_ns);
const char *node_text(const struct node *node);
bool node_joined(const struct node *node);

/* As courier_leave() and courier_left(). */
void node_leave(struct node *node);
bool node_left(const struct node *node);

/* False when there was nothing to do: wait for the part's wake. */
bool node_compute_step(struct node *node);
bool node_load_step(struct node *node);

/* As loader_busy(); from the loader thread. */
bool node_loading(const struct node *node);

/* What the node holds now, for tests that look for leaks; while no step runs. */
struct node_census {
    uint32_t plan_count;   /* being closed included */
    uint64_t memory;       /* of the budget, taken by plans */
    size_t mail_size;      /* bytes in mailboxes, where nothing waits when nothing moves */
    uint32_t buffer_count; /* of activations that are under way */
    struct node_plan_census {
        uint64_t plan_id;
        uint32_t stage_index;
        uint32_t stage_count;
        uint32_t kv_blocks;
        uint32_t kv_blocks_free;
        uint32_t credit_rows; /* that the stage before was given at first; 0 on a first stage */
        uint32_t credit_owed; /* of those, free again and not yet told */
        uint64_t credit;      /* rows that may be sent to the stage after now */
    } plans[NODE_PLAN_MAX];
};
void node_census(const struct node *node, struct node_census *out);

/* What ends a part's wait; clear it before looking for work. */
struct wake *node_wake(struct node *node, enum node_part part);

#endif
