/* exposed_search.h - finds spans of one request for the walk back from its token.
 *
 * Spans are looked at by their end, from the last down.  A search remembers how
 * far down each stage was walked, so that nothing is explained twice: `compute`
 * are the tasks before the one the walk came to, `loader` the pieces before the
 * one it explained last.
 *
 * Every span looked at costs fuel.  Honest traces take a fraction of it; a hostile
 * one, made so that every step looks at everything, finds nothing any more.
 *
 * The finders take `now_ns`, where the walk stands, when it matters; they write
 * the index of what they found, and nothing when they return false.
 *
 * Thread:  any; no I/O, no allocation.
 * Memory:  `config` is borrowed as long as the search is used.
 * Units:   nanoseconds of the coordinator's clock.
 */
#ifndef COORDINATOR_EXPOSED_SEARCH_H
#define COORDINATOR_EXPOSED_SEARCH_H

#include <stdbool.h>
#include <stdint.h>

#include "coordinator/exposed_chain.h"
#include "proto/span.h"

#ifdef __cplusplus
extern "C" {
#endif

struct exposed_search {
    const struct exposed_chain_config *config;
    uint32_t fuel;
    uint32_t compute[FL_STAGE_COUNT_MAX]; /* compute spans from here on were walked, */
    uint32_t loader[FL_STAGE_COUNT_MAX];  /* and the loader's */
};

/* Sorts all spans; nothing was walked yet. */
void exposed_search_begin(struct exposed_search *search, const struct exposed_chain_config *config);

/* Steps *index down to the span before it; false: there is none, or no fuel to look. */
bool exposed_search_down(struct exposed_search *search, uint32_t *index);

/* What a span is: a task of the compute thread, the opening of a stage, a piece on its way in. */
bool exposed_search_is_task(const struct fl_span *span);
bool exposed_search_is_opening(const struct fl_span *span);
bool exposed_search_is_loading(const struct fl_span *span);

/* Whether span `index`, a task or an opening, was for this request. */
bool exposed_search_is_own(struct exposed_search *search, uint32_t stage, uint32_t index);

/* A JOIN of the request in `run`, below `from`; one that holds `row`. */
bool exposed_search_join_of_run(struct exposed_search *search, uint32_t stage, uint64_t run,
                                uint32_t from, uint32_t *out);
bool exposed_search_join_of_row(struct exposed_search *search, uint32_t stage, uint32_t row,
                                uint32_t *out);

/* The last task of a run that was not walked yet. */
bool exposed_search_task(struct exposed_search *search, uint32_t stage, uint64_t run,
                         uint32_t *out);

/* The request's SEND of `row`, or RECEIVE: the last by now, or the first after.  The last stage
 * sends one thing, its first token. */
bool exposed_search_send(struct exposed_search *search, uint32_t stage, uint32_t row,
                         uint64_t now_ns, uint32_t *out);
bool exposed_search_receive(struct exposed_search *search, uint32_t stage, uint32_t row,
                            uint64_t now_ns, uint32_t *out);

/* RECEIVE of PLAN (request_id 0) or of ADMIT; the coordinator's SEND of it. */
bool exposed_search_order(struct exposed_search *search, uint32_t stage, uint64_t request_id,
                          uint32_t *out);
bool exposed_search_own_send(struct exposed_search *search, uint32_t stage, uint64_t request_id,
                             uint32_t *out);

/* The last the loader finished by now; of spans walked already, none. */
bool exposed_search_loading(struct exposed_search *search, uint32_t stage, uint64_t now_ns,
                            uint32_t *out);

/* When a piece came in: the last time by now, or the first after. */
bool exposed_search_piece(struct exposed_search *search, uint32_t stage, uint32_t piece,
                          uint64_t now_ns, uint32_t *out);

/* The loader's reading of the embedding's rows that were there at `ready_ns`, and whether a task of
 * the request's own runs waited for them. */
bool exposed_search_rows(struct exposed_search *search, uint32_t stage, uint64_t ready_ns,
                         uint32_t *out);
bool exposed_search_is_own_rows(struct exposed_search *search, uint32_t stage, uint64_t ready_ns);

#ifdef __cplusplus
}
#endif
#endif
