#include "pipeline/model_identity.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/checksum.h"

_Static_assert((int)FL_IDENTITY_SIZE == (int)FL_CHECKSUM128_SIZE, "an identity is one checksum");

static fl_status add_range(struct fl_checksum *sum, int fd, const char *path, uint64_t offset,
                           uint64_t size)
{
    unsigned char buffer[16 << 10];
    while (size > 0) {
        const size_t want = size < sizeof(buffer) ? (size_t)size : sizeof(buffer);
        const ssize_t got = pread(fd, buffer, want, (off_t)offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return FL_FAIL(FL_IO, "%s: cannot be read at byte %" PRIu64 ": %s", path, offset,
                           got == 0 ? "the file became shorter" : strerror(errno));
        }
        fl_checksum_add(sum, buffer, (size_t)got);
        offset += (uint64_t)got;
        size -= (uint64_t)got;
    }
    return FL_OK;
}

static fl_status add_samples(struct fl_checksum *sum, int fd, const char *path)
{
    const uint64_t head = MODEL_IDENTITY_HEAD_SIZE;
    const uint64_t sample = MODEL_IDENTITY_SAMPLE_SIZE;
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        return FL_FAIL(FL_IO, "%s: is not a regular file", path);
    }
    /* Each sample would bring 128 KiB of neighbours along: time on a slow disk, and bytes that a node
     * on this machine then finds in the page cache. */
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    const uint64_t size = (uint64_t)info.st_size;
    unsigned char text[sizeof(size)];
    for (size_t i = 0; i < sizeof(text); i++) {
        text[i] = (unsigned char)(size >> (8 * i));
    }
    fl_checksum_add(sum, text, sizeof(text));
    if (size <= head + MODEL_IDENTITY_SAMPLE_COUNT * sample) {
        return add_range(sum, fd, path, 0, size);
    }
    FL_TRY(add_range(sum, fd, path, 0, head));
    const uint64_t room = size - head - sample;
    for (uint64_t i = 1; i <= MODEL_IDENTITY_SAMPLE_COUNT; i++) {
        /* room / count first: room * i could overflow. */
        const uint64_t offset =
            i == MODEL_IDENTITY_SAMPLE_COUNT ? room : room / MODEL_IDENTITY_SAMPLE_COUNT * i;
        FL_TRY(add_range(sum, fd, path, head + offset, sample));
    }
    return FL_OK;
}

fl_status model_identity_of_files(const char *const *paths, uint32_t count,
                                  unsigned char out[FL_IDENTITY_SIZE])
{
    struct fl_checksum sum;
    fl_checksum_init(&sum);
    for (uint32_t i = 0; i < count; i++) {
        const int fd = open(paths[i], O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0) {
            const int error = errno;
            return FL_FAIL(error == ENOENT || error == ENOTDIR ? FL_NOT_FOUND : FL_IO,
                           "%s: cannot be opened: %s", paths[i], strerror(error));
        }
        /* No read-ahead: around each sample it costs a cold start as much as some MiB of weights, and
         * makes what is read here look like a file that was in the page cache before. */
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
        const fl_status status = add_samples(&sum, fd, paths[i]);
        close(fd);
        FL_TRY(status);
    }
    fl_checksum_digest128(&sum, out);
    return FL_OK;
}
