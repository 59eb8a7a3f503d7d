/* Tokenizer over small vocabularies: flags, special tokens, odd bytes, growth. */
#include "coordinator/tokenizer.h"

#include <stdlib.h>

#include "coordinator/token_list.h"
#include "tests/harness.h"
#include "tests/support/vocabulary_fixture.h"

enum { IDS_MAX = 64 };

struct encoded {
    fl_status status;
    uint32_t ids[IDS_MAX];
    size_t count;
};

static struct encoded encode_bytes(struct vocabulary_fixture *f, const char *text, size_t size,
                                   unsigned flags)
{
    struct encoded out = {.count = 0};
    out.status = tokenizer_encode(f->tokenizer, text, size, flags, out.ids, IDS_MAX, &out.count);
    return out;
}

static struct encoded encode(struct vocabulary_fixture *f, const char *text, unsigned flags)
{
    return encode_bytes(f, text, strlen(text), flags);
}

/* The tokens spelled out and joined by bars, for reading in a test. */
static const char *spell(const struct vocabulary_fixture *f, const struct encoded *encoded)
{
    static char out[1024];
    size_t size = 0;
    for (size_t i = 0; i < encoded->count && i < IDS_MAX; i++) {
        const struct gguf_string piece =
            tokenizer_piece(f->tokenizer, encoded->ids[i], TOKENIZER_SHOW_SPECIAL);
        CHECK(size + piece.size + 2 < sizeof(out));
        if (i > 0) {
            out[size++] = '|';
        }
        memcpy(out + size, piece.data, piece.size);
        size += piece.size;
    }
    out[size] = '\0';
    return out;
}

#define CHECK_SPELLS(f, encoded, want)                                 \
    do {                                                               \
        const char *check_got = spell((f), &(encoded));                \
        if (strcmp(check_got, (want)) != 0) {                          \
            printf("  got  \"%s\"\n  want \"%s\"\n", check_got, want); \
        }                                                              \
        CHECK(strcmp(check_got, (want)) == 0);                         \
    } while (0)

static void open_with(struct vocabulary_fixture *f, enum token_table_kind kind)
{
    vocabulary_fixture_init(f, kind);
    CHECK_EQ(vocabulary_fixture_open(f), FL_OK);
}

static void test_bpe_merges_by_rank(void)
{
    struct vocabulary_fixture f;
    open_with(&f, TOKEN_TABLE_BPE);
    struct encoded got = encode(&f, "hello hello world, the cat", TOKENIZER_ADD_SPECIAL);
    CHECK_EQ(got.status, FL_OK);
    CHECK_SPELLS(&f, got, "hello| hello| world|,| the| cat");
    got = encode(&f, "hellohello", 0); /* one word: "hello" does not join "hello" */
    CHECK_SPELLS(&f, got, "hello|hello");
    vocabulary_fixture_close(&f);
}

static void test_spm_joins_best_score(void)
{
    struct vocabulary_fixture f;
    open_with(&f, TOKEN_TABLE_SPM);
    struct encoded got = encode(&f, "hello world", TOKENIZER_ADD_SPECIAL);
    CHECK_EQ(got.status, FL_OK);
    CHECK_SPELLS(&f, got, "<s>| hello| world");
    got = encode(&f, "hello world", TOKENIZER_ADD_SPECIAL | TOKENIZER_NO_BOS);
    CHECK_SPELLS(&f, got, " hello| world");
    vocabulary_fixture_close(&f);
}

/* Equal scores: the leftmost pair joins first. */
static void test_spm_ties_go_left(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_SPM);
    vocabulary_fixture_add(&f, "xy", MODEL_TOKEN_NORMAL, -1);
    vocabulary_fixture_add(&f, "yx", MODEL_TOKEN_NORMAL, -1);
    f.add_space_prefix = FIXTURE_FALSE;
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    const struct encoded got = encode(&f, "xyxyx", 0);
    CHECK_SPELLS(&f, got, "xy|xy|x");
    vocabulary_fixture_close(&f);
}

static void test_space_prefix_is_a_flag(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_SPM);
    f.add_space_prefix = FIXTURE_FALSE;
    f.add_bos = FIXTURE_FALSE;
    f.add_eos = FIXTURE_TRUE;
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    struct encoded got = encode(&f, "hello", TOKENIZER_ADD_SPECIAL);
    CHECK_SPELLS(&f, got, "hello|</s>");
    got = encode(&f, "hello", TOKENIZER_ADD_SPECIAL | TOKENIZER_NO_EOS);
    CHECK_SPELLS(&f, got, "hello");
    vocabulary_fixture_close(&f);

    open_with(&f, TOKEN_TABLE_SPM); /* the prefix comes back after a special token */
    got = encode(&f, "cat</s>cat", TOKENIZER_PARSE_SPECIAL);
    CHECK_SPELLS(&f, got, " cat|</s>| cat");
    vocabulary_fixture_close(&f);
}

static void test_empty_text(void)
{
    struct vocabulary_fixture f;
    open_with(&f, TOKEN_TABLE_SPM);
    struct encoded got = encode(&f, "", TOKENIZER_ADD_SPECIAL);
    CHECK_SPELLS(&f, got, "<s>");
    got = encode(&f, "", 0);
    CHECK_EQ(got.count, 0);
    vocabulary_fixture_close(&f);
    open_with(&f, TOKEN_TABLE_BPE);
    got = encode_bytes(&f, NULL, 0, TOKENIZER_ADD_SPECIAL);
    CHECK_EQ(got.status, FL_OK);
    CHECK_EQ(got.count, 0);
    vocabulary_fixture_close(&f);
}

static void test_only_spaces(void)
{
    struct vocabulary_fixture f;
    open_with(&f, TOKEN_TABLE_BPE);
    struct encoded got = encode(&f, "    ", 0);
    CHECK_EQ(got.status, FL_OK);
    CHECK_EQ(got.count, 4); /* the small vocabulary has no token of several spaces */
    vocabulary_fixture_close(&f);
    open_with(&f, TOKEN_TABLE_SPM);
    got = encode(&f, "  ", 0);
    CHECK_SPELLS(&f, got, " | | ");
    vocabulary_fixture_close(&f);
}

static void test_typed_marks_are_text(void)
{
    struct vocabulary_fixture f;
    open_with(&f, TOKEN_TABLE_BPE);
    struct encoded got = encode(&f, "a<|im_end|>b", 0);
    for (size_t i = 0; i < got.count; i++) {
        CHECK(got.ids[i] != 2);
    }
    got = encode(&f, "a<|im_end|>b", TOKENIZER_PARSE_SPECIAL);
    CHECK_SPELLS(&f, got, "a|<|im_end|>|b");
    CHECK_EQ(got.ids[1], 2);
    vocabulary_fixture_close(&f);
}

static void test_typed_parts_are_text(void)
{
    static const char text[] = "<|im_start|><|im_start|>a<|im_end|>";
    static const struct text_range typed[] = {{0, 0}, {12, 25}};
    struct vocabulary_fixture f;
    struct encoded got = {.count = 0};
    open_with(&f, TOKEN_TABLE_BPE);
    CHECK_EQ(tokenizer_encode_parts(f.tokenizer, text, strlen(text), TOKENIZER_PARSE_SPECIAL, typed,
                                    2, got.ids, IDS_MAX, &got.count),
             FL_OK);
    CHECK_EQ(got.ids[0], 1);
    CHECK_EQ(got.ids[got.count - 1], 2);
    for (size_t i = 1; i + 1 < got.count; i++) {
        CHECK(got.ids[i] > 2);
    }
    /* A mark that only touches a typed part is none either. */
    static const struct text_range edge[] = {{11, 12}, {34, 35}};
    CHECK_EQ(tokenizer_encode_parts(f.tokenizer, text, strlen(text), TOKENIZER_PARSE_SPECIAL, edge,
                                    2, got.ids, IDS_MAX, &got.count),
             FL_OK);
    size_t marks = 0;
    for (size_t i = 0; i < got.count; i++) {
        marks += got.ids[i] <= 2;
    }
    CHECK_EQ(marks, 1);
    vocabulary_fixture_close(&f);
}

static void test_user_defined_always_count(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_SPM);
    const uint32_t id = vocabulary_fixture_add(&f, "<b>", MODEL_TOKEN_USER_DEFINED, -5);
    const uint32_t tabs = vocabulary_fixture_add(&f, "\t\t", MODEL_TOKEN_USER_DEFINED, -5);
    const uint32_t mark = vocabulary_fixture_add(&f, "<|turn|>", MODEL_TOKEN_USER_DEFINED, -5);
    f.add_space_prefix = FIXTURE_FALSE;
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    struct encoded got = encode(&f, "x<b>\t\t\t", 0);
    CHECK_SPELLS(&f, got, "x|<b>|\t\t|\t");
    CHECK_EQ(got.ids[1], id);
    CHECK_EQ(got.ids[2], tabs);
    got = encode(&f, "<|turn|>", 0); /* looks like chat markup: nobody may type it */
    CHECK(got.count > 1);
    got = encode(&f, "<|turn|>", TOKENIZER_PARSE_SPECIAL);
    CHECK_EQ(got.count, 1);
    CHECK_EQ(got.ids[0], mark);
    vocabulary_fixture_close(&f);
}

static void test_longest_special_wins(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_BPE);
    vocabulary_fixture_add(&f, "<x>", MODEL_TOKEN_CONTROL, 0);
    vocabulary_fixture_add(&f, "<x><y>", MODEL_TOKEN_CONTROL, 0);
    vocabulary_fixture_add(&f, "y><z", MODEL_TOKEN_CONTROL, 0);
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    struct encoded got = encode(&f, "<x><x><y>", TOKENIZER_PARSE_SPECIAL);
    CHECK_SPELLS(&f, got, "<x>|<x><y>");
    /* "<x><y>" is longer than "y><z", although that would leave more of the text. */
    got = encode(&f, "<x><y><z", TOKENIZER_PARSE_SPECIAL);
    CHECK_SPELLS(&f, got, "<x><y>|<|z");
    vocabulary_fixture_close(&f);
}

static void test_phi3_swallows_space(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_SPM);
    vocabulary_fixture_add(&f, "<|end|>", MODEL_TOKEN_CONTROL, 0);
    f.name = "Phi-3 mini";
    f.add_space_prefix = FIXTURE_FALSE;
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    struct encoded got = encode(&f, "x<|end|>\n \ty<s> z", TOKENIZER_PARSE_SPECIAL);
    CHECK_SPELLS(&f, got, "x|<|end|>|y|<s>| |z");
    vocabulary_fixture_close(&f);
}

static void test_byte_fallback(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_SPM);
    f.add_space_prefix = FIXTURE_FALSE;
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    struct encoded got = encode(&f, "\xe5\xad\x97\xc3\xa9", 0); /* one without a token, one with */
    CHECK_EQ(got.count, 4);
    CHECK_EQ(got.ids[0], 3 + 0xe5);
    CHECK_EQ(got.ids[1], 3 + 0xad);
    CHECK_EQ(got.ids[2], 3 + 0x97);
    CHECK_SPELLS(&f, got, "\xe5|\xad|\x97|\xc3\xa9");
    got = encode_bytes(&f, "a\0b", 3, 0);
    CHECK_EQ(got.count, 3);
    CHECK_EQ(got.ids[1], 3);
    CHECK_EQ(tokenizer_piece(f.tokenizer, 3, TOKENIZER_HIDE_SPECIAL).size, 1);
    CHECK_EQ(tokenizer_piece(f.tokenizer, 3, TOKENIZER_HIDE_SPECIAL).data[0], 0);
    vocabulary_fixture_close(&f);
    open_with(&f, TOKEN_TABLE_BPE);
    got = encode_bytes(&f, "a\0b", 3, 0);
    CHECK_EQ(got.count, 3);
    CHECK_EQ(got.ids[1], 3);
    vocabulary_fixture_close(&f);
}

/* U+2581 typed by a user is what SentencePiece takes for a space; byte-level BPE keeps it. */
static void test_lower_one_eighth_block(void)
{
    struct vocabulary_fixture f;
    open_with(&f, TOKEN_TABLE_SPM);
    struct encoded got = encode(&f, "\xe2\x96\x81hello", 0);
    CHECK_SPELLS(&f, got, " | hello");
    vocabulary_fixture_close(&f);
    open_with(&f, TOKEN_TABLE_BPE);
    got = encode(&f, "\xe2\x96\x81hello", 0);
    CHECK_SPELLS(&f, got, "\xe2|\x96|\x81|hello");
    vocabulary_fixture_close(&f);
}

static void test_broken_utf8_is_refused(void)
{
    static const struct {
        const char *text;
        const char *offset;
    } broken[] = {
        {"ab\xff", "byte 2 "},           {"\xc3", "byte 0 "},
        {"x\xc0\x80", "byte 1 "},        {"xy\xed\xa0\x80", "byte 2 "},
        {"\xf4\x90\x80\x80", "byte 0 "}, {"\xe2\x82", "byte 0 "},
        {"\xc3\xa9\x80", "byte 2 "},     {"\xf0\x9f\x98", "byte 0 "},
    };
    struct vocabulary_fixture f;
    open_with(&f, TOKEN_TABLE_BPE);
    for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
        const struct encoded got = encode(&f, broken[i].text, 0);
        CHECK_EQ(got.status, FL_INVALID);
        CHECK(strstr(fl_last_error(), broken[i].offset) != NULL);
    }
    vocabulary_fixture_close(&f);
}

static void test_too_little_room_says_how_much(void)
{
    struct vocabulary_fixture f;
    uint32_t ids[3] = {9, 9, 9};
    size_t count = 0;
    open_with(&f, TOKEN_TABLE_BPE);
    CHECK_EQ(tokenizer_encode(f.tokenizer, "1 3 5", 5, 0, ids, 2, &count), FL_TOO_LARGE);
    CHECK_EQ(count, 5);
    CHECK(strstr(fl_last_error(), "5 tokens long, there is room for 2") != NULL);
    CHECK_EQ(ids[2], 9);
    CHECK_EQ(tokenizer_encode(f.tokenizer, "1 3", 3, 0, ids, 3, &count), FL_OK);
    CHECK_EQ(count, 3);
    CHECK_EQ(tokenizer_encode(f.tokenizer, "1", 1, 0, NULL, 0, &count), FL_TOO_LARGE);
    CHECK_EQ(count, 1);
    vocabulary_fixture_close(&f);
}

static void test_too_long_a_text_is_refused(void)
{
    struct vocabulary_fixture f;
    size_t count = 7;
    char *text = malloc(TOKENIZER_TEXT_SIZE_MAX + 1);
    CHECK(text != NULL);
    memset(text, 'x', TOKENIZER_TEXT_SIZE_MAX + 1);
    open_with(&f, TOKEN_TABLE_BPE);
    CHECK_EQ(tokenizer_encode(f.tokenizer, text, TOKENIZER_TEXT_SIZE_MAX + 1, 0, NULL, 0, &count),
             FL_TOO_LARGE);
    CHECK_EQ(count, 0);
    /* As long as may be, and one single word. */
    CHECK_EQ(tokenizer_encode(f.tokenizer, text, TOKENIZER_TEXT_SIZE_MAX, 0, NULL, 0, &count),
             FL_TOO_LARGE);
    CHECK_EQ(count, TOKENIZER_TEXT_SIZE_MAX);
    vocabulary_fixture_close(&f);
    free(text);
}

/* Pairs looked up for a word of `size` letters. */
static uint64_t lookups(struct vocabulary_fixture *f, size_t size)
{
    static char word[20000];
    size_t count = 0;
    for (size_t i = 0; i < size; i++) {
        word[i] = "hellocathereand"[i * 7 % 15];
    }
    const uint64_t before = tokenizer_lookup_count(f->tokenizer);
    CHECK_EQ(tokenizer_encode(f->tokenizer, word, size, 0, NULL, 0, &count), FL_TOO_LARGE);
    return tokenizer_lookup_count(f->tokenizer) - before;
}

static void test_long_words_grow_linearly(void)
{
    static const enum token_table_kind kinds[] = {TOKEN_TABLE_BPE, TOKEN_TABLE_SPM};
    for (size_t i = 0; i < 2; i++) {
        struct vocabulary_fixture f;
        open_with(&f, kinds[i]);
        const uint64_t half = lookups(&f, 5000);
        const uint64_t whole = lookups(&f, 10000);
        CHECK(half >= 4999 && half < 3 * 5000);
        CHECK(whole < 2 * half + 100);
        vocabulary_fixture_close(&f);
    }
}

static void test_pieces_hide_control(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_SPM);
    const uint32_t unused = vocabulary_fixture_add(&f, "<unused0>", MODEL_TOKEN_UNUSED, 0);
    const uint32_t html =
        vocabulary_fixture_add(&f, "\xe2\x96\x81<b>", MODEL_TOKEN_USER_DEFINED, 0);
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    CHECK_EQ(tokenizer_piece(f.tokenizer, 1, TOKENIZER_HIDE_SPECIAL).size, 0);
    CHECK_EQ(tokenizer_piece(f.tokenizer, 0, TOKENIZER_HIDE_SPECIAL).size, 0);
    CHECK_EQ(tokenizer_piece(f.tokenizer, 1, TOKENIZER_SHOW_SPECIAL).size, 3);
    CHECK_EQ(tokenizer_piece(f.tokenizer, unused, TOKENIZER_SHOW_SPECIAL).size, 0);
    CHECK_EQ(tokenizer_piece(f.tokenizer, html, TOKENIZER_HIDE_SPECIAL).size, 6); /* as it is */
    CHECK_EQ(tokenizer_piece(f.tokenizer, 1u << 30, TOKENIZER_SHOW_SPECIAL).size, 0);
    CHECK_EQ(tokenizer_piece(f.tokenizer, TOKEN_NONE, TOKENIZER_SHOW_SPECIAL).size, 0);
    vocabulary_fixture_close(&f);
}

/* What each pre-tokenizer does to the same text; only the cuts differ, the tokens are bytes. */
static void test_pretokenizers(void)
{
    static const struct {
        const char *pre;
        const char *text;
        const char *want;
    } rows[] = {
        {"gpt-2", "12 12the", "12| |12|t|he"},
        {"smollm", "12 12the", "1|2| |1|2|t|he"},
        {"qwen2", "12 12", "1|2| |1|2"},
        {"llama-bpe", "12 12", "12| |12"},
        {"default", "12.12 cat", "12|.|12| cat"},
        {"gpt-2", "a\n\n\n cat", "a|\n\n|\n| cat"},
        {"llama-bpe", "a\n\n\n cat", "a|\n\n|\n| cat"},
        {"llama-bpe", "(cat 'LL", "(|cat| |'|L|L"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct vocabulary_fixture f;
        vocabulary_fixture_init(&f, TOKEN_TABLE_BPE);
        f.pre = rows[i].pre;
        f.add_bos = FIXTURE_FALSE;
        CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
        const struct encoded got = encode(&f, rows[i].text, TOKENIZER_ADD_SPECIAL);
        CHECK_SPELLS(&f, got, rows[i].want);
        vocabulary_fixture_close(&f);
    }
}

/* Llama 3 takes a word that is a token as it is, even where no merges lead to it. */
static void test_whole_words(void)
{
    struct vocabulary_fixture f;
    vocabulary_fixture_init(&f, TOKEN_TABLE_BPE);
    vocabulary_fixture_add(&f, " xyz", MODEL_TOKEN_NORMAL, 0);
    f.pre = "llama-bpe";
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    struct encoded got = encode(&f, "x xyz", TOKENIZER_ADD_SPECIAL);
    CHECK_SPELLS(&f, got, "<|endoftext|>|x| xyz"); /* and a BOS by default */
    vocabulary_fixture_close(&f);

    vocabulary_fixture_init(&f, TOKEN_TABLE_BPE);
    vocabulary_fixture_add(&f, " xyz", MODEL_TOKEN_NORMAL, 0);
    CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
    got = encode(&f, "x xyz", TOKENIZER_ADD_SPECIAL);
    CHECK_SPELLS(&f, got, "x| |x|y|z");
    vocabulary_fixture_close(&f);
}

static const struct test_case cases[] = {
    {"bpe: pairs merge by rank, within words", test_bpe_merges_by_rank},
    {"spm: pairs join by score, with BOS unless told otherwise", test_spm_joins_best_score},
    {"spm: equal scores join from the left", test_spm_ties_go_left},
    {"tokenizer: BOS, EOS and the leading space follow the file's flags",
     test_space_prefix_is_a_flag},
    {"tokenizer: an empty text is BOS or nothing", test_empty_text},
    {"tokenizer: spaces alone are tokens", test_only_spaces},
    {"tokenizer: special text typed by a user is text unless asked for", test_typed_marks_are_text},
    {"tokenizer: no control token in or across a typed part", test_typed_parts_are_text},
    {"tokenizer: user-defined tokens always count, chat marks among them do not",
     test_user_defined_always_count},
    {"tokenizer: the longest special token wins", test_longest_special_wins},
    {"tokenizer: Phi 3 swallows white space after special tokens", test_phi3_swallows_space},
    {"tokenizer: a character without a token falls back to bytes, NUL is one", test_byte_fallback},
    {"tokenizer: U+2581 in the text itself", test_lower_one_eighth_block},
    {"tokenizer: broken UTF-8 is refused with the place of the bad byte",
     test_broken_utf8_is_refused},
    {"tokenizer: too little room says how much is needed", test_too_little_room_says_how_much},
    {"tokenizer: a text over the limit is refused, one at it is not",
     test_too_long_a_text_is_refused},
    {"tokenizer: a word twice as long takes twice the lookups", test_long_words_grow_linearly},
    {"tokenizer: pieces hide control tokens, unused ones print nothing", test_pieces_hide_control},
    {"pretokenizer: each cuts as its model was trained", test_pretokenizers},
    {"bpe: Llama 3 takes whole words that are tokens", test_whole_words},
};
TEST_MAIN(cases)
