/* matrix.h - weights as the kernels want them.
 *
 * On their way from the loader to the kernels weights pass through one repack:
 * 16 rows are interleaved, so that one SIMD lane is one row.  The packed form
 * of a quantised type holds the same numbers as the file, in another order and
 * at about the same size; nothing is rounded.  Rows are padded to a multiple of
 * MATRIX_ROW_GROUP with zeros.
 *
 * Thread:  any; plain values.
 * Memory:  views never own.
 * Shapes:  N rows (outputs), K columns (inputs); [slowest, .., fastest].
 */
#ifndef KERNELS_MATRIX_H
#define KERNELS_MATRIX_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MATRIX_ROW_GROUP = 16,
    MATRIX_ALIGNMENT = 64, /* of packed data */
};

struct matrix {
    const void *data;    /* packed */
    enum fl_dtype dtype; /* of the file; the packed layout follows from it */
    uint32_t rows;       /* N */
    uint32_t columns;    /* K */
};

/* Bytes of the packed form.  `columns` must suit `dtype` (fl_dtype_row_size says so). */
size_t matrix_packed_size(enum fl_dtype dtype, uint32_t rows, uint32_t columns);

/* Pack rows row_first .. row_first + row_count - 1, as they lie in the file, into `packed` (the
 * start of the whole matrix).  row_first is a multiple of MATRIX_ROW_GROUP, row_count too unless
 * these are the last rows.  Reads raw rows, writes whole groups; any thread, different groups may
 * be packed at once. */
void matrix_pack_rows(enum fl_dtype dtype, uint32_t columns, const void *raw, uint32_t row_first,
                      uint32_t row_count, void *packed);

/* One row as floats: out [K], exactly what matrix_dequantize_row() makes of the file's row. */
void matrix_row(const struct matrix *matrix, uint32_t row, float *out);

/* A row as it lies in the file, as floats: out [columns].
 * Source: ggml's block formats: Q4_0 d * (q - 8); Q4_1 d * q + m; Q4_K d * sc * q - dmin * m; ..
 * Each product and sum is rounded once to float, in the order the kernels' f32 definition uses. */
void matrix_dequantize_row(enum fl_dtype dtype, const void *raw, uint32_t columns, float *out);

#ifdef __cplusplus
}
#endif
#endif
