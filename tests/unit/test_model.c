/* Model: manifests of generated and real models, every way to be refused, identity. */
#include "pipeline/model.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "pipeline/model_identity.h"
#include "tests/harness.h"
#include "tests/support/model_writer.h"
#include "tests/support/temp_folder.h"

/* A model from the header that `spec` makes, or the status. */
static fl_status open_spec(const struct model_spec *spec, struct gguf_buffer *header,
                           struct model **out)
{
    struct gguf *gguf = NULL;
    uint64_t file_size;
    *header = (struct gguf_buffer){0};
    model_header(spec, header, &file_size);
    fl_status status = gguf_parse(header->data, header->size, file_size, &gguf);
    CHECK_EQ(status, FL_OK);
    status = model_from_gguf(gguf, "tiny", out);
    if (status != FL_OK) {
        gguf_close(gguf);
        gguf_buffer_free(header);
    }
    return status;
}

static void check_refused(const struct model_spec *spec, fl_status want, const char *phrase)
{
    struct gguf_buffer header;
    struct model *model = NULL;
    const fl_status status = open_spec(spec, &header, &model);
    if (strstr(fl_last_error(), phrase) == NULL) {
        printf("  \"%s\" does not say \"%s\"\n", fl_last_error(), phrase);
    }
    CHECK_EQ(status, want);
    CHECK(model == NULL);
    CHECK(strstr(fl_last_error(), phrase) != NULL);
}

/* The shape of the model that `spec` makes. */
static struct fl_model_shape shape_of(const struct model_spec *spec)
{
    struct gguf_buffer header;
    struct model *model = NULL;
    CHECK_EQ(open_spec(spec, &header, &model), FL_OK);
    CHECK_EQ(fl_manifest_check(model_manifest(model)), FL_OK);
    const struct fl_model_shape shape = model_manifest(model)->shape;
    model_close(model);
    gguf_buffer_free(&header);
    return shape;
}

static const enum fl_dtype all_types[] = {
    FL_DTYPE_F32,  FL_DTYPE_F16,  FL_DTYPE_BF16, FL_DTYPE_Q8_0, FL_DTYPE_Q4_0, FL_DTYPE_Q4_1,
    FL_DTYPE_Q5_0, FL_DTYPE_Q5_1, FL_DTYPE_Q4_K, FL_DTYPE_Q5_K, FL_DTYPE_Q6_K,
};

static void test_both_architectures_in_every_type(void)
{
    for (size_t i = 0; i < sizeof(all_types) / sizeof(all_types[0]); i++) {
        struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, all_types[i]);
        struct fl_model_shape shape = shape_of(&spec);
        CHECK_EQ(shape.architecture, FL_ARCHITECTURE_LLAMA);
        CHECK_EQ(shape.layer_count, 3);
        CHECK_EQ(shape.width, spec.width);
        CHECK_EQ(shape.head_size, spec.head_size);
        CHECK_EQ(shape.rope_dim, spec.head_size);
        CHECK_EQ(shape.head_count[2], 4);
        CHECK_EQ(shape.head_count_kv[2], 2);
        CHECK_EQ(shape.window, 0);
        CHECK(shape.tied_head && shape.embedding_scale == 1.0f);
        CHECK(shape.attention_scale == 1.0f / sqrtf((float)spec.head_size));

        spec = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, all_types[i]);
        shape = shape_of(&spec);
        CHECK_EQ(shape.architecture, FL_ARCHITECTURE_GEMMA3);
        CHECK_EQ(shape.window, 8);
        CHECK_EQ(shape.window_pattern, 6);
        CHECK(fl_model_layer_is_local(&shape, 0) && !fl_model_layer_is_local(&shape, 5));
        CHECK(shape.embedding_scale == sqrtf((float)spec.width));
        CHECK(shape.rope_local.freq_base == 10000.0f);
    }
}

static void test_pieces_are_in_order_of_use(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q8_0);
    struct gguf_buffer header;
    struct model *model = NULL;
    CHECK_EQ(open_spec(&spec, &header, &model), FL_OK);
    const struct fl_manifest *manifest = model_manifest(model);
    CHECK_EQ(manifest->piece_count, 16);
    CHECK_EQ(manifest->pieces[0].kind, FL_PIECE_EMBED);
    for (uint32_t layer = 0; layer < 7; layer++) {
        CHECK_EQ(manifest->pieces[1 + 2 * layer].kind, FL_PIECE_ATTENTION);
        CHECK_EQ(manifest->pieces[1 + 2 * layer].layer, layer);
        CHECK_EQ(manifest->pieces[1 + 2 * layer].tensor_count, 8);
        CHECK_EQ(manifest->pieces[2 + 2 * layer].kind, FL_PIECE_FFN);
        CHECK_EQ(manifest->pieces[2 + 2 * layer].tensor_count, 5);
    }
    const struct fl_piece *head = &manifest->pieces[15];
    CHECK_EQ(head->kind, FL_PIECE_HEAD);
    CHECK_EQ(head->tensors[0].role, FL_ROLE_OUTPUT_NORM);
    CHECK_EQ(head->tensors[1].role, FL_ROLE_OUTPUT);
    CHECK(head->tensors[1].offset == manifest->pieces[0].tensors[0].offset); /* tied */
    CHECK(fl_piece_size(head) == head->tensors[0].size + head->tensors[1].size);
    CHECK(strcmp(manifest->name, "tiny") == 0);
    model_close(model);
    gguf_buffer_free(&header);
}

static void test_untied_head_has_bytes_of_its_own(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q8_0);
    struct gguf_buffer header;
    struct model *model = NULL;
    spec.untied = true;
    spec.dtypes[FL_ROLE_OUTPUT] = FL_DTYPE_F16;
    CHECK_EQ(open_spec(&spec, &header, &model), FL_OK);
    const struct fl_manifest *manifest = model_manifest(model);
    CHECK(!manifest->shape.tied_head);
    CHECK_EQ(manifest->pieces[7].tensors[1].dtype, FL_DTYPE_F16);
    CHECK(manifest->pieces[7].tensors[1].offset != manifest->pieces[0].tensors[0].offset);
    model_close(model);
    gguf_buffer_free(&header);
}

static void test_keys_may_be_of_any_integer_type_and_per_layer(void)
{
    static const enum gguf_type types[] = {GGUF_UINT32, GGUF_INT32, GGUF_UINT64, GGUF_INT64};
    static const uint32_t heads_kv[3] = {1, 4, 2};
    static const uint32_t ffn_widths[3] = {96, 32, 64};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
        spec.integer_type = types[i];
        spec.version = i % 2 == 0 ? 2 : 3;
        spec.alignment = 64;
        CHECK_EQ(shape_of(&spec).head_count_kv[1], 2);
        spec.arrays = true;
        spec.heads_kv = heads_kv;
        spec.ffn_widths = ffn_widths;
        const struct fl_model_shape shape = shape_of(&spec);
        for (uint32_t layer = 0; layer < 3; layer++) {
            CHECK_EQ(shape.head_count_kv[layer], heads_kv[layer]);
            CHECK_EQ(shape.ffn_width[layer], ffn_widths[layer]);
        }
    }
}

static void test_vocabulary_comes_from_tokens_key_or_table(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_F16);
    struct token_table tokens;
    model_spec_tokens(&spec, &tokens);
    const uint32_t count = tokens.count;
    token_table_close(&tokens);
    CHECK(count > 256);
    CHECK_EQ(shape_of(&spec).vocabulary, count);
    spec.vocabulary = 1000;
    CHECK_EQ(shape_of(&spec).vocabulary, 1000);
    spec.tokenizer = TOKEN_TABLE_NONE;
    spec.vocabulary = 77;
    CHECK_EQ(shape_of(&spec).vocabulary, 77);
    spec.vocabulary_key = true;
    CHECK_EQ(shape_of(&spec).vocabulary, 77);
}

static void test_rope_scalings_are_read(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_F16);
    struct fl_rope rope = shape_of(&spec).rope;
    CHECK(rope.scaling == FL_ROPE_NONE && rope.factor == 1.0f && rope.freq_base == 10000.0f);
    CHECK(rope.yarn_beta_fast == 32.0f && rope.yarn_beta_slow == 1.0f);

    spec.rope_scale_linear = 4.0f; /* the old key, which had no type */
    rope = shape_of(&spec).rope;
    CHECK(rope.scaling == FL_ROPE_LINEAR && rope.factor == 4.0f);
    spec.rope_scaling = "none";
    rope = shape_of(&spec).rope;
    CHECK(rope.scaling == FL_ROPE_NONE && rope.factor == 1.0f);
    spec.rope_scale_linear = 0;
    spec.rope_scaling = "linear";
    spec.rope_factor = 2.0f;
    spec.rope_dim = 8;
    rope = shape_of(&spec).rope;
    CHECK(rope.scaling == FL_ROPE_LINEAR && rope.factor == 2.0f);
    CHECK_EQ(shape_of(&spec).rope_dim, 8);

    spec.rope_scaling = "yarn";
    rope = shape_of(&spec).rope;
    CHECK(rope.scaling == FL_ROPE_YARN && rope.attention_factor == 0);
    CHECK_EQ(rope.original_context, 512); /* the model's, for want of a key */
    spec.rope_original_context = 128;
    spec.rope_attention_factor = 2.0f;
    rope = shape_of(&spec).rope;
    CHECK_EQ(rope.original_context, 128);
    CHECK(fabsf(rope.attention_factor - 2.0f * (1.0f + 0.1f * logf(2.0f))) < 1e-6f);

    spec.rope_scaling = "longrope";
    check_refused(&spec, FL_MALFORMED, "rope_factors_long");
    spec.rope_factors = true;
    rope = shape_of(&spec).rope;
    CHECK(rope.scaling == FL_ROPE_LONG && rope.attention_factor == 2.0f);
    spec.rope_scaling = NULL; /* the tensors say it too */
    CHECK_EQ(shape_of(&spec).rope.scaling, FL_ROPE_LONG);
    spec.rope_original_context = 0;
    check_refused(&spec, FL_MALFORMED, "rope original context");
    spec.rope_scaling = "su";
    check_refused(&spec, FL_UNSUPPORTED, "\"su\"");
}

static void test_rope_factors_ride_in_every_attention_piece(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q5_1);
    struct gguf_buffer header;
    struct model *model = NULL;
    spec.rope_freqs = true;
    CHECK_EQ(open_spec(&spec, &header, &model), FL_OK);
    const struct fl_manifest *manifest = model_manifest(model);
    for (uint32_t layer = 0; layer < 3; layer++) {
        const struct fl_tensor_ref *tensor = &manifest->pieces[1 + 2 * layer].tensors[0];
        CHECK_EQ(tensor->role, FL_ROLE_ROPE_FACTORS);
        CHECK_EQ(tensor->columns, spec.head_size / 2);
    }
    model_close(model);
    gguf_buffer_free(&header);
    spec.rope_factors = true; /* both kinds at once mean nothing */
    spec.rope_original_context = 128;
    check_refused(&spec, FL_UNSUPPORTED, "rope_factors_");
    spec = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q5_1);
    spec.rope_freqs = true;
    check_refused(&spec, FL_UNSUPPORTED, "rope_freqs.weight");
}

static void test_gemma_scales_attention_as_it_was_trained(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q4_0);
    CHECK(shape_of(&spec).attention_scale == 1.0f / sqrtf(32.0f));
    spec.layer_count = 62; /* the 27B: width / heads, not the head's size */
    CHECK(shape_of(&spec).attention_scale == 1.0f / sqrtf(16.0f));
    spec.window_pattern = 3;
    CHECK_EQ(shape_of(&spec).window_pattern, 3);
    spec.window = 0;
    spec.window_pattern = 0;
    CHECK(!fl_model_layer_is_local(&(struct fl_model_shape){.window = 0}, 0));
    CHECK_EQ(shape_of(&spec).window_pattern, 0);
}

/* ---- keys that tests append ---- */

struct extra_key {
    const char *key;
    enum gguf_type type; /* GGUF_FLOAT32, GGUF_BOOL, GGUF_STRING or an integer */
    double value;
    const char *text;
};

/* An array; of strings it has empty ones. */
struct extra_array {
    const char *key;
    enum gguf_type type; /* GGUF_FLOAT32, GGUF_STRING or an integer */
    uint32_t count;
    uint32_t values[8]; /* of integers */
};

static void put_extra(struct gguf_buffer *buffer, void *ctx)
{
    const struct extra_key *extra = ctx;
    if (extra->type == GGUF_FLOAT32) {
        gguf_put_key_float(buffer, extra->key, (float)extra->value);
    } else if (extra->type == GGUF_STRING) {
        gguf_put_key_text(buffer, extra->key, extra->text);
    } else {
        gguf_put_key_uint(buffer, extra->key, extra->type, (uint64_t)extra->value);
    }
}

static void put_array(struct gguf_buffer *buffer, void *ctx)
{
    static const struct gguf_string strings[8] = {{"", 0}};
    static const float floats[8] = {0};
    const struct extra_array *extra = ctx;
    if (extra->type == GGUF_FLOAT32) {
        gguf_put_key_floats(buffer, extra->key, floats, extra->count);
    } else if (extra->type == GGUF_STRING) {
        gguf_put_key_strings(buffer, extra->key, strings, extra->count);
    } else {
        gguf_put_key_uints(buffer, extra->key, extra->type, extra->values, extra->count);
    }
}

static void test_metadata_that_changes_the_result_is_refused(void)
{
    static struct extra_key extras[] = {
        {"llama.expert_count", GGUF_UINT32, 8, NULL},
        {"llama.attn_logit_softcapping", GGUF_FLOAT32, 50, NULL},
        {"llama.final_logit_softcapping", GGUF_FLOAT32, 30, NULL},
        {"llama.logit_scale", GGUF_FLOAT32, 0.25, NULL},
        {"llama.embedding_scale", GGUF_FLOAT32, 12, NULL},
        {"llama.residual_scale", GGUF_FLOAT32, 0.5, NULL},
        {"llama.attention.clamp_kqv", GGUF_FLOAT32, 8, NULL},
        {"llama.attention.max_alibi_bias", GGUF_FLOAT32, 8, NULL},
        {"llama.attention.causal", GGUF_BOOL, 0, NULL},
        {"llama.attention.sliding_window", GGUF_UINT32, 64, NULL},
        {"llama.rope.scaling.yarn_log_multiplier", GGUF_FLOAT32, 0.1, NULL},
    };
    for (size_t i = 0; i < sizeof(extras) / sizeof(extras[0]); i++) {
        struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
        spec.more_keys = put_extra;
        spec.ctx = &extras[i];
        check_refused(&spec, FL_UNSUPPORTED, extras[i].key);
    }
    static struct extra_key harmless[] = {
        {"llama.expert_count", GGUF_UINT32, 0, NULL},
        {"llama.final_logit_softcapping", GGUF_FLOAT32, 0, NULL},
        {"llama.logit_scale", GGUF_FLOAT32, 1, NULL},
        {"llama.attention.causal", GGUF_BOOL, 1, NULL},
        {"llama.attention.sliding_window", GGUF_UINT32, 512, NULL},
        {"llama.attention.scale", GGUF_FLOAT32, 0.5, NULL},
        {"some.other.key", GGUF_STRING, 0, "is nobody's business"},
    };
    for (size_t i = 0; i < sizeof(harmless) / sizeof(harmless[0]); i++) {
        struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
        spec.more_keys = put_extra;
        spec.ctx = &harmless[i];
        const float scale = shape_of(&spec).attention_scale;
        CHECK(scale == (strstr(harmless[i].key, "attention.scale") != NULL ? 0.5f : 0.25f));
    }
}

static void test_mistyped_metadata_is_refused(void)
{
    static struct extra_key extras[] = {
        {"llama.vocab_size", GGUF_STRING, 0, "many"},
        {"llama.rope.dimension_count", GGUF_FLOAT32, 16, NULL},
        {"llama.attention.key_length", GGUF_STRING, 0, "16"},
        {"llama.rope.scaling.type", GGUF_UINT32, 1, NULL},
        {"llama.rope.scaling.factor", GGUF_STRING, 0, "2"},
        {"llama.attention.value_length", GGUF_UINT32, 9999, NULL},
    };
    for (size_t i = 0; i < sizeof(extras) / sizeof(extras[0]); i++) {
        struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
        spec.tokenizer = TOKEN_TABLE_NONE;
        spec.vocabulary = 64;
        spec.more_keys = put_extra;
        spec.ctx = &extras[i];
        check_refused(&spec, FL_MALFORMED, extras[i].key);
    }
    static struct extra_key value_length = {"llama.attention.value_length", GGUF_UINT32, 32, NULL};
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    spec.more_keys = put_extra;
    spec.ctx = &value_length;
    check_refused(&spec, FL_UNSUPPORTED, "keys have 16 elements a head, values 32");
}

/* ---- headers that tests change ---- */

/* Where what follows the name of a key or tensor begins: of a key its type and, 4 on, its value; of a
 * tensor the number of dimensions and, 4 on, these, then its type. */
static unsigned char *behind(const struct gguf_buffer *header, const char *name)
{
    unsigned char *at = memmem(header->data, header->size, name, strlen(name));
    CHECK(at != NULL);
    return at + strlen(name);
}

/* A header that is read, and makes no model.  Ends the header. */
static void check_header_refused(struct gguf_buffer *header, uint64_t file_size, fl_status want,
                                 const char *phrase)
{
    struct gguf *gguf = NULL;
    struct model *model = NULL;
    CHECK_EQ(gguf_parse(header->data, header->size, file_size, &gguf), FL_OK);
    const fl_status status = model_from_gguf(gguf, "tiny", &model);
    if (strstr(fl_last_error(), phrase) == NULL) {
        printf("  \"%s\" does not say \"%s\"\n", fl_last_error(), phrase);
    }
    CHECK_EQ(status, want);
    CHECK(model == NULL && strstr(fl_last_error(), phrase) != NULL);
    gguf_close(gguf);
    gguf_buffer_free(header);
}

/* The header of `spec` with one name changed, in place: same length. */
static void check_rename_refused(const struct model_spec *spec, const char *from, const char *to,
                                 fl_status want, const char *phrase)
{
    struct gguf_buffer header = {0};
    uint64_t file_size;
    model_header(spec, &header, &file_size);
    CHECK_EQ(strlen(from), strlen(to));
    memcpy(behind(&header, from) - strlen(from), to, strlen(to));
    check_header_refused(&header, file_size, want, phrase);
}

/* The header of `spec` with the number changed that lies `skip` bytes behind a name. */
static void check_change_refused(const struct model_spec *spec, const char *name, size_t skip,
                                 uint32_t value, fl_status want, const char *phrase)
{
    struct gguf_buffer header = {0};
    uint64_t file_size;
    model_header(spec, &header, &file_size);
    memcpy(behind(&header, name) + skip, &value, sizeof(value));
    check_header_refused(&header, file_size, want, phrase);
}

static void test_missing_keys_and_tensors_are_named(void)
{
    static const char *const keys[][2] = {
        {"general.architecture", "general.architectura"},
        {"llama.block_count", "llama.block_amount"},
        {"llama.context_length", "llama.context_lengtt"},
        {"llama.embedding_length", "llama.embedding_lengtt"},
        {"llama.feed_forward_length", "llama.feed_forward_lengtt"},
        {"llama.attention.head_count", "llama.attention.head_number"},
        {"llama.attention.layer_norm_rms_epsilon", "llama.attention.layer_norm_rms_epsilom"},
    };
    const struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        char to[64];
        snprintf(to, sizeof(to), "%.*s", (int)strlen(keys[i][0]), keys[i][1]);
        check_rename_refused(&spec, keys[i][0], to, FL_MALFORMED, keys[i][0]);
    }
    check_rename_refused(&spec, "blk.1.attn_k.weight", "blk.1.attn_z.weight", FL_UNSUPPORTED,
                         "tensor blk.1.attn_z.weight, which this build does not know");
    check_rename_refused(&spec, "blk.2.ffn_up.weight", "blk.0.ffn_up.weighu", FL_UNSUPPORTED,
                         "blk.0.ffn_up.weighu");
    check_rename_refused(&spec, "token_embd.weight", "token_embd.weighs", FL_UNSUPPORTED,
                         "token_embd.weighs");
}

static void test_foreign_tensors_are_refused_by_what_they_are(void)
{
    const struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    check_rename_refused(&spec, "blk.0.attn_norm.weight", "blk.0.attn_output.bias", FL_UNSUPPORTED,
                         "a bias");
    check_rename_refused(&spec, "blk.0.ffn_gate.weight", "blk.0.ffn_gate_inp.wt", FL_UNSUPPORTED,
                         "mixture of experts");
    check_rename_refused(&spec, "blk.0.attn_output.weight", "blk.0.ffn_up_exps.weighu",
                         FL_UNSUPPORTED, "mixture of experts");
}

/* More or fewer layers in the file than its metadata says. */
static void test_missing_tensor_is_named(void)
{
    const struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    check_change_refused(&spec, "llama.block_count", 4, 4, FL_MALFORMED,
                         "tensor blk.3.attn_norm.weight is missing");
    check_change_refused(&spec, "llama.block_count", 4, 2, FL_UNSUPPORTED, "blk.2.");
}

static void test_other_architectures_and_types_are_refused_by_name(void)
{
    const struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    struct gguf_buffer header = {0};
    uint64_t file_size;
    model_header(&spec, &header, &file_size);
    memcpy(behind(&header, "general.architecture") + 4 + 8, "qwen2", 5);
    check_header_refused(&header, file_size, FL_UNSUPPORTED,
                         "\"qwen2\" is not supported; llama and gemma3 are");
    check_change_refused(&spec, "blk.1.ffn_up.weight", 4 + 16, 16, FL_UNSUPPORTED,
                         "blk.1.ffn_up.weight has type IQ2_XXS (16)");
}

static void test_shapes_must_agree_with_the_metadata(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    static const struct {
        const char *key;
        uint32_t value;
        const char *phrase;
    } changes[] = {
        {"llama.embedding_length", 128, "token_embd has"},
        {"llama.embedding_length", 96, "head size is 24"},
        {"llama.embedding_length", 65, "width is 65"},
        {"llama.embedding_length", 0, "width is 0"},
        {"llama.feed_forward_length", 128, "blk.0.ffn_gate has 96 rows of 64"},
        {"llama.feed_forward_length", 33, "multiple of 32"},
        {"llama.attention.head_count", 2, "blk.0.attn_k has 32 rows of 64"},
        {"llama.attention.head_count", 0, "head size is 0"},
        {"llama.attention.head_count_kv", 3, "must divide"},
        {"llama.attention.head_count_kv", 0, "KV head count of layer 0 is 0"},
        {"llama.attention.head_count_kv", 8, "must be 1 to 4"},
        {"llama.attention.head_count_kv", 1, "blk.0.attn_k has 32 rows"},
        {"llama.block_count", 0, "layer count is 0"},
        {"llama.block_count", 513, "must be 0 to 512"},
        {"llama.block_count", UINT32_MAX, "must be 0 to 512"},
        {"llama.context_length", 0, "context is 0"},
    };
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        check_change_refused(&spec, changes[i].key, 4, changes[i].value, FL_MALFORMED,
                             changes[i].phrase);
    }
}

static void test_quantised_norms_are_refused(void)
{
    const struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    check_change_refused(&spec, "blk.1.ffn_norm.weight", 4 + 8, FL_DTYPE_Q8_0, FL_UNSUPPORTED,
                         "blk.1.ffn_norm has type Q8_0; norms and factors must be F32");
}

static void test_required_keys_must_be_of_their_type(void)
{
    static const char *const keys[] = {
        "llama.block_count",         "llama.context_length",       "llama.embedding_length",
        "llama.feed_forward_length", "llama.attention.head_count",
    };
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        char phrase[96];
        snprintf(phrase, sizeof(phrase), "%s is a number; it must be an integer", keys[i]);
        if (strstr(keys[i], "head_count") != NULL) {
            snprintf(phrase, sizeof(phrase), "is a number; it must be an integer"); /* or _kv */
        }
        check_change_refused(&spec, keys[i], 0, GGUF_FLOAT32, FL_MALFORMED, phrase);
    }
    struct extra_key number = {"general.architecture", GGUF_UINT32, 1, NULL};
    spec.more_keys = put_extra;
    spec.ctx = &number;
    check_rename_refused(&spec, "general.architecture", "general.architectura", FL_MALFORMED,
                         "general.architecture is an integer; it must be a string");
    struct extra_key text = {"llama.attention.layer_norm_rms_epsilon", GGUF_STRING, 0, "1e-5"};
    spec.ctx = &text;
    check_rename_refused(&spec, "llama.attention.layer_norm_rms_epsilon",
                         "llama.attention.layer_norm_rms_epsilom", FL_MALFORMED,
                         "layer_norm_rms_epsilon is a string; it must be a number");
}

/* The scalar that is there is renamed, the array takes its place. */
static void test_arrays_must_have_a_value_for_each_layer(void)
{
    static const struct {
        struct extra_array array;
        const char *phrase;
    } bad[] = {
        {{"llama.attention.head_count_kv", GGUF_UINT32, 2, {2, 2}},
         "has 2 elements; the model has 3"},
        {{"llama.attention.head_count_kv", GGUF_UINT32, 0, {0}}, "has 0 elements; the model has 3"},
        {{"llama.attention.head_count_kv", GGUF_STRING, 3, {0}}, "it must hold integers"},
        {{"llama.attention.head_count_kv", GGUF_FLOAT32, 3, {0}}, "it must hold integers"},
        {{"llama.attention.head_count_kv", GGUF_INT32, 3, {2, (uint32_t)-2, 2}}, "element 1"},
        {{"llama.attention.head_count_kv", GGUF_UINT32, 3, {2, 513, 2}}, "element 1"},
        {{"llama.attention.head_count_kv", GGUF_UINT32, 3, {2, 2, 0}},
         "KV head count of layer 2 is 0"},
        {{"llama.attention.head_count_kv", GGUF_UINT32, 3, {2, 3, 2}}, "must divide"},
        {{"llama.feed_forward_length", GGUF_UINT64, 4, {96, 96, 96, 96}}, "has 4 elements"},
        {{"llama.block_count", GGUF_UINT32, 1, {3}},
         "block_count is an array; it must be an integer"},
        {{"llama.embedding_length", GGUF_UINT32, 0, {0}}, "is an array; it must be an integer"},
        {{"general.architecture", GGUF_STRING, 1, {0}}, "is an array; it must be a string"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
        struct extra_array array = bad[i].array;
        char renamed[64];
        spec.more_keys = put_array;
        spec.ctx = &array;
        snprintf(renamed, sizeof(renamed), "%s", array.key);
        renamed[strlen(renamed) - 1] = '_';
        check_rename_refused(&spec, array.key, renamed, FL_MALFORMED, bad[i].phrase);
    }
}

/* Seven layers: 1 for each local one, which must be all but every n-th. */
static void test_window_patterns_may_be_arrays(void)
{
    static const struct {
        struct extra_array array;
        uint32_t period; /* 0: refused, with */
        fl_status status;
        const char *phrase;
    } rows[] = {
        {{"gemma3.attention.sliding_window_pattern", GGUF_BOOL, 7, {1, 1, 1, 1, 1, 0, 1}},
         6,
         FL_OK,
         NULL},
        {{"gemma3.attention.sliding_window_pattern", GGUF_UINT32, 7, {1, 0, 1, 0, 1, 0, 1}},
         2,
         FL_OK,
         NULL},
        {{"gemma3.attention.sliding_window_pattern", GGUF_INT8, 7, {0}}, 1, FL_OK, NULL},
        {{"gemma3.attention.sliding_window_pattern", GGUF_UINT8, 7, {1, 1, 1, 1, 1, 1, 1}},
         8,
         FL_OK,
         NULL},
        {{"gemma3.attention.sliding_window_pattern", GGUF_BOOL, 7, {1, 1, 0, 1, 1, 1, 1}},
         0,
         FL_UNSUPPORTED,
         "no period at layer 5"},
        {{"gemma3.attention.sliding_window_pattern", GGUF_BOOL, 7, {0, 1, 0, 1, 0, 1, 0}},
         0,
         FL_UNSUPPORTED,
         "no period at layer 1"},
        {{"gemma3.attention.sliding_window_pattern", GGUF_BOOL, 6, {1}},
         0,
         FL_MALFORMED,
         "has 6 elements; it must have 7"},
        {{"gemma3.attention.sliding_window_pattern", GGUF_UINT32, 0, {0}},
         0,
         FL_MALFORMED,
         "has 0 elements; it must have 7"},
        {{"gemma3.attention.sliding_window_pattern", GGUF_UINT32, 7, {2}},
         0,
         FL_MALFORMED,
         "element 0"},
        {{"gemma3.attention.sliding_window_pattern", GGUF_STRING, 7, {0}},
         0,
         FL_MALFORMED,
         "must hold integers"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q8_0);
        struct extra_array array = rows[i].array;
        spec.window_pattern = 0; /* no key of its own */
        spec.more_keys = put_array;
        spec.ctx = &array;
        if (rows[i].period == 0) {
            check_refused(&spec, rows[i].status, rows[i].phrase);
        } else {
            CHECK_EQ(shape_of(&spec).window_pattern, rows[i].period);
        }
    }
}

static void test_matrices_have_two_dimensions_of_a_sane_size(void)
{
    static const struct {
        uint32_t dim_count;
        uint64_t dims[4];
        const char *phrase;
    } bad[] = {
        {3, {32, 8, 2}, "token_embd.weight has 3 dimensions"},
        {4, {32, 8, 1, 2}, "token_embd.weight has 4 dimensions"},
        {2, {65568, 8}, "65568 x 8"},
        {2, {32, (1 << 20) + 1}, "32 x 1048577"},
        {2, {32, 1ull << 32}, "32 x 4294967296"}, /* 0 rows, in 32 bits */
        {1, {32}, "token_embd has 1 rows of 32"},
        {2, {8, 32}, "token_embd has 32 rows of 8"}, /* transposed */
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct gguf_buffer header = {0};
        gguf_put_header(&header, 3);
        gguf_put_key_text(&header, "general.architecture", "llama");
        gguf_put_key_uint(&header, "llama.block_count", GGUF_UINT32, 1);
        gguf_put_key_uint(&header, "llama.context_length", GGUF_UINT32, 64);
        gguf_put_key_uint(&header, "llama.embedding_length", GGUF_UINT32, 32);
        gguf_put_key_uint(&header, "llama.feed_forward_length", GGUF_UINT32, 32);
        gguf_put_key_uint(&header, "llama.attention.head_count", GGUF_UINT32, 2);
        gguf_put_key_uint(&header, "llama.vocab_size", GGUF_UINT32, 8);
        gguf_put_key_float(&header, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
        gguf_put_tensor(&header, "token_embd.weight", bad[i].dim_count, bad[i].dims, FL_DTYPE_F32,
                        0);
        gguf_put_padding(&header, 32);
        check_header_refused(&header, 1ull << 50, FL_MALFORMED, bad[i].phrase);
    }
}

static void test_a_list_of_no_tokens_is_no_vocabulary(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    struct extra_array none = {"tokenizer.ggml.tokens", GGUF_STRING, 0, {0}};
    spec.tokenizer = TOKEN_TABLE_NONE;
    spec.vocabulary = 64;
    spec.more_keys = put_array;
    spec.ctx = &none;
    check_refused(&spec, FL_MALFORMED, "vocabulary is 0");
}

static void test_files_on_disk_have_names_and_identities(void)
{
    struct temp_folder folder;
    char path[TEMP_PATH_MAX];
    char part[TEMP_PATH_MAX];
    struct model *model = NULL;
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_K);
    temp_folder_make(&folder);
    temp_folder_path(&folder, "my model.gguf", path);
    CHECK_EQ(model_write(&spec, path), FL_OK);
    CHECK_EQ(model_open(path, &model), FL_OK);
    CHECK(strcmp(model_manifest(model)->name, "my model") == 0);
    struct fl_manifest first = *model_manifest(model);
    CHECK_EQ(first.files[0].size, gguf_file_size(model_gguf(model), 0));
    model_close(model);

    unsigned char identity[FL_IDENTITY_SIZE] = {0};
    const char *const paths[] = {path};
    CHECK_EQ(model_identity_of_files(paths, 1, identity), FL_OK);
    CHECK(memcmp(identity, first.identity, sizeof(identity)) == 0);

    spec.part_count = 3;
    CHECK_EQ(model_write(&spec, path), FL_OK);
    model_part_path(path, 1, 3, part, sizeof(part));
    CHECK_EQ(model_open(part, &model), FL_OK);
    const struct fl_manifest *split = model_manifest(model);
    CHECK(strcmp(split->name, "my model") == 0);
    CHECK_EQ(split->file_count, 3);
    CHECK(memcmp(split->identity, first.identity, sizeof(identity)) != 0);
    CHECK_EQ(split->pieces[split->piece_count - 1].tensors[0].file, 2);
    model_close(model);
    temp_folder_remove(&folder);
}

static void test_same_seed_makes_the_same_bytes(void)
{
    struct temp_folder folder;
    char path[3][TEMP_PATH_MAX];
    unsigned char identity[3][FL_IDENTITY_SIZE];
    temp_folder_make(&folder);
    for (int i = 0; i < 3; i++) {
        struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_BF16);
        const char *const paths[] = {path[i]};
        char name[16];
        snprintf(name, sizeof(name), "%d.gguf", i);
        temp_folder_path(&folder, name, path[i]);
        spec.seed = i == 2 ? 2 : 1;
        CHECK_EQ(model_write(&spec, path[i]), FL_OK);
        CHECK_EQ(model_identity_of_files(paths, 1, identity[i]), FL_OK);
    }
    CHECK(memcmp(identity[0], identity[1], FL_IDENTITY_SIZE) == 0);
    CHECK(memcmp(identity[0], identity[2], FL_IDENTITY_SIZE) != 0);
    temp_folder_remove(&folder);
}

static void put_file(const struct temp_folder *folder, const char *name, size_t size, size_t flip)
{
    unsigned char *bytes = calloc(1, size != 0 ? size : 1);
    if (flip < size) {
        bytes[flip] = 1;
    }
    temp_folder_put(folder, name, bytes, size);
    free(bytes);
}

static void test_identity_sees_size_head_samples_and_order(void)
{
    enum { SIZE = 1 << 20 };
    static const size_t flips[] = {0, 65535, SIZE - 1, SIZE - 4096};
    struct temp_folder folder;
    char path[2][TEMP_PATH_MAX];
    unsigned char plain[FL_IDENTITY_SIZE];
    unsigned char other[FL_IDENTITY_SIZE];
    temp_folder_make(&folder);
    temp_folder_path(&folder, "a", path[0]);
    temp_folder_path(&folder, "b", path[1]);
    const char *const one[] = {path[0]};
    const char *const both[] = {path[0], path[1]};
    const char *const swapped[] = {path[1], path[0]};
    put_file(&folder, "a", SIZE, SIZE);
    CHECK_EQ(model_identity_of_files(one, 1, plain), FL_OK);
    for (size_t i = 0; i < sizeof(flips) / sizeof(flips[0]); i++) {
        put_file(&folder, "a", SIZE, flips[i]);
        CHECK_EQ(model_identity_of_files(one, 1, other), FL_OK);
        CHECK(memcmp(plain, other, sizeof(plain)) != 0);
    }
    put_file(&folder, "a", SIZE + 1, SIZE + 1);
    CHECK_EQ(model_identity_of_files(one, 1, other), FL_OK);
    CHECK(memcmp(plain, other, sizeof(plain)) != 0);

    put_file(&folder, "a", 10, 3); /* shorter than its samples, and nothing at all */
    put_file(&folder, "b", 0, 0);
    CHECK_EQ(model_identity_of_files(both, 2, plain), FL_OK);
    CHECK_EQ(model_identity_of_files(swapped, 2, other), FL_OK);
    CHECK(memcmp(plain, other, sizeof(plain)) != 0);
    CHECK_EQ(unlink(path[1]), 0);
    CHECK_EQ(model_identity_of_files(both, 2, other), FL_NOT_FOUND);
    const char *const folders[] = {folder.path};
    CHECK_EQ(model_identity_of_files(folders, 1, other), FL_IO);
    temp_folder_remove(&folder);
}

static void test_stages_share_the_pieces(void)
{
    const struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    struct gguf_buffer header;
    struct model *model = NULL;
    struct fl_manifest stage;
    CHECK_EQ(open_spec(&spec, &header, &model), FL_OK);
    const struct fl_manifest *whole = model_manifest(model);
    struct model_range range = {.layer_first = 0, .layer_count = 1, .has_embed = true};
    CHECK_EQ(model_stage_manifest(whole, &range, &stage), FL_OK);
    CHECK(stage.piece_count == 3 && stage.pieces == whole->pieces);
    CHECK_EQ(fl_manifest_check(&stage), FL_OK);
    range = (struct model_range){.layer_first = 1, .layer_count = 1};
    CHECK_EQ(model_stage_manifest(whole, &range, &stage), FL_OK);
    CHECK(stage.piece_count == 2 && stage.pieces[0].layer == 1);
    CHECK_EQ(fl_manifest_check(&stage), FL_OK);
    range = (struct model_range){.layer_first = 2, .layer_count = 1, .has_head = true};
    CHECK_EQ(model_stage_manifest(whole, &range, &stage), FL_OK);
    CHECK(stage.piece_count == 3 && stage.pieces[2].kind == FL_PIECE_HEAD);
    CHECK_EQ(fl_manifest_check(&stage), FL_OK);
    static const struct model_range bad[] = {
        {.layer_first = 0, .layer_count = 0},
        {.layer_first = 3, .layer_count = 1},
        {.layer_first = 1, .layer_count = 3},
        {.layer_first = 1, .layer_count = UINT32_MAX},
        {.layer_first = 1, .layer_count = 1, .has_embed = true},
        {.layer_first = 1, .layer_count = 1, .has_head = true},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_EQ(model_stage_manifest(whole, &bad[i], &stage), FL_INVALID);
    }
    model_close(model);
    gguf_buffer_free(&header);
}

static void test_smollm2_is_understood(void)
{
    char path[TEMP_PATH_MAX];
    struct model *model = NULL;
    if (!real_model_path("SmolLM2-135M-Instruct.Q4_1.gguf", path)) {
        TEST_SKIP("SmolLM2-135M-Instruct.Q4_1.gguf is not in the models folder");
    }
    CHECK_EQ(model_open(path, &model), FL_OK);
    const struct fl_model_shape *shape = &model_manifest(model)->shape;
    CHECK(shape->layer_count == 30 && shape->width == 576 && shape->head_size == 64);
    CHECK(shape->vocabulary == 49152 && shape->tied_head && shape->context == 8192);
    CHECK(shape->rope.freq_base == 100000.0f && shape->attention_scale == 0.125f);
    CHECK(strcmp(model_manifest(model)->name, "SmolLM2-135M-Instruct.Q4_1") == 0);
    model_close(model);
}

static void test_gemma_is_understood(void)
{
    char path[TEMP_PATH_MAX];
    struct model *model = NULL;
    if (!real_model_path("gemma-3-270m-q4_k_m.gguf", path)) {
        TEST_SKIP("gemma-3-270m-q4_k_m.gguf is not in the models folder");
    }
    CHECK_EQ(model_open(path, &model), FL_OK);
    const struct fl_model_shape *shape = &model_manifest(model)->shape;
    CHECK(shape->layer_count == 18 && shape->width == 640 && shape->head_size == 256);
    CHECK(shape->vocabulary == 262144 && shape->tied_head);
    CHECK(shape->window == 512 && shape->window_pattern == 6);
    CHECK(shape->rope.freq_base == 1e6f && shape->rope_local.freq_base == 1e4f);
    CHECK(shape->attention_scale == 1.0f / 16 && shape->head_count_kv[17] == 1);
    model_close(model);
}

static const struct test_case cases[] = {
    {"model: both architectures in every type", test_both_architectures_in_every_type},
    {"model: pieces are in order of use", test_pieces_are_in_order_of_use},
    {"model: untied head has bytes of its own", test_untied_head_has_bytes_of_its_own},
    {"model: keys may be of any integer type and per layer",
     test_keys_may_be_of_any_integer_type_and_per_layer},
    {"model: vocabulary comes from tokens, key or table",
     test_vocabulary_comes_from_tokens_key_or_table},
    {"model: rope scalings are read", test_rope_scalings_are_read},
    {"model: rope factors ride in every attention piece",
     test_rope_factors_ride_in_every_attention_piece},
    {"model: gemma scales attention as it was trained",
     test_gemma_scales_attention_as_it_was_trained},
    {"model: metadata that changes the result is refused",
     test_metadata_that_changes_the_result_is_refused},
    {"model: mistyped metadata is refused", test_mistyped_metadata_is_refused},
    {"model: missing keys and tensors are named", test_missing_keys_and_tensors_are_named},
    {"model: foreign tensors are refused by what they are",
     test_foreign_tensors_are_refused_by_what_they_are},
    {"model: missing tensor is named", test_missing_tensor_is_named},
    {"model: other architectures and types are refused by name",
     test_other_architectures_and_types_are_refused_by_name},
    {"model: shapes must agree with the metadata", test_shapes_must_agree_with_the_metadata},
    {"model: quantised norms are refused", test_quantised_norms_are_refused},
    {"model: required keys must be of their type", test_required_keys_must_be_of_their_type},
    {"model: arrays must have a value for each layer",
     test_arrays_must_have_a_value_for_each_layer},
    {"model: window patterns may be arrays", test_window_patterns_may_be_arrays},
    {"model: matrices have two dimensions of a sane size",
     test_matrices_have_two_dimensions_of_a_sane_size},
    {"model: a list of no tokens is no vocabulary", test_a_list_of_no_tokens_is_no_vocabulary},
    {"model: files on disk have names and identities",
     test_files_on_disk_have_names_and_identities},
    {"model: same seed makes the same bytes", test_same_seed_makes_the_same_bytes},
    {"model: identity sees size, head, samples and order",
     test_identity_sees_size_head_samples_and_order},
    {"model: stages share the pieces", test_stages_share_the_pieces},
    {"model: SmolLM2 is understood", test_smollm2_is_understood},
    {"model: Gemma is understood", test_gemma_is_understood},
};

TEST_MAIN(cases)
