#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <ucp/api/ucp.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#include "cluster/ucx.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"

enum {
    ROUND_MAX = 16, /* fragments fetched in one call */
    STREAK_MAX = 8, /* calls that found a message before the outbox and the door get their turn */
};

static const long mute_ns = FL_NS_PER_MS;          /* an outbox that calls for nothing */
static const uint64_t round_ns = FL_NS_PER_S / 10; /* UCX is looked after without being asked */

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

/* Whether the environment leaves us to UCX's TCP alone. */
static bool is_tcp_only(void)
{
    const char *transports = getenv("UCX_TLS");
    return transports == NULL || strcmp(transports, "tcp") == 0 ||
           strcmp(transports, "tcp,self") == 0 || strcmp(transports, "self,tcp") == 0;
}

/* What an empty value or a variable of the environment leaves alone is as UCX has it. */
static fl_status configure(ucp_config_t *config, const char *device, const char *ports)
{
    const struct {
        const char *env, *name, *value;
    } settings[] = {
        /* Shared memory would be quicker on one machine, but it does not notice a killed peer; RDMA
         * takes part when the environment names it. */
        {"UCX_TLS", "TLS", "tcp"},
        /* It would otherwise open data ports on every network of the machine. */
        {"UCX_NET_DEVICES", "NET_DEVICES", device},
        {NULL, "PORT_RANGE", ports},
        {NULL, "MAX_EAGER_LANES", "1"}, /* two may reorder */
        {NULL, "PROTO_ENABLE", "n"},    /* 1.16's new ones take no fragment at once */
        {NULL, "ZCOPY_THRESH", "inf"},
        {NULL, "TX_SEG_SIZE", "64K"}, /* of TCP: holds a fragment, and is received at once, too */
        {NULL, "MAX_POLL", "1"},      /* of TCP: sockets whose events are fetched at once */
        {NULL, "CONN_NB", "y"},       /* of TCP: do not wait for a firewall that drops packets */
        {NULL, "ADAPTIVE_PROGRESS", "n"},    /* the inbox works without an endpoint */
        {NULL, "RESOLVE_REMOTE_EP_ID", "n"}, /* nobody connects back */
        {NULL, "KEEPALIVE_INTERVAL", "inf"}, /* TCP has its own, and peer.h pings */
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

/* A network device may go away after UCX has listed it and before it is opened; UCX then gives up as
 * a whole, although a look at what there is now would do. */
static bool is_device_gone(ucs_status_t error)
{
    return error == UCS_ERR_NO_DEVICE || error == UCS_ERR_IO_ERROR;
}

static fl_status open_context(struct ucx *ucx, const char *device, const char *range, bool last_try)
{
    ucp_config_t *config = NULL;
    ucs_status_t error = ucp_config_read(NULL, NULL, &config);
    if (error != UCS_OK) {
        return FL_FAIL(FL_INTERNAL, "UCX cannot read its configuration: %s",
                       ucs_status_string(error));
    }
    fl_status status = configure(config, device, range);
    if (status == FL_OK) {
        const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                     .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
        error = ucp_init(&params, config, &ucx->context);
        if (error != UCS_OK) {
            ucx->context = NULL;
            status = is_device_gone(error) && !last_try
                         ? FL_AGAIN
                         : FL_FAIL(FL_INTERNAL,
                                   "UCX does not start: %s (is UCX_TLS or UCX_NET_DEVICES "
                                   "set to something this machine lacks?)",
                                   ucs_status_string(error));
        }
    }
    ucp_config_release(config);
    return status;
}

fl_status ucx_worker_watch(struct ucx *ucx, int fd, enum ucx_ready ready)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = ready};
    return epoll_ctl(ucx->fd, EPOLL_CTL_ADD, fd, &event) == 0
               ? FL_OK
               : FL_FAIL(FL_INTERNAL, "cannot wait for the network: %s", strerror(errno));
}

static fl_status open_worker(struct ucx *ucx, enum ucx_ready ready, bool last_try,
                             struct ucp_worker **out, int *out_fd)
{
    const ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED, /* opened by one thread, used by another */
        .am_alignment = 8,
    };
    ucs_status_t error = ucp_worker_create(ucx->context, &params, out);
    if (error != UCS_OK) {
        *out = NULL;
        return is_device_gone(error) && !last_try
                   ? FL_AGAIN
                   : FL_FAIL(FL_INTERNAL, "UCX makes no worker: %s", ucs_status_string(error));
    }
    error = ucp_worker_get_efd(*out, out_fd);
    return error == UCS_OK
               ? ucx_worker_watch(ucx, *out_fd, ready)
               : FL_FAIL(FL_INTERNAL, "UCX worker cannot wait: %s", ucs_status_string(error));
}

static ucs_status_t on_arrival(void *arg, const void *wire, size_t wire_size, void *data,
                               size_t size, const ucp_am_recv_param_t *param)
{
    const struct ucx_entry *entry = arg;
    ucx_arrived(entry->ucx, entry->id, wire, wire_size, data, size,
                (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0);
    return UCS_OK;
}

static fl_status set_entries(struct ucx *ucx)
{
    for (enum ucx_am id = UCX_AM_MESSAGE; id < UCX_AM_END; id++) {
        ucx->entries[id] = (struct ucx_entry){.ucx = ucx, .id = id};
        const ucp_am_handler_param_t param = {
            .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                          UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
            .id = id,
            .flags = UCP_AM_FLAG_WHOLE_MSG,
            .cb = on_arrival,
            .arg = &ucx->entries[id],
        };
        const ucs_status_t error = ucp_worker_set_am_recv_handler(ucx->inbox, &param);
        if (error != UCS_OK) {
            return FL_FAIL(FL_INTERNAL, "UCX worker is of no use: %s", ucs_status_string(error));
        }
    }
    return FL_OK;
}

/* The inbox's address with the process's number in front. */
static fl_status set_inbox_address(struct ucx *ucx)
{
    ucp_address_t *address = NULL;
    size_t size = 0;
    const ucs_status_t error = ucp_worker_get_address(ucx->inbox, &address, &size);
    if (error != UCS_OK) {
        return FL_FAIL(FL_INTERNAL, "UCX worker has no address: %s", ucs_status_string(error));
    }
    fl_status status = FL_OK;
    if (size > FL_ADDRESS_MAX - UCX_BLOB_PROCESS_SIZE) {
        status = FL_FAIL(FL_TOO_LARGE,
                         "the UCX worker's address has %zu bytes, %d are allowed: "
                         "name fewer devices in UCX_NET_DEVICES",
                         size, FL_ADDRESS_MAX - UCX_BLOB_PROCESS_SIZE);
    } else {
        ucx->inbox_address = (struct fl_address){.kind = FL_ADDRESS_WORKER,
                                                 .size = (uint32_t)(UCX_BLOB_PROCESS_SIZE + size)};
        ucx_put_u64(ucx->inbox_address.bytes, ucx->process);
        memcpy(ucx->inbox_address.bytes + UCX_BLOB_PROCESS_SIZE, address, size);
    }
    ucp_worker_release_address(ucx->inbox, address);
    return status;
}

fl_status ucx_workers_open(struct ucx *ucx, const char *device, const struct transport_ports *ports,
                           bool last_try)
{
    int inbox_fd = -1;
    char range[TRANSPORT_PORTS_TEXT_MAX] = "";
    if (ports->last != 0) {
        FL_TRY(transport_ports_check(ports));
        transport_ports_text(ports, range);
    }
    keep_quiet(ucx);
    ucx->tcp_only = is_tcp_only();
    ucx->fd = epoll_create1(EPOLL_CLOEXEC);
    ucx->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (ucx->fd < 0 || ucx->timer < 0) {
        return FL_FAIL(FL_INTERNAL, "cannot wait for the network: %s", strerror(errno));
    }
    FL_TRY(ucx_worker_watch(ucx, ucx->timer, UCX_READY_TIMER));
    FL_TRY(open_context(ucx, device, range, last_try));
    FL_TRY(open_worker(ucx, UCX_READY_INBOX, last_try, &ucx->inbox, &inbox_fd));
    FL_TRY(open_worker(ucx, UCX_READY_OUTBOX, last_try, &ucx->outbox, &ucx->outbox_fd));
    FL_TRY(set_entries(ucx));
    return set_inbox_address(ucx);
}

void ucx_workers_close(struct ucx *ucx)
{
    if (ucx->outbox != NULL) {
        ucp_worker_destroy(ucx->outbox);
    }
    if (ucx->inbox != NULL) {
        ucp_worker_destroy(ucx->inbox);
    }
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
}

/* While a peer has not answered UCX's connection, its socket is writable and nothing is to be
 * written: the outbox calls, and there is nothing to do.  Then it is not heard for a while. */
static void mute(struct ucx *ucx)
{
    const struct itimerspec when = {.it_value = {.tv_nsec = mute_ns}};
    if (!ucx->muted && timerfd_settime(ucx->timer, 0, &when, NULL) == 0) {
        struct epoll_event event = {.events = 0, .data.u32 = UCX_READY_OUTBOX};
        ucx->muted = epoll_ctl(ucx->fd, EPOLL_CTL_MOD, ucx->outbox_fd, &event) == 0;
    }
}

static void unmute(struct ucx *ucx)
{
    uint64_t count;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = UCX_READY_OUTBOX};
    (void)!read(ucx->timer, &count, sizeof(count));
    if (ucx->muted && epoll_ctl(ucx->fd, EPOLL_CTL_MOD, ucx->outbox_fd, &event) == 0) {
        ucx->muted = false;
    }
}

/* What has something to do, of those that the descriptor stands for. */
static unsigned who_calls(struct ucx *ucx, uint64_t now)
{
    struct epoll_event events[4];
    unsigned ready = 0;
    if (!ucx->tcp_only || now >= ucx->next_round_ns) {
        ucx->next_round_ns = now + round_ns;
        ucx->more_out = true;
        return UCX_READY_ALL;
    }
    const int count = epoll_wait(ucx->fd, events, 4, 0);
    for (int i = 0; i < count; i++) {
        ready |= events[i].data.u32;
    }
    if ((ready & UCX_READY_TIMER) != 0) {
        unmute(ucx);
    }
    return ready;
}

/* Let a worker work.  What of UCX's TCP calls goes on calling, so that nobody need arm it; only a
 * worker that called and found nothing is told to be quiet. */
static unsigned progress(struct ucx *ucx, struct ucp_worker *worker, enum ucx_ready ready)
{
    ucx->inside = true;
    const unsigned happened = ucp_worker_progress(worker);
    ucx->inside = false;
    if (happened == 0 && ucx->tcp_only && ucp_worker_arm(worker) != UCS_OK) {
        ucx->due |= ready;
    }
    return happened;
}

unsigned ucx_outbox_progress(struct ucx *ucx)
{
    return ucp_worker_progress(ucx->outbox);
}

/* Who was waiting nearly always waited for a message: asking who calls would be one call of the
 * system more.  Of a message in fragments nobody hears before its last, so that they are fetched
 * together. */
static unsigned fetch_awaited(struct ucx *ucx)
{
    unsigned count = 0;
    unsigned happened;
    int rounds = 0;
    do {
        ucx->inside = true;
        happened = ucp_worker_progress(ucx->inbox);
        ucx->inside = false;
        count += happened;
    } while (happened > 0 && ucx->expecting && ++rounds < ROUND_MAX);
    return count;
}

unsigned ucx_workers_progress(struct ucx *ucx, uint64_t now, bool *out_door)
{
    unsigned count = 0;
    const bool inbox_first = ucx->armed || ucx->expecting;
    *out_door = false;
    ucx->armed = false;
    if (ucx->tcp_only && inbox_first && now < ucx->next_round_ns &&
        ucx->inbox_streak < STREAK_MAX) {
        count = fetch_awaited(ucx);
        if (count > 0) {
            ucx->inbox_streak++;
            return count;
        }
    }
    ucx->inbox_streak = 0;
    const unsigned called = who_calls(ucx, now);
    const unsigned ready = called | ucx->due;
    ucx->due = 0;
    *out_door = (ready & UCX_READY_DOOR) != 0;
    if ((ready & UCX_READY_INBOX) != 0) {
        count += progress(ucx, ucx->inbox, UCX_READY_INBOX);
    }
    if ((ready & UCX_READY_OUTBOX) != 0) {
        const unsigned happened = progress(ucx, ucx->outbox, UCX_READY_OUTBOX);
        count += happened;
        if (happened > 0) {
            ucx->more_out = true;
            ucx->due |= UCX_READY_OUTBOX;
        } else if (called == UCX_READY_OUTBOX) {
            mute(ucx);
        }
    }
    return count;
}

fl_status ucx_workers_arm(struct ucx *ucx)
{
    ucs_status_t status = UCS_OK;
    if (ucx->due != 0) {
        return FL_AGAIN;
    }
    if (!ucx->tcp_only) {
        status = ucp_worker_arm(ucx->inbox);
        status = status == UCS_OK ? ucp_worker_arm(ucx->outbox) : status;
    }
    if (status == UCS_ERR_BUSY) {
        return FL_AGAIN;
    }
    ucx->armed = status == UCS_OK;
    return status == UCS_OK
               ? FL_OK
               : FL_FAIL(FL_INTERNAL, "cannot wait for the network: %s", ucs_status_string(status));
}
