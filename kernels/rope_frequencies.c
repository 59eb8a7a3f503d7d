#include "kernels/kernels.h"
#include "kernels/scalar_math.h"
#include "proto/model_shape.h"

/* YaRN: the pair that makes `turns` full turns over the original context. */
static double pair_of_turns(const struct fl_rope *rope, uint32_t rope_dim, double turns)
{
    const double tau = 0x1.921fb54442d18p+2;
    return rope_dim * math_log(rope->original_context / (turns * tau)) /
           (2.0 * math_log((double)rope->freq_base));
}

/* YaRN: how far pair `i` is interpolated: 0 up to `low` (as trained), 1 from `high` on. */
static double yarn_share(double low, double high, uint32_t i)
{
    const double width = high - low > 0.001 ? high - low : 0.001;
    const double share = (i - low) / width;
    return share < 0.0 ? 0.0 : share > 1.0 ? 1.0 : share;
}

/* cos and sin grow with the extension: YaRN section 3.4; LongRoPE for factors from the file. */
static float scale_of(const struct fl_rope *rope)
{
    const double factor = (double)rope->factor;
    if (rope->attention_factor > 0.0f) {
        return rope->attention_factor;
    }
    if (rope->scaling == FL_ROPE_YARN && factor > 1.0) {
        return (float)(0.1 * math_log(factor) + 1.0);
    }
    if (rope->scaling == FL_ROPE_LONG && factor > 1.0 && rope->original_context > 1) {
        return (float)sqrt(1.0 + math_log(factor) / math_log(rope->original_context));
    }
    return 1.0f;
}

void rope_inverse_frequencies(const struct fl_rope *rope, uint32_t rope_dim, const float *factors,
                              float *out, float *out_scale)
{
    FL_ASSERT(rope_dim % 2 == 0 && rope->freq_base > 0.0f);
    const bool interpolates =
        (rope->scaling == FL_ROPE_LINEAR || rope->scaling == FL_ROPE_YARN) && rope->factor > 0.0f;
    const double position_scale = interpolates ? 1.0 / (double)rope->factor : 1.0;
    const bool yarn =
        rope->scaling == FL_ROPE_YARN && rope->original_context > 0 && rope->freq_base > 1.0f;
    double low = 0.0, high = 0.0;
    if (yarn) {
        low = floor(pair_of_turns(rope, rope_dim, (double)rope->yarn_beta_fast));
        high = ceil(pair_of_turns(rope, rope_dim, (double)rope->yarn_beta_slow));
        low = low < 0.0 ? 0.0 : low;
        high = high > rope_dim - 1.0 ? rope_dim - 1.0 : high;
    }
    for (uint32_t i = 0; i < rope_dim / 2; i++) {
        const double exponent = -2.0 * i / rope_dim;
        double trained = math_pow((double)rope->freq_base, exponent);
        if (factors != NULL) {
            trained /= (double)factors[i];
        }
        const double interpolated = trained * position_scale;
        const double share = yarn ? yarn_share(low, high, i) : 1.0;
        out[i] = (float)(trained * (1.0 - share) + interpolated * share);
    }
    *out_scale = scale_of(rope);
}
