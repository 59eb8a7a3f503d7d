/* summary.h - what the coordinator shows of itself.
 *
 * Thread:  owner (the main loop).
 */
#ifndef COORDINATOR_SUMMARY_H
#define COORDINATOR_SUMMARY_H

#include "coordinator/state.h"

/* Answer a STATUS request. */
void summary_send_status(struct coordinator *coordinator, const struct request *request);

/* Answer a MODELS request from the folder's files. */
void summary_send_models(struct coordinator *coordinator, const struct request *request,
                         const struct model_file *files, uint32_t count);

#endif
