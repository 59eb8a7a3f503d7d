#include "pipeline/model.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pipeline/model_identity.h"
#include "pipeline/model_metadata.h"
#include "pipeline/model_pieces.h"

struct model {
    struct gguf *gguf;
    struct fl_manifest manifest;
    struct fl_piece pieces[FL_PIECE_COUNT_MAX];
};

static fl_status read_manifest(const struct gguf *gguf, struct fl_manifest *manifest)
{
    manifest->file_count = gguf_file_count(gguf);
    for (uint32_t i = 0; i < manifest->file_count; i++) {
        manifest->files[i].size = gguf_file_size(gguf, i);
    }
    FL_TRY(model_metadata_read(gguf, &manifest->shape));
    FL_TRY(model_pieces_read(gguf, manifest));
    return fl_manifest_check(manifest);
}

fl_status model_from_gguf(struct gguf *gguf, const char *name, struct model **out)
{
    const char *path = gguf_file_path(gguf, 0);
    if (strlen(name) >= FL_MODEL_NAME_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "%s: the model's name is longer than %d bytes", path,
                       FL_MODEL_NAME_MAX - 1);
    }
    struct model *model = calloc(1, sizeof(*model));
    if (model == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory to describe the model", path);
    }
    model->manifest.pieces = model->pieces;
    snprintf(model->manifest.name, sizeof(model->manifest.name), "%s", name);
    const fl_status status = read_manifest(gguf, &model->manifest);
    if (status != FL_OK) {
        free(model);
        return status;
    }
    model->gguf = gguf;
    *out = model;
    return FL_OK;
}

/* The file's name without folder, ".gguf" and the number of its part. */
static void name_of_path(const char *path, char *out, size_t out_size)
{
    static const char suffix[] = ".gguf";
    const char *slash = strrchr(path, '/');
    const char *name = slash != NULL ? slash + 1 : path;
    size_t size = strlen(name);
    if (size > sizeof(suffix) - 1 && strcmp(name + size - (sizeof(suffix) - 1), suffix) == 0) {
        size -= sizeof(suffix) - 1;
    }
    const size_t part_size = strlen("-00001-of-00002");
    if (size > part_size && strncmp(name + size - part_size, "-00001-of-", 10) == 0) {
        size -= part_size;
    }
    snprintf(out, out_size, "%.*s", (int)(size < out_size ? size : out_size), name);
}

static fl_status identify(struct model *model)
{
    const struct gguf *gguf = model->gguf;
    const char *paths[FL_FILE_COUNT_MAX];
    for (uint32_t i = 0; i < gguf_file_count(gguf); i++) {
        paths[i] = gguf_file_path(gguf, i);
    }
    return model_identity_of_files(paths, gguf_file_count(gguf), model->manifest.identity);
}

fl_status model_open(const char *path, struct model **out)
{
    char name[FL_MODEL_NAME_MAX + 1];
    struct gguf *gguf = NULL;
    struct model *model = NULL;
    FL_TRY(gguf_open(path, &gguf));
    name_of_path(path, name, sizeof(name));
    fl_status status = model_from_gguf(gguf, name, &model);
    if (status != FL_OK) {
        gguf_close(gguf);
        return status;
    }
    FL_ASSERT(model != NULL);
    status = identify(model);
    if (status != FL_OK) {
        model_close(model);
        return status;
    }
    *out = model;
    return FL_OK;
}

void model_close(struct model *model)
{
    if (model != NULL) {
        gguf_close(model->gguf);
        free(model);
    }
}

const struct fl_manifest *model_manifest(const struct model *model)
{
    return &model->manifest;
}

const struct gguf *model_gguf(const struct model *model)
{
    return model->gguf;
}

fl_status model_stage_manifest(const struct fl_manifest *whole, const struct model_range *range,
                               struct fl_manifest *out)
{
    const uint32_t layers = whole->shape.layer_count;
    if (range->layer_count == 0 || range->layer_first >= layers ||
        range->layer_count > layers - range->layer_first ||
        (range->has_embed && range->layer_first != 0) ||
        (range->has_head && range->layer_first + range->layer_count != layers)) {
        return FL_FAIL(FL_INVALID,
                       "model %s: %" PRIu32 " layers from %" PRIu32
                       " on are no stage of its %" PRIu32 " layers",
                       whole->name, range->layer_count, range->layer_first, layers);
    }
    FL_ASSERT(whole->piece_count == 2 * layers + 2);
    *out = *whole;
    const uint32_t embed = range->has_embed ? 1 : 0;
    out->pieces = &whole->pieces[1 + 2 * range->layer_first - embed];
    out->piece_count = embed + 2 * range->layer_count + (range->has_head ? 1 : 0);
    return FL_OK;
}
