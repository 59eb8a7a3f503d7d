#include "proto/client/waterfall.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <string.h>

#include "proto/base/size_text.h"
#include "proto/client/plain_text.h"
#include "proto/span.h"

enum {
    NAME_WIDTH = 14,
    LANE_WIDTH = 8,
    BAR_WIDTH = 56,
    TOP_COUNT = 12, /* parts of the chain listed one by one */
    CELL_SIZE = 128,
};

_Static_assert(NAME_WIDTH + LANE_WIDTH + BAR_WIDTH + 22 == WATERFALL_WIDTH,
               "the columns of a lane");

/* One letter a phase. */
static const char letters[FL_PHASE_COUNT] = {
    [FL_PHASE_UNKNOWN] = '?', [FL_PHASE_START] = '^',    [FL_PHASE_OPEN] = 'o',
    [FL_PHASE_PLAN] = 'p',    [FL_PHASE_TOKENISE] = 't', [FL_PHASE_QUEUE] = 'q',
    [FL_PHASE_SEND] = 's',    [FL_PHASE_RECEIVE] = '|',  [FL_PHASE_WAKE] = 'w',
    [FL_PHASE_MEMORY] = 'm',  [FL_PHASE_KV] = 'k',       [FL_PHASE_LINK] = 'l',
    [FL_PHASE_READ] = 'r',    [FL_PHASE_VERIFY] = 'v',   [FL_PHASE_REPACK] = 'x',
    [FL_PHASE_COPY] = 'c',    [FL_PHASE_EMBED] = 'e',    [FL_PHASE_JOIN] = '\0',
    [FL_PHASE_PREFILL] = 'P', [FL_PHASE_HEAD] = 'H',     [FL_PHASE_SAMPLE] = 'S',
    [FL_PHASE_DECODE] = 'D',  [FL_PHASE_RETURN] = 'R',
};

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static double smaller(double a, double b)
{
    return a < b ? a : b;
}

static enum fl_phase phase_of(const char *name)
{
    for (int i = 0; i < FL_PHASE_COUNT; i++) {
        if (strcmp(fl_phase_name((enum fl_phase)i), name) == 0) {
            return (enum fl_phase)i;
        }
    }
    return FL_PHASE_UNKNOWN;
}

/* A line of a table, without blanks at its end. */
__attribute__((format(printf, 2, 3))) static void put_line(FILE *stream, const char *format, ...)
{
    char line[4 * WATERFALL_WIDTH];
    va_list arguments;
    va_start(arguments, format);
    const int size = vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    size_t end = size < 0 ? 0 : (size_t)size < sizeof(line) ? (size_t)size : sizeof(line) - 1;
    while (end > 0 && line[end - 1] == ' ') {
        end--;
    }
    fwrite(line, 1, end, stream);
    fputc('\n', stream);
}

/* ---- one lane ---- */

struct bar {
    double ms_per_column;
    double busy[BAR_WIDTH][FL_PHASE_COUNT]; /* ms */
    double total_ms;
    uint64_t bytes;
};

/* Spread `busy_ms` evenly over start .. end, as far as that lies between t0 and the first token. */
static void bar_add(struct bar *bar, const char *phase_name, double start_ms, double end_ms,
                    double busy_ms)
{
    const enum fl_phase phase = phase_of(phase_name);
    const double window_ms = bar->ms_per_column * BAR_WIDTH;
    const double from = larger(start_ms, 0);
    const double to = smaller(end_ms, window_ms);
    if (letters[phase] == '\0' || to <= from || end_ms <= start_ms) {
        return;
    }
    const double share = smaller(busy_ms / (end_ms - start_ms), 1);
    bar->total_ms += share * (to - from);
    for (int i = (int)(from / bar->ms_per_column); i < BAR_WIDTH; i++) {
        const double left = larger(from, i * bar->ms_per_column);
        const double right = smaller(to, (i + 1) * bar->ms_per_column);
        if (right <= left && i * bar->ms_per_column > to) {
            return;
        }
        bar->busy[i][phase] += share * larger(right - left, 0);
    }
}

/* The phase that took most of a column; '.' where the lane was at work for less than a twentieth. */
static char letter_at(const struct bar *bar, int column)
{
    int best = 0;
    double sum = 0;
    for (int i = 0; i < FL_PHASE_COUNT; i++) {
        sum += bar->busy[column][i];
        best = bar->busy[column][i] > bar->busy[column][best] ? i : best;
    }
    if (sum <= 0) {
        return ' ';
    }
    return sum < 0.05 * bar->ms_per_column ? '.' : letters[best];
}

static void bar_print(const struct bar *bar, const char *name, const char *lane, FILE *stream)
{
    char cell[CELL_SIZE];
    char size[FL_SIZE_TEXT_MAX] = "";
    char row[BAR_WIDTH + 1];
    for (int i = 0; i < BAR_WIDTH; i++) {
        row[i] = letter_at(bar, i);
    }
    row[BAR_WIDTH] = '\0';
    if (bar->bytes > 0) {
        fl_size_text_format(bar->bytes, size);
    }
    put_line(stream, "%-*.*s %-*s%s %8.1f %10s", NAME_WIDTH, NAME_WIDTH,
             plain_text(name, cell, sizeof(cell)), LANE_WIDTH, lane, row, bar->total_ms, size);
}

/* ---- the picture ---- */

static void print_lane(const struct fl_timeline *timeline, const char *node, const char *lane,
                       bool *name_printed, FILE *stream)
{
    struct bar bar = {.ms_per_column = timeline->ttft_ms / BAR_WIDTH};
    for (uint32_t i = 0; i < timeline->span_count; i++) {
        const struct fl_timeline_span *span = &timeline->spans[i];
        if (strcmp(span->node, node) != 0 || strcmp(span->lane, lane) != 0) {
            continue;
        }
        bar_add(&bar, span->phase, span->start_ms, span->end_ms, span->busy_ms);
        /* A piece is read once, and its bytes are told again when they are checked and repacked. */
        const enum fl_phase phase = phase_of(span->phase);
        bar.bytes += phase == FL_PHASE_READ || phase == FL_PHASE_SEND ? span->bytes : 0;
    }
    if (bar.total_ms > 0) {
        bar_print(&bar, *name_printed ? "" : node, lane, stream);
        *name_printed = true;
    }
}

static void print_lanes(const struct fl_timeline *timeline, FILE *stream)
{
    static const char *const lanes[] = {"main", "worker", "disk", "compute", "wire"};
    struct bar exposed = {.ms_per_column = timeline->ttft_ms / BAR_WIDTH};
    for (uint32_t i = 0; i < timeline->segment_count; i++) {
        const struct fl_segment_summary *segment = &timeline->segments[i];
        bar_add(&exposed, segment->phase, segment->start_ms, segment->start_ms + segment->ms,
                segment->ms);
    }
    char scale[32];
    snprintf(scale, sizeof(scale), "%.1f ms", timeline->ttft_ms);
    fprintf(stream, "\n%-*s 0 ms%*s %8s %10s\n", NAME_WIDTH + LANE_WIDTH, "", BAR_WIDTH - 4, scale,
            "busy ms", "bytes");
    bar_print(&exposed, "exposed", "", stream);
    for (uint32_t n = 0; n <= timeline->node_count; n++) {
        const char *node = n == 0 ? "coordinator" : timeline->nodes[n - 1].node;
        bool name_printed = false;
        for (size_t i = 0; i < sizeof(lanes) / sizeof(lanes[0]); i++) {
            print_lane(timeline, node, lanes[i], &name_printed, stream);
        }
    }
}

/* What the letters in this picture mean: those of phases that took any time. */
static void print_legend(const struct fl_timeline *timeline, FILE *stream)
{
    int column = 0;
    for (uint32_t i = 0; i < timeline->phase_count; i++) {
        const struct fl_phase_summary *phase = &timeline->phases[i];
        const char letter = letters[phase_of(phase->phase)];
        char name[CELL_SIZE];
        if (letter == '\0' || phase->exposed_ms + phase->hidden_ms <= 0) {
            continue;
        }
        plain_text(phase->phase, name, sizeof(name));
        const int width = (int)strlen(name) + 4;
        if (column + width > WATERFALL_WIDTH - 2) {
            fputc('\n', stream);
            column = 0;
        }
        column += fprintf(stream, "%s%c %s", column > 0 ? "  " : "", letter, name);
    }
    fprintf(stream, "%s", column > 0 ? "\n" : "");
}

/* ---- the tables ---- */

/* Of bytes that moved: memory that is taken has a size, and no rate. */
static void print_rate(const struct fl_phase_summary *summary, char *out, size_t size)
{
    const enum fl_phase phase = phase_of(summary->phase);
    const double ms = summary->exposed_ms + summary->hidden_ms;
    out[0] = '\0';
    if (summary->bytes > 0 && ms > 0 && phase != FL_PHASE_MEMORY && phase != FL_PHASE_KV) {
        snprintf(out, size, "%.1f MB/s", (double)summary->bytes / ms / 1e3);
    }
}

static void print_phases(const struct fl_timeline *timeline, FILE *stream)
{
    fprintf(stream, "\n%-12s %12s %8s %12s %12s %14s\n", "phase", "exposed ms", "share",
            "hidden ms", "bytes", "rate");
    for (uint32_t i = 0; i < timeline->phase_count; i++) {
        const struct fl_phase_summary *phase = &timeline->phases[i];
        char name[CELL_SIZE];
        char size[FL_SIZE_TEXT_MAX] = "";
        char rate[32];
        if (phase->bytes > 0) {
            fl_size_text_format(phase->bytes, size);
        }
        print_rate(phase, rate, sizeof(rate));
        put_line(stream, "%-12s %12.3f %6.1f %% %12.3f %12s %14s",
                 plain_text(phase->phase, name, sizeof(name)), phase->exposed_ms,
                 timeline->ttft_ms > 0 ? 100 * phase->exposed_ms / timeline->ttft_ms : 0,
                 phase->hidden_ms, size, rate);
    }
}

/* Whether segment `index` is among the TOP_COUNT longest; of equal ones the first are. */
static bool is_among_longest(const struct fl_timeline *timeline, uint32_t index)
{
    uint32_t longer = 0;
    for (uint32_t i = 0; i < timeline->segment_count; i++) {
        const double ms = timeline->segments[i].ms;
        longer +=
            ms > timeline->segments[index].ms || (i < index && ms >= timeline->segments[index].ms);
    }
    return longer < TOP_COUNT;
}

static void print_chain(const struct fl_timeline *timeline, FILE *stream)
{
    fprintf(stream, "\nthe first token waited for, in order%s\n",
            timeline->segment_count > TOP_COUNT ? " (the longest parts)" : "");
    for (uint32_t i = 0; i < timeline->segment_count; i++) {
        const struct fl_segment_summary *segment = &timeline->segments[i];
        char phase[CELL_SIZE];
        char node[CELL_SIZE];
        char cause[CELL_SIZE];
        if (segment->ms <= 0 || !is_among_longest(timeline, i)) {
            continue;
        }
        const bool plain = segment->cause[0] == '\0' || strcmp(segment->cause, "none") == 0;
        put_line(stream, "%12.3f %10.3f ms  %-9s %-*.*s  %.*s", segment->start_ms, segment->ms,
                 plain_text(segment->phase, phase, sizeof(phase)), NAME_WIDTH, NAME_WIDTH,
                 plain_text(segment->node, node, sizeof(node)), WATERFALL_WIDTH - 56,
                 plain ? "" : plain_text(segment->cause, cause, sizeof(cause)));
    }
}

static void print_node(const struct fl_timeline_node *node, FILE *stream)
{
    char name[CELL_SIZE];
    char regime[CELL_SIZE];
    char shard[FL_SIZE_TEXT_MAX];
    char medium[FL_SIZE_TEXT_MAX];
    char cached[32] = "not known";
    char clock[48] = "unknown";
    fl_size_text_format(node->shard_bytes, shard);
    fl_size_text_format(node->medium_bytes, medium);
    if (node->residency_known) {
        snprintf(cached, sizeof(cached), "%.0f to %.0f %%", 100 * node->page_cache_before,
                 100 * node->page_cache_after);
    }
    if (node->clock_known) {
        snprintf(clock, sizeof(clock), "%+.0f us +-%.0f", node->clock_offset_us,
                 node->clock_error_us);
    }
    fprintf(stream, "%-*.*s %10s %12s %12s %-9.9s %22s %9.0f\n", NAME_WIDTH, NAME_WIDTH,
            plain_text(node->node, name, sizeof(name)), shard, cached, medium,
            plain_text(node->regime, regime, sizeof(regime)), clock, node->process_ms);
    if (node->slept_ms > 0) {
        fprintf(stream, "  it slept %.1f s since it joined\n", node->slept_ms / 1e3);
    }
    if (node->spans_lost > 0) {
        fprintf(stream,
                "  %" PRIu64
                " spans are missing: overwritten, over the limit, or of a clock nobody knows\n",
                node->spans_lost);
    }
}

static void print_nodes(const struct fl_timeline *timeline, FILE *stream)
{
    fprintf(stream, "\n%-*s %10s %12s %12s %-9s %22s %9s\n", NAME_WIDTH, "node", "shard",
            "page cache", "from medium", "reads", "clock", "start ms");
    for (uint32_t i = 0; i < timeline->node_count; i++) {
        print_node(&timeline->nodes[i], stream);
    }
}

void waterfall_print(const struct fl_timeline *timeline, FILE *stream)
{
    char model[CELL_SIZE];
    char predicted[64] = "";
    if (timeline->predicted_ms > 0) {
        snprintf(predicted, sizeof(predicted), " (predicted %.1f ms)", timeline->predicted_ms);
    }
    fprintf(stream,
            "%.*s: %s, first token after %.1f ms%s, %" PRIu32 " prompt tokens, request %" PRIu64
            "\n",
            WATERFALL_WIDTH, plain_text(timeline->model, model, sizeof(model)),
            fl_class_name(timeline->class_), timeline->ttft_ms, predicted, timeline->prompt_tokens,
            timeline->id);
    if (!timeline->complete) {
        fprintf(stream, "some of it was not told by its node: that is phase unknown (?)\n");
    }
    if (timeline->ttft_ms > 0 && timeline->span_count > 0) {
        print_lanes(timeline, stream);
        print_legend(timeline, stream);
    } else if (timeline->span_count == 0) {
        fprintf(stream, "its spans are no longer kept; the chain is\n");
    }
    print_chain(timeline, stream);
    print_phases(timeline, stream);
    print_nodes(timeline, stream);
}
