#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/ucx.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "proto/pool_key.h"

static const uint64_t admit_wait_ns = 5 * FL_NS_PER_S; /* from the door to a knock */
static const uint64_t gone_wait_ns = FL_NS_PER_S / 4;  /* a goodbye still under way in UCX */
static const uint64_t close_wait_ns = 2 * FL_NS_PER_S; /* a goodbye that is not answered */

static const char data_ports_hint[] =
    "a firewall has to let the data ports of both sides through (--data-ports)";

uint64_t ucx_now_ns(void)
{
    const struct fl_clock clock = fl_clock_monotonic();
    return fl_clock_now(&clock);
}

void ucx_look_at(struct ucx *ucx, uint64_t when_ns)
{
    if (when_ns < ucx->next_look_ns) {
        ucx->next_look_ns = when_ns;
    }
}

struct ucx_link *ucx_link_find(struct ucx *ucx, transport_link id)
{
    struct ucx_link *link = &ucx->links[id % TRANSPORT_LINK_MAX];
    return id != 0 && link->state != LINK_FREE && link->id == id ? link : NULL;
}

struct ucx_link *ucx_link_by_token(struct ucx *ucx, uint64_t token)
{
    struct ucx_link *link = &ucx->links[token % TRANSPORT_LINK_MAX];
    return link->state != LINK_FREE && link->token == token ? link : NULL;
}

struct ucx_link *ucx_link_take(struct ucx *ucx, enum ucx_link_state state, struct ucx_pipe *pipe)
{
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        struct ucx_link *link = &ucx->links[i];
        if (link->state != LINK_FREE) {
            continue;
        }
        *link = (struct ucx_link){.state = state, .known = state != LINK_AWAITED, .pipe = pipe};
        ucx_list_init(&link->waiting);
        link->id = ++ucx->link_counter * TRANSPORT_LINK_MAX + i;
        fl_random_bytes(&link->token, sizeof(link->token));
        link->token = link->token / TRANSPORT_LINK_MAX * TRANSPORT_LINK_MAX + i;
        if (pipe != NULL) {
            pipe->link_count++;
        }
        return link;
    }
    return NULL;
}

void ucx_link_end(struct ucx_link *link, struct ucx *ucx, fl_status why, const char *text)
{
    if (link->state == LINK_DEAD) {
        return;
    }
    if (link->state != LINK_CLOSING) {
        link->why = why;
        snprintf(link->text, sizeof(link->text), "%s", text);
    }
    link->state = LINK_DEAD;
    ucx->attention = true;
    struct ucx_send *send;
    while ((send = ucx_list_pop(&link->waiting)) != NULL) {
        ucx_send_give(ucx, send);
    }
    if (link->pipe != NULL) {
        ucx_pipe_give_up(link->pipe, link->id);
    }
    if (ucx->door != NULL) {
        door_leave(ucx->door, link->visit);
        link->visit = 0;
    }
    link->deadline_ns = ucx_now_ns() + close_wait_ns;
}

void ucx_link_close(struct ucx *ucx, struct ucx_link *link)
{
    link->state = LINK_CLOSING;
    link->why = FL_CANCELLED;
    snprintf(link->text, sizeof(link->text), "closed here");
    link->deadline_ns = ucx_now_ns() + close_wait_ns;
    ucx_look_at(ucx, link->deadline_ns);
    ucx_pipe_post_own(link->pipe, UCX_AM_BYE, link->remote_token, 0, 0, UCX_BYE_SIZE);
}

void ucx_link_post(struct ucx_link *link, struct ucx_send *send)
{
    ucx_put_u64(send->header, link->remote_token);
    ucx_put_u32(send->header + 8, link->sequence_out++);
    link->in_flight++;
    ucx_pipe_post(link->pipe, UCX_AM_MESSAGE, send);
}

/* A link without a pipe yet: make one to the worker whose address was shown at the door. */
static bool link_admit(struct ucx *ucx, struct ucx_link *link, const void *pass, size_t size)
{
    const char *why = "its address is too short";
    struct ucx_pipe *pipe = size > UCX_BLOB_PROCESS_SIZE ? ucx_pipe_to(ucx, pass, &why) : NULL;
    if (pipe == NULL) {
        char text[UCX_TEXT_MAX];
        snprintf(text, sizeof(text),
                 "cannot reach %s with UCX: %s (does one side listen on loopback only?)",
                 link->peer, why);
        ucx_link_end(link, ucx, FL_LINK_LOST, text);
        return false;
    }
    pipe->link_count++;
    link->pipe = pipe;
    return true;
}

struct ucx_link *ucx_link_by_ticket(struct ucx *ucx, uint64_t ticket)
{
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        if (ucx->links[i].state == LINK_AWAITED && ucx->links[i].ticket == ticket) {
            return &ucx->links[i];
        }
    }
    return NULL;
}

static struct ucx_link *link_by_visit(struct ucx *ucx, door_visit visit)
{
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        if (ucx->links[i].state != LINK_FREE && ucx->links[i].visit == visit) {
            return &ucx->links[i];
        }
    }
    return NULL;
}

void ucx_link_admitted(void *ctx, door_visit visit, bool opener, uint64_t ticket, const void *pass,
                       size_t size, const char *peer)
{
    struct ucx *ucx = ctx;
    if (opener) {
        struct ucx_link *link = link_by_visit(ucx, visit);
        if (link != NULL && link->state == LINK_OPENING && link_admit(ucx, link, pass, size)) {
            ucx_pipe_post_own(link->pipe, UCX_AM_KNOCK, UCX_KNOCK_MAGIC, link->token, ticket,
                              UCX_KNOCK_SIZE);
        }
        return;
    }
    struct ucx_link *link = ucx_link_take(ucx, LINK_AWAITED, NULL);
    if (link == NULL) {
        fl_log(FL_LOG_WARN, "link from %s refused: %d are open, which is the limit", peer,
               TRANSPORT_LINK_MAX);
        door_leave(ucx->door, visit);
        return;
    }
    link->visit = visit;
    link->ticket = ticket;
    snprintf(link->peer, sizeof(link->peer), "%s", peer);
    link->deadline_ns = ucx_now_ns() + admit_wait_ns;
    ucx_look_at(ucx, link->deadline_ns);
    (void)link_admit(ucx, link, pass, size);
}

/* The process behind a link is gone, or closed it: then its goodbye may still be under way. */
void ucx_link_gone(void *ctx, door_visit visit, fl_status why, const char *text)
{
    struct ucx *ucx = ctx;
    struct ucx_link *link = link_by_visit(ucx, visit);
    if (link == NULL) {
        return;
    }
    link->visit = 0;
    if (link->state == LINK_OPEN) {
        link->why = why;
        snprintf(link->text, sizeof(link->text), "%s", text);
        link->deadline_ns = ucx_now_ns() + gone_wait_ns;
        ucx_look_at(ucx, link->deadline_ns);
    } else if (link->state == LINK_OPENING && link->pipe != NULL) {
        char longer[UCX_TEXT_MAX];
        snprintf(longer, sizeof(longer), "%.120s, and no data had come from there: %s", text,
                 data_ports_hint);
        ucx_link_end(link, ucx, why, longer);
    } else if (link->state == LINK_OPENING || link->state == LINK_AWAITED) {
        ucx_link_end(link, ucx, why, text);
    }
}

unsigned ucx_report_sent(struct ucx *ucx)
{
    unsigned count = 0;
    struct ucx_send *send;
    while ((send = ucx_list_pop(&ucx->done)) != NULL) {
        const transport_link id = send->link;
        const uint64_t cookie = send->cookie;
        struct ucx_link *link = ucx_link_find(ucx, id);
        if (link != NULL) {
            link->queue_count--;
            link->queue_bytes -= send->size;
            link->in_flight--;
            if (link->state == LINK_DEAD && link->in_flight == 0) {
                ucx->attention = true;
            }
        }
        ucx_send_give(ucx, send);
        count++;
        if (link != NULL && cookie != 0 && link->state != LINK_DEAD) {
            ucx->events.sent(ucx->events.ctx, id, cookie);
        }
    }
    return count;
}

void ucx_links_lost(struct ucx *ucx, const struct ucx_pipe *pipe)
{
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        struct ucx_link *link = &ucx->links[i];
        if (link->state == LINK_FREE || link->pipe != pipe) {
            continue;
        }
        char text[UCX_TEXT_MAX];
        snprintf(text, sizeof(text), "connection to %s lost: %s", link->peer, ucx_pipe_error(pipe));
        ucx_link_end(link, ucx, FL_LINK_LOST, text);
        ucx_pipe_release(link->pipe);
        link->pipe = NULL;
    }
}

static unsigned look_after_link(struct ucx *ucx, struct ucx_link *link, uint64_t now)
{
    const bool late = link->deadline_ns != 0 && now >= link->deadline_ns;
    if (link->state != LINK_FREE && link->state != LINK_DEAD && link->deadline_ns != 0) {
        if (late) {
            char text[UCX_TEXT_MAX];
            if (link->state == LINK_AWAITED) {
                fl_log(FL_LOG_WARN, "%s was let in and sent no data: %s", link->peer,
                       data_ports_hint);
            }
            memcpy(text, link->text, sizeof(text));
            ucx_link_end(link, ucx, link->why, text);
            if (link->pipe != NULL) {
                ucx_pipe_retire(link->pipe);
            }
        } else {
            ucx_look_at(ucx, link->deadline_ns);
        }
    }
    if (link->state != LINK_DEAD) {
        return 0;
    }
    if (link->in_flight > 0) {
        if (now >= link->deadline_ns && link->pipe != NULL) {
            ucx_pipe_cut(link->pipe);
        }
        ucx_look_at(ucx, now >= link->deadline_ns ? now + FL_NS_PER_MS : link->deadline_ns);
        return 0;
    }
    if (link->pipe != NULL) {
        ucx_pipe_release(link->pipe);
    }
    const struct ucx_link over = *link;
    free(link->assembly.data);
    link->assembly.data = NULL;
    link->state = LINK_FREE;
    if (over.known) {
        ucx->events.closed(ucx->events.ctx, over.id, over.why, over.text);
    }
    return 1;
}

unsigned ucx_look_after(struct ucx *ucx, uint64_t now)
{
    unsigned count = 0;
    ucx->attention = false;
    for (size_t i = 0; i < ucx->pipe_end; i++) {
        ucx_pipe_look_after(ucx, &ucx->pipes[i], now);
    }
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        count += look_after_link(ucx, &ucx->links[i], now);
    }
    return count;
}
