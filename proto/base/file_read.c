#include "proto/base/file_read.h"

#include <errno.h>
#include <unistd.h>

size_t fl_file_read(int fd, void *dst, size_t size, uint64_t offset)
{
    size_t done = 0;
    while (done < size) {
        const ssize_t got =
            pread(fd, (unsigned char *)dst + done, size - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            errno = got < 0 ? errno : 0;
            break;
        }
        done += (size_t)got;
    }
    return done;
}
