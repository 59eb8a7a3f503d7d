#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "proto/client/commands.h"
#include "proto/client/exchange.h"
#include "proto/client/interrupt.h"
#include "proto/client/json_output.h"
#include "proto/client/plain_text.h"

enum { CELL_SIZE = 128 };

/* ---- JSON ---- */

static void node_json(struct json_output *json, const struct fl_node_summary *node)
{
    json_open(json, NULL, '{');
    json_string(json, "name", node->name);
    json_string(json, "state", node->state);
    json_string(json, "address", node->address);
    json_string(json, "isa", node->isa);
    json_whole(json, "threads", node->threads);
    json_whole(json, "memory_budget", node->memory_budget);
    json_whole(json, "memory_used", node->memory_used);
    json_real(json, "heartbeat_ms", node->heartbeat_ms);
    if (node->clock_known) {
        json_real(json, "clock_offset_us", node->clock_offset_us);
        json_real(json, "clock_error_us", node->clock_error_us);
    } else {
        json_null(json, "clock_offset_us");
        json_null(json, "clock_error_us");
    }
    json_real(json, "slept_ms", node->slept_ms);
    json_close(json, '}');
}

static void loaded_json(struct json_output *json, const struct fl_loaded_summary *loaded)
{
    json_open(json, NULL, '{');
    json_string(json, "model", loaded->model);
    json_string(json, "state", loaded->state);
    json_whole(json, "context", loaded->context);
    json_whole(json, "kv_blocks_total", loaded->kv_blocks_total);
    json_whole(json, "kv_blocks_used", loaded->kv_blocks_used);
    json_whole(json, "sequences_kept", loaded->sequences_kept);
    json_whole(json, "requests_running", loaded->requests_running);
    json_whole(json, "requests_queued", loaded->requests_queued);
    json_open(json, "stages", '[');
    for (uint32_t i = 0; i < loaded->stage_count; i++) {
        const struct fl_plan_stage_summary *stage = &loaded->stages[i];
        json_open(json, NULL, '{');
        json_string(json, "node", stage->node);
        json_whole(json, "first_layer", stage->first_layer);
        json_whole(json, "last_layer", stage->last_layer);
        json_whole(json, "pieces_done", stage->pieces_done);
        json_whole(json, "pieces_total", stage->pieces_total);
        json_whole(json, "bytes_done", stage->bytes_done);
        json_whole(json, "bytes_total", stage->bytes_total);
        json_close(json, '}');
    }
    json_close(json, ']');
    json_close(json, '}');
}

static void print_json(const struct fl_client_event *event)
{
    struct json_output json = {.stream = stdout};
    json_open(&json, NULL, '{');
    json_string(&json, "version", event->as.status.version);
    json_real(&json, "uptime_s", event->as.status.uptime_s);
    json_open(&json, "nodes", '[');
    for (uint32_t i = 0; i < event->as.status.node_count; i++) {
        node_json(&json, &event->as.status.nodes[i]);
    }
    json_close(&json, ']');
    json_open(&json, "loaded", '[');
    for (uint32_t i = 0; i < event->as.status.loaded_count; i++) {
        loaded_json(&json, &event->as.status.loaded[i]);
    }
    json_close(&json, ']');
    json_close(&json, '}');
    fputc('\n', stdout);
}

/* ---- for a person ---- */

static void print_uptime(double seconds)
{
    const uint64_t whole = (uint64_t)seconds;
    if (whole < 120) {
        printf("%" PRIu64 " s", whole);
    } else if (whole < 7200) {
        printf("%" PRIu64 " min", whole / 60);
    } else if (whole < 172800) {
        printf("%" PRIu64 " h", whole / 3600);
    } else {
        printf("%" PRIu64 " days", whole / 86400);
    }
}

static void print_nodes(const struct fl_client_event *event)
{
    if (event->as.status.node_count == 0) {
        printf("no nodes have joined: start them with firstlight-node --join HOST:PORT\n");
        return;
    }
    printf("%-16s  %-8s  %-23s  %-8s  %7s  %11s  %11s  %9s  %11s\n", "node", "state", "address",
           "cpu", "threads", "memory used", "budget", "heartbeat", "clock");
    for (uint32_t i = 0; i < event->as.status.node_count; i++) {
        const struct fl_node_summary *node = &event->as.status.nodes[i];
        char name[CELL_SIZE];
        char state[CELL_SIZE];
        char address[CELL_SIZE];
        char isa[CELL_SIZE];
        char used[SIZE_TEXT_MAX];
        char budget[SIZE_TEXT_MAX];
        char heartbeat[32] = "-";
        char clock[32] = "-";
        if (node->heartbeat_ms > 0) {
            snprintf(heartbeat, sizeof(heartbeat), "%.2f ms", node->heartbeat_ms);
        }
        if (node->clock_known) {
            snprintf(clock, sizeof(clock), "+- %.3f ms", node->clock_error_us / 1e3);
        }
        printf("%-16s  %-8s  %-23s  %-8s  %7" PRIu32 "  %11s  %11s  %9s  %11s\n",
               plain_text(node->name, name, sizeof(name)),
               plain_text(node->state, state, sizeof(state)),
               plain_text(node->address, address, sizeof(address)),
               plain_text(node->isa, isa, sizeof(isa)), node->threads,
               size_text(node->memory_used, used), size_text(node->memory_budget, budget),
               heartbeat, clock);
    }
    for (uint32_t i = 0; i < event->as.status.node_count; i++) {
        const struct fl_node_summary *node = &event->as.status.nodes[i];
        char name[CELL_SIZE];
        if (node->slept_ms > 0) {
            printf("%s slept %.1f s since it joined\n", plain_text(node->name, name, sizeof(name)),
                   node->slept_ms / 1e3);
        }
    }
}

static void print_loaded(const struct fl_loaded_summary *loaded)
{
    char name[CELL_SIZE];
    char state[CELL_SIZE];
    printf("\n%s: %s, context %" PRIu32 ", KV blocks %" PRIu32 " of %" PRIu32
           ", conversations %" PRIu32 ", running %" PRIu32 ", queued %" PRIu32 "\n",
           plain_text(loaded->model, name, sizeof(name)),
           plain_text(loaded->state, state, sizeof(state)), loaded->context, loaded->kv_blocks_used,
           loaded->kv_blocks_total, loaded->sequences_kept, loaded->requests_running,
           loaded->requests_queued);
    for (uint32_t i = 0; i < loaded->stage_count; i++) {
        const struct fl_plan_stage_summary *stage = &loaded->stages[i];
        char done[SIZE_TEXT_MAX];
        char total[SIZE_TEXT_MAX];
        char layers[32];
        char pieces[32];
        snprintf(layers, sizeof(layers), "%" PRIu32 "-%" PRIu32, stage->first_layer,
                 stage->last_layer);
        snprintf(pieces, sizeof(pieces), "%" PRIu32 "/%" PRIu32, stage->pieces_done,
                 stage->pieces_total);
        printf("  %-14s  layers %-9s  pieces %9s  %10s of %10s\n",
               plain_text(stage->node, name, sizeof(name)), layers, pieces,
               size_text(stage->bytes_done, done), size_text(stage->bytes_total, total));
    }
}

static void print_text(const struct fl_client_event *event)
{
    char version[CELL_SIZE];
    printf("coordinator %s, up ", plain_text(event->as.status.version, version, sizeof(version)));
    print_uptime(event->as.status.uptime_s);
    printf("\n\n");
    print_nodes(event);
    if (event->as.status.loaded_count == 0) {
        printf("\nno model is loaded\n");
    }
    for (uint32_t i = 0; i < event->as.status.loaded_count; i++) {
        print_loaded(&event->as.status.loaded[i]);
    }
}

/* ---- command ---- */

static fl_status run(const struct exchange_config *config)
{
    const struct fl_client_request request = {.kind = FL_REQUEST_STATUS};
    struct exchange exchange;
    struct fl_client_event event;
    fl_status status = exchange_open(&exchange, config);
    if (status == FL_OK) {
        interrupt_watch();
        status = exchange_ask(&exchange, &request, FL_EVENT_STATUS, &event);
    }
    if (status == FL_OK && config->json) {
        print_json(&event);
    } else if (status == FL_OK) {
        print_text(&event);
    }
    exchange_close(&exchange);
    return status;
}

int command_status(int argc, char **argv)
{
    struct exchange_config config = {0};
    const struct option options[] = {EXCHANGE_OPTIONS(&config)};
    const struct command_line line = {
        .command = "status",
        .usage = "[OPTION..]",
        .about = "Shows the nodes, what they hold, and what the loaded models are doing.",
        .examples = "  firstlight status\n  firstlight status --json --addr 192.168.1.10:7411\n",
        .options = options,
        .option_count = sizeof(options) / sizeof(options[0]),
    };
    const fl_status status = options_parse(&line, argc, argv);
    if (status != FL_OK) {
        return status == FL_END ? EXIT_SUCCESS : EXIT_CALLED_WRONGLY;
    }
    return exchange_exit(run(&config));
}
