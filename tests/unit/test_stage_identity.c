/* The same request gives the same tokens and logits, to the last bit, however it is run. */
#include <stdlib.h>

#include "tests/harness.h"
#include "tests/support/model_writer.h"
#include "tests/support/stage_chain.h"
#include "tests/support/temp_folder.h"

enum {
    PROMPTS = 11,
    MAX_TOKENS = 6,
    CONTEXT = 160,
};

/* Around the chunk, the page of 32 and Gemma's window of 8. */
static const uint32_t lengths[PROMPTS] = {1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100};

/* A model file and what each prompt gives when it is run alone, in one stage, by one thread. */
struct subject {
    struct temp_folder folder;
    char path[TEMP_PATH_MAX];
    uint32_t vocabulary;
    uint32_t prompts[PROMPTS][CONTEXT];
    struct stage_chain_request want[PROMPTS];
};

static struct subject subject;

/* Numbers that follow from the seed: Marsaglia, Xorshift RNGs, 2003. */
static uint32_t next_random(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static struct stage_chain_config config_of(uint32_t stage_count, uint32_t chunk_rows)
{
    return (struct stage_chain_config){
        .path = subject.path,
        .stage_count = stage_count,
        .chunk_rows = chunk_rows,
        .context = CONTEXT,
        .sequence_max = PROMPTS,
        .threads = 1,
    };
}

static struct stage_chain_request request_of(uint32_t prompt)
{
    return (struct stage_chain_request){
        .sequence_id = prompt + 1,
        .prompt = subject.prompts[prompt],
        .prompt_count = lengths[prompt],
        .max_tokens = MAX_TOKENS,
        /* Half of them draw, with a penalty, so that history and random numbers count too. */
        .sampling = {.temperature = prompt % 2 == 0 ? 0.0f : 0.8f,
                     .top_k = 40,
                     .top_p = 0.95f,
                     .repetition_penalty = 1.1f,
                     .penalty_window = 64,
                     .seed = prompt,
                     .top_logits = FL_TOP_MAX,
                     .logprobs = 2},
    };
}

static void open_subject(struct model_spec spec, bool activations_f32)
{
    memset(&subject, 0, sizeof(subject));
    temp_folder_make(&subject.folder);
    temp_folder_path(&subject.folder, "tiny.gguf", subject.path);
    CHECK_EQ(model_write(&spec, subject.path), FL_OK);

    struct stage_chain_config config = config_of(1, 64);
    config.isa = "scalar";
    config.activations_f32 = activations_f32;
    struct stage_chain *chain;
    CHECK_EQ(stage_chain_open(&config, &chain), FL_OK);
    subject.vocabulary = stage_chain_manifest(chain)->shape.vocabulary;
    uint32_t state = 2463534242u;
    for (uint32_t i = 0; i < PROMPTS; i++) {
        for (uint32_t j = 0; j < lengths[i]; j++) {
            subject.prompts[i][j] = next_random(&state) % subject.vocabulary;
        }
        subject.want[i] = request_of(i);
        CHECK_EQ(stage_chain_answer(chain, &subject.want[i]), FL_OK);
        CHECK_EQ(subject.want[i].failure, FL_OK);
        CHECK_EQ(subject.want[i].count, MAX_TOKENS);
        CHECK_EQ(subject.want[i].finish, FL_FINISH_LENGTH);
        CHECK_EQ(subject.want[i].top_count, FL_TOP_MAX);
    }
    stage_chain_close(chain);
}

static void close_subject(void)
{
    temp_folder_remove(&subject.folder);
}

static struct model_spec llama(enum fl_dtype dtype)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, dtype);
    spec.layer_count = 4;
    return spec;
}

static void check_same(const struct stage_chain_request *got, uint32_t prompt)
{
    const struct stage_chain_request *want = &subject.want[prompt];
    CHECK_EQ(got->failure, FL_OK);
    CHECK_EQ(got->count, want->count);
    CHECK(memcmp(got->tokens, want->tokens, want->count * sizeof(want->tokens[0])) == 0);
    CHECK(memcmp(got->logprobs, want->logprobs, want->count * sizeof(want->logprobs[0])) == 0);
    CHECK_EQ(got->top_count, want->top_count);
    CHECK(memcmp(got->top, want->top, want->top_count * sizeof(want->top[0])) == 0);
}

static struct stage_chain_request got[PROMPTS];

/* All prompts, `at_once` of them at a time. */
static void check_answers(const struct stage_chain_config *config, uint32_t at_once)
{
    struct stage_chain *chain;
    CHECK_EQ(stage_chain_open(config, &chain), FL_OK);
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
    for (uint32_t first = 0; first < PROMPTS; first += at_once) {
        const uint32_t end = first + at_once < PROMPTS ? first + at_once : PROMPTS;
        for (uint32_t i = first; i < end; i++) {
            got[i] = request_of(i);
            CHECK_EQ(stage_chain_admit(chain, &got[i]), FL_OK);
        }
        CHECK_EQ(stage_chain_settle(chain), FL_OK);
        for (uint32_t i = first; i < end; i++) {
            check_same(&got[i], i);
            stage_chain_end(chain, &got[i], 0);
        }
    }
    for (uint32_t i = 0; i < config->stage_count; i++) {
        CHECK_EQ(stage_kv_blocks_free(stage_chain_stage(chain, i)),
                 stage_chain_plan(chain, i)->kv_block_count);
    }
    stage_chain_close(chain);
}

static void chunks_of(struct model_spec spec)
{
    static const uint32_t chunks[] = {1, 2, 7, 31, 32, 33, 64};
    open_subject(spec, false);
    for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        const struct stage_chain_config config = config_of(1, chunks[i]);
        check_answers(&config, 1);
    }
    close_subject();
}

static void chunks_llama(void)
{
    chunks_of(llama(FL_DTYPE_Q4_0));
}

static void chunks_gemma(void)
{
    chunks_of(model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q8_0));
}

static void cuts_of(struct model_spec spec)
{
    open_subject(spec, false);
    for (uint32_t stages = 1; stages <= 4; stages++) {
        const struct stage_chain_config config = config_of(stages, 7 * stages);
        check_answers(&config, 3);
    }
    close_subject();
}

static void cuts_llama(void)
{
    struct model_spec spec = llama(FL_DTYPE_Q4_1);
    spec.untied = true;
    cuts_of(spec);
}

static void cuts_gemma(void)
{
    cuts_of(model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q6_K));
}

static void sessions(void)
{
    static const uint32_t at_once[] = {1, 3, 8, PROMPTS};
    open_subject(llama(FL_DTYPE_Q5_1), false);
    for (size_t i = 0; i < sizeof(at_once) / sizeof(at_once[0]); i++) {
        for (uint32_t stages = 1; stages <= 3; stages += 2) {
            const struct stage_chain_config config = config_of(stages, 5);
            check_answers(&config, at_once[i]);
        }
    }
    close_subject();
}

static void threads(void)
{
    open_subject(llama(FL_DTYPE_Q4_K), false);
    for (uint32_t count = 2; count <= 3; count++) {
        struct stage_chain_config config = config_of(2, 32);
        config.threads = count;
        check_answers(&config, 4);
    }
    close_subject();
}

/* Asks the kernels once, because they log a refusal. */
static bool has_isa(const char *name)
{
    static int known[2]; /* avx2, avx512: 1 yes, 2 no */
    int *is_known = &known[strcmp(name, "avx512") == 0];
    if (*is_known == 0) {
        const struct kernel_ops *kernels;
        *is_known = kernel_ops_select(name, &kernels) == FL_OK ? 1 : 2;
        if (*is_known == 1) {
            printf("  checked here: %s\n", name);
        }
    }
    return *is_known == 1;
}

static void isas_of(struct model_spec spec, bool activations_f32)
{
    static const char *const names[] = {"avx2", "avx512"};
    spec.layer_count = 2;
    open_subject(spec, activations_f32); /* by scalar kernels */
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!has_isa(names[i])) {
            continue;
        }
        struct stage_chain_config config = config_of(2, 33);
        config.isa = names[i];
        config.activations_f32 = activations_f32;
        check_answers(&config, 8);
    }
    close_subject();
}

static void isas_q8(void)
{
    static const enum fl_dtype dtypes[] = {FL_DTYPE_Q4_0, FL_DTYPE_Q4_1, FL_DTYPE_Q5_0,
                                           FL_DTYPE_Q5_1, FL_DTYPE_Q8_0, FL_DTYPE_Q4_K,
                                           FL_DTYPE_Q5_K, FL_DTYPE_Q6_K};
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
        isas_of(llama(dtypes[i]), false);
    }
    isas_of(model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q4_K), false);
}

static void isas_float(void)
{
    isas_of(llama(FL_DTYPE_F16), false);
    isas_of(llama(FL_DTYPE_BF16), true);
    isas_of(model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_F32), true);
    isas_of(llama(FL_DTYPE_Q5_K), true);
}

static void odd_shapes(void)
{
    static const uint32_t heads_kv[] = {1, 2, 4, 2};
    static const uint32_t widths[] = {32, 96, 64, 160};
    struct model_spec spec = llama(FL_DTYPE_Q8_0);
    spec.arrays = true;
    spec.heads_kv = heads_kv;
    spec.ffn_widths = widths;
    spec.head_size = 32; /* not width / heads */
    spec.rope_dim = 16;
    spec.rope_freqs = true;
    spec.dtypes[FL_ROLE_ATTN_V] = FL_DTYPE_F16; /* one input, two kinds of product */
    open_subject(spec, false);
    for (uint32_t stages = 1; stages <= 4; stages++) {
        const struct stage_chain_config config = config_of(stages, 16);
        check_answers(&config, 8);
    }
    close_subject();
}

static void long_factors(void)
{
    struct model_spec spec = llama(FL_DTYPE_F16);
    spec.rope_scaling = "longrope";
    spec.rope_factors = true;
    spec.rope_factor = 4;
    spec.rope_original_context = 128; /* below CONTEXT: the long ones count */
    open_subject(spec, false);
    const struct stage_chain_config config = config_of(3, 16);
    check_answers(&config, 8);
    close_subject();
}

/* Pieces come in an order of their own, some tasks run between any two. */
static void late_weights(void)
{
    open_subject(model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q4_0), false);
    uint32_t state = 88172645u;
    for (uint32_t round = 0; round < 16; round++) {
        struct stage_chain_config config = config_of(1 + round % 3, 1 + 6 * (round % 5));
        config.embed_late = round % 2 == 1;
        config.no_overlap = round % 8 == 7;
        struct stage_chain *chain;
        CHECK_EQ(stage_chain_open(&config, &chain), FL_OK);
        for (uint32_t i = 0; i < PROMPTS; i++) {
            got[i] = request_of(i);
            CHECK_EQ(stage_chain_admit(chain, &got[i]), FL_OK);
        }
        while (stage_chain_missing(chain) > 0) {
            uint32_t stage, piece;
            stage_chain_missing_at(chain, next_random(&state) % stage_chain_missing(chain), &stage,
                                   &piece);
            CHECK_EQ(stage_chain_load(chain, stage, piece), FL_OK);
            for (uint32_t i = next_random(&state) % 20; i > 0; i--) {
                const fl_status status = stage_chain_pump(chain);
                CHECK(status == FL_OK || status == FL_AGAIN);
            }
        }
        CHECK_EQ(stage_chain_settle(chain), FL_OK);
        for (uint32_t i = 0; i < PROMPTS; i++) {
            check_same(&got[i], i);
        }
        stage_chain_close(chain);
    }
    close_subject();
}

/* Sessions start and end at any time; those that stay must not notice. */
static void cancelled_neighbours(void)
{
    open_subject(llama(FL_DTYPE_Q4_0), false);
    uint32_t state = 362436069u;
    struct stage_chain_config config = config_of(3, 4);
    config.kv_block_count = 16; /* few: blocks change hands all the time */
    struct stage_chain *chain;
    CHECK_EQ(stage_chain_open(&config, &chain), FL_OK);
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
    bool running[PROMPTS] = {false};
    uint32_t finished = 0;
    uint32_t cancelled = 0;
    for (uint32_t turn = 0; turn < 3000 && finished < 60; turn++) {
        const uint32_t i = next_random(&state) % PROMPTS;
        if (!running[i]) {
            got[i] = request_of(i);
            const uint32_t blocks = (lengths[i] + MAX_TOKENS + 31) / 32;
            if (blocks <= stage_kv_blocks_free(stage_chain_stage(chain, 0))) {
                CHECK_EQ(stage_chain_admit(chain, &got[i]), FL_OK);
                running[i] = true;
            }
        } else if (got[i].finish != FL_FINISH_NONE) {
            check_same(&got[i], i);
            stage_chain_end(chain, &got[i], 0);
            running[i] = false;
            finished++;
        } else if (next_random(&state) % 8 == 0) {
            stage_chain_end(chain, &got[i], 0);
            running[i] = false;
            cancelled++;
        }
        for (uint32_t j = next_random(&state) % 12; j > 0; j--) {
            const fl_status status = stage_chain_pump(chain);
            CHECK(status == FL_OK || status == FL_AGAIN);
        }
    }
    printf("  %" PRIu32 " finished, %" PRIu32 " cancelled\n", finished, cancelled);
    CHECK(finished >= 30 && cancelled >= 30);
    stage_chain_close(chain);
    close_subject();
}

/* A conversation: the second turn keeps what it shares with the first. */
static void kept_positions(void)
{
    static const uint32_t keeps[] = {1, 31, 32, 33, 63, 64, 65, 99};
    const uint32_t prompt = PROMPTS - 1; /* 100 tokens */
    open_subject(model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q8_0), false);
    struct stage_chain *chain;
    const struct stage_chain_config config = config_of(2, 16);
    CHECK_EQ(stage_chain_open(&config, &chain), FL_OK);
    CHECK_EQ(stage_chain_load_all(chain), FL_OK);
    for (size_t i = 0; i < sizeof(keeps) / sizeof(keeps[0]); i++) {
        /* The first turn agrees with the prompt on `keep` tokens and goes another way after. */
        uint32_t first[CONTEXT];
        for (uint32_t j = 0; j < 120; j++) {
            first[j] = j < keeps[i] ? subject.prompts[prompt][j] : (j * 7 + 1) % subject.vocabulary;
        }
        struct stage_chain_request turn = request_of(prompt);
        turn.sequence_id = 100 + i;
        turn.prompt = first;
        turn.prompt_count = 120;
        turn.max_tokens = 3;
        CHECK_EQ(stage_chain_admit(chain, &turn), FL_OK);
        CHECK_EQ(stage_chain_settle(chain), FL_OK);
        stage_chain_end(chain, &turn, 121);

        got[0] = request_of(prompt);
        got[0].sequence_id = 100 + i;
        got[0].keep = keeps[i];
        CHECK_EQ(stage_chain_admit(chain, &got[0]), FL_OK);
        CHECK_EQ(stage_chain_settle(chain), FL_OK);
        check_same(&got[0], prompt);
        stage_chain_end(chain, &got[0], 0);
    }
    stage_chain_close(chain);
    close_subject();
}

static const struct test_case cases[] = {
    {"identity: llama, any chunk", chunks_llama},
    {"identity: gemma3, any chunk", chunks_gemma},
    {"identity: llama, untied, cut into 1 to 4 stages", cuts_llama},
    {"identity: gemma3 cut into 1 to 4 stages", cuts_gemma},
    {"identity: any number of sessions at once", sessions},
    {"identity: any number of threads", threads},
    {"identity: every quantised type on every instruction set", isas_q8},
    {"identity: float weights and float activations on every instruction set", isas_float},
    {"identity: heads and widths that differ by layer, types that differ by matrix", odd_shapes},
    {"identity: long RoPE factors in every stage", long_factors},
    {"identity: weights that arrive late, in any order", late_weights},
    {"identity: neighbours that are cancelled, blocks that change hands", cancelled_neighbours},
    {"identity: a conversation that continues equals one from the start", kept_positions},
};

TEST_MAIN(cases)
