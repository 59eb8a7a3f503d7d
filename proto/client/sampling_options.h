/* sampling_options.h - the options of generate and chat that shape an answer.
 *
 * Thread:  any.
 */
#ifndef PROTO_CLIENT_SAMPLING_OPTIONS_H
#define PROTO_CLIENT_SAMPLING_OPTIONS_H

#include "proto/client/options.h"
#include "proto/client_message.h"

#ifdef __cplusplus
extern "C" {
#endif

struct sampling_options {
    struct fl_sampling sampling;
    uint32_t max_tokens;
    const char *chat_template;
    struct option_list stops;
};

#define SAMPLING_OPTIONS(o, default_temperature, default_seed)                                    \
    {OPTION_HEADING, "Answer", NULL, NULL, NULL, 0, 0},                                           \
        {OPTION_COUNT,                                                                            \
         "--max-tokens",                                                                          \
         "N",                                                                                     \
         "at most this many (0: what the context has left)",                                      \
         &(o)->max_tokens,                                                                        \
         0,                                                                                       \
         0},                                                                                      \
        {OPTION_REAL,                                                                             \
         "--temperature",                                                                         \
         "T",                                                                                     \
         "0: always the likeliest token (default " default_temperature ")",                       \
         &(o)->sampling.temperature,                                                              \
         0,                                                                                       \
         FL_SAMPLING_FACTOR_MAX},                                                                 \
        {OPTION_COUNT,         "--top-k", "K", "draw from the K likeliest (0: all)",              \
         &(o)->sampling.top_k, 0,         0},                                                     \
        {OPTION_REAL,          "--top-p", "P", "draw from the likeliest that make up P (1: all)", \
         &(o)->sampling.top_p, 0,         1},                                                     \
        {OPTION_REAL,          "--min-p", "P", "drop those below P of the likeliest (0: none)",   \
         &(o)->sampling.min_p, 0,         1},                                                     \
        {OPTION_REAL,                                                                             \
         "--repetition-penalty",                                                                  \
         "X",                                                                                     \
         "make recent tokens less likely (1: do not)",                                            \
         &(o)->sampling.repetition_penalty,                                                       \
         0,                                                                                       \
         FL_SAMPLING_FACTOR_MAX},                                                                 \
        {OPTION_COUNT,                                                                            \
         "--penalty-window",                                                                      \
         "N",                                                                                     \
         "recent: the last N tokens (0: all)",                                                    \
         &(o)->sampling.penalty_window,                                                           \
         0,                                                                                       \
         0},                                                                                      \
        {OPTION_SEED,                                                                             \
         "--seed",                                                                                \
         "N",                                                                                     \
         "the same seed draws the same answer (default " default_seed ")",                        \
         &(o)->sampling.seed,                                                                     \
         0,                                                                                       \
         0},                                                                                      \
        {OPTION_LIST, "--stop", "TEXT", "end before this text (up to 8 of them)",                 \
         &(o)->stops, 0,        0},                                                               \
    {                                                                                             \
        OPTION_TEXT, "--template", "NAME", "chat template family, instead of the file's own",     \
            &(o)->chat_template, 0, 0                                                             \
    }

/* Carry them over into a request.  FL_INVALID for a stop that is empty, too long or not UTF-8. */
FL_MUST_CHECK fl_status sampling_options_apply(const struct sampling_options *options,
                                               struct fl_generate *out);

#ifdef __cplusplus
}
#endif
#endif
