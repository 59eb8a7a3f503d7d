/* How far the definition (the scalar table) is from exact arithmetic: twins in double. */
#include "kernels/scalar_math.h"
#include "tests/harness.h"
#include "tests/kernels/fixture.h"

static const struct kernel_ops *const ops = &kernel_ops_scalar;

/* Worst |out - exact| over the sum of |w * a|, for one matrix and activation mode. */
static double product_error(const struct test_matrix *m, const struct test_rows *r,
                            enum activation_mode mode)
{
    const uint32_t rows = m->packed.rows;
    const uint32_t columns = m->packed.columns;
    float *out = test_alloc((size_t)r->x.rows * rows * sizeof(float));
    float *w = test_alloc(columns * sizeof(float));
    ops->matmul(NULL, &m->packed, &r->x, mode, out);
    double worst = 0.0;
    for (uint32_t n = 0; n < rows; n++) {
        matrix_dequantize_row(m->packed.dtype, m->raw + n * m->row_size, columns, w);
        for (uint32_t t = 0; t < r->x.rows; t++) {
            double sum = 0.0, magnitude = 1e-30;
            for (size_t k = 0; k < columns; k++) {
                const size_t at = (size_t)t * columns + k;
                const double a = mode == ACTIVATION_F32
                                     ? (double)r->f32[at]
                                     : (double)r->x.q8.q[at] * (double)r->x.q8.scale[at / 32];
                sum += (double)w[k] * a;
                magnitude += fabs((double)w[k] * a);
            }
            worst = fmax(worst, fabs((double)out[(size_t)t * rows + n] - sum) / magnitude);
        }
    }
    free(w);
    free(out);
    return worst;
}

static void test_products_are_close_to_exact(void)
{
    uint64_t seed = 11;
    for (int d = 0; d < DTYPE_COUNT; d++) {
        const enum fl_dtype dtype = all_dtypes[d];
        struct test_matrix m;
        struct test_rows r;
        test_matrix_init(&m, dtype, 21, 512, &seed);
        test_rows_init(&r, 3, 512, &seed);
        ops->quantize(NULL, &r.x);
        const double f32 = product_error(&m, &r, ACTIVATION_F32);
        const int quantised =
            dtype != FL_DTYPE_F32 && dtype != FL_DTYPE_F16 && dtype != FL_DTYPE_BF16;
        const double q8 = quantised ? product_error(&m, &r, ACTIVATION_Q8) : 0.0;
        printf("  %-4s f32 %.1e, q8 %.1e of sum |w a|\n", fl_dtype_name(dtype), f32, q8);
        /* A rounding is 6e-8.  f32: 512 of them, mostly cancelling; q8: 16 blocks, but a sum of
         * large terms and a large minimum of opposite signs. */
        CHECK(f32 < 1e-6 && q8 < 1e-6);
        test_rows_free(&r);
        test_matrix_free(&m);
    }
}

static void test_quantised_activations_are_within_half_a_step(void)
{
    uint64_t seed = 12;
    struct test_rows r;
    test_rows_init(&r, 40, 96, &seed);
    for (uint32_t i = 0; i < 40 * 96; i++) {
        r.f32[i] *= exp2f((float)(i / 32 % 60) - 30.0f);
    }
    ops->quantize(NULL, &r.x);
    for (uint32_t b = 0; b < 40 * 3; b++) {
        const double step = (double)r.x.q8.scale[b];
        int sum = 0, top = 0;
        for (uint32_t i = b * 32; i < b * 32 + 32; i++) {
            CHECK(fabs(r.x.q8.q[i] * step - (double)r.f32[i]) <= step * 0.500001);
            sum += r.x.q8.q[i];
            top = abs(r.x.q8.q[i]) > top ? abs(r.x.q8.q[i]) : top;
        }
        CHECK_EQ(top, 127);
        CHECK_EQ(r.x.q8.sums[2 * b] + r.x.q8.sums[2 * b + 1], sum);
    }
    test_rows_free(&r);
}

static void test_quantising_extremes_stays_finite(void)
{
    uint64_t seed = 13;
    struct test_rows r;
    test_rows_init(&r, 1, 160, &seed);
    for (int i = 0; i < 32; i++) {
        r.f32[i] = 0.0f;
        r.f32[32 + i] = i % 2 == 0 ? 1e-44f : -1e-40f; /* subnormal */
        r.f32[64 + i] = i % 2 == 0 ? 3.4e38f : -3.4e38f;
        r.f32[96 + i] = i == 5 ? NAN : 0.5f;
        r.f32[128 + i] = (float)(i - 16) + 0.5f; /* halves round to even at amax 127 */
    }
    r.f32[128] = 127.0f;
    ops->quantize(NULL, &r.x);
    CHECK(r.x.q8.scale[0] == 0.0f && r.x.q8.scale[1] == 0.0f);
    CHECK(r.x.q8.q[0] == 0 && r.x.q8.q[33] == 0 && r.x.q8.sums[2] == 0);
    CHECK(r.x.q8.q[64] == 127 && r.x.q8.q[65] == -127 && isfinite(r.x.q8.scale[2]));
    CHECK(r.x.q8.q[96 + 5] == -127 && r.x.q8.q[96] == 127); /* NaN is not an answer, but defined */
    CHECK(r.x.q8.q[128 + 16] == 0 && r.x.q8.q[128 + 17] == 2 && r.x.q8.q[128 + 18] == 2);
    test_rows_free(&r);
}

static void test_norms_have_unit_mean_square(void)
{
    uint64_t seed = 14;
    enum { D = 200 };
    float x[3 * D], gain[D], out[3 * D];
    for (int i = 0; i < 3 * D; i++) {
        x[i] = i < 2 * D ? random_float(&seed) * 30.0f : 0.0f;
        gain[i % D] = random_float(&seed);
    }
    ops->rms_norm(NULL, x, gain, 1e-5f, 3, D, out);
    for (int t = 0; t < 3; t++) {
        double sum = 0.0;
        for (int d = 0; d < D; d++) {
            sum += (double)x[t * D + d] * (double)x[t * D + d];
        }
        for (int d = 0; d < D; d++) {
            const double want = (double)x[t * D + d] / sqrt(sum / D + 1e-5) * (double)gain[d];
            CHECK(fabs((double)out[t * D + d] - want) <= 4e-7 * fabs(want));
        }
    }
    ops->rms_norm(NULL, x, gain, 1e-5f, 3, D, x);
    CHECK(memcmp(x, out, sizeof(x)) == 0); /* out may be x */
}

static void test_rope_turns_pairs_by_the_position(void)
{
    uint64_t seed = 15;
    enum { T = 3, H = 2, E = 12, DIM = 8 };
    const float frequencies[DIM / 2] = {1.0f, 0.1f, 0.03f, 1e-4f};
    const uint32_t positions[T] = {0, 17, 131071};
    for (int neox = 0; neox < 2; neox++) {
        const struct rope_table table = {frequencies, 1.5f, DIM, neox};
        float x[T * H * E], before[T * H * E];
        for (int i = 0; i < T * H * E; i++) {
            before[i] = random_float(&seed);
            x[i] = before[i];
        }
        ops->rope(NULL, &table, positions, T, H, E, x);
        for (int t = 0; t < T; t++) {
            for (int h = 0; h < H; h++) {
                const float *now = x + (t * H + h) * E;
                const float *was = before + (t * H + h) * E;
                for (int i = 0; i < DIM / 2; i++) {
                    const int a = neox ? i : 2 * i, b = neox ? i + DIM / 2 : 2 * i + 1;
                    const double angle = (double)positions[t] * (double)frequencies[i];
                    const double s = 1.5 * sin(angle), c = 1.5 * cos(angle);
                    CHECK(fabs((double)now[a] - ((double)was[a] * c - (double)was[b] * s)) < 5e-7);
                    CHECK(fabs((double)now[b] - ((double)was[a] * s + (double)was[b] * c)) < 5e-7);
                }
                CHECK(memcmp(now + DIM, was + DIM, (E - DIM) * sizeof(float)) == 0);
            }
        }
    }
}

/* A sequence of `length` positions in shuffled KV blocks, and attention at every position. */
static void check_attention(uint32_t head_size, uint32_t window, uint32_t length)
{
    enum { H = 4, G = 2, PAGES = 8 };
    uint64_t seed = 16 + head_size + window;
    const uint32_t blocks[PAGES] = {5, 2, 7, 0, 3, 6, 1, 4};
    const struct attention_shape shape = {H, G, head_size, window, 0.3f};
    const size_t kv = (size_t)PAGES * G * KV_BLOCK_POSITIONS * head_size;
    struct kv_layer layer = {test_alloc(kv * sizeof(float)), test_alloc(kv * sizeof(float))};
    float *k = test_alloc((size_t)length * G * head_size * sizeof(float));
    float *v = test_alloc((size_t)length * G * head_size * sizeof(float));
    float *q = test_alloc((size_t)length * H * head_size * sizeof(float));
    float *out = test_alloc((size_t)length * H * head_size * sizeof(float));
    double *weights = test_alloc(length * sizeof(double));
    struct attention_row *rows = test_alloc(length * sizeof(*rows));
    void *scratch = test_alloc(attention_scratch_size(length, 1));
    for (size_t i = 0; i < kv; i++) {
        layer.keys[i] = NAN;
        layer.values[i] = NAN; /* whatever is not stored must not be read */
    }
    for (size_t i = 0; i < (size_t)length * G * head_size; i++) {
        k[i] = random_float(&seed);
        v[i] = random_float(&seed);
    }
    for (size_t i = 0; i < (size_t)length * H * head_size; i++) {
        q[i] = random_float(&seed) * 4.0f;
    }
    for (uint32_t t = 0; t < length; t++) {
        rows[t] = (struct attention_row){blocks, t};
    }
    ops->kv_store(NULL, &shape, rows, length, k, v, &layer);
    ops->attention(NULL, &shape, rows, length, q, &layer, scratch, out);
    for (uint32_t t = 0; t < length; t++) {
        const uint32_t first = window != 0 && t + 1 > window ? t + 1 - window : 0;
        for (uint32_t h = 0; h < H; h++) {
            double max = -HUGE_VAL, sum = 0.0;
            for (uint32_t p = first; p <= t; p++) {
                weights[p] = 0.0;
                for (uint32_t e = 0; e < head_size; e++) {
                    weights[p] += (double)q[(t * H + h) * head_size + e] *
                                  (double)k[(p * G + h / 2) * head_size + e];
                }
                weights[p] *= (double)0.3f;
                max = fmax(max, weights[p]);
            }
            for (uint32_t p = first; p <= t; p++) {
                weights[p] = exp(weights[p] - max);
                sum += weights[p];
            }
            for (uint32_t e = 0; e < head_size; e++) {
                double want = 0.0;
                for (uint32_t p = first; p <= t; p++) {
                    want += weights[p] / sum * (double)v[(p * G + h / 2) * head_size + e];
                }
                CHECK(fabs((double)out[(t * H + h) * head_size + e] - want) < 4e-6);
            }
        }
    }
    free(layer.keys);
    free(layer.values);
    free(k);
    free(v);
    free(q);
    free(out);
    free(weights);
    free(rows);
    free(scratch);
}

static void test_attention_follows_its_formula_at_every_boundary(void)
{
    check_attention(16, 0, 70);
    check_attention(72, 0, 33);
    check_attention(64, 1, 5);
    check_attention(48, 31, 70);
    check_attention(80, 32, 70);
    check_attention(16, 33, 70);
    check_attention(256, 40, 66);
    check_attention(512, 0, 3);
}

static const struct test_case cases[] = {
    {"definition: products are close to exact", test_products_are_close_to_exact},
    {"definition: quantised activations are within half a step",
     test_quantised_activations_are_within_half_a_step},
    {"definition: quantising extremes stays finite", test_quantising_extremes_stays_finite},
    {"definition: norms have unit mean square", test_norms_have_unit_mean_square},
    {"definition: rope turns pairs by the position", test_rope_turns_pairs_by_the_position},
    {"definition: attention follows its formula at every boundary",
     test_attention_follows_its_formula_at_every_boundary},
};

TEST_MAIN(cases)
