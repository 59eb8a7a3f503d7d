/* shard_cache.h - pieces that came over the wire, kept on this machine's disk.
 *
 *   FOLDER/<model identity>/<piece>-<what it holds>.piece     an entry
 *   FOLDER/<model identity>/.part-<pid>-<random>              one being written
 *   FOLDER/<model identity>/lock                              held while a plan uses the model
 *
 * An entry is the piece's bytes as they lie in the model file, in chunks of
 * SHARD_CHUNK_SIZE with a checksum each, behind a header with a checksum of its
 * own.  It is written under another name, synced and renamed, so that a name
 * that looks like an entry is a whole one; what does not check out when it is
 * read is deleted and fetched again.  The cache never fails a load: a full or
 * read-only disk costs one warning, the pieces come from the wire, and the next
 * model that is loaded tries the disk again.
 *
 * Entries are kept within a budget: models longest unused go first, those in
 * use by any process never.  Two nodes may share a folder.
 *
 * Thread:  owner (the loader thread).
 * Memory:  open() allocates, close() frees; writers likewise.
 * Units:   sizes in bytes.
 */
#ifndef NODE_SHARD_CACHE_H
#define NODE_SHARD_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "node/shard_entry.h"
#include "proto/base/status.h"
#include "proto/model_shape.h"

struct shard_cache;
struct shard_writer;
struct shard_use;

struct shard_cache_config {
    const char *folder; /* made when missing; borrowed for the call */
    uint64_t budget;
};

/* Removes what dead processes left half-written.  FL_NO_MEMORY. */
FL_MUST_CHECK fl_status shard_cache_open(const struct shard_cache_config *config,
                                         struct shard_cache **out);
/* Writers must be gone; entries written but not yet committed are dropped. */
void shard_cache_close(struct shard_cache *cache);

/* Keep a model's entries from eviction until unuse(); NULL when that is not possible here.  After a
 * failed write, writing is tried again from here on. */
struct shard_use *shard_cache_use(struct shard_cache *cache,
                                  const unsigned char identity[FL_IDENTITY_SIZE]);
void shard_cache_unuse(struct shard_use *use);

/* A piece that is here: shard_entry_open(). */
FL_MUST_CHECK fl_status shard_cache_find(const struct shard_cache *cache,
                                         const unsigned char identity[FL_IDENTITY_SIZE],
                                         const struct fl_piece *piece, struct shard_entry **out);

/* Begin an entry; NULL when it cannot be cached (said once until the next use(), as a warning). */
struct shard_writer *shard_writer_open(struct shard_cache *cache,
                                       const unsigned char identity[FL_IDENTITY_SIZE],
                                       const struct fl_piece *piece);
/* Chunks come in order, each of SHARD_CHUNK_SIZE bytes but the last. */
void shard_writer_put(struct shard_writer *writer, const void *data, size_t size);
/* After the last chunk: the entry waits for its commit.  Before it: the entry is given up. */
void shard_writer_close(struct shard_writer *writer);

/* Sync and name one entry that waits; false when none does.  Takes as long as the disk does. */
bool shard_cache_commit(struct shard_cache *cache);

#endif
