#include "coordinator/settings.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cluster/topology.h"
#include "coordinator/chat_template.h"
#include "proto/base/size_text.h"

static const char HELP[] =
    "usage: firstlight-coordinator [OPTION]..\n"
    "\n"
    "Splits models over the nodes that join, and answers the programs that ask.\n"
    "\n"
    "  --models DIR            folder of .gguf files (~/.cache/firstlight/models)\n"
    "  --listen HOST:PORT      where nodes join (127.0.0.1:7412)\n"
    "  --data-ports A-B        ports for the data between machines, for firewalls: two for\n"
    "                          each process of a machine, 7420-7439 say (any)\n"
    "  --client-listen ADDRESS where programs ask: HOST:PORT or unix:/path; may be\n"
    "                          given more than once (127.0.0.1:7411)\n"
    "  --key-file FILE         pool key, made by 'firstlight keygen'; needed for every\n"
    "                          address that other machines reach\n"
    "  --context N             positions a conversation may have (4096, or the model's)\n"
    "  --kv-budget SIZE        KV cache of one model on each node (256MiB)\n"
    "  --sequences N           requests and kept conversations of one model at once (16)\n"
    "  --queue N               requests that may wait (64)\n"
    "  --chunk N               prompt tokens computed together (64)\n"
    "  --activations q8|f32    q8: fast (the default); f32: the yardstick, slow\n"
    "  --split A,B,..          layers of each node, in order of the nodes' names\n"
    "  --no-overlap            load everything, then compute: for comparison\n"
    "  --template NAME         chat format, when the model's own is not recognised: chatml,\n"
    "                          llama2, llama3, gemma, mistral-v1, mistral-v3, phi3, ..\n"
    "  --config FILE           JSON file with the same names; flags win\n"
    "  --log LEVEL             error, warn, info, debug or trace (info)\n"
    "  --version, --help\n"
    "\n"
    "A request without a limit of its own may fill the rest of the context, and the KV\n"
    "cache for that is reserved when it starts: give limits to run many at once.\n"
    "Exit status: 0 stopped, 1 failed, 2 called or configured wrongly.\n"
    "\n"
    "examples:\n"
    "  firstlight-coordinator --models /srv/models\n"
    "  firstlight-coordinator --listen 0.0.0.0:7412 --client-listen 0.0.0.0:7411 \\\n"
    "      --client-listen unix:/run/firstlight/sock --key-file pool.key\n"
    "  mpirun --bind-to none -np 1 firstlight-coordinator --models /srv/models : -np 4 "
    "firstlight-node\n";

enum flag {
    OPTION_MODELS = 256,
    OPTION_LISTEN,
    OPTION_DATA_PORTS,
    OPTION_CLIENT_LISTEN,
    OPTION_KEY_FILE,
    OPTION_CONTEXT,
    OPTION_KV_BUDGET,
    OPTION_SEQUENCES,
    OPTION_QUEUE,
    OPTION_CHUNK,
    OPTION_ACTIVATIONS,
    OPTION_SPLIT,
    OPTION_NO_OVERLAP,
    OPTION_TEMPLATE,
    OPTION_CONFIG,
    OPTION_LOG,
    OPTION_VERSION,
    OPTION_HELP,
};

static const struct option OPTIONS[] = {
    {"models", required_argument, NULL, OPTION_MODELS},
    {"listen", required_argument, NULL, OPTION_LISTEN},
    {"data-ports", required_argument, NULL, OPTION_DATA_PORTS},
    {"client-listen", required_argument, NULL, OPTION_CLIENT_LISTEN},
    {"key-file", required_argument, NULL, OPTION_KEY_FILE},
    {"context", required_argument, NULL, OPTION_CONTEXT},
    {"kv-budget", required_argument, NULL, OPTION_KV_BUDGET},
    {"sequences", required_argument, NULL, OPTION_SEQUENCES},
    {"queue", required_argument, NULL, OPTION_QUEUE},
    {"chunk", required_argument, NULL, OPTION_CHUNK},
    {"activations", required_argument, NULL, OPTION_ACTIVATIONS},
    {"split", required_argument, NULL, OPTION_SPLIT},
    {"no-overlap", no_argument, NULL, OPTION_NO_OVERLAP},
    {"template", required_argument, NULL, OPTION_TEMPLATE},
    {"config", required_argument, NULL, OPTION_CONFIG},
    {"log", required_argument, NULL, OPTION_LOG},
    {"version", no_argument, NULL, OPTION_VERSION},
    {"help", no_argument, NULL, OPTION_HELP},
    {NULL, 0, NULL, 0},
};

static fl_status copy_text(const char *flag, const char *text, char *out, size_t size)
{
    const int wanted = snprintf(out, size, "%s", text);
    if (wanted <= 0 || (size_t)wanted >= size) {
        return FL_FAIL(FL_INVALID, "%s: a text of 1 to %zu bytes is wanted, this one has %d", flag,
                       size - 1, wanted);
    }
    return FL_OK;
}

static fl_status read_number(const char *flag, const char *text, uint64_t low, uint64_t high,
                             uint32_t *out)
{
    char *end = NULL;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < low ||
        value > high) {
        return FL_FAIL(FL_INVALID, "%s %s: a number from %" PRIu64 " to %" PRIu64 " is wanted",
                       flag, text, low, high);
    }
    *out = (uint32_t)value;
    return FL_OK;
}

static fl_status read_size(const char *flag, const char *text, uint64_t *out)
{
    if (!fl_size_text_value(text, out) || *out == 0) {
        return FL_FAIL(FL_INVALID, "%s %s: a size like 512MiB or 2GiB is wanted", flag, text);
    }
    return FL_OK;
}

static fl_status read_split(const char *text, struct coordinator_settings *out)
{
    char copy[1024];
    FL_TRY(copy_text("--split", text, copy, sizeof(copy)));
    out->split_count = 0;
    uint64_t layers = 0;
    char *rest = copy;
    for (char *part = strsep(&rest, ","); part != NULL; part = strsep(&rest, ",")) {
        if (out->split_count == COORDINATOR_SPLIT_MAX) {
            return FL_FAIL(FL_INVALID, "--split names more than %d stages", COORDINATOR_SPLIT_MAX);
        }
        FL_TRY(read_number("--split", part, 0, FL_LAYER_COUNT_MAX, &out->split[out->split_count]));
        layers += out->split[out->split_count];
        out->split_count++;
    }
    if (layers == 0) {
        return FL_FAIL(FL_INVALID, "--split %s: no node gets a layer; 6,6,5,5 cuts 22 of them",
                       text);
    }
    return FL_OK;
}

static fl_status read_level(const char *text, enum fl_log_level *out)
{
    return fl_log_level_named(text, out)
               ? FL_OK
               : FL_FAIL(FL_INVALID, "--log %s: error, warn, info, debug or trace is wanted", text);
}

static fl_status read_activations(const char *text, bool *out_f32)
{
    if (strcmp(text, "q8") != 0 && strcmp(text, "f32") != 0) {
        return FL_FAIL(FL_INVALID, "--activations %s: q8 or f32 is wanted", text);
    }
    *out_f32 = strcmp(text, "f32") == 0;
    return FL_OK;
}

static fl_status add_client_listen(const char *text, struct settings *out)
{
    if (out->client_listen_count == CLIENT_SERVER_LISTENER_MAX) {
        return FL_FAIL(FL_INVALID, "--client-listen is given more than %d times",
                       CLIENT_SERVER_LISTENER_MAX);
    }
    FL_TRY(copy_text("--client-listen", text, out->client_listen[out->client_listen_count],
                     sizeof(out->client_listen[0])));
    out->client_listen_count++;
    return FL_OK;
}

static fl_status read_family(const char *text, struct settings *out)
{
    struct chat_template family;
    FL_TRY(chat_template_named(text, &family));
    return copy_text("--template", text, out->chat_family, sizeof(out->chat_family));
}

static fl_status take_option(int option, const char *text, struct settings *out)
{
    struct coordinator_settings *more = &out->coordinator;
    switch (option) {
    case OPTION_MODELS: return copy_text("--models", text, out->models, sizeof(out->models));
    case OPTION_LISTEN: return copy_text("--listen", text, out->listen, sizeof(out->listen));
    case OPTION_DATA_PORTS: return transport_ports_parse(text, "--data-ports", &out->data_ports);
    case OPTION_CLIENT_LISTEN: return add_client_listen(text, out);
    case OPTION_KEY_FILE:
        return copy_text("--key-file", text, out->key_file, sizeof(out->key_file));
    case OPTION_CONTEXT: return read_number("--context", text, 1, FL_CONTEXT_MAX, &more->context);
    case OPTION_KV_BUDGET: return read_size("--kv-budget", text, &more->kv_budget);
    case OPTION_SEQUENCES:
        return read_number("--sequences", text, 1, COORDINATOR_SEQUENCES_MAX, &more->sequences);
    case OPTION_QUEUE: return read_number("--queue", text, 1, COORDINATOR_QUEUE_MAX, &more->queue);
    case OPTION_CHUNK: return read_number("--chunk", text, 1, FL_CHUNK_MAX, &more->chunk);
    case OPTION_ACTIVATIONS: return read_activations(text, &more->activations_f32);
    case OPTION_SPLIT: return read_split(text, more);
    case OPTION_NO_OVERLAP: more->no_overlap = true; return FL_OK;
    case OPTION_TEMPLATE: return read_family(text, out);
    case OPTION_LOG: return read_level(text, &out->log);
    case OPTION_CONFIG: return FL_OK; /* taken before the others */
    default: break;
    }
    return FL_FAIL(FL_INVALID, "unknown option; --help lists them");
}

static void set_defaults(struct settings *out)
{
    *out = (struct settings){.log = fl_log_level_from_env(FL_LOG_INFO)};
    const char *home = getenv("HOME");
    snprintf(out->listen, sizeof(out->listen), "127.0.0.1:7412");
    snprintf(out->models, sizeof(out->models), "%s/.cache/firstlight/models",
             home != NULL ? home : "");
}

/* A number of the file, held against the flag's limits. */
static fl_status take_number(const char *key, const struct topology_number *number, uint64_t high,
                             uint32_t *out)
{
    if (!number->given) {
        return FL_OK;
    }
    if (number->value < 1 || number->value > high) {
        return FL_FAIL(FL_INVALID,
                       "coordinator.%s is %" PRIu64 ": a number from 1 to %" PRIu64 " is wanted",
                       key, number->value, high);
    }
    *out = (uint32_t)number->value;
    return FL_OK;
}

static fl_status take_text(const char *key, const char *text, char *out, size_t size)
{
    return text[0] != '\0' ? copy_text(key, text, out, size) : FL_OK;
}

static fl_status take_file(const char *path, struct settings *out)
{
    struct topology *topology = malloc(sizeof(*topology));
    if (topology == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory to read %s", path);
    }
    fl_status status = topology_read(path, topology);
    const struct topology_coordinator file = topology->coordinator;
    free(topology);
    FL_TRY(status);
    struct coordinator_settings *more = &out->coordinator;
    FL_TRY(take_text("listen", file.listen, out->listen, sizeof(out->listen)));
    FL_TRY(take_text("models", file.models, out->models, sizeof(out->models)));
    FL_TRY(take_text("key_file", file.key_file, out->key_file, sizeof(out->key_file)));
    out->data_ports = file.data_ports;
    if (file.client_listen[0] != '\0') {
        FL_TRY(add_client_listen(file.client_listen, out));
    }
    if (file.activations[0] != '\0') {
        FL_TRY(read_activations(file.activations, &more->activations_f32));
    }
    FL_TRY(take_number("context", &file.context, FL_CONTEXT_MAX, &more->context));
    FL_TRY(take_number("chunk", &file.chunk, FL_CHUNK_MAX, &more->chunk));
    FL_TRY(take_number("queue", &file.queue, COORDINATOR_QUEUE_MAX, &more->queue));
    more->kv_budget = file.kv_budget.given ? file.kv_budget.value : more->kv_budget;
    more->split_count = file.split_count;
    memcpy(more->split, file.split, sizeof(more->split));
    return FL_OK;
}

/* The file goes first, wherever its flag stands. */
static fl_status find_file(int argc, char **argv, struct settings *out)
{
    opterr = 0;
    optind = 0; /* start anew */
    for (int option; (option = getopt_long(argc, argv, "+:", OPTIONS, NULL)) != -1;) {
        if (option == OPTION_CONFIG) {
            FL_TRY(take_file(optarg, out));
        }
    }
    return FL_OK;
}

/* A folder that is not there yet may come later; a file will never be one. */
static fl_status check_models(const char *path)
{
    struct stat found;
    if (stat(path, &found) == 0 && !S_ISDIR(found.st_mode)) {
        return FL_FAIL(FL_INVALID,
                       "--models %.200s is no folder; the one with the .gguf files is "
                       "wanted",
                       path);
    }
    return FL_OK;
}

static fl_status finish(struct settings *out)
{
    FL_TRY(check_models(out->models));
    if (out->client_listen_count == 0) {
        snprintf(out->client_listen[0], sizeof(out->client_listen[0]), "127.0.0.1:7411");
        out->client_listen_count = 1;
    }
    out->coordinator.models_folder = out->models;
    out->coordinator.chat_family = out->chat_family[0] != '\0' ? out->chat_family : NULL;
    return FL_OK;
}

/* The next flag, or -1 after the last. */
static fl_status next_option(int argc, char **argv, int *out)
{
    *out = getopt_long(argc, argv, "+:", OPTIONS, NULL);
    if (*out == ':') {
        return FL_FAIL(FL_INVALID, "%s needs a value; --help says which", argv[optind - 1]);
    }
    if (*out == '?' && optopt >= OPTION_MODELS) {
        return FL_FAIL(FL_INVALID, "%s: this option takes no value", argv[optind - 1]);
    }
    return *out == '?' ? FL_FAIL(FL_INVALID, "%s is no option; --help lists them", argv[optind - 1])
                       : FL_OK;
}

fl_status settings_read(int argc, char **argv, struct settings *out)
{
    set_defaults(out);
    FL_TRY(find_file(argc, argv, out));
    const uint32_t file_listens = out->client_listen_count;
    bool flag_listens = false;
    optind = 0;
    for (;;) {
        int option = 0;
        FL_TRY(next_option(argc, argv, &option));
        if (option == -1) {
            break;
        }
        if (option == OPTION_HELP) {
            fputs(HELP, stdout);
            return FL_END;
        }
        if (option == OPTION_VERSION) {
            printf("firstlight-coordinator %s\n", FL_VERSION);
            return FL_END;
        }
        if (option == OPTION_CLIENT_LISTEN && file_listens > 0 && !flag_listens) {
            out->client_listen_count = 0; /* the file's give way to the flags' */
        }
        flag_listens = flag_listens || option == OPTION_CLIENT_LISTEN;
        FL_TRY(take_option(option, optarg, out));
    }
    if (optind < argc) {
        return FL_FAIL(FL_INVALID, "'%s' is not understood; --help lists the options",
                       argv[optind]);
    }
    return finish(out);
}
