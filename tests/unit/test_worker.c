/* test_worker.c - jobs go to the worker and come back, with and without a thread. */
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>

#include "coordinator/worker.h"
#include "tests/harness.h"

enum { JOBS = 500 };

struct sum_job {
    struct job job;
    int number;
    bool ran;
};

struct sum {
    int total;
    int done;
    int last;
};

static void run_sum(struct job *job)
{
    ((struct sum_job *)job)->ran = true;
}

static void done_sum(struct job *job, void *ctx)
{
    struct sum_job *sum_job = (struct sum_job *)job;
    struct sum *sum = ctx;
    sum->total += sum_job->ran ? sum_job->number : 0;
    sum->done++;
    sum->last = sum_job->number;
    free(sum_job);
}

static struct job *new_job(int number)
{
    struct sum_job *job = calloc(1, sizeof(*job));
    CHECK(job != NULL);
    *job = (struct sum_job){.job = {.run = run_sum, .done = done_sum}, .number = number};
    return &job->job;
}

static void jobs_run_in_order_on_their_thread(void)
{
    struct sum sum = {0};
    struct worker *worker = NULL;
    CHECK_EQ(worker_open(&sum, &worker), FL_OK);
    CHECK_EQ(worker_start(worker), FL_OK);
    for (int i = 1; i <= JOBS; i++) {
        CHECK_EQ(worker_submit(worker, new_job(i)), FL_OK);
    }
    struct pollfd fd = {.fd = worker_fd(worker), .events = POLLIN};
    while (sum.done < JOBS && poll(&fd, 1, 5000) > 0) {
        (void)worker_collect(worker);
    }
    worker_close(worker);
    CHECK_EQ(sum.done, JOBS);
    CHECK_EQ(sum.last, JOBS);
    CHECK_EQ(sum.total, JOBS * (JOBS + 1) / 2);
}

static void a_step_runs_one_job_here(void)
{
    struct sum sum = {0};
    struct worker *worker = NULL;
    CHECK_EQ(worker_open(&sum, &worker), FL_OK);
    CHECK_EQ(worker_step(worker), FL_AGAIN);
    CHECK_EQ(worker_submit(worker, new_job(7)), FL_OK);
    CHECK_EQ(worker_step(worker), FL_OK);
    CHECK_EQ(sum.done, 0);
    CHECK_EQ(worker_collect(worker), 1);
    CHECK_EQ(sum.total, 7);
    worker_close(worker);
}

static void the_queue_is_bounded_and_closing_returns_what_waits(void)
{
    struct sum sum = {0};
    struct worker *worker = NULL;
    CHECK_EQ(worker_open(&sum, &worker), FL_OK);
    for (int i = 0; i < WORKER_JOB_MAX; i++) {
        CHECK_EQ(worker_submit(worker, new_job(1)), FL_OK);
    }
    struct job *extra = new_job(1);
    CHECK_EQ(worker_submit(worker, extra), FL_BUSY);
    free(extra);
    CHECK_EQ(worker_step(worker), FL_OK);
    worker_close(worker);
    CHECK_EQ(sum.done, WORKER_JOB_MAX);
    CHECK_EQ(sum.total, 1); /* the others were given back without being run */
}

static const struct test_case cases[] = {
    {"worker: jobs run in order on their thread", jobs_run_in_order_on_their_thread},
    {"worker: a step runs one job here", a_step_runs_one_job_here},
    {"worker: the queue is bounded and closing returns what waits",
     the_queue_is_bounded_and_closing_returns_what_waits},
};

TEST_MAIN(cases)
