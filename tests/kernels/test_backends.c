/* Every backend equals the scalar table to the last bit, for any batch and any number of threads. */
#include "tests/harness.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/fixture.h"

static const struct kernel_ops *const scalar = &kernel_ops_scalar;

static int floats_equal(const float *a, const float *b, size_t count)
{
    return memcmp(a, b, count * sizeof(float)) == 0;
}

/* ---- products ---- */

struct product_case {
    struct test_matrix m;
    struct test_rows r;
    enum activation_mode mode;
    float *want; /* [T, N] */
    float *got;
};

static void product_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct product_case *c = ctx;
    const size_t count = (size_t)c->r.x.rows * c->m.packed.rows;
    memset(c->got, 0xee, count * sizeof(float));
    ops->matmul(pool, &c->m.packed, &c->r.x, c->mode, c->got);
    if (!floats_equal(c->want, c->got, count)) {
        printf("  %s: %s, T %u N %u K %u mode %d, %u threads\n", ops->name,
               fl_dtype_name(c->m.packed.dtype), c->r.x.rows, c->m.packed.rows, c->r.x.columns,
               (int)c->mode, cpu_pool_threads(pool));
    }
    CHECK(floats_equal(c->want, c->got, count));
}

static void product_case_run(enum fl_dtype dtype, uint32_t t, uint32_t n, uint32_t k,
                             uint64_t *seed)
{
    struct product_case c;
    test_matrix_init(&c.m, dtype, n, k, seed);
    test_rows_init(&c.r, t, k, seed);
    if (k % Q8_BLOCK == 0) {
        scalar->quantize(NULL, &c.r.x);
    }
    c.want = test_alloc((size_t)t * n * sizeof(float));
    c.got = test_alloc((size_t)t * n * sizeof(float));
    for (int mode = 0; mode < 2; mode++) {
        c.mode = mode == 0 ? ACTIVATION_Q8 : ACTIVATION_F32;
        /* Row by row: a batch must equal its rows alone. */
        for (uint32_t row = 0; row < t; row++) {
            const struct activations alone = test_rows_view(&c.r.x, row, 1);
            scalar->matmul(NULL, &c.m.packed, &alone, c.mode, c.want + (size_t)row * n);
        }
        for_each_backend(product_check, &c);
    }
    free(c.want);
    free(c.got);
    test_rows_free(&c.r);
    test_matrix_free(&c.m);
}

static void test_products_equal_the_scalar_ones(void)
{
    static const uint32_t batches[] = {1, 2, 3, 5, 7, 33};
    static const uint32_t outputs[] = {1, 16, 19, 50, 96, 131};
    uint64_t seed = 21;
    for (int d = 0; d < DTYPE_COUNT; d++) {
        const uint32_t length = fl_dtype_block_length(all_dtypes[d]);
        const uint32_t unit = length < 32 ? 32 : length;
        for (int i = 0; i < 6; i++) {
            const uint32_t columns = unit * (1 + (uint32_t)(i + d) % 3);
            product_case_run(all_dtypes[d], batches[i], outputs[(i + d) % 6], columns, &seed);
        }
        product_case_run(all_dtypes[d], 3, 37, 768, &seed);
    }
}

static void test_products_of_many_rows_equal_the_scalar_ones(void)
{
    uint64_t seed = 22;
    product_case_run(FL_DTYPE_Q4_0, 131, 33, 64, &seed); /* more than one chunk of activations */
    product_case_run(FL_DTYPE_Q6_K, 130, 17, 256, &seed);
    product_case_run(FL_DTYPE_F16, 129, 33, 40, &seed); /* K need not be a multiple of 32 here */
    product_case_run(FL_DTYPE_F32, 1, 65, 8, &seed);
    product_case_run(FL_DTYPE_Q4_1, 2, 1000, 96, &seed); /* parts for several threads */
}

/* Quants at both ends of their range against activations at both ends: nothing saturates. */
static void test_extreme_blocks_do_not_saturate(void)
{
    uint64_t seed = 23;
    for (int d = 0; d < DTYPE_COUNT; d++) {
        if (all_dtypes[d] == FL_DTYPE_F32 || all_dtypes[d] == FL_DTYPE_F16 ||
            all_dtypes[d] == FL_DTYPE_BF16) {
            continue;
        }
        for (int fill = 0; fill < 5; fill++) {
            static const uint8_t bytes[] = {0x00, 0xff, 0x80, 0x7f, 0xf0};
            struct product_case c;
            test_matrix_init(&c.m, all_dtypes[d], 16, 256, &seed);
            test_rows_init(&c.r, 4, 256, &seed);
            const size_t block = fl_dtype_block_size(all_dtypes[d]);
            for (size_t i = 0; i < c.m.row_size * 16; i++) {
                /* Leave the f16 scales, the first and for Q6_K the last 2 or 4 bytes, alone. */
                const size_t at = i % block;
                if (at >= 4 && at < block - 2) {
                    c.m.raw[i] = bytes[fill];
                }
            }
            matrix_pack_rows(all_dtypes[d], 256, c.m.raw, 0, 16, c.m.data);
            for (int i = 0; i < 4 * 256; i++) {
                c.r.f32[i] = i / 256 == 0 ? 1.0f : i / 256 == 1 ? -1.0f : i % 2 == 0 ? 1.0f : -1.0f;
            }
            scalar->quantize(NULL, &c.r.x);
            c.mode = ACTIVATION_Q8;
            c.want = test_alloc(4 * 16 * sizeof(float));
            c.got = test_alloc(4 * 16 * sizeof(float));
            scalar->matmul(NULL, &c.m.packed, &c.r.x, c.mode, c.want);
            for_each_backend(product_check, &c);
            for (int i = 0; i < 4 * 16; i++) {
                CHECK(isfinite(c.want[i]));
            }
            free(c.want);
            free(c.got);
            test_rows_free(&c.r);
            test_matrix_free(&c.m);
        }
    }
}

/* Zero blocks give zeros, subnormal scales give finite sums. */
static void test_zero_and_subnormal_blocks_are_harmless(void)
{
    uint64_t seed = 24;
    for (int d = 0; d < DTYPE_COUNT; d++) {
        struct product_case c;
        test_matrix_init(&c.m, all_dtypes[d], 20, 256, &seed);
        test_rows_init(&c.r, 2, 256, &seed);
        memset(c.m.raw, 0, c.m.row_size * 10);
        matrix_pack_rows(all_dtypes[d], 256, c.m.raw, 0, 20, c.m.data);
        for (int i = 0; i < 256; i++) {
            c.r.f32[i] *= i < 128 ? 1e-36f : 0.0f;
        }
        scalar->quantize(NULL, &c.r.x);
        c.want = test_alloc(2 * 20 * sizeof(float));
        c.got = test_alloc(2 * 20 * sizeof(float));
        for (int mode = 0; mode < 2; mode++) {
            c.mode = mode == 0 ? ACTIVATION_Q8 : ACTIVATION_F32;
            scalar->matmul(NULL, &c.m.packed, &c.r.x, c.mode, c.want);
            for_each_backend(product_check, &c);
            for (int i = 0; i < 2 * 20; i++) {
                CHECK(isfinite(c.want[i]) && (i % 20 >= 10 || c.want[i] == 0.0f));
            }
        }
        free(c.want);
        free(c.got);
        test_rows_free(&c.r);
        test_matrix_free(&c.m);
    }
}

/* ---- quantize ---- */

struct quantize_case {
    struct test_rows want, got;
};

static void quantize_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct quantize_case *c = ctx;
    const size_t count = (size_t)c->want.x.rows * c->want.x.columns;
    memset(c->got.x.q8.q, 0x55, count);
    ops->quantize(pool, &c->got.x);
    CHECK(memcmp(c->got.x.q8.q, c->want.x.q8.q, count) == 0);
    CHECK(floats_equal(c->got.x.q8.scale, c->want.x.q8.scale, count / 32));
    CHECK(memcmp(c->got.x.q8.sums, c->want.x.q8.sums, count / 16 * sizeof(int16_t)) == 0);
}

static void test_quantised_activations_equal_the_scalar_ones(void)
{
    uint64_t seed = 25;
    struct quantize_case c;
    test_rows_init(&c.want, 37, 576, &seed);
    test_rows_init(&c.got, 37, 576, &seed);
    for (int i = 0; i < 37 * 576; i++) {
        float x = c.want.f32[i] * ldexpf(1.0f, i / 32 % 250 - 125);
        x = i / 32 % 29 == 0 ? 0.0f : i / 32 % 29 == 1 ? (float)(i % 32 - 15) + 0.5f : x;
        x = i == 700 ? NAN : x;
        c.want.f32[i] = c.got.f32[i] = x;
    }
    scalar->quantize(NULL, &c.want.x);
    for_each_backend(quantize_check, &c);
    test_rows_free(&c.want);
    test_rows_free(&c.got);
}

/* ---- norms, rope, element-wise ---- */

enum { SMALL_MAX = 4096 };

struct small_case {
    uint32_t rows, columns, heads;
    struct rope_table rope;
    const uint32_t *positions;
    float x[SMALL_MAX], y[SMALL_MAX], want[SMALL_MAX], got[SMALL_MAX];
};

static void small_init(struct small_case *c, uint32_t rows, uint32_t columns, uint64_t *seed)
{
    c->rows = rows;
    c->columns = columns;
    for (int i = 0; i < SMALL_MAX; i++) {
        c->x[i] = random_float(seed) * 20.0f;
        c->y[i] = random_float(seed);
    }
}

static void norm_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct small_case *c = ctx;
    ops->rms_norm(pool, c->x, c->y, 1e-6f, c->rows, c->columns, c->got);
    CHECK(floats_equal(c->want, c->got, c->rows * c->columns));
}

static void test_norms_equal_the_scalar_ones(void)
{
    static struct small_case c;
    static const uint32_t widths[] = {1, 15, 16, 17, 64, 576, 2047};
    uint64_t seed = 26;
    for (int i = 0; i < 7; i++) {
        small_init(&c, 2, widths[i], &seed);
        scalar->rms_norm(NULL, c.x, c.y, 1e-6f, c.rows, c.columns, c.want);
        for_each_backend(norm_check, &c);
    }
}

static void rope_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct small_case *c = ctx;
    memcpy(c->got, c->x, sizeof(c->x));
    ops->rope(pool, &c->rope, c->positions, c->rows, c->heads, c->columns, c->got);
    CHECK(floats_equal(c->want, c->got, SMALL_MAX));
}

static void test_rope_equals_the_scalar_one(void)
{
    static struct small_case c;
    static const uint32_t positions[] = {0, 1, 31, 4095, 1048575};
    static const uint32_t dims[][2] = {{16, 16}, {64, 64},  {80, 20},
                                       {72, 72}, {128, 64}, {256, 256}};
    uint64_t seed = 27;
    float frequencies[128];
    c.positions = positions;
    c.heads = 3;
    for (int i = 0; i < 128; i++) {
        frequencies[i] = powf(10000.0f, -(float)i / 128.0f);
    }
    for (int i = 0; i < 12; i++) {
        small_init(&c, 5, dims[i / 2][0], &seed);
        c.rope =
            (struct rope_table){frequencies, i % 2 == 0 ? 1.0f : 1.19f, dims[i / 2][1], i % 2 == 0};
        memcpy(c.want, c.x, sizeof(c.x));
        scalar->rope(NULL, &c.rope, positions, c.rows, c.heads, c.columns, c.want);
        for_each_backend(rope_check, &c);
    }
}

static void element_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct small_case *c = ctx;
    static float want[SMALL_MAX];
    scalar->silu_mul(NULL, c->x, c->y, c->columns, want);
    ops->silu_mul(pool, c->x, c->y, c->columns, c->got);
    CHECK(floats_equal(want, c->got, c->columns));
    scalar->gelu_mul(NULL, c->x, c->y, c->columns, want);
    memcpy(c->got, c->x, sizeof(c->x)); /* out may be gate */
    ops->gelu_mul(pool, c->got, c->y, c->columns, c->got);
    CHECK(floats_equal(want, c->got, c->columns));
    memcpy(want, c->x, sizeof(want));
    memcpy(c->got, c->x, sizeof(c->x));
    scalar->add(NULL, c->y, c->columns, want);
    scalar->scale(NULL, 0.3f, c->columns, want);
    ops->add(pool, c->y, c->columns, c->got);
    ops->scale(pool, 0.3f, c->columns, c->got);
    CHECK(floats_equal(want, c->got, SMALL_MAX));
}

static void test_element_wise_operations_equal_the_scalar_ones(void)
{
    static struct small_case c;
    static const uint32_t counts[] = {0, 1, 15, 16, 17, 1023, 4095, 4096};
    uint64_t seed = 28;
    for (int i = 0; i < 8; i++) {
        small_init(&c, 1, counts[i], &seed);
        for (int k = 0; k < SMALL_MAX; k += 3) {
            c.x[k] *= k % 2 == 0 ? 10.0f : 1e-3f; /* beyond exp's ends, and close to 0 */
        }
        for_each_backend(element_check, &c);
    }
}

/* ---- attention ---- */

enum { PAGES = 6, H = 6, G = 2, ROWS = 9 };

struct attention_case {
    struct attention_shape shape;
    struct attention_row rows[ROWS];
    struct kv_layer layer, stored;
    size_t kv; /* floats of keys */
    float *q, *k, *v, *want, *got;
    void *scratch;
};

static void attention_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct attention_case *c = ctx;
    const size_t row = (size_t)H * c->shape.head_size;
    /* The stored keys are there already; storing the rows' own again must change nothing. */
    memcpy(c->stored.keys, c->layer.keys, c->kv * sizeof(float));
    memcpy(c->stored.values, c->layer.values, c->kv * sizeof(float));
    ops->kv_store(pool, &c->shape, c->rows, ROWS, c->k, c->v, &c->stored);
    CHECK(floats_equal(c->stored.keys, c->layer.keys, c->kv));
    CHECK(floats_equal(c->stored.values, c->layer.values, c->kv));
    ops->attention(pool, &c->shape, c->rows, ROWS, c->q, &c->layer, c->scratch, c->got);
    CHECK(floats_equal(c->want, c->got, ROWS * row));
}

static void attention_case_run(uint32_t head_size, uint32_t window)
{
    static const uint32_t blocks[PAGES] = {3, 0, 5, 1, 4, 2};
    static const uint32_t positions[ROWS] = {0, 1, 15, 16, 31, 32, 63, 100, 150};
    uint64_t seed = 29 + head_size + window;
    struct attention_case c = {.shape = {H, G, head_size, window, 0.25f}};
    c.kv = (size_t)PAGES * G * KV_BLOCK_POSITIONS * head_size;
    float **const kv[] = {&c.layer.keys, &c.layer.values, &c.stored.keys, &c.stored.values};
    for (int i = 0; i < 4; i++) {
        *kv[i] = test_alloc(c.kv * sizeof(float));
        for (size_t n = 0; n < c.kv; n++) {
            (*kv[i])[n] = random_float(&seed);
        }
    }
    const size_t row = (size_t)H * head_size;
    c.q = test_alloc(ROWS * row * sizeof(float));
    c.k = test_alloc(ROWS * row * sizeof(float));
    c.v = test_alloc(ROWS * row * sizeof(float));
    c.want = test_alloc(ROWS * row * sizeof(float));
    c.got = test_alloc(ROWS * row * sizeof(float));
    c.scratch = test_alloc(attention_scratch_size(PAGES * KV_BLOCK_POSITIONS, POOLS));
    for (size_t i = 0; i < ROWS * row; i++) {
        c.q[i] = random_float(&seed) * 3.0f;
        c.k[i] = random_float(&seed);
        c.v[i] = random_float(&seed);
    }
    for (int t = 0; t < ROWS; t++) {
        c.rows[t] = (struct attention_row){blocks, positions[t]};
    }
    scalar->kv_store(NULL, &c.shape, c.rows, ROWS, c.k, c.v, &c.layer);
    for (size_t t = 0; t < ROWS; t++) {
        scalar->attention(NULL, &c.shape, c.rows + t, 1, c.q + t * row, &c.layer, c.scratch,
                          c.want + t * row);
    }
    for_each_backend(attention_check, &c);
    for (int i = 0; i < 4; i++) {
        free(*kv[i]);
    }
    free(c.q);
    free(c.k);
    free(c.v);
    free(c.want);
    free(c.got);
    free(c.scratch);
}

static void test_attention_equals_the_scalar_one(void)
{
    static const uint32_t head_sizes[] = {16, 48, 64, 72, 80, 128, 256};
    static const uint32_t windows[] = {0, 1, 16, 17, 32, 33, 64, 101};
    for (int i = 0; i < 7; i++) {
        for (int w = 0; w < 8; w += i % 2 == 0 ? 1 : 3) {
            attention_case_run(head_sizes[i], windows[w]);
        }
    }
}

/* ---- selection ---- */

static void test_tables_are_chosen_by_name(void)
{
    const struct kernel_ops *ops = NULL;
    CHECK_EQ(kernel_ops_select("scalar", &ops), FL_OK);
    CHECK(ops == scalar);
    CHECK_EQ(kernel_ops_select(NULL, &ops), FL_OK);
    const struct kernel_ops *best = NULL;
    CHECK_EQ(kernel_ops_select("auto", &best), FL_OK);
    CHECK(ops == best);
    CHECK_EQ(kernel_ops_select("neon", &ops), FL_INVALID);
    CHECK(strstr(fl_last_error(), "neon") != NULL && ops == best);
    static const char *const names[] = {"avx2", "avx512"};
    for (int i = 0; i < 2; i++) {
        const fl_status status = kernel_ops_select(names[i], &ops);
        CHECK(status == FL_OK ? strcmp(ops->name, names[i]) == 0 : status == FL_UNSUPPORTED);
        CHECK(status == FL_OK || strstr(fl_last_error(), names[i]) != NULL);
    }
}

static const struct test_case cases[] = {
    {"backends: products equal the scalar ones", test_products_equal_the_scalar_ones},
    {"backends: products of many rows equal the scalar ones",
     test_products_of_many_rows_equal_the_scalar_ones},
    {"backends: extreme blocks do not saturate", test_extreme_blocks_do_not_saturate},
    {"backends: zero and subnormal blocks are harmless",
     test_zero_and_subnormal_blocks_are_harmless},
    {"backends: quantised activations equal the scalar ones",
     test_quantised_activations_equal_the_scalar_ones},
    {"backends: norms equal the scalar ones", test_norms_equal_the_scalar_ones},
    {"backends: rope equals the scalar one", test_rope_equals_the_scalar_one},
    {"backends: element-wise operations equal the scalar ones",
     test_element_wise_operations_equal_the_scalar_ones},
    {"backends: attention equals the scalar one", test_attention_equals_the_scalar_one},
    {"backends: tables are chosen by name", test_tables_are_chosen_by_name},
};

TEST_MAIN(cases)
