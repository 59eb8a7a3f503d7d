/* bench_spans - what recording costs: a span, a look at the clock, and of a decoded token its share.
 *
 *   bench_spans MODEL.gguf [tokens]
 *
 * CSV.  The share is what is recorded during a decode, counted, times what each of it costs alone,
 * over the time of a token: the difference between two runs would drown in their noise.
 */
#include <stdio.h>
#include <stdlib.h>

#include "proto/base/clock.h"
#include "tests/support/stage_chain.h"

enum { PUTS = 2000000, PROMPT = 16, RING = 8192 };

static uint64_t looks;

static uint64_t counted_now(void *ctx)
{
    (void)ctx;
    const struct fl_clock clock = fl_clock_monotonic();
    looks++;
    return fl_clock_now(&clock);
}

static double put_ns(struct fl_span_ring *ring)
{
    const struct fl_clock clock = fl_clock_monotonic();
    struct fl_span span = {.phase = FL_PHASE_PREFILL};
    const uint64_t begun_ns = fl_clock_now(&clock);
    for (uint32_t i = 0; i < PUTS; i++) {
        span.start_ns = i;
        fl_span_ring_put(ring, &span);
    }
    return (double)(fl_clock_now(&clock) - begun_ns) / PUTS;
}

static double look_ns(void)
{
    const struct fl_clock clock = fl_clock_monotonic();
    const uint64_t begun_ns = fl_clock_now(&clock);
    for (uint32_t i = 0; i < PUTS; i++) {
        (void)fl_clock_now(&clock);
    }
    return (double)(fl_clock_now(&clock) - begun_ns) / PUTS;
}

/* Decode a token at a time; spans and looks at the clock go to the two numbers.  Returns
 * nanoseconds per token. */
static double decode(struct stage_chain *chain, struct stage_chain_request *request,
                     const struct fl_span_ring *ring, double *out_spans, double *out_looks)
{
    const struct fl_clock clock = fl_clock_monotonic();
    while (request->count < 1 && request->failure == FL_OK) {
        if (stage_chain_pump(chain) != FL_OK) {
            return 0;
        }
    }
    const uint64_t spans = fl_span_ring_end(ring);
    const uint64_t before = looks;
    const uint64_t begun_ns = fl_clock_now(&clock);
    while (request->finish == FL_FINISH_NONE && request->failure == FL_OK) {
        if (stage_chain_pump(chain) != FL_OK) {
            return 0;
        }
    }
    const double tokens = (double)request->count - 1;
    *out_spans = (double)(fl_span_ring_end(ring) - spans) / tokens;
    *out_looks = (double)(looks - before) / tokens;
    return (double)(fl_clock_now(&clock) - begun_ns) / tokens;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fputs("bench_spans MODEL.gguf [tokens]\n", stderr);
        return 2;
    }
    const unsigned long tokens = argc > 2 ? strtoul(argv[2], NULL, 10) : 64;
    if (tokens < 2 || tokens > STAGE_CHAIN_TOKENS_MAX) {
        fprintf(stderr, "bench_spans: tokens must be 2 to %d\n", STAGE_CHAIN_TOKENS_MAX);
        return 2;
    }
    struct run_trace trace = {.clock = {.now_ns = counted_now}};
    if (fl_span_ring_open(FL_LANE_COMPUTE, RING, &trace.spans) != FL_OK) {
        return 1;
    }
    const double put = put_ns(trace.spans);
    const double look = look_ns();
    const struct stage_chain_config config = {
        .path = argv[1],
        .stage_count = 1,
        .chunk_rows = PROMPT,
        .context = PROMPT + STAGE_CHAIN_TOKENS_MAX,
        .sequence_max = 1,
        .threads = 2,
        .isa = "auto",
        .traces = &trace,
    };
    struct stage_chain *chain;
    uint32_t prompt[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) {
        prompt[i] = 100 + i * 7;
    }
    struct stage_chain_request request = {
        .sequence_id = 1,
        .prompt = prompt,
        .prompt_count = PROMPT,
        .max_tokens = (uint32_t)tokens,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
    };
    if (stage_chain_open(&config, &chain) != FL_OK || stage_chain_load_all(chain) != FL_OK ||
        stage_chain_admit(chain, &request) != FL_OK) {
        return 1;
    }
    double spans = 0;
    double seen = 0;
    const double token = decode(chain, &request, trace.spans, &spans, &seen);
    if (token == 0) {
        fputs("bench_spans: the model gave no answer\n", stderr);
        return 1;
    }
    const double cost = spans * put + seen * look;
    puts("put_ns,clock_ns,spans_per_token,clock_reads_per_token,token_us,cost_us,share_percent");
    printf("%.1f,%.1f,%.2f,%.1f,%.1f,%.3f,%.4f\n", put, look, spans, seen, token / 1e3, cost / 1e3,
           100 * cost / token);
    stage_chain_close(chain);
    fl_span_ring_close(trace.spans);
    return 0;
}
