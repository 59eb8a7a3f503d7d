#include "node/shard_eviction.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/log.h"

enum { MODEL_MAX = 1024, IDENTITY_HEX = 32 };

struct cached_model {
    char name[IDENTITY_HEX + 1];
    uint64_t size;
    time_t used; /* newest entry */
};

/* Only folders named like an identity are ours to touch. */
static bool is_model(const char *name)
{
    return strlen(name) == IDENTITY_HEX && strspn(name, "0123456789abcdef") == IDENTITY_HEX;
}

static bool is_entry(const char *name)
{
    const size_t size = strlen(name);
    return size > 6 && strcmp(name + size - 6, ".piece") == 0;
}

static bool is_part(const char *name)
{
    return strncmp(name, ".part-", 6) == 0;
}

/* Call visit(ctx, fd of the folder, name, stat) for each entry and part of a model. */
static void each_file(const char *path,
                      void (*visit)(void *ctx, int folder, const char *name, const struct stat *st),
                      void *ctx)
{
    DIR *folder = opendir(path);
    if (folder == NULL) {
        return;
    }
    for (const struct dirent *file; (file = readdir(folder)) != NULL;) {
        struct stat st;
        if ((is_entry(file->d_name) || is_part(file->d_name)) &&
            fstatat(dirfd(folder), file->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(st.st_mode)) {
            visit(ctx, dirfd(folder), file->d_name, &st);
        }
    }
    closedir(folder);
}

static void add_up(void *ctx, int folder, const char *name, const struct stat *st)
{
    (void)folder;
    (void)name;
    struct cached_model *model = ctx;
    model->size += (uint64_t)st->st_size;
    if (st->st_mtime > model->used) {
        model->used = st->st_mtime;
    }
}

static bool path_join(char out[PATH_MAX], const char *folder, const char *name)
{
    const int size = snprintf(out, PATH_MAX, "%s/%s", folder, name);
    return size > 0 && size < PATH_MAX;
}

/* out [MODEL_MAX] */
static uint32_t list_models(const char *path, struct cached_model *out)
{
    uint32_t count = 0;
    DIR *folder = opendir(path);
    if (folder == NULL) {
        return 0;
    }
    for (const struct dirent *file; count < MODEL_MAX && (file = readdir(folder)) != NULL;) {
        char model_path[PATH_MAX];
        if (is_model(file->d_name) && path_join(model_path, path, file->d_name)) {
            out[count] = (struct cached_model){.used = 0};
            memcpy(out[count].name, file->d_name, IDENTITY_HEX);
            each_file(model_path, add_up, &out[count]);
            count++;
        }
    }
    closedir(folder);
    return count;
}

static int by_use(const void *a, const void *b)
{
    const struct cached_model *left = a;
    const struct cached_model *right = b;
    return (left->used > right->used) - (left->used < right->used);
}

static void remove_entry(void *ctx, int folder, const char *name, const struct stat *st)
{
    uint64_t *removed = ctx;
    if (is_entry(name) && unlinkat(folder, name, 0) == 0) {
        *removed += (uint64_t)st->st_size;
    }
}

/* Bytes freed; 0 when a plan somewhere uses the model. */
static uint64_t evict(const char *folder, const struct cached_model *model)
{
    char path[PATH_MAX];
    char lock_path[PATH_MAX];
    uint64_t removed = 0;
    if (!path_join(path, folder, model->name) || !path_join(lock_path, path, "lock")) {
        return 0;
    }
    const int lock = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) == 0) {
        each_file(path, remove_entry, &removed);
        fl_log(FL_LOG_INFO, "shard cache model %s evicted bytes %" PRIu64, model->name, removed);
    }
    if (lock >= 0) {
        close(lock);
    }
    return removed;
}

bool shard_eviction_make_room(const char *folder, uint64_t budget, uint64_t size)
{
    struct cached_model *models = malloc(MODEL_MAX * sizeof(*models));
    if (models == NULL || size > budget) {
        free(models);
        return false;
    }
    const uint32_t count = list_models(folder, models);
    uint64_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        used += models[i].size;
    }
    if (used > budget - size) {
        qsort(models, count, sizeof(models[0]), by_use);
    }
    for (uint32_t i = 0; i < count && used > budget - size; i++) {
        used -= evict(folder, &models[i]);
    }
    free(models);
    return used <= budget - size;
}

/* A part's writer holds its lock; one written and waiting for its commit has a living process. */
static void remove_if_stale(void *ctx, int folder, const char *name, const struct stat *st)
{
    const unsigned age_s = *(const unsigned *)ctx;
    char *end = NULL;
    const long pid = is_part(name) ? strtol(name + 6, &end, 10) : 0;
    if (pid <= 0 || pid > INT_MAX || *end != '-') {
        return;
    }
    const bool gone = kill((pid_t)pid, 0) != 0 && errno == ESRCH;
    const bool old = time(NULL) - st->st_mtime > (time_t)age_s;
    const int fd = openat(folder, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd >= 0 && (gone || old) && flock(fd, LOCK_EX | LOCK_NB) == 0 &&
        unlinkat(folder, name, 0) == 0) {
        fl_log(FL_LOG_DEBUG, "shard cache part %s of a dead process removed", name);
    }
    if (fd >= 0) {
        close(fd);
    }
}

void shard_eviction_remove_stale(const char *folder, unsigned age_s)
{
    struct cached_model *models = malloc(MODEL_MAX * sizeof(*models));
    if (models == NULL) {
        return;
    }
    const uint32_t count = list_models(folder, models);
    for (uint32_t i = 0; i < count; i++) {
        char path[PATH_MAX];
        if (path_join(path, folder, models[i].name)) {
            each_file(path, remove_if_stale, &age_s);
        }
    }
    free(models);
}
