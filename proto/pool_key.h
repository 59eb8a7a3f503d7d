/* pool_key.h - the secret that the machines of a pool share.
 *
 * A key file holds one line: "firstlight-key-1 " and 64 hexadecimal digits.
 *
 * Thread:  any, after fl_pool_key_start().
 * Memory:  a plain value.
 * Source:  libsodium; this is the one file pair that uses it.
 */
#ifndef PROTO_POOL_KEY_H
#define PROTO_POOL_KEY_H

#include <stddef.h>

#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FL_POOL_KEY_SIZE = 32, FL_PROOF_SIZE = 32, FL_KEY_TEXT_SIZE = 96 };

struct fl_pool_key {
    unsigned char bytes[FL_POOL_KEY_SIZE];
};

/* A fresh random key. */
void fl_pool_key_make(struct fl_pool_key *out);

/* The line of a key file, with its newline, NUL-terminated. */
void fl_pool_key_text(const struct fl_pool_key *key, char out[FL_KEY_TEXT_SIZE]);

/* Read a key file.  FL_NOT_FOUND, FL_IO, FL_MALFORMED; FL_DENIED when others may read the file
 * (the sentence says chmod 600). */
FL_MUST_CHECK fl_status fl_pool_key_read(const char *path, struct fl_pool_key *out);

/* Write a new key file with mode 600.  FL_INVALID when it exists. */
FL_MUST_CHECK fl_status fl_pool_key_write(const char *path, const struct fl_pool_key *key);

/* Proof over a message, and its check in constant time. */
void fl_pool_key_prove(const struct fl_pool_key *key, const void *message, size_t size,
                       unsigned char out[FL_PROOF_SIZE]);
int fl_pool_key_check(const struct fl_pool_key *key, const void *message, size_t size,
                      const unsigned char proof[FL_PROOF_SIZE]);

/* Bytes nobody can guess: nonces, incarnations. */
void fl_random_bytes(void *out, size_t size);

#ifdef __cplusplus
}
#endif
#endif
