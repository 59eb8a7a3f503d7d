#include "coordinator/worker.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct job_list {
    struct job *first;
    struct job *last;
};

struct worker {
    void *ctx;
    int wake; /* eventfd: counts finished jobs */
    bool started;
    pthread_t thread;
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t more;
    struct job_list waiting;
    struct job_list finished;
    unsigned waiting_count;
    bool stopping;
};

static void list_push(struct job_list *list, struct job *job)
{
    job->next = NULL;
    if (list->last != NULL) {
        list->last->next = job;
    } else {
        list->first = job;
    }
    list->last = job;
}

static struct job *list_pop(struct job_list *list)
{
    struct job *job = list->first;
    if (job != NULL) {
        list->first = job->next;
        list->last = list->first != NULL ? list->last : NULL;
        job->next = NULL;
    }
    return job;
}

fl_status worker_open(void *ctx, struct worker **out)
{
    struct worker *worker = calloc(1, sizeof(*worker));
    if (worker == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "worker: %zu bytes are not available", sizeof(*worker));
    }
    worker->ctx = ctx;
    worker->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (worker->wake < 0) {
        const int error = errno;
        free(worker);
        return FL_FAIL(FL_NO_MEMORY, "worker: no event descriptor: %s", strerror(error));
    }
    pthread_mutex_init(&worker->mutex, NULL);
    pthread_cond_init(&worker->more, NULL);
    *out = worker;
    return FL_OK;
}

void worker_close(struct worker *worker)
{
    if (worker == NULL) {
        return;
    }
    pthread_mutex_lock(&worker->mutex);
    worker->stopping = true;
    pthread_cond_signal(&worker->more);
    pthread_mutex_unlock(&worker->mutex);
    if (worker->started) {
        pthread_join(worker->thread, NULL);
    }
    (void)worker_collect(worker);
    for (struct job *job; (job = list_pop(&worker->waiting)) != NULL;) {
        job->done(job, worker->ctx);
    }
    pthread_cond_destroy(&worker->more);
    pthread_mutex_destroy(&worker->mutex);
    close(worker->wake);
    free(worker);
}

/* Moves the job to the finished ones and wakes the owner. */
static void finish(struct worker *worker, struct job *job)
{
    pthread_mutex_lock(&worker->mutex);
    list_push(&worker->finished, job);
    pthread_mutex_unlock(&worker->mutex);
    const uint64_t one = 1;
    /* The counter cannot overflow: collect() clears it. */
    (void)!write(worker->wake, &one, sizeof(one));
}

static void *worker_main(void *arg)
{
    struct worker *worker = arg;
    (void)fl_fail_log_at(FL_LOG_DEBUG); /* whoever gave the job hears of it */
    for (;;) {
        pthread_mutex_lock(&worker->mutex);
        while (worker->waiting.first == NULL && !worker->stopping) {
            pthread_cond_wait(&worker->more, &worker->mutex);
        }
        struct job *job = worker->stopping ? NULL : list_pop(&worker->waiting);
        worker->waiting_count -= job != NULL;
        pthread_mutex_unlock(&worker->mutex);
        if (job == NULL) {
            return NULL;
        }
        job->run(job);
        finish(worker, job);
    }
}

fl_status worker_start(struct worker *worker)
{
    /* Signals are the main thread's. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&worker->thread, NULL, worker_main, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        return FL_FAIL(FL_NO_MEMORY, "worker: no thread could be started: %s", strerror(error));
    }
    worker->started = true;
    return FL_OK;
}

fl_status worker_submit(struct worker *worker, struct job *job)
{
    pthread_mutex_lock(&worker->mutex);
    const bool full = worker->waiting_count >= WORKER_JOB_MAX;
    if (!full) {
        list_push(&worker->waiting, job);
        worker->waiting_count++;
        pthread_cond_signal(&worker->more);
    }
    pthread_mutex_unlock(&worker->mutex);
    return full ? FL_FAIL(FL_BUSY, "coordinator: %d jobs are waiting already; try again shortly",
                          WORKER_JOB_MAX)
                : FL_OK;
}

fl_status worker_step(struct worker *worker)
{
    pthread_mutex_lock(&worker->mutex);
    struct job *job = list_pop(&worker->waiting);
    worker->waiting_count -= job != NULL;
    pthread_mutex_unlock(&worker->mutex);
    if (job == NULL) {
        return FL_AGAIN;
    }
    job->run(job);
    finish(worker, job);
    return FL_OK;
}

unsigned worker_collect(struct worker *worker)
{
    uint64_t count;
    /* EAGAIN only says that nothing finished since. */
    (void)!read(worker->wake, &count, sizeof(count));
    unsigned collected = 0;
    for (;;) {
        pthread_mutex_lock(&worker->mutex);
        struct job *job = list_pop(&worker->finished);
        pthread_mutex_unlock(&worker->mutex);
        if (job == NULL) {
            return collected;
        }
        job->done(job, worker->ctx);
        collected++;
    }
}

int worker_fd(const struct worker *worker)
{
    return worker->wake;
}
