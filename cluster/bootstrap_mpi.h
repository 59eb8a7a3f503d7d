/* bootstrap_mpi.h - forms a cluster that mpirun started.
 *
 * Rank 0 is the coordinator.  The ranks exchange their workers' addresses and a
 * fresh pool key, then MPI is finished with and not used again.
 *
 * Thread:  main, before any other thread starts.
 * Memory:  exchange() allocates the addresses; the caller frees them with free().
 */
#ifndef CLUSTER_BOOTSTRAP_MPI_H
#define CLUSTER_BOOTSTRAP_MPI_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/cluster_message.h"
#include "proto/pool_key.h"

struct bootstrap_mpi {
    uint32_t rank;
    uint32_t size;
    struct fl_address *addresses; /* [size], by rank */
    struct fl_pool_key key;       /* made by rank 0 */
};

/* True when mpirun (or another PMIx launcher) started this process. */
bool bootstrap_mpi_present(void);

/* FL_INVALID when a node is rank 0, or a coordinator is not, or there is no node. */
FL_MUST_CHECK fl_status bootstrap_mpi_exchange(const struct fl_address *mine, bool coordinator,
                                               struct bootstrap_mpi *out);

#endif
