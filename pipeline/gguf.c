#include "pipeline/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    KEY_SIZE_MAX = 65535, /* of a key's name, as the specification has it */
    DIM_COUNT_MAX = 4,
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_MIN = 8,
    ALIGNMENT_MAX = 1 << 20,
    READ_SIZE_MIN = 64 << 10,
    READ_SIZE_MAX = 1 << 20,
    SHOWN_MAX = 72, /* of a name in an error sentence */
    PATH_SIZE_MAX = 4096,
    SPLIT_SUFFIX_SIZE = 20, /* "-00001-of-00003.gguf" */
};

static const char memory_path[] = "model in memory";

struct key {
    struct gguf_string name;
    enum gguf_type type;        /* GGUF_ARRAY for arrays */
    enum gguf_type element;     /* the type itself for a scalar */
    uint32_t count;             /* 1 for a scalar */
    const unsigned char *value; /* the first element */
};

/* One file: its header, and where its tensors' bytes begin. */
struct part {
    char *path;
    uint64_t file_size;
    const unsigned char *header;
    size_t header_size;
    void *mapping; /* anonymous memory that holds the header, or NULL when it is borrowed */
    size_t mapping_size;
    struct key *keys; /* [key_count], sorted by name */
    uint32_t key_count;
    uint32_t tensor_first;
    uint32_t tensor_count;
};

struct gguf {
    struct part parts[FL_FILE_COUNT_MAX];
    uint32_t part_count;
    struct gguf_tensor *tensors; /* [tensor_count], in file order */
    uint32_t tensor_count;
    const struct gguf_tensor **by_name; /* [tensor_count], sorted */
};

/* Walks a header front to back and reads as it goes.  The memory is reserved for the longest header
 * allowed, so that what was read never moves; pages not read cost nothing. */
struct cursor {
    struct part *part;
    int fd; /* -1: everything is there */
    unsigned char *base;
    size_t limit;  /* bytes that may be read: the file's size or GGUF_HEADER_SIZE_MAX */
    size_t filled; /* bytes that are there */
    size_t at;
    size_t read_size; /* of the next read */
};

/* A name as it may be printed: cut, and without control characters. */
struct shown {
    char text[SHOWN_MAX + 4];
};

static struct shown show(struct gguf_string string)
{
    struct shown shown = {.text = ""};
    const size_t size = string.size < SHOWN_MAX ? string.size : SHOWN_MAX;
    for (size_t i = 0; i < size; i++) {
        const unsigned char byte = (unsigned char)string.data[i];
        shown.text[i] = byte < 0x20 || byte == 0x7f ? '?' : (char)byte;
    }
    if (string.size > SHOWN_MAX) {
        memcpy(shown.text + size, "...", 4);
    }
    return shown;
}

static int string_compare(struct gguf_string a, struct gguf_string b)
{
    const size_t common = a.size < b.size ? a.size : b.size;
    const int order = common != 0 ? memcmp(a.data, b.data, common) : 0;
    return order != 0 ? order : (a.size > b.size) - (a.size < b.size);
}

static struct gguf_string string_of(const char *text)
{
    return (struct gguf_string){.data = text, .size = strlen(text)};
}

/* ---- reading ---- */

static uint32_t load_u32(const unsigned char *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static uint64_t load_u64(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static fl_status cursor_fill(struct cursor *cursor, size_t size)
{
    struct part *part = cursor->part;
    if (size > cursor->limit - cursor->at) {
        if (cursor->limit < part->file_size && cursor->fd >= 0) {
            return FL_FAIL(FL_TOO_LARGE, "%s: the header is longer than %d MiB", part->path,
                           GGUF_HEADER_SIZE_MAX >> 20);
        }
        return FL_FAIL(FL_MALFORMED,
                       "%s: the file ends at byte %zu, in the middle of its header: it was cut "
                       "short, copy or download it again",
                       part->path, cursor->limit);
    }
    while (cursor->filled < cursor->at + size) {
        size_t want = cursor->limit - cursor->filled;
        want = want < cursor->read_size ? want : cursor->read_size;
        const ssize_t got =
            pread(cursor->fd, cursor->base + cursor->filled, want, (off_t)cursor->filled);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return FL_FAIL(FL_IO, "%s: cannot be read at byte %zu: %s", part->path, cursor->filled,
                           strerror(errno));
        }
        if (got == 0) {
            return FL_FAIL(FL_MALFORMED, "%s: shrank to %zu bytes while it was read", part->path,
                           cursor->filled);
        }
        cursor->filled += (size_t)got;
        cursor->read_size =
            cursor->read_size < READ_SIZE_MAX ? 2 * cursor->read_size : cursor->read_size;
    }
    return FL_OK;
}

/* Make the next `size` bytes readable. */
static inline fl_status cursor_need(struct cursor *cursor, size_t size)
{
    return size <= cursor->filled - cursor->at ? FL_OK : cursor_fill(cursor, size);
}

static fl_status cursor_u32(struct cursor *cursor, uint32_t *out)
{
    FL_TRY(cursor_need(cursor, sizeof(*out)));
    *out = load_u32(cursor->base + cursor->at);
    cursor->at += sizeof(*out);
    return FL_OK;
}

static fl_status cursor_u64(struct cursor *cursor, uint64_t *out)
{
    FL_TRY(cursor_need(cursor, sizeof(*out)));
    *out = load_u64(cursor->base + cursor->at);
    cursor->at += sizeof(*out);
    return FL_OK;
}

/* A length and that many bytes.  `what` is for the error sentence. */
static fl_status cursor_string(struct cursor *cursor, uint64_t size_max, const char *what,
                               struct gguf_string *out)
{
    uint64_t size;
    FL_TRY(cursor_u64(cursor, &size));
    if (size > size_max) {
        return FL_FAIL(FL_TOO_LARGE,
                       "%s: %s at byte %zu has a length of %" PRIu64 " bytes; at most %" PRIu64
                       " are allowed",
                       cursor->part->path, what, cursor->at - sizeof(size), size, size_max);
    }
    FL_TRY(cursor_need(cursor, (size_t)size));
    *out =
        (struct gguf_string){.data = (const char *)cursor->base + cursor->at, .size = (size_t)size};
    cursor->at += (size_t)size;
    return FL_OK;
}

/* ---- what a file is ---- */

/* What the first bytes look like when they are not GGUF, or NULL. */
static const char *foreign_kind(const unsigned char *bytes, size_t size)
{
    static const struct {
        const char *magic;
        size_t size;
        const char *kind;
    } kinds[] = {
        {"lmgg", 4, "a GGML file of the time before GGUF; convert the model anew"},
        {"tjgg", 4, "a GGJT file of the time before GGUF; convert the model anew"},
        {"fmgg", 4, "a GGMF file of the time before GGUF; convert the model anew"},
        {"algg", 4, "a GGLA adapter of the time before GGUF"},
        {"PK\3\4", 4, "a zip archive or a PyTorch checkpoint; convert it to GGUF"},
        {"\x80\2", 2, "a Python pickle; convert the model to GGUF"},
        {"\x1f\x8b", 2, "a gzip archive; unpack it"},
        {"\x28\xb5\x2f\xfd", 4, "a zstd archive; unpack it"},
        {"version https://git-lfs", 23, "a Git LFS pointer; fetch the file itself"},
        {"<!", 2, "a web page; the download went wrong"},
        {"<html", 5, "a web page; the download went wrong"},
        {"{", 1, "JSON text"},
        {"\x7f"
         "ELF",
         4, "a program"},
    };
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (size >= kinds[i].size && memcmp(bytes, kinds[i].magic, kinds[i].size) == 0) {
            return kinds[i].kind;
        }
    }
    if (size > 8 && load_u64(bytes) < (100u << 20) && bytes[8] == '{') {
        return "a safetensors file; convert the model to GGUF";
    }
    return NULL;
}

static fl_status check_magic(struct cursor *cursor)
{
    const struct part *part = cursor->part;
    if (part->file_size == 0) {
        return FL_FAIL(FL_MALFORMED, "%s: the file is empty; a GGUF model is expected", part->path);
    }
    /* As much as foreign_kind() looks at. */
    const size_t probe = cursor->limit < 32 ? cursor->limit : 32;
    FL_TRY(cursor_need(cursor, probe));
    if (probe < 4 || memcmp(cursor->base, "GGUF", 4) != 0) {
        const char *kind = foreign_kind(cursor->base, probe);
        return FL_FAIL(FL_MALFORMED, "%s: is no GGUF model%s%s", part->path,
                       kind != NULL ? ", it looks like " : " (it does not begin with \"GGUF\")",
                       kind != NULL ? kind : "");
    }
    cursor->at = 4;
    uint32_t version;
    FL_TRY(cursor_u32(cursor, &version));
    if (version != 0 && (version & 0xffff) == 0) {
        return FL_FAIL(FL_UNSUPPORTED, "%s: is a big-endian GGUF file; little-endian is supported",
                       part->path);
    }
    if (version != 2 && version != 3) {
        return FL_FAIL(FL_UNSUPPORTED,
                       "%s: is GGUF version %" PRIu32 "; versions 2 and 3 are supported",
                       part->path, version);
    }
    return FL_OK;
}

/* ---- keys ---- */

static const struct {
    const char *name;
    size_t size; /* 0: not a fixed one */
} type_info[] = {
    [GGUF_UINT8] = {"an integer", 1},  [GGUF_INT8] = {"an integer", 1},
    [GGUF_UINT16] = {"an integer", 2}, [GGUF_INT16] = {"an integer", 2},
    [GGUF_UINT32] = {"an integer", 4}, [GGUF_INT32] = {"an integer", 4},
    [GGUF_FLOAT32] = {"a number", 4},  [GGUF_BOOL] = {"true or false", 1},
    [GGUF_STRING] = {"a string", 0},   [GGUF_ARRAY] = {"an array", 0},
    [GGUF_UINT64] = {"an integer", 8}, [GGUF_INT64] = {"an integer", 8},
    [GGUF_FLOAT64] = {"a number", 8},
};

static fl_status check_type(const struct cursor *cursor, const struct key *key, uint32_t type)
{
    if (type > GGUF_FLOAT64) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: key %s has the unknown value type %" PRIu32 "; types are 0 to %d",
                       cursor->part->path, show(key->name).text, type, GGUF_FLOAT64);
    }
    return FL_OK;
}

/* Step over the strings of an array; their lengths are all that is looked at. */
static fl_status walk_strings(struct cursor *cursor, uint32_t count)
{
    struct gguf_string string;
    for (uint32_t i = 0; i < count; i++) {
        FL_TRY(cursor_string(cursor, GGUF_STRING_SIZE_MAX, "a string in an array", &string));
    }
    return FL_OK;
}

static fl_status parse_array(struct cursor *cursor, struct key *key)
{
    uint32_t element;
    uint64_t count;
    FL_TRY(cursor_u32(cursor, &element));
    FL_TRY(check_type(cursor, key, element));
    FL_TRY(cursor_u64(cursor, &count));
    if (element == GGUF_ARRAY) {
        return FL_FAIL(FL_UNSUPPORTED, "%s: key %s is an array of arrays, which no model needs",
                       cursor->part->path, show(key->name).text);
    }
    if (count > GGUF_ARRAY_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE,
                       "%s: key %s is an array of %" PRIu64 " elements; at most %d are allowed",
                       cursor->part->path, show(key->name).text, count, GGUF_ARRAY_COUNT_MAX);
    }
    key->element = (enum gguf_type)element;
    key->count = (uint32_t)count;
    key->value = cursor->base + cursor->at;
    if (element == GGUF_STRING) {
        return walk_strings(cursor, key->count);
    }
    const size_t size = key->count * type_info[element].size;
    FL_TRY(cursor_need(cursor, size));
    cursor->at += size;
    return FL_OK;
}

static fl_status parse_key(struct cursor *cursor, struct key *key)
{
    uint32_t type;
    FL_TRY(cursor_string(cursor, KEY_SIZE_MAX, "a key", &key->name));
    if (key->name.size == 0) {
        return FL_FAIL(FL_MALFORMED, "%s: the key at byte %zu has no name", cursor->part->path,
                       cursor->at - sizeof(uint64_t));
    }
    FL_TRY(cursor_u32(cursor, &type));
    FL_TRY(check_type(cursor, key, type));
    key->type = key->element = (enum gguf_type)type;
    key->count = 1;
    key->value = cursor->base + cursor->at;
    if (type == GGUF_ARRAY) {
        return parse_array(cursor, key);
    }
    if (type == GGUF_STRING) {
        return walk_strings(cursor, 1);
    }
    FL_TRY(cursor_need(cursor, type_info[type].size));
    cursor->at += type_info[type].size;
    return FL_OK;
}

static int key_compare(const void *a, const void *b)
{
    return string_compare(((const struct key *)a)->name, ((const struct key *)b)->name);
}

static fl_status parse_keys(struct cursor *cursor, uint64_t count)
{
    struct part *part = cursor->part;
    if (count > GGUF_KEY_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "%s: claims %" PRIu64 " keys; at most %d are allowed",
                       part->path, count, GGUF_KEY_COUNT_MAX);
    }
    part->keys = calloc(count != 0 ? count : 1, sizeof(*part->keys));
    if (part->keys == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory for %" PRIu64 " keys", part->path, count);
    }
    for (part->key_count = 0; part->key_count < count; part->key_count++) {
        FL_TRY(parse_key(cursor, &part->keys[part->key_count]));
    }
    qsort(part->keys, part->key_count, sizeof(*part->keys), key_compare);
    for (uint32_t i = 1; i < part->key_count; i++) {
        if (key_compare(&part->keys[i - 1], &part->keys[i]) == 0) {
            return FL_FAIL(FL_MALFORMED, "%s: key %s is there twice", part->path,
                           show(part->keys[i].name).text);
        }
    }
    return FL_OK;
}

static const struct key *key_find(const struct part *part, const char *name)
{
    const struct key wanted = {.name = string_of(name)};
    return part->key_count == 0
               ? NULL
               : bsearch(&wanted, part->keys, part->key_count, sizeof(wanted), key_compare);
}

/* ---- values ---- */

/* An integer of any type as sign and magnitude; false when the element is no integer. */
static bool load_integer(enum gguf_type type, const unsigned char *at, bool *negative,
                         uint64_t *magnitude)
{
    int64_t value = 0;
    uint64_t bits = 0;
    if (type == GGUF_STRING || type == GGUF_ARRAY || type == GGUF_FLOAT32 || type == GGUF_FLOAT64) {
        return false;
    }
    memcpy(&bits, at, type_info[type].size);
    switch (type) {
    case GGUF_INT8: value = (int8_t)bits; break;
    case GGUF_INT16: value = (int16_t)bits; break;
    case GGUF_INT32: value = (int32_t)bits; break;
    case GGUF_INT64: value = (int64_t)bits; break;
    case GGUF_UINT8:
    case GGUF_UINT16:
    case GGUF_UINT32:
    case GGUF_UINT64:
    case GGUF_BOOL:
    case GGUF_FLOAT32:
    case GGUF_FLOAT64:
    case GGUF_STRING:
    case GGUF_ARRAY: break;
    }
    *negative = value < 0;
    *magnitude = value < 0 ? -(uint64_t)value : bits;
    return true;
}

static bool load_float(enum gguf_type type, const unsigned char *at, float *out)
{
    bool negative;
    uint64_t magnitude;
    if (type == GGUF_FLOAT32) {
        memcpy(out, at, sizeof(*out));
        return true;
    }
    if (type == GGUF_FLOAT64) {
        double value;
        memcpy(&value, at, sizeof(value));
        *out = (float)value;
        return true;
    }
    if (type == GGUF_BOOL || !load_integer(type, at, &negative, &magnitude)) {
        return false;
    }
    *out = negative ? -(float)magnitude : (float)magnitude;
    return true;
}

static fl_status wrong_kind(const struct part *part, const struct key *key, const char *want)
{
    const char *got = type_info[key->type].name;
    return FL_FAIL(FL_MALFORMED, "%s: key %s is %s; it must be %s", part->path,
                   show(key->name).text, got, want);
}

static fl_status part_get_uint(const struct part *part, const char *name, uint64_t max,
                               uint64_t *out)
{
    const struct key *key = key_find(part, name);
    bool negative;
    uint64_t magnitude;
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (key->type == GGUF_BOOL || !load_integer(key->type, key->value, &negative, &magnitude)) {
        return wrong_kind(part, key, "an integer");
    }
    if (negative || magnitude > max) {
        return FL_FAIL(FL_MALFORMED, "%s: key %s is %s%" PRIu64 "; it must be 0 to %" PRIu64,
                       part->path, name, negative ? "-" : "", magnitude, max);
    }
    *out = magnitude;
    return FL_OK;
}

bool gguf_has(const struct gguf *gguf, const char *key)
{
    return key_find(&gguf->parts[0], key) != NULL;
}

bool gguf_is_array(const struct gguf *gguf, const char *name)
{
    const struct key *key = key_find(&gguf->parts[0], name);
    return key != NULL && key->type == GGUF_ARRAY;
}

fl_status gguf_get_uint(const struct gguf *gguf, const char *key, uint64_t max, uint64_t *out)
{
    return part_get_uint(&gguf->parts[0], key, max, out);
}

fl_status gguf_get_float(const struct gguf *gguf, const char *name, float *out)
{
    const struct part *part = &gguf->parts[0];
    const struct key *key = key_find(part, name);
    float value;
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (!load_float(key->type, key->value, &value)) {
        return wrong_kind(part, key, "a number");
    }
    if (!isfinite(value)) {
        return FL_FAIL(FL_MALFORMED, "%s: key %s is %f; it must be finite", part->path, name,
                       (double)value);
    }
    *out = value;
    return FL_OK;
}

fl_status gguf_get_bool(const struct gguf *gguf, const char *name, bool *out)
{
    const struct part *part = &gguf->parts[0];
    const struct key *key = key_find(part, name);
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (key->type != GGUF_BOOL) {
        return wrong_kind(part, key, "true or false");
    }
    if (key->value[0] > 1) {
        return FL_FAIL(FL_MALFORMED, "%s: key %s holds %d; true is 1, false is 0", part->path, name,
                       key->value[0]);
    }
    *out = key->value[0] == 1;
    return FL_OK;
}

/* The string whose length is at `at`; its bounds were checked when the header was read. */
static const unsigned char *take_string(const unsigned char *at, struct gguf_string *out)
{
    const size_t size = (size_t)load_u64(at);
    *out = (struct gguf_string){.data = (const char *)at + sizeof(uint64_t), .size = size};
    return at + sizeof(uint64_t) + size;
}

fl_status gguf_get_string(const struct gguf *gguf, const char *name, struct gguf_string *out)
{
    const struct part *part = &gguf->parts[0];
    const struct key *key = key_find(part, name);
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (key->type != GGUF_STRING) {
        return wrong_kind(part, key, "a string");
    }
    (void)take_string(key->value, out);
    return FL_OK;
}

static fl_status array_find(const struct gguf *gguf, const char *name, const struct key **out)
{
    const struct part *part = &gguf->parts[0];
    const struct key *key = key_find(part, name);
    if (key == NULL) {
        return FL_NOT_FOUND;
    }
    if (key->type != GGUF_ARRAY) {
        return wrong_kind(part, key, "an array");
    }
    *out = key;
    return FL_OK;
}

fl_status gguf_array_count(const struct gguf *gguf, const char *name, enum gguf_type *out_type,
                           uint32_t *out_count)
{
    const struct key *key;
    FL_TRY(array_find(gguf, name, &key));
    *out_type = key->element;
    *out_count = key->count;
    return FL_OK;
}

/* The array `name`, of `count` elements whose kind is right when `fits`. */
static fl_status elements_find(const struct gguf *gguf, const char *name, uint32_t count,
                               const char *want, bool (*fits)(enum gguf_type),
                               const struct key **out)
{
    const char *path = gguf->parts[0].path;
    FL_TRY(array_find(gguf, name, out));
    if (!fits((*out)->element)) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: key %s is an array of which each element is %s; it must "
                       "hold %s",
                       path, name, type_info[(*out)->element].name, want);
    }
    if ((*out)->count != count) {
        return FL_FAIL(FL_MALFORMED, "%s: key %s has %" PRIu32 " elements; it must have %" PRIu32,
                       path, name, (*out)->count, count);
    }
    return FL_OK;
}

static bool is_string(enum gguf_type type)
{
    return type == GGUF_STRING;
}

static bool is_number(enum gguf_type type)
{
    return type != GGUF_STRING && type != GGUF_BOOL;
}

static bool is_integer(enum gguf_type type)
{
    return type != GGUF_STRING && type != GGUF_FLOAT32 && type != GGUF_FLOAT64;
}

fl_status gguf_strings(const struct gguf *gguf, const char *name, struct gguf_string *out,
                       uint32_t count)
{
    const struct key *key;
    FL_TRY(elements_find(gguf, name, count, "strings", is_string, &key));
    const unsigned char *at = key->value;
    for (uint32_t i = 0; i < count; i++) {
        at = take_string(at, &out[i]);
    }
    return FL_OK;
}

fl_status gguf_floats(const struct gguf *gguf, const char *name, float *out, uint32_t count)
{
    const struct key *key;
    FL_TRY(elements_find(gguf, name, count, "numbers", is_number, &key));
    const size_t size = type_info[key->element].size;
    for (uint32_t i = 0; i < count; i++) {
        if (!load_float(key->element, key->value + i * size, &out[i]) || isnan(out[i])) {
            return FL_FAIL(FL_MALFORMED, "%s: element %" PRIu32 " of key %s is not a number",
                           gguf->parts[0].path, i, name);
        }
    }
    return FL_OK;
}

fl_status gguf_uints(const struct gguf *gguf, const char *name, uint32_t max, uint32_t *out,
                     uint32_t count)
{
    const struct key *key;
    FL_TRY(elements_find(gguf, name, count, "integers", is_integer, &key));
    const size_t size = type_info[key->element].size;
    for (uint32_t i = 0; i < count; i++) {
        bool negative = false;
        uint64_t magnitude = 0;
        (void)load_integer(key->element, key->value + i * size, &negative, &magnitude);
        if (negative || magnitude > max) {
            return FL_FAIL(FL_MALFORMED,
                           "%s: element %" PRIu32 " of key %s is %s%" PRIu64
                           "; it must be 0 to %" PRIu32,
                           gguf->parts[0].path, i, name, negative ? "-" : "", magnitude, max);
        }
        out[i] = (uint32_t)magnitude;
    }
    return FL_OK;
}

/* ---- tensors ---- */

/* Bytes of a tensor; 0 when its type is unknown. */
static fl_status tensor_size(const struct part *part, const struct gguf_tensor *tensor,
                             uint64_t *out)
{
    uint64_t elements = 1;
    for (uint32_t i = 0; i < DIM_COUNT_MAX; i++) {
        if (tensor->dims[i] == 0) {
            return FL_FAIL(FL_MALFORMED, "%s: dimension %" PRIu32 " of tensor %s is 0", part->path,
                           i, show(tensor->name).text);
        }
        if (__builtin_mul_overflow(elements, tensor->dims[i], &elements) || elements > INT64_MAX) {
            return FL_FAIL(FL_MALFORMED,
                           "%s: the dimensions of tensor %s multiply to more than "
                           "2^63 elements",
                           part->path, show(tensor->name).text);
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
                       part->path, show(tensor->name).text, tensor->dims[0], fl_dtype_name(dtype),
                       length);
    }
    if (__builtin_mul_overflow(elements / length, (uint64_t)fl_dtype_block_size(dtype), out)) {
        return FL_FAIL(FL_MALFORMED, "%s: tensor %s is larger than 2^64 bytes", part->path,
                       show(tensor->name).text);
    }
    return FL_OK;
}

static fl_status parse_tensor(struct cursor *cursor, struct gguf_tensor *tensor)
{
    const struct part *part = cursor->part;
    FL_TRY(cursor_string(cursor, GGUF_TENSOR_NAME_MAX, "a tensor's name", &tensor->name));
    FL_TRY(cursor_u32(cursor, &tensor->dim_count));
    if (tensor->dim_count < 1 || tensor->dim_count > DIM_COUNT_MAX) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: tensor %s has %" PRIu32 " dimensions; 1 to %d are allowed", part->path,
                       show(tensor->name).text, tensor->dim_count, DIM_COUNT_MAX);
    }
    for (uint32_t i = 0; i < DIM_COUNT_MAX; i++) {
        tensor->dims[i] = 1;
        if (i < tensor->dim_count) {
            FL_TRY(cursor_u64(cursor, &tensor->dims[i]));
        }
    }
    FL_TRY(cursor_u32(cursor, &tensor->dtype));
    FL_TRY(cursor_u64(cursor, &tensor->offset));
    return tensor_size(part, tensor, &tensor->size);
}

/* From an offset within the data to one within the file, which must hold all of the tensor. */
static fl_status place_tensor(const struct part *part, uint64_t data_first, uint64_t alignment,
                              struct gguf_tensor *tensor)
{
    if (tensor->offset % alignment != 0) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: tensor %s begins at offset %" PRIu64
                       ", which is not a multiple of the alignment %" PRIu64,
                       part->path, show(tensor->name).text, tensor->offset, alignment);
    }
    uint64_t end;
    if (__builtin_add_overflow(data_first, tensor->offset, &tensor->offset) ||
        __builtin_add_overflow(tensor->offset, tensor->size, &end) || end > part->file_size) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: tensor %s (%" PRIu64 " bytes at offset %" PRIu64
                       ") lies beyond the end of the file at %" PRIu64
                       ": it was cut short, copy or download it again",
                       part->path, show(tensor->name).text, tensor->size, tensor->offset,
                       part->file_size);
    }
    return FL_OK;
}

static fl_status read_alignment(const struct part *part, uint64_t *out)
{
    uint64_t value = ALIGNMENT_DEFAULT;
    const fl_status status = part_get_uint(part, "general.alignment", UINT32_MAX, &value);
    if (status != FL_OK && status != FL_NOT_FOUND) {
        return status;
    }
    if (value < ALIGNMENT_MIN || value > ALIGNMENT_MAX || (value & (value - 1)) != 0) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: general.alignment is %" PRIu64 "; it must be a power of two, %d to %d",
                       part->path, value, ALIGNMENT_MIN, ALIGNMENT_MAX);
    }
    *out = value;
    return FL_OK;
}

static fl_status parse_tensors(struct gguf *gguf, struct cursor *cursor, uint64_t count)
{
    struct part *part = cursor->part;
    if (count > GGUF_TENSOR_COUNT_MAX - gguf->tensor_count) {
        return FL_FAIL(FL_TOO_LARGE, "%s: claims %" PRIu64 " tensors; at most %d are allowed",
                       part->path, count, GGUF_TENSOR_COUNT_MAX);
    }
    uint64_t alignment;
    FL_TRY(read_alignment(part, &alignment));
    part->tensor_first = gguf->tensor_count;
    part->tensor_count = (uint32_t)count;
    const size_t total = gguf->tensor_count + count;
    struct gguf_tensor *tensors =
        realloc(gguf->tensors, (total != 0 ? total : 1) * sizeof(*tensors));
    if (tensors == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory for %zu tensors", part->path, total);
    }
    gguf->tensors = tensors;
    for (; gguf->tensor_count < total; gguf->tensor_count++) {
        struct gguf_tensor *tensor = &tensors[gguf->tensor_count];
        *tensor = (struct gguf_tensor){.file = gguf->part_count};
        FL_TRY(parse_tensor(cursor, tensor));
    }
    const uint64_t data_first = (cursor->at + alignment - 1) & ~(alignment - 1);
    for (uint32_t i = part->tensor_first; i < gguf->tensor_count; i++) {
        FL_TRY(place_tensor(part, data_first, alignment, &tensors[i]));
    }
    return FL_OK;
}

static int tensor_compare_name(const void *a, const void *b)
{
    return string_compare((*(const struct gguf_tensor *const *)a)->name,
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

/* Sort the tensors by name for lookups, after a look at how they lie in their files. */
static fl_status index_tensors(struct gguf *gguf)
{
    const uint32_t count = gguf->tensor_count;
    gguf->by_name = calloc(count != 0 ? count : 1, sizeof(*gguf->by_name));
    if (gguf->by_name == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory for %" PRIu32 " tensors", gguf->parts[0].path,
                       count);
    }
    for (uint32_t i = 0; i < count; i++) {
        gguf->by_name[i] = &gguf->tensors[i];
    }
    qsort(gguf->by_name, count, sizeof(*gguf->by_name), tensor_compare_place);
    for (uint32_t i = 1; i < count; i++) {
        const struct gguf_tensor *before = gguf->by_name[i - 1];
        const struct gguf_tensor *tensor = gguf->by_name[i];
        if (before->file == tensor->file && tensor->offset - before->offset < before->size) {
            return FL_FAIL(FL_MALFORMED, "%s: tensors %s and %s overlap at byte %" PRIu64,
                           gguf->parts[tensor->file].path, show(before->name).text,
                           show(tensor->name).text, tensor->offset);
        }
    }
    qsort(gguf->by_name, count, sizeof(*gguf->by_name), tensor_compare_name);
    for (uint32_t i = 1; i < count; i++) {
        if (tensor_compare_name(&gguf->by_name[i - 1], &gguf->by_name[i]) == 0) {
            return FL_FAIL(FL_MALFORMED, "%s: tensor %s is there twice",
                           gguf->parts[gguf->by_name[i]->file].path,
                           show(gguf->by_name[i]->name).text);
        }
    }
    return FL_OK;
}

/* ---- files ---- */

static fl_status parse_part(struct gguf *gguf, struct cursor *cursor)
{
    uint64_t tensor_count;
    uint64_t key_count;
    FL_TRY(check_magic(cursor));
    FL_TRY(cursor_u64(cursor, &tensor_count));
    FL_TRY(cursor_u64(cursor, &key_count));
    FL_TRY(parse_keys(cursor, key_count));
    FL_TRY(parse_tensors(gguf, cursor, tensor_count));
    cursor->part->header = cursor->base;
    cursor->part->header_size = cursor->at;
    return FL_OK;
}

/* Give back what the longest header would have needed. */
static void shrink_mapping(struct part *part)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t size = (part->header_size + page - 1) & ~(page - 1);
    if (size < part->mapping_size &&
        munmap((unsigned char *)part->mapping + size, part->mapping_size - size) == 0) {
        part->mapping_size = size;
    }
}

static fl_status read_part(struct gguf *gguf, struct part *part, int fd)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return FL_FAIL(FL_IO, "%s: cannot be examined: %s", part->path, strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        return FL_FAIL(FL_MALFORMED, "%s: is %s; a GGUF file is expected", part->path,
                       S_ISDIR(info.st_mode) ? "a folder" : "not a regular file");
    }
    part->file_size = (uint64_t)info.st_size;
    struct cursor cursor = {.part = part, .fd = fd, .read_size = READ_SIZE_MIN};
    cursor.limit = part->file_size < GGUF_HEADER_SIZE_MAX ? (size_t)part->file_size
                                                          : (size_t)GGUF_HEADER_SIZE_MAX;
    if (cursor.limit == 0) {
        return check_magic(&cursor);
    }
    void *mapping = mmap(NULL, cursor.limit, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory for a header of up to %zu bytes", part->path,
                       cursor.limit);
    }
    part->mapping = mapping;
    part->mapping_size = cursor.limit;
    cursor.base = mapping;
    FL_TRY(parse_part(gguf, &cursor));
    shrink_mapping(part);
    return FL_OK;
}

/* Open the next part.  What fails is freed by gguf_close(). */
static fl_status open_part(struct gguf *gguf, const char *path)
{
    struct part *part = &gguf->parts[gguf->part_count];
    part->path = strdup(path);
    if (part->path == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory for its name", path);
    }
    /* Non-blocking: a named pipe must not hold the program up. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        const int error = errno;
        if (error == ENOENT && gguf->part_count > 0) {
            return FL_FAIL(
                FL_NOT_FOUND,
                "%s: does not exist; it is a part of the split model that begins with %s", path,
                gguf->parts[0].path);
        }
        return FL_FAIL(error == ENOENT || error == ENOTDIR ? FL_NOT_FOUND : FL_IO,
                       "%s: cannot be opened: %s", path, strerror(error));
    }
    const fl_status status = read_part(gguf, part, fd);
    close(fd);
    gguf->part_count++;
    return status;
}

/* The name of part `number` (from 1) of `count`, made from the first part's. */
static fl_status part_path(const char *first, uint64_t number, uint64_t count, char *out)
{
    char suffix[SPLIT_SUFFIX_SIZE + 32];
    const size_t size = strlen(first);
    snprintf(suffix, sizeof(suffix), "-%05d-of-%05" PRIu64 ".gguf", 1, count);
    if (size < SPLIT_SUFFIX_SIZE || size >= PATH_SIZE_MAX ||
        strcmp(first + size - SPLIT_SUFFIX_SIZE, suffix) != 0) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: is the first of %" PRIu64 " parts, so its name must end in %s", first,
                       count, suffix);
    }
    const size_t stem = size - SPLIT_SUFFIX_SIZE;
    snprintf(out, PATH_SIZE_MAX, "%.*s-%05" PRIu64 "-of-%05" PRIu64 ".gguf", (int)stem, first,
             number, count);
    return FL_OK;
}

/* `key` of a part, or `fallback` when it is not there. */
static fl_status split_value(const struct part *part, const char *key, uint64_t max,
                             uint64_t fallback, uint64_t *out)
{
    *out = fallback;
    const fl_status status = part_get_uint(part, key, max, out);
    return status == FL_NOT_FOUND ? FL_OK : status;
}

static fl_status check_split(const struct part *part, uint64_t number, uint64_t count)
{
    uint64_t no;
    uint64_t total;
    FL_TRY(split_value(part, "split.no", UINT32_MAX, 0, &no));
    FL_TRY(split_value(part, "split.count", UINT32_MAX, 1, &total));
    if (total != count) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: says it is one of %" PRIu64 " parts, the first part says %" PRIu64,
                       part->path, total, count);
    }
    if (no != number - 1) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: is part %" PRIu64 " of %" PRIu64 "; part %" PRIu64
                       " is expected here%s",
                       part->path, no + 1, count, number,
                       number == 1 ? " (name the first part to open a split model)" : "");
    }
    return FL_OK;
}

static fl_status open_parts(struct gguf *gguf, const char *path)
{
    FL_TRY(open_part(gguf, path));
    struct part *first = &gguf->parts[0];
    uint64_t count;
    uint64_t tensors;
    FL_TRY(split_value(first, "split.count", FL_FILE_COUNT_MAX, 1, &count));
    if (count <= 1) {
        return FL_OK;
    }
    FL_TRY(check_split(first, 1, count));
    for (uint64_t number = 2; number <= count; number++) {
        char name[PATH_SIZE_MAX];
        FL_TRY(part_path(path, number, count, name));
        FL_TRY(open_part(gguf, name));
        FL_TRY(check_split(&gguf->parts[number - 1], number, count));
    }
    FL_TRY(split_value(first, "split.tensors.count", UINT32_MAX, gguf->tensor_count, &tensors));
    if (tensors != gguf->tensor_count) {
        return FL_FAIL(FL_MALFORMED, "%s: announces %" PRIu64 " tensors, its parts hold %" PRIu32,
                       path, tensors, gguf->tensor_count);
    }
    return FL_OK;
}

/* Index `gguf` and hand it out, or free it. */
static fl_status finish(struct gguf *gguf, fl_status status, struct gguf **out)
{
    if (status == FL_OK) {
        status = index_tensors(gguf);
    }
    if (status != FL_OK) {
        gguf_close(gguf);
        return status;
    }
    *out = gguf;
    return FL_OK;
}

fl_status gguf_open(const char *path, struct gguf **out)
{
    struct gguf *gguf = calloc(1, sizeof(*gguf));
    if (gguf == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory to open it", path);
    }
    return finish(gguf, open_parts(gguf, path), out);
}

static fl_status parse_memory(struct gguf *gguf, const void *data, size_t size, uint64_t file_size)
{
    struct part *part = &gguf->parts[0];
    part->path = strdup(memory_path);
    if (part->path == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory to open a %s", memory_path);
    }
    part->file_size = file_size;
    /* Never written: only cursor_fill() writes, and everything is there. */
    struct cursor cursor = {.part = part, .fd = -1, .limit = size, .filled = size};
    memcpy(&cursor.base, &data, sizeof(data));
    const fl_status status = parse_part(gguf, &cursor);
    gguf->part_count = 1;
    FL_TRY(status);
    uint64_t count;
    FL_TRY(split_value(part, "split.count", UINT32_MAX, 1, &count));
    if (count > 1) {
        return FL_FAIL(FL_UNSUPPORTED, "%s: is one of %" PRIu64 " parts, which only files can be",
                       part->path, count);
    }
    return FL_OK;
}

fl_status gguf_parse(const void *data, size_t size, uint64_t file_size, struct gguf **out)
{
    FL_ASSERT(size <= file_size);
    struct gguf *gguf = calloc(1, sizeof(*gguf));
    if (gguf == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory to open a %s", memory_path);
    }
    return finish(gguf, parse_memory(gguf, data, size, file_size), out);
}

void gguf_close(struct gguf *gguf)
{
    if (gguf == NULL) {
        return;
    }
    for (uint32_t i = 0; i < FL_FILE_COUNT_MAX; i++) {
        struct part *part = &gguf->parts[i];
        if (part->mapping != NULL) {
            munmap(part->mapping, part->mapping_size);
        }
        free(part->keys);
        free(part->path);
    }
    free(gguf->tensors);
    free(gguf->by_name);
    free(gguf);
}

uint32_t gguf_file_count(const struct gguf *gguf)
{
    return gguf->part_count;
}

const char *gguf_file_path(const struct gguf *gguf, uint32_t file)
{
    FL_ASSERT(file < gguf->part_count);
    return gguf->parts[file].path;
}

uint64_t gguf_file_size(const struct gguf *gguf, uint32_t file)
{
    FL_ASSERT(file < gguf->part_count);
    return gguf->parts[file].file_size;
}

uint32_t gguf_tensor_count(const struct gguf *gguf)
{
    return gguf->tensor_count;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *gguf, uint32_t index)
{
    FL_ASSERT(index < gguf->tensor_count);
    return &gguf->tensors[index];
}

const struct gguf_tensor *gguf_tensor_find(const struct gguf *gguf, const char *name)
{
    const struct gguf_tensor wanted = {.name = string_of(name)};
    const struct gguf_tensor *key = &wanted;
    const struct gguf_tensor **found = gguf->tensor_count == 0
                                           ? NULL
                                           : bsearch(&key, gguf->by_name, gguf->tensor_count,
                                                     sizeof(*gguf->by_name), tensor_compare_name);
    return found != NULL ? *found : NULL;
}
