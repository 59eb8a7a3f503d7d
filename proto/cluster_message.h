/* cluster_message.h - what coordinator and nodes say to each other.
 *
 * One tagged struct for every control message, and a pack and an unpack that
 * map it to cluster.proto.  Activations and file bytes do not travel as
 * protobuf: they have the fixed little-endian headers at the end of this file.
 *
 *   node ──JOIN──► coordinator ──WELCOME──► node
 *   coordinator ──PLAN──► every stage         (each starts to load; no answer is waited for)
 *   coordinator ──ADMIT──► every stage        (stage 0 and the last get the prompt)
 *   stage k ──LINK, activations──► stage k+1 ──CREDIT──► stage k
 *   last stage ──TOKEN──► stage 0 and coordinator
 *   coordinator ──END──► every stage          (request over; how much KV to keep)
 *   coordinator ──TRACE──► every stage ──SPANS──► coordinator   (where the first token's time went)
 *
 * Order: on one link messages arrive as sent; between links there is none.
 * Request ids rise; a stage that meets a request id above every one it was
 * admitted holds the message until the ADMIT comes, one that is below and not
 * current is late and dropped.
 *
 * Thread:  any; plain values.
 * Memory:  unpack() puts arrays and strings into the arena; pack() borrows.
 * Units:   sizes in bytes, positions count from 0.
 */
#ifndef PROTO_CLUSTER_MESSAGE_H
#define PROTO_CLUSTER_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"
#include "proto/span.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FL_PROTOCOL_VERSION = 2,
    FL_NAME_MAX = 64, /* node names, bytes with the NUL: letters, digits, '.', '_', '-' */
    FL_ADDRESS_MAX = 2048,
    FL_STAGE_COUNT_MAX = 64,
    FL_STOP_TOKEN_MAX = 32,
    FL_TOP_MAX = 128,             /* logits or log-probabilities listed for one position */
    FL_SAMPLING_FACTOR_MAX = 100, /* of temperature and repetition penalty */
    FL_ERROR_TEXT_MAX = 512,
    FL_FETCH_RANGE_MAX = 4096,
    FL_FETCH_SIZE_MAX = 1 << 20, /* bytes of one fetch */
    FL_CHUNK_MAX = 1024,         /* rows of one prefill chunk */
    FL_SPANS_MAX = 1024,         /* spans of one message */
    FL_CLUSTER_MESSAGE_MAX = 4 << 20,
};

enum fl_address_kind { FL_ADDRESS_SOCKET = 1, FL_ADDRESS_WORKER = 2, FL_ADDRESS_LOCAL = 3 };

/* Where a transport reaches a process.  SOCKET: "host:port" as text without NUL. */
struct fl_address {
    enum fl_address_kind kind;
    uint32_t size;
    unsigned char bytes[FL_ADDRESS_MAX];
};

enum fl_message_kind {
    FL_MESSAGE_JOIN = 1,
    FL_MESSAGE_WELCOME,
    FL_MESSAGE_PLAN,
    FL_MESSAGE_UNPLAN,
    FL_MESSAGE_ADMIT,
    FL_MESSAGE_END,
    FL_MESSAGE_DROP,
    FL_MESSAGE_TOKEN,
    FL_MESSAGE_PROGRESS,
    FL_MESSAGE_FAILURE,
    FL_MESSAGE_LINK,
    FL_MESSAGE_CREDIT,
    FL_MESSAGE_FETCH,
    FL_MESSAGE_TRACE,
    FL_MESSAGE_SPANS,
};

struct fl_join {
    char name[FL_NAME_MAX];
    uint64_t incarnation; /* random at process start: a restarted node is another node */
    struct fl_address address;
    uint64_t memory_budget; /* bytes the node may use for shards and KV */
    uint32_t threads;
    char isa[16];
};

struct fl_welcome {
    uint64_t coordinator; /* its incarnation: a node that sees another one drops its plans */
};

struct fl_stage {
    char node[FL_NAME_MAX];
    uint64_t incarnation;
    struct fl_address address;
    uint32_t layer_first;
    uint32_t layer_count;
    bool has_embed;
    bool has_head;
};

struct fl_plan {
    uint64_t plan_id; /* rises; never used twice by one coordinator */
    uint32_t stage_index;
    uint32_t stage_count;
    struct fl_stage *stages;     /* [stage_count] */
    struct fl_manifest manifest; /* the pieces of this stage only */
    uint32_t chunk_rows;         /* prefill rows per run, 1 .. FL_CHUNK_MAX */
    uint32_t context;            /* positions a sequence may have */
    uint32_t kv_block_count;     /* blocks of KV_BLOCK_POSITIONS, the same on every stage */
    uint32_t sequence_max;       /* sequences with KV at once */
    bool activations_f32;        /* else 8-bit activations */
    bool no_overlap;             /* load everything, then compute */
};

struct fl_unplan {
    uint64_t plan_id;
};

struct fl_sampling {
    float temperature;        /* 0: greedy */
    uint32_t top_k;           /* 0: all */
    float top_p;              /* 1: all */
    float min_p;              /* 0: all */
    float repetition_penalty; /* 1: none */
    uint32_t penalty_window;  /* last tokens the penalty looks at; 0: all */
    uint64_t seed;
    uint32_t top_logits; /* raw logits to report of the prompt's last position, 0 .. FL_TOP_MAX */
    uint32_t logprobs;   /* log-probabilities to report per token, 0 .. FL_TOP_MAX */
};

struct fl_admit {
    uint64_t plan_id;
    uint64_t request_id;
    uint64_t sequence_id;  /* keeps its KV over requests until DROP */
    uint32_t keep;         /* positions of the sequence that stay; prefill starts here */
    uint32_t position_max; /* positions the request may fill: its blocks are reserved */
    uint32_t prompt_count; /* tokens of the whole prompt, kept ones included; > keep */
    uint32_t max_tokens;   /* 1 or more */
    uint32_t token_count;  /* prompt_count on the first and last stage, else 0 */
    uint32_t *tokens;
    uint32_t stop_count;
    uint32_t stop_tokens[FL_STOP_TOKEN_MAX]; /* end-of-generation ids */
    struct fl_sampling sampling;             /* used by the last stage */
};

/* The request is over, however it ended.  keep: positions of the sequence worth keeping. */
struct fl_end {
    uint64_t plan_id;
    uint64_t request_id;
    uint32_t keep;
};

struct fl_drop {
    uint64_t plan_id;
    uint64_t sequence_id;
};

enum fl_finish {
    FL_FINISH_NONE,
    FL_FINISH_STOP,   /* an end-of-generation id (it is the token), or a stop string */
    FL_FINISH_LENGTH, /* max_tokens or the context is full */
    FL_FINISH_CANCELLED,
};

struct fl_top {
    uint32_t id;
    float value;
};

struct fl_token {
    uint64_t plan_id;
    uint64_t request_id;
    uint32_t index;    /* 0: first generated token */
    uint32_t position; /* where this token goes in the sequence */
    uint32_t id;
    enum fl_finish finish;
    float logprob; /* of id, when asked for */
    uint32_t logprob_count;
    struct fl_top *logprobs; /* [logprob_count], best first */
    uint32_t logit_count;
    struct fl_top *logits; /* [logit_count], best first; with index 0 when asked for */
};

struct fl_progress {
    uint64_t plan_id;
    uint32_t pieces_done;
    uint32_t pieces_total;
    uint64_t bytes_done;
    uint64_t bytes_total;
    uint64_t bytes_file;    /* of bytes_done: read from a model file here */
    uint64_t bytes_cache;   /* from the shard cache */
    uint64_t bytes_fetched; /* over the wire */
};

struct fl_failure {
    uint64_t plan_id;    /* 0: no plan: a JOIN is refused, or a node says that it leaves */
    uint64_t request_id; /* 0: the whole plan is broken on this node */
    uint32_t code;       /* fl_status */
    char text[FL_ERROR_TEXT_MAX];
};

/* First message on a link between two stages. */
struct fl_link {
    uint64_t plan_id;
    uint32_t from_stage;
    uint64_t incarnation; /* of the sender */
};

/* The receiver of activations has room for `rows` more. */
struct fl_credit {
    uint64_t plan_id;
    uint32_t rows;
};

struct fl_range {
    uint64_t offset;
    uint32_t size;
};

/* Bytes of a model file, asked of the coordinator: answered by one FETCH_DATA. */
struct fl_fetch {
    uint64_t transfer_id;
    char model[FL_MODEL_NAME_MAX];
    unsigned char identity[FL_IDENTITY_SIZE];
    uint32_t file;
    uint32_t range_count;
    struct fl_range *ranges; /* together at most FL_FETCH_SIZE_MAX bytes */
};

/* Asks a stage for its spans of a request and of its plan.  The request may still be running:
 * what is not over yet is not there. */
struct fl_trace {
    uint64_t plan_id;
    uint64_t request_id;
};

/* How a stage read its shard, beside its spans. */
struct fl_start_record {
    uint64_t exec_ns;  /* CLOCK_MONOTONIC when the process began (0: not known), and */
    uint64_t ready_ns; /* when it could join */
    uint64_t shard_bytes;
    bool residency_known;       /* whether the next two could be measured */
    uint64_t page_cache_before; /* bytes of the shard in the page cache when loading began, */
    uint64_t page_cache_after;  /* and of each piece that is there when it had just come */
    uint64_t medium_bytes;      /* read from the medium until then, as the kernel counts them */
    bool direct;                /* reads went past the page cache */
    uint32_t mhz_before;        /* CPU frequency, 0: not known */
    uint32_t mhz_after;         /* when all was there; 0 until then */
};

/* The answer to TRACE: messages of up to FL_SPANS_MAX spans, `last` in the last of them. */
struct fl_spans {
    uint64_t plan_id;
    uint64_t request_id;
    bool last;
    uint64_t lost; /* spans that are missing: overwritten, or of a plan that is gone */
    struct fl_start_record start;
    uint32_t span_count;
    struct fl_span *spans; /* [span_count] */
};

struct fl_cluster_message {
    enum fl_message_kind kind;
    union {
        struct fl_join join;
        struct fl_welcome welcome;
        struct fl_plan plan;
        struct fl_unplan unplan;
        struct fl_admit admit;
        struct fl_end end;
        struct fl_drop drop;
        struct fl_token token;
        struct fl_progress progress;
        struct fl_failure failure;
        struct fl_link link;
        struct fl_credit credit;
        struct fl_fetch fetch;
        struct fl_trace trace;
        struct fl_spans spans;
    } as;
};

/* Bytes of the packed message, 1 .. FL_CLUSTER_MESSAGE_MAX; 0 when it is over the limit. */
size_t fl_cluster_message_size(const struct fl_cluster_message *message, struct fl_arena *scratch);

/* Pack into out [size]; *out_size gets the bytes written.  FL_TOO_LARGE when it does not fit.
 * `scratch` holds the generated structs meanwhile. */
FL_MUST_CHECK fl_status fl_cluster_message_pack(const struct fl_cluster_message *message,
                                                struct fl_arena *scratch, void *out, size_t size,
                                                size_t *out_size);

/* Unpack and check every field: kinds, limits, enum ranges, finite floats, names, counts that must
 * agree.  Nothing is allocated outside the arena.  FL_PROTOCOL with a sentence; FL_NO_MEMORY when
 * the arena is too small (FL_CLUSTER_MESSAGE_MAX x 4 is always enough). */
FL_MUST_CHECK fl_status fl_cluster_message_unpack(const void *data, size_t size,
                                                  struct fl_arena *arena,
                                                  struct fl_cluster_message *out);

/* Types of transport messages.  Below 16: the peer layer's own. */
enum fl_wire_type {
    FL_WIRE_HANDSHAKE = 1,
    FL_WIRE_PING = 2,
    FL_WIRE_PONG = 3,
    FL_WIRE_CONTROL = 16,     /* a packed fl_cluster_message */
    FL_WIRE_ACTIVATIONS = 17, /* fl_activation_header, then [rows, width] f32 */
    FL_WIRE_FETCH_DATA = 18,  /* fl_fetch_header, then the ranges' bytes */
};

enum { FL_ACTIVATION_HEADER_SIZE = 40, FL_FETCH_HEADER_SIZE = 32 };

enum { FL_ACTIVATION_SAMPLE = 1 }; /* flags: the last row's logits are wanted */

struct fl_activation_header {
    uint64_t plan_id;
    uint64_t request_id;
    uint32_t position; /* of the first row */
    uint32_t rows;     /* 1 .. FL_CHUNK_MAX */
    uint32_t width;
    uint32_t flags;
};

struct fl_fetch_header {
    uint64_t transfer_id;
    uint32_t status; /* fl_status; when not FL_OK the data is the sentence */
    uint32_t size;
    uint64_t checksum; /* XXH3-64 of the data */
};

/* Little-endian, fixed; `size` is the header's alone.  unpack checks size, limits and flags:
 * FL_PROTOCOL with a sentence. */
void fl_activation_header_pack(const struct fl_activation_header *header,
                               unsigned char out[FL_ACTIVATION_HEADER_SIZE]);
FL_MUST_CHECK fl_status fl_activation_header_unpack(const void *data, size_t size,
                                                    struct fl_activation_header *out);
void fl_fetch_header_pack(const struct fl_fetch_header *header,
                          unsigned char out[FL_FETCH_HEADER_SIZE]);
FL_MUST_CHECK fl_status fl_fetch_header_unpack(const void *data, size_t size,
                                               struct fl_fetch_header *out);

#ifdef __cplusplus
}
#endif
#endif
