/* waterfall.h - a timeline as text for a terminal: where the time to the first token went.
 *
 *   m: cold, first token after 1934.2 ms (predicted 1800.0 ms), 16 prompt tokens, request 7
 *   exposed           rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrPPPPPPP          1934.2 ms
 *   box-1   disk      rrrrrrrrrrrrrrrrr                              88 %   150.1 MiB
 *           compute             P  P  P   P                          12 %
 *
 * One line a lane, one letter a column: the phase that took most of that slice
 * of time, so that it reads without colour.  Below it: the exposed chain's
 * largest parts, what each phase took, and what was found on each node.
 *
 * Thread:  any.
 * Memory:  none.
 */
#ifndef PROTO_CLIENT_WATERFALL_H
#define PROTO_CLIENT_WATERFALL_H

#include <stdio.h>

#include "proto/client_message.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { WATERFALL_WIDTH = 100 }; /* columns of a line, at most */

void waterfall_print(const struct fl_timeline *timeline, FILE *stream);

#ifdef __cplusplus
}
#endif
#endif
