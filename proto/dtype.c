#include "proto/dtype.h"

#include <inttypes.h>
#include <stdbool.h>

struct dtype_row {
    const char *name;
    uint32_t block_length; /* 0: GGUF has the type, this build has no kernels for it */
    uint32_t block_size;
};

/* Indexed by GGUF's number. */
static const struct dtype_row dtypes[] = {
#define XX(name, value, length, size) [value] = {#name, length, size},
    FL_DTYPE_MAP(XX)
#undef XX
        [4] = {.name = "Q4_2"},
    [5] = {.name = "Q4_3"},
    [9] = {.name = "Q8_1"},
    [10] = {.name = "Q2_K"},
    [11] = {.name = "Q3_K"},
    [15] = {.name = "Q8_K"},
    [16] = {.name = "IQ2_XXS"},
    [17] = {.name = "IQ2_XS"},
    [18] = {.name = "IQ3_XXS"},
    [19] = {.name = "IQ1_S"},
    [20] = {.name = "IQ4_NL"},
    [21] = {.name = "IQ3_S"},
    [22] = {.name = "IQ2_S"},
    [23] = {.name = "IQ4_XS"},
    [24] = {.name = "I8"},
    [25] = {.name = "I16"},
    [26] = {.name = "I32"},
    [27] = {.name = "I64"},
    [28] = {.name = "F64"},
    [29] = {.name = "IQ1_M"},
    [31] = {.name = "Q4_0_4_4"},
    [32] = {.name = "Q4_0_4_8"},
    [33] = {.name = "Q4_0_8_8"},
    [34] = {.name = "TQ1_0"},
    [35] = {.name = "TQ2_0"},
    [39] = {.name = "MXFP4"},
};

enum { DTYPE_COUNT = sizeof(dtypes) / sizeof(dtypes[0]) };

const char *fl_dtype_name(uint32_t dtype)
{
    return dtype < DTYPE_COUNT && dtypes[dtype].name != NULL ? dtypes[dtype].name : "unknown";
}

int fl_dtype_known(uint32_t dtype)
{
    return dtype < DTYPE_COUNT && dtypes[dtype].block_length != 0;
}

uint32_t fl_dtype_block_length(enum fl_dtype dtype)
{
    FL_ASSERT(fl_dtype_known(dtype));
    return dtypes[dtype].block_length;
}

uint32_t fl_dtype_block_size(enum fl_dtype dtype)
{
    FL_ASSERT(fl_dtype_known(dtype));
    return dtypes[dtype].block_size;
}

fl_status fl_dtype_row_size(enum fl_dtype dtype, uint32_t columns, size_t *out)
{
    const uint32_t length = fl_dtype_block_length(dtype);
    if (columns == 0 || columns % length != 0) {
        return FL_FAIL(FL_INVALID,
                       "a row of %" PRIu32
                       " elements cannot be %s; that needs a multiple of %" PRIu32 " above 0",
                       columns, fl_dtype_name(dtype), length);
    }
    *out = (size_t)(columns / length) * fl_dtype_block_size(dtype);
    return FL_OK;
}
