#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/ucx.h"

/* `data` at an address that is a multiple of 8, or NULL when memory is out. */
static const void *aligned(struct ucx *ucx, const void *data, size_t size)
{
    if (size == 0 || (uintptr_t)data % 8 == 0) {
        return size > 0 ? data : NULL;
    }
    if (size > ucx->bounce_size) {
        unsigned char *grown = realloc(ucx->bounce, size);
        if (grown == NULL) {
            return NULL;
        }
        ucx->bounce = grown;
        ucx->bounce_size = size;
    }
    memcpy(ucx->bounce, data, size);
    return ucx->bounce;
}

/* A peer that breaks the rules loses the link. */
static void link_broken(struct ucx_link *link, struct ucx *ucx, const char *what)
{
    char text[UCX_TEXT_MAX];
    snprintf(text, sizeof(text), "link to %s: %s", link->peer, what);
    ucx_pipe_post_own(link->pipe, UCX_AM_BYE, link->remote_token, 0, 0, UCX_BYE_SIZE);
    ucx_link_end(link, ucx, FL_PROTOCOL, text);
}

/* UCX loses fragments of a peer that is just dying, and then still hands on what came after. */
static void link_gap(struct ucx_link *link, struct ucx *ucx, uint32_t sequence)
{
    char text[UCX_TEXT_MAX];
    snprintf(text, sizeof(text),
             "connection to %s lost: message %" PRIu32 " came where %" PRIu32 " was due%s",
             link->peer, sequence, link->sequence_in,
             link->assembly.size > 0 ? ", in the middle of another" : "");
    ucx_pipe_post_own(link->pipe, UCX_AM_BYE, link->remote_token, 0, 0, UCX_BYE_SIZE);
    ucx_link_end(link, ucx, FL_LINK_LOST, text);
}

/* The first fragment of a message that has more. */
static void assembly_begin(struct ucx *ucx, struct ucx_link *link, size_t total, const void *data,
                           size_t size)
{
    struct ucx_assembly *assembly = &link->assembly;
    if (total > assembly->capacity) {
        free(assembly->data);
        assembly->data = malloc(total);
        assembly->capacity = assembly->data != NULL ? total : 0;
    }
    if (assembly->data == NULL) {
        link_broken(link, ucx, "no memory for a message");
        return;
    }
    memcpy(assembly->data, data, size);
    assembly->size = total;
    assembly->filled = size;
    ucx->expecting = true;
}

static void on_message(struct ucx *ucx, const void *wire, size_t wire_size, const void *data,
                       size_t size, bool whole)
{
    struct ucx_link *link =
        wire_size >= UCX_WIRE_HEADER_SIZE ? ucx_link_by_token(ucx, ucx_get_u64(wire)) : NULL;
    if (link == NULL || link->state != LINK_OPEN || link->pipe->failed) {
        return; /* late, or from nobody we know */
    }
    const unsigned char *bytes = wire;
    const size_t header_size = ucx_get_u16(bytes + 14);
    const size_t total = ucx_get_u32(bytes + 16);
    struct ucx_assembly *assembly = &link->assembly;
    if (!whole) {
        link_broken(link, ucx, "a rendezvous message, which no firstlight sends");
    } else if (header_size != wire_size - UCX_WIRE_HEADER_SIZE ||
               header_size > TRANSPORT_HEADER_MAX || total > TRANSPORT_MESSAGE_MAX - header_size ||
               size > total || (size == 0 && total > 0)) {
        link_broken(link, ucx, "a message over the size limit");
    } else if (ucx_get_u32(bytes + 8) != link->sequence_in || assembly->size > 0) {
        link_gap(link, ucx, ucx_get_u32(bytes + 8));
    } else {
        link->sequence_in++;
        assembly->type = ucx_get_u16(bytes + 12);
        assembly->header_size = header_size;
        memcpy(assembly->header, bytes + UCX_WIRE_HEADER_SIZE, header_size);
        if (size < total) {
            assembly_begin(ucx, link, total, data, size);
            return;
        }
        const void *view = aligned(ucx, data, size);
        if (view == NULL && size > 0) {
            link_broken(link, ucx, "no memory for a message");
            return;
        }
        ucx->events.received(ucx->events.ctx, link->id, assembly->type, assembly->header,
                             header_size, view, size);
    }
}

static void on_more(struct ucx *ucx, const void *wire, size_t wire_size, const void *data,
                    size_t size, bool whole)
{
    struct ucx_link *link =
        wire_size == UCX_MORE_SIZE ? ucx_link_by_token(ucx, ucx_get_u64(wire)) : NULL;
    if (link == NULL || link->state != LINK_OPEN || link->pipe->failed) {
        return;
    }
    const unsigned char *bytes = wire;
    struct ucx_assembly *assembly = &link->assembly;
    if (!whole || assembly->size == 0 || size == 0 || size > assembly->size - assembly->filled ||
        ucx_get_u32(bytes + 8) != link->sequence_in - 1 ||
        ucx_get_u32(bytes + 12) != assembly->filled) {
        link_gap(link, ucx, ucx_get_u32(bytes + 8));
        return;
    }
    memcpy(assembly->data + assembly->filled, data, size);
    assembly->filled += size;
    if (assembly->filled == assembly->size) {
        assembly->size = 0;
        ucx->events.received(ucx->events.ctx, link->id, assembly->type, assembly->header,
                             assembly->header_size, assembly->data, assembly->filled);
    } else {
        ucx->expecting = true;
    }
}

/* The link that a knock is for, NULL when there is none. */
static struct ucx_link *knock_link(struct ucx *ucx, uint64_t ticket, const void *data, size_t size)
{
    if (ucx->door != NULL) {
        return ucx_link_by_ticket(ucx, ticket);
    }
    /* An inbox's address is only taken from processes that mpirun started with us. */
    const char *why;
    struct ucx_pipe *pipe = size > UCX_BLOB_PROCESS_SIZE && size <= FL_ADDRESS_MAX
                                ? ucx_pipe_to(ucx, data, &why)
                                : NULL;
    struct ucx_link *link = pipe != NULL ? ucx_link_take(ucx, LINK_AWAITED, pipe) : NULL;
    if (link != NULL) {
        memcpy(link->peer, pipe->peer, sizeof(link->peer));
    }
    return link;
}

static void on_knock(struct ucx *ucx, const void *wire, size_t wire_size, const void *data,
                     size_t size, bool whole)
{
    if (wire_size != UCX_KNOCK_SIZE || ucx_get_u64(wire) != UCX_KNOCK_MAGIC || !whole) {
        return;
    }
    const unsigned char *bytes = wire;
    struct ucx_link *link = knock_link(ucx, ucx_get_u64(bytes + 16), data, size);
    if (link == NULL) {
        return;
    }
    link->remote_token = ucx_get_u64(bytes + 8);
    link->state = LINK_OPEN;
    link->known = true;
    link->deadline_ns = 0;
    ucx_pipe_post_own(link->pipe, UCX_AM_GREET, link->remote_token, link->token, 0, UCX_GREET_SIZE);
    ucx->events.accepted(ucx->events.ctx, link->id, link->peer);
}

static void on_greet(struct ucx *ucx, const void *wire, size_t wire_size)
{
    struct ucx_link *link =
        wire_size == UCX_GREET_SIZE ? ucx_link_by_token(ucx, ucx_get_u64(wire)) : NULL;
    if (link == NULL || link->state != LINK_OPENING) {
        return;
    }
    link->remote_token = ucx_get_u64((const unsigned char *)wire + 8);
    link->state = LINK_OPEN;
    struct ucx_send *send;
    while ((send = ucx_list_pop(&link->waiting)) != NULL) {
        ucx_link_post(link, send);
    }
}

static void on_bye(struct ucx *ucx, const void *wire, size_t wire_size)
{
    struct ucx_link *link =
        wire_size == UCX_BYE_SIZE ? ucx_link_by_token(ucx, ucx_get_u64(wire)) : NULL;
    if (link == NULL || link->state == LINK_DEAD) {
        return;
    }
    char text[UCX_TEXT_MAX];
    snprintf(text, sizeof(text), "%s closed the link", link->peer);
    if (link->state == LINK_OPEN) {
        ucx_pipe_post_own(link->pipe, UCX_AM_BYE, link->remote_token, 0, 0, UCX_BYE_SIZE);
    }
    ucx_link_end(link, ucx, FL_LINK_LOST, text);
}

void ucx_arrived(struct ucx *ucx, enum ucx_am id, const void *wire, size_t wire_size,
                 const void *data, size_t size, bool whole)
{
    ucx->expecting = false;
    switch (id) {
    case UCX_AM_MESSAGE: on_message(ucx, wire, wire_size, data, size, whole); break;
    case UCX_AM_MORE: on_more(ucx, wire, wire_size, data, size, whole); break;
    case UCX_AM_KNOCK: on_knock(ucx, wire, wire_size, data, size, whole); break;
    case UCX_AM_GREET: on_greet(ucx, wire, wire_size); break;
    case UCX_AM_BYE: on_bye(ucx, wire, wire_size); break;
    case UCX_AM_END: break;
    }
}
