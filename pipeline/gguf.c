#include "pipeline/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pipeline/gguf_cursor.h"
#include "pipeline/gguf_keys.h"
#include "pipeline/gguf_tensors.h"

enum {
    PATH_SIZE_MAX = 4096,
    SPLIT_SUFFIX_SIZE = 20, /* "-00001-of-00003.gguf" */
};

static const char memory_path[] = "model in memory";

/* One file: its header, and where its tensors' bytes begin. */
struct part {
    char *path;
    uint64_t file_size;
    dev_t device; /* with inode and time of change: which file it was */
    ino_t inode;
    struct timespec changed;
    size_t header_size;
    void *mapping; /* anonymous memory that holds the header, or NULL when it is borrowed */
    size_t mapping_size;
    struct gguf_keys keys;
};

struct gguf {
    struct part parts[FL_FILE_COUNT_MAX];
    uint32_t part_count;
    struct gguf_tensors tensors; /* of all parts */
};

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
    /* A small 64-bit length, then JSON. */
    static const unsigned char small[4] = {0};
    if (size > 8 && memcmp(bytes + 4, small, sizeof(small)) == 0 && bytes[8] == '{') {
        return "a safetensors file; convert the model to GGUF";
    }
    return NULL;
}

static fl_status check_magic(struct gguf_cursor *cursor)
{
    if (cursor->file_size == 0) {
        return FL_FAIL(FL_MALFORMED, "%s: the file is empty; a GGUF model is expected",
                       cursor->path);
    }
    /* As much as foreign_kind() looks at. */
    const size_t probe = cursor->limit < 32 ? cursor->limit : 32;
    FL_TRY(gguf_cursor_need(cursor, probe));
    if (probe < 4 || memcmp(cursor->base, "GGUF", 4) != 0) {
        const char *kind = foreign_kind(cursor->base, probe);
        return FL_FAIL(FL_MALFORMED, "%s: is no GGUF model%s%s", cursor->path,
                       kind != NULL ? ", it looks like " : " (it does not begin with \"GGUF\")",
                       kind != NULL ? kind : "");
    }
    cursor->at = 4;
    uint32_t version = 0;
    FL_TRY(gguf_cursor_u32(cursor, &version));
    if (version != 0 && (version & 0xffff) == 0) {
        return FL_FAIL(FL_UNSUPPORTED, "%s: is a big-endian GGUF file; little-endian is supported",
                       cursor->path);
    }
    if (version != 2 && version != 3) {
        return FL_FAIL(FL_UNSUPPORTED,
                       "%s: is GGUF version %" PRIu32 "; versions 2 and 3 are supported",
                       cursor->path, version);
    }
    return FL_OK;
}

/* ---- files ---- */

static fl_status parse_part(struct gguf *gguf, struct part *part, struct gguf_cursor *cursor)
{
    uint64_t tensor_count = 0;
    uint64_t key_count = 0;
    FL_TRY(check_magic(cursor));
    FL_TRY(gguf_cursor_u64(cursor, &tensor_count));
    FL_TRY(gguf_cursor_u64(cursor, &key_count));
    FL_TRY(gguf_keys_read(&part->keys, cursor, key_count));
    FL_TRY(gguf_tensors_read(&gguf->tensors, cursor, &part->keys, tensor_count, gguf->part_count));
    part->header_size = cursor->at;
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
    part->device = info.st_dev;
    part->inode = info.st_ino;
    part->changed = info.st_mtim;
    struct gguf_cursor cursor = {.path = part->path,
                                 .file_size = part->file_size,
                                 .fd = fd,
                                 .read_size = GGUF_CURSOR_READ_SIZE};
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
    FL_TRY(parse_part(gguf, part, &cursor));
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
    /* The reads are large, and nothing behind the header is wanted. */
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
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
    const fl_status status = gguf_keys_uint(&part->keys, key, max, out);
    return status == FL_NOT_FOUND ? FL_OK : status;
}

static fl_status check_split(const struct part *part, uint64_t number, uint64_t count)
{
    uint64_t no = 0;
    uint64_t total = 0;
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
    uint64_t count = 0;
    uint64_t tensors = 0;
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
    FL_TRY(split_value(first, "split.tensors.count", UINT32_MAX, gguf->tensors.count, &tensors));
    if (tensors != gguf->tensors.count) {
        return FL_FAIL(FL_MALFORMED, "%s: announces %" PRIu64 " tensors, its parts hold %" PRIu32,
                       path, tensors, gguf->tensors.count);
    }
    return FL_OK;
}

/* Index `gguf` and hand it out, or free it. */
static fl_status finish(struct gguf *gguf, fl_status status, struct gguf **out)
{
    if (status == FL_OK) {
        const char *paths[FL_FILE_COUNT_MAX];
        for (uint32_t i = 0; i < gguf->part_count; i++) {
            paths[i] = gguf->parts[i].path;
        }
        status = gguf_tensors_index(&gguf->tensors, paths);
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
    /* Never written: only gguf_cursor_fill() writes, and everything is there. */
    struct gguf_cursor cursor = {
        .path = part->path, .file_size = file_size, .fd = -1, .limit = size, .filled = size};
    memcpy(&cursor.base, &data, sizeof(data));
    const fl_status status = parse_part(gguf, part, &cursor);
    gguf->part_count = 1;
    FL_TRY(status);
    uint64_t count = 0;
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
        gguf_keys_free(&part->keys);
        free(part->path);
    }
    gguf_tensors_free(&gguf->tensors);
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

fl_status gguf_file_check(const struct gguf *gguf, uint32_t file, int fd)
{
    FL_ASSERT(file < gguf->part_count);
    const struct part *part = &gguf->parts[file];
    struct stat info;
    if (fstat(fd, &info) != 0 || info.st_dev != part->device || info.st_ino != part->inode ||
        (uint64_t)info.st_size != part->file_size || info.st_mtim.tv_sec != part->changed.tv_sec ||
        info.st_mtim.tv_nsec != part->changed.tv_nsec) {
        return FL_FAIL(FL_IO,
                       "%s: was replaced or changed since the model was opened; load it again",
                       part->path);
    }
    return FL_OK;
}

uint32_t gguf_tensor_count(const struct gguf *gguf)
{
    return gguf->tensors.count;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *gguf, uint32_t index)
{
    FL_ASSERT(index < gguf->tensors.count);
    return &gguf->tensors.list[index];
}

const struct gguf_tensor *gguf_tensor_find(const struct gguf *gguf, const char *name)
{
    return gguf_tensors_find(&gguf->tensors, name);
}

/* ---- values ---- */

bool gguf_has(const struct gguf *gguf, const char *key)
{
    return gguf_keys_find(&gguf->parts[0].keys, key) != NULL;
}

bool gguf_is_array(const struct gguf *gguf, const char *key)
{
    const struct gguf_key *found = gguf_keys_find(&gguf->parts[0].keys, key);
    return found != NULL && found->type == GGUF_ARRAY;
}

fl_status gguf_get_uint(const struct gguf *gguf, const char *key, uint64_t max, uint64_t *out)
{
    return gguf_keys_uint(&gguf->parts[0].keys, key, max, out);
}

fl_status gguf_get_float(const struct gguf *gguf, const char *key, float *out)
{
    return gguf_keys_float(&gguf->parts[0].keys, key, out);
}

fl_status gguf_get_bool(const struct gguf *gguf, const char *key, bool *out)
{
    return gguf_keys_bool(&gguf->parts[0].keys, key, out);
}

fl_status gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *out)
{
    return gguf_keys_string(&gguf->parts[0].keys, key, out);
}

fl_status gguf_array_count(const struct gguf *gguf, const char *key, enum gguf_type *out_type,
                           uint32_t *out_count)
{
    return gguf_keys_array(&gguf->parts[0].keys, key, out_type, out_count);
}

fl_status gguf_strings(const struct gguf *gguf, const char *key, struct gguf_string *out,
                       uint32_t count)
{
    return gguf_keys_strings(&gguf->parts[0].keys, key, out, count);
}

fl_status gguf_floats(const struct gguf *gguf, const char *key, float *out, uint32_t count)
{
    return gguf_keys_floats(&gguf->parts[0].keys, key, out, count);
}

fl_status gguf_uints(const struct gguf *gguf, const char *key, uint32_t max, uint32_t *out,
                     uint32_t count)
{
    return gguf_keys_uints(&gguf->parts[0].keys, key, max, out, count);
}
