/* sampler.h - from a row of logits to a token.
 *
 * The same logits, settings, history and position give the same token on every
 * machine: exp and log are the kernels' own, sums run in one order, ties go to
 * the lowest id, and the random number is a function of (seed, position) alone,
 * so that a resumed conversation draws what it would have drawn.
 *
 * Order of the filters, each working on what the one before left:
 *
 *   repetition penalty ─► top-k ─► top-p ─► min-p ─► temperature ─► draw
 *
 * (The order of llama.cpp's default chain, so that settings carry over.)
 * Temperature 0 takes the largest logit after the penalty.
 *
 * Thread:  owner.
 * Memory:  open() takes it all, sampler_memory() bytes.
 * Shapes:  V vocabulary; logits [V], host memory.
 * Source:  penalty: Keskar et al., CTRL, arXiv:1909.05858, section 4.1; top-p: Holtzman et al.,
 *          arXiv:1904.09751; min-p: Nguyen et al., arXiv:2407.01082; random numbers: Salmon et
 *          al., Parallel Random Numbers: As Easy as 1, 2, 3 (Philox4x32-10), SC 2011.
 */
#ifndef PIPELINE_SAMPLER_H
#define PIPELINE_SAMPLER_H

#include <stdint.h>

#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

struct sampler;

/* The tokens at positions 0 .. count - 1, as token(ctx, position) gives them. */
struct sampler_history {
    uint32_t (*token)(void *ctx, uint32_t position);
    void *ctx;
    uint32_t count;
};

uint64_t sampler_memory(uint32_t vocabulary);
FL_MUST_CHECK fl_status sampler_open(uint32_t vocabulary, struct sampler **out);
void sampler_close(struct sampler *sampler);

/* FL_INVALID with a sentence when a setting is out of range: temperature 0 .. 100, top_p above 0 to
 * 1, min_p 0 to 1, repetition penalty above 0 to 100, counts up to FL_TOP_MAX; all finite. */
FL_MUST_CHECK fl_status sampler_check(const struct fl_sampling *sampling);

/* The token for `position`.  FL_MALFORMED when a logit is not finite. */
FL_MUST_CHECK fl_status sampler_pick(struct sampler *sampler, const float *logits,
                                     const struct fl_sampling *sampling,
                                     const struct sampler_history *history, uint32_t position,
                                     uint32_t *out_id);

/* The `count` largest logits, best first, ties by lowest id; count <= FL_TOP_MAX.  Returns how
 * many there are: count, or V when that is less. */
uint32_t sampler_top(struct sampler *sampler, const float *logits, uint32_t count,
                     struct fl_top *out);

/* Turn logits into log-probabilities of the whole vocabulary, before any filter: *logprob of `id`,
 * and the `count` values of `top` in place. */
void sampler_logprobs(struct sampler *sampler, const float *logits, uint32_t id, float *out_logprob,
                      struct fl_top *top, uint32_t count);

/* A number in [0, 1) that depends on the two arguments alone. */
double sampler_random(uint64_t seed, uint64_t counter);

#ifdef __cplusplus
}
#endif
#endif
