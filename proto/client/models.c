/* What is there and what is loaded: models, plan, load, unload. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/client/answer.h"
#include "proto/client/commands.h"
#include "proto/client/exchange.h"
#include "proto/client/interrupt.h"
#include "proto/client/json_output.h"
#include "proto/client/plain_text.h"

enum { CELL_SIZE = 256 };

/* Open, ask, print, close. */
static fl_status ask(const struct exchange_config *config, const struct fl_client_request *request,
                     enum fl_event_kind kind,
                     void (*print)(const struct fl_client_event *event, bool json))
{
    struct exchange exchange;
    struct fl_client_event event;
    fl_status status = exchange_open(&exchange, config);
    if (status == FL_OK) {
        interrupt_watch();
        status = exchange_ask(&exchange, request, kind, &event);
    }
    if (status == FL_OK) {
        print(&event, config->json);
    }
    exchange_close(&exchange);
    return status;
}

/* ---- models ---- */

static void models_json(const struct fl_client_event *event)
{
    struct json_output json = {.stream = stdout};
    json_open(&json, NULL, '{');
    json_open(&json, "models", '[');
    for (uint32_t i = 0; i < event->as.models.count; i++) {
        const struct fl_model_summary *model = &event->as.models.models[i];
        json_open(&json, NULL, '{');
        json_string(&json, "name", model->name);
        json_whole(&json, "bytes", model->bytes);
        json_string(&json, "architecture", model->architecture);
        json_bool(&json, "loaded", model->loaded);
        json_string(&json, "problem", model->problem);
        json_close(&json, '}');
    }
    json_close(&json, ']');
    json_close(&json, '}');
    fputc('\n', stdout);
}

static void print_models(const struct fl_client_event *event, bool json)
{
    if (json) {
        models_json(event);
        return;
    }
    int width = 4;
    for (uint32_t i = 0; i < event->as.models.count; i++) {
        const int size = (int)strnlen(event->as.models.models[i].name, 60);
        width = size > width ? size : width;
    }
    if (event->as.models.count == 0) {
        printf("no models: the coordinator's models folder holds no .gguf file\n");
        return;
    }
    printf("%-*s  %10s  %-8s  %s\n", width, "name", "size", "kind", "state");
    for (uint32_t i = 0; i < event->as.models.count; i++) {
        const struct fl_model_summary *model = &event->as.models.models[i];
        char name[CELL_SIZE];
        char kind[CELL_SIZE];
        char problem[CELL_SIZE];
        char size[SIZE_TEXT_MAX];
        plain_text(model->problem, problem, sizeof(problem));
        printf("%-*s  %10s  %-8s  %s\n", width, plain_text(model->name, name, sizeof(name)),
               size_text(model->bytes, size),
               model->architecture[0] != '\0' ? plain_text(model->architecture, kind, sizeof(kind))
                                              : "-",
               model->loaded        ? "loaded"
               : problem[0] != '\0' ? problem
                                    : "on disk");
    }
}

int command_models(int argc, char **argv)
{
    struct exchange_config config = {0};
    const struct option options[] = {EXCHANGE_OPTIONS(&config)};
    const struct command_line line = {
        .command = "models",
        .usage = "[OPTION..]",
        .about = "Lists the models in the coordinator's models folder, and why one cannot be used.",
        .examples = "  firstlight models\n  firstlight models --json\n",
        .options = options,
        .option_count = sizeof(options) / sizeof(options[0]),
    };
    const fl_status status = options_parse(&line, argc, argv);
    if (status != FL_OK) {
        return status == FL_END ? EXIT_SUCCESS : EXIT_CALLED_WRONGLY;
    }
    const struct fl_client_request request = {.kind = FL_REQUEST_MODELS};
    return exchange_exit(ask(&config, &request, FL_EVENT_MODELS, print_models));
}

/* ---- plan, load, unload: commands on one model ---- */

static void print_plan(const struct fl_client_event *event, bool as_json)
{
    const struct fl_stage_summary *stages = event->as.plan.stages;
    const uint32_t count = event->as.plan.stage_count;
    if (as_json) {
        struct json_output json = {.stream = stdout};
        json_open(&json, NULL, '{');
        json_string(&json, "model", event->as.plan.model);
        json_whole(&json, "total_bytes", event->as.plan.total_bytes);
        json_whole(&json, "context", event->as.plan.context);
        json_whole(&json, "kv_positions", event->as.plan.kv_positions);
        answer_stages_json(&json, stages, count);
        json_string(&json, "note", event->as.plan.note);
        json_close(&json, '}');
        fputc('\n', stdout);
        return;
    }
    char cell[CELL_SIZE];
    char text[3][SIZE_TEXT_MAX];
    printf("%s: %s, context %" PRIu32 ", room for %" PRIu32 " positions\n\n",
           plain_text(event->as.plan.model, cell, sizeof(cell)),
           size_text(event->as.plan.total_bytes, text[0]), event->as.plan.context,
           event->as.plan.kv_positions);
    printf("%-16s  %9s  %11s  %11s  %11s\n", "node", "layers", "weights", "KV cache", "budget");
    for (uint32_t i = 0; i < count; i++) {
        char layers[32];
        snprintf(layers, sizeof(layers), "%" PRIu32 "-%" PRIu32, stages[i].first_layer,
                 stages[i].last_layer);
        printf("%-16s  %9s  %11s  %11s  %11s\n", plain_text(stages[i].node, cell, sizeof(cell)),
               layers, size_text(stages[i].shard_bytes, text[0]),
               size_text(stages[i].kv_bytes, text[1]), size_text(stages[i].memory_budget, text[2]));
    }
    if (event->as.plan.note[0] != '\0') {
        printf("\n%s\n", plain_text(event->as.plan.note, cell, sizeof(cell)));
    }
}

static void print_loaded(const struct fl_client_event *event, bool json)
{
    (void)event;
    printf("%s\n", json ? "{\"loaded\":true}" : "loaded");
}

static void print_unloaded(const struct fl_client_event *event, bool json)
{
    (void)event;
    printf("%s\n", json ? "{\"unloaded\":true}" : "unloaded");
}

struct model_command {
    const char *name;
    const char *about;
    const char *examples;
    enum fl_request_kind request;
    enum fl_event_kind answer;
    void (*print)(const struct fl_client_event *event, bool json);
};

static int run_model_command(const struct model_command *command, int argc, char **argv)
{
    struct exchange_config config = {0};
    const char *named = NULL;
    const char *model = NULL;
    const struct option options[] = {
        {OPTION_HEADING, "Model", NULL, NULL, NULL, 0, 0},
        {OPTION_TEXT, "--model", "NAME", "the same as NAME alone", &named, 0, 0},
        EXCHANGE_OPTIONS(&config),
    };
    const struct command_line line = {
        .command = command->name,
        .usage = "NAME [OPTION..]",
        .about = command->about,
        .examples = command->examples,
        .positional = &model,
        .options = options,
        .option_count = sizeof(options) / sizeof(options[0]),
    };
    fl_status status = options_parse(&line, argc, argv);
    if (status == FL_OK && (model == NULL) == (named == NULL)) {
        status = FL_FAIL(FL_INVALID,
                         "firstlight %s takes the name of one model; firstlight models "
                         "lists them",
                         command->name);
    }
    if (status != FL_OK) {
        return status == FL_END ? EXIT_SUCCESS : EXIT_CALLED_WRONGLY;
    }
    const struct fl_client_request request = {.kind = command->request,
                                              .as.by_model.model = model != NULL ? model : named};
    return exchange_exit(ask(&config, &request, command->answer, command->print));
}

int command_plan(int argc, char **argv)
{
    static const struct model_command command = {
        .name = "plan",
        .about = "Shows how a model would be split over the nodes that are there now.  Loads "
                 "nothing.",
        .examples = "  firstlight plan SmolLM2-135M-Instruct.Q4_1\n"
                    "  firstlight plan --model tiny --json\n",
        .request = FL_REQUEST_PLAN,
        .answer = FL_EVENT_PLAN,
        .print = print_plan,
    };
    return run_model_command(&command, argc, argv);
}

int command_load(int argc, char **argv)
{
    static const struct model_command command = {
        .name = "load",
        .about = "Loads a model and waits until all of it is there.",
        .examples = "  firstlight load SmolLM2-135M-Instruct.Q4_1\n",
        .request = FL_REQUEST_LOAD,
        .answer = FL_EVENT_LOADED,
        .print = print_loaded,
    };
    return run_model_command(&command, argc, argv);
}

int command_unload(int argc, char **argv)
{
    static const struct model_command command = {
        .name = "unload",
        .about = "Frees what a model holds on the nodes: weights, KV cache, conversations.",
        .examples = "  firstlight unload SmolLM2-135M-Instruct.Q4_1\n",
        .request = FL_REQUEST_UNLOAD,
        .answer = FL_EVENT_UNLOADED,
        .print = print_unloaded,
    };
    return run_model_command(&command, argc, argv);
}
