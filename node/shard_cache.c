#include "node/shard_cache.h"

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

#include "node/residency.h"
#include "node/shard_eviction.h"
#include "proto/base/log.h"
#include "proto/checksum.h"

enum {
    FORMAT_VERSION = 1,
    HEADER_SIZE = 128, /* then the chunks' checksums; the data begins at the next page */
    PAGE = 4096,
    PENDING_MAX = FL_PIECE_COUNT_MAX,
    STALE_AGE_S = 3600,
};

static const char magic[8] = {'F', 'L', 'P', 'I', 'E', 'C', 'E', '\n'};

/* As it lies in the file, on the machine that wrote it (all of ours are little-endian). */
struct header {
    char magic[8];
    uint32_t version;
    uint32_t chunk_size;
    unsigned char identity[FL_IDENTITY_SIZE];
    uint64_t piece_key;
    uint64_t size;
    uint32_t chunk_count;
    uint32_t reserved[17];
    uint64_t checksum; /* of all before it and of the chunks' checksums */
};
_Static_assert(sizeof(struct header) == HEADER_SIZE, "the header has no holes");

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

struct shard_entry {
    int fd;
    char *path;
    uint64_t size;
    uint32_t chunk_count;
    uint64_t checksums[];
};

struct shard_writer {
    struct shard_cache *cache;
    int fd; /* -1: given up */
    char *part;
    char *name;
    uint32_t chunk;
    struct header header;
    uint64_t checksums[];
};

struct shard_use {
    int fd;
};

static uint64_t data_offset(uint32_t chunk_count)
{
    const uint64_t end = HEADER_SIZE + (uint64_t)chunk_count * sizeof(uint64_t);
    return (end + PAGE - 1) / PAGE * PAGE;
}

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

/* Entries ------------------------------------------------------------------------------------ */

/* What a piece holds: two pieces with one key have the same bytes in the same model. */
static uint64_t piece_key(const struct fl_piece *piece)
{
    struct fl_checksum sum;
    fl_checksum_init(&sum);
    const uint32_t head[] = {(uint32_t)piece->kind, piece->layer, piece->tensor_count};
    fl_checksum_add(&sum, head, sizeof(head));
    for (uint32_t i = 0; i < piece->tensor_count; i++) {
        const struct fl_tensor_ref *tensor = &piece->tensors[i];
        const uint64_t fields[] = {tensor->role, tensor->dtype,  tensor->rows, tensor->columns,
                                   tensor->file, tensor->offset, tensor->size};
        fl_checksum_add(&sum, fields, sizeof(fields));
    }
    return fl_checksum_digest64(&sum);
}

static char *folder_of(const struct shard_cache *cache,
                       const unsigned char identity[FL_IDENTITY_SIZE])
{
    char hex[2 * FL_IDENTITY_SIZE + 1];
    for (size_t i = 0; i < FL_IDENTITY_SIZE; i++) {
        snprintf(hex + 2 * i, 3, "%02x", identity[i]);
    }
    char *path = NULL;
    return asprintf(&path, "%s/%s", cache->folder, hex) < 0 ? NULL : path;
}

static char *name_of(const struct shard_cache *cache,
                     const unsigned char identity[FL_IDENTITY_SIZE], const struct fl_piece *piece)
{
    static const char *const kinds[] = {
        [FL_PIECE_EMBED] = "embed",
        [FL_PIECE_ATTENTION] = "attention",
        [FL_PIECE_FFN] = "ffn",
        [FL_PIECE_HEAD] = "head",
    };
    char *folder = folder_of(cache, identity);
    char *path = NULL;
    if (folder != NULL && asprintf(&path, "%s/%s%03" PRIu32 "-%016" PRIx64 ".piece", folder,
                                   kinds[piece->kind], piece->layer, piece_key(piece)) < 0) {
        path = NULL;
    }
    free(folder);
    return path;
}

static bool read_whole(int fd, void *dst, size_t size, uint64_t offset)
{
    for (size_t done = 0; done < size;) {
        const ssize_t got =
            pread(fd, (unsigned char *)dst + done, size - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return false;
        }
        done += (size_t)got;
    }
    return true;
}

static uint64_t header_checksum(const struct header *header, const uint64_t *checksums)
{
    struct fl_checksum sum;
    fl_checksum_init(&sum);
    fl_checksum_add(&sum, header, offsetof(struct header, checksum));
    fl_checksum_add(&sum, checksums, header->chunk_count * sizeof(checksums[0]));
    return fl_checksum_digest64(&sum);
}

static uint32_t chunk_count_of(uint64_t size)
{
    const uint64_t count = (size + SHARD_CHUNK_SIZE - 1) / SHARD_CHUNK_SIZE;
    return count == 0 || count > SHARD_CHUNK_COUNT_MAX ? 0 : (uint32_t)count;
}

static struct header header_of(const unsigned char identity[FL_IDENTITY_SIZE],
                               const struct fl_piece *piece)
{
    struct header header = {
        .version = FORMAT_VERSION,
        .chunk_size = SHARD_CHUNK_SIZE,
        .piece_key = piece_key(piece),
        .size = fl_piece_size(piece),
    };
    memcpy(header.magic, magic, sizeof(magic));
    memcpy(header.identity, identity, FL_IDENTITY_SIZE);
    header.chunk_count = chunk_count_of(header.size);
    return header;
}

/* True when the file's header is the one this piece must have, and its sums are intact. */
static bool entry_check(struct shard_entry *entry, const struct header *wanted)
{
    struct header header;
    struct stat stat_now;
    if (!read_whole(entry->fd, &header, sizeof(header), 0) ||
        memcmp(&header, wanted, offsetof(struct header, checksum)) != 0 ||
        !read_whole(entry->fd, entry->checksums, wanted->chunk_count * sizeof(uint64_t),
                    sizeof(header)) ||
        header_checksum(&header, entry->checksums) != header.checksum) {
        return false;
    }
    return fstat(entry->fd, &stat_now) == 0 &&
           (uint64_t)stat_now.st_size == data_offset(wanted->chunk_count) + wanted->size;
}

static void entry_delete(const struct shard_entry *entry, const char *why)
{
    fl_log(FL_LOG_WARN, "shard cache entry %s: %s; deleted, fetched again", entry->path, why);
    (void)unlink(entry->path); /* a read-only cache keeps it, and it is refused again */
}

fl_status shard_entry_open(struct shard_cache *cache,
                           const unsigned char identity[FL_IDENTITY_SIZE],
                           const struct fl_piece *piece, struct shard_entry **out)
{
    const struct header wanted = header_of(identity, piece);
    if (wanted.chunk_count == 0) {
        return FL_NOT_FOUND;
    }
    struct shard_entry *entry =
        calloc(1, sizeof(*entry) + wanted.chunk_count * sizeof(entry->checksums[0]));
    if (entry == NULL) {
        return FL_NOT_FOUND;
    }
    entry->size = wanted.size;
    entry->chunk_count = wanted.chunk_count;
    entry->path = name_of(cache, identity, piece);
    entry->fd = entry->path == NULL ? -1 : open(entry->path, O_RDONLY | O_CLOEXEC);
    if (entry->fd < 0) {
        shard_entry_close(entry);
        return FL_NOT_FOUND;
    }
    /* Not a page beyond the header: how much is in the page cache is still to be measured. */
    (void)posix_fadvise(entry->fd, 0, 0, POSIX_FADV_RANDOM);
    if (!entry_check(entry, &wanted)) {
        entry_delete(entry, "its header is damaged or another piece's");
        shard_entry_close(entry);
        return FL_NOT_FOUND;
    }
    (void)futimens(entry->fd, NULL); /* used now, says eviction; a read-only cache does not evict */
    (void)posix_fadvise(entry->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    *out = entry;
    return FL_OK;
}

static size_t entry_chunk_size(const struct shard_entry *entry, uint32_t chunk)
{
    FL_ASSERT(chunk < entry->chunk_count);
    const uint64_t left = entry->size - (uint64_t)chunk * SHARD_CHUNK_SIZE;
    return left < SHARD_CHUNK_SIZE ? (size_t)left : SHARD_CHUNK_SIZE;
}

fl_status shard_entry_load(struct shard_entry *entry, uint32_t chunk, void *dst)
{
    const uint64_t offset = data_offset(entry->chunk_count) + (uint64_t)chunk * SHARD_CHUNK_SIZE;
    if (!read_whole(entry->fd, dst, entry_chunk_size(entry, chunk), offset)) {
        entry_delete(entry, "it cannot be read to its end");
        return FL_CORRUPT;
    }
    return FL_OK;
}

fl_status shard_entry_verify(struct shard_entry *entry, uint32_t chunk, const void *bytes)
{
    if (fl_checksum64(bytes, entry_chunk_size(entry, chunk)) != entry->checksums[chunk]) {
        entry_delete(entry, "a chunk has a wrong checksum");
        return FL_CORRUPT;
    }
    return FL_OK;
}

fl_status shard_entry_read(struct shard_entry *entry, uint32_t chunk, void *dst)
{
    FL_TRY(shard_entry_load(entry, chunk, dst));
    return shard_entry_verify(entry, chunk, dst);
}

bool shard_entry_resident(const struct shard_entry *entry, uint64_t *out_bytes)
{
    return residency_measure(entry->fd, data_offset(entry->chunk_count), entry->size, out_bytes);
}

void shard_entry_close(struct shard_entry *entry)
{
    if (entry != NULL) {
        if (entry->fd >= 0) {
            close(entry->fd);
        }
        free(entry->path);
        free(entry);
    }
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
    char *folder = folder_of(cache, identity);
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

static bool write_whole(int fd, const void *data, size_t size, uint64_t offset)
{
    for (size_t done = 0; done < size;) {
        const ssize_t put =
            pwrite(fd, (const unsigned char *)data + done, size - done, (off_t)(offset + done));
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return false;
        }
        done += (size_t)put;
    }
    return true;
}

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
    const struct header header = header_of(identity, piece);
    if (cache->off || header.chunk_count == 0 || cache->pending_count == PENDING_MAX) {
        return NULL;
    }
    const uint64_t file_size = data_offset(header.chunk_count) + header.size;
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
    char *folder = folder_of(cache, identity);
    if (writer == NULL || folder == NULL) {
        free(writer);
        free(folder);
        return NULL;
    }
    writer->cache = cache;
    writer->header = header;
    writer->fd = -1;
    writer->name = name_of(cache, identity, piece);
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
    const uint64_t offset =
        data_offset(writer->header.chunk_count) + (uint64_t)writer->chunk * SHARD_CHUNK_SIZE;
    if (writer->fd >= 0 && !write_whole(writer->fd, data, size, offset)) {
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
    struct header *header = &writer->header;
    if (writer->fd >= 0 && writer->chunk == header->chunk_count) {
        header->checksum = header_checksum(header, writer->checksums);
        if (write_whole(writer->fd, header, sizeof(*header), 0) &&
            write_whole(writer->fd, writer->checksums,
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
