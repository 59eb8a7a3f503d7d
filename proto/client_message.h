/* client_message.h - what programs say to a coordinator, and what it answers.
 *
 * A connection carries frames (wire.h): 4 bytes little-endian length, then one
 * protobuf message of client.proto.  A client sends requests, each with an id
 * of its choice; the coordinator answers each with a stream of events that ends
 * with DONE, a result, or one ERROR.  Several requests may be under way on one
 * connection; closing it cancels them.
 *
 *   GENERATE ► [ADMITTED] [PROGRESS]* [TEXT]* (DONE | ERROR)
 *   LOAD     ► [PROGRESS]* (LOADED | ERROR)
 *   CANCEL   ► nothing; the cancelled request, whatever it was, ends with DONE(cancelled)
 *   others   ► their result | ERROR
 *
 * Thread:  any; plain values.
 * Memory:  unpack() puts arrays and strings into the arena; pack() borrows.
 *          Strings are NUL-terminated except struct fl_text, which may hold NUL.
 * Units:   sizes in bytes, times in ms as double.
 */
#ifndef PROTO_CLIENT_MESSAGE_H
#define PROTO_CLIENT_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FL_CLIENT_VERSION = 1,
    FL_CLIENT_MESSAGE_MAX = 8 << 20,
    FL_PROMPT_SIZE_MAX = 1 << 20, /* what is tokenised in bounded memory */
    FL_STOP_STRING_MAX = 8,
    FL_STOP_STRING_SIZE_MAX = 256,
    FL_CHAT_MESSAGE_MAX = 1024,
    FL_TIMELINE_KEPT = 64,        /* requests whose timelines a coordinator keeps */
    FL_TIMELINE_SPAN_MAX = 16384, /* spans of one timeline */
    FL_TIMELINE_SEGMENT_MAX = 4096,
};

struct fl_text {
    const char *data; /* UTF-8 */
    size_t size;
};

enum fl_class { FL_CLASS_UNKNOWN, FL_CLASS_COLD, FL_CLASS_PARTIAL, FL_CLASS_WARM };
const char *fl_class_name(enum fl_class value);   /* "cold" */
const char *fl_finish_name(enum fl_finish value); /* "stop" */

enum fl_request_kind {
    FL_REQUEST_GENERATE = 1,
    FL_REQUEST_CANCEL,
    FL_REQUEST_TOKENIZE,
    FL_REQUEST_MODELS,
    FL_REQUEST_PLAN,
    FL_REQUEST_LOAD,
    FL_REQUEST_UNLOAD,
    FL_REQUEST_STATUS,
    FL_REQUEST_TIMELINE,
};

struct fl_chat_message {
    const char *role; /* "system", "user", "assistant" */
    struct fl_text content;
};

/* Exactly one of prompt, tokens and messages is given. */
struct fl_generate {
    const char *model;
    struct fl_text prompt; /* data NULL: not given */
    uint32_t token_count;
    uint32_t *tokens;
    uint32_t message_count;
    struct fl_chat_message *messages; /* rendered with the model's chat template */
    const char *chat_template;        /* family that overrides the file's; "" for the file's */
    bool special;                     /* special-token text in the prompt becomes tokens */
    bool no_bos;
    bool ignore_end;     /* end-of-generation tokens do not stop (benchmarks) */
    uint32_t max_tokens; /* 0: what the context has left */
    struct fl_sampling sampling;
    uint32_t stop_count;
    struct fl_text stops[FL_STOP_STRING_MAX];
};

struct fl_tokenize {
    const char *model;
    struct fl_text text;
    bool special;
    bool no_bos;
};

struct fl_client_request {
    uint32_t version; /* FL_CLIENT_VERSION; another one is refused by name */
    uint64_t id;      /* the client's; unique among its requests under way */
    enum fl_request_kind kind;
    union {
        struct fl_generate generate;
        struct {
            uint64_t id; /* of the request to cancel */
        } cancel;
        struct fl_tokenize tokenize;
        struct {
            const char *model;
        } by_model; /* PLAN, LOAD, UNLOAD */
        struct {
            uint64_t id; /* DONE's timeline_id; 0: the last one that got a token */
        } timeline;
    } as;
};

enum fl_event_kind {
    FL_EVENT_ADMITTED = 1,
    FL_EVENT_PROGRESS,
    FL_EVENT_TEXT,
    FL_EVENT_DONE,
    FL_EVENT_ERROR,
    FL_EVENT_TOKENS,
    FL_EVENT_MODELS,
    FL_EVENT_PLAN,
    FL_EVENT_LOADED,
    FL_EVENT_UNLOADED,
    FL_EVENT_STATUS,
    FL_EVENT_TIMELINE,
};

struct fl_stage_summary {
    const char *node;
    uint32_t first_layer;
    uint32_t last_layer; /* inclusive; a stage has one layer or more */
    uint64_t shard_bytes;
    uint64_t kv_bytes;
    uint64_t memory_budget;
};

struct fl_token_detail {
    uint32_t id;
    float logprob;
    uint32_t top_count;
    struct fl_top *top; /* best first */
};

struct fl_model_summary {
    const char *name;
    uint64_t bytes;
    const char *architecture; /* "" when the file cannot be used: then problem says why */
    const char *problem;
    bool loaded;
};

struct fl_node_summary {
    const char *name;
    const char *state; /* "ready", "loading", "lost" */
    const char *address;
    const char *isa;
    uint32_t threads;
    uint64_t memory_budget;
    uint64_t memory_used; /* shards and KV of its plans */
    double heartbeat_ms;  /* round trip; 0 when not yet known */
    bool clock_known;     /* false: no ping was answered */
    double clock_offset_us;
    double clock_error_us;
    double slept_ms; /* suspended since it joined */
};

struct fl_plan_stage_summary {
    const char *node;
    uint32_t first_layer;
    uint32_t last_layer;
    uint32_t pieces_done;
    uint32_t pieces_total;
    uint64_t bytes_done;
    uint64_t bytes_total;
};

struct fl_loaded_summary {
    const char *model;
    const char *state; /* "loading", "ready" */
    uint32_t context;
    uint32_t kv_blocks_total;
    uint32_t kv_blocks_used; /* reserved by requests and kept conversations */
    uint32_t sequences_kept; /* conversations whose KV is kept */
    uint32_t requests_running;
    uint32_t requests_queued;
    uint32_t stage_count;
    struct fl_plan_stage_summary *stages;
};

/* A part of the way from t0 to the first token: the exposed chain is these, one after the other,
 * and their `ms` sum to the TTFT. */
struct fl_segment_summary {
    const char *phase; /* fl_phase_name() */
    const char *node;  /* "coordinator" or a node's name */
    const char *cause; /* why it was waited for: fl_cause_name(), or a sentence; "" when plain */
    double start_ms;   /* after t0 */
    double ms;
    uint64_t bytes;
};

/* What one phase took until the first token, on all nodes together. */
struct fl_phase_summary {
    const char *phase;
    double exposed_ms; /* on the chain: the user waited for it */
    double hidden_ms;  /* the rest of its busy time, which ran beside something else */
    uint64_t bytes;
};

struct fl_timeline_node {
    const char *node;
    bool clock_known;       /* false: it never answered a ping, its spans cannot be placed */
    double clock_offset_us; /* its clock minus the coordinator's */
    double clock_error_us;  /* the true offset is this near, at most */
    bool residency_known;
    double page_cache_before; /* share of its shard, 0 to 1 */
    double page_cache_after;
    uint64_t shard_bytes;
    uint64_t medium_bytes; /* read from the medium, as the kernel counts them */
    const char *regime;    /* "buffered" or "direct" */
    double process_ms;     /* exec to ready */
    double slept_ms;       /* suspended since it joined */
    uint32_t mhz_before;   /* CPU frequency; 0: not known */
    uint32_t mhz_after;
    uint64_t spans_lost;
};

struct fl_timeline_span {
    const char *phase;
    const char *node;
    const char *lane;   /* "wire", "compute", "disk", "main", "worker" */
    const char *source; /* "" when it has none */
    const char *cause;
    const char *piece; /* "layer 3 attention", "head"; "" when it has none */
    double start_ms;   /* after t0; below 0 when it began before */
    double end_ms;
    double busy_ms;
    double cause_ms;
    uint64_t bytes;
    uint64_t run;
    uint32_t position;
    uint32_t rows;
};

struct fl_timeline {
    uint64_t id;
    const char *model;
    enum fl_class class_;
    double ttft_ms;
    double predicted_ms; /* 0: there was no prediction */
    uint32_t prompt_tokens;
    bool
        complete; /* false: a node did not answer, or spans were lost; what is missing is "unknown" */
    uint32_t segment_count;
    struct fl_segment_summary *segments; /* in order */
    uint32_t phase_count;
    struct fl_phase_summary *phases; /* most exposed first */
    uint32_t node_count;
    struct fl_timeline_node *nodes;
    uint32_t span_count;
    struct fl_timeline_span *spans; /* by start; dropped for timelines that are old */
};

struct fl_client_event {
    uint64_t id; /* of the request */
    enum fl_event_kind kind;
    union {
        struct {
            enum fl_class class_;
            uint32_t prompt_tokens;
            uint32_t cached_tokens; /* of the prompt, already in the KV cache */
            uint32_t stage_count;
            struct fl_stage_summary *stages;
        } admitted;
        struct {
            const char *phase; /* "queue", "load" */
            const char *cause; /* why a request waits, "" when it does not */
            uint64_t bytes_done;
            uint64_t bytes_total;
        } progress;
        struct {
            struct fl_text text; /* whole UTF-8 characters; may be empty */
            uint32_t token_count;
            struct fl_token_detail *tokens; /* the tokens since the last TEXT */
        } text;
        struct {
            enum fl_finish finish;
            enum fl_class class_;
            uint32_t prompt_tokens;
            uint32_t cached_tokens;
            uint32_t output_tokens; /* end-of-generation token not counted */
            double ttft_ms;         /* request's arrival to first token leaving; 0: no token */
            double decode_tok_s;    /* 0 with fewer than two tokens */
            uint32_t stage_count;
            struct fl_stage_summary *stages;
            uint32_t logit_count;
            struct fl_top *logits; /* raw, of the prompt's last position, when asked for */
            uint64_t timeline_id;  /* for TIMELINE */
            double predicted_ms;   /* of the TTFT; 0: there was no prediction */
            uint32_t phase_count;  /* 0: no token */
            struct fl_phase_summary *phases; /* most exposed first; exposed_ms sum to ttft_ms */
        } done;
        struct {
            uint32_t code; /* fl_status */
            const char *text;
            uint32_t retry_ms; /* 0: retrying will not help */
        } error;
        struct {
            uint32_t count;
            uint32_t *ids;
        } tokens;
        struct {
            uint32_t count;
            struct fl_model_summary *models;
        } models;
        struct {
            const char *model;
            uint64_t total_bytes;
            uint32_t context;
            uint32_t kv_positions; /* that fit on the least stage */
            uint32_t stage_count;
            struct fl_stage_summary *stages;
            const char *note; /* nodes left out and why; may be "" */
        } plan;
        struct {
            const char *version; /* of the coordinator's build */
            double uptime_s;
            uint32_t node_count;
            struct fl_node_summary *nodes;
            uint32_t loaded_count;
            struct fl_loaded_summary *loaded;
        } status;
        struct fl_timeline timeline;
        /* LOADED and UNLOADED carry nothing more. */
    } as;
};

/* Bytes an arena must have for unpack() of a request of `size` bytes; unknown fields by the thousand
 * need more, and are FL_PROTOCOL. */
size_t fl_client_request_arena(size_t size);

/* As fl_cluster_message_pack() and _unpack() do, with client.proto.
 *
 * A request that cannot be read at all is FL_PROTOCOL (FL_TOO_LARGE over the limit): close.  One
 * of another version is FL_UNSUPPORTED, one with a wrong field is FL_INVALID: then out->id is set,
 * so that the answer is an ERROR with fl_last_error() and the connection goes on.  A top_p or
 * repetition_penalty of 0 arrives as 1, no sampling at all as greedy. */
FL_MUST_CHECK fl_status fl_client_request_pack(const struct fl_client_request *request,
                                               struct fl_arena *scratch, void *out, size_t size,
                                               size_t *out_size);
FL_MUST_CHECK fl_status fl_client_request_unpack(const void *data, size_t size,
                                                 struct fl_arena *arena,
                                                 struct fl_client_request *out);
FL_MUST_CHECK fl_status fl_client_event_pack(const struct fl_client_event *event,
                                             struct fl_arena *scratch, void *out, size_t size,
                                             size_t *out_size);
FL_MUST_CHECK fl_status fl_client_event_unpack(const void *data, size_t size,
                                               struct fl_arena *arena, struct fl_client_event *out);

#ifdef __cplusplus
}
#endif
#endif
