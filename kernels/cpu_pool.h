/* cpu_pool.h - a few threads that run the parts of one operation.
 *
 * The owner calls cpu_pool_run() and works along; the call returns when every
 * part is done.  Between calls the threads spin for a moment (operations of a
 * layer follow each other within microseconds), then sleep: an idle pool costs
 * nothing.
 *
 * Thread:  owner.  One cpu_pool_run() at a time.
 * Memory:  open() allocates, close() frees.
 */
#ifndef KERNELS_CPU_POOL_H
#define KERNELS_CPU_POOL_H

#include <stdint.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CPU_POOL_THREADS_MAX = 256 };

struct cpu_pool;
struct cpu_affinity;

/* `threads` counts the owner: 1 starts none.  FL_INVALID outside 1 .. CPU_POOL_THREADS_MAX,
 * FL_NO_MEMORY when a thread cannot be started. */
FL_MUST_CHECK fl_status cpu_pool_open(uint32_t threads, struct cpu_pool **out);
void cpu_pool_close(struct cpu_pool *pool);

/* The pool's threads keep to their CPUs from now on; the owner, which need not be the thread that calls
 * this, sees to itself. */
void cpu_pool_bind(struct cpu_pool *pool, const struct cpu_affinity *affinity);

/* Threads of the pool; 1 for NULL. */
uint32_t cpu_pool_threads(const struct cpu_pool *pool);

/* Call part(ctx, index, thread) for index 0 .. count - 1, in any order, on any of the pool's
 * threads (`thread` < cpu_pool_threads()); returns when all are done.  A NULL pool runs them here. */
void cpu_pool_run(struct cpu_pool *pool, uint32_t count,
                  void (*part)(void *ctx, uint32_t index, uint32_t thread), void *ctx);

#ifdef __cplusplus
}
#endif
#endif
