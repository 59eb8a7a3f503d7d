#include "node/node.h"

#include <stdlib.h>

#include "node/compute.h"
#include "node/courier.h"
#include "node/fetch_queue.h"
#include "node/loader.h"
#include "node/node_spans.h"

struct node {
    struct wake wakes[NODE_PART_COUNT];
    struct node_spans spans;
    struct fetch_queue *fetches;
    struct loader *loader;
    struct compute *compute;
    struct courier *courier;
};

static void signal_wire(void *ctx)
{
    struct node *node = ctx;
    wake_signal(&node->wakes[NODE_WIRE]);
}

static fl_status open_parts(struct node *node, const struct node_config *config)
{
    struct wake *wakes = node->wakes;
    for (int i = 0; i < NODE_PART_COUNT; i++) {
        FL_TRY(wake_open(&wakes[i]));
    }
    if (!config->no_spans) {
        FL_TRY(node_spans_open(&node->spans));
    }
    FL_TRY(fetch_queue_open(&wakes[NODE_LOADER], &wakes[NODE_WIRE], &node->fetches));
    const struct loader_config loader_config = {
        .storage = config->storage,
        .cache = config->cache,
        .fetches = node->fetches,
        .clock = config->clock,
        .loader_wake = &wakes[NODE_LOADER],
        .compute_wake = &wakes[NODE_COMPUTE],
        .wire_wake = &wakes[NODE_WIRE],
        .spans = node->spans.loader,
        .meter = config->meter,
    };
    FL_TRY(loader_open(&loader_config, &node->loader));
    struct compute_config compute_config = {
        .device = config->device,
        .loader = node->loader,
        .fetches = node->fetches,
        .loader_wake = &wakes[NODE_LOADER],
        .compute_wake = &wakes[NODE_COMPUTE],
        .events = {.ctx = node, .posted = signal_wire},
        .clock = config->clock,
        .spans = node->spans.compute,
        .memory_budget = config->join.memory_budget,
    };
    if (config->events.posted != NULL) {
        compute_config.events =
            (struct compute_events){.ctx = config->events.ctx, .posted = config->events.posted};
    }
    FL_TRY(compute_open(&compute_config, &node->compute));
    const struct courier_config courier_config = {
        .transport = config->transport,
        .key = config->key,
        .clock = config->clock,
        .coordinator = config->coordinator,
        .rejoin = config->rejoin,
        .join = config->join,
        .compute = node->compute,
        .fetches = node->fetches,
        .compute_wake = &wakes[NODE_COMPUTE],
        .spans = config->no_spans ? NULL : &node->spans,
        .exec_ns = config->exec_ns,
    };
    return courier_open(&courier_config, &node->courier);
}

fl_status node_open(const struct node_config *config, struct node **out)
{
    struct node *node = calloc(1, sizeof(*node));
    if (node == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "node: no memory");
    }
    for (int i = 0; i < NODE_PART_COUNT; i++) {
        node->wakes[i].fd = -1;
    }
    const fl_status status = open_parts(node, config);
    if (status != FL_OK) {
        node_close(node);
        return status;
    }
    *out = node;
    return FL_OK;
}

void node_close(struct node *node)
{
    if (node == NULL) {
        return;
    }
    loader_close(node->loader); /* lets go of the plans' weights */
    compute_close(node->compute);
    courier_close(node->courier); /* frees the plans */
    fetch_queue_close(node->fetches);
    node_spans_close(&node->spans);
    for (int i = 0; i < NODE_PART_COUNT; i++) {
        wake_close(&node->wakes[i]);
    }
    free(node);
}

fl_status node_wire_poll(struct node *node, uint64_t *out_next_ns)
{
    return courier_poll(node->courier, out_next_ns);
}

const char *node_text(const struct node *node)
{
    return courier_text(node->courier);
}

bool node_joined(const struct node *node)
{
    return courier_joined(node->courier);
}

void node_leave(struct node *node)
{
    courier_leave(node->courier);
}

bool node_left(const struct node *node)
{
    return courier_left(node->courier);
}

bool node_compute_step(struct node *node)
{
    return compute_step(node->compute);
}

bool node_load_step(struct node *node)
{
    return loader_step(node->loader) == FL_OK;
}

bool node_loading(const struct node *node)
{
    return loader_busy(node->loader);
}

void node_census(const struct node *node, struct node_census *out)
{
    *out = (struct node_census){.plan_count = 0};
    compute_census(node->compute, out);
    courier_census(node->courier, out);
}

struct wake *node_wake(struct node *node, enum node_part part)
{
    FL_ASSERT(part < NODE_PART_COUNT);
    return &node->wakes[part];
}
