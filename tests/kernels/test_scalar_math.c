/* The project's own functions against libm in double precision. */
#include "kernels/scalar_math.h"

#include "proto/model_shape.h"
#include "tests/harness.h"
#include "tests/kernels/fixture.h"

static double ulp_of(double value)
{
    const float f = (float)value;
    return (double)nextafterf(fabsf(f), INFINITY) - fabs((double)f);
}

static void test_exp_is_within_one_and_a_half_ulp(void)
{
    double worst = 0.0;
    for (float x = -87.0f; x < 88.7f; x += 0.00137f) {
        const double want = exp((double)x);
        const double error = fabs((double)math_exp(x) - want) / ulp_of(want);
        worst = error > worst ? error : worst;
    }
    printf("  exp: worst error %.2f ulp\n", worst);
    CHECK(worst < 1.5);
}

static void test_exp_ends_in_zero_infinity_and_nan(void)
{
    CHECK(math_exp(0.0f) == 1.0f && math_exp(-0.0f) == 1.0f);
    CHECK(math_exp(-105.0f) == 0.0f && math_exp(-INFINITY) == 0.0f && math_exp(-1e30f) == 0.0f);
    CHECK(isinf(math_exp(89.0f)) && isinf(math_exp(INFINITY)) && isnan(math_exp(NAN)));
    CHECK(math_exp(-100.0f) > 0.0f); /* subnormal */
    CHECK(!isinf(math_exp(88.7f)));
}

static void test_sine_and_cosine_hold_for_a_million_positions(void)
{
    double worst = 0.0;
    uint64_t seed = 3;
    for (int i = 0; i < 400000; i++) {
        const double scale = i % 2 == 0 ? 2e6 : 8.0;
        const double x = (double)random_float(&seed) * scale;
        double s, c;
        math_sincos(x, &s, &c);
        const double error = fmax(fabs(s - sin(x)), fabs(c - cos(x)));
        worst = error > worst ? error : worst;
    }
    printf("  sincos: worst error %.2e\n", worst);
    CHECK(worst < 3e-16);
    double s, c;
    math_sincos(0.0, &s, &c);
    CHECK(s == 0.0 && c == 1.0);
}

static void test_powers_and_logarithms_are_within_1e_14(void)
{
    double worst = 0.0;
    uint64_t seed = 4;
    for (int i = 0; i < 100000; i++) {
        const double base = exp2((double)random_float(&seed) * 25.0);
        const double exponent = (double)random_float(&seed) * 2.0;
        worst = fmax(worst, fabs(math_pow(base, exponent) / pow(base, exponent) - 1.0));
        worst = fmax(worst, fabs(math_log(base) - log(base)) / fmax(1.0, fabs(log(base))));
    }
    printf("  pow, log: worst relative error %.2e\n", worst);
    CHECK(worst < 2e-14);
    CHECK(math_pow(10000.0, 0.0) == 1.0 && math_log2(8.0) == 3.0 && math_exp2(-4.0) == 0.0625);
}

static void test_silu_and_gelu_follow_their_formulas(void)
{
    for (float x = -30.0f; x < 30.0f; x += 0.0137f) {
        const double d = (double)x;
        const double silu = d / (1.0 + exp(-d));
        const double gelu =
            0.5 * d * (1.0 + tanh(sqrt(2.0 / 3.14159265358979) * (d + 0.044715 * d * d * d)));
        CHECK(fabs((double)math_silu(x) - silu) <= 4e-7 * fabs(silu) + 1e-30);
        /* tanh's form cancels for negative x; this one does not. */
        CHECK(fabs((double)math_gelu(x) - gelu) <= 2e-6 * fabs(gelu) + 1e-15);
    }
    CHECK(math_silu(0.0f) == 0.0f && math_gelu(0.0f) == 0.0f);
    CHECK(math_silu(-1e30f) == 0.0f && math_silu(1e30f) == 1e30f);
    CHECK(math_gelu(-1e10f) == 0.0f && math_gelu(1e10f) == 1e10f);
}

static const struct fl_rope plain = {
    .freq_base = 10000.0f, .scaling = FL_ROPE_NONE, .factor = 1.0f};

static void test_rope_frequencies_are_powers_of_the_base(void)
{
    float got[64];
    float scale = 0.0f;
    rope_inverse_frequencies(&plain, 128, NULL, got, &scale);
    for (int i = 0; i < 64; i++) {
        const double want = pow(10000.0, -2.0 * i / 128);
        CHECK(fabs((double)got[i] - want) <= 6e-8 * want);
    }
    CHECK(scale == 1.0f);
}

static void test_rope_linear_and_factors_divide(void)
{
    float base[32], got[32], factors[32];
    float scale = 0.0f;
    struct fl_rope rope = plain;
    rope_inverse_frequencies(&rope, 64, NULL, base, &scale);
    rope.scaling = FL_ROPE_LINEAR;
    rope.factor = 8.0f;
    for (int i = 0; i < 32; i++) {
        factors[i] = (float)(i + 1);
    }
    rope_inverse_frequencies(&rope, 64, NULL, got, &scale);
    for (int i = 0; i < 32; i++) {
        CHECK(got[i] == base[i] / 8.0f);
    }
    CHECK(scale == 1.0f);
    rope.scaling = FL_ROPE_NONE;
    rope_inverse_frequencies(&rope, 64, factors, got, &scale);
    for (int i = 0; i < 32; i++) {
        CHECK(fabs((double)got[i] * (i + 1) / (double)base[i] - 1.0) < 2e-7);
    }
    rope.scaling = FL_ROPE_LONG;
    rope.factor = 32.0f;
    rope.original_context = 4096;
    rope_inverse_frequencies(&rope, 64, factors, got, &scale);
    CHECK(fabs((double)got[3] * 4 / (double)base[3] - 1.0) < 2e-7);
    CHECK(fabs((double)scale - sqrt(1.0 + log(32.0) / log(4096.0))) < 1e-7);
    rope.attention_factor = 1.25f;
    rope_inverse_frequencies(&rope, 64, factors, got, &scale);
    CHECK(scale == 1.25f);
}

static void test_rope_yarn_keeps_fast_pairs_and_stretches_slow_ones(void)
{
    struct fl_rope rope = plain;
    rope.scaling = FL_ROPE_YARN;
    rope.factor = 4.0f;
    rope.original_context = 2048;
    rope.yarn_beta_fast = 32.0f;
    rope.yarn_beta_slow = 1.0f;
    float base[32], got[32];
    float scale = 0.0f;
    rope_inverse_frequencies(&plain, 64, NULL, base, &scale);
    rope_inverse_frequencies(&rope, 64, NULL, got, &scale);
    CHECK(fabs((double)scale - (0.1 * log(4.0) + 1.0)) < 1e-7);
    const double tau = 6.283185307179586;
    const double low = floor(64 * log(2048 / (32 * tau)) / (2 * log(10000.0)));
    const double high = ceil(64 * log(2048 / tau) / (2 * log(10000.0)));
    for (int i = 0; i < 32; i++) {
        const double share = fmin(1.0, fmax(0.0, (i - low) / (high - low)));
        const double want = (double)base[i] * (1.0 - share + share / 4.0);
        CHECK(fabs((double)got[i] / want - 1.0) < 2e-7);
    }
    CHECK(got[0] == base[0] && got[31] == base[31] / 4.0f);
}

static const struct test_case cases[] = {
    {"math: exp is within 1.5 ulp", test_exp_is_within_one_and_a_half_ulp},
    {"math: exp ends in zero, infinity and NaN", test_exp_ends_in_zero_infinity_and_nan},
    {"math: sine and cosine hold for a million positions",
     test_sine_and_cosine_hold_for_a_million_positions},
    {"math: powers and logarithms are within 1e-14", test_powers_and_logarithms_are_within_1e_14},
    {"math: silu and gelu follow their formulas", test_silu_and_gelu_follow_their_formulas},
    {"rope: frequencies are powers of the base", test_rope_frequencies_are_powers_of_the_base},
    {"rope: linear scaling and factors divide", test_rope_linear_and_factors_divide},
    {"rope: yarn keeps fast pairs and stretches slow ones",
     test_rope_yarn_keeps_fast_pairs_and_stretches_slow_ones},
};

TEST_MAIN(cases)
