#include "kernels/cpu_pool.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu_affinity.h"

enum {
    SPINS = 1000, /* pauses before a thread sleeps: 15 - 60 us, longer than the gap between two
                     operations of a layer */
    CACHE_LINE = 64,
};

struct worker {
    struct cpu_pool *pool;
    pthread_t thread;
    uint32_t index;
};

struct cpu_pool {
    /* Written by the owner before it publishes a ticket, read after a part was claimed. */
    void (*part)(void *ctx, uint32_t index, uint32_t thread);
    void *ctx;
    uint32_t count;

    /* Parts not yet claimed.  Whoever takes it down from n owns part count - n. */
    alignas(CACHE_LINE) atomic_uint unclaimed;
    alignas(CACHE_LINE) atomic_uint done; /* parts finished */

    alignas(CACHE_LINE) pthread_mutex_t lock; /* guards the waits, no data */
    pthread_cond_t work;                      /* unclaimed > 0, or stop */
    pthread_cond_t finished;                  /* done == count */
    atomic_uint sleepers;                     /* workers in or about to be in a wait on `work` */
    atomic_bool owner_sleeps;
    atomic_bool stop;

    uint32_t threads;
    struct worker workers[]; /* [threads - 1] */
};

/* Run one part if any is left.  The acquire pairs with the release in publish(), through the
 * chain of claims: the job's fields belong to the count that was claimed from. */
static bool run_one(struct cpu_pool *pool, uint32_t thread)
{
    unsigned left = atomic_load_explicit(&pool->unclaimed, memory_order_relaxed);
    do {
        if (left == 0) {
            return false;
        }
    } while (!atomic_compare_exchange_weak_explicit(&pool->unclaimed, &left, left - 1,
                                                    memory_order_acq_rel, memory_order_relaxed));
    const uint32_t count = pool->count;
    pool->part(pool->ctx, count - left, thread);
    /* Release: pairs with the acquire in wait_for_the_rest().  Sequentially consistent, as the
     * load after it: either we see the sleeping owner or it sees our count. */
    if (atomic_fetch_add(&pool->done, 1) + 1 == count && atomic_load(&pool->owner_sleeps)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_signal(&pool->finished);
        pthread_mutex_unlock(&pool->lock);
    }
    return true;
}

static void *worker_main(void *arg)
{
    const struct worker *worker = arg;
    struct cpu_pool *pool = worker->pool;
    uint32_t spins = 0;
    while (!atomic_load_explicit(&pool->stop, memory_order_relaxed)) {
        if (run_one(pool, worker->index)) {
            spins = 0;
        } else if (spins < SPINS) {
            spins++;
            __builtin_ia32_pause();
        } else {
            /* Sequentially consistent, as in publish(): one of the two sees the other. */
            pthread_mutex_lock(&pool->lock);
            atomic_fetch_add(&pool->sleepers, 1);
            while (atomic_load(&pool->unclaimed) == 0 && !atomic_load(&pool->stop)) {
                pthread_cond_wait(&pool->work, &pool->lock);
            }
            atomic_fetch_sub(&pool->sleepers, 1);
            pthread_mutex_unlock(&pool->lock);
            spins = 0;
        }
    }
    return NULL;
}

static void wake_sleepers(struct cpu_pool *pool)
{
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
    }
}

static void stop_workers(struct cpu_pool *pool, uint32_t started)
{
    atomic_store(&pool->stop, true);
    wake_sleepers(pool);
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
}

static void pool_free(struct cpu_pool *pool)
{
    pthread_cond_destroy(&pool->finished);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* Workers take no signals: those are for the program's own threads. */
static int start_worker(struct worker *worker)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&worker->thread, NULL, worker_main, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

fl_status cpu_pool_open(uint32_t threads, struct cpu_pool **out)
{
    if (threads < 1 || threads > CPU_POOL_THREADS_MAX) {
        return FL_FAIL(FL_INVALID, "%" PRIu32 " compute threads; 1 to %d would be right", threads,
                       CPU_POOL_THREADS_MAX);
    }
    const size_t size = sizeof(struct cpu_pool) + (threads - 1) * sizeof(struct worker);
    struct cpu_pool *pool =
        aligned_alloc(CACHE_LINE, (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (pool == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a pool of %" PRIu32 " compute threads",
                       threads);
    }
    memset(pool, 0, size);
    pool->threads = threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->finished, NULL);
    for (uint32_t i = 0; i + 1 < threads; i++) {
        pool->workers[i].pool = pool;
        pool->workers[i].index = i + 1;
        const int error = start_worker(&pool->workers[i]);
        if (error != 0) {
            stop_workers(pool, i);
            pool_free(pool);
            return FL_FAIL(FL_NO_MEMORY,
                           "compute thread %" PRIu32 " of %" PRIu32
                           " cannot be started: %s; fewer threads would be right",
                           i + 2, threads, strerror(error));
        }
    }
    *out = pool;
    return FL_OK;
}

void cpu_pool_close(struct cpu_pool *pool)
{
    if (pool != NULL) {
        stop_workers(pool, pool->threads - 1);
        pool_free(pool);
    }
}

void cpu_pool_bind(struct cpu_pool *pool, const struct cpu_affinity *affinity)
{
    for (uint32_t i = 0; i + 1 < pool->threads; i++) {
        cpu_affinity_bind(affinity, i + 1, pool->workers[i].thread);
    }
}

uint32_t cpu_pool_threads(const struct cpu_pool *pool)
{
    return pool != NULL ? pool->threads : 1;
}

/* Release: pairs with the acquire in run_one(). */
static void publish(struct cpu_pool *pool, uint32_t count)
{
    pool->count = count;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store(&pool->unclaimed, count);
    wake_sleepers(pool);
}

static void wait_for_the_rest(struct cpu_pool *pool)
{
    for (uint32_t spins = 0; spins < SPINS; spins++) {
        if (atomic_load_explicit(&pool->done, memory_order_acquire) == pool->count) {
            return;
        }
        __builtin_ia32_pause();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->owner_sleeps, true);
    while (atomic_load(&pool->done) != pool->count) {
        pthread_cond_wait(&pool->finished, &pool->lock);
    }
    atomic_store(&pool->owner_sleeps, false);
    pthread_mutex_unlock(&pool->lock);
}

void cpu_pool_run(struct cpu_pool *pool, uint32_t count,
                  void (*part)(void *ctx, uint32_t index, uint32_t thread), void *ctx)
{
    if (pool == NULL || pool->threads == 1 || count <= 1) {
        for (uint32_t i = 0; i < count; i++) {
            part(ctx, i, 0);
        }
        return;
    }
    pool->part = part;
    pool->ctx = ctx;
    publish(pool, count);
    while (run_one(pool, 0)) {
    }
    wait_for_the_rest(pool);
}
