#include "proto/checksum.h"

#include <string.h>
/* The size of a state, which is part of the static interface only. */
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

#include "proto/base/check.h"

_Static_assert(sizeof(XXH3_state_t) <= FL_CHECKSUM_STATE_SIZE, "the state fits its box");
_Static_assert(_Alignof(XXH3_state_t) <= 64, "the box is aligned for the state");

/* The library's state lives in the box: xxhash.h stays out of the header. */
static XXH3_state_t *state_of(struct fl_checksum *sum)
{
    return (XXH3_state_t *)(void *)sum->state;
}

static const XXH3_state_t *const_state_of(const struct fl_checksum *sum)
{
    return (const XXH3_state_t *)(const void *)sum->state;
}

static void store128(XXH128_hash_t hash, unsigned char *out)
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    memcpy(out, canonical.digest, FL_CHECKSUM128_SIZE);
}

uint64_t fl_checksum64(const void *data, size_t size)
{
    return XXH3_64bits(data, size);
}

void fl_checksum128(const void *data, size_t size, unsigned char out[FL_CHECKSUM128_SIZE])
{
    store128(XXH3_128bits(data, size), out);
}

void fl_checksum_init(struct fl_checksum *sum)
{
    /* The library copies fields of a state it has not seen before. */
    memset(sum, 0, sizeof(*sum));
    FL_ASSERT(XXH3_128bits_reset(state_of(sum)) == XXH_OK);
}

void fl_checksum_add(struct fl_checksum *sum, const void *data, size_t size)
{
    if (size != 0) {
        FL_ASSERT(XXH3_128bits_update(state_of(sum), data, size) == XXH_OK);
    }
}

uint64_t fl_checksum_digest64(const struct fl_checksum *sum)
{
    return XXH3_64bits_digest(const_state_of(sum));
}

void fl_checksum_digest128(const struct fl_checksum *sum, unsigned char out[FL_CHECKSUM128_SIZE])
{
    store128(XXH3_128bits_digest(const_state_of(sum)), out);
}
