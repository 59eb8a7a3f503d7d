/* options.h - command lines: flags, their values, and the help text made from them.
 *
 * A command is a table of options.  parse() fills in what the table points to
 * and says in one line what is wrong, and what would be right.
 *
 * Thread:  owner.
 * Memory:  text values point into argv.
 */
#ifndef PROTO_CLIENT_OPTIONS_H
#define PROTO_CLIENT_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum option_kind {
    OPTION_FLAG,    /* bool */
    OPTION_TEXT,    /* const char * */
    OPTION_ADDRESS, /* const char *, HOST:PORT or unix:/path */
    OPTION_COUNT,   /* uint32_t */
    OPTION_SEED,    /* uint64_t */
    OPTION_REAL,    /* float, within low .. high */
    OPTION_LIST,    /* struct option_list: may be given several times */
    OPTION_HEADING,
};

enum { OPTION_LIST_MAX = 8 };

struct option_list {
    size_t count;
    const char *items[OPTION_LIST_MAX];
};

struct option {
    enum option_kind kind;
    const char *name;  /* "--model"; the text of a HEADING */
    const char *value; /* "NAME" in the help; NULL for a flag */
    const char *help;
    void *out;
    double low; /* COUNT and REAL */
    double high;
};

struct command_line {
    const char *command;     /* "generate" */
    const char *usage;       /* what follows the command's name in the help */
    const char *about;       /* a paragraph */
    const char *examples;    /* lines */
    const char **positional; /* one argument without a name goes here; NULL: none is allowed */
    const struct option *options;
    size_t option_count;
};

/* FL_END when --help was asked for and printed.  FL_INVALID: said what is wrong. */
FL_MUST_CHECK fl_status options_parse(const struct command_line *line, int argc, char **argv);

/* The name most like `word` among `count`, or NULL when none is near. */
const char *options_nearest(const char *word, const char *const *names, size_t count);

#ifdef __cplusplus
}
#endif
#endif
