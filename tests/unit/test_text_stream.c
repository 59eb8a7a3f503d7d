/* Text stream: whole characters only, stop strings across tokens, nothing lost at the end. */
#include "coordinator/text_stream.h"

#include "proto/base/utf8.h"
#include "tests/harness.h"
#include "tests/support/vocabulary_fixture.h"

enum { TEXT_MAX = 4096 };

/* A stream over the byte-level vocabulary, and everything it has said. */
struct fixture {
    struct vocabulary_fixture vocabulary;
    struct text_stream stream;
    enum text_stream_state state;
    char last[TEXT_MAX]; /* by the last call */
    char said[TEXT_MAX];
    size_t said_size;
};

static void fixture_open(struct fixture *f, const char *const *stops, size_t stop_count)
{
    struct gguf_string strings[TEXT_STREAM_STOP_COUNT_MAX];
    for (size_t i = 0; i < stop_count; i++) {
        strings[i] = (struct gguf_string){.data = stops[i], .size = strlen(stops[i])};
    }
    vocabulary_fixture_init(&f->vocabulary, TOKEN_TABLE_BPE);
    CHECK_EQ(vocabulary_fixture_open(&f->vocabulary), FL_OK);
    CHECK_EQ(text_stream_init(&f->stream, f->vocabulary.tokenizer, strings, stop_count,
                              TOKENIZER_HIDE_SPECIAL),
             FL_OK);
    f->state = TEXT_STREAM_OPEN;
    f->said_size = 0;
    f->said[0] = '\0';
}

static void fixture_close(struct fixture *f)
{
    vocabulary_fixture_close(&f->vocabulary);
}

static void take(struct fixture *f, struct gguf_string text)
{
    CHECK(f->said_size + text.size < TEXT_MAX);
    CHECK_EQ(fl_utf8_valid_size(text.data, text.size), text.size);
    memcpy(f->last, text.data, text.size);
    f->last[text.size] = '\0';
    memcpy(f->said + f->said_size, text.data, text.size);
    f->said_size += text.size;
    f->said[f->said_size] = '\0';
}

static const char *push_id(struct fixture *f, uint32_t id)
{
    struct gguf_string text = {0};
    f->state = text_stream_push(&f->stream, id, &text);
    take(f, text);
    return f->last;
}

static const char *push_byte(struct fixture *f, unsigned char byte)
{
    return push_id(f, 3u + byte);
}

static void push_bytes(struct fixture *f, const char *text)
{
    for (; *text != '\0'; text++) {
        push_byte(f, (unsigned char)*text);
    }
}

/* A token of several bytes that the vocabulary has. */
static const char *push_token(struct fixture *f, const char *text)
{
    const uint32_t id = token_table_find(&f->vocabulary.table, text);
    CHECK(id != MODEL_TOKEN_ABSENT);
    return push_id(f, id);
}

static const char *finish(struct fixture *f)
{
    struct gguf_string text = {0};
    f->state = text_stream_finish(&f->stream, &text);
    take(f, text);
    return f->last;
}

static void check_text(const char *got, const char *want)
{
    if (strcmp(got, want) != 0) {
        printf("  got  \"%s\"\n  want \"%s\"\n", got, want);
    }
    CHECK(strcmp(got, want) == 0);
}

static void test_text_comes_at_once(void)
{
    struct fixture f;
    fixture_open(&f, NULL, 0);
    check_text(push_token(&f, " hello"), " hello"); /* the leading space stays */
    check_text(push_token(&f, " world"), " world");
    CHECK_EQ(f.state, TEXT_STREAM_OPEN);
    check_text(finish(&f), "");
    CHECK_EQ(f.state, TEXT_STREAM_ENDED);
    fixture_close(&f);
}

static void test_half_characters_wait(void)
{
    struct fixture f;
    fixture_open(&f, NULL, 0);
    check_text(push_byte(&f, 0xf0), "");
    check_text(push_byte(&f, 0x9f), "");
    check_text(push_byte(&f, 0x99), "");
    check_text(push_byte(&f, 0x82), "\xf0\x9f\x99\x82");
    check_text(push_byte(&f, 0xc3), "");
    check_text(push_byte(&f, 0xa9), "\xc3\xa9");
    fixture_close(&f);
}

static void test_broken_characters_become_fffd(void)
{
    static const struct {
        const char *bytes;
        const char *want;
    } rows[] = {
        {"\xff", "\xef\xbf\xbd"},
        {"a\x80z", "a\xef\xbf\xbdz"},
        {"\xe2\x82z", "\xef\xbf\xbdz"}, /* one mark for what was begun */
        {"\xe2\xe2\x82\xac", "\xef\xbf\xbd\xe2\x82\xac"},
        {"\xf0\x9f\x99", "\xef\xbf\xbd"},                         /* cut off by the end */
        {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd"},                 /* a long form */
        {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* a surrogate */
        {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct fixture f;
        fixture_open(&f, NULL, 0);
        push_bytes(&f, rows[i].bytes);
        finish(&f);
        check_text(f.said, rows[i].want);
        fixture_close(&f);
    }
}

static void test_stop_across_tokens(void)
{
    static const char *const stops[] = {"lo wor"};
    struct fixture f;
    fixture_open(&f, stops, 1);
    check_text(push_token(&f, "hello"), "hel");
    check_text(push_token(&f, " world"), "");
    CHECK_EQ(f.state, TEXT_STREAM_STOPPED);
    check_text(push_token(&f, "hello"), ""); /* what is still in flight */
    CHECK_EQ(f.state, TEXT_STREAM_STOPPED);
    check_text(finish(&f), "");
    CHECK_EQ(f.state, TEXT_STREAM_STOPPED);
    check_text(f.said, "hel");
    fixture_close(&f);
}

static void test_held_text_is_released(void)
{
    static const char *const stops[] = {"xxy"};
    struct fixture f;
    fixture_open(&f, stops, 1);
    check_text(push_byte(&f, 'x'), "");
    check_text(push_byte(&f, 'x'), "");
    check_text(push_byte(&f, 'x'), "x"); /* the last two may still become "xxy" */
    check_text(push_byte(&f, 'z'), "xxz");
    check_text(push_byte(&f, 'x'), "");
    check_text(finish(&f), "x");
    CHECK_EQ(f.state, TEXT_STREAM_ENDED);
    check_text(f.said, "xxxzx");
    fixture_close(&f);
}

/* Of several stop strings the one that is complete first counts, in whatever tokens it comes. */
static void test_first_complete_stop_wins(void)
{
    static const char *const stops[] = {"hello!", "ell", "lo"};
    struct fixture f;
    fixture_open(&f, stops, 3);
    check_text(push_token(&f, "hello"), "h");
    CHECK_EQ(f.state, TEXT_STREAM_STOPPED);
    fixture_close(&f);
    fixture_open(&f, stops, 3);
    push_bytes(&f, "hello");
    check_text(f.said, "h");
    CHECK_EQ(f.state, TEXT_STREAM_STOPPED);
    fixture_close(&f);
}

static void test_stop_with_wide_characters(void)
{
    static const char *const stops[] = {"\xc3\xa9!"};
    struct fixture f;
    fixture_open(&f, stops, 1);
    push_bytes(&f, "a\xc3\xa9");
    check_text(f.said, "a");
    push_bytes(&f, "\xc3\xa8\xc3\xa9");
    check_text(f.said, "a\xc3\xa9\xc3\xa8");
    push_bytes(&f, "!");
    CHECK_EQ(f.state, TEXT_STREAM_STOPPED);
    check_text(f.said, "a\xc3\xa9\xc3\xa8");
    fixture_close(&f);
}

static void test_end_tokens_print_nothing(void)
{
    static const char *const stops[] = {"abc"};
    struct fixture f;
    fixture_open(&f, stops, 1);
    push_bytes(&f, "xab\xe2\x82");
    check_text(f.said, "x");
    check_text(push_id(&f, 2), "ab\xef\xbf\xbd"); /* what was held comes out */
    CHECK_EQ(f.state, TEXT_STREAM_ENDED);
    check_text(push_byte(&f, 'z'), "");
    check_text(finish(&f), "");
    CHECK_EQ(f.state, TEXT_STREAM_ENDED);
    fixture_close(&f);
}

static void test_control_tokens_show_when_asked(void)
{
    struct fixture f;
    struct gguf_string text = {0};
    fixture_open(&f, NULL, 0);
    check_text(push_id(&f, 1), "");
    CHECK_EQ(text_stream_init(&f.stream, f.vocabulary.tokenizer, NULL, 0, TOKENIZER_SHOW_SPECIAL),
             FL_OK);
    check_text(push_id(&f, 1), "<|im_start|>");
    check_text(push_id(&f, 1u << 31), ""); /* no such token */
    CHECK_EQ(text_stream_push(&f.stream, 2, &text), TEXT_STREAM_ENDED);
    CHECK_EQ(text.size, 0);
    fixture_close(&f);
}

/* A stop string that U+FFFD at the very end completes. */
static void test_stop_in_the_last_character(void)
{
    static const char *const stops[] = {"b\xef\xbf\xbd"};
    struct fixture f;
    fixture_open(&f, stops, 1);
    push_bytes(&f, "ab\xe2\x82");
    check_text(finish(&f), "");
    CHECK_EQ(f.state, TEXT_STREAM_STOPPED);
    check_text(f.said, "a");
    fixture_close(&f);
}

static void test_longest_token_of_broken_bytes(void)
{
    static char text[VOCABULARY_TEXT_SIZE_MAX / 2];
    static const char *const stops[] = {"\xef\xbf\xbd!"};
    struct vocabulary_fixture v;
    struct text_stream stream;
    struct gguf_string out = {0};
    const struct gguf_string stop = {.data = stops[0], .size = 4};
    memset(text, 0x80, sizeof(text)); /* each byte is two in the alphabet, three as U+FFFD */
    vocabulary_fixture_init(&v, TOKEN_TABLE_BPE);
    const uint32_t id = token_table_add(
        &v.table, (struct gguf_string){.data = text, .size = sizeof(text)}, MODEL_TOKEN_NORMAL, 0);
    CHECK_EQ(vocabulary_fixture_open(&v), FL_OK);
    CHECK_EQ(text_stream_init(&stream, v.tokenizer, &stop, 1, TOKENIZER_HIDE_SPECIAL), FL_OK);
    CHECK_EQ(text_stream_push(&stream, id, &out), TEXT_STREAM_OPEN);
    CHECK_EQ(out.size, 3 * sizeof(text) - 3); /* the last one may begin the stop string */
    CHECK_EQ(text_stream_push(&stream, id, &out), TEXT_STREAM_OPEN);
    CHECK_EQ(out.size, 3 * sizeof(text));
    vocabulary_fixture_close(&v);
}

static void test_bad_stops_are_refused(void)
{
    struct vocabulary_fixture v;
    struct text_stream stream;
    char long_stop[TEXT_STREAM_STOP_SIZE_MAX + 1];
    struct gguf_string stops[TEXT_STREAM_STOP_COUNT_MAX + 1];
    memset(long_stop, 'x', sizeof(long_stop));
    for (size_t i = 0; i <= TEXT_STREAM_STOP_COUNT_MAX; i++) {
        stops[i] = (struct gguf_string){.data = long_stop, .size = TEXT_STREAM_STOP_SIZE_MAX};
    }
    vocabulary_fixture_init(&v, TOKEN_TABLE_BPE);
    CHECK_EQ(vocabulary_fixture_open(&v), FL_OK);
    CHECK_EQ(text_stream_init(&stream, v.tokenizer, stops, TEXT_STREAM_STOP_COUNT_MAX,
                              TOKENIZER_HIDE_SPECIAL),
             FL_OK);
    CHECK_EQ(text_stream_init(&stream, v.tokenizer, stops, TEXT_STREAM_STOP_COUNT_MAX + 1,
                              TOKENIZER_HIDE_SPECIAL),
             FL_INVALID);
    CHECK(strstr(fl_last_error(), "9 are given, at most 8") != NULL);
    stops[1].size++;
    CHECK_EQ(text_stream_init(&stream, v.tokenizer, stops, 2, TOKENIZER_HIDE_SPECIAL), FL_INVALID);
    CHECK(strstr(fl_last_error(), "stop string 2 is 257 bytes long") != NULL);
    stops[1].size = 0;
    CHECK_EQ(text_stream_init(&stream, v.tokenizer, stops, 2, TOKENIZER_HIDE_SPECIAL), FL_INVALID);
    stops[1] = (struct gguf_string){.data = "\xff", .size = 1};
    CHECK_EQ(text_stream_init(&stream, v.tokenizer, stops, 2, TOKENIZER_HIDE_SPECIAL), FL_INVALID);
    CHECK(strstr(fl_last_error(), "not UTF-8") != NULL);
    vocabulary_fixture_close(&v);
}

static const struct test_case cases[] = {
    {"text stream: text comes with its token, leading space included", test_text_comes_at_once},
    {"text stream: half a character waits for the other half", test_half_characters_wait},
    {"text stream: bytes that cannot become a character are U+FFFD",
     test_broken_characters_become_fffd},
    {"text stream: a stop string may span tokens", test_stop_across_tokens},
    {"text stream: held text is released when it does not stop", test_held_text_is_released},
    {"text stream: the stop string that is complete first counts", test_first_complete_stop_wins},
    {"text stream: stop strings of wide characters", test_stop_with_wide_characters},
    {"text stream: end tokens print nothing and release what is held",
     test_end_tokens_print_nothing},
    {"text stream: control tokens show only when asked for", test_control_tokens_show_when_asked},
    {"text stream: a stop string in the very last character", test_stop_in_the_last_character},
    {"text stream: the longest token of broken bytes fits", test_longest_token_of_broken_bytes},
    {"text stream: too many, long, empty and broken stop strings are refused",
     test_bad_stops_are_refused},
};
TEST_MAIN(cases)
