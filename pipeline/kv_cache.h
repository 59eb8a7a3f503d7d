/* kv_cache.h - paged keys and values of one stage, and who owns which block.
 *
 * A sequence is a conversation: a table of blocks, each KV_BLOCK_POSITIONS
 * positions of every layer of the stage.  Blocks are reserved when a request is
 * admitted, for all positions it may fill, so that a running request never
 * meets a full cache; when it ends only blocks of positions worth keeping stay.
 *
 *   sequence ─► blocks [7 | 2 | 9 | ..] ─► keys, values of each layer
 *                                      └─► token ids, for the stages that know them
 *
 * One block more than planned, the spare, belongs to nobody: rows of a request
 * that ended while they were under way write there.
 *
 * Thread:  owner (the stage's loop).
 * Memory:  open() takes everything; nothing is allocated after.
 * Shapes:  per layer keys and values [block, G, KV_BLOCK_POSITIONS, E].
 * Source:  Kwon et al., PagedAttention, SOSP 2023, arXiv:2309.06180, section 4.
 */
#ifndef PIPELINE_KV_CACHE_H
#define PIPELINE_KV_CACHE_H

#include <stdint.h>

#include "kernels/device.h"
#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KV_CACHE_NONE UINT32_MAX

struct kv_cache;

struct kv_cache_config {
    struct device *device; /* borrowed until close */
    uint32_t layer_count;
    const uint32_t *head_count_kv; /* [layer_count] */
    uint32_t head_size;
    uint32_t block_count;
    uint32_t sequence_max; /* sequences that may hold blocks at once */
    uint32_t context;      /* positions a sequence may have */
};

/* Bytes on the device: 2 x 4 x E x KV_BLOCK_POSITIONS x (block_count + 1) x the sum of all G.
 * UINT64_MAX when that overflows.  `device` is not looked at. */
uint64_t kv_cache_memory(const struct kv_cache_config *config);

/* Bytes on the host: token ids and tables. */
uint64_t kv_cache_table_memory(const struct kv_cache_config *config);

/* FL_NO_MEMORY with the number wanted. */
FL_MUST_CHECK fl_status kv_cache_open(const struct kv_cache_config *config, struct kv_cache **out);
void kv_cache_close(struct kv_cache *cache);

/* The sequence of that id, or KV_CACHE_NONE. */
uint32_t kv_cache_find(const struct kv_cache *cache, uint64_t sequence_id);

/* Reserve blocks for positions 0 .. position_max - 1; the first `keep` ones stay as they are.  A
 * new sequence has keep 0.  FL_INVALID: `keep` over what was filled, or position_max over the
 * context; FL_BUSY: sequence_max are held; FL_NO_MEMORY: says how many positions would fit.
 * A refusal changes nothing. */
FL_MUST_CHECK fl_status kv_cache_reserve(struct kv_cache *cache, uint64_t sequence_id,
                                         uint32_t keep, uint32_t position_max,
                                         uint32_t *out_sequence);

/* Positions 0 .. count - 1 hold keys and values now; never fewer than before. */
void kv_cache_fill(struct kv_cache *cache, uint32_t sequence, uint32_t count);

/* Keep at most `keep` positions and the blocks they need; keep 0 forgets the sequence. */
void kv_cache_trim(struct kv_cache *cache, uint32_t sequence, uint32_t keep);

/* The sequence's blocks, [position / KV_BLOCK_POSITIONS]; valid while it is held. */
const uint32_t *kv_cache_blocks(const struct kv_cache *cache, uint32_t sequence);

/* A table of one block, the spare. */
const uint32_t *kv_cache_spare(const struct kv_cache *cache);

/* Token ids by position; the first form writes, position < the reserved count. */
void kv_cache_set_token(struct kv_cache *cache, uint32_t sequence, uint32_t position, uint32_t id);
uint32_t kv_cache_token(const struct kv_cache *cache, uint32_t sequence, uint32_t position);

/* Layer 0 is the stage's first. */
struct kv_layer kv_cache_layer(const struct kv_cache *cache, uint32_t layer);

uint32_t kv_cache_blocks_free(const struct kv_cache *cache);

#ifdef __cplusplus
}
#endif
#endif
