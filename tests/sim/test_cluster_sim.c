/* test_cluster_sim.c - whole clusters under seeded delay, loss and restart.
 *
 * Each seed is a story: a cluster of one to four nodes, questions of several
 * clients, and what goes wrong meanwhile.  Whatever it is, every request ends
 * once, an answer is the one that one node gives alone, to the last bit, errors
 * have a fault to blame, and afterwards everything works and nothing is left
 * over.  `test_cluster_sim SEED` replays one.
 */
#include <stdlib.h>

#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "tests/harness.h"
#include "tests/support/sim_cluster.h"

static struct sim_book *book;
static bool verbose;

enum { QUESTIONS = 14 };

/* What a seed decides before anything runs. */
static struct sim_config draw_config(uint64_t seed)
{
    static const uint64_t delays[] = {1000, 300000, 5000000, 40000000};
    static const uint64_t pauses[] = {0, 0, 50000, 2000000};
    static const uint64_t disks[] = {0, 100000, 5000000, 60000000};
    static const uint64_t budgets[] = {0, 600 << 10, 1 << 20, 2 << 20}; /* one context and more */
    static const uint32_t chunks[] = {1, 7, 16, 64};
    uint64_t bits = seed * UINT64_C(0x9e3779b97f4a7c15) >> 16;
    struct sim_config config = {.seed = seed, .book = book};
    config.node_count = 1 + (uint32_t)(bits % SIM_NODE_MAX);
    config.delay_max_ns = delays[(bits >> 2) % 4];
    config.compute_max_ns = pauses[(bits >> 4) % 4];
    config.worker_max_ns = pauses[(bits >> 6) % 4] * 10;
    config.disk_max_ns = disks[(bits >> 8) % 4];
    config.chunk = chunks[(bits >> 10) % 4];
    config.sequences = 1 + (uint32_t)(bits >> 12) % 6;
    config.kv_budget = budgets[(bits >> 17) % 4];
    config.fetch = (bits >> 15) % 2 != 0;
    config.cache = (bits >> 16) % 2 != 0;
    return config;
}

/* Something goes wrong, or what was wrong is put right. */
static void disturb(struct sim_cluster *sim, const struct sim_config *config)
{
    const uint32_t node = (uint32_t)sim_random(sim, config->node_count);
    const uint32_t other = (uint32_t)sim_random(sim, config->node_count + 1);
    switch (sim_random(sim, 8)) {
    case 0: sim_kill(sim, node); break;
    case 1:
        sim_kill(sim, node);
        sim_start(sim, node); /* before anybody noticed */
        break;
    case 2: sim_start(sim, node); break;
    case 3: sim_cut(sim, node, other < config->node_count ? other : SIM_COORDINATOR); break;
    case 4: sim_heal(sim); break;
    case 5:
        sim_kill_coordinator(sim);
        sim_run(sim, sim_random(sim, 8) * FL_NS_PER_S);
        sim_start_coordinator(sim);
        break;
    case 6: sim_heal(sim); break;
    default: break;
    }
}

/* A client does something. */
static void act(struct sim_cluster *sim)
{
    const uint64_t client = 1 + sim_random(sim, 5);
    const uint32_t count = sim_request_count(sim);
    switch (sim_random(sim, 10)) {
    case 0:
        if (count > 0) {
            sim_cancel(sim, sim_request_at(sim, (uint32_t)sim_random(sim, count)));
        }
        break;
    case 1: sim_vanish(sim, client); break;
    case 2:
        (void)sim_by_model(sim, client, FL_REQUEST_LOAD,
                           sim_models[sim_random(sim, SIM_MODEL_COUNT)]);
        break;
    case 3:
        (void)sim_by_model(sim, client, FL_REQUEST_UNLOAD,
                           sim_models[sim_random(sim, SIM_MODEL_COUNT)]);
        break;
    case 4: { /* a conversation goes on, or back */
        const uint32_t turn = book->count - 1 - (uint32_t)sim_random(sim, 10);
        (void)sim_ask(sim, client, &book->questions[turn]);
        break;
    }
    case 5: /* a crowd */
        for (uint32_t i = 0; i < 4; i++) {
            (void)sim_ask(sim, 1 + i, &book->questions[sim_random(sim, book->count)]);
        }
        break;
    default: (void)sim_ask(sim, client, &book->questions[sim_random(sim, book->count)]); break;
    }
}

static void put_right(struct sim_cluster *sim, const struct sim_config *config)
{
    sim_heal(sim);
    sim_start_coordinator(sim);
    for (uint32_t i = 0; i < config->node_count; i++) {
        sim_start(sim, i);
    }
}

/* A span of time of the seed's: mostly short, sometimes as long as a deadline. */
static uint64_t draw_pause(struct sim_cluster *sim)
{
    const uint64_t kind = sim_random(sim, 10);
    return sim_random(sim, kind == 0  ? 12 * FL_NS_PER_S
                           : kind < 4 ? 200 * FL_NS_PER_MS
                                      : 10 * FL_NS_PER_MS);
}

static bool story(uint64_t seed, bool faults)
{
    struct sim_cluster *sim = NULL;
    const struct sim_config config = draw_config(seed);
    FL_ASSERT(sim_open(&config, &sim) == FL_OK);
    if (sim_random(sim, 3) > 0) { /* else the first come while nodes join */
        (void)sim_settle(sim, 20 * FL_NS_PER_S);
    }
    for (uint32_t i = 0; i < QUESTIONS && sim_complaint(sim) == NULL; i++) {
        act(sim);
        sim_run(sim, draw_pause(sim));
        if (faults && sim_random(sim, 3) == 0) {
            disturb(sim, &config);
            sim_run(sim, draw_pause(sim));
        }
    }
    put_right(sim, &config);
    (void)sim_settle(sim, 120 * FL_NS_PER_S);
    sim_run(sim, 20 * FL_NS_PER_S); /* over any aftermath */
    for (uint32_t i = 0; i < 3 && sim_complaint(sim) == NULL; i++) {
        (void)sim_ask(sim, 1 + i, &book->questions[sim_random(sim, book->count)]);
    }
    (void)sim_settle(sim, 120 * FL_NS_PER_S);
    if (sim_complaint(sim) == NULL) {
        sim_check_idle(sim);
        sim_check_empty(sim);
    }
    const bool right = sim_complaint(sim) == NULL;
    for (uint32_t i = 0; verbose && i < sim_request_count(sim); i++) {
        const struct sim_request *request = sim_request_at(sim, i);
        printf("  request %" PRIu64 " %.3f .. %.3f s end %d code %" PRIu32 " %s\n", request->id,
               (double)request->began_ns / (double)FL_NS_PER_S,
               (double)request->ended_ns / (double)FL_NS_PER_S, (int)request->end, request->code,
               request->text);
    }
    if (verbose || !right) {
        printf("  seed %" PRIu64 "%s: %" PRIu32 " nodes, %" PRIu32 " requests, %.3f s\n", seed,
               faults ? "" : " (calm)", config.node_count, sim_request_count(sim),
               (double)sim_now(sim) / (double)FL_NS_PER_S);
    }
    sim_close(sim);
    return right;
}

static uint64_t seed_first = 1;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static uint64_t seed_count = 6; /* several times slower */
#else
static uint64_t seed_count = 50;
#endif

static void without_faults(void)
{
    uint32_t wrong = 0;
    for (uint64_t i = 0; i < seed_count; i++) {
        wrong += !story(seed_first + i, false);
    }
    CHECK_EQ(wrong, 0);
}

static void with_faults(void)
{
    uint32_t wrong = 0;
    for (uint64_t i = 0; i < 2 * seed_count; i++) {
        wrong += !story(seed_first + i, true);
    }
    CHECK_EQ(wrong, 0);
}

/* Cases of one fault each ---------------------------------------------------------------------- */

static const struct sim_config plain = {
    .seed = 5, .node_count = 3, .delay_max_ns = 300000, .chunk = 16, .sequences = 4};

static struct sim_cluster *begin(struct sim_config config)
{
    struct sim_cluster *sim = NULL;
    config.book = book;
    FL_ASSERT(sim_open(&config, &sim) == FL_OK);
    (void)sim_settle(sim, 20 * FL_NS_PER_S);
    return sim;
}

/* After whatever happened: put right, three answers, nothing left over. */
static bool end(struct sim_cluster *sim)
{
    sim_heal(sim);
    sim_start_coordinator(sim);
    for (uint32_t i = 0; i < SIM_NODE_MAX; i++) {
        if (i < sim_node_count(sim)) {
            sim_start(sim, i);
        }
    }
    (void)sim_settle(sim, 120 * FL_NS_PER_S);
    sim_run(sim, 20 * FL_NS_PER_S);
    for (uint32_t i = 0; i < 3; i++) {
        (void)sim_ask(sim, 1, &book->questions[(i * 11 + 3) % book->count]);
        (void)sim_settle(sim, 60 * FL_NS_PER_S);
    }
    if (sim_complaint(sim) == NULL) {
        sim_check_idle(sim);
        sim_check_empty(sim);
    }
    const bool right = sim_complaint(sim) == NULL;
    sim_close(sim);
    return right;
}

/* A question about the model with an answer of `count` tokens or more. */
static const struct sim_question *long_one(const char *model, uint32_t count)
{
    for (uint32_t i = 0; i < book->count; i++) {
        const struct sim_question *question = &book->questions[i];
        if (strcmp(question->model, model) == 0 && question->answer.token_count >= count) {
            return question;
        }
    }
    FL_ASSERT(false && "a question of that length");
    return NULL;
}

/* Asks, and goes on until `count` tokens came. */
static struct sim_request *ask_until(struct sim_cluster *sim, uint32_t count)
{
    struct sim_request *request = sim_ask(sim, 1, long_one("tiny", 20));
    for (int i = 0; i < 100000 && request->end == SIM_PENDING; i++) {
        if (request->answer.token_count >= count) {
            return request;
        }
        sim_run(sim, 20000);
    }
    return request;
}

static void a_killed_node_is_named_at_any_time(void)
{
    for (uint32_t node = 0; node < 3; node++) {
        for (uint32_t tokens = 0; tokens < 9; tokens += 4) {
            struct sim_cluster *sim = begin(plain);
            const struct sim_request *request = ask_until(sim, tokens);
            char name[8];
            snprintf(name, sizeof(name), "box%" PRIu32, node + 1);
            sim_kill(sim, node);
            const uint64_t killed_ns = sim_now(sim);
            (void)sim_settle(sim, FL_NS_PER_S);
            const bool named = request->end == SIM_FAILED && request->code == FL_NODE_LOST &&
                               strstr(request->text, name) != NULL &&
                               request->ended_ns - killed_ns < 10 * FL_NS_PER_MS;
            if (!named) {
                printf("  %s after %" PRIu32 " tokens: '%s'\n", name, tokens, request->text);
            }
            sim_run(sim, 100 * FL_NS_PER_MS);
            const struct sim_request *next = sim_ask(sim, 1, request->question);
            (void)sim_settle(sim, 5 * FL_NS_PER_S);
            const bool answered = next->end == SIM_DONE && next->stage_count == 2;
            const bool right = end(sim);
            CHECK(named);
            CHECK(answered);
            CHECK(right);
        }
    }
}

static void a_silent_node_is_found_lost_within_seconds(void)
{
    for (uint32_t node = 0; node < 3; node++) {
        struct sim_cluster *sim = begin(plain);
        const struct sim_request *request = ask_until(sim, 3);
        char name[8];
        snprintf(name, sizeof(name), "box%" PRIu32, node + 1);
        for (uint32_t other = 0; other < 3; other++) {
            sim_cut(sim, node, other);
        }
        sim_cut(sim, node, SIM_COORDINATOR);
        const uint64_t cut_ns = sim_now(sim);
        sim_run(sim, 8 * FL_NS_PER_S);
        const bool named = request->end == SIM_FAILED && strstr(request->text, name) != NULL &&
                           request->ended_ns - cut_ns < 7 * FL_NS_PER_S;
        if (!named) {
            printf("  %s: '%s' after %.1f s\n", name, request->text,
                   (double)(request->ended_ns - cut_ns) / (double)FL_NS_PER_S);
        }
        const struct sim_request *next = sim_ask(sim, 1, request->question);
        sim_run(sim, 5 * FL_NS_PER_S);
        const bool answered = next->end == SIM_DONE && next->stage_count == 2;
        const bool right = end(sim);
        CHECK(named);
        CHECK(answered);
        CHECK(right);
    }
}

static void nodes_that_do_not_hear_each_other_end_the_request_with_their_names(void)
{
    struct sim_cluster *sim = begin(plain);
    const struct sim_request *request = ask_until(sim, 3);
    sim_cut(sim, 0, 1);
    (void)sim_settle(sim, 10 * FL_NS_PER_S);
    const bool named = request->end == SIM_FAILED && strstr(request->text, "box1") != NULL &&
                       strstr(request->text, "box2") != NULL;
    if (!named) {
        printf("  '%s'\n", request->text);
    }
    const bool right = end(sim);
    CHECK(named);
    CHECK(right);
}

/* The last stage cannot reach the first: it tells the coordinator its token and keeps it for the
 * other until the plan is over. */
static void a_token_half_sent_when_its_plan_ends_takes_no_other_along(void)
{
    struct sim_cluster *sim = begin(plain);
    sim_cut(sim, 0, 2);
    struct sim_request *request = ask_until(sim, 1);
    const bool began = request->end == SIM_PENDING && request->answer.token_count == 1;
    sim_cancel(sim, request);
    (void)sim_by_model(sim, 1, FL_REQUEST_UNLOAD, "tiny");
    (void)sim_settle(sim, FL_NS_PER_S);
    CHECK(end(sim));
    CHECK(began);
}

static void a_node_that_lost_power_takes_its_name_back(void)
{
    struct sim_cluster *sim = begin(plain);
    (void)ask_until(sim, 2);
    sim_cut(sim, 1, SIM_COORDINATOR); /* its last words never arrive */
    sim_kill(sim, 1);
    sim_start(sim, 1);
    const bool joined = sim_settle(sim, 12 * FL_NS_PER_S);
    CHECK(end(sim));
    CHECK(joined);
}

static void a_restarted_coordinator_is_joined_again(void)
{
    struct sim_config config = plain;
    config.fetch = true;
    config.cache = true;
    struct sim_cluster *sim = begin(config);
    const struct sim_request *request = ask_until(sim, 3);
    sim_kill_coordinator(sim);
    const bool told = request->end == SIM_FAILED && request->code == FL_CANCELLED;
    sim_run(sim, 3 * FL_NS_PER_S);
    sim_start_coordinator(sim);
    const bool joined = sim_settle(sim, 5 * FL_NS_PER_S);
    const struct sim_request *next = sim_ask(sim, 1, request->question);
    (void)sim_settle(sim, 5 * FL_NS_PER_S);
    const bool answered = next->end == SIM_DONE && next->stage_count == 3;
    const bool right = end(sim);
    CHECK(told);
    CHECK(joined);
    CHECK(answered);
    CHECK(right);
}

static void two_models_take_turns_in_memory_for_one(void)
{
    struct sim_config config = plain;
    config.node_count = 2;
    config.memory_budget = UINT64_C(40) << 20;
    struct sim_cluster *sim = begin(config);
    uint32_t loaded = 0;
    uint32_t done = 0;
    for (uint32_t i = 0; i < 8; i++) {
        const struct sim_request *request = sim_ask(sim, 1, long_one(sim_models[i % 2], 9));
        (void)sim_settle(sim, 20 * FL_NS_PER_S);
        loaded += request->class_ != FL_CLASS_WARM;
        done += request->end == SIM_DONE;
    }
    const bool right = end(sim);
    CHECK_EQ(done, 8);
    CHECK_EQ(loaded, 8); /* else both fit, and nothing was tried here */
    CHECK(right);
}

static void an_edited_history_keeps_what_is_before_the_edit(void)
{
    struct sim_cluster *sim = begin(plain);
    uint32_t turns = 0;
    uint32_t cached[5] = {0};
    uint32_t prompts[5] = {0};
    for (uint32_t i = book->count - 5; i < book->count; i++) {
        const struct sim_request *request = sim_ask(sim, 1, &book->questions[i]);
        (void)sim_settle(sim, 10 * FL_NS_PER_S);
        prompts[turns] = book->questions[i].token_count;
        cached[turns++] = request->cached_tokens;
    }
    const bool right = end(sim);
    CHECK_EQ(cached[0], 0);
    CHECK_EQ(cached[1], prompts[1] - 10); /* all but the new ones and the last answered token */
    CHECK_EQ(cached[2], prompts[2] - 10);
    CHECK_EQ(cached[3], prompts[3] / 2); /* edited there */
    CHECK(right);
}

static void decode_rows_join_a_chunk_before_the_embedding_is_there(void)
{
    struct sim_config config = plain;
    config.chunk = 1;
    config.node_count = 1;
    config.disk_max_ns = 20 * FL_NS_PER_MS;
    for (config.seed = 1; config.seed <= 10; config.seed++) {
        struct sim_cluster *sim = begin(config);
        for (uint32_t i = 0; i < 4; i++) {
            (void)sim_ask(sim, 1 + i, long_one("tiny", 12 + i));
        }
        (void)sim_settle(sim, 60 * FL_NS_PER_S);
        CHECK(end(sim));
    }
}

static void a_slow_disk_is_no_fault(void)
{
    struct sim_config config = plain;
    config.disk_max_ns = 3 * FL_NS_PER_S;
    struct sim_cluster *sim = begin(config);
    const struct sim_request *request = sim_ask(sim, 1, long_one("tiny", 9));
    (void)sim_settle(sim, 600 * FL_NS_PER_S);
    const uint64_t took_ns = request->ended_ns - request->began_ns;
    const bool done = request->end == SIM_DONE;
    const bool right = end(sim);
    CHECK(done);
    CHECK(took_ns > 10 * FL_NS_PER_S); /* longer than any heartbeat's deadline */
    CHECK(right);
}

static void clients_that_vanish_or_cancel_leave_nothing_behind(void)
{
    for (uint32_t tokens = 0; tokens < 12; tokens += 2) {
        struct sim_cluster *sim = begin(plain);
        struct sim_request *first = ask_until(sim, tokens);
        (void)sim_ask(sim, 2, long_one("gem", 9));
        (void)sim_by_model(sim, 2, FL_REQUEST_LOAD, "script");
        for (uint32_t i = 0; i < 6; i++) {
            (void)sim_ask(sim, 3, long_one("tiny", 12)); /* some wait in line */
        }
        sim_run(sim, 2 * FL_NS_PER_MS);
        sim_vanish(sim, 3);
        sim_cancel(sim, first);
        sim_run(sim, FL_NS_PER_MS);
        sim_vanish(sim, 2);
        const bool done = first->end == SIM_DONE;
        const bool right = end(sim);
        CHECK(done);
        CHECK(right);
    }
}

static const struct test_case cases[] = {
    {"sim: without faults every answer is the one of a single node", without_faults},
    {"sim: whatever goes wrong, requests end once and the cluster recovers", with_faults},
    {"sim: a killed node is named, and the others answer the next question",
     a_killed_node_is_named_at_any_time},
    {"sim: a silent node is found lost within seconds", a_silent_node_is_found_lost_within_seconds},
    {"sim: nodes that do not hear each other end the request with their names",
     nodes_that_do_not_hear_each_other_end_the_request_with_their_names},
    {"sim: a token half sent when its plan ends takes no other along",
     a_token_half_sent_when_its_plan_ends_takes_no_other_along},
    {"sim: a node that lost power takes its name back", a_node_that_lost_power_takes_its_name_back},
    {"sim: a restarted coordinator is joined again and answers",
     a_restarted_coordinator_is_joined_again},
    {"sim: two models take turns in memory for one", two_models_take_turns_in_memory_for_one},
    {"sim: an edited history keeps what is before the edit",
     an_edited_history_keeps_what_is_before_the_edit},
    {"sim: decode rows join a chunk before the embedding is there",
     decode_rows_join_a_chunk_before_the_embedding_is_there},
    {"sim: a slow disk is no fault", a_slow_disk_is_no_fault},
    {"sim: clients that vanish or cancel leave nothing behind",
     clients_that_vanish_or_cancel_leave_nothing_behind},
};

/* test_cluster_sim [CASE | SEED [COUNT [verbose]]] */
int main(int argc, char **argv)
{
    char *end = NULL;
    (void)setvbuf(stdout, NULL, _IOLBF, 0); /* a crash must not take the seed with it */
    fl_log_init("sim", fl_log_level_from_env(FL_LOG_SILENT));
    if (sim_book_open(&book) != FL_OK) {
        printf("%s\n", fl_last_error());
        return 1;
    }
    const uint64_t seed = argc > 1 ? strtoull(argv[1], &end, 10) : 0;
    int result;
    if (argc > 1 && *end == '\0') {
        seed_first = seed;
        seed_count = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
        verbose = seed_count == 1 || argc > 3;
        result = test_main(cases, 2, 1, argv);
    } else {
        result = test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
    }
    sim_book_close(book);
    return result;
}
