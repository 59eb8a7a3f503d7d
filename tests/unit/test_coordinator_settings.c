/* test_coordinator_settings.c - flags and file of firstlight-coordinator. */
#include "coordinator/settings.h"
#include "tests/harness.h"
#include "tests/support/temp_folder.h"

static struct settings settings;

/* Reads a command line of up to four words. */
static fl_status read_words(const char *a, const char *b, const char *c, const char *d)
{
    static char words[5][TEMP_PATH_MAX];
    char *argv[6] = {words[0]};
    int argc = 1;
    const char *const given[] = {a, b, c, d};
    snprintf(words[0], sizeof(words[0]), "firstlight-coordinator");
    for (int i = 0; i < 4 && given[i] != NULL; i++) {
        snprintf(words[argc], sizeof(words[argc]), "%s", given[i]);
        argv[argc] = words[argc];
        argc++;
    }
    return settings_read(argc, argv, &settings);
}

static void defaults_are_on_loopback(void)
{
    CHECK_EQ(read_words(NULL, NULL, NULL, NULL), FL_OK);
    CHECK(strcmp(settings.listen, "127.0.0.1:7412") == 0);
    CHECK_EQ(settings.client_listen_count, 1);
    CHECK(strcmp(settings.client_listen[0], "127.0.0.1:7411") == 0);
    CHECK(settings.coordinator.chat_family == NULL);
    CHECK(strstr(settings.models, "firstlight/models") != NULL);
}

static void flags_are_taken(void)
{
    CHECK_EQ(read_words("--kv-budget", "2GiB", "--split", "3,0,12"), FL_OK);
    CHECK_EQ(settings.coordinator.kv_budget, UINT64_C(2) << 30);
    CHECK_EQ(settings.coordinator.split_count, 3);
    CHECK_EQ(settings.coordinator.split[2], 12);
    CHECK_EQ(read_words("--client-listen", "unix:/tmp/a", "--client-listen", "127.0.0.1:1"), FL_OK);
    CHECK_EQ(settings.client_listen_count, 2);
    CHECK_EQ(read_words("--data-ports", "7420-7439", NULL, NULL), FL_OK);
    CHECK_EQ(settings.data_ports.first, 7420);
    CHECK_EQ(settings.data_ports.last, 7439);
    CHECK_EQ(read_words("--activations=f32", "--no-overlap", "--template", "gemma"), FL_OK);
    CHECK(settings.coordinator.activations_f32 && settings.coordinator.no_overlap);
    CHECK(strcmp(settings.coordinator.chat_family, "gemma") == 0);
}

static void wrong_flags_are_named(void)
{
    static const struct {
        const char *flag, *value, *word;
    } wrong[] = {
        {"--bogus", NULL, "--bogus is no option"},
        {"--context", NULL, "--context needs a value"},
        {"--no-overlap=3", NULL, "--no-overlap=3: this option takes no value"},
        {"stray", "--context", "stray"},
        {"--context", "0", "1 to"},
        {"--context", "-5", "-5"},
        {"--context", "12x", "12x"},
        {"--kv-budget", "lots", "512MiB"},
        {"--kv-budget", "0", "512MiB"},
        {"--chunk", "1025", "1024"},
        {"--data-ports", "7420", "FIRST-LAST"},
        {"--data-ports", "7420-7420", "7420-7421"},
        {"--activations", "bf16", "q8"},
        {"--split", "1,,2", "--split"},
        {"--split", "0,0", "no node gets a layer"},
        {"--log", "loud", "debug"},
        {"stray", NULL, "stray"},
        {"--sequences", "257", "256"},
        {"--config", "/nonexistent.json", "nonexistent"},
        {"--queue", "99999999999999", "4096"},
        {"--models", "", "--models"},
        {"--models", "/dev/null", "folder"},
        {"--template", "chatlm", "chatml"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        const fl_status status = read_words(wrong[i].flag, wrong[i].value, NULL, NULL);
        CHECK(status == FL_INVALID || status == FL_NOT_FOUND || status == FL_UNSUPPORTED);
        CHECK(strstr(fl_last_error(), wrong[i].word) != NULL);
    }
}

static void flags_win_over_the_file(void)
{
    static const char text[] =
        "{\"coordinator\": {\"listen\": \"127.0.0.1:5\", \"client_listen\": \"unix:/tmp/b\","
        " \"context\": 512, \"kv_budget\": \"64MiB\", \"split\": [1, 2],"
        " \"data_ports\": \"7420-7439\"}}";
    struct temp_folder folder;
    char path[TEMP_PATH_MAX];
    temp_folder_make(&folder);
    temp_folder_put(&folder, "pool.json", text, sizeof(text) - 1);
    temp_folder_path(&folder, "pool.json", path);
    const fl_status plain = read_words("--config", path, NULL, NULL);
    const struct settings file = settings;
    const fl_status both = read_words("--context", "99", "--config", path);
    const uint32_t context = settings.coordinator.context;
    const fl_status listens = read_words("--config", path, "--client-listen", "127.0.0.1:6");
    temp_folder_remove(&folder);
    CHECK_EQ(plain, FL_OK);
    CHECK(strcmp(file.listen, "127.0.0.1:5") == 0);
    CHECK(strcmp(file.client_listen[0], "unix:/tmp/b") == 0);
    CHECK_EQ(file.coordinator.context, 512);
    CHECK_EQ(file.coordinator.kv_budget, 64 << 20);
    CHECK_EQ(file.coordinator.split_count, 2);
    CHECK_EQ(file.data_ports.last, 7439);
    CHECK_EQ(both, FL_OK);
    CHECK_EQ(context, 99);
    CHECK_EQ(listens, FL_OK);
    CHECK_EQ(settings.client_listen_count, 1);
    CHECK(strcmp(settings.client_listen[0], "127.0.0.1:6") == 0);
}

static void help_and_version_end_it(void)
{
    CHECK_EQ(read_words("--version", NULL, NULL, NULL), FL_END);
    CHECK_EQ(read_words("--help", NULL, NULL, NULL), FL_END);
}

static const struct test_case cases[] = {
    {"settings: defaults are on loopback", defaults_are_on_loopback},
    {"settings: flags are taken", flags_are_taken},
    {"settings: wrong flags are named, with what would be right", wrong_flags_are_named},
    {"settings: flags win over the file", flags_win_over_the_file},
    {"settings: help and version end it", help_and_version_end_it},
};

TEST_MAIN(cases)
