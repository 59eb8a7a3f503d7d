/* model_storage.h - where a node may find a model's files beside the wire.
 *
 * A struct of functions, so that the same loader reads a folder of the host
 * (model_folder.h) and the memory of a simulation.
 *
 * Thread:  the loader thread.
 * Memory:  open() makes a copy's handle, close() frees it.
 * Units:   offsets from the start of a file, in bytes.
 */
#ifndef NODE_MODEL_STORAGE_H
#define NODE_MODEL_STORAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/model_shape.h"

struct model_copy; /* one model's files, open */

struct model_storage {
    void *ctx;

    /* FL_NOT_FOUND (said as a log line, if at all) when there is no copy here of these names and
     * sizes.  Nothing of it is read. */
    fl_status (*open)(void *ctx, const struct fl_manifest *manifest, struct model_copy **out);

    /* FL_NOT_FOUND, said as a log line, when it holds other bytes than the manifest's. */
    fl_status (*check)(struct model_copy *copy, const struct fl_manifest *manifest);

    /* All of `size` bytes, or FL_IO with a sentence that names the file.  May block on the disk. */
    fl_status (*read)(struct model_copy *copy, uint32_t file, uint64_t offset, void *dst,
                      size_t size);

    /* These bytes are wanted soon; only a hint. */
    void (*will_need)(struct model_copy *copy, uint32_t file, uint64_t offset, size_t size);

    /* Bytes of a range that are in memory already; false: not known.  NULL: never known. */
    bool (*resident)(struct model_copy *copy, uint32_t file, uint64_t offset, uint64_t size,
                     uint64_t *out_bytes);

    void (*close)(struct model_copy *copy);
};

#endif
