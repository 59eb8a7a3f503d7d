/* select.c - the table this CPU runs, and what does not depend on the table. */
#include <cpuid.h>
#include <string.h>

#include "kernels/attention_span.h"
#include "kernels/kernels.h"

size_t attention_scratch_size(uint32_t context, uint32_t stream_threads)
{
    return attention_scores(context) * stream_threads * sizeof(float);
}

/* __builtin_cpu_supports() asks the operating system too (XGETBV): wide registers it does not
 * save are as good as missing. */
static bool has_avx2(void)
{
    unsigned eax, ebx, ecx, edx;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

fl_status kernel_ops_select(const char *name, const struct kernel_ops **out)
{
    const bool best = name == NULL || strcmp(name, "auto") == 0;
    if (best) {
        *out = has_avx512() ? &kernel_ops_avx512
               : has_avx2() ? &kernel_ops_avx2
                            : &kernel_ops_scalar;
        return FL_OK;
    }
    if (strcmp(name, "scalar") == 0) {
        *out = &kernel_ops_scalar;
        return FL_OK;
    }
    if (strcmp(name, "avx2") == 0) {
        if (!has_avx2()) {
            return FL_FAIL(FL_UNSUPPORTED,
                           "kernels \"avx2\" need AVX2, FMA and F16C, which this CPU "
                           "lacks; scalar or auto would be right");
        }
        *out = &kernel_ops_avx2;
        return FL_OK;
    }
    if (strcmp(name, "avx512") == 0) {
        if (!has_avx512()) {
            return FL_FAIL(FL_UNSUPPORTED,
                           "kernels \"avx512\" need AVX-512 F, BW, VL, DQ and VNNI, which this CPU "
                           "lacks; %s or auto would be right",
                           has_avx2() ? "avx2, scalar" : "scalar");
        }
        *out = &kernel_ops_avx512;
        return FL_OK;
    }
    return FL_FAIL(FL_INVALID,
                   "no kernels are named \"%s\"; scalar, avx2, avx512 or auto would be right",
                   name);
}
