/* mkmodel - writes a random model of any shape, for benchmarks and by hand.
 *
 * The same flags give the same bytes.  The tokenizer is a small real one, filled
 * up with unused tokens, so that `firstlight generate --prompt` works on it.
 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/log.h"
#include "proto/base/stop_signal.h"
#include "tests/support/model_writer.h"

static const char usage[] =
    "usage: mkmodel --out FILE.gguf [options]\n"
    "Write a model with random weights, by default of the shape of a 1.1 B llama.\n"
    "\n"
    "  --architecture NAME  llama (default) or gemma3\n"
    "  --layers N           22\n"
    "  --width N            2048\n"
    "  --heads N            32\n"
    "  --kv-heads N         4\n"
    "  --head-size N        width / heads\n"
    "  --ffn N              5632\n"
    "  --vocab N            32000\n"
    "  --context N          2048\n"
    "  --window N           gemma3: positions a local layer attends to (512)\n"
    "  --type TYPE          of the matrices: F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K "
    "(Q4_0)\n"
    "  --embed-type TYPE    of token_embd and output (as --type)\n"
    "  --tied               the head uses token_embd\n"
    "  --tokenizer NAME     bpe or spm (spm)\n"
    "  --seed N             1\n"
    "  --parts N            split into N files (1)\n"
    "  --out FILE           where to\n";

enum flag {
    FLAG_ARCHITECTURE = 256,
    FLAG_LAYERS,
    FLAG_WIDTH,
    FLAG_HEADS,
    FLAG_KV_HEADS,
    FLAG_HEAD_SIZE,
    FLAG_FFN,
    FLAG_VOCAB,
    FLAG_CONTEXT,
    FLAG_WINDOW,
    FLAG_TYPE,
    FLAG_EMBED_TYPE,
    FLAG_TIED,
    FLAG_TOKENIZER,
    FLAG_SEED,
    FLAG_PARTS,
    FLAG_OUT,
    FLAG_HELP,
};

static const struct option options[] = {
    {"architecture", required_argument, NULL, FLAG_ARCHITECTURE},
    {"layers", required_argument, NULL, FLAG_LAYERS},
    {"width", required_argument, NULL, FLAG_WIDTH},
    {"heads", required_argument, NULL, FLAG_HEADS},
    {"kv-heads", required_argument, NULL, FLAG_KV_HEADS},
    {"head-size", required_argument, NULL, FLAG_HEAD_SIZE},
    {"ffn", required_argument, NULL, FLAG_FFN},
    {"vocab", required_argument, NULL, FLAG_VOCAB},
    {"context", required_argument, NULL, FLAG_CONTEXT},
    {"window", required_argument, NULL, FLAG_WINDOW},
    {"type", required_argument, NULL, FLAG_TYPE},
    {"embed-type", required_argument, NULL, FLAG_EMBED_TYPE},
    {"tied", no_argument, NULL, FLAG_TIED},
    {"tokenizer", required_argument, NULL, FLAG_TOKENIZER},
    {"seed", required_argument, NULL, FLAG_SEED},
    {"parts", required_argument, NULL, FLAG_PARTS},
    {"out", required_argument, NULL, FLAG_OUT},
    {"help", no_argument, NULL, FLAG_HELP},
    {NULL, 0, NULL, 0},
};

/* What the flags say, before the spec is put together. */
struct request {
    struct model_spec spec;
    int type; /* a GGUF number, or -1 */
    int embed_type;
    const char *out;
};

static int parse_number(const char *flag, const char *text, uint64_t max, uint64_t *out)
{
    char *end = NULL;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value > max) {
        fprintf(stderr, "mkmodel: --%s %s: must be a number from 0 to %" PRIu64 "\n", flag, text,
                max);
        return -1;
    }
    *out = value;
    return 0;
}

static int parse_u32(const char *flag, const char *text, uint32_t max, uint32_t *out)
{
    uint64_t value;
    if (parse_number(flag, text, max, &value) != 0) {
        return -1;
    }
    *out = (uint32_t)value;
    return 0;
}

static int parse_type(const char *text, int *out)
{
    for (uint32_t type = 0; type < 64; type++) {
        if (fl_dtype_known(type) && strcmp(text, fl_dtype_name(type)) == 0) {
            *out = (int)type;
            return 0;
        }
    }
    fprintf(stderr, "mkmodel: type %s is unknown; see --help\n", text);
    return -1;
}

/* The index of `text` in two words. */
static int parse_word(const char *flag, const char *text, const char *first, const char *second)
{
    if (strcmp(text, first) == 0) {
        return 0;
    }
    if (strcmp(text, second) == 0) {
        return 1;
    }
    fprintf(stderr, "mkmodel: --%s %s: must be %s or %s\n", flag, text, first, second);
    return -1;
}

static int take_word_flag(struct request *request, int flag, const char *name, const char *text)
{
    if (flag == FLAG_ARCHITECTURE) {
        const int word = parse_word(name, text, "llama", "gemma3");
        request->spec.architecture = word == 1 ? FL_ARCHITECTURE_GEMMA3 : FL_ARCHITECTURE_LLAMA;
        return word < 0 ? -1 : 0;
    }
    const int word = parse_word(name, text, "bpe", "spm");
    request->spec.tokenizer = word == 1 ? TOKEN_TABLE_SPM : TOKEN_TABLE_BPE;
    return word < 0 ? -1 : 0;
}

static int take_flag(struct request *request, int flag, const char *name, const char *text)
{
    struct model_spec *spec = &request->spec;
    switch (flag) {
    case FLAG_ARCHITECTURE:
    case FLAG_TOKENIZER: return take_word_flag(request, flag, name, text);
    case FLAG_LAYERS: return parse_u32(name, text, FL_LAYER_COUNT_MAX, &spec->layer_count);
    case FLAG_WIDTH: return parse_u32(name, text, FL_WIDTH_MAX, &spec->width);
    case FLAG_HEADS: return parse_u32(name, text, FL_HEAD_COUNT_MAX, &spec->head_count);
    case FLAG_KV_HEADS: return parse_u32(name, text, FL_HEAD_COUNT_MAX, &spec->head_count_kv);
    case FLAG_HEAD_SIZE: return parse_u32(name, text, FL_HEAD_SIZE_MAX, &spec->head_size);
    case FLAG_FFN: return parse_u32(name, text, FL_WIDTH_MAX, &spec->ffn_width);
    case FLAG_VOCAB: return parse_u32(name, text, FL_VOCABULARY_MAX, &spec->vocabulary);
    case FLAG_CONTEXT: return parse_u32(name, text, FL_CONTEXT_MAX, &spec->context);
    case FLAG_WINDOW: return parse_u32(name, text, FL_CONTEXT_MAX, &spec->window);
    case FLAG_PARTS: return parse_u32(name, text, FL_FILE_COUNT_MAX, &spec->part_count);
    case FLAG_SEED: return parse_number(name, text, UINT64_MAX, &spec->seed);
    case FLAG_TYPE: return parse_type(text, &request->type);
    case FLAG_EMBED_TYPE: return parse_type(text, &request->embed_type);
    case FLAG_TIED: spec->untied = false; return 0;
    case FLAG_OUT: request->out = text; return 0;
    default: return -1;
    }
}

/* A header that the reader accepts, or a sentence why not: nothing is written that cannot be run. */
static int check_shape(const struct model_spec *spec)
{
    struct fl_model_shape shape = {
        .architecture = spec->architecture,
        .layer_count = spec->layer_count,
        .width = spec->width,
        .head_size = spec->head_size,
        .vocabulary = spec->vocabulary,
        .context = spec->context,
        .rope_dim = spec->head_size,
        .norm_epsilon = 1e-5f,
        .embedding_scale = 1.0f,
        .attention_scale = 1.0f,
        .rope = {.freq_base = spec->rope_base, .factor = 1.0f},
        .rope_local = {.freq_base = spec->rope_base, .factor = 1.0f},
    };
    for (uint32_t layer = 0; layer < spec->layer_count; layer++) {
        shape.head_count[layer] = spec->head_count;
        shape.head_count_kv[layer] = spec->head_count_kv;
        shape.ffn_width[layer] = spec->ffn_width;
    }
    if (fl_model_shape_check(&shape) != FL_OK) {
        return -1;
    }
    size_t row_size;
    const uint32_t columns[] = {spec->width, spec->ffn_width, spec->head_count * spec->head_size};
    for (size_t i = 0; i < sizeof(columns) / sizeof(columns[0]); i++) {
        if (fl_dtype_row_size(spec->dtypes[FL_ROLE_ATTN_Q], columns[i], &row_size) != FL_OK) {
            return -1;
        }
    }
    return fl_dtype_row_size(spec->dtypes[FL_ROLE_TOKEN_EMBD], spec->width, &row_size) == FL_OK
               ? 0
               : -1;
}

static int complete(struct request *request)
{
    struct model_spec *spec = &request->spec;
    if (request->out == NULL) {
        fprintf(stderr, "mkmodel: --out FILE is missing; see --help\n");
        return -1;
    }
    model_spec_set_dtype(spec, (enum fl_dtype)request->type);
    if (request->embed_type >= 0) {
        spec->dtypes[FL_ROLE_TOKEN_EMBD] = (enum fl_dtype)request->embed_type;
        spec->dtypes[FL_ROLE_OUTPUT] = (enum fl_dtype)request->embed_type;
    }
    if (spec->head_size == 0 && spec->head_count != 0) {
        spec->head_size = spec->width / spec->head_count;
    }
    if (spec->part_count == 0) {
        spec->part_count = 1;
    }
    const bool gemma = spec->architecture == FL_ARCHITECTURE_GEMMA3;
    if (!gemma) {
        spec->window = 0;
    } else if (spec->window == 0) {
        spec->window = 512;
    }
    spec->pre = spec->tokenizer == TOKEN_TABLE_BPE ? "smollm" : NULL;
    spec->chat_template = gemma ? model_template_gemma : model_template_chatml;
    spec->add_bos = spec->tokenizer == TOKEN_TABLE_SPM;
    return check_shape(spec);
}

int main(int argc, char **argv)
{
    fl_log_init("mkmodel", FL_LOG_WARN);
    struct request request = {
        .spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0),
        .type = FL_DTYPE_Q4_0,
        .embed_type = -1,
    };
    struct model_spec *spec = &request.spec;
    spec->layer_count = 22;
    spec->width = 2048;
    spec->head_count = 32;
    spec->head_count_kv = 4;
    spec->head_size = 0;
    spec->ffn_width = 5632;
    spec->vocabulary = 32000;
    spec->context = 2048;
    spec->untied = true;
    spec->tokenizer = TOKEN_TABLE_SPM;

    int index = 0;
    for (int flag; (flag = getopt_long(argc, argv, "", options, &index)) != -1;) {
        if (flag == FLAG_HELP) {
            fputs(usage, stdout);
            return 0;
        }
        if (flag == '?' || take_flag(&request, flag, options[index].name, optarg) != 0) {
            return 2;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "mkmodel: %s: unexpected argument; see --help\n", argv[optind]);
        return 2;
    }
    if (complete(&request) != 0) {
        return 2;
    }
    fl_stop_signal_block();
    const fl_status status = model_write(spec, request.out);
    return status == FL_OK ? 0 : status == FL_CANCELLED ? 130 : 1;
}
