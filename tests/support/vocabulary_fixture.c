#include "tests/support/vocabulary_fixture.h"

#include <string.h>

void vocabulary_fixture_init(struct vocabulary_fixture *f, enum token_table_kind kind)
{
    *f = (struct vocabulary_fixture){.pre = "gpt-2"};
    token_table_open(&f->table, kind, false, false);
}

uint32_t vocabulary_fixture_add(struct vocabulary_fixture *f, const char *text,
                                enum token_table_type type, float score)
{
    return token_table_add(&f->table, (struct gguf_string){.data = text, .size = strlen(text)},
                           type, score);
}

static void put_flag(struct gguf_buffer *buffer, const char *key, enum fixture_flag flag)
{
    if (flag != FIXTURE_ABSENT) {
        gguf_put_key_bool(buffer, key, flag == FIXTURE_TRUE);
    }
}

static void put_id(struct gguf_buffer *buffer, const char *key, uint32_t id)
{
    if (id != MODEL_TOKEN_ABSENT) {
        gguf_put_key_uint(buffer, key, GGUF_UINT32, id);
    }
}

static void put_text(struct gguf_buffer *buffer, const char *key, const char *text)
{
    if (text != NULL) {
        gguf_put_key_text(buffer, key, text);
    }
}

fl_status vocabulary_fixture_open(struct vocabulary_fixture *f)
{
    struct gguf_buffer *buffer = &f->buffer;
    const struct token_table *table = &f->table;
    gguf_put_header(buffer, 3);
    put_text(buffer, "general.name", f->name);
    gguf_put_key_text(buffer, "tokenizer.ggml.model",
                      table->kind == TOKEN_TABLE_BPE ? "gpt2" : "llama");
    gguf_put_key_strings(buffer, "tokenizer.ggml.tokens", table->texts, table->count);
    gguf_put_key_uints(buffer, "tokenizer.ggml.token_type", GGUF_INT32, table->types, table->count);
    if (table->kind == TOKEN_TABLE_BPE) {
        put_text(buffer, "tokenizer.ggml.pre", f->pre);
        gguf_put_key_strings(buffer, "tokenizer.ggml.merges", table->merges, table->merge_count);
    } else {
        gguf_put_key_floats(buffer, "tokenizer.ggml.scores", table->scores, table->count);
    }
    put_id(buffer, "tokenizer.ggml.bos_token_id", table->bos);
    put_id(buffer, "tokenizer.ggml.eos_token_id", table->eos);
    put_id(buffer, "tokenizer.ggml.eot_token_id", table->eot);
    put_id(buffer, "tokenizer.ggml.unknown_token_id", table->unk);
    put_flag(buffer, "tokenizer.ggml.add_bos_token", f->add_bos);
    put_flag(buffer, "tokenizer.ggml.add_eos_token", f->add_eos);
    put_flag(buffer, "tokenizer.ggml.add_space_prefix", f->add_space_prefix);
    put_text(buffer, "tokenizer.chat_template", f->chat_template);
    gguf_put_padding(buffer, 32);
    FL_TRY(gguf_parse(buffer->data, buffer->size, buffer->size, &f->gguf));
    return tokenizer_open(f->gguf, &f->tokenizer);
}

void vocabulary_fixture_close(struct vocabulary_fixture *f)
{
    tokenizer_close(f->tokenizer);
    gguf_close(f->gguf);
    gguf_buffer_free(&f->buffer);
    token_table_close(&f->table);
}
