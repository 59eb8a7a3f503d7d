#include "node/fetch_queue.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/log.h"
#include "proto/checksum.h"

enum { TRY_MAX = 3, TEXT_MAX = 256 };

enum part_state { PART_WANTED, PART_SENT, PART_DONE };

struct slot_part {
    enum part_state state;
    uint32_t tries;
    uint64_t transfer_id;
};

struct slot {
    bool used;
    fl_status status; /* FL_AGAIN until every part is done */
    char text[TEXT_MAX];
    struct fetch_request request;
    struct slot_part parts[FETCH_PART_MAX];
    unsigned char *bytes; /* [FL_FETCH_SIZE_MAX] */
};

struct fetch_queue {
    struct wake *loader_wake;
    struct wake *wire_wake;
    /* The wire thread's copy: a request may be released while its message is packed. */
    struct fl_range ranges[FL_FETCH_RANGE_MAX];

    pthread_mutex_t lock; /* guards what follows */
    uint64_t transfer_last;
    struct slot slots[FETCH_SLOT_COUNT];
};

fl_status fetch_queue_open(struct wake *loader_wake, struct wake *wire_wake,
                           struct fetch_queue **out)
{
    struct fetch_queue *queue = calloc(1, sizeof(*queue));
    unsigned char *bytes = malloc((size_t)FETCH_SLOT_COUNT * FL_FETCH_SIZE_MAX);
    if (queue == NULL || bytes == NULL) {
        free(queue);
        free(bytes);
        return FL_FAIL(FL_NO_MEMORY, "fetch queue of %d bytes: no memory",
                       FETCH_SLOT_COUNT * FL_FETCH_SIZE_MAX);
    }
    queue->loader_wake = loader_wake;
    queue->wire_wake = wire_wake;
    pthread_mutex_init(&queue->lock, NULL);
    for (uint32_t i = 0; i < FETCH_SLOT_COUNT; i++) {
        queue->slots[i].bytes = bytes + (size_t)i * FL_FETCH_SIZE_MAX;
    }
    *out = queue;
    return FL_OK;
}

void fetch_queue_close(struct fetch_queue *queue)
{
    if (queue != NULL) {
        pthread_mutex_destroy(&queue->lock);
        free(queue->slots[0].bytes);
        free(queue);
    }
}

static void request_check(const struct fetch_request *request)
{
    uint32_t size = 0;
    FL_ASSERT(request->part_count >= 1 && request->part_count <= FETCH_PART_MAX);
    for (uint32_t i = 0; i < request->part_count; i++) {
        FL_ASSERT(request->parts[i].offset == size);
        FL_ASSERT(request->parts[i].range_count <= FL_FETCH_RANGE_MAX);
        size += request->parts[i].size;
    }
    FL_ASSERT(size <= FL_FETCH_SIZE_MAX);
}

fl_status fetch_queue_submit(struct fetch_queue *queue, const struct fetch_request *request,
                             uint32_t *out_slot)
{
    request_check(request);
    fl_status status = FL_AGAIN;
    pthread_mutex_lock(&queue->lock);
    for (uint32_t i = 0; i < FETCH_SLOT_COUNT && status == FL_AGAIN; i++) {
        struct slot *slot = &queue->slots[i];
        if (!slot->used) {
            slot->used = true;
            slot->status = FL_AGAIN;
            slot->request = *request;
            memset(slot->parts, 0, sizeof(slot->parts));
            *out_slot = i;
            status = FL_OK;
        }
    }
    pthread_mutex_unlock(&queue->lock);
    if (status == FL_OK) {
        wake_signal(queue->wire_wake);
    }
    return status;
}

fl_status fetch_queue_poll(struct fetch_queue *queue, uint32_t index, const unsigned char **out)
{
    struct slot *slot = &queue->slots[index];
    pthread_mutex_lock(&queue->lock);
    const fl_status status = slot->status;
    pthread_mutex_unlock(&queue->lock);
    if (status == FL_OK) {
        *out = slot->bytes;
        return FL_OK;
    }
    /* The text does not change once the status is final. */
    return status == FL_AGAIN ? FL_AGAIN : FL_FAIL(status, "%s", slot->text);
}

void fetch_queue_release(struct fetch_queue *queue, uint32_t index)
{
    pthread_mutex_lock(&queue->lock);
    FL_ASSERT(queue->slots[index].used);
    queue->slots[index].used = false;
    pthread_mutex_unlock(&queue->lock);
}

/* Locked. */
static bool next_part(struct fetch_queue *queue, struct slot **out_slot, uint32_t *out_part)
{
    for (uint32_t i = 0; i < FETCH_SLOT_COUNT; i++) {
        struct slot *slot = &queue->slots[i];
        for (uint32_t p = 0; slot->used && slot->status == FL_AGAIN && p < slot->request.part_count;
             p++) {
            if (slot->parts[p].state == PART_WANTED) {
                *out_slot = slot;
                *out_part = p;
                return true;
            }
        }
    }
    return false;
}

bool fetch_queue_next(struct fetch_queue *queue, struct fl_fetch *out)
{
    struct slot *slot;
    uint32_t p;
    pthread_mutex_lock(&queue->lock);
    const bool found = next_part(queue, &slot, &p);
    if (found) {
        const struct fl_manifest *manifest = slot->request.manifest;
        const struct fetch_part *part = &slot->request.parts[p];
        slot->parts[p].transfer_id = ++queue->transfer_last;
        *out = (struct fl_fetch){
            .transfer_id = slot->parts[p].transfer_id,
            .file = part->file,
            .range_count = part->range_count,
            .ranges = queue->ranges,
        };
        memcpy(out->model, manifest->name, sizeof(out->model));
        memcpy(out->identity, manifest->identity, sizeof(out->identity));
        memcpy(queue->ranges, part->ranges, part->range_count * sizeof(part->ranges[0]));
    }
    pthread_mutex_unlock(&queue->lock);
    return found;
}

/* Locked: the part with this transfer in `state`. */
static bool find_part(struct fetch_queue *queue, uint64_t transfer_id, enum part_state state,
                      struct slot **out_slot, uint32_t *out_part)
{
    for (uint32_t i = 0; i < FETCH_SLOT_COUNT; i++) {
        struct slot *slot = &queue->slots[i];
        for (uint32_t p = 0; slot->used && p < slot->request.part_count; p++) {
            if (slot->parts[p].transfer_id == transfer_id && slot->parts[p].state == state) {
                *out_slot = slot;
                *out_part = p;
                return true;
            }
        }
    }
    return false;
}

void fetch_queue_sent(struct fetch_queue *queue, uint64_t transfer_id)
{
    struct slot *slot;
    uint32_t p;
    pthread_mutex_lock(&queue->lock);
    if (find_part(queue, transfer_id, PART_WANTED, &slot, &p)) {
        slot->parts[p].state = PART_SENT;
    }
    pthread_mutex_unlock(&queue->lock);
}

/* Locked. */
static fl_status take_answer(struct slot *slot, uint32_t p, const struct fl_fetch_header *header,
                             const void *data, size_t size, bool intact)
{
    const struct fetch_part *part = &slot->request.parts[p];
    if (header->status != FL_OK) {
        slot->status = fl_status_scope((fl_status)header->status) == FL_SCOPE_NONE
                           ? FL_PROTOCOL
                           : (fl_status)header->status;
        snprintf(slot->text, sizeof(slot->text), "fetch of model %s from the coordinator: %.*s",
                 slot->request.manifest->name, (int)(size < 160 ? size : 160), (const char *)data);
        return FL_OK;
    }
    if (size != part->size) {
        slot->status = FL_PROTOCOL;
        snprintf(slot->text, sizeof(slot->text),
                 "fetch of model %s: the coordinator sent %zu bytes, want %" PRIu32,
                 slot->request.manifest->name, size, part->size);
        return FL_PROTOCOL;
    }
    if (!intact) {
        slot->parts[p].state = PART_WANTED;
        if (++slot->parts[p].tries == TRY_MAX) {
            slot->status = FL_CORRUPT;
            snprintf(slot->text, sizeof(slot->text),
                     "fetch of model %s: %d answers in a row had a wrong checksum",
                     slot->request.manifest->name, TRY_MAX);
        }
        return FL_OK;
    }
    memcpy(slot->bytes + part->offset, data, size);
    slot->parts[p].state = PART_DONE;
    uint32_t done = 0;
    for (uint32_t i = 0; i < slot->request.part_count; i++) {
        done += slot->parts[i].state == PART_DONE;
    }
    if (done == slot->request.part_count && slot->status == FL_AGAIN) {
        slot->status = FL_OK;
    }
    return FL_OK;
}

fl_status fetch_queue_deliver(struct fetch_queue *queue, const struct fl_fetch_header *header,
                              const void *data, size_t size)
{
    if (size != header->size || size > FL_FETCH_SIZE_MAX) {
        return FL_FAIL(FL_PROTOCOL, "fetch answer of %zu bytes, its header says %" PRIu32, size,
                       header->size);
    }
    const bool intact = header->status != FL_OK || fl_checksum64(data, size) == header->checksum;
    if (!intact) {
        fl_log(FL_LOG_WARN, "fetch answer of %zu bytes: wrong checksum, asked for again", size);
    }
    fl_status status = FL_OK;
    struct slot *slot = NULL;
    uint32_t p;
    pthread_mutex_lock(&queue->lock);
    if (find_part(queue, header->transfer_id, PART_SENT, &slot, &p)) {
        status = take_answer(slot, p, header, data, size, intact);
    }
    pthread_mutex_unlock(&queue->lock);
    if (slot != NULL) {
        wake_signal(queue->loader_wake);
    }
    if (status != FL_OK) {
        return FL_FAIL(status, "fetch answer of %zu bytes, another size was asked for", size);
    }
    return FL_OK;
}

void fetch_queue_reset(struct fetch_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    for (uint32_t i = 0; i < FETCH_SLOT_COUNT; i++) {
        struct slot *slot = &queue->slots[i];
        if (slot->used && slot->status == FL_AGAIN) {
            slot->status = FL_LINK_LOST;
            snprintf(slot->text, sizeof(slot->text), "fetch of model %s: the coordinator is gone",
                     slot->request.manifest->name);
        }
    }
    pthread_mutex_unlock(&queue->lock);
    wake_signal(queue->loader_wake);
}
