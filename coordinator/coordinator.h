/* coordinator.h - the one process of a cluster that knows it all.
 *
 * Keeps who is there (roster), what can be run (catalog), what is loaded where
 * (placement) and who waits for an answer (request), and speaks to nodes over
 * the transport that it is handed and to programs through two functions:
 *
 *   coordinator_request(client, request) ─►          ─► event(client, event)
 *                             transport ◄── messages ──► nodes
 *
 * Clock and transport are handed in, no socket is opened here and no thread is
 * started unless asked for, so the simulator runs the same code.
 *
 * Thread:  owner (the main loop), but for the worker's jobs.
 * Memory:  open() allocates; a request is allocated when it comes and freed when it ends.
 */
#ifndef COORDINATOR_COORDINATOR_H
#define COORDINATOR_COORDINATOR_H

#include <stdbool.h>
#include <stdint.h>

#include "cluster/transport.h"
#include "coordinator/worker.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/client_message.h"
#include "proto/pool_key.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    COORDINATOR_CONTEXT = 4096, /* positions, or the model's when it has fewer */
    COORDINATOR_CHUNK = 64,     /* rows of a prefill chunk */
    COORDINATOR_QUEUE = 64,     /* requests that wait */
    COORDINATOR_SEQUENCES = 16, /* requests and kept conversations of one model */
    COORDINATOR_SEQUENCES_MAX = 256,
    COORDINATOR_QUEUE_MAX = 4096,
    COORDINATOR_CLIENT_REQUEST_MAX = 64, /* requests of one client under way */
    COORDINATOR_SPLIT_MAX = FL_STAGE_COUNT_MAX,
};
#define COORDINATOR_KV_BUDGET (UINT64_C(256) << 20) /* bytes of KV cache on each node, per model */

/* What a user may set. */
struct coordinator_settings {
    const char *models_folder;
    const char *chat_family; /* overrides every file's chat template; NULL: none */
    uint32_t context;        /* 0: COORDINATOR_CONTEXT */
    uint64_t kv_budget;      /* 0: COORDINATOR_KV_BUDGET */
    uint32_t chunk;          /* 0: COORDINATOR_CHUNK */
    uint32_t queue;          /* 0: COORDINATOR_QUEUE */
    uint32_t sequences;      /* 0: COORDINATOR_SEQUENCES */
    bool activations_f32;
    bool no_overlap;
    uint32_t split_count;                  /* 0: the planner decides */
    uint32_t split[COORDINATOR_SPLIT_MAX]; /* layers of each stage, over nodes in order of name */
};

struct coordinator_config {
    struct fl_clock clock;
    struct transport *transport;          /* borrowed until close */
    const struct fl_pool_key *key;        /* NULL: none; borrowed until close */
    struct coordinator_settings settings; /* strings are borrowed until close */
    void *ctx;
    /* An event for a client.  Valid for the call. */
    void (*event)(void *ctx, uint64_t client, const struct fl_client_event *event);
};

struct coordinator;

FL_MUST_CHECK fl_status coordinator_open(const struct coordinator_config *config,
                                         struct coordinator **out);
/* Ends every request with an error and closes the links. */
void coordinator_close(struct coordinator *coordinator);

/* A client's request; its events follow, some from inside this call.  Valid for the call. */
void coordinator_request(struct coordinator *coordinator, uint64_t client,
                         const struct fl_client_request *request);

/* A client is gone: its requests are cancelled, no event follows. */
void coordinator_client_gone(struct coordinator *coordinator, uint64_t client);

/* Do what can be done without waiting; *out_next_ns: when to call again at the latest. */
unsigned coordinator_poll(struct coordinator *coordinator, uint64_t *out_next_ns);

/* For worker_start() and worker_fd(), or worker_step() where there is no thread. */
struct worker *coordinator_worker(struct coordinator *coordinator);

/* Ends every request with this sentence. */
void coordinator_end_requests(struct coordinator *coordinator, const char *text);

/* Hang up on the nodes, which hear that it was on purpose; poll until alone(), or until the caller
 * has waited enough. */
void coordinator_leave(struct coordinator *coordinator);
bool coordinator_alone(const struct coordinator *coordinator);

#ifdef __cplusplus
}
#endif
#endif
