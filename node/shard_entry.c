#include "node/shard_entry.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "node/residency.h"
#include "proto/base/log.h"
#include "proto/checksum.h"

struct shard_entry {
    int fd;
    char *path;
    uint64_t size;
    uint32_t chunk_count;
    uint64_t checksums[];
};

/* True when the file's header is the one this piece must have, and its sums are intact. */
static bool entry_check(struct shard_entry *entry, const struct shard_file_header *wanted)
{
    struct shard_file_header header;
    struct stat stat_now;
    if (!shard_file_read(entry->fd, &header, sizeof(header), 0) ||
        memcmp(&header, wanted, offsetof(struct shard_file_header, checksum)) != 0 ||
        !shard_file_read(entry->fd, entry->checksums, wanted->chunk_count * sizeof(uint64_t),
                         sizeof(header)) ||
        shard_file_checksum(&header, entry->checksums) != header.checksum) {
        return false;
    }
    return fstat(entry->fd, &stat_now) == 0 &&
           (uint64_t)stat_now.st_size == shard_file_data_offset(wanted->chunk_count) + wanted->size;
}

static void entry_delete(const struct shard_entry *entry, const char *why)
{
    fl_log(FL_LOG_WARN, "shard cache entry %s: %s; deleted, fetched again", entry->path, why);
    (void)unlink(entry->path); /* a read-only cache keeps it, and it is refused again */
}

fl_status shard_entry_open(const char *cache, const unsigned char identity[FL_IDENTITY_SIZE],
                           const struct fl_piece *piece, struct shard_entry **out)
{
    const struct shard_file_header wanted = shard_file_header_of(identity, piece);
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
    entry->path = shard_file_path(cache, identity, piece);
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
    const uint64_t offset =
        shard_file_data_offset(entry->chunk_count) + (uint64_t)chunk * SHARD_CHUNK_SIZE;
    if (!shard_file_read(entry->fd, dst, entry_chunk_size(entry, chunk), offset)) {
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
    return residency_measure(entry->fd, shard_file_data_offset(entry->chunk_count), entry->size,
                             out_bytes);
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
