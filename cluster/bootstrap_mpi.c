#include "cluster/bootstrap_mpi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mpi.h>

/* One process's part of the exchange, as bytes: all ranks run the same program's build. */
struct entry {
    uint32_t version;
    uint32_t coordinator;
    struct fl_address address;
};

bool bootstrap_mpi_present(void)
{
    return getenv("OMPI_COMM_WORLD_SIZE") != NULL || getenv("PMIX_RANK") != NULL ||
           getenv("PMI_RANK") != NULL;
}

/* MPI is used for a few hundred bytes: plain TCP does, and keeps its UCX out of ours. */
static void set_defaults(void)
{
    (void)setenv("OMPI_MCA_pml", "ob1", 0);
    (void)setenv("OMPI_MCA_btl", "self,vader,tcp", 0);
    (void)setenv("OMPI_MCA_osc", "^ucx", 0);
}

static fl_status failed(const char *what, int error)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int size = 0;
    (void)MPI_Error_string(error, text, &size);
    return FL_FAIL(FL_INTERNAL, "%s fails: %.200s", what, text);
}

/* Rank 0 and only rank 0 is a coordinator, there is a node, and all speak one version. */
static fl_status check_entries(const struct entry *entries, uint32_t size)
{
    if (size < 2) {
        return FL_FAIL(FL_INVALID, "mpirun started no node: "
                                   "mpirun -np 1 firstlight-coordinator : -np 3 firstlight-node");
    }
    for (uint32_t rank = 0; rank < size; rank++) {
        const struct entry *entry = &entries[rank];
        if (entry->version != FL_PROTOCOL_VERSION) {
            return FL_FAIL(FL_INVALID,
                           "rank %u speaks firstlight protocol %u, rank 0 speaks %d; "
                           "run the same version on all machines",
                           (unsigned)rank, (unsigned)entry->version, FL_PROTOCOL_VERSION);
        }
        if (entry->coordinator != (rank == 0)) {
            return rank == 0 ? FL_FAIL(FL_INVALID, "rank 0 is a node; mpirun must name one "
                                                   "coordinator first, then the nodes")
                             : FL_FAIL(FL_INVALID,
                                       "rank %u is another coordinator; mpirun must name exactly "
                                       "one, first",
                                       (unsigned)rank);
        }
        if (entry->address.size == 0 || entry->address.size > FL_ADDRESS_MAX) {
            return FL_FAIL(FL_INVALID, "rank %u has an address of %u bytes, 1 to %d are right",
                           (unsigned)rank, (unsigned)entry->address.size, FL_ADDRESS_MAX);
        }
    }
    return FL_OK;
}

/* Everyone learns everyone's entry and rank 0's key. */
static fl_status exchange(const struct entry *mine, struct entry *all, struct fl_pool_key *key)
{
    int error = MPI_Allgather(mine, (int)sizeof(*mine), MPI_BYTE, all, (int)sizeof(*mine), MPI_BYTE,
                              MPI_COMM_WORLD);
    if (error != MPI_SUCCESS) {
        return failed("MPI_Allgather", error);
    }
    error = MPI_Bcast(key->bytes, FL_POOL_KEY_SIZE, MPI_BYTE, 0, MPI_COMM_WORLD);
    return error == MPI_SUCCESS ? FL_OK : failed("MPI_Bcast", error);
}

static fl_status share(const struct fl_address *mine, bool coordinator, struct bootstrap_mpi *out)
{
    int rank = 0;
    int size = 0;
    (void)MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    int error = MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (error == MPI_SUCCESS) {
        error = MPI_Comm_size(MPI_COMM_WORLD, &size);
    }
    if (error != MPI_SUCCESS || size < 1 || rank < 0) {
        return failed("MPI_Comm_size", error);
    }
    struct entry entry;
    memset(&entry, 0, sizeof(entry));
    entry.version = FL_PROTOCOL_VERSION;
    entry.coordinator = coordinator;
    entry.address = *mine;
    struct entry *all = calloc((size_t)size, sizeof(*all));
    struct fl_address *addresses = calloc((size_t)size, sizeof(*addresses));
    struct fl_pool_key key = {.bytes = {0}};
    fl_status status = FL_OK;
    if (all == NULL || addresses == NULL) {
        status = FL_FAIL(FL_NO_MEMORY, "no memory for the addresses of %d ranks", size);
        goto fail;
    }
    if (rank == 0) {
        fl_pool_key_make(&key);
    }
    status = exchange(&entry, all, &key);
    if (status == FL_OK) {
        status = check_entries(all, (uint32_t)size);
    }
    if (status != FL_OK) {
        goto fail;
    }
    for (int i = 0; i < size; i++) {
        addresses[i] = all[i].address;
    }
    free(all);
    *out = (struct bootstrap_mpi){
        .rank = (uint32_t)rank, .size = (uint32_t)size, .addresses = addresses, .key = key};
    return FL_OK;

fail:
    free(addresses);
    free(all);
    return status;
}

fl_status bootstrap_mpi_exchange(const struct fl_address *mine, bool coordinator,
                                 struct bootstrap_mpi *out)
{
    set_defaults();
    int provided = 0;
    int initialized = 0;
    (void)MPI_Initialized(&initialized);
    FL_ASSERT(!initialized);
    const int error = MPI_Init_thread(NULL, NULL, MPI_THREAD_SINGLE, &provided);
    if (error != MPI_SUCCESS) {
        return FL_FAIL(FL_INTERNAL, "MPI does not start (error %d)", error);
    }
    const fl_status status = share(mine, coordinator, out);
    /* All ranks see the same entries and fail alike, so none waits here for another. */
    (void)MPI_Finalize();
    return status;
}
