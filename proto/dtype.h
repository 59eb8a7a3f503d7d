/* dtype.h - element types of weights, numbered as GGUF numbers them.
 *
 * A quantised type is a row of blocks: `block_length` elements in `block_size`
 * bytes.  A row's length is a multiple of the block's.
 *
 * Thread:  any; the table is constant.
 * Units:   sizes in bytes.
 * Source:  ggml/docs/gguf.md, "ggml_type"; block layouts in kernels/matrix_block.h.
 */
#ifndef PROTO_DTYPE_H
#define PROTO_DTYPE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* XX(name, GGUF number, block length in elements, block size in bytes) */
#define FL_DTYPE_MAP(XX)   \
    XX(F32, 0, 1, 4)       \
    XX(F16, 1, 1, 2)       \
    XX(Q4_0, 2, 32, 18)    \
    XX(Q4_1, 3, 32, 20)    \
    XX(Q5_0, 6, 32, 22)    \
    XX(Q5_1, 7, 32, 24)    \
    XX(Q8_0, 8, 32, 34)    \
    XX(Q4_K, 12, 256, 144) \
    XX(Q5_K, 13, 256, 176) \
    XX(Q6_K, 14, 256, 210) \
    XX(BF16, 30, 1, 2)

enum fl_dtype {
#define XX(name, value, length, size) FL_DTYPE_##name = value,
    FL_DTYPE_MAP(XX)
#undef XX
};

/* "Q4_K"; for a number this build does not know, the name GGUF gives it, or "unknown". */
const char *fl_dtype_name(uint32_t dtype);

/* True for the types listed above. */
int fl_dtype_known(uint32_t dtype);

uint32_t fl_dtype_block_length(enum fl_dtype dtype);
uint32_t fl_dtype_block_size(enum fl_dtype dtype);

/* Bytes of a row of `columns` elements in the file.
 * FL_INVALID when `columns` is no multiple of the block's length or 0. */
FL_MUST_CHECK fl_status fl_dtype_row_size(enum fl_dtype dtype, uint32_t columns, size_t *out);

#ifdef __cplusplus
}
#endif
#endif
