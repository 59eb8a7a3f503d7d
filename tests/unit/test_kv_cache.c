#include "pipeline/kv_cache.h"

#include "tests/harness.h"

static struct device *device;
static struct kv_cache *cache;
static const uint32_t heads[] = {2, 1, 4};

static struct kv_cache_config config_of(uint32_t block_count)
{
    return (struct kv_cache_config){
        .device = device,
        .layer_count = 3,
        .head_count_kv = heads,
        .head_size = 16,
        .block_count = block_count,
        .sequence_max = 3,
        .context = 200,
    };
}

static void open_cache(uint32_t block_count)
{
    const struct device_host_config host = {.threads = 1, .isa = "scalar"};
    CHECK_EQ(device_host_open(&host, &device), FL_OK);
    const struct kv_cache_config config = config_of(block_count);
    CHECK_EQ(kv_cache_open(&config, &cache), FL_OK);
}

static void close_cache(void)
{
    kv_cache_close(cache);
    device->ops->close(device);
}

static void memory_formula(void)
{
    const struct kv_cache_config config = config_of(8);
    /* 2 (keys, values) x 4 bytes x 16 x 32 positions x (8 + 1) blocks x (2 + 1 + 4) heads */
    CHECK_EQ(kv_cache_memory(&config), 2 * 4 * 16 * 32 * 9 * 7);
    struct kv_cache_config huge = config;
    static const uint32_t many[] = {UINT32_MAX, UINT32_MAX, UINT32_MAX};
    huge.block_count = UINT32_MAX;
    huge.head_count_kv = many;
    huge.head_size = 512;
    CHECK(kv_cache_memory(&huge) == UINT64_MAX);
    huge.device = NULL;
}

static void refuses_without_memory(void)
{
    open_cache(8);
    struct kv_cache_config huge = config_of(INT32_MAX);
    static const uint32_t many[] = {512, 512, 512};
    huge.head_count_kv = many;
    huge.head_size = 512;
    struct kv_cache *other;
    CHECK_EQ(kv_cache_open(&huge, &other), FL_NO_MEMORY);
    CHECK(strstr(fl_last_error(), "bytes are wanted") != NULL);
    close_cache();
}

static void layers_do_not_overlap(void)
{
    open_cache(8);
    for (uint32_t layer = 0; layer < 3; layer++) {
        const struct kv_layer at = kv_cache_layer(cache, layer);
        const size_t floats = (size_t)heads[layer] * 16 * 32 * 9;
        CHECK_EQ(at.values - at.keys, floats);
        if (layer < 2) {
            CHECK_EQ(kv_cache_layer(cache, layer + 1).keys - at.values, floats);
        }
        at.values[floats - 1] = 1; /* the spare block's last value is inside */
    }
    CHECK_EQ(kv_cache_spare(cache)[0], 8);
    close_cache();
}

static void reserves_whole_blocks(void)
{
    open_cache(8);
    uint32_t a, b;
    CHECK_EQ(kv_cache_reserve(cache, 10, 0, 32, &a), FL_OK);
    CHECK_EQ(kv_cache_blocks_free(cache), 7);
    CHECK_EQ(kv_cache_reserve(cache, 11, 0, 33, &b), FL_OK);
    CHECK_EQ(kv_cache_blocks_free(cache), 5);
    CHECK(kv_cache_blocks(cache, a)[0] != kv_cache_blocks(cache, b)[0]);
    CHECK(kv_cache_blocks(cache, b)[0] != kv_cache_blocks(cache, b)[1]);
    CHECK_EQ(kv_cache_find(cache, 11), b);
    CHECK_EQ(kv_cache_find(cache, 12), KV_CACHE_NONE);
    close_cache();
}

static void refusals_change_nothing(void)
{
    open_cache(4);
    uint32_t a, b;
    CHECK_EQ(kv_cache_reserve(cache, 10, 0, 64, &a), FL_OK);
    kv_cache_fill(cache, a, 40);
    CHECK_EQ(kv_cache_reserve(cache, 11, 0, 97, &b), FL_NO_MEMORY);
    CHECK(strstr(fl_last_error(), "97 positions; 64 would fit now") != NULL);
    CHECK_EQ(kv_cache_find(cache, 11), KV_CACHE_NONE);
    CHECK_EQ(kv_cache_reserve(cache, 10, 0, 160, &b), FL_NO_MEMORY);
    CHECK(strstr(fl_last_error(), "128 would fit now") != NULL);
    CHECK_EQ(kv_cache_reserve(cache, 10, 41, 64, &b), FL_INVALID);
    CHECK_EQ(kv_cache_reserve(cache, 10, 0, 201, &b), FL_INVALID);
    CHECK_EQ(kv_cache_reserve(cache, 11, 1, 10, &b), FL_INVALID);
    CHECK_EQ(kv_cache_blocks_free(cache), 2);
    CHECK_EQ(kv_cache_reserve(cache, 10, 40, 64, &b), FL_OK); /* what was filled is still there */
    CHECK_EQ(b, a);
    CHECK_EQ(kv_cache_reserve(cache, 12, 0, 1, &b), FL_OK);
    CHECK_EQ(kv_cache_reserve(cache, 13, 0, 1, &b), FL_OK);
    CHECK_EQ(kv_cache_blocks_free(cache), 0);
    kv_cache_trim(cache, a, 1);
    CHECK_EQ(kv_cache_reserve(cache, 14, 0, 1, &b), FL_BUSY);
    CHECK_EQ(kv_cache_blocks_free(cache), 1);
    close_cache();
}

static void keeps_only_what_is_worth_keeping(void)
{
    open_cache(8);
    uint32_t a;
    CHECK_EQ(kv_cache_reserve(cache, 10, 0, 200, &a), FL_OK);
    CHECK_EQ(kv_cache_blocks_free(cache), 1);
    kv_cache_fill(cache, a, 100);
    const uint32_t second = kv_cache_blocks(cache, a)[1];
    kv_cache_trim(cache, a, 150); /* more than was filled: 100 positions, 4 blocks */
    CHECK_EQ(kv_cache_blocks_free(cache), 4);
    kv_cache_trim(cache, a, 64);
    CHECK_EQ(kv_cache_blocks_free(cache), 6);
    CHECK_EQ(kv_cache_reserve(cache, 10, 64, 65, &a), FL_OK);
    CHECK_EQ(kv_cache_blocks_free(cache), 5);
    CHECK_EQ(kv_cache_blocks(cache, a)[1], second);
    kv_cache_trim(cache, a, 0);
    CHECK_EQ(kv_cache_blocks_free(cache), 8);
    CHECK_EQ(kv_cache_find(cache, 10), KV_CACHE_NONE);
    close_cache();
}

static void tokens_stay_with_their_blocks(void)
{
    open_cache(8);
    uint32_t a, b;
    CHECK_EQ(kv_cache_reserve(cache, 10, 0, 70, &a), FL_OK);
    CHECK_EQ(kv_cache_reserve(cache, 11, 0, 70, &b), FL_OK);
    for (uint32_t i = 0; i < 70; i++) {
        kv_cache_set_token(cache, a, i, i);
        kv_cache_set_token(cache, b, i, 1000 + i);
    }
    kv_cache_fill(cache, a, 70);
    kv_cache_trim(cache, a, 33);
    CHECK_EQ(kv_cache_reserve(cache, 10, 33, 96, &a), FL_OK);
    for (uint32_t i = 0; i < 33; i++) {
        CHECK_EQ(kv_cache_token(cache, a, i), i);
        CHECK_EQ(kv_cache_token(cache, b, i + 30), 1030 + i);
    }
    close_cache();
}

static const struct test_case cases[] = {
    {"kv_cache: memory is what the formula says, and overflow is seen", memory_formula},
    {"kv_cache: memory that is not there is refused with its size", refuses_without_memory},
    {"kv_cache: layers lie side by side, spare block included", layers_do_not_overlap},
    {"kv_cache: positions are reserved in whole blocks", reserves_whole_blocks},
    {"kv_cache: a refusal says what would fit and changes nothing", refusals_change_nothing},
    {"kv_cache: after the end only kept positions hold blocks", keeps_only_what_is_worth_keeping},
    {"kv_cache: token ids follow the sequence's blocks", tokens_stay_with_their_blocks},
};

TEST_MAIN(cases)
