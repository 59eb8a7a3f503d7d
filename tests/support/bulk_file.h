/* bulk_file.h - a file written from front to back, large ones at the disk's speed.
 *
 * Bytes gather in a slab and go out in whole slabs.  A large file is written
 * with O_DIRECT where the file system allows it: it does not wait for the page
 * cache to be cleaned, and leaves nothing in it.  Until commit() the file has
 * another name, so that nobody meets half of it; in a program that holds SIGINT
 * and SIGTERM back, such a signal is an error, FL_CANCELLED, and not a half left.
 *
 * Thread:  owner.
 * Memory:  open() allocates one slab; commit() and discard() free it.
 * Units:   sizes in bytes.
 */
#ifndef TESTS_SUPPORT_BULK_FILE_H
#define TESTS_SUPPORT_BULK_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

enum { BULK_FILE_DIRECT_SIZE_MIN = 64 << 20 }; /* what counts as large */

struct bulk_file;

/* `size` is about what will be written.  FL_IO. */
FL_MUST_CHECK fl_status bulk_file_open(const char *path, uint64_t size, struct bulk_file **out);
FL_MUST_CHECK fl_status bulk_file_put(struct bulk_file *file, const void *bytes, size_t size);

/* Both end the file.  commit() gives it its name: FL_IO when the last bytes cannot be written, and
 * then there is no file. */
FL_MUST_CHECK fl_status bulk_file_commit(struct bulk_file *file);
void bulk_file_discard(struct bulk_file *file);

#endif
