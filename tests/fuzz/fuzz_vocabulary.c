/* A tokenizer whose metadata is anything at all opens or is refused, and encodes when it opened. */
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer.h"
#include "proto/base/log.h"
#include "tests/support/gguf_buffer.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fl_log_init("", FL_LOG_ERROR);
    return 0;
}

struct input {
    const uint8_t *data;
    size_t size;
};

static uint8_t take(struct input *input)
{
    if (input->size == 0) {
        return 0;
    }
    input->size--;
    return *input->data++;
}

/* Up to 40 short strings from a small alphabet, so that merges now and then fit. */
static void put_strings(struct gguf_buffer *buffer, struct input *input, const char *key)
{
    static char bytes[40][4];
    struct gguf_string strings[40];
    const uint32_t count = take(input) % 41;
    for (uint32_t i = 0; i < count; i++) {
        strings[i] = (struct gguf_string){.data = bytes[i], .size = take(input) % 5};
        for (size_t k = 0; k < strings[i].size; k++) {
            const uint8_t byte = take(input);
            bytes[i][k] = (char)(byte < 192 ? "ab <"[byte % 4] : byte);
        }
    }
    gguf_put_key_strings(buffer, key, strings, count);
}

static void put_numbers(struct gguf_buffer *buffer, struct input *input, const char *key,
                        bool floats)
{
    uint32_t values[40];
    float scores[40];
    const uint32_t count = take(input) % 41;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t byte = take(input);
        values[i] = byte % 8;
        scores[i] = (float)byte / 3.0F;
    }
    if (floats) {
        gguf_put_key_floats(buffer, key, scores, count);
    } else {
        gguf_put_key_uints(buffer, key, GGUF_INT32, values, count);
    }
}

static void put_file(struct gguf_buffer *buffer, struct input *input)
{
    static const char *const id_keys[] = {"tokenizer.ggml.bos_token_id",
                                          "tokenizer.ggml.eos_token_id",
                                          "tokenizer.ggml.unknown_token_id"};
    const uint8_t parts = take(input);
    gguf_put_header(buffer, 3);
    gguf_put_key_text(buffer, "tokenizer.ggml.model", (parts & 1) != 0 ? "gpt2" : "llama");
    put_strings(buffer, input, "tokenizer.ggml.tokens");
    if ((parts & 2) != 0) {
        put_strings(buffer, input, "tokenizer.ggml.merges");
    }
    if ((parts & 4) != 0) {
        put_numbers(buffer, input, "tokenizer.ggml.token_type", false);
    }
    if ((parts & 8) != 0) {
        put_numbers(buffer, input, "tokenizer.ggml.scores", true);
    }
    if ((parts & 16) != 0) {
        put_numbers(buffer, input, "tokenizer.ggml.eos_token_ids", false);
    }
    for (size_t i = 0; (parts & 32) != 0 && i < 3; i++) {
        gguf_put_key_uint(buffer, id_keys[i], GGUF_UINT32, take(input));
    }
    gguf_put_padding(buffer, 32);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] = "ab a <b \xc3\xa9";
    struct input input = {.data = data, .size = size};
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    struct tokenizer *tokenizer = NULL;
    put_file(&buffer, &input);
    if (gguf_parse(buffer.data, buffer.size, buffer.size, &gguf) == FL_OK &&
        tokenizer_open(gguf, &tokenizer) == FL_OK) {
        uint32_t ids[64];
        size_t count = 0;
        const fl_status status =
            tokenizer_encode(tokenizer, text, sizeof(text) - 1,
                             TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, ids, 64, &count);
        FL_ASSERT(status == FL_OK && count <= 64);
        for (size_t i = 0; i < count; i++) {
            FL_ASSERT(ids[i] < tokenizer_vocabulary(tokenizer)->count);
        }
    }
    tokenizer_close(tokenizer);
    gguf_close(gguf);
    gguf_buffer_free(&buffer);
    return 0;
}
