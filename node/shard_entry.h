/* shard_entry.h - a piece in the shard cache, read back and checked.
 *
 * What does not check out is deleted, which is said as a warning, and fetched
 * again by whoever wants it.
 *
 * Thread:  owner (the loader thread).
 * Memory:  open() allocates, close() frees.
 * Units:   sizes in bytes.
 */
#ifndef NODE_SHARD_ENTRY_H
#define NODE_SHARD_ENTRY_H

#include <stdbool.h>
#include <stdint.h>

#include "node/shard_file.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"

struct shard_entry;

/* Of the cache in folder `cache`.  FL_NOT_FOUND, silently, when there is none that can be used. */
FL_MUST_CHECK fl_status shard_entry_open(const char *cache,
                                         const unsigned char identity[FL_IDENTITY_SIZE],
                                         const struct fl_piece *piece, struct shard_entry **out);
/* Chunk `chunk` of the piece: SHARD_CHUNK_SIZE bytes, fewer in the last.  FL_CORRUPT when it is not
 * what was written: the entry is deleted, which is said as a warning. */
FL_MUST_CHECK fl_status shard_entry_read(struct shard_entry *entry, uint32_t chunk, void *dst);
/* The two halves of it: bytes from the disk, and whether they are what was written. */
FL_MUST_CHECK fl_status shard_entry_load(struct shard_entry *entry, uint32_t chunk, void *dst);
FL_MUST_CHECK fl_status shard_entry_verify(struct shard_entry *entry, uint32_t chunk,
                                           const void *bytes);
/* Bytes of the piece in the page cache; false: not known. */
bool shard_entry_resident(const struct shard_entry *entry, uint64_t *out_bytes);
void shard_entry_close(struct shard_entry *entry);

#endif
