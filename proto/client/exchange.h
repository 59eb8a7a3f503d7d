/* exchange.h - one request of the tool, from sending it to its last event.
 *
 * Progress becomes the bar on the terminal, an error event becomes a failure,
 * Ctrl-C becomes a CANCEL, after which the request still ends in its own way.
 *
 * Thread:  the main thread.
 * Memory:  open() allocates the connection; events live until the next call.
 */
#ifndef PROTO_CLIENT_EXCHANGE_H
#define PROTO_CLIENT_EXCHANGE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/client/client.h"
#include "proto/client/options.h"
#include "proto/client/progress_bar.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What every command that talks to a coordinator can be told. */
struct exchange_config {
    const char *address;
    const char *key_file;
    uint32_t timeout_s; /* silence before giving up; 0: none */
    bool json;
    bool quiet;
};

#define EXCHANGE_OPTIONS(config)                                                                     \
    {OPTION_HEADING, "Connection and output", NULL, NULL, NULL, 0, 0},                               \
        {OPTION_ADDRESS,                                                                             \
         "--addr",                                                                                   \
         "HOST:PORT",                                                                                \
         "the coordinator, or unix:/path (FIRSTLIGHT_ADDR; 127.0.0.1:7411)",                         \
         &(config)->address,                                                                         \
         0,                                                                                          \
         0},                                                                                         \
        {OPTION_TEXT,                                                                                \
         "--key-file",                                                                               \
         "FILE",                                                                                     \
         "the pool's key (FIRSTLIGHT_KEY_FILE)",                                                     \
         &(config)->key_file,                                                                        \
         0,                                                                                          \
         0},                                                                                         \
        {OPTION_COUNT,         "--timeout", "SECONDS", "give up after this much silence (0: never)", \
         &(config)->timeout_s, 0,           86400},                                                  \
        {OPTION_FLAG, "--json", NULL, "one JSON object on standard output", &(config)->json, 0, 0},  \
    {                                                                                                \
        OPTION_FLAG, "--quiet", NULL, "no progress and no figures on standard error",                \
            &(config)->quiet, 0, 0                                                                   \
    }

struct exchange {
    struct fl_client *client;
    const struct exchange_config *config;
    struct progress_bar bar;
    uint64_t id;
    uint64_t heard_ns;     /* when the last event came */
    uint64_t cancelled_ns; /* when CANCEL was sent; 0: it was not */
};

FL_MUST_CHECK fl_status exchange_open(struct exchange *exchange,
                                      const struct exchange_config *config);
void exchange_close(struct exchange *exchange);

/* Send a request; next() then speaks of this one. */
FL_MUST_CHECK fl_status exchange_begin(struct exchange *exchange,
                                       const struct fl_client_request *request);

/* Its next event but progress.  The coordinator's error is a failure with its code; FL_CANCELLED
 * when Ctrl-C came and the request did not end in time or has nothing to cancel. */
FL_MUST_CHECK fl_status exchange_next(struct exchange *exchange, struct fl_client_event *out);

/* begin() and next() for a request with one answer of this kind; others are FL_PROTOCOL, and
 * FL_CANCELLED when it was cancelled. */
FL_MUST_CHECK fl_status exchange_ask(struct exchange *exchange,
                                     const struct fl_client_request *request,
                                     enum fl_event_kind kind, struct fl_client_event *out);

/* The exit status of a command that ended like this. */
int exchange_exit(fl_status status);

#ifdef __cplusplus
}
#endif
#endif
