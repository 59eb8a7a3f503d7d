/* Loader: what is loaded from where, in which order, and every way it can fail. */
#include "node/loader.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "node/model_folder.h"
#include "pipeline/model.h"
#include "proto/checksum.h"
#include "tests/harness.h"
#include "tests/support/model_writer.h"
#include "tests/support/page_cache.h"
#include "tests/support/temp_folder.h"

enum { STEPS_MAX = 100000, ROWS = 5 };

struct fixture {
    struct temp_folder temp;   /* the coordinator's models, and the caches' parent */
    struct temp_folder shards; /* the cache */
    char path[TEMP_PATH_MAX];
    struct model *model;
    struct fl_manifest manifest; /* of the stage */
    struct fl_plan plan;
    struct fl_stage stage;
    struct device *device;
    struct wake wakes[3];
    struct fetch_queue *fetches;
    struct model_folder folder;
    struct model_storage storage;
    struct shard_cache *cache;
    struct fl_span_ring *spans;
    struct loader *loader;

    struct node_plan *node_plan;
    struct weight_store *weights;
    struct embedding_reader *embed;
    struct loader_job job;

    uint32_t served;  /* fetches answered */
    uint32_t spoil;   /* this many answers get a wrong checksum */
    fl_status refuse; /* else this status */
};

enum source { FROM_FILE, FROM_WIRE };

static void begin_job(struct fixture *f)
{
    CHECK_EQ(node_plan_make(&f->plan, &f->node_plan), FL_OK);
    const struct fl_manifest *manifest = &f->node_plan->plan.manifest;
    CHECK_EQ(weight_store_open(manifest, f->device, &f->weights), FL_OK);
    const struct embedding_reader_config embed = {
        .manifest = manifest,
        .rows_max = 64,
        .fetches = f->fetches,
        .loader_wake = &f->wakes[0],
        .compute_wake = &f->wakes[1],
    };
    CHECK_EQ(embedding_reader_open(&embed, &f->embed), FL_OK);
    f->job = (struct loader_job){.plan = f->node_plan, .weights = f->weights, .embed = f->embed};
    loader_submit(f->loader, &f->job);
}

static void end_job(struct fixture *f)
{
    loader_abandon(f->loader, &f->job);
    for (int i = 0; i < STEPS_MAX && !loader_released(&f->job); i++) {
        (void)!loader_step(f->loader);
    }
    CHECK(loader_released(&f->job));
    embedding_reader_close(f->embed);
    weight_store_close(f->weights);
    node_plan_free(f->node_plan);
}

static uint64_t some_bytes(void)
{
    static uint64_t bytes;
    return bytes += 1000;
}

static uint32_t some_mhz(void)
{
    return 1234;
}

static const struct host_meter meter = {.medium_bytes = some_bytes, .mhz = some_mhz};

/* The loader of an open cache; `its_meter` may be NULL. */
static void open_loader(struct fixture *f, const struct host_meter *its_meter)
{
    CHECK_EQ(fl_span_ring_open(FL_LANE_LOADER, 1024, &f->spans), FL_OK);
    const struct loader_config config = {
        .storage = &f->storage,
        .cache = f->cache,
        .fetches = f->fetches,
        .clock = fl_clock_monotonic(),
        .loader_wake = &f->wakes[0],
        .compute_wake = &f->wakes[1],
        .wire_wake = &f->wakes[2],
        .spans = f->spans,
        .meter = its_meter,
    };
    CHECK_EQ(loader_open(&config, &f->loader), FL_OK);
}

static void close_loader(struct fixture *f)
{
    loader_close(f->loader);
    fl_span_ring_close(f->spans);
}

/* Rewrite a model file with its weights `by` bytes further behind the header, a hole between. */
static void move_weights(const char *path, uint64_t by)
{
    struct gguf *gguf = NULL;
    struct stat st;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && fstat(fd, &st) == 0);
    unsigned char *bytes = malloc((size_t)st.st_size);
    CHECK(bytes != NULL && pread(fd, bytes, (size_t)st.st_size, 0) == st.st_size);
    CHECK_EQ(gguf_open(path, &gguf), FL_OK);
    uint64_t data_first = UINT64_MAX;
    for (uint32_t i = 0; i < gguf_tensor_count(gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor_at(gguf, i);
        data_first = tensor->offset < data_first ? tensor->offset : data_first;
    }
    for (uint32_t i = 0; i < gguf_tensor_count(gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor_at(gguf, i);
        const uint64_t offset = tensor->offset - data_first + by;
        unsigned char *name = memmem(bytes, data_first, tensor->name.data, tensor->name.size);
        memcpy(name + tensor->name.size + 4 + 8 * tensor->dim_count + 4, &offset, sizeof(offset));
    }
    gguf_close(gguf);
    const size_t data_size = (size_t)((uint64_t)st.st_size - data_first);
    CHECK_EQ(ftruncate(fd, (off_t)data_first), 0);
    CHECK_EQ(pwrite(fd, bytes, (size_t)data_first, 0), data_first);
    CHECK_EQ(pwrite(fd, bytes + data_first, data_size, (off_t)(data_first + by)), data_size);
    free(bytes);
    close(fd);
}

static void begin_moved(struct fixture *f, enum source source, bool untied, uint64_t by)
{
    *f = (struct fixture){.refuse = FL_OK};
    temp_folder_make(&f->temp);
    temp_folder_make(&f->shards);
    temp_folder_path(&f->temp, "tiny.gguf", f->path);
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q8_0);
    spec.vocabulary = 40001; /* a table of several chunks, and no whole row groups */
    spec.untied = untied;
    CHECK_EQ(model_write(&spec, f->path), FL_OK);
    if (by != 0) {
        move_weights(f->path, by);
    }
    CHECK_EQ(model_open(f->path, &f->model), FL_OK);
    const struct fl_manifest *whole = model_manifest(f->model);
    const struct model_range range = {
        .layer_count = whole->shape.layer_count, .has_embed = true, .has_head = true};
    CHECK_EQ(model_stage_manifest(whole, &range, &f->manifest), FL_OK);
    f->stage = (struct fl_stage){
        .node = "box1", .layer_count = range.layer_count, .has_embed = true, .has_head = true};
    f->plan = (struct fl_plan){
        .plan_id = 1, .stage_count = 1, .stages = &f->stage, .manifest = f->manifest};

    const struct device_host_config host = {.threads = 1, .isa = "scalar"};
    CHECK_EQ(device_host_open(&host, &f->device), FL_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(wake_open(&f->wakes[i]), FL_OK);
    }
    CHECK_EQ(fetch_queue_open(&f->wakes[0], &f->wakes[2], &f->fetches), FL_OK);
    f->folder.path = source == FROM_FILE ? f->temp.path : NULL;
    f->storage = model_folder_storage(&f->folder);
    const struct shard_cache_config cache = {.folder = f->shards.path, .budget = 1 << 30};
    CHECK_EQ(shard_cache_open(&cache, &f->cache), FL_OK);
    open_loader(f, &meter);
    begin_job(f);
}

static void begin(struct fixture *f, enum source source, bool untied)
{
    begin_moved(f, source, untied, 0);
}

static void clear_cache(const struct fixture *f)
{
    DIR *dir = opendir(f->shards.path);
    for (const struct dirent *file; dir != NULL && (file = readdir(dir)) != NULL;) {
        struct temp_folder below;
        if (file->d_name[0] != '.') {
            temp_folder_path(&f->shards, file->d_name, below.path);
            temp_folder_remove(&below);
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
}

static void end(struct fixture *f)
{
    end_job(f);
    close_loader(f);
    shard_cache_close(f->cache);
    fetch_queue_close(f->fetches);
    for (int i = 0; i < 3; i++) {
        wake_close(&f->wakes[i]);
    }
    f->device->ops->close(f->device);
    model_close(f->model);
    clear_cache(f);
    temp_folder_remove(&f->shards);
    temp_folder_remove(&f->temp);
}

static size_t read_ranges(const struct fixture *f, const struct fl_fetch *fetch, unsigned char *out)
{
    const int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    size_t size = 0;
    CHECK(fd >= 0);
    for (uint32_t i = 0; i < fetch->range_count; i++) {
        CHECK_EQ(pread(fd, out + size, fetch->ranges[i].size, (off_t)fetch->ranges[i].offset),
                 fetch->ranges[i].size);
        size += fetch->ranges[i].size;
    }
    close(fd);
    return size;
}

/* The coordinator's part: answer one message; false when none waits. */
static bool serve(struct fixture *f)
{
    static unsigned char bytes[FL_FETCH_SIZE_MAX];
    struct fl_fetch fetch;
    if (!fetch_queue_next(f->fetches, &fetch)) {
        return false;
    }
    CHECK(memcmp(fetch.identity, f->manifest.identity, FL_IDENTITY_SIZE) == 0);
    CHECK(strcmp(fetch.model, "tiny") == 0);
    fetch_queue_sent(f->fetches, fetch.transfer_id);
    struct fl_fetch_header header = {.transfer_id = fetch.transfer_id};
    if (f->refuse != FL_OK) {
        header.status = (uint32_t)f->refuse;
        header.size = 9;
        CHECK_EQ(fetch_queue_deliver(f->fetches, &header, "no access", 9), FL_OK);
        return true;
    }
    header.size = (uint32_t)read_ranges(f, &fetch, bytes);
    header.checksum = fl_checksum64(bytes, header.size);
    if (f->spoil > 0) {
        f->spoil--;
        header.checksum ^= 1;
    }
    CHECK_EQ(fetch_queue_deliver(f->fetches, &header, bytes, header.size), FL_OK);
    f->served++;
    return true;
}

/* Until nothing more is to be done without an answer: everything is asked for, or committed. */
static void work_dry(struct fixture *f)
{
    while (loader_step(f->loader) == FL_OK) {
    }
}

/* Load until the loader lets go; false when it hangs. */
static bool load(struct fixture *f)
{
    for (int i = 0; i < STEPS_MAX; i++) {
        if (loader_released(&f->job)) {
            return true;
        }
        if (loader_step(f->loader) == FL_AGAIN && !serve(f)) {
            return false;
        }
    }
    return false;
}

/* True when the stored matrix is what the file holds. */
static bool matrix_is_right(const struct fixture *f, const struct fl_tensor_ref *tensor,
                            const struct matrix *matrix)
{
    unsigned char raw[4096];
    float want[1024];
    float got[1024];
    const size_t size = (size_t)(tensor->size / tensor->rows);
    const int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    bool right = fd >= 0 && size <= sizeof(raw) && tensor->columns <= 1024;
    for (uint32_t row = 0; right && row < tensor->rows; row++) {
        right = pread(fd, raw, size, (off_t)(tensor->offset + row * size)) == (ssize_t)size;
        matrix_dequantize_row(tensor->dtype, raw, tensor->columns, want);
        matrix_row(matrix, row, got);
        right = right && memcmp(want, got, tensor->columns * sizeof(float)) == 0;
    }
    close(fd);
    return right;
}

static bool all_is_right(const struct fixture *f)
{
    for (uint32_t i = 0; i < f->manifest.piece_count; i++) {
        const struct fl_piece *piece = &f->manifest.pieces[i];
        const struct piece_weights *weights;
        if (!weight_store_has_memory(f->weights, i)) {
            continue;
        }
        if (weight_store_acquire(f->weights, i, &weights) != FL_OK) {
            return false;
        }
        for (uint32_t t = 0; t < piece->tensor_count; t++) {
            const struct matrix *matrix = &weights->matrix[piece->tensors[t].role];
            if (matrix->data != NULL && !matrix_is_right(f, &piece->tensors[t], matrix)) {
                return false;
            }
        }
        weight_store_release(f->weights, i);
    }
    return true;
}

static void a_models_own_file_is_loaded_whole(void)
{
    for (int untied = 0; untied < 2; untied++) {
        struct fixture f;
        begin(&f, FROM_FILE, untied != 0);
        const bool loaded = load(&f);
        const bool right = all_is_right(&f);
        const uint64_t bytes = f.node_plan->bytes_file;
        const uint64_t total = f.node_plan->bytes_total;
        const uint32_t pieces = f.node_plan->pieces_done;
        const uint64_t stored = weight_store_bytes_done(f.weights);
        end(&f);
        CHECK(loaded);
        CHECK(right);
        CHECK_EQ(f.served, 0);
        CHECK_EQ(bytes, total);
        CHECK_EQ(bytes, stored);
        CHECK_EQ(pieces, f.manifest.piece_count);
    }
}

static void weights_beyond_4_gib_are_loaded(void)
{
    for (enum source source = FROM_FILE; source <= FROM_WIRE; source++) {
        struct fixture f;
        begin_moved(&f, source, true, 5ull << 30);
        const uint64_t first = f.manifest.pieces[0].tensors[0].offset;
        const bool loaded = load(&f);
        const bool right = all_is_right(&f);
        end(&f);
        CHECK(first > 5ull << 30);
        CHECK(loaded && right);
    }
}

static void pieces_are_published_in_the_order_of_use(void)
{
    struct fixture f;
    begin(&f, FROM_FILE, true);
    uint32_t n = 0;
    bool ordered = true;
    while (!loader_released(&f.job)) {
        CHECK_EQ(loader_step(f.loader), FL_OK);
        uint32_t piece;
        const struct piece_weights *weights;
        while (weight_store_order(f.weights, n, &piece) == FL_OK &&
               weight_store_acquire(f.weights, piece, &weights) == FL_OK) {
            weight_store_release(f.weights, piece);
            n++;
        }
        uint32_t later;
        if (weight_store_order(f.weights, n + 1, &later) == FL_OK) {
            ordered = ordered && weight_store_acquire(f.weights, later, &weights) == FL_AGAIN;
        }
    }
    end(&f);
    CHECK(ordered);
    CHECK_EQ(n, f.manifest.piece_count);
}

static void without_a_file_pieces_are_fetched_and_the_next_start_reads_the_cache(void)
{
    struct fixture f;
    begin(&f, FROM_WIRE, true);
    const bool loaded = load(&f);
    const bool right = all_is_right(&f);
    const uint64_t fetched = f.node_plan->bytes_fetched;
    const uint64_t total = f.node_plan->bytes_total;
    work_dry(&f);
    const uint32_t served = f.served;
    end_job(&f);
    begin_job(&f);
    const bool again = load(&f);
    const bool right_again = all_is_right(&f);
    const uint64_t cached = f.node_plan->bytes_cache;
    end(&f);
    CHECK(loaded && right);
    CHECK_EQ(fetched, total);
    CHECK(served > f.manifest.piece_count); /* the table takes several */
    CHECK(again && right_again);
    CHECK_EQ(cached, total);
    CHECK_EQ(f.served, served);
}

/* Flip a byte far behind in the largest entry. */
static void damage_largest(const struct fixture *f)
{
    char hex[2 * FL_IDENTITY_SIZE + 1];
    for (size_t i = 0; i < FL_IDENTITY_SIZE; i++) {
        snprintf(hex + 2 * i, 3, "%02x", f->manifest.identity[i]);
    }
    struct temp_folder below;
    char largest[TEMP_PATH_MAX] = "";
    off_t size = 0;
    temp_folder_path(&f->shards, hex, below.path);
    DIR *dir = opendir(below.path);
    CHECK(dir != NULL);
    for (const struct dirent *file; (file = readdir(dir)) != NULL;) {
        char path[TEMP_PATH_MAX];
        struct stat st;
        temp_folder_path(&below, file->d_name, path);
        if (stat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > size) {
            size = st.st_size;
            memcpy(largest, path, sizeof(largest));
        }
    }
    closedir(dir);
    const int fd = open(largest, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(pwrite(fd, "damage", 6, size - 100), 6);
    close(fd);
}

static void a_damaged_cache_entry_is_fetched_again_in_mid_load(void)
{
    struct fixture f;
    begin(&f, FROM_WIRE, true);
    CHECK(load(&f));
    work_dry(&f);
    const uint32_t served = f.served;
    end_job(&f);
    damage_largest(&f);
    begin_job(&f);
    const bool again = load(&f);
    const bool right = all_is_right(&f);
    const uint64_t cached = f.node_plan->bytes_cache;
    const uint64_t fetched = f.node_plan->bytes_fetched;
    end(&f);
    CHECK(again && right);
    CHECK(f.served > served);
    CHECK(fetched > 0 && cached > 0);
}

static bool rows_are_right(const struct fixture *f, const uint32_t *ids, const float *rows)
{
    const struct fl_tensor_ref *table = &f->manifest.pieces[0].tensors[0];
    unsigned char raw[4096];
    float want[1024];
    const size_t size = (size_t)(table->size / table->rows);
    const int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    bool right = true;
    for (uint32_t i = 0; right && i < ROWS; i++) {
        right = pread(fd, raw, size, (off_t)(table->offset + ids[i] * size)) == (ssize_t)size;
        matrix_dequantize_row(table->dtype, raw, table->columns, want);
        right =
            right && memcmp(want, rows + i * table->columns, table->columns * sizeof(float)) == 0;
    }
    close(fd);
    return right;
}

static void check_embedding(enum source source)
{
    static float rows[ROWS * 1024];
    const uint32_t ids[ROWS] = {40000, 7, 0, 7, 4711};
    const uint32_t beyond[1] = {40001 + 4096};
    struct fixture f;
    uint64_t ready_ns = 0;
    begin(&f, source, true);
    const fl_status first = embedding_reader_read(f.embed, ids, ROWS, rows, &ready_ns);
    fl_status second = FL_AGAIN;
    for (int i = 0; second == FL_AGAIN && i < 8; i++) {
        (void)!loader_step(f.loader);
        (void)!loader_step(f.loader);
        (void)serve(&f);
        second = embedding_reader_read(f.embed, ids, ROWS, rows, &ready_ns);
    }
    const uint32_t pieces = f.node_plan->pieces_done;
    const bool right = rows_are_right(&f, ids, rows);
    const fl_status wrong = embedding_reader_read(f.embed, beyond, 1, rows, &ready_ns);
    end(&f);
    CHECK_EQ(first, FL_AGAIN);
    CHECK_EQ(second, FL_OK);
    CHECK(right);
    CHECK(pieces < f.manifest.piece_count / 2);
    CHECK_EQ(wrong, FL_INVALID);
}

static void embedding_rows_come_ahead_of_the_pieces(void)
{
    check_embedding(FROM_FILE);
    check_embedding(FROM_WIRE);
}

/* Spans ------------------------------------------------------------------------------------- */

struct span_list {
    uint32_t count;
    struct fl_span spans[256];
};

static void read_spans(const struct fixture *f, struct span_list *out)
{
    uint64_t cursor = 0;
    uint64_t lost = 0;
    out->count = 0;
    while (out->count < 256 &&
           fl_span_ring_read(f->spans, &cursor, &lost, &out->spans[out->count])) {
        out->count++;
    }
    CHECK_EQ(lost, 0);
}

/* The intervals of a load follow each other from its begin to the last piece, and hold what their
 * phases say.  Returns the bytes that came from `source`. */
static uint64_t check_intervals(const struct fixture *f, const struct span_list *list,
                                enum fl_source source, bool verified)
{
    const struct fl_manifest *manifest = &f->node_plan->plan.manifest;
    uint64_t at_ns = f->job.begin_ns;
    uint64_t bytes = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const struct fl_span *read = &list->spans[i];
        if (read->phase != FL_PHASE_READ) {
            continue;
        }
        const struct fl_span *verify = read + 1;
        const struct fl_span *repack = verify->phase == FL_PHASE_VERIFY ? read + 2 : read + 1;
        uint32_t piece;
        CHECK_EQ(weight_store_order(f->weights, n++, &piece), FL_OK);
        CHECK_EQ(repack->phase, FL_PHASE_REPACK);
        CHECK_EQ(verify->phase == FL_PHASE_VERIFY, verified);
        CHECK_EQ(read->start_ns, at_ns);
        CHECK(repack->start_ns == read->start_ns && repack->end_ns == read->end_ns);
        const uint64_t verify_ns = verified ? verify->busy_ns : 0;
        CHECK_EQ(read->busy_ns + verify_ns + repack->busy_ns, read->end_ns - read->start_ns);
        CHECK_EQ(read->piece, piece);
        CHECK_EQ(read->bytes, fl_piece_size(&manifest->pieces[piece]));
        CHECK_EQ(read->end_ns, weight_store_published_ns(f->weights, piece));
        CHECK(read->plan_id == 1 && repack->source == read->source);
        at_ns = read->end_ns;
        bytes += read->source == source ? read->bytes : 0;
    }
    CHECK_EQ(n, f->job.order_count);
    return bytes;
}

/* All of a plan is in the page cache.  A page that the kernel moves at the moment, to make room for a
 * large one, does not count as there. */
static void check_resident(uint64_t bytes, const struct node_plan *plan)
{
    enum { MOVED_MAX = 16 * 4096 };
    CHECK(bytes <= plan->bytes_total);
    CHECK(bytes + MOVED_MAX >= plan->bytes_total);
}

static void a_loads_intervals_have_no_gaps(void)
{
    struct fixture f;
    struct span_list list;
    begin(&f, FROM_FILE, true);
    CHECK(load(&f));
    read_spans(&f, &list);
    /* The file was written a moment ago. */
    const uint64_t bytes = check_intervals(&f, &list, FL_SOURCE_PAGE_CACHE, false);
    const struct node_plan *plan = f.node_plan;
    CHECK_EQ(bytes, plan->bytes_total);
    CHECK_EQ(plan->resident_unknown, 0);
    check_resident(plan->resident_before, plan);
    check_resident(plan->resident_after, plan);
    CHECK_EQ(plan->medium_bytes, 1000 * f.job.order_count); /* asked once more with each piece */
    CHECK(plan->mhz_before == 1234 && plan->mhz_after == 1234);
    end(&f);
}

static void the_wire_and_the_cache_are_told_apart(void)
{
    struct fixture f;
    struct span_list list;
    begin(&f, FROM_WIRE, true);
    CHECK(load(&f));
    read_spans(&f, &list);
    CHECK_EQ(check_intervals(&f, &list, FL_SOURCE_WIRE, false), f.node_plan->bytes_total);
    CHECK_EQ(f.node_plan->resident_unknown, 0);
    CHECK_EQ(f.node_plan->resident_before + f.node_plan->resident_after, 0);
    work_dry(&f);
    end_job(&f);
    close_loader(&f);
    open_loader(&f, NULL);
    begin_job(&f);
    CHECK(load(&f));
    read_spans(&f, &list);
    CHECK_EQ(check_intervals(&f, &list, FL_SOURCE_SHARD_CACHE, true), f.node_plan->bytes_total);
    check_resident(f.node_plan->resident_before, f.node_plan);
    CHECK_EQ(f.node_plan->mhz_before, 0); /* no meter */
    end(&f);
}

static void a_dropped_file_comes_from_the_disk(void)
{
    struct fixture f;
    struct span_list list;
    begin(&f, FROM_FILE, true);
    const int fd = open(f.path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    const bool dropped = page_cache_drop(fd);
    close(fd);
    if (!dropped) {
        end(&f);
        TEST_SKIP("files here are in memory only");
    }
    CHECK(load(&f));
    read_spans(&f, &list);
    /* What tells the file from others is read first, and does not count. */
    CHECK_EQ(check_intervals(&f, &list, FL_SOURCE_DISK, false), f.node_plan->bytes_total);
    CHECK_EQ(f.node_plan->resident_before, 0);
    check_resident(f.node_plan->resident_after, f.node_plan);
    end(&f);
}

static void rows_that_are_served_are_no_reading(void)
{
    static float rows[ROWS * 1024];
    const uint32_t ids[ROWS] = {40000, 7, 0, 7, 4711};
    struct fixture f;
    struct span_list list;
    uint64_t ready_ns = 0;
    begin(&f, FROM_FILE, true);
    CHECK_EQ(loader_step(f.loader), FL_OK); /* the job begins */
    CHECK_EQ(embedding_reader_read(f.embed, ids, ROWS, rows, &ready_ns), FL_AGAIN);
    CHECK_EQ(loader_step(f.loader), FL_OK);
    CHECK_EQ(embedding_reader_read(f.embed, ids, ROWS, rows, &ready_ns), FL_OK);
    CHECK(load(&f));
    read_spans(&f, &list);
    CHECK_EQ(list.spans[0].phase, FL_PHASE_EMBED);
    CHECK_EQ(list.spans[0].end_ns, ready_ns);
    CHECK_EQ(list.spans[0].rows, ROWS);
    CHECK_EQ(list.spans[0].bytes,
             4 * f.manifest.pieces[0].tensors[0].size / f.manifest.pieces[0].tensors[0].rows);
    CHECK_EQ(list.spans[0].source, FL_SOURCE_PAGE_CACHE);
    CHECK_EQ(list.spans[0].plan_id, 1);
    const struct fl_span *read = &list.spans[1];
    const struct fl_span *repack = &list.spans[2];
    CHECK_EQ(read->phase, FL_PHASE_READ);
    CHECK_EQ(read->start_ns, f.job.begin_ns);
    CHECK(read->busy_ns + repack->busy_ns + list.spans[0].busy_ns <= read->end_ns - read->start_ns);
    end(&f);
}

static void check_failure(struct fixture *f, fl_status want, const char *words)
{
    const struct piece_weights *weights;
    uint32_t last = 0;
    for (uint32_t n = 0, piece; weight_store_order(f->weights, n, &piece) == FL_OK; n++) {
        last = piece;
    }
    const fl_status acquired = weight_store_acquire(f->weights, last, &weights);
    const fl_status failed = (fl_status)f->node_plan->failed;
    char text[FL_ERROR_TEXT_MAX];
    memcpy(text, f->node_plan->failure_text, sizeof(text));
    end(f);
    printf("  says: %s\n", text);
    CHECK_EQ(failed, want);
    CHECK_EQ(acquired, want);
    CHECK(strstr(text, words) != NULL);
    CHECK(strstr(text, "box1") != NULL);
}

static void a_file_cut_short_while_it_is_loaded_is_named(void)
{
    struct fixture f;
    begin(&f, FROM_FILE, true);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(loader_step(f.loader), FL_OK);
    }
    CHECK_EQ(truncate(f.path, (off_t)f.manifest.files[0].size / 2), 0);
    CHECK(load(&f));
    check_failure(&f, FL_IO, "tiny.gguf");
}

static void a_file_that_vanishes_is_still_read_to_its_end(void)
{
    struct fixture f;
    begin(&f, FROM_FILE, true);
    CHECK_EQ(loader_step(f.loader), FL_OK);
    CHECK_EQ(unlink(f.path), 0);
    const bool loaded = load(&f);
    const int failed = f.node_plan->failed;
    end(&f);
    CHECK(loaded);
    CHECK_EQ(failed, 0);
}

static void a_file_of_the_same_name_and_other_bytes_is_not_used(void)
{
    struct fixture f;
    begin(&f, FROM_WIRE, true);
    char copy[TEMP_PATH_MAX];
    struct temp_folder models;
    temp_folder_make(&models);
    temp_folder_path(&models, "tiny.gguf", copy);
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q8_0);
    spec.vocabulary = 40001;
    spec.untied = true;
    spec.seed = 99;
    CHECK_EQ(model_write(&spec, copy), FL_OK);
    struct stat st;
    CHECK_EQ(stat(copy, &st), 0);
    f.folder.path = models.path;
    const bool loaded = load(&f);
    const bool right = all_is_right(&f);
    const uint64_t from_file = f.node_plan->bytes_file;
    end(&f);
    temp_folder_remove(&models);
    CHECK_EQ((uint64_t)st.st_size, f.manifest.files[0].size); /* only the identity tells */
    CHECK(loaded && right);
    CHECK_EQ(from_file, 0);
}

static void damaged_answers_are_asked_for_again_but_not_for_ever(void)
{
    struct fixture f;
    begin(&f, FROM_WIRE, true);
    f.spoil = 1;
    const bool loaded = load(&f);
    const bool right = all_is_right(&f);
    end(&f);
    CHECK(loaded && right);

    begin(&f, FROM_WIRE, true);
    f.spoil = UINT32_MAX;
    CHECK(load(&f));
    check_failure(&f, FL_CORRUPT, "checksum");
}

static void a_refusal_of_the_coordinator_is_passed_on_in_its_words(void)
{
    struct fixture f;
    begin(&f, FROM_WIRE, true);
    f.refuse = FL_IO;
    CHECK(load(&f));
    check_failure(&f, FL_IO, "no access");
}

static void a_lost_coordinator_ends_the_load(void)
{
    struct fixture f;
    begin(&f, FROM_WIRE, true);
    work_dry(&f);
    fetch_queue_reset(f.fetches);
    CHECK(load(&f));
    check_failure(&f, FL_LINK_LOST, "coordinator");
}

static void an_answer_of_another_size_breaks_the_protocol(void)
{
    struct fixture f;
    begin(&f, FROM_WIRE, true);
    work_dry(&f);
    struct fl_fetch fetch;
    CHECK(fetch_queue_next(f.fetches, &fetch));
    fetch_queue_sent(f.fetches, fetch.transfer_id);
    struct fl_fetch_header header = {.transfer_id = fetch.transfer_id, .size = 3};
    header.checksum = fl_checksum64("abc", 3);
    const fl_status status = fetch_queue_deliver(f.fetches, &header, "abc", 3);
    header.transfer_id = 12345;
    const fl_status stranger = fetch_queue_deliver(f.fetches, &header, "abc", 3);
    const fl_status mismatch = fetch_queue_deliver(f.fetches, &header, "ab", 2);
    CHECK(load(&f));
    const int failed = f.node_plan->failed;
    end(&f);
    CHECK_EQ(status, FL_PROTOCOL);
    CHECK_EQ(stranger, FL_OK); /* late ones are dropped */
    CHECK_EQ(mismatch, FL_PROTOCOL);
    CHECK_EQ(failed, FL_PROTOCOL);
}

static void an_abandoned_load_lets_go_at_once_and_frees_its_fetches(void)
{
    struct fixture f;
    begin(&f, FROM_WIRE, true);
    work_dry(&f);
    loader_abandon(f.loader, &f.job);
    const fl_status step = loader_step(f.loader);
    const bool released = loader_released(&f.job);
    struct fl_fetch fetch;
    const bool asks = fetch_queue_next(f.fetches, &fetch);
    end_job(&f);
    begin_job(&f); /* every slot is free again */
    const bool loaded = load(&f);
    end(&f);
    CHECK_EQ(step, FL_OK);
    CHECK(released);
    CHECK(!asks);
    CHECK(loaded);
}

static const struct test_case cases[] = {
    {"loader: a model's own file is loaded whole", a_models_own_file_is_loaded_whole},
    {"loader: weights beyond 4 GiB of a file are loaded", weights_beyond_4_gib_are_loaded},
    {"loader: pieces are published in the order of use", pieces_are_published_in_the_order_of_use},
    {"loader: without a file pieces are fetched, and the next start reads the cache",
     without_a_file_pieces_are_fetched_and_the_next_start_reads_the_cache},
    {"loader: a damaged cache entry is fetched again in mid load",
     a_damaged_cache_entry_is_fetched_again_in_mid_load},
    {"loader: embedding rows come ahead of the pieces", embedding_rows_come_ahead_of_the_pieces},
    {"loader: the intervals of a load have no gaps and add up", a_loads_intervals_have_no_gaps},
    {"loader: the wire and the cache are told apart", the_wire_and_the_cache_are_told_apart},
    {"loader: a file that is not in the page cache comes from the disk",
     a_dropped_file_comes_from_the_disk},
    {"loader: rows that are served in between are no reading", rows_that_are_served_are_no_reading},
    {"loader: a file cut short while it is loaded is named",
     a_file_cut_short_while_it_is_loaded_is_named},
    {"loader: a file that vanishes is still read to its end",
     a_file_that_vanishes_is_still_read_to_its_end},
    {"loader: a file of the same name and other bytes is not used",
     a_file_of_the_same_name_and_other_bytes_is_not_used},
    {"loader: damaged answers are asked for again, but not for ever",
     damaged_answers_are_asked_for_again_but_not_for_ever},
    {"loader: a refusal of the coordinator is passed on in its words",
     a_refusal_of_the_coordinator_is_passed_on_in_its_words},
    {"loader: a lost coordinator ends the load", a_lost_coordinator_ends_the_load},
    {"loader: an answer of another size breaks the protocol",
     an_answer_of_another_size_breaks_the_protocol},
    {"loader: an abandoned load lets go at once and frees its fetches",
     an_abandoned_load_lets_go_at_once_and_frees_its_fetches},
};

TEST_MAIN(cases)
