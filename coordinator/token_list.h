/* token_list.h - token ids written into the caller's memory.
 *
 * Ids beyond `max` are counted but not written, so that whoever overflows can
 * say how much room would have been right.
 *
 * Thread:  owner.
 * Memory:  `ids` is the caller's.
 */
#ifndef COORDINATOR_TOKEN_LIST_H
#define COORDINATOR_TOKEN_LIST_H

#include <stddef.h>
#include <stdint.h>

#define TOKEN_NONE UINT32_MAX /* no token */

struct token_list {
    uint32_t *ids; /* [max] */
    size_t max;
    size_t count; /* may exceed max */
};

static inline void token_list_push(struct token_list *list, uint32_t id)
{
    if (list->count < list->max) {
        list->ids[list->count] = id;
    }
    list->count++;
}

#endif
