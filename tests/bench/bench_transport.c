/* bench_transport - round trips between two processes over UCX, each waiting on its descriptor.
 *
 *   bench_transport                           both processes here, over loopback
 *   bench_transport server LISTEN             one of two machines, prints its address
 *   bench_transport client ADDRESS LISTEN     the other
 *
 * Lines: what,unit,value
 */
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cluster/transport.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"

struct bench {
    struct transport *transport;
    bool echo;
    unsigned received;
    bool closed;
};

static uint64_t now_ns(void)
{
    const struct fl_clock clock = fl_clock_monotonic();
    return fl_clock_now(&clock);
}

static void on_accepted(void *ctx, transport_link link, const char *peer)
{
    (void)ctx, (void)link, (void)peer;
}

static void on_received(void *ctx, transport_link link, uint16_t type, const void *header,
                        size_t header_size, const void *data, size_t size)
{
    struct bench *bench = ctx;
    bench->received++;
    if (bench->echo) {
        (void)!bench->transport->ops->send(bench->transport, link, type, header, header_size, data,
                                           size, 0);
    }
}

static void on_sent(void *ctx, transport_link link, uint64_t cookie)
{
    (void)ctx, (void)link, (void)cookie;
}

static void on_closed(void *ctx, transport_link link, fl_status why, const char *text)
{
    (void)link, (void)why;
    ((struct bench *)ctx)->closed = true;
    fprintf(stderr, "closed: %s\n", text);
}

/* One turn of a wire thread. */
static void turn(struct bench *bench)
{
    const struct transport_ops *ops = bench->transport->ops;
    if (ops->progress(bench->transport) == 0 && ops->arm(bench->transport) == FL_OK) {
        struct pollfd fd = {.fd = ops->fd(bench->transport), .events = POLLIN};
        poll(&fd, 1, 100);
    }
}

static fl_status bench_open(struct bench *bench, const char *listen, struct fl_address *out)
{
    const struct transport_ucx_config config = {.listen = listen};
    FL_TRY(transport_ucx_open(&config, &bench->transport));
    const struct transport_events events = {bench, on_accepted, on_received, on_sent, on_closed};
    bench->transport->ops->set_events(bench->transport, &events);
    bench->transport->ops->address(bench->transport, out);
    return FL_OK;
}

/* Echoes until its one client is gone. */
static int serve(const char *listen, int out)
{
    struct bench bench = {.echo = true};
    struct fl_address address;
    if (bench_open(&bench, listen, &address) != FL_OK) {
        return 1;
    }
    (void)!write(out, address.bytes, address.size);
    (void)!write(out, "\n", 1);
    while (!bench.closed) {
        turn(&bench);
    }
    bench.transport->ops->close(bench.transport);
    return 0;
}

static double round_trip_us(struct bench *bench, transport_link link, const void *data, size_t size)
{
    const uint64_t start = now_ns();
    const unsigned before = bench->received;
    while (bench->transport->ops->send(bench->transport, link, 17, NULL, 0, data, size, 0) ==
           FL_AGAIN) {
        turn(bench);
    }
    while (bench->received == before && !bench->closed) {
        turn(bench);
    }
    return (double)(now_ns() - start) / 1e3;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static int measure(const char *text, const char *listen)
{
    enum { ROUNDS = 2000 };
    static unsigned char data[4 << 20];
    static double times[ROUNDS];
    static const struct {
        size_t size;
        int rounds;
    } runs[] = {{64, ROUNDS}, {2304, ROUNDS}, {65536, 400}, {1 << 20, 60}, {4 << 20, 20}};
    struct bench bench = {.echo = false};
    struct fl_address mine;
    struct fl_address address = {.kind = FL_ADDRESS_SOCKET, .size = (uint32_t)strlen(text)};
    transport_link link = 0;
    memcpy(address.bytes, text, strlen(text));
    const uint64_t start = now_ns();
    if (bench_open(&bench, listen, &mine) != FL_OK) {
        return 1;
    }
    printf("transport_open,ms,%.1f\n", (double)(now_ns() - start) / 1e6);
    if (bench.transport->ops->connect(bench.transport, &address, &link) != FL_OK) {
        return 1;
    }
    printf("transport_first_round_trip,ms,%.2f\n", round_trip_us(&bench, link, data, 64) / 1e3);
    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]) && !bench.closed; i++) {
        double sum = 0;
        for (int k = 0; k < runs[i].rounds; k++) {
            times[k] = round_trip_us(&bench, link, data, runs[i].size);
            sum += times[k];
        }
        qsort(times, (size_t)runs[i].rounds, sizeof(times[0]), compare);
        printf("transport_round_trip_%zu,us,%.1f (median %.1f, 99%% %.1f)\n", runs[i].size,
               sum / runs[i].rounds, times[runs[i].rounds / 2],
               times[runs[i].rounds - 1 - runs[i].rounds / 100]);
    }
    bench.transport->ops->close(bench.transport);
    return 0;
}

int main(int argc, char **argv)
{
    fl_log_init("bench_transport", fl_log_level_from_env(FL_LOG_WARN));
    if (argc == 3 && strcmp(argv[1], "server") == 0) {
        return serve(argv[2], STDOUT_FILENO);
    }
    if (argc == 4 && strcmp(argv[1], "client") == 0) {
        return measure(argv[2], argv[3]);
    }
    int fds[2];
    char text[64] = "";
    if (pipe(fds) != 0) {
        return 1;
    }
    const pid_t pid = fork(); /* before UCX starts its thread */
    if (pid == 0) {
        return serve("127.0.0.1:0", fds[1]);
    }
    const ssize_t size = pid > 0 ? read(fds[0], text, sizeof(text) - 1) : -1;
    text[size > 0 ? strcspn(text, "\n") : 0] = '\0';
    const int result = measure(text, "127.0.0.1:0");
    int status = 0;
    if (pid > 0) {
        waitpid(pid, &status, 0);
    }
    return result;
}
