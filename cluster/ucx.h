/* ucx.h - what the parts of the UCX transport share; transport.h is what others see.
 *
 * Messages are UCX active messages.  A *pipe* is a UCX endpoint to another process's inbox, shared
 * by all links to that process; the other process has a pipe of its own back to ours.
 *
 *   opener                                  answerer
 *   (both have met at the door, door.h, or over MPI: each knows the other's inbox)
 *   KNOCK(token, ticket or address) ──►     makes a link, accepted()
 *          ◄── GREET(to, token)
 *   MESSAGE(to, sequence, type, size), MORE(to, sequence, offset) ◄──►
 *   BYE(to) ──►  ◄── BYE(to)                both have everything
 *
 * A message names its link by a random token of the receiver: UCX does not say which socket a
 * message came in on, so a stranger who speaks UCX must not be able to guess his way into a link
 * that others have opened.
 *
 *   file              owns                                                        includes UCX
 *   ucx_worker.c      UCX's settings, the inbox and the outbox, waiting for them        yes
 *   ucx_pipe.c        endpoints, and messages until they have left                      yes
 *   ucx_send.c        records and copies of messages to be sent                          -
 *   ucx_link.c        links from the door to closed(), their deadlines                   -
 *   ucx_arrival.c     what comes in: messages in fragments, knocks, goodbyes             -
 *   transport_ucx.c   the operations of transport.h, opening and closing                 -
 *
 * Two workers, because UCX 1.13 ends the process when it makes an endpoint to a worker whose own
 * connection came first and who has just died.  Others connect to the inbox, which makes no
 * endpoint; the outbox makes the endpoints, and nobody knows its address.
 *
 * Everything is sent eagerly, in fragments that UCX takes at once or not at all: of what UCX queues
 * it makes the receiver connect back, its own fragments overtake one another, and its zero copy
 * ends the process when the peer dies in the middle.  Rendezvous would save a copy on RDMA, but it
 * may overtake, and its size is announced by the peer; whoever sends one here is cut off.
 *
 * Nothing is given to UCX from within its own callbacks.
 *
 * Thread:  owner (the wire thread).
 * Memory:  struct ucx and what hangs off it live from open() to close().
 */
#ifndef CLUSTER_UCX_H
#define CLUSTER_UCX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cluster/door.h"
#include "cluster/transport.h"
#include "cluster/transport_ports.h"

enum {
    UCX_PIPE_MAX = TRANSPORT_LINK_MAX + 64, /* also those that are closing */
    UCX_COPY_CLASSES = 6,
    UCX_TEXT_MAX = 256,
    UCX_FRAGMENT_MAX = 60 << 10, /* bytes of data that UCX gets at once; see TX_SEG_SIZE */
    UCX_WIRE_HEADER_SIZE = 20, /* to u64, sequence u32, type u16, header size u16, data size u32 */
    UCX_MORE_SIZE = 16,        /* to u64, sequence u32, offset u32 */
    UCX_KNOCK_SIZE = 24,       /* magic u64, token u64, ticket u64 */
    UCX_GREET_SIZE = 16,       /* to u64, token u64 */
    UCX_BYE_SIZE = 8,          /* to u64 */
    UCX_BLOB_PROCESS_SIZE = 8, /* process u64, in front of a worker's address */
};

enum ucx_am {
    UCX_AM_MESSAGE = 1,
    UCX_AM_KNOCK = 2,
    UCX_AM_GREET = 3,
    UCX_AM_BYE = 4,
    UCX_AM_MORE = 5,
    UCX_AM_END
};

#define UCX_KNOCK_MAGIC UINT64_C(0x316b6e6f6e6b6c66)

struct ucx;
struct ucp_context; /* UCX's own, behind its *_h types */
struct ucp_worker;
struct ucp_ep;

struct ucx_send {
    struct ucx_send *next;
    enum ucx_am id;
    bool started;        /* its first fragment has left */
    size_t offset;       /* data that has left */
    transport_link link; /* 0: one of the transport's own */
    uint64_t cookie;
    const void *data;
    size_t size;
    void *copy; /* owned when not NULL */
    int copy_class;
    size_t header_size;
    unsigned char header[UCX_WIRE_HEADER_SIZE + TRANSPORT_HEADER_MAX];
};

struct ucx_send_list {
    struct ucx_send *first;
    struct ucx_send **last;
};

struct ucx_pipe {
    struct ucx *ucx;
    struct ucp_ep *ep;        /* NULL: the slot is free, unless `closing` */
    void *closing;            /* request of the endpoint's close */
    struct ucx_send_list out; /* what has not left, in order */
    bool busy;                /* UCX holds a fragment of the first of them; never over TCP */
    bool failed;              /* the error handler ran, or a send failed at once */
    bool retired;             /* no link may begin to use it */
    int error;                /* UCX's status; valid when failed */
    unsigned link_count;      /* links that use it */
    uint64_t process;         /* whose inbox */
    uint64_t deadline_ns;     /* close it then when no link uses it; 0: never */
    char peer[TRANSPORT_TEXT_MAX];
};

enum ucx_link_state {
    LINK_FREE,
    LINK_AWAITED, /* admitted at the door, has not knocked; nobody knows of it */
    LINK_OPENING,
    LINK_OPEN,
    LINK_CLOSING,
    LINK_DEAD,
};

/* A message that comes in fragments. */
struct ucx_assembly {
    unsigned char *data; /* owned, kept for the next message */
    size_t capacity;
    size_t size; /* 0: none under way */
    size_t filled;
    uint16_t type;
    size_t header_size;
    uint64_t header[TRANSPORT_HEADER_MAX / 8];
};

struct ucx_link {
    enum ucx_link_state state;
    transport_link id;
    bool known; /* to our caller */
    uint64_t token;
    uint64_t remote_token;
    uint64_t ticket;       /* of LINK_AWAITED */
    door_visit visit;      /* its connection at the door; 0: none, or gone */
    struct ucx_pipe *pipe; /* NULL before it is admitted, and when dead */
    uint32_t sequence_out;
    uint32_t sequence_in;
    struct ucx_assembly assembly;
    unsigned queue_count; /* waiting and in flight */
    size_t queue_bytes;
    unsigned in_flight;           /* in the pipe: their data may not be touched yet */
    struct ucx_send_list waiting; /* until the answerer greets */
    uint64_t deadline_ns;         /* of a goodbye; 0: none */
    fl_status why;                /* how it ended, or will */
    char peer[TRANSPORT_TEXT_MAX];
    char text[UCX_TEXT_MAX];
};

/* What one kind of active message leads to; UCX gets a pointer to it. */
struct ucx_entry {
    struct ucx *ucx;
    enum ucx_am id;
};

enum ucx_ready {
    UCX_READY_INBOX = 1,
    UCX_READY_OUTBOX = 2,
    UCX_READY_DOOR = 4,
    UCX_READY_TIMER = 8,
    UCX_READY_ALL = 7, /* that can have work */
};

struct ucx {
    struct transport transport; /* first: the ops get a pointer to it */

    /* ucx_worker.c */
    struct ucp_context *context;
    struct ucp_worker *inbox;
    struct ucp_worker *outbox;
    struct ucx_entry entries[UCX_AM_END];
    int fd; /* epoll over the workers', the door's and the timer's */
    int outbox_fd;
    int timer;             /* when it fires, the outbox is listened to again */
    bool muted;            /* it is not */
    bool tcp_only;         /* no transport but UCX's TCP is in play */
    bool quiet;            /* UCX's own lines go to our log */
    bool inside;           /* a callback of UCX may be running */
    unsigned due;          /* UCX_READY_*: to be looked at without being asked */
    bool armed;            /* our caller waits, or did until now */
    unsigned inbox_streak; /* times that it alone had something, in a row */
    uint64_t next_round_ns;
    struct fl_address inbox_address; /* process u64, then the worker's address */

    /* ucx_pipe.c */
    struct ucx_pipe pipes[UCX_PIPE_MAX];
    size_t pipe_end; /* no pipe was ever made from here on */
    bool more_out;   /* some pipe can go on sending */

    /* ucx_send.c */
    struct ucx_send *free_sends;
    void *free_copies[UCX_COPY_CLASSES];
    size_t free_copy_bytes;

    /* ucx_link.c */
    struct door *door; /* NULL when the address is the inbox's */
    struct ucx_link links[TRANSPORT_LINK_MAX];
    uint64_t link_counter;
    struct ucx_send_list done; /* left or failed; to be reported */
    bool attention;            /* some pipe or link needs a look by the next progress() */
    uint64_t next_look_ns;

    /* ucx_arrival.c */
    bool expecting;        /* the last message to come has more fragments */
    unsigned char *bounce; /* aligned copy of data that UCX hands out unaligned */
    size_t bounce_size;

    /* transport_ucx.c */
    uint64_t process; /* our number, to tell pipes to us from others */
    struct transport_events events;
    struct fl_address address; /* where others reach us */
};

uint64_t ucx_now_ns(void);

/* Have progress() look again at that time. */
void ucx_look_at(struct ucx *ucx, uint64_t when_ns);

/* ucx_send.c: records and copies come from free lists, so that a steady flow allocates nothing. */

void ucx_list_init(struct ucx_send_list *list);
void ucx_list_push(struct ucx_send_list *list, struct ucx_send *send);
struct ucx_send *ucx_list_pop(struct ucx_send_list *list); /* NULL when empty */

/* A record, all zero; NULL when memory is out. */
struct ucx_send *ucx_send_take(struct ucx *ucx);
/* Also its copy. */
void ucx_send_give(struct ucx *ucx, struct ucx_send *send);

/* Have the record point to a copy of `data`, at most TRANSPORT_COPY_MAX. */
FL_MUST_CHECK bool ucx_send_copy(struct ucx *ucx, struct ucx_send *send, const void *data,
                                 size_t size);
void ucx_sends_free(struct ucx *ucx);

/* ucx_pipe.c */

/* The pipe to another process's inbox, made when there is none; `blob` is an inbox's address.  NULL
 * when there is none, then *out_why says why. */
struct ucx_pipe *ucx_pipe_to(struct ucx *ucx, const unsigned char *blob, const char **out_why);
void ucx_pipe_release(struct ucx_pipe *pipe); /* by a link that used it */

/* Queue a message.  It is in `done` later, whatever becomes of it. */
void ucx_pipe_post(struct ucx_pipe *pipe, enum ucx_am id, struct ucx_send *send);

/* One of the transport's own messages; lost silently when memory is out, as the peer's deadline
 * covers it. */
void ucx_pipe_post_own(struct ucx_pipe *pipe, enum ucx_am id, uint64_t first, uint64_t second,
                       uint64_t third, size_t size);

/* Messages that will not leave go to `done`: those of one link, or with 0 all.  What UCX holds
 * stays until it lets go. */
void ucx_pipe_give_up(struct ucx_pipe *pipe, transport_link link);

/* A link had to be given up: what was wrong with the connection is not to trouble the next one.
 * (TCP that was not heard for six seconds may not try again for as long.) */
void ucx_pipe_retire(struct ucx_pipe *pipe);

/* The only way to get back what UCX holds. */
void ucx_pipe_cut(struct ucx_pipe *pipe);

const char *ucx_pipe_error(const struct ucx_pipe *pipe);

void ucx_pipes_pump(struct ucx *ucx); /* send what can be sent */
void ucx_pipe_look_after(struct ucx *ucx, struct ucx_pipe *pipe, uint64_t now);

/* Give all endpoints up and wait for UCX to let go of them, at most a second. */
void ucx_pipes_close(struct ucx *ucx);

/* ucx_link.c */

struct ucx_link *ucx_link_take(struct ucx *ucx, enum ucx_link_state state, struct ucx_pipe *pipe);
struct ucx_link *ucx_link_find(struct ucx *ucx, transport_link id);
struct ucx_link *ucx_link_by_token(struct ucx *ucx, uint64_t token);
struct ucx_link *ucx_link_by_ticket(struct ucx *ucx, uint64_t ticket); /* of LINK_AWAITED */
void ucx_link_post(struct ucx_link *link, struct ucx_send *send);

/* Say goodbye; the link ends when it is answered, or after a while. */
void ucx_link_close(struct ucx *ucx, struct ucx_link *link);

/* The link is over; closed() follows from progress() once UCX has let go of its messages. */
void ucx_link_end(struct ucx_link *link, struct ucx *ucx, fl_status why, const char *text);

/* The links of a pipe that has failed. */
void ucx_links_lost(struct ucx *ucx, const struct ucx_pipe *pipe);

/* For the door's events. */
void ucx_link_admitted(void *ctx, door_visit visit, bool opener, uint64_t ticket, const void *pass,
                       size_t size, const char *peer);
void ucx_link_gone(void *ctx, door_visit visit, fl_status why, const char *text);

/* Tell our caller what was sent, and what ended; both return how many. */
unsigned ucx_report_sent(struct ucx *ucx);
unsigned ucx_look_after(struct ucx *ucx, uint64_t now);

/* ucx_arrival.c */

/* An active message has come; `whole`: its data is here, and not for us to fetch. */
void ucx_arrived(struct ucx *ucx, enum ucx_am id, const void *wire, size_t wire_size,
                 const void *data, size_t size, bool whole);

/* ucx_worker.c */

/* `device`: the only network device to be used, "" for all.  Also sets inbox_address.
 * FL_BUSY when none of the ports is free.  FL_AGAIN, unless this is the last try: a device went away
 * while it was being opened; close, and open anew. */
FL_MUST_CHECK fl_status ucx_workers_open(struct ucx *ucx, const char *device,
                                         const struct transport_ports *ports, bool last_try);
FL_MUST_CHECK fl_status ucx_worker_watch(struct ucx *ucx, int fd, enum ucx_ready ready);
void ucx_workers_close(struct ucx *ucx);

/* Let the workers work that call, or are due; returns how many things happened.  *out_door: the
 * door calls, too. */
unsigned ucx_workers_progress(struct ucx *ucx, uint64_t now, bool *out_door);
unsigned ucx_outbox_progress(struct ucx *ucx);
FL_MUST_CHECK fl_status ucx_workers_arm(struct ucx *ucx);

/* Numbers on the wire are little-endian. */

static inline void ucx_put_u16(unsigned char *out, uint16_t value)
{
    out[0] = (unsigned char)value;
    out[1] = (unsigned char)(value >> 8);
}

static inline void ucx_put_u32(unsigned char *out, uint32_t value)
{
    ucx_put_u16(out, (uint16_t)value);
    ucx_put_u16(out + 2, (uint16_t)(value >> 16));
}

static inline void ucx_put_u64(unsigned char *out, uint64_t value)
{
    ucx_put_u32(out, (uint32_t)value);
    ucx_put_u32(out + 4, (uint32_t)(value >> 32));
}

static inline uint16_t ucx_get_u16(const unsigned char *in)
{
    return (uint16_t)(in[0] | in[1] << 8);
}

static inline uint32_t ucx_get_u32(const unsigned char *in)
{
    return ucx_get_u16(in) | (uint32_t)ucx_get_u16(in + 2) << 16;
}

static inline uint64_t ucx_get_u64(const unsigned char *in)
{
    return ucx_get_u32(in) | (uint64_t)ucx_get_u32(in + 4) << 32;
}

#endif
