#include "proto/sampling_message.h"

#include "proto/client.pb-c.h"

#include "proto/message_field.h"

fl_status fl_sampling_message_build(const struct fl_sampling *sampling, struct fl_arena *arena,
                                    struct Firstlight__Sampling **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Sampling, firstlight__sampling, out);
    (*out)->temperature = sampling->temperature;
    (*out)->top_k = sampling->top_k;
    (*out)->top_p = sampling->top_p;
    (*out)->min_p = sampling->min_p;
    (*out)->repetition_penalty = sampling->repetition_penalty;
    (*out)->penalty_window = sampling->penalty_window;
    (*out)->seed = sampling->seed;
    (*out)->top_logits = sampling->top_logits;
    (*out)->logprobs = sampling->logprobs;
    return FL_OK;
}

static fl_status check(const struct fl_sampling *sampling)
{
    FL_TRY(fl_field_real("temperature", (double)sampling->temperature, 0, FL_SAMPLING_FACTOR_MAX));
    FL_TRY(fl_field_real("top_p", (double)sampling->top_p, 0, 1));
    FL_TRY(fl_field_real("min_p", (double)sampling->min_p, 0, 1));
    FL_TRY(fl_field_real("repetition_penalty", (double)sampling->repetition_penalty, 0,
                         FL_SAMPLING_FACTOR_MAX));
    FL_TRY(fl_field_range("top_logits", sampling->top_logits, 0, FL_TOP_MAX));
    return fl_field_range("logprobs", sampling->logprobs, 0, FL_TOP_MAX);
}

fl_status fl_sampling_message_take(const struct Firstlight__Sampling *message,
                                   struct fl_sampling *out)
{
    *out = (struct fl_sampling){
        .temperature = message->temperature,
        .top_k = message->top_k,
        .top_p = message->top_p,
        .min_p = message->min_p,
        .repetition_penalty = message->repetition_penalty,
        .penalty_window = message->penalty_window,
        .seed = message->seed,
        .top_logits = message->top_logits,
        .logprobs = message->logprobs,
    };
    return check(out);
}

fl_status fl_sampling_message_build_top(const struct fl_top *top, uint32_t count,
                                        struct fl_arena *arena, struct Firstlight__Top ***out)
{
    FL_TRY(fl_field_array(arena, count, sizeof(**out), out));
    for (uint32_t i = 0; i < count; i++) {
        FL_FIELD_MAKE(arena, Firstlight__Top, firstlight__top, &(*out)[i]);
        (*out)[i]->id = top[i].id;
        (*out)[i]->value = top[i].value;
    }
    return FL_OK;
}

fl_status fl_sampling_message_take_top(const char *field, struct Firstlight__Top *const *message,
                                       size_t count, struct fl_arena *arena, struct fl_top **out)
{
    FL_TRY(fl_field_range(field, count, 0, FL_TOP_MAX));
    FL_TRY(fl_field_array(arena, count, sizeof(**out), out));
    for (size_t i = 0; i < count; i++) {
        FL_TRY(fl_field_range(field, message[i]->id, 0, FL_VOCABULARY_MAX - 1));
        FL_TRY(fl_field_real(field, (double)message[i]->value, -1e30, 1e30));
        (*out)[i] = (struct fl_top){.id = message[i]->id, .value = message[i]->value};
    }
    return FL_OK;
}
