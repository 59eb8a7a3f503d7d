/* backends.h - the kernel tables that this machine runs.
 *
 * Thread:  any.
 */
#ifndef TESTS_KERNELS_BACKENDS_H
#define TESTS_KERNELS_BACKENDS_H

#include <stdio.h>

#include "kernels/cpu_pool.h"
#include "kernels/kernels.h"
#include "tests/harness.h"

#ifdef HAVE_EMULATED_AVX512
extern const struct kernel_ops kernel_ops_avx512_emulated;
#endif

enum { BACKENDS_MAX = 4, POOLS = 3 };

struct backend {
    const char *name;
    const struct kernel_ops *ops;
};

/* Scalar first: its own threads and batches are checked too. */
static inline int backends(const struct backend **out)
{
    static struct backend all[BACKENDS_MAX];
    static int count;
    const struct kernel_ops *ops = NULL;
    *out = all;
    if (count > 0) {
        return count;
    }
    all[count++] = (struct backend){"scalar", &kernel_ops_scalar};
    if (kernel_ops_select("avx2", &ops) == FL_OK) {
        all[count++] = (struct backend){"avx2", ops};
#ifdef HAVE_EMULATED_AVX512
        all[count++] = (struct backend){"avx512 (emulated)", &kernel_ops_avx512_emulated};
#endif
    }
    if (kernel_ops_select("avx512", &ops) == FL_OK) {
        all[count++] = (struct backend){"avx512", ops};
    }
    for (int b = 0; b < count; b++) {
        printf("  checked here: %s\n", all[b].name);
    }
    return count;
}

/* Calls check(ops, pool, ctx) for every backend on 1, 2 and 3 threads. */
static inline void for_each_backend(void (*check)(const struct kernel_ops *ops,
                                                  struct cpu_pool *pool, void *ctx),
                                    void *ctx)
{
    const struct backend *all = NULL;
    const int count = backends(&all);
    for (uint32_t threads = 1; threads <= POOLS; threads++) {
        struct cpu_pool *pool = NULL;
        CHECK_EQ(cpu_pool_open(threads, &pool), FL_OK);
        for (int b = 0; b < count; b++) {
            check(all[b].ops, pool, ctx);
        }
        cpu_pool_close(pool);
    }
}

#endif
