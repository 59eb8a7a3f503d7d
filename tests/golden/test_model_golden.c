/* Both real models against reference logits and greedy tokens, float and 8-bit activations.
 *
 * The reference computed with float weights and activations throughout; README.md here says how,
 * and what llama.cpp's 8-bit activations cost on the same prompts.  All prompts of a file run
 * through one stage together. */
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "tests/harness.h"
#include "tests/support/jsonl.h"
#include "tests/support/stage_chain.h"
#include "tests/support/temp_folder.h"

enum {
    RECORDS_MAX = 32,
    PROMPT_MAX = 2048,
    GREEDY_MAX = 32,
    COMPARED = 16, /* greedy tokens, as safe16 promises */
    TOP = 10,
};

struct ids {
    size_t count;
    uint32_t id[GREEDY_MAX];
};

struct record {
    char id[32];
    size_t prompt_count;
    uint32_t prompt[PROMPT_MAX];
    bool safe16;
    struct ids greedy;
    struct ids llamacpp_greedy;
    struct fl_top top[TOP];
    float llamacpp_top[TOP]; /* of the ids in `top`; NAN when it is not listed */
};

struct golden {
    const char *file;
    const char *model;
    uint32_t stops[2];
    double float_limit; /* of a logit's deviation, float activations */
    double q8_limit;    /* 8-bit activations */
    double q8_mean_limit;
    uint32_t count;
    struct record records[RECORDS_MAX];
};

/* ---- reading ---- */

static double read_number(struct jsonl_slice value)
{
    char text[64];
    CHECK(value.size < sizeof(text));
    memcpy(text, value.data, value.size);
    text[value.size] = 0;
    char *end;
    const double number = strtod(text, &end);
    CHECK(end != text);
    return number;
}

static void read_top(struct jsonl_slice line, const char *key, struct fl_top out[TOP])
{
    struct jsonl_slice array, pair, value;
    CHECK(jsonl_field(line, key, &array));
    for (size_t i = 0; i < TOP; i++) {
        CHECK(jsonl_element(array, i, &pair));
        CHECK(jsonl_element(pair, 0, &value));
        out[i].id = (uint32_t)read_number(value);
        CHECK(jsonl_element(pair, 1, &value));
        out[i].value = (float)read_number(value);
    }
}

static void read_ids(struct jsonl_slice line, const char *key, struct ids *out)
{
    struct jsonl_slice value;
    CHECK(jsonl_field(line, key, &value));
    CHECK(jsonl_uints(value, out->id, GREEDY_MAX, &out->count));
}

static void read_record(struct jsonl_slice line, struct record *out)
{
    struct jsonl_slice value;
    struct fl_top llamacpp[TOP];
    size_t size;
    CHECK(jsonl_field(line, "id", &value));
    CHECK(jsonl_string(value, out->id, sizeof(out->id) - 1, &size));
    out->id[size] = 0;
    CHECK(jsonl_field(line, "prompt_tokens", &value));
    CHECK(jsonl_uints(value, out->prompt, PROMPT_MAX, &out->prompt_count));
    CHECK(jsonl_field(line, "safe16", &value) && jsonl_bool(value, &out->safe16));
    read_ids(line, "greedy", &out->greedy);
    read_ids(line, "llamacpp_greedy", &out->llamacpp_greedy);
    read_top(line, "top", out->top);
    read_top(line, "llamacpp_top", llamacpp);
    for (size_t i = 0; i < TOP; i++) {
        out->llamacpp_top[i] = NAN;
        for (size_t j = 0; j < TOP; j++) {
            if (llamacpp[j].id == out->top[i].id) {
                out->llamacpp_top[i] = llamacpp[j].value;
            }
        }
    }
}

/* Sanitizers slow a prompt of 1500 tokens down to minutes: their presets set a limit. */
static size_t prompt_max(void)
{
    const char *limit = getenv("FIRSTLIGHT_GOLDEN_PROMPT_MAX");
    return limit != NULL ? strtoull(limit, NULL, 10) : PROMPT_MAX;
}

static void read_golden(struct golden *golden)
{
    struct jsonl file;
    struct jsonl_slice line;
    char path[256];
    snprintf(path, sizeof(path), "tests/golden/%s", golden->file);
    CHECK(jsonl_open(&file, path));
    uint32_t read = 0;
    golden->count = 0;
    for (; jsonl_next(&file, &line); read++) {
        CHECK(golden->count < RECORDS_MAX);
        read_record(line, &golden->records[golden->count]);
        golden->count += golden->records[golden->count].prompt_count <= prompt_max() ? 1 : 0;
    }
    jsonl_close(&file);
    CHECK_EQ(read, 24);
    CHECK(golden->count >= 12);
}

/* ---- comparing ---- */

struct deviation {
    double sum;
    double max;
    uint32_t count;
};

static void add_deviation(struct deviation *deviation, double difference)
{
    deviation->sum += fabs(difference);
    deviation->max = fabs(difference) > deviation->max ? fabs(difference) : deviation->max;
    deviation->count++;
}

static double mean_of(const struct deviation *deviation)
{
    return deviation->sum / deviation->count;
}

static bool agrees(const struct ids *want, const uint32_t *got, size_t count)
{
    const size_t compared = want->count < COMPARED ? want->count : COMPARED;
    return count >= compared && memcmp(want->id, got, compared * sizeof(*got)) == 0;
}

static float logit_of(const struct stage_chain_request *answer, uint32_t id)
{
    for (uint32_t i = 0; i < answer->top_count; i++) {
        if (answer->top[i].id == id) {
            return answer->top[i].value;
        }
    }
    printf("  token %" PRIu32 " is not among the %" PRIu32 " best\n", id, answer->top_count);
    CHECK(false);
    return 0;
}

struct outcome {
    struct deviation ours;
    struct deviation llamacpp;
    uint32_t safe;
    uint32_t ours_agree; /* of safe */
    uint32_t llamacpp_agree;
};

static struct outcome compare(const struct golden *golden,
                              const struct stage_chain_request answers[RECORDS_MAX])
{
    struct outcome outcome = {0};
    for (uint32_t i = 0; i < golden->count; i++) {
        const struct record *record = &golden->records[i];
        struct deviation own = {0};
        for (size_t j = 0; j < TOP; j++) {
            const double want = (double)record->top[j].value;
            const double difference = (double)logit_of(&answers[i], record->top[j].id) - want;
            add_deviation(&own, difference);
            add_deviation(&outcome.ours, difference);
            if (!isnan(record->llamacpp_top[j])) {
                add_deviation(&outcome.llamacpp, (double)record->llamacpp_top[j] - want);
            }
        }
        const bool agree = agrees(&record->greedy, answers[i].tokens, answers[i].count);
        if (record->safe16) {
            outcome.safe++;
            outcome.ours_agree += agree ? 1 : 0;
            outcome.llamacpp_agree +=
                agrees(&record->greedy, record->llamacpp_greedy.id, record->llamacpp_greedy.count)
                    ? 1
                    : 0;
        }
        printf("  %s %4zu tokens: mean %.5f max %.5f %s\n", record->id, record->prompt_count,
               mean_of(&own), own.max,
               agree ? "agrees" : (record->safe16 ? "DIFFERS" : "differs, not safe"));
    }
    printf("  %s: firstlight mean %.5f max %.5f, %" PRIu32 " of %" PRIu32 " agree\n", golden->file,
           mean_of(&outcome.ours), outcome.ours.max, outcome.ours_agree, outcome.safe);
    printf("  %s: llama.cpp  mean %.5f max %.5f, %" PRIu32 " of %" PRIu32 " agree\n", golden->file,
           mean_of(&outcome.llamacpp), outcome.llamacpp.max, outcome.llamacpp_agree, outcome.safe);
    return outcome;
}

/* ---- running ---- */

static struct golden golden; /* too large for a stack */
static struct stage_chain_request answers[RECORDS_MAX];

static void answer_all(bool activations_f32)
{
    char path[TEMP_PATH_MAX];
    if (!real_model_path(golden.model, path)) {
        TEST_SKIP("the model is not here; cluster/models fetches it");
    }
    read_golden(&golden);
    struct stage_chain *chain;
    const struct stage_chain_config config = {
        .path = path,
        .stage_count = 1,
        .chunk_rows = 64,
        .context = PROMPT_MAX,
        .kv_block_count = 320,
        .sequence_max = RECORDS_MAX,
        .threads = 2,
        .activations_f32 = activations_f32,
    };
    CHECK_EQ(stage_chain_open(&config, &chain), FL_OK);
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
    const clock_t start = clock();
    for (uint32_t i = 0; i < golden.count; i++) {
        answers[i] = (struct stage_chain_request){
            .sequence_id = i + 1,
            .prompt = golden.records[i].prompt,
            .prompt_count = (uint32_t)golden.records[i].prompt_count,
            .max_tokens = COMPARED,
            .stop_count = 2,
            .stop_tokens = {golden.stops[0], golden.stops[1]},
            .sampling = {.top_p = 1, .repetition_penalty = 1, .top_logits = FL_TOP_MAX},
        };
        CHECK_EQ(stage_chain_admit(chain, &answers[i]), FL_OK);
    }
    CHECK_EQ(stage_chain_settle(chain), FL_OK);
    printf("  %.1f s of processor time\n", (double)(clock() - start) / CLOCKS_PER_SEC);
    for (uint32_t i = 0; i < golden.count; i++) {
        CHECK_EQ(answers[i].failure, FL_OK);
        CHECK(answers[i].finish != FL_FINISH_NONE);
    }
    stage_chain_close(chain);
}

static void check_float(void)
{
    answer_all(true);
    const struct outcome outcome = compare(&golden, answers);
    CHECK(outcome.ours.max <= golden.float_limit);
    CHECK_EQ(outcome.ours_agree, outcome.safe);
}

static void check_q8(void)
{
    answer_all(false);
    const struct outcome outcome = compare(&golden, answers);
    CHECK(outcome.ours.max <= golden.q8_limit);
    CHECK(mean_of(&outcome.ours) <= golden.q8_mean_limit);
    CHECK(outcome.ours_agree >= outcome.llamacpp_agree);
}

static void choose_smollm2(void)
{
    golden = (struct golden){
        .file = "smollm2.jsonl",
        .model = "SmolLM2-135M-Instruct.Q4_1.gguf",
        .stops = {0, 2},
        .float_limit = 0.001,
        .q8_limit = 1.0,
        .q8_mean_limit = 0.30,
    };
}

static void choose_gemma3(void)
{
    golden = (struct golden){
        .file = "gemma3.jsonl",
        .model = "gemma-3-270m-q4_k_m.gguf",
        .stops = {1, 106},
        .float_limit = 0.02,
        .q8_limit = 1.7,
        .q8_mean_limit = 0.35,
    };
}

static void smollm2_float(void)
{
    choose_smollm2();
    check_float();
}

static void smollm2_q8(void)
{
    choose_smollm2();
    check_q8();
}

static void gemma3_float(void)
{
    choose_gemma3();
    check_float();
}

static void gemma3_q8(void)
{
    choose_gemma3();
    check_q8();
}

static const struct test_case cases[] = {
    {"SmolLM2, float activations: safe tokens agree, logits within 0.001", smollm2_float},
    {"Gemma 3, float activations: safe tokens agree, logits within 0.02", gemma3_float},
    {"SmolLM2, 8-bit activations: no worse than llama.cpp", smollm2_q8},
    {"Gemma 3, 8-bit activations: no worse than llama.cpp", gemma3_q8},
};

TEST_MAIN(cases)
