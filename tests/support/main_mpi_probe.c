/* mpi_probe coordinator|node - joins a cluster that mpirun started, greets every other rank over
 * UCX and prints one line; what tests/integration/test_bootstrap_mpi.sh runs. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/bootstrap_mpi.h"
#include "cluster/peer.h"
#include "proto/base/log.h"

struct probe {
    unsigned up, received;
    uint32_t greeting;
    struct peer_table *peers;
};

static void on_up(void *ctx, transport_link link, enum fl_party party, const char *address)
{
    (void)party, (void)address;
    struct probe *probe = ctx;
    probe->up++;
    (void)!peer_send(probe->peers, link, FL_WIRE_CONTROL, NULL, 0, &probe->greeting,
                     sizeof(probe->greeting), 0);
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    (void)link, (void)type, (void)header, (void)header_size, (void)data;
    struct probe *probe = ctx;
    probe->received += size == sizeof(probe->greeting);
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    (void)ctx, (void)link, (void)cookie;
}

static void on_down(void *ctx, transport_link link, fl_status why, const char *text)
{
    (void)ctx, (void)link;
    if (why != FL_CANCELLED) {
        fprintf(stderr, "down: %s\n", text);
    }
}

/* Until every pair has met, and a little longer so that the slower ones do too. */
static void serve(struct probe *probe, struct transport *transport, unsigned want)
{
    const struct fl_clock clock = fl_clock_monotonic();
    const uint64_t start = fl_clock_now(&clock);
    uint64_t end = start + 10 * FL_NS_PER_S;
    for (uint64_t now = start; now < end; now = fl_clock_now(&clock)) {
        uint64_t next = 0;
        if (peer_poll(probe->peers, &next) > 0) {
            continue;
        }
        if (probe->received >= want && end > now + FL_NS_PER_S) {
            end = now + FL_NS_PER_S;
        }
        if (transport->ops->arm(transport) == FL_OK) {
            struct pollfd fd = {.fd = transport->ops->fd(transport), .events = POLLIN};
            poll(&fd, 1, 50);
        }
    }
}

static fl_status run(bool coordinator)
{
    const struct fl_clock clock = fl_clock_monotonic();
    const uint64_t start = fl_clock_now(&clock);
    const struct transport_ucx_config config = {.listen = NULL};
    struct transport *transport = NULL;
    struct bootstrap_mpi cluster;
    struct fl_address mine;
    FL_TRY(transport_ucx_open(&config, &transport));
    const uint64_t opened = fl_clock_now(&clock);
    transport->ops->address(transport, &mine);
    fl_status status = bootstrap_mpi_exchange(&mine, coordinator, &cluster);
    if (status != FL_OK) {
        transport->ops->close(transport);
        return status;
    }
    const uint64_t exchanged = fl_clock_now(&clock);
    struct probe probe = {.greeting = cluster.rank};
    const struct peer_config peer_config = {
        .transport = transport,
        .clock = clock,
        .party = coordinator ? FL_PARTY_COORDINATOR : FL_PARTY_NODE,
        .key = &cluster.key,
        .events = {&probe, on_up, on_received, on_sent, on_down},
    };
    status = peer_open(&peer_config, &probe.peers);
    /* Every rank opens a link to every higher one; each link carries a greeting both ways. */
    for (uint32_t rank = cluster.rank + 1; status == FL_OK && rank < cluster.size; rank++) {
        transport_link link = 0;
        status = peer_connect(probe.peers, &cluster.addresses[rank], &link);
    }
    if (status == FL_OK) {
        serve(&probe, transport, cluster.size - 1);
        printf("rank %u of %u: up %u, received %u, ucx %.1f ms, mpi %.1f ms\n",
               (unsigned)cluster.rank, (unsigned)cluster.size, probe.up, probe.received,
               (double)(opened - start) / 1e6, (double)(exchanged - opened) / 1e6);
    }
    peer_close(probe.peers);
    transport->ops->close(transport);
    free(cluster.addresses);
    return status != FL_OK || probe.received == cluster.size - 1 ? status : FL_LINK_LOST;
}

int main(int argc, char **argv)
{
    if (argc != 2 || (strcmp(argv[1], "coordinator") != 0 && strcmp(argv[1], "node") != 0)) {
        fprintf(stderr, "usage: mpirun -np 1 mpi_probe coordinator : -np 3 mpi_probe node\n");
        return 2;
    }
    if (!bootstrap_mpi_present()) {
        fprintf(stderr, "mpi_probe: mpirun did not start this\n");
        return 2;
    }
    fl_log_init("mpi_probe", fl_log_level_from_env(FL_LOG_WARN));
    return run(strcmp(argv[1], "coordinator") == 0) == FL_OK ? 0 : 1;
}
