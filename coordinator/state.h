/* state.h - the coordinator laid open to the files that make it.
 *
 *   coordinator.c   opening, closing, the links' events
 *   placement.c     models on nodes
 *   request.c       requests from arrival to their last event
 *   generation.c    those that generate: admission, tokens, end
 *   trace.c         where the time to their first tokens went
 *   summary.c       what status, models and plan show
 *
 * Thread:  owner (the main loop).
 */
#ifndef COORDINATOR_STATE_H
#define COORDINATOR_STATE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "cluster/peer.h"
#include "coordinator/catalog.h"
#include "coordinator/coordinator.h"
#include "coordinator/file_server.h"
#include "coordinator/roster.h"
#include "coordinator/sequence_table.h"
#include "coordinator/text_stream.h"
#include "coordinator/timeline.h"
#include "coordinator/worker.h"

enum { STATE_TEXT_MAX = 640 }; /* a sentence with a node's sentence inside */

struct placement_stage {
    struct roster_node *node;
    uint32_t layer_first;
    uint32_t layer_count;
    uint64_t shard_bytes; /* in the file */
    uint64_t kv_bytes;
    uint64_t memory; /* everything the stage takes on its node */
    uint32_t pieces_done;
    uint32_t pieces_total;
    uint64_t bytes_done;
    uint64_t bytes_total;
    uint64_t sent_ns; /* PLAN went to it */
};

/* A model loaded, or being loaded, on its nodes. */
struct placement {
    struct placement *next;
    uint64_t plan_id;
    struct catalog_model *model; /* held */
    uint32_t context;
    uint32_t kv_block_count;
    uint32_t stage_count;
    struct placement_stage stages[FL_STAGE_COUNT_MAX];
    struct sequence_table sequences;
    struct coordinator *coordinator;
    uint64_t plan_ns;     /* planning began, */
    uint64_t planned_ns;  /* and ended */
    uint64_t used_ns;     /* last time a request began or ended */
    uint64_t progress_ns; /* last time progress was told to clients */
    bool dropping;        /* its requests are being ended */
};

enum request_state {
    REQUEST_OPENING,    /* the model's file is being read */
    REQUEST_TOKENISING, /* or another job of the worker */
    REQUEST_QUEUED,     /* waits for KV blocks */
    REQUEST_RUNNING,    /* admitted */
    REQUEST_LOADING,    /* LOAD, until every piece is there */
    REQUEST_ENDING,     /* answered and free of nodes; DONE waits for the last spans */
};

struct request {
    struct request *next; /* in order of arrival */
    uint64_t serial;      /* never used twice: how a job finds its request again */
    uint64_t client;
    uint64_t id; /* the client's */
    enum fl_request_kind kind;
    enum request_state state;
    bool muted; /* its client is gone */
    uint64_t arrived_ns;
    enum fl_class class_; /* as far as it is known */

    /* What was in the nodes' memory when it arrived. */
    uint64_t resident_plan_id; /* 0: nothing */
    uint64_t resident_bytes[FL_STAGE_COUNT_MAX];

    /* Its way to the first token; 0: it did not come by. */
    uint64_t opened_ns; /* the model was open */
    uint64_t tokenise_ns;
    uint64_t tokenised_ns;
    uint64_t queued_ns; /* it had to wait */
    uint64_t admit_ns;
    uint64_t admit_sent_ns[FL_STAGE_COUNT_MAX]; /* ADMIT went to the stage */
    uint64_t token_ns;                          /* the first token came */
    struct timeline *timeline;                  /* from the first token on, until it is kept */

    /* ENDING. */
    enum fl_finish finish;
    uint64_t deadline_ns;

    char model_name[FL_MODEL_NAME_MAX];
    struct catalog_model *model; /* held; NULL while opening */
    struct placement *placement; /* NULL until there is one */

    /* The prompt as it came, until it is tokens. */
    char *text; /* the prompt, or the contents of all messages */
    size_t text_size;
    uint32_t message_count;
    struct chat_message *messages; /* content points into `text`, role is static */
    char chat_family[32];
    bool special;
    bool no_bos;
    bool ignore_end;
    uint32_t max_tokens;
    struct fl_sampling sampling;
    uint32_t stop_count;
    struct text_stream_stop stops[FL_STOP_STRING_MAX];

    /* From tokens to the end. */
    uint32_t *tokens; /* [prompt_count] until admitted */
    uint32_t prompt_count;
    uint32_t position_max;
    uint64_t request_id; /* the cluster's; 0 until admitted */
    struct sequence *sequence;
    uint32_t cached;       /* prompt tokens that needed no prefill */
    uint32_t token_count;  /* received from the last stage */
    uint32_t output_count; /* of these, without the end token */
    uint64_t first_ns;
    uint64_t last_ns;
    uint32_t logit_count;
    struct fl_top *logits;
    struct text_stream stream;
};

struct coordinator {
    struct coordinator_config config;
    uint64_t incarnation;
    uint64_t started_ns;
    bool leaving;
    uint64_t refused_incarnation; /* of the node last refused: it tries again, and was logged */
    struct peer_table *peers;
    struct worker *worker;
    struct roster *roster;
    struct catalog *catalog;
    struct file_server *files;
    struct timeline_table *timelines;
    struct placement *placements;
    struct request *requests;
    uint64_t next_serial;
    uint64_t next_plan_id;
    uint64_t next_request_id;
    void *arena_block;
    struct fl_arena arena; /* a received message */
};

static inline uint64_t state_now(const struct coordinator *coordinator)
{
    return fl_clock_now(&coordinator->config.clock);
}

/* A node's failure as a sentence that names it once; out [STATE_TEXT_MAX]. */
static inline void state_failure_text(const struct roster_node *node,
                                      const struct fl_failure *failure, char *out)
{
    const bool named = strncmp(failure->text, "node ", 5) == 0;
    snprintf(out, STATE_TEXT_MAX, "%s%s%s%s", named ? "" : "node ", named ? "" : node->name,
             named ? "" : ": ", failure->text);
}

#endif
