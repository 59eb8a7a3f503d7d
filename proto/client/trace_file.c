#include "proto/client/trace_file.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "proto/client/json_output.h"
#include "proto/span.h"

enum {
    ROW_MAX = 8, /* rows of one lane; what overlaps more shares the last */
    NODE_MAX = FL_STAGE_COUNT_MAX + 1,
};

/* Where a lane's next event may begin, row by row. */
struct lane_rows {
    double end_ms[ROW_MAX];
    int used;
};

static void put_name(struct json_output *json, const char *what, uint32_t process, uint32_t thread,
                     const char *name)
{
    json_open(json, NULL, '{');
    json_string(json, "ph", "M");
    json_string(json, "name", what);
    json_whole(json, "pid", process);
    json_whole(json, "tid", thread);
    json_open(json, "args", '{');
    json_string(json, "name", name);
    json_close(json, '}');
    json_close(json, '}');
}

/* The part all complete events have; the caller adds arguments and closes twice. */
static void begin_event(struct json_output *json, const char *name, uint32_t process,
                        uint32_t thread, double start_ms, double ms)
{
    json_open(json, NULL, '{');
    json_string(json, "ph", "X");
    json_string(json, "name", name);
    json_string(json, "cat", "firstlight");
    json_whole(json, "pid", process);
    json_whole(json, "tid", thread);
    json_real(json, "ts", start_ms * 1e3);
    json_real(json, "dur", ms * 1e3);
    json_open(json, "args", '{');
}

static void end_event(struct json_output *json)
{
    json_close(json, '}');
    json_close(json, '}');
}

static double earliest(const struct fl_timeline *timeline)
{
    double start_ms = 0;
    for (uint32_t i = 0; i < timeline->span_count; i++) {
        start_ms = timeline->spans[i].start_ms < start_ms ? timeline->spans[i].start_ms : start_ms;
    }
    return start_ms;
}

static void put_chain(struct json_output *json, const struct fl_timeline *timeline, double zero_ms)
{
    put_name(json, "process_name", 0, 0, "exposed chain");
    put_name(json, "thread_name", 0, 1, "what the first token waited for");
    for (uint32_t i = 0; i < timeline->segment_count; i++) {
        const struct fl_segment_summary *segment = &timeline->segments[i];
        begin_event(json, segment->phase, 0, 1, segment->start_ms - zero_ms, segment->ms);
        json_string(json, "node", segment->node);
        json_string(json, "cause", segment->cause);
        json_whole(json, "bytes", segment->bytes);
        end_event(json);
    }
}

/* 0: coordinator; nodes count from 1; -1: a node that is not in the list. */
static int node_index(const struct fl_timeline *timeline, const char *name)
{
    if (strcmp(name, "coordinator") == 0) {
        return 0;
    }
    for (uint32_t i = 0; i < timeline->node_count; i++) {
        if (strcmp(timeline->nodes[i].node, name) == 0) {
            return (int)i + 1;
        }
    }
    return -1;
}

static int lane_index(const char *name)
{
    for (int i = 0; i < FL_LANE_COUNT; i++) {
        if (strcmp(fl_lane_name((enum fl_lane)i), name) == 0) {
            return i;
        }
    }
    return FL_LANE_NONE;
}

static int row_for(struct lane_rows *rows, double start_ms, double end_ms)
{
    int row = 0;
    while (row < ROW_MAX - 1 && row < rows->used && rows->end_ms[row] > start_ms) {
        row++;
    }
    rows->used = row >= rows->used ? row + 1 : rows->used;
    rows->end_ms[row] = end_ms;
    return row;
}

static void name_row(struct json_output *json, uint32_t process, uint32_t thread, const char *lane,
                     int row)
{
    char name[64];
    if (row == 0) {
        snprintf(name, sizeof(name), "%.32s", lane);
    } else {
        snprintf(name, sizeof(name), "%.32s %d", lane, row + 1);
    }
    put_name(json, "thread_name", process, thread, name);
}

static void put_span(struct json_output *json, const struct fl_timeline_span *span,
                     uint32_t process, struct lane_rows rows[FL_LANE_COUNT], double zero_ms)
{
    const int lane = lane_index(span->lane);
    const int used = rows[lane].used;
    const int row = row_for(&rows[lane], span->start_ms, span->end_ms);
    const uint32_t thread = (uint32_t)(lane * ROW_MAX + row + 1);
    if (rows[lane].used > used) {
        name_row(json, process, thread, span->lane, row);
    }
    begin_event(json, span->phase, process, thread, span->start_ms - zero_ms,
                span->end_ms - span->start_ms);
    json_real(json, "busy_ms", span->busy_ms);
    json_whole(json, "bytes", span->bytes);
    json_string(json, "piece", span->piece);
    json_string(json, "source", span->source);
    json_string(json, "cause", span->cause);
    json_whole(json, "run", span->run);
    json_whole(json, "position", span->position);
    json_whole(json, "rows", span->rows);
    end_event(json);
}

void trace_file_write(const struct fl_timeline *timeline, FILE *stream)
{
    struct json_output json = {.stream = stream};
    struct lane_rows rows[NODE_MAX][FL_LANE_COUNT] = {0};
    const double zero_ms = earliest(timeline);
    json_open(&json, NULL, '{');
    json_string(&json, "displayTimeUnit", "ms");
    json_open(&json, "traceEvents", '[');
    put_chain(&json, timeline, zero_ms);
    put_name(&json, "process_name", 1, 0, "coordinator");
    for (uint32_t i = 0; i < timeline->node_count; i++) {
        put_name(&json, "process_name", i + 2, 0, timeline->nodes[i].node);
    }
    for (uint32_t i = 0; i < timeline->span_count; i++) {
        const int node = node_index(timeline, timeline->spans[i].node);
        if (node >= 0 && node < NODE_MAX) {
            put_span(&json, &timeline->spans[i], (uint32_t)node + 1, rows[node], zero_ms);
        }
    }
    json_close(&json, ']');
    json_close(&json, '}');
    fputc('\n', stream);
}
