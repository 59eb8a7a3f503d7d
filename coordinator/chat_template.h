/* chat_template.h - a conversation as the text its model was trained on.
 *
 * Model files carry a program (Jinja) that writes their chat format.  We do
 * not run it: we recognise which of a few families it belongs to, take from it
 * what differs within the family (a default system message, spaces, trimming),
 * and write the text ourselves.  A program we do not recognise is refused with
 * a sentence that says how to name the family.
 *
 *     struct chat_template chat;
 *     FL_TRY(chat_template_open(gguf, tokenizer_vocabulary(tokenizer), NULL, &chat));
 *     FL_TRY(chat_template_encode(&chat, tokenizer, messages, count, CHAT_ADD_PROMPT, ids, max,
 *                                 &n));
 *
 * What users typed never becomes a control token: while the text is written,
 * their parts are recorded, and only the markup around them is parsed.
 *
 * Thread:  any, once open; encode() as the tokenizer.
 * Memory:  open() takes none; default_system is a copy.  encode() allocates
 *          one text for the call.
 * Source:  the chat templates published with SmolLM2, Qwen2, Llama 2, Llama 3,
 *          Gemma, Mistral (v1, v3, v7) and Phi 3.
 */
#ifndef COORDINATOR_CHAT_TEMPLATE_H
#define COORDINATOR_CHAT_TEMPLATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "coordinator/tokenizer.h"
#include "pipeline/gguf.h"
#include "proto/base/status.h"

enum {
    CHAT_MESSAGE_COUNT_MAX = 4096,
    CHAT_DEFAULT_SYSTEM_SIZE_MAX = 2048,
};

enum chat_family {
    CHAT_CHATML,
    CHAT_LLAMA2,
    CHAT_LLAMA3,
    CHAT_GEMMA,
    CHAT_MISTRAL_V1,
    CHAT_MISTRAL_V3,
    CHAT_MISTRAL_V3_TEKKEN,
    CHAT_MISTRAL_V7,
    CHAT_MISTRAL_V7_TEKKEN,
    CHAT_PHI3,
    CHAT_FAMILIES,
};

struct chat_message {
    const char *role; /* "system", "user" or "assistant" */
    struct gguf_string content;
};

struct chat_template {
    enum chat_family family;
    bool trims;             /* white space around contents goes */
    bool trims_answers;     /* .. around the assistant's only */
    bool tight;             /* Mistral v1 as first published: no space before [INST] and answers */
    bool writes_bos;        /* the text starts with the BOS token */
    bool repeats_bos;       /* Llama 2: so does every later exchange */
    bool closes_with_eos;   /* Phi 3: EOS ends a text that asks for no answer */
    struct gguf_string bos; /* their texts, borrowed from the gguf; empty when there is none */
    struct gguf_string eos;
    char default_system[CHAT_DEFAULT_SYSTEM_SIZE_MAX]; /* said when no system message comes first */
    size_t default_system_size;                        /* 0: none is said */
};

/* A conversation being written.  `text` and `typed` are the caller's. */
struct chat_text {
    char *text; /* [max] */
    size_t max;
    size_t size;              /* may exceed max: what does not fit is counted, not written */
    struct text_range *typed; /* [message count]: the parts that came from messages */
    size_t typed_count;
};

enum chat_flag {
    CHAT_ADD_PROMPT = 1 << 0,    /* the opening of the assistant's next answer */
    CHAT_PARSE_CONTENT = 1 << 1, /* encode(): control tokens count in messages, too */
};

/* `name` overrides what the file says, NULL takes it from there.  The vocabulary gives the texts of
 * BOS and EOS.
 * FL_NOT_FOUND when the file has no template, FL_UNSUPPORTED when it is not recognised or there is
 * no family of that name. */
FL_MUST_CHECK fl_status chat_template_open(const struct gguf *gguf,
                                           const struct vocabulary *vocabulary, const char *name,
                                           struct chat_template *out);

/* The same from the program's text alone. */
FL_MUST_CHECK fl_status chat_template_recognise(struct gguf_string program,
                                                struct chat_template *out);

/* The family of that name.  FL_UNSUPPORTED when there is none. */
FL_MUST_CHECK fl_status chat_template_named(const char *name, struct chat_template *out);

/* The family's name, as --template takes it. */
const char *chat_template_name(const struct chat_template *chat);

/* Write the conversation.  FL_INVALID for an unknown role, an empty list or an order the family
 * does not know; FL_TOO_LARGE when out->max is too small, out->size then says what is needed. */
FL_MUST_CHECK fl_status chat_template_render(const struct chat_template *chat,
                                             const struct chat_message *messages, size_t count,
                                             unsigned flags, struct chat_text *out);

/* Straight to tokens, BOS included where the model has one.  Errors as tokenizer_encode(). */
FL_MUST_CHECK fl_status chat_template_encode(const struct chat_template *chat,
                                             struct tokenizer *tokenizer,
                                             const struct chat_message *messages, size_t count,
                                             unsigned flags, uint32_t *ids, size_t max,
                                             size_t *out_count);

#endif
