/* device.h - where a stage's numbers live and are computed.
 *
 * Memory, copies, events and a kernel table behind one struct, so that a stage
 * does not know whether it runs on the host or, later, on a GPU.  The host
 * implementation (device_host.c) owns a cpu_pool and hands it to the kernels as
 * their stream; copies are memcpy and events are always done.
 *
 * Thread:  owner (the compute thread), except copy_in() to memory no kernel uses
 *          yet, which the loader thread may call.
 * Memory:  alloc() is for start-up and plans, never for steps.
 */
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

struct device {
    const struct device_ops *ops;
    const struct kernel_ops *kernels;
    void *stream;     /* the kernels' first argument */
    uint32_t threads; /* of the stream; 1 when that means nothing */
};

/* What memory is for: weights are written whole and then read over and over, which large pages make
 * faster by a third and more; of a buffer only the touched part may cost anything. */
enum device_memory { DEVICE_MEMORY_WEIGHTS, DEVICE_MEMORY_BUFFER };

struct device_ops {
    const char *name; /* "host" */
    /* Aligned to 64 bytes and not zeroed; a buffer's untouched pages cost nothing.  NULL when there is
     * no memory. */
    void *(*alloc)(struct device *device, enum device_memory use, size_t size);
    void (*free)(struct device *device, void *memory, size_t size);
    void (*copy_in)(struct device *device, void *to, const void *from_host, size_t size);
    void (*copy_out)(struct device *device, void *to_host, const void *from, size_t size);
    /* FL_AGAIN while work queued before this call is under way; FL_DEVICE when it failed. */
    fl_status (*poll)(struct device *device);
    void (*close)(struct device *device);
};

struct cpu_affinity;
struct device_host_config {
    uint32_t threads;                    /* 1 or more */
    const struct cpu_affinity *affinity; /* of the threads; NULL: none.  Borrowed for the call */
    const char *isa;                     /* for kernel_ops_select() */
};
FL_MUST_CHECK fl_status device_host_open(const struct device_host_config *config,
                                         struct device **out);

#ifdef __cplusplus
}
#endif
#endif
