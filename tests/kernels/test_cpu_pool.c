/* Every part runs once, on threads the pool said it has, and nothing is left running. */
#include "kernels/cpu_pool.h"

#include <stdatomic.h>
#include <unistd.h>

#include "tests/harness.h"

enum { PARTS = 300 };

struct tally {
    atomic_uint runs[PARTS];
    atomic_uint thread_max;
};

static void count_part(void *ctx, uint32_t index, uint32_t thread)
{
    struct tally *tally = ctx;
    atomic_fetch_add(&tally->runs[index], 1);
    unsigned seen = atomic_load(&tally->thread_max);
    while (seen < thread && !atomic_compare_exchange_weak(&tally->thread_max, &seen, thread)) {
    }
}

/* Runs 0 .. PARTS parts many times over; every part below `count` ran once each time. */
static void check_pool(struct cpu_pool *pool, uint32_t threads)
{
    struct tally tally = {0};
    uint32_t runs[PARTS] = {0};
    for (uint32_t round = 0; round < 400; round++) {
        const uint32_t count = round * 7 % (PARTS + 1);
        cpu_pool_run(pool, count, count_part, &tally);
        for (uint32_t i = 0; i < count; i++) {
            runs[i]++;
        }
        if (round % 97 == 0) {
            usleep(300); /* long enough for the workers to fall asleep */
        }
        for (uint32_t i = 0; i < PARTS; i++) {
            CHECK_EQ(atomic_load(&tally.runs[i]), runs[i]);
        }
    }
    CHECK(atomic_load(&tally.thread_max) < threads);
}

static void test_every_part_runs_once_for_any_thread_count(void)
{
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct cpu_pool *pool = NULL;
        CHECK_EQ(cpu_pool_open(threads, &pool), FL_OK);
        CHECK_EQ(cpu_pool_threads(pool), threads);
        check_pool(pool, threads);
        cpu_pool_close(pool);
    }
}

static void test_no_pool_is_the_calling_thread(void)
{
    CHECK_EQ(cpu_pool_threads(NULL), 1);
    check_pool(NULL, 1);
    cpu_pool_close(NULL);
}

static void test_unusable_thread_counts_are_refused(void)
{
    struct cpu_pool *pool = NULL;
    CHECK_EQ(cpu_pool_open(0, &pool), FL_INVALID);
    CHECK_EQ(cpu_pool_open(CPU_POOL_THREADS_MAX + 1, &pool), FL_INVALID);
    CHECK(strstr(fl_last_error(), "257") != NULL);
    CHECK(pool == NULL);
}

static void test_pools_open_and_close_at_once(void)
{
    for (int i = 0; i < 50; i++) {
        struct cpu_pool *pool = NULL;
        CHECK_EQ(cpu_pool_open(3, &pool), FL_OK);
        cpu_pool_close(pool);
    }
}

static const struct test_case cases[] = {
    {"cpu_pool: every part runs once for any thread count",
     test_every_part_runs_once_for_any_thread_count},
    {"cpu_pool: no pool is the calling thread", test_no_pool_is_the_calling_thread},
    {"cpu_pool: unusable thread counts are refused", test_unusable_thread_counts_are_refused},
    {"cpu_pool: pools open and close at once", test_pools_open_and_close_at_once},
};

TEST_MAIN(cases)
