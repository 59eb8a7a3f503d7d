/* The packed layout holds the file's numbers, and the numbers are ggml's. */
#include "kernels/half.h"
#include "tests/harness.h"
#include "tests/kernels/fixture.h"

static void test_half_conversions_are_exact(void)
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const uint32_t exponent = bits >> 10 & 31;
        const double fraction = bits & 1023;
        if (exponent == 31) {
            continue;
        }
        double want =
            exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, (int)exponent - 25);
        want = bits & 0x8000 ? -want : want;
        const float got = f16_to_float((uint16_t)bits);
        CHECK((double)got == want && (signbit(got) != 0) == (bits >> 15 != 0));
    }
    CHECK(isinf(f16_to_float(0x7c00)) && isnan(f16_to_float(0x7e00)) &&
          isnan(f16_to_float(0x7c01)));
    CHECK(bf16_to_float(0x3f80) == 1.0f && bf16_to_float(0xc040) == -3.0f);
}

/* Hand-made blocks: f16 1.0 is 3c00, 2.0 is 4000, 0.5 is 3800. */
static void test_blocks_of_32_read_as_ggml_defines_them(void)
{
    uint8_t raw[34] = {0};
    float out[32];
    raw[1] = 0x3c;
    raw[2] = 0xf3; /* columns 0 and 16 */
    matrix_dequantize_row(FL_DTYPE_Q4_0, raw, 32, out);
    CHECK(out[0] == -5.0f && out[16] == 7.0f && out[1] == -8.0f);

    memset(raw, 0, sizeof(raw));
    raw[1] = 0x40;
    raw[3] = 0x38;
    raw[4 + 15] = 0xa1; /* columns 15 and 31 */
    matrix_dequantize_row(FL_DTYPE_Q4_1, raw, 32, out);
    CHECK(out[15] == 2.5f && out[31] == 20.5f && out[0] == 0.5f);

    memset(raw, 0, sizeof(raw));
    raw[1] = 0x3c;
    raw[2 + 2] = 0x01; /* fifth bit of column 16 */
    raw[6] = 0xf3;
    matrix_dequantize_row(FL_DTYPE_Q5_0, raw, 32, out);
    CHECK(out[0] == -13.0f && out[16] == 15.0f && out[1] == -16.0f);

    memset(raw, 0, sizeof(raw));
    raw[1] = 0x3c;
    raw[3] = 0xbc;     /* -1 */
    raw[4 + 3] = 0x80; /* fifth bit of column 31 */
    raw[8 + 15] = 0x21;
    matrix_dequantize_row(FL_DTYPE_Q5_1, raw, 32, out);
    CHECK(out[15] == 0.0f && out[31] == 17.0f && out[0] == -1.0f);

    memset(raw, 0, sizeof(raw));
    raw[1] = 0x38;
    raw[2 + 7] = 0x80; /* -128 */
    matrix_dequantize_row(FL_DTYPE_Q8_0, raw, 32, out);
    CHECK(out[7] == -64.0f && out[0] == 0.0f);
}

static void test_super_blocks_read_as_ggml_defines_them(void)
{
    uint8_t raw[210] = {0};
    float out[256];
    raw[1] = 0x3c;           /* d 1 */
    raw[3] = 0x38;           /* dmin 0.5 */
    raw[4 + 1] = 0x40 | 5;   /* scale 1 is 5; its upper bits belong to scale 5 */
    raw[4 + 5] = 0x80 | 6;   /* minimum 1 is 6; its upper bits belong to minimum 5 */
    raw[4 + 9] = 0x73;       /* scale 5 is 3 + 16 * 1, minimum 5 is 7 + 16 * 2 */
    raw[16 + 0] = 0x90;      /* column 32, block 1: 9 */
    raw[16 + 64 + 2] = 0x20; /* column 128 + 32 + 2, block 5: 2 */
    matrix_dequantize_row(FL_DTYPE_Q4_K, raw, 256, out);
    CHECK(out[32] == 5 * 9 - 3.0f && out[33] == -3.0f && out[0] == 0.0f);
    CHECK(out[162] == 19 * 2 - 19.5f && out[160] == -19.5f);

    memmove(raw + 48, raw + 16, 128);
    memset(raw + 16, 0, 32);
    raw[16 + 2] = 1 << 5; /* fifth bit of column 2 of block 5 */
    matrix_dequantize_row(FL_DTYPE_Q5_K, raw, 256, out);
    CHECK(out[32] == 5 * 9 - 3.0f && out[162] == 19 * 18 - 19.5f);

    memset(raw, 0, sizeof(raw));
    raw[209] = 0x38;           /* d 0.5 */
    raw[192 + 15] = 0xfe;      /* scale of columns 240 .. 255: -2 */
    raw[64 + 32 + 16] = 0x50;  /* block 7, column 16: nibble 5 */
    raw[128 + 32 + 16] = 0x80; /* pair 2 */
    matrix_dequantize_row(FL_DTYPE_Q6_K, raw, 256, out);
    CHECK(out[240] == -1.0f * (5 + 32 - 32) && out[241] == 32.0f && out[0] == 0.0f);
}

static void test_packed_rows_equal_the_files_rows(void)
{
    uint64_t seed = 7;
    const uint32_t row_counts[] = {1, 15, 16, 17, 47};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        const uint32_t length = fl_dtype_block_length(all_dtypes[d]);
        for (int r = 0; r < 5; r++) {
            for (uint32_t blocks = 1; blocks <= 3; blocks += 2) {
                const uint32_t columns = blocks * length;
                struct test_matrix m;
                test_matrix_init(&m, all_dtypes[d], row_counts[r], columns, &seed);
                float want[768], got[768];
                for (uint32_t n = 0; n < row_counts[r]; n++) {
                    matrix_dequantize_row(all_dtypes[d], m.raw + n * m.row_size, columns, want);
                    matrix_row(&m.packed, n, got);
                    CHECK(memcmp(want, got, columns * sizeof(float)) == 0);
                }
                test_matrix_free(&m);
            }
        }
    }
}

static void test_packing_in_pieces_equals_packing_at_once(void)
{
    uint64_t seed = 8;
    for (int d = 0; d < DTYPE_COUNT; d++) {
        struct test_matrix m;
        test_matrix_init(&m, all_dtypes[d], 70, 256, &seed);
        const size_t size = matrix_packed_size(all_dtypes[d], 70, 256);
        uint8_t *pieces = test_alloc(size);
        memcpy(pieces, m.data, size); /* bytes after the last group are nobody's */
        memset(pieces, 0xee, size / 2);
        matrix_pack_rows(all_dtypes[d], 256, m.raw + 48 * m.row_size, 48, 22, pieces);
        matrix_pack_rows(all_dtypes[d], 256, m.raw, 0, 48, pieces);
        CHECK(memcmp(pieces, m.data, size) == 0);
        free(pieces);
        test_matrix_free(&m);
    }
}

static void test_packed_size_is_close_to_the_files(void)
{
    for (int d = 0; d < DTYPE_COUNT; d++) {
        size_t row_size = 0;
        CHECK_EQ(fl_dtype_row_size(all_dtypes[d], 2048, &row_size), FL_OK);
        const size_t raw = row_size * 2048;
        const size_t packed = matrix_packed_size(all_dtypes[d], 2048, 2048);
        CHECK(packed >= raw && packed <= raw + raw * 3 / 100);
        CHECK_EQ(packed % MATRIX_ALIGNMENT, 0);
        CHECK(matrix_packed_size(all_dtypes[d], 1, 256) >=
              matrix_packed_size(all_dtypes[d], 16, 256));
    }
}

static void test_dtypes_say_what_they_are(void)
{
    size_t size = 0;
    CHECK(strcmp(fl_dtype_name(12), "Q4_K") == 0 && strcmp(fl_dtype_name(10), "Q2_K") == 0);
    CHECK(strcmp(fl_dtype_name(36), "unknown") == 0 &&
          strcmp(fl_dtype_name(UINT32_MAX), "unknown") == 0);
    CHECK(fl_dtype_known(30) && fl_dtype_known(0));
    CHECK(!fl_dtype_known(10) && !fl_dtype_known(31) && !fl_dtype_known(UINT32_MAX));
    CHECK_EQ(fl_dtype_row_size(FL_DTYPE_Q4_K, 512, &size), FL_OK);
    CHECK_EQ(size, 288);
    CHECK_EQ(fl_dtype_row_size(FL_DTYPE_Q4_K, 288, &size), FL_INVALID);
    CHECK(strstr(fl_last_error(), "288") != NULL && strstr(fl_last_error(), "Q4_K") != NULL);
    CHECK_EQ(fl_dtype_row_size(FL_DTYPE_F32, 0, &size), FL_INVALID);
    CHECK_EQ(size, 288);
}

static const struct test_case cases[] = {
    {"matrix: half conversions are exact", test_half_conversions_are_exact},
    {"matrix: blocks of 32 read as ggml defines them", test_blocks_of_32_read_as_ggml_defines_them},
    {"matrix: super blocks read as ggml defines them", test_super_blocks_read_as_ggml_defines_them},
    {"matrix: packed rows equal the file's rows", test_packed_rows_equal_the_files_rows},
    {"matrix: packing in pieces equals packing at once",
     test_packing_in_pieces_equals_packing_at_once},
    {"matrix: packed size is close to the file's", test_packed_size_is_close_to_the_files},
    {"dtype: types say what they are", test_dtypes_say_what_they_are},
};

TEST_MAIN(cases)
