/* exposed_phases.h - a request's time by phase: what was waited for, what ran beside it.
 *
 * Exposed times are those of the chain's segments, so they sum to the TTFT.
 * Hidden time is the busy time of the request's spans of a phase, less what of the
 * phase is exposed: waiting for a medium or a wire is exposed and not busy.
 *
 * Thread:  any; no I/O, no allocation.
 * Units:   nanoseconds, bytes.
 */
#ifndef COORDINATOR_EXPOSED_PHASES_H
#define COORDINATOR_EXPOSED_PHASES_H

#include <stdint.h>

#include "coordinator/exposed_chain.h"
#include "proto/span.h"

#ifdef __cplusplus
extern "C" {
#endif

struct exposed_phase {
    uint64_t exposed_ns; /* on the chain */
    uint64_t hidden_ns;  /* busy beside it, before the first token */
    uint64_t bytes;
};

/* Sums by phase; `segments` is what exposed_chain_find() gave for `config`, which it sorted. */
void exposed_phases_sum(const struct exposed_chain_config *config,
                        const struct exposed_segment *segments, uint32_t count,
                        struct exposed_phase out[FL_PHASE_COUNT]);

#ifdef __cplusplus
}
#endif
#endif
