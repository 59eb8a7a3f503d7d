/* sim_question.h - what clients of a simulated cluster ask, and the right answers.
 *
 * Three small models: "tiny" (random llama), "gem" (random gemma3 with a sliding
 * window) and "script" (says known texts).  The questions about them are the
 * same in every run; conversations are questions whose prompts hold the right
 * answers to earlier ones, with a piece of their history edited here and there.
 *
 * Memory:  open() allocates, close() frees; questions belong to the book.
 */
#ifndef TESTS_SUPPORT_SIM_QUESTION_H
#define TESTS_SUPPORT_SIM_QUESTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/client_message.h"
#include "tests/support/temp_folder.h"

enum {
    SIM_MODEL_COUNT = 3,
    SIM_CONTEXT = 256, /* of every simulated coordinator */
    SIM_TEXT_MAX = 2048,
    SIM_LOGITS = 8,
    SIM_LOGPROBS = 2,
    SIM_QUESTION_MAX = 40,
};

extern const char *const sim_models[SIM_MODEL_COUNT];

struct sim_answer {
    enum fl_finish finish;
    uint32_t token_count;
    uint32_t output_tokens; /* as DONE says */
    uint32_t tokens[SIM_CONTEXT];
    float logprobs[SIM_CONTEXT];
    struct fl_top tops[SIM_CONTEXT][SIM_LOGPROBS];
    uint32_t logit_count;
    struct fl_top logits[SIM_LOGITS];
    size_t text_size;
    char text[SIM_TEXT_MAX];
};

struct sim_question {
    const char *model;
    const char *text; /* the prompt, or NULL: tokens */
    uint32_t token_count;
    uint32_t tokens[SIM_CONTEXT];
    uint32_t max_tokens; /* 0: to the end of the context */
    const char *stop;    /* or NULL */
    bool ignore_end;
    struct fl_sampling sampling;
    const char *says;         /* the text that is right whatever anybody computes, or NULL */
    struct sim_answer answer; /* of one node, without faults */
};

struct sim_book {
    struct temp_folder models;
    uint32_t count;
    struct sim_question questions[SIM_QUESTION_MAX];
};

/* Writes the models and has every question answered by a cluster of one node. */
FL_MUST_CHECK fl_status sim_book_open(struct sim_book **out);
void sim_book_close(struct sim_book *book);

/* The same to the last bit; prints the first difference. */
bool sim_answer_equal(const struct sim_answer *got, const struct sim_answer *want);

/* What a cancelled request had got is a beginning of the right answer. */
bool sim_answer_begins(const struct sim_answer *got, const struct sim_answer *want);

#endif
