/* unroll.h - asks the compiler to unroll a loop of a few constant steps.
 *
 * Arrays of registers stay in registers only when every index is a constant.
 */
#ifndef KERNELS_UNROLL_H
#define KERNELS_UNROLL_H

enum { UNROLL_STEPS_MAX = 16 };

#ifdef SIMD_EMULATED
#    define UNROLL /* there are no registers to keep */
#elif defined(__clang__)
#    define UNROLL _Pragma("unroll")
#else
#    define UNROLL _Pragma("GCC unroll 16")
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

#endif
