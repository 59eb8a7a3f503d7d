#include "coordinator/file_server.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/file_read.h"
#include "proto/checksum.h"

#define RETRY_NS (1 * FL_NS_PER_MS)

enum transfer_state { TRANSFER_WAITING, TRANSFER_READING, TRANSFER_UNSENT, TRANSFER_SENDING };

struct transfer {
    struct job job;
    struct transfer *next; /* in order of arrival */
    struct file_server *server;
    enum transfer_state state;
    transport_link link; /* 0: the node is gone */
    uint64_t transfer_id;
    uint64_t cookie;
    struct catalog_model *model; /* held */
    uint32_t file;
    uint32_t size; /* of all ranges together */
    fl_status status;
    char text[FL_ERROR_TEXT_MAX];
    uint64_t checksum;
    unsigned char *data; /* [size], from reading to sent */
    uint32_t range_count;
    struct fl_range ranges[];
};

struct file_server {
    struct file_server_config config;
    struct transfer *first;
    uint64_t next_cookie;
    uint64_t buffered; /* bytes of transfers past WAITING */
};

fl_status file_server_open(const struct file_server_config *config, struct file_server **out)
{
    struct file_server *server = calloc(1, sizeof(*server));
    if (server == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "file server: no memory");
    }
    server->config = *config;
    server->next_cookie = 1;
    *out = server;
    return FL_OK;
}

static void free_transfer(struct file_server *server, struct transfer *transfer)
{
    for (struct transfer **at = &server->first; *at != NULL; at = &(*at)->next) {
        if (*at == transfer) {
            *at = transfer->next;
            break;
        }
    }
    if (transfer->state != TRANSFER_WAITING) {
        server->buffered -= transfer->size;
    }
    struct roster_node *node = roster_by_link(server->config.roster, transfer->link);
    if (transfer->link != 0 && node != NULL && node->fetch_count > 0) {
        node->fetch_count--;
    }
    catalog_release(server->config.catalog, transfer->model);
    free(transfer->data);
    free(transfer);
}

void file_server_close(struct file_server *server)
{
    if (server == NULL) {
        return;
    }
    while (server->first != NULL) {
        free_transfer(server, server->first);
    }
    free(server);
}

/* ---- on the worker ---- */

static fl_status read_range(int fd, const char *path, const struct fl_range *range,
                            unsigned char *out)
{
    if (fl_file_read(fd, out, range->size, range->offset) < range->size) {
        return FL_FAIL(FL_IO, "%s: reading %" PRIu32 " bytes at %" PRIu64 " failed: %s", path,
                       range->size, range->offset,
                       errno != 0 ? strerror(errno) : "the file has become shorter");
    }
    return FL_OK;
}

static fl_status read_ranges(struct transfer *transfer)
{
    const char *path = gguf_file_path(model_gguf(transfer->model->model), transfer->file);
    transfer->data = malloc(transfer->size);
    if (transfer->data == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a fetch of %" PRIu32 " bytes", transfer->size);
    }
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return FL_FAIL(FL_IO, "%s cannot be opened: %s", path, strerror(errno));
    }
    fl_status status = FL_OK;
    unsigned char *out = transfer->data;
    for (uint32_t i = 0; status == FL_OK && i < transfer->range_count; i++) {
        status = read_range(fd, path, &transfer->ranges[i], out);
        out += transfer->ranges[i].size;
    }
    /* Nodes keep what they fetch under this model's identity: bytes of another file may not pass. */
    if (status == FL_OK) {
        status = gguf_file_check(model_gguf(transfer->model->model), transfer->file, fd);
    }
    close(fd);
    if (status == FL_OK) {
        transfer->checksum = fl_checksum64(transfer->data, transfer->size);
    }
    return status;
}

static void run_transfer(struct job *job)
{
    struct transfer *transfer = (struct transfer *)job;
    transfer->status = read_ranges(transfer);
    if (transfer->status != FL_OK) {
        snprintf(transfer->text, sizeof(transfer->text), "%s", fl_last_error());
    }
}

/* ---- on the owner ---- */

/* An answer that is only a sentence; small enough to be copied by the wire. */
static fl_status answer_failure(struct file_server *server, struct roster_node *node,
                                const struct transfer *transfer)
{
    const size_t size = strlen(transfer->text);
    const struct fl_fetch_header header = {.transfer_id = transfer->transfer_id,
                                           .status = (uint32_t)transfer->status,
                                           .size = (uint32_t)size,
                                           .checksum = fl_checksum64(transfer->text, size)};
    unsigned char packed[FL_FETCH_HEADER_SIZE];
    fl_fetch_header_pack(&header, packed);
    return roster_send_data(server->config.roster, node, FL_WIRE_FETCH_DATA, packed, sizeof(packed),
                            transfer->text, size, 0);
}

static void send_transfer(struct file_server *server, struct transfer *transfer)
{
    struct roster_node *node = roster_by_link(server->config.roster, transfer->link);
    if (transfer->link == 0 || node == NULL) {
        free_transfer(server, transfer);
        return;
    }
    if (transfer->status != FL_OK) {
        if (answer_failure(server, node, transfer) != FL_AGAIN) {
            free_transfer(server, transfer);
        }
        return;
    }
    const struct fl_fetch_header header = {.transfer_id = transfer->transfer_id,
                                           .status = FL_OK,
                                           .size = transfer->size,
                                           .checksum = transfer->checksum};
    unsigned char packed[FL_FETCH_HEADER_SIZE];
    fl_fetch_header_pack(&header, packed);
    /* Before the call: sent() may come from inside it. */
    transfer->state = TRANSFER_SENDING;
    transfer->cookie = server->next_cookie++;
    const fl_status status =
        roster_send_data(server->config.roster, node, FL_WIRE_FETCH_DATA, packed, sizeof(packed),
                         transfer->data, transfer->size, transfer->cookie);
    if (status == FL_AGAIN) {
        transfer->state = TRANSFER_UNSENT;
    } else if (status != FL_OK) {
        free_transfer(server, transfer);
    }
}

static void done_transfer(struct job *job, void *ctx)
{
    (void)ctx;
    struct transfer *transfer = (struct transfer *)job;
    transfer->state = TRANSFER_UNSENT;
    if (transfer->data == NULL && transfer->status == FL_OK) {
        transfer->link = 0; /* the worker stopped before it came to this */
    }
    send_transfer(transfer->server, transfer);
}

/* Starts reading in order of arrival, as far as the buffers go. */
static void start_reading(struct file_server *server)
{
    struct transfer *next;
    for (struct transfer *transfer = server->first; transfer != NULL; transfer = next) {
        next = transfer->next;
        if (transfer->state != TRANSFER_WAITING) {
            continue;
        }
        if (server->buffered + transfer->size > FILE_SERVER_BUFFER_MAX ||
            worker_submit(server->config.worker, &transfer->job) != FL_OK) {
            return;
        }
        transfer->state = TRANSFER_READING;
        server->buffered += transfer->size;
    }
}

static fl_status check_fetch(struct file_server *server, const struct roster_node *node,
                             const struct fl_fetch *fetch, struct catalog_model **out_model,
                             uint32_t *out_size)
{
    if (node->fetch_count >= FILE_SERVER_NODE_MAX) {
        return FL_FAIL(FL_BUSY, "node %s has %d fetches under way, the limit", node->name,
                       FILE_SERVER_NODE_MAX);
    }
    struct catalog_model *model =
        catalog_find(server->config.catalog, fetch->model, fetch->identity);
    if (model == NULL) {
        return FL_FAIL(FL_NOT_FOUND, "model '%s' as node %s's plan knows it is not loaded here",
                       fetch->model, node->name);
    }
    const struct gguf *gguf = model_gguf(model->model);
    if (fetch->file >= gguf_file_count(gguf)) {
        return FL_FAIL(FL_INVALID,
                       "model '%s' has %" PRIu32 " files, file %" PRIu32 " was asked for",
                       fetch->model, gguf_file_count(gguf), fetch->file);
    }
    const uint64_t file_size = gguf_file_size(gguf, fetch->file);
    uint64_t total = 0;
    for (uint32_t i = 0; i < fetch->range_count; i++) {
        const struct fl_range *range = &fetch->ranges[i];
        if (range->offset > file_size || range->size > file_size - range->offset) {
            return FL_FAIL(FL_INVALID,
                           "model '%s': %" PRIu32 " bytes at %" PRIu64
                           " are beyond its end at %" PRIu64,
                           fetch->model, range->size, range->offset, file_size);
        }
        total += range->size;
    }
    if (total == 0 || total > FL_FETCH_SIZE_MAX || fetch->range_count > FL_FETCH_RANGE_MAX) {
        return FL_FAIL(FL_INVALID, "a fetch of %" PRIu64 " bytes is outside 1 .. %d", total,
                       FL_FETCH_SIZE_MAX);
    }
    *out_model = model;
    *out_size = (uint32_t)total;
    return FL_OK;
}

void file_server_fetch(struct file_server *server, struct roster_node *node,
                       const struct fl_fetch *fetch)
{
    struct catalog_model *model = NULL;
    uint32_t size = 0;
    fl_status status = check_fetch(server, node, fetch, &model, &size);
    /* A refusal waits for the wire like any answer, but a node that heaps them up is let go. */
    const uint32_t range_count = status == FL_OK ? fetch->range_count : 0;
    const size_t ranges_size = range_count * sizeof(fetch->ranges[0]);
    struct transfer *transfer = node->fetch_count < 2 * FILE_SERVER_NODE_MAX
                                    ? calloc(1, sizeof(*transfer) + ranges_size)
                                    : NULL;
    if (transfer == NULL) {
        roster_hang_up(server->config.roster, node); /* it would wait for ever for an answer */
        return;
    }
    *transfer = (struct transfer){.job = {.run = run_transfer, .done = done_transfer},
                                  .server = server,
                                  .state = status == FL_OK ? TRANSFER_WAITING : TRANSFER_UNSENT,
                                  .status = status,
                                  .link = node->link,
                                  .transfer_id = fetch->transfer_id,
                                  .model = model,
                                  .file = fetch->file,
                                  .size = size,
                                  .range_count = range_count};
    if (status == FL_OK) {
        memcpy(transfer->ranges, fetch->ranges, ranges_size);
    } else {
        snprintf(transfer->text, sizeof(transfer->text), "%s", fl_last_error());
    }
    catalog_keep(model);
    node->fetch_count++;
    struct transfer **at = &server->first;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = transfer;
    start_reading(server);
}

void file_server_sent(struct file_server *server, uint64_t cookie)
{
    for (struct transfer *transfer = server->first; transfer != NULL; transfer = transfer->next) {
        if (transfer->state == TRANSFER_SENDING && transfer->cookie == cookie) {
            free_transfer(server, transfer);
            start_reading(server);
            return;
        }
    }
}

void file_server_link_down(struct file_server *server, transport_link link)
{
    struct transfer *next;
    for (struct transfer *transfer = server->first; transfer != NULL; transfer = next) {
        next = transfer->next;
        if (transfer->link != link) {
            continue;
        }
        transfer->link = 0;
        if (transfer->state != TRANSFER_READING) {
            free_transfer(server, transfer);
        }
    }
}

uint64_t file_server_poll(struct file_server *server, uint64_t now_ns)
{
    uint64_t next_ns = UINT64_MAX;
    struct transfer *next;
    for (struct transfer *transfer = server->first; transfer != NULL; transfer = next) {
        next = transfer->next;
        if (transfer->state == TRANSFER_UNSENT) {
            send_transfer(server, transfer);
        }
    }
    start_reading(server);
    for (struct transfer *transfer = server->first; transfer != NULL; transfer = transfer->next) {
        next_ns = transfer->state == TRANSFER_UNSENT ? now_ns + RETRY_NS : next_ns;
    }
    return next_ns;
}

uint32_t file_server_count(const struct file_server *server)
{
    uint32_t count = 0;
    for (const struct transfer *transfer = server->first; transfer != NULL;
         transfer = transfer->next) {
        count++;
    }
    return count;
}
