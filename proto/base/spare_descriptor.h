/* spare_descriptor.h - how a listener says no when no file descriptor is left.
 *
 * A visitor that cannot be accepted stays in the listener's queue, and a loop
 * that waits for visitors would turn without end.  One descriptor kept aside is
 * given up, the visitor accepted and hung up on, and the descriptor taken back.
 *
 * Thread:  owner.
 */
#ifndef PROTO_BASE_SPARE_DESCRIPTOR_H
#define PROTO_BASE_SPARE_DESCRIPTOR_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A descriptor to keep aside, or -1. */
int fl_spare_descriptor_open(void);

/* After accept() has failed with `error`: hangs up on the visitor when that was for want of
 * descriptors; true when it did. */
bool fl_spare_descriptor_refuse(int *spare, int listener, int error);

void fl_spare_descriptor_close(int *spare);

#ifdef __cplusplus
}
#endif
#endif
