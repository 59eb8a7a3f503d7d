/* tokenizer.h - text to token ids and back, as the model file says.
 *
 *     struct tokenizer *tokenizer;
 *     FL_TRY(tokenizer_open(gguf, &tokenizer));
 *     FL_TRY(tokenizer_encode(tokenizer, text, size, TOKENIZER_ADD_SPECIAL, ids, max, &count));
 *
 * Byte-level BPE and SentencePiece vocabularies.  A text is first cut at
 * special tokens, longest first; what lies between is encoded.  User-defined
 * tokens are always found in a text.  Control tokens ("<|im_end|>") are found
 * only when asked for, so that nobody opens a turn by typing its mark.
 *
 * Thread:  owner: encoding uses scratch memory inside the tokenizer.  Looking
 *          tokens up (piece, is_end, ..) from any thread.
 * Memory:  open() allocates; the gguf is borrowed until close().  Scratch grows
 *          with the text, up to about 60 times its size, and goes back after it.
 */
#ifndef COORDINATOR_TOKENIZER_H
#define COORDINATOR_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "coordinator/vocabulary.h"
#include "pipeline/gguf.h"
#include "proto/base/status.h"
#include "proto/client_message.h"

/* As much as a client may send: encoding it takes about 50 MiB of scratch memory. */
enum { TOKENIZER_TEXT_SIZE_MAX = FL_PROMPT_SIZE_MAX };

enum tokenizer_flag {
    TOKENIZER_ADD_SPECIAL = 1 << 0,   /* BOS and EOS where the model has them */
    TOKENIZER_PARSE_SPECIAL = 1 << 1, /* control tokens in the text count */
    TOKENIZER_NO_BOS = 1 << 2,        /* no BOS even so */
    TOKENIZER_NO_EOS = 1 << 3,
};

struct tokenizer;

/* A part of a text, [begin, end) in bytes. */
struct text_range {
    size_t begin;
    size_t end;
};

FL_MUST_CHECK fl_status tokenizer_open(const struct gguf *gguf, struct tokenizer **out);
void tokenizer_close(struct tokenizer *tokenizer);

/* `flags` from enum tokenizer_flag; ids[max] is the caller's.
 * FL_INVALID when the text is not UTF-8, FL_TOO_LARGE when it is over TOKENIZER_TEXT_SIZE_MAX or
 * its tokens over `max`; *out_count is then the number there would be (0 for too long a text). */
FL_MUST_CHECK fl_status tokenizer_encode(struct tokenizer *tokenizer, const char *text, size_t size,
                                         unsigned flags, uint32_t *ids, size_t max,
                                         size_t *out_count);

/* The same, but control tokens do not count where they touch one of `plain` (ascending, apart),
 * whatever the flags say: those parts are what users typed. */
FL_MUST_CHECK fl_status tokenizer_encode_parts(struct tokenizer *tokenizer, const char *text,
                                               size_t size, unsigned flags,
                                               const struct text_range *plain, size_t plain_count,
                                               uint32_t *ids, size_t max, size_t *out_count);

/* The bytes a token prints; they may be part of a character.  Nothing for control tokens unless
 * `show`, and for an id that does not exist. */
enum tokenizer_special { TOKENIZER_HIDE_SPECIAL, TOKENIZER_SHOW_SPECIAL };
struct gguf_string tokenizer_piece(const struct tokenizer *tokenizer, uint32_t id,
                                   enum tokenizer_special show);

/* Whether the token ends an answer. */
bool tokenizer_is_end(const struct tokenizer *tokenizer, uint32_t id);

/* Everything else there is to know: counts, types, BOS, the end tokens. */
const struct vocabulary *tokenizer_vocabulary(const struct tokenizer *tokenizer);

/* Pairs looked up since open(), for tests of growth. */
uint64_t tokenizer_lookup_count(const struct tokenizer *tokenizer);

#endif
