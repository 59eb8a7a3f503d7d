/* settings.h - what firstlight-coordinator was started with.
 *
 * Flags say more than the configuration file, and the file more than the
 * defaults.
 *
 * Thread:  main, at the start.
 * Memory:  strings are copied into the struct; nothing to free.
 */
#ifndef COORDINATOR_SETTINGS_H
#define COORDINATOR_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>

#include "cluster/transport_ports.h"
#include "coordinator/client_server.h"
#include "coordinator/coordinator.h"
#include "proto/base/log.h"
#include "proto/base/status.h"
#include "proto/network_address.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SETTINGS_PATH_MAX = 1024 };

struct settings {
    char listen[FL_NETWORK_TEXT_MAX];
    uint32_t client_listen_count;
    char client_listen[CLIENT_SERVER_LISTENER_MAX][FL_NETWORK_TEXT_MAX];
    char models[SETTINGS_PATH_MAX];
    char key_file[SETTINGS_PATH_MAX]; /* "" for none */
    char chat_family[32];
    struct transport_ports data_ports; /* 0 and 0: any */
    enum fl_log_level log;
    struct coordinator_settings coordinator; /* its strings point into this struct */
};

/* FL_END when --help or --version was asked for and printed; FL_INVALID with a sentence. */
FL_MUST_CHECK fl_status settings_read(int argc, char **argv, struct settings *out);

#ifdef __cplusplus
}
#endif
#endif
