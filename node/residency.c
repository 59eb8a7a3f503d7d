#include "node/residency.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* mincore() takes a fifth of a microsecond a page: all of a large range would be seen in the TTFT. */
enum {
    BLOCK_SIZE = 64 << 10,
    STRIDE_SIZE = 8 * BLOCK_SIZE,
    EXACT_SIZE = 1 << 20,
    PAGE_SIZE_MIN = 4096,
    PAGES_MAX = EXACT_SIZE / PAGE_SIZE_MIN + 1,
};

/* Not in every system's headers yet. */
struct cache_range {
    uint64_t offset;
    uint64_t size;
};

struct cache_count {
    uint64_t there;
    uint64_t dirty;
    uint64_t under_writeback;
    uint64_t evicted;
    uint64_t lately_evicted;
};

#ifdef SYS_cachestat
static const long cachestat_number = SYS_cachestat;
#else
static const long cachestat_number = 451; /* on every architecture */
#endif

/* The kernel says "all there" to everybody else. */
static bool may_know(int fd)
{
    struct stat info;
    return fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
           (info.st_uid == geteuid() || faccessat(fd, "", W_OK, AT_EACCESS | AT_EMPTY_PATH) == 0);
}

static bool is_range(uint64_t offset, uint64_t size)
{
    return size <= INT64_MAX && offset <= INT64_MAX - size;
}

/* Pages that hold a byte of the range. */
static bool count_pages(int fd, uint64_t offset, uint64_t size, uint64_t *out_pages)
{
    const struct cache_range range = {.offset = offset, .size = size};
    struct cache_count count = {0};
    if (syscall(cachestat_number, fd, &range, &count, 0) != 0) {
        return false;
    }
    *out_pages = count.there;
    return true;
}

/* Exact to the byte: of the first and the last page only a part may be asked for. */
static bool count_bytes(int fd, uint64_t offset, uint64_t size, uint64_t page, uint64_t *out_bytes)
{
    const uint64_t end = offset + size;
    uint64_t pages = 0;
    uint64_t first = 0;
    uint64_t last = 0;
    if (!count_pages(fd, offset, size, &pages) || !count_pages(fd, offset, 1, &first) ||
        !count_pages(fd, end - 1, 1, &last)) {
        return false;
    }
    const uint64_t before = offset % page;
    const uint64_t after = (page - end % page) % page;
    *out_bytes = pages * page - (first > 0 ? before : 0) - (last > 0 ? after : 0);
    *out_bytes = *out_bytes < size ? *out_bytes : size; /* it may change while we count */
    return true;
}

/* Bytes first .. end - 1, at most EXACT_SIZE, of a file that is mapped from `mapped_at` on. */
static bool look_at_pages(unsigned char *mapped, uint64_t mapped_at, uint64_t first, uint64_t end,
                          uint64_t page, uint64_t *out_bytes)
{
    unsigned char there[PAGES_MAX];
    uint64_t bytes = 0;
    const uint64_t start = first / page * page;
    if (mincore(mapped + (start - mapped_at), (size_t)(end - start), there) != 0) {
        return false;
    }
    for (uint64_t at = start; at < end; at += page) {
        if ((there[(at - start) / page] & 1) != 0) {
            const uint64_t from = at < first ? first : at;
            const uint64_t to = at + page < end ? at + page : end;
            bytes += to - from;
        }
    }
    *out_bytes = bytes;
    return true;
}

bool residency_estimate(int fd, uint64_t offset, uint64_t size, uint64_t *out_bytes)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (size == 0 || !is_range(offset, size) || !may_know(fd)) {
        *out_bytes = 0;
        return size == 0 && may_know(fd);
    }
    const uint64_t start = offset / page * page;
    const size_t mapped_size = (size_t)(offset + size - start);
    unsigned char *mapped = mmap(NULL, mapped_size, PROT_NONE, MAP_SHARED, fd, (off_t)start);
    if (mapped == MAP_FAILED) {
        return false;
    }
    const uint64_t stride = size > EXACT_SIZE ? STRIDE_SIZE : EXACT_SIZE;
    const uint64_t block = size > EXACT_SIZE ? BLOCK_SIZE : EXACT_SIZE;
    uint64_t bytes = 0;
    bool known = true;
    for (uint64_t done = 0; known && done < size; done += stride) {
        const uint64_t left = size - done;
        const uint64_t whole = left < stride ? left : stride;
        const uint64_t part = left < block ? left : block;
        uint64_t there = 0;
        known = look_at_pages(mapped, start, offset + done, offset + done + part, page, &there);
        bytes += there * whole / part;
    }
    (void)munmap(mapped, mapped_size);
    *out_bytes = bytes;
    return known;
}

bool residency_measure(int fd, uint64_t offset, uint64_t size, uint64_t *out_bytes)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (size == 0 || !is_range(offset, size) || !may_know(fd)) {
        *out_bytes = 0;
        return size == 0 && may_know(fd);
    }
    return count_bytes(fd, offset, size, page, out_bytes) ||
           residency_estimate(fd, offset, size, out_bytes);
}
