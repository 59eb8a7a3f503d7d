#include "coordinator/exposed_search.h"

#include <stdlib.h>

/* Spans looked at before the search gives up: honest traces take a fraction of it, and hostile ones
 * cost milliseconds. */
enum { FUEL = 1 << 20 };

/* Order -------------------------------------------------------------------------------------- */

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

static void sort(struct fl_span *spans, uint32_t count)
{
    if (count > 1) {
        qsort(spans, count, sizeof(*spans), by_end);
    }
}

void exposed_search_begin(struct exposed_search *search, const struct exposed_chain_config *config)
{
    *search = (struct exposed_search){.config = config, .fuel = FUEL};
    sort(config->own, config->own_count);
    for (uint32_t i = 0; i < config->stage_count; i++) {
        const struct exposed_stage *stage = &config->stages[i];
        sort(stage->spans, stage->span_count);
        search->compute[i] = stage->span_count;
        search->loader[i] = stage->span_count;
        while (search->loader[i] > 0 &&
               !exposed_search_is_loading(&stage->spans[search->loader[i] - 1])) {
            search->loader[i]--;
        }
    }
}

bool exposed_search_down(struct exposed_search *search, uint32_t *index)
{
    if (*index == 0 || search->fuel == 0) {
        return false;
    }
    search->fuel--;
    --*index;
    return true;
}

/* Kinds -------------------------------------------------------------------------------------- */

bool exposed_search_is_task(const struct fl_span *span)
{
    return span->lane == FL_LANE_COMPUTE &&
           (span->phase == FL_PHASE_EMBED || span->phase == FL_PHASE_PREFILL ||
            span->phase == FL_PHASE_HEAD || span->phase == FL_PHASE_SAMPLE);
}

bool exposed_search_is_opening(const struct fl_span *span)
{
    return span->lane == FL_LANE_COMPUTE &&
           (span->phase == FL_PHASE_MEMORY || span->phase == FL_PHASE_KV);
}

bool exposed_search_is_loading(const struct fl_span *span)
{
    return span->lane == FL_LANE_LOADER &&
           (span->phase == FL_PHASE_READ || span->phase == FL_PHASE_VERIFY ||
            span->phase == FL_PHASE_REPACK || span->phase == FL_PHASE_COPY);
}

static bool covers(const struct fl_span *span, uint32_t row)
{
    return row >= span->position && row - span->position < span->rows;
}

/* Finders ------------------------------------------------------------------------------------ */

bool exposed_search_join_of_run(struct exposed_search *search, uint32_t stage, uint64_t run,
                                uint32_t from, uint32_t *out)
{
    const struct fl_span *spans = search->config->stages[stage].spans;
    bool met = false;
    for (uint32_t i = from; exposed_search_down(search, &i);) {
        const bool joins = spans[i].phase == FL_PHASE_JOIN && spans[i].run == run;
        if (joins && spans[i].request_id == search->config->request_id) {
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

bool exposed_search_join_of_row(struct exposed_search *search, uint32_t stage, uint32_t row,
                                uint32_t *out)
{
    const struct fl_span *spans = search->config->stages[stage].spans;
    for (uint32_t i = search->compute[stage]; exposed_search_down(search, &i);) {
        if (spans[i].phase == FL_PHASE_JOIN && spans[i].request_id == search->config->request_id &&
            covers(&spans[i], row)) {
            *out = i;
            return true;
        }
    }
    return false;
}

bool exposed_search_task(struct exposed_search *search, uint32_t stage, uint64_t run, uint32_t *out)
{
    const struct fl_span *spans = search->config->stages[stage].spans;
    for (uint32_t i = search->compute[stage]; exposed_search_down(search, &i);) {
        if (spans[i].run == run && exposed_search_is_task(&spans[i])) {
            *out = i;
            return true;
        }
        if (spans[i].run == run && spans[i].phase == FL_PHASE_JOIN) {
            return false; /* it was formed here */
        }
    }
    return false;
}

bool exposed_search_is_own(struct exposed_search *search, uint32_t stage, uint32_t index)
{
    const struct fl_span *span = &search->config->stages[stage].spans[index];
    uint32_t join = 0;
    if (exposed_search_is_opening(span) || span->request_id == search->config->request_id) {
        return true;
    }
    return span->request_id == 0 && exposed_search_is_task(span) &&
           exposed_search_join_of_run(search, stage, span->run, index, &join);
}

/* A wire span of the request that holds `row`, or any when it is a token that was sent. */
static bool find_wire(struct exposed_search *search, uint32_t stage, enum fl_phase phase,
                      uint32_t row, uint64_t now_ns, uint32_t *out)
{
    const struct exposed_chain_config *config = search->config;
    const struct fl_span *spans = config->stages[stage].spans;
    const bool token = phase == FL_PHASE_SEND && stage == config->stage_count - 1;
    bool found = false;
    for (uint32_t i = config->stages[stage].span_count; exposed_search_down(search, &i);) {
        if (spans[i].lane != FL_LANE_WIRE || spans[i].phase != phase ||
            spans[i].request_id != config->request_id || (!token && !covers(&spans[i], row))) {
            continue;
        }
        *out = i;
        found = true;
        if (spans[i].end_ns <= now_ns) {
            return true;
        }
    }
    return found;
}

bool exposed_search_send(struct exposed_search *search, uint32_t stage, uint32_t row,
                         uint64_t now_ns, uint32_t *out)
{
    return find_wire(search, stage, FL_PHASE_SEND, row, now_ns, out);
}

bool exposed_search_receive(struct exposed_search *search, uint32_t stage, uint32_t row,
                            uint64_t now_ns, uint32_t *out)
{
    return find_wire(search, stage, FL_PHASE_RECEIVE, row, now_ns, out);
}

bool exposed_search_order(struct exposed_search *search, uint32_t stage, uint64_t request_id,
                          uint32_t *out)
{
    const struct fl_span *spans = search->config->stages[stage].spans;
    for (uint32_t i = search->config->stages[stage].span_count; exposed_search_down(search, &i);) {
        if (spans[i].phase == FL_PHASE_RECEIVE && spans[i].request_id == request_id &&
            spans[i].rows == 0) {
            *out = i;
            return true;
        }
    }
    return false;
}

bool exposed_search_own_send(struct exposed_search *search, uint32_t stage, uint64_t request_id,
                             uint32_t *out)
{
    const struct fl_span *own = search->config->own;
    for (uint32_t i = search->config->own_count; exposed_search_down(search, &i);) {
        if (own[i].phase == FL_PHASE_SEND && own[i].position == stage &&
            own[i].request_id == request_id) {
            *out = i;
            return true;
        }
    }
    return false;
}

bool exposed_search_loading(struct exposed_search *search, uint32_t stage, uint64_t now_ns,
                            uint32_t *out)
{
    const struct fl_span *spans = search->config->stages[stage].spans;
    for (uint32_t i = search->loader[stage]; exposed_search_down(search, &i);) {
        if (exposed_search_is_loading(&spans[i]) && spans[i].end_ns <= now_ns) {
            *out = i;
            return true;
        }
    }
    return false;
}

bool exposed_search_piece(struct exposed_search *search, uint32_t stage, uint32_t piece,
                          uint64_t now_ns, uint32_t *out)
{
    const struct fl_span *spans = search->config->stages[stage].spans;
    bool found = false;
    for (uint32_t i = search->loader[stage]; exposed_search_down(search, &i);) {
        if (exposed_search_is_loading(&spans[i]) && spans[i].piece == piece) {
            *out = i;
            found = true;
            if (spans[i].end_ns <= now_ns) {
                return true;
            }
        }
    }
    return found;
}

bool exposed_search_rows(struct exposed_search *search, uint32_t stage, uint64_t ready_ns,
                         uint32_t *out)
{
    const struct fl_span *spans = search->config->stages[stage].spans;
    for (uint32_t i = search->config->stages[stage].span_count; exposed_search_down(search, &i);) {
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

bool exposed_search_is_own_rows(struct exposed_search *search, uint32_t stage, uint64_t ready_ns)
{
    const struct fl_span *spans = search->config->stages[stage].spans;
    for (uint32_t i = search->config->stages[stage].span_count; exposed_search_down(search, &i);) {
        if (exposed_search_is_task(&spans[i]) && spans[i].phase == FL_PHASE_EMBED &&
            spans[i].cause_ns == ready_ns) {
            return true;
        }
    }
    return false;
}
