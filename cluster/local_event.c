#include "cluster/local_event.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct local_event *local_event_new(void)
{
    struct local_event *event = calloc(1, sizeof(*event));
    FL_ASSERT(event != NULL);
    return event;
}

void local_event_free(struct local_event *event)
{
    free(event->data);
    free(event);
}

void local_event_fill(struct local_event *event, const void *header, size_t header_size,
                      const void *data, size_t size)
{
    FL_ASSERT(event->data == NULL && header_size <= sizeof(event->header));
    event->header_size = header_size;
    event->size = size;
    if (header_size > 0) {
        memcpy(event->header, header, header_size);
    }
    if (size > 0) {
        event->data = malloc(size);
        FL_ASSERT(event->data != NULL);
        memcpy(event->data, data, size);
    }
}

static void grow(struct local_event_list *list)
{
    if (list->count == list->size) {
        list->size = list->size > 0 ? list->size * 2 : 64;
        list->events = realloc(list->events, list->size * sizeof(struct local_event *));
        FL_ASSERT(list->events != NULL);
    }
}

void local_event_list_append(struct local_event_list *list, struct local_event *event)
{
    grow(list);
    list->events[list->count++] = event;
}

static bool before(const struct local_event *a, const struct local_event *b)
{
    return a->when_ns != b->when_ns ? a->when_ns < b->when_ns : a->order < b->order;
}

void local_event_list_push(struct local_event_list *list, struct local_event *event)
{
    grow(list);
    size_t i = list->count++;
    while (i > 0 && before(event, list->events[(i - 1) / 2])) {
        list->events[i] = list->events[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    list->events[i] = event;
}

struct local_event *local_event_list_pop(struct local_event_list *list)
{
    FL_ASSERT(list->count > 0);
    struct local_event *first = list->events[0];
    struct local_event *last = list->events[--list->count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= list->count) {
            break;
        }
        if (child + 1 < list->count && before(list->events[child + 1], list->events[child])) {
            child++;
        }
        if (!before(list->events[child], last)) {
            break;
        }
        list->events[i] = list->events[child];
        i = child;
    }
    list->events[i] = last;
    return first;
}

uint64_t local_event_list_next_ns(const struct local_event_list *list)
{
    return list->count > 0 ? list->events[0]->when_ns : UINT64_MAX;
}

void local_event_list_clear(struct local_event_list *list)
{
    while (list->count > 0) {
        local_event_free(list->events[--list->count]);
    }
}

void local_event_list_close(struct local_event_list *list)
{
    local_event_list_clear(list);
    free(list->events);
    *list = (struct local_event_list){0};
}
