#include "coordinator/catalog.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/log.h"

struct catalog {
    struct catalog_config config;
    struct model_shelf *folder;
    struct catalog_model *models; /* used ones, and at most one unused */
    struct opening *openings;
};

/* One model being opened, or looked at again. */
struct opening {
    struct job job;
    struct opening *next;
    struct catalog *catalog;
    char name[FL_MODEL_NAME_MAX];
    struct catalog_model *known; /* held already, but perhaps of a file that changed; or NULL */
    fl_status status;            /* FL_AGAIN: not run */
    char text[MODEL_SHELF_PROBLEM_MAX];
    struct catalog_model *model; /* opened; NULL when the known one is still right */
};

fl_status catalog_open(const struct catalog_config *config, struct catalog **out)
{
    struct catalog *catalog = calloc(1, sizeof(*catalog));
    if (catalog == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "catalog: no memory");
    }
    catalog->config = *config;
    const fl_status status = model_shelf_open(config->models_folder, &catalog->folder);
    if (status != FL_OK) {
        free(catalog);
        return status;
    }
    *out = catalog;
    return FL_OK;
}

static void free_model(struct catalog_model *model)
{
    if (model != NULL) {
        tokenizer_close(model->tokenizer);
        model_close(model->model);
        free(model);
    }
}

void catalog_close(struct catalog *catalog)
{
    if (catalog == NULL) {
        return;
    }
    FL_ASSERT(catalog->openings == NULL);
    while (catalog->models != NULL) {
        struct catalog_model *model = catalog->models;
        catalog->models = model->next;
        free_model(model);
    }
    model_shelf_close(catalog->folder);
    free(catalog);
}

struct model_shelf *catalog_folder(struct catalog *catalog)
{
    return catalog->folder;
}

/* ---- on the worker ---- */

static fl_status open_model(const struct catalog *catalog, const struct model_file *file,
                            struct catalog_model *model)
{
    FL_TRY(model_open(file->path, &model->model));
    const struct gguf *gguf = model_gguf(model->model);
    FL_TRY(tokenizer_open(gguf, &model->tokenizer));
    const struct vocabulary *vocabulary = tokenizer_vocabulary(model->tokenizer);
    model->has_chat =
        chat_template_open(gguf, vocabulary, catalog->config.chat_family, &model->chat) == FL_OK;
    if (!model->has_chat) {
        snprintf(model->chat_problem, sizeof(model->chat_problem), "%s", fl_last_error());
    }
    snprintf(model->name, sizeof(model->name), "%s", file->name);
    model->size = file->size;
    model->changed_ns = file->changed_ns;
    return FL_OK;
}

static void run_opening(struct job *job)
{
    struct opening *opening = (struct opening *)job;
    const struct model_file *file = NULL;
    opening->status = model_shelf_find(opening->catalog->folder, opening->name, &file);
    const struct catalog_model *known = opening->known;
    if (opening->status == FL_OK &&
        (known == NULL || file->size != known->size || file->changed_ns != known->changed_ns)) {
        struct catalog_model *model = calloc(1, sizeof(*model));
        opening->status = model == NULL
                              ? FL_FAIL(FL_NO_MEMORY, "no memory for model '%s'", opening->name)
                              : open_model(opening->catalog, file, model);
        if (opening->status == FL_OK) {
            opening->model = model;
        } else {
            free_model(model);
        }
    }
    if (opening->status != FL_OK) {
        snprintf(opening->text, sizeof(opening->text), "%s", fl_last_error());
    }
}

/* ---- on the owner ---- */

static struct catalog_model *find_model(struct catalog *catalog, const char *name)
{
    for (struct catalog_model *model = catalog->models; model != NULL; model = model->next) {
        if (strcmp(model->name, name) == 0) {
            return model;
        }
    }
    return NULL;
}

static void remove_model(struct catalog *catalog, struct catalog_model *model)
{
    for (struct catalog_model **at = &catalog->models; *at != NULL; at = &(*at)->next) {
        if (*at == model) {
            *at = model->next;
            free_model(model);
            return;
        }
    }
}

/* Lets unused models go, all but `keep`. */
static void trim(struct catalog *catalog, const struct catalog_model *keep)
{
    struct catalog_model *next;
    for (struct catalog_model *model = catalog->models; model != NULL; model = next) {
        next = model->next;
        if (model->ref_count == 0 && model != keep) {
            fl_log(FL_LOG_DEBUG, "model %s closed: nothing uses it", model->name);
            remove_model(catalog, model);
        }
    }
}

static void done_opening(struct job *job, void *ctx)
{
    (void)ctx;
    struct opening *opening = (struct opening *)job;
    struct catalog *catalog = opening->catalog;
    for (struct opening **at = &catalog->openings; *at != NULL; at = &(*at)->next) {
        if (*at == opening) {
            *at = opening->next;
            break;
        }
    }
    struct catalog_model *model = opening->model;
    if (model != NULL) {
        /* In front: a former one of that name is not found any more, and goes when it is let go. */
        model->next = catalog->models;
        catalog->models = model;
    } else if (opening->status == FL_OK) {
        model = opening->known;
    }
    catalog_keep(model);
    catalog_release(catalog, opening->known);
    if (opening->status != FL_AGAIN) {
        catalog->config.ready(catalog->config.ctx, opening->name, opening->status, opening->text,
                              model);
    }
    catalog_release(catalog, model);
    free(opening);
}

fl_status catalog_get(struct catalog *catalog, const char *name, struct catalog_model **out)
{
    for (struct opening *opening = catalog->openings; opening != NULL; opening = opening->next) {
        if (strcmp(opening->name, name) == 0) {
            return FL_AGAIN;
        }
    }
    struct catalog_model *model = find_model(catalog, name);
    if (model != NULL && model->ref_count > 0) {
        *out = model;
        return FL_OK;
    }
    struct opening *opening = calloc(1, sizeof(*opening));
    if (opening == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "catalog: no memory");
    }
    *opening = (struct opening){
        .job = {.run = run_opening, .done = done_opening}, .catalog = catalog, .status = FL_AGAIN};
    snprintf(opening->name, sizeof(opening->name), "%s", name);
    catalog_keep(model); /* until the job has looked at its file */
    opening->known = model;
    const fl_status status = worker_submit(catalog->config.worker, &opening->job);
    if (status != FL_OK) {
        catalog_release(catalog, model);
        free(opening);
        return status;
    }
    opening->next = catalog->openings;
    catalog->openings = opening;
    return FL_AGAIN;
}

struct catalog_model *catalog_find(struct catalog *catalog, const char *name,
                                   const unsigned char identity[FL_IDENTITY_SIZE])
{
    for (struct catalog_model *model = catalog->models; model != NULL; model = model->next) {
        const struct fl_manifest *manifest = model_manifest(model->model);
        if (strcmp(model->name, name) == 0 &&
            memcmp(manifest->identity, identity, FL_IDENTITY_SIZE) == 0) {
            return model;
        }
    }
    return NULL;
}

void catalog_keep(struct catalog_model *model)
{
    if (model != NULL) {
        model->ref_count++;
    }
}

void catalog_release(struct catalog *catalog, struct catalog_model *model)
{
    if (model != NULL) {
        FL_ASSERT(model->ref_count > 0);
        model->ref_count--;
        if (model->ref_count == 0) {
            trim(catalog, model);
        }
    }
}
