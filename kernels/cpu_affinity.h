/* cpu_affinity.h - the CPU that each compute thread keeps to.
 *
 * Where a process computes with as many threads as it may use CPUs, each thread
 * gets one of its own.  The scheduler, left alone, would wake a thread on whichever
 * CPU idles at the moment, and a decoded token, which passes through several
 * threads, would wait at each for a halted CPU to start and for a cold cache to
 * fill.  With fewer threads than CPUs there is a choice, and it stays the scheduler's.
 *
 * The CPUs are those that the process may use when it starts; a mask that is given to its threads
 * later (taskset -a) holds until the next load.
 *
 * Thread:  any; a value that does not change.
 */
#ifndef KERNELS_CPU_AFFINITY_H
#define KERNELS_CPU_AFFINITY_H

#include <pthread.h>
#include <stdint.h>

#include "kernels/cpu_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cpu_affinity {
    uint32_t count; /* of cpus; 0: every thread runs where the scheduler puts it */
    uint16_t cpus[CPU_POOL_THREADS_MAX]; /* ascending */
};

/* For `threads` threads, from the CPUs that the calling thread may use. */
struct cpu_affinity cpu_affinity_for(uint32_t threads);

/* `thread` is thread `index` of them, or works for it: it keeps to that CPU from now on.  Nothing
 * happens where that cannot be (the CPU has gone, say): it is about speed only. */
void cpu_affinity_bind(const struct cpu_affinity *affinity, uint32_t index, pthread_t thread);

/* The scheduler's choice again, among the CPUs of them all. */
void cpu_affinity_release(const struct cpu_affinity *affinity, pthread_t thread);

#ifdef __cplusplus
}
#endif
#endif
