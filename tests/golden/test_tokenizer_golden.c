/* Both real vocabularies against the reference ids and texts, record by record. */
#include "coordinator/tokenizer.h"

#include <stdlib.h>

#include "coordinator/text_stream.h"
#include "tests/harness.h"
#include "tests/support/jsonl.h"
#include "tests/support/temp_folder.h"

enum { TEXT_MAX = 1 << 16, IDS_MAX = 1 << 14 };

static struct gguf *open_model(const char *name)
{
    char path[TEMP_PATH_MAX];
    struct gguf *gguf = NULL;
    if (!real_model_path(name, path)) {
        TEST_SKIP(path);
    }
    CHECK_EQ(gguf_open(path, &gguf), FL_OK);
    return gguf;
}

struct record {
    struct jsonl_slice line;
    char text[TEXT_MAX];
    size_t text_size;
    char detok[TEXT_MAX];
    size_t detok_size;
    uint32_t ids[IDS_MAX];
    size_t count;
    unsigned flags;
};

static void read_record(struct jsonl_slice line, struct record *record)
{
    struct jsonl_slice value;
    bool add_special = false;
    bool parse_special = false;
    record->line = line;
    CHECK(jsonl_field(line, "text", &value));
    CHECK(jsonl_string(value, record->text, TEXT_MAX, &record->text_size));
    CHECK(jsonl_field(line, "detok", &value));
    CHECK(jsonl_string(value, record->detok, TEXT_MAX, &record->detok_size));
    CHECK(jsonl_field(line, "ids", &value));
    CHECK(jsonl_uints(value, record->ids, IDS_MAX, &record->count));
    CHECK(jsonl_field(line, "add_special", &value) && jsonl_bool(value, &add_special));
    CHECK(jsonl_field(line, "parse_special", &value) && jsonl_bool(value, &parse_special));
    record->flags =
        (add_special ? TOKENIZER_ADD_SPECIAL : 0u) | (parse_special ? TOKENIZER_PARSE_SPECIAL : 0u);
}

static void print_record(const struct record *record, const uint32_t *ids, size_t count)
{
    printf("  %.*s\n  got", (int)(record->line.size < 400 ? record->line.size : 400),
           record->line.data);
    for (size_t i = 0; i < count && i < 60; i++) {
        printf(" %" PRIu32, ids[i]);
    }
    printf("\n");
}

static bool ids_are_right(struct tokenizer *tokenizer, const struct record *record)
{
    static uint32_t ids[IDS_MAX];
    size_t count = 0;
    CHECK_EQ(tokenizer_encode(tokenizer, record->text, record->text_size, record->flags, ids,
                              IDS_MAX, &count),
             FL_OK);
    if (count != record->count || memcmp(ids, record->ids, count * sizeof(ids[0])) != 0) {
        print_record(record, ids, count);
        return false;
    }
    return true;
}

static bool text_is_right(struct tokenizer *tokenizer, const struct record *record)
{
    size_t at = 0;
    for (size_t i = 0; i < record->count; i++) {
        const struct gguf_string piece =
            tokenizer_piece(tokenizer, record->ids[i], TOKENIZER_SHOW_SPECIAL);
        if (piece.size > record->detok_size - at ||
            memcmp(piece.data, record->detok + at, piece.size) != 0) {
            print_record(record, record->ids, i + 1);
            return false;
        }
        at += piece.size;
    }
    return at == record->detok_size;
}

static void check_file(const char *model, const char *path, size_t want)
{
    static struct record record;
    struct jsonl file;
    struct jsonl_slice line;
    struct tokenizer *tokenizer = NULL;
    struct gguf *gguf = open_model(model);
    CHECK_EQ(tokenizer_open(gguf, &tokenizer), FL_OK);
    CHECK(jsonl_open(&file, path));
    size_t records = 0;
    size_t wrong = 0;
    while (jsonl_next(&file, &line)) {
        read_record(line, &record);
        records++;
        wrong += !ids_are_right(tokenizer, &record) || !text_is_right(tokenizer, &record);
    }
    jsonl_close(&file);
    tokenizer_close(tokenizer);
    gguf_close(gguf);
    CHECK_EQ(wrong, 0);
    CHECK_EQ(records, want);
}

static void test_smollm2(void)
{
    check_file("SmolLM2-135M-Instruct.Q4_1.gguf", "tests/golden/tokens_smollm2.jsonl", 173);
}

static void test_gemma3(void)
{
    check_file("gemma-3-270m-q4_k_m.gguf", "tests/golden/tokens_gemma3.jsonl", 175);
}

static void check_ends(const char *model, uint32_t first, uint32_t second)
{
    struct tokenizer *tokenizer = NULL;
    struct gguf *gguf = open_model(model);
    CHECK_EQ(tokenizer_open(gguf, &tokenizer), FL_OK);
    const struct vocabulary *vocabulary = tokenizer_vocabulary(tokenizer);
    CHECK_EQ(vocabulary->end_count, 2);
    CHECK_EQ(vocabulary->ends[0], first);
    CHECK_EQ(vocabulary->ends[1], second);
    CHECK(tokenizer_is_end(tokenizer, first) && tokenizer_is_end(tokenizer, second));
    CHECK(!tokenizer_is_end(tokenizer, 3));
    tokenizer_close(tokenizer);
    gguf_close(gguf);
}

static void test_ends(void)
{
    check_ends("SmolLM2-135M-Instruct.Q4_1.gguf", 0, 2);
    check_ends("gemma-3-270m-q4_k_m.gguf", 1, 106);
}

/* What a reader sees of one answer. */
static void check_answer(const struct tokenizer *tokenizer, struct jsonl_slice line)
{
    static struct record record;
    struct text_stream stream;
    struct gguf_string text = {0};
    struct jsonl_slice value;
    size_t at = 0;
    CHECK(jsonl_field(line, "greedy_text", &value));
    CHECK(jsonl_string(value, record.text, TEXT_MAX, &record.text_size));
    CHECK(jsonl_field(line, "greedy", &value));
    CHECK(jsonl_uints(value, record.ids, IDS_MAX, &record.count));
    CHECK_EQ(text_stream_init(&stream, tokenizer, NULL, 0, TOKENIZER_SHOW_SPECIAL), FL_OK);
    for (size_t i = 0; i <= record.count; i++) {
        if (i < record.count) {
            (void)text_stream_push(&stream, record.ids[i], &text);
        } else {
            CHECK_EQ(text_stream_finish(&stream, &text), TEXT_STREAM_ENDED);
        }
        CHECK(text.size <= record.text_size - at);
        CHECK(memcmp(text.data, record.text + at, text.size) == 0);
        at += text.size;
    }
    CHECK_EQ(at, record.text_size);
}

static void check_answers(const char *model, const char *path)
{
    struct jsonl file;
    struct jsonl_slice line;
    struct tokenizer *tokenizer = NULL;
    struct gguf *gguf = open_model(model);
    size_t records = 0;
    CHECK_EQ(tokenizer_open(gguf, &tokenizer), FL_OK);
    CHECK(jsonl_open(&file, path));
    for (; jsonl_next(&file, &line); records++) {
        check_answer(tokenizer, line);
    }
    jsonl_close(&file);
    tokenizer_close(tokenizer);
    gguf_close(gguf);
    CHECK_EQ(records, 24);
}

static void test_answers(void)
{
    check_answers("SmolLM2-135M-Instruct.Q4_1.gguf", "tests/golden/smollm2.jsonl");
    check_answers("gemma-3-270m-q4_k_m.gguf", "tests/golden/gemma3.jsonl");
}

static const struct test_case cases[] = {
    {"tokenizer: every SmolLM2 record gives the reference's ids and text", test_smollm2},
    {"tokenizer: every Gemma 3 record gives the reference's ids and text", test_gemma3},
    {"text stream: every reference answer reads as the reference says", test_answers},
    {"tokenizer: both models end an answer at exactly their two end tokens", test_ends},
};
TEST_MAIN(cases)
