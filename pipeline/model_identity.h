/* model_identity.h - says whether two copies of a model are the same.
 *
 * Reads the size, the beginning and evenly spread samples of each file: less
 * than 130 KiB a file, so a node can compare its own copy with the plan's in
 * about a millisecond.  It tells models and conversions apart; a damaged byte
 * between two samples is not its business (the loader's checksums find it).
 *
 * Thread:  any; no state.
 */
#ifndef PIPELINE_MODEL_IDENTITY_H
#define PIPELINE_MODEL_IDENTITY_H

#include <stdint.h>

#include "proto/base/status.h"
#include "proto/model_shape.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MODEL_IDENTITY_HEAD_SIZE = 64 << 10, /* bytes from the beginning of each file */
    MODEL_IDENTITY_SAMPLE_COUNT = 16,
    MODEL_IDENTITY_SAMPLE_SIZE = 4 << 10, /* the last sample ends with the file */
};

/* XXH3-128 over the sizes and samples of `count` files, in order.  A file too short for its samples
 * is read whole.  FL_NOT_FOUND, FL_IO. */
FL_MUST_CHECK fl_status model_identity_of_files(const char *const *paths, uint32_t count,
                                                unsigned char out[FL_IDENTITY_SIZE]);

#ifdef __cplusplus
}
#endif
#endif
