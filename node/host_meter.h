/* host_meter.h - what the host says of this process and of itself.
 *
 * For the start record of a plan: bytes that came from the medium, so that a
 * claim about the page cache can be checked, and how fast the processor ran.  A
 * struct of functions, so that a simulated node has none.
 *
 * Thread:  any.
 * Memory:  none.
 */
#ifndef NODE_HOST_METER_H
#define NODE_HOST_METER_H

#include <stdint.h>

struct host_meter {
    /* Bytes this process had read from storage so far, as the kernel counts them; 0: not known. */
    uint64_t (*medium_bytes)(void);
    /* Of the fastest processor now; 0: not known. */
    uint32_t (*mhz)(void);
};

/* This machine's, from /proc and /sys. */
struct host_meter host_meter_system(void);

/* When this process began, on CLOCK_MONOTONIC, to a hundredth of a second; 0: not known. */
uint64_t host_meter_exec_ns(void);

#endif
