/* vocabulary.h - the tokens of a model file: text, type, score, and what ends an answer.
 *
 * Read once from the `tokenizer.ggml.` metadata.  Token texts stay where the
 * file's header holds them; beside them lie one open-addressing hash table
 * (text to id) and one block with the bytes each token prints, so that a
 * vocabulary of a quarter million tokens loads in a few tens of milliseconds
 * without an allocation per token.
 *
 * Byte-level BPE ("gpt2") writes each byte as a printable character, and that
 * alphabet is what its texts are in; SentencePiece ("llama") writes a space as
 * U+2581 and spells bytes "<0x41>".
 *
 * Thread:  any, once open: nothing changes until close().
 * Memory:  open() allocates about 45 bytes a token plus its text; the gguf is
 *          borrowed until close().
 * Source:  token types and defaults as GGUF files are written, ggml/docs/gguf.md;
 *          byte alphabet of GPT-2, Radford et al. 2019.
 */
#ifndef COORDINATOR_VOCABULARY_H
#define COORDINATOR_VOCABULARY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pipeline/gguf.h"
#include "proto/base/status.h"

enum {
    VOCABULARY_COUNT_MAX = 1 << 21,
    VOCABULARY_TEXT_SIZE_MAX = 1024, /* of one token; the longest known is near 400 */
    VOCABULARY_END_COUNT_MAX = 32,
};

enum vocabulary_kind { VOCABULARY_BPE, VOCABULARY_SPM };

/* The numbers are GGUF's. */
enum token_type {
    TOKEN_UNDEFINED,
    TOKEN_NORMAL,
    TOKEN_UNKNOWN,
    TOKEN_CONTROL,
    TOKEN_USER_DEFINED,
    TOKEN_UNUSED,
    TOKEN_BYTE,
};

struct vocabulary_slot {
    uint32_t hash;
    uint32_t id; /* TOKEN_NONE: free */
};

struct vocabulary {
    enum vocabulary_kind kind;
    uint32_t count;
    struct gguf_string *texts; /* [count], as in the file */
    uint8_t *types;            /* [count], enum token_type */
    float *scores;             /* [count]; NULL for BPE */
    char *pieces;              /* what tokens print, one after the other */
    uint32_t *piece_offsets;   /* [count + 1] */
    struct vocabulary_slot *slots;
    uint32_t slot_mask;
    uint32_t text_size_max; /* of the longest token */

    uint32_t bos; /* ids, or TOKEN_NONE */
    uint32_t eos;
    uint32_t unknown;
    bool add_bos;
    bool add_eos;
    bool add_space_prefix;
    bool strip_after_special;                /* Phi 3: white space after a special token goes */
    uint32_t ends[VOCABULARY_END_COUNT_MAX]; /* [end_count], ascending */
    uint32_t end_count;
};

/* FL_NOT_FOUND without a tokenizer in the file, FL_UNSUPPORTED for another kind of tokenizer,
 * FL_MALFORMED, FL_TOO_LARGE, FL_NO_MEMORY. */
FL_MUST_CHECK fl_status vocabulary_open(const struct gguf *gguf, struct vocabulary *out);
void vocabulary_close(struct vocabulary *vocabulary);

/* The token with exactly this text, or TOKEN_NONE. */
uint32_t vocabulary_find(const struct vocabulary *vocabulary, const char *text, size_t size);

/* How byte-level BPE writes a byte: one or two bytes of UTF-8 into `out`; returns how many. */
size_t vocabulary_byte_text(unsigned char byte, char out[2]);

/* Control and unknown tokens: read and printed only when asked for. */
bool vocabulary_is_special(const struct vocabulary *vocabulary, uint32_t id);
bool vocabulary_is_end(const struct vocabulary *vocabulary, uint32_t id);

#endif
