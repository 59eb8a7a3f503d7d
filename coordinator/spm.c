#include "coordinator/spm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/utf8.h"

enum { ESCAPED_KEPT_SIZE = 64 << 10 };

static const char space_mark[] = "\xe2\x96\x81"; /* U+2581 */
enum { SPACE_MARK_SIZE = sizeof(space_mark) - 1 };

void spm_open(const struct vocabulary *vocabulary, struct spm *out)
{
    *out = (struct spm){.vocabulary = vocabulary};
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[8];
        const char raw = (char)byte;
        const int size = snprintf(text, sizeof(text), "<0x%02X>", byte);
        uint32_t id = vocabulary_find(vocabulary, text, (size_t)size);
        id = id != TOKEN_NONE ? id : vocabulary_find(vocabulary, &raw, 1);
        out->byte_ids[byte] = id != TOKEN_NONE ? id : vocabulary->unknown;
    }
}

void spm_close(struct spm *spm)
{
    pair_merger_close(&spm->merger);
    free(spm->escaped);
    *spm = (struct spm){0};
}

void spm_trim(struct spm *spm)
{
    pair_merger_trim(&spm->merger);
    if (spm->escaped_capacity > ESCAPED_KEPT_SIZE) {
        free(spm->escaped);
        spm->escaped = NULL;
        spm->escaped_capacity = 0;
    }
}

/* Scores as numbers that ascend when scores descend. */
static uint32_t priority_of(float score)
{
    uint32_t bits = 0;
    score += 0.0F; /* -0 and 0 are one score */
    memcpy(&bits, &score, sizeof(bits));
    return bits >> 31 != 0 ? bits : ~(bits | 0x80000000u);
}

static bool join(const void *ctx, const struct pair_symbol *left, const struct pair_symbol *right,
                 uint32_t *out_priority, uint32_t *out_id)
{
    const struct spm *spm = ctx;
    const uint32_t id = vocabulary_find(spm->vocabulary, spm->escaped + left->offset,
                                        (size_t)left->size + right->size);
    if (id == TOKEN_NONE) {
        return false;
    }
    *out_priority = priority_of(spm->vocabulary->scores[id]);
    *out_id = id;
    return true;
}

/* Returns the escaped size in `out`. */
static fl_status escape(struct spm *spm, const char *text, size_t size, bool lead_space,
                        size_t *out)
{
    const size_t needed = (size + 1) * SPACE_MARK_SIZE;
    if (spm->escaped_capacity < needed) {
        free(spm->escaped);
        spm->escaped_capacity = 0;
        spm->escaped = malloc(needed);
        if (spm->escaped == NULL) {
            return FL_FAIL(FL_NO_MEMORY, "spm: no memory for a text of %zu bytes", size);
        }
        spm->escaped_capacity = needed;
    }
    char *at = spm->escaped;
    if (lead_space) {
        memcpy(at, space_mark, SPACE_MARK_SIZE);
        at += SPACE_MARK_SIZE;
    }
    for (size_t i = 0; i < size; i++) {
        if (text[i] == ' ') {
            memcpy(at, space_mark, SPACE_MARK_SIZE);
            at += SPACE_MARK_SIZE;
        } else {
            *at++ = text[i];
        }
    }
    *out = (size_t)(at - spm->escaped);
    return FL_OK;
}

fl_status spm_encode(struct spm *spm, const char *text, size_t size, bool lead_space,
                     struct token_list *out)
{
    struct pair_merger *merger = &spm->merger;
    size_t escaped_size = 0;
    FL_TRY(escape(spm, text, size, lead_space, &escaped_size));
    pair_merger_reset(merger);
    for (size_t at = 0; at < escaped_size;) {
        const uint32_t step = fl_utf8_size((unsigned char)spm->escaped[at]);
        FL_ASSERT(step > 0 && step <= escaped_size - at);
        FL_TRY(pair_merger_add(merger, (uint32_t)at, step, TOKEN_NONE));
        at += step;
    }
    FL_TRY(pair_merger_run(merger, join, spm));
    for (size_t i = 0; i < merger->count; i++) {
        const struct pair_symbol *symbol = &merger->symbols[i];
        const char *bytes = spm->escaped + symbol->offset;
        if (symbol->size == 0) {
            continue;
        }
        const uint32_t id = symbol->id != TOKEN_NONE
                                ? symbol->id
                                : vocabulary_find(spm->vocabulary, bytes, symbol->size);
        if (id != TOKEN_NONE) {
            token_list_push(out, id);
            continue;
        }
        for (uint32_t byte = 0; byte < symbol->size; byte++) {
            token_list_push(out, spm->byte_ids[(unsigned char)bytes[byte]]);
        }
    }
    return FL_OK;
}
