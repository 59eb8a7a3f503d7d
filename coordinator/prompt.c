#include "coordinator/prompt.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/request.h"

enum {
    RETRY_MS = 1000,
    /* Token ids a chat template adds: its marks, and a default system message. */
    MARKUP_TOKENS = 4096,
    MESSAGE_MARKUP_TOKENS = 64,
};

/* ---- taking what the client sent ---- */

static const char *known_role(const char *role)
{
    static const char *const roles[] = {"system", "user", "assistant"};
    for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++) {
        if (role != NULL && strcmp(role, roles[i]) == 0) {
            return roles[i];
        }
    }
    return NULL;
}

static fl_status take_messages(struct request *request, const struct fl_generate *wanted)
{
    size_t size = 0;
    for (uint32_t i = 0; i < wanted->message_count; i++) {
        size += wanted->messages[i].content.size;
        if (known_role(wanted->messages[i].role) == NULL) {
            return FL_FAIL(FL_INVALID,
                           "message %" PRIu32 " has the role '%s'; it is system, user or assistant",
                           i + 1, wanted->messages[i].role);
        }
    }
    request->text = malloc(size + 1);
    request->messages = calloc(wanted->message_count, sizeof(*request->messages));
    if (request->text == NULL || request->messages == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for messages of %zu bytes", size);
    }
    char *at = request->text;
    for (uint32_t i = 0; i < wanted->message_count; i++) {
        const struct fl_text *content = &wanted->messages[i].content;
        if (content->size > 0) {
            memcpy(at, content->data, content->size);
        }
        request->messages[i].role = known_role(wanted->messages[i].role);
        request->messages[i].content = (struct gguf_string){.data = at, .size = content->size};
        at += content->size;
    }
    request->text_size = size;
    request->message_count = wanted->message_count;
    return FL_OK;
}

fl_status prompt_take_text(struct request *request, const struct fl_text *text, const char *what)
{
    request->text = malloc(text->size + 1);
    if (request->text == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a %s of %zu bytes", what, text->size);
    }
    if (text->size > 0) {
        memcpy(request->text, text->data, text->size);
    }
    request->text_size = text->size;
    return FL_OK;
}

fl_status prompt_take(struct request *request, const struct fl_generate *wanted)
{
    const int given =
        (wanted->prompt.data != NULL) + (wanted->token_count > 0) + (wanted->message_count > 0);
    if (given != 1) {
        return FL_FAIL(FL_INVALID, "a request has %s; give one of prompt, tokens and messages",
                       given == 0 ? "no prompt" : "more than one kind of prompt");
    }
    if (wanted->message_count > 0) {
        return take_messages(request, wanted);
    }
    if (wanted->token_count > 0) {
        request->tokens = malloc(wanted->token_count * sizeof(*request->tokens));
        if (request->tokens == NULL) {
            return FL_FAIL(FL_NO_MEMORY, "no memory for %" PRIu32 " tokens", wanted->token_count);
        }
        memcpy(request->tokens, wanted->tokens, wanted->token_count * sizeof(*request->tokens));
        request->prompt_count = wanted->token_count;
        return FL_OK;
    }
    return prompt_take_text(request, &wanted->prompt, "prompt");
}

/* ---- tokenising, on the worker ---- */

struct tokenising {
    struct job job;
    struct coordinator *coordinator;
    prompt_ready_fn *ready;
    struct catalog_model *model; /* held */
    uint64_t serial;
    char *text; /* taken over from the request, with messages */
    size_t text_size;
    uint32_t message_count;
    struct chat_message *messages;
    char chat_family[32];
    unsigned flags; /* enum tokenizer_flag */
    unsigned chat_flags;
    fl_status status; /* FL_AGAIN: not run */
    char error[STATE_TEXT_MAX];
    uint64_t begin_ns;
    uint64_t end_ns;
    uint32_t *ids;
    size_t count;
};

static fl_status encode_messages(struct tokenising *job, size_t max)
{
    const struct catalog_model *model = job->model;
    struct chat_template other;
    const struct chat_template *chat = &model->chat;
    if (job->chat_family[0] != '\0') {
        FL_TRY(chat_template_open(model_gguf(model->model), tokenizer_vocabulary(model->tokenizer),
                                  job->chat_family, &other));
        chat = &other;
    } else if (!model->has_chat) {
        return FL_FAIL(FL_UNSUPPORTED, "%s", model->chat_problem);
    }
    return chat_template_encode(chat, model->tokenizer, job->messages, job->message_count,
                                job->chat_flags, job->ids, max, &job->count);
}

static void tokenise(struct tokenising *job)
{
    /* A token takes a byte of text or more, but for those that the model adds. */
    size_t max = job->text_size + 16;
    if (job->message_count > 0) {
        max += MARKUP_TOKENS + (size_t)job->message_count * MESSAGE_MARKUP_TOKENS;
    }
    job->ids = malloc(max * sizeof(*job->ids));
    if (job->ids == NULL) {
        job->status =
            FL_FAIL(FL_NO_MEMORY, "no memory for the tokens of %zu bytes", job->text_size);
    } else if (job->message_count > 0) {
        job->status = encode_messages(job, max);
    } else {
        job->status = tokenizer_encode(job->model->tokenizer, job->text, job->text_size, job->flags,
                                       job->ids, max, &job->count);
    }
    if (job->status != FL_OK) {
        snprintf(job->error, sizeof(job->error), "%s", fl_last_error());
        return;
    }
    uint32_t *fitted = realloc(job->ids, (job->count > 0 ? job->count : 1) * sizeof(*job->ids));
    job->ids = fitted != NULL ? fitted : job->ids;
}

static void run_tokenising(struct job *base)
{
    struct tokenising *job = (struct tokenising *)base;
    job->begin_ns = state_now(job->coordinator);
    tokenise(job);
    job->end_ns = state_now(job->coordinator);
}

static void done_tokenising(struct job *base, void *ctx)
{
    struct coordinator *coordinator = ctx;
    struct tokenising *job = (struct tokenising *)base;
    struct request *request = request_by_serial(coordinator, job->serial);
    if (request != NULL && job->status != FL_OK) {
        request_fail(coordinator, request, job->status == FL_AGAIN ? FL_CANCELLED : job->status,
                     job->error, 0);
    } else if (request != NULL) {
        request->tokens = job->ids;
        request->prompt_count = (uint32_t)job->count;
        request->tokenise_ns = job->begin_ns;
        request->tokenised_ns = job->end_ns;
        job->ids = NULL;
        job->ready(coordinator, request);
    }
    catalog_release(coordinator->catalog, job->model);
    free(job->text);
    free(job->messages);
    free(job->ids);
    free(job);
}

void prompt_tokenise(struct coordinator *coordinator, struct request *request,
                     prompt_ready_fn *ready)
{
    struct tokenising *job = calloc(1, sizeof(*job));
    if (job == NULL) {
        request_fail(coordinator, request, FL_NO_MEMORY, "no memory to tokenise the prompt", 0);
        return;
    }
    *job = (struct tokenising){.job = {.run = run_tokenising, .done = done_tokenising},
                               .coordinator = coordinator,
                               .ready = ready,
                               .model = request->model,
                               .serial = request->serial,
                               .text_size = request->text_size,
                               .message_count = request->message_count,
                               .flags = TOKENIZER_ADD_SPECIAL,
                               .chat_flags = CHAT_ADD_PROMPT,
                               .status = FL_AGAIN};
    /* The model's end-of-text is for training texts; behind a prompt it would end the answer. */
    job->flags |= request->kind == FL_REQUEST_GENERATE ? TOKENIZER_NO_EOS : 0;
    job->flags |= request->special ? TOKENIZER_PARSE_SPECIAL : 0;
    job->chat_flags |= request->special ? CHAT_PARSE_CONTENT : 0;
    job->flags |= request->no_bos ? TOKENIZER_NO_BOS : 0;
    memcpy(job->chat_family, request->chat_family, sizeof(job->chat_family));
    /* Before submit(): the worker may run the job at once. */
    job->text = request->text;
    job->messages = request->messages;
    if (worker_submit(coordinator->worker, &job->job) != FL_OK) {
        free(job);
        request_fail(coordinator, request, FL_BUSY, fl_last_error(), RETRY_MS);
        return;
    }
    request->text = NULL;
    request->messages = NULL;
    catalog_keep(job->model);
}
