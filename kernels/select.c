/* select.c - the table this CPU runs, and what does not depend on the table. */
#include <string.h>

#include "kernels/attention_span.h"
#include "kernels/kernels.h"

size_t attention_scratch_size(uint32_t context, uint32_t stream_threads)
{
    return attention_scores(context) * stream_threads * sizeof(float);
}

fl_status kernel_ops_select(const char *name, const struct kernel_ops **out)
{
    if (name == NULL || strcmp(name, "auto") == 0 || strcmp(name, "scalar") == 0) {
        *out = &kernel_ops_scalar;
        return FL_OK;
    }
    return FL_FAIL(FL_INVALID,
                   "no kernels are named \"%s\"; scalar, avx2, avx512 or auto would be right",
                   name);
}
