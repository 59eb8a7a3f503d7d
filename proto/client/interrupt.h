/* interrupt.h - Ctrl-C: the first one asks, the second one ends the program.  SIGTERM asks for more:
 * to leave, whatever is going on.
 *
 * Thread:  the main thread.
 */
#ifndef PROTO_CLIENT_INTERRUPT_H
#define PROTO_CLIENT_INTERRUPT_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { EXIT_INTERRUPTED = 130 };

/* From now on the first SIGINT or SIGTERM is only remembered. */
void interrupt_watch(void);

bool interrupt_seen(void);

/* It was SIGTERM. */
bool interrupt_is_final(void);

/* Forget it, unless it was final: the next one is a first one again. */
void interrupt_clear(void);

#ifdef __cplusplus
}
#endif
#endif
