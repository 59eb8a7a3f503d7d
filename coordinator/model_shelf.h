/* model_shelf.h - the model files of one folder, by name.
 *
 * A model's name is its file's, without ".gguf" and, for a split one, without
 * "-00001-of-0000N"; only first parts are listed.  What a file holds is found
 * by opening it, once, until its size or time changes.
 *
 * Thread:  owner (the worker: it reads the disk).
 * Memory:  open() allocates, close() frees; files are valid until the next scan().
 */
#ifndef COORDINATOR_MODEL_SHELF_H
#define COORDINATOR_MODEL_SHELF_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/model_shape.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MODEL_SHELF_FILE_MAX = 1024,
    MODEL_SHELF_PATH_MAX = 1024,
    MODEL_SHELF_PROBLEM_MAX = 512,
};

struct model_file {
    char name[FL_MODEL_NAME_MAX];
    char path[MODEL_SHELF_PATH_MAX]; /* of the first part */
    uint64_t size;                   /* of all parts */
    int64_t changed_ns;              /* latest modification of any part */
    bool inspected;
    char architecture[32]; /* "" when the file cannot be used */
    char problem[MODEL_SHELF_PROBLEM_MAX];
};

struct model_shelf;

/* `path` is copied; the folder need not exist yet. */
FL_MUST_CHECK fl_status model_shelf_open(const char *path, struct model_shelf **out);
void model_shelf_close(struct model_shelf *folder);

/* Look at the folder again.  FL_NOT_FOUND when it cannot be read. */
FL_MUST_CHECK fl_status model_shelf_scan(struct model_shelf *folder);

/* Files in order of name, of the last scan. */
uint32_t model_shelf_count(const struct model_shelf *folder);
const struct model_file *model_shelf_at(const struct model_shelf *folder, uint32_t index);

/* Scan, and find a name.  FL_NOT_FOUND with the names there are. */
FL_MUST_CHECK fl_status model_shelf_find(struct model_shelf *folder, const char *name,
                                         const struct model_file **out);

/* Open every file not yet inspected, to learn its architecture or what is wrong with it. */
void model_shelf_inspect(struct model_shelf *folder);

/* "llama", "gemma3" */
const char *model_shelf_architecture(enum fl_architecture architecture);

#ifdef __cplusplus
}
#endif
#endif
