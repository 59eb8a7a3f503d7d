/* file_server.h - gives nodes the ranges of model files that they lack.
 *
 * A node asks for ranges of a model that a plan uses; the worker reads them and
 * the answer leaves as one message with a checksum.  What is read but not yet
 * on the wire is bounded; fetches beyond that wait, and a node that asks for
 * more than FILE_SERVER_NODE_MAX at once is answered with FL_BUSY.
 *
 *   FETCH ─► waiting ─► reading (worker) ─► sending ─► sent(cookie)
 *
 * Thread:  owner (the main loop); files are read on the worker.
 * Memory:  at most FILE_SERVER_BUFFER_MAX bytes of file data.
 */
#ifndef COORDINATOR_FILE_SERVER_H
#define COORDINATOR_FILE_SERVER_H

#include <stdint.h>

#include "coordinator/catalog.h"
#include "coordinator/roster.h"
#include "coordinator/worker.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FILE_SERVER_NODE_MAX = 64,         /* fetches of one node under way */
    FILE_SERVER_BUFFER_MAX = 16 << 20, /* bytes read and not yet sent */
};

struct file_server;

struct file_server_config {
    struct worker *worker; /* all borrowed until close */
    struct roster *roster;
    struct catalog *catalog;
};

FL_MUST_CHECK fl_status file_server_open(const struct file_server_config *config,
                                         struct file_server **out);
/* After worker_close(): nothing is being read. */
void file_server_close(struct file_server *server);

/* Answer a node's FETCH, sooner or later. */
void file_server_fetch(struct file_server *server, struct roster_node *node,
                       const struct fl_fetch *fetch);

/* The wire is done with a message of ours. */
void file_server_sent(struct file_server *server, uint64_t cookie);

/* A link is over, and its cookies with it. */
void file_server_link_down(struct file_server *server, transport_link link);

/* Send what the wire did not take; returns when to call again at the latest. */
uint64_t file_server_poll(struct file_server *server, uint64_t now_ns);

/* Fetches under way, for tests and status. */
uint32_t file_server_count(const struct file_server *server);

#ifdef __cplusplus
}
#endif
#endif
