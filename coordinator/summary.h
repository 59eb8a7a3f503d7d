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

/* Answer a TIMELINE request.  FL_NO_MEMORY with a sentence. */
FL_MUST_CHECK fl_status summary_send_timeline(struct coordinator *coordinator,
                                              const struct request *request,
                                              const struct timeline *timeline);

#endif
