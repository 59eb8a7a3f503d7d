#include "tests/support/sim_question.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "tests/support/model_writer.h"
#include "tests/support/sim_cluster.h"

const char *const sim_models[SIM_MODEL_COUNT] = {"tiny", "gem", "script"};

/* Answers ------------------------------------------------------------------------------------ */

static bool same_tops(const struct fl_top *a, const struct fl_top *b, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (a[i].id != b[i].id || memcmp(&a[i].value, &b[i].value, sizeof(float)) != 0) {
            return false;
        }
    }
    return true;
}

static bool same_tokens(const struct sim_answer *a, const struct sim_answer *b, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (a->tokens[i] != b->tokens[i] ||
            memcmp(&a->logprobs[i], &b->logprobs[i], sizeof(float)) != 0 ||
            !same_tops(a->tops[i], b->tops[i], SIM_LOGPROBS)) {
            printf("  token %" PRIu32 " is %" PRIu32 ", want %" PRIu32 "\n", i, a->tokens[i],
                   b->tokens[i]);
            return false;
        }
    }
    return true;
}

bool sim_answer_equal(const struct sim_answer *got, const struct sim_answer *want)
{
    if (got->finish != want->finish || got->token_count != want->token_count ||
        got->output_tokens != want->output_tokens || got->logit_count != want->logit_count) {
        printf("  finish %d tokens %" PRIu32 " (%" PRIu32 ") logits %" PRIu32 ", want %d %" PRIu32
               " (%" PRIu32 ") %" PRIu32 "\n",
               (int)got->finish, got->token_count, got->output_tokens, got->logit_count,
               (int)want->finish, want->token_count, want->output_tokens, want->logit_count);
        return false;
    }
    if (!same_tokens(got, want, want->token_count)) {
        return false;
    }
    if (!same_tops(got->logits, want->logits, SIM_LOGITS)) {
        printf("  the logits differ\n");
        return false;
    }
    if (got->text_size != want->text_size || memcmp(got->text, want->text, want->text_size) != 0) {
        printf("  text '%.*s', want '%.*s'\n", (int)got->text_size, got->text, (int)want->text_size,
               want->text);
        return false;
    }
    return true;
}

bool sim_answer_begins(const struct sim_answer *got, const struct sim_answer *want)
{
    /* Text held back comes out when a request is cancelled: half a character as its stand-in. */
    return got->token_count <= want->token_count && same_tokens(got, want, got->token_count);
}

/* Models ------------------------------------------------------------------------------------- */

static struct model_spec tiny_spec(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    spec.layer_count = 5;
    return spec;
}

/* After 'a' comes "HELO STopq" and the end, after 'b' half a euro sign, its rest, 'c' and the end,
 * after 'x' x for ever. */
enum { STEP_STOP, STEP_HALF, STEP_COUNT };

static const struct model_token script_tokens[STEP_COUNT] = {
    {.text = {"ST", 2}, .type = MODEL_TOKEN_NORMAL},
    {.text = {"\xe2\x82", 2}, .type = MODEL_TOKEN_NORMAL}, /* two thirds of a euro sign */
};

static fl_status script_write(const char *path)
{
    struct model_spec spec =
        model_spec_scripted(TOKEN_TABLE_BPE, script_tokens, STEP_COUNT, NULL, 0);
    struct token_table table;
    uint32_t chain[512] = {0};
    model_spec_tokens(&spec, &table);
    FL_ASSERT(table.count <= 512);
    const uint32_t half = token_table_find(&table, "\xe2\x82");
    const uint32_t byte0 = token_table_find(&table, "a") - 'a';
    const uint32_t stop = half - 1;
    const uint32_t rest = byte0 + 0xac;
    const uint32_t end = table.eos;
    static const char says[] = "aHELO ";
    for (uint32_t i = 0; says[i + 1] != '\0'; i++) {
        chain[byte0 + (unsigned char)says[i]] = byte0 + (unsigned char)says[i + 1];
    }
    chain[token_table_find(&table, " ")] = stop;
    chain[stop] = byte0 + 'o';
    chain[byte0 + 'o'] = byte0 + 'p';
    chain[byte0 + 'p'] = byte0 + 'q';
    chain[byte0 + 'q'] = end;
    chain[byte0 + 'b'] = half;
    chain[half] = rest;
    chain[rest] = byte0 + 'c';
    chain[byte0 + 'c'] = end;
    chain[byte0 + 'x'] = byte0 + 'x';
    spec.layer_count = 4;
    spec.chain = chain;
    spec.chain_count = table.count;
    token_table_close(&table);
    return model_write(&spec, path);
}

static fl_status models_write(const struct temp_folder *folder)
{
    char path[TEMP_PATH_MAX];
    const struct model_spec tiny = tiny_spec();
    const struct model_spec gem = model_spec_tiny(FL_ARCHITECTURE_GEMMA3, FL_DTYPE_Q8_0);
    temp_folder_path(folder, "tiny.gguf", path);
    FL_TRY(model_write(&tiny, path));
    temp_folder_path(folder, "gem.gguf", path);
    FL_TRY(model_write(&gem, path));
    temp_folder_path(folder, "script.gguf", path);
    return script_write(path);
}

/* Questions ---------------------------------------------------------------------------------- */

static struct sim_question *add(struct sim_book *book, const char *model, uint32_t max_tokens)
{
    FL_ASSERT(book->count < SIM_QUESTION_MAX);
    struct sim_question *question = &book->questions[book->count++];
    *question = (struct sim_question){
        .model = model,
        .max_tokens = max_tokens,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .top_logits = SIM_LOGITS}};
    return question;
}

static struct sim_question *add_text(struct sim_book *book, const char *model, const char *text,
                                     uint32_t max_tokens)
{
    struct sim_question *question = add(book, model, max_tokens);
    question->text = text;
    return question;
}

static struct sim_question *add_tokens(struct sim_book *book, const char *model, uint32_t count,
                                       uint32_t salt, uint32_t max_tokens)
{
    struct sim_question *question = add(book, model, max_tokens);
    question->token_count = count;
    for (uint32_t i = 0; i < count; i++) {
        question->tokens[i] = 10 + (salt + i * 7 + i * i % 11) % 200;
    }
    return question;
}

static void add_facts(struct sim_book *book)
{
    static const struct {
        const char *prompt, *stop, *says;
        uint32_t max_tokens;
    } facts[] = {
        {"a", NULL, "HELO STopq", 40},
        {"a", "STop", "HELO ", 40},
        {"a", "O S", "HEL", 40},
        {"a", "qX", "HELO STopq", 40},
        {"a", "zz", "HELO", 4},
        {"b", NULL,
         "\xe2\x82\xac"
         "c",
         9},
        {"b", NULL, "\xef\xbf\xbd", 1},
        {"c", NULL, "", 5},
        {"x", "xxxxy", "xxxxxxxx", 8},
    };
    for (size_t i = 0; i < sizeof(facts) / sizeof(facts[0]); i++) {
        struct sim_question *question =
            add_text(book, "script", facts[i].prompt, facts[i].max_tokens);
        question->stop = facts[i].stop;
        question->says = facts[i].says;
    }
}

static void add_random(struct sim_book *book)
{
    static const uint32_t counts[] = {1, 15, 16, 17, 64, 130};
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        struct sim_question *question = add_tokens(book, "tiny", counts[i], 3 * i, 12);
        question->sampling.logprobs = i % 2 == 0 ? SIM_LOGPROBS : 0;
        (void)add_tokens(book, "gem", counts[i], 5 * i, 9);
    }
    add_tokens(book, "tiny", 200, 9, 0)->ignore_end = true; /* to the last position */
    (void)add_text(book, "tiny", "Tell me about the first token.", 20);
    struct sim_question *warm = add_text(book, "gem", "What is a pool of machines?", 16);
    warm->sampling.temperature = 0.9f;
    warm->sampling.top_k = 40;
    warm->sampling.seed = 17;
    warm = add_text(book, "tiny", "Roll the dice", 24);
    warm->sampling.temperature = 1.3f;
    warm->sampling.top_p = 0.9f;
    warm->sampling.repetition_penalty = 1.2f;
    warm->sampling.seed = 99;
}

/* A turn that continues `earlier`, after `edit` of its positions are others. */
static void add_turn(struct sim_book *book, const struct sim_question *earlier, uint32_t edit)
{
    struct sim_question *turn = add(book, earlier->model, 10);
    turn->ignore_end = true;
    memcpy(turn->tokens, earlier->tokens, sizeof(turn->tokens));
    turn->token_count = earlier->token_count;
    for (uint32_t i = 0; i < earlier->answer.token_count; i++) {
        turn->tokens[turn->token_count++] = earlier->answer.tokens[i];
    }
    for (uint32_t i = 0; i < 9; i++) {
        turn->tokens[turn->token_count++] = 20 + 13 * i % 90;
    }
    for (uint32_t i = 0; i < edit; i++) {
        turn->tokens[turn->token_count / 2 + i] = 33 + i;
    }
}

/* A cluster of one node answers; every question to a model that was just loaded. */
static fl_status answer(struct sim_book *book, struct sim_question *question)
{
    const struct sim_config config = {
        .seed = 1, .book = book, .node_count = 1, .chunk = 64, .sequences = 4};
    struct sim_cluster *sim = NULL;
    fl_status status = sim_open(&config, &sim);
    if (status == FL_OK) {
        (void)sim_settle(sim, 20 * FL_NS_PER_S);
        const struct sim_request *request = sim_ask(sim, 1, question);
        (void)sim_settle(sim, 60 * FL_NS_PER_S);
        question->answer = request->answer;
        if (request->end != SIM_DONE) {
            status = FL_FAIL(FL_INTERNAL, "one node does not answer: %s", request->text);
        }
    }
    const char *says = question->says;
    if (status == FL_OK && says != NULL &&
        (question->answer.text_size != strlen(says) ||
         memcmp(question->answer.text, says, strlen(says)) != 0)) {
        status = FL_FAIL(FL_INTERNAL, "the script says '%.*s' and should say '%s'",
                         (int)question->answer.text_size, question->answer.text, says);
    }
    sim_close(sim);
    return status;
}

static fl_status answer_all(struct sim_book *book)
{
    add_facts(book);
    add_random(book);
    for (uint32_t i = 0; i < book->count; i++) {
        FL_TRY(answer(book, &book->questions[i]));
    }
    for (uint32_t model = 0; model < 2; model++) {
        struct sim_question *first = add_tokens(book, sim_models[model], 30, 77 + model, 8);
        first->ignore_end = true;
        FL_TRY(answer(book, first));
        for (uint32_t turn = 0; turn < 4; turn++) {
            add_turn(book, &book->questions[book->count - 1], turn == 2 ? 2 : 0);
            FL_TRY(answer(book, &book->questions[book->count - 1]));
        }
    }
    return FL_OK;
}

fl_status sim_book_open(struct sim_book **out)
{
    struct sim_book *book = calloc(1, sizeof(*book));
    if (book == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for questions");
    }
    temp_folder_make(&book->models);
    fl_status status = models_write(&book->models);
    if (status == FL_OK) {
        status = answer_all(book);
    }
    if (status != FL_OK) {
        sim_book_close(book);
        return status;
    }
    *out = book;
    return FL_OK;
}

void sim_book_close(struct sim_book *book)
{
    if (book != NULL) {
        temp_folder_remove(&book->models);
        free(book);
    }
}
