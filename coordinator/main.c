/* main.c - firstlight-coordinator: opens the doors and turns the main loop. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cluster/bootstrap_mpi.h"
#include "cluster/transport.h"
#include "coordinator/client_server.h"
#include "coordinator/coordinator.h"
#include "coordinator/settings.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "proto/base/stop_signal.h"
#include "proto/network_address.h"
#include "proto/pool_key.h"

static const uint64_t leave_wait_ns = 300 * FL_NS_PER_MS;

enum { NETWORK_WAIT_MS = 1000 };

enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

struct program {
    struct settings settings;
    bool has_key;
    struct fl_pool_key key;             /* the file's; what clients prove */
    const struct fl_pool_key *node_key; /* what nodes prove; NULL: nothing */
    struct fl_pool_key mpi_key;
    struct transport *transport;
    struct coordinator *coordinator;
    struct client_server *clients;
    int signals;
};

static void on_event(void *ctx, uint64_t client, const struct fl_client_event *event)
{
    struct program *program = ctx;
    if (program->clients != NULL) {
        client_server_send(program->clients, client, event);
    }
}

static void on_request(void *ctx, uint64_t client, const struct fl_client_request *request)
{
    struct program *program = ctx;
    coordinator_request(program->coordinator, client, request);
}

static void on_gone(void *ctx, uint64_t client)
{
    struct program *program = ctx;
    coordinator_client_gone(program->coordinator, client);
}

static fl_status read_key(struct program *program)
{
    if (program->settings.key_file[0] == '\0') {
        return FL_OK;
    }
    FL_TRY(fl_pool_key_read(program->settings.key_file, &program->key));
    program->has_key = true;
    return FL_OK;
}

/* mpirun's ranks exchange their workers' addresses and a fresh key; nobody listens. */
static fl_status open_mpi_transport(struct program *program)
{
    const struct transport_ucx_config config = {
        .listen = NULL, .party = FL_PARTY_COORDINATOR, .data_ports = program->settings.data_ports};
    FL_TRY(transport_ucx_open(&config, &program->transport));
    struct fl_address mine;
    program->transport->ops->address(program->transport, &mine);
    struct bootstrap_mpi world;
    FL_TRY(bootstrap_mpi_exchange(&mine, true, &world));
    fl_log(FL_LOG_INFO, "cluster of %u nodes formed by mpirun", world.size - 1);
    free(world.addresses);
    program->mpi_key = world.key;
    program->node_key = &program->mpi_key;
    return FL_OK;
}

static fl_status open_transport(struct program *program)
{
    const char *listen = program->settings.listen;
    if (bootstrap_mpi_present()) {
        return open_mpi_transport(program);
    }
    bool loopback = false;
    FL_TRY(fl_network_text_is_loopback(listen, &loopback));
    if (!program->has_key && !loopback) {
        return FL_FAIL(FL_DENIED,
                       "--listen %s is reached from other machines: that needs a pool key "
                       "(firstlight keygen --out FILE, then --key-file FILE)",
                       listen);
    }
    program->node_key = program->has_key ? &program->key : NULL;
    const struct transport_ucx_config config = {.listen = listen,
                                                .party = FL_PARTY_COORDINATOR,
                                                .key = program->node_key,
                                                .data_ports = program->settings.data_ports};
    /* UCX only ever uses the network devices that are up when it starts: wait for one. */
    struct pollfd signals = {.fd = program->signals, .events = POLLIN};
    bool said = false;
    fl_status status;
    while ((status = transport_ucx_open(&config, &program->transport)) == FL_AGAIN) {
        if (!said) {
            fl_log(FL_LOG_WARN, "listening on %s waits for a network device that is up", listen);
            said = true;
        }
        if (poll(&signals, 1, NETWORK_WAIT_MS) > 0) {
            return FL_CANCELLED;
        }
    }
    return status;
}

static fl_status open_clients(struct program *program)
{
    const struct client_server_config config = {
        .clock = fl_clock_monotonic(),
        .key = program->has_key ? &program->key : NULL,
        .events = {.ctx = program, .request = on_request, .gone = on_gone}};
    FL_TRY(client_server_open(&config, &program->clients));
    for (uint32_t i = 0; i < program->settings.client_listen_count; i++) {
        FL_TRY(client_server_listen(program->clients, program->settings.client_listen[i]));
    }
    return FL_OK;
}

static fl_status open_program(struct program *program)
{
    FL_TRY(fl_stop_signal_open(&program->signals));
    FL_TRY(read_key(program));
    /* The doors that can be shut in our face come first. */
    FL_TRY(open_clients(program));
    FL_TRY(open_transport(program));
    const struct coordinator_config config = {.clock = fl_clock_monotonic(),
                                              .transport = program->transport,
                                              .key = program->node_key,
                                              .settings = program->settings.coordinator,
                                              .ctx = program,
                                              .event = on_event};
    FL_TRY(coordinator_open(&config, &program->coordinator));
    return worker_start(coordinator_worker(program->coordinator));
}

static void say_ready(const struct program *program)
{
    struct fl_address address;
    program->transport->ops->address(program->transport, &address);
    for (uint32_t i = 0; i < program->settings.client_listen_count; i++) {
        fl_log(FL_LOG_INFO, "clients welcome at %s", client_server_address(program->clients, i));
    }
    if (address.kind == FL_ADDRESS_SOCKET) {
        fl_log(FL_LOG_INFO, "nodes welcome at %.*s", (int)address.size,
               (const char *)address.bytes);
    }
    fl_log(FL_LOG_INFO, "models from %s", program->settings.models);
    if (access(program->settings.models, R_OK | X_OK) != 0) {
        fl_log(FL_LOG_WARN, "%s cannot be read (%s): there are no models until it can",
               program->settings.models, strerror(errno));
    }
}

static int wait_ms(uint64_t next_ns, uint64_t now_ns)
{
    if (next_ns <= now_ns) {
        return 0;
    }
    const uint64_t ms = (next_ns - now_ns + FL_NS_PER_MS - 1) / FL_NS_PER_MS;
    return ms < 60000 ? (int)ms : 60000;
}

/* Returns when a signal says so. */
static void serve(struct program *program)
{
    const struct transport_ops *ops = program->transport->ops;
    const struct fl_clock clock = fl_clock_monotonic();
    struct pollfd fds[] = {
        {.fd = ops->fd(program->transport), .events = POLLIN},
        {.fd = client_server_fd(program->clients), .events = POLLIN},
        {.fd = worker_fd(coordinator_worker(program->coordinator)), .events = POLLIN},
        {.fd = program->signals, .events = POLLIN},
    };
    while ((fds[3].revents & POLLIN) == 0) {
        uint64_t next_ns = UINT64_MAX;
        (void)coordinator_poll(program->coordinator, &next_ns);
        const uint64_t clients_ns = client_server_poll(program->clients);
        next_ns = clients_ns < next_ns ? clients_ns : next_ns;
        /* Sleep only when nothing came meanwhile; a round more for each message would cost every
         * token a dozen system calls. */
        const bool quiet = ops->arm(program->transport) == FL_OK;
        (void)poll(fds, sizeof(fds) / sizeof(fds[0]),
                   quiet ? wait_ms(next_ns, fl_clock_now(&clock)) : 0);
    }
}

/* Gives the goodbye to the nodes a moment to leave. */
static void leave(struct program *program)
{
    const struct transport_ops *ops = program->transport->ops;
    const struct fl_clock clock = fl_clock_monotonic();
    const uint64_t deadline_ns = fl_clock_now(&clock) + leave_wait_ns;
    struct pollfd fd = {.fd = ops->fd(program->transport), .events = POLLIN};
    coordinator_leave(program->coordinator);
    for (uint64_t now_ns = 0; now_ns < deadline_ns; now_ns = fl_clock_now(&clock)) {
        uint64_t next_ns = UINT64_MAX;
        (void)coordinator_poll(program->coordinator, &next_ns);
        if (coordinator_alone(program->coordinator)) {
            return;
        }
        next_ns = next_ns < deadline_ns ? next_ns : deadline_ns;
        const bool quiet = ops->arm(program->transport) == FL_OK;
        (void)poll(&fd, 1, quiet ? wait_ms(next_ns, fl_clock_now(&clock)) : 0);
    }
}

static void close_program(struct program *program)
{
    /* Clients hear why before their sockets close, and are gone before the coordinator is. */
    if (program->coordinator != NULL) {
        coordinator_end_requests(program->coordinator, "the coordinator is stopping");
    }
    client_server_close(program->clients);
    program->clients = NULL;
    if (program->coordinator != NULL) {
        leave(program);
    }
    coordinator_close(program->coordinator);
    if (program->transport != NULL) {
        program->transport->ops->close(program->transport);
    }
    if (program->signals >= 0) {
        close(program->signals);
    }
}

/* Returns the exit status. */
static int run(struct program *program)
{
    const fl_status status = open_program(program);
    if (status == FL_INVALID || status == FL_DENIED) {
        return EXIT_USAGE; /* an address that is none, or that needs a key */
    }
    if (status != FL_OK) {
        return status == FL_CANCELLED ? EXIT_SUCCESS : EXIT_FAILED;
    }
    say_ready(program);
    serve(program);
    fl_log(FL_LOG_INFO, "stopping");
    return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    fl_stop_signal_block(); /* before anything else, so that none is lost */
    struct program program = {.signals = -1};
    fl_log_init("firstlight-coordinator", fl_log_level_from_env(FL_LOG_INFO));
    const fl_status status = settings_read(argc, argv, &program.settings);
    if (status != FL_OK) {
        return status == FL_END ? EXIT_SUCCESS : EXIT_USAGE;
    }
    fl_log_init("firstlight-coordinator", program.settings.log);
    const int exit_status = run(&program);
    close_program(&program);
    return exit_status;
}
