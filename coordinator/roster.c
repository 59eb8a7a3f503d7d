#include "coordinator/roster.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/log.h"

#define JOIN_DEADLINE_NS (5 * FL_NS_PER_S)
#define RETRY_NS         (1 * FL_NS_PER_MS) /* when the wire took no more */
#define PONG_DEADLINE_NS (5 * FL_NS_PER_S)
#define ASLEEP_MIN_NS    (CLOCK_MAP_ASLEEP_MIN_MS * FL_NS_PER_MS)

enum { SCRATCH_SIZE = 4 * FL_CLUSTER_MESSAGE_MAX, FIRST_SCRATCH_SIZE = 256 << 10 };

struct roster_out {
    struct roster_out *next;
    size_t size;
    unsigned char bytes[];
};

struct pending_link {
    transport_link link; /* 0: free */
    uint64_t deadline_ns;
    char where[TRANSPORT_TEXT_MAX];
};

struct roster {
    struct roster_wire wire;
    struct fl_clock clock;
    uint64_t incarnation;
    uint64_t asleep_ns; /* of this machine, as far as it was told */
    struct pending_link pending[ROSTER_PENDING_MAX];
    struct roster_node nodes[ROSTER_NODE_MAX];
};

fl_status roster_open(const struct roster_wire *wire, struct fl_clock clock, uint64_t incarnation,
                      struct roster **out)
{
    struct roster *roster = calloc(1, sizeof(*roster));
    if (roster == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "roster: %zu bytes are not available", sizeof(*roster));
    }
    roster->wire = *wire;
    roster->clock = clock;
    roster->incarnation = incarnation;
    roster->asleep_ns = fl_clock_asleep(&clock);
    *out = roster;
    return FL_OK;
}

static void drop_outbox(struct roster_node *node)
{
    while (node->out_first != NULL) {
        struct roster_out *out = node->out_first;
        node->out_first = out->next;
        free(out);
    }
    node->out_last = NULL;
    node->out_count = 0;
}

void roster_close(struct roster *roster)
{
    if (roster == NULL) {
        return;
    }
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        drop_outbox(&roster->nodes[i]);
    }
    free(roster);
}

void roster_link_up(struct roster *roster, transport_link link, const char *where)
{
    for (uint32_t i = 0; i < ROSTER_PENDING_MAX; i++) {
        struct pending_link *pending = &roster->pending[i];
        if (pending->link == 0) {
            pending->link = link;
            pending->deadline_ns = fl_clock_now(&roster->clock) + JOIN_DEADLINE_NS;
            snprintf(pending->where, sizeof(pending->where), "%s", where);
            return;
        }
    }
    fl_log(FL_LOG_WARN, "roster full: %d links wait to join, %s is closed", ROSTER_PENDING_MAX,
           where);
    roster->wire.close(roster->wire.ctx, link);
}

static struct pending_link *find_pending(struct roster *roster, transport_link link)
{
    for (uint32_t i = 0; i < ROSTER_PENDING_MAX; i++) {
        if (roster->pending[i].link == link) {
            return &roster->pending[i];
        }
    }
    return NULL;
}

static struct roster_node *find_name(struct roster *roster, const char *name)
{
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        struct roster_node *node = &roster->nodes[i];
        if (node->state != ROSTER_FREE && strcmp(node->name, name) == 0) {
            return node;
        }
    }
    return NULL;
}

/* A slot nobody uses, or the one of a lost node. */
static struct roster_node *find_slot(struct roster *roster)
{
    struct roster_node *lost = NULL;
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        struct roster_node *node = &roster->nodes[i];
        if (node->state == ROSTER_FREE) {
            return node;
        }
        if (node->state == ROSTER_LOST && lost == NULL) {
            lost = node;
        }
    }
    return lost;
}

/* Packs a message; the caller frees it.  NULL when memory is short or it is over the limit. */
static struct roster_out *pack(const struct fl_cluster_message *message)
{
    /* Nearly every message is small; a plan of a deep model is not. */
    for (size_t scratch = FIRST_SCRATCH_SIZE; scratch <= SCRATCH_SIZE; scratch *= 8) {
        struct fl_arena arena;
        void *block = malloc(scratch);
        if (block == NULL) {
            return NULL;
        }
        fl_arena_init(&arena, block, scratch);
        const size_t size = fl_cluster_message_size(message, &arena);
        struct roster_out *out = size > 0 ? malloc(sizeof(*out) + size) : NULL;
        fl_arena_reset(&arena);
        fl_status status = FL_TOO_LARGE;
        if (out != NULL) {
            status = fl_cluster_message_pack(message, &arena, out->bytes, size, &out->size);
        }
        free(block);
        if (status == FL_OK) {
            out->next = NULL;
            return out;
        }
        free(out);
    }
    return NULL;
}

/* Tells a link that may not join why, and closes it. */
static void refuse(struct roster *roster, transport_link link, fl_status code)
{
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FAILURE};
    message.as.failure.code = (uint32_t)code;
    snprintf(message.as.failure.text, sizeof(message.as.failure.text), "%s", fl_last_error());
    struct roster_out *out = pack(&message);
    if (out != NULL) {
        /* Best effort: the link closes either way. */
        (void)!roster->wire.send(roster->wire.ctx, link, FL_WIRE_CONTROL, NULL, 0, out->bytes,
                                 out->size, 0);
        free(out);
    }
    roster->wire.close(roster->wire.ctx, link);
}

struct roster_node *roster_former(struct roster *roster, const struct fl_join *join)
{
    struct roster_node *node = find_name(roster, join->name);
    const bool same = node != NULL && node->state == ROSTER_READY;
    return same && node->incarnation == join->incarnation ? node : NULL;
}

static fl_status find_place(struct roster *roster, const struct fl_join *join, transport_link link,
                            struct roster_node **out)
{
    struct roster_node *node = find_name(roster, join->name);
    if (node != NULL && node->state == ROSTER_READY && node->link == link) {
        return FL_FAIL(FL_PROTOCOL, "node '%s' said JOIN twice on one link", join->name);
    }
    if (node != NULL && node->state == ROSTER_READY && node->incarnation != join->incarnation) {
        return FL_FAIL(FL_BUSY,
                       "node name '%s' is taken by a node that lives at %s; start this one with "
                       "--name OTHER, or try again in a few seconds if that one was just stopped",
                       join->name, node->where);
    }
    node = node != NULL ? node : find_slot(roster);
    if (node == NULL) {
        return FL_FAIL(FL_TOO_LARGE, "node '%s' is one too many: the pool has %d nodes, its limit",
                       join->name, ROSTER_NODE_MAX);
    }
    *out = node;
    return FL_OK;
}

fl_status roster_join(struct roster *roster, transport_link link, const struct fl_join *join,
                      struct roster_node **out_node)
{
    struct pending_link *pending = find_pending(roster, link);
    struct roster_node *node = NULL;
    fl_status status = FL_OK;
    if (pending == NULL) {
        status = FL_FAIL(FL_PROTOCOL, "node '%s' said JOIN on a link that has joined already",
                         join->name);
    } else {
        status = find_place(roster, join, link, &node);
    }
    if (status != FL_OK) {
        refuse(roster, link, status);
        return status;
    }
    if (node->state == ROSTER_READY) {
        roster->wire.close(roster->wire.ctx, node->link);
    }
    drop_outbox(node);
    /* The same process over a new link, perhaps because its machine slept. */
    const bool same = node->incarnation == join->incarnation && strcmp(node->name, join->name) == 0;
    *node = (struct roster_node){.state = ROSTER_READY,
                                 .link = link,
                                 .joined_ns = fl_clock_now(&roster->clock),
                                 .asleep_known = same && node->asleep_known,
                                 .asleep_ns = same ? node->asleep_ns : 0,
                                 .slept_ns = same ? node->slept_ns : 0,
                                 .incarnation = join->incarnation,
                                 .address = join->address,
                                 .memory_budget = join->memory_budget,
                                 .threads = join->threads};
    snprintf(node->name, sizeof(node->name), "%s", join->name);
    snprintf(node->isa, sizeof(node->isa), "%s", join->isa);
    snprintf(node->where, sizeof(node->where), "%s", pending->where);
    pending->link = 0;

    struct fl_cluster_message welcome = {.kind = FL_MESSAGE_WELCOME};
    welcome.as.welcome.coordinator = roster->incarnation;
    roster_send(roster, node, &welcome);
    *out_node = node;
    return FL_OK;
}

struct roster_node *roster_link_down(struct roster *roster, transport_link link)
{
    struct pending_link *pending = find_pending(roster, link);
    if (pending != NULL) {
        pending->link = 0;
    }
    struct roster_node *node = roster_by_link(roster, link);
    if (node != NULL) {
        drop_outbox(node);
        node->state = ROSTER_LOST;
        node->link = 0;
        node->memory_used = 0;
        node->fetch_count = 0;
    }
    return node;
}

static double seconds(uint64_t ns)
{
    return (double)ns / (double)FL_NS_PER_S;
}

void roster_ponged(struct roster *roster, transport_link link, const struct clock_map *map,
                   enum clock_map_news news)
{
    const uint64_t asleep_ns = fl_clock_asleep(&roster->clock);
    if (asleep_ns >= roster->asleep_ns + ASLEEP_MIN_NS) {
        fl_log(FL_LOG_WARN, "this machine slept %.1f s", seconds(asleep_ns - roster->asleep_ns));
        roster->asleep_ns = asleep_ns;
    }
    struct roster_node *node = roster_by_link(roster, link);
    if (node == NULL || map == NULL || !map->met) {
        return;
    }
    node->clock_known = node->clock_known || map->sample_count > 0;
    if (node->asleep_known && map->their_asleep_ns >= node->asleep_ns + ASLEEP_MIN_NS) {
        const uint64_t slept_ns = map->their_asleep_ns - node->asleep_ns;
        node->slept_ns += slept_ns;
        fl_log(FL_LOG_WARN, "node %s slept %.1f s", node->name, seconds(slept_ns));
    } else if (news == CLOCK_MAP_STEPPED) {
        /* A machine that does it all the time is told of once. */
        fl_log(map->step_count == 1 ? FL_LOG_WARN : FL_LOG_DEBUG,
               "node %s clock stepped, or runs off by more than %d ppm: what came before is not "
               "compared with what comes after",
               node->name, CLOCK_MAP_DRIFT_PPM);
    }
    node->asleep_ns = map->their_asleep_ns;
    node->asleep_known = true;
}

void roster_forget(struct roster_node *node)
{
    FL_ASSERT(node->state == ROSTER_LOST);
    *node = (struct roster_node){.state = ROSTER_FREE};
}

struct roster_node *roster_by_link(struct roster *roster, transport_link link)
{
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        struct roster_node *node = &roster->nodes[i];
        if (node->state == ROSTER_READY && node->link == link) {
            return node;
        }
    }
    return NULL;
}

struct roster_node *roster_at(struct roster *roster, uint32_t index)
{
    FL_ASSERT(index < ROSTER_NODE_MAX);
    return &roster->nodes[index];
}

uint32_t roster_ready_count(const struct roster *roster)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        count += roster->nodes[i].state == ROSTER_READY;
    }
    return count;
}

void roster_hang_up(struct roster *roster, struct roster_node *node)
{
    if (node->state == ROSTER_READY) {
        roster->wire.close(roster->wire.ctx, node->link);
    }
}

static fl_status send_out(struct roster *roster, const struct roster_node *node,
                          const struct roster_out *out)
{
    return roster->wire.send(roster->wire.ctx, node->link, FL_WIRE_CONTROL, NULL, 0, out->bytes,
                             out->size, 0);
}

void roster_send(struct roster *roster, struct roster_node *node,
                 const struct fl_cluster_message *message)
{
    if (node->state != ROSTER_READY || node->leaving) {
        return;
    }
    struct roster_out *out = pack(message);
    if (out == NULL || node->out_count >= ROSTER_OUT_MAX) {
        fl_log(FL_LOG_WARN, "node %s closed: %s", node->name,
               out == NULL ? "a message could not be packed" : "it takes no messages any more");
        free(out);
        roster_hang_up(roster, node);
        return;
    }
    const fl_status status = node->out_first == NULL ? send_out(roster, node, out) : FL_AGAIN;
    if (status != FL_AGAIN) {
        if (status != FL_OK) {
            roster_hang_up(roster, node);
        }
        free(out);
        return;
    }
    if (node->out_last != NULL) {
        node->out_last->next = out;
    } else {
        node->out_first = out;
    }
    node->out_last = out;
    node->out_count++;
}

fl_status roster_send_data(struct roster *roster, struct roster_node *node, uint16_t type,
                           const void *header, size_t header_size, const void *data, size_t size,
                           uint64_t cookie)
{
    if (node->state != ROSTER_READY || node->leaving) {
        return FL_LINK_LOST;
    }
    if (node->out_first != NULL) {
        return FL_AGAIN;
    }
    return roster->wire.send(roster->wire.ctx, node->link, type, header, header_size, data, size,
                             cookie);
}

/* Returns true when messages still wait. */
static bool flush(struct roster *roster, struct roster_node *node)
{
    while (node->state == ROSTER_READY && node->out_first != NULL) {
        struct roster_out *out = node->out_first;
        const fl_status status = send_out(roster, node, out);
        if (status == FL_AGAIN) {
            return true;
        }
        node->out_first = out->next;
        node->out_last = node->out_first != NULL ? node->out_last : NULL;
        node->out_count--;
        free(out);
        if (status != FL_OK) {
            drop_outbox(node);
            roster_hang_up(roster, node);
        }
    }
    return false;
}

/* It lives, or its link would be down; but where its moments lie on our clock is not known. */
static void check_clock(struct roster_node *node, uint64_t now)
{
    if (node->state == ROSTER_READY && !node->clock_known && !node->clock_missed &&
        now >= node->joined_ns + PONG_DEADLINE_NS) {
        node->clock_missed = true;
        fl_log(FL_LOG_WARN,
               "node %s answers no pings: its times cannot be compared with those of others",
               node->name);
    }
}

uint64_t roster_poll(struct roster *roster)
{
    const uint64_t now = fl_clock_now(&roster->clock);
    uint64_t next_ns = UINT64_MAX;
    for (uint32_t i = 0; i < ROSTER_PENDING_MAX; i++) {
        struct pending_link *pending = &roster->pending[i];
        if (pending->link != 0 && pending->deadline_ns <= now) {
            fl_log(FL_LOG_WARN, "link %s closed: no JOIN within 5 s", pending->where);
            const transport_link link = pending->link;
            pending->link = 0;
            roster->wire.close(roster->wire.ctx, link);
        } else if (pending->link != 0 && pending->deadline_ns < next_ns) {
            next_ns = pending->deadline_ns;
        }
    }
    for (uint32_t i = 0; i < ROSTER_NODE_MAX; i++) {
        check_clock(&roster->nodes[i], now);
        if (flush(roster, &roster->nodes[i]) && now + RETRY_NS < next_ns) {
            next_ns = now + RETRY_NS;
        }
    }
    return next_ns;
}
