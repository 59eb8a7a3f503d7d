/* trace_file.h - a timeline as a trace for ui.perfetto.dev: a process a node, a thread a lane.
 *
 * The "JSON Array Format" of Chrome's trace viewer, which Perfetto opens: complete
 * events ("X") in microseconds from the earliest span on.  Spans of one lane that
 * overlap are drawn on rows of their own ("disk", "disk 2"), because events of a
 * thread must nest.  Process 0 is the exposed chain.
 *
 * Source:  "Trace Event Format", sections "JSON Array Format" and "Complete Events".
 * Thread:  any.
 * Memory:  none.
 */
#ifndef PROTO_CLIENT_TRACE_FILE_H
#define PROTO_CLIENT_TRACE_FILE_H

#include <stdio.h>

#include "proto/client_message.h"

#ifdef __cplusplus
extern "C" {
#endif

void trace_file_write(const struct fl_timeline *timeline, FILE *stream);

#ifdef __cplusplus
}
#endif
#endif
