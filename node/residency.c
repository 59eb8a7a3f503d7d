#include "node/residency.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WINDOW_PAGES = 16384 };

/* The kernel says "all there" to everybody else. */
static bool may_know(int fd)
{
    struct stat info;
    return fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
           (info.st_uid == geteuid() || faccessat(fd, "", W_OK, AT_EACCESS | AT_EMPTY_PATH) == 0);
}

/* Bytes first .. end - 1, all of one window. */
static bool measure_window(int fd, uint64_t first, uint64_t end, uint64_t page, uint64_t *bytes)
{
    unsigned char there[WINDOW_PAGES];
    const uint64_t start = first / page * page;
    const size_t size = (size_t)(end - start);
    void *window = mmap(NULL, size, PROT_NONE, MAP_SHARED, fd, (off_t)start);
    if (window == MAP_FAILED) {
        return false;
    }
    const bool known = mincore(window, size, there) == 0;
    (void)munmap(window, size);
    for (uint64_t at = start; known && at < end; at += page) {
        if ((there[(at - start) / page] & 1) != 0) {
            const uint64_t from = at < first ? first : at;
            const uint64_t to = at + page < end ? at + page : end;
            *bytes += to - from;
        }
    }
    return known;
}

bool residency_measure(int fd, uint64_t offset, uint64_t size, uint64_t *out_bytes)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (size > INT64_MAX || offset > INT64_MAX - size || !may_know(fd)) {
        return false;
    }
    uint64_t bytes = 0;
    const uint64_t end = offset + size;
    for (uint64_t at = offset; at < end;) {
        const uint64_t most = at / page * page + WINDOW_PAGES * page;
        const uint64_t stop = most < end ? most : end;
        if (!measure_window(fd, at, stop, page, &bytes)) {
            return false;
        }
        at = stop;
    }
    *out_bytes = bytes;
    return true;
}
