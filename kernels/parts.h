/* parts.h - how an operation is cut for the threads of its stream.
 *
 * Items (row groups, heads, rows) are never split, and no result depends on
 * which part an item is in.  A few parts per thread let a thread that was held
 * up do fewer; an operation too small to be worth waking a thread is one part.
 *
 * Thread:  any.
 */
#ifndef KERNELS_PARTS_H
#define KERNELS_PARTS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PARTS_PER_THREAD = 4,
    PARTS_WORK_MIN = 16384, /* multiply-adds below which one thread is faster alone: ~1 us */
};

/* Parts for `items` items that cost `work` multiply-adds together. */
static inline uint32_t parts_count(const void *stream, uint32_t items, uint64_t work)
{
    const uint32_t threads = cpu_pool_threads((const struct cpu_pool *)stream);
    if (threads == 1 || work < PARTS_WORK_MIN) {
        return items > 0 ? 1 : 0;
    }
    const uint32_t parts = threads * PARTS_PER_THREAD;
    return items < parts ? items : parts;
}

/* First item of part `part`; that of part `parts` is `items`. */
static inline uint32_t parts_first(uint32_t part, uint32_t parts, uint32_t items)
{
    return (uint32_t)((uint64_t)items * part / parts);
}

#ifdef __cplusplus
}
#endif
#endif
