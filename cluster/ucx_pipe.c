#include <inttypes.h>
#include <stdio.h>

#include <ucp/api/ucp.h>

#include "cluster/ucx.h"
#include "proto/base/clock.h"

static const uint64_t idle_wait_ns = 10 * FL_NS_PER_S;   /* a pipe that no link uses */
static const uint64_t retired_wait_ns = FL_NS_PER_S / 4; /* that none may use: for goodbyes */

static void pipe_fail(struct ucx_pipe *pipe, ucs_status_t error)
{
    if (!pipe->failed) {
        pipe->failed = true;
        pipe->error = error;
    }
    pipe->ucx->attention = true;
}

void ucx_pipe_retire(struct ucx_pipe *pipe)
{
    pipe->retired = true;
}

void ucx_pipe_cut(struct ucx_pipe *pipe)
{
    pipe_fail(pipe, UCS_ERR_CANCELED);
}

const char *ucx_pipe_error(const struct ucx_pipe *pipe)
{
    return ucs_status_string((ucs_status_t)pipe->error);
}

static void on_pipe_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    (void)ep;
    pipe_fail(arg, status);
}

static void on_sent(void *request, ucs_status_t status, void *user_data)
{
    struct ucx_pipe *pipe = user_data;
    pipe->busy = false;
    pipe->ucx->more_out = true;
    if (status != UCS_OK) {
        pipe_fail(pipe, status);
    }
    ucp_request_free(request);
}

void ucx_pipe_give_up(struct ucx_pipe *pipe, transport_link link)
{
    struct ucx_send_list kept;
    struct ucx_send *send;
    ucx_list_init(&kept);
    if (pipe->busy && (send = ucx_list_pop(&pipe->out)) != NULL) {
        ucx_list_push(&kept, send);
    }
    while ((send = ucx_list_pop(&pipe->out)) != NULL) {
        ucx_list_push(link == 0 || send->link == link ? &pipe->ucx->done : &kept, send);
    }
    ucx_list_init(&pipe->out);
    while ((send = ucx_list_pop(&kept)) != NULL) {
        ucx_list_push(&pipe->out, send);
    }
}

/* Hand the next fragment of a message to UCX; false when it has no room for it now.  Over TCP a
 * fragment is taken at once or not at all: what UCX queues, it asks the peer to connect back for. */
static bool send_fragment(struct ucx_pipe *pipe, struct ucx_send *send)
{
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK |
                        UCP_OP_ATTR_FIELD_USER_DATA |
                        (pipe->ucx->tcp_only ? UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL : 0),
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_sent,
        .user_data = pipe,
    };
    const size_t left = send->size - send->offset;
    const size_t size = left < UCX_FRAGMENT_MAX ? left : UCX_FRAGMENT_MAX;
    const void *data = size > 0 ? (const unsigned char *)send->data + send->offset : NULL;
    if (send->started) {
        ucx_put_u32(send->header + 12, (uint32_t)send->offset); /* sequence and receiver stay */
    }
    const enum ucx_am id = send->started ? UCX_AM_MORE : send->id;
    const size_t header_size = send->started ? UCX_MORE_SIZE : send->header_size;
    pipe->busy = true;
    ucs_status_ptr_t request =
        ucp_am_send_nbx(pipe->ep, id, send->header, header_size, data, size, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        pipe->busy = false;
    }
    if (UCS_PTR_STATUS(request) == UCS_ERR_NO_RESOURCE) {
        return false;
    }
    if (UCS_PTR_IS_ERR(request)) {
        pipe_fail(pipe, UCS_PTR_STATUS(request));
    }
    send->started = true;
    send->offset += size;
    return true;
}

/* Send what can be sent. */
static void pump(struct ucx_pipe *pipe)
{
    bool room = true;
    while (room && !pipe->busy && !pipe->failed && pipe->out.first != NULL) {
        struct ucx_send *send = pipe->out.first;
        if (!send->started || send->offset < send->size) {
            room = send_fragment(pipe, send);
        } else {
            ucx_list_push(&pipe->ucx->done, ucx_list_pop(&pipe->out));
        }
    }
    if (pipe->failed) {
        ucx_pipe_give_up(pipe, 0);
    }
}

void ucx_pipes_pump(struct ucx *ucx)
{
    ucx->more_out = false;
    for (size_t i = 0; i < ucx->pipe_end; i++) {
        if (ucx->pipes[i].out.first != NULL) {
            pump(&ucx->pipes[i]);
        }
    }
}

void ucx_pipe_post(struct ucx_pipe *pipe, enum ucx_am id, struct ucx_send *send)
{
    struct ucx *ucx = pipe->ucx;
    send->id = id;
    if (pipe->failed || pipe->ep == NULL) {
        ucx_list_push(&ucx->done, send);
        return;
    }
    ucx_list_push(&pipe->out, send);
    if (ucx->inside) {
        ucx->more_out = true;
    } else {
        pump(pipe);
    }
}

void ucx_pipe_post_own(struct ucx_pipe *pipe, enum ucx_am id, uint64_t first, uint64_t second,
                       uint64_t third, size_t size)
{
    struct ucx_send *send = ucx_send_take(pipe->ucx);
    if (send == NULL) {
        pipe_fail(pipe, UCS_ERR_NO_MEMORY);
        return;
    }
    ucx_put_u64(send->header, first);
    ucx_put_u64(send->header + 8, second);
    ucx_put_u64(send->header + 16, third);
    send->header_size = size;
    if (id == UCX_AM_KNOCK && pipe->ucx->door == NULL) {
        send->data = pipe->ucx->inbox_address.bytes;
        send->size = pipe->ucx->inbox_address.size;
    }
    ucx_pipe_post(pipe, id, send);
}

static struct ucx_pipe *pipe_take(struct ucx *ucx)
{
    for (size_t i = 0; i < UCX_PIPE_MAX; i++) {
        struct ucx_pipe *pipe = &ucx->pipes[i];
        if (pipe->ep == NULL && pipe->closing == NULL && !pipe->busy) {
            ucx->pipe_end = i < ucx->pipe_end ? ucx->pipe_end : i + 1;
            *pipe = (struct ucx_pipe){.ucx = ucx};
            ucx_list_init(&pipe->out);
            return pipe;
        }
    }
    return NULL;
}

static ucs_status_t pipe_create(struct ucx_pipe *pipe, ucp_ep_params_t *params)
{
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler = (ucp_err_handler_t){.cb = on_pipe_error, .arg = pipe};
    const ucs_status_t status = ucp_ep_create(pipe->ucx->outbox, params, &pipe->ep);
    if (status != UCS_OK) {
        pipe->ep = NULL;
    }
    return status;
}

/* Begin to close the endpoint; what it still had to send is given up. */
static void pipe_close(struct ucx_pipe *pipe)
{
    static const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                              .flags = UCP_EP_CLOSE_FLAG_FORCE};
    if (pipe->ep == NULL) {
        return;
    }
    ucs_status_ptr_t request = ucp_ep_close_nbx(pipe->ep, &param);
    pipe->ep = NULL;
    pipe->failed = true;
    ucx_pipe_give_up(pipe, 0);
    pipe->ucx->more_out = true; /* for what UCX has let go of meanwhile */
    pipe->closing = UCS_PTR_IS_PTR(request) ? request : NULL;
    pipe->ucx->attention = true;
}

void ucx_pipe_release(struct ucx_pipe *pipe)
{
    FL_ASSERT(pipe->link_count > 0);
    pipe->link_count--;
    if (pipe->link_count == 0 && (pipe->retired || pipe->ucx->door != NULL)) {
        pipe->deadline_ns = ucx_now_ns() + (pipe->retired ? retired_wait_ns : idle_wait_ns);
        ucx_look_at(pipe->ucx, pipe->deadline_ns);
    }
}

struct ucx_pipe *ucx_pipe_to(struct ucx *ucx, const unsigned char *blob, const char **out_why)
{
    const uint64_t process = ucx_get_u64(blob);
    *out_why = "too many processes at once";
    for (size_t i = 0; i < ucx->pipe_end; i++) {
        struct ucx_pipe *pipe = &ucx->pipes[i];
        if (pipe->ep != NULL && !pipe->failed && !pipe->retired && pipe->process == process) {
            return pipe;
        }
    }
    struct ucx_pipe *pipe = pipe_take(ucx);
    if (pipe == NULL) {
        return NULL;
    }
    pipe->process = process;
    snprintf(pipe->peer, sizeof(pipe->peer), "worker %016" PRIx64, process);
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
        .address = (const ucp_address_t *)(const void *)(blob + UCX_BLOB_PROCESS_SIZE),
    };
    const ucs_status_t status = pipe_create(pipe, &params);
    *out_why = ucs_status_string(status);
    return status == UCS_OK ? pipe : NULL;
}

void ucx_pipe_look_after(struct ucx *ucx, struct ucx_pipe *pipe, uint64_t now)
{
    if (pipe->closing != NULL) {
        if (ucp_request_check_status(pipe->closing) != UCS_INPROGRESS) {
            ucp_request_free(pipe->closing);
            pipe->closing = NULL;
        } else {
            ucx_look_at(ucx, now + FL_NS_PER_MS);
        }
        return;
    }
    if (pipe->ep == NULL) {
        return;
    }
    if (pipe->failed) {
        ucx_links_lost(ucx, pipe);
        pipe_close(pipe);
    } else if (pipe->deadline_ns != 0 && pipe->link_count == 0) {
        if (now >= pipe->deadline_ns) {
            pipe_close(pipe);
        } else {
            ucx_look_at(ucx, pipe->deadline_ns);
        }
    }
}

void ucx_pipes_close(struct ucx *ucx)
{
    for (size_t i = 0; i < ucx->pipe_end; i++) {
        pipe_close(&ucx->pipes[i]);
    }
    const uint64_t deadline = ucx_now_ns() + FL_NS_PER_S;
    size_t open = 1;
    while (open > 0 && ucx_now_ns() < deadline) {
        (void)ucx_outbox_progress(ucx);
        ucx_pipes_pump(ucx);
        open = 0;
        for (size_t i = 0; i < ucx->pipe_end; i++) {
            ucx_pipe_look_after(ucx, &ucx->pipes[i], 0);
            open += ucx->pipes[i].closing != NULL;
        }
    }
}
