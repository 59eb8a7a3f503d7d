/* Threads keep to CPUs of their own exactly where there are as many of them as CPUs. */
#include "kernels/cpu_affinity.h"

#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "tests/harness.h"

static cpu_set_t allowed_now(void)
{
    cpu_set_t allowed;
    CHECK_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    return allowed;
}

static uint32_t cpu_count(void)
{
    const cpu_set_t allowed = allowed_now();
    return (uint32_t)CPU_COUNT(&allowed);
}

static void allow(const cpu_set_t *allowed)
{
    CHECK_EQ(sched_setaffinity(0, sizeof(*allowed), allowed), 0);
}

static cpu_set_t only(uint16_t cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return one;
}

static void test_as_many_threads_as_cpus_get_one_each(void)
{
    const cpu_set_t allowed = allowed_now();
    const struct cpu_affinity affinity = cpu_affinity_for(cpu_count());
    CHECK_EQ(affinity.count, cpu_count());
    for (uint32_t i = 0; i < affinity.count; i++) {
        CHECK(CPU_ISSET(affinity.cpus[i], &allowed));
        CHECK(i == 0 || affinity.cpus[i - 1] < affinity.cpus[i]);
    }
}

static void test_any_other_number_is_left_to_the_scheduler(void)
{
    const uint32_t cpus = cpu_count();
    const cpu_set_t before = allowed_now();
    const uint32_t others[] = {0, cpus - 1, cpus + 1, CPU_POOL_THREADS_MAX + 1};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        const struct cpu_affinity affinity = cpu_affinity_for(others[i]);
        CHECK_EQ(affinity.count, 0);
        cpu_affinity_bind(&affinity, 3, pthread_self());
        cpu_affinity_release(&affinity, pthread_self());
        const cpu_set_t after = allowed_now();
        CHECK(CPU_EQUAL(&before, &after));
    }
}

static void test_only_the_cpus_that_the_process_may_use_count(void)
{
    const cpu_set_t before = allowed_now();
    const struct cpu_affinity all = cpu_affinity_for(cpu_count());
    const uint16_t last = all.cpus[all.count - 1];
    const cpu_set_t narrowed = only(last);
    allow(&narrowed);
    const struct cpu_affinity affinity = cpu_affinity_for(1);
    allow(&before);
    CHECK_EQ(affinity.count, 1);
    CHECK_EQ(affinity.cpus[0], last);
    cpu_affinity_bind(&affinity, 0, pthread_self());
    const cpu_set_t bound = allowed_now();
    allow(&before);
    CHECK(CPU_EQUAL(&bound, &narrowed));
}

static void test_who_is_released_runs_on_all_of_them_again(void)
{
    const cpu_set_t before = allowed_now();
    const struct cpu_affinity affinity = cpu_affinity_for(cpu_count());
    cpu_affinity_bind(&affinity, affinity.count - 1, pthread_self());
    const cpu_set_t bound = allowed_now();
    cpu_affinity_release(&affinity, pthread_self());
    const cpu_set_t released = allowed_now();
    allow(&before);
    const cpu_set_t own = only(affinity.cpus[affinity.count - 1]);
    CHECK(CPU_EQUAL(&bound, &own));
    CHECK(CPU_EQUAL(&released, &before));
}

static void test_a_cpu_that_has_gone_changes_nothing(void)
{
    const cpu_set_t before = allowed_now();
    const struct cpu_affinity affinity = {.count = 1, .cpus = {CPU_SETSIZE - 1}};
    cpu_affinity_bind(&affinity, 0, pthread_self());
    const cpu_set_t after = allowed_now();
    CHECK(CPU_EQUAL(&before, &after));
}

struct seen {
    const struct cpu_affinity *affinity;
    atomic_uint elsewhere; /* parts on a thread that may run on other CPUs, too */
    atomic_uint helped;    /* parts that the pool's own threads ran */
};

static void note_where(void *ctx, uint32_t index, uint32_t thread)
{
    struct seen *seen = ctx;
    (void)index;
    if (thread > 0) {
        const cpu_set_t allowed = allowed_now();
        const cpu_set_t own = only(seen->affinity->cpus[thread]);
        atomic_fetch_add(&seen->elsewhere, CPU_EQUAL(&allowed, &own) ? 0 : 1);
        atomic_fetch_add(&seen->helped, 1);
    } else {
        usleep(100); /* something is left for the others */
    }
}

static void test_a_pools_threads_keep_to_theirs(void)
{
    const struct cpu_affinity affinity = cpu_affinity_for(cpu_count());
    const cpu_set_t before = allowed_now();
    struct cpu_pool *pool = NULL;
    struct seen seen = {.affinity = &affinity};
    if (affinity.count < 2) {
        TEST_SKIP("this process may use one CPU only");
    }
    CHECK_EQ(cpu_pool_open(affinity.count, &pool), FL_OK);
    cpu_pool_bind(pool, &affinity);
    for (int round = 0; round < 1000 && atomic_load(&seen.helped) < 20; round++) {
        cpu_pool_run(pool, 4 * affinity.count, note_where, &seen);
    }
    cpu_pool_close(pool);
    CHECK(atomic_load(&seen.helped) > 0);
    CHECK_EQ(atomic_load(&seen.elsewhere), 0);
    const cpu_set_t after = allowed_now();
    CHECK(CPU_EQUAL(&before, &after));
}

static const struct test_case cases[] = {
    {"cpu_affinity: as many threads as CPUs get one each",
     test_as_many_threads_as_cpus_get_one_each},
    {"cpu_affinity: any other number is left to the scheduler",
     test_any_other_number_is_left_to_the_scheduler},
    {"cpu_affinity: only the CPUs that the process may use count",
     test_only_the_cpus_that_the_process_may_use_count},
    {"cpu_affinity: who is released runs on all of them again",
     test_who_is_released_runs_on_all_of_them_again},
    {"cpu_affinity: a CPU that has gone changes nothing", test_a_cpu_that_has_gone_changes_nothing},
    {"cpu_affinity: a pool's threads keep to theirs", test_a_pools_threads_keep_to_theirs},
};

TEST_MAIN(cases)
