/* span.h - where time went: one phase, on one thread of one process.
 *
 * Whatever takes time on the way to a first token is a span: an interval on the
 * clock of the process that saw it, with what it moved and what it had waited
 * for.  The coordinator gathers them, maps them to its own clock, and walks back
 * from the first token to say which of them the user waited for.
 *
 * A span that covers several phases in turns (a piece is read, verified and
 * repacked chunk by chunk) is recorded once per phase, with the same interval
 * and its own `busy_ns`.
 *
 * Run and batch: a run is a batch of rows that one stage puts through its
 * pieces together.  Its tasks name the run, and a JOIN span for every request
 * in it says whose rows it holds.
 *
 * Thread:  any; plain values.
 * Units:   nanoseconds of CLOCK_MONOTONIC of the recording process, bytes.
 */
#ifndef PROTO_SPAN_H
#define PROTO_SPAN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Append only: the numbers travel.  The comment says who records it, and what its cause is. */
enum fl_phase {
    FL_PHASE_UNKNOWN = 0, /* nobody recorded what happened */
    FL_PHASE_START,       /* process: exec to ready */
    FL_PHASE_OPEN,        /* coordinator: the model's header and vocabulary are read */
    FL_PHASE_PLAN,        /* coordinator: nodes and cuts are chosen */
    FL_PHASE_TOKENISE,    /* coordinator */
    FL_PHASE_QUEUE,       /* coordinator: the request waits for KV cache */
    FL_PHASE_SEND,    /* wire: rows or a token wait to be sent, from the moment compute has them; */
                      /* and, in a chain, a message on its way */
    FL_PHASE_RECEIVE, /* wire: something arrived; start = end */
    FL_PHASE_WAKE,    /* a thread was roused, or was busy with something nobody recorded */
    FL_PHASE_MEMORY,  /* compute: weights and buffers are taken from the device */
    FL_PHASE_KV,      /* compute: KV cache is taken */
    FL_PHASE_LINK,    /* wire: a link to a neighbour, from opening to usable */
    FL_PHASE_READ,    /* loader: bytes of a piece arrive, from `source` */
    FL_PHASE_VERIFY,  /* loader: checksums */
    FL_PHASE_REPACK,  /* loader: into the kernels' layout */
    FL_PHASE_COPY,    /* loader: to the device */
    FL_PHASE_EMBED,   /* rows of the embedding: loader reads them, compute looks them up */
    FL_PHASE_JOIN,    /* compute: a request's rows joined a run; cause_ns: when they were there, */
                      /* BUSY: the thread ended another task since, last at its start */
    FL_PHASE_PREFILL, /* compute: a task of a run that holds prompt rows */
    FL_PHASE_HEAD,    /* compute: the output head of such a run, sampling left out */
    FL_PHASE_SAMPLE,  /* compute: tokens are chosen */
    FL_PHASE_DECODE,  /* compute: a run of decode rows only, all its pieces */
    FL_PHASE_RETURN,  /* coordinator: a token's text goes to the client */
    FL_PHASE_COUNT,
};

enum fl_lane {
    FL_LANE_NONE = 0,
    FL_LANE_WIRE,
    FL_LANE_COMPUTE,
    FL_LANE_LOADER, /* shown as "disk" */
    FL_LANE_MAIN,   /* coordinator */
    FL_LANE_WORKER, /* coordinator */
    FL_LANE_COUNT,
};

/* Where bytes came from. */
enum fl_source {
    FL_SOURCE_NONE = 0,
    FL_SOURCE_DISK,
    FL_SOURCE_PAGE_CACHE,  /* a model file, more than half of the piece in the page cache */
    FL_SOURCE_WIRE,        /* fetched from the coordinator */
    FL_SOURCE_SHARD_CACHE, /* this node's own, from disk or page cache */
    FL_SOURCE_COUNT,
};

/* What came last before a span could begin. */
enum fl_cause {
    FL_CAUSE_NONE = 0, /* nothing was waited for */
    FL_CAUSE_WEIGHTS,  /* task: its piece was published at cause_ns */
    FL_CAUSE_INPUT,    /* task: its rows were there at cause_ns */
    FL_CAUSE_BUSY,     /* task: the thread ended another task at cause_ns */
    FL_CAUSE_CREDIT,   /* send: the receiver had no room until cause_ns */
    FL_CAUSE_LINK,     /* send: the link was not there until cause_ns */
    FL_CAUSE_KV,       /* queue: no KV cache was free */
    FL_CAUSE_COUNT,
};

#define FL_SPAN_NO_PIECE UINT32_MAX

struct fl_span {
    uint64_t start_ns;
    uint64_t end_ns;     /* start_ns or later */
    uint64_t busy_ns;    /* of it, in the phase itself; at most end_ns - start_ns */
    uint64_t plan_id;    /* 0: none */
    uint64_t request_id; /* 0: none, or several: then JOIN spans of the same run tell */
    uint64_t run;        /* of a stage, counted from 1; 0: none */
    uint64_t bytes;
    uint64_t cause_ns; /* 0: not known */
    uint32_t piece;    /* index into the stage's manifest; FL_SPAN_NO_PIECE */
    uint32_t position; /* of the first row */
    uint32_t rows;
    enum fl_phase phase;
    enum fl_lane lane;
    enum fl_source source;
    enum fl_cause cause;
};

/* "prefill"; "unknown" for a number that is none. */
const char *fl_phase_name(enum fl_phase phase);
const char *fl_lane_name(enum fl_lane lane);
const char *fl_source_name(enum fl_source source);
const char *fl_cause_name(enum fl_cause cause);

#ifdef __cplusplus
}
#endif
#endif
