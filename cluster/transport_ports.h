/* transport_ports.h - the range of ports over which a process takes in data.
 *
 * A process of a pool needs two of them: others connect to one, and UCX opens
 * another that nobody is told of.  A firewall between boxes has to let the
 * range through (docs/your-own-boxes.md).
 */
#ifndef CLUSTER_TRANSPORT_PORTS_H
#define CLUSTER_TRANSPORT_PORTS_H

#include <stdint.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TRANSPORT_PORTS_MIN = 2, /* ports in a range */
    TRANSPORT_PORTS_TEXT_MAX = 16,
};

struct transport_ports {
    uint16_t first, last; /* both belong to it; 0 and 0: any port */
};

/* Reads "FIRST-LAST".  FL_INVALID with a sentence that begins with `name`, the flag or field. */
FL_MUST_CHECK fl_status transport_ports_parse(const char *text, const char *name,
                                              struct transport_ports *out);

/* FL_BUSY with a sentence when less than a process needs are free: UCX would try for ever. */
FL_MUST_CHECK fl_status transport_ports_check(const struct transport_ports *ports);

void transport_ports_text(const struct transport_ports *ports, char out[TRANSPORT_PORTS_TEXT_MAX]);

#ifdef __cplusplus
}
#endif
#endif
