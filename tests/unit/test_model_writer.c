/* Fixtures: vocabularies that encode any text, weights that are finite and of a sensible size,
 * scripted chains that say what they should. */
#include "tests/support/model_writer.h"

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "coordinator/tokenizer.h"
#include "kernels/matrix.h"
#include "pipeline/model.h"
#include "tests/harness.h"
#include "tests/support/temp_folder.h"

static struct temp_folder folder;

static struct model *write_and_open(const struct model_spec *spec)
{
    char path[TEMP_PATH_MAX];
    char first[TEMP_PATH_MAX];
    struct model *model = NULL;
    temp_folder_make(&folder);
    temp_folder_path(&folder, "m.gguf", path);
    CHECK_EQ(model_write(spec, path), FL_OK);
    model_part_path(path, 1, spec->part_count, first, sizeof(first));
    CHECK_EQ(model_open(first, &model), FL_OK);
    return model;
}

static void close_and_remove(struct model *model)
{
    model_close(model);
    temp_folder_remove(&folder);
}

/* The tensor's bytes, as they lie in the file; the caller frees. */
static unsigned char *read_tensor(const struct model *model, const struct fl_tensor_ref *tensor)
{
    unsigned char *bytes = malloc(tensor->size);
    const int fd = open(gguf_file_path(model_gguf(model), tensor->file), O_RDONLY | O_CLOEXEC);
    CHECK(bytes != NULL && fd >= 0);
    CHECK_EQ(pread(fd, bytes, tensor->size, (off_t)tensor->offset), (ssize_t)tensor->size);
    close(fd);
    return bytes;
}

/* Deviation of a matrix's elements; NAN when one is not finite. */
static double deviation_of(const struct fl_tensor_ref *tensor, const unsigned char *bytes)
{
    float row[1024];
    double sum = 0;
    for (uint32_t i = 0; i < tensor->rows; i++) {
        matrix_dequantize_row(tensor->dtype, bytes + i * (tensor->size / tensor->rows),
                              tensor->columns, row);
        for (uint32_t k = 0; k < tensor->columns; k++) {
            sum += (double)row[k] * (double)row[k];
        }
    }
    return sqrt(sum / tensor->rows / tensor->columns);
}

static void test_random_weights_have_the_size_they_should(void)
{
    static const enum fl_dtype types[] = {
        FL_DTYPE_F32,  FL_DTYPE_F16,  FL_DTYPE_BF16, FL_DTYPE_Q8_0, FL_DTYPE_Q4_0, FL_DTYPE_Q4_1,
        FL_DTYPE_Q5_0, FL_DTYPE_Q5_1, FL_DTYPE_Q4_K, FL_DTYPE_Q5_K, FL_DTYPE_Q6_K,
    };
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, types[i]);
        spec.part_count = 2;
        struct model *model = write_and_open(&spec);
        const struct fl_manifest *manifest = model_manifest(model);
        for (uint32_t p = 0; p < manifest->piece_count; p++) {
            for (uint32_t t = 0; t < manifest->pieces[p].tensor_count; t++) {
                const struct fl_tensor_ref *tensor = &manifest->pieces[p].tensors[t];
                unsigned char *bytes = read_tensor(model, tensor);
                const double deviation = deviation_of(tensor, bytes);
                const double want = tensor->rows == 1 ? 1.0 : 1.0 / sqrt(tensor->columns);
                free(bytes);
                CHECK(deviation > 0.7 * want && deviation < 1.5 * want);
            }
        }
        close_and_remove(model);
    }
}

static void check_round_trip(const struct model_spec *spec, const char *text, size_t max)
{
    struct model *model = write_and_open(spec);
    struct tokenizer *tokenizer = NULL;
    uint32_t ids[64];
    size_t count = 0;
    CHECK_EQ(tokenizer_open(model_gguf(model), &tokenizer), FL_OK);
    CHECK_EQ(tokenizer_encode(tokenizer, text, strlen(text), 0, ids, 64, &count), FL_OK);
    CHECK(count >= 1 && count <= max);
    char back[256];
    size_t size = 0;
    for (size_t i = 0; i < count; i++) {
        const struct gguf_string piece = tokenizer_piece(tokenizer, ids[i], TOKENIZER_HIDE_SPECIAL);
        CHECK(size + piece.size < sizeof(back));
        memcpy(back + size, piece.data, piece.size);
        size += piece.size;
    }
    CHECK(size == strlen(text) && memcmp(back, text, size) == 0);
    tokenizer_close(tokenizer);
    close_and_remove(model);
}

static void test_built_in_vocabularies_encode_any_text(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    check_round_trip(&spec, "hello world", 4);
    check_round_trip(&spec, "\xf0\x9f\x99\x82 caf\xc3\xa9 \xe6\x97\xa5\n\n~", 24);
    spec.tokenizer = TOKEN_TABLE_SPM;
    spec.pre = NULL;
    check_round_trip(&spec, "hello world", 4);
    check_round_trip(&spec, "\xf0\x9f\x99\x82 caf\xc3\xa9 \xe6\x97\xa5\n\n~", 24);
    spec = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q4_0);
    check_round_trip(&spec, "Hello the cat", 6);
}

static void test_scripted_output_points_along_the_chain(void)
{
    static const struct model_token tokens[] = {
        {.text = {"STOP", 4}, .type = MODEL_TOKEN_NORMAL},
        {.text = {"\xe2\x82", 2}, .type = MODEL_TOKEN_NORMAL}, /* two thirds of a euro sign */
    };
    struct model_spec spec = model_spec_scripted(TOKEN_TABLE_BPE, tokens, 2, NULL, 0);
    struct token_table table;
    uint32_t chain[400] = {0};
    model_spec_tokens(&spec, &table);
    const uint32_t count = table.count;
    const uint32_t stop = token_table_find(&table, "STOP");
    const uint32_t a = token_table_find(&table, "a");
    CHECK(count <= 400 && stop == count - 2 && a == 3 + 'a');
    CHECK_EQ(token_table_find(&table, "\xe2\x82"), count - 1);
    CHECK_EQ(token_table_find(&table, "no such token"), MODEL_TOKEN_ABSENT);
    token_table_close(&table);
    chain[a] = stop;
    chain[stop] = count - 1;
    chain[count - 1] = 2;
    spec.chain = chain;
    spec.chain_count = count;

    struct model *model = write_and_open(&spec);
    const struct fl_manifest *manifest = model_manifest(model);
    CHECK(!manifest->shape.tied_head);
    const struct fl_tensor_ref *embed = &manifest->pieces[0].tensors[0];
    const struct fl_tensor_ref *output = &manifest->pieces[manifest->piece_count - 1].tensors[1];
    float *from = (float *)(void *)read_tensor(model, embed);
    float *to = (float *)(void *)read_tensor(model, output);
    CHECK_EQ(embed->rows, count);
    for (uint32_t id = 0; id < count; id++) {
        for (uint32_t next = 0; next < count; next++) {
            float logit = 0;
            for (uint32_t k = 0; k < embed->columns; k++) {
                logit += from[id * embed->columns + k] * to[next * embed->columns + k];
            }
            CHECK(logit == (next == chain[id] ? 1.0f : 0.0f));
        }
    }
    free(from);
    free(to);
    const struct fl_piece *ffn = &manifest->pieces[2];
    float *down = (float *)(void *)read_tensor(model, &ffn->tensors[3]);
    CHECK(down[0] == 0 && down[100] == 0);
    free(down);
    close_and_remove(model);
}

static void test_unwritable_path_is_an_error(void)
{
    const struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    CHECK_EQ(model_write(&spec, "/nowhere/at/all.gguf"), FL_IO);
    CHECK(strstr(fl_last_error(), "/nowhere/at/all.gguf") != NULL);
}

static const struct test_case cases[] = {
    {"model_writer: random weights have the size they should",
     test_random_weights_have_the_size_they_should},
    {"model_writer: built-in vocabularies encode any text",
     test_built_in_vocabularies_encode_any_text},
    {"model_writer: scripted output points along the chain",
     test_scripted_output_points_along_the_chain},
    {"model_writer: unwritable path is an error", test_unwritable_path_is_an_error},
};

TEST_MAIN(cases)
