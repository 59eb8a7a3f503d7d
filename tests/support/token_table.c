#include "tests/support/token_table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"

static const char space_mark[] = "\xe2\x96\x81"; /* U+2581, SentencePiece's space */

/* Pairs of plain text, most frequent first; the product of each is a token. */
static const char *const merges[][2] = {
    {" ", "t"},     {" ", "a"},       {"h", "e"},    {"i", "n"},     {"r", "e"}, {"o", "n"},
    {" t", "he"},   {"e", "r"},       {" ", "s"},    {"a", "t"},     {"n", "d"}, {" a", "nd"},
    {"o", "r"},     {"e", "n"},       {" ", "w"},    {"l", "l"},     {"i", "s"}, {" ", "o"},
    {"o", "u"},     {"ll", "o"},      {"he", "llo"}, {" ", "hello"}, {"l", "d"}, {" w", "or"},
    {" wor", "ld"}, {"in", "g"},      {"H", "e"},    {"He", "llo"},  {"1", "2"}, {"c", "at"},
    {" ", "cat"},   {"\xc3", "\xa9"}, {"\n", "\n"},
};

enum { MERGE_COUNT = sizeof(merges) / sizeof(merges[0]) };

static char *allocate(size_t size)
{
    char *memory = malloc(size != 0 ? size : 1);
    FL_ASSERT(memory != NULL);
    return memory;
}

static void put_code_point(uint32_t code, char *out, size_t *size)
{
    if (code < 0x80) {
        out[(*size)++] = (char)code;
    } else {
        out[(*size)++] = (char)(0xc0 | code >> 6);
        out[(*size)++] = (char)(0x80 | (code & 0x3f));
    }
}

/* GPT-2's letter for a byte: itself when printable in Latin-1, else the next code point from 256. */
static uint32_t byte_letter(unsigned char byte)
{
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; b++) {
        const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        if (b == byte) {
            return printable ? b : next;
        }
        next += printable ? 0 : 1;
    }
    return next;
}

/* Plain bytes as the vocabulary stores them. */
static struct gguf_string stored_text(enum token_table_kind kind, struct gguf_string plain)
{
    char *text = allocate(3 * plain.size);
    size_t size = 0;
    for (size_t i = 0; i < plain.size; i++) {
        if (kind == TOKEN_TABLE_BPE) {
            put_code_point(byte_letter((unsigned char)plain.data[i]), text, &size);
        } else if (plain.data[i] == ' ') {
            memcpy(text + size, space_mark, 3);
            size += 3;
        } else {
            text[size++] = plain.data[i];
        }
    }
    return (struct gguf_string){.data = text, .size = size};
}

static uint32_t append(struct token_table *table, struct gguf_string text, uint32_t type,
                       float score)
{
    if (table->count == table->capacity) {
        table->capacity = 2 * table->capacity + 512;
        table->texts = realloc(table->texts, table->capacity * sizeof(*table->texts));
        table->types = realloc(table->types, table->capacity * sizeof(*table->types));
        table->scores = realloc(table->scores, table->capacity * sizeof(*table->scores));
        FL_ASSERT(table->texts != NULL && table->types != NULL && table->scores != NULL);
    }
    table->texts[table->count] = text;
    table->types[table->count] = type;
    table->scores[table->count] = score;
    return table->count++;
}

uint32_t token_table_add(struct token_table *table, struct gguf_string text,
                         enum token_table_type type, float score)
{
    if (type == MODEL_TOKEN_NORMAL) {
        return append(table, stored_text(table->kind, text), type, score);
    }
    char *copy = allocate(text.size);
    memcpy(copy, text.data, text.size);
    return append(table, (struct gguf_string){.data = copy, .size = text.size}, type, score);
}

static uint32_t add_text(struct token_table *table, const char *text, enum token_table_type type,
                         float score)
{
    return token_table_add(table, (struct gguf_string){.data = text, .size = strlen(text)}, type,
                           score);
}

static void add_merges(struct token_table *table)
{
    for (int i = 0; i < MERGE_COUNT; i++) {
        char text[32];
        snprintf(text, sizeof(text), "%s%s", merges[i][0], merges[i][1]);
        /* Half a character is a byte token's business in SentencePiece. */
        if (table->kind == TOKEN_TABLE_BPE || (unsigned char)merges[i][0][0] < 0x80) {
            (void)add_text(table, text, MODEL_TOKEN_NORMAL, -1.0f - (float)i);
        }
    }
}

static void open_bpe(struct token_table *table)
{
    table->bos = add_text(table, "<|endoftext|>", MODEL_TOKEN_CONTROL, 0);
    (void)add_text(table, "<|im_start|>", MODEL_TOKEN_CONTROL, 0);
    table->eos = add_text(table, "<|im_end|>", MODEL_TOKEN_CONTROL, 0);
    for (int byte = 0; byte < 256; byte++) {
        const char text = (char)byte;
        (void)token_table_add(table, (struct gguf_string){.data = &text, .size = 1},
                              MODEL_TOKEN_NORMAL, 0);
    }
    add_merges(table);
    table->merges = calloc(MERGE_COUNT, sizeof(*table->merges));
    FL_ASSERT(table->merges != NULL);
    for (int i = 0; i < MERGE_COUNT; i++) {
        struct gguf_string part[2];
        for (int side = 0; side < 2; side++) {
            const char *plain = merges[i][side];
            part[side] = stored_text(table->kind,
                                     (struct gguf_string){.data = plain, .size = strlen(plain)});
        }
        const size_t size = part[0].size + 1 + part[1].size;
        char *text = allocate(size);
        memcpy(text, part[0].data, part[0].size);
        text[part[0].size] = ' ';
        memcpy(text + part[0].size + 1, part[1].data, part[1].size);
        table->merges[table->merge_count++] = (struct gguf_string){.data = text, .size = size};
        for (int side = 0; side < 2; side++) {
            free((void *)(uintptr_t)part[side].data);
        }
    }
}

static void open_spm(struct token_table *table, bool gemma)
{
    if (gemma) {
        table->pad = add_text(table, "<pad>", MODEL_TOKEN_CONTROL, 0);
        table->eos = add_text(table, "<eos>", MODEL_TOKEN_CONTROL, 0);
        table->bos = add_text(table, "<bos>", MODEL_TOKEN_CONTROL, 0);
        table->unk = add_text(table, "<unk>", MODEL_TOKEN_UNKNOWN, 0);
        (void)add_text(table, "<start_of_turn>", MODEL_TOKEN_CONTROL, 0);
        table->eot = add_text(table, "<end_of_turn>", MODEL_TOKEN_CONTROL, 0);
    } else {
        table->unk = add_text(table, "<unk>", MODEL_TOKEN_UNKNOWN, 0);
        table->bos = add_text(table, "<s>", MODEL_TOKEN_CONTROL, 0);
        table->eos = add_text(table, "</s>", MODEL_TOKEN_CONTROL, 0);
    }
    for (int byte = 0; byte < 256; byte++) {
        char text[8];
        snprintf(text, sizeof(text), "<0x%02X>", (unsigned)byte);
        (void)add_text(table, text, MODEL_TOKEN_BYTE, 0);
    }
    add_merges(table);
    for (int letter = ' '; letter < 127; letter++) {
        const char text = (char)letter;
        (void)token_table_add(table, (struct gguf_string){.data = &text, .size = 1},
                              MODEL_TOKEN_NORMAL, -1000.0f - (float)letter);
    }
    (void)add_text(table, "\xc3\xa9", MODEL_TOKEN_NORMAL, -2000.0f);
}

void token_table_open(struct token_table *table, enum token_table_kind kind, bool gemma, bool empty)
{
    *table = (struct token_table){
        .kind = kind,
        .bos = MODEL_TOKEN_ABSENT,
        .eos = MODEL_TOKEN_ABSENT,
        .eot = MODEL_TOKEN_ABSENT,
        .unk = MODEL_TOKEN_ABSENT,
        .pad = MODEL_TOKEN_ABSENT,
    };
    if (!empty && kind == TOKEN_TABLE_BPE) {
        open_bpe(table);
    } else if (!empty && kind == TOKEN_TABLE_SPM) {
        open_spm(table, gemma);
    }
}

void token_table_close(struct token_table *table)
{
    for (uint32_t i = 0; i < table->count; i++) {
        free((void *)(uintptr_t)table->texts[i].data);
    }
    for (uint32_t i = 0; i < table->merge_count; i++) {
        free((void *)(uintptr_t)table->merges[i].data);
    }
    free(table->texts);
    free(table->types);
    free(table->scores);
    free(table->merges);
    *table = (struct token_table){0};
}

void token_table_fill(struct token_table *table, uint32_t count)
{
    while (table->count < count) {
        char text[24];
        snprintf(text, sizeof(text), " w%" PRIu32, table->count);
        (void)add_text(table, text, MODEL_TOKEN_NORMAL, -10000.0f - (float)table->count);
    }
}

uint32_t token_table_find(const struct token_table *table, const char *text)
{
    const struct gguf_string plain = {.data = text, .size = strlen(text)};
    const struct gguf_string stored = stored_text(table->kind, plain);
    uint32_t found = MODEL_TOKEN_ABSENT;
    for (uint32_t id = 0; id < table->count && found == MODEL_TOKEN_ABSENT; id++) {
        const struct gguf_string *want = table->types[id] == MODEL_TOKEN_NORMAL ? &stored : &plain;
        if (table->texts[id].size == want->size &&
            memcmp(table->texts[id].data, want->data, want->size) == 0) {
            found = id;
        }
    }
    free((void *)(uintptr_t)stored.data);
    return found;
}
