#include "coordinator/tokenizer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/bpe.h"
#include "coordinator/spm.h"
#include "coordinator/token_list.h"
#include "proto/base/utf8.h"

enum { SPAN_KEPT_COUNT = 4096 };

/* First bytes of the special tokens of one size. */
struct special_size {
    uint32_t size;
    bool has_user_defined;
    uint64_t first_user_defined[4];
    uint64_t first[4];
};

/* A special token, or a run of text between them when id is TOKEN_NONE. */
struct span {
    uint32_t begin;
    uint32_t end;
    uint32_t id;
};

struct span_list {
    struct span *spans; /* [count] */
    size_t count;
    size_t capacity;
};

struct tokenizer {
    struct vocabulary vocabulary;
    struct bpe bpe; /* one of the two, by vocabulary.kind */
    struct spm spm;
    struct special_size *specials; /* [special_count], longest first */
    size_t special_count;
    struct span_list spans[2];
};

/* One call of tokenizer_encode_parts(). */
struct job {
    const char *text;
    size_t size;
    unsigned flags;
    const struct text_range *plain; /* [plain_count] */
    size_t plain_count;
    size_t plain_at; /* the first range that does not end before the place looked at */
};

static bool bit_is_set(const uint64_t bits[4], unsigned char byte)
{
    return (bits[byte / 64] >> byte % 64 & 1) != 0;
}

static void bit_set(uint64_t bits[4], unsigned char byte)
{
    bits[byte / 64] |= (uint64_t)1 << byte % 64;
}

static bool is_marked(const struct vocabulary *vocabulary, uint32_t id)
{
    return vocabulary->texts[id].size > 0 &&
           (vocabulary_is_special(vocabulary, id) || vocabulary->types[id] == TOKEN_USER_DEFINED);
}

static fl_status collect_specials(struct tokenizer *tokenizer)
{
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    struct special_size by_size[VOCABULARY_TEXT_SIZE_MAX + 1];
    size_t count = 0;
    memset(by_size, 0, sizeof(by_size));
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        if (!is_marked(vocabulary, id)) {
            continue;
        }
        const struct gguf_string text = vocabulary->texts[id];
        struct special_size *special = &by_size[text.size];
        count += special->size == 0;
        special->size = (uint32_t)text.size;
        bit_set(special->first, (unsigned char)text.data[0]);
        if (vocabulary->types[id] == TOKEN_USER_DEFINED) {
            special->has_user_defined = true;
            bit_set(special->first_user_defined, (unsigned char)text.data[0]);
        }
    }
    tokenizer->specials = malloc((count + 1) * sizeof(*tokenizer->specials));
    if (tokenizer->specials == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "tokenizer: no memory for special tokens");
    }
    for (size_t size = VOCABULARY_TEXT_SIZE_MAX; size > 0; size--) {
        if (by_size[size].size > 0) {
            tokenizer->specials[tokenizer->special_count++] = by_size[size];
        }
    }
    return FL_OK;
}

static fl_status tokenizer_read(const struct gguf *gguf, struct tokenizer *tokenizer)
{
    FL_TRY(vocabulary_open(gguf, &tokenizer->vocabulary));
    if (tokenizer->vocabulary.kind == VOCABULARY_BPE) {
        FL_TRY(bpe_open(gguf, &tokenizer->vocabulary, &tokenizer->bpe));
    } else {
        spm_open(&tokenizer->vocabulary, &tokenizer->spm);
    }
    return collect_specials(tokenizer);
}

fl_status tokenizer_open(const struct gguf *gguf, struct tokenizer **out)
{
    struct tokenizer *tokenizer = calloc(1, sizeof(*tokenizer));
    if (tokenizer == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "tokenizer: no memory");
    }
    const fl_status status = tokenizer_read(gguf, tokenizer);
    if (status != FL_OK) {
        tokenizer_close(tokenizer);
        return status;
    }
    *out = tokenizer;
    return FL_OK;
}

void tokenizer_close(struct tokenizer *tokenizer)
{
    if (tokenizer == NULL) {
        return;
    }
    bpe_close(&tokenizer->bpe);
    spm_close(&tokenizer->spm);
    vocabulary_close(&tokenizer->vocabulary);
    free(tokenizer->specials);
    free(tokenizer->spans[0].spans);
    free(tokenizer->spans[1].spans);
    free(tokenizer);
}

static fl_status span_push(struct span_list *list, size_t begin, size_t end, uint32_t id)
{
    if (begin == end) {
        return FL_OK;
    }
    if (list->count == list->capacity) {
        const size_t capacity = list->capacity < 64 ? 64 : list->capacity * 2;
        struct span *spans = reallocarray(list->spans, capacity, sizeof(*spans));
        if (spans == NULL) {
            return FL_FAIL(FL_NO_MEMORY, "tokenizer: no memory for %zu special tokens", capacity);
        }
        list->spans = spans;
        list->capacity = capacity;
    }
    list->spans[list->count++] =
        (struct span){.begin = (uint32_t)begin, .end = (uint32_t)end, .id = id};
    return FL_OK;
}

static bool is_c_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Phi 3 swallows white space after its special tokens, but not after these. */
static bool strips_after(const struct vocabulary *vocabulary, uint32_t id)
{
    static const char *const exceptions[] = {"<unk>", "<s>", "<|endoftext|>"};
    const struct gguf_string text = vocabulary->texts[id];
    for (size_t i = 0; i < sizeof(exceptions) / sizeof(exceptions[0]); i++) {
        if (strlen(exceptions[i]) == text.size &&
            memcmp(exceptions[i], text.data, text.size) == 0) {
            return false;
        }
    }
    return vocabulary->strip_after_special;
}

/* The special token of this size at this place, if it may count here. */
static uint32_t special_at(const struct vocabulary *vocabulary, struct job *job, size_t at,
                           uint32_t size)
{
    const uint32_t id = vocabulary_find(vocabulary, job->text + at, size);
    if (id == TOKEN_NONE || !is_marked(vocabulary, id)) {
        return TOKEN_NONE;
    }
    if (vocabulary->types[id] == TOKEN_USER_DEFINED) {
        return id;
    }
    if ((job->flags & TOKENIZER_PARSE_SPECIAL) == 0) {
        return TOKEN_NONE;
    }
    while (job->plain_at < job->plain_count && job->plain[job->plain_at].end <= at) {
        job->plain_at++;
    }
    const bool typed =
        job->plain_at < job->plain_count && job->plain[job->plain_at].begin < at + size;
    return typed ? TOKEN_NONE : id;
}

/* Cut one run of text at the special tokens of one size, from the left. */
static fl_status cut_span(const struct tokenizer *tokenizer, const struct special_size *special,
                          struct job *job, struct span span, struct span_list *out)
{
    const uint64_t *first =
        (job->flags & TOKENIZER_PARSE_SPECIAL) != 0 ? special->first : special->first_user_defined;
    size_t begin = span.begin;
    for (size_t at = span.begin; at + special->size <= span.end;) {
        const uint32_t id = bit_is_set(first, (unsigned char)job->text[at])
                                ? special_at(&tokenizer->vocabulary, job, at, special->size)
                                : TOKEN_NONE;
        if (id == TOKEN_NONE) {
            at++;
            continue;
        }
        FL_TRY(span_push(out, begin, at, TOKEN_NONE));
        FL_TRY(span_push(out, at, at + special->size, id));
        at += special->size;
        while (at < span.end && is_c_space(job->text[at]) &&
               strips_after(&tokenizer->vocabulary, id)) {
            at++;
        }
        begin = at;
    }
    return span_push(out, begin, span.end, TOKEN_NONE);
}

/* Longest special tokens first, each over the whole text, as the models' own tokenizers do. */
static fl_status cut(struct tokenizer *tokenizer, struct job *job, const struct span_list **out)
{
    struct span_list *from = &tokenizer->spans[0];
    struct span_list *to = &tokenizer->spans[1];
    from->count = 0;
    FL_TRY(span_push(from, 0, job->size, TOKEN_NONE));
    for (size_t i = 0; i < tokenizer->special_count; i++) {
        const struct special_size *special = &tokenizer->specials[i];
        if ((job->flags & TOKENIZER_PARSE_SPECIAL) == 0 && !special->has_user_defined) {
            continue;
        }
        to->count = 0;
        job->plain_at = 0;
        for (size_t span = 0; span < from->count; span++) {
            if (from->spans[span].id == TOKEN_NONE) {
                FL_TRY(cut_span(tokenizer, special, job, from->spans[span], to));
            } else {
                FL_TRY(span_push(to, from->spans[span].begin, from->spans[span].end,
                                 from->spans[span].id));
            }
        }
        struct span_list *swap = from;
        from = to;
        to = swap;
    }
    *out = from;
    return FL_OK;
}

static fl_status encode_spans(struct tokenizer *tokenizer, const struct job *job,
                              const struct span_list *list, struct token_list *out)
{
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    bool after_special = true; /* SPM puts its space at the start and after special tokens */
    for (size_t i = 0; i < list->count; i++) {
        const struct span span = list->spans[i];
        const char *text = job->text + span.begin;
        const size_t size = span.end - span.begin;
        if (span.id != TOKEN_NONE) {
            token_list_push(out, span.id);
        } else if (vocabulary->kind == VOCABULARY_BPE) {
            FL_TRY(bpe_encode(&tokenizer->bpe, text, size, out));
        } else {
            FL_TRY(spm_encode(&tokenizer->spm, text, size,
                              vocabulary->add_space_prefix && after_special, out));
        }
        after_special = span.id != TOKEN_NONE;
    }
    return FL_OK;
}

static void trim(struct tokenizer *tokenizer)
{
    pair_merger_trim(&tokenizer->bpe.merger);
    spm_trim(&tokenizer->spm);
    for (size_t i = 0; i < 2; i++) {
        if (tokenizer->spans[i].capacity > SPAN_KEPT_COUNT) {
            free(tokenizer->spans[i].spans);
            tokenizer->spans[i] = (struct span_list){0};
        }
    }
}

static fl_status encode(struct tokenizer *tokenizer, struct job *job, struct token_list *out)
{
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    const bool add = (job->flags & TOKENIZER_ADD_SPECIAL) != 0;
    const struct span_list *spans = NULL;
    if (add && vocabulary->add_bos && (job->flags & TOKENIZER_NO_BOS) == 0) {
        token_list_push(out, vocabulary->bos);
    }
    FL_TRY(cut(tokenizer, job, &spans));
    FL_TRY(encode_spans(tokenizer, job, spans, out));
    if (add && vocabulary->add_eos && (job->flags & TOKENIZER_NO_EOS) == 0) {
        token_list_push(out, vocabulary->eos);
    }
    return FL_OK;
}

fl_status tokenizer_encode_parts(struct tokenizer *tokenizer, const char *text, size_t size,
                                 unsigned flags, const struct text_range *plain, size_t plain_count,
                                 uint32_t *ids, size_t max, size_t *out_count)
{
    struct job job = {
        .text = text, .size = size, .flags = flags, .plain = plain, .plain_count = plain_count};
    struct token_list list = {.ids = ids, .max = max};
    *out_count = 0;
    if (size > TOKENIZER_TEXT_SIZE_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "tokenizer: the text is %zu bytes long, at most %d are read",
                       size, (int)TOKENIZER_TEXT_SIZE_MAX);
    }
    const size_t valid_size = fl_utf8_valid_size(text, size);
    if (valid_size != size) {
        return FL_FAIL(FL_INVALID,
                       "tokenizer: the text is not UTF-8: byte %zu (0x%02x) does not "
                       "belong there",
                       valid_size, (unsigned)(unsigned char)text[valid_size]);
    }
    const fl_status status = encode(tokenizer, &job, &list);
    trim(tokenizer);
    FL_TRY(status);
    *out_count = list.count;
    if (list.count > max) {
        return FL_FAIL(FL_TOO_LARGE,
                       "tokenizer: the text is %zu tokens long, there is room for "
                       "%zu",
                       list.count, max);
    }
    return FL_OK;
}

fl_status tokenizer_encode(struct tokenizer *tokenizer, const char *text, size_t size,
                           unsigned flags, uint32_t *ids, size_t max, size_t *out_count)
{
    return tokenizer_encode_parts(tokenizer, text, size, flags, NULL, 0, ids, max, out_count);
}

struct gguf_string tokenizer_piece(const struct tokenizer *tokenizer, uint32_t id,
                                   enum tokenizer_special show)
{
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    if (id >= vocabulary->count ||
        (show == TOKENIZER_HIDE_SPECIAL && vocabulary_is_special(vocabulary, id))) {
        return (struct gguf_string){.data = "", .size = 0};
    }
    const uint32_t begin = vocabulary->piece_offsets[id];
    return (struct gguf_string){.data = vocabulary->pieces + begin,
                                .size = vocabulary->piece_offsets[id + 1] - begin};
}

bool tokenizer_is_end(const struct tokenizer *tokenizer, uint32_t id)
{
    return vocabulary_is_end(&tokenizer->vocabulary, id);
}

const struct vocabulary *tokenizer_vocabulary(const struct tokenizer *tokenizer)
{
    return &tokenizer->vocabulary;
}

uint64_t tokenizer_lookup_count(const struct tokenizer *tokenizer)
{
    return tokenizer->bpe.merger.lookup_count + tokenizer->spm.merger.lookup_count;
}
