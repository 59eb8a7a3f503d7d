/* cpu_avx2.c - the table for CPUs with AVX2, FMA and F16C.
 *
 * CMake compiles this file alone for them; nothing here runs on another CPU.
 */
#include "kernels/simd_avx2.h"

#include "kernels/cpu_matmul.h"
#include "kernels/cpu_ops.h"

const struct kernel_ops kernel_ops_avx2 = {
    .name = "avx2",
    .rms_norm = rms_norm,
    .quantize = quantize,
    .matmul = matmul,
    .rope = rope,
    .kv_store = kv_store,
    .attention = attention,
    .silu_mul = silu_mul,
    .gelu_mul = gelu_mul,
    .add = add,
    .scale = scale,
};
