#include "node/node_options.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu_pool.h"
#include "proto/base/clock.h"
#include "proto/base/size_text.h"

static const uint64_t cache_budget_default = UINT64_C(20) << 30;
static const uint64_t memory_fallback = UINT64_C(2) << 30; /* when /proc says nothing */

enum flag {
    FLAG_JOIN = 256,
    FLAG_NAME,
    FLAG_LISTEN,
    FLAG_DATA_PORTS,
    FLAG_MODELS,
    FLAG_CACHE,
    FLAG_CACHE_BUDGET,
    FLAG_MEMORY,
    FLAG_THREADS,
    FLAG_ISA,
    FLAG_KEY_FILE,
    FLAG_CONFIG,
    FLAG_LOG,
    FLAG_HELP,
    FLAG_VERSION,
};

static const struct option long_options[] = {
    {"join", required_argument, NULL, FLAG_JOIN},
    {"name", required_argument, NULL, FLAG_NAME},
    {"listen", required_argument, NULL, FLAG_LISTEN},
    {"data-ports", required_argument, NULL, FLAG_DATA_PORTS},
    {"models", required_argument, NULL, FLAG_MODELS},
    {"cache", required_argument, NULL, FLAG_CACHE},
    {"cache-budget", required_argument, NULL, FLAG_CACHE_BUDGET},
    {"memory", required_argument, NULL, FLAG_MEMORY},
    {"threads", required_argument, NULL, FLAG_THREADS},
    {"isa", required_argument, NULL, FLAG_ISA},
    {"key-file", required_argument, NULL, FLAG_KEY_FILE},
    {"config", required_argument, NULL, FLAG_CONFIG},
    {"log", required_argument, NULL, FLAG_LOG},
    {"help", no_argument, NULL, FLAG_HELP},
    {"version", no_argument, NULL, FLAG_VERSION},
    {NULL, 0, NULL, 0},
};

void node_options_help(void)
{
    puts(
        "firstlight-node - one machine of a pool that runs a language model together\n"
        "\n"
        "  firstlight-node --join HOST:PORT [options]\n"
        "\n"
        "  --join HOST:PORT      the coordinator; tried again until it is there\n"
        "  --name NAME           how the pool calls this machine (default: its host name; under\n"
        "                        mpirun its host name and rank)\n"
        "  --listen HOST:PORT    where other nodes reach this one (default: loopback for a\n"
        "                        coordinator on loopback, else the address that leads there)\n"
        "  --data-ports A-B      ports for the data between machines, for firewalls: two for each\n"
        "                        process of a machine, 7420-7439 say (default: any)\n"
        "  --models DIR          model files on this machine; without, or when a model is not in\n"
        "                        it, its bytes are fetched from the coordinator\n"
        "  --cache DIR           fetched bytes are kept here (default ~/.cache/firstlight/shards)\n"
        "  --cache-budget SIZE   at most this much of them (default 20GiB)\n"
        "  --memory SIZE         for weights, KV cache and buffers (default: 70 % of what is "
        "free)\n"
        "  --threads N           that compute (default: the CPUs this process may use;\n"
        "                        as many as these keep to one each)\n"
        "  --isa NAME            auto, avx512, avx2 or scalar (default auto)\n"
        "  --key-file FILE       the pool's key; needed when listening on other than loopback\n"
        "  --config FILE         a JSON file that says the above for every machine of a pool\n"
        "  --log LEVEL           error, warn, info, debug or trace (default info)\n"
        "  --help, --version\n"
        "\n"
        "Examples\n"
        "  firstlight-node --join 127.0.0.1:7412 --models ~/models\n"
        "  firstlight-node --join box1.local:7412 --key-file pool.key --memory 12GiB\n"
        "  mpirun --bind-to none -np 1 firstlight-coordinator --models ~/models \\\n"
        "         : -np 3 firstlight-node\n");
}

static fl_status parse_size(const char *what, const char *text, uint64_t *out)
{
    if (!fl_size_text_value(text, out)) {
        return FL_FAIL(FL_INVALID, "%s is '%.40s'; a size like 512MiB or 20GiB would be right",
                       what, text);
    }
    return FL_OK;
}

static fl_status parse_count(const char *what, const char *text, uint32_t min, uint32_t max,
                             uint32_t *out)
{
    char *end = NULL;
    errno = 0;
    const unsigned long value = strtoul(text, &end, 10);
    if (!isdigit((unsigned char)text[0]) || *end != '\0' || errno != 0 || value < min ||
        value > max) {
        return FL_FAIL(FL_INVALID, "%s is '%.40s'; %" PRIu32 " to %" PRIu32 " would be right", what,
                       text, min, max);
    }
    *out = (uint32_t)value;
    return FL_OK;
}

static bool name_char(char c)
{
    return isalnum((unsigned char)c) || c == '.' || c == '_' || c == '-';
}

static fl_status parse_name(const char *text, char out[FL_NAME_MAX])
{
    const size_t size = strlen(text);
    bool good = size >= 1 && size < FL_NAME_MAX;
    for (size_t i = 0; i < size && good; i++) {
        good = name_char(text[i]);
    }
    if (!good) {
        return FL_FAIL(FL_INVALID,
                       "--name is '%.80s'; 1 to %d letters, digits, '.', '_' or '-' would be right",
                       text, FL_NAME_MAX - 1);
    }
    memcpy(out, text, size + 1);
    return FL_OK;
}

static fl_status parse_log_level(const char *text, enum fl_log_level *out)
{
    return fl_log_level_named(text, out)
               ? FL_OK
               : FL_FAIL(FL_INVALID,
                         "--log is '%.40s'; error, warn, info, debug or trace would be right",
                         text);
}

static void default_name(char out[FL_NAME_MAX])
{
    char host[FL_NAME_MAX] = "";
    (void)gethostname(host, sizeof(host) - 1);
    size_t size = 0;
    for (size_t i = 0; host[i] != '\0'; i++) {
        const char good = host[i];
        out[size] = '-';
        if (name_char(good)) {
            out[size] = good;
        }
        size++;
    }
    out[size] = '\0';
    if (size == 0) {
        snprintf(out, FL_NAME_MAX, "node");
    }
}

static uint32_t default_threads(void)
{
    cpu_set_t cpus;
    int count = 0;
    if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) {
        count = CPU_COUNT(&cpus);
    }
    if (count < 1) {
        return 1;
    }
    return count > CPU_POOL_THREADS_MAX ? CPU_POOL_THREADS_MAX : (uint32_t)count;
}

/* 70 % of MemAvailable. */
static uint64_t default_memory(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    uint64_t kib = 0;
    char line[128];
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, "MemAvailable:", 13) == 0) {
            kib = strtoull(line + 13, NULL, 10);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return kib == 0 ? memory_fallback : kib * 1024 / 10 * 7;
}

static void set_defaults(struct node_options *options)
{
    *options = (struct node_options){
        .isa = "auto",
        .log_level = fl_log_level_from_env(FL_LOG_INFO),
        .cache_budget = cache_budget_default,
        .memory = default_memory(),
        .threads = default_threads(),
    };
    default_name(options->name);
    const char *base = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    if (base != NULL && base[0] == '/') {
        snprintf(options->cache, sizeof(options->cache), "%.3000s/firstlight/shards", base);
    } else {
        snprintf(options->cache, sizeof(options->cache), "%.3000s/.cache/firstlight/shards",
                 home != NULL && home[0] == '/' ? home : "/tmp");
    }
}

static const char *given(const char *text, const char *fallback)
{
    return text[0] != '\0' ? text : fallback;
}

/* What the file's "node" says; `boxes` are looked at when the name is known. */
static fl_status take_file(struct node_options *options, const struct topology_node *file)
{
    if (file->name[0] != '\0') {
        FL_TRY(parse_name(file->name, options->name));
        options->named = true;
    }
    options->file = *file;
    options->join = given(options->file.join, NULL);
    options->listen = given(options->file.listen, NULL);
    options->models = given(options->file.models, NULL);
    options->key_file = given(options->file.key_file, NULL);
    options->isa = given(options->file.isa, options->isa);
    options->data_ports = file->data_ports;
    if (file->cache[0] != '\0') {
        snprintf(options->cache, sizeof(options->cache), "%s", file->cache);
    }
    options->memory = file->memory.given ? file->memory.value : options->memory;
    options->cache_budget =
        file->cache_budget.given ? file->cache_budget.value : options->cache_budget;
    if (file->threads.given) {
        if (file->threads.value < 1 || file->threads.value > CPU_POOL_THREADS_MAX) {
            return FL_FAIL(FL_INVALID, "node.threads is %" PRIu64 "; 1 to %d would be right",
                           file->threads.value, CPU_POOL_THREADS_MAX);
        }
        options->threads = (uint32_t)file->threads.value;
    }
    return FL_OK;
}

static fl_status take_option(struct node_options *options, int option, const char *value)
{
    switch (option) {
    case FLAG_JOIN: options->join = value; return FL_OK;
    case FLAG_NAME: options->named = true; return parse_name(value, options->name);
    case FLAG_LISTEN: options->listen = value; return FL_OK;
    case FLAG_DATA_PORTS: return transport_ports_parse(value, "--data-ports", &options->data_ports);
    case FLAG_MODELS: options->models = value; return FL_OK;
    case FLAG_CACHE:
        if (value[0] == '\0' || strlen(value) >= sizeof(options->cache)) {
            return FL_FAIL(FL_INVALID, "--cache: a folder would be right");
        }
        memcpy(options->cache, value, strlen(value) + 1);
        return FL_OK;
    case FLAG_CACHE_BUDGET: return parse_size("--cache-budget", value, &options->cache_budget);
    case FLAG_MEMORY: return parse_size("--memory", value, &options->memory);
    case FLAG_THREADS:
        return parse_count("--threads", value, 1, CPU_POOL_THREADS_MAX, &options->threads);
    case FLAG_ISA: options->isa = value; return FL_OK;
    case FLAG_KEY_FILE: options->key_file = value; return FL_OK;
    case FLAG_CONFIG: return FL_OK; /* read before the other flags */
    case FLAG_LOG: return parse_log_level(value, &options->log_level);
    case FLAG_HELP: options->help = true; return FL_OK;
    case FLAG_VERSION: options->version = true; return FL_OK;
    default: return FL_FAIL(FL_INTERNAL, "option %d has no meaning", option);
    }
}

static fl_status next_flag(int argc, char **argv, int *out)
{
    *out = getopt_long(argc, argv, "+:", long_options, NULL);
    if (*out == '?') {
        return FL_FAIL(FL_INVALID, "'%.80s' is no option; --help lists them", argv[optind - 1]);
    }
    if (*out == ':') {
        return FL_FAIL(FL_INVALID, "'%.80s' needs a value; see --help", argv[optind - 1]);
    }
    return FL_OK;
}

/* The file first, wherever --config stands: flags override it. */
static fl_status read_config(struct node_options *options, int argc, char **argv,
                             struct topology *topology)
{
    optind = 0;
    for (int flag = 0; flag != -1;) {
        FL_TRY(next_flag(argc, argv, &flag));
        if (flag == FLAG_CONFIG) {
            FL_TRY(topology_read(optarg, topology));
            FL_TRY(take_file(options, &topology->node));
        }
    }
    return FL_OK;
}

static fl_status parse(struct node_options *options, int argc, char **argv,
                       struct topology *topology)
{
    bool memory_said = false;
    opterr = 0;
    FL_TRY(read_config(options, argc, argv, topology));
    optind = 0;
    for (int flag = 0; flag != -1;) {
        FL_TRY(next_flag(argc, argv, &flag));
        if (flag != -1) {
            FL_TRY(take_option(options, flag, optarg));
        }
        memory_said = memory_said || flag == FLAG_MEMORY;
    }
    const struct topology_box *box = topology_find(topology, options->name);
    if (box != NULL && box->memory.given && !memory_said) {
        options->memory = box->memory.value;
    }
    return FL_OK;
}

void node_options_number(struct node_options *options, uint32_t rank)
{
    char suffix[16];
    if (options->named) {
        return;
    }
    const int size = snprintf(suffix, sizeof(suffix), "-%" PRIu32, rank);
    const size_t host_size = strnlen(options->name, sizeof(options->name) - 1 - (size_t)size);
    memcpy(options->name + host_size, suffix, (size_t)size + 1);
}

fl_status node_options_parse(int argc, char **argv, bool mpi, struct node_options *out)
{
    struct topology *topology = calloc(1, sizeof(*topology));
    if (topology == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "configuration: no memory");
    }
    set_defaults(out);
    const fl_status status = parse(out, argc, argv, topology);
    free(topology);
    FL_TRY(status);
    if (optind < argc) {
        return FL_FAIL(FL_INVALID, "'%.80s' is not expected; --help lists the options",
                       argv[optind]);
    }
    if (!out->help && !out->version && !mpi && out->join == NULL) {
        return FL_FAIL(FL_INVALID, "--join HOST:PORT is missing: which coordinator?");
    }
    return FL_OK;
}
