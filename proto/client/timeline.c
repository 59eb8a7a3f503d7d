#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/client/answer.h"
#include "proto/client/commands.h"
#include "proto/client/exchange.h"
#include "proto/client/interrupt.h"
#include "proto/client/json_output.h"
#include "proto/client/trace_file.h"
#include "proto/client/waterfall.h"

struct timeline_options {
    struct exchange_config exchange;
    const char *id;
    const char *perfetto;
};

/* ---- JSON ---- */

static void segments_json(struct json_output *json, const struct fl_timeline *timeline)
{
    json_open(json, "exposed", '[');
    for (uint32_t i = 0; i < timeline->segment_count; i++) {
        const struct fl_segment_summary *segment = &timeline->segments[i];
        json_open(json, NULL, '{');
        json_string(json, "phase", segment->phase);
        json_string(json, "node", segment->node);
        json_string(json, "cause", segment->cause);
        json_nano(json, "start_ms", segment->start_ms);
        json_nano(json, "ms", segment->ms);
        json_whole(json, "bytes", segment->bytes);
        json_close(json, '}');
    }
    json_close(json, ']');
}

static void share_json(struct json_output *json, const char *key, bool known, double share)
{
    if (known) {
        json_nano(json, key, share);
    } else {
        json_null(json, key);
    }
}

static void nodes_json(struct json_output *json, const struct fl_timeline *timeline)
{
    json_open(json, "nodes", '[');
    for (uint32_t i = 0; i < timeline->node_count; i++) {
        const struct fl_timeline_node *node = &timeline->nodes[i];
        json_open(json, NULL, '{');
        json_string(json, "node", node->node);
        share_json(json, "clock_offset_us", node->clock_known, node->clock_offset_us);
        share_json(json, "clock_error_us", node->clock_known, node->clock_error_us);
        share_json(json, "page_cache_before", node->residency_known, node->page_cache_before);
        share_json(json, "page_cache_after", node->residency_known, node->page_cache_after);
        json_whole(json, "shard_bytes", node->shard_bytes);
        json_whole(json, "medium_bytes", node->medium_bytes);
        json_string(json, "regime", node->regime);
        json_real(json, "process_ms", node->process_ms);
        json_real(json, "slept_ms", node->slept_ms);
        json_whole(json, "mhz_before", node->mhz_before);
        json_whole(json, "mhz_after", node->mhz_after);
        json_whole(json, "spans_lost", node->spans_lost);
        json_close(json, '}');
    }
    json_close(json, ']');
}

static void spans_json(struct json_output *json, const struct fl_timeline *timeline)
{
    json_open(json, "spans", '[');
    for (uint32_t i = 0; i < timeline->span_count; i++) {
        const struct fl_timeline_span *span = &timeline->spans[i];
        json_open(json, NULL, '{');
        json_string(json, "phase", span->phase);
        json_string(json, "node", span->node);
        json_string(json, "lane", span->lane);
        json_string(json, "source", span->source);
        json_string(json, "cause", span->cause);
        json_string(json, "piece", span->piece);
        json_nano(json, "start_ms", span->start_ms);
        json_nano(json, "end_ms", span->end_ms);
        json_nano(json, "busy_ms", span->busy_ms);
        json_nano(json, "cause_ms", span->cause_ms);
        json_whole(json, "bytes", span->bytes);
        json_whole(json, "run", span->run);
        json_whole(json, "position", span->position);
        json_whole(json, "rows", span->rows);
        json_close(json, '}');
    }
    json_close(json, ']');
}

static void print_json(const struct fl_timeline *timeline)
{
    struct json_output json = {.stream = stdout};
    json_open(&json, NULL, '{');
    json_whole(&json, "id", timeline->id);
    json_string(&json, "model", timeline->model);
    json_string(&json, "class", fl_class_name(timeline->class_));
    json_nano(&json, "ttft_ms", timeline->ttft_ms);
    share_json(&json, "predicted_ms", timeline->predicted_ms > 0, timeline->predicted_ms);
    json_whole(&json, "prompt_tokens", timeline->prompt_tokens);
    json_bool(&json, "complete", timeline->complete);
    segments_json(&json, timeline);
    answer_phases_json(&json, timeline->phases, timeline->phase_count);
    nodes_json(&json, timeline);
    spans_json(&json, timeline);
    json_close(&json, '}');
    fputc('\n', stdout);
}

/* ---- command ---- */

static fl_status cannot_write(const char *path, int error)
{
    return FL_FAIL(FL_IO, "--perfetto %s cannot be written: %s", path, strerror(error));
}

static fl_status write_stream(const struct fl_timeline *timeline, const char *path, FILE *file)
{
    trace_file_write(timeline, file);
    const bool failed = ferror(file) != 0;
    const int error = errno;
    if (fclose(file) != 0 || failed) {
        return cannot_write(path, failed ? error : errno);
    }
    return FL_OK;
}

/* A file appears whole or not at all, and what had its name stays until then. */
static fl_status write_file(const struct fl_timeline *timeline, const char *path)
{
    char part[PATH_MAX];
    const int size = snprintf(part, sizeof(part), "%s.XXXXXX", path);
    if (size < 0 || (size_t)size >= sizeof(part)) {
        return cannot_write(path, ENAMETOOLONG);
    }
    const int fd = mkstemp(part);
    if (fd < 0) {
        return cannot_write(path, errno);
    }
    const mode_t mask = umask(0);
    umask(mask);
    FILE *file = fdopen(fd, "w");
    if (file == NULL || fchmod(fd, 0666 & ~mask) != 0) {
        const int error = errno;
        close(fd);
        remove(part);
        return cannot_write(path, error);
    }
    fl_status status = write_stream(timeline, path, file);
    if (status == FL_OK && rename(part, path) != 0) {
        status = cannot_write(path, errno);
    }
    if (status != FL_OK) {
        remove(part);
    }
    return status;
}

static fl_status write_trace(const struct fl_timeline *timeline, const char *path)
{
    struct stat info;
    if (strcmp(path, "-") == 0) {
        trace_file_write(timeline, stdout);
        return FL_OK;
    }
    if (stat(path, &info) != 0 || S_ISREG(info.st_mode)) {
        return write_file(timeline, path);
    }
    FILE *file = fopen(path, "w"); /* a pipe or a device: it stays what it is */
    return file != NULL ? write_stream(timeline, path, file) : cannot_write(path, errno);
}

static fl_status show(const struct timeline_options *o, const struct fl_timeline *timeline)
{
    if (o->perfetto != NULL) {
        FL_TRY(write_trace(timeline, o->perfetto));
        if (!o->exchange.quiet && strcmp(o->perfetto, "-") != 0) {
            fprintf(stderr, "%s: open it at https://ui.perfetto.dev\n", o->perfetto);
        }
    }
    if (o->exchange.json) {
        print_json(timeline);
    } else if (o->perfetto == NULL) {
        waterfall_print(timeline, stdout);
    }
    return FL_OK;
}

static fl_status run(const struct timeline_options *o, uint64_t id)
{
    const struct fl_client_request request = {.kind = FL_REQUEST_TIMELINE, .as.timeline.id = id};
    struct exchange exchange;
    struct fl_client_event event;
    fl_status status = exchange_open(&exchange, &o->exchange);
    if (status == FL_OK) {
        interrupt_watch();
        status = exchange_ask(&exchange, &request, FL_EVENT_TIMELINE, &event);
    }
    if (status == FL_OK) {
        status = show(o, &event.as.timeline);
    }
    exchange_close(&exchange);
    return status;
}

static fl_status parse_id(const char *text, uint64_t *out)
{
    char *end = NULL;
    *out = 0;
    if (text == NULL) {
        return FL_OK;
    }
    errno = 0;
    *out = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || *out == 0) {
        return FL_FAIL(FL_INVALID,
                       "'%.40s' is no request's number; the one generate ends with would be right, "
                       "or none for the last request",
                       text);
    }
    return FL_OK;
}

static fl_status check(const struct timeline_options *o, uint64_t *out_id)
{
    FL_TRY(parse_id(o->id, out_id));
    if (o->exchange.json && o->perfetto != NULL && strcmp(o->perfetto, "-") == 0) {
        return FL_FAIL(FL_INVALID, "--json and --perfetto - both go to standard output; give "
                                   "--perfetto a file");
    }
    return FL_OK;
}

int command_timeline(int argc, char **argv)
{
    struct timeline_options o = {0};
    const struct option options[] = {
        {OPTION_HEADING, "Trace", NULL, NULL, NULL, 0, 0},
        {OPTION_TEXT, "--perfetto", "FILE",
         "write a trace that ui.perfetto.dev opens (-: standard output)", &o.perfetto, 0, 0},
        EXCHANGE_OPTIONS(&o.exchange),
    };
    const struct command_line line = {
        .command = "timeline",
        .usage = "[ID] [OPTION..]",
        .about = "Shows where the time to a first token went: what was waited for, and what was\n"
                 "hidden behind it, on every node.  ID is the number that generate ends with;\n"
                 "without one it is the last request.  The coordinator keeps the last 64.",
        .examples = "  firstlight timeline\n"
                    "  firstlight timeline 17 --json\n"
                    "  firstlight timeline --perfetto cold.json\n",
        .positional = &o.id,
        .options = options,
        .option_count = sizeof(options) / sizeof(options[0]),
    };
    uint64_t id = 0;
    const fl_status status = options_parse(&line, argc, argv);
    if (status == FL_END) {
        return EXIT_SUCCESS;
    }
    if (status != FL_OK || check(&o, &id) != FL_OK) {
        return EXIT_CALLED_WRONGLY;
    }
    return exchange_exit(run(&o, id));
}
