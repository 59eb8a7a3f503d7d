/* sim_cluster.h - a whole cluster in one thread, replayed by its seed.
 *
 * The real coordinator and real nodes on the in-process network and a turned
 * clock.  What runs when is drawn from the seed: the order of the parts of each
 * round, how long messages travel, how long disks, computers and the
 * coordinator's worker take.  Clients are numbers; their requests go straight in.
 *
 *     sim_open ─► sim_ask, sim_kill, sim_cut, .. ─► sim_run(.., until) ─► sim_check_idle ─► sim_close
 *
 * The cluster judges what comes out at once: a request that ends twice, speaks
 * after its end, gives a wrong answer, or fails without a fault to blame is a
 * complaint, which sim_complaint() returns (the first) and prints.
 *
 * Thread:  owner.
 * Memory:  open() allocates, close() frees.
 * Units:   nanoseconds of the virtual clock.
 */
#ifndef TESTS_SUPPORT_SIM_CLUSTER_H
#define TESTS_SUPPORT_SIM_CLUSTER_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/support/sim_question.h"

struct sim_cluster;

enum { SIM_NODE_MAX = 4, SIM_REQUEST_MAX = 128, SIM_COORDINATOR = SIM_NODE_MAX };

struct sim_config {
    uint64_t seed;
    const struct sim_book *book; /* borrowed until close; only its folder is used */
    uint32_t node_count;
    uint64_t memory_budget; /* of each node; 0: plenty */
    uint64_t delay_max_ns;  /* of a message */
    uint64_t disk_max_ns;   /* of a loader's step */
    uint64_t compute_max_ns;
    uint64_t worker_max_ns; /* of a job of the coordinator's worker */
    bool fetch;             /* nodes have no models folder */
    bool cache;             /* nodes have a shard cache each */
    uint32_t chunk;
    uint32_t sequences;
    uint64_t kv_budget; /* 0: plenty */
};

enum sim_end { SIM_PENDING, SIM_DONE, SIM_FAILED, SIM_OVER, SIM_VANISHED };

struct sim_request {
    const struct sim_question *question; /* NULL: LOAD or UNLOAD */
    enum fl_request_kind kind;
    uint64_t client;
    uint64_t id;
    uint64_t began_ns;
    uint64_t ended_ns;
    uint32_t turbulence; /* faults before it began */
    bool calm;           /* no fault's aftermath when it began */
    bool cancelled;
    bool admitted;
    enum sim_end end; /* OVER: LOADED or UNLOADED; VANISHED: nobody listens any more */
    enum fl_class class_;
    uint32_t cached_tokens;
    uint32_t stage_count;
    uint64_t timeline_id; /* 0: none, or of a coordinator that is no more */
    double ttft_ms;
    bool undisturbed; /* by any fault, from its beginning to its end */
    struct sim_answer answer;
    uint32_t code;
    char text[640];
};

FL_MUST_CHECK fl_status sim_open(const struct sim_config *config, struct sim_cluster **out);
void sim_close(struct sim_cluster *sim);

uint64_t sim_now(const struct sim_cluster *sim);
/* Drawn from the seed, below `count`. */
uint64_t sim_random(struct sim_cluster *sim, uint64_t count);
uint32_t sim_node_count(const struct sim_cluster *sim);
const char *sim_complaint(const struct sim_cluster *sim);

/* Go on for so long, or until nothing is pending and all nodes have joined. */
void sim_run(struct sim_cluster *sim, uint64_t duration_ns);
bool sim_settle(struct sim_cluster *sim, uint64_t limit_ns);

/* Clients.  NULL for a model's name asks STATUS. */
struct sim_request *sim_ask(struct sim_cluster *sim, uint64_t client,
                            const struct sim_question *question);
struct sim_request *sim_by_model(struct sim_cluster *sim, uint64_t client,
                                 enum fl_request_kind kind, const char *model);
void sim_cancel(struct sim_cluster *sim, struct sim_request *request);
void sim_vanish(struct sim_cluster *sim, uint64_t client);
struct sim_request *sim_request_at(struct sim_cluster *sim, uint32_t index);
uint32_t sim_request_count(const struct sim_cluster *sim);

/* Faults.  Nodes are 0 .. node_count - 1 and called box1 ..; SIM_COORDINATOR is the coordinator. */
void sim_kill(struct sim_cluster *sim, uint32_t node);
void sim_start(struct sim_cluster *sim, uint32_t node); /* with a new incarnation */
bool sim_alive(const struct sim_cluster *sim, uint32_t node);
void sim_kill_coordinator(struct sim_cluster *sim);
void sim_start_coordinator(struct sim_cluster *sim);
void sim_cut(struct sim_cluster *sim, uint32_t a, uint32_t b);
void sim_heal(struct sim_cluster *sim);

/* Nothing waits, what is remembered of answers is whole, and nothing is held that should not be: credits, mailboxes, buffers, KV blocks.
 * For a settled cluster; what is wrong becomes the complaint. */
void sim_check_idle(struct sim_cluster *sim);
/* Unload every model, then: nodes hold nothing at all. */
void sim_check_empty(struct sim_cluster *sim);

#endif
