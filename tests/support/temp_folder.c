#include "tests/support/temp_folder.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/check.h"

static void join(const char *folder, const char *name, char out[TEMP_PATH_MAX])
{
    const int size = snprintf(out, TEMP_PATH_MAX, "%s/%s", folder, name);
    FL_ASSERT(size > 0 && size < TEMP_PATH_MAX);
}

void temp_folder_make(struct temp_folder *folder)
{
    const char *parent = getenv("TMPDIR");
    join(parent != NULL && parent[0] != '\0' ? parent : "/tmp", "firstlight-test-XXXXXX",
         folder->path);
    FL_ASSERT(mkdtemp(folder->path) != NULL);
}

static int remove_entry(const char *path, const struct stat *found, int kind, struct FTW *at)
{
    (void)found;
    (void)kind;
    (void)at;
    (void)remove(path);
    return 0;
}

void temp_folder_remove(struct temp_folder *folder)
{
    enum { OPEN_MAX = 8 };
    FL_ASSERT(nftw(folder->path, remove_entry, OPEN_MAX, FTW_DEPTH | FTW_PHYS) == 0);
}

void temp_folder_path(const struct temp_folder *folder, const char *name, char out[TEMP_PATH_MAX])
{
    join(folder->path, name, out);
}

void temp_folder_put(const struct temp_folder *folder, const char *name, const void *bytes,
                     size_t size)
{
    char path[TEMP_PATH_MAX];
    join(folder->path, name, path);
    FILE *file = fopen(path, "wbe");
    FL_ASSERT(file != NULL);
    FL_ASSERT(fwrite(bytes, 1, size, file) == size);
    FL_ASSERT(fclose(file) == 0);
}

int real_model_path(const char *name, char out[TEMP_PATH_MAX])
{
    const char *models = getenv("FIRSTLIGHT_MODELS");
    const char *home = getenv("HOME");
    char folder[TEMP_PATH_MAX];
    if (models == NULL || models[0] == '\0') {
        join(home != NULL ? home : "", ".cache/firstlight/models", folder);
        models = folder;
    }
    join(models, name, out);
    return access(out, R_OK) == 0;
}
