/* spm.h - SentencePiece-style encoding: characters join into the token with the best score.
 *
 * Spaces become U+2581 first.  A character that no token covers falls back to
 * its bytes.
 *
 * Thread:  owner.
 * Memory:  the vocabulary is borrowed until close().
 * Source:  Kudo & Richardson, SentencePiece, arXiv:1808.06226.
 */
#ifndef COORDINATOR_SPM_H
#define COORDINATOR_SPM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "coordinator/pair_merger.h"
#include "coordinator/token_list.h"
#include "coordinator/vocabulary.h"

struct spm {
    const struct vocabulary *vocabulary;
    uint32_t byte_ids[256]; /* what an uncovered byte becomes */
    char *escaped;          /* the text with its spaces written as U+2581 */
    size_t escaped_capacity;
    struct pair_merger merger;
};

void spm_open(const struct vocabulary *vocabulary, struct spm *out);
void spm_close(struct spm *spm);

/* Append the tokens of a text without special tokens; valid UTF-8.  `lead_space`: as if a space
 * came first.  FL_NO_MEMORY. */
FL_MUST_CHECK fl_status spm_encode(struct spm *spm, const char *text, size_t size, bool lead_space,
                                   struct token_list *out);
void spm_trim(struct spm *spm);

#endif
