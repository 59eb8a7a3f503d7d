/* residency.h - how much of a file is in the page cache, without reading it.
 *
 * Tells a cold start from a warm one by what was there, not by what was meant.
 * The kernel counts (cachestat, Linux 6.5); an older one is asked about mapped
 * pages with mincore(), of a large range about every eighth block.  No page is
 * touched, so that asking changes nothing.  The kernel answers truthfully only
 * to those who own a file or may write to it: for others nothing is known.
 *
 * Thread:  any.
 * Memory:  none; at most a window of addresses during the call.
 * Units:   bytes.
 * Source:  Linux, mm/filemap.c and mm/mincore.c, can_do_mincore().
 */
#ifndef NODE_RESIDENCY_H
#define NODE_RESIDENCY_H

#include <stdbool.h>
#include <stdint.h>

/* Of the file's bytes offset .. offset + size - 1, those in the page cache.  false: not known. */
bool residency_measure(int fd, uint64_t offset, uint64_t size, uint64_t *out_bytes);
/* The same as on an older kernel, for tests: an estimate when the range is over a MiB. */
bool residency_estimate(int fd, uint64_t offset, uint64_t size, uint64_t *out_bytes);

#endif
