#include "proto/client_message.h"

#include <inttypes.h>
#include <string.h>

#include "proto/client.pb-c.h"

#include "proto/base/utf8.h"
#include "proto/message_field.h"
#include "proto/sampling_message.h"

enum { ROLE_SIZE_MAX = 16, TEMPLATE_SIZE_MAX = 32 };

/* Fields of client.proto that are looked at before a request is taken apart. */
enum {
    REQUEST_VERSION = 1,
    REQUEST_ID = 2,
    REQUEST_GENERATE = 3,
    GENERATE_MESSAGES = 4,
    GENERATE_STOPS = 11,
};

const char *fl_class_name(enum fl_class value)
{
    switch (value) {
    case FL_CLASS_UNKNOWN: return "unknown";
    case FL_CLASS_COLD: return "cold";
    case FL_CLASS_PARTIAL: return "partial";
    case FL_CLASS_WARM: return "warm";
    }
    return "unknown";
}

const char *fl_finish_name(enum fl_finish value)
{
    switch (value) {
    case FL_FINISH_NONE: return "none";
    case FL_FINISH_STOP: return "stop";
    case FL_FINISH_LENGTH: return "length";
    case FL_FINISH_CANCELLED: return "cancelled";
    }
    return "none";
}

/* ---- build: plain struct to generated struct ---- */

static fl_status build_chat(const struct fl_generate *generate, struct fl_arena *arena,
                            Firstlight__Generate *out)
{
    out->n_messages = generate->message_count;
    FL_TRY(fl_field_array(arena, generate->message_count, sizeof(*out->messages), &out->messages));
    for (uint32_t i = 0; i < generate->message_count; i++) {
        const struct fl_chat_message *chat = &generate->messages[i];
        FL_FIELD_MAKE(arena, Firstlight__ChatMessage, firstlight__chat_message, &out->messages[i]);
        fl_field_borrow_text(chat->role, &out->messages[i]->role);
        fl_field_borrow(chat->content.data, chat->content.size, &out->messages[i]->content);
    }
    return FL_OK;
}

static fl_status build_generate(const struct fl_generate *generate, struct fl_arena *arena,
                                Firstlight__Generate **out)
{
    FL_ASSERT(generate->stop_count <= FL_STOP_STRING_MAX);

    FL_FIELD_MAKE(arena, Firstlight__Generate, firstlight__generate, out);
    Firstlight__Generate *message = *out;
    fl_field_borrow_text(generate->model, &message->model);
    if (generate->prompt.data != NULL) {
        message->given_case = FIRSTLIGHT__GENERATE__GIVEN_PROMPT;
        fl_field_borrow(generate->prompt.data, generate->prompt.size, &message->prompt);
    }
    message->n_tokens = generate->token_count;
    message->tokens = generate->tokens;
    FL_TRY(build_chat(generate, arena, message));
    fl_field_borrow_text(generate->chat_template, &message->chat_template);
    message->special = generate->special;
    message->no_bos = generate->no_bos;
    message->ignore_end = generate->ignore_end;
    message->max_tokens = generate->max_tokens;
    FL_TRY(fl_sampling_message_build(&generate->sampling, arena, &message->sampling));
    message->n_stops = generate->stop_count;
    FL_TRY(fl_field_array(arena, generate->stop_count, sizeof(*message->stops), &message->stops));
    for (uint32_t i = 0; i < generate->stop_count; i++) {
        fl_field_borrow(generate->stops[i].data, generate->stops[i].size, &message->stops[i]);
    }
    return FL_OK;
}

static fl_status build_tokenize(const struct fl_tokenize *tokenize, struct fl_arena *arena,
                                Firstlight__Tokenize **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Tokenize, firstlight__tokenize, out);
    fl_field_borrow_text(tokenize->model, &(*out)->model);
    fl_field_borrow(tokenize->text.data, tokenize->text.size, &(*out)->text);
    (*out)->special = tokenize->special;
    (*out)->no_bos = tokenize->no_bos;
    return FL_OK;
}

static fl_status build_by_model(const char *model, struct fl_arena *arena,
                                Firstlight__ByModel **out)
{
    FL_FIELD_MAKE(arena, Firstlight__ByModel, firstlight__by_model, out);
    fl_field_borrow_text(model, &(*out)->model);
    return FL_OK;
}

static fl_status build(const struct fl_client_request *request, struct fl_arena *arena,
                       Firstlight__Request *out)
{
    firstlight__request__init(out);
    out->version = request->version;
    out->id = request->id;
    const char *model = request->as.by_model.model;
    switch (request->kind) {
    case FL_REQUEST_GENERATE:
        out->kind_case = FIRSTLIGHT__REQUEST__KIND_GENERATE;
        return build_generate(&request->as.generate, arena, &out->generate);
    case FL_REQUEST_CANCEL:
        out->kind_case = FIRSTLIGHT__REQUEST__KIND_CANCEL;
        FL_FIELD_MAKE(arena, Firstlight__Cancel, firstlight__cancel, &out->cancel);
        out->cancel->id = request->as.cancel.id;
        return FL_OK;
    case FL_REQUEST_TOKENIZE:
        out->kind_case = FIRSTLIGHT__REQUEST__KIND_TOKENIZE;
        return build_tokenize(&request->as.tokenize, arena, &out->tokenize);
    case FL_REQUEST_MODELS:
        out->kind_case = FIRSTLIGHT__REQUEST__KIND_MODELS;
        FL_FIELD_MAKE(arena, Firstlight__Empty, firstlight__empty, &out->models);
        return FL_OK;
    case FL_REQUEST_PLAN:
        out->kind_case = FIRSTLIGHT__REQUEST__KIND_PLAN;
        return build_by_model(model, arena, &out->plan);
    case FL_REQUEST_LOAD:
        out->kind_case = FIRSTLIGHT__REQUEST__KIND_LOAD;
        return build_by_model(model, arena, &out->load);
    case FL_REQUEST_UNLOAD:
        out->kind_case = FIRSTLIGHT__REQUEST__KIND_UNLOAD;
        return build_by_model(model, arena, &out->unload);
    case FL_REQUEST_STATUS:
        out->kind_case = FIRSTLIGHT__REQUEST__KIND_STATUS;
        FL_FIELD_MAKE(arena, Firstlight__Empty, firstlight__empty, &out->status);
        return FL_OK;
    case FL_REQUEST_TIMELINE:
        out->kind_case = FIRSTLIGHT__REQUEST__KIND_TIMELINE;
        FL_FIELD_MAKE(arena, Firstlight__ByTimeline, firstlight__by_timeline, &out->timeline);
        out->timeline->timeline_id = request->as.timeline.id;
        return FL_OK;
    }
    return FL_FAIL(FL_INVALID, "request kind %d does not exist", (int)request->kind);
}

fl_status fl_client_request_pack(const struct fl_client_request *request, struct fl_arena *scratch,
                                 void *out, size_t size, size_t *out_size)
{
    Firstlight__Request built;
    FL_TRY(build(request, scratch, &built));
    return fl_field_serialise(&built.base, FL_CLIENT_MESSAGE_MAX, out, size, out_size);
}

/* ---- take: generated struct to plain struct, every field checked ---- */

/* Text that may hold NUL: stays where protobuf-c put it, in the arena. */
static fl_status take_bytes(const char *field, const ProtobufCBinaryData *data, size_t size_max,
                            struct fl_text *out)
{
    if (data->len > size_max) {
        return FL_FAIL(FL_PROTOCOL, "%s has %zu bytes, the limit is %zu", field, data->len,
                       size_max);
    }
    const size_t valid = fl_utf8_valid_size(data->data, data->len);
    if (valid < data->len) {
        return FL_FAIL(FL_PROTOCOL, "%s is not UTF-8 at byte %zu (0x%02x)", field, valid,
                       data->data[valid]);
    }
    *out =
        (struct fl_text){.data = data->len > 0 ? (const char *)data->data : "", .size = data->len};
    return FL_OK;
}

static fl_status take_model(const ProtobufCBinaryData *data, struct fl_arena *arena,
                            const char **out)
{
    char *name = NULL;
    FL_TRY(fl_field_array(arena, FL_MODEL_NAME_MAX, 1, (void *)&name));
    FL_TRY(fl_field_model("model", data, name));
    *out = name;
    return FL_OK;
}

static fl_status take_sampling(const Firstlight__Sampling *message, struct fl_sampling *out)
{
    *out = (struct fl_sampling){.top_p = 1, .repetition_penalty = 1};
    if (message == NULL) {
        return FL_OK;
    }
    FL_TRY(fl_sampling_message_take(message, out));
    /* proto3 cannot tell 0 from left out, and 0 would mean nothing here. */
    if (!(out->top_p > 0)) {
        out->top_p = 1;
    }
    if (!(out->repetition_penalty > 0)) {
        out->repetition_penalty = 1;
    }
    return FL_OK;
}

static fl_status take_chat(const Firstlight__Generate *message, struct fl_arena *arena,
                           struct fl_generate *out)
{
    static const char *const roles[] = {"system", "user", "assistant"};
    FL_TRY(fl_field_range("message count", message->n_messages, 0, FL_CHAT_MESSAGE_MAX));
    out->message_count = (uint32_t)message->n_messages;
    FL_TRY(fl_field_array(arena, out->message_count, sizeof(*out->messages), &out->messages));
    size_t left = FL_PROMPT_SIZE_MAX;
    for (size_t i = 0; i < message->n_messages; i++) {
        struct fl_chat_message *chat = &out->messages[i];
        char role[ROLE_SIZE_MAX];
        FL_TRY(fl_field_copy("role", &message->messages[i]->role, role, sizeof(role)));
        for (size_t k = 0; k < sizeof(roles) / sizeof(roles[0]); k++) {
            if (strcmp(role, roles[k]) == 0) {
                chat->role = roles[k];
            }
        }
        if (chat->role == NULL) {
            return FL_FAIL(FL_PROTOCOL, "role '%s' is none of system, user, assistant", role);
        }
        if (message->messages[i]->content.len > left) {
            return FL_FAIL(FL_PROTOCOL, "the messages have more than %d bytes together, the limit",
                           FL_PROMPT_SIZE_MAX);
        }
        FL_TRY(take_bytes("message content", &message->messages[i]->content, left, &chat->content));
        left -= chat->content.size;
    }
    return FL_OK;
}

/* What to continue: exactly one of three ways to say it. */
static fl_status take_input(const Firstlight__Generate *message, struct fl_arena *arena,
                            struct fl_generate *out)
{
    if (message->given_case == FIRSTLIGHT__GENERATE__GIVEN_PROMPT) {
        FL_TRY(take_bytes("prompt", &message->prompt, FL_PROMPT_SIZE_MAX, &out->prompt));
    }
    FL_TRY(fl_field_range("token count", message->n_tokens, 0, FL_CONTEXT_MAX));
    for (size_t i = 0; i < message->n_tokens; i++) {
        FL_TRY(fl_field_range("token", message->tokens[i], 0, FL_VOCABULARY_MAX - 1));
    }
    out->token_count = (uint32_t)message->n_tokens;
    out->tokens = message->tokens; /* in the arena already */
    FL_TRY(take_chat(message, arena, out));

    const int given =
        (out->prompt.data != NULL) + (out->token_count != 0) + (out->message_count != 0);
    if (given != 1) {
        return FL_FAIL(FL_PROTOCOL,
                       "generate has %s of prompt, tokens and messages: give exactly one",
                       given == 0 ? "none" : "more than one");
    }
    return FL_OK;
}

static fl_status take_generate(const Firstlight__Generate *message, struct fl_arena *arena,
                               struct fl_generate *out)
{
    FL_TRY(take_model(&message->model, arena, &out->model));
    FL_TRY(take_input(message, arena, out));
    FL_TRY(fl_field_text(arena, "chat_template", &message->chat_template, TEMPLATE_SIZE_MAX,
                         &out->chat_template));
    out->special = message->special != 0;
    out->no_bos = message->no_bos != 0;
    out->ignore_end = message->ignore_end != 0;
    out->max_tokens = message->max_tokens;
    FL_TRY(take_sampling(message->sampling, &out->sampling));
    FL_TRY(fl_field_range("stop count", message->n_stops, 0, FL_STOP_STRING_MAX));
    out->stop_count = (uint32_t)message->n_stops;
    for (size_t i = 0; i < message->n_stops; i++) {
        FL_TRY(take_bytes("stop", &message->stops[i], FL_STOP_STRING_SIZE_MAX, &out->stops[i]));
        if (out->stops[i].size == 0) {
            return FL_FAIL(FL_PROTOCOL, "stop %zu is empty: it would end every answer", i);
        }
    }
    return FL_OK;
}

static fl_status take_tokenize(const Firstlight__Tokenize *message, struct fl_arena *arena,
                               struct fl_tokenize *out)
{
    FL_TRY(take_model(&message->model, arena, &out->model));
    FL_TRY(take_bytes("text", &message->text, FL_PROMPT_SIZE_MAX, &out->text));
    out->special = message->special != 0;
    out->no_bos = message->no_bos != 0;
    return FL_OK;
}

static fl_status take(const Firstlight__Request *message, struct fl_arena *arena,
                      struct fl_client_request *out)
{
    switch (message->kind_case) {
    case FIRSTLIGHT__REQUEST__KIND_GENERATE:
        out->kind = FL_REQUEST_GENERATE;
        return take_generate(message->generate, arena, &out->as.generate);
    case FIRSTLIGHT__REQUEST__KIND_CANCEL:
        out->kind = FL_REQUEST_CANCEL;
        out->as.cancel.id = message->cancel->id;
        return FL_OK;
    case FIRSTLIGHT__REQUEST__KIND_TOKENIZE:
        out->kind = FL_REQUEST_TOKENIZE;
        return take_tokenize(message->tokenize, arena, &out->as.tokenize);
    case FIRSTLIGHT__REQUEST__KIND_MODELS: out->kind = FL_REQUEST_MODELS; return FL_OK;
    case FIRSTLIGHT__REQUEST__KIND_PLAN:
        out->kind = FL_REQUEST_PLAN;
        return take_model(&message->plan->model, arena, &out->as.by_model.model);
    case FIRSTLIGHT__REQUEST__KIND_LOAD:
        out->kind = FL_REQUEST_LOAD;
        return take_model(&message->load->model, arena, &out->as.by_model.model);
    case FIRSTLIGHT__REQUEST__KIND_UNLOAD:
        out->kind = FL_REQUEST_UNLOAD;
        return take_model(&message->unload->model, arena, &out->as.by_model.model);
    case FIRSTLIGHT__REQUEST__KIND_STATUS: out->kind = FL_REQUEST_STATUS; return FL_OK;
    case FIRSTLIGHT__REQUEST__KIND_TIMELINE:
        out->kind = FL_REQUEST_TIMELINE;
        out->as.timeline.id = message->timeline->timeline_id;
        return FL_OK;
    case FIRSTLIGHT__REQUEST__KIND__NOT_SET: break;
    case _FIRSTLIGHT__REQUEST__KIND__CASE_IS_INT_SIZE: break;
    }
    return FL_FAIL(FL_PROTOCOL, "request %" PRIu64 " is of no kind that protocol version %d knows",
                   out->id, FL_CLIENT_VERSION);
}

size_t fl_client_request_arena(size_t size)
{
    /* A conversation's parts cost up to 300 bytes each, however short they are. */
    return 8 * size + (size_t)FL_CHAT_MESSAGE_MAX * 300 + (64 << 10);
}

/* The counts whose parts cost many times their bytes in memory: they meet their limits first. */
static fl_status check_counts(const void *data, size_t size, struct fl_client_request *out)
{
    const unsigned char *at = data;
    struct fl_raw_field field;
    struct fl_raw_field part;
    size_t messages = 0;
    size_t stops = 0;
    while (size > 0 && fl_field_next(&at, (const unsigned char *)data + size, &field)) {
        if (field.number == REQUEST_VERSION) {
            out->version = (uint32_t)field.value;
        } else if (field.number == REQUEST_ID) {
            out->id = field.value;
        } else if (field.number == REQUEST_GENERATE && field.data != NULL) {
            const unsigned char *inside = field.data;
            while (fl_field_next(&inside, field.data + field.size, &part)) {
                messages += part.number == GENERATE_MESSAGES;
                stops += part.number == GENERATE_STOPS;
            }
        }
    }
    if (out->version != FL_CLIENT_VERSION) {
        return FL_OK; /* refused by its name, and its fields are others */
    }
    if (messages > FL_CHAT_MESSAGE_MAX) {
        return FL_FAIL(FL_INVALID,
                       "the conversation has %zu messages, the limit is %d: leave the oldest out",
                       messages, FL_CHAT_MESSAGE_MAX);
    }
    if (stops > FL_STOP_STRING_MAX) {
        return FL_FAIL(FL_INVALID, "the request has %zu stop texts, the limit is %d", stops,
                       FL_STOP_STRING_MAX);
    }
    return FL_OK;
}

fl_status fl_client_request_unpack(const void *data, size_t size, struct fl_arena *arena,
                                   struct fl_client_request *out)
{
    *out = (struct fl_client_request){0};
    FL_TRY(check_counts(data, size, out));
    ProtobufCMessage *parsed = NULL;
    FL_TRY(fl_field_parse(&firstlight__request__descriptor, data, size, FL_CLIENT_MESSAGE_MAX,
                          arena, &parsed));
    const Firstlight__Request *message = (const Firstlight__Request *)parsed;
    out->version = message->version;
    out->id = message->id;
    if (message->version != FL_CLIENT_VERSION) {
        return FL_FAIL(FL_UNSUPPORTED,
                       "client speaks protocol version %" PRIu32 ", this coordinator speaks %d",
                       message->version, FL_CLIENT_VERSION);
    }
    const fl_status status = take(message, arena, out);
    /* The frame was a request: what is wrong with it is no reason to end the connection. */
    return status == FL_PROTOCOL ? FL_INVALID : status;
}
