/* shard_eviction.h - keeps a shard cache's folder within its budget, and tidy.
 *
 * Whole models go, the longest unused first; one whose lock file another holds
 * (a plan uses it) stays.  What is removed is said in the log.  An entry that
 * someone has open stays readable for them.
 *
 * Thread:  any; other processes may do the same in the same folder.
 */
#ifndef NODE_SHARD_EVICTION_H
#define NODE_SHARD_EVICTION_H

#include <stdbool.h>
#include <stdint.h>

/* Remove models until `size` more bytes fit into `budget`; false when they cannot. */
bool shard_eviction_make_room(const char *folder, uint64_t budget, uint64_t size);

/* Remove parts that no living process writes: nobody holds their lock, and the process that their
 * name tells is gone or they are older than `age_s`. */
void shard_eviction_remove_stale(const char *folder, unsigned age_s);

#endif
