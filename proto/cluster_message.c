#include "proto/cluster_message.h"

#include <inttypes.h>
#include <string.h>

#include "proto/cluster.pb-c.h"

#include "proto/message_field.h"
#include "proto/plan_message.h"
#include "proto/sampling_message.h"
#include "proto/span_message.h"

/* ---- build: plain struct to generated struct ---- */

static fl_status build_join(const struct fl_join *join, struct fl_arena *arena,
                            Firstlight__Cluster__Join **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Join, firstlight__cluster__join, out);
    fl_field_borrow(join->name, strnlen(join->name, sizeof(join->name)), &(*out)->name);
    (*out)->incarnation = join->incarnation;
    FL_TRY(fl_address_message_build(&join->address, arena, &(*out)->address));
    (*out)->memory_budget = join->memory_budget;
    (*out)->threads = join->threads;
    fl_field_borrow(join->isa, strnlen(join->isa, sizeof(join->isa)), &(*out)->isa);
    return FL_OK;
}

static fl_status build_admit(const struct fl_admit *admit, struct fl_arena *arena,
                             Firstlight__Cluster__Admit **out)
{
    FL_ASSERT(admit->stop_count <= FL_STOP_TOKEN_MAX);

    FL_FIELD_MAKE(arena, Firstlight__Cluster__Admit, firstlight__cluster__admit, out);
    (*out)->plan_id = admit->plan_id;
    (*out)->request_id = admit->request_id;
    (*out)->sequence_id = admit->sequence_id;
    (*out)->keep = admit->keep;
    (*out)->position_max = admit->position_max;
    (*out)->prompt_count = admit->prompt_count;
    (*out)->max_tokens = admit->max_tokens;
    (*out)->n_tokens = admit->token_count;
    (*out)->tokens = admit->tokens;
    (*out)->n_stop_tokens = admit->stop_count;
    (*out)->stop_tokens = (uint32_t *)(uintptr_t)admit->stop_tokens;
    return fl_sampling_message_build(&admit->sampling, arena, &(*out)->sampling);
}

static fl_status build_token(const struct fl_token *token, struct fl_arena *arena,
                             Firstlight__Cluster__Token **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Token, firstlight__cluster__token, out);
    (*out)->plan_id = token->plan_id;
    (*out)->request_id = token->request_id;
    (*out)->index = token->index;
    (*out)->position = token->position;
    (*out)->id = token->id;
    (*out)->finish = token->finish;
    (*out)->logprob = token->logprob;
    (*out)->n_logprobs = token->logprob_count;
    FL_TRY(fl_sampling_message_build_top(token->logprobs, token->logprob_count, arena,
                                         &(*out)->logprobs));
    (*out)->n_logits = token->logit_count;
    return fl_sampling_message_build_top(token->logits, token->logit_count, arena, &(*out)->logits);
}

static fl_status build_progress(const struct fl_progress *progress, struct fl_arena *arena,
                                Firstlight__Cluster__Progress **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Progress, firstlight__cluster__progress, out);
    (*out)->plan_id = progress->plan_id;
    (*out)->pieces_done = progress->pieces_done;
    (*out)->pieces_total = progress->pieces_total;
    (*out)->bytes_done = progress->bytes_done;
    (*out)->bytes_total = progress->bytes_total;
    (*out)->bytes_file = progress->bytes_file;
    (*out)->bytes_cache = progress->bytes_cache;
    (*out)->bytes_fetched = progress->bytes_fetched;
    return FL_OK;
}

static fl_status build_fetch(const struct fl_fetch *fetch, struct fl_arena *arena,
                             Firstlight__Cluster__Fetch **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Fetch, firstlight__cluster__fetch, out);
    (*out)->transfer_id = fetch->transfer_id;
    fl_field_borrow(fetch->model, strnlen(fetch->model, sizeof(fetch->model)), &(*out)->model);
    fl_field_borrow(fetch->identity, FL_IDENTITY_SIZE, &(*out)->identity);
    (*out)->file = fetch->file;
    (*out)->n_ranges = fetch->range_count;
    FL_TRY(fl_field_array(arena, fetch->range_count, sizeof(*(*out)->ranges), &(*out)->ranges));
    for (uint32_t i = 0; i < fetch->range_count; i++) {
        FL_FIELD_MAKE(arena, Firstlight__Cluster__Range, firstlight__cluster__range,
                      &(*out)->ranges[i]);
        (*out)->ranges[i]->offset = fetch->ranges[i].offset;
        (*out)->ranges[i]->size = fetch->ranges[i].size;
    }
    return FL_OK;
}

/* Messages of a few numbers. */
static fl_status build_small(const struct fl_cluster_message *message, struct fl_arena *arena,
                             Firstlight__Cluster__Message *out)
{
    if (message->kind == FL_MESSAGE_WELCOME) {
        FL_FIELD_MAKE(arena, Firstlight__Cluster__Welcome, firstlight__cluster__welcome,
                      &out->welcome);
        out->welcome->coordinator = message->as.welcome.coordinator;
    } else if (message->kind == FL_MESSAGE_UNPLAN) {
        FL_FIELD_MAKE(arena, Firstlight__Cluster__Unplan, firstlight__cluster__unplan,
                      &out->unplan);
        out->unplan->plan_id = message->as.unplan.plan_id;
    } else if (message->kind == FL_MESSAGE_END) {
        FL_FIELD_MAKE(arena, Firstlight__Cluster__End, firstlight__cluster__end, &out->end);
        out->end->plan_id = message->as.end.plan_id;
        out->end->request_id = message->as.end.request_id;
        out->end->keep = message->as.end.keep;
    } else if (message->kind == FL_MESSAGE_DROP) {
        FL_FIELD_MAKE(arena, Firstlight__Cluster__Drop, firstlight__cluster__drop, &out->drop);
        out->drop->plan_id = message->as.drop.plan_id;
        out->drop->sequence_id = message->as.drop.sequence_id;
    } else if (message->kind == FL_MESSAGE_FAILURE) {
        const struct fl_failure *failure = &message->as.failure;
        FL_FIELD_MAKE(arena, Firstlight__Cluster__Failure, firstlight__cluster__failure,
                      &out->failure);
        out->failure->plan_id = failure->plan_id;
        out->failure->request_id = failure->request_id;
        out->failure->code = failure->code;
        fl_field_borrow(failure->text, strnlen(failure->text, sizeof(failure->text)),
                        &out->failure->text);
    } else if (message->kind == FL_MESSAGE_LINK) {
        FL_FIELD_MAKE(arena, Firstlight__Cluster__Link, firstlight__cluster__link, &out->link);
        out->link->plan_id = message->as.link.plan_id;
        out->link->from_stage = message->as.link.from_stage;
        out->link->incarnation = message->as.link.incarnation;
    } else if (message->kind == FL_MESSAGE_TRACE) {
        FL_FIELD_MAKE(arena, Firstlight__Cluster__Trace, firstlight__cluster__trace, &out->trace);
        out->trace->plan_id = message->as.trace.plan_id;
        out->trace->request_id = message->as.trace.request_id;
    } else {
        FL_ASSERT(message->kind == FL_MESSAGE_CREDIT);
        FL_FIELD_MAKE(arena, Firstlight__Cluster__Credit, firstlight__cluster__credit,
                      &out->credit);
        out->credit->plan_id = message->as.credit.plan_id;
        out->credit->rows = message->as.credit.rows;
    }
    return FL_OK;
}

static fl_status build(const struct fl_cluster_message *message, struct fl_arena *arena,
                       Firstlight__Cluster__Message *out)
{
    firstlight__cluster__message__init(out);
    /* A kind's number is its field's number: both are pinned, and the tests see every kind. */
    out->kind_case = (Firstlight__Cluster__Message__KindCase)message->kind;
    switch (message->kind) {
    case FL_MESSAGE_JOIN: return build_join(&message->as.join, arena, &out->join);
    case FL_MESSAGE_PLAN: return fl_plan_message_build(&message->as.plan, arena, &out->plan);
    case FL_MESSAGE_ADMIT: return build_admit(&message->as.admit, arena, &out->admit);
    case FL_MESSAGE_TOKEN: return build_token(&message->as.token, arena, &out->token);
    case FL_MESSAGE_PROGRESS: return build_progress(&message->as.progress, arena, &out->progress);
    case FL_MESSAGE_FETCH: return build_fetch(&message->as.fetch, arena, &out->fetch);
    case FL_MESSAGE_WELCOME:
    case FL_MESSAGE_UNPLAN:
    case FL_MESSAGE_END:
    case FL_MESSAGE_DROP:
    case FL_MESSAGE_FAILURE:
    case FL_MESSAGE_LINK:
    case FL_MESSAGE_TRACE:
    case FL_MESSAGE_CREDIT: return build_small(message, arena, out);
    case FL_MESSAGE_SPANS: return fl_span_message_build(&message->as.spans, arena, &out->spans);
    }
    return FL_FAIL(FL_INVALID, "message kind %d does not exist", (int)message->kind);
}

size_t fl_cluster_message_size(const struct fl_cluster_message *message, struct fl_arena *scratch)
{
    Firstlight__Cluster__Message built;
    if (build(message, scratch, &built) != FL_OK) {
        return 0;
    }
    const size_t size = protobuf_c_message_get_packed_size(&built.base);
    return size <= FL_CLUSTER_MESSAGE_MAX ? size : 0;
}

fl_status fl_cluster_message_pack(const struct fl_cluster_message *message,
                                  struct fl_arena *scratch, void *out, size_t size,
                                  size_t *out_size)
{
    Firstlight__Cluster__Message built;
    FL_TRY(build(message, scratch, &built));
    return fl_field_serialise(&built.base, FL_CLUSTER_MESSAGE_MAX, out, size, out_size);
}

/* ---- take: generated struct to plain struct, every field checked ---- */

static fl_status take_plan_id(uint64_t value, uint64_t *out)
{
    *out = value;
    return fl_field_range("plan_id", value, 1, UINT64_MAX);
}

static fl_status take_request_id(uint64_t value, uint64_t *out)
{
    *out = value;
    return fl_field_range("request_id", value, 1, UINT64_MAX);
}

static fl_status take_join(const Firstlight__Cluster__Join *message, struct fl_join *out)
{
    FL_TRY(fl_field_name("node name", &message->name, out->name));
    FL_TRY(fl_field_range("incarnation", message->incarnation, 1, UINT64_MAX));
    FL_TRY(fl_address_message_take(message->address, &out->address));
    FL_TRY(fl_field_range("threads", message->threads, 1, 4096));
    FL_TRY(fl_field_copy("isa", &message->isa, out->isa, sizeof(out->isa)));
    out->incarnation = message->incarnation;
    out->memory_budget = message->memory_budget;
    out->threads = message->threads;
    return FL_OK;
}

static fl_status take_welcome(const Firstlight__Cluster__Welcome *message, struct fl_welcome *out)
{
    out->coordinator = message->coordinator;
    return fl_field_range("coordinator", message->coordinator, 1, UINT64_MAX);
}

static fl_status take_tokens(const Firstlight__Cluster__Admit *message, struct fl_admit *out)
{
    if (message->n_tokens != 0 && message->n_tokens != message->prompt_count) {
        return FL_FAIL(FL_PROTOCOL, "admit carries %zu tokens of a prompt of %" PRIu32,
                       message->n_tokens, message->prompt_count);
    }
    for (size_t i = 0; i < message->n_tokens; i++) {
        FL_TRY(fl_field_range("token", message->tokens[i], 0, FL_VOCABULARY_MAX - 1));
    }
    out->token_count = (uint32_t)message->n_tokens;
    out->tokens = message->tokens; /* in the arena already */

    FL_TRY(fl_field_range("stop token count", message->n_stop_tokens, 0, FL_STOP_TOKEN_MAX));
    out->stop_count = (uint32_t)message->n_stop_tokens;
    for (size_t i = 0; i < message->n_stop_tokens; i++) {
        FL_TRY(fl_field_range("stop token", message->stop_tokens[i], 0, FL_VOCABULARY_MAX - 1));
        out->stop_tokens[i] = message->stop_tokens[i];
    }
    return FL_OK;
}

static fl_status take_admit(const Firstlight__Cluster__Admit *message, struct fl_admit *out)
{
    FL_TRY(take_plan_id(message->plan_id, &out->plan_id));
    FL_TRY(take_request_id(message->request_id, &out->request_id));
    out->sequence_id = message->sequence_id;
    FL_TRY(fl_field_range("prompt_count", message->prompt_count, 1, FL_CONTEXT_MAX));
    FL_TRY(fl_field_range("keep", message->keep, 0, message->prompt_count - 1));
    FL_TRY(fl_field_range("position_max", message->position_max, message->prompt_count,
                          FL_CONTEXT_MAX));
    FL_TRY(fl_field_range("max_tokens", message->max_tokens, 1, UINT32_MAX));
    out->keep = message->keep;
    out->position_max = message->position_max;
    out->prompt_count = message->prompt_count;
    out->max_tokens = message->max_tokens;
    FL_TRY(take_tokens(message, out));
    if (message->sampling == NULL) {
        return FL_FAIL(FL_PROTOCOL, "sampling is missing");
    }
    return fl_sampling_message_take(message->sampling, &out->sampling);
}

static fl_status take_end(const Firstlight__Cluster__End *message, struct fl_end *out)
{
    FL_TRY(take_plan_id(message->plan_id, &out->plan_id));
    FL_TRY(take_request_id(message->request_id, &out->request_id));
    FL_TRY(fl_field_range("keep", message->keep, 0, FL_CONTEXT_MAX));
    out->keep = message->keep;
    return FL_OK;
}

static fl_status take_token(const Firstlight__Cluster__Token *message, struct fl_arena *arena,
                            struct fl_token *out)
{
    FL_TRY(take_plan_id(message->plan_id, &out->plan_id));
    FL_TRY(take_request_id(message->request_id, &out->request_id));
    FL_TRY(fl_field_range("token index", message->index, 0, FL_CONTEXT_MAX));
    FL_TRY(fl_field_range("token position", message->position, 0, FL_CONTEXT_MAX));
    FL_TRY(fl_field_range("token id", message->id, 0, FL_VOCABULARY_MAX - 1));
    FL_TRY(fl_field_range("token finish", message->finish, FL_FINISH_NONE, FL_FINISH_CANCELLED));
    FL_TRY(fl_field_real("token logprob", (double)message->logprob, -1e30, 1e30));
    out->index = message->index;
    out->position = message->position;
    out->id = message->id;
    out->finish = (enum fl_finish)message->finish;
    out->logprob = message->logprob;
    out->logprob_count = (uint32_t)message->n_logprobs;
    out->logit_count = (uint32_t)message->n_logits;
    FL_TRY(fl_sampling_message_take_top("token logprobs", message->logprobs, message->n_logprobs,
                                        arena, &out->logprobs));
    return fl_sampling_message_take_top("token logits", message->logits, message->n_logits, arena,
                                        &out->logits);
}

static fl_status take_progress(const Firstlight__Cluster__Progress *message,
                               struct fl_progress *out)
{
    FL_TRY(take_plan_id(message->plan_id, &out->plan_id));
    FL_TRY(fl_field_range("pieces_total", message->pieces_total, 0, FL_PIECE_COUNT_MAX));
    FL_TRY(fl_field_range("pieces_done", message->pieces_done, 0, message->pieces_total));
    FL_TRY(fl_field_range("bytes_done", message->bytes_done, 0, message->bytes_total));
    out->pieces_done = message->pieces_done;
    out->pieces_total = message->pieces_total;
    out->bytes_done = message->bytes_done;
    out->bytes_total = message->bytes_total;
    out->bytes_file = message->bytes_file;
    out->bytes_cache = message->bytes_cache;
    out->bytes_fetched = message->bytes_fetched;
    return FL_OK;
}

static fl_status take_failure(const Firstlight__Cluster__Failure *message, struct fl_failure *out)
{
    out->plan_id = message->plan_id; /* 0: a refused JOIN */
    out->request_id = message->request_id;
    /* Codes of a later build are fine; those that mean "no failure" are not. */
    FL_TRY(fl_field_range("failure code", message->code, FL_INVALID, UINT32_MAX));
    out->code = message->code;
    return fl_field_copy("failure text", &message->text, out->text, sizeof(out->text));
}

static fl_status take_link(const Firstlight__Cluster__Link *message, struct fl_link *out)
{
    FL_TRY(take_plan_id(message->plan_id, &out->plan_id));
    FL_TRY(fl_field_range("from_stage", message->from_stage, 0, FL_STAGE_COUNT_MAX - 1));
    out->from_stage = message->from_stage;
    out->incarnation = message->incarnation;
    return FL_OK;
}

static fl_status take_fetch(const Firstlight__Cluster__Fetch *message, struct fl_arena *arena,
                            struct fl_fetch *out)
{
    out->transfer_id = message->transfer_id;
    FL_TRY(fl_field_model("model", &message->model, out->model));
    FL_TRY(
        fl_field_range("identity size", message->identity.len, FL_IDENTITY_SIZE, FL_IDENTITY_SIZE));
    memcpy(out->identity, message->identity.data, FL_IDENTITY_SIZE);
    FL_TRY(fl_field_range("file", message->file, 0, FL_FILE_COUNT_MAX - 1));
    out->file = message->file;
    FL_TRY(fl_field_range("range count", message->n_ranges, 1, FL_FETCH_RANGE_MAX));
    out->range_count = (uint32_t)message->n_ranges;
    FL_TRY(fl_field_array(arena, out->range_count, sizeof(*out->ranges), &out->ranges));

    uint64_t left = FL_FETCH_SIZE_MAX;
    for (size_t i = 0; i < message->n_ranges; i++) {
        const Firstlight__Cluster__Range *range = message->ranges[i];
        FL_TRY(fl_field_range("range size", range->size, 1, left));
        FL_TRY(fl_field_range("range offset", range->offset, 0, UINT64_MAX / 2));
        left -= range->size;
        out->ranges[i] = (struct fl_range){.offset = range->offset, .size = range->size};
    }
    return FL_OK;
}

static fl_status take(const Firstlight__Cluster__Message *message, struct fl_arena *arena,
                      struct fl_cluster_message *out)
{
    out->kind = (enum fl_message_kind)message->kind_case;
    switch (out->kind) {
    case FL_MESSAGE_JOIN: return take_join(message->join, &out->as.join);
    case FL_MESSAGE_WELCOME: return take_welcome(message->welcome, &out->as.welcome);
    case FL_MESSAGE_PLAN: return fl_plan_message_take(message->plan, arena, &out->as.plan);
    case FL_MESSAGE_UNPLAN: return take_plan_id(message->unplan->plan_id, &out->as.unplan.plan_id);
    case FL_MESSAGE_ADMIT: return take_admit(message->admit, &out->as.admit);
    case FL_MESSAGE_END: return take_end(message->end, &out->as.end);
    case FL_MESSAGE_DROP:
        out->as.drop.sequence_id = message->drop->sequence_id;
        return take_plan_id(message->drop->plan_id, &out->as.drop.plan_id);
    case FL_MESSAGE_TOKEN: return take_token(message->token, arena, &out->as.token);
    case FL_MESSAGE_PROGRESS: return take_progress(message->progress, &out->as.progress);
    case FL_MESSAGE_FAILURE: return take_failure(message->failure, &out->as.failure);
    case FL_MESSAGE_LINK: return take_link(message->link, &out->as.link);
    case FL_MESSAGE_CREDIT:
        out->as.credit.rows = message->credit->rows;
        return take_plan_id(message->credit->plan_id, &out->as.credit.plan_id);
    case FL_MESSAGE_FETCH: return take_fetch(message->fetch, arena, &out->as.fetch);
    case FL_MESSAGE_TRACE:
        FL_TRY(take_request_id(message->trace->request_id, &out->as.trace.request_id));
        return take_plan_id(message->trace->plan_id, &out->as.trace.plan_id);
    case FL_MESSAGE_SPANS: return fl_span_message_take(message->spans, arena, &out->as.spans);
    }
    return FL_FAIL(FL_PROTOCOL, "message is of no kind that version %d knows", FL_PROTOCOL_VERSION);
}

fl_status fl_cluster_message_unpack(const void *data, size_t size, struct fl_arena *arena,
                                    struct fl_cluster_message *out)
{
    *out = (struct fl_cluster_message){0};
    ProtobufCMessage *parsed = NULL;
    FL_TRY(fl_field_parse(&firstlight__cluster__message__descriptor, data, size,
                          FL_CLUSTER_MESSAGE_MAX, arena, &parsed));
    return take((const Firstlight__Cluster__Message *)parsed, arena, out);
}
