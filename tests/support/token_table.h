/* token_table.h - small but real vocabularies for generated models.
 *
 * bpe   byte-level (gpt2): three special tokens, all 256 bytes, and some merges
 * spm   SentencePiece-style (llama): control tokens, all 256 byte tokens, the
 *       printable ASCII characters, and some longer pieces with scores
 *
 * Every text can be encoded with either.  Tokens may be added: their texts are
 * plain bytes, and are stored as the vocabulary's kind wants them.
 *
 * Memory:  open() allocates, close() frees.
 */
#ifndef TESTS_SUPPORT_TOKEN_TABLE_H
#define TESTS_SUPPORT_TOKEN_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pipeline/gguf.h"

enum token_table_kind { TOKEN_TABLE_NONE, TOKEN_TABLE_BPE, TOKEN_TABLE_SPM };

/* GGUF's numbers. */
enum token_table_type {
    MODEL_TOKEN_NORMAL = 1,
    MODEL_TOKEN_UNKNOWN,
    MODEL_TOKEN_CONTROL,
    MODEL_TOKEN_USER_DEFINED,
    MODEL_TOKEN_UNUSED,
    MODEL_TOKEN_BYTE,
};

#define MODEL_TOKEN_ABSENT UINT32_MAX /* no such token */

struct token_table {
    enum token_table_kind kind;
    uint32_t count;
    uint32_t capacity;
    struct gguf_string *texts; /* [count], as stored in the file */
    uint32_t *types;           /* [count] */
    float *scores;             /* [count] */
    uint32_t merge_count;
    struct gguf_string *merges;       /* bpe */
    uint32_t bos, eos, eot, unk, pad; /* ids or MODEL_TOKEN_ABSENT */
};

/* bpe: <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2, bytes from 3 on.  spm: <unk> 0, <s> 1, </s> 2,
 * bytes from 3 on; with `gemma` <pad> 0, <eos> 1, <bos> 2, <unk> 3, <start_of_turn> 4, <end_of_turn> 5,
 * bytes from 6 on.  `kind` NONE and `empty` start with nothing. */
void token_table_open(struct token_table *table, enum token_table_kind kind, bool gemma,
                      bool empty);
void token_table_close(struct token_table *table);

/* Append a token; returns its id.  NORMAL texts are plain bytes. */
uint32_t token_table_add(struct token_table *table, struct gguf_string text,
                         enum token_table_type type, float score);

/* Append unused ones until there are `count`. */
void token_table_fill(struct token_table *table, uint32_t count);

/* Id of the token whose plain text is `text`, or MODEL_TOKEN_ABSENT. */
uint32_t token_table_find(const struct token_table *table, const char *text);

#endif
