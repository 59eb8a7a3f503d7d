#include "pipeline/weight_store.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

#define NO_PIECE UINT32_MAX

/* One piece's place in memory.  `published` and what it stands for pass from the loader
 * thread to the compute thread; the rest is constant after open, `holders` is the compute
 * thread's own. */
struct stored_piece {
    struct piece_weights weights;
    unsigned char *data[FL_PIECE_TENSOR_MAX]; /* by tensor; NULL when the piece has no memory */
    uint64_t file_size;
    uint64_t published_ns;
    uint32_t holders;
    _Atomic int published;
};

struct weight_store {
    const struct fl_manifest *manifest;
    struct device *device;
    unsigned char *memory;
    size_t memory_size;
    uint32_t embed;  /* index of EMBED, NO_PIECE when the stage has none */
    uint32_t head;   /* index of HEAD, likewise */
    bool embed_tied; /* EMBED's rows are HEAD's */
    uint32_t order_count;
    uint32_t *order; /* [order_count] pieces in the order of loading */
    _Atomic uint32_t pieces_done;
    _Atomic uint64_t bytes_done;
    _Atomic fl_status failure; /* set once, never cleared */
    struct stored_piece *pieces;
};

/* Bytes of a tensor in memory, whole cache lines. */
static uint64_t tensor_memory(const struct fl_tensor_ref *tensor)
{
    const uint64_t size = fl_tensor_role_is_vector(tensor->role)
                              ? (uint64_t)tensor->columns * sizeof(float)
                              : matrix_packed_size(tensor->dtype, tensor->rows, tensor->columns);
    return (size + MATRIX_ALIGNMENT - 1) / MATRIX_ALIGNMENT * MATRIX_ALIGNMENT;
}

static uint32_t find_piece(const struct fl_manifest *manifest, enum fl_piece_kind kind)
{
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        if (manifest->pieces[i].kind == kind) {
            return i;
        }
    }
    return NO_PIECE;
}

static bool shares_embed(const struct fl_manifest *manifest)
{
    return manifest->shape.tied_head && find_piece(manifest, FL_PIECE_EMBED) != NO_PIECE &&
           find_piece(manifest, FL_PIECE_HEAD) != NO_PIECE;
}

uint64_t weight_store_memory(const struct fl_manifest *manifest)
{
    const bool tied = shares_embed(manifest);
    uint64_t size = 0;
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        const struct fl_piece *piece = &manifest->pieces[i];
        for (uint32_t j = 0; j < piece->tensor_count; j++) {
            size += tied && piece->kind == FL_PIECE_EMBED ? 0 : tensor_memory(&piece->tensors[j]);
        }
    }
    return size;
}

/* Give the piece its memory from *next on, and fill in the views. */
static void place_piece(struct stored_piece *stored, const struct fl_piece *piece,
                        unsigned char **next)
{
    for (uint32_t i = 0; i < piece->tensor_count; i++) {
        const struct fl_tensor_ref *tensor = &piece->tensors[i];
        stored->data[i] = *next;
        *next += tensor_memory(tensor);
        if (fl_tensor_role_is_vector(tensor->role)) {
            stored->weights.vector[tensor->role] = (const float *)(const void *)stored->data[i];
        } else {
            stored->weights.matrix[tensor->role] = (struct matrix){
                .data = stored->data[i],
                .dtype = tensor->dtype,
                .rows = tensor->rows,
                .columns = tensor->columns,
            };
        }
    }
    stored->file_size = fl_piece_size(piece);
}

static void place_pieces(struct weight_store *store)
{
    const struct fl_manifest *manifest = store->manifest;
    unsigned char *next = store->memory;
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        if (i != store->embed) {
            place_piece(&store->pieces[i], &manifest->pieces[i], &next);
            store->order[store->order_count++] = i;
        }
    }
    if (store->embed_tied) {
        store->pieces[store->embed].weights.matrix[FL_ROLE_TOKEN_EMBD] =
            store->pieces[store->head].weights.matrix[FL_ROLE_OUTPUT];
    } else if (store->embed != NO_PIECE) {
        place_piece(&store->pieces[store->embed], &manifest->pieces[store->embed], &next);
        store->order[store->order_count++] = store->embed;
    }
    FL_ASSERT(next == store->memory + store->memory_size);
}

fl_status weight_store_open(const struct fl_manifest *manifest, struct device *device,
                            struct weight_store **out)
{
    const uint64_t size = weight_store_memory(manifest);
    struct weight_store *store = calloc(1, sizeof(*store));
    if (store == NULL) {
        goto fail;
    }
    store->manifest = manifest;
    store->device = device;
    store->memory_size = (size_t)size;
    store->embed = find_piece(manifest, FL_PIECE_EMBED);
    store->head = find_piece(manifest, FL_PIECE_HEAD);
    store->embed_tied = shares_embed(manifest);
    store->pieces = calloc(manifest->piece_count, sizeof(*store->pieces));
    store->order = calloc(manifest->piece_count, sizeof(*store->order));
    store->memory = device->ops->alloc(device, DEVICE_MEMORY_WEIGHTS, store->memory_size);
    if (store->pieces == NULL || store->order == NULL || store->memory == NULL) {
        goto fail;
    }
    place_pieces(store);
    *out = store;
    return FL_OK;

fail:
    weight_store_close(store);
    return FL_FAIL(FL_NO_MEMORY, "no memory for the weights of %s: %" PRIu64 " bytes are wanted",
                   manifest->name, size);
}

void weight_store_close(struct weight_store *store)
{
    if (store != NULL) {
        if (store->memory != NULL) {
            store->device->ops->free(store->device, store->memory, store->memory_size);
        }
        free(store->order);
        free(store->pieces);
        free(store);
    }
}

fl_status weight_store_order(const struct weight_store *store, uint32_t n, uint32_t *out_piece)
{
    if (n >= store->order_count) {
        return FL_END;
    }
    *out_piece = store->order[n];
    return FL_OK;
}

int weight_store_has_memory(const struct weight_store *store, uint32_t piece)
{
    FL_ASSERT(piece < store->manifest->piece_count);
    return !(store->embed_tied && piece == store->embed);
}

void weight_store_put(struct weight_store *store, uint32_t piece, uint32_t tensor,
                      uint32_t row_first, uint32_t row_count, const void *raw)
{
    FL_ASSERT(piece < store->manifest->piece_count && weight_store_has_memory(store, piece));
    FL_ASSERT(tensor < store->manifest->pieces[piece].tensor_count);
    const struct fl_tensor_ref *ref = &store->manifest->pieces[piece].tensors[tensor];
    const bool is_last = (uint64_t)row_first + row_count == ref->rows;
    FL_ASSERT(row_count <= ref->rows && row_first <= ref->rows - row_count);
    FL_ASSERT(row_first % MATRIX_ROW_GROUP == 0 && (row_count % MATRIX_ROW_GROUP == 0 || is_last));
    /* Relaxed: the loader thread itself wrote it. */
    FL_ASSERT(!atomic_load_explicit(&store->pieces[piece].published, memory_order_relaxed));

    unsigned char *data = store->pieces[piece].data[tensor];
    if (fl_tensor_role_is_vector(ref->role)) {
        matrix_dequantize_row(ref->dtype, raw, ref->columns, (float *)(void *)data);
    } else {
        matrix_pack_rows(ref->dtype, ref->columns, raw, row_first, row_count, data);
    }
}

void weight_store_publish(struct weight_store *store, uint32_t piece, uint64_t now_ns)
{
    FL_ASSERT(piece < store->manifest->piece_count && weight_store_has_memory(store, piece));
    struct stored_piece *stored = &store->pieces[piece];
    const uint32_t pieces = store->embed_tied && piece == store->head ? 2 : 1;

    stored->published_ns = now_ns;
    /* The piece's bytes and views; pairs with the acquire in weight_store_acquire(). */
    FL_ASSERT(!atomic_exchange_explicit(&stored->published, 1, memory_order_release));
    if (pieces == 2) {
        store->pieces[store->embed].published_ns = now_ns;
        atomic_store_explicit(&store->pieces[store->embed].published, 1, memory_order_release);
    }
    /* Counters for display: they order nothing. */
    atomic_fetch_add_explicit(&store->bytes_done, stored->file_size, memory_order_relaxed);
    atomic_fetch_add_explicit(&store->pieces_done, pieces, memory_order_relaxed);
}

void weight_store_fail(struct weight_store *store, fl_status status)
{
    FL_ASSERT(fl_status_scope(status) != FL_SCOPE_NONE);
    /* Pairs with the acquire in weight_store_acquire(). */
    atomic_store_explicit(&store->failure, status, memory_order_release);
}

fl_status weight_store_acquire(struct weight_store *store, uint32_t piece,
                               const struct piece_weights **out)
{
    FL_ASSERT(piece < store->manifest->piece_count);
    struct stored_piece *stored = &store->pieces[piece];

    /* The failure is read first, so that it never overtakes a piece published before it. */
    const fl_status failure = atomic_load_explicit(&store->failure, memory_order_acquire);
    if (!atomic_load_explicit(&stored->published, memory_order_acquire)) {
        return failure != FL_OK ? failure : FL_AGAIN;
    }
    stored->holders++;
    *out = &stored->weights;
    return FL_OK;
}

void weight_store_release(struct weight_store *store, uint32_t piece)
{
    FL_ASSERT(piece < store->manifest->piece_count && store->pieces[piece].holders > 0);
    store->pieces[piece].holders--;
}

uint64_t weight_store_published_ns(const struct weight_store *store, uint32_t piece)
{
    FL_ASSERT(piece < store->manifest->piece_count);
    return store->pieces[piece].published_ns;
}

fl_status weight_store_embed(const struct weight_store *store, const uint32_t *ids, uint32_t count,
                             float *out)
{
    if (store->embed == NO_PIECE) {
        return FL_AGAIN;
    }
    const struct stored_piece *stored = &store->pieces[store->embed];
    if (!atomic_load_explicit(&stored->published, memory_order_acquire)) {
        return FL_AGAIN;
    }
    const struct matrix *table = &stored->weights.matrix[FL_ROLE_TOKEN_EMBD];
    for (uint32_t i = 0; i < count; i++) {
        FL_ASSERT(ids[i] < table->rows);
        matrix_row(table, ids[i], out + (size_t)i * table->columns);
    }
    return FL_OK;
}

uint32_t weight_store_pieces_done(const struct weight_store *store)
{
    return atomic_load_explicit(&store->pieces_done, memory_order_relaxed);
}

uint64_t weight_store_bytes_done(const struct weight_store *store)
{
    return atomic_load_explicit(&store->bytes_done, memory_order_relaxed);
}

uint64_t weight_store_bytes_total(const struct weight_store *store)
{
    uint64_t size = 0;
    for (uint32_t n = 0; n < store->order_count; n++) {
        size += store->pieces[store->order[n]].file_size;
    }
    return size;
}
