#include "proto/client/exchange.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "proto/client/interrupt.h"
#include "proto/client/plain_text.h"

enum {
    POLL_MS = 100,      /* a Ctrl-C between two waits is noticed within this */
    CANCEL_WAIT_S = 10, /* for a cancelled request to end */
    TEXT_SIZE = 512,
};

static uint64_t now_ns(void)
{
    const struct fl_clock clock = fl_clock_monotonic();
    return fl_clock_now(&clock);
}

fl_status exchange_open(struct exchange *exchange, const struct exchange_config *config)
{
    *exchange = (struct exchange){.config = config};
    const struct fl_client_config where = {
        .address = config->address,
        .key_file = config->key_file,
        .connect_ms = config->timeout_s > 0 ? (int)config->timeout_s * 1000 : 0,
    };
    return fl_client_open(&where, &exchange->client);
}

void exchange_close(struct exchange *exchange)
{
    progress_bar_clear(&exchange->bar);
    fl_client_close(exchange->client);
    exchange->client = NULL;
}

fl_status exchange_begin(struct exchange *exchange, const struct fl_client_request *request)
{
    progress_bar_init(&exchange->bar, !exchange->config->quiet);
    exchange->heard_ns = now_ns();
    exchange->cancelled_ns = 0;
    return fl_client_send(exchange->client, request, &exchange->id);
}

/* The coordinator's error, said in its words. */
static fl_status fail_as_told(struct exchange *exchange, const struct fl_client_event *event)
{
    char text[TEXT_SIZE];
    char retry[64] = "";
    plain_text(event->as.error.text, text, sizeof(text));
    if (event->as.error.retry_ms >= 50) { /* less is at once: the sentence says that it helps */
        snprintf(retry, sizeof(retry), " (try again in %.1f s)",
                 (double)event->as.error.retry_ms / 1000);
    }
    progress_bar_clear(&exchange->bar);
    fl_status code = (fl_status)event->as.error.code;
    if (fl_status_scope(code) == FL_SCOPE_NONE) {
        code = FL_INTERNAL; /* an error that says nothing failed */
    }
    return FL_FAIL(code, "%s%s", text, retry);
}

/* What a time without any event means. */
static fl_status take_silence(struct exchange *exchange)
{
    const uint64_t now = now_ns();
    if (interrupt_seen() && exchange->cancelled_ns == 0) {
        exchange->cancelled_ns = now;
        return fl_client_cancel(exchange->client, exchange->id);
    }
    if (exchange->cancelled_ns != 0 && now - exchange->cancelled_ns > CANCEL_WAIT_S * FL_NS_PER_S) {
        return FL_FAIL(FL_CANCELLED, "the cancelled request did not end within %d s",
                       CANCEL_WAIT_S);
    }
    const uint32_t limit_s = exchange->config->timeout_s;
    if (limit_s > 0 && now - exchange->heard_ns > limit_s * FL_NS_PER_S) {
        return FL_FAIL(FL_DEADLINE, "the coordinator was silent for %" PRIu32 " s (--timeout)",
                       limit_s);
    }
    return FL_OK;
}

static fl_status next_event(struct exchange *exchange, struct fl_client_event *out)
{
    for (;;) {
        FL_TRY(take_silence(exchange));
        const fl_status status = fl_client_next(exchange->client, POLL_MS, out);
        if (status == FL_AGAIN) {
            continue;
        }
        FL_TRY(status);
        exchange->heard_ns = now_ns();
        if (out->kind == FL_EVENT_ERROR && (out->id == exchange->id || out->id == 0)) {
            return fail_as_told(exchange, out);
        }
        if (out->id != exchange->id) {
            continue; /* the rest of one that was given up */
        }
        if (out->kind != FL_EVENT_PROGRESS) {
            return FL_OK;
        }
        progress_bar_draw(&exchange->bar, out->as.progress.phase, out->as.progress.cause,
                          out->as.progress.bytes_done, out->as.progress.bytes_total);
    }
}

fl_status exchange_next(struct exchange *exchange, struct fl_client_event *out)
{
    const fl_status status = next_event(exchange, out);
    if (status != FL_OK || out->kind != FL_EVENT_ADMITTED) {
        progress_bar_clear(&exchange->bar);
    }
    return status;
}

fl_status exchange_ask(struct exchange *exchange, const struct fl_client_request *request,
                       enum fl_event_kind kind, struct fl_client_event *out)
{
    FL_TRY(exchange_begin(exchange, request));
    FL_TRY(exchange_next(exchange, out));
    if (out->kind == FL_EVENT_DONE && out->as.done.finish == FL_FINISH_CANCELLED) {
        return FL_FAIL(FL_CANCELLED, "cancelled");
    }
    if (out->kind != kind) {
        return FL_FAIL(FL_PROTOCOL, "the coordinator answered with event %d, want %d",
                       (int)out->kind, (int)kind);
    }
    return FL_OK;
}

int exchange_exit(fl_status status)
{
    if (status == FL_OK || status == FL_END) {
        return EXIT_SUCCESS;
    }
    if (status == FL_CANCELLED || interrupt_seen()) {
        return EXIT_INTERRUPTED;
    }
    return EXIT_FAILURE;
}
