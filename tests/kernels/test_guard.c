/* No kernel touches a byte outside its operands: each lies against an inaccessible page. */
#include <sys/wait.h>

#include "tests/harness.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/fixture.h"
#include "tests/kernels/guard.h"

static const struct kernel_ops *const scalar = &kernel_ops_scalar;

static const char *side_name(enum guard_side side)
{
    return side == GUARD_AFTER ? "page after" : "page before";
}

static float *guard_floats(struct guard *guard, size_t count, uint64_t *seed)
{
    float *out = guard_alloc(guard, count * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        out[i] = random_float(seed);
    }
    return out;
}

/* ---- the guard itself ---- */

static int dies_touching(const volatile uint8_t *at)
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        (void)*at;
        _exit(0);
    }
    int status = 0;
    return child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status) &&
           WTERMSIG(status) == SIGSEGV;
}

static void test_a_byte_too_far_is_a_fault(void)
{
    static const size_t sizes[] = {1, 4, 4095, 4096, 4100};
    for (int side = 0; side < GUARD_SIDES; side++) {
        struct guard guard = {.side = (enum guard_side)side};
        for (int i = 0; i < 5; i++) {
            const uint8_t *at = guard_alloc(&guard, sizes[i]);
            CHECK(dies_touching(side == GUARD_AFTER ? at + sizes[i] : at - 1));
            CHECK(!dies_touching(at) && !dies_touching(at + sizes[i] - 1));
        }
        guard_free_all(&guard);
    }
}

/* ---- products ---- */

struct product_case {
    struct guard guard;
    struct matrix w;
    struct activations x;
    enum activation_mode mode;
    float *got;        /* [T, N] */
    const float *want; /* [T, N] */
};

static void product_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct product_case *c = ctx;
    const size_t count = (size_t)c->x.rows * c->w.rows;
    snprintf(guard_running, sizeof(guard_running), "%s: matmul %s, T %u N %u K %u mode %d, %s",
             ops->name, fl_dtype_name(c->w.dtype), c->x.rows, c->w.rows, c->w.columns, (int)c->mode,
             side_name(c->guard.side));
    memset(c->got, 0xee, count * sizeof(float));
    ops->matmul(pool, &c->w, &c->x, c->mode, c->got);
    CHECK(memcmp(c->got, c->want, count * sizeof(float)) == 0);
}

/* The rows of a file are packed between guards too. */
static struct matrix guard_matrix(struct guard *guard, const struct test_matrix *m)
{
    const struct matrix *from = &m->packed;
    const void *raw = guard_copy(guard, m->raw, m->row_size * from->rows);
    const size_t size = matrix_packed_size(from->dtype, from->rows, from->columns);
    void *data = guard_alloc(guard, size);
    snprintf(guard_running, sizeof(guard_running), "pack %s, N %u K %u, %s",
             fl_dtype_name(from->dtype), from->rows, from->columns, side_name(guard->side));
    matrix_pack_rows(from->dtype, from->columns, raw, 0, from->rows, data);
    return (struct matrix){data, from->dtype, from->rows, from->columns};
}

static void product_run(enum fl_dtype dtype, uint32_t t, uint32_t n, uint32_t k,
                        enum guard_side side)
{
    uint64_t seed = 31 + t + n + k;
    struct test_matrix m;
    test_matrix_init(&m, dtype, n, k, &seed);
    struct product_case c = {.guard.side = side};
    struct guard *guard = &c.guard;
    c.w = guard_matrix(guard, &m);
    const size_t count = (size_t)t * k;
    c.x = (struct activations){
        .f32 = guard_floats(guard, count, &seed),
        .q8 = {.q = guard_alloc(guard, count),
               .scale = guard_alloc(guard, count / Q8_BLOCK * sizeof(float)),
               .sums = guard_alloc(guard, count / 16 * sizeof(int16_t))},
        .rows = t,
        .columns = k,
    };
    if (k % Q8_BLOCK == 0) {
        scalar->quantize(NULL, &c.x);
    }
    c.got = guard_alloc(guard, (size_t)t * n * sizeof(float));
    float *want = test_alloc((size_t)t * n * sizeof(float));
    c.want = want;
    for (int mode = 0; mode < 2; mode++) {
        c.mode = mode == 0 ? ACTIVATION_Q8 : ACTIVATION_F32;
        scalar->matmul(NULL, &m.packed, &c.x, c.mode, want);
        for_each_backend(product_check, &c);
    }
    free(want);
    test_matrix_free(&m);
    guard_free_all(guard);
}

static void test_products_stay_inside(void)
{
    static const uint32_t shapes[][2] = {{1, 1},  {1, 16}, {1, 19}, {1, 33}, {2, 17},
                                         {3, 40}, {5, 5},  {7, 31}, {13, 18}}; /* T, N */
    for (int d = 0; d < DTYPE_COUNT; d++) {
        const uint32_t length = fl_dtype_block_length(all_dtypes[d]);
        for (int i = 0; i < 9; i++) {
            const uint32_t columns =
                length == 1 ? (uint32_t[]){1, 8, 40}[i % 3] : length * (1 + (uint32_t)i % 3);
            for (int side = 0; side < GUARD_SIDES; side++) {
                product_run(all_dtypes[d], shapes[i][0], shapes[i][1], columns,
                            (enum guard_side)side);
            }
        }
    }
}

/* ---- rows and elements ---- */

struct row_case {
    struct guard guard;
    uint32_t rows, columns;
    const float *a, *b; /* [T, D], [D] or [T, D] */
    float *out;         /* [T, D] */
    struct activations x;
};

static void row_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct row_case *c = ctx;
    const size_t count = (size_t)c->rows * c->columns;
    snprintf(guard_running, sizeof(guard_running), "%s: a norm or element, T %u D %u, %s",
             ops->name, c->rows, c->columns, side_name(c->guard.side));
    ops->rms_norm(pool, c->a, c->b, 1e-6f, c->rows, c->columns, c->out);
    ops->silu_mul(pool, c->a, c->b, count, c->out);
    ops->gelu_mul(pool, c->a, c->b, count, c->out);
    ops->scale(pool, 0.5f, count, c->out);
    ops->add(pool, c->b, count, c->out);
    CHECK(isfinite(c->out[0]) && isfinite(c->out[count - 1]));
    if (c->columns % Q8_BLOCK == 0) {
        snprintf(guard_running, sizeof(guard_running), "%s: quantize, T %u K %u, %s", ops->name,
                 c->rows, c->columns, side_name(c->guard.side));
        ops->quantize(pool, &c->x);
        CHECK(c->x.q8.scale[0] > 0.0f);
    }
}

static void test_rows_and_elements_stay_inside(void)
{
    static const uint32_t shapes[][2] = {{1, 1},  {1, 15}, {2, 16},  {3, 17},   {1, 31},
                                         {1, 32}, {5, 96}, {2, 576}, {1, 1000}, {7, 4099}};
    uint64_t seed = 32;
    for (int i = 0; i < 10; i++) {
        for (int side = 0; side < GUARD_SIDES; side++) {
            struct row_case c = {.guard.side = (enum guard_side)side};
            struct guard *guard = &c.guard;
            c.rows = shapes[i][0];
            c.columns = shapes[i][1];
            const size_t count = (size_t)c.rows * c.columns;
            c.a = guard_floats(guard, count, &seed);
            c.b = guard_floats(guard, count, &seed);
            c.out = guard_alloc(guard, count * sizeof(float));
            c.x = (struct activations){
                .f32 = c.a,
                .q8 = {.q = guard_alloc(guard, count),
                       .scale = guard_alloc(guard, count / Q8_BLOCK * sizeof(float)),
                       .sums = guard_alloc(guard, count / 16 * sizeof(int16_t))},
                .rows = c.rows,
                .columns = c.columns,
            };
            for_each_backend(row_check, &c);
            guard_free_all(guard);
        }
    }
}

/* ---- rope ---- */

struct rope_case {
    struct guard guard;
    struct rope_table table;
    const uint32_t *positions;
    uint32_t rows, heads, head_size;
    float *x; /* [T, heads, E] */
};

static void rope_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct rope_case *c = ctx;
    snprintf(guard_running, sizeof(guard_running), "%s: rope, T %u heads %u E %u, %s", ops->name,
             c->rows, c->heads, c->head_size, side_name(c->guard.side));
    ops->rope(pool, &c->table, c->positions, c->rows, c->heads, c->head_size, c->x);
    CHECK(isfinite(c->x[0]));
}

static void test_rope_stays_inside(void)
{
    static const uint32_t dims[][2] = {{16, 16}, {64, 64}, {80, 20}, {72, 72}, {256, 254}};
    static const uint32_t positions[] = {0, 7, 4095};
    uint64_t seed = 33;
    for (int i = 0; i < 20; i++) {
        struct rope_case c = {.guard.side = (enum guard_side)(i % 2)};
        const uint32_t *dim = dims[i / 4];
        c.rows = 3;
        c.heads = 1 + (uint32_t)i % 3;
        c.head_size = dim[0];
        c.table = (struct rope_table){guard_floats(&c.guard, dim[1] / 2, &seed), 1.0f, dim[1],
                                      i / 2 % 2 == 0};
        c.positions = guard_copy(&c.guard, positions, sizeof(positions));
        c.x = guard_floats(&c.guard, (size_t)c.rows * c.heads * c.head_size, &seed);
        for_each_backend(rope_check, &c);
        guard_free_all(&c.guard);
    }
}

/* ---- attention ---- */

enum { PAGES = 3, H = 4, G = 2, ROWS = 4 };

struct attention_case {
    struct guard guard;
    struct attention_shape shape;
    struct attention_row *rows; /* [ROWS] */
    struct kv_layer layer;
    const float *q, *k, *v;
    void *scratch;
    float *out;
};

static void attention_check(const struct kernel_ops *ops, struct cpu_pool *pool, void *ctx)
{
    struct attention_case *c = ctx;
    snprintf(guard_running, sizeof(guard_running), "%s: attention, E %u window %u position %u, %s",
             ops->name, c->shape.head_size, c->shape.window, c->rows[ROWS - 1].position,
             side_name(c->guard.side));
    ops->kv_store(pool, &c->shape, c->rows, ROWS, c->k, c->v, &c->layer);
    ops->attention(pool, &c->shape, c->rows, ROWS, c->q, &c->layer, c->scratch, c->out);
    CHECK(isfinite(c->out[0]) && isfinite(c->out[(size_t)ROWS * H * c->shape.head_size - 1]));
}

static void attention_run(uint32_t head_size, uint32_t window, uint32_t last, enum guard_side side)
{
    static const uint32_t blocks[PAGES] = {2, 0, 1}; /* the last position's page is inside */
    uint64_t seed = 34 + head_size;
    struct attention_case c = {.guard.side = side, .shape = {H, G, head_size, window, 0.25f}};
    struct guard *guard = &c.guard;
    const uint32_t pages = last / KV_BLOCK_POSITIONS + 1;
    const size_t kv = (size_t)PAGES * G * KV_BLOCK_POSITIONS * head_size;
    c.layer = (struct kv_layer){guard_floats(guard, kv, &seed), guard_floats(guard, kv, &seed)};
    c.rows = guard_alloc(guard, ROWS * sizeof(*c.rows));
    const uint32_t *table = guard_copy(guard, blocks, pages * sizeof(blocks[0]));
    for (uint32_t t = 0; t < ROWS; t++) {
        c.rows[t] = (struct attention_row){table, last * t / (ROWS - 1)};
    }
    const size_t row = (size_t)H * head_size;
    c.q = guard_floats(guard, ROWS * row, &seed);
    c.k = guard_floats(guard, (size_t)ROWS * G * head_size, &seed);
    c.v = guard_floats(guard, (size_t)ROWS * G * head_size, &seed);
    c.scratch = guard_alloc(guard, attention_scratch_size(last + 1, POOLS));
    c.out = guard_alloc(guard, ROWS * row * sizeof(float));
    for_each_backend(attention_check, &c);
    guard_free_all(guard);
}

static void test_attention_stays_inside(void)
{
    static const uint32_t head_sizes[] = {16, 48, 64, 72, 80, 128, 256};
    static const uint32_t windows[] = {0, 1, 17, 33};
    static const uint32_t lasts[] = {0, 3, 14, 15, 16, 31, 32, 47, 3 * KV_BLOCK_POSITIONS - 1};
    for (int e = 0; e < 7; e++) {
        for (int i = 0; i < 9; i++) {
            for (int side = 0; side < GUARD_SIDES; side++) {
                attention_run(head_sizes[e], windows[(e + i) % 4], lasts[i], (enum guard_side)side);
            }
        }
    }
}

static const struct test_case cases[] = {
    {"guard: a byte too far is a fault", test_a_byte_too_far_is_a_fault},
    {"guard: products stay inside their operands", test_products_stay_inside},
    {"guard: rows and elements stay inside their operands", test_rows_and_elements_stay_inside},
    {"guard: rope stays inside its operands", test_rope_stays_inside},
    {"guard: attention stays inside its operands", test_attention_stays_inside},
};

int main(int argc, char **argv)
{
    guard_faults();
    return test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
