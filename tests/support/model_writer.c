#include "tests/support/model_writer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/bulk_file.h"

enum {
    TENSOR_COUNT_MAX = 13 * FL_LAYER_COUNT_MAX + 8,
    NAME_SIZE = 48,
    PATH_SIZE = 4096,
    SLAB_SIZE = 1 << 20, /* bytes made at once */
    KEY_SIZE = 96,
    SCRIPTED_HEAD_SIZE = 32,
};

const char model_template_chatml[] =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}";
const char model_template_gemma[] =
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<start_of_turn>model\n' }}{% endif %}";

struct planned_tensor {
    char name[NAME_SIZE];
    enum fl_tensor_role role;
    enum fl_dtype dtype;
    uint32_t rows;
    uint32_t columns;
    uint32_t part;
    uint64_t offset; /* within its part's data */
    uint64_t size;
};

struct planned_model {
    const struct model_spec *spec;
    struct fl_model_shape shape; /* what fl_tensor_dimensions() looks at */
    struct token_table tokens;
    uint32_t tensor_count;
    struct planned_tensor tensors[TENSOR_COUNT_MAX];
    uint64_t data_size[FL_FILE_COUNT_MAX];
};

/* ---- specs ---- */

void model_spec_set_dtype(struct model_spec *spec, enum fl_dtype dtype)
{
    for (uint32_t role = 0; role <= FL_ROLE_LAST; role++) {
        spec->dtypes[role] = dtype;
    }
}

struct model_spec model_spec_tiny(enum fl_architecture architecture, enum fl_dtype dtype)
{
    const bool gemma = architecture == FL_ARCHITECTURE_GEMMA3;
    const bool wide = fl_dtype_block_length(dtype) > 32;
    struct model_spec spec = {
        .architecture = architecture,
        .seed = 1,
        .layer_count = gemma ? 7 : 3,
        .width = wide ? 256 : 64,
        .head_count = 4,
        .head_count_kv = gemma ? 1 : 2,
        .head_size = wide    ? 64
                     : gemma ? 32
                             : 16,
        .ffn_width = wide ? 256 : 96,
        .context = 512,
        .window = gemma ? 8 : 0,
        .version = 3,
        .alignment = 32,
        .integer_type = GGUF_UINT32,
        .part_count = 1,
        .rope_base = 10000.0f,
        .tokenizer = gemma ? TOKEN_TABLE_SPM : TOKEN_TABLE_BPE,
        .pre = gemma ? NULL : "smollm",
        .chat_template = gemma ? model_template_gemma : model_template_chatml,
        .add_bos = gemma,
        .bos = MODEL_TOKEN_ABSENT,
        .eos = MODEL_TOKEN_ABSENT,
        .eot = MODEL_TOKEN_ABSENT,
        .unk = MODEL_TOKEN_ABSENT,
    };
    model_spec_set_dtype(&spec, dtype);
    return spec;
}

struct model_spec model_spec_scripted(enum token_table_kind tokenizer,
                                      const struct model_token *tokens, uint32_t token_count,
                                      const uint32_t *chain, uint32_t chain_count)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_F32);
    spec.layer_count = 1;
    spec.tokenizer = tokenizer;
    spec.pre = tokenizer == TOKEN_TABLE_BPE ? "smollm" : NULL;
    spec.tokens = tokens;
    spec.token_count = token_count;
    spec.chain = chain;
    spec.chain_count = chain_count;
    spec.untied = true;
    struct token_table table;
    model_spec_tokens(&spec, &table);
    /* One element of the embedding for each token. */
    spec.width = (table.count + SCRIPTED_HEAD_SIZE - 1) / SCRIPTED_HEAD_SIZE * SCRIPTED_HEAD_SIZE;
    token_table_close(&table);
    spec.head_count = 1;
    spec.head_count_kv = 1;
    spec.head_size = SCRIPTED_HEAD_SIZE;
    spec.ffn_width = SCRIPTED_HEAD_SIZE;
    return spec;
}

void model_spec_tokens(const struct model_spec *spec, struct token_table *out)
{
    token_table_open(out, spec->tokenizer, spec->architecture == FL_ARCHITECTURE_GEMMA3,
                     spec->no_builtin_tokens);
    for (uint32_t i = 0; i < spec->token_count; i++) {
        (void)token_table_add(out, spec->tokens[i].text, spec->tokens[i].type,
                              spec->tokens[i].score);
    }
    if (spec->tokenizer != TOKEN_TABLE_NONE) {
        token_table_fill(out, spec->vocabulary);
    }
    out->bos = spec->bos != MODEL_TOKEN_ABSENT ? spec->bos : out->bos;
    out->eos = spec->eos != MODEL_TOKEN_ABSENT ? spec->eos : out->eos;
    out->eot = spec->eot != MODEL_TOKEN_ABSENT ? spec->eot : out->eot;
    out->unk = spec->unk != MODEL_TOKEN_ABSENT ? spec->unk : out->unk;
}

/* ---- which tensors, where ---- */

static void plan_tensor(struct planned_model *plan, enum fl_tensor_role role, uint32_t layer,
                        const char *name)
{
    FL_ASSERT(plan->tensor_count < TENSOR_COUNT_MAX);
    struct planned_tensor *tensor = &plan->tensors[plan->tensor_count++];
    *tensor = (struct planned_tensor){.role = role};
    snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    fl_tensor_dimensions(&plan->shape, role, layer, &tensor->rows, &tensor->columns);
    tensor->dtype = tensor->rows == 1 ? FL_DTYPE_F32 : plan->spec->dtypes[role];
    size_t row_size;
    const fl_status status = fl_dtype_row_size(tensor->dtype, tensor->columns, &row_size);
    FL_ASSERT(status == FL_OK);
    tensor->size = (uint64_t)tensor->rows * row_size;
}

static void plan_layer(struct planned_model *plan, uint32_t layer)
{
    const bool gemma = plan->spec->architecture == FL_ARCHITECTURE_GEMMA3;
    for (uint32_t role = FL_ROLE_ATTN_NORM; role <= FL_ROLE_LAST; role++) {
        const bool gemma_only = role == FL_ROLE_ATTN_Q_NORM || role == FL_ROLE_ATTN_K_NORM ||
                                role == FL_ROLE_ATTN_POST_NORM || role == FL_ROLE_FFN_POST_NORM;
        if (gemma_only && !gemma) {
            continue;
        }
        char name[NAME_SIZE];
        snprintf(name, sizeof(name), "blk.%" PRIu32 ".%s.weight", layer,
                 fl_tensor_role_name((enum fl_tensor_role)role));
        plan_tensor(plan, (enum fl_tensor_role)role, layer, name);
    }
}

/* Cut the list into parts and give each tensor its place. */
static void plan_places(struct planned_model *plan)
{
    const struct model_spec *spec = plan->spec;
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        struct planned_tensor *tensor = &plan->tensors[i];
        tensor->part = (uint32_t)((uint64_t)i * spec->part_count / plan->tensor_count);
        uint64_t *end = &plan->data_size[tensor->part];
        tensor->offset = (*end + spec->alignment - 1) / spec->alignment * spec->alignment;
        *end = tensor->offset + tensor->size;
    }
}

static struct planned_model *plan_model(const struct model_spec *spec)
{
    struct planned_model *plan = calloc(1, sizeof(*plan));
    FL_ASSERT(plan != NULL);
    FL_ASSERT(spec->layer_count <= FL_LAYER_COUNT_MAX && spec->part_count <= FL_FILE_COUNT_MAX);
    plan->spec = spec;
    model_spec_tokens(spec, &plan->tokens);
    plan->shape = (struct fl_model_shape){
        .architecture = spec->architecture,
        .layer_count = spec->layer_count,
        .width = spec->width,
        .head_size = spec->head_size,
        .vocabulary = spec->tokenizer != TOKEN_TABLE_NONE ? plan->tokens.count : spec->vocabulary,
        .rope_dim = spec->rope_dim != 0 ? spec->rope_dim : spec->head_size,
    };
    for (uint32_t layer = 0; layer < spec->layer_count; layer++) {
        plan->shape.head_count[layer] = spec->head_count;
        plan->shape.head_count_kv[layer] =
            spec->heads_kv != NULL ? spec->heads_kv[layer] : spec->head_count_kv;
        plan->shape.ffn_width[layer] =
            spec->ffn_widths != NULL ? spec->ffn_widths[layer] : spec->ffn_width;
    }
    plan_tensor(plan, FL_ROLE_TOKEN_EMBD, 0, "token_embd.weight");
    if (spec->rope_freqs) {
        plan_tensor(plan, FL_ROLE_ROPE_FACTORS, 0, "rope_freqs.weight");
    }
    if (spec->rope_factors) {
        plan_tensor(plan, FL_ROLE_ROPE_FACTORS_LONG, 0, "rope_factors_long.weight");
        plan_tensor(plan, FL_ROLE_ROPE_FACTORS, 0, "rope_factors_short.weight");
    }
    for (uint32_t layer = 0; layer < spec->layer_count; layer++) {
        plan_layer(plan, layer);
    }
    plan_tensor(plan, FL_ROLE_OUTPUT_NORM, 0, "output_norm.weight");
    if (spec->untied) {
        plan_tensor(plan, FL_ROLE_OUTPUT, 0, "output.weight");
    }
    plan_places(plan);
    return plan;
}

static void plan_close(struct planned_model *plan)
{
    token_table_close(&plan->tokens);
    free(plan);
}

/* ---- header ---- */

struct key_writer {
    struct gguf_buffer *buffer;
    const struct model_spec *spec;
    const char *prefix;
};

static void put_uint(const struct key_writer *writer, const char *key, uint32_t value)
{
    char name[KEY_SIZE];
    snprintf(name, sizeof(name), "%s.%s", writer->prefix, key);
    gguf_put_key_uint(writer->buffer, name, writer->spec->integer_type, value);
}

static void put_uints(const struct key_writer *writer, const char *key, const uint32_t *values)
{
    char name[KEY_SIZE];
    snprintf(name, sizeof(name), "%s.%s", writer->prefix, key);
    if (writer->spec->arrays) {
        gguf_put_key_uints(writer->buffer, name, writer->spec->integer_type, values,
                           writer->spec->layer_count);
    } else {
        gguf_put_key_uint(writer->buffer, name, writer->spec->integer_type, values[0]);
    }
}

static void put_float(const struct key_writer *writer, const char *key, float value)
{
    char name[KEY_SIZE];
    snprintf(name, sizeof(name), "%s.%s", writer->prefix, key);
    if (value != 0) {
        gguf_put_key_float(writer->buffer, name, value);
    }
}

static void put_rope(const struct key_writer *writer)
{
    const struct model_spec *spec = writer->spec;
    put_float(writer, "rope.freq_base", spec->rope_base);
    if (spec->rope_dim != 0) {
        put_uint(writer, "rope.dimension_count", spec->rope_dim);
    }
    if (spec->rope_scaling != NULL) {
        char name[KEY_SIZE];
        snprintf(name, sizeof(name), "%s.rope.scaling.type", writer->prefix);
        gguf_put_key_text(writer->buffer, name, spec->rope_scaling);
    }
    put_float(writer, "rope.scaling.factor", spec->rope_factor);
    put_float(writer, "rope.scale_linear", spec->rope_scale_linear);
    put_float(writer, "rope.scaling.attn_factor", spec->rope_attention_factor);
    if (spec->rope_original_context != 0) {
        put_uint(writer, "rope.scaling.original_context_length", spec->rope_original_context);
    }
}

static void put_shape(const struct key_writer *writer, const struct planned_model *plan)
{
    const struct model_spec *spec = writer->spec;
    put_uint(writer, "block_count", spec->layer_count);
    put_uint(writer, "context_length", spec->context);
    put_uint(writer, "embedding_length", spec->width);
    put_uints(writer, "feed_forward_length", plan->shape.ffn_width);
    put_uints(writer, "attention.head_count", plan->shape.head_count);
    put_uints(writer, "attention.head_count_kv", plan->shape.head_count_kv);
    put_float(writer, "attention.layer_norm_rms_epsilon", 1e-5f);
    if (spec->head_size * spec->head_count != spec->width) {
        put_uint(writer, "attention.key_length", spec->head_size);
        put_uint(writer, "attention.value_length", spec->head_size);
    }
    if (spec->window != 0) {
        put_uint(writer, "attention.sliding_window", spec->window);
    }
    if (spec->window_pattern != 0) {
        put_uint(writer, "attention.sliding_window_pattern", spec->window_pattern);
    }
    if (spec->vocabulary_key) {
        put_uint(writer, "vocab_size", plan->shape.vocabulary);
    }
    put_rope(writer);
}

static void put_token_id(struct gguf_buffer *buffer, const struct model_spec *spec, const char *key,
                         uint32_t id)
{
    if (id != MODEL_TOKEN_ABSENT) {
        gguf_put_key_uint(buffer, key, spec->integer_type, id);
    }
}

static void put_tokenizer(struct gguf_buffer *buffer, const struct planned_model *plan)
{
    const struct model_spec *spec = plan->spec;
    const struct token_table *tokens = &plan->tokens;
    const bool bpe = spec->tokenizer == TOKEN_TABLE_BPE;
    gguf_put_key_text(buffer, "tokenizer.ggml.model", bpe ? "gpt2" : "llama");
    if (spec->pre != NULL) {
        gguf_put_key_text(buffer, "tokenizer.ggml.pre", spec->pre);
    }
    gguf_put_key_strings(buffer, "tokenizer.ggml.tokens", tokens->texts, tokens->count);
    gguf_put_key_uints(buffer, "tokenizer.ggml.token_type", GGUF_INT32, tokens->types,
                       tokens->count);
    if (bpe) {
        gguf_put_key_strings(buffer, "tokenizer.ggml.merges", tokens->merges, tokens->merge_count);
    } else {
        gguf_put_key_floats(buffer, "tokenizer.ggml.scores", tokens->scores, tokens->count);
    }
    put_token_id(buffer, spec, "tokenizer.ggml.bos_token_id", tokens->bos);
    put_token_id(buffer, spec, "tokenizer.ggml.eos_token_id", tokens->eos);
    put_token_id(buffer, spec, "tokenizer.ggml.eot_token_id", tokens->eot);
    put_token_id(buffer, spec, "tokenizer.ggml.unknown_token_id", tokens->unk);
    put_token_id(buffer, spec, "tokenizer.ggml.padding_token_id", tokens->pad);
    gguf_put_key_bool(buffer, "tokenizer.ggml.add_bos_token", spec->add_bos);
    gguf_put_key_bool(buffer, "tokenizer.ggml.add_eos_token", spec->add_eos);
    gguf_put_key_bool(buffer, "tokenizer.ggml.add_space_prefix", spec->add_space_prefix);
    if (spec->chat_template != NULL) {
        gguf_put_key_text(buffer, "tokenizer.chat_template", spec->chat_template);
    }
}

static void put_keys(struct gguf_buffer *buffer, const struct planned_model *plan)
{
    const struct model_spec *spec = plan->spec;
    const struct key_writer writer = {
        .buffer = buffer,
        .spec = spec,
        .prefix = spec->architecture == FL_ARCHITECTURE_GEMMA3 ? "gemma3" : "llama",
    };
    gguf_put_key_text(buffer, "general.architecture", writer.prefix);
    gguf_put_key_text(buffer, "general.name", "generated for a test");
    put_shape(&writer, plan);
    if (spec->tokenizer != TOKEN_TABLE_NONE) {
        put_tokenizer(buffer, plan);
    }
    if (spec->more_keys != NULL) {
        spec->more_keys(buffer, spec->ctx);
    }
}

static void put_part_header(const struct planned_model *plan, uint32_t part,
                            struct gguf_buffer *buffer)
{
    const struct model_spec *spec = plan->spec;
    gguf_put_header(buffer, spec->version);
    if (part == 0) {
        put_keys(buffer, plan);
    }
    if (spec->alignment != 32) {
        gguf_put_key_uint(buffer, "general.alignment", spec->integer_type, spec->alignment);
    }
    if (spec->part_count > 1) {
        gguf_put_key_uint(buffer, "split.no", GGUF_UINT16, part);
        gguf_put_key_uint(buffer, "split.count", GGUF_UINT16, spec->part_count);
        gguf_put_key_uint(buffer, "split.tensors.count", GGUF_INT32, plan->tensor_count);
    }
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        const struct planned_tensor *tensor = &plan->tensors[i];
        const uint64_t dims[2] = {tensor->columns, tensor->rows};
        if (tensor->part == part) {
            gguf_put_tensor(buffer, tensor->name, tensor->rows == 1 ? 1 : 2, dims, tensor->dtype,
                            tensor->offset);
        }
    }
    gguf_put_padding(buffer, spec->alignment);
}

void model_header(const struct model_spec *spec, struct gguf_buffer *out, uint64_t *out_file_size)
{
    FL_ASSERT(spec->part_count == 1);
    struct planned_model *plan = plan_model(spec);
    put_part_header(plan, 0, out);
    *out_file_size = out->size + plan->data_size[0];
    plan_close(plan);
}

/* ---- weights ---- */

/* Source: Blackman and Vigna, xoshiro256++; seeded by splitmix64. */
struct random_state {
    uint64_t s[4];
};

static uint64_t splitmix(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void random_init(struct random_state *random, uint64_t seed, uint64_t stream)
{
    uint64_t state = seed;
    state = splitmix(&state) ^ stream;
    for (int i = 0; i < 4; i++) {
        random->s[i] = splitmix(&state);
    }
}

static uint64_t rotate(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

static uint64_t random_next(struct random_state *random)
{
    uint64_t *s = random->s;
    const uint64_t result = rotate(s[0] + s[3], 23) + s[0];
    const uint64_t shifted = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= shifted;
    s[3] = rotate(s[3], 45);
    return result;
}

static uint16_t half_of(float value)
{
    uint32_t bits;
    const float magnitude = fabsf(value);
    memcpy(&bits, &magnitude, sizeof(bits));
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    FL_ASSERT(magnitude < 65504.0f);
    if (magnitude < 0x1p-14f) { /* subnormal: multiples of 2^-24 */
        return (uint16_t)(sign | (uint16_t)lrintf(magnitude * 0x1p24f));
    }
    /* Round to 10 bits of fraction, then move the exponent's bias from 127 to 15. */
    const uint32_t rounded = (bits + 0xfff + (bits >> 13 & 1)) >> 13;
    return (uint16_t)(sign | (rounded - ((127 - 15) << 10)));
}

static uint16_t bfloat_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void store_half(unsigned char *at, float value)
{
    const uint16_t half = half_of(value);
    memcpy(at, &half, sizeof(half));
}

/* 0.5 .. 1.5, from two random bytes. */
static float jitter(const unsigned char *bytes)
{
    uint16_t value;
    memcpy(&value, bytes, sizeof(value));
    return 0.5f + (float)value / 65536.0f;
}

/* Turn a block of random bytes into a valid one whose values deviate by about `deviation`.
 * The divisors are the standard deviations of what a block's random integers multiply to. */
static void set_scales(enum fl_dtype dtype, float deviation, unsigned char *block)
{
    const float d = deviation * jitter(block);
    switch (dtype) {
    case FL_DTYPE_Q4_0: store_half(block, d / 4.6f); break;
    case FL_DTYPE_Q5_0: store_half(block, d / 9.2f); break;
    case FL_DTYPE_Q8_0: store_half(block, d / 74.0f); break;
    case FL_DTYPE_Q4_1:
        store_half(block + 2, -7.5f * d / 4.6f * (0.9f + 0.2f * jitter(block + 2)));
        store_half(block, d / 4.6f);
        break;
    case FL_DTYPE_Q5_1:
        store_half(block + 2, -15.5f * d / 9.2f * (0.9f + 0.2f * jitter(block + 2)));
        store_half(block, d / 9.2f);
        break;
    case FL_DTYPE_Q4_K:
        store_half(block, d / 260.0f);
        store_half(block + 2, 7.5f * d / 260.0f);
        break;
    case FL_DTYPE_Q5_K:
        store_half(block, d / 530.0f);
        store_half(block + 2, 15.5f * d / 530.0f);
        break;
    case FL_DTYPE_Q6_K: store_half(block + 208, d / 1369.0f); break;
    case FL_DTYPE_F32:
    case FL_DTYPE_F16:
    case FL_DTYPE_BF16: break;
    }
}

static void fill_floats(struct random_state *random, enum fl_dtype dtype, float centre,
                        float deviation, unsigned char *out, size_t count)
{
    const float scale = deviation * 1.7320508f / 2147483648.0f; /* uniform, so sqrt(3) wide */
    for (size_t i = 0; i < count; i++) {
        const float value = centre + scale * (float)(int32_t)(random_next(random) >> 32);
        if (dtype == FL_DTYPE_F32) {
            memcpy(out + 4 * i, &value, 4);
        } else {
            const uint16_t half = dtype == FL_DTYPE_F16 ? half_of(value) : bfloat_of(value);
            memcpy(out + 2 * i, &half, 2);
        }
    }
}

/* Centre and deviation of a tensor's values, such that activations stay of size 1. */
static void values_of(const struct model_spec *spec, const struct planned_tensor *tensor,
                      float *centre, float *deviation)
{
    *centre = 0;
    *deviation = 1.0f / sqrtf((float)tensor->columns);
    if (tensor->rows == 1) {
        const bool factors =
            tensor->role == FL_ROLE_ROPE_FACTORS || tensor->role == FL_ROLE_ROPE_FACTORS_LONG;
        *centre = factors ? 2.0f : 1.0f;
        *deviation = factors ? 0.5f : 0.1f;
    } else if (tensor->role == FL_ROLE_TOKEN_EMBD && spec->architecture == FL_ARCHITECTURE_LLAMA) {
        *deviation = 0.25f;
    } else if (tensor->role == FL_ROLE_OUTPUT) {
        *deviation *= 4.0f;
    }
}

static void fill_random(struct random_state *random, const struct model_spec *spec,
                        const struct planned_tensor *tensor, unsigned char *out, size_t size)
{
    float centre;
    float deviation;
    values_of(spec, tensor, &centre, &deviation);
    const size_t block = fl_dtype_block_size(tensor->dtype);
    if (fl_dtype_block_length(tensor->dtype) == 1) {
        fill_floats(random, tensor->dtype, centre, deviation, out, size / block);
        return;
    }
    for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
        const uint64_t value = random_next(random);
        const size_t left = size - at;
        memcpy(out + at, &value, left < sizeof(value) ? left : sizeof(value));
    }
    for (size_t at = 0; at < size; at += block) {
        set_scales(tensor->dtype, deviation, out + at);
    }
}

/* Scripted models: rows `row_first` on of a tensor whose elements are F32. */
static void fill_scripted(const struct model_spec *spec, const struct planned_tensor *tensor,
                          uint64_t row_first, unsigned char *out, size_t size)
{
    float *values = (float *)(void *)out;
    const uint32_t columns = tensor->columns;
    memset(out, 0, size);
    const uint64_t rows = size / sizeof(float) / columns;
    for (uint64_t row = 0; row < rows; row++) {
        float *to = values + row * columns;
        const uint64_t id = row_first + row;
        if (tensor->rows == 1) {
            for (uint32_t i = 0; i < columns; i++) {
                to[i] = 1.0f;
            }
        } else if (tensor->role == FL_ROLE_TOKEN_EMBD) {
            to[id] = 1.0f;
        } else if (tensor->role == FL_ROLE_OUTPUT) {
            for (uint32_t from = 0; from < tensor->rows; from++) {
                const uint32_t next = from < spec->chain_count ? spec->chain[from] : 0;
                to[from] = next == id ? 1.0f : 0.0f;
            }
        }
    }
}

/* ---- files ---- */

static fl_status write_tensor(const struct planned_model *plan, uint32_t index,
                              struct bulk_file *file, unsigned char *slab)
{
    const struct model_spec *spec = plan->spec;
    const struct planned_tensor *tensor = &plan->tensors[index];
    struct random_state random;
    random_init(&random, spec->seed, index);
    /* Whole rows for scripts; else whole blocks. */
    const uint64_t unit =
        spec->chain_count != 0 ? tensor->size / tensor->rows : fl_dtype_block_size(tensor->dtype);
    const uint64_t step = SLAB_SIZE / unit * unit;
    for (uint64_t at = 0; at < tensor->size; at += step) {
        const uint64_t left = tensor->size - at;
        const size_t size = (size_t)(left < step ? left : step);
        if (spec->chain_count != 0) {
            fill_scripted(spec, tensor, at / unit, slab, size);
        } else {
            fill_random(&random, spec, tensor, slab, size);
        }
        FL_TRY(bulk_file_put(file, slab, size));
    }
    return FL_OK;
}

static fl_status write_data(const struct planned_model *plan, uint32_t part, struct bulk_file *file,
                            unsigned char *slab)
{
    uint64_t written = 0;
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        const struct planned_tensor *tensor = &plan->tensors[i];
        if (tensor->part != part) {
            continue;
        }
        while (written < tensor->offset) {
            const uint64_t gap = tensor->offset - written;
            const size_t size = gap < SLAB_SIZE ? (size_t)gap : (size_t)SLAB_SIZE;
            memset(slab, 0, size);
            FL_TRY(bulk_file_put(file, slab, size));
            written += size;
        }
        FL_TRY(write_tensor(plan, i, file, slab));
        written += tensor->size;
    }
    return FL_OK;
}

static fl_status write_part(const struct planned_model *plan, uint32_t part, const char *path,
                            unsigned char *slab)
{
    struct bulk_file *file;
    FL_TRY(bulk_file_open(path, plan->data_size[part], &file));
    struct gguf_buffer header = {0};
    put_part_header(plan, part, &header);
    fl_status status = bulk_file_put(file, header.data, header.size);
    gguf_buffer_free(&header);
    if (status == FL_OK) {
        status = write_data(plan, part, file, slab);
    }
    if (status != FL_OK) {
        bulk_file_discard(file);
        return status;
    }
    return bulk_file_commit(file);
}

void model_part_path(const char *path, uint32_t number, uint32_t count, char *out, size_t out_size)
{
    static const char suffix[] = ".gguf";
    size_t size = strlen(path);
    if (count <= 1) {
        snprintf(out, out_size, "%s", path);
        return;
    }
    if (size > sizeof(suffix) - 1 && strcmp(path + size - (sizeof(suffix) - 1), suffix) == 0) {
        size -= sizeof(suffix) - 1;
    }
    snprintf(out, out_size, "%.*s-%05" PRIu32 "-of-%05" PRIu32 ".gguf", (int)size, path, number,
             count);
}

fl_status model_write(const struct model_spec *spec, const char *path)
{
    struct planned_model *plan = plan_model(spec);
    unsigned char *slab = malloc(SLAB_SIZE);
    FL_ASSERT(slab != NULL);
    fl_status status = FL_OK;
    for (uint32_t part = 0; part < spec->part_count && status == FL_OK; part++) {
        char part_path[PATH_SIZE];
        model_part_path(path, part + 1, spec->part_count, part_path, sizeof(part_path));
        status = write_part(plan, part, part_path, slab);
    }
    free(slab);
    plan_close(plan);
    return status;
}
