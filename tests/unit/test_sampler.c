#include "pipeline/sampler.h"

#include <math.h>
#include <stdlib.h>

#include "tests/harness.h"

enum { SMALL = 8, LARGE = 5000 };

static struct sampler *sampler;
static float logits[LARGE];

static const struct fl_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
static const struct fl_sampling plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};

static uint32_t token_of(void *ctx, uint32_t position)
{
    return ((const uint32_t *)ctx)[position];
}

static uint32_t pick_at(const struct fl_sampling *sampling, uint32_t *tokens, uint32_t count,
                        uint32_t position)
{
    const struct sampler_history history = {token_of, tokens, count};
    uint32_t id;
    CHECK_EQ(sampler_pick(sampler, logits, sampling, &history, position, &id), FL_OK);
    return id;
}

static void open_small(const float values[SMALL])
{
    CHECK_EQ(sampler_open(SMALL, &sampler), FL_OK);
    memcpy(logits, values, SMALL * sizeof(*values));
}

/* How often each id is drawn at positions 0 .. draws - 1. */
static void count_draws(const struct fl_sampling *sampling, uint32_t draws, uint32_t counts[SMALL])
{
    memset(counts, 0, SMALL * sizeof(*counts));
    for (uint32_t i = 0; i < draws; i++) {
        counts[pick_at(sampling, NULL, 0, i)]++;
    }
}

static void ties_go_to_the_lowest(void)
{
    open_small((const float[SMALL]){1, 3, 2, 3, 3, -1, 0, 3});
    CHECK_EQ(pick_at(&greedy, NULL, 0, 5), 1);
    struct fl_top top[5];
    CHECK_EQ(sampler_top(sampler, logits, 5, top), 5);
    static const uint32_t want[] = {1, 3, 4, 7, 2};
    for (uint32_t i = 0; i < 5; i++) {
        CHECK_EQ(top[i].id, want[i]);
    }
    struct fl_top all[FL_TOP_MAX];
    CHECK_EQ(sampler_top(sampler, logits, FL_TOP_MAX, all), SMALL);
    CHECK_EQ(all[7].id, 5);
    CHECK_EQ(sampler_top(sampler, logits, 0, top), 0);
    sampler_close(sampler);
}

static int by_value(const void *a, const void *b)
{
    const struct fl_top *x = a, *y = b;
    return x->value != y->value ? (x->value < y->value ? 1 : -1) : (x->id < y->id ? -1 : 1);
}

static void top_equals_a_sort(void)
{
    static struct fl_top sorted[LARGE];
    struct fl_top top[FL_TOP_MAX];
    CHECK_EQ(sampler_open(LARGE, &sampler), FL_OK);
    for (uint32_t round = 0; round < 4; round++) {
        for (uint32_t i = 0; i < LARGE; i++) {
            /* few values, many ties; then ascending; then descending */
            logits[i] = round == 0   ? (float)(sampler_random(1, i) * 20.0)
                        : round == 1 ? floorf((float)(sampler_random(2, i) * 20.0))
                        : round == 2 ? (float)i
                                     : -(float)i;
            sorted[i] = (struct fl_top){.id = i, .value = logits[i]};
        }
        qsort(sorted, LARGE, sizeof(sorted[0]), by_value);
        CHECK_EQ(sampler_top(sampler, logits, FL_TOP_MAX, top), FL_TOP_MAX);
        CHECK(memcmp(top, sorted, sizeof(top)) == 0);
    }
    sampler_close(sampler);
}

static void draws_follow_probabilities(void)
{
    uint32_t counts[SMALL];
    open_small((const float[SMALL]){0, 1, 2, 3, 2, 1, 0, -50});
    double weights[SMALL], total = 0;
    for (uint32_t i = 0; i < SMALL; i++) {
        weights[i] = exp((double)logits[i] / 0.7);
        total += weights[i];
    }
    struct fl_sampling sampling = plain;
    sampling.temperature = 0.7f;
    count_draws(&sampling, 20000, counts);
    for (uint32_t i = 0; i < SMALL; i++) {
        const double want = 20000 * weights[i] / total;
        CHECK(fabs(counts[i] - want) <= 5 * sqrt(want + 1));
    }
    CHECK_EQ(counts[7], 0);
    sampler_close(sampler);
}

static void filters_cut(void)
{
    uint32_t counts[SMALL];
    /* probabilities 0.5, 0.25, 0.125, .. */
    const float ln2 = 0.69314718f;
    open_small(
        (const float[SMALL]){0, -ln2, -2 * ln2, -3 * ln2, -4 * ln2, -5 * ln2, -6 * ln2, -7 * ln2});
    struct fl_sampling sampling = plain;
    sampling.top_k = 2;
    count_draws(&sampling, 2000, counts);
    CHECK(counts[0] > 1200 && counts[1] > 550 && counts[0] + counts[1] == 2000);

    sampling = plain;
    sampling.top_p = 0.7f; /* 0.502 + 0.251 reach it */
    count_draws(&sampling, 2000, counts);
    CHECK(counts[1] > 0 && counts[0] + counts[1] == 2000);

    sampling.top_p = 0.001f; /* one always stays */
    count_draws(&sampling, 100, counts);
    CHECK_EQ(counts[0], 100);

    sampling = plain;
    sampling.min_p = 0.2f; /* 1, 0.5 and 0.25 times the likeliest */
    count_draws(&sampling, 4000, counts);
    CHECK(counts[2] > 0 && counts[0] + counts[1] + counts[2] == 4000);

    sampling = plain;
    sampling.top_k = 4; /* top-p counts what top-k left: 0.533, 0.267, 0.133, 0.067 */
    sampling.top_p = 0.9f;
    count_draws(&sampling, 4000, counts);
    CHECK(counts[2] > 0 && counts[0] + counts[1] + counts[2] == 4000);

    /* The filters look at the probabilities before temperature. */
    sampling = plain;
    sampling.min_p = 0.2f;
    sampling.temperature = 50;
    count_draws(&sampling, 4000, counts);
    CHECK(counts[2] > 1100 && counts[0] + counts[1] + counts[2] == 4000);
    sampler_close(sampler);
}

static void wide_nucleus(void)
{
    /* All alike: top-p 0.5 must look at half of the vocabulary, by id. */
    CHECK_EQ(sampler_open(LARGE, &sampler), FL_OK);
    memset(logits, 0, sizeof(logits));
    struct fl_sampling sampling = plain;
    sampling.top_p = 0.5f;
    uint32_t largest = 0;
    for (uint32_t i = 0; i < 200; i++) {
        const uint32_t id = pick_at(&sampling, NULL, 0, i);
        largest = id > largest ? id : largest;
    }
    CHECK(largest < LARGE / 2 && largest > LARGE / 2 - 200);
    sampling.top_p = 0.99999994f; /* all but the last, or all */
    CHECK(pick_at(&sampling, NULL, 0, 0) < LARGE);
    sampling.top_k = LARGE + 7; /* more than there are: no limit */
    sampling.top_p = 1;
    struct fl_sampling without = sampling;
    without.top_k = 0;
    CHECK_EQ(pick_at(&sampling, NULL, 0, 3), pick_at(&without, NULL, 0, 3));
    sampler_close(sampler);
}

static void penalty(void)
{
    uint32_t tokens[] = {1, 1, 2, 2, 2, 5};
    open_small((const float[SMALL]){-1, 4, 3.9f, 3, -2, -0.5f, -3, -4});
    struct fl_sampling sampling = greedy;
    sampling.repetition_penalty = 2;
    CHECK_EQ(pick_at(&sampling, tokens, 0, 6), 1);
    CHECK_EQ(pick_at(&sampling, tokens, 2, 6), 2); /* 1 is halved once, not twice */
    CHECK_EQ(pick_at(&sampling, tokens, 3, 6), 3);
    sampling.penalty_window = 1; /* 5 alone */
    CHECK_EQ(pick_at(&sampling, tokens, 6, 6), 1);
    sampling.penalty_window = 4; /* 2 and 5 */
    CHECK_EQ(pick_at(&sampling, tokens, 6, 6), 1);
    sampling.penalty_window = 5; /* 1 too */
    CHECK_EQ(pick_at(&sampling, tokens, 6, 6), 3);
    sampling.penalty_window = 100; /* more than there are */
    CHECK_EQ(pick_at(&sampling, tokens, 6, 6), 3);
    CHECK_EQ(pick_at(&sampling, tokens, 6, 6), 3); /* nothing is left behind */
    /* A negative logit gets more negative. */
    logits[1] = logits[2] = logits[3] = -1;
    uint32_t zero[] = {0};
    sampling.penalty_window = 0;
    CHECK_EQ(pick_at(&sampling, zero, 1, 1), 5);
    uint32_t five[] = {5};
    CHECK_EQ(pick_at(&sampling, five, 1, 1), 0);
    sampler_close(sampler);
}

static void same_seed_same_draw(void)
{
    open_small((const float[SMALL]){0, 0, 0, 0, 0, 0, 0, 0});
    struct fl_sampling sampling = plain;
    sampling.seed = 42;
    uint32_t differ_seed = 0, differ_position = 0;
    struct fl_sampling other = sampling;
    other.seed = 43;
    for (uint32_t i = 0; i < 100; i++) {
        const uint32_t id = pick_at(&sampling, NULL, 0, i);
        CHECK_EQ(pick_at(&sampling, NULL, 0, i), id);
        differ_seed += pick_at(&other, NULL, 0, i) != id;
        differ_position += pick_at(&sampling, NULL, 0, i + 1) != id;
    }
    CHECK(differ_seed > 50 && differ_position > 50);
    sampler_close(sampler);
}

static void philox(void)
{
    /* Known answers of Philox4x32-10 (Random123, kat_vectors): counter 0, key 0 gives 6627e8d5
     * e169c58d .. */
    const double zero = (double)((UINT64_C(0x6627e8d5e169c58d)) >> 11) * 0x1p-53;
    CHECK(sampler_random(0, 0) == zero);
    double sum = 0;
    for (uint64_t i = 0; i < 10000; i++) {
        const double value = sampler_random(7, i);
        CHECK(value >= 0 && value < 1);
        sum += value;
    }
    CHECK(fabs(sum / 10000 - 0.5) < 0.02);
}

static void log_probabilities(void)
{
    open_small((const float[SMALL]){0.5f, -3, 2, 7.25f, 7, -80, 1, 0});
    struct fl_top top[3];
    float logprob;
    double total = 0;
    for (uint32_t i = 0; i < SMALL; i++) {
        total += exp((double)logits[i]);
    }
    for (uint32_t id = 0; id < SMALL; id++) {
        CHECK_EQ(sampler_top(sampler, logits, 3, top), 3);
        sampler_logprobs(sampler, logits, id, &logprob, top, 3);
        CHECK(fabs((double)logprob - ((double)logits[id] - log(total))) < 1e-5);
        CHECK(fabs((double)top[0].value - (7.25 - log(total))) < 1e-6);
    }
    CHECK_EQ(top[1].id, 4);
    sampler_close(sampler);
}

static void refuses_nonsense(void)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    uint32_t id = 77;
    const struct sampler_history history = {token_of, NULL, 0};
    for (uint32_t i = 0; i < 3; i++) {
        open_small((const float[SMALL]){1, 2, bad[i], 3, 0, 0, 0, 0});
        CHECK_EQ(sampler_pick(sampler, logits, &greedy, &history, 9, &id), FL_MALFORMED);
        CHECK(strstr(fl_last_error(), "position 9") != NULL);
        CHECK_EQ(sampler_pick(sampler, logits, &plain, &history, 9, &id), FL_MALFORMED);
        CHECK_EQ(id, 77);
        sampler_close(sampler);
    }
    open_small((const float[SMALL]){1e38f, 2, 0, 3, 0, 0, 0, 0});
    struct fl_sampling sampling = greedy;
    sampling.repetition_penalty = 1e-30f;
    uint32_t zero[] = {0};
    const struct sampler_history one = {token_of, zero, 1};
    CHECK_EQ(sampler_pick(sampler, logits, &sampling, &one, 1, &id), FL_INVALID);
    sampler_close(sampler);
}

static void settings(void)
{
    struct {
        const char *says;
        struct fl_sampling sampling;
    } cases[] = {
        {"temperature is -1", {.temperature = -1, .top_p = 1, .repetition_penalty = 1}},
        {"temperature is nan", {.temperature = NAN, .top_p = 1, .repetition_penalty = 1}},
        {"temperature is 101", {.temperature = 101, .top_p = 1, .repetition_penalty = 1}},
        {"top-p is 0; it must be above 0", {.repetition_penalty = 1}},
        {"top-p is 1.5", {.top_p = 1.5f, .repetition_penalty = 1}},
        {"min-p is -0.5", {.top_p = 1, .min_p = -0.5f, .repetition_penalty = 1}},
        {"min-p is 2", {.top_p = 1, .min_p = 2, .repetition_penalty = 1}},
        {"repetition penalty is 0", {.top_p = 1}},
        {"repetition penalty is inf", {.top_p = 1, .repetition_penalty = INFINITY}},
        {"top-logits is 129", {.top_p = 1, .repetition_penalty = 1, .top_logits = 129}},
        {"logprobs is 4000", {.top_p = 1, .repetition_penalty = 1, .logprobs = 4000}},
    };
    CHECK_EQ(sampler_check(&greedy), FL_OK);
    CHECK_EQ(sampler_check(&plain), FL_OK);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        CHECK_EQ(sampler_check(&cases[i].sampling), FL_INVALID);
        CHECK(strstr(fl_last_error(), cases[i].says) != NULL);
    }
}

static const struct test_case cases[] = {
    {"sampler: greedy takes the largest, the lowest id on a tie", ties_go_to_the_lowest},
    {"sampler: the best n equal those of a full sort", top_equals_a_sort},
    {"sampler: draws follow the probabilities at a temperature", draws_follow_probabilities},
    {"sampler: top-k, top-p and min-p cut in this order, before temperature", filters_cut},
    {"sampler: a nucleus wider than the first look", wide_nucleus},
    {"sampler: the penalty meets each token of the window once", penalty},
    {"sampler: a draw depends on seed and position alone", same_seed_same_draw},
    {"sampler: random numbers equal Philox's known answer", philox},
    {"sampler: log-probabilities equal those computed in double", log_probabilities},
    {"sampler: a logit that is no number is an error", refuses_nonsense},
    {"sampler: settings out of range are refused by name", settings},
};

TEST_MAIN(cases)
