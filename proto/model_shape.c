#include "proto/model_shape.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum {
    COLUMN_MULTIPLE = 32, /* the kernels quantise activations in blocks of this many */
    HEAD_MULTIPLE = 16,   /* attention sums over this many lanes */
};

/* ---- what belongs where ---- */

enum presence { ABSENT, OPTIONAL, REQUIRED };

/* A role's GGUF name (per layer behind "blk.N."), the piece it lives in, and whether each
 * architecture has it. */
static const struct {
    const char *name;
    enum fl_piece_kind piece;
    enum presence llama;
    enum presence gemma3;
} roles[FL_ROLE_LAST + 1] = {
    [FL_ROLE_TOKEN_EMBD] = {"token_embd", FL_PIECE_EMBED, REQUIRED, REQUIRED},
    [FL_ROLE_OUTPUT_NORM] = {"output_norm", FL_PIECE_HEAD, REQUIRED, REQUIRED},
    [FL_ROLE_OUTPUT] = {"output", FL_PIECE_HEAD, REQUIRED, REQUIRED},
    [FL_ROLE_ROPE_FACTORS] = {"rope_freqs", FL_PIECE_ATTENTION, OPTIONAL, ABSENT},
    [FL_ROLE_ROPE_FACTORS_LONG] = {"rope_factors_long", FL_PIECE_ATTENTION, OPTIONAL, ABSENT},
    [FL_ROLE_ATTN_NORM] = {"attn_norm", FL_PIECE_ATTENTION, REQUIRED, REQUIRED},
    [FL_ROLE_ATTN_Q] = {"attn_q", FL_PIECE_ATTENTION, REQUIRED, REQUIRED},
    [FL_ROLE_ATTN_K] = {"attn_k", FL_PIECE_ATTENTION, REQUIRED, REQUIRED},
    [FL_ROLE_ATTN_V] = {"attn_v", FL_PIECE_ATTENTION, REQUIRED, REQUIRED},
    [FL_ROLE_ATTN_OUTPUT] = {"attn_output", FL_PIECE_ATTENTION, REQUIRED, REQUIRED},
    [FL_ROLE_ATTN_Q_NORM] = {"attn_q_norm", FL_PIECE_ATTENTION, ABSENT, REQUIRED},
    [FL_ROLE_ATTN_K_NORM] = {"attn_k_norm", FL_PIECE_ATTENTION, ABSENT, REQUIRED},
    [FL_ROLE_ATTN_POST_NORM] = {"post_attention_norm", FL_PIECE_ATTENTION, ABSENT, REQUIRED},
    [FL_ROLE_FFN_NORM] = {"ffn_norm", FL_PIECE_FFN, REQUIRED, REQUIRED},
    [FL_ROLE_FFN_GATE] = {"ffn_gate", FL_PIECE_FFN, REQUIRED, REQUIRED},
    [FL_ROLE_FFN_UP] = {"ffn_up", FL_PIECE_FFN, REQUIRED, REQUIRED},
    [FL_ROLE_FFN_DOWN] = {"ffn_down", FL_PIECE_FFN, REQUIRED, REQUIRED},
    [FL_ROLE_FFN_POST_NORM] = {"post_ffw_norm", FL_PIECE_FFN, ABSENT, REQUIRED},
};

const char *fl_tensor_role_name(enum fl_tensor_role role)
{
    return role >= 1 && role <= FL_ROLE_LAST ? roles[role].name : "unknown";
}

static enum presence presence_of(const struct fl_model_shape *shape, uint32_t role)
{
    return shape->architecture == FL_ARCHITECTURE_GEMMA3 ? roles[role].gemma3 : roles[role].llama;
}

bool fl_tensor_role_is_vector(enum fl_tensor_role role)
{
    switch (role) {
    case FL_ROLE_OUTPUT_NORM:
    case FL_ROLE_ROPE_FACTORS:
    case FL_ROLE_ROPE_FACTORS_LONG:
    case FL_ROLE_ATTN_NORM:
    case FL_ROLE_ATTN_Q_NORM:
    case FL_ROLE_ATTN_K_NORM:
    case FL_ROLE_ATTN_POST_NORM:
    case FL_ROLE_FFN_NORM:
    case FL_ROLE_FFN_POST_NORM: return true;
    case FL_ROLE_TOKEN_EMBD:
    case FL_ROLE_OUTPUT:
    case FL_ROLE_ATTN_Q:
    case FL_ROLE_ATTN_K:
    case FL_ROLE_ATTN_V:
    case FL_ROLE_ATTN_OUTPUT:
    case FL_ROLE_FFN_GATE:
    case FL_ROLE_FFN_UP:
    case FL_ROLE_FFN_DOWN: break;
    }
    return false;
}

void fl_tensor_dimensions(const struct fl_model_shape *shape, enum fl_tensor_role role,
                          uint32_t layer, uint32_t *out_rows, uint32_t *out_columns)
{
    const uint32_t width = shape->width;
    const uint32_t queries = shape->head_count[layer] * shape->head_size;
    const uint32_t keys = shape->head_count_kv[layer] * shape->head_size;
    const uint32_t ffn = shape->ffn_width[layer];
    uint32_t rows = 1;
    uint32_t columns = width;
    switch (role) {
    case FL_ROLE_TOKEN_EMBD:
    case FL_ROLE_OUTPUT: rows = shape->vocabulary; break;
    case FL_ROLE_ROPE_FACTORS:
    case FL_ROLE_ROPE_FACTORS_LONG: columns = shape->rope_dim / 2; break;
    case FL_ROLE_ATTN_Q: rows = queries; break;
    case FL_ROLE_ATTN_K:
    case FL_ROLE_ATTN_V: rows = keys; break;
    case FL_ROLE_ATTN_OUTPUT: rows = width, columns = queries; break;
    case FL_ROLE_ATTN_Q_NORM:
    case FL_ROLE_ATTN_K_NORM: columns = shape->head_size; break;
    case FL_ROLE_FFN_GATE:
    case FL_ROLE_FFN_UP: rows = ffn; break;
    case FL_ROLE_FFN_DOWN: rows = width, columns = ffn; break;
    case FL_ROLE_OUTPUT_NORM:
    case FL_ROLE_ATTN_NORM:
    case FL_ROLE_ATTN_POST_NORM:
    case FL_ROLE_FFN_NORM:
    case FL_ROLE_FFN_POST_NORM: break;
    }
    *out_rows = rows;
    *out_columns = columns;
}

uint64_t fl_piece_size(const struct fl_piece *piece)
{
    uint64_t size = 0;
    for (uint32_t i = 0; i < piece->tensor_count; i++) {
        size += piece->tensors[i].size;
    }
    return size;
}

/* ---- shape ---- */

static fl_status check_range(const char *what, uint64_t value, uint64_t min, uint64_t max)
{
    if (value < min || value > max) {
        return FL_FAIL(FL_MALFORMED,
                       "model shape: %s is %" PRIu64 "; it must be %" PRIu64 " to %" PRIu64, what,
                       value, min, max);
    }
    return FL_OK;
}

static fl_status check_multiple(const char *what, uint64_t value, uint32_t of)
{
    if (value % of != 0) {
        return FL_FAIL(FL_MALFORMED,
                       "model shape: %s is %" PRIu64 "; it must be a multiple of %" PRIu32, what,
                       value, of);
    }
    return FL_OK;
}

/* Finite, above 0 and at most `max`. */
static fl_status check_positive(const char *what, float value, float max)
{
    if (!isfinite(value) || value <= 0 || value > max) {
        return FL_FAIL(FL_MALFORMED, "model shape: %s is %g; it must be above 0 and at most %g",
                       what, (double)value, (double)max);
    }
    return FL_OK;
}

static fl_status check_rope(const struct fl_rope *rope)
{
    FL_TRY(check_positive("rope base", rope->freq_base, 1e12f));
    FL_TRY(check_range("rope scaling", (uint64_t)rope->scaling, FL_ROPE_NONE, FL_ROPE_LONG));
    FL_TRY(check_positive("rope scaling factor", rope->factor, 1e6f));
    if (rope->attention_factor != 0) {
        FL_TRY(check_positive("rope attention factor", rope->attention_factor, 1e3f));
    }
    FL_TRY(check_range("rope original context", rope->original_context, 0, FL_CONTEXT_MAX));
    if (rope->scaling == FL_ROPE_NONE && rope->factor != 1.0f) {
        return FL_FAIL(FL_MALFORMED,
                       "model shape: rope scaling factor is %g without a scaling; it "
                       "must be 1",
                       (double)rope->factor);
    }
    if (rope->scaling == FL_ROPE_YARN || rope->scaling == FL_ROPE_LONG) {
        FL_TRY(check_range("rope original context", rope->original_context, 1, FL_CONTEXT_MAX));
    }
    if (rope->scaling == FL_ROPE_YARN) {
        FL_TRY(check_positive("yarn beta fast", rope->yarn_beta_fast, 1e6f));
        FL_TRY(check_positive("yarn beta slow", rope->yarn_beta_slow, 1e6f));
        if (rope->yarn_beta_slow >= rope->yarn_beta_fast) {
            return FL_FAIL(FL_MALFORMED,
                           "model shape: yarn beta slow is %g; it must be below beta fast, %g",
                           (double)rope->yarn_beta_slow, (double)rope->yarn_beta_fast);
        }
    }
    return FL_OK;
}

static fl_status check_layer(const struct fl_model_shape *shape, uint32_t layer)
{
    char what[64];
    const uint32_t heads = shape->head_count[layer];
    const uint32_t heads_kv = shape->head_count_kv[layer];
    snprintf(what, sizeof(what), "head count of layer %" PRIu32, layer);
    FL_TRY(check_range(what, heads, 1, FL_HEAD_COUNT_MAX));
    snprintf(what, sizeof(what), "head count x head size of layer %" PRIu32, layer);
    FL_TRY(check_range(what, (uint64_t)heads * shape->head_size, 1, FL_WIDTH_MAX));
    FL_TRY(check_multiple(what, (uint64_t)heads * shape->head_size, COLUMN_MULTIPLE));
    snprintf(what, sizeof(what), "KV head count of layer %" PRIu32, layer);
    FL_TRY(check_range(what, heads_kv, 1, heads));
    if (heads % heads_kv != 0) {
        return FL_FAIL(FL_MALFORMED,
                       "model shape: %s is %" PRIu32 "; it must divide the head count, %" PRIu32,
                       what, heads_kv, heads);
    }
    snprintf(what, sizeof(what), "FFN width of layer %" PRIu32, layer);
    FL_TRY(check_range(what, shape->ffn_width[layer], 1, FL_WIDTH_MAX));
    return check_multiple(what, shape->ffn_width[layer], COLUMN_MULTIPLE);
}

fl_status fl_model_shape_check(const struct fl_model_shape *shape)
{
    FL_TRY(check_range("architecture", (uint64_t)shape->architecture, FL_ARCHITECTURE_LLAMA,
                       FL_ARCHITECTURE_GEMMA3));
    FL_TRY(check_range("layer count", shape->layer_count, 1, FL_LAYER_COUNT_MAX));
    FL_TRY(check_range("width", shape->width, 1, FL_WIDTH_MAX));
    FL_TRY(check_multiple("width", shape->width, COLUMN_MULTIPLE));
    FL_TRY(check_range("head size", shape->head_size, HEAD_MULTIPLE, FL_HEAD_SIZE_MAX));
    FL_TRY(check_multiple("head size", shape->head_size, HEAD_MULTIPLE));
    FL_TRY(check_range("vocabulary", shape->vocabulary, 1, FL_VOCABULARY_MAX));
    FL_TRY(check_range("context", shape->context, 1, FL_CONTEXT_MAX));
    FL_TRY(check_range("rope dimension", shape->rope_dim, 2, shape->head_size));
    FL_TRY(check_multiple("rope dimension", shape->rope_dim, 2));
    FL_TRY(check_range("window", shape->window, 0, FL_CONTEXT_MAX));
    FL_TRY(check_range("window pattern", shape->window_pattern, 0, FL_LAYER_COUNT_MAX));
    FL_TRY(check_positive("norm epsilon", shape->norm_epsilon, 1.0f));
    FL_TRY(check_positive("embedding scale", shape->embedding_scale, 1e6f));
    FL_TRY(check_positive("attention scale", shape->attention_scale, 1e6f));
    FL_TRY(check_rope(&shape->rope));
    FL_TRY(check_rope(&shape->rope_local));
    for (uint32_t layer = 0; layer < shape->layer_count; layer++) {
        FL_TRY(check_layer(shape, layer));
    }
    return FL_OK;
}

/* ---- manifest ---- */

/* A tensor's name as the file has it: "blk.3.attn_q", "output". */
struct tensor_name {
    char text[48];
};

static struct tensor_name name_of(const struct fl_piece *piece, uint32_t role)
{
    struct tensor_name name;
    if ((piece->kind == FL_PIECE_ATTENTION || piece->kind == FL_PIECE_FFN) &&
        role != FL_ROLE_ROPE_FACTORS && role != FL_ROLE_ROPE_FACTORS_LONG) {
        snprintf(name.text, sizeof(name.text), "blk.%" PRIu32 ".%s", piece->layer,
                 roles[role].name);
    } else {
        snprintf(name.text, sizeof(name.text), "%s", roles[role].name);
    }
    return name;
}

static fl_status check_place(const struct fl_manifest *manifest, const struct fl_tensor_ref *tensor,
                             const char *name)
{
    uint64_t end;
    if (tensor->file >= manifest->file_count) {
        return FL_FAIL(FL_MALFORMED, "model %s: %s is in file %" PRIu32 ", of %" PRIu32 " files",
                       manifest->name, name, tensor->file, manifest->file_count);
    }
    if (__builtin_add_overflow(tensor->offset, tensor->size, &end) ||
        end > manifest->files[tensor->file].size) {
        return FL_FAIL(FL_MALFORMED,
                       "model %s: %s (%" PRIu64 " bytes at offset %" PRIu64
                       ") lies beyond the end of its file at %" PRIu64,
                       manifest->name, name, tensor->size, tensor->offset,
                       manifest->files[tensor->file].size);
    }
    return FL_OK;
}

/* Dimensions first: "has rows of 576" says more than "has 663552 bytes". */
static fl_status check_tensor(const struct fl_manifest *manifest, const struct fl_piece *piece,
                              const struct fl_tensor_ref *tensor)
{
    const struct tensor_name name = name_of(piece, tensor->role);
    uint32_t rows;
    uint32_t columns;
    fl_tensor_dimensions(&manifest->shape, tensor->role, piece->layer, &rows, &columns);
    if (tensor->rows != rows || tensor->columns != columns) {
        return FL_FAIL(FL_MALFORMED,
                       "model %s: %s has %" PRIu32 " rows of %" PRIu32 "; the model's metadata "
                       "wants %" PRIu32 " rows of %" PRIu32,
                       manifest->name, name.text, tensor->rows, tensor->columns, rows, columns);
    }
    if (!fl_dtype_known(tensor->dtype) ||
        (fl_tensor_role_is_vector(tensor->role) && tensor->dtype != FL_DTYPE_F32)) {
        return FL_FAIL(FL_UNSUPPORTED, "model %s: %s has type %s; %s", manifest->name, name.text,
                       fl_dtype_name(tensor->dtype),
                       fl_tensor_role_is_vector(tensor->role)
                           ? "norms and factors must be F32"
                           : "supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, "
                             "Q5_K and Q6_K");
    }
    if (columns % fl_dtype_block_length(tensor->dtype) != 0) {
        return FL_FAIL(FL_MALFORMED,
                       "model %s: rows of %s have %" PRIu32 " elements; with type %s it must be a "
                       "multiple of %" PRIu32,
                       manifest->name, name.text, columns, fl_dtype_name(tensor->dtype),
                       fl_dtype_block_length(tensor->dtype));
    }
    size_t row_size;
    FL_TRY(fl_dtype_row_size(tensor->dtype, columns, &row_size));
    if (tensor->size != (uint64_t)rows * row_size) {
        return FL_FAIL(FL_MALFORMED,
                       "model %s: %s has %" PRIu64 " bytes; its dimensions make %" PRIu64,
                       manifest->name, name.text, tensor->size, (uint64_t)rows * row_size);
    }
    return check_place(manifest, tensor, name.text);
}

static bool at_home(const struct fl_model_shape *shape, const struct fl_piece *piece, uint32_t role)
{
    return role >= 1 && role <= FL_ROLE_LAST && roles[role].piece == piece->kind &&
           presence_of(shape, role) != ABSENT;
}

/* A scaling by factors from the file has both sets; without it there is at most rope_freqs. */
static fl_status check_factors(const struct fl_manifest *manifest, const struct fl_piece *piece,
                               uint32_t seen)
{
    const bool has_short = (seen >> FL_ROLE_ROPE_FACTORS & 1) != 0;
    const bool has_long = (seen >> FL_ROLE_ROPE_FACTORS_LONG & 1) != 0;
    const bool wants = manifest->shape.rope.scaling == FL_ROPE_LONG;
    if (piece->kind == FL_PIECE_ATTENTION && (has_long != wants || (wants && !has_short))) {
        return FL_FAIL(FL_MALFORMED,
                       "model %s: rope scaling longrope needs rope_factors_long and "
                       "rope_factors_short, and nothing else may have them (layer %" PRIu32 ")",
                       manifest->name, piece->layer);
    }
    return FL_OK;
}

static fl_status check_piece(const struct fl_manifest *manifest, const struct fl_piece *piece)
{
    const struct fl_model_shape *shape = &manifest->shape;
    uint32_t seen = 0; /* one bit a role */
    _Static_assert(FL_ROLE_LAST < 32, "a bit for each role");
    if (piece->tensor_count > FL_PIECE_TENSOR_MAX) {
        return FL_FAIL(FL_MALFORMED, "model %s: a piece has %" PRIu32 " tensors; at most %d fit",
                       manifest->name, piece->tensor_count, FL_PIECE_TENSOR_MAX);
    }
    for (uint32_t i = 0; i < piece->tensor_count; i++) {
        const uint32_t role = piece->tensors[i].role;
        if (!at_home(shape, piece, role)) {
            return FL_FAIL(FL_MALFORMED,
                           "model %s: a tensor of role %" PRIu32 " (%s) does not belong in a piece "
                           "of kind %d of this architecture",
                           manifest->name, role, fl_tensor_role_name((enum fl_tensor_role)role),
                           (int)piece->kind);
        }
        if ((seen >> role & 1) != 0) {
            return FL_FAIL(FL_MALFORMED, "model %s: %s is there twice", manifest->name,
                           name_of(piece, role).text);
        }
        seen |= 1u << role;
        FL_TRY(check_tensor(manifest, piece, &piece->tensors[i]));
    }
    for (uint32_t role = 1; role <= FL_ROLE_LAST; role++) {
        if (roles[role].piece == piece->kind && presence_of(shape, role) == REQUIRED &&
            (seen >> role & 1) == 0) {
            return FL_FAIL(FL_MALFORMED, "model %s: tensor %s.weight is missing", manifest->name,
                           name_of(piece, role).text);
        }
    }
    return check_factors(manifest, piece, seen);
}

/* Where a piece comes in the order of use of the whole model, or UINT32_MAX when nowhere. */
static uint32_t piece_place(const struct fl_model_shape *shape, const struct fl_piece *piece)
{
    const uint32_t layers = shape->layer_count;
    switch (piece->kind) {
    case FL_PIECE_EMBED: return piece->layer == 0 ? 0 : UINT32_MAX;
    case FL_PIECE_ATTENTION: return piece->layer < layers ? 1 + 2 * piece->layer : UINT32_MAX;
    case FL_PIECE_FFN: return piece->layer < layers ? 2 + 2 * piece->layer : UINT32_MAX;
    case FL_PIECE_HEAD: return piece->layer == 0 ? 1 + 2 * layers : UINT32_MAX;
    }
    return UINT32_MAX;
}

/* Whole layers without a gap; EMBED only before the first, HEAD only after the last. */
static fl_status check_order(const struct fl_manifest *manifest)
{
    const uint32_t count = manifest->piece_count;
    const uint32_t head = 1 + 2 * manifest->shape.layer_count;
    if (count < 1 || count > FL_PIECE_COUNT_MAX || count > head + 1) {
        return FL_FAIL(FL_MALFORMED, "model %s: has %" PRIu32 " pieces; it must be 1 to %" PRIu32,
                       manifest->name, count, head + 1);
    }
    const uint32_t first = piece_place(&manifest->shape, &manifest->pieces[0]);
    uint32_t place = first;
    for (uint32_t i = 0; i < count; i++) {
        place = piece_place(&manifest->shape, &manifest->pieces[i]);
        if (place == UINT32_MAX || place != first + i) {
            return FL_FAIL(
                FL_MALFORMED,
                "model %s: piece %" PRIu32 " (kind %d, layer %" PRIu32 ") is out of order",
                manifest->name, i, (int)manifest->pieces[i].kind, manifest->pieces[i].layer);
        }
    }
    const bool starts_whole = first == 0 || first % 2 == 1;
    const bool ends_whole = place == head || place % 2 == 0;
    if (!starts_whole || !ends_whole || first == head || place == 0) {
        return FL_FAIL(FL_MALFORMED, "model %s: its pieces are not whole layers", manifest->name);
    }
    return FL_OK;
}

/* The name becomes part of file names, and travels in sentences. */
static fl_status check_name(const char *name)
{
    const size_t size = strnlen(name, FL_MODEL_NAME_MAX);
    if (size == 0 || size == FL_MODEL_NAME_MAX) {
        return FL_FAIL(FL_MALFORMED, "a model's name has %zu bytes; it must be 1 to %d", size,
                       FL_MODEL_NAME_MAX - 1);
    }
    for (size_t i = 0; i < size; i++) {
        const unsigned char byte = (unsigned char)name[i];
        if (byte < 0x20 || byte == 0x7f || byte == '/' || (i == 0 && byte == '.')) {
            return FL_FAIL(FL_MALFORMED,
                           "a model's name has the byte 0x%02x at %zu; it must be a "
                           "file name that does not begin with a dot",
                           byte, i);
        }
    }
    return FL_OK;
}

static fl_status check_files(const struct fl_manifest *manifest)
{
    if (manifest->file_count < 1 || manifest->file_count > FL_FILE_COUNT_MAX) {
        return FL_FAIL(FL_MALFORMED, "model %s: has %" PRIu32 " files; it must be 1 to %d",
                       manifest->name, manifest->file_count, FL_FILE_COUNT_MAX);
    }
    for (uint32_t i = 0; i < manifest->file_count; i++) {
        if (manifest->files[i].size > INT64_MAX) {
            return FL_FAIL(FL_MALFORMED,
                           "model %s: file %" PRIu32 " has %" PRIu64
                           " bytes; at most 2^63 - 1 are possible",
                           manifest->name, i, manifest->files[i].size);
        }
    }
    return FL_OK;
}

fl_status fl_manifest_check(const struct fl_manifest *manifest)
{
    FL_TRY(check_name(manifest->name));
    FL_TRY(fl_model_shape_check(&manifest->shape));
    FL_TRY(check_files(manifest));
    FL_TRY(check_order(manifest));
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        FL_TRY(check_piece(manifest, &manifest->pieces[i]));
    }
    return FL_OK;
}
