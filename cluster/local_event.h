/* local_event.h - what will happen to the processes of a network inside one process.
 *
 * An event belongs to the process that it happens to, in one of two lists: what
 * is under way, the earliest first, and what came while the sender was cut off,
 * in the order in which it came.
 *
 * Simulations run where memory is plenty: without it there is nothing to replay,
 * and the process ends.
 *
 * Thread:  owner; one thread runs the whole network.
 * Memory:  lists own their events; what pop() returns is the caller's to free.
 */
#ifndef CLUSTER_LOCAL_EVENT_H
#define CLUSTER_LOCAL_EVENT_H

#include <stddef.h>
#include <stdint.h>

#include "cluster/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

enum local_event_kind {
    LOCAL_EVENT_CONNECT, /* a link from elsewhere */
    LOCAL_EVENT_MESSAGE,
    LOCAL_EVENT_SENT,   /* to ourselves */
    LOCAL_EVENT_BYE,    /* the other side closed, or was killed */
    LOCAL_EVENT_CLOSED, /* to ourselves */
};

struct local_event {
    enum local_event_kind kind;
    uint64_t when_ns;
    uint64_t order; /* among those of one time */
    uint32_t from;  /* process */
    transport_link from_link;
    uint64_t cookie;
    const void *borrowed; /* the sender's data, to see that it stays as it was */
    uint16_t type;
    fl_status why;
    size_t header_size;
    uint64_t header[TRANSPORT_HEADER_MAX / 8];
    size_t size;
    unsigned char *data;
};

/* Zeroed, so that it needs no end. */
struct local_event *local_event_new(void);
void local_event_free(struct local_event *event);

/* The event's own copy of header and data. */
void local_event_fill(struct local_event *event, const void *header, size_t header_size,
                      const void *data, size_t size);

/* Zeroed, it is empty. */
struct local_event_list {
    struct local_event **events; /* [count] */
    size_t count;
    size_t size;
};

/* At the end, in the order of calls. */
void local_event_list_append(struct local_event_list *list, struct local_event *event);

/* A list that only ever got push() and pop() has its earliest event, by when_ns and then by order,
 * at events[0]; neither may change in place. */
void local_event_list_push(struct local_event_list *list, struct local_event *event);
struct local_event *local_event_list_pop(struct local_event_list *list);

/* When its first event is due; UINT64_MAX: it is empty. */
uint64_t local_event_list_next_ns(const struct local_event_list *list);

/* Frees the events, not the list's memory; close() frees both. */
void local_event_list_clear(struct local_event_list *list);
void local_event_list_close(struct local_event_list *list);

#ifdef __cplusplus
}
#endif
#endif
