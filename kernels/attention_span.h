/* attention_span.h - which positions a row attends to, and the scratch that takes.
 *
 * Thread:  any; plain values.
 */
#ifndef KERNELS_ATTENTION_SPAN_H
#define KERNELS_ATTENTION_SPAN_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* First position that the row at `position` sees. */
static inline uint32_t attention_first(const struct attention_shape *shape, uint32_t position)
{
    return shape->window != 0 && position >= shape->window ? position + 1 - shape->window : 0;
}

/* Floats of one thread's scores for rows that see up to `positions` positions: whole lanes before
 * and after, and a cache line of its own. */
static inline size_t attention_scores(uint32_t positions)
{
    return ((size_t)positions + 3 * (size_t)ATTENTION_LANES - 1) / ATTENTION_LANES *
           ATTENTION_LANES;
}

/* Floats of scratch per thread for these rows, and the multiply-adds of them all. */
static inline size_t attention_stride(const struct attention_shape *shape,
                                      const struct attention_row *rows, uint32_t row_count,
                                      uint64_t *out_work)
{
    uint32_t longest = 1;
    uint64_t positions = 0;
    for (uint32_t t = 0; t < row_count; t++) {
        const uint32_t seen = rows[t].position + 1 - attention_first(shape, rows[t].position);
        longest = seen > longest ? seen : longest;
        positions += seen;
    }
    *out_work = positions * shape->head_count * shape->head_size * 2;
    return attention_scores(longest);
}

#ifdef __cplusplus
}
#endif
#endif
