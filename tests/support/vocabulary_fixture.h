/* vocabulary_fixture.h - a tokenizer over a small vocabulary, from bytes in memory.
 *
 *     struct vocabulary_fixture f;
 *     vocabulary_fixture_init(&f, TOKEN_TABLE_SPM);
 *     token_table_add(&f.table, ..);               more tokens, if any
 *     CHECK_EQ(vocabulary_fixture_open(&f), FL_OK);
 *     .. f.tokenizer ..
 *     vocabulary_fixture_close(&f);
 *
 * Memory:  init() and open() allocate, close() frees, whatever open() returned.
 */
#ifndef TESTS_SUPPORT_VOCABULARY_FIXTURE_H
#define TESTS_SUPPORT_VOCABULARY_FIXTURE_H

#include "coordinator/tokenizer.h"
#include "tests/support/gguf_buffer.h"
#include "tests/support/token_table.h"

enum fixture_flag { FIXTURE_ABSENT, FIXTURE_FALSE, FIXTURE_TRUE }; /* of a boolean key */

struct vocabulary_fixture {
    struct token_table table;
    const char *pre; /* keys that are left out when NULL or ABSENT */
    const char *name;
    const char *chat_template;
    enum fixture_flag add_bos;
    enum fixture_flag add_eos;
    enum fixture_flag add_space_prefix;
    struct gguf_buffer buffer;
    struct gguf *gguf;
    struct tokenizer *tokenizer;
};

void vocabulary_fixture_init(struct vocabulary_fixture *f, enum token_table_kind kind);
fl_status vocabulary_fixture_open(struct vocabulary_fixture *f);
void vocabulary_fixture_close(struct vocabulary_fixture *f);

/* A token whose text is a C string. */
uint32_t vocabulary_fixture_add(struct vocabulary_fixture *f, const char *text,
                                enum token_table_type type, float score);

#endif
