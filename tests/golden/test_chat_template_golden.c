/* SmolLM2's conversations: the text its own template gives, and tokens nobody can forge. */
#include "coordinator/chat_template.h"

#include <stdlib.h>

#include "tests/harness.h"
#include "tests/support/jsonl.h"
#include "tests/support/temp_folder.h"

enum { TEXT_MAX = 1 << 14, MESSAGES_MAX = 16, IDS_MAX = 4096 };

struct record {
    struct chat_message messages[MESSAGES_MAX];
    size_t count;
    unsigned flags;
    char roles[MESSAGES_MAX][16];
    char contents[MESSAGES_MAX][2048];
    char text[TEXT_MAX];
    size_t text_size;
};

static void read_message(struct jsonl_slice value, struct record *record)
{
    struct jsonl_slice field;
    size_t size = 0;
    const size_t i = record->count++;
    CHECK(i < MESSAGES_MAX);
    memset(record->roles[i], 0, sizeof(record->roles[i]));
    CHECK(jsonl_field(value, "role", &field));
    CHECK(jsonl_string(field, record->roles[i], sizeof(record->roles[i]) - 1, &size));
    CHECK(jsonl_field(value, "content", &field));
    CHECK(jsonl_string(field, record->contents[i], sizeof(record->contents[i]), &size));
    record->messages[i] =
        (struct chat_message){.role = record->roles[i], .content = {record->contents[i], size}};
}

static void read_record(struct jsonl_slice line, struct record *record)
{
    struct jsonl_slice value;
    struct jsonl_slice element;
    bool add_prompt = false;
    record->count = 0;
    CHECK(jsonl_field(line, "messages", &value));
    while (jsonl_element(value, record->count, &element)) {
        read_message(element, record);
    }
    CHECK(jsonl_field(line, "add_generation_prompt", &value) && jsonl_bool(value, &add_prompt));
    CHECK(jsonl_field(line, "text", &value));
    CHECK(jsonl_string(value, record->text, TEXT_MAX, &record->text_size));
    record->flags = add_prompt ? CHAT_ADD_PROMPT : 0u;
}

struct fixture {
    struct gguf *gguf;
    struct tokenizer *tokenizer;
    struct chat_template chat;
    struct jsonl file;
};

static void fixture_open(struct fixture *f)
{
    static const char name[] = "SmolLM2-135M-Instruct.Q4_1.gguf";
    char path[TEMP_PATH_MAX];
    if (!real_model_path(name, path)) {
        TEST_SKIP(path);
    }
    CHECK_EQ(gguf_open(path, &f->gguf), FL_OK);
    CHECK_EQ(tokenizer_open(f->gguf, &f->tokenizer), FL_OK);
    CHECK_EQ(chat_template_open(f->gguf, tokenizer_vocabulary(f->tokenizer), NULL, &f->chat),
             FL_OK);
    CHECK(jsonl_open(&f->file, "tests/golden/chat_smollm2.jsonl"));
}

static void fixture_close(struct fixture *f)
{
    jsonl_close(&f->file);
    tokenizer_close(f->tokenizer);
    gguf_close(f->gguf);
}

static void test_texts(void)
{
    static struct record record;
    static char buffer[TEXT_MAX];
    struct fixture f;
    struct jsonl_slice line;
    size_t records = 0;
    fixture_open(&f);
    while (jsonl_next(&f.file, &line)) {
        struct chat_text text = {.text = buffer, .max = TEXT_MAX};
        read_record(line, &record);
        CHECK_EQ(chat_template_render(&f.chat, record.messages, record.count, record.flags, &text),
                 FL_OK);
        CHECK_EQ(text.size, record.text_size);
        CHECK(memcmp(buffer, record.text, text.size) == 0);
        records++;
    }
    CHECK_EQ(records, 14);
    fixture_close(&f);
}

static size_t count_id(const uint32_t *ids, size_t count, uint32_t id)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        found += ids[i] == id;
    }
    return found;
}

/* Where no message holds a mark, the tokens are those of the whole text; where one does, the turns
 * are still as many as the messages. */
static void test_tokens(void)
{
    static struct record record;
    static uint32_t got[IDS_MAX];
    static uint32_t whole[IDS_MAX];
    struct fixture f;
    struct jsonl_slice line;
    size_t forged = 0;
    fixture_open(&f);
    while (jsonl_next(&f.file, &line)) {
        size_t count = 0;
        size_t whole_count = 0;
        read_record(line, &record);
        CHECK_EQ(chat_template_encode(&f.chat, f.tokenizer, record.messages, record.count,
                                      record.flags, got, IDS_MAX, &count),
                 FL_OK);
        CHECK_EQ(tokenizer_encode(f.tokenizer, record.text, record.text_size,
                                  TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, whole, IDS_MAX,
                                  &whole_count),
                 FL_OK);
        const bool said = strcmp(record.messages[0].role, "system") == 0;
        CHECK_EQ(count_id(got, count, 2), record.count + (said ? 0 : 1));
        if (memmem(record.contents[0], record.messages[0].content.size, "<|im_end|>", 10) != NULL) {
            CHECK_EQ(count_id(whole, whole_count, 2), count_id(got, count, 2) + 1);
            CHECK_EQ(chat_template_encode(&f.chat, f.tokenizer, record.messages, record.count,
                                          record.flags | CHAT_PARSE_CONTENT, got, IDS_MAX, &count),
                     FL_OK);
            forged++;
        }
        CHECK_EQ(count, whole_count);
        CHECK(memcmp(got, whole, count * sizeof(got[0])) == 0);
    }
    CHECK_EQ(forged, 2);
    fixture_close(&f);
}

static const struct test_case cases[] = {
    {"chat template: every SmolLM2 conversation gives the reference's text", test_texts},
    {"chat template: tokens are those of the text, and typed marks are none", test_tokens},
};
TEST_MAIN(cases)
