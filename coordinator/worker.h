/* worker.h - does what would make the main loop wait.
 *
 * Opening a model, reading file ranges and tokenising take from one to hundreds
 * of milliseconds; heartbeats and tokens must not stand behind them.  The owner
 * submits jobs, one thread runs them in order, and the owner collects what is
 * done.
 *
 *   owner:  submit ─► [bounded queue] ─► run()   (worker thread, or worker_step())
 *           collect ◄─ done()  ◄─────────┘
 *
 * The worker starts a thread only when worker_start() is called: the simulator
 * and the tests call worker_step() themselves.
 *
 * Thread:  submit(), collect(), start(), stop(), close() from the owner; step() from one other
 *          thread, or from the owner.
 * Memory:  a job belongs to the worker from submit() until its done() is called.
 */
#ifndef COORDINATOR_WORKER_H
#define COORDINATOR_WORKER_H

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { WORKER_JOB_MAX = 1024 };

struct worker;

/* The first member of a struct that says what to do. */
struct job {
    void (*run)(struct job *job);             /* on the worker; may block */
    void (*done)(struct job *job, void *ctx); /* on the owner; may free the job */
    struct job *next;                         /* the worker's */
};

/* `ctx` is handed to every done(). */
FL_MUST_CHECK fl_status worker_open(void *ctx, struct worker **out);

/* Stops the thread after the job it runs.  Jobs that are queued or not collected are done with
 * (their done() is called) without being run. */
void worker_close(struct worker *worker);

/* From now on a thread runs the jobs. */
FL_MUST_CHECK fl_status worker_start(struct worker *worker);

/* FL_BUSY when WORKER_JOB_MAX jobs wait. */
FL_MUST_CHECK fl_status worker_submit(struct worker *worker, struct job *job);

/* Run one job here.  FL_AGAIN when there is none. */
FL_MUST_CHECK fl_status worker_step(struct worker *worker);

/* Call done() of every finished job; returns how many. */
unsigned worker_collect(struct worker *worker);

/* Readable while finished jobs wait to be collected. */
int worker_fd(const struct worker *worker);

#ifdef __cplusplus
}
#endif
#endif
