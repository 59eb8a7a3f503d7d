#include "pipeline/kv_cache.h"

#include <inttypes.h>
#include <stdlib.h>

struct kv_sequence {
    uint64_t id;
    bool held;
    uint32_t block_count;
    uint32_t filled;  /* positions whose keys and values are there */
    uint32_t *blocks; /* [table_size] */
};

struct kv_cache {
    struct device *device;
    struct kv_layer *layers; /* [layer_count] */
    float *memory;
    size_t memory_size;
    uint32_t layer_count;
    uint32_t block_count;
    uint32_t sequence_max;
    uint32_t context;
    uint32_t free_count;
    uint32_t *free_blocks; /* [block_count], a stack of free_count */
    uint32_t spare[1];     /* the block after the last */
    uint32_t *tokens;      /* [block_count, KV_BLOCK_POSITIONS] */
    uint32_t *tables;      /* [sequence_max, table_size]: the sequences' blocks */
    struct kv_sequence *sequences;
};

static uint32_t blocks_for(uint32_t positions)
{
    return positions / KV_BLOCK_POSITIONS + (positions % KV_BLOCK_POSITIONS != 0);
}

/* Floats of one layer's keys, which are as many as its values; 0 on overflow. */
static uint64_t layer_floats(const struct kv_cache_config *config, uint32_t layer)
{
    uint64_t count = (uint64_t)config->block_count + 1;
    const uint64_t block = (uint64_t)config->head_size * KV_BLOCK_POSITIONS;
    return __builtin_mul_overflow(count, block, &count) ||
                   __builtin_mul_overflow(count, config->head_count_kv[layer], &count)
               ? 0
               : count;
}

uint64_t kv_cache_memory(const struct kv_cache_config *config)
{
    uint64_t size = 0;
    for (uint32_t layer = 0; layer < config->layer_count; layer++) {
        uint64_t bytes;
        const uint64_t floats = layer_floats(config, layer);
        if (floats == 0 || __builtin_mul_overflow(floats, 2 * sizeof(float), &bytes) ||
            __builtin_add_overflow(size, bytes, &size)) {
            return UINT64_MAX;
        }
    }
    return size;
}

uint64_t kv_cache_table_memory(const struct kv_cache_config *config)
{
    const uint64_t per_block = sizeof(uint32_t) * (KV_BLOCK_POSITIONS + 1);
    const uint64_t per_sequence =
        sizeof(uint32_t) * (uint64_t)blocks_for(config->context) + sizeof(struct kv_sequence);
    return sizeof(struct kv_cache) + per_block * config->block_count +
           per_sequence * config->sequence_max + sizeof(struct kv_layer) * config->layer_count;
}

static void place_layers(struct kv_cache *cache, const struct kv_cache_config *config)
{
    float *next = cache->memory;
    for (uint32_t layer = 0; layer < config->layer_count; layer++) {
        const uint64_t floats = layer_floats(config, layer);
        cache->layers[layer] = (struct kv_layer){.keys = next, .values = next + floats};
        next += 2 * floats;
    }
}

fl_status kv_cache_open(const struct kv_cache_config *config, struct kv_cache **out)
{
    const uint64_t size = kv_cache_memory(config);
    const uint32_t table_size = blocks_for(config->context);
    struct kv_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL || size >= SIZE_MAX / 2) {
        goto fail;
    }
    *cache = (struct kv_cache){
        .device = config->device,
        .memory_size = (size_t)size,
        .layer_count = config->layer_count,
        .block_count = config->block_count,
        .sequence_max = config->sequence_max,
        .context = config->context,
        .spare = {config->block_count},
    };
    /* The large one first: a size out of the question is refused before tables are made for it. */
    cache->memory =
        config->device->ops->alloc(config->device, DEVICE_MEMORY_BUFFER, cache->memory_size);
    if (cache->memory == NULL) {
        goto fail;
    }
    cache->layers = calloc(config->layer_count, sizeof(*cache->layers));
    cache->free_blocks = calloc(config->block_count, sizeof(*cache->free_blocks));
    cache->tokens = calloc(config->block_count, KV_BLOCK_POSITIONS * sizeof(*cache->tokens));
    cache->tables = calloc(config->sequence_max, table_size * sizeof(*cache->tables));
    cache->sequences = calloc(config->sequence_max, sizeof(*cache->sequences));
    if (cache->layers == NULL || cache->free_blocks == NULL || cache->tokens == NULL ||
        cache->tables == NULL || cache->sequences == NULL) {
        goto fail;
    }
    place_layers(cache, config);
    for (uint32_t i = 0; i < config->sequence_max; i++) {
        cache->sequences[i].blocks = cache->tables + (size_t)i * table_size;
    }
    /* The lowest block is on top, so that a small load touches little memory. */
    for (uint32_t i = 0; i < config->block_count; i++) {
        cache->free_blocks[i] = config->block_count - 1 - i;
    }
    cache->free_count = config->block_count;
    *out = cache;
    return FL_OK;

fail:
    kv_cache_close(cache);
    return FL_FAIL(FL_NO_MEMORY,
                   "no memory for a KV cache of %" PRIu32 " blocks: %" PRIu64 " bytes are wanted",
                   config->block_count, size);
}

void kv_cache_close(struct kv_cache *cache)
{
    if (cache != NULL) {
        if (cache->memory != NULL) {
            cache->device->ops->free(cache->device, cache->memory, cache->memory_size);
        }
        free(cache->sequences);
        free(cache->tables);
        free(cache->tokens);
        free(cache->free_blocks);
        free(cache->layers);
        free(cache);
    }
}

uint32_t kv_cache_find(const struct kv_cache *cache, uint64_t sequence_id)
{
    for (uint32_t i = 0; i < cache->sequence_max; i++) {
        if (cache->sequences[i].held && cache->sequences[i].id == sequence_id) {
            return i;
        }
    }
    return KV_CACHE_NONE;
}

static uint32_t find_unused(const struct kv_cache *cache)
{
    for (uint32_t i = 0; i < cache->sequence_max; i++) {
        if (!cache->sequences[i].held) {
            return i;
        }
    }
    return KV_CACHE_NONE;
}

static void resize(struct kv_cache *cache, struct kv_sequence *sequence, uint32_t block_count)
{
    while (sequence->block_count > block_count) {
        cache->free_blocks[cache->free_count++] = sequence->blocks[--sequence->block_count];
    }
    while (sequence->block_count < block_count) {
        FL_ASSERT(cache->free_count > 0);
        sequence->blocks[sequence->block_count++] = cache->free_blocks[--cache->free_count];
    }
}

fl_status kv_cache_reserve(struct kv_cache *cache, uint64_t sequence_id, uint32_t keep,
                           uint32_t position_max, uint32_t *out_sequence)
{
    uint32_t index = kv_cache_find(cache, sequence_id);
    const bool is_new = index == KV_CACHE_NONE;
    const uint32_t filled = is_new ? 0 : cache->sequences[index].filled;
    const uint32_t held = is_new ? 0 : cache->sequences[index].block_count;
    if (position_max > cache->context || keep > position_max) {
        return FL_FAIL(FL_INVALID,
                       "request wants positions up to %" PRIu32 " and keeps %" PRIu32
                       "; the context has %" PRIu32,
                       position_max, keep, cache->context);
    }
    if (keep > filled) {
        return FL_FAIL(FL_INVALID,
                       "sequence %" PRIu64 " should keep %" PRIu32 " positions; it has %" PRIu32,
                       sequence_id, keep, filled);
    }
    const uint32_t wanted = blocks_for(position_max);
    if (wanted > held && wanted - held > cache->free_count) {
        return FL_FAIL(FL_NO_MEMORY,
                       "KV cache is too full for %" PRIu32 " positions; %" PRIu64 " would fit now",
                       position_max, ((uint64_t)held + cache->free_count) * KV_BLOCK_POSITIONS);
    }
    if (is_new) {
        index = find_unused(cache);
        if (index == KV_CACHE_NONE) {
            return FL_FAIL(FL_BUSY, "all %" PRIu32 " sequences are in use", cache->sequence_max);
        }
    }
    struct kv_sequence *sequence = &cache->sequences[index];
    sequence->held = true;
    sequence->id = sequence_id;
    sequence->filled = keep;
    resize(cache, sequence, wanted);
    *out_sequence = index;
    return FL_OK;
}

static struct kv_sequence *held_sequence(const struct kv_cache *cache, uint32_t sequence)
{
    FL_ASSERT(sequence < cache->sequence_max && cache->sequences[sequence].held);
    return &cache->sequences[sequence];
}

void kv_cache_fill(struct kv_cache *cache, uint32_t sequence, uint32_t count)
{
    struct kv_sequence *held = held_sequence(cache, sequence);
    FL_ASSERT(count >= held->filled && blocks_for(count) <= held->block_count);
    held->filled = count;
}

void kv_cache_trim(struct kv_cache *cache, uint32_t sequence, uint32_t keep)
{
    struct kv_sequence *held = held_sequence(cache, sequence);
    held->filled = keep < held->filled ? keep : held->filled;
    resize(cache, held, blocks_for(held->filled));
    held->held = held->filled > 0;
}

const uint32_t *kv_cache_blocks(const struct kv_cache *cache, uint32_t sequence)
{
    return held_sequence(cache, sequence)->blocks;
}

const uint32_t *kv_cache_spare(const struct kv_cache *cache)
{
    return cache->spare;
}

static uint32_t *token_at(const struct kv_cache *cache, uint32_t sequence, uint32_t position)
{
    const struct kv_sequence *held = held_sequence(cache, sequence);
    const uint32_t page = position / KV_BLOCK_POSITIONS;
    FL_ASSERT(page < held->block_count);
    return cache->tokens + (size_t)held->blocks[page] * KV_BLOCK_POSITIONS +
           position % KV_BLOCK_POSITIONS;
}

void kv_cache_set_token(struct kv_cache *cache, uint32_t sequence, uint32_t position, uint32_t id)
{
    *token_at(cache, sequence, position) = id;
}

uint32_t kv_cache_token(const struct kv_cache *cache, uint32_t sequence, uint32_t position)
{
    return *token_at(cache, sequence, position);
}

struct kv_layer kv_cache_layer(const struct kv_cache *cache, uint32_t layer)
{
    FL_ASSERT(layer < cache->layer_count);
    return cache->layers[layer];
}

uint32_t kv_cache_blocks_free(const struct kv_cache *cache)
{
    return cache->free_count;
}
