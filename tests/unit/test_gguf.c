/* GGUF reader: every kind of file that is refused, every way a good one may say things. */
#include "pipeline/gguf.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/harness.h"
#include "tests/support/gguf_buffer.h"
#include "tests/support/temp_folder.h"

static const uint64_t dims_64[1] = {64};

/* Header, one key, two F32 tensors of 64 elements; 512 bytes of data would follow. */
static void put_small(struct gguf_buffer *buffer)
{
    gguf_put_header(buffer, 3);
    gguf_put_key_text(buffer, "general.architecture", "llama");
    gguf_put_tensor(buffer, "a", 1, dims_64, FL_DTYPE_F32, 0);
    gguf_put_tensor(buffer, "b", 1, dims_64, FL_DTYPE_F32, 256);
    gguf_put_padding(buffer, 32);
}

static fl_status parse(const struct gguf_buffer *buffer, struct gguf **out)
{
    return gguf_parse(buffer->data, buffer->size, buffer->size + 512, out);
}

/* The buffer is refused with this status and a sentence that says `phrase`.  Ends the buffer. */
static void check_refused(struct gguf_buffer *buffer, fl_status want, const char *phrase)
{
    struct gguf *gguf = NULL;
    /* A copy of the exact size, so that the sanitizer sees a read past the end. */
    unsigned char *data = malloc(buffer->size != 0 ? buffer->size : 1);
    if (buffer->size != 0) {
        memcpy(data, buffer->data, buffer->size);
    }
    const fl_status status = gguf_parse(data, buffer->size, buffer->size + 512, &gguf);
    free(data);
    gguf_buffer_free(buffer);
    if (status == want && strstr(fl_last_error(), phrase) == NULL) {
        printf("  \"%s\" does not say \"%s\"\n", fl_last_error(), phrase);
    }
    CHECK_EQ(status, want);
    CHECK(gguf == NULL);
    CHECK(strstr(fl_last_error(), phrase) != NULL);
}

static void test_small_file_is_read(void)
{
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    put_small(&buffer);
    CHECK_EQ(parse(&buffer, &gguf), FL_OK);
    CHECK_EQ(gguf_tensor_count(gguf), 2);
    CHECK_EQ(gguf_file_count(gguf), 1);
    CHECK_EQ(gguf_file_size(gguf, 0), buffer.size + 512);
    const struct gguf_tensor *tensor = gguf_tensor_find(gguf, "b");
    CHECK(tensor != NULL && tensor == gguf_tensor_at(gguf, 1));
    CHECK_EQ(tensor->offset, buffer.size + 256);
    CHECK_EQ(tensor->size, 256);
    CHECK_EQ(tensor->dims[0], 64);
    CHECK_EQ(tensor->dims[1], 1);
    CHECK(gguf_tensor_find(gguf, "c") == NULL);
    CHECK(gguf_has(gguf, "general.architecture") && !gguf_has(gguf, "general"));
    gguf_close(gguf);
    gguf_buffer_free(&buffer);
}

static void test_every_truncation_is_refused(void)
{
    struct gguf_buffer buffer = {0};
    put_small(&buffer);
    struct gguf *gguf = NULL;
    for (size_t size = 0; size + 32 < buffer.size; size++) {
        unsigned char *data = malloc(size != 0 ? size : 1);
        memcpy(data, buffer.data, size);
        const fl_status status = gguf_parse(data, size, size, &gguf);
        free(data);
        CHECK_EQ(status, FL_MALFORMED);
        CHECK(gguf == NULL);
    }
    /* All of the header, but not all of the data. */
    CHECK_EQ(gguf_parse(buffer.data, buffer.size, buffer.size + 511, &gguf), FL_MALFORMED);
    CHECK(strstr(fl_last_error(), "tensor b") != NULL);
    CHECK(strstr(fl_last_error(), "cut short") != NULL);
    gguf_buffer_free(&buffer);
}

static void test_versions_2_and_3_are_read_others_not(void)
{
    for (uint32_t version = 0; version < 6; version++) {
        struct gguf_buffer buffer = {0};
        struct gguf *gguf = NULL;
        put_small(&buffer);
        gguf_patch_u32(&buffer, GGUF_AT_VERSION, version);
        const bool good = version == 2 || version == 3;
        CHECK_EQ(parse(&buffer, &gguf), good ? FL_OK : FL_UNSUPPORTED);
        gguf_close(gguf);
        gguf_buffer_free(&buffer);
    }
    struct gguf_buffer buffer = {0};
    put_small(&buffer);
    gguf_patch_u32(&buffer, GGUF_AT_VERSION, 0x03000000);
    check_refused(&buffer, FL_UNSUPPORTED, "big-endian");
}

static void test_foreign_files_are_named(void)
{
    static const struct {
        const char *bytes;
        size_t size;
        const char *phrase;
    } files[] = {
        {"\x40\0\0\0\0\0\0\0{\"__metadata__\"", 23, "safetensors"},
        {"PK\3\4________________", 20, "zip"},
        {"lmgg________________", 20, "GGML"},
        {"tjgg________________", 20, "GGJT"},
        {"version https://git-lfs.github.com/spec/v1", 42, "Git LFS"},
        {"<!DOCTYPE html>     ", 20, "web page"},
        {"\x7f"
         "ELF________________",
         20, "program"},
        {"{\"a\": 1}            ", 20, "JSON"},
        {"hello, this is text ", 20, "does not begin with"},
        {"GGU", 3, "does not begin with"},
    };
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        struct gguf_buffer buffer = {0};
        gguf_put(&buffer, files[i].bytes, files[i].size);
        check_refused(&buffer, FL_MALFORMED, files[i].phrase);
    }
}

static void test_absurd_counts_are_refused(void)
{
    static const uint64_t counts[] = {65537, 1u << 31, UINT64_MAX, UINT64_MAX / 2};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        struct gguf_buffer buffer = {0};
        put_small(&buffer);
        gguf_patch_u64(&buffer, GGUF_AT_TENSOR_COUNT, counts[i]);
        check_refused(&buffer, FL_TOO_LARGE, "tensors; at most 65536");
        put_small(&buffer);
        gguf_patch_u64(&buffer, GGUF_AT_KEY_COUNT, counts[i]);
        check_refused(&buffer, FL_TOO_LARGE, "keys; at most 65536");
    }
    /* Within the limit, but more than there are. */
    struct gguf_buffer buffer = {0};
    put_small(&buffer);
    gguf_patch_u64(&buffer, GGUF_AT_TENSOR_COUNT, 65536);
    check_refused(&buffer, FL_MALFORMED, "model in memory: ");
}

static void test_absurd_lengths_are_refused(void)
{
    static const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - 7, (16 << 20) + 1, 1ull << 32};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct gguf_buffer buffer = {0};
        gguf_put_header(&buffer, 3);
        gguf_put_key(&buffer, "k", GGUF_STRING);
        gguf_put_u64(&buffer, sizes[i]);
        check_refused(&buffer, FL_TOO_LARGE, "length");

        gguf_put_header(&buffer, 3);
        gguf_put_key(&buffer, "k", GGUF_ARRAY);
        gguf_put_u32(&buffer, GGUF_UINT64);
        gguf_put_u64(&buffer, sizes[i]);
        check_refused(&buffer, FL_TOO_LARGE, "elements");

        gguf_put_header(&buffer, 3);
        gguf_patch_u64(&buffer, GGUF_AT_KEY_COUNT, 1);
        gguf_put_u64(&buffer, sizes[i]);
        check_refused(&buffer, FL_TOO_LARGE, "a key");

        gguf_put_header(&buffer, 3);
        gguf_patch_u64(&buffer, GGUF_AT_TENSOR_COUNT, 1);
        gguf_put_u64(&buffer, sizes[i]);
        check_refused(&buffer, FL_TOO_LARGE, "a tensor's name");
    }
}

static void test_wrong_value_types_are_refused(void)
{
    struct gguf_buffer buffer = {0};
    gguf_put_header(&buffer, 3);
    gguf_put_key(&buffer, "some.key", 13);
    gguf_put_u64(&buffer, 0);
    check_refused(&buffer, FL_MALFORMED, "some.key has the unknown value type 13");

    gguf_put_header(&buffer, 3);
    gguf_put_key(&buffer, "some.key", GGUF_ARRAY);
    gguf_put_u32(&buffer, 77);
    gguf_put_u64(&buffer, 0);
    check_refused(&buffer, FL_MALFORMED, "77");

    gguf_put_header(&buffer, 3);
    gguf_put_key(&buffer, "some.key", GGUF_ARRAY);
    gguf_put_u32(&buffer, GGUF_ARRAY);
    gguf_put_u64(&buffer, 0);
    check_refused(&buffer, FL_UNSUPPORTED, "array of arrays");

    gguf_put_header(&buffer, 3);
    gguf_put_key(&buffer, "", GGUF_UINT8);
    gguf_put(&buffer, "", 1);
    check_refused(&buffer, FL_MALFORMED, "no name");
}

static void test_names_must_differ(void)
{
    struct gguf_buffer buffer = {0};
    gguf_put_header(&buffer, 3);
    gguf_put_key_float(&buffer, "x", 1);
    gguf_put_key_float(&buffer, "y", 1);
    gguf_put_key_text(&buffer, "x", "1");
    check_refused(&buffer, FL_MALFORMED, "key x is there twice");

    gguf_put_header(&buffer, 3);
    gguf_put_tensor(&buffer, "w", 1, dims_64, FL_DTYPE_F32, 0);
    gguf_put_tensor(&buffer, "w", 1, dims_64, FL_DTYPE_F32, 256);
    gguf_put_padding(&buffer, 32);
    check_refused(&buffer, FL_MALFORMED, "tensor w is there twice");
}

/* One tensor of `dims`, `dtype` and `offset` is refused. */
static void check_tensor_refused(uint32_t dim_count, const uint64_t *dims, uint32_t dtype,
                                 uint64_t offset, fl_status want, const char *phrase)
{
    struct gguf_buffer buffer = {0};
    gguf_put_header(&buffer, 3);
    gguf_put_tensor(&buffer, "w", dim_count, dims, dtype, offset);
    gguf_put_padding(&buffer, 32);
    check_refused(&buffer, want, phrase);
}

static void test_impossible_tensors_are_refused(void)
{
    static const uint64_t zero[2] = {32, 0};
    static const uint64_t huge[4] = {1ull << 32, 1ull << 32, 1, 1};
    static const uint64_t sly[4] = {1ull << 62, 4, 1, 1}; /* wraps to 0 in 64 bits */
    static const uint64_t odd[2] = {33, 2};
    static const uint64_t bytes[1] = {1ull << 62}; /* elements fit, bytes do not */
    static const uint64_t five[5] = {1, 1, 1, 1, 1};
    check_tensor_refused(2, zero, FL_DTYPE_F32, 0, FL_MALFORMED, "dimension 1 of tensor w is 0");
    check_tensor_refused(4, huge, FL_DTYPE_F32, 0, FL_MALFORMED, "2^63");
    check_tensor_refused(4, sly, FL_DTYPE_F32, 0, FL_MALFORMED, "2^63");
    check_tensor_refused(1, bytes, FL_DTYPE_F32, 0, FL_MALFORMED, "2^64 bytes");
    check_tensor_refused(2, odd, FL_DTYPE_Q4_0, 0, FL_MALFORMED, "multiple of 32");
    check_tensor_refused(5, five, FL_DTYPE_F32, 0, FL_MALFORMED, "5 dimensions");
    check_tensor_refused(0, five, FL_DTYPE_F32, 0, FL_MALFORMED, "0 dimensions");
    check_tensor_refused(1, dims_64, FL_DTYPE_F32, 16, FL_MALFORMED,
                         "multiple of the alignment 32");
    check_tensor_refused(1, dims_64, FL_DTYPE_F32, 1024, FL_MALFORMED, "beyond the end");
    check_tensor_refused(1, dims_64, FL_DTYPE_F32, UINT64_MAX - 31, FL_MALFORMED, "beyond the end");
}

static void test_overlapping_tensors_are_refused(void)
{
    struct gguf_buffer buffer = {0};
    gguf_put_header(&buffer, 3);
    gguf_put_tensor(&buffer, "late", 1, dims_64, FL_DTYPE_F32, 224);
    gguf_put_tensor(&buffer, "early", 1, dims_64, FL_DTYPE_F32, 0);
    gguf_put_padding(&buffer, 32);
    check_refused(&buffer, FL_MALFORMED, "early and late overlap");

    gguf_put_header(&buffer, 3);
    gguf_put_tensor(&buffer, "one", 1, dims_64, FL_DTYPE_F32, 0);
    gguf_put_tensor(&buffer, "two", 1, dims_64, FL_DTYPE_F32, 0);
    gguf_put_padding(&buffer, 32);
    check_refused(&buffer, FL_MALFORMED, "overlap");
}

static void test_alignment_is_honoured_and_checked(void)
{
    static const uint64_t bad[] = {0, 1, 4, 33, 48, 1 << 21, 1ull << 31, 1ull << 40};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct gguf_buffer buffer = {0};
        gguf_put_header(&buffer, 3);
        gguf_put_key_uint(&buffer, "general.alignment", GGUF_UINT64, bad[i]);
        check_refused(&buffer, FL_MALFORMED, "general.alignment");
    }
    struct gguf_buffer text = {0};
    gguf_put_header(&text, 3);
    gguf_put_key_text(&text, "general.alignment", "32");
    check_refused(&text, FL_MALFORMED, "is a string; it must be an integer");

    static const enum gguf_type types[] = {GGUF_UINT32, GGUF_INT32, GGUF_UINT64, GGUF_UINT16};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct gguf_buffer buffer = {0};
        struct gguf *gguf = NULL;
        gguf_put_header(&buffer, 3);
        gguf_put_key_uint(&buffer, "general.alignment", types[i], 128);
        gguf_put_tensor(&buffer, "a", 1, dims_64, FL_DTYPE_F32, 0);
        gguf_put_tensor(&buffer, "b", 1, dims_64, FL_DTYPE_F32, 256);
        gguf_put_padding(&buffer, 128);
        CHECK_EQ(parse(&buffer, &gguf), FL_OK);
        CHECK_EQ(gguf_tensor_at(gguf, 0)->offset, buffer.size);
        gguf_close(gguf);
        gguf_buffer_free(&buffer);
    }
}

static void test_integers_come_from_any_integer_type(void)
{
    static const enum gguf_type types[] = {GGUF_UINT8,  GGUF_INT8,  GGUF_UINT16, GGUF_INT16,
                                           GGUF_UINT32, GGUF_INT32, GGUF_UINT64, GGUF_INT64};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct gguf_buffer buffer = {0};
        struct gguf *gguf = NULL;
        uint64_t value = 0;
        float number = 0;
        bool flag;
        gguf_put_header(&buffer, 3);
        gguf_put_key_uint(&buffer, "n", types[i], 100);
        CHECK_EQ(parse(&buffer, &gguf), FL_OK);
        CHECK_EQ(gguf_get_uint(gguf, "n", 100, &value), FL_OK);
        CHECK_EQ(value, 100);
        CHECK_EQ(gguf_get_float(gguf, "n", &number), FL_OK);
        CHECK(number == 100.0f);
        value = 7;
        CHECK_EQ(gguf_get_uint(gguf, "n", 99, &value), FL_MALFORMED);
        CHECK_EQ(value, 7);
        CHECK_EQ(gguf_get_bool(gguf, "n", &flag), FL_MALFORMED);
        CHECK_EQ(gguf_get_uint(gguf, "m", 99, &value), FL_NOT_FOUND);
        gguf_close(gguf);
        gguf_buffer_free(&buffer);
    }
}

static void test_values_out_of_range_or_of_another_kind_are_refused(void)
{
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    uint64_t value;
    float number;
    bool flag = false;
    struct gguf_string string;
    const float infinity = 1e38f * 10.0f;
    gguf_put_header(&buffer, 3);
    gguf_put_key_uint(&buffer, "negative", GGUF_INT32, (uint32_t)-5);
    gguf_put_key_uint(&buffer, "lowest", GGUF_INT64, 1ull << 63);
    gguf_put_key_uint(&buffer, "maybe", GGUF_BOOL, 2);
    gguf_put_key_bool(&buffer, "yes", true);
    gguf_put_key_float(&buffer, "infinite", infinity);
    gguf_put_key_text(&buffer, "text", "12");
    CHECK_EQ(parse(&buffer, &gguf), FL_OK);
    CHECK_EQ(gguf_get_uint(gguf, "negative", 1000, &value), FL_MALFORMED);
    CHECK(strstr(fl_last_error(), "negative is -5; it must be 0 to 1000") != NULL);
    CHECK_EQ(gguf_get_float(gguf, "negative", &number), FL_OK);
    CHECK(number == -5.0f);
    CHECK_EQ(gguf_get_uint(gguf, "lowest", UINT64_MAX, &value), FL_MALFORMED);
    CHECK_EQ(gguf_get_bool(gguf, "maybe", &flag), FL_MALFORMED);
    CHECK_EQ(gguf_get_bool(gguf, "yes", &flag), FL_OK);
    CHECK(flag);
    CHECK_EQ(gguf_get_float(gguf, "yes", &number), FL_MALFORMED);
    CHECK_EQ(gguf_get_uint(gguf, "yes", 9, &value), FL_MALFORMED);
    CHECK_EQ(gguf_get_float(gguf, "infinite", &number), FL_MALFORMED);
    CHECK_EQ(gguf_get_uint(gguf, "infinite", 9, &value), FL_MALFORMED);
    CHECK_EQ(gguf_get_uint(gguf, "text", 99, &value), FL_MALFORMED);
    CHECK_EQ(gguf_get_float(gguf, "text", &number), FL_MALFORMED);
    CHECK_EQ(gguf_get_string(gguf, "yes", &string), FL_MALFORMED);
    CHECK_EQ(gguf_get_string(gguf, "text", &string), FL_OK);
    CHECK_EQ(string.size, 2);
    CHECK(!gguf_is_array(gguf, "text"));
    gguf_close(gguf);
    gguf_buffer_free(&buffer);
}

static void test_strings_may_hold_nul_and_arrays_may_be_empty(void)
{
    static const struct gguf_string strings[3] = {{"a\0b", 3}, {"", 0}, {"\0", 1}};
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    struct gguf_string out[3];
    enum gguf_type type;
    uint32_t count = 9;
    gguf_put_header(&buffer, 3);
    gguf_put_key_string(&buffer, "s", strings[0]);
    gguf_put_key_strings(&buffer, "three", strings, 3);
    gguf_put_key_strings(&buffer, "none", strings, 0);
    gguf_put_key_floats(&buffer, "nil", NULL, 0);
    CHECK_EQ(parse(&buffer, &gguf), FL_OK);
    CHECK_EQ(gguf_get_string(gguf, "s", &out[0]), FL_OK);
    CHECK(out[0].size == 3 && memcmp(out[0].data, "a\0b", 3) == 0);
    CHECK_EQ(gguf_array_count(gguf, "three", &type, &count), FL_OK);
    CHECK(type == GGUF_STRING && count == 3 && gguf_is_array(gguf, "three"));
    CHECK_EQ(gguf_strings(gguf, "three", out, 3), FL_OK);
    CHECK(out[0].size == 3 && out[1].size == 0 && out[2].size == 1);
    CHECK_EQ(gguf_strings(gguf, "three", out, 2), FL_MALFORMED);
    CHECK_EQ(gguf_array_count(gguf, "none", &type, &count), FL_OK);
    CHECK_EQ(count, 0);
    CHECK_EQ(gguf_strings(gguf, "none", out, 0), FL_OK);
    CHECK_EQ(gguf_floats(gguf, "nil", NULL, 0), FL_OK);
    CHECK_EQ(gguf_floats(gguf, "three", NULL, 3), FL_MALFORMED);
    CHECK_EQ(gguf_strings(gguf, "s", out, 1), FL_MALFORMED);
    CHECK_EQ(gguf_strings(gguf, "missing", out, 1), FL_NOT_FOUND);
    gguf_close(gguf);
    gguf_buffer_free(&buffer);
}

/* A name ends where its length says, not at a NUL. */
static void test_names_may_hold_nul(void)
{
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    uint64_t value = 0;
    gguf_put_header(&buffer, 3);
    gguf_put_key_uint(&buffer, "key_", GGUF_UINT32, 1);
    gguf_put_key_uint(&buffer, "key", GGUF_UINT32, 2);
    gguf_put_tensor(&buffer, "w_", 1, dims_64, FL_DTYPE_F32, 0);
    gguf_put_tensor(&buffer, "w", 1, dims_64, FL_DTYPE_F32, 256);
    gguf_put_padding(&buffer, 32);
    ((char *)memmem(buffer.data, buffer.size, "key_", 4))[3] = '\0';
    ((char *)memmem(buffer.data, buffer.size, "w_", 2))[1] = '\0';
    CHECK_EQ(parse(&buffer, &gguf), FL_OK);
    CHECK_EQ(gguf_get_uint(gguf, "key", 9, &value), FL_OK);
    CHECK_EQ(value, 2);
    CHECK_EQ(gguf_tensor_find(gguf, "w")->offset, buffer.size + 256);
    gguf_close(gguf);
    gguf_buffer_free(&buffer);
}

static void test_arrays_of_numbers_are_read_and_checked(void)
{
    static const uint32_t values[3] = {1, 2, 250};
    const float not_a_number = (1e38f * 10.0f) - (1e38f * 10.0f);
    const float floats[2] = {-1.5f, not_a_number};
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    uint32_t out[3] = {0};
    float numbers[3];
    gguf_put_header(&buffer, 3);
    gguf_put_key_uints(&buffer, "bytes", GGUF_UINT8, values, 3);
    gguf_put_key_uints(&buffer, "signed", GGUF_INT8, values, 3);
    gguf_put_key_uints(&buffer, "long", GGUF_INT64, values, 3);
    gguf_put_key_floats(&buffer, "floats", floats, 1);
    gguf_put_key_floats(&buffer, "nan", floats, 2);
    CHECK_EQ(parse(&buffer, &gguf), FL_OK);
    CHECK_EQ(gguf_uints(gguf, "bytes", 250, out, 3), FL_OK);
    CHECK_EQ(out[2], 250);
    CHECK_EQ(gguf_uints(gguf, "bytes", 249, out, 3), FL_MALFORMED);
    CHECK(strstr(fl_last_error(), "element 2") != NULL);
    CHECK_EQ(gguf_uints(gguf, "signed", 250, out, 3), FL_MALFORMED); /* -6 */
    CHECK_EQ(gguf_uints(gguf, "long", 250, out, 3), FL_OK);
    CHECK_EQ(gguf_floats(gguf, "long", numbers, 3), FL_OK);
    CHECK(numbers[2] == 250.0f);
    CHECK_EQ(gguf_floats(gguf, "floats", numbers, 1), FL_OK);
    CHECK(numbers[0] == -1.5f);
    CHECK_EQ(gguf_uints(gguf, "floats", 9, out, 1), FL_MALFORMED);
    CHECK_EQ(gguf_floats(gguf, "nan", numbers, 2), FL_MALFORMED);
    gguf_close(gguf);
    gguf_buffer_free(&buffer);
}

static void test_offsets_beyond_2_and_4_gib_are_kept(void)
{
    static const uint64_t offsets[] = {(1ull << 31) - 32, 1ull << 31, 3ull << 30, (1ull << 32) - 32,
                                       1ull << 32,        5ull << 30, 1ull << 50};
    for (size_t i = 0; i < sizeof(offsets) / sizeof(offsets[0]); i++) {
        struct gguf_buffer buffer = {0};
        struct gguf *gguf = NULL;
        const uint64_t far = offsets[i];
        gguf_put_header(&buffer, 3);
        gguf_put_tensor(&buffer, "near", 1, dims_64, FL_DTYPE_F32, 0);
        gguf_put_tensor(&buffer, "far", 1, dims_64, FL_DTYPE_F32, far);
        gguf_put_padding(&buffer, 32);
        CHECK_EQ(gguf_parse(buffer.data, buffer.size, buffer.size + far + 256, &gguf), FL_OK);
        CHECK(gguf_tensor_find(gguf, "far")->offset == buffer.size + far);
        gguf_close(gguf);
        gguf = NULL;
        CHECK_EQ(gguf_parse(buffer.data, buffer.size, buffer.size + far + 255, &gguf),
                 FL_MALFORMED);
        gguf_buffer_free(&buffer);
    }
}

static void test_a_sparse_file_of_5_gib_is_opened(void)
{
    const uint64_t far = 5ull << 30;
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    struct temp_folder folder;
    char path[TEMP_PATH_MAX];
    temp_folder_make(&folder);
    temp_folder_path(&folder, "sparse.gguf", path);
    gguf_put_header(&buffer, 3);
    gguf_put_tensor(&buffer, "far", 1, dims_64, FL_DTYPE_F32, far);
    gguf_put_padding(&buffer, 32);
    temp_folder_put(&folder, "sparse.gguf", buffer.data, buffer.size);
    CHECK_EQ(truncate(path, (off_t)(buffer.size + far + 256)), 0);
    CHECK_EQ(gguf_open(path, &gguf), FL_OK);
    CHECK(gguf_tensor_find(gguf, "far")->offset == buffer.size + far);
    gguf_close(gguf);
    temp_folder_remove(&folder);
    gguf_buffer_free(&buffer);
}

static void test_unknown_types_are_listed_not_refused(void)
{
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    gguf_put_header(&buffer, 3);
    gguf_put_tensor(&buffer, "w", 1, dims_64, 16, 0);
    gguf_put_padding(&buffer, 32);
    CHECK_EQ(parse(&buffer, &gguf), FL_OK);
    CHECK_EQ(gguf_tensor_at(gguf, 0)->dtype, 16);
    CHECK_EQ(gguf_tensor_at(gguf, 0)->size, 0);
    gguf_close(gguf);
    gguf_buffer_free(&buffer);
}

static void test_names_in_sentences_are_printable(void)
{
    struct gguf_buffer buffer = {0};
    gguf_put_header(&buffer, 3);
    gguf_put_key(&buffer, "bad\033[31m\nkey", 99);
    check_refused(&buffer, FL_MALFORMED, "bad?[31m?key");
}

static void test_paths_that_are_no_model_are_refused(void)
{
    struct temp_folder folder;
    char path[TEMP_PATH_MAX];
    struct gguf *gguf = NULL;
    temp_folder_make(&folder);
    temp_folder_path(&folder, "missing.gguf", path);
    CHECK_EQ(gguf_open(path, &gguf), FL_NOT_FOUND);
    CHECK(strstr(fl_last_error(), "missing.gguf") != NULL);
    CHECK_EQ(gguf_open(folder.path, &gguf), FL_MALFORMED);
    CHECK(strstr(fl_last_error(), "a folder") != NULL);
    temp_folder_put(&folder, "empty.gguf", "", 0);
    temp_folder_path(&folder, "empty.gguf", path);
    CHECK_EQ(gguf_open(path, &gguf), FL_MALFORMED);
    CHECK(strstr(fl_last_error(), "empty") != NULL);
    temp_folder_path(&folder, "pipe.gguf", path);
    CHECK_EQ(mkfifo(path, 0600), 0);
    CHECK_EQ(gguf_open(path, &gguf), FL_MALFORMED); /* and does not hang */
    CHECK(gguf == NULL);
    temp_folder_remove(&folder);
}

/* Header of part `no` of `count` with one tensor. */
static void put_part_of(const struct temp_folder *folder, const char *name, uint32_t no,
                        uint32_t count, uint32_t total, const char *tensor)
{
    struct gguf_buffer buffer = {0};
    gguf_put_header(&buffer, 3);
    if (no == 0) {
        gguf_put_key_text(&buffer, "general.name", "first");
    }
    gguf_put_key_uint(&buffer, "split.no", GGUF_UINT16, no);
    gguf_put_key_uint(&buffer, "split.count", GGUF_UINT16, count);
    gguf_put_key_uint(&buffer, "split.tensors.count", GGUF_INT32, total);
    gguf_put_tensor(&buffer, tensor, 1, dims_64, FL_DTYPE_F32, 0);
    gguf_put_padding(&buffer, 32);
    const float data[64] = {0};
    gguf_put(&buffer, data, sizeof(data));
    temp_folder_put(folder, name, buffer.data, buffer.size);
    gguf_buffer_free(&buffer);
}

/* The same with a tensor of the part's own. */
static void put_part(const struct temp_folder *folder, const char *name, uint32_t no,
                     uint32_t count, uint32_t total)
{
    char tensor[8];
    snprintf(tensor, sizeof(tensor), "t%u", (unsigned)no);
    put_part_of(folder, name, no, count, total, tensor);
}

static void test_split_files_are_one_model(void)
{
    struct temp_folder folder;
    char path[TEMP_PATH_MAX];
    struct gguf *gguf = NULL;
    temp_folder_make(&folder);
    put_part(&folder, "m-00001-of-00003.gguf", 0, 3, 3);
    put_part(&folder, "m-00002-of-00003.gguf", 1, 3, 3);
    put_part(&folder, "m-00003-of-00003.gguf", 2, 3, 3);
    temp_folder_path(&folder, "m-00001-of-00003.gguf", path);
    CHECK_EQ(gguf_open(path, &gguf), FL_OK);
    CHECK_EQ(gguf_file_count(gguf), 3);
    CHECK_EQ(gguf_tensor_count(gguf), 3);
    CHECK_EQ(gguf_tensor_find(gguf, "t2")->file, 2);
    CHECK(strstr(gguf_file_path(gguf, 2), "m-00003-of-00003.gguf") != NULL);
    CHECK(gguf_has(gguf, "general.name"));
    gguf_close(gguf);
    temp_folder_remove(&folder);
}

static void test_another_file_in_its_place_is_noticed(void)
{
    struct temp_folder folder;
    char path[TEMP_PATH_MAX];
    struct gguf *gguf = NULL;
    temp_folder_make(&folder);
    put_part(&folder, "m.gguf", 0, 1, 1);
    temp_folder_path(&folder, "m.gguf", path);
    CHECK_EQ(gguf_open(path, &gguf), FL_OK);
    const int fd = open(path, O_RDWR);
    CHECK(fd >= 0);
    const fl_status same = gguf_file_check(gguf, 0, fd);
    put_part(&folder, "n.gguf", 0, 1, 1);
    char other[TEMP_PATH_MAX];
    temp_folder_path(&folder, "n.gguf", other);
    CHECK_EQ(rename(other, path), 0);
    const int replaced_fd = open(path, O_RDONLY);
    const fl_status replaced = gguf_file_check(gguf, 0, replaced_fd);
    const struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    CHECK_EQ(futimens(fd, times), 0); /* as if it had been written to */
    const fl_status changed = gguf_file_check(gguf, 0, fd);
    close(fd);
    close(replaced_fd);
    gguf_close(gguf);
    temp_folder_remove(&folder);
    CHECK_EQ(same, FL_OK);
    CHECK_EQ(replaced, FL_IO);
    CHECK_EQ(changed, FL_IO);
    CHECK(strstr(fl_last_error(), "replaced or changed") != NULL);
}

/* Opening NAME is refused with a sentence that says `phrase`. */
static void check_open_refused(const struct temp_folder *folder, const char *name, fl_status want,
                               const char *phrase)
{
    char path[TEMP_PATH_MAX];
    struct gguf *gguf = NULL;
    temp_folder_path(folder, name, path);
    CHECK_EQ(gguf_open(path, &gguf), want);
    CHECK(gguf == NULL);
    CHECK(strstr(fl_last_error(), phrase) != NULL);
}

static void test_incomplete_splits_are_refused(void)
{
    struct temp_folder folder;
    temp_folder_make(&folder);
    put_part(&folder, "m-00001-of-00003.gguf", 0, 3, 3);
    put_part(&folder, "m-00002-of-00003.gguf", 1, 3, 3);
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_NOT_FOUND, "m-00003-of-00003.gguf");
    check_open_refused(&folder, "m-00002-of-00003.gguf", FL_MALFORMED, "name the first part");
    put_part(&folder, "m-00003-of-00003.gguf", 1, 3, 3);
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED, "part 3 is expected");
    put_part(&folder, "m-00003-of-00003.gguf", 2, 4, 3);
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED, "one of 4 parts");
    put_part(&folder, "m-00003-of-00003.gguf", 2, 3, 3);
    put_part(&folder, "m-00001-of-00003.gguf", 0, 3, 4);
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED, "4 tensors");
    put_part(&folder, "other.gguf", 0, 3, 3);
    check_open_refused(&folder, "other.gguf", FL_MALFORMED, "must end in -00001-of-00003.gguf");
    put_part(&folder, "m-00001-of-00065.gguf", 0, 65, 65);
    check_open_refused(&folder, "m-00001-of-00065.gguf", FL_MALFORMED, "65");
    temp_folder_remove(&folder);

    struct gguf_buffer buffer = {0};
    gguf_put_header(&buffer, 3);
    gguf_put_key_uint(&buffer, "split.count", GGUF_UINT16, 2);
    check_refused(&buffer, FL_UNSUPPORTED, "2 parts");
}

static void test_swapped_doubled_and_foreign_parts_are_refused(void)
{
    struct temp_folder folder;
    temp_folder_make(&folder);
    put_part(&folder, "m-00001-of-00003.gguf", 0, 3, 3);
    put_part(&folder, "m-00002-of-00003.gguf", 2, 3, 3);
    put_part(&folder, "m-00003-of-00003.gguf", 1, 3, 3);
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED,
                       "is part 3 of 3; part 2 is expected here");
    put_part(&folder, "m-00002-of-00003.gguf", 1, 3, 3);
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED,
                       "is part 2 of 3; part 3 is expected here");
    put_part(&folder, "m-00003-of-00003.gguf", 0, 3, 3); /* the first once more */
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED, "is part 1 of 3");
    /* Of another model, cut in as many parts: its tensors are there already, */
    put_part_of(&folder, "m-00003-of-00003.gguf", 2, 3, 3, "t0");
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED, "tensor t0 is there twice");
    /* or it is no part at all, */
    put_part(&folder, "m-00003-of-00003.gguf", 0, 1, 1);
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED, "one of 1 parts");
    temp_folder_put(&folder, "m-00003-of-00003.gguf", "PK\3\4 and more of it", 20);
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED, "zip archive");
    temp_folder_put(&folder, "m-00003-of-00003.gguf", "", 0);
    check_open_refused(&folder, "m-00001-of-00003.gguf", FL_MALFORMED,
                       "m-00003-of-00003.gguf: the file is empty");
    temp_folder_remove(&folder);
}

static void test_file_cut_in_its_header_is_refused(void)
{
    /* Longer than one read, so that the cut falls into a later one. */
    struct temp_folder folder;
    char path[TEMP_PATH_MAX];
    struct gguf_buffer buffer = {0};
    struct gguf *gguf = NULL;
    static float values[100000];
    gguf_put_header(&buffer, 3);
    gguf_put_key_floats(&buffer, "many", values, 100000);
    gguf_put_key_text(&buffer, "last", "one");
    temp_folder_make(&folder);
    temp_folder_put(&folder, "cut.gguf", buffer.data, buffer.size);
    temp_folder_path(&folder, "cut.gguf", path);
    CHECK_EQ(gguf_open(path, &gguf), FL_OK);
    CHECK(gguf_has(gguf, "last"));
    gguf_close(gguf);
    gguf = NULL;
    static const size_t cuts[] = {1, 2, 100, 200000, 399990};
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        CHECK_EQ(truncate(path, (off_t)(buffer.size - cuts[i])), 0);
        CHECK_EQ(gguf_open(path, &gguf), FL_MALFORMED);
        CHECK(strstr(fl_last_error(), "cut short") != NULL);
    }
    temp_folder_remove(&folder);
    gguf_buffer_free(&buffer);
}

static const struct test_case cases[] = {
    {"gguf: small file is read", test_small_file_is_read},
    {"gguf: every truncation is refused", test_every_truncation_is_refused},
    {"gguf: versions 2 and 3 are read, others not", test_versions_2_and_3_are_read_others_not},
    {"gguf: foreign files are named", test_foreign_files_are_named},
    {"gguf: absurd counts are refused", test_absurd_counts_are_refused},
    {"gguf: absurd lengths are refused", test_absurd_lengths_are_refused},
    {"gguf: wrong value types are refused", test_wrong_value_types_are_refused},
    {"gguf: names must differ", test_names_must_differ},
    {"gguf: impossible tensors are refused", test_impossible_tensors_are_refused},
    {"gguf: overlapping tensors are refused", test_overlapping_tensors_are_refused},
    {"gguf: alignment is honoured and checked", test_alignment_is_honoured_and_checked},
    {"gguf: integers come from any integer type", test_integers_come_from_any_integer_type},
    {"gguf: values out of range or of another kind are refused",
     test_values_out_of_range_or_of_another_kind_are_refused},
    {"gguf: strings may hold NUL and arrays may be empty",
     test_strings_may_hold_nul_and_arrays_may_be_empty},
    {"gguf: names may hold NUL", test_names_may_hold_nul},
    {"gguf: arrays of numbers are read and checked", test_arrays_of_numbers_are_read_and_checked},
    {"gguf: offsets beyond 2 and 4 GiB are kept", test_offsets_beyond_2_and_4_gib_are_kept},
    {"gguf: a sparse file of 5 GiB is opened", test_a_sparse_file_of_5_gib_is_opened},
    {"gguf: unknown types are listed, not refused", test_unknown_types_are_listed_not_refused},
    {"gguf: names in sentences are printable", test_names_in_sentences_are_printable},
    {"gguf: paths that are no model are refused", test_paths_that_are_no_model_are_refused},
    {"gguf: another file in its place is noticed", test_another_file_in_its_place_is_noticed},
    {"gguf: split files are one model", test_split_files_are_one_model},
    {"gguf: incomplete splits are refused", test_incomplete_splits_are_refused},
    {"gguf: swapped, doubled and foreign parts are refused",
     test_swapped_doubled_and_foreign_parts_are_refused},
    {"gguf: file cut in its header is refused", test_file_cut_in_its_header_is_refused},
};

TEST_MAIN(cases)
