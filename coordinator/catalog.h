/* catalog.h - models that are open: understood, with their tokenizer.
 *
 * Opening reads a header and builds a vocabulary, up to a few hundred
 * milliseconds, so the worker does it and ready() follows.  A model that a plan
 * or a request uses stays as it is; one that nobody uses is held back until
 * another takes its place, and looked at again before it is used.
 *
 * Thread:  owner (the main loop); the folder and the tokenizers' scratch are the worker's.
 * Memory:  an open model takes its header and vocabulary; at most one unused one is held.
 */
#ifndef COORDINATOR_CATALOG_H
#define COORDINATOR_CATALOG_H

#include <stdbool.h>
#include <stdint.h>

#include "coordinator/chat_template.h"
#include "coordinator/model_shelf.h"
#include "coordinator/tokenizer.h"
#include "coordinator/worker.h"
#include "pipeline/model.h"
#include "proto/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct catalog;

struct catalog_model {
    char name[FL_MODEL_NAME_MAX];
    struct model *model;
    struct tokenizer *tokenizer; /* encoding: the worker's jobs only */
    bool has_chat;
    struct chat_template chat;
    char chat_problem[MODEL_SHELF_PROBLEM_MAX]; /* why there is none */
    uint64_t size;                              /* of the files when they were opened */
    int64_t changed_ns;                         /* as model_file's */
    uint32_t ref_count;                         /* the catalog's */
    struct catalog_model *next;
};

struct catalog_config {
    struct worker *worker;     /* borrowed until close */
    const char *models_folder; /* copied */
    const char *chat_family;   /* overrides the files' templates; NULL: none; borrowed */
    void *ctx;
    /* A model that get() answered with FL_AGAIN is open (keep() it to hold it beyond the call), or
     * cannot be opened: `text` says why. */
    void (*ready)(void *ctx, const char *name, fl_status status, const char *text,
                  struct catalog_model *model);
};

FL_MUST_CHECK fl_status catalog_open(const struct catalog_config *config, struct catalog **out);
/* After worker_close(): no job is under way. */
void catalog_close(struct catalog *catalog);

/* A model in use comes at once, for others FL_AGAIN: ready() follows.  FL_BUSY: no job is to be
 * had. */
FL_MUST_CHECK fl_status catalog_get(struct catalog *catalog, const char *name,
                                    struct catalog_model **out);

/* The open model of that name and identity, or NULL. */
struct catalog_model *catalog_find(struct catalog *catalog, const char *name,
                                   const unsigned char identity[FL_IDENTITY_SIZE]);

/* Hold a model, and let it go. */
void catalog_keep(struct catalog_model *model);
void catalog_release(struct catalog *catalog, struct catalog_model *model);

/* The worker's view of the folder: for jobs only. */
struct model_shelf *catalog_folder(struct catalog *catalog);

#ifdef __cplusplus
}
#endif
#endif
