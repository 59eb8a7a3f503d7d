/* Shapes and manifests from outside: each field broken in turn, and the sentence that says so. */
#include "proto/model_shape.h"

#include <math.h>
#include <stdlib.h>

#include "pipeline/model.h"
#include "tests/harness.h"
#include "tests/support/model_writer.h"

/* A copy of a good manifest that a test may break. */
struct fixture {
    struct fl_manifest manifest;
    struct fl_piece pieces[32];
};

static void fixture_init(struct fixture *f, enum fl_architecture architecture)
{
    const struct model_spec spec = model_spec_tiny(architecture, FL_DTYPE_Q4_0);
    struct gguf_buffer header = {0};
    struct gguf *gguf = NULL;
    struct model *model = NULL;
    uint64_t file_size;
    model_header(&spec, &header, &file_size);
    CHECK_EQ(gguf_parse(header.data, header.size, file_size, &gguf), FL_OK);
    CHECK_EQ(model_from_gguf(gguf, "tiny", &model), FL_OK);
    f->manifest = *model_manifest(model);
    CHECK(f->manifest.piece_count <= 32);
    memcpy(f->pieces, f->manifest.pieces, f->manifest.piece_count * sizeof(f->pieces[0]));
    f->manifest.pieces = f->pieces;
    model_close(model);
    gguf_buffer_free(&header);
    CHECK_EQ(fl_manifest_check(&f->manifest), FL_OK);
}

static void check_refused(const struct fixture *f, fl_status want, const char *phrase)
{
    const fl_status status = fl_manifest_check(&f->manifest);
    if (strstr(fl_last_error(), phrase) == NULL) {
        printf("  \"%s\" does not say \"%s\"\n", fl_last_error(), phrase);
    }
    CHECK_EQ(status, want);
    CHECK(strstr(fl_last_error(), phrase) != NULL);
}

/* Set one field to a value that must be refused; the fixture starts anew each time. */
#define CHECK_FIELD(field, value, phrase)          \
    do {                                           \
        fixture_init(&f, FL_ARCHITECTURE_GEMMA3);  \
        f.manifest.field = (value);                \
        check_refused(&f, FL_MALFORMED, (phrase)); \
    } while (0)

static void test_integers_out_of_range_are_refused(void)
{
    static struct fixture f;
    CHECK_FIELD(shape.architecture, (enum fl_architecture)0, "architecture is 0");
    CHECK_FIELD(shape.architecture, (enum fl_architecture)3, "architecture is 3");
    CHECK_FIELD(shape.layer_count, 0, "layer count is 0");
    CHECK_FIELD(shape.layer_count, 513, "layer count is 513");
    CHECK_FIELD(shape.layer_count, UINT32_MAX, "layer count is");
    CHECK_FIELD(shape.width, 0, "width is 0");
    CHECK_FIELD(shape.width, 65568, "width is 65568");
    CHECK_FIELD(shape.width, 40, "multiple of 32");
    CHECK_FIELD(shape.head_size, 0, "head size is 0");
    CHECK_FIELD(shape.head_size, 520, "head size is 520");
    CHECK_FIELD(shape.head_size, 24, "multiple of 16");
    CHECK_FIELD(shape.vocabulary, 0, "vocabulary is 0");
    CHECK_FIELD(shape.vocabulary, (1 << 20) + 1, "vocabulary is 1048577");
    CHECK_FIELD(shape.context, 0, "context is 0");
    CHECK_FIELD(shape.context, (1 << 20) + 1, "context is 1048577");
    CHECK_FIELD(shape.rope_dim, 0, "rope dimension is 0");
    CHECK_FIELD(shape.rope_dim, 34, "rope dimension is 34; it must be 2 to 32");
    CHECK_FIELD(shape.rope_dim, 31, "multiple of 2");
    CHECK_FIELD(shape.window, (1 << 20) + 1, "window is 1048577");
    CHECK_FIELD(shape.window_pattern, 513, "window pattern is 513");
    CHECK_FIELD(shape.head_count[2], 0, "head count of layer 2 is 0");
    CHECK_FIELD(shape.head_count[2], 513, "head count of layer 2 is 513");
    CHECK_FIELD(shape.head_count_kv[6], 0, "KV head count of layer 6 is 0");
    CHECK_FIELD(shape.head_count_kv[6], 3, "must divide the head count, 4");
    CHECK_FIELD(shape.head_count_kv[6], 5, "must be 1 to 4");
    CHECK_FIELD(shape.ffn_width[0], 0, "FFN width of layer 0 is 0");
    CHECK_FIELD(shape.ffn_width[0], 65568, "FFN width of layer 0 is 65568");
    CHECK_FIELD(shape.ffn_width[0], 97, "multiple of 32");
    CHECK_FIELD(shape.rope.original_context, (1 << 20) + 1, "rope original context");
}

static void test_numbers_must_be_finite_and_positive(void)
{
    static const float bad[] = {0.0f, -1.0f, NAN, INFINITY, 1e30f};
    static struct fixture f;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_FIELD(shape.norm_epsilon, bad[i], "norm epsilon");
        CHECK_FIELD(shape.embedding_scale, bad[i], "embedding scale");
        CHECK_FIELD(shape.attention_scale, bad[i], "attention scale");
        CHECK_FIELD(shape.rope.freq_base, bad[i], "rope base");
        CHECK_FIELD(shape.rope_local.freq_base, bad[i], "rope base");
        CHECK_FIELD(shape.rope.factor, bad[i], "rope scaling factor");
        if (i != 0) {
            CHECK_FIELD(shape.rope.attention_factor, bad[i], "rope attention factor");
        }
    }
    CHECK_FIELD(shape.rope.factor, 2.0f, "without a scaling");
    CHECK_FIELD(shape.rope.scaling, (enum fl_rope_scaling)4, "rope scaling is 4");
}

static void test_yarn_needs_its_constants(void)
{
    static struct fixture f;
    fixture_init(&f, FL_ARCHITECTURE_LLAMA);
    struct fl_rope *rope = &f.manifest.shape.rope;
    *rope = (struct fl_rope){.freq_base = 1e4f,
                             .scaling = FL_ROPE_YARN,
                             .factor = 4.0f,
                             .original_context = 128,
                             .yarn_beta_fast = 32.0f,
                             .yarn_beta_slow = 1.0f};
    CHECK_EQ(fl_manifest_check(&f.manifest), FL_OK);
    rope->yarn_beta_slow = 32.0f;
    check_refused(&f, FL_MALFORMED, "below beta fast");
    rope->yarn_beta_slow = NAN;
    check_refused(&f, FL_MALFORMED, "yarn beta slow");
    rope->yarn_beta_slow = 1.0f;
    rope->yarn_beta_fast = 0.0f;
    check_refused(&f, FL_MALFORMED, "yarn beta fast");
    rope->yarn_beta_fast = 32.0f;
    rope->original_context = 0;
    check_refused(&f, FL_MALFORMED, "rope original context is 0");
    rope->original_context = 128;
    rope->scaling = FL_ROPE_LONG;
    check_refused(&f, FL_MALFORMED, "rope_factors_long");
}

static void test_names_must_be_file_names(void)
{
    static const char *const bad[] = {"", ".", "..", ".hidden", "a/b", "../x", "a\nb", "\x7f"};
    static struct fixture f;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        fixture_init(&f, FL_ARCHITECTURE_LLAMA);
        snprintf(f.manifest.name, sizeof(f.manifest.name), "%s", bad[i]);
        check_refused(&f, FL_MALFORMED, "a model's name");
    }
    fixture_init(&f, FL_ARCHITECTURE_LLAMA);
    memset(f.manifest.name, 'x', sizeof(f.manifest.name)); /* no end */
    check_refused(&f, FL_MALFORMED, "a model's name");
}

static void test_pieces_must_be_whole_layers_in_order(void)
{
    static struct fixture f;
    CHECK_FIELD(piece_count, 0, "has 0 pieces");
    CHECK_FIELD(piece_count, 17, "has 17 pieces");
    CHECK_FIELD(piece_count, UINT32_MAX, "pieces");
    CHECK_FIELD(piece_count, 1, "not whole layers");
    CHECK_FIELD(piece_count, 2, "not whole layers");
    CHECK_FIELD(pieces, f.pieces + 2, "piece 14");
    CHECK_FIELD(pieces[3].layer, 2, "piece 3 (kind 2, layer 2) is out of order");
    CHECK_FIELD(pieces[3].layer, UINT32_MAX, "out of order");
    CHECK_FIELD(pieces[3].layer, 1u << 31, "out of order");
    CHECK_FIELD(pieces[0].layer, 1, "out of order");
    CHECK_FIELD(pieces[15].layer, 6, "out of order");
    CHECK_FIELD(pieces[15].kind, (enum fl_piece_kind)5, "out of order");
    CHECK_FIELD(pieces[4].kind, FL_PIECE_ATTENTION, "out of order");
    fixture_init(&f, FL_ARCHITECTURE_GEMMA3);
    f.manifest.pieces = f.pieces + 2; /* begins with half a layer */
    f.manifest.piece_count = 3;
    check_refused(&f, FL_MALFORMED, "not whole layers");
    f.manifest.pieces = f.pieces + 15; /* a head alone */
    f.manifest.piece_count = 1;
    check_refused(&f, FL_MALFORMED, "not whole layers");
    f.manifest.pieces = f.pieces + 3; /* the second layer alone is a stage */
    f.manifest.piece_count = 2;
    CHECK_EQ(fl_manifest_check(&f.manifest), FL_OK);
    f.manifest.pieces = f.pieces + 13; /* so is the last one with the head */
    f.manifest.piece_count = 3;
    CHECK_EQ(fl_manifest_check(&f.manifest), FL_OK);
}

static void test_tensors_must_be_at_home_once_and_all_there(void)
{
    static struct fixture f;
    CHECK_FIELD(pieces[1].tensor_count, 0, "blk.0.attn_norm.weight is missing");
    CHECK_FIELD(pieces[1].tensor_count, 7, "blk.0.post_attention_norm.weight is missing");
    CHECK_FIELD(pieces[1].tensor_count, 13, "13 tensors");
    CHECK_FIELD(pieces[1].tensor_count, UINT32_MAX, "tensors; at most 12");
    CHECK_FIELD(pieces[1].tensors[0].role, FL_ROLE_FFN_NORM, "(ffn_norm) does not belong");
    CHECK_FIELD(pieces[1].tensors[0].role, (enum fl_tensor_role)0, "role 0 (unknown)");
    CHECK_FIELD(pieces[1].tensors[0].role, (enum fl_tensor_role)99, "role 99 (unknown)");
    CHECK_FIELD(pieces[1].tensors[7].role, FL_ROLE_ATTN_NORM, "blk.0.attn_norm is there twice");
    CHECK_FIELD(pieces[0].tensor_count, 0, "token_embd.weight is missing");
    CHECK_FIELD(pieces[15].tensor_count, 1, "output.weight is missing");
    CHECK_FIELD(shape.architecture, FL_ARCHITECTURE_LLAMA, "does not belong");
}

static void test_tensors_must_fit_the_shape_and_the_file(void)
{
    static struct fixture f;
    CHECK_FIELD(pieces[1].tensors[1].rows, 127, "blk.0.attn_q has 127 rows of 64");
    CHECK_FIELD(pieces[1].tensors[1].columns, 96, "blk.0.attn_q has 128 rows of 96");
    CHECK_FIELD(pieces[1].tensors[1].size, 1, "blk.0.attn_q has 1 bytes");
    CHECK_FIELD(pieces[1].tensors[1].size, UINT64_MAX, "bytes; its dimensions make 4608");
    CHECK_FIELD(pieces[1].tensors[1].offset, UINT64_MAX, "beyond the end");
    CHECK_FIELD(pieces[1].tensors[1].offset, f.manifest.files[0].size, "beyond the end");
    CHECK_FIELD(pieces[1].tensors[1].file, 1, "blk.0.attn_q is in file 1, of 1 files");
    CHECK_FIELD(pieces[1].tensors[1].dtype, FL_DTYPE_Q4_K, "multiple of 256");
    CHECK_FIELD(file_count, 0, "has 0 files");
    CHECK_FIELD(file_count, 65, "has 65 files");
    CHECK_FIELD(files[0].size, UINT64_MAX, "2^63");
    CHECK_FIELD(files[0].size, 100, "beyond the end of its file at 100");
    fixture_init(&f, FL_ARCHITECTURE_GEMMA3);
    f.pieces[1].tensors[1].dtype = (enum fl_dtype)16;
    check_refused(&f, FL_UNSUPPORTED, "blk.0.attn_q has type IQ2_XXS");
    f.pieces[1].tensors[1].dtype = (enum fl_dtype)0xffffffff;
    check_refused(&f, FL_UNSUPPORTED, "blk.0.attn_q has type");
    fixture_init(&f, FL_ARCHITECTURE_GEMMA3);
    f.pieces[2].tensors[0].dtype = FL_DTYPE_BF16;
    check_refused(&f, FL_UNSUPPORTED, "norms and factors must be F32");
}

static const struct test_case cases[] = {
    {"model_shape: integers out of range are refused", test_integers_out_of_range_are_refused},
    {"model_shape: numbers must be finite and positive", test_numbers_must_be_finite_and_positive},
    {"model_shape: yarn needs its constants", test_yarn_needs_its_constants},
    {"model_shape: names must be file names", test_names_must_be_file_names},
    {"model_shape: pieces must be whole layers in order",
     test_pieces_must_be_whole_layers_in_order},
    {"model_shape: tensors must be at home, once and all there",
     test_tensors_must_be_at_home_once_and_all_there},
    {"model_shape: tensors must fit the shape and the file",
     test_tensors_must_fit_the_shape_and_the_file},
};

TEST_MAIN(cases)
