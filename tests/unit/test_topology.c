/* The configuration file: what is read, and that every mistake is refused by name. */
#include "cluster/topology.h"

#include <stdlib.h>
#include <unistd.h>

#include "proto/base/log.h"
#include "proto/base/size_text.h"
#include "tests/harness.h"

static struct topology topology;

static fl_status parse(const char *text)
{
    return topology_parse(text, strlen(text), "pool.json", &topology);
}

static void test_whole(void)
{
    CHECK_EQ(
        parse("{\"coordinator\": {\"listen\": \"0.0.0.0:7412\", \"client_listen\": "
              "\"unix:/run/fl.sock\",\n"
              " \"models\": \"/srv/models\", \"key_file\": \"/etc/key\", \"context\": 4096,\n"
              " \"kv_budget\": \"512MiB\", \"chunk\": 64, \"activations\": \"f32\",\n"
              " \"split\": [10, 12, 8], \"queue\": 64, \"data_ports\": \"7420-7439\"},\n"
              " \"node\": {\"name\": \"box1\", \"join\": \"host:7412\", \"memory\": \"6GiB\",\n"
              " \"listen\": \"[::1]:0\", \"models\": \"/m\", \"cache\": \"/c\", "
              "\"cache_budget\": 1000, \"threads\": 4,\n"
              " \"isa\": \"auto\", \"key_file\": \"k\", \"data_ports\": \"1-65535\"},\n"
              " \"nodes\": [{\"name\": \"box1\", \"memory\": \"1.5GiB\"}, {\"name\": \"b-2\"}]}"),
        FL_OK);
    const struct topology_coordinator *c = &topology.coordinator;
    CHECK_EQ(strcmp(c->listen, "0.0.0.0:7412"), 0);
    CHECK_EQ(strcmp(c->client_listen, "unix:/run/fl.sock"), 0);
    CHECK_EQ(strcmp(c->models, "/srv/models"), 0);
    CHECK_EQ(strcmp(c->key_file, "/etc/key"), 0);
    CHECK_EQ(strcmp(c->activations, "f32"), 0);
    CHECK(c->context.given && c->context.value == 4096);
    CHECK(c->kv_budget.given && c->kv_budget.value == 512 << 20);
    CHECK(c->chunk.given && c->chunk.value == 64);
    CHECK(c->queue.given && c->queue.value == 64);
    CHECK(c->split_count == 3 && c->split[0] == 10 && c->split[1] == 12 && c->split[2] == 8);
    const struct topology_node *n = &topology.node;
    CHECK_EQ(strcmp(n->name, "box1"), 0);
    CHECK_EQ(strcmp(n->join, "host:7412"), 0);
    CHECK_EQ(strcmp(n->listen, "[::1]:0"), 0);
    CHECK_EQ(strcmp(n->cache, "/c"), 0);
    CHECK_EQ(strcmp(n->isa, "auto"), 0);
    CHECK(n->memory.value == UINT64_C(6) << 30 && n->cache_budget.value == 1000);
    CHECK(n->threads.given && n->threads.value == 4);
    CHECK(c->data_ports.first == 7420 && c->data_ports.last == 7439);
    CHECK(n->data_ports.first == 1 && n->data_ports.last == 65535);
    CHECK_EQ(topology.box_count, 2);
    CHECK(topology_find(&topology, "box1")->memory.value == UINT64_C(3) << 29);
    CHECK(!topology_find(&topology, "b-2")->memory.given);
    CHECK(topology_find(&topology, "box3") == NULL);
}

static void test_nothing_given(void)
{
    CHECK_EQ(parse("{}"), FL_OK);
    CHECK(topology.coordinator.listen[0] == '\0' && !topology.coordinator.context.given);
    CHECK(topology.node.name[0] == '\0' && !topology.node.memory.given);
    CHECK_EQ(topology.box_count, 0);
    CHECK_EQ(parse(" {\"coordinator\": {}, \"node\": {}, \"nodes\": []} \n"), FL_OK);
}

struct mistake {
    const char *text;
    const char *says; /* a part of the sentence */
};

static void check_mistakes(const struct mistake *mistakes, size_t count, fl_status want)
{
    for (size_t i = 0; i < count; i++) {
        memset(&topology, 0x5a, sizeof(topology));
        const fl_status got = parse(mistakes[i].text);
        if (got != want || strstr(fl_last_error(), mistakes[i].says) == NULL) {
            printf("  %s: %d, \"%s\", want \"%s\"\n", mistakes[i].text, (int)got, fl_last_error(),
                   mistakes[i].says);
        }
        CHECK_EQ(got, want);
        CHECK(strstr(fl_last_error(), mistakes[i].says) != NULL);
        CHECK(strstr(fl_last_error(), "pool.json") == fl_last_error());
        CHECK(strchr(fl_last_error(), '\n') == NULL);
        CHECK_EQ(((unsigned char *)&topology)[0], 0x5a); /* untouched */
    }
}

static void test_no_json(void)
{
    static const struct mistake mistakes[] = {
        {"", "pool.json:1:1"},
        {"{", "pool.json:1:"},
        {"{\n  \"coordinator\": {\n    \"context\" 4096\n  }\n}", "pool.json:3:15"},
        {"{} x", "pool.json:1:4"},
        {"{\"node\": {\"name\": \"a\\u0000b\"}}", "NUL"},
        {"[[[[[[[[[]]]]]]]]]", "pool.json:1:9: more than 8"},
        {"\1\2", "pool.json:1:"},
        {"nonsense", "not JSON"},
    };
    check_mistakes(mistakes, sizeof(mistakes) / sizeof(mistakes[0]), FL_MALFORMED);
    CHECK_EQ(topology_parse("{}\0", 3, "pool.json", &topology), FL_MALFORMED);
}

static void test_mistakes(void)
{
    static const struct mistake mistakes[] = {
        {"[]", "object in braces"},
        {"3", "object in braces"},
        {"{\"coordinators\": {}}", "has no \"coordinators\"; it may have coordinator, node, nodes"},
        {"{\"coordinator\": {\"contexts\": 1}}",
         "coordinator has no \"contexts\"; it may have listen"},
        {"{\"node\": {\"Name\": \"a\"}}", "node has no \"Name\""},
        {"{\"coordinator\": []}", "coordinator must be an object"},
        {"{\"coordinator\": {\"context\": \"many\"}}",
         "coordinator.context must be a whole number"},
        {"{\"coordinator\": {\"context\": -5}}", "coordinator.context must be a whole number"},
        {"{\"coordinator\": {\"context\": 0}}", "from 1 to"},
        {"{\"coordinator\": {\"context\": 1.5}}", "whole number"},
        {"{\"coordinator\": {\"context\": 1e300}}", "whole number"},
        {"{\"coordinator\": {\"context\": null}}", "whole number"},
        {"{\"coordinator\": {\"chunk\": 1025}}", "from 1 to 1024"},
        {"{\"coordinator\": {\"context\": 1, \"context\": 2}}",
         "coordinator.context is there twice"},
        {"{\"node\": {}, \"node\": {}}", "node is there twice"},
        {"{\"coordinator\": {\"kv_budget\": \"lots\"}}", "kv_budget must be a size"},
        {"{\"coordinator\": {\"kv_budget\": \"1EiB\"}}", "kv_budget must be a size"},
        {"{\"coordinator\": {\"kv_budget\": true}}", "kv_budget must be a size"},
        {"{\"coordinator\": {\"listen\": \"nonsense\"}}", "HOST:PORT"},
        {"{\"coordinator\": {\"listen\": \"::1:7412\"}}", "HOST:PORT"},
        {"{\"coordinator\": {\"listen\": \"\"}}", "not empty"},
        {"{\"coordinator\": {\"listen\": 7412}}", "must be a text"},
        {"{\"coordinator\": {\"models\": \"a\\nb\"}}", "control character"},
        {"{\"coordinator\": {\"activations\": \"q4\"}}", "must be one of \"q8\", \"f32\""},
        {"{\"coordinator\": {\"activations\": 8}}", "must be one of"},
        {"{\"coordinator\": {\"split\": 3}}", "list of numbers"},
        {"{\"coordinator\": {\"split\": []}}", "1 to 64"},
        {"{\"coordinator\": {\"split\": [1, \"2\"]}}", "1 to 64"},
        {"{\"node\": {\"name\": \"box 1\"}}", "letters, digits"},
        {"{\"node\": {\"threads\": 5000}}", "from 1 to 1024"},
        {"{\"node\": {\"data_ports\": 7420}}", "data_ports must be a text"},
        {"{\"node\": {\"data_ports\": \"7420\"}}", "node.data_ports \"7420\" is not FIRST-LAST"},
        {"{\"coordinator\": {\"data_ports\": \"9-8\"}}", "so 9-10 would do"},
        {"{\"nodes\": {}}", "nodes must be a list"},
        {"{\"nodes\": [{\"memory\": 1}]}", "nodes[0].name is missing"},
        {"{\"nodes\": [{\"name\": \"a\"}, {\"name\": \"a\"}]}", "names a twice"},
        {"{\"nodes\": [{\"name\": \"a\"}, {\"name\": \"b\", \"cpu\": 1}]}",
         "nodes[1] has no \"cpu\""},
        {"{\"nodes\": [1]}", "nodes[0] must be an object"},
    };
    check_mistakes(mistakes, sizeof(mistakes) / sizeof(mistakes[0]), FL_INVALID);
}

static void test_limits(void)
{
    static char text[TOPOLOGY_FILE_MAX + 2];
    memset(text, ' ', sizeof(text));
    memcpy(text, "{}", 2);
    CHECK_EQ(topology_parse(text, TOPOLOGY_FILE_MAX, "pool.json", &topology), FL_OK);
    CHECK_EQ(topology_parse(text, TOPOLOGY_FILE_MAX + 1, "pool.json", &topology), FL_TOO_LARGE);
    for (int nodes = 64; nodes <= 65; nodes++) {
        size_t used = (size_t)snprintf(text, sizeof(text), "{\"nodes\": [");
        for (int i = 0; i < nodes; i++) {
            used += (size_t)snprintf(text + used, sizeof(text) - used, "%s{\"name\": \"box%d\"}",
                                     i > 0 ? "," : "", i);
        }
        snprintf(text + used, sizeof(text) - used, "]}");
        CHECK_EQ(parse(text), nodes == 64 ? FL_OK : FL_INVALID);
    }
    char name[80];
    memset(name, 'n', sizeof(name));
    for (int size = 63; size <= 64; size++) {
        snprintf(text, sizeof(text), "{\"node\": {\"name\": \"%.*s\"}}", size, name);
        CHECK_EQ(parse(text), size == 63 ? FL_OK : FL_INVALID);
    }
    /* A great many unknown keys must not take quadratic time. */
    size_t used = (size_t)snprintf(text, sizeof(text), "{\"node\": {");
    for (int i = 0; i < 50000; i++) {
        used +=
            (size_t)snprintf(text + used, sizeof(text) - used, "%s\"k%d\":1", i > 0 ? "," : "", i);
    }
    snprintf(text + used, sizeof(text) - used, "}}");
    CHECK_EQ(parse(text), FL_INVALID);
    used = (size_t)snprintf(text, sizeof(text), "{\"node\": {");
    for (int i = 0; i < 50000; i++) {
        used += (size_t)snprintf(text + used, sizeof(text) - used, "%s\"isa\":1", i > 0 ? "," : "");
    }
    snprintf(text + used, sizeof(text) - used, "}}");
    CHECK_EQ(parse(text), FL_INVALID);
}

static void test_file(void)
{
    char path[] = "/tmp/firstlight-topology-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    static const char text[] = "{\"coordinator\": {\"context\": 64}}\n";
    CHECK_EQ(write(fd, text, sizeof(text) - 1), sizeof(text) - 1);
    close(fd);
    CHECK_EQ(topology_read(path, &topology), FL_OK);
    CHECK_EQ(topology.coordinator.context.value, 64);
    unlink(path);
    CHECK_EQ(topology_read(path, &topology), FL_NOT_FOUND);
    CHECK_EQ(topology_read("/tmp", &topology), FL_IO);
}

static void test_sizes(void)
{
    static const struct {
        const char *text;
        uint64_t value;
    } good[] = {
        {"0", 0},
        {"4096", 4096},
        {"7B", 7},
        {"1K", 1024},
        {"1KiB", 1024},
        {"1kB", 1000},
        {"512MiB", 512 << 20},
        {"512 MiB", 512 << 20},
        {"2GiB", UINT64_C(2) << 30},
        {"20GB", UINT64_C(20000000000)},
        {"1.5GiB", UINT64_C(3) << 29},
        {"0.25T", UINT64_C(1) << 38},
        {"4194303TiB", UINT64_C(4194303) << 40},
    };
    static const char *const bad[] = {"",
                                      " ",
                                      "MiB",
                                      "-1",
                                      "1X",
                                      "1.MiB",
                                      ".5GiB",
                                      "1 GiB x",
                                      "1e9",
                                      "4194304TiB",
                                      "99999999999999999999999",
                                      "0x10",
                                      "1MiBs"};
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        CHECK_EQ(fl_size_text_parse(good[i].text, &value), FL_OK);
        CHECK_EQ(value, good[i].value);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_EQ(fl_size_text_parse(bad[i], &value), FL_INVALID);
    }
    char text[FL_SIZE_TEXT_MAX];
    fl_size_text_format(1023, text);
    CHECK_EQ(strcmp(text, "1023 B"), 0);
    fl_size_text_format(UINT64_C(3) << 29, text);
    CHECK_EQ(strcmp(text, "1.5 GiB"), 0);
    fl_size_text_format(UINT64_MAX, text);
    CHECK_EQ(strcmp(text, "16.0 EiB"), 0);
}

static const struct test_case cases[] = {
    {"topology: every key arrives where it belongs", test_whole},
    {"topology: what was not given is told apart", test_nothing_given},
    {"topology: what is no JSON is refused with line and column", test_no_json},
    {"topology: every other mistake is refused by its key", test_mistakes},
    {"topology: limits hold on both sides", test_limits},
    {"topology: a file is read, a missing one named", test_file},
    {"size_text: sizes with and without units", test_sizes},
};

int main(int argc, char **argv)
{
    fl_log_init("", FL_LOG_ERROR);
    return test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
