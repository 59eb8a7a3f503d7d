#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/client/commands.h"
#include "proto/client/options.h"
#include "proto/pool_key.h"

enum { PATH_SIZE = 4096 };

/* ~/.config/firstlight/pool.key, as XDG_CONFIG_HOME and HOME say. */
static fl_status default_path(char out[PATH_SIZE])
{
    const char *config = getenv("XDG_CONFIG_HOME");
    const char *home = getenv("HOME");
    int size = -1;
    if (config != NULL && config[0] == '/') {
        size = snprintf(out, PATH_SIZE, "%s/firstlight/pool.key", config);
    } else if (home != NULL && home[0] == '/') {
        size = snprintf(out, PATH_SIZE, "%s/.config/firstlight/pool.key", home);
    }
    if (size < 0 || size >= PATH_SIZE) {
        return FL_FAIL(FL_INVALID, "HOME does not say where to put the key: give --out FILE");
    }
    return FL_OK;
}

/* Folders above a file, for this user alone. */
static fl_status make_folders(const char *path)
{
    char folder[PATH_SIZE];
    if ((size_t)snprintf(folder, sizeof(folder), "%s", path) >= sizeof(folder)) {
        return FL_FAIL(FL_INVALID, "the path has more than %d bytes", PATH_SIZE - 1);
    }
    for (char *slash = strchr(folder + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(folder, 0700) != 0 && errno != EEXIST) {
            return FL_FAIL(FL_IO, "folder %s cannot be made: %s", folder, strerror(errno));
        }
        *slash = '/';
    }
    return FL_OK;
}

static fl_status run(const char *path)
{
    char place[PATH_SIZE];
    if (path == NULL) {
        FL_TRY(default_path(place));
        FL_TRY(make_folders(place));
        path = place;
    }
    struct fl_pool_key key;
    fl_pool_key_make(&key);
    FL_TRY(fl_pool_key_write(path, &key));
    printf("%s\n", path);
    return FL_OK;
}

int command_keygen(int argc, char **argv)
{
    const char *path = NULL;
    const struct option options[] = {
        {OPTION_HEADING, "Key", NULL, NULL, NULL, 0, 0},
        {OPTION_TEXT, "--out", "FILE", "write it here (default ~/.config/firstlight/pool.key)",
         &path, 0, 0},
    };
    const struct command_line line = {
        .command = "keygen",
        .usage = "[--out FILE]",
        .about = "Makes a pool key and prints where it is.  Copy the file to every machine of the\n"
                 "pool; whoever has it may use the pool.  A file that is there is never replaced.",
        .examples = "  firstlight keygen\n"
                    "  firstlight keygen --out /etc/firstlight/pool.key\n",
        .options = options,
        .option_count = sizeof(options) / sizeof(options[0]),
    };
    const fl_status status = options_parse(&line, argc, argv);
    if (status != FL_OK) {
        return status == FL_END ? EXIT_SUCCESS : EXIT_CALLED_WRONGLY;
    }
    return run(path) == FL_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
