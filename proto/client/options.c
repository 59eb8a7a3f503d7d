#include "proto/client/options.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/network_address.h"

enum { NAME_MAX_SIZE = 40, OPTION_MAX = 64, HELP_COLUMN = 28 };

/* ---- a word mistyped ---- */

/* Letters to change, add or remove to make one word of the other. */
static size_t edits_between(const char *a, const char *b)
{
    const size_t a_size = strnlen(a, NAME_MAX_SIZE);
    const size_t b_size = strnlen(b, NAME_MAX_SIZE);
    size_t row[NAME_MAX_SIZE + 1];
    for (size_t j = 0; j <= b_size; j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= a_size; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_size; j++) {
            size_t least = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            least = row[j] + 1 < least ? row[j] + 1 : least;
            row[j] = row[j - 1] + 1 < least ? row[j - 1] + 1 : least;
        }
    }
    return row[b_size];
}

const char *options_nearest(const char *word, const char *const *names, size_t count)
{
    const char *best = NULL;
    size_t best_edits = 3; /* more, and it is another word */
    for (size_t i = 0; i < count; i++) {
        const size_t edits = edits_between(word, names[i]);
        if (edits < best_edits && edits < strlen(names[i])) {
            best = names[i];
            best_edits = edits;
        }
    }
    return best;
}

/* ---- help ---- */

static void print_option(const struct option *option)
{
    if (option->kind == OPTION_HEADING) {
        printf("\n%s\n", option->name);
        return;
    }
    const int used = printf("  %s%s%s", option->name, option->value != NULL ? " " : "",
                            option->value != NULL ? option->value : "");
    printf("%*s%s\n", used < HELP_COLUMN ? HELP_COLUMN - used : 2, "", option->help);
}

static void print_help(const struct command_line *line)
{
    printf("firstlight %s %s\n\n%s\n", line->command, line->usage, line->about);
    for (size_t i = 0; i < line->option_count; i++) {
        print_option(&line->options[i]);
    }
    printf("\nExamples\n%s", line->examples);
}

/* ---- values ---- */

static fl_status wrong(const struct command_line *line, const struct option *option,
                       const char *text, const char *want)
{
    return FL_FAIL(FL_INVALID, "%s %s is not %s (firstlight %s --help)", option->name, text, want,
                   line->command);
}

static bool is_number_start(const char *text)
{
    return (text[0] >= '0' && text[0] <= '9') || text[0] == '.' || text[0] == '-';
}

static fl_status take_whole(const struct command_line *line, const struct option *option,
                            const char *text, uint64_t high, uint64_t *out)
{
    char *end = NULL;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    char want[64];
    snprintf(want, sizeof(want), "a whole number from %.0f to %" PRIu64, option->low, high);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value > high ||
        (double)value < option->low) {
        return wrong(line, option, text, want);
    }
    *out = value;
    return FL_OK;
}

static fl_status take_real(const struct command_line *line, const struct option *option,
                           const char *text)
{
    char *end = NULL;
    const float value = strtof(text, &end);
    char want[64];
    snprintf(want, sizeof(want), "a number from %g to %g", option->low, option->high);
    if (!is_number_start(text) || *end != '\0' || !isfinite(value) || (double)value < option->low ||
        (double)value > option->high) {
        return wrong(line, option, text, want);
    }
    *(float *)option->out = value;
    return FL_OK;
}

static fl_status take_address(const struct option *option, const char *text)
{
    struct fl_network_address address;
    FL_TRY(fl_network_address_parse(text, strlen(text), &address));
    *(const char **)option->out = text;
    return FL_OK;
}

static fl_status take_value(const struct command_line *line, const struct option *option,
                            const char *text)
{
    uint64_t whole = 0;
    switch (option->kind) {
    case OPTION_TEXT: *(const char **)option->out = text; return FL_OK;
    case OPTION_ADDRESS: return take_address(option, text);
    case OPTION_COUNT:
        FL_TRY(take_whole(line, option, text,
                          option->high > 0 ? (uint64_t)option->high : UINT32_MAX, &whole));
        *(uint32_t *)option->out = (uint32_t)whole;
        return FL_OK;
    case OPTION_SEED: return take_whole(line, option, text, UINT64_MAX, option->out);
    case OPTION_REAL: return take_real(line, option, text);
    case OPTION_LIST: {
        struct option_list *list = option->out;
        if (list->count == OPTION_LIST_MAX) {
            return FL_FAIL(FL_INVALID, "%s is given more than %d times", option->name,
                           OPTION_LIST_MAX);
        }
        list->items[list->count++] = text;
        return FL_OK;
    }
    case OPTION_FLAG:
    case OPTION_HEADING: break;
    }
    return FL_OK;
}

/* ---- parsing ---- */

static const struct option *find(const struct command_line *line, const char *name, size_t size)
{
    for (size_t i = 0; i < line->option_count; i++) {
        const struct option *option = &line->options[i];
        if (option->kind != OPTION_HEADING && strncmp(option->name, name, size) == 0 &&
            option->name[size] == '\0') {
            return option;
        }
    }
    return NULL;
}

static fl_status unknown(const struct command_line *line, const char *word, size_t size)
{
    char name[NAME_MAX_SIZE];
    snprintf(name, sizeof(name), "%.*s", (int)(size < sizeof(name) ? size : sizeof(name) - 1),
             word);
    const char *names[OPTION_MAX];
    size_t count = 0;
    for (size_t i = 0; i < line->option_count && count < OPTION_MAX; i++) {
        if (line->options[i].kind != OPTION_HEADING) {
            names[count++] = line->options[i].name;
        }
    }
    const char *nearest = options_nearest(name, names, count);
    if (nearest != NULL) {
        return FL_FAIL(FL_INVALID, "firstlight %s has no option %s; did you mean %s?",
                       line->command, name, nearest);
    }
    return FL_FAIL(FL_INVALID, "firstlight %s has no option %s; firstlight %s --help lists them",
                   line->command, name, line->command);
}

static fl_status take_positional(const struct command_line *line, const char *text)
{
    if (line->positional == NULL) {
        return FL_FAIL(FL_INVALID, "firstlight %s takes no argument '%s'; firstlight %s --help",
                       line->command, text, line->command);
    }
    if (*line->positional != NULL) {
        return FL_FAIL(FL_INVALID, "firstlight %s takes one name, here are '%s' and '%s'",
                       line->command, *line->positional, text);
    }
    *line->positional = text;
    return FL_OK;
}

fl_status options_parse(const struct command_line *line, int argc, char **argv)
{
    for (int i = 0; i < argc; i++) {
        const char *word = argv[i];
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            print_help(line);
            return FL_END;
        }
        if (word[0] != '-' || word[1] == '\0') {
            FL_TRY(take_positional(line, word));
            continue;
        }
        const size_t size = strcspn(word, "=");
        const struct option *option = find(line, word, size);
        if (option == NULL) {
            return unknown(line, word, size);
        }
        if (option->kind == OPTION_FLAG) {
            if (word[size] == '=') {
                return FL_FAIL(FL_INVALID, "%s takes no value", option->name);
            }
            *(bool *)option->out = true;
        } else if (word[size] == '=') {
            FL_TRY(take_value(line, option, word + size + 1));
        } else if (i + 1 < argc) {
            FL_TRY(take_value(line, option, argv[++i]));
        } else {
            return FL_FAIL(FL_INVALID, "%s needs a value: %s %s", option->name, option->name,
                           option->value);
        }
    }
    return FL_OK;
}
