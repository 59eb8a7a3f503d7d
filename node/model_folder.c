#include "node/model_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "node/residency.h"
#include "pipeline/model_identity.h"
#include "proto/base/file_read.h"
#include "proto/base/log.h"

struct copied_file {
    int fd;
    uint64_t size;
    struct timespec changed; /* when it was opened */
    char *path;
};

struct model_copy {
    uint32_t file_count;
    struct copied_file files[FL_FILE_COUNT_MAX];
};

/* A name from the wire becomes a path: it must stay inside the folder. */
static bool name_is_plain(const char *name)
{
    return name[0] != '\0' && name[0] != '.' && strchr(name, '/') == NULL;
}

/* NAME.gguf, or part `file` of a split model whose name may be the first part's or the common one. */
static char *path_of(const struct model_folder *folder, const struct fl_manifest *manifest,
                     uint32_t file)
{
    char suffix[32] = "";
    size_t stem = strlen(manifest->name);
    if (manifest->file_count > 1) {
        char first[32];
        const int size =
            snprintf(first, sizeof(first), "-00001-of-%05" PRIu32, manifest->file_count);
        if (stem > (size_t)size && strcmp(manifest->name + stem - size, first) == 0) {
            stem -= (size_t)size;
        }
        snprintf(suffix, sizeof(suffix), "-%05" PRIu32 "-of-%05" PRIu32, file + 1,
                 manifest->file_count);
    }
    char *path = NULL;
    if (asprintf(&path, "%s/%.*s%s.gguf", folder->path, (int)stem, manifest->name, suffix) < 0) {
        return NULL;
    }
    return path;
}

/* FL_NOT_FOUND without a word when it is not there or has another size. */
static fl_status open_file(const char *path, uint64_t size, struct copied_file *out)
{
    out->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (out->fd < 0 && (errno == ENOENT || errno == ENOTDIR)) {
        return FL_NOT_FOUND;
    }
    struct stat stat_now;
    if (out->fd < 0 || fstat(out->fd, &stat_now) != 0) {
        fl_log(FL_LOG_WARN, "model file %s: %s; its bytes are fetched instead", path,
               strerror(errno));
        return FL_NOT_FOUND;
    }
    if (!S_ISREG(stat_now.st_mode) || (uint64_t)stat_now.st_size != size) {
        fl_log(FL_LOG_WARN,
               "model file %s: %jd bytes, the coordinator's has %" PRIu64
               "; its bytes are fetched instead",
               path, (intmax_t)stat_now.st_size, size);
        return FL_NOT_FOUND;
    }
    out->size = size;
    out->changed = stat_now.st_mtim;
    (void)posix_fadvise(out->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    return FL_OK;
}

static void copy_close(struct model_copy *copy)
{
    if (copy == NULL) {
        return;
    }
    for (uint32_t i = 0; i < copy->file_count; i++) {
        if (copy->files[i].fd >= 0) {
            close(copy->files[i].fd);
        }
        free(copy->files[i].path);
    }
    free(copy);
}

static fl_status copy_open(struct model_folder *folder, const struct fl_manifest *manifest,
                           struct model_copy *copy)
{
    for (uint32_t i = 0; i < manifest->file_count; i++) {
        struct copied_file *file = &copy->files[i];
        file->fd = -1;
        copy->file_count = i + 1;
        file->path = path_of(folder, manifest, i);
        if (file->path == NULL) {
            return FL_FAIL(FL_NO_MEMORY, "model %s: no memory for its paths", manifest->name);
        }
        FL_TRY(open_file(file->path, manifest->files[i].size, file));
    }
    return FL_OK;
}

static fl_status copy_check(struct model_copy *copy, const struct fl_manifest *manifest)
{
    const char *paths[FL_FILE_COUNT_MAX];
    for (uint32_t i = 0; i < copy->file_count; i++) {
        paths[i] = copy->files[i].path;
    }
    unsigned char identity[FL_IDENTITY_SIZE];
    if (model_identity_of_files(paths, manifest->file_count, identity) != FL_OK) {
        return FL_NOT_FOUND; /* said why */
    }
    if (memcmp(identity, manifest->identity, sizeof(identity)) != 0) {
        fl_log(FL_LOG_WARN,
               "model file %s: other bytes than the coordinator's; its bytes are fetched instead",
               paths[0]);
        return FL_NOT_FOUND;
    }
    return FL_OK;
}

static fl_status folder_open(void *ctx, const struct fl_manifest *manifest, struct model_copy **out)
{
    struct model_folder *folder = ctx;
    if (folder->path == NULL || !name_is_plain(manifest->name) || manifest->file_count == 0 ||
        manifest->file_count > FL_FILE_COUNT_MAX) {
        return FL_NOT_FOUND;
    }
    struct model_copy *copy = calloc(1, sizeof(*copy));
    if (copy == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "model %s: no memory to open its files", manifest->name);
    }
    const fl_status status = copy_open(folder, manifest, copy);
    if (status != FL_OK) {
        copy_close(copy);
        return status;
    }
    *out = copy;
    return FL_OK;
}

static fl_status copy_read(struct model_copy *copy, uint32_t index, uint64_t offset, void *dst,
                           size_t size)
{
    FL_ASSERT(index < copy->file_count);
    const struct copied_file *file = &copy->files[index];
    FL_ASSERT(offset <= file->size && size <= file->size - offset);

    const size_t done = fl_file_read(file->fd, dst, size, offset);
    if (done < size && errno != 0) {
        return FL_FAIL(FL_IO, "model file %s: read at %" PRIu64 ": %s", file->path, offset + done,
                       strerror(errno));
    }
    if (done < size) {
        return FL_FAIL(FL_IO,
                       "model file %s: ends at %" PRIu64 " while it is loaded, want %" PRIu64
                       " bytes; was it replaced?",
                       file->path, offset + done, file->size);
    }
    struct stat stat_now;
    if (fstat(file->fd, &stat_now) != 0 || (uint64_t)stat_now.st_size != file->size ||
        stat_now.st_mtim.tv_sec != file->changed.tv_sec ||
        stat_now.st_mtim.tv_nsec != file->changed.tv_nsec) {
        return FL_FAIL(FL_IO, "model file %s: was changed while it is loaded; load it again",
                       file->path);
    }
    return FL_OK;
}

static void copy_will_need(struct model_copy *copy, uint32_t file, uint64_t offset, size_t size)
{
    FL_ASSERT(file < copy->file_count);
    (void)posix_fadvise(copy->files[file].fd, (off_t)offset, (off_t)size, POSIX_FADV_WILLNEED);
}

static bool copy_resident(struct model_copy *copy, uint32_t file, uint64_t offset, uint64_t size,
                          uint64_t *out_bytes)
{
    FL_ASSERT(file < copy->file_count);
    return residency_measure(copy->files[file].fd, offset, size, out_bytes);
}

struct model_storage model_folder_storage(struct model_folder *folder)
{
    return (struct model_storage){
        .ctx = folder,
        .open = folder_open,
        .check = copy_check,
        .read = copy_read,
        .will_need = copy_will_need,
        .resident = copy_resident,
        .close = copy_close,
    };
}
