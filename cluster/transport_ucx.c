/* Messages are UCX active messages.  A *pipe* is a UCX endpoint to another process's worker, shared
 * by all links between the two, because UCX pairs up endpoints that two workers make to each other.
 *
 *   opener                                  answerer
 *   (both have met at the door, door.h, or over MPI: each knows the other's worker address)
 *   KNOCK(token, ticket or address) ──►     makes a link, accepted()
 *          ◄── GREET(to, token)
 *   MESSAGE(to, sequence, type, size), MORE(to, sequence, offset) ◄──►
 *   BYE(to) ──►  ◄── BYE(to)                both have everything
 *
 * A message names its link by a random token of the receiver: UCX does not say which socket a
 * message came in on, so a stranger who speaks UCX must not be able to guess his way into a link
 * that others have opened.
 *
 * Everything is sent eagerly, in fragments that UCX passes on as they are, one after the other.
 * UCX's own fragments overtake one another, and its zero copy ends the process when the peer dies
 * in the middle.  Rendezvous would save a copy on RDMA, but it may overtake, and its size is
 * announced by the peer; whoever sends one here is cut off.
 *
 * Nothing is given to UCX from within its own callbacks, and it looks at one socket at a time: a
 * send that finds a peer dead closes that peer's socket, and UCX 1.13 aborts the process when it
 * then meets an event of that socket that it had fetched before.
 */
#include "cluster/transport.h"

#include <errno.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <net/if.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <ucp/api/ucp.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#include "cluster/door.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "proto/network_address.h"
#include "proto/pool_key.h"

enum {
    PIPE_MAX = TRANSPORT_LINK_MAX + 64, /* also those that are closing */
    QUEUE_COUNT_MAX = 256,              /* messages of one link that have not left */
    QUEUE_BYTES_MAX = 16 << 20,
    COPY_CACHE_MAX = 8 << 20, /* bytes of copy buffers kept for the next messages */
    COPY_CLASSES = 6,
    TEXT_MAX = 256,
    FRAGMENT_MAX = 60 << 10, /* bytes of data that UCX gets at once; see TCP_TX_SEG_SIZE */
    WIRE_HEADER_SIZE = 20,   /* to u64, sequence u32, type u16, header size u16, data size u32 */
    MORE_SIZE = 16,          /* to u64, sequence u32, offset u32 */
    KNOCK_SIZE = 24,         /* magic u64, token u64, ticket u64 */
    GREET_SIZE = 16,         /* to u64, token u64 */
    BYE_SIZE = 8,            /* to u64 */
    BLOB_PROCESS_SIZE = 8,   /* in front of a worker's address */
};

enum { READY_INBOX = 1, READY_OUTBOX = 2, READY_DOOR = 4, READY_ALL = 7, READY_TIMER = 8 };

enum { AM_MESSAGE = 1, AM_KNOCK = 2, AM_GREET = 3, AM_BYE = 4, AM_MORE = 5 };

static const uint64_t knock_magic = UINT64_C(0x316b6e6f6e6b6c66);
static const uint64_t door_wait_ns = 5 * FL_NS_PER_S;  /* from a TCP connection to a link */
static const uint64_t gone_wait_ns = FL_NS_PER_S / 4;  /* a goodbye still under way in UCX */
static const uint64_t idle_wait_ns = 10 * FL_NS_PER_S; /* a pipe that no link uses */
static const uint64_t close_wait_ns = 2 * FL_NS_PER_S; /* a goodbye that is not answered */
static const long mute_ns = FL_NS_PER_MS;              /* an outbox that calls for nothing */
static const uint64_t round_ns = FL_NS_PER_S / 10;     /* UCX is looked after without being asked */

static const size_t copy_class_size[COPY_CLASSES] = {1 << 9,  1 << 12, 1 << 15,
                                                     1 << 18, 1 << 20, 1 << 22};
_Static_assert(TRANSPORT_COPY_MAX <= 1 << 22, "the largest copy class holds the largest copy");

struct ucx;
struct send;

struct send_list {
    struct send *first;
    struct send **last;
};

struct pipe {
    struct ucx *ucx;
    ucp_ep_h ep;          /* NULL: the slot is free, unless `closing` */
    void *closing;        /* request of the endpoint's close */
    struct send_list out; /* what has not left, in order */
    bool busy;            /* UCX holds a fragment of the first of them */
    bool failed;          /* the error handler ran, or a send failed at once */
    ucs_status_t error;   /* valid when failed */
    unsigned link_count;  /* links that use it */
    uint64_t process;     /* whose worker */
    uint64_t deadline_ns; /* close it then when no link uses it; 0: never */
    char peer[TRANSPORT_TEXT_MAX];
};

enum link_state {
    LINK_FREE,
    LINK_AWAITED, /* admitted at the door, has not knocked; nobody knows of it */
    LINK_OPENING,
    LINK_OPEN,
    LINK_CLOSING,
    LINK_DEAD,
};

struct send {
    struct send *next;
    unsigned id;         /* AM_* */
    bool started;        /* its first fragment has left */
    size_t offset;       /* data that has left */
    transport_link link; /* 0: one of the transport's own */
    uint64_t cookie;
    const void *data;
    size_t size;
    void *copy; /* owned when not NULL */
    int copy_class;
    size_t header_size;
    unsigned char header[WIRE_HEADER_SIZE + TRANSPORT_HEADER_MAX];
};

/* A message that comes in fragments. */
struct assembly {
    unsigned char *data; /* owned, kept for the next message */
    size_t capacity;
    size_t size; /* 0: none under way */
    size_t filled;
    uint16_t type;
    size_t header_size;
    uint64_t header[TRANSPORT_HEADER_MAX / 8];
};

struct link {
    enum link_state state;
    transport_link id;
    bool known; /* to our caller */
    uint64_t token;
    uint64_t remote_token;
    uint64_t ticket;   /* of LINK_AWAITED */
    door_visit visit;  /* its connection at the door; 0: none, or gone */
    struct pipe *pipe; /* NULL before it is admitted, and when dead */
    uint32_t sequence_out;
    uint32_t sequence_in;
    struct assembly assembly;
    unsigned queue_count; /* waiting and in flight */
    size_t queue_bytes;
    unsigned in_flight;       /* with UCX: their data may not be touched yet */
    struct send_list waiting; /* until the answerer greets */
    uint64_t deadline_ns;     /* of a goodbye; 0: none */
    fl_status why;            /* how it ended, or will */
    char peer[TRANSPORT_TEXT_MAX];
    char text[TEXT_MAX];
};

struct ucx {
    struct transport transport; /* first: the ops get a pointer to it */
    ucp_context_h context;
    ucp_worker_h inbox;  /* others connect to it; it makes no endpoint */
    ucp_worker_h outbox; /* all endpoints are its; nobody knows its address */
    struct door *door;   /* NULL when the address is the worker's */
    int fd;              /* epoll over UCX's two descriptors and the door's */
    bool tcp_only;       /* no transport but UCX's TCP is in play */
    int outbox_fd;
    int timer;    /* when it fires, the outbox is listened to again; -1: none */
    bool muted;   /* it is not */
    unsigned due; /* READY_*: to be looked at without being asked */
    uint64_t next_round_ns;
    bool quiet;     /* UCX's own lines go to our log */
    bool attention; /* some pipe or link needs a look by the next progress() */
    bool inside;    /* a callback of UCX may be running */
    bool more_out;  /* some pipe can go on sending */
    uint64_t next_look_ns;
    uint64_t link_counter;
    uint64_t process;
    struct transport_events events;
    struct fl_address address;        /* where others reach us */
    struct fl_address worker_address; /* process u64, then the worker's address */
    struct link links[TRANSPORT_LINK_MAX];
    struct pipe pipes[PIPE_MAX];
    struct send *free_sends;
    struct send_list done; /* left or failed; to be reported */
    void *free_copies[COPY_CLASSES];
    size_t free_copy_bytes;
    unsigned char *bounce; /* aligned copy of data that UCX hands out unaligned */
    size_t bounce_size;
};

static uint64_t now_ns(void)
{
    const struct fl_clock clock = fl_clock_monotonic();
    return fl_clock_now(&clock);
}

static void put_u16(unsigned char *out, uint16_t value)
{
    out[0] = (unsigned char)value;
    out[1] = (unsigned char)(value >> 8);
}

static void put_u32(unsigned char *out, uint32_t value)
{
    put_u16(out, (uint16_t)value);
    put_u16(out + 2, (uint16_t)(value >> 16));
}

static void put_u64(unsigned char *out, uint64_t value)
{
    put_u32(out, (uint32_t)value);
    put_u32(out + 4, (uint32_t)(value >> 32));
}

static uint16_t get_u16(const unsigned char *in)
{
    return (uint16_t)(in[0] | in[1] << 8);
}

static uint32_t get_u32(const unsigned char *in)
{
    return get_u16(in) | (uint32_t)get_u16(in + 2) << 16;
}

static uint64_t get_u64(const unsigned char *in)
{
    return get_u32(in) | (uint64_t)get_u32(in + 4) << 32;
}

/* Have progress() look again at that time. */
static void look_at(struct ucx *ucx, uint64_t when_ns)
{
    if (when_ns < ucx->next_look_ns) {
        ucx->next_look_ns = when_ns;
    }
}

/* Sends: records and copy buffers come from free lists, so that a steady flow allocates nothing. */

static void list_init(struct send_list *list)
{
    list->first = NULL;
    list->last = &list->first;
}

static void list_push(struct send_list *list, struct send *send)
{
    send->next = NULL;
    *list->last = send;
    list->last = &send->next;
}

static struct send *list_pop(struct send_list *list)
{
    struct send *send = list->first;
    if (send != NULL) {
        list->first = send->next;
        if (list->first == NULL) {
            list->last = &list->first;
        }
    }
    return send;
}

static void *copy_take(struct ucx *ucx, size_t size, int *out_class)
{
    int class = 0;
    while (copy_class_size[class] < size) {
        class ++;
    }
    *out_class = class;
    void *copy = ucx->free_copies[class];
    if (copy == NULL) {
        return malloc(copy_class_size[class]);
    }
    memcpy(&ucx->free_copies[class], copy, sizeof(void *));
    ucx->free_copy_bytes -= copy_class_size[class];
    return copy;
}

static void copy_give(struct ucx *ucx, void *copy, int class)
{
    if (ucx->free_copy_bytes + copy_class_size[class] > COPY_CACHE_MAX) {
        free(copy);
        return;
    }
    memcpy(copy, &ucx->free_copies[class], sizeof(void *));
    ucx->free_copies[class] = copy;
    ucx->free_copy_bytes += copy_class_size[class];
}

static struct send *send_take(struct ucx *ucx)
{
    struct send *send = ucx->free_sends;
    if (send != NULL) {
        ucx->free_sends = send->next;
    } else {
        send = malloc(sizeof(*send));
    }
    if (send != NULL) {
        *send = (struct send){.link = 0};
    }
    return send;
}

static void send_give(struct ucx *ucx, struct send *send)
{
    if (send->copy != NULL) {
        copy_give(ucx, send->copy, send->copy_class);
    }
    send->next = ucx->free_sends;
    ucx->free_sends = send;
}

static struct link *link_find(struct ucx *ucx, transport_link id)
{
    struct link *link = &ucx->links[id % TRANSPORT_LINK_MAX];
    return id != 0 && link->state != LINK_FREE && link->id == id ? link : NULL;
}

static struct link *link_by_token(struct ucx *ucx, uint64_t token)
{
    struct link *link = &ucx->links[token % TRANSPORT_LINK_MAX];
    return link->state != LINK_FREE && link->token == token ? link : NULL;
}

static void pipe_fail(struct pipe *pipe, ucs_status_t error)
{
    if (!pipe->failed) {
        pipe->failed = true;
        pipe->error = error;
    }
    pipe->ucx->attention = true;
}

static void on_pipe_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    (void)ep;
    pipe_fail(arg, status);
}

static void on_sent(void *request, ucs_status_t status, void *user_data)
{
    struct pipe *pipe = user_data;
    pipe->busy = false;
    pipe->ucx->more_out = true;
    if (status != UCS_OK) {
        pipe_fail(pipe, status);
    }
    ucp_request_free(request);
}

/* Messages of a pipe that will not leave: those of one link, or with 0 all.  What UCX holds stays
 * until it lets go. */
static void give_up(struct pipe *pipe, transport_link link)
{
    struct send_list kept;
    struct send *send;
    list_init(&kept);
    if (pipe->busy && (send = list_pop(&pipe->out)) != NULL) {
        list_push(&kept, send);
    }
    while ((send = list_pop(&pipe->out)) != NULL) {
        list_push(link == 0 || send->link == link ? &pipe->ucx->done : &kept, send);
    }
    list_init(&pipe->out);
    while ((send = list_pop(&kept)) != NULL) {
        list_push(&pipe->out, send);
    }
}

/* Hand the next fragment of a message to UCX; false when it has no room for it now.  Over TCP a
 * fragment is taken at once or not at all: what UCX queues, it asks the peer to connect back for. */
static bool send_fragment(struct pipe *pipe, struct send *send)
{
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK |
                        UCP_OP_ATTR_FIELD_USER_DATA |
                        (pipe->ucx->tcp_only ? UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL : 0),
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_sent,
        .user_data = pipe,
    };
    const size_t left = send->size - send->offset;
    const size_t size = left < FRAGMENT_MAX ? left : FRAGMENT_MAX;
    const void *data = size > 0 ? (const unsigned char *)send->data + send->offset : NULL;
    if (send->started) {
        put_u32(send->header + 12, (uint32_t)send->offset); /* sequence and receiver stay */
    }
    const unsigned id = send->started ? AM_MORE : send->id;
    const size_t header_size = send->started ? MORE_SIZE : send->header_size;
    pipe->busy = true;
    ucs_status_ptr_t request =
        ucp_am_send_nbx(pipe->ep, id, send->header, header_size, data, size, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        pipe->busy = false;
    }
    if (UCS_PTR_STATUS(request) == UCS_ERR_NO_RESOURCE) {
        return false;
    }
    if (UCS_PTR_IS_ERR(request)) {
        pipe_fail(pipe, UCS_PTR_STATUS(request));
    }
    send->started = true;
    send->offset += size;
    return true;
}

/* Send what can be sent. */
static void pump(struct pipe *pipe)
{
    bool room = true;
    while (room && !pipe->busy && !pipe->failed && pipe->out.first != NULL) {
        struct send *send = pipe->out.first;
        if (!send->started || send->offset < send->size) {
            room = send_fragment(pipe, send);
        } else {
            list_push(&pipe->ucx->done, list_pop(&pipe->out));
        }
    }
    if (pipe->failed) {
        give_up(pipe, 0);
    }
}

static void pump_all(struct ucx *ucx)
{
    ucx->more_out = false;
    for (size_t i = 0; i < PIPE_MAX; i++) {
        if (ucx->pipes[i].out.first != NULL) {
            pump(&ucx->pipes[i]);
        }
    }
}

/* Queue a message.  It is reported in progress() whatever becomes of it. */
static void post(struct pipe *pipe, unsigned id, struct send *send)
{
    struct ucx *ucx = pipe->ucx;
    send->id = id;
    if (pipe->failed || pipe->ep == NULL) {
        list_push(&ucx->done, send);
        return;
    }
    list_push(&pipe->out, send);
    if (ucx->inside) {
        ucx->more_out = true;
    } else {
        pump(pipe);
    }
}

/* One of the transport's own messages; lost silently when memory is out, as the peer's deadline
 * covers it. */
static void post_own(struct pipe *pipe, unsigned id, uint64_t first, uint64_t second,
                     uint64_t third, size_t size)
{
    struct send *send = send_take(pipe->ucx);
    if (send == NULL) {
        pipe_fail(pipe, UCS_ERR_NO_MEMORY);
        return;
    }
    put_u64(send->header, first);
    put_u64(send->header + 8, second);
    put_u64(send->header + 16, third);
    send->header_size = size;
    if (id == AM_KNOCK && pipe->ucx->door == NULL) {
        send->data = pipe->ucx->worker_address.bytes;
        send->size = pipe->ucx->worker_address.size;
    }
    post(pipe, id, send);
}

/* Pipes. */

static struct pipe *pipe_take(struct ucx *ucx)
{
    for (size_t i = 0; i < PIPE_MAX; i++) {
        struct pipe *pipe = &ucx->pipes[i];
        if (pipe->ep == NULL && pipe->closing == NULL && !pipe->busy) {
            *pipe = (struct pipe){.ucx = ucx};
            list_init(&pipe->out);
            return pipe;
        }
    }
    return NULL;
}

static ucs_status_t pipe_create(struct pipe *pipe, ucp_ep_params_t *params)
{
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler = (ucp_err_handler_t){.cb = on_pipe_error, .arg = pipe};
    const ucs_status_t status = ucp_ep_create(pipe->ucx->outbox, params, &pipe->ep);
    if (status != UCS_OK) {
        pipe->ep = NULL;
    }
    return status;
}

/* Begin to close the endpoint; what it still had to send is given up. */
static void pipe_close(struct pipe *pipe)
{
    static const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                              .flags = UCP_EP_CLOSE_FLAG_FORCE};
    if (pipe->ep == NULL) {
        return;
    }
    ucs_status_ptr_t request = ucp_ep_close_nbx(pipe->ep, &param);
    pipe->ep = NULL;
    pipe->failed = true;
    give_up(pipe, 0);
    pipe->ucx->more_out = true; /* for what UCX has let go of meanwhile */
    pipe->closing = UCS_PTR_IS_PTR(request) ? request : NULL;
    pipe->ucx->attention = true;
}

static void pipe_release(struct pipe *pipe)
{
    FL_ASSERT(pipe->link_count > 0);
    pipe->link_count--;
    if (pipe->link_count == 0 && pipe->ucx->door != NULL) {
        pipe->deadline_ns = now_ns() + idle_wait_ns;
        look_at(pipe->ucx, pipe->deadline_ns);
    }
}

/* Links. */

static struct link *link_take(struct ucx *ucx, enum link_state state, struct pipe *pipe)
{
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        struct link *link = &ucx->links[i];
        if (link->state != LINK_FREE) {
            continue;
        }
        *link = (struct link){.state = state, .known = state != LINK_AWAITED, .pipe = pipe};
        list_init(&link->waiting);
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

/* The link is over; closed() follows from progress() once UCX has let go of its messages. */
static void link_end(struct link *link, struct ucx *ucx, fl_status why, const char *text)
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
    struct send *send;
    while ((send = list_pop(&link->waiting)) != NULL) {
        send_give(ucx, send);
    }
    if (link->pipe != NULL) {
        give_up(link->pipe, link->id);
    }
    if (ucx->door != NULL) {
        door_leave(ucx->door, link->visit);
        link->visit = 0;
    }
    link->deadline_ns = now_ns() + close_wait_ns;
}

/* A peer that breaks the rules loses the link. */
static void link_broken(struct link *link, struct ucx *ucx, const char *what)
{
    char text[TEXT_MAX];
    snprintf(text, sizeof(text), "link to %s: %s", link->peer, what);
    post_own(link->pipe, AM_BYE, link->remote_token, 0, 0, BYE_SIZE);
    link_end(link, ucx, FL_PROTOCOL, text);
}

static void link_post(struct link *link, struct send *send)
{
    put_u64(send->header, link->remote_token);
    put_u32(send->header + 8, link->sequence_out++);
    link->in_flight++;
    post(link->pipe, AM_MESSAGE, send);
}

/* The pipe to another process's worker, made when there is none. */
static struct pipe *worker_pipe(struct ucx *ucx, const unsigned char *blob, ucs_status_t *out_error)
{
    const uint64_t process = get_u64(blob);
    *out_error = UCS_ERR_EXCEEDS_LIMIT;
    for (size_t i = 0; i < PIPE_MAX; i++) {
        struct pipe *pipe = &ucx->pipes[i];
        if (pipe->ep != NULL && !pipe->failed && pipe->process == process) {
            return pipe;
        }
    }
    struct pipe *pipe = pipe_take(ucx);
    if (pipe == NULL) {
        return NULL;
    }
    pipe->process = process;
    snprintf(pipe->peer, sizeof(pipe->peer), "worker %016" PRIx64, process);
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
        .address = (const ucp_address_t *)(const void *)(blob + BLOB_PROCESS_SIZE),
    };
    *out_error = pipe_create(pipe, &params);
    return *out_error == UCS_OK ? pipe : NULL;
}

/* What arrives. */

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

/* UCX loses fragments of a peer that is just dying, and then still hands on what came after. */
static void link_gap(struct link *link, struct ucx *ucx, uint32_t sequence)
{
    char text[TEXT_MAX];
    snprintf(text, sizeof(text),
             "connection to %s lost: message %" PRIu32 " came where %" PRIu32 " was due%s",
             link->peer, sequence, link->sequence_in,
             link->assembly.size > 0 ? ", in the middle of another" : "");
    post_own(link->pipe, AM_BYE, link->remote_token, 0, 0, BYE_SIZE);
    link_end(link, ucx, FL_LINK_LOST, text);
}

/* The first fragment of a message that has more. */
static void assembly_begin(struct ucx *ucx, struct link *link, size_t total, const void *data,
                           size_t size)
{
    struct assembly *assembly = &link->assembly;
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
}

static ucs_status_t on_message(void *arg, const void *wire, size_t wire_size, void *data,
                               size_t size, const ucp_am_recv_param_t *param)
{
    struct ucx *ucx = arg;
    struct link *link = wire_size >= WIRE_HEADER_SIZE ? link_by_token(ucx, get_u64(wire)) : NULL;
    if (link == NULL || link->state != LINK_OPEN || link->pipe->failed) {
        return UCS_OK; /* late, or from nobody we know */
    }
    const unsigned char *bytes = wire;
    const size_t header_size = get_u16(bytes + 14);
    const size_t total = get_u32(bytes + 16);
    struct assembly *assembly = &link->assembly;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
        link_broken(link, ucx, "a rendezvous message, which no firstlight sends");
    } else if (header_size != wire_size - WIRE_HEADER_SIZE || header_size > TRANSPORT_HEADER_MAX ||
               total > TRANSPORT_MESSAGE_MAX - header_size || size > total ||
               (size == 0 && total > 0)) {
        link_broken(link, ucx, "a message over the size limit");
    } else if (get_u32(bytes + 8) != link->sequence_in || assembly->size > 0) {
        link_gap(link, ucx, get_u32(bytes + 8));
    } else {
        link->sequence_in++;
        assembly->type = get_u16(bytes + 12);
        assembly->header_size = header_size;
        memcpy(assembly->header, bytes + WIRE_HEADER_SIZE, header_size);
        if (size < total) {
            assembly_begin(ucx, link, total, data, size);
            return UCS_OK;
        }
        const void *view = aligned(ucx, data, size);
        if (view == NULL && size > 0) {
            link_broken(link, ucx, "no memory for a message");
            return UCS_OK;
        }
        ucx->events.received(ucx->events.ctx, link->id, assembly->type, assembly->header,
                             header_size, view, size);
    }
    return UCS_OK;
}

static ucs_status_t on_more(void *arg, const void *wire, size_t wire_size, void *data, size_t size,
                            const ucp_am_recv_param_t *param)
{
    struct ucx *ucx = arg;
    struct link *link = wire_size == MORE_SIZE ? link_by_token(ucx, get_u64(wire)) : NULL;
    if (link == NULL || link->state != LINK_OPEN || link->pipe->failed) {
        return UCS_OK;
    }
    const unsigned char *bytes = wire;
    struct assembly *assembly = &link->assembly;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 || assembly->size == 0 || size == 0 ||
        size > assembly->size - assembly->filled || get_u32(bytes + 8) != link->sequence_in - 1 ||
        get_u32(bytes + 12) != assembly->filled) {
        link_gap(link, ucx, get_u32(bytes + 8));
        return UCS_OK;
    }
    memcpy(assembly->data + assembly->filled, data, size);
    assembly->filled += size;
    if (assembly->filled == assembly->size) {
        assembly->size = 0;
        ucx->events.received(ucx->events.ctx, link->id, assembly->type, assembly->header,
                             assembly->header_size, assembly->data, assembly->filled);
    }
    return UCS_OK;
}

/* The link that a knock is for, NULL when there is none. */
static struct link *knock_link(struct ucx *ucx, uint64_t ticket, const void *data, size_t size)
{
    if (ucx->door == NULL) {
        /* A worker's address is only taken from processes that mpirun started with us. */
        ucs_status_t error;
        struct pipe *pipe = size > BLOB_PROCESS_SIZE && size <= FL_ADDRESS_MAX
                                ? worker_pipe(ucx, data, &error)
                                : NULL;
        struct link *link = pipe != NULL ? link_take(ucx, LINK_AWAITED, pipe) : NULL;
        if (link != NULL) {
            memcpy(link->peer, pipe->peer, sizeof(link->peer));
        }
        return link;
    }
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        struct link *link = &ucx->links[i];
        if (link->state == LINK_AWAITED && link->ticket == ticket) {
            return link;
        }
    }
    return NULL;
}

static ucs_status_t on_knock(void *arg, const void *wire, size_t wire_size, void *data, size_t size,
                             const ucp_am_recv_param_t *param)
{
    struct ucx *ucx = arg;
    if (wire_size != KNOCK_SIZE || get_u64(wire) != knock_magic ||
        (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
        return UCS_OK;
    }
    const unsigned char *bytes = wire;
    struct link *link = knock_link(ucx, get_u64(bytes + 16), data, size);
    if (link == NULL) {
        return UCS_OK;
    }
    link->remote_token = get_u64(bytes + 8);
    link->state = LINK_OPEN;
    link->known = true;
    link->deadline_ns = 0;
    post_own(link->pipe, AM_GREET, link->remote_token, link->token, 0, GREET_SIZE);
    ucx->events.accepted(ucx->events.ctx, link->id, link->peer);
    return UCS_OK;
}

static ucs_status_t on_greet(void *arg, const void *wire, size_t wire_size, void *data, size_t size,
                             const ucp_am_recv_param_t *param)
{
    (void)data, (void)size, (void)param;
    struct ucx *ucx = arg;
    struct link *link = wire_size == GREET_SIZE ? link_by_token(ucx, get_u64(wire)) : NULL;
    if (link == NULL || link->state != LINK_OPENING) {
        return UCS_OK;
    }
    link->remote_token = get_u64((const unsigned char *)wire + 8);
    link->state = LINK_OPEN;
    struct send *send;
    while ((send = list_pop(&link->waiting)) != NULL) {
        link_post(link, send);
    }
    return UCS_OK;
}

static ucs_status_t on_bye(void *arg, const void *wire, size_t wire_size, void *data, size_t size,
                           const ucp_am_recv_param_t *param)
{
    (void)data, (void)size, (void)param;
    struct ucx *ucx = arg;
    struct link *link = wire_size == BYE_SIZE ? link_by_token(ucx, get_u64(wire)) : NULL;
    if (link == NULL || link->state == LINK_DEAD) {
        return UCS_OK;
    }
    char text[TEXT_MAX];
    snprintf(text, sizeof(text), "%s closed the link", link->peer);
    if (link->state == LINK_OPEN) {
        post_own(link->pipe, AM_BYE, link->remote_token, 0, 0, BYE_SIZE);
    }
    link_end(link, ucx, FL_LINK_LOST, text);
    return UCS_OK;
}

/* The door. */

/* A link without a pipe yet: make one to the worker whose address was shown at the door. */
static bool link_admit(struct ucx *ucx, struct link *link, const void *pass, size_t size)
{
    ucs_status_t error = UCS_ERR_INVALID_PARAM;
    struct pipe *pipe = size > BLOB_PROCESS_SIZE ? worker_pipe(ucx, pass, &error) : NULL;
    if (pipe == NULL) {
        char text[TEXT_MAX];
        snprintf(text, sizeof(text),
                 "cannot reach %s with UCX: %s (does one side listen on loopback only?)",
                 link->peer, ucs_status_string(error));
        link_end(link, ucx, FL_LINK_LOST, text);
        return false;
    }
    pipe->link_count++;
    link->pipe = pipe;
    return true;
}

static struct link *link_by_visit(struct ucx *ucx, door_visit visit)
{
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        if (ucx->links[i].state != LINK_FREE && ucx->links[i].visit == visit) {
            return &ucx->links[i];
        }
    }
    return NULL;
}

static void on_admitted(void *ctx, door_visit visit, bool opener, uint64_t ticket, const void *pass,
                        size_t size, const char *peer)
{
    struct ucx *ucx = ctx;
    if (opener) {
        struct link *link = link_by_visit(ucx, visit);
        if (link != NULL && link->state == LINK_OPENING && link_admit(ucx, link, pass, size)) {
            post_own(link->pipe, AM_KNOCK, knock_magic, link->token, ticket, KNOCK_SIZE);
        }
        return;
    }
    struct link *link = link_take(ucx, LINK_AWAITED, NULL);
    if (link == NULL) {
        fl_log(FL_LOG_WARN, "link from %s refused: %d are open, which is the limit", peer,
               TRANSPORT_LINK_MAX);
        door_leave(ucx->door, visit);
        return;
    }
    link->visit = visit;
    link->ticket = ticket;
    snprintf(link->peer, sizeof(link->peer), "%s", peer);
    link->deadline_ns = now_ns() + door_wait_ns;
    look_at(ucx, link->deadline_ns);
    (void)link_admit(ucx, link, pass, size);
}

/* The process behind a link is gone, or closed it: then its goodbye may still be under way. */
static void on_gone(void *ctx, door_visit visit, fl_status why, const char *text)
{
    struct ucx *ucx = ctx;
    struct link *link = link_by_visit(ucx, visit);
    if (link == NULL) {
        return;
    }
    link->visit = 0;
    if (link->state == LINK_OPEN) {
        link->why = why;
        snprintf(link->text, sizeof(link->text), "%s", text);
        link->deadline_ns = now_ns() + gone_wait_ns;
        look_at(ucx, link->deadline_ns);
    } else if (link->state == LINK_OPENING || link->state == LINK_AWAITED) {
        link_end(link, ucx, why, text);
    }
}

/* progress(): reports, then deadlines and failures. */

static unsigned report_sent(struct ucx *ucx)
{
    unsigned count = 0;
    struct send *send;
    while ((send = list_pop(&ucx->done)) != NULL) {
        const transport_link id = send->link;
        const uint64_t cookie = send->cookie;
        struct link *link = link_find(ucx, id);
        if (link != NULL) {
            link->queue_count--;
            link->queue_bytes -= send->size;
            link->in_flight--;
            if (link->state == LINK_DEAD && link->in_flight == 0) {
                ucx->attention = true;
            }
        }
        send_give(ucx, send);
        count++;
        if (link != NULL && cookie != 0 && link->state != LINK_DEAD) {
            ucx->events.sent(ucx->events.ctx, id, cookie);
        }
    }
    return count;
}

/* The link's pipe has failed. */
static void link_lost(struct ucx *ucx, struct link *link, ucs_status_t error)
{
    char text[TEXT_MAX];
    snprintf(text, sizeof(text), "connection to %s lost: %s", link->peer, ucs_status_string(error));
    link_end(link, ucx, FL_LINK_LOST, text);
    pipe_release(link->pipe);
    link->pipe = NULL;
}

static void look_after_pipe(struct ucx *ucx, struct pipe *pipe, uint64_t now)
{
    if (pipe->closing != NULL) {
        if (ucp_request_check_status(pipe->closing) != UCS_INPROGRESS) {
            ucp_request_free(pipe->closing);
            pipe->closing = NULL;
        } else {
            look_at(ucx, now + FL_NS_PER_MS);
        }
        return;
    }
    if (pipe->ep == NULL) {
        return;
    }
    if (pipe->failed) {
        for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
            if (ucx->links[i].state != LINK_FREE && ucx->links[i].pipe == pipe) {
                link_lost(ucx, &ucx->links[i], pipe->error);
            }
        }
        pipe_close(pipe);
    } else if (pipe->deadline_ns != 0 && pipe->link_count == 0) {
        if (now >= pipe->deadline_ns) {
            pipe_close(pipe);
        } else {
            look_at(ucx, pipe->deadline_ns);
        }
    }
}

static unsigned look_after_link(struct ucx *ucx, struct link *link, uint64_t now)
{
    const bool late = link->deadline_ns != 0 && now >= link->deadline_ns;
    if (link->state != LINK_FREE && link->state != LINK_DEAD && link->deadline_ns != 0) {
        if (late) {
            char text[TEXT_MAX];
            memcpy(text, link->text, sizeof(text));
            link_end(link, ucx, link->why, text);
        } else {
            look_at(ucx, link->deadline_ns);
        }
    }
    if (link->state != LINK_DEAD) {
        return 0;
    }
    if (link->in_flight > 0) {
        if (now >= link->deadline_ns && link->pipe != NULL) {
            pipe_fail(link->pipe, UCS_ERR_ENDPOINT_TIMEOUT);
        }
        look_at(ucx, now >= link->deadline_ns ? now + FL_NS_PER_MS : link->deadline_ns);
        return 0;
    }
    if (link->pipe != NULL) {
        pipe_release(link->pipe);
    }
    const struct link over = *link;
    free(link->assembly.data);
    link->assembly.data = NULL;
    link->state = LINK_FREE;
    if (over.known) {
        ucx->events.closed(ucx->events.ctx, over.id, over.why, over.text);
    }
    return 1;
}

static unsigned look_after_all(struct ucx *ucx, uint64_t now)
{
    unsigned count = 0;
    ucx->attention = false;
    for (size_t i = 0; i < PIPE_MAX; i++) {
        look_after_pipe(ucx, &ucx->pipes[i], now);
    }
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        count += look_after_link(ucx, &ucx->links[i], now);
    }
    return count;
}

static struct ucx *ucx_of(struct transport *transport)
{
    return (struct ucx *)(void *)transport;
}

/* While a peer has not answered UCX's connection, its socket is writable and nothing is to be
 * written: the outbox calls, and there is nothing to do.  Then it is not heard for a while. */
static void mute(struct ucx *ucx)
{
    const struct itimerspec when = {.it_value = {.tv_nsec = mute_ns}};
    if (!ucx->muted && timerfd_settime(ucx->timer, 0, &when, NULL) == 0) {
        struct epoll_event event = {.events = 0, .data.u32 = READY_OUTBOX};
        ucx->muted = epoll_ctl(ucx->fd, EPOLL_CTL_MOD, ucx->outbox_fd, &event) == 0;
    }
}

static void unmute(struct ucx *ucx)
{
    uint64_t count;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = READY_OUTBOX};
    (void)!read(ucx->timer, &count, sizeof(count));
    if (ucx->muted && epoll_ctl(ucx->fd, EPOLL_CTL_MOD, ucx->outbox_fd, &event) == 0) {
        ucx->muted = false;
    }
}

/* What has something to do, of those that the descriptor stands for. */
static unsigned ready_now(struct ucx *ucx, uint64_t now)
{
    struct epoll_event events[4];
    unsigned ready = 0;
    if (!ucx->tcp_only || now >= ucx->next_round_ns) {
        ucx->next_round_ns = now + round_ns;
        ucx->more_out = true;
        return READY_ALL;
    }
    const int count = epoll_wait(ucx->fd, events, 4, 0);
    for (int i = 0; i < count; i++) {
        ready |= events[i].data.u32;
    }
    if ((ready & READY_TIMER) != 0) {
        unmute(ucx);
    }
    return ready;
}

/* Let a worker work.  One that had called for it and found nothing is told to be quiet. */
static unsigned progress_worker(struct ucx *ucx, ucp_worker_h worker, unsigned ready)
{
    ucx->inside = true;
    const unsigned happened = ucp_worker_progress(worker);
    ucx->inside = false;
    if (happened == 0 && ucx->tcp_only && ucp_worker_arm(worker) != UCS_OK) {
        ucx->due |= ready;
    }
    return happened;
}

static unsigned ucx_progress(struct transport *transport)
{
    struct ucx *ucx = ucx_of(transport);
    unsigned count = 0;
    const uint64_t now = now_ns();
    const unsigned called = ready_now(ucx, now);
    const unsigned ready = called | ucx->due;
    ucx->due = 0;
    if ((ready & READY_INBOX) != 0) {
        count += progress_worker(ucx, ucx->inbox, READY_INBOX);
    }
    if ((ready & READY_OUTBOX) != 0) {
        const unsigned happened = progress_worker(ucx, ucx->outbox, READY_OUTBOX);
        ucx->more_out |= happened > 0;
        count += happened;
        if (happened > 0) {
            ucx->due |= READY_OUTBOX;
        } else if (called == READY_OUTBOX) {
            mute(ucx);
        }
    }
    if (ucx->more_out) {
        pump_all(ucx);
    }
    if (now >= ucx->next_look_ns) {
        ucx->next_look_ns = UINT64_MAX;
        ucx->attention = true;
    }
    if (ucx->door != NULL && (ucx->attention || (ready & READY_DOOR) != 0)) {
        count += door_poll(ucx->door, now, &ucx->next_look_ns);
    }
    count += report_sent(ucx);
    if (ucx->attention) {
        count += look_after_all(ucx, now);
    }
    return count;
}

static fl_status ucx_arm(struct transport *transport)
{
    struct ucx *ucx = ucx_of(transport);
    if (ucx->attention || ucx->more_out || ucx->due != 0 || ucx->done.first != NULL) {
        return FL_AGAIN;
    }
    ucs_status_t status = UCS_OK;
    if (!ucx->tcp_only) {
        status = ucp_worker_arm(ucx->inbox);
        status = status == UCS_OK ? ucp_worker_arm(ucx->outbox) : status;
    }
    if (status == UCS_ERR_BUSY) {
        return FL_AGAIN;
    }
    return status == UCS_OK
               ? FL_OK
               : FL_FAIL(FL_INTERNAL, "cannot wait for the network: %s", ucs_status_string(status));
}

static int ucx_fd(struct transport *transport)
{
    return ucx_of(transport)->fd;
}

static void ucx_set_events(struct transport *transport, const struct transport_events *events)
{
    ucx_of(transport)->events = *events;
}

static void ucx_address(struct transport *transport, struct fl_address *out)
{
    *out = ucx_of(transport)->address;
}

static fl_status connect_socket(struct ucx *ucx, const struct fl_address *address,
                                transport_link *out)
{
    struct fl_network_address place;
    struct fl_network_socket targets[FL_NETWORK_RESOLVED_MAX];
    size_t count = 0;
    if (ucx->door == NULL || address->size > FL_ADDRESS_MAX) {
        return FL_FAIL(FL_INVALID, "a socket address of %u bytes is of no use here",
                       (unsigned)address->size);
    }
    FL_TRY(fl_network_address_parse((const char *)address->bytes, address->size, &place));
    if (place.is_unix || place.port == 0) {
        return FL_FAIL(FL_INVALID, "cannot connect to \"%.*s\": HOST:PORT with a port is needed",
                       (int)(address->size < 64 ? address->size : 64),
                       (const char *)address->bytes);
    }
    FL_TRY(fl_network_address_resolve(&place, targets, FL_NETWORK_RESOLVED_MAX, &count));
    struct link *link = link_take(ucx, LINK_OPENING, NULL);
    if (link != NULL) {
        snprintf(link->peer, sizeof(link->peer), "%.*s",
                 (int)(address->size < 100 ? address->size : 100), (const char *)address->bytes);
        link->visit = door_knock(ucx->door, targets, count, link->peer);
    }
    if (link == NULL || link->visit == 0) {
        if (link != NULL) {
            link->state = LINK_FREE;
        }
        return FL_FAIL(FL_TOO_LARGE, "%d links are open, which is the limit", TRANSPORT_LINK_MAX);
    }
    ucx->attention = true; /* it may have been refused on the spot */
    *out = link->id;
    return FL_OK;
}

static fl_status connect_worker(struct ucx *ucx, const struct fl_address *address,
                                transport_link *out)
{
    if (ucx->door != NULL || address->size <= BLOB_PROCESS_SIZE || address->size > FL_ADDRESS_MAX) {
        return FL_FAIL(FL_INVALID, "a worker's address of %u bytes is of no use here",
                       (unsigned)address->size);
    }
    ucs_status_t error = UCS_OK;
    struct pipe *pipe = worker_pipe(ucx, address->bytes, &error);
    if (pipe == NULL) {
        return FL_FAIL(FL_INVALID, "cannot make an endpoint to a worker's address: %s",
                       ucs_status_string(error));
    }
    struct link *link = link_take(ucx, LINK_OPENING, pipe);
    if (link == NULL) {
        return FL_FAIL(FL_TOO_LARGE, "%d links are open, which is the limit", TRANSPORT_LINK_MAX);
    }
    memcpy(link->peer, pipe->peer, sizeof(link->peer));
    post_own(pipe, AM_KNOCK, knock_magic, link->token, 0, KNOCK_SIZE);
    *out = link->id;
    return FL_OK;
}

static fl_status ucx_connect(struct transport *transport, const struct fl_address *address,
                             transport_link *out)
{
    struct ucx *ucx = ucx_of(transport);
    switch (address->kind) {
    case FL_ADDRESS_SOCKET: return connect_socket(ucx, address, out);
    case FL_ADDRESS_WORKER: return connect_worker(ucx, address, out);
    case FL_ADDRESS_LOCAL: break;
    }
    return FL_FAIL(FL_INVALID, "address kind %d cannot be reached over UCX", (int)address->kind);
}

static fl_status ucx_send(struct transport *transport, transport_link id, uint16_t type,
                          const void *header, size_t header_size, const void *data, size_t size,
                          uint64_t cookie)
{
    struct ucx *ucx = ucx_of(transport);
    FL_ASSERT(header_size <= TRANSPORT_HEADER_MAX && size <= TRANSPORT_MESSAGE_MAX - header_size);
    FL_ASSERT(cookie != 0 || size <= TRANSPORT_COPY_MAX);
    struct link *link = link_find(ucx, id);
    if (link == NULL || (link->state != LINK_OPENING && link->state != LINK_OPEN)) {
        return FL_LINK_LOST;
    }
    if (link->queue_count >= QUEUE_COUNT_MAX ||
        (link->queue_count > 0 && link->queue_bytes + size > QUEUE_BYTES_MAX)) {
        return FL_AGAIN;
    }
    struct send *send = send_take(ucx);
    if (send == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory to queue a message to %s", link->peer);
    }
    if (cookie == 0 && size > 0) {
        send->copy = copy_take(ucx, size, &send->copy_class);
        if (send->copy == NULL) {
            send_give(ucx, send);
            return FL_FAIL(FL_NO_MEMORY, "no memory to copy a message of %zu bytes", size);
        }
        memcpy(send->copy, data, size);
    }
    send->link = id;
    send->cookie = cookie;
    send->data = send->copy != NULL ? send->copy : data;
    send->size = size;
    send->header_size = WIRE_HEADER_SIZE + header_size;
    put_u16(send->header + 12, type);
    put_u16(send->header + 14, (uint16_t)header_size);
    put_u32(send->header + 16, (uint32_t)size);
    if (header_size > 0) {
        memcpy(send->header + WIRE_HEADER_SIZE, header, header_size);
    }
    link->queue_count++;
    link->queue_bytes += size;
    if (link->state == LINK_OPENING) {
        list_push(&link->waiting, send);
    } else {
        link_post(link, send);
    }
    return FL_OK;
}

static void ucx_close_link(struct transport *transport, transport_link id)
{
    struct ucx *ucx = ucx_of(transport);
    struct link *link = link_find(ucx, id);
    if (link == NULL) {
        return;
    }
    if (link->state == LINK_OPENING) {
        link_end(link, ucx, FL_CANCELLED, "closed here");
    } else if (link->state == LINK_OPEN) {
        link->state = LINK_CLOSING;
        link->why = FL_CANCELLED;
        snprintf(link->text, sizeof(link->text), "closed here");
        link->deadline_ns = now_ns() + close_wait_ns;
        look_at(ucx, link->deadline_ns);
        post_own(link->pipe, AM_BYE, link->remote_token, 0, 0, BYE_SIZE);
    }
}

static void ucx_drop_link(struct transport *transport, transport_link id)
{
    struct ucx *ucx = ucx_of(transport);
    struct link *link = link_find(ucx, id);
    if (link == NULL || link->state == LINK_DEAD) {
        return;
    }
    struct pipe *pipe = link->pipe;
    if (link->state == LINK_OPEN) {
        post_own(pipe, AM_BYE, link->remote_token, 0, 0, BYE_SIZE);
    }
    link_end(link, ucx, FL_CANCELLED, "dropped here");
    if (link->in_flight > 0) {
        pipe_fail(pipe, UCS_ERR_CANCELED); /* the only way to get the messages' data back */
    }
}

/* Give all endpoints up and wait for UCX to let go of them, at most a second. */
static void close_pipes(struct ucx *ucx)
{
    for (size_t i = 0; i < PIPE_MAX; i++) {
        pipe_close(&ucx->pipes[i]);
    }
    const uint64_t deadline = now_ns() + FL_NS_PER_S;
    size_t open = 1;
    while (open > 0 && now_ns() < deadline) {
        (void)ucp_worker_progress(ucx->outbox);
        pump_all(ucx);
        open = 0;
        for (size_t i = 0; i < PIPE_MAX; i++) {
            look_after_pipe(ucx, &ucx->pipes[i], 0);
            open += ucx->pipes[i].closing != NULL;
        }
    }
}

static void free_sends(struct ucx *ucx)
{
    struct send *send;
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        while (ucx->links[i].state != LINK_FREE &&
               (send = list_pop(&ucx->links[i].waiting)) != NULL) {
            send_give(ucx, send);
        }
        free(ucx->links[i].assembly.data);
    }
    while ((send = list_pop(&ucx->done)) != NULL) {
        send_give(ucx, send);
    }
    while ((send = ucx->free_sends) != NULL) {
        ucx->free_sends = send->next;
        free(send);
    }
    for (int class = 0; class < COPY_CLASSES; class ++) {
        while (ucx->free_copies[class] != NULL) {
            void *copy = ucx->free_copies[class];
            memcpy(&ucx->free_copies[class], copy, sizeof(void *));
            free(copy);
        }
    }
}

static void ucx_close(struct transport *transport)
{
    if (transport == NULL) {
        return;
    }
    struct ucx *ucx = ucx_of(transport);
    /* Only the outbox works from here on: no message comes any more. */
    if (ucx->outbox != NULL) {
        close_pipes(ucx);
        ucp_worker_destroy(ucx->outbox);
    }
    if (ucx->inbox != NULL) {
        ucp_worker_destroy(ucx->inbox);
    }
    /* After the pipes: a link that ends while they close still leaves its visit. */
    door_close(ucx->door);
    if (ucx->timer >= 0) {
        close(ucx->timer);
    }
    if (ucx->fd >= 0) {
        close(ucx->fd);
    }
    if (ucx->context != NULL) {
        ucp_cleanup(ucx->context);
    }
    if (ucx->quiet) {
        ucs_log_pop_handler();
    }
    free_sends(ucx);
    free(ucx->bounce);
    free(ucx);
}

static const struct transport_ops ucx_ops = {
    .name = "ucx",
    .set_events = ucx_set_events,
    .address = ucx_address,
    .connect = ucx_connect,
    .send = ucx_send,
    .close_link = ucx_close_link,
    .drop_link = ucx_drop_link,
    .progress = ucx_progress,
    .fd = ucx_fd,
    .arm = ucx_arm,
    .close = ucx_close,
};

/* open(). */

/* UCX reports what its callers also get as a status; one line on stderr is enough. */
static ucs_log_func_rc_t on_log(const char *file, unsigned line, const char *function,
                                ucs_log_level_t level, const ucs_log_component_config_t *component,
                                const char *message, va_list args)
{
    (void)function, (void)component;
    char text[512];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    vsnprintf(text, sizeof(text), message, args);
#pragma GCC diagnostic pop
    fl_log(level == UCS_LOG_LEVEL_FATAL ? FL_LOG_ERROR : FL_LOG_DEBUG, "ucx %s:%u %s", file, line,
           text);
    return UCS_LOG_FUNC_RC_STOP;
}

/* UCX takes over fatal signals when it is loaded, to print back traces; give them back. */
static void keep_quiet(struct ucx *ucx)
{
    if (getenv("UCX_LOG_LEVEL") == NULL) {
        ucs_log_push_handler(on_log);
        ucx->quiet = true;
    }
    if (getenv("UCX_HANDLE_ERRORS") == NULL) {
        static const int signals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};
        for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
            ucs_debug_disable_signal(signals[i]);
        }
    }
}

/* The name of the network device that has this IPv4 address, false for none or 0.0.0.0. */
static bool device_of(const struct fl_network_socket *place, char out[IF_NAMESIZE])
{
    struct sockaddr_in wanted;
    struct ifaddrs *list = NULL;
    if (fl_network_socket_is_loopback(place)) {
        snprintf(out, IF_NAMESIZE, "lo");
        return true;
    }
    if (place->storage.ss_family != AF_INET || getifaddrs(&list) != 0) {
        return false;
    }
    memcpy(&wanted, &place->storage, sizeof(wanted));
    bool found = false;
    for (const struct ifaddrs *device = list; device != NULL && !found; device = device->ifa_next) {
        struct sockaddr_in has;
        if (device->ifa_addr != NULL && device->ifa_addr->sa_family == AF_INET) {
            memcpy(&has, device->ifa_addr, sizeof(has));
            found = has.sin_addr.s_addr == wanted.sin_addr.s_addr;
            snprintf(out, IF_NAMESIZE, "%s", device->ifa_name);
        }
    }
    freeifaddrs(list);
    return found;
}

/* Whether a device other than loopback has an IPv4 address and a cable. */
static bool network_is_up(void)
{
    struct ifaddrs *list = NULL;
    bool up = false;
    if (getifaddrs(&list) != 0) {
        return true; /* UCX will say what is wrong */
    }
    for (const struct ifaddrs *device = list; device != NULL; device = device->ifa_next) {
        const unsigned wanted = IFF_UP | IFF_RUNNING;
        up = up || (device->ifa_addr != NULL && device->ifa_addr->sa_family == AF_INET &&
                    (device->ifa_flags & (wanted | IFF_LOOPBACK)) == wanted);
    }
    freeifaddrs(list);
    return up;
}

/* `device`: what UCX may use, "" for all. */
static fl_status configure(ucp_config_t *config, const char *device)
{
    /* Shared memory would be quicker on one machine, but it does not notice a killed peer; RDMA
     * takes part when UCX_TLS names it.  One lane, because two may reorder; for the three lines after
     * it see the top.  UCX keeps to the
     * device we listen on: it would otherwise open data ports on every network of the machine. */
    const struct {
        const char *env, *name, *value;
    } settings[] = {
        {"UCX_TLS", "TLS", "tcp"},
        {NULL, "MAX_EAGER_LANES", "1"},
        {NULL, "ZCOPY_THRESH", "inf"},
        {NULL, "TX_SEG_SIZE", "64K"}, /* what is received at once, too: holds a fragment */
        {NULL, "MAX_POLL", "1"},
        {NULL, "CONN_NB", "y"},
        {NULL, "ADAPTIVE_PROGRESS", "n"},
        {NULL, "RESOLVE_REMOTE_EP_ID", "n"},
        {NULL, "KEEPALIVE_INTERVAL", "inf"},
        {"UCX_NET_DEVICES", "NET_DEVICES", device},
    };
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        if (settings[i].value[0] == '\0' ||
            (settings[i].env != NULL && getenv(settings[i].env) != NULL)) {
            continue;
        }
        const ucs_status_t status = ucp_config_modify(config, settings[i].name, settings[i].value);
        if (status != UCS_OK) {
            return FL_FAIL(FL_INTERNAL, "UCX does not take %s=%s: %s", settings[i].name,
                           settings[i].value, ucs_status_string(status));
        }
    }
    return FL_OK;
}

/* Whether the environment leaves us to UCX's TCP alone. */
static bool is_tcp_only(void)
{
    const char *transports = getenv("UCX_TLS");
    return transports == NULL || strcmp(transports, "tcp") == 0 ||
           strcmp(transports, "tcp,self") == 0 || strcmp(transports, "self,tcp") == 0;
}

static fl_status open_context(struct ucx *ucx, const char *device)
{
    ucp_config_t *config = NULL;
    ucs_status_t error = ucp_config_read(NULL, NULL, &config);
    if (error != UCS_OK) {
        return FL_FAIL(FL_INTERNAL, "UCX cannot read its configuration: %s",
                       ucs_status_string(error));
    }
    fl_status status = configure(config, device);
    if (status == FL_OK) {
        const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                     .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
        error = ucp_init(&params, config, &ucx->context);
        if (error != UCS_OK) {
            ucx->context = NULL;
            status = FL_FAIL(FL_INTERNAL,
                             "UCX does not start: %s (is UCX_TLS or UCX_NET_DEVICES "
                             "set to something this machine lacks?)",
                             ucs_status_string(error));
        }
    }
    ucp_config_release(config);
    return status;
}

static fl_status open_worker(struct ucx *ucx, unsigned ready, ucp_worker_h *out, int *out_fd)
{
    const ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED, /* opened by one thread, used by another */
        .am_alignment = 8,
    };
    ucs_status_t error = ucp_worker_create(ucx->context, &params, out);
    if (error != UCS_OK) {
        *out = NULL;
        return FL_FAIL(FL_INTERNAL, "UCX makes no worker: %s", ucs_status_string(error));
    }
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = ready};
    error = ucp_worker_get_efd(*out, out_fd);
    if (error == UCS_OK && epoll_ctl(ucx->fd, EPOLL_CTL_ADD, *out_fd, &event) != 0) {
        error = UCS_ERR_IO_ERROR;
    }
    return error == UCS_OK
               ? FL_OK
               : FL_FAIL(FL_INTERNAL, "UCX worker is of no use: %s", ucs_status_string(error));
}

static fl_status set_handlers(struct ucx *ucx)
{
    const struct {
        unsigned id;
        ucp_am_recv_callback_t cb;
    } entries[] = {{AM_MESSAGE, on_message},
                   {AM_MORE, on_more},
                   {AM_KNOCK, on_knock},
                   {AM_GREET, on_greet},
                   {AM_BYE, on_bye}};
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        const ucp_am_handler_param_t param = {
            .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                          UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
            .id = entries[i].id,
            .flags = UCP_AM_FLAG_WHOLE_MSG,
            .cb = entries[i].cb,
            .arg = ucx,
        };
        const ucs_status_t error = ucp_worker_set_am_recv_handler(ucx->inbox, &param);
        if (error != UCS_OK) {
            return FL_FAIL(FL_INTERNAL, "UCX worker is of no use: %s", ucs_status_string(error));
        }
    }
    return FL_OK;
}

static fl_status open_workers(struct ucx *ucx)
{
    int inbox_fd = -1;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = READY_TIMER};
    ucx->fd = epoll_create1(EPOLL_CLOEXEC);
    ucx->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (ucx->fd < 0 || ucx->timer < 0 ||
        epoll_ctl(ucx->fd, EPOLL_CTL_ADD, ucx->timer, &event) != 0) {
        return FL_FAIL(FL_INTERNAL, "cannot wait for the network: %s", strerror(errno));
    }
    FL_TRY(open_worker(ucx, READY_INBOX, &ucx->inbox, &inbox_fd));
    FL_TRY(open_worker(ucx, READY_OUTBOX, &ucx->outbox, &ucx->outbox_fd));
    return set_handlers(ucx);
}

/* The worker's address with the process's number in front. */
static fl_status set_worker_address(struct ucx *ucx)
{
    ucp_address_t *address = NULL;
    size_t size = 0;
    const ucs_status_t error = ucp_worker_get_address(ucx->inbox, &address, &size);
    if (error != UCS_OK) {
        return FL_FAIL(FL_INTERNAL, "UCX worker has no address: %s", ucs_status_string(error));
    }
    fl_status status = FL_OK;
    if (size > FL_ADDRESS_MAX - BLOB_PROCESS_SIZE) {
        status = FL_FAIL(FL_TOO_LARGE,
                         "the UCX worker's address has %zu bytes, %d are allowed: "
                         "name fewer devices in UCX_NET_DEVICES",
                         size, FL_ADDRESS_MAX - BLOB_PROCESS_SIZE);
    } else {
        ucx->worker_address = (struct fl_address){.kind = FL_ADDRESS_WORKER,
                                                  .size = (uint32_t)(BLOB_PROCESS_SIZE + size)};
        put_u64(ucx->worker_address.bytes, ucx->process);
        memcpy(ucx->worker_address.bytes + BLOB_PROCESS_SIZE, address, size);
        ucx->address = ucx->worker_address;
    }
    ucp_worker_release_address(ucx->inbox, address);
    return status;
}

static fl_status open_door(struct ucx *ucx, const struct transport_ucx_config *config,
                           const struct fl_network_socket *sockets, size_t count)
{
    const struct door_config door = {
        .listen = sockets,
        .listen_count = count,
        .listen_text = config->listen,
        .party = config->party != 0 ? config->party : FL_PARTY_NODE,
        .key = config->key,
        .pass = ucx->worker_address.bytes,
        .pass_size = ucx->worker_address.size,
        .wait_ns = door_wait_ns,
        .events = {.ctx = ucx, .admitted = on_admitted, .gone = on_gone},
    };
    FL_TRY(door_open(&door, &ucx->door));
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = READY_DOOR};
    if (epoll_ctl(ucx->fd, EPOLL_CTL_ADD, door_fd(ucx->door), &event) != 0) {
        return FL_FAIL(FL_INTERNAL, "cannot wait for the listener on %s", config->listen);
    }
    struct fl_network_socket bound;
    char text[FL_NETWORK_TEXT_MAX];
    door_address(ucx->door, &bound);
    fl_network_socket_text(&bound, text);
    ucx->address = (struct fl_address){.kind = FL_ADDRESS_SOCKET, .size = (uint32_t)strlen(text)};
    memcpy(ucx->address.bytes, text, strlen(text));
    return FL_OK;
}

static fl_status open_all(struct ucx *ucx, const struct transport_ucx_config *config)
{
    struct fl_network_address place;
    struct fl_network_socket sockets[FL_NETWORK_RESOLVED_MAX];
    size_t count = 0;
    char device[IF_NAMESIZE] = "";
    if (config->listen != NULL) {
        FL_TRY(fl_network_address_parse(config->listen, strlen(config->listen), &place));
        if (place.is_unix) {
            return FL_FAIL(FL_INVALID, "cannot listen on \"%.64s\": nodes need HOST:PORT",
                           config->listen);
        }
        FL_TRY(fl_network_address_resolve(&place, sockets, FL_NETWORK_RESOLVED_MAX, &count));
        if (!device_of(&sockets[0], device)) {
            device[0] = '\0';
        }
        if (!fl_network_socket_is_loopback(&sockets[0]) && !network_is_up()) {
            return FL_FAIL(FL_AGAIN, "listening on %s waits for a network device that is up",
                           config->listen);
        }
    }
    FL_TRY(open_context(ucx, device));
    FL_TRY(open_workers(ucx));
    FL_TRY(set_worker_address(ucx));
    return config->listen != NULL ? open_door(ucx, config, sockets, count) : FL_OK;
}

fl_status transport_ucx_open(const struct transport_ucx_config *config, struct transport **out)
{
    struct ucx *ucx = calloc(1, sizeof(*ucx));
    if (ucx == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a transport of %zu bytes", sizeof(*ucx));
    }
    ucx->transport.ops = &ucx_ops;
    ucx->next_look_ns = UINT64_MAX;
    ucx->fd = -1;
    ucx->timer = -1;
    ucx->tcp_only = is_tcp_only();
    list_init(&ucx->done);
    fl_random_bytes(&ucx->process, sizeof(ucx->process));
    keep_quiet(ucx);
    const fl_status status = open_all(ucx, config);
    if (status != FL_OK) {
        ucx_close(&ucx->transport);
        return status;
    }
    *out = &ucx->transport;
    return FL_OK;
}
