/* Any bytes as a configuration: refused with one line, or taken with every value in its range. */
#include "cluster/topology.h"

#include <string.h>

#include "proto/base/log.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct topology topology;
    fl_log_init("", FL_LOG_ERROR);
    const fl_status status = topology_parse((const char *)data, size, "f", &topology);
    if (status != FL_OK) {
        FL_ASSERT(status == FL_MALFORMED || status == FL_INVALID || status == FL_TOO_LARGE);
        FL_ASSERT(fl_last_error()[0] != '\0' && strchr(fl_last_error(), '\n') == NULL);
        return 0;
    }
    FL_ASSERT(topology.box_count <= TOPOLOGY_NODE_MAX);
    for (uint32_t i = 0; i < topology.box_count; i++) {
        FL_ASSERT(topology_find(&topology, topology.boxes[i].name) == &topology.boxes[i]);
    }
    FL_ASSERT(topology.coordinator.split_count <= FL_STAGE_COUNT_MAX);
    FL_ASSERT(!topology.coordinator.chunk.given ||
              topology.coordinator.chunk.value <= FL_CHUNK_MAX);
    FL_ASSERT(!topology.node.threads.given || topology.node.threads.value <= 1024);
    return 0;
}
