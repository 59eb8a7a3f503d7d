/* topology.h - the configuration file of a pool, one for all its machines.
 *
 *   {
 *     "coordinator": {"listen": "192.168.1.10:7412", "models": "/srv/models", "kv_budget": "512MiB"},
 *     "node":        {"join": "192.168.1.10:7412", "cache_budget": "20GiB"},
 *     "nodes":       [{"name": "box1", "memory": "5GiB"}, {"name": "box2", "memory": "12GiB"}]
 *   }
 *
 * The coordinator reads "coordinator" and "nodes"; a node reads "node" and its
 * own entry of "nodes".  Everything is optional, and flags override it, so each
 * value says whether it was given.  What the file must not have is refused by
 * name: a key nobody knows is a typing mistake, and silence about it would cost
 * an evening.
 *
 * Thread:  any; a plain value.
 * Memory:  read() allocates while it works and frees all of it.
 * Source:  cJSON parses; this is the one file of the cluster that uses it.
 */
#ifndef CLUSTER_TOPOLOGY_H
#define CLUSTER_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cluster/transport_ports.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"
#include "proto/network_address.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TOPOLOGY_FILE_MAX = 1 << 20,
    TOPOLOGY_DEPTH_MAX = 8,
    TOPOLOGY_NODE_MAX = 64,
    TOPOLOGY_PATH_MAX = 1024,
    TOPOLOGY_WORD_MAX = 16,
};

struct topology_number {
    bool given;
    uint64_t value;
};

/* Texts that were not given are "". */
struct topology_coordinator {
    char listen[FL_NETWORK_TEXT_MAX];
    char client_listen[FL_NETWORK_TEXT_MAX]; /* may be unix:/path */
    char models[TOPOLOGY_PATH_MAX];
    char key_file[TOPOLOGY_PATH_MAX];
    char activations[TOPOLOGY_WORD_MAX]; /* "q8" or "f32" */
    struct transport_ports data_ports;   /* 0 and 0: not given */
    struct topology_number context;
    struct topology_number kv_budget; /* bytes */
    struct topology_number chunk;
    struct topology_number queue;
    uint32_t split_count;
    uint32_t split[FL_STAGE_COUNT_MAX]; /* layers of each stage, in order */
};

struct topology_node {
    char name[FL_NAME_MAX];
    char join[FL_NETWORK_TEXT_MAX];
    char listen[FL_NETWORK_TEXT_MAX];
    char models[TOPOLOGY_PATH_MAX];
    char cache[TOPOLOGY_PATH_MAX];
    char key_file[TOPOLOGY_PATH_MAX];
    char isa[TOPOLOGY_WORD_MAX];   /* "auto", "scalar", "avx2" or "avx512" */
    struct topology_number memory; /* bytes */
    struct topology_number cache_budget;
    struct topology_number threads;
    struct transport_ports data_ports; /* 0 and 0: not given */
};

struct topology_box {
    char name[FL_NAME_MAX];
    struct topology_number memory;
};

struct topology {
    struct topology_coordinator coordinator;
    struct topology_node node;
    uint32_t box_count;
    struct topology_box boxes[TOPOLOGY_NODE_MAX];
};

/* Parse a configuration; `name` stands for it in sentences.  FL_MALFORMED: no JSON (with line and
 * column).  FL_INVALID: JSON that is no configuration (with the key). */
FL_MUST_CHECK fl_status topology_parse(const char *text, size_t size, const char *name,
                                       struct topology *out);

/* Read a file.  FL_NOT_FOUND, FL_IO, FL_TOO_LARGE, and as topology_parse(). */
FL_MUST_CHECK fl_status topology_read(const char *path, struct topology *out);

/* The entry of "nodes" with that name, NULL when there is none. */
const struct topology_box *topology_find(const struct topology *topology, const char *name);

#ifdef __cplusplus
}
#endif
#endif
