#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/client/answer.h"
#include "proto/client/commands.h"
#include "proto/client/exchange.h"
#include "proto/client/input_text.h"
#include "proto/client/interrupt.h"
#include "proto/client/options.h"
#include "proto/client/sampling_options.h"
#include "proto/pool_key.h"

/* What was said so far.  The coordinator keeps no conversation, but the nodes keep its KV cache:
 * the next turn sends everything and computes only what is new. */
struct conversation {
    uint32_t count;
    struct fl_chat_message messages[FL_CHAT_MESSAGE_MAX]; /* contents are malloc'ed */
    size_t size;                                          /* bytes of all contents */
};

struct chat {
    struct exchange_config exchange_config;
    struct sampling_options answer;
    const char *model;
    const char *system;
    bool terminal; /* a person types */
    struct exchange exchange;
    struct conversation conversation;
    bool failed; /* a turn did */
};

/* ---- conversation ---- */

static void forget_from(struct conversation *conversation, uint32_t first)
{
    while (conversation->count > first) {
        struct fl_chat_message *message = &conversation->messages[--conversation->count];
        conversation->size -= message->content.size;
        free((void *)(uintptr_t)message->content.data);
    }
}

static fl_status say(struct conversation *conversation, const char *role, const char *text,
                     size_t size)
{
    if (conversation->count == FL_CHAT_MESSAGE_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "the conversation has %d messages: /reset begins a new one",
                       FL_CHAT_MESSAGE_MAX);
    }
    if (size > FL_PROMPT_SIZE_MAX - conversation->size) {
        return FL_FAIL(FL_TOO_LARGE, "the conversation is over %d bytes: /reset begins a new one",
                       FL_PROMPT_SIZE_MAX);
    }
    char *copy = malloc(size + 1);
    if (copy == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a message of %zu bytes", size);
    }
    memcpy(copy, text, size);
    copy[size] = '\0';
    conversation->messages[conversation->count++] =
        (struct fl_chat_message){.role = role, .content = {.data = copy, .size = size}};
    conversation->size += size;
    return FL_OK;
}

static fl_status reset(struct chat *chat)
{
    forget_from(&chat->conversation, 0);
    if (chat->system != NULL && chat->system[0] != '\0') {
        return say(&chat->conversation, "system", chat->system, strlen(chat->system));
    }
    return FL_OK;
}

/* ---- one turn ---- */

static fl_status receive(struct chat *chat, struct answer *answer)
{
    struct fl_client_request request = {.kind = FL_REQUEST_GENERATE};
    struct fl_client_event done;
    FL_TRY(sampling_options_apply(&chat->answer, &request.as.generate));
    request.as.generate.model = chat->model;
    request.as.generate.messages = chat->conversation.messages;
    request.as.generate.message_count = chat->conversation.count;
    FL_TRY(exchange_begin(&chat->exchange, &request));
    FL_TRY(answer_receive(answer, &chat->exchange, &done));
    if (answer->text_size == 0 || answer->text[answer->text_size - 1] != '\n') {
        fputc('\n', stdout);
    }
    fflush(stdout);
    if (!chat->exchange_config.quiet) {
        answer_figures(&done, stderr);
    }
    return FL_OK;
}

/* A turn that failed leaves no trace in the conversation.  FL_LINK_LOST and the like end the chat:
 * whatever else failed has been said, and the next turn may go better. */
static fl_status take_turn(struct chat *chat, const char *text, size_t size)
{
    const uint32_t before = chat->conversation.count;
    struct answer answer;
    answer_init(&answer, true);
    fl_status status = input_text_check("the message", text, size);
    if (status == FL_OK) {
        status = say(&chat->conversation, "user", text, size);
    }
    if (status == FL_OK) {
        status = receive(chat, &answer);
    }
    if (status == FL_OK && answer.text_size > 0) {
        status = say(&chat->conversation, "assistant", answer.text, answer.text_size);
    }
    if (status != FL_OK || answer.text_size == 0) {
        forget_from(&chat->conversation, before);
    }
    answer_free(&answer);
    interrupt_clear();
    if (status != FL_OK) {
        chat->failed = true;
    }
    if (interrupt_is_final()) {
        return FL_CANCELLED;
    }
    return status != FL_OK && fl_status_scope(status) == FL_SCOPE_LINK ? status : FL_OK;
}

/* ---- lines ---- */

static void print_chat_help(void)
{
    printf("/exit            leave (also Ctrl-D)\n"
           "/reset           begin a new conversation\n"
           "/system TEXT     say how the model should behave, and begin anew\n"
           "Ctrl-C           stop an answer\n");
}

/* A line that begins with '/'.  FL_END: leave. */
static fl_status take_command(struct chat *chat, char *line)
{
    static const char *const names[] = {"/exit", "/reset", "/system", "/help"};
    char *argument = line + strcspn(line, " ");
    if (*argument == ' ') {
        *argument++ = '\0';
    }
    if (strcmp(line, "/exit") == 0 || strcmp(line, "/quit") == 0) {
        return FL_END;
    }
    if (strcmp(line, "/reset") == 0) {
        return reset(chat);
    }
    if (strcmp(line, "/system") == 0) {
        forget_from(&chat->conversation, 0);
        chat->system = NULL; /* only what was typed last counts */
        FL_TRY(input_text_check("the message", argument, strlen(argument)));
        return argument[0] == '\0' ? FL_OK
                                   : say(&chat->conversation, "system", argument, strlen(argument));
    }
    if (strcmp(line, "/help") == 0) {
        print_chat_help();
        return FL_OK;
    }
    const char *nearest = options_nearest(line, names, sizeof(names) / sizeof(names[0]));
    fprintf(stderr, "there is no %.20s here%s%s; /help lists what there is\n", line,
            nearest != NULL ? ", perhaps you mean " : "", nearest != NULL ? nearest : "");
    return FL_OK;
}

static fl_status take_line(struct chat *chat, char *line, size_t size)
{
    while (size > 0 && (line[size - 1] == '\n' || line[size - 1] == '\r')) {
        line[--size] = '\0';
    }
    if (size == 0) {
        return FL_OK;
    }
    if (line[0] == '/') {
        const fl_status status = take_command(chat, line);
        if (status == FL_END) {
            return FL_END;
        }
        chat->failed = chat->failed || status != FL_OK;
        return FL_OK;
    }
    return take_turn(chat, line, size);
}

/* FL_END at the end of input, FL_AGAIN after Ctrl-C at the prompt, FL_CANCELLED when it is over. */
static fl_status read_line(const struct chat *chat, char **line, size_t *room, size_t *out_size)
{
    if (chat->terminal) {
        fputs("> ", stdout);
        fflush(stdout);
    }
    errno = 0;
    const ssize_t size = getline(line, room, stdin);
    if (size >= 0) {
        *out_size = (size_t)size;
        return FL_OK;
    }
    if (errno == EINTR && (interrupt_is_final() || !chat->terminal)) {
        return FL_CANCELLED;
    }
    if (errno == EINTR) {
        clearerr(stdin);
        interrupt_clear();
        fputs("\n(/exit or Ctrl-D leaves)\n", stdout);
        return FL_AGAIN;
    }
    return FL_END;
}

static fl_status talk(struct chat *chat)
{
    char *line = NULL;
    size_t room = 0;
    fl_status status = reset(chat);
    while (status == FL_OK) {
        size_t size = 0;
        status = read_line(chat, &line, &room, &size);
        if (status == FL_OK) {
            status = take_line(chat, line, size);
        } else if (status == FL_AGAIN) {
            status = FL_OK;
        }
    }
    free(line);
    return status == FL_END ? FL_OK : status;
}

/* ---- command ---- */

static fl_status parse(int argc, char **argv, struct chat *chat)
{
    const struct option options[] = {
        {OPTION_HEADING, "Conversation", NULL, NULL, NULL, 0, 0},
        {OPTION_TEXT, "--model", "NAME", "the model's file without .gguf (firstlight models)",
         &chat->model, 0, 0},
        {OPTION_TEXT, "--system", "TEXT", "how the model should behave", &chat->system, 0, 0},
        SAMPLING_OPTIONS(&chat->answer, "0.7", "a fresh one"),
        EXCHANGE_OPTIONS(&chat->exchange_config),
    };
    const struct command_line line = {
        .command = "chat",
        .usage = "--model NAME [OPTION..]",
        .about = "Talks with a model, one line a turn, and remembers what was said.  /help lists\n"
                 "what can be typed besides; Ctrl-C stops an answer.  Reads a pipe too.",
        .examples =
            "  firstlight chat --model SmolLM2-135M-Instruct.Q4_1\n"
            "  firstlight chat --model gemma-3-270m-q4_k_m --system \"Answer briefly.\" "
            "--temperature 0\n"
            "  printf 'Hello\\nWhat did I say?\\n' | firstlight chat --model tiny --quiet\n",
        .options = options,
        .option_count = sizeof(options) / sizeof(options[0]),
    };
    FL_TRY(options_parse(&line, argc, argv));
    if (chat->model == NULL) {
        return FL_FAIL(FL_INVALID, "--model is missing; firstlight models lists the names");
    }
    if (chat->exchange_config.json) {
        return FL_FAIL(FL_INVALID, "chat prints no JSON: firstlight generate --chat --json does");
    }
    struct fl_generate unused;
    return sampling_options_apply(&chat->answer, &unused);
}

int command_chat(int argc, char **argv)
{
    struct chat *chat = calloc(1, sizeof(*chat));
    if (chat == NULL) {
        (void)FL_FAIL(FL_NO_MEMORY, "no memory for a conversation");
        return EXIT_FAILURE;
    }
    chat->answer.sampling =
        (struct fl_sampling){.temperature = 0.7f, .top_p = 1, .repetition_penalty = 1};
    fl_random_bytes(&chat->answer.sampling.seed, sizeof(chat->answer.sampling.seed));
    chat->terminal = isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0;
    fl_status status = parse(argc, argv, chat);
    int exit_status = EXIT_SUCCESS;
    if (status == FL_OK) {
        status = exchange_open(&chat->exchange, &chat->exchange_config);
        if (status == FL_OK) {
            interrupt_watch();
            status = talk(chat);
        }
        exit_status = chat->failed && status == FL_OK ? EXIT_FAILURE : exchange_exit(status);
    } else if (status != FL_END) {
        exit_status = EXIT_CALLED_WRONGLY;
    }
    exchange_close(&chat->exchange);
    forget_from(&chat->conversation, 0);
    free(chat);
    return exit_status;
}
