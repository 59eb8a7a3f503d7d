#include "pipeline/weight_store.h"

#include <pthread.h>
#include <stdlib.h>

#include "pipeline/model.h"
#include "tests/harness.h"
#include "tests/support/model_writer.h"
#include "tests/support/temp_folder.h"

/* A tiny model on disk, one stage of it, and its store. */
struct subject {
    struct temp_folder folder;
    struct model *model;
    struct fl_manifest manifest;
    struct device *device;
    struct weight_store *store;
    unsigned char *file;
};

static struct subject subject;

static void open_subject(struct model_spec spec, struct model_range range)
{
    char path[TEMP_PATH_MAX];
    temp_folder_make(&subject.folder);
    temp_folder_path(&subject.folder, "tiny.gguf", path);
    CHECK_EQ(model_write(&spec, path), FL_OK);
    CHECK_EQ(model_open(path, &subject.model), FL_OK);
    CHECK_EQ(model_stage_manifest(model_manifest(subject.model), &range, &subject.manifest), FL_OK);

    const size_t size = (size_t)subject.manifest.files[0].size;
    FILE *file = fopen(path, "rb");
    subject.file = malloc(size);
    CHECK(file != NULL && subject.file != NULL);
    CHECK_EQ(fread(subject.file, 1, size, file), size);
    fclose(file);

    const struct device_host_config host = {.threads = 1, .isa = "scalar"};
    CHECK_EQ(device_host_open(&host, &subject.device), FL_OK);
    CHECK_EQ(weight_store_open(&subject.manifest, subject.device, &subject.store), FL_OK);
}

static void close_subject(void)
{
    weight_store_close(subject.store);
    subject.device->ops->close(subject.device);
    free(subject.file);
    model_close(subject.model);
    temp_folder_remove(&subject.folder);
}

static struct model_spec tiny(void)
{
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    spec.dtypes[FL_ROLE_FFN_DOWN] = FL_DTYPE_F16;
    spec.rope_freqs = true;
    return spec;
}

static const struct model_range whole = {.layer_count = 3, .has_embed = true, .has_head = true};

static const unsigned char *raw_row(const struct fl_tensor_ref *tensor, uint32_t row)
{
    size_t row_size;
    CHECK_EQ(fl_dtype_row_size(tensor->dtype, tensor->columns, &row_size), FL_OK);
    return subject.file + tensor->offset + row * row_size;
}

static void put_piece(uint32_t piece, uint32_t rows_at_once)
{
    const struct fl_piece *ref = &subject.manifest.pieces[piece];
    for (uint32_t i = 0; i < ref->tensor_count; i++) {
        const struct fl_tensor_ref *tensor = &ref->tensors[i];
        for (uint32_t row = 0; row < tensor->rows; row += rows_at_once) {
            const uint32_t rest = tensor->rows - row;
            weight_store_put(subject.store, piece, i, row,
                             rest < rows_at_once ? rest : rows_at_once, raw_row(tensor, row));
        }
    }
}

/* Every row of the piece is what the file's row says. */
static void check_piece(uint32_t piece, const struct piece_weights *weights)
{
    const struct fl_piece *ref = &subject.manifest.pieces[piece];
    static float want[4096], got[4096];
    for (uint32_t i = 0; i < ref->tensor_count; i++) {
        const struct fl_tensor_ref *tensor = &ref->tensors[i];
        const struct matrix *matrix = &weights->matrix[tensor->role];
        for (uint32_t row = 0; row < tensor->rows; row++) {
            matrix_dequantize_row(tensor->dtype, raw_row(tensor, row), tensor->columns, want);
            if (matrix->data != NULL) {
                matrix_row(matrix, row, got);
            } else {
                memcpy(got, weights->vector[tensor->role], tensor->columns * sizeof(float));
            }
            CHECK(memcmp(want, got, tensor->columns * sizeof(float)) == 0);
        }
    }
}

static void pieces_come_one_by_one(void)
{
    open_subject(tiny(), whole);
    uint32_t piece;
    const struct piece_weights *weights;
    uint64_t bytes = 0;
    for (uint32_t n = 0; weight_store_order(subject.store, n, &piece) == FL_OK; n++) {
        CHECK_EQ(weight_store_acquire(subject.store, piece, &weights), FL_AGAIN);
        put_piece(piece, n % 2 == 0 ? 16 : 48);
        CHECK_EQ(weight_store_acquire(subject.store, piece, &weights), FL_AGAIN);
        CHECK_EQ(weight_store_bytes_done(subject.store), bytes);
        weight_store_publish(subject.store, piece, 0);
        bytes += fl_piece_size(&subject.manifest.pieces[piece]);
        CHECK_EQ(weight_store_bytes_done(subject.store), bytes);
        CHECK_EQ(weight_store_acquire(subject.store, piece, &weights), FL_OK);
        check_piece(piece, weights);
        weight_store_release(subject.store, piece);
    }
    CHECK_EQ(weight_store_bytes_done(subject.store), weight_store_bytes_total(subject.store));
    CHECK_EQ(weight_store_pieces_done(subject.store), subject.manifest.piece_count);
    close_subject();
}

static void order_of_loading(void)
{
    struct model_spec spec = tiny();
    spec.untied = true;
    open_subject(spec, whole);
    /* EMBED, A0, F0, A1, F1, A2, F2, HEAD: layers first, the table last. */
    static const uint32_t want[] = {1, 2, 3, 4, 5, 6, 7, 0};
    uint32_t piece;
    for (uint32_t n = 0; n < 8; n++) {
        CHECK_EQ(weight_store_order(subject.store, n, &piece), FL_OK);
        CHECK_EQ(piece, want[n]);
        CHECK(weight_store_has_memory(subject.store, piece));
    }
    CHECK_EQ(weight_store_order(subject.store, 8, &piece), FL_END);
    close_subject();
}

static void tied_head_is_the_table(void)
{
    open_subject(tiny(), whole);
    const uint32_t head = subject.manifest.piece_count - 1;
    const uint32_t ids[] = {0, 17, 200, 17};
    static float rows[4 * 4096], want[4096];
    const struct fl_tensor_ref copy = subject.manifest.pieces[0].tensors[0];
    const struct fl_tensor_ref *table = &copy; /* the model is closed and opened again */
    CHECK(!weight_store_has_memory(subject.store, 0));
    uint64_t memory = weight_store_memory(&subject.manifest);
    CHECK_EQ(weight_store_embed(subject.store, ids, 4, rows), FL_AGAIN);
    put_piece(head, 64);
    weight_store_publish(subject.store, head, 0);
    CHECK_EQ(weight_store_pieces_done(subject.store), 2);
    CHECK_EQ(weight_store_embed(subject.store, ids, 4, rows), FL_OK);
    for (uint32_t i = 0; i < 4; i++) {
        matrix_dequantize_row(table->dtype, raw_row(table, ids[i]), table->columns, want);
        CHECK(memcmp(want, rows + i * table->columns, table->columns * sizeof(float)) == 0);
    }
    const struct piece_weights *weights;
    CHECK_EQ(weight_store_acquire(subject.store, 0, &weights), FL_OK);
    CHECK_EQ(weights->matrix[FL_ROLE_TOKEN_EMBD].rows, table->rows);
    weight_store_release(subject.store, 0);
    close_subject();

    /* Cut in two, each side has the table once: together more by one table. */
    const struct model_range first = {.layer_count = 2, .has_embed = true};
    const struct model_range last = {.layer_first = 2, .layer_count = 1, .has_head = true};
    open_subject(tiny(), first);
    uint64_t apart = weight_store_memory(&subject.manifest);
    CHECK(weight_store_has_memory(subject.store, 0));
    put_piece(0, 16);
    weight_store_publish(subject.store, 0, 0);
    CHECK_EQ(weight_store_embed(subject.store, ids, 4, rows), FL_OK);
    close_subject();
    open_subject(tiny(), last);
    apart += weight_store_memory(&subject.manifest);
    CHECK_EQ(weight_store_embed(subject.store, ids, 4, rows), FL_AGAIN); /* for ever: no EMBED */
    CHECK_EQ(apart - memory, matrix_packed_size(table->dtype, table->rows, table->columns));
    close_subject();
}

static void failure_stops_what_is_missing(void)
{
    open_subject(tiny(), whole);
    const struct piece_weights *weights;
    put_piece(1, 16);
    weight_store_publish(subject.store, 1, 0);
    weight_store_fail(subject.store, FL_CORRUPT);
    CHECK_EQ(weight_store_acquire(subject.store, 1, &weights), FL_OK); /* came before */
    weight_store_release(subject.store, 1);
    CHECK_EQ(weight_store_acquire(subject.store, 2, &weights), FL_CORRUPT);
    close_subject();
}

static void refuses_without_memory(void)
{
    open_subject(tiny(), whole);
    struct fl_manifest huge = subject.manifest;
    struct fl_piece piece = huge.pieces[1];
    for (uint32_t i = 0; i < piece.tensor_count; i++) {
        piece.tensors[i].rows = 1u << 31;
        piece.tensors[i].columns = 1u << 20;
    }
    huge.pieces = &piece;
    huge.piece_count = 1;
    struct weight_store *store;
    CHECK_EQ(weight_store_open(&huge, subject.device, &store), FL_NO_MEMORY);
    CHECK(strstr(fl_last_error(), "bytes are wanted") != NULL);
    close_subject();
}

static void *load_all(void *ctx)
{
    uint32_t piece;
    (void)ctx;
    for (uint32_t n = 0; weight_store_order(subject.store, n, &piece) == FL_OK; n++) {
        put_piece(piece, 32);
        weight_store_publish(subject.store, piece, 0);
    }
    return NULL;
}

static void loads_beside_compute(void)
{
    open_subject(tiny(), whole);
    pthread_t loader;
    CHECK_EQ(pthread_create(&loader, NULL, load_all, NULL), 0);
    for (uint32_t piece = 1; piece < subject.manifest.piece_count; piece++) {
        const struct piece_weights *weights;
        fl_status status;
        while ((status = weight_store_acquire(subject.store, piece, &weights)) == FL_AGAIN) {
            sched_yield();
        }
        CHECK_EQ(status, FL_OK);
        check_piece(piece, weights);
        weight_store_release(subject.store, piece);
    }
    CHECK_EQ(pthread_join(loader, NULL), 0);
    close_subject();
}

static const struct test_case cases[] = {
    {"weight_store: a piece is seen when it is whole, as the file has it", pieces_come_one_by_one},
    {"weight_store: layers are loaded as they compute, then the head, then the table",
     order_of_loading},
    {"weight_store: a tied head serves the embedding and is in memory once",
     tied_head_is_the_table},
    {"weight_store: a failed load ends what was not there yet, and nothing else",
     failure_stops_what_is_missing},
    {"weight_store: memory that is not there is refused with its size", refuses_without_memory},
    {"weight_store: a loader thread fills while another reads", loads_beside_compute},
};

TEST_MAIN(cases)
