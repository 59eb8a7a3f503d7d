#include "coordinator/exposed_chain.h"

#include "coordinator/exposed_search.h"
#include "coordinator/exposed_segments.h"
#include "proto/base/status.h"

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
    struct exposed_search search;
    struct exposed_segments chain;
};

/* Explains the time from `start` to now. */
static void emit(struct walk *walk, enum fl_phase phase, uint32_t stage, enum fl_cause cause,
                 uint64_t start, uint64_t bytes)
{
    exposed_segments_add(
        &walk->chain,
        (struct exposed_segment){
            .start_ns = start, .bytes = bytes, .stage = stage, .phase = phase, .cause = cause});
}

/* Steps: each explains some time, and says what to explain next -------------------------------- */

static struct step step_to(enum step_kind kind, uint32_t stage, uint32_t row)
{
    return (struct step){.kind = kind, .stage = stage, .row = row};
}

/* A message on its way, back to when the coordinator had sent it. */
static struct step from_coordinator(struct walk *walk, struct step at, uint64_t request_id,
                                    bool received)
{
    uint32_t sent = 0;
    if (!exposed_search_own_send(&walk->search, at.stage, request_id, &sent)) {
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
    const bool received = exposed_search_order(&walk->search, at.stage, 0, &index);
    if (received) {
        exposed_segments_add_gap(&walk->chain, at.stage,
                                 walk->config->stages[at.stage].spans[index].start_ns);
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
    for (uint32_t i = at.index; exposed_search_down(&walk->search, &i);) {
        if (own[i].phase != FL_PHASE_RETURN) {
            exposed_segments_add_span(&walk->chain, &own[i], EXPOSED_CHAIN_COORDINATOR);
        }
    }
    /* Of two requests that waited for one model, the first is told first and has it planned. */
    for (uint32_t i = walk->config->own_count; exposed_search_down(&walk->search, &i);) {
        if (own[i].phase == FL_PHASE_OPEN) {
            emit(walk, FL_PHASE_OPEN, EXPOSED_CHAIN_COORDINATOR, FL_CAUSE_NONE, own[i].start_ns, 0);
        }
    }
    exposed_segments_add_gap(&walk->chain, EXPOSED_CHAIN_COORDINATOR, walk->config->begin_ns);
    return (struct step){.kind = STEP_END};
}

/* The nearest thing that is known: rows that came from a stage before, or what the coordinator did
 * last. */
static struct step step_lost(struct walk *walk, struct step at)
{
    uint32_t index = 0;
    for (uint32_t stage = at.stage; stage-- > 0;) {
        if (exposed_search_send(&walk->search, stage, at.row, walk->chain.now_ns, &index)) {
            emit(walk, FL_PHASE_UNKNOWN, at.stage, FL_CAUSE_NONE,
                 walk->config->stages[stage].spans[index].end_ns, 0);
            return step_to(STEP_SENT, stage, at.row);
        }
    }
    for (uint32_t i = walk->config->own_count; exposed_search_down(&walk->search, &i);) {
        const struct fl_span *span = &walk->config->own[i];
        if (span->end_ns <= walk->chain.now_ns && span->phase != FL_PHASE_RETURN) {
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
    for (uint32_t i = walk->config->stages[at.stage].span_count;
         exposed_search_down(&walk->search, &i);) {
        if (spans[i].phase == FL_PHASE_LINK && spans[i].start_ns <= walk->chain.now_ns) {
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
        for (uint32_t i = walk->search.compute[next]; exposed_search_down(&walk->search, &i);) {
            if (spans[i].phase != FL_PHASE_JOIN || spans[i].end_ns > walk->chain.now_ns + slack) {
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
    if (!exposed_search_send(&walk->search, at.stage, at.row, walk->chain.now_ns, &index)) {
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
    if (!exposed_search_join_of_row(&walk->search, at.stage, at.row, &join)) {
        return step_to(STEP_LOST, at.stage, at.row);
    }
    const uint64_t run = walk->config->stages[at.stage].spans[join].run;
    if (!exposed_search_task(&walk->search, at.stage, run, &task)) {
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
    needs.has_task = exposed_search_task(&walk->search, stage, span->run, &needs.task);
    needs.has_join =
        !needs.has_task && exposed_search_join_of_run(&walk->search, stage, span->run,
                                                      walk->search.compute[stage], &needs.join);
    if (needs.has_task) {
        needs.input_ns = spans[needs.task].end_ns;
    } else if (needs.has_join) {
        needs.input_ns =
            spans[needs.join].cause_ns != 0 ? spans[needs.join].cause_ns : spans[needs.join].end_ns;
    }
    needs.has_piece =
        span->phase != FL_PHASE_EMBED && span->piece != FL_SPAN_NO_PIECE &&
        span->cause != FL_CAUSE_INPUT &&
        exposed_search_piece(&walk->search, stage, span->piece, walk->chain.now_ns, &piece);
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
    for (uint32_t i = walk->search.compute[at.stage]; exposed_search_down(&walk->search, &i);) {
        if (spans[i].end_ns + EXPOSED_NEAR_NS < walk->chain.now_ns) {
            break;
        }
        others = others || exposed_search_is_task(&spans[i]) || spans[i].phase == FL_PHASE_DECODE;
        if ((exposed_search_is_task(&spans[i]) || exposed_search_is_opening(&spans[i])) &&
            exposed_search_is_own(&walk->search, at.stage, i)) {
            at.kind = exposed_search_is_task(&spans[i]) ? STEP_TASK : STEP_OPENED;
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
    for (uint32_t i = walk->config->stages[at.stage].span_count;
         exposed_search_down(&walk->search, &i);) {
        if (spans[i].lane != FL_LANE_LOADER ||
            spans[i].end_ns > walk->chain.now_ns + EXPOSED_NEAR_NS) {
            continue;
        }
        if (exposed_search_is_loading(&spans[i])) {
            at.kind = STEP_LOADED;
            at.piece = task->piece;
            return at;
        }
        if (spans[i].phase == FL_PHASE_EMBED) {
            exposed_segments_add_span(&walk->chain, &spans[i], at.stage);
            break;
        }
    }
    const struct needs needs = find_needs(walk, at.stage, task);
    return input_step(at, &needs);
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
         exposed_search_down(&walk->search, &i) && spans[i].end_ns > formed_ns;) {
        loading = loading || (exposed_search_is_loading(&spans[i]) && spans[i].start_ns < taken_ns);
        if (spans[i].lane == FL_LANE_LOADER && spans[i].phase == FL_PHASE_EMBED &&
            spans[i].end_ns <= taken_ns) {
            before = true;
            others = others || !exposed_search_is_own_rows(&walk->search, stage, spans[i].end_ns);
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
    exposed_segments_add_span(&walk->chain, &spans[rows], at.stage);
    const struct needs needs = find_needs(walk, at.stage, task);
    if (needs.has_join) {
        emit_loader_busy(walk, at.stage, rows, spans[needs.join].end_ns);
    }
    return input_step(at, &needs);
}

static struct step step_task(struct walk *walk, struct step at)
{
    const struct fl_span *span = &walk->config->stages[at.stage].spans[at.index];
    walk->search.compute[at.stage] = at.index;
    exposed_segments_add_span(&walk->chain, span, at.stage);
    enum fl_cause cause = span->cause_ns != 0 ? span->cause : FL_CAUSE_NONE;
    if (cause != FL_CAUSE_NONE) {
        exposed_segments_add_gap(&walk->chain, at.stage, span->cause_ns);
    }
    if (cause == FL_CAUSE_BUSY) {
        return step_busy(walk, at, span);
    }
    uint32_t rows = 0;
    if (cause == FL_CAUSE_INPUT && span->phase == FL_PHASE_EMBED &&
        exposed_search_rows(&walk->search, at.stage, span->cause_ns, &rows)) {
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
    const bool admitted =
        exposed_search_order(&walk->search, stage, walk->config->request_id, &admit);
    const bool arrived =
        stage > 0 && exposed_search_receive(&walk->search, stage, row, walk->chain.now_ns, &rows);
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
        exposed_segments_add_gap(&walk->chain, stage, join->start_ns);
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
    exposed_segments_add_gap(&walk->chain, at.stage, join->end_ns);
    walk->search.compute[at.stage] = at.index;
    for (uint32_t i = at.index;
         exposed_search_down(&walk->search, &i) && spans[i].end_ns > rows_ns;) {
        const bool opening = exposed_search_is_opening(&spans[i]);
        if ((opening || exposed_search_is_task(&spans[i])) &&
            exposed_search_is_own(&walk->search, at.stage, i)) {
            emit_others(walk, at.stage, join, spans[i].end_ns);
            at.kind = opening ? STEP_OPENED : STEP_TASK;
            at.index = i;
            return at;
        }
        if (exposed_search_is_task(&spans[i]) || spans[i].phase == FL_PHASE_DECODE) {
            emit(walk, FL_PHASE_QUEUE, at.stage, FL_CAUSE_BUSY, rows_ns, 0);
            break;
        }
    }
    emit_others(walk, at.stage, join, rows_ns);
    exposed_segments_add_gap(&walk->chain, at.stage, rows_ns);
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
    exposed_segments_add_gap(&walk->chain, stage, piece.end_ns);
    walk->search.loader[stage] = index;
    for (uint32_t i = index + 1;
         exposed_search_down(&walk->search, &i) && spans[i].end_ns >= piece.start_ns;) {
        const bool same = exposed_search_is_loading(&spans[i]) && spans[i].piece == piece.piece &&
                          spans[i].start_ns == piece.start_ns && spans[i].end_ns == piece.end_ns;
        /* The loader reads rows of the embedding between a piece's chunks. */
        const bool within = spans[i].lane == FL_LANE_LOADER && spans[i].phase == FL_PHASE_EMBED &&
                            spans[i].start_ns >= piece.start_ns;
        if (same || within) {
            busy[spans[i].phase] += spans[i].busy_ns;
            bytes[spans[i].phase] += exposed_segments_bytes(&walk->chain, &spans[i]);
            walk->search.loader[stage] = same ? i : walk->search.loader[stage];
        }
    }
    const uint64_t start =
        piece.start_ns > walk->config->begin_ns ? piece.start_ns : walk->config->begin_ns;
    const uint64_t whole = piece.end_ns - piece.start_ns;
    const uint64_t seen = walk->chain.now_ns > start ? walk->chain.now_ns - start : 0;
    for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++) {
        const enum fl_phase phase = order[i];
        const uint64_t share = exposed_segments_share(busy[phase], seen, whole);
        const uint64_t left = walk->chain.now_ns > start ? walk->chain.now_ns - start : 0;
        const bool all = phase == FL_PHASE_READ || share >= left;
        emit(walk, phase, stage, FL_CAUSE_NONE, all ? start : walk->chain.now_ns - share,
             bytes[phase]);
    }
}

static struct step step_loading(struct walk *walk, struct step at)
{
    uint32_t index = 0;
    if (!exposed_search_loading(&walk->search, at.stage, walk->chain.now_ns, &index)) {
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
    const bool has_piece =
        exposed_search_piece(&walk->search, at.stage, at.piece, walk->chain.now_ns, &piece);
    const bool has_last =
        exposed_search_loading(&walk->search, at.stage, walk->chain.now_ns, &last);
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
    for (uint32_t i = stage->span_count; exposed_search_down(&walk->search, &i);) {
        if (exposed_search_is_opening(&stage->spans[i]) &&
            stage->spans[i].end_ns <= walk->chain.now_ns) {
            exposed_segments_add_span(&walk->chain, &stage->spans[i], at.stage);
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

uint32_t exposed_chain_find(const struct exposed_chain_config *config, struct exposed_segment *out)
{
    FL_ASSERT(out != NULL && config->begin_ns <= config->end_ns && config->stage_count >= 1 &&
              config->stage_count <= FL_STAGE_COUNT_MAX && config->prompt_count > 0);
    struct walk walk = {.config = config};
    exposed_search_begin(&walk.search, config);
    exposed_segments_begin(&walk.chain, config, out);
    const uint32_t last = config->stage_count - 1;
    emit(&walk, FL_PHASE_RETURN, EXPOSED_CHAIN_COORDINATOR, FL_CAUSE_NONE, config->token_ns, 0);
    struct step at = step_to(STEP_SENT, last, config->prompt_count - 1);
    /* Every step looks at a span or is followed by one that does, so the fuel ends the walk. */
    while (walk.chain.now_ns > config->begin_ns && walk.search.fuel > 0 && at.kind != STEP_END) {
        at = take_step(&walk, at);
    }
    return exposed_segments_finish(&walk.chain);
}
