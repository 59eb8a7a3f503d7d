/* firstlight-node: opens what a node is made of, and runs its three threads. */
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cluster/bootstrap_mpi.h"
#include "cluster/transport.h"
#include "kernels/cpu_affinity.h"
#include "kernels/device.h"
#include "node/model_folder.h"
#include "node/node.h"
#include "node/node_options.h"
#include "node/shard_cache.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "proto/base/stop_signal.h"
#include "proto/network_address.h"
#include "proto/pool_key.h"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

static const uint64_t stop_wait_ns = 800 * FL_NS_PER_MS;
static const uint64_t leave_wait_ns = 300 * FL_NS_PER_MS;
static const uint64_t resolve_wait_ns = 2 * FL_NS_PER_S;

struct program {
    struct node_options options;
    bool mpi;
    int signals; /* SIGTERM and SIGINT arrive here */
    bool has_key;
    struct fl_pool_key key;
    struct transport *transport;
    struct cpu_affinity affinity;
    bool placed; /* compute and wire thread keep to the first CPU; the loader thread's */
    struct device *device;
    struct model_folder folder;
    struct model_storage storage;
    struct host_meter meter;
    struct shard_cache *cache;
    struct node *node;
    pthread_mutex_t wire;  /* held by who turns the wire: its thread, or compute for a moment */
    uint64_t wire_next_ns; /* when the wire thread turns it next, at the latest */
    _Atomic int stopping;
    pthread_t wire_thread; /* main() */
    pthread_t compute;
    pthread_t loader;
};

static void run_part(struct program *program, enum node_part part, bool (*step)(struct program *))
{
    while (atomic_load_explicit(&program->stopping, memory_order_relaxed) == 0) {
        wake_clear(node_wake(program->node, part));
        while (step(program) &&
               atomic_load_explicit(&program->stopping, memory_order_relaxed) == 0) {
        }
        wake_wait(node_wake(program->node, part), WAKE_FOREVER);
    }
}

static bool compute_step(struct program *program)
{
    return node_compute_step(program->node);
}

static void *run_compute(void *ctx)
{
    run_part(ctx, NODE_COMPUTE, compute_step);
    return NULL;
}

/* Of a decoded token, compute and the wire thread wait for each other: they share a CPU.  While
 * weights come in there is one thread more that works, and the scheduler knows best who makes room. */
static void place_threads(struct program *program, bool loading)
{
    if (program->placed == !loading) {
        return;
    }
    program->placed = !loading;
    const pthread_t threads[] = {program->compute, program->wire_thread};
    for (size_t i = 0; i < sizeof(threads) / sizeof(threads[0]); i++) {
        if (loading) {
            cpu_affinity_release(&program->affinity, threads[i]);
        } else {
            cpu_affinity_bind(&program->affinity, 0, threads[i]);
        }
    }
}

static bool load_step(struct program *program)
{
    const bool busy = node_load_step(program->node);
    place_threads(program, node_loading(program->node));
    return busy;
}

static void *run_loader(void *ctx)
{
    run_part(ctx, NODE_LOADER, load_step);
    return NULL;
}

static int timeout_ms(uint64_t now_ns, uint64_t next_ns)
{
    if (next_ns <= now_ns) {
        return 0;
    }
    const uint64_t ms = (next_ns - now_ns + FL_NS_PER_MS - 1) / FL_NS_PER_MS;
    return ms > 1000 ? 1000 : (int)ms;
}

/* FL_AGAIN: there is more to do at once. */
static fl_status turn_wire(struct program *program, uint64_t *out_next_ns)
{
    struct transport *transport = program->transport;
    pthread_mutex_lock(&program->wire);
    fl_status status = node_wire_poll(program->node, out_next_ns);
    if (status == FL_OK) {
        status = transport->ops->arm(transport);
    }
    program->wire_next_ns = *out_next_ns;
    pthread_mutex_unlock(&program->wire);
    return status;
}

/* Compute has something to send.  While the wire thread sleeps, compute turns the wire once itself:
 * waking the other thread first would cost every decoded token a good part of its time on the way.
 * Heartbeats stay with the wire thread, which keeps its deadlines whatever compute does. */
static void on_posted(void *ctx)
{
    struct program *program = ctx;
    struct transport *transport = program->transport;
    bool rouse = true;
    if (pthread_mutex_trylock(&program->wire) == 0) {
        uint64_t next_ns = 0;
        const fl_status status = node_wire_poll(program->node, &next_ns);
        rouse = status != FL_OK || next_ns < program->wire_next_ns ||
                transport->ops->arm(transport) != FL_OK;
        pthread_mutex_unlock(&program->wire);
    }
    if (rouse) {
        wake_signal(node_wake(program->node, NODE_WIRE));
    }
}

/* The wire thread's loop; FL_CANCELLED when a signal ends it. */
static fl_status run_wire(struct program *program)
{
    const struct fl_clock clock = fl_clock_monotonic();
    struct transport *transport = program->transport;
    struct wake *wake = node_wake(program->node, NODE_WIRE);
    struct pollfd fds[] = {
        {.fd = program->signals, .events = POLLIN},
        {.fd = transport->ops->fd(transport), .events = POLLIN},
        {.fd = wake->fd, .events = POLLIN},
    };
    for (;;) {
        uint64_t next_ns = 0;
        wake_clear(wake);
        const fl_status status = turn_wire(program, &next_ns);
        if (status != FL_OK && status != FL_AGAIN) {
            return status;
        }
        if (status == FL_AGAIN || !wake_watch(wake)) {
            continue;
        }
        const int ready = poll(fds, 3, timeout_ms(fl_clock_now(&clock), next_ns));
        if (ready > 0 && (fds[0].revents & POLLIN) != 0) {
            return FL_CANCELLED;
        }
        if (ready > 0 && (fds[2].revents & POLLIN) != 0) {
            wake_drain(wake);
        }
    }
}

/* Says goodbye, and gives it a moment to be heard: the pool then knows that this was no accident. */
static void leave(struct program *program)
{
    const struct fl_clock clock = fl_clock_monotonic();
    struct transport *transport = program->transport;
    const uint64_t deadline_ns = fl_clock_now(&clock) + leave_wait_ns;
    struct pollfd fd = {.fd = transport->ops->fd(transport), .events = POLLIN};
    pthread_mutex_lock(&program->wire);
    node_leave(program->node);
    for (;;) {
        uint64_t next_ns = 0;
        (void)!node_wire_poll(program->node, &next_ns);
        const uint64_t now_ns = fl_clock_now(&clock);
        if (node_left(program->node) || now_ns >= deadline_ns) {
            break;
        }
        if (transport->ops->arm(transport) == FL_OK) {
            next_ns = next_ns < deadline_ns ? next_ns : deadline_ns;
            (void)poll(&fd, 1, timeout_ms(now_ns, next_ns));
        }
    }
    pthread_mutex_unlock(&program->wire);
}

/* Start-up ----------------------------------------------------------------------------------- */

/* True when a signal came meanwhile. */
static bool sleep_unless_stopped(struct program *program, uint64_t wait_ns)
{
    struct pollfd fd = {.fd = program->signals, .events = POLLIN};
    return poll(&fd, 1, (int)(wait_ns / FL_NS_PER_MS)) > 0;
}

/* Our address toward the coordinator.  A box that starts before its network, or before the name of
 * the coordinator resolves, waits; FL_CANCELLED when a signal ends that. */
static fl_status wait_for_route(struct program *program, char out[FL_NETWORK_TEXT_MAX])
{
    const enum fl_log_level level = fl_fail_log_at(FL_LOG_DEBUG);
    bool said = false;
    fl_status status = FL_OK;
    while (status == FL_OK && fl_network_source_toward(program->options.join, out) != FL_OK) {
        if (!said) { /* once, however long it takes */
            fl_log(FL_LOG_WARN, "coordinator cannot be reached: %s; trying until it can",
                   fl_last_error());
            said = true;
        }
        status = sleep_unless_stopped(program, resolve_wait_ns) ? FL_CANCELLED : FL_OK;
    }
    (void)fl_fail_log_at(level);
    return status;
}

/* UCX only ever uses the network devices that are up when it starts. */
static fl_status open_transport(struct program *program, const char *listen)
{
    const struct transport_ucx_config ucx = {.listen = listen,
                                             .party = FL_PARTY_NODE,
                                             .key = program->has_key ? &program->key : NULL,
                                             .data_ports = program->options.data_ports};
    char host[FL_NETWORK_TEXT_MAX];
    fl_status status;
    FL_TRY(wait_for_route(program, host));
    while ((status = transport_ucx_open(&ucx, &program->transport)) == FL_AGAIN) {
        if (sleep_unless_stopped(program, resolve_wait_ns)) {
            return FL_CANCELLED;
        }
    }
    return status;
}

/* Where to listen when nobody says: where those who reach the coordinator reach this node too.
 * FL_CANCELLED when a signal ends the wait for the network. */
static fl_status default_listen(struct program *program, char out[FL_NETWORK_TEXT_MAX])
{
    const char *join = program->options.join;
    char host[FL_NETWORK_TEXT_MAX];
    bool loopback = false;
    FL_TRY(wait_for_route(program, host));
    FL_TRY(fl_network_text_is_loopback(join, &loopback));
    if (loopback) {
        snprintf(out, FL_NETWORK_TEXT_MAX, "127.0.0.1:0");
        return FL_OK;
    }
    snprintf(out, FL_NETWORK_TEXT_MAX, "%.*s:0", FL_NETWORK_TEXT_MAX - 3, host);
    return FL_OK;
}

/* Others cannot call 0.0.0.0: tell them the address that leads to the coordinator. */
static fl_status advertise(const struct program *program, struct fl_address *address)
{
    char text[FL_NETWORK_TEXT_MAX];
    const size_t size = address->size < sizeof(text) - 1 ? address->size : sizeof(text) - 1;
    memcpy(text, address->bytes, size);
    text[size] = '\0';
    if (strncmp(text, "0.0.0.0:", 8) != 0) {
        return FL_OK;
    }
    char host[FL_NETWORK_TEXT_MAX];
    FL_TRY(fl_network_source_toward(program->options.join, host));
    address->size =
        (uint32_t)snprintf((char *)address->bytes, sizeof(address->bytes), "%s:%s", host, text + 8);
    return FL_OK;
}

static fl_status read_key(struct program *program)
{
    if (program->options.key_file != NULL) {
        FL_TRY(fl_pool_key_read(program->options.key_file, &program->key));
        program->has_key = true;
    }
    return FL_OK;
}

static fl_status open_pool(struct program *program, struct node_config *config)
{
    struct fl_network_address join;
    char chosen[FL_NETWORK_TEXT_MAX];
    const char *listen = program->options.listen;
    const size_t join_size = strlen(program->options.join);
    FL_TRY(fl_network_address_parse(program->options.join, join_size, &join));
    if (join.is_unix || join.port == 0) {
        return FL_FAIL(FL_INVALID,
                       "--join is '%.80s'; the HOST:PORT where nodes are welcome "
                       "would be right",
                       program->options.join);
    }
    FL_TRY(read_key(program));
    if (listen == NULL) {
        FL_TRY(default_listen(program, chosen));
        listen = chosen;
    }
    bool loopback = false;
    FL_TRY(fl_network_text_is_loopback(listen, &loopback));
    if (!program->has_key && !loopback) {
        return FL_FAIL(FL_DENIED,
                       "listening on %s, which others can reach, needs --key-file with the pool's "
                       "key; 'firstlight keygen' makes one",
                       listen);
    }
    FL_TRY(open_transport(program, listen));
    program->transport->ops->address(program->transport, &config->join.address);
    FL_TRY(advertise(program, &config->join.address));
    config->rejoin = true;
    config->coordinator =
        (struct fl_address){.kind = FL_ADDRESS_SOCKET, .size = (uint32_t)join_size};
    memcpy(config->coordinator.bytes, program->options.join, join_size);
    return FL_OK;
}

static fl_status open_mpi(struct program *program, struct node_config *config)
{
    struct bootstrap_mpi bootstrap;
    const struct transport_ucx_config ucx = {.listen = NULL,
                                             .party = FL_PARTY_NODE,
                                             .key = &program->key,
                                             .data_ports = program->options.data_ports};
    FL_TRY(transport_ucx_open(&ucx, &program->transport));
    program->transport->ops->address(program->transport, &config->join.address);
    FL_TRY(bootstrap_mpi_exchange(&config->join.address, false, &bootstrap));
    config->coordinator = bootstrap.addresses[0];
    config->rejoin = false;
    program->key = bootstrap.key;
    program->has_key = true;
    free(bootstrap.addresses);
    node_options_number(&program->options, bootstrap.rank);
    return FL_OK;
}

static fl_status open_node(struct program *program)
{
    const struct node_options *options = &program->options;
    struct node_config config = {.clock = fl_clock_monotonic()};
    FL_TRY(fl_stop_signal_open(&program->signals));
    program->affinity = cpu_affinity_for(options->threads);
    const struct device_host_config host = {
        .threads = options->threads, .affinity = &program->affinity, .isa = options->isa};
    FL_TRY(device_host_open(&host, &program->device)); /* before what may wait for a network */
    FL_TRY(program->mpi ? open_mpi(program, &config) : open_pool(program, &config));
    const struct shard_cache_config cache = {.folder = options->cache,
                                             .budget = options->cache_budget};
    FL_TRY(shard_cache_open(&cache, &program->cache));
    program->folder.path = options->models;
    program->storage = model_folder_storage(&program->folder);

    program->meter = host_meter_system();
    config.events = (struct node_events){.ctx = program, .posted = on_posted};
    config.meter = &program->meter;
    config.exec_ns = host_meter_exec_ns();
    config.transport = program->transport;
    config.key = program->has_key ? &program->key : NULL;
    config.device = program->device;
    config.storage = &program->storage;
    config.cache = program->cache;
    memcpy(config.join.name, options->name, sizeof(config.join.name));
    fl_random_bytes(&config.join.incarnation, sizeof(config.join.incarnation));
    config.join.incarnation |= 1; /* never 0 */
    config.join.memory_budget = options->memory;
    config.join.threads = options->threads;
    snprintf(config.join.isa, sizeof(config.join.isa), "%s", program->device->kernels->name);
    return node_open(&config, &program->node);
}

static fl_status start_thread(pthread_t *thread, void *(*run)(void *), struct program *program,
                              const char *name)
{
    const int error = pthread_create(thread, NULL, run, program);
    if (error != 0) {
        return FL_FAIL(FL_NO_MEMORY, "%s thread: %s", name, strerror(error));
    }
    (void)pthread_setname_np(*thread, name);
    return FL_OK;
}

/* The end ------------------------------------------------------------------------------------ */

/* A thread that is deep in a disk or a long task is not waited for: the process ends anyway. */
static void join_or_exit(pthread_t thread, int exit_code)
{
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    const uint64_t end_ns = (uint64_t)deadline.tv_nsec + stop_wait_ns;
    deadline.tv_sec += (time_t)(end_ns / FL_NS_PER_S);
    deadline.tv_nsec = (long)(end_ns % FL_NS_PER_S);
    if (pthread_timedjoin_np(thread, NULL, &deadline) != 0) {
        _exit(exit_code);
    }
}

static void close_all(struct program *program)
{
    if (program->transport != NULL) {
        program->transport->ops->close(program->transport);
    }
    node_close(program->node);
    shard_cache_close(program->cache);
    if (program->device != NULL) {
        program->device->ops->close(program->device);
    }
    if (program->signals >= 0) {
        close(program->signals);
    }
}

static int exit_code_of(struct program *program, fl_status status)
{
    if (status == FL_CANCELLED) {
        return EXIT_SUCCESS;
    }
    if (status == FL_END) {
        fl_log(FL_LOG_INFO, "%s", node_text(program->node));
        return EXIT_SUCCESS;
    }
    fl_log(FL_LOG_ERROR, "%s", node_text(program->node));
    return EXIT_FAILED;
}

static int run(struct program *program)
{
    fl_status status = open_node(program);
    if (status == FL_CANCELLED) {
        return EXIT_SUCCESS;
    }
    if (status != FL_OK) {
        return status == FL_INVALID || status == FL_DENIED ? EXIT_USAGE : EXIT_FAILED;
    }
    program->wire_thread = pthread_self();
    if (start_thread(&program->compute, run_compute, program, "compute") != FL_OK ||
        start_thread(&program->loader, run_loader, program, "loader") != FL_OK) {
        _exit(EXIT_FAILED);
    }
    status = run_wire(program);
    if (status == FL_CANCELLED) {
        leave(program);
    }
    const int exit_code = exit_code_of(program, status);
    atomic_store_explicit(&program->stopping, 1, memory_order_relaxed);
    wake_signal(node_wake(program->node, NODE_COMPUTE));
    wake_signal(node_wake(program->node, NODE_LOADER));
    join_or_exit(program->loader, exit_code); /* first: it places the others */
    join_or_exit(program->compute, exit_code);
    return exit_code;
}

int main(int argc, char **argv)
{
    fl_stop_signal_block();   /* before anything else, so that none is lost */
    signal(SIGXFSZ, SIG_IGN); /* a cache over a file-size limit is an error like a full disk */
    struct program program = {
        .signals = -1, .mpi = bootstrap_mpi_present(), .wire = PTHREAD_MUTEX_INITIALIZER};
    fl_log_init("firstlight-node", fl_log_level_from_env(FL_LOG_INFO));
    if (node_options_parse(argc, argv, program.mpi, &program.options) != FL_OK) {
        return EXIT_USAGE;
    }
    if (program.options.help) {
        node_options_help();
        return EXIT_SUCCESS;
    }
    if (program.options.version) {
        puts("firstlight-node " FL_VERSION);
        return EXIT_SUCCESS;
    }
    fl_log_init("firstlight-node", program.options.log_level);
    const int exit_code = run(&program);
    close_all(&program);
    return exit_code;
}
