#include "pipeline/sampler.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/scalar_math.h"

enum { TOP_P_FIRST = 64 }; /* candidates looked at first when only top-p limits them */

struct sampler {
    uint32_t vocabulary;
    float *logits;          /* [V], after the penalty */
    struct fl_top *sorted;  /* [V]: the best candidates, best first */
    unsigned char *touched; /* [V / 8 + 1]: ids the penalty has met */
};

uint64_t sampler_memory(uint32_t vocabulary)
{
    return sizeof(struct sampler) + (uint64_t)vocabulary * (sizeof(float) + sizeof(struct fl_top)) +
           vocabulary / 8 + 1;
}

fl_status sampler_open(uint32_t vocabulary, struct sampler **out)
{
    struct sampler *sampler = calloc(1, sizeof(*sampler));
    if (sampler == NULL) {
        goto fail;
    }
    sampler->vocabulary = vocabulary;
    sampler->logits = calloc(vocabulary, sizeof(*sampler->logits));
    sampler->sorted = calloc(vocabulary, sizeof(*sampler->sorted));
    sampler->touched = calloc(1, vocabulary / 8 + 1);
    if (sampler->logits == NULL || sampler->sorted == NULL || sampler->touched == NULL) {
        goto fail;
    }
    *out = sampler;
    return FL_OK;

fail:
    sampler_close(sampler);
    return FL_FAIL(FL_NO_MEMORY, "no memory for a sampler: %" PRIu64 " bytes are wanted",
                   sampler_memory(vocabulary));
}

void sampler_close(struct sampler *sampler)
{
    if (sampler != NULL) {
        free(sampler->touched);
        free(sampler->sorted);
        free(sampler->logits);
        free(sampler);
    }
}

static fl_status check_setting(const char *name, float value, float low, bool low_allowed,
                               float high)
{
    if (!isfinite(value) || value > high || value < low || (value <= low && !low_allowed)) {
        return FL_FAIL(FL_INVALID, "%s is %g; it must be %s %g and at most %g", name, (double)value,
                       low_allowed ? "at least" : "above", (double)low, (double)high);
    }
    return FL_OK;
}

static fl_status check_count(const char *name, uint32_t value)
{
    if (value > FL_TOP_MAX) {
        return FL_FAIL(FL_INVALID, "%s is %" PRIu32 "; at most %d can be listed", name, value,
                       FL_TOP_MAX);
    }
    return FL_OK;
}

fl_status sampler_check(const struct fl_sampling *sampling)
{
    FL_TRY(check_setting("temperature", sampling->temperature, 0.0f, true, FL_SAMPLING_FACTOR_MAX));
    FL_TRY(check_setting("top-p", sampling->top_p, 0.0f, false, 1.0f));
    FL_TRY(check_setting("min-p", sampling->min_p, 0.0f, true, 1.0f));
    FL_TRY(check_setting("repetition penalty", sampling->repetition_penalty, 0.0f, false,
                         FL_SAMPLING_FACTOR_MAX));
    FL_TRY(check_count("top-logits", sampling->top_logits));
    return check_count("logprobs", sampling->logprobs);
}

/* ---- selection ---- */

static bool is_better(const struct fl_top *a, const struct fl_top *b)
{
    return a->value > b->value || (a->value == b->value && a->id < b->id);
}

/* heap [count]: every node is worse than its children, so the worst is on top. */
static void sift_down(struct fl_top *heap, uint32_t count, uint32_t node)
{
    const struct fl_top moved = heap[node];
    for (uint32_t child = 2 * node + 1; child < count; child = 2 * node + 1) {
        if (child + 1 < count && is_better(&heap[child], &heap[child + 1])) {
            child++;
        }
        if (!is_better(&moved, &heap[child])) {
            break;
        }
        heap[node] = heap[child];
        node = child;
    }
    heap[node] = moved;
}

/* The `count` best of logits [vocabulary], best first; count <= vocabulary.
 * One comparison for most logits: O(V + count log count) as a rule. */
static void select_best(const float *logits, uint32_t vocabulary, uint32_t count,
                        struct fl_top *out)
{
    if (count == 0) {
        return;
    }
    for (uint32_t id = 0; id < count; id++) {
        out[id] = (struct fl_top){.id = id, .value = logits[id]};
    }
    for (uint32_t node = count / 2; node-- > 0;) {
        sift_down(out, count, node);
    }
    for (uint32_t id = count; id < vocabulary; id++) {
        if (logits[id] > out[0].value) { /* an equal one has the higher id: worse */
            out[0] = (struct fl_top){.id = id, .value = logits[id]};
            sift_down(out, count, 0);
        }
    }
    for (uint32_t last = count - 1; last > 0; last--) {
        const struct fl_top worst = out[0];
        out[0] = out[last];
        out[last] = worst;
        sift_down(out, last, 0);
    }
}

uint32_t sampler_top(struct sampler *sampler, const float *logits, uint32_t count,
                     struct fl_top *out)
{
    FL_ASSERT(count <= FL_TOP_MAX);
    count = count < sampler->vocabulary ? count : sampler->vocabulary;
    select_best(logits, sampler->vocabulary, count, out);
    return count;
}

/* ---- probabilities ---- */

/* The largest logit's index (the lowest on a tie), or V when one is not finite. */
static uint32_t find_largest(const float *logits, uint32_t vocabulary)
{
    uint32_t best = 0;
    bool finite = true;
    for (uint32_t id = 0; id < vocabulary; id++) {
        finite = finite && isfinite(logits[id]);
        best = logits[id] > logits[best] ? id : best;
    }
    return finite ? best : vocabulary;
}

/* Sum of exp(logit - largest) over all, ids ascending. */
static double sum_weights(const float *logits, uint32_t vocabulary, float largest)
{
    double sum = 0;
    for (uint32_t id = 0; id < vocabulary; id++) {
        sum += (double)math_exp(logits[id] - largest);
    }
    return sum;
}

void sampler_logprobs(struct sampler *sampler, const float *logits, uint32_t id, float *out_logprob,
                      struct fl_top *top, uint32_t count)
{
    const uint32_t best = find_largest(logits, sampler->vocabulary);
    FL_ASSERT(id < sampler->vocabulary && best < sampler->vocabulary);
    const double largest = (double)logits[best];
    const double log_sum = math_log(sum_weights(logits, sampler->vocabulary, logits[best]));
    *out_logprob = (float)(((double)logits[id] - largest) - log_sum);
    for (uint32_t i = 0; i < count; i++) {
        top[i].value = (float)(((double)top[i].value - largest) - log_sum);
    }
}

/* ---- random numbers ---- */

/* Philox4x32 with 10 rounds, key = seed, counter = (counter, 0). */
double sampler_random(uint64_t seed, uint64_t counter)
{
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t word[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0};
    for (int round = 0; round < 10; round++) {
        const uint64_t low = UINT64_C(0xD2511F53) * word[0];
        const uint64_t high = UINT64_C(0xCD9E8D57) * word[2];
        word[0] = (uint32_t)(high >> 32) ^ word[1] ^ key[0];
        word[1] = (uint32_t)high;
        word[2] = (uint32_t)(low >> 32) ^ word[3] ^ key[1];
        word[3] = (uint32_t)low;
        key[0] += UINT32_C(0x9E3779B9);
        key[1] += UINT32_C(0xBB67AE85);
    }
    const uint64_t bits = ((uint64_t)word[0] << 32 | word[1]) >> 11;
    return (double)bits * 0x1p-53;
}

/* ---- pick ---- */

/* sampler->logits = logits, with every id of the window made less likely once. */
static void apply_penalty(struct sampler *sampler, const float *logits,
                          const struct fl_sampling *sampling, const struct sampler_history *history)
{
    memcpy(sampler->logits, logits, sampler->vocabulary * sizeof(*logits));
    const float penalty = sampling->repetition_penalty;
    if (penalty == 1.0f) {
        return;
    }
    const uint32_t window = sampling->penalty_window;
    const uint32_t first = window != 0 && window < history->count ? history->count - window : 0;
    for (uint32_t position = first; position < history->count; position++) {
        const uint32_t id = history->token(history->ctx, position);
        FL_ASSERT(id < sampler->vocabulary);
        const unsigned char bit = (unsigned char)(1u << id % 8);
        if ((sampler->touched[id / 8] & bit) == 0) {
            sampler->touched[id / 8] |= bit;
            float *logit = &sampler->logits[id];
            *logit = *logit > 0 ? *logit / penalty : *logit * penalty;
        }
    }
    for (uint32_t position = first; position < history->count; position++) {
        sampler->touched[history->token(history->ctx, position) / 8] = 0;
    }
}

/* How many of sorted [count] make up the share top_p of `total`; 0 when all of them are less. */
static uint32_t nucleus(const struct fl_top *sorted, uint32_t count, double top_p, double total)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += (double)math_exp(sorted[i].value - sorted[0].value);
        if (sum >= top_p * total) {
            return i + 1;
        }
    }
    return 0;
}

/* Fill sampler->sorted with the candidates that top-k and top-p leave, best first. */
static uint32_t take_best(struct sampler *sampler, const struct fl_sampling *sampling,
                          float largest)
{
    const uint32_t vocabulary = sampler->vocabulary;
    const bool limited = sampling->top_k != 0 && sampling->top_k < vocabulary;
    const double top_p = (double)sampling->top_p;
    if (limited) {
        const uint32_t count = sampling->top_k;
        double total = 0;
        select_best(sampler->logits, vocabulary, count, sampler->sorted);
        for (uint32_t i = 0; i < count; i++) {
            total += (double)math_exp(sampler->sorted[i].value - largest);
        }
        const uint32_t kept = nucleus(sampler->sorted, count, top_p, total);
        return sampling->top_p < 1.0f && kept != 0 ? kept : count;
    }
    /* The nucleus is small as a rule: sort few candidates, more only when they do not suffice. */
    const double total = sum_weights(sampler->logits, vocabulary, largest);
    for (uint32_t count = TOP_P_FIRST;; count *= 8) {
        count = count < vocabulary / 8 ? count : vocabulary;
        select_best(sampler->logits, vocabulary, count, sampler->sorted);
        const uint32_t kept = nucleus(sampler->sorted, count, top_p, total);
        if (kept != 0 || count == vocabulary) {
            return kept != 0 ? kept : count;
        }
    }
}

/* Without a limit on the candidates their order does not matter: by id. */
static uint32_t take_all(struct sampler *sampler)
{
    for (uint32_t id = 0; id < sampler->vocabulary; id++) {
        sampler->sorted[id] = (struct fl_top){.id = id, .value = sampler->logits[id]};
    }
    return sampler->vocabulary;
}

/* Drop candidates less likely than min_p times the likeliest; their order stays. */
static uint32_t drop_unlikely(struct fl_top *candidates, uint32_t count, float largest, float min_p)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (math_exp(candidates[i].value - largest) >= min_p) {
            candidates[kept++] = candidates[i];
        }
    }
    return kept;
}

/* One of the candidates, by exp((logit - largest) / temperature); the values become weights. */
static uint32_t draw(struct fl_top *candidates, uint32_t count, float largest, float temperature,
                     double random)
{
    double total = 0;
    for (uint32_t i = 0; i < count; i++) {
        candidates[i].value = math_exp((candidates[i].value - largest) / temperature);
        total += (double)candidates[i].value;
    }
    const double target = random * total;
    double sum = 0;
    uint32_t last = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += (double)candidates[i].value;
        last = candidates[i].value > 0 ? i : last;
        if (sum > target) {
            return candidates[i].id;
        }
    }
    return candidates[last].id;
}

fl_status sampler_pick(struct sampler *sampler, const float *logits,
                       const struct fl_sampling *sampling, const struct sampler_history *history,
                       uint32_t position, uint32_t *out_id)
{
    if (find_largest(logits, sampler->vocabulary) == sampler->vocabulary) {
        return FL_FAIL(FL_MALFORMED,
                       "the model gave a logit that is no finite number for position %" PRIu32
                       "; its weights are damaged or of a kind this build computes wrongly",
                       position);
    }
    apply_penalty(sampler, logits, sampling, history);
    const uint32_t best = find_largest(sampler->logits, sampler->vocabulary);
    if (best == sampler->vocabulary) {
        return FL_FAIL(FL_INVALID,
                       "repetition penalty %g makes a logit infinite; use a smaller one",
                       (double)sampling->repetition_penalty);
    }
    if (sampling->temperature == 0.0f) {
        *out_id = best;
        return FL_OK;
    }
    const float largest = sampler->logits[best];
    const bool limited = sampling->top_k != 0 && sampling->top_k < sampler->vocabulary;
    uint32_t count = limited || sampling->top_p < 1.0f ? take_best(sampler, sampling, largest)
                                                       : take_all(sampler);
    if (sampling->min_p > 0.0f) {
        count = drop_unlikely(sampler->sorted, count, largest, sampling->min_p);
    }
    *out_id = draw(sampler->sorted, count, largest, sampling->temperature,
                   sampler_random(sampling->seed, position));
    return FL_OK;
}
