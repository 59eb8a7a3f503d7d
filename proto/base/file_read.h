/* file_read.h - all the bytes of a place in a file, however many calls of the system it takes.
 *
 * Thread:  any.
 */
#ifndef PROTO_BASE_FILE_READ_H
#define PROTO_BASE_FILE_READ_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns how many of `size` bytes at `offset` were read.  Fewer: errno says why, 0 that the file
 * ends there.  Says nothing: callers know what the file is. */
size_t fl_file_read(int fd, void *dst, size_t size, uint64_t offset);

#ifdef __cplusplus
}
#endif
#endif
