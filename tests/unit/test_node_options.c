/* Command line of firstlight-node: defaults, the file, flags over it, and what is refused. */
#include "node/node_options.h"

#include "tests/harness.h"
#include "tests/support/temp_folder.h"

enum { ARGUMENT_MAX = 16 };

static fl_status parse(struct node_options *out, const char *const *arguments)
{
    static char texts[ARGUMENT_MAX][TEMP_PATH_MAX];
    char *argv[ARGUMENT_MAX + 2] = {texts[0]};
    int argc = 1;
    snprintf(texts[0], sizeof(texts[0]), "firstlight-node");
    for (; arguments[argc - 1] != NULL; argc++) {
        snprintf(texts[argc], sizeof(texts[argc]), "%s", arguments[argc - 1]);
        argv[argc] = texts[argc];
    }
    return node_options_parse(argc, argv, false, out);
}

#define PARSE(out, ...) parse((out), (const char *const[]){__VA_ARGS__, NULL})

static struct node_options options;

static void defaults_are_sensible(void)
{
    CHECK_EQ(PARSE(&options, "--join", "127.0.0.1:7412"), FL_OK);
    CHECK(strcmp(options.join, "127.0.0.1:7412") == 0);
    CHECK(options.name[0] != '\0');
    CHECK(options.threads >= 1);
    CHECK(options.memory > 1 << 20);
    CHECK_EQ(options.cache_budget, UINT64_C(20) << 30);
    CHECK(strstr(options.cache, "firstlight/shards") != NULL);
    CHECK(options.models == NULL && options.listen == NULL && options.key_file == NULL);
}

static void flags_are_taken(void)
{
    CHECK_EQ(PARSE(&options, "--join=a:1", "--name", "box.1_-x", "--memory", "1.5GiB", "--threads",
                   "3", "--isa", "scalar", "--cache", "/c", "--cache-budget", "1MiB", "--log",
                   "debug"),
             FL_OK);
    CHECK(strcmp(options.name, "box.1_-x") == 0);
    CHECK_EQ(options.memory, UINT64_C(3) << 29);
    CHECK_EQ(options.threads, 3);
    CHECK(strcmp(options.isa, "scalar") == 0);
    CHECK(strcmp(options.cache, "/c") == 0);
    CHECK_EQ(options.cache_budget, 1 << 20);
    CHECK_EQ(options.log_level, FL_LOG_DEBUG);
    CHECK_EQ(PARSE(&options, "--join=a:1", "--data-ports", "7420-7439"), FL_OK);
    CHECK_EQ(options.data_ports.first, 7420);
    CHECK_EQ(options.data_ports.last, 7439);
    CHECK_EQ(PARSE(&options, "--help"), FL_OK);
    CHECK(options.help);
    CHECK_EQ(PARSE(&options, "--version"), FL_OK);
    CHECK(options.version);
}

static void what_cannot_be_used_is_refused_in_words(void)
{
    static const struct {
        const char *arguments[4];
        const char *words;
    } bad[] = {
        {{"--name", "x"}, "--join"},
        {{"--join", "a:1", "--nonsense"}, "--nonsense"},
        {{"--join"}, "needs a value"},
        {{"--join", "a:1", "extra"}, "extra"},
        {{"--threads", "0"}, "--threads"},
        {{"--threads", "2x"}, "2x"},
        {{"--threads", "-1"}, "--threads"},
        {{"--memory", "lots"}, "lots"},
        {{"--memory", "-5"}, "--memory"},
        {{"--cache-budget", "5Q"}, "--cache-budget"},
        {{"--name", "two words"}, "two words"},
        {{"--name", ""}, "--name"},
        {{"--cache", ""}, "--cache"},
        {{"--data-ports", "7420"}, "FIRST-LAST"},
        {{"--data-ports", "7420-"}, "FIRST-LAST"},
        {{"--data-ports", "0-9"}, "1 to 65535"},
        {{"--data-ports", "7420-65536"}, "1 to 65535"},
        {{"--data-ports", "7420-7421x"}, "7420-7421x"},
        {{"--data-ports", "99999999999-3"}, "FIRST-LAST"},
        {{"--data-ports", "7421-7420"}, "7421-7422 would do"},
        {{"--data-ports", "7420-7420"}, "7420-7421 would do"},
        {{"--data-ports", "65535-65535"}, "65534-65535 would do"},
        {{"--log", "loud"}, "loud"},
        {{"--config", "/nowhere/at/all.json"}, "/nowhere/at/all.json"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK(parse(&options, bad[i].arguments) != FL_OK);
        if (strstr(fl_last_error(), bad[i].words) == NULL) {
            printf("  says: %s\n", fl_last_error());
        }
        CHECK(strstr(fl_last_error(), bad[i].words) != NULL);
    }
}

static void flags_override_the_file_and_a_boxs_entry_the_general_one(void)
{
    static const char text[] =
        "{\"node\": {\"join\": \"box1:7412\", \"listen\": \"0.0.0.0:7413\", \"memory\": \"1GiB\","
        " \"cache_budget\": \"2GiB\", \"threads\": 5, \"data_ports\": \"7420-7439\"},"
        " \"nodes\": [{\"name\": \"box2\", \"memory\": \"3GiB\"}]}";
    struct temp_folder folder;
    char path[TEMP_PATH_MAX];
    struct node_options box2;
    struct node_options box3;
    struct node_options said;
    temp_folder_make(&folder);
    temp_folder_put(&folder, "pool.json", text, sizeof(text) - 1);
    temp_folder_path(&folder, "pool.json", path);
    const fl_status status2 = PARSE(&box2, "--name", "box2", "--config", path);
    const fl_status status3 = PARSE(&box3, "--config", path, "--name", "box3", "--threads", "2");
    const fl_status status4 = PARSE(&said, "--memory", "9GiB", "--config", path, "--name", "box2",
                                    "--join", "other:1", "--data-ports", "8000-8001");
    temp_folder_remove(&folder);
    CHECK_EQ(status2, FL_OK);
    CHECK_EQ(status3, FL_OK);
    CHECK_EQ(status4, FL_OK);
    CHECK(strcmp(box2.join, "box1:7412") == 0 && strcmp(box2.listen, "0.0.0.0:7413") == 0);
    CHECK_EQ(box2.memory, UINT64_C(3) << 30);
    CHECK_EQ(box2.cache_budget, UINT64_C(2) << 30);
    CHECK_EQ(box2.threads, 5);
    CHECK_EQ(box3.memory, UINT64_C(1) << 30);
    CHECK_EQ(box3.threads, 2);
    CHECK_EQ(said.memory, UINT64_C(9) << 30);
    CHECK(strcmp(said.join, "other:1") == 0);
    CHECK_EQ(box2.data_ports.last, 7439);
    CHECK_EQ(said.data_ports.last, 8001);
}

static void under_mpirun_a_rank_is_added_to_a_name_nobody_gave(void)
{
    CHECK_EQ(PARSE(&options, "--join=a:1"), FL_OK);
    snprintf(options.name, sizeof(options.name), "box");
    node_options_number(&options, 12);
    CHECK(strcmp(options.name, "box-12") == 0);

    memset(options.name, 'x', sizeof(options.name) - 1);
    node_options_number(&options, UINT32_MAX);
    CHECK_EQ(strlen(options.name), sizeof(options.name) - 1);
    CHECK(strcmp(strchr(options.name, '-'), "-4294967295") == 0);

    CHECK_EQ(PARSE(&options, "--join=a:1", "--name", "mine"), FL_OK);
    node_options_number(&options, 1);
    CHECK(strcmp(options.name, "mine") == 0);
}

static const struct test_case cases[] = {
    {"node options: defaults are sensible", defaults_are_sensible},
    {"node options: flags are taken", flags_are_taken},
    {"node options: what cannot be used is refused in words",
     what_cannot_be_used_is_refused_in_words},
    {"node options: flags override the file, and a box's entry the general one",
     flags_override_the_file_and_a_boxs_entry_the_general_one},
    {"node options: under mpirun a rank is added to a name nobody gave",
     under_mpirun_a_rank_is_added_to_a_name_nobody_gave},
};

TEST_MAIN(cases)
