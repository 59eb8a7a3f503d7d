#include "tests/support/page_cache.h"

#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

#include "node/residency.h"

bool page_cache_drop(int fd)
{
    struct stat file;
    uint64_t left = 1;
    if (fsync(fd) != 0 || fstat(fd, &file) != 0) {
        return false;
    }
    for (int attempt = 0; left > 0 && attempt < 200; attempt++) {
        if (attempt > 0) {
            usleep(5000);
        }
        if (posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0 ||
            !residency_measure(fd, 0, (uint64_t)file.st_size, &left)) {
            return false;
        }
    }
    return left == 0;
}
