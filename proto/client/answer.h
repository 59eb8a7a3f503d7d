/* answer.h - what a generate request has brought so far.
 *
 * Text is shown as it comes and kept; tokens and their details are kept for
 * the JSON at the end.
 *
 * Thread:  the main thread.
 * Memory:  grows with the answer, which the context limits; free() gives it back.
 */
#ifndef PROTO_CLIENT_ANSWER_H
#define PROTO_CLIENT_ANSWER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/client/exchange.h"
#include "proto/client/json_output.h"

#ifdef __cplusplus
extern "C" {
#endif

struct answer {
    bool show;   /* text goes to stdout as it comes */
    bool filter; /* stdout is a terminal: control characters do not reach it */

    char *text; /* [text_size] */
    size_t text_size;
    size_t text_room;
    struct fl_token_detail *tokens; /* [token_count], each with its own `top` */
    size_t token_count;
    size_t token_room;
};

void answer_init(struct answer *answer, bool show);
void answer_free(struct answer *answer);

/* Take events of the exchange's request until DONE, which is left in *out: valid until the
 * exchange is used again. */
FL_MUST_CHECK fl_status answer_receive(struct answer *answer, struct exchange *exchange,
                                       struct fl_client_event *out);

/* One object: the answer and what DONE says of it. */
void answer_json(const struct answer *answer, const struct fl_client_event *done, bool logprobs,
                 bool logits, FILE *stream);

/* One line of figures for a person. */
void answer_figures(const struct fl_client_event *done, FILE *stream);

/* "phases" of an event, used by timeline too. */
void answer_phases_json(struct json_output *json, const struct fl_phase_summary *phases,
                        uint32_t count);

/* "stages" of an event, used by plan too. */
void answer_stages_json(struct json_output *json, const struct fl_stage_summary *stages,
                        uint32_t count);

#ifdef __cplusplus
}
#endif
#endif
