#include "kernels/cpu_affinity.h"

#include <sched.h>

#include "proto/base/check.h"

_Static_assert(CPU_SETSIZE <= UINT16_MAX, "a CPU's number fits");

struct cpu_affinity cpu_affinity_for(uint32_t threads)
{
    struct cpu_affinity affinity = {.count = 0};
    cpu_set_t allowed;
    if (threads > CPU_POOL_THREADS_MAX || sched_getaffinity(0, sizeof(allowed), &allowed) != 0 ||
        (uint32_t)CPU_COUNT(&allowed) != threads) {
        return affinity;
    }
    for (uint16_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed)) {
            affinity.cpus[affinity.count++] = cpu;
        }
    }
    return affinity;
}

static void bind(const struct cpu_affinity *affinity, uint32_t first, uint32_t count,
                 pthread_t thread)
{
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (uint32_t i = first; i < first + count; i++) {
        CPU_SET(affinity->cpus[i], &cpus);
    }
    (void)pthread_setaffinity_np(thread, sizeof(cpus), &cpus);
}

void cpu_affinity_bind(const struct cpu_affinity *affinity, uint32_t index, pthread_t thread)
{
    if (affinity->count > 0) {
        FL_ASSERT(index < affinity->count);
        bind(affinity, index, 1, thread);
    }
}

void cpu_affinity_release(const struct cpu_affinity *affinity, pthread_t thread)
{
    if (affinity->count > 0) {
        bind(affinity, 0, affinity->count, thread);
    }
}
