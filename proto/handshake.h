/* handshake.h - who may speak, settled before any other message is parsed.
 *
 * The same four fixed records open every connection that needs them: links
 * between processes of the cluster, and clients over TCP when a pool key is set.
 * Both sides prove that they hold the key without sending it; each proof covers
 * both nonces, both roles and the version, so it cannot be replayed or sent back.
 *
 *   opener                          answerer
 *   HELLO(version, role, nonce) ──►
 *          ◄── CHALLENGE(version, role, nonce, proof or zeros)
 *   PROOF(proof or zeros) ──►
 *          ◄── WELCOME, or REFUSED(reason)
 *
 * Without a key on either side the proofs are zeros and prove nothing: only for
 * loopback.  A side with a key refuses one without, and says so in words.  A
 * record's first byte cannot begin a protobuf message, so that a server without
 * a key can tell a HELLO from a request.
 *
 * Processes of a cluster must be of one FL_PROTOCOL_VERSION.  A client need not:
 * a handshake that it opens has a version of its own, both ways.
 *
 * Thread:  owner.
 * Memory:  a plain struct; no allocation.
 * Source:  proofs are crypto_auth (HMAC-SHA-512-256) of libsodium.
 */
#ifndef PROTO_HANDSHAKE_H
#define PROTO_HANDSHAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/pool_key.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FL_HANDSHAKE_RECORD_MAX = 256, FL_HANDSHAKE_CLIENT_VERSION = 1 };

enum fl_party { FL_PARTY_CLIENT = 1, FL_PARTY_NODE = 2, FL_PARTY_COORDINATOR = 3 };

struct fl_handshake {
    const struct fl_pool_key *key; /* NULL: none; borrowed */
    enum fl_party party;
    bool opener;
    int step;                 /* private */
    enum fl_party peer_party; /* valid once complete */
    unsigned char nonce[32];
    unsigned char peer_nonce[32];
};

void fl_handshake_init(struct fl_handshake *handshake, enum fl_party party, bool opener,
                       const struct fl_pool_key *key);

/* The opener's first record. out [FL_HANDSHAKE_RECORD_MAX]. */
void fl_handshake_hello(struct fl_handshake *handshake, unsigned char *out, size_t *out_size);

/* Take the peer's record; fill in an answer (*out_size 0: none).
 * FL_AGAIN: send the answer and wait for the next record.  FL_OK: complete (send the answer, if
 * any).  FL_PROTOCOL: no record, or another version (named).  FL_DENIED: the key is missing or
 * wrong here or there (said which).  On failure the answer, if any, is a REFUSED record to send
 * before closing. */
FL_MUST_CHECK fl_status fl_handshake_take(struct fl_handshake *handshake, const void *record,
                                          size_t size, unsigned char *out, size_t *out_size);

/* True when these bytes begin a handshake record. */
bool fl_handshake_is_record(const void *data, size_t size);

#ifdef __cplusplus
}
#endif
#endif
