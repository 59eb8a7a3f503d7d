/* stage_chain.h - a model cut into real stages that run in this process.
 *
 * What nodes and wires do between stages is done here by function calls:
 * outputs are routed to inputs within their credits, tokens go back to the
 * first stage, pieces of weights are read from the file when the test says so.
 *
 *   open ─ admit, admit, .. ─ (pump | load)* ─ close
 *
 * Thread:  owner.
 * Memory:  open() allocates, close() frees.  Requests are the caller's and must live until they end.
 */
#ifndef TESTS_SUPPORT_STAGE_CHAIN_H
#define TESTS_SUPPORT_STAGE_CHAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "pipeline/stage.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

enum {
    STAGE_CHAIN_STAGES_MAX = 8,
    STAGE_CHAIN_REQUESTS_MAX = 64,
    STAGE_CHAIN_TOKENS_MAX = 512, /* generated ones recorded per request */
};

struct stage_chain;

struct stage_chain_config {
    const char *path;                      /* model file */
    uint32_t stage_count;                  /* 1 or more */
    uint32_t cuts[STAGE_CHAIN_STAGES_MAX]; /* layers of each stage; all 0: as even as can be */
    uint32_t chunk_rows;
    uint32_t context;
    uint32_t kv_block_count; /* 0: enough for sequence_max full contexts */
    uint32_t sequence_max;
    uint32_t threads; /* of each stage's device */
    const char *isa;
    bool activations_f32;
    bool no_overlap;
    bool embed_late;          /* the embedding source says AGAIN before it answers */
    struct run_trace *traces; /* [stage_count], borrowed; NULL: nothing is recorded */
};

/* One request and what came of it. */
struct stage_chain_request {
    /* Filled in by the caller; request_id by stage_chain_admit(). */
    uint64_t sequence_id;
    const uint32_t *prompt;
    uint32_t prompt_count;
    uint32_t keep;
    uint32_t max_tokens;
    uint32_t position_max; /* 0: prompt_count + max_tokens, or the context */
    uint32_t stop_count;
    uint32_t stop_tokens[FL_STOP_TOKEN_MAX];
    struct fl_sampling sampling;
    /* Filled in by the chain. */
    uint64_t request_id;
    uint32_t count; /* tokens generated so far */
    uint32_t tokens[STAGE_CHAIN_TOKENS_MAX];
    float logprobs[STAGE_CHAIN_TOKENS_MAX];
    enum fl_finish finish;
    uint32_t top_count;
    struct fl_top top[FL_TOP_MAX];
    uint32_t failure; /* fl_status, FL_OK when it did not fail */
    char failure_text[FL_ERROR_TEXT_MAX];
};

FL_MUST_CHECK fl_status stage_chain_open(const struct stage_chain_config *config,
                                         struct stage_chain **out);
void stage_chain_close(struct stage_chain *chain);

const struct fl_manifest *stage_chain_manifest(const struct stage_chain *chain);
struct weight_store *stage_chain_weights(struct stage_chain *chain, uint32_t stage);
struct stage *stage_chain_stage(struct stage_chain *chain, uint32_t stage);
const struct fl_plan *stage_chain_plan(const struct stage_chain *chain, uint32_t stage);

/* Read one piece (index in the stage's manifest) from the file and publish it. */
FL_MUST_CHECK fl_status stage_chain_load(struct stage_chain *chain, uint32_t stage, uint32_t piece);
FL_MUST_CHECK fl_status stage_chain_load_all(struct stage_chain *chain);
/* Pieces that can be loaded and were not; *stage and *piece of the n-th of them. */
uint32_t stage_chain_missing(const struct stage_chain *chain);
void stage_chain_missing_at(const struct stage_chain *chain, uint32_t n, uint32_t *stage,
                            uint32_t *piece);

/* Admit on every stage, the first one first; a refusal anywhere ends it everywhere. */
FL_MUST_CHECK fl_status stage_chain_admit(struct stage_chain *chain,
                                          struct stage_chain_request *request);
/* The same for one stage, so that rows come before the ADMIT; ids are taken by _prepare. */
void stage_chain_prepare(struct stage_chain *chain, struct stage_chain_request *request);
FL_MUST_CHECK fl_status stage_chain_admit_at(struct stage_chain *chain, uint32_t stage,
                                             struct stage_chain_request *request);

/* END on every stage. */
void stage_chain_end(struct stage_chain *chain, struct stage_chain_request *request, uint32_t keep);

/* One step of every stage and all the routing there is; FL_AGAIN when nothing moved. */
FL_MUST_CHECK fl_status stage_chain_pump(struct stage_chain *chain);

/* Pump until nothing moves. */
FL_MUST_CHECK fl_status stage_chain_settle(struct stage_chain *chain);

/* Load everything, admit, settle, end with keep 0: a whole answer. */
FL_MUST_CHECK fl_status stage_chain_answer(struct stage_chain *chain,
                                           struct stage_chain_request *request);

/* The largest number of rows that waited for credit on any link, and messages sent on links. */
uint32_t stage_chain_rows_waiting_peak(const struct stage_chain *chain);

#endif
