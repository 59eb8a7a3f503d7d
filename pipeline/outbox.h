/* outbox.h - what a stage has finished and nobody has taken yet.
 *
 * Two rings: slots of finished runs, whose segments go to the next stage one by
 * one, and sampled tokens of the last stage.  A slot comes free when all its
 * segments were taken and returned.
 *
 * Thread:  owner (the stage's loop).
 * Memory:  open() takes outbox_memory() bytes, on the host.
 * Shapes:  D model width.
 */
#ifndef PIPELINE_OUTBOX_H
#define PIPELINE_OUTBOX_H

#include <stdint.h>

#include "pipeline/run.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { OUTBOX_SLOTS = 4 };

struct outbox;

/* slot_rows 0: no slots (the last stage); token_count 0: no tokens (any other). */
struct outbox_config {
    uint32_t slot_rows;
    uint32_t width;
    uint32_t token_count;
};

uint64_t outbox_memory(const struct outbox_config *config);
FL_MUST_CHECK fl_status outbox_open(const struct outbox_config *config, struct outbox **out);
void outbox_close(struct outbox *outbox);

/* A free slot's rows [slot_rows, D] to be filled, or NULL; then push the run's segments. */
float *outbox_slot(struct outbox *outbox);
void outbox_push(struct outbox *outbox, const struct run *run);

/* The next segment that is not dead; *rows and *slot are its numbers and the slot to return.
 * FL_AGAIN when there is none. */
FL_MUST_CHECK fl_status outbox_take(struct outbox *outbox, struct run_segment *segment,
                                    const float **rows, uint32_t *slot);
void outbox_return(struct outbox *outbox, uint32_t slot);

/* Segments of the request that were not taken yet are dead from now on. */
void outbox_kill(struct outbox *outbox, uint32_t request);

/* Room for tokens; a token to fill in, its arrays with FL_TOP_MAX entries. */
uint32_t outbox_token_room(const struct outbox *outbox);
struct fl_token *outbox_add_token(struct outbox *outbox);

/* The oldest token, valid until the next call; FL_AGAIN when there is none. */
FL_MUST_CHECK fl_status outbox_take_token(struct outbox *outbox, struct fl_token *out);

#ifdef __cplusplus
}
#endif
#endif
