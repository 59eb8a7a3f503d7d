/* bpe.h - byte-level byte pair encoding: bytes to tokens by ranked merges.
 *
 * Every merge of the file is checked and resolved to ids at open(): a pair of
 * ids looks up its rank and the id it becomes, so no text is hashed while a
 * prompt is encoded.
 *
 * Thread:  owner.
 * Memory:  open() allocates 24 .. 48 bytes a merge; the vocabulary is borrowed
 *          until close().
 * Source:  Radford et al., GPT-2, 2019.
 */
#ifndef COORDINATOR_BPE_H
#define COORDINATOR_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "coordinator/pair_merger.h"
#include "coordinator/pretokenizer.h"
#include "coordinator/token_list.h"
#include "coordinator/vocabulary.h"

enum { BPE_MERGE_COUNT_MAX = 1 << 22 };

struct bpe_merge {
    uint64_t pair; /* (left << 32 | right) + 1; 0: free */
    uint32_t rank;
    uint32_t id;
};

struct bpe {
    const struct vocabulary *vocabulary;
    struct pretokenizer *pretokenizer;
    struct bpe_merge *merges; /* open addressing */
    uint32_t merge_mask;
    uint32_t byte_ids[256]; /* TOKEN_NONE: the vocabulary lacks that byte */
    bool whole_words;       /* a word that is a token needs no merges (Llama 3) */
    struct pair_merger merger;
};

/* FL_UNSUPPORTED (pre-tokenizer), FL_MALFORMED (merges), FL_TOO_LARGE, FL_NO_MEMORY. */
FL_MUST_CHECK fl_status bpe_open(const struct gguf *gguf, const struct vocabulary *vocabulary,
                                 struct bpe *out);
void bpe_close(struct bpe *bpe);

/* Append the tokens of a text without special tokens; valid UTF-8.  Bytes that the vocabulary
 * lacks give no token. */
FL_MUST_CHECK fl_status bpe_encode(struct bpe *bpe, const char *text, size_t size,
                                   struct token_list *out);

#endif
