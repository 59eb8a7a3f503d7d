#include "pipeline/model_pieces.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSOR_NAME_SIZE = 48 };

/* What the reading of one header passes around. */
struct reader {
    const struct gguf *gguf;
    const char *path;
    struct fl_manifest *manifest;
    bool *used; /* [tensors]: taken by a piece */
};

static fl_status refuse_types(const struct reader *reader)
{
    for (uint32_t i = 0; i < gguf_tensor_count(reader->gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor_at(reader->gguf, i);
        if (!fl_dtype_known(tensor->dtype)) {
            return FL_FAIL(FL_UNSUPPORTED,
                           "%s: tensor %s has type %s (%" PRIu32
                           "); supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, "
                           "Q5_K and Q6_K",
                           reader->path, gguf_show(tensor->name).text, fl_dtype_name(tensor->dtype),
                           tensor->dtype);
        }
    }
    return FL_OK;
}

static bool string_has(struct gguf_string string, const char *part)
{
    return memmem(string.data, string.size, part, strlen(part)) != NULL;
}

/* A tensor no piece took: its absence would change the result. */
static fl_status refuse_unused(const struct reader *reader)
{
    for (uint32_t i = 0; i < gguf_tensor_count(reader->gguf); i++) {
        if (reader->used[i]) {
            continue;
        }
        const struct gguf_string name = gguf_tensor_at(reader->gguf, i)->name;
        const char *why = "which this build does not know";
        if (string_has(name, "_exp")) {
            why = "of a mixture of experts, which is not supported yet";
        } else if (string_has(name, "ffn_gate_inp")) {
            why = "the router of a mixture of experts, which is not supported yet";
        } else if (string_has(name, ".bias")) {
            why = "a bias, which is not supported";
        }
        return FL_FAIL(FL_UNSUPPORTED, "%s: the model has tensor %s, %s", reader->path,
                       gguf_show(name).text, why);
    }
    return FL_OK;
}

static fl_status add_tensor(const struct reader *reader, struct fl_piece *piece,
                            enum fl_tensor_role role, const char *name)
{
    const struct gguf_tensor *tensor = gguf_tensor_find(reader->gguf, name);
    if (tensor == NULL) {
        return FL_OK; /* fl_manifest_check() knows which must be there */
    }
    if (tensor->dim_count > 2 || tensor->dims[0] > FL_WIDTH_MAX ||
        tensor->dims[1] > FL_VOCABULARY_MAX) {
        return FL_FAIL(FL_MALFORMED,
                       "%s: tensor %s has %" PRIu32 " dimensions, %" PRIu64 " x %" PRIu64
                       " x ..; it must have 1 or 2, at most %d x %d",
                       reader->path, name, tensor->dim_count, tensor->dims[0], tensor->dims[1],
                       FL_WIDTH_MAX, FL_VOCABULARY_MAX);
    }
    FL_ASSERT(piece->tensor_count < FL_PIECE_TENSOR_MAX);
    piece->tensors[piece->tensor_count++] = (struct fl_tensor_ref){
        .role = role,
        .dtype = (enum fl_dtype)tensor->dtype,
        .rows = (uint32_t)tensor->dims[1],
        .columns = (uint32_t)tensor->dims[0],
        .file = tensor->file,
        .offset = tensor->offset,
        .size = tensor->size,
    };
    reader->used[tensor - gguf_tensor_at(reader->gguf, 0)] = true;
    return FL_OK;
}

static fl_status add_layer_tensor(const struct reader *reader, struct fl_piece *piece,
                                  enum fl_tensor_role role)
{
    char name[TENSOR_NAME_SIZE];
    snprintf(name, sizeof(name), "blk.%" PRIu32 ".%s.weight", piece->layer,
             fl_tensor_role_name(role));
    return add_tensor(reader, piece, role, name);
}

static struct fl_piece *next_piece(const struct reader *reader, enum fl_piece_kind kind,
                                   uint32_t layer)
{
    struct fl_manifest *manifest = reader->manifest;
    struct fl_piece *piece = &manifest->pieces[manifest->piece_count++];
    *piece = (struct fl_piece){.kind = kind, .layer = layer};
    return piece;
}

static fl_status add_factors(const struct reader *reader, struct fl_piece *piece)
{
    FL_TRY(add_tensor(reader, piece, FL_ROLE_ROPE_FACTORS, "rope_freqs.weight"));
    if (reader->manifest->shape.rope.scaling == FL_ROPE_LONG && piece->tensor_count == 0) {
        FL_TRY(add_tensor(reader, piece, FL_ROLE_ROPE_FACTORS, "rope_factors_short.weight"));
        FL_TRY(add_tensor(reader, piece, FL_ROLE_ROPE_FACTORS_LONG, "rope_factors_long.weight"));
    }
    return FL_OK;
}

static fl_status add_layer(const struct reader *reader, uint32_t layer)
{
    static const enum fl_tensor_role attention[] = {
        FL_ROLE_ATTN_NORM,   FL_ROLE_ATTN_Q,      FL_ROLE_ATTN_K,      FL_ROLE_ATTN_V,
        FL_ROLE_ATTN_Q_NORM, FL_ROLE_ATTN_K_NORM, FL_ROLE_ATTN_OUTPUT, FL_ROLE_ATTN_POST_NORM,
    };
    static const enum fl_tensor_role ffn[] = {
        FL_ROLE_FFN_NORM, FL_ROLE_FFN_GATE, FL_ROLE_FFN_UP, FL_ROLE_FFN_DOWN, FL_ROLE_FFN_POST_NORM,
    };
    struct fl_piece *piece = next_piece(reader, FL_PIECE_ATTENTION, layer);
    if (reader->manifest->shape.architecture == FL_ARCHITECTURE_LLAMA) {
        FL_TRY(add_factors(reader, piece));
    }
    for (size_t i = 0; i < sizeof(attention) / sizeof(attention[0]); i++) {
        FL_TRY(add_layer_tensor(reader, piece, attention[i]));
    }
    piece = next_piece(reader, FL_PIECE_FFN, layer);
    for (size_t i = 0; i < sizeof(ffn) / sizeof(ffn[0]); i++) {
        FL_TRY(add_layer_tensor(reader, piece, ffn[i]));
    }
    return FL_OK;
}

static fl_status read_pieces(const struct reader *reader)
{
    const struct fl_model_shape *shape = &reader->manifest->shape;
    const char *table = "token_embd.weight";
    struct fl_piece *piece = next_piece(reader, FL_PIECE_EMBED, 0);
    FL_TRY(add_tensor(reader, piece, FL_ROLE_TOKEN_EMBD, table));
    for (uint32_t layer = 0; layer < shape->layer_count; layer++) {
        FL_TRY(add_layer(reader, layer));
    }
    piece = next_piece(reader, FL_PIECE_HEAD, 0);
    FL_TRY(add_tensor(reader, piece, FL_ROLE_OUTPUT_NORM, "output_norm.weight"));
    return add_tensor(reader, piece, FL_ROLE_OUTPUT, shape->tied_head ? table : "output.weight");
}

static fl_status fill_pieces(const struct reader *reader)
{
    FL_TRY(refuse_types(reader));
    FL_TRY(read_pieces(reader));
    return refuse_unused(reader);
}

fl_status model_pieces_read(const struct gguf *gguf, struct fl_manifest *manifest)
{
    const uint32_t tensors = gguf_tensor_count(gguf);
    const struct reader reader = {
        .gguf = gguf,
        .path = gguf_file_path(gguf, 0),
        .manifest = manifest,
        .used = calloc(tensors != 0 ? tensors : 1, sizeof(bool)),
    };
    if (reader.used == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "%s: no memory for a table of tensors", reader.path);
    }
    const fl_status status = fill_pieces(&reader);
    free(reader.used);
    return status;
}
