#include "proto/plan_message.h"

#include <inttypes.h>
#include <string.h>

#include "proto/cluster.pb-c.h"

#include "proto/message_field.h"

enum {
    KV_BLOCK_COUNT_MAX = 1 << 24,
    SEQUENCE_COUNT_MAX = 4096,
};

/* ---- addresses ---- */

fl_status fl_address_message_build(const struct fl_address *address, struct fl_arena *arena,
                                   struct Firstlight__Cluster__Address **out)
{
    FL_ASSERT(address->size <= FL_ADDRESS_MAX);

    Firstlight__Cluster__Address *message = NULL;
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Address, firstlight__cluster__address, &message);
    message->kind = address->kind;
    fl_field_borrow(address->bytes, address->size, &message->data);
    *out = message;
    return FL_OK;
}

fl_status fl_address_message_take(const struct Firstlight__Cluster__Address *message,
                                  struct fl_address *out)
{
    if (message == NULL) {
        return FL_FAIL(FL_PROTOCOL, "address is missing");
    }
    FL_TRY(fl_field_range("address kind", message->kind, FL_ADDRESS_SOCKET, FL_ADDRESS_LOCAL));
    FL_TRY(fl_field_range("address size", message->data.len, 1, FL_ADDRESS_MAX));
    if (message->kind == FL_ADDRESS_SOCKET &&
        memchr(message->data.data, 0, message->data.len) != NULL) {
        return FL_FAIL(FL_PROTOCOL, "socket address holds a NUL byte");
    }
    out->kind = (enum fl_address_kind)message->kind;
    out->size = (uint32_t)message->data.len;
    memcpy(out->bytes, message->data.data, message->data.len);
    return FL_OK;
}

/* ---- stages ---- */

static fl_status build_stages(const struct fl_plan *plan, struct fl_arena *arena,
                              Firstlight__Cluster__Plan *message)
{
    FL_ASSERT(plan->stage_count <= FL_STAGE_COUNT_MAX);

    FL_TRY(fl_field_array(arena, plan->stage_count, sizeof(*message->stages), &message->stages));
    message->n_stages = plan->stage_count;
    for (uint32_t i = 0; i < plan->stage_count; i++) {
        const struct fl_stage *stage = &plan->stages[i];
        Firstlight__Cluster__Stage *out = NULL;
        FL_FIELD_MAKE(arena, Firstlight__Cluster__Stage, firstlight__cluster__stage, &out);
        fl_field_borrow(stage->node, strnlen(stage->node, sizeof(stage->node)), &out->node);
        out->incarnation = stage->incarnation;
        FL_TRY(fl_address_message_build(&stage->address, arena, &out->address));
        out->layer_first = stage->layer_first;
        out->layer_count = stage->layer_count;
        out->has_embed = stage->has_embed;
        out->has_head = stage->has_head;
        message->stages[i] = out;
    }
    return FL_OK;
}

static fl_status take_stage(const Firstlight__Cluster__Stage *message, struct fl_stage *out)
{
    FL_TRY(fl_field_name("stage node", &message->node, out->node));
    out->incarnation = message->incarnation;
    FL_TRY(fl_address_message_take(message->address, &out->address));
    FL_TRY(fl_field_range("stage layer_first", message->layer_first, 0, FL_LAYER_COUNT_MAX - 1));
    FL_TRY(fl_field_range("stage layer_count", message->layer_count, 1, FL_LAYER_COUNT_MAX));
    out->layer_first = message->layer_first;
    out->layer_count = message->layer_count;
    out->has_embed = message->has_embed != 0;
    out->has_head = message->has_head != 0;
    return FL_OK;
}

static fl_status take_stages(const Firstlight__Cluster__Plan *message, struct fl_arena *arena,
                             struct fl_plan *out)
{
    FL_TRY(fl_field_range("plan stage count", message->n_stages, 1, FL_STAGE_COUNT_MAX));
    FL_TRY(fl_field_range("plan stage_index", message->stage_index, 0, message->n_stages - 1));
    out->stage_index = message->stage_index;
    out->stage_count = (uint32_t)message->n_stages;
    FL_TRY(fl_field_array(arena, out->stage_count, sizeof(*out->stages), &out->stages));

    uint32_t layer = 0;
    for (uint32_t i = 0; i < out->stage_count; i++) {
        struct fl_stage *stage = &out->stages[i];
        FL_TRY(take_stage(message->stages[i], stage));
        if (stage->layer_first != layer) {
            return FL_FAIL(FL_PROTOCOL,
                           "stage %" PRIu32 " begins at layer %" PRIu32 ", the one before ends "
                           "at %" PRIu32,
                           i, stage->layer_first, layer);
        }
        layer += stage->layer_count;
        if (stage->has_embed != (i == 0) || stage->has_head != (i + 1 == out->stage_count)) {
            return FL_FAIL(FL_PROTOCOL,
                           "stage %" PRIu32 " of %" PRIu32 " has embedding %d and head %d: the "
                           "first stage embeds, the last has the head",
                           i, out->stage_count, stage->has_embed, stage->has_head);
        }
    }
    return fl_field_range("layers of all stages", layer, 1, FL_LAYER_COUNT_MAX);
}

/* ---- shape ---- */

static fl_status build_rope(const struct fl_rope *rope, struct fl_arena *arena,
                            Firstlight__Cluster__Rope **out)
{
    Firstlight__Cluster__Rope *message = NULL;
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Rope, firstlight__cluster__rope, &message);
    message->freq_base = rope->freq_base;
    message->scaling = rope->scaling;
    message->factor = rope->factor;
    message->attention_factor = rope->attention_factor;
    message->original_context = rope->original_context;
    message->yarn_beta_fast = rope->yarn_beta_fast;
    message->yarn_beta_slow = rope->yarn_beta_slow;
    *out = message;
    return FL_OK;
}

static fl_status take_rope(const char *field, const Firstlight__Cluster__Rope *message,
                           struct fl_rope *out)
{
    if (message == NULL) {
        return FL_FAIL(FL_PROTOCOL, "%s is missing", field);
    }
    FL_TRY(fl_field_range("rope scaling", message->scaling, FL_ROPE_NONE, FL_ROPE_LONG));
    *out = (struct fl_rope){
        .freq_base = message->freq_base,
        .scaling = (enum fl_rope_scaling)message->scaling,
        .factor = message->factor,
        .attention_factor = message->attention_factor,
        .original_context = message->original_context,
        .yarn_beta_fast = message->yarn_beta_fast,
        .yarn_beta_slow = message->yarn_beta_slow,
    };
    return FL_OK;
}

static fl_status build_shape(const struct fl_model_shape *shape, struct fl_arena *arena,
                             Firstlight__Cluster__Shape **out)
{
    FL_ASSERT(shape->layer_count <= FL_LAYER_COUNT_MAX);

    Firstlight__Cluster__Shape *message = NULL;
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Shape, firstlight__cluster__shape, &message);
    message->architecture = shape->architecture;
    message->layer_count = shape->layer_count;
    message->width = shape->width;
    message->head_size = shape->head_size;
    message->vocabulary = shape->vocabulary;
    message->context = shape->context;
    message->rope_dim = shape->rope_dim;
    message->window = shape->window;
    message->window_pattern = shape->window_pattern;
    message->norm_epsilon = shape->norm_epsilon;
    message->embedding_scale = shape->embedding_scale;
    message->attention_scale = shape->attention_scale;
    FL_TRY(build_rope(&shape->rope, arena, &message->rope));
    FL_TRY(build_rope(&shape->rope_local, arena, &message->rope_local));
    message->tied_head = shape->tied_head;
    message->n_head_count = shape->layer_count;
    message->head_count = (uint32_t *)(uintptr_t)shape->head_count;
    message->n_head_count_kv = shape->layer_count;
    message->head_count_kv = (uint32_t *)(uintptr_t)shape->head_count_kv;
    message->n_ffn_width = shape->layer_count;
    message->ffn_width = (uint32_t *)(uintptr_t)shape->ffn_width;
    *out = message;
    return FL_OK;
}

/* One value per layer. */
static fl_status take_per_layer(const char *field, const uint32_t *values, size_t count,
                                uint32_t layer_count, uint32_t *out)
{
    if (count != layer_count) {
        return FL_FAIL(FL_PROTOCOL, "%s has %zu values for %" PRIu32 " layers", field, count,
                       layer_count);
    }
    memcpy(out, values, count * sizeof(*values));
    return FL_OK;
}

static fl_status take_shape(const Firstlight__Cluster__Shape *message, struct fl_model_shape *out)
{
    if (message == NULL) {
        return FL_FAIL(FL_PROTOCOL, "model shape is missing");
    }
    FL_TRY(fl_field_range("layer_count", message->layer_count, 1, FL_LAYER_COUNT_MAX));
    FL_TRY(fl_field_range("architecture", message->architecture, FL_ARCHITECTURE_LLAMA,
                          FL_ARCHITECTURE_GEMMA3));
    *out = (struct fl_model_shape){
        .architecture = (enum fl_architecture)message->architecture,
        .layer_count = message->layer_count,
        .width = message->width,
        .head_size = message->head_size,
        .vocabulary = message->vocabulary,
        .context = message->context,
        .rope_dim = message->rope_dim,
        .window = message->window,
        .window_pattern = message->window_pattern,
        .norm_epsilon = message->norm_epsilon,
        .embedding_scale = message->embedding_scale,
        .attention_scale = message->attention_scale,
        .tied_head = message->tied_head != 0,
    };
    FL_TRY(take_rope("rope", message->rope, &out->rope));
    FL_TRY(take_rope("rope_local", message->rope_local, &out->rope_local));
    const uint32_t layers = out->layer_count;
    FL_TRY(take_per_layer("head_count", message->head_count, message->n_head_count, layers,
                          out->head_count));
    FL_TRY(take_per_layer("head_count_kv", message->head_count_kv, message->n_head_count_kv, layers,
                          out->head_count_kv));
    return take_per_layer("ffn_width", message->ffn_width, message->n_ffn_width, layers,
                          out->ffn_width);
}

/* ---- pieces ---- */

static fl_status build_tensor(const struct fl_tensor_ref *tensor, struct fl_arena *arena,
                              Firstlight__Cluster__TensorRef **out)
{
    Firstlight__Cluster__TensorRef *message = NULL;
    FL_FIELD_MAKE(arena, Firstlight__Cluster__TensorRef, firstlight__cluster__tensor_ref, &message);
    message->role = tensor->role;
    message->dtype = tensor->dtype;
    message->rows = tensor->rows;
    message->columns = tensor->columns;
    message->file = tensor->file;
    message->offset = tensor->offset;
    message->size = tensor->size;
    *out = message;
    return FL_OK;
}

static fl_status build_piece(const struct fl_piece *piece, struct fl_arena *arena,
                             Firstlight__Cluster__Piece **out)
{
    FL_ASSERT(piece->tensor_count <= FL_PIECE_TENSOR_MAX);

    Firstlight__Cluster__Piece *message = NULL;
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Piece, firstlight__cluster__piece, &message);
    message->kind = piece->kind;
    message->layer = piece->layer;
    message->n_tensors = piece->tensor_count;
    FL_TRY(
        fl_field_array(arena, piece->tensor_count, sizeof(*message->tensors), &message->tensors));
    for (uint32_t i = 0; i < piece->tensor_count; i++) {
        FL_TRY(build_tensor(&piece->tensors[i], arena, &message->tensors[i]));
    }
    *out = message;
    return FL_OK;
}

static fl_status take_piece(const Firstlight__Cluster__Piece *message, struct fl_piece *out)
{
    FL_TRY(fl_field_range("piece kind", message->kind, FL_PIECE_EMBED, FL_PIECE_HEAD));
    FL_TRY(fl_field_range("piece layer", message->layer, 0, FL_LAYER_COUNT_MAX - 1));
    FL_TRY(fl_field_range("piece tensor count", message->n_tensors, 1, FL_PIECE_TENSOR_MAX));
    out->kind = (enum fl_piece_kind)message->kind;
    out->layer = message->layer;
    out->tensor_count = (uint32_t)message->n_tensors;
    for (size_t i = 0; i < message->n_tensors; i++) {
        const Firstlight__Cluster__TensorRef *tensor = message->tensors[i];
        FL_TRY(fl_field_range("tensor role", tensor->role, FL_ROLE_TOKEN_EMBD, FL_ROLE_LAST));
        if (!fl_dtype_known(tensor->dtype)) {
            return FL_FAIL(FL_PROTOCOL, "tensor type %" PRIu32 " (%s) is not supported",
                           tensor->dtype, fl_dtype_name(tensor->dtype));
        }
        out->tensors[i] = (struct fl_tensor_ref){
            .role = (enum fl_tensor_role)tensor->role,
            .dtype = (enum fl_dtype)tensor->dtype,
            .rows = tensor->rows,
            .columns = tensor->columns,
            .file = tensor->file,
            .offset = tensor->offset,
            .size = tensor->size,
        };
    }
    return FL_OK;
}

/* ---- manifest ---- */

static fl_status build_manifest(const struct fl_manifest *manifest, struct fl_arena *arena,
                                Firstlight__Cluster__Manifest **out)
{
    FL_ASSERT(manifest->file_count <= FL_FILE_COUNT_MAX);
    FL_ASSERT(manifest->piece_count <= FL_PIECE_COUNT_MAX);

    Firstlight__Cluster__Manifest *message = NULL;
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Manifest, firstlight__cluster__manifest, &message);
    fl_field_borrow(manifest->name, strnlen(manifest->name, sizeof(manifest->name)),
                    &message->name);
    fl_field_borrow(manifest->identity, FL_IDENTITY_SIZE, &message->identity);
    FL_TRY(build_shape(&manifest->shape, arena, &message->shape));

    message->n_file_sizes = manifest->file_count;
    FL_TRY(fl_field_array(arena, manifest->file_count, sizeof(*message->file_sizes),
                          &message->file_sizes));
    for (uint32_t i = 0; i < manifest->file_count; i++) {
        message->file_sizes[i] = manifest->files[i].size;
    }
    message->n_pieces = manifest->piece_count;
    FL_TRY(
        fl_field_array(arena, manifest->piece_count, sizeof(*message->pieces), &message->pieces));
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        FL_TRY(build_piece(&manifest->pieces[i], arena, &message->pieces[i]));
    }
    *out = message;
    return FL_OK;
}

static fl_status take_manifest(const Firstlight__Cluster__Manifest *message, struct fl_arena *arena,
                               struct fl_manifest *out)
{
    if (message == NULL) {
        return FL_FAIL(FL_PROTOCOL, "plan has no manifest");
    }
    FL_TRY(fl_field_model("model", &message->name, out->name));
    FL_TRY(
        fl_field_range("identity size", message->identity.len, FL_IDENTITY_SIZE, FL_IDENTITY_SIZE));
    memcpy(out->identity, message->identity.data, FL_IDENTITY_SIZE);
    FL_TRY(take_shape(message->shape, &out->shape));

    FL_TRY(fl_field_range("file count", message->n_file_sizes, 1, FL_FILE_COUNT_MAX));
    out->file_count = (uint32_t)message->n_file_sizes;
    for (size_t i = 0; i < message->n_file_sizes; i++) {
        out->files[i].size = message->file_sizes[i];
    }
    FL_TRY(fl_field_range("piece count", message->n_pieces, 1, FL_PIECE_COUNT_MAX));
    out->piece_count = (uint32_t)message->n_pieces;
    FL_TRY(fl_field_array(arena, out->piece_count, sizeof(*out->pieces), &out->pieces));
    for (size_t i = 0; i < message->n_pieces; i++) {
        FL_TRY(take_piece(message->pieces[i], &out->pieces[i]));
    }
    if (fl_manifest_check(out) != FL_OK) {
        return FL_PROTOCOL; /* the check has said what is wrong */
    }
    return FL_OK;
}

/* The piece that comes at `index` of a stage, in order of use. */
static void piece_expected(const struct fl_stage *stage, uint32_t index, enum fl_piece_kind *kind,
                           uint32_t *layer)
{
    const uint32_t before = stage->has_embed ? 1 : 0;
    *layer = 0;
    if (index < before) {
        *kind = FL_PIECE_EMBED;
    } else if (index - before < 2 * stage->layer_count) {
        *kind = (index - before) % 2 == 0 ? FL_PIECE_ATTENTION : FL_PIECE_FFN;
        *layer = stage->layer_first + (index - before) / 2;
    } else {
        *kind = FL_PIECE_HEAD;
    }
}

/* The manifest holds the pieces of the plan's own stage, all of them and no other. */
static fl_status check_pieces(const struct fl_plan *plan)
{
    const struct fl_manifest *manifest = &plan->manifest;
    const struct fl_stage *stage = &plan->stages[plan->stage_index];
    const struct fl_stage *last = &plan->stages[plan->stage_count - 1];
    if (last->layer_first + last->layer_count != manifest->shape.layer_count) {
        return FL_FAIL(FL_PROTOCOL, "stages hold %" PRIu32 " layers, the model has %" PRIu32,
                       last->layer_first + last->layer_count, manifest->shape.layer_count);
    }
    const uint32_t want =
        2 * stage->layer_count + (stage->has_embed ? 1 : 0) + (stage->has_head ? 1 : 0);
    if (manifest->piece_count != want) {
        return FL_FAIL(FL_PROTOCOL, "stage %" PRIu32 " has %" PRIu32 " pieces, want %" PRIu32,
                       plan->stage_index, manifest->piece_count, want);
    }
    for (uint32_t i = 0; i < want; i++) {
        const struct fl_piece *piece = &manifest->pieces[i];
        enum fl_piece_kind kind;
        uint32_t layer;
        piece_expected(stage, i, &kind, &layer);
        if (piece->kind != kind || piece->layer != layer) {
            return FL_FAIL(FL_PROTOCOL,
                           "piece %" PRIu32 " of stage %" PRIu32 " is kind %d layer %" PRIu32
                           ", want kind %d layer %" PRIu32,
                           i, plan->stage_index, (int)piece->kind, piece->layer, (int)kind, layer);
        }
    }
    return FL_OK;
}

/* ---- plan ---- */

fl_status fl_plan_message_build(const struct fl_plan *plan, struct fl_arena *arena,
                                struct Firstlight__Cluster__Plan **out)
{
    Firstlight__Cluster__Plan *message = NULL;
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Plan, firstlight__cluster__plan, &message);
    message->plan_id = plan->plan_id;
    message->stage_index = plan->stage_index;
    FL_TRY(build_stages(plan, arena, message));
    FL_TRY(build_manifest(&plan->manifest, arena, &message->manifest));
    message->chunk_rows = plan->chunk_rows;
    message->context = plan->context;
    message->kv_block_count = plan->kv_block_count;
    message->sequence_max = plan->sequence_max;
    message->activations_f32 = plan->activations_f32;
    message->no_overlap = plan->no_overlap;
    *out = message;
    return FL_OK;
}

fl_status fl_plan_message_take(const struct Firstlight__Cluster__Plan *message,
                               struct fl_arena *arena, struct fl_plan *out)
{
    FL_TRY(fl_field_range("plan_id", message->plan_id, 1, UINT64_MAX));
    out->plan_id = message->plan_id;
    FL_TRY(take_stages(message, arena, out));
    FL_TRY(take_manifest(message->manifest, arena, &out->manifest));
    FL_TRY(check_pieces(out));
    FL_TRY(fl_field_range("chunk_rows", message->chunk_rows, 1, FL_CHUNK_MAX));
    FL_TRY(fl_field_range("context", message->context, 1, FL_CONTEXT_MAX));
    FL_TRY(fl_field_range("kv_block_count", message->kv_block_count, 1, KV_BLOCK_COUNT_MAX));
    FL_TRY(fl_field_range("sequence_max", message->sequence_max, 1, SEQUENCE_COUNT_MAX));
    out->chunk_rows = message->chunk_rows;
    out->context = message->context;
    out->kv_block_count = message->kv_block_count;
    out->sequence_max = message->sequence_max;
    out->activations_f32 = message->activations_f32 != 0;
    out->no_overlap = message->no_overlap != 0;
    return FL_OK;
}
