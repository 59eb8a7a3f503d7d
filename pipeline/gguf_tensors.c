#include "pipeline/gguf_tensors.h"

#include <inttypes.h>
#include <stdlib.h>

enum {
    DIM_COUNT_MAX = 4,
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_MIN = 8,
    ALIGNMENT_MAX = 1 << 20,
};

/* Bytes of a tensor; 0 when its type is unknown. */
static fl_status tensor_size(const char *path, const struct gguf_tensor *tensor, uint64_t *out)
{
    uint64_t elements = 1;
    for (uint32_t i = 0; i < DIM_COUNT_MAX; i++) {
        if (tensor->dims[i] == 0) {
            return FL_FAIL(FL_MALFORMED, "%s: dimension %" PRIu32 " of tensor %s is 0", path, i,
                           gguf_show(tensor->name).text);
        }
        if (__builtin_mul_overflow(elements, tensor->dims[i], &elements) || elements > INT64_MAX) {
            return FL_FAIL(FL_MALFORMED,
                           "%s: the dimensions of tensor %s multiply to more than "
                           "2^63 elements",
                           path, gguf_show(tensor->name).text);
        }
    }
    *out = 0;
    if (!fl_dtype_known(tensor->dtype)) {
        return FL_OK;
    }
    const enum fl_dtype dtype = (enum fl_dtype)tensor->dtype;
    const uint32_t length = fl_dtype_block_length(dtype);
    if (tensor->dims[0] % length != 0) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: rows of tensor %s have %" PRIu64
                       " elements; with type %s it must be a multiple of %" PRIu32,
                       path, gguf_show(tensor->name).text, tensor->dims[0], fl_dtype_name(dtype),
                       length);
    }
    if (__builtin_mul_overflow(elements / length, (uint64_t)fl_dtype_block_size(dtype), out)) {
        return FL_FAIL(FL_MALFORMED, "%s: tensor %s is larger than 2^64 bytes", path,
                       gguf_show(tensor->name).text);
    }
    return FL_OK;
}

static fl_status parse_tensor(struct gguf_cursor *cursor, struct gguf_tensor *tensor)
{
    FL_TRY(gguf_cursor_string(cursor, GGUF_TENSOR_NAME_MAX, "a tensor's name", &tensor->name));
    FL_TRY(gguf_cursor_u32(cursor, &tensor->dim_count));
    if (tensor->dim_count < 1 || tensor->dim_count > DIM_COUNT_MAX) {
        return FL_FAIL(
            FL_MALFORMED, "%s: tensor %s has %" PRIu32 " dimensions; 1 to %d are allowed",
            cursor->path, gguf_show(tensor->name).text, tensor->dim_count, DIM_COUNT_MAX);
    }
    for (uint32_t i = 0; i < DIM_COUNT_MAX; i++) {
        tensor->dims[i] = 1;
        if (i < tensor->dim_count) {
            FL_TRY(gguf_cursor_u64(cursor, &tensor->dims[i]));
        }
    }
    FL_TRY(gguf_cursor_u32(cursor, &tensor->dtype));
    FL_TRY(gguf_cursor_u64(cursor, &tensor->offset));
    return tensor_size(cursor->path, tensor, &tensor->size);
}

/* From an offset within the data to one within the file, which must hold all of the tensor. */
static fl_status place_tensor(const struct gguf_cursor *cursor, uint64_t data_first,
                              uint64_t alignment, struct gguf_tensor *tensor)
{
    if (tensor->offset % alignment != 0) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: tensor %s begins at offset %" PRIu64
                       ", which is not a multiple of the alignment %" PRIu64,
                       cursor->path, gguf_show(tensor->name).text, tensor->offset, alignment);
    }
    uint64_t end;
    if (__builtin_add_overflow(data_first, tensor->offset, &tensor->offset) ||
        __builtin_add_overflow(tensor->offset, tensor->size, &end) || end > cursor->file_size) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: tensor %s (%" PRIu64 " bytes at offset %" PRIu64
                       ") lies beyond the end of the file at %" PRIu64
                       ": it was cut short, copy or download it again",
                       cursor->path, gguf_show(tensor->name).text, tensor->size, tensor->offset,
                       cursor->file_size);
    }
    return FL_OK;
}

static fl_status read_alignment(const struct gguf_keys *keys, uint64_t *out)
{
    uint64_t value = ALIGNMENT_DEFAULT;
    const fl_status status = gguf_keys_uint(keys, "general.alignment", UINT32_MAX, &value);
    if (status != FL_OK && status != FL_NOT_FOUND) {
        return status;
    }
    if (value < ALIGNMENT_MIN || value > ALIGNMENT_MAX || (value & (value - 1)) != 0) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: general.alignment is %" PRIu64 "; it must be a power of two, %d to %d",
                       keys->path, value, ALIGNMENT_MIN, ALIGNMENT_MAX);
    }
    *out = value;
    return FL_OK;
}

fl_status gguf_tensors_read(struct gguf_tensors *tensors, struct gguf_cursor *cursor,
                            const struct gguf_keys *keys, uint64_t count, uint32_t file)
{
    if (count > GGUF_TENSOR_COUNT_MAX - tensors->count) {
        return FL_FAIL(FL_TOO_LARGE, "%s: claims %" PRIu64 " tensors; at most %d are allowed",
                       cursor->path, count, GGUF_TENSOR_COUNT_MAX);
    }
    uint64_t alignment = ALIGNMENT_DEFAULT;
    FL_TRY(read_alignment(keys, &alignment));
    const uint32_t first = tensors->count;
    const size_t total = first + count;
    struct gguf_tensor *list = realloc(tensors->list, (total != 0 ? total : 1) * sizeof(*list));
    if (list == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory for %zu tensors", cursor->path, total);
    }
    tensors->list = list;
    for (; tensors->count < total; tensors->count++) {
        struct gguf_tensor *tensor = &list[tensors->count];
        *tensor = (struct gguf_tensor){.file = file};
        FL_TRY(parse_tensor(cursor, tensor));
    }
    const uint64_t data_first = (cursor->at + alignment - 1) & ~(alignment - 1);
    for (uint32_t i = first; i < total; i++) {
        FL_TRY(place_tensor(cursor, data_first, alignment, &list[i]));
    }
    return FL_OK;
}

static int tensor_compare_name(const void *a, const void *b)
{
    return gguf_string_compare((*(const struct gguf_tensor *const *)a)->name,
                               (*(const struct gguf_tensor *const *)b)->name);
}

static int tensor_compare_place(const void *a, const void *b)
{
    const struct gguf_tensor *x = *(const struct gguf_tensor *const *)a;
    const struct gguf_tensor *y = *(const struct gguf_tensor *const *)b;
    if (x->file != y->file) {
        return x->file < y->file ? -1 : 1;
    }
    return (x->offset > y->offset) - (x->offset < y->offset);
}

static fl_status refuse_overlaps(const struct gguf_tensor *const *sorted, uint32_t count,
                                 const char *const *paths)
{
    for (uint32_t i = 1; i < count; i++) {
        const struct gguf_tensor *before = sorted[i - 1];
        const struct gguf_tensor *tensor = sorted[i];
        if (before->file == tensor->file && tensor->offset - before->offset < before->size) {
            return FL_FAIL(FL_MALFORMED, "%s: tensors %s and %s overlap at byte %" PRIu64,
                           paths[tensor->file], gguf_show(before->name).text,
                           gguf_show(tensor->name).text, tensor->offset);
        }
    }
    return FL_OK;
}

static fl_status refuse_twins(const struct gguf_tensor *const *sorted, uint32_t count,
                              const char *const *paths)
{
    for (uint32_t i = 1; i < count; i++) {
        if (tensor_compare_name(&sorted[i - 1], &sorted[i]) == 0) {
            return FL_FAIL(FL_MALFORMED, "%s: tensor %s is there twice", paths[sorted[i]->file],
                           gguf_show(sorted[i]->name).text);
        }
    }
    return FL_OK;
}

fl_status gguf_tensors_index(struct gguf_tensors *tensors, const char *const *paths)
{
    const uint32_t count = tensors->count;
    tensors->by_name = calloc(count != 0 ? count : 1, sizeof(void *));
    if (tensors->by_name == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory for %" PRIu32 " tensors", paths[0], count);
    }
    for (uint32_t i = 0; i < count; i++) {
        tensors->by_name[i] = &tensors->list[i];
    }
    qsort(tensors->by_name, count, sizeof(void *), tensor_compare_place);
    FL_TRY(refuse_overlaps(tensors->by_name, count, paths));
    qsort(tensors->by_name, count, sizeof(void *), tensor_compare_name);
    return refuse_twins(tensors->by_name, count, paths);
}

const struct gguf_tensor *gguf_tensors_find(const struct gguf_tensors *tensors, const char *name)
{
    const struct gguf_tensor wanted = {.name = gguf_string_of(name)};
    const struct gguf_tensor *key = &wanted;
    const struct gguf_tensor **found =
        tensors->count == 0
            ? NULL
            : bsearch(&key, tensors->by_name, tensors->count, sizeof(void *), tensor_compare_name);
    return found != NULL ? *found : NULL;
}

void gguf_tensors_free(struct gguf_tensors *tensors)
{
    free(tensors->list);
    free(tensors->by_name);
    *tensors = (struct gguf_tensors){0};
}
