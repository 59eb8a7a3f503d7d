/* firstlight - the command line of a firstlight cluster. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/log.h"
#include "proto/base/status.h"
#include "proto/client/commands.h"
#include "proto/client/options.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *about;
} commands[] = {
    {"generate", command_generate, "continue a text, or answer one question (--chat)"},
    {"chat", command_chat, "talk with a model"},
    {"tokenize", command_tokenize, "show the token ids of a text"},
    {"models", command_models, "list the coordinator's model files"},
    {"plan", command_plan, "show how a model would be split over the nodes"},
    {"load", command_load, "load a model now, so that the first answer is a warm one"},
    {"unload", command_unload, "free what a model holds on the nodes"},
    {"status", command_status, "show nodes, loaded models and their memory"},
    {"timeline", command_timeline, "show where the time to a first token went"},
    {"keygen", command_keygen, "make a pool key"},
};

enum { COMMAND_COUNT = sizeof(commands) / sizeof(commands[0]) };

static void print_help(void)
{
    printf("firstlight %s: one language model on several small machines\n\n"
           "firstlight COMMAND [OPTION..]      firstlight COMMAND --help says more\n\n",
           FL_VERSION);
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        printf("  %-10s %s\n", commands[i].name, commands[i].about);
    }
    printf("\nThe coordinator is at --addr, FIRSTLIGHT_ADDR, or 127.0.0.1:7411.\n"
           "Exit status: 0 done, 1 failed, 2 called wrongly, 130 cancelled.\n\n"
           "Examples\n"
           "  firstlight models\n"
           "  firstlight generate --model SmolLM2-135M-Instruct.Q4_1 --prompt \"Once upon\"\n"
           "  firstlight chat --model SmolLM2-135M-Instruct.Q4_1\n");
}

static int unknown_command(const char *word)
{
    const char *names[COMMAND_COUNT];
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        names[i] = commands[i].name;
    }
    const char *nearest = options_nearest(word, names, COMMAND_COUNT);
    if (nearest != NULL) {
        fl_log(FL_LOG_ERROR, "there is no command '%.40s'; did you mean %s?", word, nearest);
    } else {
        fl_log(FL_LOG_ERROR, "there is no command '%.40s'; firstlight --help lists them", word);
    }
    return EXIT_CALLED_WRONGLY;
}

int main(int argc, char **argv)
{
    fl_log_init("firstlight", fl_log_level_from_env(FL_LOG_WARN));
    if (argc < 2) {
        fl_log(FL_LOG_ERROR, "a command is missing; firstlight --help lists them");
        return EXIT_CALLED_WRONGLY;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_help();
        return EXIT_SUCCESS;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("firstlight %s\n", FL_VERSION);
        return EXIT_SUCCESS;
    }
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            const int status = commands[i].run(argc - 2, argv + 2);
            if (fflush(stdout) != 0 || ferror(stdout)) {
                fl_log(FL_LOG_ERROR, "standard output cannot be written");
                return status == EXIT_SUCCESS ? EXIT_FAILURE : status;
            }
            return status;
        }
    }
    return unknown_command(argv[1]);
}
