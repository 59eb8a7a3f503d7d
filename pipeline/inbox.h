/* inbox.h - rows of activations that have arrived and wait to enter a run.
 *
 * A row is kept by itself, in order of arrival, because rows of requests that
 * are not admitted yet wait among rows that can go.  The sender was promised
 * `capacity` rows at first and gets back what take_credit() says: a row's place
 * comes free when it enters a run or is dropped.
 *
 * Thread:  owner (the stage's loop).
 * Memory:  open() takes inbox_memory() bytes, on the host.
 * Shapes:  D model width.
 */
#ifndef PIPELINE_INBOX_H
#define PIPELINE_INBOX_H

#include <stdint.h>

#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

#define INBOX_NONE UINT32_MAX

struct inbox;

struct inbox_row {
    uint64_t request_id;
    uint64_t arrived_ns;
    uint32_t position;
    uint32_t next; /* row that arrived after this one, or INBOX_NONE */
    uint32_t previous;
};

uint64_t inbox_memory(uint32_t capacity, uint32_t width);
FL_MUST_CHECK fl_status inbox_open(uint32_t capacity, uint32_t width, struct inbox **out);
void inbox_close(struct inbox *inbox);

/* Account for rows that arrive: FL_PROTOCOL when the sender has no credit for them. */
FL_MUST_CHECK fl_status inbox_charge(struct inbox *inbox, uint32_t row_count);

/* Keep rows [header->rows, D] that were charged, copied; or let them go at once. */
void inbox_put(struct inbox *inbox, const struct fl_activation_header *header, const float *rows,
               uint64_t arrived_ns);
void inbox_refuse(struct inbox *inbox, uint32_t row_count);

/* The oldest row, or INBOX_NONE. */
uint32_t inbox_first(const struct inbox *inbox);
const struct inbox_row *inbox_row(const struct inbox *inbox, uint32_t row);
const float *inbox_data(const struct inbox *inbox, uint32_t row); /* [D] */
void inbox_remove(struct inbox *inbox, uint32_t row);

/* Rows the sender may send beyond what it was told before. */
uint32_t inbox_take_credit(struct inbox *inbox);

#ifdef __cplusplus
}
#endif
#endif
