#include <stdio.h>
#include <stdlib.h>

#include "proto/client/commands.h"
#include "proto/client/exchange.h"
#include "proto/client/input_text.h"
#include "proto/client/interrupt.h"
#include "proto/client/json_output.h"

static void print_ids(const struct fl_client_event *event, bool as_json)
{
    struct json_output json = {.stream = stdout};
    if (as_json) {
        json_open(&json, NULL, '{');
        json_open(&json, "ids", '[');
    }
    for (uint32_t i = 0; i < event->as.tokens.count; i++) {
        if (as_json) {
            json_whole(&json, NULL, event->as.tokens.ids[i]);
        } else {
            printf("%s%u", i > 0 ? " " : "", event->as.tokens.ids[i]);
        }
    }
    if (as_json) {
        json_close(&json, ']');
        json_close(&json, '}');
    }
    fputc('\n', stdout);
}

static fl_status run(const struct exchange_config *config, struct fl_client_request *request)
{
    char *text = NULL;
    struct exchange exchange;
    struct fl_client_event event;
    FL_TRY(input_text_read(NULL, &text, &request->as.tokenize.text.size));
    request->as.tokenize.text.data = text;
    fl_status status = exchange_open(&exchange, config);
    if (status == FL_OK) {
        interrupt_watch();
        status = exchange_ask(&exchange, request, FL_EVENT_TOKENS, &event);
    }
    if (status == FL_OK) {
        print_ids(&event, config->json);
    }
    exchange_close(&exchange);
    free(text);
    return status;
}

int command_tokenize(int argc, char **argv)
{
    struct exchange_config config = {0};
    struct fl_client_request request = {.kind = FL_REQUEST_TOKENIZE};
    const struct option options[] = {
        {OPTION_HEADING, "Text", NULL, NULL, NULL, 0, 0},
        {OPTION_TEXT, "--model", "NAME", "the model's file without .gguf (firstlight models)",
         &request.as.tokenize.model, 0, 0},
        {OPTION_FLAG, "--special", NULL, "text like <|im_start|> becomes special tokens",
         &request.as.tokenize.special, 0, 0},
        {OPTION_FLAG, "--no-bos", NULL, "no beginning-of-text token in front",
         &request.as.tokenize.no_bos, 0, 0},
        EXCHANGE_OPTIONS(&config),
    };
    const struct command_line line = {
        .command = "tokenize",
        .usage = "--model NAME [OPTION..] < TEXT",
        .about = "Prints the token ids of standard input.  Loads no weights.",
        .examples = "  printf 'Hello world' | firstlight tokenize --model tiny\n"
                    "  firstlight tokenize --model tiny --special --json < prompt.txt\n",
        .options = options,
        .option_count = sizeof(options) / sizeof(options[0]),
    };
    fl_status status = options_parse(&line, argc, argv);
    if (status == FL_OK && request.as.tokenize.model == NULL) {
        status = FL_FAIL(FL_INVALID, "--model is missing; firstlight models lists the names");
    }
    if (status == FL_OK) {
        return exchange_exit(run(&config, &request));
    }
    return status == FL_END ? EXIT_SUCCESS : EXIT_CALLED_WRONGLY;
}
