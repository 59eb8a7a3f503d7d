#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/client/answer.h"
#include "proto/client/commands.h"
#include "proto/client/exchange.h"
#include "proto/client/input_text.h"
#include "proto/client/interrupt.h"
#include "proto/client/options.h"
#include "proto/client/sampling_options.h"

struct generate_options {
    struct exchange_config exchange;
    struct sampling_options answer;
    const char *model;
    const char *prompt;
    const char *prompt_file;
    const char *tokens;
    bool chat;
    bool special;
    bool no_bos;
    bool ignore_end;
};

static fl_status parse(int argc, char **argv, struct generate_options *o)
{
    const struct option options[] = {
        {OPTION_HEADING, "What to continue", NULL, NULL, NULL, 0, 0},
        {OPTION_TEXT, "--model", "NAME", "the model's file without .gguf (firstlight models)",
         &o->model, 0, 0},
        {OPTION_TEXT, "--prompt", "TEXT", "this text", &o->prompt, 0, 0},
        {OPTION_TEXT, "--prompt-file", "FILE", "the text in a file (-: standard input)",
         &o->prompt_file, 0, 0},
        {OPTION_TEXT, "--tokens", "1,2,3", "these token ids as they are", &o->tokens, 0, 0},
        {OPTION_FLAG, "--chat", NULL, "the text is a question: put it into the chat template",
         &o->chat, 0, 0},
        {OPTION_FLAG, "--special", NULL, "text like <|im_start|> becomes special tokens",
         &o->special, 0, 0},
        {OPTION_FLAG, "--no-bos", NULL, "no beginning-of-text token in front", &o->no_bos, 0, 0},
        SAMPLING_OPTIONS(&o->answer, "0", "0"),
        {OPTION_FLAG, "--ignore-end", NULL, "go on after the model's end token (benchmarks)",
         &o->ignore_end, 0, 0},
        {OPTION_COUNT, "--logprobs", "K", "K log-probabilities a token (needs --json)",
         &o->answer.sampling.logprobs, 0, FL_TOP_MAX},
        {OPTION_COUNT, "--top-logits", "K", "the K largest logits of the prompt's last position",
         &o->answer.sampling.top_logits, 0, FL_TOP_MAX},
        EXCHANGE_OPTIONS(&o->exchange),
    };
    const struct command_line line = {
        .command = "generate",
        .usage = "--model NAME (--prompt TEXT | --prompt-file F | --tokens 1,2,3) [OPTION..]",
        .about = "Continues a text and prints the continuation as it comes; loads the model first\n"
                 "when it is not loaded.  Ctrl-C cancels the request on the cluster.",
        .examples =
            "  firstlight generate --model SmolLM2-135M-Instruct.Q4_1 --prompt \"Once upon\" "
            "--max-tokens 40\n"
            "  firstlight generate --model SmolLM2-135M-Instruct.Q4_1 --chat --prompt "
            "\"Why is the sky blue?\"\n"
            "  firstlight generate --model tiny --tokens 1,15043 --max-tokens 8 --json\n",
        .options = options,
        .option_count = sizeof(options) / sizeof(options[0]),
    };
    return options_parse(&line, argc, argv);
}

/* "1,2,3" into a malloc'ed array. */
static fl_status parse_tokens(const char *text, uint32_t **out, uint32_t *out_count)
{
    uint32_t *tokens = malloc((strlen(text) / 2 + 1) * sizeof(*tokens));
    if (tokens == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for --tokens");
    }
    uint32_t count = 0;
    const char *at = text;
    for (;;) {
        char *end = NULL;
        errno = 0;
        const unsigned long id = strtoul(at, &end, 10);
        if (at[0] < '0' || at[0] > '9' || errno != 0 || id >= FL_VOCABULARY_MAX ||
            (*end != '\0' && *end != ',') || count == FL_CONTEXT_MAX) {
            free(tokens);
            return FL_FAIL(FL_INVALID, "--tokens has '%.20s' where a token id below %d would be",
                           at, FL_VOCABULARY_MAX);
        }
        tokens[count++] = (uint32_t)id;
        if (*end == '\0') {
            *out = tokens;
            *out_count = count;
            return FL_OK;
        }
        at = end + 1;
    }
}

static fl_status check(const struct generate_options *o)
{
    if (o->model == NULL) {
        return FL_FAIL(FL_INVALID, "--model is missing; firstlight models lists the names");
    }
    const int given = (o->prompt != NULL) + (o->prompt_file != NULL) + (o->tokens != NULL);
    if (given != 1) {
        return FL_FAIL(FL_INVALID, "give exactly one of --prompt, --prompt-file and --tokens");
    }
    if (o->chat && o->tokens != NULL) {
        return FL_FAIL(FL_INVALID, "--chat needs a text, --tokens has none");
    }
    if (o->answer.chat_template != NULL && !o->chat) {
        return FL_FAIL(FL_INVALID, "--template needs --chat");
    }
    if (o->answer.sampling.logprobs > 0 && !o->exchange.json) {
        return FL_FAIL(FL_INVALID, "--logprobs needs --json, which shows them");
    }
    if (o->prompt != NULL) {
        return input_text_check("--prompt", o->prompt, strlen(o->prompt));
    }
    return FL_OK;
}

static void print_logits(const struct fl_client_event *done)
{
    printf("%8s  %s\n", "token", "logit");
    for (uint32_t i = 0; i < done->as.done.logit_count; i++) {
        printf("%8u  %.9g\n", done->as.done.logits[i].id, (double)done->as.done.logits[i].value);
    }
}

static fl_status run_request(const struct generate_options *o,
                             const struct fl_client_request *request, struct exchange *exchange)
{
    const bool json = o->exchange.json;
    struct answer answer;
    struct fl_client_event done;
    answer_init(&answer, !json);
    interrupt_watch();
    fl_status status = exchange_begin(exchange, request);
    if (status == FL_OK) {
        status = answer_receive(&answer, exchange, &done);
    }
    if (!json && answer.text_size > 0 && answer.text[answer.text_size - 1] != '\n') {
        fputc('\n', stdout);
        fflush(stdout);
    }
    if (status == FL_OK && json) {
        answer_json(&answer, &done, o->answer.sampling.logprobs > 0,
                    o->answer.sampling.top_logits > 0, stdout);
    } else if (status == FL_OK && o->answer.sampling.top_logits > 0) {
        print_logits(&done);
    }
    if (status == FL_OK && !o->exchange.quiet && !json) {
        answer_figures(&done, stderr);
    }
    if (status == FL_OK && done.as.done.finish == FL_FINISH_CANCELLED) {
        status = FL_CANCELLED;
    }
    answer_free(&answer);
    return status;
}

static fl_status run(const struct generate_options *o, struct fl_generate *generate)
{
    const struct fl_client_request request = {.kind = FL_REQUEST_GENERATE,
                                              .as.generate = *generate};
    struct exchange exchange;
    fl_status status = exchange_open(&exchange, &o->exchange);
    if (status == FL_OK) {
        status = run_request(o, &request, &exchange);
    }
    exchange_close(&exchange);
    return status;
}

int command_generate(int argc, char **argv)
{
    struct generate_options o = {.answer.sampling = {.top_p = 1, .repetition_penalty = 1}};
    struct fl_generate generate = {0};
    fl_status status = parse(argc, argv, &o);
    if (status == FL_END) {
        return EXIT_SUCCESS;
    }
    if (status != FL_OK || check(&o) != FL_OK ||
        sampling_options_apply(&o.answer, &generate) != FL_OK) {
        return EXIT_CALLED_WRONGLY;
    }
    generate.model = o.model;
    generate.special = o.special;
    generate.no_bos = o.no_bos;
    generate.ignore_end = o.ignore_end;

    char *file_text = NULL;
    struct fl_text text = {.data = o.prompt, .size = o.prompt != NULL ? strlen(o.prompt) : 0};
    struct fl_chat_message message = {.role = "user"};
    if (o.tokens != NULL) {
        status = parse_tokens(o.tokens, &generate.tokens, &generate.token_count);
        if (status != FL_OK) {
            return EXIT_CALLED_WRONGLY;
        }
    } else if (o.prompt_file != NULL) {
        status = input_text_read(o.prompt_file, &file_text, &text.size);
        text.data = file_text;
    }
    if (o.chat) {
        message.content = text;
        generate.messages = &message;
        generate.message_count = 1;
    } else if (o.tokens == NULL) {
        generate.prompt = text;
    }
    if (status == FL_OK) {
        status = run(&o, &generate);
    }
    free(file_text);
    free(generate.tokens);
    return exchange_exit(status);
}
