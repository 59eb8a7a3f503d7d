#include "tests/support/bulk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "proto/base/check.h"

enum {
    SLAB_SIZE = 4 << 20,
    DIRECT_ALIGNMENT = 4096,
};

struct bulk_file {
    char path[PATH_MAX];
    char part_path[PATH_MAX];
    int fd;
    bool direct;
    size_t filled; /* bytes of the slab */
    unsigned char *slab;
};

static void file_free(struct bulk_file *file)
{
    free(file->slab);
    free(file);
}

/* A disk that is filled up to the brim harms whoever else writes to it: ask first. */
static fl_status check_space(const char *path, int fd, uint64_t size)
{
    struct statvfs space;
    if (fstatvfs(fd, &space) != 0) {
        return FL_OK; /* then the write will tell */
    }
    const uint64_t free_size = (uint64_t)space.f_bavail * space.f_frsize;
    if (size > free_size) {
        return FL_FAIL(FL_IO, "%s: needs %" PRIu64 " MiB, its disk has %" PRIu64 " MiB free", path,
                       size >> 20, free_size >> 20);
    }
    return FL_OK;
}

fl_status bulk_file_open(const char *path, uint64_t size, struct bulk_file **out)
{
    struct bulk_file *file = calloc(1, sizeof(*file));
    FL_ASSERT(file != NULL);
    file->slab = aligned_alloc(DIRECT_ALIGNMENT, SLAB_SIZE);
    FL_ASSERT(file->slab != NULL);
    const int path_size = snprintf(file->path, sizeof(file->path), "%s", path);
    const int part_size = snprintf(file->part_path, sizeof(file->part_path), "%s.part", path);
    if (path_size < 0 || part_size < 0 || (size_t)part_size >= sizeof(file->part_path)) {
        file_free(file);
        return FL_FAIL(FL_IO, "%.80s..: a path of at most %zu bytes would be right", path,
                       sizeof(file->path) - sizeof(".part"));
    }
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
    file->direct = size >= BULK_FILE_DIRECT_SIZE_MIN;
    file->fd = open(file->part_path, file->direct ? flags | O_DIRECT : flags, 0644);
    if (file->fd < 0 && file->direct) { /* tmpfs, for one */
        file->direct = false;
        file->fd = open(file->part_path, flags, 0644);
    }
    if (file->fd < 0) {
        const int error = errno;
        file_free(file);
        return FL_FAIL(FL_IO, "%s: cannot be created: %s", path, strerror(error));
    }
    const fl_status status = check_space(path, file->fd, size);
    if (status != FL_OK) {
        bulk_file_discard(file);
        return status;
    }
    *out = file;
    return FL_OK;
}

static bool is_interrupted(void)
{
    sigset_t pending;
    return sigpending(&pending) == 0 &&
           (sigismember(&pending, SIGINT) == 1 || sigismember(&pending, SIGTERM) == 1);
}

static fl_status flush(struct bulk_file *file)
{
    if (is_interrupted()) {
        return FL_FAIL(FL_CANCELLED, "%s: interrupted, nothing of it is left", file->path);
    }
    for (size_t at = 0; at < file->filled;) {
        const size_t left = file->filled - at;
        if (file->direct && (at % DIRECT_ALIGNMENT != 0 || left % DIRECT_ALIGNMENT != 0)) {
            /* The file's last bytes, or a short write. */
            if (fcntl(file->fd, F_SETFL, 0) != 0) {
                return FL_FAIL(FL_IO, "%s: cannot leave direct writing: %s", file->path,
                               strerror(errno));
            }
            file->direct = false;
        }
        const ssize_t done = write(file->fd, file->slab + at, left);
        if (done < 0 && errno != EINTR) {
            return FL_FAIL(FL_IO, "%s: cannot be written: %s", file->path, strerror(errno));
        }
        at += done > 0 ? (size_t)done : 0;
    }
    file->filled = 0;
    return FL_OK;
}

fl_status bulk_file_put(struct bulk_file *file, const void *bytes, size_t size)
{
    const unsigned char *from = bytes;
    while (size > 0) {
        const size_t room = SLAB_SIZE - file->filled;
        const size_t step = size < room ? size : room;
        memcpy(file->slab + file->filled, from, step);
        file->filled += step;
        from += step;
        size -= step;
        if (file->filled == SLAB_SIZE) {
            FL_TRY(flush(file));
        }
    }
    return FL_OK;
}

fl_status bulk_file_commit(struct bulk_file *file)
{
    fl_status status = flush(file);
    if (status == FL_OK && close(file->fd) != 0) {
        status = FL_FAIL(FL_IO, "%s: cannot be written: %s", file->path, strerror(errno));
        file->fd = -1;
    } else if (status == FL_OK) {
        file->fd = -1;
        if (rename(file->part_path, file->path) != 0) {
            status =
                FL_FAIL(FL_IO, "%s: cannot be given its name: %s", file->path, strerror(errno));
        }
    }
    if (status != FL_OK) {
        bulk_file_discard(file);
        return status;
    }
    file_free(file);
    return FL_OK;
}

void bulk_file_discard(struct bulk_file *file)
{
    if (file == NULL) {
        return;
    }
    if (file->fd >= 0) {
        (void)close(file->fd);
    }
    (void)unlink(file->part_path);
    file_free(file);
}
