/* stage_link.h - the links of a plan's stage to the stage before and the stage after.
 *
 * A node opens a link to the node of the stage that follows and says LINK on it;
 * the stage before does the same to us.  A link is to a node and stays when
 * plans come and go.  Whoever receives activations gives credit for as many rows
 * as it has room for; what has no credit yet waits in the plan's queue.
 *
 *   LINK, activations ──►  this stage  ──► LINK, activations
 *                CREDIT ◄──            ◄── CREDIT
 *   (stage 0)     TOKEN ──►            ──► TOKEN   (the last stage)
 *
 * Thread:  owner (the wire thread).
 * Memory:  none of its own; buffers of activations are compute's, and go back when sent.
 */
#ifndef NODE_STAGE_LINK_H
#define NODE_STAGE_LINK_H

#include "node/courier_state.h"

/* The link to that stage's node: one we have, or a new one.  0: it cannot be had, said why. */
transport_link stage_link_open(struct courier *courier, const struct fl_stage *stage);

/* LINKs that came before their plan: take those that name this one. */
void stage_link_take_held(struct courier *courier, struct courier_plan *entry);
/* Forget those whose plan never came; the links themselves may serve others. */
void stage_link_expire_held(struct courier *courier, uint64_t now_ns);

/* What came over a link that is not the coordinator's. */
void stage_link_message(struct courier *courier, transport_link link,
                        const struct fl_cluster_message *message);
void stage_link_activations(struct courier *courier, transport_link link, const void *header_bytes,
                            size_t header_size, const void *data, size_t size);

/* LINK to the stage after, CREDIT to the stage before, as soon as they can be said. */
void stage_link_greet(struct courier *courier, struct courier_plan *entry);

/* Send queued activations as far as the credit goes. */
void stage_link_send(struct courier *courier, struct courier_plan *entry);
/* A sampled token on its way to stage 0: sent, or kept while the link is not up yet or is full.
 * False when as many are kept as there may be; its lists are not passed. */
bool stage_link_pass_token(struct courier *courier, struct courier_plan *entry,
                           const struct fl_token *token);
/* Send kept tokens, as far as the link takes them. */
void stage_link_send_tokens(struct courier *courier, struct courier_plan *entry);
/* The transport is done with the data of a message that had this cookie. */
void stage_link_sent(struct courier *courier, uint64_t cookie);

/* Give back what waits for credit: nobody will take it any more. */
void stage_link_return_queue(struct courier *courier, struct courier_plan *entry);

/* A link is over: the plans that used it are broken here. */
void stage_link_down(struct courier *courier, transport_link link, const char *text);

#endif
