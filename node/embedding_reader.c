#include "node/embedding_reader.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/matrix.h"

/* Who may touch the request: compute in IDLE, READY and FAILED, the loader in WANTED. */
enum state { IDLE, WANTED, READY, FAILED };

struct wanted_row {
    uint32_t id;
    uint32_t index; /* in the request */
};

struct embedding_reader {
    struct embedding_reader_config config;
    const struct fl_tensor_ref *table; /* [V, D] */
    uint32_t piece;                    /* that it is of */
    size_t row_size;                   /* in the file */
    _Atomic int state;
    fl_status failure;
    uint64_t ready_ns; /* when the rows were there */

    uint32_t count;
    uint32_t *ids; /* [rows_max], as asked for */
    float *rows;   /* [rows_max, D] */

    /* The loader's part. */
    bool started;
    uint64_t begun_ns;
    uint32_t read_count; /* rows read, each once */
    enum fl_source source;
    struct wanted_row *sorted; /* [rows_max], by id */
    uint32_t done;             /* of sorted */
    bool fetching;
    uint32_t fetch_slot;
    uint32_t fetch_end;      /* rows sorted[done .. fetch_end) are on their way */
    struct fl_range *ranges; /* [rows_max], of the fetch */
    unsigned char *raw;      /* [row_size] */
};

static const struct fl_tensor_ref *find_table(const struct fl_manifest *manifest,
                                              uint32_t *out_piece)
{
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        const struct fl_piece *piece = &manifest->pieces[i];
        for (uint32_t t = 0; piece->kind == FL_PIECE_EMBED && t < piece->tensor_count; t++) {
            if (piece->tensors[t].role == FL_ROLE_TOKEN_EMBD) {
                *out_piece = i;
                return &piece->tensors[t];
            }
        }
    }
    return NULL;
}

fl_status embedding_reader_open(const struct embedding_reader_config *config,
                                struct embedding_reader **out)
{
    uint32_t piece = 0;
    const struct fl_tensor_ref *table = find_table(config->manifest, &piece);
    if (table == NULL) {
        return FL_FAIL(FL_INVALID, "plan of model %s: a first stage without an embedding",
                       config->manifest->name);
    }
    struct embedding_reader *reader = calloc(1, sizeof(*reader));
    if (reader == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "embedding reader: no memory");
    }
    const size_t rows = config->rows_max;
    reader->config = *config;
    reader->table = table;
    reader->piece = piece;
    reader->row_size = (size_t)(table->size / table->rows);
    atomic_init(&reader->state, IDLE);
    reader->ids = calloc(rows, sizeof(reader->ids[0]));
    reader->rows = malloc(rows * table->columns * sizeof(float));
    reader->sorted = calloc(rows, sizeof(reader->sorted[0]));
    reader->ranges = calloc(rows, sizeof(reader->ranges[0]));
    reader->raw = malloc(reader->row_size);
    if (reader->ids == NULL || reader->rows == NULL || reader->sorted == NULL ||
        reader->ranges == NULL || reader->raw == NULL) {
        embedding_reader_close(reader);
        return FL_FAIL(FL_NO_MEMORY, "embedding reader of %zu rows: no memory", rows);
    }
    *out = reader;
    return FL_OK;
}

void embedding_reader_close(struct embedding_reader *reader)
{
    if (reader != NULL) {
        FL_ASSERT(!reader->fetching); /* stop() was called */
        free(reader->ids);
        free(reader->rows);
        free(reader->sorted);
        free(reader->ranges);
        free(reader->raw);
        free(reader);
    }
}

fl_status embedding_reader_read(void *ctx, const uint32_t *ids, uint32_t count, float *out,
                                uint64_t *out_ready_ns)
{
    struct embedding_reader *reader = ctx;
    FL_ASSERT(count >= 1 && count <= reader->config.rows_max);
    /* Pairs with the release in finish(). */
    const int state = atomic_load_explicit(&reader->state, memory_order_acquire);
    if (state == WANTED) {
        return FL_AGAIN;
    }
    const bool same =
        count == reader->count && memcmp(ids, reader->ids, count * sizeof(ids[0])) == 0;
    if (state == FAILED && same) {
        atomic_store_explicit(&reader->state, IDLE, memory_order_relaxed);
        return reader->failure; /* said when it happened */
    }
    if (state == READY && same) {
        memcpy(out, reader->rows, (size_t)count * reader->table->columns * sizeof(float));
        *out_ready_ns = reader->ready_ns;
        atomic_store_explicit(&reader->state, IDLE, memory_order_relaxed);
        return FL_OK;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (ids[i] >= reader->table->rows) {
            return FL_FAIL(FL_INVALID, "token %" PRIu32 ": the vocabulary has %" PRIu32, ids[i],
                           reader->table->rows);
        }
    }
    memcpy(reader->ids, ids, count * sizeof(ids[0]));
    reader->count = count;
    /* Publishes the ids; pairs with the acquire in embedding_reader_step(). */
    atomic_store_explicit(&reader->state, WANTED, memory_order_release);
    wake_signal(reader->config.loader_wake);
    return FL_AGAIN;
}

static int by_id(const void *a, const void *b)
{
    const uint32_t left = ((const struct wanted_row *)a)->id;
    const uint32_t right = ((const struct wanted_row *)b)->id;
    return (left > right) - (left < right);
}

static void start(struct embedding_reader *reader, uint64_t now)
{
    for (uint32_t i = 0; i < reader->count; i++) {
        reader->sorted[i] = (struct wanted_row){.id = reader->ids[i], .index = i};
    }
    qsort(reader->sorted, reader->count, sizeof(reader->sorted[0]), by_id);
    reader->done = 0;
    reader->read_count = 0;
    reader->source = FL_SOURCE_WIRE;
    reader->begun_ns = now;
    reader->started = true;
}

/* Hand the request back to the compute thread. */
static void finish(struct embedding_reader *reader, int state, fl_status failure)
{
    if (reader->fetching) {
        fetch_queue_release(reader->config.fetches, reader->fetch_slot);
        reader->fetching = false;
    }
    reader->started = false;
    reader->failure = failure;
    atomic_store_explicit(&reader->state, state, memory_order_release);
    wake_signal(reader->config.compute_wake);
}

/* A row as it lies in the file, for the next of the sorted rows and its repetitions. */
static void take_row(struct embedding_reader *reader, const unsigned char *raw)
{
    const size_t columns = reader->table->columns;
    const struct wanted_row first = reader->sorted[reader->done];
    float *row = reader->rows + first.index * columns;
    reader->read_count++;
    matrix_dequantize_row(reader->table->dtype, raw, reader->table->columns, row);
    while (++reader->done < reader->count && reader->sorted[reader->done].id == first.id) {
        memcpy(reader->rows + reader->sorted[reader->done].index * columns, row,
               columns * sizeof(float));
    }
}

static uint64_t row_offset(const struct embedding_reader *reader, uint32_t id)
{
    return reader->table->offset + (uint64_t)id * reader->row_size;
}

static fl_status read_rows(struct embedding_reader *reader, const struct model_storage *storage,
                           struct model_copy *copy)
{
    uint64_t resident = 0;
    if (storage->resident != NULL) { /* the first row speaks for all */
        (void)storage->resident(copy, reader->table->file, row_offset(reader, reader->sorted[0].id),
                                reader->row_size, &resident);
    }
    reader->source = 2 * resident > reader->row_size ? FL_SOURCE_PAGE_CACHE : FL_SOURCE_DISK;
    while (reader->done < reader->count) {
        const uint32_t id = reader->sorted[reader->done].id;
        FL_TRY(storage->read(copy, reader->table->file, row_offset(reader, id), reader->raw,
                             reader->row_size));
        take_row(reader, reader->raw);
    }
    return FL_OK;
}

/* Ask for as many different rows as one message may carry. */
static fl_status ask_rows(struct embedding_reader *reader)
{
    uint32_t range_count = 0;
    uint32_t size = 0;
    uint32_t end = reader->done;
    for (; end < reader->count; end++) {
        if (end > reader->done && reader->sorted[end].id == reader->sorted[end - 1].id) {
            continue;
        }
        if (range_count == FL_FETCH_RANGE_MAX || size + reader->row_size > FL_FETCH_SIZE_MAX) {
            break;
        }
        reader->ranges[range_count++] =
            (struct fl_range){.offset = row_offset(reader, reader->sorted[end].id),
                              .size = (uint32_t)reader->row_size};
        size += (uint32_t)reader->row_size;
    }
    const struct fetch_request request = {
        .manifest = reader->config.manifest,
        .part_count = 1,
        .parts = {{.file = reader->table->file,
                   .range_count = range_count,
                   .ranges = reader->ranges,
                   .size = size}},
    };
    FL_TRY(fetch_queue_submit(reader->config.fetches, &request, &reader->fetch_slot));
    reader->fetching = true;
    reader->fetch_end = end;
    return FL_OK;
}

static fl_status fetch_rows(struct embedding_reader *reader)
{
    while (reader->done < reader->count) {
        if (!reader->fetching) {
            FL_TRY(ask_rows(reader));
        }
        const unsigned char *bytes;
        FL_TRY(fetch_queue_poll(reader->config.fetches, reader->fetch_slot, &bytes));
        while (reader->done < reader->fetch_end) {
            /* Copied, for alignment. */
            memcpy(reader->raw, bytes, reader->row_size);
            take_row(reader, reader->raw);
            bytes += reader->row_size;
        }
        fetch_queue_release(reader->config.fetches, reader->fetch_slot);
        reader->fetching = false;
    }
    return FL_OK;
}

fl_status embedding_reader_step(struct embedding_reader *reader,
                                const struct model_storage *storage, struct model_copy *copy,
                                const struct fl_clock *clock, struct fl_span *out_span)
{
    /* Pairs with the release in embedding_reader_read(). */
    if (atomic_load_explicit(&reader->state, memory_order_acquire) != WANTED) {
        return FL_AGAIN;
    }
    if (!reader->started) {
        start(reader, fl_clock_now(clock));
    }
    const fl_status status = copy != NULL ? read_rows(reader, storage, copy) : fetch_rows(reader);
    if (status == FL_AGAIN) {
        return FL_AGAIN;
    }
    reader->ready_ns = fl_clock_now(clock);
    *out_span = (struct fl_span){
        .start_ns = reader->begun_ns,
        .end_ns = reader->ready_ns,
        .busy_ns = reader->ready_ns - reader->begun_ns,
        .bytes = (uint64_t)reader->read_count * reader->row_size,
        .piece = reader->piece,
        .rows = reader->count,
        .phase = FL_PHASE_EMBED,
        .source = reader->source,
    };
    finish(reader, status == FL_OK ? READY : FAILED, status);
    return FL_OK;
}

void embedding_reader_stop(struct embedding_reader *reader, fl_status status)
{
    if (atomic_load_explicit(&reader->state, memory_order_acquire) == WANTED) {
        finish(reader, FAILED, status);
    }
}
