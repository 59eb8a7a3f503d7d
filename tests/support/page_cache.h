/* page_cache.h - a test's file, out of the page cache. */
#ifndef TESTS_SUPPORT_PAGE_CACHE_H
#define TESTS_SUPPORT_PAGE_CACHE_H

#include <stdbool.h>

/* Write the file out and drop it.  Tried again for a second when something stays: a page that the
 * kernel moves at the moment cannot be dropped.  False where the file system keeps its files in memory only. */
bool page_cache_drop(int fd);

#endif
