#include "node/shard_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/file_read.h"
#include "proto/checksum.h"

enum {
    FORMAT_VERSION = 1,
    PAGE = 4096,
};

static const char magic[8] = {'F', 'L', 'P', 'I', 'E', 'C', 'E', '\n'};

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

char *shard_file_folder(const char *cache, const unsigned char identity[FL_IDENTITY_SIZE])
{
    char hex[2 * FL_IDENTITY_SIZE + 1];
    for (size_t i = 0; i < FL_IDENTITY_SIZE; i++) {
        snprintf(hex + 2 * i, 3, "%02x", identity[i]);
    }
    char *path = NULL;
    return asprintf(&path, "%s/%s", cache, hex) < 0 ? NULL : path;
}

char *shard_file_path(const char *cache, const unsigned char identity[FL_IDENTITY_SIZE],
                      const struct fl_piece *piece)
{
    static const char *const kinds[] = {
        [FL_PIECE_EMBED] = "embed",
        [FL_PIECE_ATTENTION] = "attention",
        [FL_PIECE_FFN] = "ffn",
        [FL_PIECE_HEAD] = "head",
    };
    char *folder = shard_file_folder(cache, identity);
    char *path = NULL;
    if (folder != NULL && asprintf(&path, "%s/%s%03" PRIu32 "-%016" PRIx64 ".piece", folder,
                                   kinds[piece->kind], piece->layer, piece_key(piece)) < 0) {
        path = NULL;
    }
    free(folder);
    return path;
}

uint64_t shard_file_data_offset(uint32_t chunk_count)
{
    const uint64_t end =
        sizeof(struct shard_file_header) + (uint64_t)chunk_count * sizeof(uint64_t);
    return (end + PAGE - 1) / PAGE * PAGE;
}

uint64_t shard_file_checksum(const struct shard_file_header *header, const uint64_t *checksums)
{
    struct fl_checksum sum;
    fl_checksum_init(&sum);
    fl_checksum_add(&sum, header, offsetof(struct shard_file_header, checksum));
    fl_checksum_add(&sum, checksums, header->chunk_count * sizeof(checksums[0]));
    return fl_checksum_digest64(&sum);
}

static uint32_t chunk_count_of(uint64_t size)
{
    const uint64_t count = (size + SHARD_CHUNK_SIZE - 1) / SHARD_CHUNK_SIZE;
    return count == 0 || count > SHARD_CHUNK_COUNT_MAX ? 0 : (uint32_t)count;
}

struct shard_file_header shard_file_header_of(const unsigned char identity[FL_IDENTITY_SIZE],
                                              const struct fl_piece *piece)
{
    struct shard_file_header header = {
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

bool shard_file_read(int fd, void *dst, size_t size, uint64_t offset)
{
    return fl_file_read(fd, dst, size, offset) == size;
}

bool shard_file_write(int fd, const void *data, size_t size, uint64_t offset)
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
