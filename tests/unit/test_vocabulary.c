/* Vocabulary: what is read, what ends an answer, and every way metadata can be wrong. */
#include "coordinator/vocabulary.h"

#include <math.h>

#include "coordinator/token_list.h"
#include "coordinator/tokenizer.h"
#include "tests/harness.h"
#include "tests/support/vocabulary_fixture.h"

#define TEXT(literal)                                  \
    {                                                  \
        .data = (literal), .size = sizeof(literal) - 1 \
    }
#define KEY(name) "tokenizer.ggml." name

static void test_reads_texts_types_and_pieces(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_SPM);
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    const struct vocabulary *vocabulary = tokenizer_vocabulary(f.tokenizer);
    CHECK_EQ(vocabulary->count, f.table.count);
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        const struct gguf_string text = f.table.texts[id];
        CHECK_EQ(vocabulary_find(vocabulary, text.data, text.size), id);
        CHECK_EQ(vocabulary->types[id], f.table.types[id]);
    }
    CHECK_EQ(vocabulary_find(vocabulary, "nothing", 7), TOKEN_NONE);
    CHECK_EQ(vocabulary_find(vocabulary, "", 0), TOKEN_NONE);
    CHECK_EQ(vocabulary->bos, 1);
    CHECK_EQ(vocabulary->eos, 2);
    CHECK_EQ(vocabulary->unknown, 0);
    vocabulary_fixture_close(&f);
}

/* Every byte survives the way through GPT-2's alphabet, and no two are written alike. */
static void test_byte_alphabet(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_BPE);
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[2];
        const size_t size = vocabulary_byte_text((unsigned char)byte, text);
        const uint32_t id = vocabulary_find(tokenizer_vocabulary(f.tokenizer), text, size);
        CHECK_EQ(id, 3 + byte);
        const struct gguf_string piece = tokenizer_piece(f.tokenizer, id, TOKENIZER_HIDE_SPECIAL);
        CHECK_EQ(piece.size, 1);
        CHECK_EQ((unsigned char)piece.data[0], byte);
    }
    vocabulary_fixture_close(&f);
}

static void test_ends_by_key_and_by_text(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_BPE);
    const uint32_t html = vocabulary_fixture_add(&f, "</s>", MODEL_TOKEN_USER_DEFINED, 0);
    const uint32_t eos = vocabulary_fixture_add(&f, "<eos>", MODEL_TOKEN_CONTROL, 0);
    const uint32_t plain = vocabulary_fixture_add(&f, "<|eot_id|>", MODEL_TOKEN_NORMAL, 0);
    f.table.eot = 3;
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    const struct vocabulary *vocabulary = tokenizer_vocabulary(f.tokenizer);
    CHECK_EQ(vocabulary->end_count, 5);
    CHECK(tokenizer_is_end(f.tokenizer, 0)); /* <|endoftext|> */
    CHECK(tokenizer_is_end(f.tokenizer, 2)); /* <|im_end|>, the file's EOS */
    CHECK(tokenizer_is_end(f.tokenizer, 3)); /* by key */
    CHECK(tokenizer_is_end(f.tokenizer, eos));
    CHECK(tokenizer_is_end(f.tokenizer, plain));
    CHECK(!tokenizer_is_end(f.tokenizer, html)); /* Gemma writes HTML with it */
    CHECK(!tokenizer_is_end(f.tokenizer, 1));
    CHECK(!tokenizer_is_end(f.tokenizer, TOKEN_NONE));
    for (uint32_t i = 1; i < vocabulary->end_count; i++) {
        CHECK(vocabulary->ends[i - 1] < vocabulary->ends[i]);
    }
    vocabulary_fixture_close(&f);
}

/* One file, right unless a test leaves something out or puts something else in. */
struct file {
    const char *model;
    const struct gguf_string *tokens;
    uint32_t token_count;
    const uint32_t *types;
    uint32_t type_count;
    const float *scores;
    uint32_t score_count;
    const struct gguf_string *merges;
    uint32_t merge_count;
    const char *pre;
    const char *id_key;
    uint32_t id;
    const char *flag_key;
    const uint32_t *ends;
    uint32_t end_count;
};

static const struct gguf_string spm_tokens[] = {TEXT("<unk>"), TEXT("<s>"), TEXT("</s>"),
                                                TEXT("<0x41>"), TEXT("a")};
static const uint32_t spm_types[] = {2, 3, 3, 6, 1};
static const float spm_scores[] = {0, 0, 0, 0, -1};
static const struct file spm_file = {
    .model = "llama",
    .tokens = spm_tokens,
    .token_count = 5,
    .types = spm_types,
    .type_count = 5,
    .scores = spm_scores,
    .score_count = 5,
};

static const struct gguf_string bpe_tokens[] = {TEXT("a"), TEXT("b"), TEXT("ab")};
static const struct gguf_string bpe_merges[] = {TEXT("a b")};
static const struct file bpe_file = {
    .model = "gpt2",
    .tokens = bpe_tokens,
    .token_count = 3,
    .merges = bpe_merges,
    .merge_count = 1,
    .pre = "gpt-2",
};

static void put_file(struct gguf_buffer *buffer, const struct file *file)
{
    gguf_put_header(buffer, 3);
    if (file->model != NULL) {
        gguf_put_key_text(buffer, KEY("model"), file->model);
    }
    if (file->tokens != NULL) {
        gguf_put_key_strings(buffer, KEY("tokens"), file->tokens, file->token_count);
    }
    if (file->types != NULL) {
        gguf_put_key_uints(buffer, KEY("token_type"), GGUF_INT32, file->types, file->type_count);
    }
    if (file->scores != NULL) {
        gguf_put_key_floats(buffer, KEY("scores"), file->scores, file->score_count);
    }
    if (file->merges != NULL) {
        gguf_put_key_strings(buffer, KEY("merges"), file->merges, file->merge_count);
    }
    if (file->pre != NULL) {
        gguf_put_key_text(buffer, KEY("pre"), file->pre);
    }
    if (file->id_key != NULL) {
        gguf_put_key_uint(buffer, file->id_key, GGUF_UINT32, file->id);
    }
    if (file->flag_key != NULL) {
        gguf_put_key_bool(buffer, file->flag_key, true);
    }
    if (file->ends != NULL) {
        gguf_put_key_uints(buffer, KEY("eos_token_ids"), GGUF_INT32, file->ends, file->end_count);
    }
    gguf_put_padding(buffer, 32);
}

static fl_status open_file(const struct file *file)
{
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    struct tokenizer *tokenizer = NULL;
    put_file(&buffer, file);
    CHECK_EQ(gguf_parse(buffer.data, buffer.size, buffer.size, &gguf), FL_OK);
    const fl_status status = tokenizer_open(gguf, &tokenizer);
    CHECK((tokenizer != NULL) == (status == FL_OK));
    tokenizer_close(tokenizer);
    gguf_close(gguf);
    gguf_buffer_free(&buffer);
    return status;
}

/* The file must be refused with this code and a sentence that has this in it. */
static void check_refused(const struct file *file, fl_status want, const char *sentence)
{
    const fl_status got = open_file(file);
    if (got != want || strstr(fl_last_error(), sentence) == NULL) {
        printf("  status %d, \"%s\"\n", (int)got, fl_last_error());
    }
    CHECK_EQ(got, want);
    CHECK(strstr(fl_last_error(), sentence) != NULL);
    CHECK(strchr(fl_last_error(), '\n') == NULL);
}

static void test_small_files_open(void)
{
    CHECK_EQ(open_file(&spm_file), FL_OK);
    CHECK_EQ(open_file(&bpe_file), FL_OK);
    struct file file = bpe_file;
    file.pre = NULL; /* then the default one */
    CHECK_EQ(open_file(&file), FL_OK);
    static const uint32_t ends[] = {1, 2};
    file.ends = ends;
    file.end_count = 2;
    CHECK_EQ(open_file(&file), FL_OK);
    static const struct gguf_string holes[] = {TEXT("a"), TEXT("b"), TEXT("ab"), TEXT(""),
                                               TEXT("")};
    file.tokens = holes;
    file.token_count = 5;
    CHECK_EQ(open_file(&file), FL_OK);
}

static void test_missing_and_foreign_tokenizers(void)
{
    struct file file = spm_file;
    file.model = NULL;
    check_refused(&file, FL_NOT_FOUND, "no tokenizer (tokenizer.ggml.model)");
    file.model = "bert";
    check_refused(&file, FL_UNSUPPORTED, "\"bert\" is not supported; gpt2 and llama are");
    file = bpe_file;
    file.pre = "tekken";
    check_refused(&file, FL_UNSUPPORTED, "\"tekken\" is not supported; default, gpt-2");
    file = spm_file;
    file.tokens = NULL;
    check_refused(&file, FL_NOT_FOUND, "no tokens");
    file.tokens = spm_tokens;
    file.token_count = 0;
    check_refused(&file, FL_MALFORMED, "empty");
}

static void test_broken_tokens(void)
{
    static const struct gguf_string twice[] = {TEXT("a"), TEXT("b"), TEXT("ab"), TEXT("b")};
    struct file file = bpe_file;
    file.tokens = twice;
    file.token_count = 4;
    check_refused(&file, FL_MALFORMED, "tokens 1 and 3 have the same text");

    static char long_text[VOCABULARY_TEXT_SIZE_MAX + 1];
    memset(long_text, 'x', sizeof(long_text));
    struct gguf_string tokens[] = {
        TEXT("a"), TEXT("b"), TEXT("ab"), {.data = long_text, .size = sizeof(long_text)}};
    file.tokens = tokens;
    check_refused(&file, FL_TOO_LARGE, "token 3 is 1025 bytes long");
    tokens[3].size--;
    CHECK_EQ(open_file(&file), FL_OK);
}

static void test_broken_types_and_scores(void)
{
    static const uint32_t high[] = {2, 3, 7, 6, 1};
    static const uint32_t not_a_byte[] = {2, 3, 3, 6, 6};
    struct file file = spm_file;
    file.types = high;
    check_refused(&file, FL_MALFORMED, "token_type");
    file.types = not_a_byte;
    check_refused(&file, FL_MALFORMED, "token 4 has type byte");
    file = spm_file;
    file.type_count = 4;
    check_refused(&file, FL_MALFORMED, "token_type has 4 entries for 5 tokens");
    file = spm_file;
    file.score_count = 3;
    check_refused(&file, FL_MALFORMED, "scores has 3 entries for 5 tokens");
    file.scores = NULL;
    check_refused(&file, FL_MALFORMED, "needs tokenizer.ggml.scores");
    static const float odd[] = {0, 0, 0, 0, NAN};
    file = spm_file;
    file.scores = odd;
    check_refused(&file, FL_MALFORMED, "not a number");
}

static void test_broken_merges(void)
{
    static const struct gguf_string unknown[] = {TEXT("a b"), TEXT("a c")};
    static const struct gguf_string result[] = {TEXT("b a")};
    static const struct gguf_string one[] = {TEXT("ab")};
    static const struct gguf_string tiny[] = {TEXT("a ")};
    static const struct gguf_string again[] = {TEXT("a b"), TEXT("a b")};
    struct file file = bpe_file;
    file.merges = unknown;
    file.merge_count = 2;
    check_refused(&file, FL_MALFORMED, "merge 1 names a token that the vocabulary does not have");
    file.merges = result;
    file.merge_count = 1;
    check_refused(&file, FL_MALFORMED, "merge 0 names a token");
    file.merges = one;
    check_refused(&file, FL_MALFORMED, "merge 0 is not two tokens");
    file.merges = tiny;
    check_refused(&file, FL_MALFORMED, "merge 0 is not two tokens");
    file.merges = NULL;
    check_refused(&file, FL_MALFORMED, "needs tokenizer.ggml.merges");
    file.merges = again;
    file.merge_count = 2;
    CHECK_EQ(open_file(&file), FL_OK);
}

static void test_broken_ids_and_flags(void)
{
    static const char *const keys[] = {KEY("bos_token_id"), KEY("eos_token_id"),
                                       KEY("eot_token_id"), KEY("eom_token_id"),
                                       KEY("unknown_token_id")};
    struct file file = spm_file;
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        file.id_key = keys[i];
        file.id = 5;
        check_refused(&file, FL_MALFORMED, "is 5, but there are 5 tokens");
        file.id = 4;
        CHECK_EQ(open_file(&file), FL_OK);
    }
    file = bpe_file; /* byte-level files have no BOS unless they say so */
    file.flag_key = KEY("add_bos_token");
    check_refused(&file, FL_MALFORMED, "bos_token_id is missing");
    file.flag_key = KEY("add_eos_token");
    check_refused(&file, FL_MALFORMED, "eos_token_id is missing");
    static const uint32_t ends[VOCABULARY_END_COUNT_MAX + 1] = {0};
    file = bpe_file;
    file.ends = ends;
    file.end_count = VOCABULARY_END_COUNT_MAX + 1;
    check_refused(&file, FL_TOO_LARGE, "eos_token_ids has 33 entries");
    static const uint32_t far[] = {3};
    file.ends = far;
    file.end_count = 1;
    check_refused(&file, FL_MALFORMED, "eos_token_ids");
}

static void test_mistyped_keys(void)
{
    static const char *const keys[] = {KEY("model"),  KEY("tokens"), KEY("token_type"),
                                       KEY("scores"), KEY("pre"),    KEY("add_bos_token")};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        struct file file = spm_file;
        file.model = i == 0 ? NULL : file.model;
        file.tokens = i == 1 ? NULL : file.tokens;
        file.types = i == 2 ? NULL : file.types;
        file.scores = i == 3 ? NULL : file.scores;
        file.id_key = keys[i]; /* a number where none belongs */
        file.id = 2;
        CHECK_EQ(open_file(&file), FL_MALFORMED);
        CHECK(strstr(fl_last_error(), keys[i]) != NULL);
    }
    struct file file = bpe_file;
    file.merges = NULL;
    file.id_key = KEY("merges");
    CHECK_EQ(open_file(&file), FL_MALFORMED);
}

static const struct test_case cases[] = {
    {"vocabulary: every token is found by its text", test_reads_texts_types_and_pieces},
    {"vocabulary: every byte has one spelling, and prints itself", test_byte_alphabet},
    {"vocabulary: end tokens by key and by text, HTML is none", test_ends_by_key_and_by_text},
    {"vocabulary: small files open", test_small_files_open},
    {"vocabulary: no tokenizer, and foreign ones, are refused by name",
     test_missing_and_foreign_tokenizers},
    {"vocabulary: double and endless tokens are refused", test_broken_tokens},
    {"vocabulary: types and scores must fit the tokens", test_broken_types_and_scores},
    {"bpe: merges must name tokens", test_broken_merges},
    {"vocabulary: ids lie within, flags have their token", test_broken_ids_and_flags},
    {"vocabulary: mistyped keys are refused by name", test_mistyped_keys},
};
TEST_MAIN(cases)
