#include "node/shard_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "node/shard_eviction.h"
#include "node/shard_file.h"
#include "proto/base/log.h"
#include "proto/checksum.h"

enum {
    PENDING_MAX = FL_PIECE_COUNT_MAX,
    STALE_AGE_S = 3600,
};

struct pending {
    char *part; /* written, not yet synced */
    char *name;
};

struct shard_cache {
    char *folder;
    uint64_t budget;
    bool off; /* a write failed, which was said: nothing is written until the next use() */
    uint32_t pending_count;
    struct pending pending[PENDING_MAX];
};

struct shard_writer {
    struct shard_cache *cache;
    int fd; /* -1: given up */
    char *part;
    char *name;
    uint32_t chunk;
    struct shard_file_header header;
    uint64_t checksums[];
};

struct shard_use {
    int fd;
};

/* One warning, then silence until the next model: a disk that is full now may not be then. */
static void turn_off(struct shard_cache *cache, const char *what, const char *path)
{
    const int error = errno;
    if (!cache->off) {
        fl_log(FL_LOG_WARN,
               "shard cache %s: %s: %s; pieces are not cached until a model is loaded again", what,
               path, strerror(error));
        cache->off = true;
    }
}

fl_status shard_cache_find(const struct shard_cache *cache,
                           const unsigned char identity[FL_IDENTITY_SIZE],
                           const struct fl_piece *piece, struct shard_entry **out)
{
    return shard_entry_open(cache->folder, identity, piece, out);
}

/* Use ---------------------------------------------------------------------------------------- */

static bool make_folder(const char *path)
{
    return mkdir(path, 0755) == 0 || errno == EEXIST;
}

/* mkdir -p. */
static bool make_folders(const char *path)
{
    char step[PATH_MAX];
    const size_t size = strlen(path);
    if (size >= sizeof(step)) {
        errno = ENAMETOOLONG;
        return false;
    }
    for (size_t i = 1; i <= size; i++) {
        if (path[i] == '/' || path[i] == '\0') {
            memcpy(step, path, i);
            step[i] = '\0';
            if (!make_folder(step)) {
                return false;
            }
        }
    }
    return true;
}

/* Try again what failed before: the disk may have room by now, or be there at all. */
static void turn_on(struct shard_cache *cache)
{
    cache->off = false;
    if (!make_folders(cache->folder)) {
        turn_off(cache, "cannot be made", cache->folder);
    } else if (access(cache->folder, W_OK) != 0) {
        turn_off(cache, "cannot be written", cache->folder);
    }
}

struct shard_use *shard_cache_use(struct shard_cache *cache,
                                  const unsigned char identity[FL_IDENTITY_SIZE])
{
    if (cache->off) {
        turn_on(cache);
    }
    char *folder = shard_file_folder(cache->folder, identity);
    char *path = NULL;
    struct shard_use *use = malloc(sizeof(*use));
    if (folder == NULL || use == NULL || asprintf(&path, "%s/lock", folder) < 0) {
        free(folder);
        free(use);
        return NULL;
    }
    (void)make_folder(folder);
    use->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (use->fd < 0 || flock(use->fd, LOCK_SH) != 0) {
        shard_cache_unuse(use);
        use = NULL;
    }
    free(path);
    free(folder);
    return use;
}

void shard_cache_unuse(struct shard_use *use)
{
    if (use != NULL) {
        if (use->fd >= 0) {
            close(use->fd); /* the lock goes with it */
        }
        free(use);
    }
}

/* Writing ------------------------------------------------------------------------------------ */

static void writer_give_up(struct shard_writer *writer)
{
    if (writer->fd >= 0) {
        FL_ASSERT(writer->part != NULL); /* it was opened by that name */
        (void)unlink(writer->part);
        close(writer->fd);
        writer->fd = -1;
    }
}

static void writer_free(struct shard_writer *writer)
{
    free(writer->part);
    free(writer->name);
    free(writer);
}

/* A name nobody else has, locked for as long as it is written. */
static bool open_part(struct shard_writer *writer, const char *folder)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (asprintf(&writer->part, "%s/.part-%jd-%lx%lx%" PRIxPTR, folder, (intmax_t)getpid(),
                 (unsigned long)now.tv_sec, (unsigned long)now.tv_nsec, (uintptr_t)writer) < 0) {
        writer->part = NULL;
        return false;
    }
    writer->fd = open(writer->part, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    return writer->fd >= 0 && flock(writer->fd, LOCK_EX | LOCK_NB) == 0;
}

struct shard_writer *shard_writer_open(struct shard_cache *cache,
                                       const unsigned char identity[FL_IDENTITY_SIZE],
                                       const struct fl_piece *piece)
{
    const struct shard_file_header header = shard_file_header_of(identity, piece);
    if (cache->off || header.chunk_count == 0 || cache->pending_count == PENDING_MAX) {
        return NULL;
    }
    const uint64_t file_size = shard_file_data_offset(header.chunk_count) + header.size;
    if (!shard_eviction_make_room(cache->folder, cache->budget, file_size)) {
        fl_log(FL_LOG_WARN,
               "shard cache %s: models in use fill its budget of %" PRIu64
               " bytes; pieces are not cached until a model is loaded again",
               cache->folder, cache->budget);
        cache->off = true;
        return NULL;
    }
    struct shard_writer *writer =
        calloc(1, sizeof(*writer) + header.chunk_count * sizeof(writer->checksums[0]));
    char *folder = shard_file_folder(cache->folder, identity);
    if (writer == NULL || folder == NULL) {
        free(writer);
        free(folder);
        return NULL;
    }
    writer->cache = cache;
    writer->header = header;
    writer->fd = -1;
    writer->name = shard_file_path(cache->folder, identity, piece);
    if (writer->name == NULL || !make_folder(folder) || !open_part(writer, folder)) {
        turn_off(cache, "cannot be written", folder);
        writer_give_up(writer);
        writer_free(writer);
        writer = NULL;
    }
    free(folder);
    return writer;
}

void shard_writer_put(struct shard_writer *writer, const void *data, size_t size)
{
    FL_ASSERT(writer->chunk < writer->header.chunk_count);
    FL_ASSERT(size == SHARD_CHUNK_SIZE || writer->chunk + 1 == writer->header.chunk_count);
    const uint64_t offset = shard_file_data_offset(writer->header.chunk_count) +
                            (uint64_t)writer->chunk * SHARD_CHUNK_SIZE;
    if (writer->fd >= 0 && !shard_file_write(writer->fd, data, size, offset)) {
        turn_off(writer->cache, "cannot be written", writer->part);
        writer_give_up(writer);
    }
    writer->checksums[writer->chunk++] = fl_checksum64(data, size);
}

void shard_writer_close(struct shard_writer *writer)
{
    if (writer == NULL) {
        return;
    }
    struct shard_cache *cache = writer->cache;
    struct shard_file_header *header = &writer->header;
    if (writer->fd >= 0 && writer->chunk == header->chunk_count) {
        header->checksum = shard_file_checksum(header, writer->checksums);
        if (shard_file_write(writer->fd, header, sizeof(*header), 0) &&
            shard_file_write(writer->fd, writer->checksums,
                             header->chunk_count * sizeof(writer->checksums[0]), sizeof(*header))) {
            cache->pending[cache->pending_count++] =
                (struct pending){.part = writer->part, .name = writer->name};
            close(writer->fd);
            free(writer);
            return;
        }
        turn_off(cache, "cannot be written", writer->part);
    }
    writer_give_up(writer);
    writer_free(writer);
}

static bool sync_path(const char *path, int flags)
{
    const int fd = open(path, flags | O_CLOEXEC);
    const bool synced = fd >= 0 && fsync(fd) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return synced;
}

bool shard_cache_commit(struct shard_cache *cache)
{
    if (cache->pending_count == 0) {
        return false;
    }
    struct pending entry = cache->pending[--cache->pending_count];
    if (!sync_path(entry.part, O_RDONLY) || rename(entry.part, entry.name) != 0) {
        turn_off(cache, "cannot be written", entry.part);
        (void)unlink(entry.part);
    } else {
        char *slash = strrchr(entry.name, '/');
        *slash = '\0';
        (void)sync_path(entry.name, O_RDONLY | O_DIRECTORY);
    }
    free(entry.part);
    free(entry.name);
    return true;
}

/* Opening ------------------------------------------------------------------------------------ */

fl_status shard_cache_open(const struct shard_cache_config *config, struct shard_cache **out)
{
    struct shard_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL || (cache->folder = strdup(config->folder)) == NULL) {
        free(cache);
        return FL_FAIL(FL_NO_MEMORY, "shard cache %s: no memory", config->folder);
    }
    cache->budget = config->budget;
    turn_on(cache);
    if (!cache->off) {
        shard_eviction_remove_stale(cache->folder, STALE_AGE_S);
    }
    *out = cache;
    return FL_OK;
}

void shard_cache_close(struct shard_cache *cache)
{
    if (cache == NULL) {
        return;
    }
    for (uint32_t i = 0; i < cache->pending_count; i++) {
        (void)unlink(cache->pending[i].part);
        free(cache->pending[i].part);
        free(cache->pending[i].name);
    }
    free(cache->folder);
    free(cache);
}
