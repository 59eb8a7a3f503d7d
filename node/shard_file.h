/* shard_file.h - how one piece lies in a file of the shard cache.
 *
 *   header · a checksum for each chunk · zeros to the next page · the piece's bytes
 *
 * The name says which piece of which model it is, the header says it again.
 *
 * Thread:  any.
 * Memory:  paths are the caller's to free.
 * Units:   sizes and offsets in bytes.
 */
#ifndef NODE_SHARD_FILE_H
#define NODE_SHARD_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/model_shape.h"

enum {
    SHARD_CHUNK_SIZE = 1 << 20,
    SHARD_CHUNK_COUNT_MAX = 1 << 16, /* larger pieces are not cached */
};

/* As it lies in the file, on the machine that wrote it (all of ours are little-endian). */
struct shard_file_header {
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
_Static_assert(sizeof(struct shard_file_header) == 128, "the header has no holes");

/* The header this piece must have, but for the checksum; chunk_count is 0 when it is not cached. */
struct shard_file_header shard_file_header_of(const unsigned char identity[FL_IDENTITY_SIZE],
                                              const struct fl_piece *piece);

/* `checksums` [header->chunk_count]. */
uint64_t shard_file_checksum(const struct shard_file_header *header, const uint64_t *checksums);

/* Where the piece's bytes begin. */
uint64_t shard_file_data_offset(uint32_t chunk_count);

/* A model's folder in the cache's, and a piece's file in it; NULL without memory. */
char *shard_file_folder(const char *cache, const unsigned char identity[FL_IDENTITY_SIZE]);
char *shard_file_path(const char *cache, const unsigned char identity[FL_IDENTITY_SIZE],
                      const struct fl_piece *piece);

/* All of `size` bytes, or false. */
bool shard_file_read(int fd, void *dst, size_t size, uint64_t offset);
bool shard_file_write(int fd, const void *data, size_t size, uint64_t offset);

#endif
