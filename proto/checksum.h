/* checksum.h - XXH3 over bytes: is this what was written?
 *
 * Not cryptographic: it finds damage, not forgery.
 *
 * Thread:  any; a running sum belongs to its owner.
 * Memory:  plain values, nothing is allocated.
 * Source:  XXH3, github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
 */
#ifndef PROTO_CHECKSUM_H
#define PROTO_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FL_CHECKSUM128_SIZE = 16, /* bytes, in canonical (big-endian) order */
    FL_CHECKSUM_STATE_SIZE = 640,
};

/* XXH3, 64 bits, of a block; 0 bytes are allowed. */
uint64_t fl_checksum64(const void *data, size_t size);

/* XXH3, 128 bits. */
void fl_checksum128(const void *data, size_t size, unsigned char out[FL_CHECKSUM128_SIZE]);

/* A sum over bytes that come in pieces. */
struct fl_checksum {
    unsigned char state[FL_CHECKSUM_STATE_SIZE] __attribute__((aligned(64)));
};

void fl_checksum_init(struct fl_checksum *sum);
void fl_checksum_add(struct fl_checksum *sum, const void *data, size_t size);
/* What was added so far; more may follow. */
uint64_t fl_checksum_digest64(const struct fl_checksum *sum);
void fl_checksum_digest128(const struct fl_checksum *sum, unsigned char out[FL_CHECKSUM128_SIZE]);

#ifdef __cplusplus
}
#endif
#endif
