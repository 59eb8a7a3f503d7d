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

static void story(uint64_t seed)
{
    struct sim_cluster *sim = NULL;
    struct sim_config config = {.seed = seed,
                                .book = book,
                                .node_count = 1 + (uint32_t)(seed % SIM_NODE_MAX),
                                .delay_max_ns = 300000,
                                .chunk = 16,
                                .sequences = 4};
    CHECK_EQ(sim_open(&config, &sim), FL_OK);
    (void)sim_settle(sim, 20 * FL_NS_PER_S);
    for (uint32_t i = 0; i < 12; i++) {
        (void)sim_ask(sim, 1 + i % 4, &book->questions[sim_random(sim, book->count)]);
        sim_run(sim, sim_random(sim, 20 * FL_NS_PER_MS));
    }
    (void)sim_settle(sim, 60 * FL_NS_PER_S);
    sim_check_idle(sim);
    sim_check_empty(sim);
    const bool right = sim_complaint(sim) == NULL;
    sim_close(sim);
    CHECK(right);
}

static void without_faults(void)
{
    for (uint64_t seed = 1; seed <= 40; seed++) {
        story(seed);
    }
}

static const struct test_case cases[] = {
    {"sim: without faults every answer is the one of a single node", without_faults},
};

int main(int argc, char **argv)
{
    fl_log_init("sim", fl_log_level_from_env(FL_LOG_SILENT));
    if (sim_book_open(&book) != FL_OK) {
        printf("%s\n", fl_last_error());
        return 1;
    }
    int result = test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
    sim_book_close(book);
    return result;
}
