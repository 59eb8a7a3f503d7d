/* node_options.h - what the command line of firstlight-node says.
 *
 * Thread:  main.
 * Memory:  strings point into argv or into this struct: do not copy it.
 * Units:   sizes in bytes.
 */
#ifndef NODE_NODE_OPTIONS_H
#define NODE_NODE_OPTIONS_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#include "cluster/topology.h"
#include "proto/base/log.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

struct node_options {
    const char *join;   /* "host:port"; NULL under mpirun */
    const char *listen; /* NULL: chosen to suit `join` */
    const char *models; /* NULL: no model files here */
    const char *key_file;
    const char *isa;
    enum fl_log_level log_level;
    uint64_t cache_budget;
    uint64_t memory;
    uint32_t threads;
    struct transport_ports data_ports; /* 0 and 0: any */
    bool help;
    bool version;
    char name[FL_NAME_MAX];
    bool named; /* by a flag or the file; else after the host */
    char cache[PATH_MAX];
    struct topology_node file; /* of --config */
};

/* Defaults, then what --config says, then flags.  FL_INVALID with a sentence for what cannot be used. */
FL_MUST_CHECK fl_status node_options_parse(int argc, char **argv, bool mpi,
                                           struct node_options *out);

/* Under mpirun several nodes may share a host: one that was given no name becomes HOST-RANK. */
void node_options_number(struct node_options *options, uint32_t rank);

void node_options_help(void);

#endif
