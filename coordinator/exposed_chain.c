#include "coordinator/exposed_chain.h"

#include <stdlib.h>
#include <string.h>

#include "proto/base/status.h"

/* Spans looked at before the walk gives up: honest traces take a fraction of it, and hostile ones
 * cost milliseconds. */
enum { FUEL = 1 << 20, OWN_RUN_MAX = 8 };

/* Two readings of one clock around one event differ by less. */
#define NEAR_NS UINT64_C(20000)

enum { SEGMENT_MAX = FL_TIMELINE_SEGMENT_MAX, SEGMENT_KEEP = SEGMENT_MAX * 3 / 4 };

/* Where the walk stands: what is about to be explained. */
enum step_kind {
    STEP_SENT,     /* `row` left the stage */
    STEP_RUN,      /* `row` was computed on the stage */
    STEP_TASK,     /* the compute span `index` */
    STEP_JOIN,     /* the JOIN `index` */
    STEP_LOADED,   /* `piece` was published */
    STEP_LOADING,  /* what the loader did before */
    STEP_OPENED,   /* the stage was opened */
    STEP_PLANNED,  /* PLAN arrived at the stage */
    STEP_ADMITTED, /* ADMIT did */
    STEP_OWN,      /* the coordinator's spans from `index` down */
    STEP_LOST,     /* the stage does not say how it came to `row` */
    STEP_END,
};

struct step {
    enum step_kind kind;
    uint32_t stage;
    uint32_t index;
    uint32_t row;
    uint32_t piece;
};

struct walk {
    const struct exposed_chain_config *config;
    struct exposed_segment *segments;
    uint32_t count;
    uint64_t now;
    uint32_t fuel;
    uint32_t compute[FL_STAGE_COUNT_MAX]; /* compute spans from here on were walked, */
    uint32_t loader[FL_STAGE_COUNT_MAX];  /* and the loader's */
};

/* Segments ----------------------------------------------------------------------------------- */

/* Melts short segments into their later neighbours until there is room; never two in a row, so that
 * a chain of like segments stays one. */
static void thin(struct walk *walk)
{
    for (uint64_t least = 1000; walk->count > SEGMENT_KEEP; least *= 2) {
        uint32_t excess = walk->count - SEGMENT_KEEP;
        uint32_t kept = 1;
        bool melted = false;
        for (uint32_t i = 1; i < walk->count; i++) {
            const struct exposed_segment *segment = &walk->segments[i];
            melted = !melted && excess > 0 && segment->end_ns - segment->start_ns < least;
            if (melted) {
                walk->segments[kept - 1].start_ns = segment->start_ns;
                excess--;
            } else {
                walk->segments[kept++] = *segment;
            }
        }
        walk->count = kept;
    }
}

/* Explains the time from `start` to now. */
static void emit(struct walk *walk, enum fl_phase phase, uint32_t stage, enum fl_cause cause,
                 uint64_t start, uint64_t bytes)
{
    start = start > walk->config->begin_ns ? start : walk->config->begin_ns;
    if (start >= walk->now) {
        return;
    }
    struct exposed_segment *last = &walk->segments[walk->count > 0 ? walk->count - 1 : 0];
    if (walk->count > 0 && last->phase == phase && last->stage == stage && last->cause == cause) {
        last->start_ns = start;
        last->bytes += bytes;
    } else {
        if (walk->count == SEGMENT_MAX) {
            thin(walk);
        }
        walk->segments[walk->count++] = (struct exposed_segment){.start_ns = start,
                                                                 .end_ns = walk->now,
                                                                 .bytes = bytes,
                                                                 .stage = stage,
                                                                 .phase = phase,
                                                                 .cause = cause};
    }
    walk->now = start;
}

/* Nobody says what this thread did from `start` to now; where spans are missing, it may have been
 * anything.  A moment on the way from one task to the next belongs to the next. */
static void emit_gap(struct walk *walk, uint32_t stage, uint64_t start)
{
    struct exposed_segment *last = &walk->segments[walk->count > 0 ? walk->count - 1 : 0];
    if (walk->count > 0 && last->stage == stage && start < walk->now &&
        walk->now - start < NEAR_NS && start >= walk->config->begin_ns) {
        last->start_ns = walk->now = start;
        return;
    }
    const bool whole = stage == EXPOSED_CHAIN_COORDINATOR || walk->config->stages[stage].whole;
    emit(walk, whole ? FL_PHASE_WAKE : FL_PHASE_UNKNOWN, stage, FL_CAUSE_NONE, start, 0);
}

static uint64_t part(uint64_t whole, uint64_t numerator, uint64_t denominator)
{
    if (numerator >= denominator) {
        return whole;
    }
    const uint64_t share = (uint64_t)((double)whole * ((double)numerator / (double)denominator));
    return share < whole ? share : whole;
}

/* Bytes of a span, as far as it lies before now and after t0. */
static uint64_t bytes_within(const struct walk *walk, const struct fl_span *span)
{
    const uint64_t begin_ns = walk->config->begin_ns;
    const uint64_t start = span->start_ns > begin_ns ? span->start_ns : begin_ns;
    const uint64_t end = span->end_ns < walk->now ? span->end_ns : walk->now;
    return part(span->bytes, end > start ? end - start : 0, span->end_ns - span->start_ns);
}

static void emit_span(struct walk *walk, const struct fl_span *span, uint32_t stage)
{
    emit_gap(walk, stage, span->end_ns);
    const enum fl_cause cause = span->phase == FL_PHASE_QUEUE ? span->cause : FL_CAUSE_NONE;
    emit(walk, span->phase, stage, cause, span->start_ns, bytes_within(walk, span));
}

/* Finding spans ------------------------------------------------------------------------------ */

/* Of spans that end together: in the order in which a run goes. */
static unsigned rank(enum fl_phase phase)
{
    return phase == FL_PHASE_JOIN    ? FL_PHASE_EMBED
           : phase == FL_PHASE_EMBED ? FL_PHASE_JOIN
                                     : phase;
}

static int order(uint64_t left, uint64_t right)
{
    return (left > right) - (left < right);
}

static int by_end(const void *a, const void *b)
{
    const struct fl_span *left = a;
    const struct fl_span *right = b;
    int result = order(left->end_ns, right->end_ns);
    result = result != 0 ? result : order(left->start_ns, right->start_ns);
    result = result != 0 ? result : order(left->run, right->run);
    result = result != 0 ? result : order(rank(left->phase), rank(right->phase));
    result = result != 0 ? result : order(left->piece, right->piece);
    return result != 0 ? result : order(left->position, right->position);
}

void exposed_chain_sort(struct fl_span *spans, uint32_t count)
{
    if (count > 1) {
        qsort(spans, count, sizeof(*spans), by_end);
    }
}

/* Steps *index down to the span before it; false: there is none, or no fuel to look. */
static bool down(struct walk *walk, uint32_t *index)
{
    if (*index == 0 || walk->fuel == 0) {
        return false;
    }
    walk->fuel--;
    --*index;
    return true;
}

static bool is_task(const struct fl_span *span)
{
    return span->lane == FL_LANE_COMPUTE &&
           (span->phase == FL_PHASE_EMBED || span->phase == FL_PHASE_PREFILL ||
            span->phase == FL_PHASE_HEAD || span->phase == FL_PHASE_SAMPLE);
}

static bool is_opening(const struct fl_span *span)
{
    return span->lane == FL_LANE_COMPUTE &&
           (span->phase == FL_PHASE_MEMORY || span->phase == FL_PHASE_KV);
}

static bool is_loading(const struct fl_span *span)
{
    return span->lane == FL_LANE_LOADER &&
           (span->phase == FL_PHASE_READ || span->phase == FL_PHASE_VERIFY ||
            span->phase == FL_PHASE_REPACK || span->phase == FL_PHASE_COPY);
}

static bool covers(const struct fl_span *span, uint32_t row)
{
    return row >= span->position && row - span->position < span->rows;
}

/* A JOIN of the request in `run`, below `from`. */
static bool find_join_of_run(struct walk *walk, uint32_t stage, uint64_t run, uint32_t from,
                             uint32_t *out)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    bool met = false;
    for (uint32_t i = from; down(walk, &i);) {
        const bool joins = spans[i].phase == FL_PHASE_JOIN && spans[i].run == run;
        if (joins && spans[i].request_id == walk->config->request_id) {
            *out = i;
            return true;
        }
        /* The requests of a run join it together. */
        if (met && !joins && spans[i].lane == FL_LANE_COMPUTE) {
            return false;
        }
        met = met || joins;
    }
    return false;
}

static bool find_join_of_row(struct walk *walk, uint32_t stage, uint32_t row, uint32_t *out)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    for (uint32_t i = walk->compute[stage]; down(walk, &i);) {
        if (spans[i].phase == FL_PHASE_JOIN && spans[i].request_id == walk->config->request_id &&
            covers(&spans[i], row)) {
            *out = i;
            return true;
        }
    }
    return false;
}

/* The last task of a run that was not walked yet. */
static bool find_task(struct walk *walk, uint32_t stage, uint64_t run, uint32_t *out)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    for (uint32_t i = walk->compute[stage]; down(walk, &i);) {
        if (spans[i].run == run && is_task(&spans[i])) {
            *out = i;
            return true;
        }
        if (spans[i].run == run && spans[i].phase == FL_PHASE_JOIN) {
            return false; /* it was formed here */
        }
    }
    return false;
}

static bool is_own(struct walk *walk, uint32_t stage, uint32_t index)
{
    const struct fl_span *span = &walk->config->stages[stage].spans[index];
    uint32_t join = 0;
    if (is_opening(span) || span->request_id == walk->config->request_id) {
        return true;
    }
    return span->request_id == 0 && is_task(span) &&
           find_join_of_run(walk, stage, span->run, index, &join);
}

/* A wire span of the request that holds `row`; the last stage sends one thing, its first token. */
static bool find_wire(struct walk *walk, uint32_t stage, enum fl_phase phase, uint32_t row,
                      uint32_t *out)
{
    const struct exposed_chain_config *config = walk->config;
    const struct fl_span *spans = config->stages[stage].spans;
    const bool token = phase == FL_PHASE_SEND && stage == config->stage_count - 1;
    bool found = false;
    for (uint32_t i = config->stages[stage].span_count; down(walk, &i);) {
        if (spans[i].lane != FL_LANE_WIRE || spans[i].phase != phase ||
            spans[i].request_id != config->request_id || (!token && !covers(&spans[i], row))) {
            continue;
        }
        *out = i;
        found = true;
        if (spans[i].end_ns <= walk->now) {
            return true;
        }
    }
    return found;
}

/* RECEIVE of PLAN (request_id 0) or of ADMIT. */
static bool find_order(struct walk *walk, uint32_t stage, uint64_t request_id, uint32_t *out)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    for (uint32_t i = walk->config->stages[stage].span_count; down(walk, &i);) {
        if (spans[i].phase == FL_PHASE_RECEIVE && spans[i].request_id == request_id &&
            spans[i].rows == 0) {
            *out = i;
            return true;
        }
    }
    return false;
}

/* The coordinator's SEND of it. */
static bool find_own_send(struct walk *walk, uint32_t stage, uint64_t request_id, uint32_t *out)
{
    const struct fl_span *own = walk->config->own;
    for (uint32_t i = walk->config->own_count; down(walk, &i);) {
        if (own[i].phase == FL_PHASE_SEND && own[i].position == stage &&
            own[i].request_id == request_id) {
            *out = i;
            return true;
        }
    }
    return false;
}

/* The last the loader finished by now; of spans walked already, none. */
static bool find_loading(struct walk *walk, uint32_t stage, uint32_t *out)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    for (uint32_t i = walk->loader[stage]; down(walk, &i);) {
        if (is_loading(&spans[i]) && spans[i].end_ns <= walk->now) {
            *out = i;
            return true;
        }
    }
    return false;
}

/* When a piece came in: the last time by now, or the first after. */
static bool find_piece(struct walk *walk, uint32_t stage, uint32_t piece, uint32_t *out)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    bool found = false;
    for (uint32_t i = walk->loader[stage]; down(walk, &i);) {
        if (is_loading(&spans[i]) && spans[i].piece == piece) {
            *out = i;
            found = true;
            if (spans[i].end_ns <= walk->now) {
                return true;
            }
        }
    }
    return found;
}

/* Steps: each explains some time, and says what to explain next ----------------------------------- */

static struct step step_to(enum step_kind kind, uint32_t stage, uint32_t row)
{
    return (struct step){.kind = kind, .stage = stage, .row = row};
}

/* A message on its way, back to when the coordinator had sent it. */
static struct step from_coordinator(struct walk *walk, struct step at, uint64_t request_id,
                                    bool received)
{
    uint32_t sent = 0;
    if (!find_own_send(walk, at.stage, request_id, &sent)) {
        return step_to(STEP_LOST, at.stage, at.row);
    }
    emit(walk, received ? FL_PHASE_SEND : FL_PHASE_UNKNOWN,
         received ? EXPOSED_CHAIN_COORDINATOR : at.stage, FL_CAUSE_NONE,
         walk->config->own[sent].end_ns, 0);
    return (struct step){.kind = STEP_OWN, .index = sent + 1};
}

static struct step step_planned(struct walk *walk, struct step at)
{
    uint32_t index = 0;
    const bool received = find_order(walk, at.stage, 0, &index);
    if (received) {
        emit_gap(walk, at.stage, walk->config->stages[at.stage].spans[index].start_ns);
    }
    return from_coordinator(walk, at, 0, received);
}

static struct step step_admitted(struct walk *walk, struct step at)
{
    return from_coordinator(walk, at, walk->config->request_id, true);
}

static struct step step_own(struct walk *walk, struct step at)
{
    const struct fl_span *own = walk->config->own;
    for (uint32_t i = at.index; down(walk, &i);) {
        if (own[i].phase != FL_PHASE_RETURN) {
            emit_span(walk, &own[i], EXPOSED_CHAIN_COORDINATOR);
        }
    }
    /* Of two requests that waited for one model, the first is told first and has it planned. */
    for (uint32_t i = walk->config->own_count; down(walk, &i);) {
        if (own[i].phase == FL_PHASE_OPEN) {
            emit(walk, FL_PHASE_OPEN, EXPOSED_CHAIN_COORDINATOR, FL_CAUSE_NONE, own[i].start_ns, 0);
        }
    }
    emit_gap(walk, EXPOSED_CHAIN_COORDINATOR, walk->config->begin_ns);
    return (struct step){.kind = STEP_END};
}

/* The nearest thing that is known: rows that came from a stage before, or what the coordinator did
 * last. */
static struct step step_lost(struct walk *walk, struct step at)
{
    uint32_t index = 0;
    for (uint32_t stage = at.stage; stage-- > 0;) {
        if (find_wire(walk, stage, FL_PHASE_SEND, at.row, &index)) {
            emit(walk, FL_PHASE_UNKNOWN, at.stage, FL_CAUSE_NONE,
                 walk->config->stages[stage].spans[index].end_ns, 0);
            return step_to(STEP_SENT, stage, at.row);
        }
    }
    for (uint32_t i = walk->config->own_count; down(walk, &i);) {
        const struct fl_span *span = &walk->config->own[i];
        if (span->end_ns <= walk->now && span->phase != FL_PHASE_RETURN) {
            emit(walk, FL_PHASE_UNKNOWN, at.stage, FL_CAUSE_NONE, span->end_ns, 0);
            return (struct step){.kind = STEP_OWN, .index = i + 1};
        }
    }
    return (struct step){.kind = STEP_END};
}

static struct step step_link(struct walk *walk, struct step at, const struct fl_span *sent)
{
    const struct fl_span *spans = walk->config->stages[at.stage].spans;
    emit(walk, FL_PHASE_SEND, at.stage, FL_CAUSE_NONE, sent->cause_ns, sent->bytes);
    for (uint32_t i = walk->config->stages[at.stage].span_count; down(walk, &i);) {
        if (spans[i].phase == FL_PHASE_LINK && spans[i].start_ns <= walk->now) {
            emit(walk, FL_PHASE_LINK, at.stage, FL_CAUSE_NONE, spans[i].start_ns, 0);
            return step_to(STEP_PLANNED, at.stage, at.row);
        }
    }
    emit(walk, FL_PHASE_LINK, at.stage, FL_CAUSE_NONE, sent->start_ns, 0);
    return step_to(STEP_RUN, at.stage, at.row);
}

/* The receiver makes room when rows leave its inbox for a run: it was the receiver that was waited
 * for. */
static struct step step_credit(struct walk *walk, struct step at, const struct fl_span *sent)
{
    const struct exposed_chain_config *config = walk->config;
    const uint32_t next = at.stage + 1;
    emit(walk, FL_PHASE_SEND, at.stage, FL_CAUSE_NONE, sent->cause_ns, sent->bytes);
    if (next < config->stage_count) {
        const struct fl_span *spans = config->stages[next].spans;
        const uint64_t slack = config->stages[at.stage].error_ns + config->stages[next].error_ns;
        for (uint32_t i = walk->compute[next]; down(walk, &i);) {
            if (spans[i].phase != FL_PHASE_JOIN || spans[i].end_ns > walk->now + slack) {
                continue;
            }
            if (spans[i].request_id != config->request_id ||
                spans[i].end_ns + slack < sent->start_ns) {
                break;
            }
            emit(walk, FL_PHASE_SEND, at.stage, FL_CAUSE_CREDIT, spans[i].end_ns, 0);
            return (struct step){.kind = STEP_JOIN, .stage = next, .index = i};
        }
    }
    emit(walk, FL_PHASE_SEND, at.stage, FL_CAUSE_CREDIT, sent->start_ns, 0);
    return step_to(STEP_RUN, at.stage, at.row);
}

static struct step step_sent(struct walk *walk, struct step at)
{
    uint32_t index = 0;
    if (!find_wire(walk, at.stage, FL_PHASE_SEND, at.row, &index)) {
        return step_to(STEP_LOST, at.stage, at.row);
    }
    const struct fl_span *span = &walk->config->stages[at.stage].spans[index];
    emit(walk, FL_PHASE_SEND, at.stage, FL_CAUSE_NONE, span->end_ns, 0);
    if (span->cause == FL_CAUSE_LINK && span->cause_ns > span->start_ns) {
        return step_link(walk, at, span);
    }
    if (span->cause == FL_CAUSE_CREDIT && span->cause_ns > span->start_ns) {
        return step_credit(walk, at, span);
    }
    emit(walk, FL_PHASE_SEND, at.stage, FL_CAUSE_NONE, span->start_ns, span->bytes);
    return step_to(STEP_RUN, at.stage, at.row);
}

static struct step step_run(struct walk *walk, struct step at)
{
    uint32_t join = 0;
    uint32_t task = 0;
    if (!find_join_of_row(walk, at.stage, at.row, &join)) {
        return step_to(STEP_LOST, at.stage, at.row);
    }
    const uint64_t run = walk->config->stages[at.stage].spans[join].run;
    if (!find_task(walk, at.stage, run, &task)) {
        return step_to(STEP_LOST, at.stage, at.row);
    }
    return (struct step){.kind = STEP_TASK, .stage = at.stage, .index = task, .row = at.row};
}

/* What a task needed beside its thread, and when each was there. */
struct needs {
    bool has_task; /* of its run, before it */
    uint32_t task;
    bool has_join; /* it was the run's first */
    uint32_t join;
    uint64_t input_ns;
    bool has_piece;
    uint64_t weights_ns;
};

static struct needs find_needs(struct walk *walk, uint32_t stage, const struct fl_span *span)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    struct needs needs = {0};
    uint32_t piece = 0;
    needs.has_task = find_task(walk, stage, span->run, &needs.task);
    needs.has_join = !needs.has_task &&
                     find_join_of_run(walk, stage, span->run, walk->compute[stage], &needs.join);
    if (needs.has_task) {
        needs.input_ns = spans[needs.task].end_ns;
    } else if (needs.has_join) {
        needs.input_ns =
            spans[needs.join].cause_ns != 0 ? spans[needs.join].cause_ns : spans[needs.join].end_ns;
    }
    needs.has_piece = span->phase != FL_PHASE_EMBED && span->piece != FL_SPAN_NO_PIECE &&
                      span->cause != FL_CAUSE_INPUT && find_piece(walk, stage, span->piece, &piece);
    needs.weights_ns = needs.has_piece ? spans[piece].end_ns : 0;
    return needs;
}

static struct step input_step(struct step at, const struct needs *needs)
{
    at.kind = needs->has_task ? STEP_TASK : needs->has_join ? STEP_JOIN : STEP_LOST;
    at.index = needs->has_task ? needs->task : needs->join;
    return at;
}

/* The thread did something else: of this request, or of others, which made it wait. */
static struct step step_busy(struct walk *walk, struct step at, const struct fl_span *span)
{
    const struct fl_span *spans = walk->config->stages[at.stage].spans;
    /* Another plan's work is recorded elsewhere. */
    bool others = walk->config->stages[at.stage].whole;
    for (uint32_t i = walk->compute[at.stage]; down(walk, &i);) {
        if (spans[i].end_ns + NEAR_NS < walk->now) {
            break;
        }
        others = others || is_task(&spans[i]) || spans[i].phase == FL_PHASE_DECODE;
        if ((is_task(&spans[i]) || is_opening(&spans[i])) && is_own(walk, at.stage, i)) {
            at.kind = is_task(&spans[i]) ? STEP_TASK : STEP_OPENED;
            at.index = i;
            return at;
        }
    }
    const struct needs needs = find_needs(walk, at.stage, span);
    if (!needs.has_task && !needs.has_join) {
        return step_to(STEP_LOST, at.stage, at.row);
    }
    const bool weights = needs.has_piece && needs.weights_ns > needs.input_ns;
    emit(walk, others ? FL_PHASE_QUEUE : FL_PHASE_UNKNOWN, at.stage,
         others ? FL_CAUSE_BUSY : FL_CAUSE_NONE, weights ? needs.weights_ns : needs.input_ns, 0);
    at.kind = STEP_LOADED;
    at.piece = span->piece;
    return weights ? at : input_step(at, &needs);
}

/* Rows of the embedding: the loader read them for this run before the table was there, or the run
 * waited for the table, or without overlap for everything. */
static struct step step_embedding(struct walk *walk, struct step at, const struct fl_span *task)
{
    const struct fl_span *spans = walk->config->stages[at.stage].spans;
    for (uint32_t i = walk->config->stages[at.stage].span_count; down(walk, &i);) {
        if (spans[i].lane != FL_LANE_LOADER || spans[i].end_ns > walk->now + NEAR_NS) {
            continue;
        }
        if (is_loading(&spans[i])) {
            at.kind = STEP_LOADED;
            at.piece = task->piece;
            return at;
        }
        if (spans[i].phase == FL_PHASE_EMBED) {
            emit_span(walk, &spans[i], at.stage);
            break;
        }
    }
    const struct needs needs = find_needs(walk, at.stage, task);
    return input_step(at, &needs);
}

/* The loader's reading of the rows that were there at `ready_ns`. */
static bool find_rows(struct walk *walk, uint32_t stage, uint64_t ready_ns, uint32_t *out)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    for (uint32_t i = walk->config->stages[stage].span_count; down(walk, &i);) {
        if (spans[i].end_ns < ready_ns) {
            return false;
        }
        if (spans[i].end_ns == ready_ns && spans[i].lane == FL_LANE_LOADER &&
            spans[i].phase == FL_PHASE_EMBED) {
            *out = i;
            return true;
        }
    }
    return false;
}

/* Whether a task of the request's own runs waited for these rows. */
static bool is_own_rows(struct walk *walk, uint32_t stage, uint64_t ready_ns)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    for (uint32_t i = walk->config->stages[stage].span_count; down(walk, &i);) {
        if (is_task(&spans[i]) && spans[i].phase == FL_PHASE_EMBED &&
            spans[i].cause_ns == ready_ns) {
            return true;
        }
    }
    return false;
}

/* The loader takes up rows between two chunks of a piece, run after run: from when it did, `rows`,
 * back to when the run was formed. */
static void emit_loader_busy(struct walk *walk, uint32_t stage, uint32_t rows, uint64_t formed_ns)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    const uint64_t taken_ns = spans[rows].start_ns;
    bool loading = false;
    bool before = false;
    bool others = false;
    for (uint32_t i = walk->config->stages[stage].span_count;
         down(walk, &i) && spans[i].end_ns > formed_ns;) {
        loading = loading || (is_loading(&spans[i]) && spans[i].start_ns < taken_ns);
        if (spans[i].lane == FL_LANE_LOADER && spans[i].phase == FL_PHASE_EMBED &&
            spans[i].end_ns <= taken_ns) {
            before = true;
            others = others || !is_own_rows(walk, stage, spans[i].end_ns);
        }
    }
    if (others) {
        emit(walk, FL_PHASE_QUEUE, stage, FL_CAUSE_BUSY, formed_ns, 0);
    } else if (before || loading) {
        emit(walk, before ? FL_PHASE_EMBED : FL_PHASE_READ, stage, FL_CAUSE_NONE, formed_ns, 0);
    }
}

static struct step step_rows(struct walk *walk, struct step at, const struct fl_span *task,
                             uint32_t rows)
{
    const struct fl_span *spans = walk->config->stages[at.stage].spans;
    emit_span(walk, &spans[rows], at.stage);
    const struct needs needs = find_needs(walk, at.stage, task);
    if (needs.has_join) {
        emit_loader_busy(walk, at.stage, rows, spans[needs.join].end_ns);
    }
    return input_step(at, &needs);
}

static struct step step_task(struct walk *walk, struct step at)
{
    const struct fl_span *span = &walk->config->stages[at.stage].spans[at.index];
    walk->compute[at.stage] = at.index;
    emit_span(walk, span, at.stage);
    enum fl_cause cause = span->cause_ns != 0 ? span->cause : FL_CAUSE_NONE;
    if (cause != FL_CAUSE_NONE) {
        emit_gap(walk, at.stage, span->cause_ns);
    }
    if (cause == FL_CAUSE_BUSY) {
        return step_busy(walk, at, span);
    }
    uint32_t rows = 0;
    if (cause == FL_CAUSE_INPUT && span->phase == FL_PHASE_EMBED &&
        find_rows(walk, at.stage, span->cause_ns, &rows)) {
        return step_rows(walk, at, span, rows);
    }
    if (cause == FL_CAUSE_WEIGHTS && span->phase == FL_PHASE_EMBED) {
        return step_embedding(walk, at, span);
    }
    if (cause == FL_CAUSE_WEIGHTS) {
        at.kind = STEP_LOADED;
        at.piece = span->piece;
        return at;
    }
    const struct needs needs = find_needs(walk, at.stage, span);
    if (cause != FL_CAUSE_INPUT && needs.input_ns > 0 && needs.weights_ns > needs.input_ns) {
        at.kind = STEP_LOADED;
        at.piece = span->piece;
        return at;
    }
    return input_step(at, &needs);
}

/* What a run's row came in with: RECEIVE of the row or, when that was later, of its ADMIT. */
enum arrival { ARRIVAL_LOST, ARRIVAL_ROWS, ARRIVAL_ADMIT };

static enum arrival find_arrival(struct walk *walk, uint32_t stage, uint32_t row, uint64_t *out_ns)
{
    const struct fl_span *spans = walk->config->stages[stage].spans;
    uint32_t admit = 0;
    uint32_t rows = 0;
    const bool admitted = find_order(walk, stage, walk->config->request_id, &admit);
    const bool arrived = stage > 0 && find_wire(walk, stage, FL_PHASE_RECEIVE, row, &rows);
    if (arrived && (!admitted || spans[rows].end_ns >= spans[admit].end_ns)) {
        *out_ns = spans[rows].end_ns;
        return ARRIVAL_ROWS;
    }
    if (!admitted || (stage > 0 && !arrived)) {
        return ARRIVAL_LOST;
    }
    *out_ns = spans[admit].end_ns;
    return ARRIVAL_ADMIT;
}

/* Tasks of other requests are not told, but that there was one after `since_ns`: then the run had
 * to wait for theirs. */
static void emit_others(struct walk *walk, uint32_t stage, const struct fl_span *join,
                        uint64_t since_ns)
{
    if (join->cause == FL_CAUSE_BUSY && join->start_ns > since_ns &&
        walk->config->stages[stage].whole) {
        emit_gap(walk, stage, join->start_ns);
        emit(walk, FL_PHASE_QUEUE, stage, FL_CAUSE_BUSY, since_ns, 0);
    }
}

/* A run was formed: when its rows had come, or when the thread had time for them. */
static struct step step_join(struct walk *walk, struct step at)
{
    const struct fl_span *spans = walk->config->stages[at.stage].spans;
    const struct fl_span *join = &spans[at.index];
    const uint32_t row = join->position + (join->rows > 0 ? join->rows - 1 : 0);
    uint64_t rows_ns = join->cause_ns != 0 ? join->cause_ns : join->end_ns;
    const enum arrival arrival = find_arrival(walk, at.stage, row, &rows_ns);
    emit_gap(walk, at.stage, join->end_ns);
    walk->compute[at.stage] = at.index;
    for (uint32_t i = at.index; down(walk, &i) && spans[i].end_ns > rows_ns;) {
        const bool opening = is_opening(&spans[i]);
        if ((opening || is_task(&spans[i])) && is_own(walk, at.stage, i)) {
            emit_others(walk, at.stage, join, spans[i].end_ns);
            at.kind = opening ? STEP_OPENED : STEP_TASK;
            at.index = i;
            return at;
        }
        if (is_task(&spans[i]) || spans[i].phase == FL_PHASE_DECODE) {
            emit(walk, FL_PHASE_QUEUE, at.stage, FL_CAUSE_BUSY, rows_ns, 0);
            break;
        }
    }
    emit_others(walk, at.stage, join, rows_ns);
    emit_gap(walk, at.stage, rows_ns);
    switch (arrival) {
    case ARRIVAL_ROWS: return step_to(STEP_SENT, at.stage - 1, row);
    case ARRIVAL_ADMIT: return step_to(STEP_ADMITTED, at.stage, row);
    case ARRIVAL_LOST: break;
    }
    return step_to(STEP_LOST, at.stage, row);
}

/* One piece: its interval is shared by the phases it went through, each as long as it was busy;
 * the rest was waiting for the medium. */
static void emit_piece(struct walk *walk, uint32_t stage, uint32_t index)
{
    static const enum fl_phase order[] = {FL_PHASE_COPY, FL_PHASE_REPACK, FL_PHASE_VERIFY,
                                          FL_PHASE_EMBED, FL_PHASE_READ};
    const struct fl_span *spans = walk->config->stages[stage].spans;
    const struct fl_span piece = spans[index];
    uint64_t busy[FL_PHASE_COUNT] = {0};
    uint64_t bytes[FL_PHASE_COUNT] = {0};
    emit_gap(walk, stage, piece.end_ns);
    walk->loader[stage] = index;
    for (uint32_t i = index + 1; down(walk, &i) && spans[i].end_ns >= piece.start_ns;) {
        const bool same = is_loading(&spans[i]) && spans[i].piece == piece.piece &&
                          spans[i].start_ns == piece.start_ns && spans[i].end_ns == piece.end_ns;
        /* The loader reads rows of the embedding between a piece's chunks. */
        const bool within = spans[i].lane == FL_LANE_LOADER && spans[i].phase == FL_PHASE_EMBED &&
                            spans[i].start_ns >= piece.start_ns;
        if (same || within) {
            busy[spans[i].phase] += spans[i].busy_ns;
            bytes[spans[i].phase] += bytes_within(walk, &spans[i]);
            walk->loader[stage] = same ? i : walk->loader[stage];
        }
    }
    const uint64_t start =
        piece.start_ns > walk->config->begin_ns ? piece.start_ns : walk->config->begin_ns;
    const uint64_t whole = piece.end_ns - piece.start_ns;
    const uint64_t seen = walk->now > start ? walk->now - start : 0;
    for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++) {
        const enum fl_phase phase = order[i];
        const uint64_t share = part(busy[phase], seen, whole);
        const uint64_t left = walk->now > start ? walk->now - start : 0;
        const bool all = phase == FL_PHASE_READ || share >= left;
        emit(walk, phase, stage, FL_CAUSE_NONE, all ? start : walk->now - share, bytes[phase]);
    }
}

static struct step step_loading(struct walk *walk, struct step at)
{
    uint32_t index = 0;
    if (!find_loading(walk, at.stage, &index)) {
        at.kind = STEP_OPENED;
        return at;
    }
    emit_piece(walk, at.stage, index);
    return at;
}

static struct step step_loaded(struct walk *walk, struct step at)
{
    const struct fl_span *spans = walk->config->stages[at.stage].spans;
    uint32_t piece = 0;
    uint32_t last = 0;
    const bool has_piece = find_piece(walk, at.stage, at.piece, &piece);
    const bool has_last = find_loading(walk, at.stage, &last);
    at.kind = STEP_LOADING;
    if (has_piece && (!has_last || spans[piece].end_ns >= spans[last].end_ns)) {
        emit_piece(walk, at.stage, piece);
    } else if (has_last) {
        emit_piece(walk, at.stage, last); /* without overlap a task waits for all of them */
    } else {
        at.kind = STEP_OPENED;
    }
    return at;
}

static struct step step_opened(struct walk *walk, struct step at)
{
    const struct exposed_stage *stage = &walk->config->stages[at.stage];
    for (uint32_t i = stage->span_count; down(walk, &i);) {
        if (is_opening(&stage->spans[i]) && stage->spans[i].end_ns <= walk->now) {
            emit_span(walk, &stage->spans[i], at.stage);
        }
    }
    at.kind = STEP_PLANNED;
    return at;
}

static struct step take_step(struct walk *walk, struct step at)
{
    switch (at.kind) {
    case STEP_SENT: return step_sent(walk, at);
    case STEP_RUN: return step_run(walk, at);
    case STEP_TASK: return step_task(walk, at);
    case STEP_JOIN: return step_join(walk, at);
    case STEP_LOADED: return step_loaded(walk, at);
    case STEP_LOADING: return step_loading(walk, at);
    case STEP_OPENED: return step_opened(walk, at);
    case STEP_PLANNED: return step_planned(walk, at);
    case STEP_ADMITTED: return step_admitted(walk, at);
    case STEP_OWN: return step_own(walk, at);
    case STEP_LOST: return step_lost(walk, at);
    case STEP_END: break;
    }
    return (struct step){.kind = STEP_END};
}

/* Our own invariant, whatever anybody sent. */
static void check(const struct exposed_chain_config *config, const struct exposed_segment *out,
                  uint32_t count)
{
    uint64_t at = config->begin_ns;
    for (uint32_t i = 0; i < count; i++) {
        FL_ASSERT(out[i].start_ns == at && out[i].end_ns > at);
        at = out[i].end_ns;
    }
    FL_ASSERT(at == config->end_ns);
}

uint32_t exposed_chain_find(const struct exposed_chain_config *config, struct exposed_segment *out)
{
    FL_ASSERT(out != NULL && config->begin_ns <= config->end_ns && config->stage_count >= 1 &&
              config->stage_count <= FL_STAGE_COUNT_MAX && config->prompt_count > 0);
    struct walk walk = {.config = config, .segments = out, .now = config->end_ns, .fuel = FUEL};
    exposed_chain_sort(config->own, config->own_count);
    for (uint32_t i = 0; i < config->stage_count; i++) {
        exposed_chain_sort(config->stages[i].spans, config->stages[i].span_count);
        walk.compute[i] = config->stages[i].span_count;
        walk.loader[i] = config->stages[i].span_count;
        while (walk.loader[i] > 0 && !is_loading(&config->stages[i].spans[walk.loader[i] - 1])) {
            walk.loader[i]--;
        }
    }
    const uint32_t last = config->stage_count - 1;
    emit(&walk, FL_PHASE_RETURN, EXPOSED_CHAIN_COORDINATOR, FL_CAUSE_NONE, config->token_ns, 0);
    struct step at = step_to(STEP_SENT, last, config->prompt_count - 1);
    /* Every step looks at a span or is followed by one that does, so the fuel ends the walk. */
    while (walk.now > config->begin_ns && walk.fuel > 0 && at.kind != STEP_END) {
        at = take_step(&walk, at);
    }
    emit(&walk, FL_PHASE_UNKNOWN, EXPOSED_CHAIN_COORDINATOR, FL_CAUSE_NONE, config->begin_ns, 0);
    for (uint32_t i = 0; i < walk.count / 2; i++) {
        const struct exposed_segment later = out[i];
        out[i] = out[walk.count - 1 - i];
        out[walk.count - 1 - i] = later;
    }
    check(config, out, walk.count);
    return walk.count;
}

/* Phases ------------------------------------------------------------------------------------- */

/* The request's runs under way; a stage has a few at once. */
struct own_runs {
    uint64_t runs[OWN_RUN_MAX];
    uint32_t next;
};

static bool has_run(const struct own_runs *own, uint64_t run)
{
    for (uint32_t i = 0; i < OWN_RUN_MAX; i++) {
        if (own->runs[i] == run) {
            return run != 0;
        }
    }
    return false;
}

static void add_busy(const struct exposed_chain_config *config, const struct fl_span *span,
                     struct exposed_phase *out)
{
    const uint64_t start = span->start_ns > config->begin_ns ? span->start_ns : config->begin_ns;
    const uint64_t end = span->end_ns < config->end_ns ? span->end_ns : config->end_ns;
    if (start > end || span->phase == FL_PHASE_JOIN || span->phase == FL_PHASE_RECEIVE) {
        return;
    }
    const uint64_t whole = span->end_ns - span->start_ns;
    const uint64_t busy = span->busy_ns < whole ? span->busy_ns : whole;
    const uint64_t within = part(busy, end - start, whole);
    out->hidden_ns += within < UINT64_MAX - out->hidden_ns ? within : UINT64_MAX - out->hidden_ns;
    out->bytes += part(span->bytes, end - start, whole);
}

static void add_stage(const struct exposed_chain_config *config, const struct exposed_stage *stage,
                      struct exposed_phase out[FL_PHASE_COUNT])
{
    struct own_runs own = {0};
    for (uint32_t i = 0; i < stage->span_count; i++) {
        const struct fl_span *span = &stage->spans[i];
        if (span->phase == FL_PHASE_JOIN && span->request_id == config->request_id) {
            own.runs[own.next++ % OWN_RUN_MAX] = span->run;
        }
        const bool task = span->lane == FL_LANE_COMPUTE && span->run != 0;
        const bool ours = span->request_id == config->request_id ||
                          (span->request_id == 0 && (!task || has_run(&own, span->run)));
        if (ours && (unsigned)span->phase < FL_PHASE_COUNT) {
            add_busy(config, span, &out[span->phase]);
        }
    }
}

void exposed_chain_phases(const struct exposed_chain_config *config,
                          const struct exposed_segment *segments, uint32_t count,
                          struct exposed_phase out[FL_PHASE_COUNT])
{
    memset(out, 0, FL_PHASE_COUNT * sizeof(*out));
    for (uint32_t i = 0; i < config->stage_count; i++) {
        add_stage(config, &config->stages[i], out);
    }
    for (uint32_t i = 0; i < config->own_count; i++) {
        if ((unsigned)config->own[i].phase < FL_PHASE_COUNT) {
            add_busy(config, &config->own[i], &out[config->own[i].phase]);
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        out[segments[i].phase].exposed_ns += segments[i].end_ns - segments[i].start_ns;
    }
    /* Exposed time is not hidden; waiting for a medium or a wire is exposed and not busy. */
    for (uint32_t i = 0; i < FL_PHASE_COUNT; i++) {
        const uint64_t busy = out[i].hidden_ns;
        out[i].hidden_ns = busy > out[i].exposed_ns ? busy - out[i].exposed_ns : 0;
    }
}
