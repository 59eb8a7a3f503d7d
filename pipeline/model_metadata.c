#include "pipeline/model_metadata.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    KEY_NAME_MAX = 96,
    GEMMA3_WINDOW_PATTERN = 6,
    GEMMA3_27B_LAYERS = 62,
};

/* What the reading of one header passes around. */
struct reader {
    const struct gguf *gguf;
    const char *path;
    const char *prefix; /* "llama", "gemma3": keys begin with it */
    struct fl_model_shape *shape;
};

/* ---- keys ---- */

struct key_name {
    char text[KEY_NAME_MAX];
};

static struct key_name key_of(const struct reader *reader, const char *key)
{
    struct key_name name;
    snprintf(name.text, sizeof(name.text), "%s.%s", reader->prefix, key);
    return name;
}

static fl_status missing_key(const struct reader *reader, const char *key)
{
    return FL_FAIL(FL_MALFORMED, "%s: key %s is missing", reader->path, key);
}

static fl_status get_uint(const struct reader *reader, const char *key, uint32_t max, uint32_t *out)
{
    uint64_t value = 0;
    const struct key_name name = key_of(reader, key);
    const fl_status status = gguf_get_uint(reader->gguf, name.text, max, &value);
    if (status == FL_NOT_FOUND) {
        return missing_key(reader, name.text);
    }
    FL_TRY(status);
    *out = (uint32_t)value;
    return FL_OK;
}

static fl_status get_uint_or(const struct reader *reader, const char *key, uint32_t max,
                             uint32_t fallback, uint32_t *out)
{
    if (!gguf_has(reader->gguf, key_of(reader, key).text)) {
        *out = fallback;
        return FL_OK;
    }
    return get_uint(reader, key, max, out);
}

static fl_status get_float_or(const struct reader *reader, const char *key, float fallback,
                              float *out)
{
    const fl_status status = gguf_get_float(reader->gguf, key_of(reader, key).text, out);
    if (status == FL_NOT_FOUND) {
        *out = fallback;
        return FL_OK;
    }
    return status;
}

/* A value for all layers, or an array with one for each; `out` [layer_count]. */
static fl_status get_per_layer(const struct reader *reader, const char *key, uint32_t max,
                               uint32_t *out)
{
    const struct key_name name = key_of(reader, key);
    const uint32_t layers = reader->shape->layer_count;
    uint64_t value = 0;
    enum gguf_type type = GGUF_UINT8;
    uint32_t count = 0;
    if (!gguf_has(reader->gguf, name.text)) {
        return missing_key(reader, name.text);
    }
    if (gguf_is_array(reader->gguf, name.text)) {
        FL_TRY(gguf_array_count(reader->gguf, name.text, &type, &count));
        if (count != layers) {
            return FL_FAIL(FL_MALFORMED,
                           "%s: key %s has %" PRIu32 " elements; the model has %" PRIu32 " layers",
                           reader->path, name.text, count, layers);
        }
        return gguf_uints(reader->gguf, name.text, max, out, count);
    }
    FL_TRY(gguf_get_uint(reader->gguf, name.text, max, &value));
    for (uint32_t layer = 0; layer < layers; layer++) {
        out[layer] = (uint32_t)value;
    }
    return FL_OK;
}

/* ---- metadata that would change the result ---- */

/* Keys that do nothing at these values and ask for computations we lack at any other. */
static const struct {
    const char *key;
    float harmless[2];
} neutral_keys[] = {
    {"expert_count", {0, 0}},
    {"attn_logit_softcapping", {0, 0}},
    {"final_logit_softcapping", {0, 0}},
    {"logit_scale", {0, 1}},
    {"embedding_scale", {0, 1}},
    {"residual_scale", {0, 1}},
    {"attention.clamp_kqv", {0, 0}},
    {"attention.max_alibi_bias", {0, 0}},
    {"attention.temperature_scale", {0, 0}},
    {"rope.scaling.yarn_log_multiplier", {0, 0}},
    {"rope.scaling.yarn_ext_factor", {-1, 1}},
    {"rope.scaling.yarn_attn_factor", {1, 1}},
};

static fl_status refuse_foreign_keys(const struct reader *reader)
{
    for (size_t i = 0; i < sizeof(neutral_keys) / sizeof(neutral_keys[0]); i++) {
        const float *harmless = neutral_keys[i].harmless;
        float value = 0;
        FL_TRY(get_float_or(reader, neutral_keys[i].key, harmless[0], &value));
        if (value != harmless[0] && value != harmless[1]) {
            return FL_FAIL(FL_UNSUPPORTED,
                           "%s: key %s is %g, which this build does not compute; only models with "
                           "%g are supported",
                           reader->path, key_of(reader, neutral_keys[i].key).text, (double)value,
                           (double)harmless[0]);
        }
    }
    bool causal = true;
    const struct key_name name = key_of(reader, "attention.causal");
    const fl_status status = gguf_get_bool(reader->gguf, name.text, &causal);
    if (status != FL_OK && status != FL_NOT_FOUND) {
        return status;
    }
    if (!causal) {
        return FL_FAIL(FL_UNSUPPORTED, "%s: key %s is false; only causal models generate text",
                       reader->path, name.text);
    }
    return FL_OK;
}

static fl_status read_architecture(struct reader *reader)
{
    struct gguf_string name = {0};
    const fl_status status = gguf_get_string(reader->gguf, "general.architecture", &name);
    if (status == FL_NOT_FOUND) {
        return missing_key(reader, "general.architecture");
    }
    FL_TRY(status);
    if (gguf_string_is(name, "llama")) {
        reader->prefix = "llama";
        reader->shape->architecture = FL_ARCHITECTURE_LLAMA;
    } else if (gguf_string_is(name, "gemma3")) {
        reader->prefix = "gemma3";
        reader->shape->architecture = FL_ARCHITECTURE_GEMMA3;
    } else {
        return FL_FAIL(FL_UNSUPPORTED,
                       "%s: architecture \"%s\" is not supported; llama and gemma3 are",
                       reader->path, gguf_show(name).text);
    }
    return FL_OK;
}

/* ---- shape ---- */

static fl_status read_scaling(const struct reader *reader, struct fl_rope *rope)
{
    const struct key_name key = key_of(reader, "rope.scaling.type");
    struct gguf_string type = {0};
    float factor = 0;
    FL_TRY(get_float_or(reader, "rope.scale_linear", 0.0f, &factor));
    FL_TRY(get_float_or(reader, "rope.scaling.factor", factor, &factor));
    const fl_status status = gguf_get_string(reader->gguf, key.text, &type);
    if (status == FL_NOT_FOUND) {
        /* Before the type had a key, a factor meant linear. */
        rope->scaling = factor != 0 && factor != 1 ? FL_ROPE_LINEAR : FL_ROPE_NONE;
    } else if (status != FL_OK) {
        return status;
    } else if (gguf_string_is(type, "none")) {
        rope->scaling = FL_ROPE_NONE;
    } else if (gguf_string_is(type, "linear")) {
        rope->scaling = FL_ROPE_LINEAR;
    } else if (gguf_string_is(type, "yarn")) {
        rope->scaling = FL_ROPE_YARN;
    } else if (gguf_string_is(type, "longrope")) {
        rope->scaling = FL_ROPE_LONG;
    } else {
        return FL_FAIL(FL_UNSUPPORTED,
                       "%s: key %s is \"%s\"; none, linear, yarn and longrope are supported",
                       reader->path, key.text, gguf_show(type).text);
    }
    rope->factor = rope->scaling == FL_ROPE_NONE || factor == 0 ? 1.0f : factor;
    return FL_OK;
}

static fl_status read_rope(const struct reader *reader, struct fl_rope *rope)
{
    struct fl_model_shape *shape = reader->shape;
    FL_TRY(get_float_or(reader, "rope.freq_base", 10000.0f, &rope->freq_base));
    FL_TRY(read_scaling(reader, rope));
    FL_TRY(get_float_or(reader, "rope.scaling.yarn_beta_fast", 32.0f, &rope->yarn_beta_fast));
    FL_TRY(get_float_or(reader, "rope.scaling.yarn_beta_slow", 1.0f, &rope->yarn_beta_slow));
    FL_TRY(get_uint_or(reader, "rope.scaling.original_context_length", FL_CONTEXT_MAX, 0,
                       &rope->original_context));
    FL_TRY(get_float_or(reader, "rope.scaling.attn_factor", 0.0f, &rope->attention_factor));
    /* Files with long and short factors may leave the type out. */
    if (gguf_tensor_find(reader->gguf, "rope_factors_long.weight") != NULL) {
        rope->scaling = FL_ROPE_LONG;
    }
    if (rope->scaling == FL_ROPE_YARN) {
        if (rope->original_context == 0) {
            rope->original_context = shape->context;
        }
        /* GGUF's factor multiplies what the paper derives; ours replaces it. */
        if (rope->attention_factor == 1.0f) {
            rope->attention_factor = 0;
        } else if (rope->attention_factor != 0) {
            rope->attention_factor *= (float)(1.0 + 0.1 * log((double)rope->factor));
        }
    }
    return FL_OK;
}

/* Local layers: "every n-th is global", from a number or an array with 1 for each local layer. */
static fl_status read_window_pattern(const struct reader *reader, uint32_t *out)
{
    const struct key_name name = key_of(reader, "attention.sliding_window_pattern");
    const uint32_t layers = reader->shape->layer_count;
    uint32_t local[FL_LAYER_COUNT_MAX];
    if (!gguf_is_array(reader->gguf, name.text)) {
        return get_uint_or(reader, "attention.sliding_window_pattern", FL_LAYER_COUNT_MAX,
                           GEMMA3_WINDOW_PATTERN, out);
    }
    FL_TRY(gguf_uints(reader->gguf, name.text, 1, local, layers));
    uint32_t period = 1;
    while (period <= layers && local[period - 1] != 0) {
        period++;
    }
    for (uint32_t layer = 0; layer < layers; layer++) {
        if ((local[layer] != 0) != ((layer + 1) % period != 0)) {
            return FL_FAIL(FL_UNSUPPORTED,
                           "%s: key %s has no period at layer %" PRIu32
                           "; every n-th layer must be global",
                           reader->path, name.text, layer);
        }
    }
    *out = period;
    return FL_OK;
}

static fl_status read_gemma3(const struct reader *reader)
{
    struct fl_model_shape *shape = reader->shape;
    FL_TRY(get_uint_or(reader, "attention.sliding_window", FL_CONTEXT_MAX, 0, &shape->window));
    if (shape->window != 0) {
        FL_TRY(read_window_pattern(reader, &shape->window_pattern));
    }
    shape->rope_local = (struct fl_rope){
        .scaling = FL_ROPE_NONE, .factor = 1.0f, .yarn_beta_fast = 32.0f, .yarn_beta_slow = 1.0f};
    FL_TRY(get_float_or(reader, "rope.freq_base_swa", 10000.0f, &shape->rope_local.freq_base));
    shape->embedding_scale = sqrtf((float)shape->width);
    /* The largest one was trained with the width per head, not the head's own size; its file does
     * not say so. */
    const uint32_t size = shape->layer_count == GEMMA3_27B_LAYERS && shape->head_count[0] != 0
                              ? shape->width / shape->head_count[0]
                              : shape->head_size;
    if (shape->attention_scale == 0 && size != 0) {
        shape->attention_scale = 1.0f / sqrtf((float)size);
    }
    return FL_OK;
}

static fl_status read_llama(const struct reader *reader)
{
    struct fl_model_shape *shape = reader->shape;
    uint32_t window = 0;
    FL_TRY(get_uint_or(reader, "attention.sliding_window", UINT32_MAX, 0, &window));
    if (window != 0 && window < shape->context) {
        return FL_FAIL(FL_UNSUPPORTED,
                       "%s: key %s is %" PRIu32 "; llama models with a sliding window are not "
                       "supported",
                       reader->path, key_of(reader, "attention.sliding_window").text, window);
    }
    shape->rope_local = shape->rope;
    shape->embedding_scale = 1.0f;
    if (shape->attention_scale == 0) {
        shape->attention_scale = 1.0f / sqrtf((float)shape->head_size);
    }
    return FL_OK;
}

/* From the tokenizer's list, else the key, else the table's rows. */
static fl_status read_vocabulary(const struct reader *reader, uint32_t *out)
{
    static const char tokens[] = "tokenizer.ggml.tokens";
    const struct gguf_tensor *table = gguf_tensor_find(reader->gguf, "token_embd.weight");
    const uint64_t rows = table != NULL ? table->dims[1] : 0;
    if (gguf_has(reader->gguf, tokens)) {
        enum gguf_type type;
        FL_TRY(gguf_array_count(reader->gguf, tokens, &type, out));
        return FL_OK;
    }
    return get_uint_or(reader, "vocab_size", FL_VOCABULARY_MAX,
                       rows <= FL_VOCABULARY_MAX ? (uint32_t)rows : 0, out);
}

static fl_status read_heads(const struct reader *reader)
{
    struct fl_model_shape *shape = reader->shape;
    uint32_t value_size = 0;
    FL_TRY(get_per_layer(reader, "attention.head_count", FL_HEAD_COUNT_MAX, shape->head_count));
    if (gguf_has(reader->gguf, key_of(reader, "attention.head_count_kv").text)) {
        FL_TRY(get_per_layer(reader, "attention.head_count_kv", FL_HEAD_COUNT_MAX,
                             shape->head_count_kv));
    } else {
        memcpy(shape->head_count_kv, shape->head_count, sizeof(shape->head_count));
    }
    const uint32_t heads = shape->head_count[0];
    FL_TRY(get_uint_or(reader, "attention.key_length", FL_HEAD_SIZE_MAX,
                       heads != 0 ? shape->width / heads : 0, &shape->head_size));
    FL_TRY(get_uint_or(reader, "attention.value_length", FL_HEAD_SIZE_MAX, shape->head_size,
                       &value_size));
    if (value_size != shape->head_size) {
        return FL_FAIL(FL_UNSUPPORTED,
                       "%s: keys have %" PRIu32 " elements a head, values %" PRIu32
                       "; only models where both are alike are supported",
                       reader->path, shape->head_size, value_size);
    }
    return FL_OK;
}

static fl_status read_shape(const struct reader *reader)
{
    struct fl_model_shape *shape = reader->shape;
    const struct key_name epsilon = key_of(reader, "attention.layer_norm_rms_epsilon");
    FL_TRY(get_uint(reader, "block_count", FL_LAYER_COUNT_MAX, &shape->layer_count));
    FL_TRY(get_uint(reader, "embedding_length", FL_WIDTH_MAX, &shape->width));
    FL_TRY(get_uint(reader, "context_length", UINT32_MAX, &shape->context));
    /* More than we can address is more than anyone asks for. */
    shape->context = shape->context < FL_CONTEXT_MAX ? shape->context : (uint32_t)FL_CONTEXT_MAX;
    FL_TRY(get_per_layer(reader, "feed_forward_length", FL_WIDTH_MAX, shape->ffn_width));
    FL_TRY(read_heads(reader));
    FL_TRY(get_uint_or(reader, "rope.dimension_count", FL_HEAD_SIZE_MAX, shape->head_size,
                       &shape->rope_dim));
    if (!gguf_has(reader->gguf, epsilon.text)) {
        return missing_key(reader, epsilon.text);
    }
    FL_TRY(gguf_get_float(reader->gguf, epsilon.text, &shape->norm_epsilon));
    FL_TRY(get_float_or(reader, "attention.scale", 0.0f, &shape->attention_scale));
    FL_TRY(read_vocabulary(reader, &shape->vocabulary));
    FL_TRY(read_rope(reader, &shape->rope));
    shape->tied_head = gguf_tensor_find(reader->gguf, "output.weight") == NULL;
    return shape->architecture == FL_ARCHITECTURE_GEMMA3 ? read_gemma3(reader) : read_llama(reader);
}

fl_status model_metadata_read(const struct gguf *gguf, struct fl_model_shape *out)
{
    struct fl_model_shape shape = {0};
    struct reader reader = {.gguf = gguf, .path = gguf_file_path(gguf, 0), .shape = &shape};
    FL_TRY(read_architecture(&reader));
    FL_TRY(refuse_foreign_keys(&reader));
    FL_TRY(read_shape(&reader));
    FL_TRY(fl_model_shape_check(&shape));
    *out = shape;
    return FL_OK;
}
