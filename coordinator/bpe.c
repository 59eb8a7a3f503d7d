#include "coordinator/bpe.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static uint32_t pair_slot(uint64_t pair, uint32_t mask)
{
    pair *= 0x9e3779b97f4a7c15;
    return (uint32_t)(pair >> 32 ^ pair >> 20) & mask;
}

static uint64_t pair_of(uint32_t left, uint32_t right)
{
    return ((uint64_t)left << 32 | right) + 1; /* ids stay far below 2^32 - 1 */
}

static bool merge_find(const void *ctx, const struct pair_symbol *left,
                       const struct pair_symbol *right, uint32_t *out_rank, uint32_t *out_id)
{
    const struct bpe *bpe = ctx;
    if (left->id == TOKEN_NONE || right->id == TOKEN_NONE) {
        return false;
    }
    const uint64_t pair = pair_of(left->id, right->id);
    for (uint32_t at = pair_slot(pair, bpe->merge_mask);; at = (at + 1) & bpe->merge_mask) {
        const struct bpe_merge *merge = &bpe->merges[at];
        if (merge->pair == pair) {
            *out_rank = merge->rank;
            *out_id = merge->id;
            return true;
        }
        if (merge->pair == 0) {
            return false;
        }
    }
}

/* "left right": resolve both and what they become. */
static fl_status merge_add(struct bpe *bpe, struct gguf_string text, uint32_t rank)
{
    const struct vocabulary *vocabulary = bpe->vocabulary;
    char joined[2 * VOCABULARY_TEXT_SIZE_MAX];
    const char *space = text.size < 3 ? NULL : memchr(text.data + 1, ' ', text.size - 1);
    if (space == NULL || text.size > sizeof(joined)) {
        return FL_FAIL(FL_MALFORMED,
                       "bpe: merge %" PRIu32 " is not two tokens with a space "
                       "between",
                       rank);
    }
    const size_t left_size = (size_t)(space - text.data);
    const size_t right_size = text.size - left_size - 1;
    memcpy(joined, text.data, left_size);
    memcpy(joined + left_size, space + 1, right_size);
    const uint32_t left = vocabulary_find(vocabulary, text.data, left_size);
    const uint32_t right = vocabulary_find(vocabulary, space + 1, right_size);
    const uint32_t both = vocabulary_find(vocabulary, joined, left_size + right_size);
    if (left == TOKEN_NONE || right == TOKEN_NONE || both == TOKEN_NONE) {
        return FL_FAIL(FL_MALFORMED,
                       "bpe: merge %" PRIu32 " names a token that the vocabulary "
                       "does not have",
                       rank);
    }
    const uint64_t pair = pair_of(left, right);
    uint32_t at = pair_slot(pair, bpe->merge_mask);
    while (bpe->merges[at].pair != 0) {
        if (bpe->merges[at].pair == pair) {
            return FL_OK; /* said twice: the first rank counts */
        }
        at = (at + 1) & bpe->merge_mask;
    }
    bpe->merges[at] = (struct bpe_merge){.pair = pair, .rank = rank, .id = both};
    return FL_OK;
}

static fl_status read_merges(const struct gguf *gguf, struct bpe *bpe)
{
    static const char key[] = "tokenizer.ggml.merges";
    enum gguf_type type = GGUF_STRING;
    uint32_t count = 0;
    if (!gguf_has(gguf, key)) {
        return FL_FAIL(FL_MALFORMED, "bpe: a \"gpt2\" tokenizer needs %s, and the file has none",
                       key);
    }
    FL_TRY(gguf_array_count(gguf, key, &type, &count));
    if (type != GGUF_STRING) {
        return FL_FAIL(FL_MALFORMED, "bpe: %s is not a list of strings", key);
    }
    if (count > BPE_MERGE_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "bpe: %" PRIu32 " merges, at most %d are read", count,
                       (int)BPE_MERGE_COUNT_MAX);
    }
    uint32_t slot_count = 16;
    while (slot_count < count + count / 2) {
        slot_count *= 2;
    }
    bpe->merges = calloc(slot_count, sizeof(*bpe->merges));
    bpe->merge_mask = slot_count - 1;
    struct gguf_string *texts = malloc((count + 1) * sizeof(*texts));
    if (bpe->merges == NULL || texts == NULL) {
        free(texts);
        return FL_FAIL(FL_NO_MEMORY, "bpe: no memory for %" PRIu32 " merges", count);
    }
    fl_status status = gguf_strings(gguf, key, texts, count);
    for (uint32_t rank = 0; status == FL_OK && rank < count; rank++) {
        status = merge_add(bpe, texts[rank], rank);
    }
    free(texts);
    return status;
}

static fl_status bpe_read(const struct gguf *gguf, struct bpe *bpe)
{
    struct gguf_string pre = {0};
    if (gguf_has(gguf, "tokenizer.ggml.pre")) {
        FL_TRY(gguf_get_string(gguf, "tokenizer.ggml.pre", &pre));
    }
    FL_TRY(pretokenizer_open(pre, &bpe->pretokenizer));
    bpe->whole_words = pre.size == 9 && memcmp(pre.data, "llama-bpe", 9) == 0;
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[2];
        const size_t size = vocabulary_byte_text((unsigned char)byte, text);
        bpe->byte_ids[byte] = vocabulary_find(bpe->vocabulary, text, size);
    }
    return read_merges(gguf, bpe);
}

fl_status bpe_open(const struct gguf *gguf, const struct vocabulary *vocabulary, struct bpe *out)
{
    struct bpe bpe = {.vocabulary = vocabulary};
    const fl_status status = bpe_read(gguf, &bpe);
    if (status != FL_OK) {
        bpe_close(&bpe);
        return status;
    }
    *out = bpe;
    return FL_OK;
}

void bpe_close(struct bpe *bpe)
{
    pretokenizer_close(bpe->pretokenizer);
    pair_merger_close(&bpe->merger);
    free(bpe->merges);
    *bpe = (struct bpe){0};
}

/* The token that is this whole word, or TOKEN_NONE. */
static uint32_t whole_word(const struct bpe *bpe, struct gguf_string word)
{
    char text[VOCABULARY_TEXT_SIZE_MAX];
    size_t size = 0;
    for (size_t i = 0; i < word.size; i++) {
        if (size + 2 > sizeof(text)) {
            return TOKEN_NONE;
        }
        size += vocabulary_byte_text((unsigned char)word.data[i], text + size);
    }
    return vocabulary_find(bpe->vocabulary, text, size);
}

static fl_status encode_word(struct bpe *bpe, struct gguf_string word, struct token_list *out)
{
    struct pair_merger *merger = &bpe->merger;
    if (bpe->whole_words) {
        const uint32_t id = whole_word(bpe, word);
        if (id != TOKEN_NONE) {
            token_list_push(out, id);
            return FL_OK;
        }
    }
    pair_merger_reset(merger);
    for (size_t i = 0; i < word.size; i++) {
        FL_TRY(pair_merger_add(merger, (uint32_t)i, 1, bpe->byte_ids[(unsigned char)word.data[i]]));
    }
    FL_TRY(pair_merger_run(merger, merge_find, bpe));
    for (size_t i = 0; i < merger->count; i++) {
        if (merger->symbols[i].size > 0 && merger->symbols[i].id != TOKEN_NONE) {
            token_list_push(out, merger->symbols[i].id);
        }
    }
    return FL_OK;
}

fl_status bpe_encode(struct bpe *bpe, const char *text, size_t size, struct token_list *out)
{
    struct pretokenizer_cursor cursor;
    struct gguf_string word = {0};
    pretokenizer_start(&cursor, text, size);
    for (;;) {
        const fl_status status = pretokenizer_next(bpe->pretokenizer, &cursor, &word);
        if (status == FL_END) {
            return FL_OK;
        }
        FL_TRY(status);
        FL_TRY(encode_word(bpe, word, out));
    }
}
