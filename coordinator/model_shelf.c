#include "coordinator/model_shelf.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "pipeline/model.h"
#include "proto/base/utf8.h"

struct model_shelf {
    char path[MODEL_SHELF_PATH_MAX];
    uint32_t count;
    struct model_file **files; /* [count], by name */
};

static const char SUFFIX[] = ".gguf";

enum { SUFFIX_SIZE = sizeof(SUFFIX) - 1, PART_SIZE = sizeof("-00001-of-00002") - 1 };

fl_status model_shelf_open(const char *path, struct model_shelf **out)
{
    struct model_shelf *folder = calloc(1, sizeof(*folder));
    if (folder == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "models folder: no memory");
    }
    const int size = snprintf(folder->path, sizeof(folder->path), "%s", path);
    if (size < 0 || (size_t)size >= sizeof(folder->path)) {
        free(folder);
        return FL_FAIL(FL_INVALID, "the models folder's path is longer than %d bytes",
                       MODEL_SHELF_PATH_MAX);
    }
    *out = folder;
    return FL_OK;
}

static void free_files(struct model_file **files, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        free(files[i]);
    }
    free(files);
}

void model_shelf_close(struct model_shelf *folder)
{
    if (folder != NULL) {
        free_files(folder->files, folder->count);
        free(folder);
    }
}

static bool five_digits(const char *text, unsigned *out)
{
    unsigned value = 0;
    for (int i = 0; i < 5; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        value = 10 * value + (unsigned)(text[i] - '0');
    }
    *out = value;
    return true;
}

/* Reads "-PPPPP-of-NNNNN" at the end of a name without suffix; false when it has none. */
static bool split_part(const char *stem, size_t size, unsigned *out_part, unsigned *out_count)
{
    if (size <= PART_SIZE) {
        return false;
    }
    unsigned part, count;
    const char *tail = stem + size - PART_SIZE;
    if (tail[0] != '-' || !five_digits(tail + 1, &part) || memcmp(tail + 6, "-of-", 4) != 0 ||
        !five_digits(tail + 10, &count)) {
        return false;
    }
    *out_part = part;
    *out_count = count;
    return true;
}

static int64_t changed_ns(const struct stat *found)
{
    return (int64_t)found->st_mtim.tv_sec * 1000000000 + found->st_mtim.tv_nsec;
}

/* Adds the sizes and times of a split model's other parts; missing ones are the reader's to report. */
static void add_parts(const struct model_shelf *folder, const char *stem, size_t size,
                      unsigned count, struct model_file *file)
{
    const int root = (int)(size - PART_SIZE);
    for (unsigned part = 2; part <= count && part <= FL_FILE_COUNT_MAX; part++) {
        char path[MODEL_SHELF_PATH_MAX + 64];
        struct stat found;
        snprintf(path, sizeof(path), "%s/%.*s-%05u-of-%05u.gguf", folder->path, root, stem, part,
                 count);
        if (stat(path, &found) == 0) {
            const int64_t changed = changed_ns(&found);
            file->size += (uint64_t)found.st_size;
            file->changed_ns = changed > file->changed_ns ? changed : file->changed_ns;
        }
    }
}

/* Fills in a file from its entry; false when it is no model or a later part. */
static bool describe(const struct model_shelf *folder, const char *entry, struct model_file *file)
{
    const size_t entry_size = strlen(entry);
    if (entry_size <= SUFFIX_SIZE || strcmp(entry + entry_size - SUFFIX_SIZE, SUFFIX) != 0) {
        return false;
    }
    const size_t stem_size = entry_size - SUFFIX_SIZE;
    unsigned part = 1;
    unsigned count = 1;
    const bool split = split_part(entry, stem_size, &part, &count);
    const size_t name_size = split ? stem_size - PART_SIZE : stem_size;
    if (part != 1 || name_size == 0 || name_size >= FL_MODEL_NAME_MAX ||
        fl_utf8_clean_size(entry, name_size) != name_size) { /* nobody could ask for it */
        return false;
    }
    const int size = snprintf(file->path, sizeof(file->path), "%s/%s", folder->path, entry);
    struct stat found;
    if (size < 0 || (size_t)size >= sizeof(file->path) || stat(file->path, &found) != 0 ||
        !S_ISREG(found.st_mode)) {
        return false;
    }
    snprintf(file->name, sizeof(file->name), "%.*s", (int)name_size, entry);
    file->size = (uint64_t)found.st_size;
    file->changed_ns = changed_ns(&found);
    if (split) {
        add_parts(folder, entry, stem_size, count, file);
    }
    return true;
}

static int by_name(const void *a, const void *b)
{
    const struct model_file *const *left = a;
    const struct model_file *const *right = b;
    return strcmp((*left)->name, (*right)->name);
}

static const struct model_file *lookup(const struct model_shelf *folder, const char *name)
{
    for (uint32_t i = 0; i < folder->count; i++) {
        if (strcmp(folder->files[i]->name, name) == 0) {
            return folder->files[i];
        }
    }
    return NULL;
}

/* What the last inspection found still holds for an unchanged file. */
static void carry_over(const struct model_shelf *folder, struct model_file *file)
{
    const struct model_file *known = lookup(folder, file->name);
    if (known != NULL && known->inspected && known->size == file->size &&
        known->changed_ns == file->changed_ns && strcmp(known->path, file->path) == 0) {
        *file = *known;
    }
}

fl_status model_shelf_scan(struct model_shelf *folder)
{
    DIR *dir = opendir(folder->path);
    if (dir == NULL) {
        return FL_FAIL(FL_NOT_FOUND, "models folder %s cannot be read: %s", folder->path,
                       strerror(errno));
    }
    struct model_file **files = calloc(MODEL_SHELF_FILE_MAX, sizeof(*files));
    uint32_t count = 0;
    const struct dirent *entry;
    while (files != NULL && count < MODEL_SHELF_FILE_MAX && (entry = readdir(dir)) != NULL) {
        struct model_file *file = calloc(1, sizeof(*file));
        if (file == NULL) {
            break;
        }
        if (!describe(folder, entry->d_name, file)) {
            free(file);
            continue;
        }
        carry_over(folder, file);
        files[count++] = file;
    }
    closedir(dir);
    if (files == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "models folder: no memory for its list");
    }
    qsort(files, count, sizeof(*files), by_name);
    free_files(folder->files, folder->count);
    folder->files = files;
    folder->count = count;
    return FL_OK;
}

uint32_t model_shelf_count(const struct model_shelf *folder)
{
    return folder->count;
}

const struct model_file *model_shelf_at(const struct model_shelf *folder, uint32_t index)
{
    FL_ASSERT(index < folder->count);
    return folder->files[index];
}

fl_status model_shelf_find(struct model_shelf *folder, const char *name,
                           const struct model_file **out)
{
    FL_TRY(model_shelf_scan(folder));
    *out = lookup(folder, name);
    if (*out != NULL) {
        return FL_OK;
    }
    char names[256] = "none";
    size_t used = 0;
    for (uint32_t i = 0; i < folder->count && used < sizeof(names); i++) {
        const int size = snprintf(names + used, sizeof(names) - used, "%s%s", i > 0 ? ", " : "",
                                  folder->files[i]->name);
        used += size > 0 ? (size_t)size : 0;
    }
    return FL_FAIL(FL_NOT_FOUND, "no model '%s' in %s; there is: %s", name, folder->path, names);
}

const char *model_shelf_architecture(enum fl_architecture architecture)
{
    switch (architecture) {
    case FL_ARCHITECTURE_LLAMA: return "llama";
    case FL_ARCHITECTURE_GEMMA3: return "gemma3";
    }
    return "unknown";
}

void model_shelf_inspect(struct model_shelf *folder)
{
    for (uint32_t i = 0; i < folder->count; i++) {
        struct model_file *file = folder->files[i];
        if (file->inspected) {
            continue;
        }
        struct model *model = NULL;
        file->inspected = true;
        if (model_open(file->path, &model) == FL_OK) {
            const struct fl_model_shape *shape = &model_manifest(model)->shape;
            snprintf(file->architecture, sizeof(file->architecture), "%s",
                     model_shelf_architecture(shape->architecture));
        } else {
            snprintf(file->problem, sizeof(file->problem), "%s", fl_last_error());
        }
        model_close(model);
    }
}
