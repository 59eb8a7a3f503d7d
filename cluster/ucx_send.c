#include <stdlib.h>
#include <string.h>

#include "cluster/ucx.h"

enum { COPY_CACHE_MAX = 8 << 20 }; /* bytes of copies kept for the next messages */

static const size_t copy_class_size[UCX_COPY_CLASSES] = {1 << 9,  1 << 12, 1 << 15,
                                                         1 << 18, 1 << 20, 1 << 22};
_Static_assert(TRANSPORT_COPY_MAX <= 1 << 22, "the largest copy class holds the largest copy");

void ucx_list_init(struct ucx_send_list *list)
{
    list->first = NULL;
    list->last = &list->first;
}

void ucx_list_push(struct ucx_send_list *list, struct ucx_send *send)
{
    send->next = NULL;
    *list->last = send;
    list->last = &send->next;
}

struct ucx_send *ucx_list_pop(struct ucx_send_list *list)
{
    struct ucx_send *send = list->first;
    if (send != NULL) {
        list->first = send->next;
        if (list->first == NULL) {
            list->last = &list->first;
        }
    }
    return send;
}

static void *copy_take(struct ucx *ucx, size_t size, int *out_class)
{
    int class = 0;
    while (copy_class_size[class] < size) {
        class ++;
    }
    *out_class = class;
    void *copy = ucx->free_copies[class];
    if (copy == NULL) {
        return malloc(copy_class_size[class]);
    }
    memcpy(&ucx->free_copies[class], copy, sizeof(void *));
    ucx->free_copy_bytes -= copy_class_size[class];
    return copy;
}

static void copy_give(struct ucx *ucx, void *copy, int class)
{
    if (ucx->free_copy_bytes + copy_class_size[class] > COPY_CACHE_MAX) {
        free(copy);
        return;
    }
    memcpy(copy, &ucx->free_copies[class], sizeof(void *));
    ucx->free_copies[class] = copy;
    ucx->free_copy_bytes += copy_class_size[class];
}

struct ucx_send *ucx_send_take(struct ucx *ucx)
{
    struct ucx_send *send = ucx->free_sends;
    if (send != NULL) {
        ucx->free_sends = send->next;
    } else {
        send = malloc(sizeof(*send));
    }
    if (send != NULL) {
        *send = (struct ucx_send){.link = 0};
    }
    return send;
}

void ucx_send_give(struct ucx *ucx, struct ucx_send *send)
{
    if (send->copy != NULL) {
        copy_give(ucx, send->copy, send->copy_class);
    }
    send->next = ucx->free_sends;
    ucx->free_sends = send;
}

bool ucx_send_copy(struct ucx *ucx, struct ucx_send *send, const void *data, size_t size)
{
    send->copy = copy_take(ucx, size, &send->copy_class);
    if (send->copy == NULL) {
        return false;
    }
    memcpy(send->copy, data, size);
    send->data = send->copy;
    return true;
}

void ucx_sends_free(struct ucx *ucx)
{
    struct ucx_send *send;
    for (size_t i = 0; i < TRANSPORT_LINK_MAX; i++) {
        while (ucx->links[i].state != LINK_FREE &&
               (send = ucx_list_pop(&ucx->links[i].waiting)) != NULL) {
            ucx_send_give(ucx, send);
        }
    }
    while ((send = ucx_list_pop(&ucx->done)) != NULL) {
        ucx_send_give(ucx, send);
    }
    while ((send = ucx->free_sends) != NULL) {
        ucx->free_sends = send->next;
        free(send);
    }
    for (int class = 0; class < UCX_COPY_CLASSES; class ++) {
        while (ucx->free_copies[class] != NULL) {
            void *copy = ucx->free_copies[class];
            memcpy(&ucx->free_copies[class], copy, sizeof(void *));
            free(copy);
        }
    }
}
