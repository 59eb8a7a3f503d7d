#include "pipeline/inbox.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct inbox {
    uint32_t capacity;
    uint32_t width;
    uint32_t allowed; /* rows the sender may still send */
    uint32_t credit;  /* rows that came free and were not yet announced */
    uint32_t first;   /* list of waiting rows */
    uint32_t last;
    uint32_t free;          /* list of unused rows, by `next` */
    struct inbox_row *rows; /* [capacity] */
    float *data;            /* [capacity, D] */
};

uint64_t inbox_memory(uint32_t capacity, uint32_t width)
{
    return sizeof(struct inbox) +
           (uint64_t)capacity * (sizeof(struct inbox_row) + width * sizeof(float));
}

fl_status inbox_open(uint32_t capacity, uint32_t width, struct inbox **out)
{
    struct inbox *inbox = calloc(1, sizeof(*inbox));
    if (inbox == NULL) {
        goto fail;
    }
    *inbox = (struct inbox){
        .capacity = capacity,
        .width = width,
        .allowed = capacity,
        .first = INBOX_NONE,
        .last = INBOX_NONE,
        .rows = calloc(capacity, sizeof(*inbox->rows)),
        .data = calloc(capacity, width * sizeof(*inbox->data)),
    };
    if (inbox->rows == NULL || inbox->data == NULL) {
        goto fail;
    }
    for (uint32_t i = 0; i < capacity; i++) {
        inbox->rows[i].next = i + 1 < capacity ? i + 1 : INBOX_NONE;
    }
    *out = inbox;
    return FL_OK;

fail:
    inbox_close(inbox);
    return FL_FAIL(FL_NO_MEMORY,
                   "no memory for an inbox of %" PRIu32 " rows: %" PRIu64 " bytes are wanted",
                   capacity, inbox_memory(capacity, width));
}

void inbox_close(struct inbox *inbox)
{
    if (inbox != NULL) {
        free(inbox->data);
        free(inbox->rows);
        free(inbox);
    }
}

fl_status inbox_charge(struct inbox *inbox, uint32_t row_count)
{
    if (row_count > inbox->allowed) {
        return FL_FAIL(FL_PROTOCOL,
                       "previous stage sent %" PRIu32 " rows; it had credit for %" PRIu32,
                       row_count, inbox->allowed);
    }
    inbox->allowed -= row_count;
    return FL_OK;
}

void inbox_put(struct inbox *inbox, const struct fl_activation_header *header, const float *rows,
               uint64_t arrived_ns)
{
    for (uint32_t i = 0; i < header->rows; i++) {
        const uint32_t index = inbox->free;
        FL_ASSERT(index != INBOX_NONE); /* charged, so there is room */
        struct inbox_row *row = &inbox->rows[index];
        inbox->free = row->next;
        *row = (struct inbox_row){
            .request_id = header->request_id,
            .arrived_ns = arrived_ns,
            .position = header->position + i,
            .next = INBOX_NONE,
            .previous = inbox->last,
        };
        if (inbox->last == INBOX_NONE) {
            inbox->first = index;
        } else {
            inbox->rows[inbox->last].next = index;
        }
        inbox->last = index;
        memcpy(inbox->data + (size_t)index * inbox->width, rows + (size_t)i * inbox->width,
               inbox->width * sizeof(*rows));
    }
}

void inbox_refuse(struct inbox *inbox, uint32_t row_count)
{
    inbox->credit += row_count;
}

uint32_t inbox_first(const struct inbox *inbox)
{
    return inbox->first;
}

const struct inbox_row *inbox_row(const struct inbox *inbox, uint32_t row)
{
    FL_ASSERT(row < inbox->capacity);
    return &inbox->rows[row];
}

const float *inbox_data(const struct inbox *inbox, uint32_t row)
{
    FL_ASSERT(row < inbox->capacity);
    return inbox->data + (size_t)row * inbox->width;
}

void inbox_remove(struct inbox *inbox, uint32_t row)
{
    FL_ASSERT(row < inbox->capacity);
    struct inbox_row *removed = &inbox->rows[row];
    if (removed->previous == INBOX_NONE) {
        inbox->first = removed->next;
    } else {
        inbox->rows[removed->previous].next = removed->next;
    }
    if (removed->next == INBOX_NONE) {
        inbox->last = removed->previous;
    } else {
        inbox->rows[removed->next].previous = removed->previous;
    }
    removed->next = inbox->free;
    inbox->free = row;
    inbox->credit++;
}

uint32_t inbox_take_credit(struct inbox *inbox)
{
    const uint32_t credit = inbox->credit;
    inbox->credit = 0;
    inbox->allowed += credit;
    FL_ASSERT(inbox->allowed <= inbox->capacity);
    return credit;
}
