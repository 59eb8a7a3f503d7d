#include "proto/client/answer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/client/plain_text.h"

void answer_init(struct answer *answer, bool show)
{
    *answer = (struct answer){.show = show, .filter = isatty(STDOUT_FILENO) != 0};
}

void answer_free(struct answer *answer)
{
    for (size_t i = 0; i < answer->token_count; i++) {
        free(answer->tokens[i].top);
    }
    free(answer->tokens);
    free(answer->text);
    *answer = (struct answer){0};
}

/* Room for `more` elements behind `count`; doubles. */
static fl_status grow(void *array, size_t *room, size_t count, size_t more, size_t element_size)
{
    if (more <= *room - count) {
        return FL_OK;
    }
    const size_t wanted = (count + more) * 2;
    void *old = NULL;
    memcpy(&old, array, sizeof(old));
    void *larger = realloc(old, wanted * element_size);
    if (larger == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for an answer of %zu bytes", wanted * element_size);
    }
    memcpy(array, &larger, sizeof(larger));
    *room = wanted;
    return FL_OK;
}

/* A model may say anything, escape sequences included: a terminal gets none of them. */
static void show_text(const struct answer *answer, const char *text, size_t size)
{
    if (!answer->filter) {
        fwrite(text, 1, size, stdout);
    } else {
        for (size_t i = 0; i < size; i++) {
            const unsigned char c = (unsigned char)text[i];
            if ((c >= 0x20 && c != 0x7f) || c == '\n' || c == '\t') {
                fputc(c, stdout);
            }
        }
    }
    fflush(stdout);
}

static fl_status keep_token(struct answer *answer, const struct fl_token_detail *token)
{
    FL_TRY(grow(&answer->tokens, &answer->token_room, answer->token_count, 1, sizeof(*token)));
    struct fl_token_detail *kept = &answer->tokens[answer->token_count];
    *kept = *token;
    kept->top = NULL;
    if (token->top_count > 0) {
        kept->top = malloc(token->top_count * sizeof(*token->top));
        if (kept->top == NULL) {
            return FL_FAIL(FL_NO_MEMORY, "no memory for an answer");
        }
        memcpy(kept->top, token->top, token->top_count * sizeof(*token->top));
    }
    answer->token_count++;
    return FL_OK;
}

static fl_status take_text(struct answer *answer, const struct fl_client_event *event)
{
    const struct fl_text text = event->as.text.text;
    if (text.size > 0) {
        FL_TRY(grow(&answer->text, &answer->text_room, answer->text_size, text.size, 1));
        memcpy(answer->text + answer->text_size, text.data, text.size);
        answer->text_size += text.size;
        if (answer->show) {
            show_text(answer, text.data, text.size);
        }
    }
    for (uint32_t i = 0; i < event->as.text.token_count; i++) {
        FL_TRY(keep_token(answer, &event->as.text.tokens[i]));
    }
    return FL_OK;
}

fl_status answer_receive(struct answer *answer, struct exchange *exchange,
                         struct fl_client_event *out)
{
    for (;;) {
        FL_TRY(exchange_next(exchange, out));
        if (out->kind == FL_EVENT_DONE) {
            return FL_OK;
        }
        if (out->kind == FL_EVENT_TEXT) {
            FL_TRY(take_text(answer, out));
        } else if (out->kind != FL_EVENT_ADMITTED) {
            return FL_FAIL(FL_PROTOCOL, "event %d does not belong in an answer", (int)out->kind);
        }
    }
}

/* ---- output ---- */

static void top_json(struct json_output *json, const char *key, const struct fl_top *top,
                     uint32_t count)
{
    json_open(json, key, '[');
    for (uint32_t i = 0; i < count; i++) {
        json_open(json, NULL, '[');
        json_whole(json, NULL, top[i].id);
        json_single(json, NULL, top[i].value);
        json_close(json, ']');
    }
    json_close(json, ']');
}

void answer_stages_json(struct json_output *json, const struct fl_stage_summary *stages,
                        uint32_t count)
{
    json_open(json, "stages", '[');
    for (uint32_t i = 0; i < count; i++) {
        json_open(json, NULL, '{');
        json_string(json, "node", stages[i].node);
        json_whole(json, "first_layer", stages[i].first_layer);
        json_whole(json, "last_layer", stages[i].last_layer);
        json_whole(json, "shard_bytes", stages[i].shard_bytes);
        json_whole(json, "kv_bytes", stages[i].kv_bytes);
        json_whole(json, "memory_budget", stages[i].memory_budget);
        json_close(json, '}');
    }
    json_close(json, ']');
}

void answer_phases_json(struct json_output *json, const struct fl_phase_summary *phases,
                        uint32_t count)
{
    json_open(json, "phases", '[');
    for (uint32_t i = 0; i < count; i++) {
        json_open(json, NULL, '{');
        json_string(json, "phase", phases[i].phase);
        json_nano(json, "exposed_ms", phases[i].exposed_ms);
        json_nano(json, "hidden_ms", phases[i].hidden_ms);
        json_whole(json, "bytes", phases[i].bytes);
        json_close(json, '}');
    }
    json_close(json, ']');
}

static void logprobs_json(struct json_output *json, const struct answer *answer)
{
    json_open(json, "logprobs", '[');
    for (size_t i = 0; i < answer->token_count; i++) {
        const struct fl_token_detail *token = &answer->tokens[i];
        json_open(json, NULL, '{');
        json_whole(json, "id", token->id);
        json_single(json, "logprob", token->logprob);
        top_json(json, "top", token->top, token->top_count);
        json_close(json, '}');
    }
    json_close(json, ']');
}

void answer_json(const struct answer *answer, const struct fl_client_event *done, bool logprobs,
                 bool logits, FILE *stream)
{
    struct json_output json = {.stream = stream};
    json_open(&json, NULL, '{');
    json_open(&json, "tokens", '[');
    for (size_t i = 0; i < answer->token_count; i++) {
        json_whole(&json, NULL, answer->tokens[i].id);
    }
    json_close(&json, ']');
    json_text(&json, "text", answer->text, answer->text_size);
    json_whole(&json, "prompt_tokens", done->as.done.prompt_tokens);
    json_whole(&json, "cached_tokens", done->as.done.cached_tokens);
    json_whole(&json, "output_tokens", done->as.done.output_tokens);
    json_string(&json, "class", fl_class_name(done->as.done.class_));
    json_nano(&json, "ttft_ms", done->as.done.ttft_ms);
    if (done->as.done.predicted_ms > 0) {
        json_nano(&json, "predicted_ms", done->as.done.predicted_ms);
    } else {
        json_null(&json, "predicted_ms");
    }
    json_whole(&json, "timeline_id", done->as.done.timeline_id);
    answer_phases_json(&json, done->as.done.phases, done->as.done.phase_count);
    json_real(&json, "decode_tok_s", done->as.done.decode_tok_s);
    json_string(&json, "finish", fl_finish_name(done->as.done.finish));
    answer_stages_json(&json, done->as.done.stages, done->as.done.stage_count);
    if (logits) {
        top_json(&json, "top_logits", done->as.done.logits, done->as.done.logit_count);
    }
    if (logprobs) {
        logprobs_json(&json, answer);
    }
    json_close(&json, '}');
    fputc('\n', stream);
}

/* The two phases that the first token waited for most. */
static void put_exposed(const struct fl_client_event *done, FILE *stream)
{
    for (uint32_t i = 0; i < done->as.done.phase_count && i < 2; i++) {
        const struct fl_phase_summary *phase = &done->as.done.phases[i];
        char name[64];
        if (phase->exposed_ms > 0) {
            fprintf(stream, "%s%s %.1f ms", i == 0 ? ": " : ", ",
                    plain_text(phase->phase, name, sizeof(name)), phase->exposed_ms);
        }
    }
}

void answer_figures(const struct fl_client_event *done, FILE *stream)
{
    const bool known = done->as.done.class_ != FL_CLASS_UNKNOWN;
    fprintf(stream, "[%s%s%" PRIu32 " prompt tokens",
            known ? fl_class_name(done->as.done.class_) : "", known ? ", " : "",
            done->as.done.prompt_tokens);
    if (done->as.done.cached_tokens > 0) {
        fprintf(stream, " (%" PRIu32 " from the cache)", done->as.done.cached_tokens);
    }
    if (done->as.done.ttft_ms > 0) {
        fprintf(stream, ", first token after %.1f ms", done->as.done.ttft_ms);
        if (done->as.done.predicted_ms > 0) {
            fprintf(stream, " (predicted %.1f ms)", done->as.done.predicted_ms);
        }
        put_exposed(done, stream);
    }
    fprintf(stream, "; %" PRIu32 " tokens", done->as.done.output_tokens);
    if (done->as.done.decode_tok_s > 0) {
        fprintf(stream, " at %.1f/s", done->as.done.decode_tok_s);
    }
    fprintf(stream, ", %s, %" PRIu32 " stage%s", fl_finish_name(done->as.done.finish),
            done->as.done.stage_count, done->as.done.stage_count == 1 ? "" : "s");
    if (done->as.done.timeline_id > 0) {
        fprintf(stream, "; firstlight timeline %" PRIu64, done->as.done.timeline_id);
    }
    fputs("]\n", stream);
}
