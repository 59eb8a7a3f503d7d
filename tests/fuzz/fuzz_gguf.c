/* GGUF header from foreign bytes, every getter on every key, and the model it may describe.
 *
 * An input that begins with an even byte is a file as it is; with an odd one it is a list of changes
 * (place, value) to the header of a good model, which reaches what lies behind the magic. */
#include "pipeline/gguf.h"

#include <stdlib.h>
#include <string.h>

#include "pipeline/model.h"
#include "proto/base/log.h"
#include "tests/support/model_writer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_arrays(const struct gguf *gguf, const char *key)
{
    enum gguf_type type;
    uint32_t count;
    if (gguf_array_count(gguf, key, &type, &count) != FL_OK) {
        return;
    }
    FL_ASSERT(gguf_is_array(gguf, key) && count <= GGUF_ARRAY_COUNT_MAX);
    void *out = malloc((size_t)count * sizeof(struct gguf_string) + 1);
    FL_ASSERT(out != NULL);
    const fl_status strings = gguf_strings(gguf, key, out, count);
    FL_ASSERT((strings == FL_OK) == (type == GGUF_STRING));
    uint64_t bytes = 0;
    for (uint32_t i = 0; strings == FL_OK && i < count; i++) {
        const struct gguf_string *string = (struct gguf_string *)out + i;
        FL_ASSERT(string->size <= GGUF_STRING_SIZE_MAX);
        bytes += string->size != 0 ? (unsigned char)string->data[string->size - 1] : 0;
    }
    FL_ASSERT(bytes < UINT64_MAX);
    FL_ASSERT(gguf_floats(gguf, key, out, count) == FL_OK || type != GGUF_FLOAT32 || count != 0);
    FL_ASSERT(gguf_uints(gguf, key, UINT32_MAX, out, count) == FL_OK || type != GGUF_UINT32);
    free(out);
}

static void read_key(const struct gguf *gguf, const char *key)
{
    uint64_t number;
    float real;
    bool flag;
    struct gguf_string string;
    if (gguf_get_uint(gguf, key, 1000, &number) == FL_OK) {
        FL_ASSERT(number <= 1000);
    }
    (void)!gguf_get_float(gguf, key, &real);
    (void)!gguf_get_bool(gguf, key, &flag);
    if (gguf_get_string(gguf, key, &string) == FL_OK && string.size != 0) {
        FL_ASSERT(string.data[string.size - 1] >= -128);
    }
    read_arrays(gguf, key);
}

static void check_tensors(const struct gguf *gguf)
{
    for (uint32_t i = 0; i < gguf_tensor_count(gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor_at(gguf, i);
        FL_ASSERT(tensor->dim_count >= 1 && tensor->dim_count <= 4);
        FL_ASSERT(tensor->size <= gguf_file_size(gguf, 0) - tensor->offset);
    }
}

static void read_file(const uint8_t *data, size_t size, uint64_t file_size)
{
    static const char *const keys[] = {
        "general.architecture",
        "general.alignment",
        "k",
        "llama.block_count",
        "llama.context_length",
        "llama.attention.head_count",
        "llama.feed_forward_length",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.token_type",
        "tokenizer.chat_template",
        "llama.rope.freq_base",
        "gemma3.block_count",
        "tokenizer.ggml.add_bos_token",
    };
    struct gguf *gguf = NULL;
    struct model *model = NULL;
    if (gguf_parse(data, size, file_size, &gguf) != FL_OK) {
        FL_ASSERT(gguf == NULL);
        return;
    }
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        read_key(gguf, keys[i]);
    }
    check_tensors(gguf);
    if (model_from_gguf(gguf, "fuzz", &model) != FL_OK) {
        FL_ASSERT(model == NULL);
        gguf_close(gguf);
        return;
    }
    FL_ASSERT(fl_manifest_check(model_manifest(model)) == FL_OK);
    model_close(model);
}

/* Two good headers, made once: building one costs more than parsing a hundred. */
static const struct gguf_buffer *good_header(unsigned index, uint64_t *out_file_size)
{
    static struct gguf_buffer headers[2];
    static uint64_t file_sizes[2];
    if (headers[index].size == 0) {
        struct model_spec spec = model_spec_tiny(
            index == 0 ? FL_ARCHITECTURE_LLAMA : FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q4_0);
        /* No tokenizer: more of the changes hit what matters here. */
        spec.tokenizer = TOKEN_TABLE_NONE;
        spec.vocabulary = 64;
        spec.arrays = index == 1;
        model_header(&spec, &headers[index], &file_sizes[index]);
    }
    *out_file_size = file_sizes[index];
    return &headers[index];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fl_log_init("", FL_LOG_SILENT);
    if (size == 0 || data[0] % 2 == 0) {
        /* Far more than the header, so that tensors have room. */
        read_file(data + (size != 0), size - (size != 0), size + (1u << 24));
        return 0;
    }
    uint64_t file_size;
    const struct gguf_buffer *good = good_header(data[0] / 2 % 2, &file_size);
    unsigned char *changed = malloc(good->size);
    FL_ASSERT(changed != NULL);
    memcpy(changed, good->data, good->size);
    for (size_t i = 1; i + 3 <= size; i += 3) {
        const size_t at = (size_t)data[i] << 8 | data[i + 1];
        changed[at % good->size] = data[i + 2];
    }
    read_file(changed, good->size, file_size);
    free(changed);
    return 0;
}
