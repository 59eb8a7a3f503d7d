/* Any text with any flags over both small vocabularies: what is encoded spells the text again. */
#include "coordinator/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "proto/base/log.h"
#include "proto/base/utf8.h"
#include "tests/support/vocabulary_fixture.h"

static const char *const pres[] = {"default", "gpt-2", "llama-bpe", "qwen2", "smollm"};

enum { PRES = sizeof(pres) / sizeof(pres[0]) };

/* The byte-level vocabulary with each pre-tokenizer, and the SentencePiece one. */
static struct vocabulary_fixture fixtures[PRES + 1];

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fl_log_init("", FL_LOG_ERROR);
    for (size_t i = 0; i <= PRES; i++) {
        struct vocabulary_fixture *f = &fixtures[i];
        vocabulary_fixture_init(f, i < PRES ? TOKEN_TABLE_BPE : TOKEN_TABLE_SPM);
        f->pre = pres[i % PRES];
        f->add_bos = FIXTURE_FALSE;
        f->add_space_prefix = FIXTURE_FALSE;
        vocabulary_fixture_add(f, "<b>", MODEL_TOKEN_USER_DEFINED, 0);
        vocabulary_fixture_add(f, "\t\t", MODEL_TOKEN_USER_DEFINED, 0);
        vocabulary_fixture_add(f, "b>\t", MODEL_TOKEN_USER_DEFINED, 0);
        FL_ASSERT(vocabulary_fixture_open(f) == FL_OK);
    }
    return 0;
}

/* The bytes of the tokens are those of the text; SentencePiece takes U+2581 for a space. */
static void check_spelling(const struct tokenizer *tokenizer, const char *text, size_t size,
                           const uint32_t *ids, size_t count)
{
    const bool spm = tokenizer_vocabulary(tokenizer)->kind == VOCABULARY_SPM;
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        const struct gguf_string piece = tokenizer_piece(tokenizer, ids[i], TOKENIZER_SHOW_SPECIAL);
        for (size_t byte = 0; byte < piece.size; byte++) {
            if (spm && piece.data[byte] == ' ' && size - at >= 3 &&
                memcmp(text + at, "\xe2\x96\x81", 3) == 0) {
                at += 3;
                continue;
            }
            FL_ASSERT(at < size && piece.data[byte] == text[at]);
            at++;
        }
    }
    FL_ASSERT(at == size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3) {
        return 0;
    }
    struct tokenizer *tokenizer = fixtures[data[0] % (PRES + 1)].tokenizer;
    const unsigned flags = data[1] & 0xf;
    const char *text = (const char *)data + 3;
    const size_t text_size = size - 3;
    const struct text_range plain = {.begin = data[2], .end = (size_t)data[2] + 8};
    size_t count = 0;
    uint32_t *ids = malloc((text_size + 1) * sizeof(*ids));
    FL_ASSERT(ids != NULL);
    const fl_status status = tokenizer_encode_parts(tokenizer, text, text_size, flags, &plain, 1,
                                                    ids, text_size + 1, &count);
    if (fl_utf8_valid_size(text, text_size) != text_size) {
        FL_ASSERT(status == FL_INVALID);
    } else {
        FL_ASSERT(status == FL_OK);
        check_spelling(tokenizer, text, text_size, ids, count);
    }
    free(ids);
    return 0;
}
