#include "node/loader.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/matrix.h"
#include "node/piece_stream.h"
#include "proto/base/log.h"

struct loader {
    struct loader_config config;
    unsigned char
        *staging; /* [staging_size]: rows of one tensor that are not a group yet, a chunk */
    size_t staging_size;

    uint32_t job_count; /* the loader's own list, in order of arrival */
    struct loader_job *jobs[NODE_PLAN_MAX];

    pthread_mutex_t lock; /* guards what was submitted and not yet taken */
    uint32_t arrived_count;
    struct loader_job *arrived[NODE_PLAN_MAX];
};

fl_status loader_open(const struct loader_config *config, struct loader **out)
{
    struct loader *loader = calloc(1, sizeof(*loader));
    if (loader == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "loader: no memory");
    }
    loader->config = *config;
    pthread_mutex_init(&loader->lock, NULL);
    *out = loader;
    return FL_OK;
}

/* The loader's last touch of a job. */
static void job_release(struct loader *loader, uint32_t index, fl_status status)
{
    struct loader_job *job = loader->jobs[index];
    piece_stream_close(job->stream);
    job->stream = NULL;
    free(job->order);
    job->order = NULL;
    if (job->embed != NULL) {
        embedding_reader_stop(job->embed, status);
    }
    loader->job_count--;
    memmove(&loader->jobs[index], &loader->jobs[index + 1],
            (loader->job_count - index) * sizeof(loader->jobs[0]));
    if (index == 0 && loader->job_count > 0 && loader->jobs[0]->stream != NULL) {
        /* Its turn; so far it has waited for the one before. */
        loader->jobs[0]->away_ns = fl_clock_now(&loader->config.clock) - loader->jobs[0]->piece_ns;
    }
    /* Pairs with the acquire in loader_released(). */
    atomic_store_explicit(&job->released, 1, memory_order_release);
    wake_signal(loader->config.compute_wake);
}

static void take_arrived(struct loader *loader)
{
    pthread_mutex_lock(&loader->lock);
    for (uint32_t i = 0; i < loader->arrived_count; i++) {
        FL_ASSERT(loader->job_count < NODE_PLAN_MAX);
        loader->jobs[loader->job_count++] = loader->arrived[i];
    }
    loader->arrived_count = 0;
    pthread_mutex_unlock(&loader->lock);
}

void loader_close(struct loader *loader)
{
    if (loader == NULL) {
        return;
    }
    take_arrived(loader);
    while (loader->job_count > 0) {
        job_release(loader, 0, FL_CANCELLED);
    }
    pthread_mutex_destroy(&loader->lock);
    free(loader->staging);
    free(loader);
}

void loader_submit(struct loader *loader, struct loader_job *job)
{
    pthread_mutex_lock(&loader->lock);
    FL_ASSERT(loader->arrived_count < NODE_PLAN_MAX);
    loader->arrived[loader->arrived_count++] = job;
    pthread_mutex_unlock(&loader->lock);
    wake_signal(loader->config.loader_wake);
}

void loader_abandon(struct loader *loader, struct loader_job *job)
{
    atomic_store_explicit(&job->abandoned, 1, memory_order_relaxed);
    wake_signal(loader->config.loader_wake);
}

bool loader_released(const struct loader_job *job)
{
    return atomic_load_explicit(&job->released, memory_order_acquire) != 0;
}

static size_t row_size(const struct fl_tensor_ref *tensor)
{
    return (size_t)(tensor->size / tensor->rows);
}

/* Room for a chunk behind the longest run of rows that cannot be put yet. */
static fl_status staging_reserve(struct loader *loader, const struct fl_manifest *manifest)
{
    size_t group_max = 0;
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        const struct fl_piece *piece = &manifest->pieces[i];
        for (uint32_t t = 0; t < piece->tensor_count; t++) {
            const size_t group = MATRIX_ROW_GROUP * row_size(&piece->tensors[t]);
            group_max = group > group_max ? group : group_max;
        }
    }
    const size_t size = group_max + SHARD_CHUNK_SIZE;
    if (size > loader->staging_size) {
        unsigned char *staging = aligned_alloc(
            MATRIX_ALIGNMENT, (size + MATRIX_ALIGNMENT - 1) / MATRIX_ALIGNMENT * MATRIX_ALIGNMENT);
        if (staging == NULL) {
            return FL_FAIL(FL_NO_MEMORY, "loader: no memory for a buffer of %zu bytes", size);
        }
        free(loader->staging);
        loader->staging = staging;
        loader->staging_size = size;
    }
    return FL_OK;
}

static void add_progress(struct loader *loader, struct node_plan *plan, uint64_t bytes,
                         enum piece_source source)
{
    _Atomic uint64_t *const by_source[] = {
        [PIECE_SOURCE_FILE] = &plan->bytes_file,
        [PIECE_SOURCE_CACHE] = &plan->bytes_cache,
        [PIECE_SOURCE_WIRE] = &plan->bytes_fetched,
    };
    atomic_fetch_add_explicit(by_source[source], bytes, memory_order_relaxed);
    /* Pairs with the acquire where the wire thread reads it. */
    atomic_fetch_add_explicit(&plan->pieces_done, 1, memory_order_release);
    wake_signal(loader->config.wire_wake);
    wake_signal(loader->config.compute_wake);
}

/* What the stream has measured so far; it orders nothing. */
static void note_resident(const struct loader_job *job)
{
    uint64_t bytes = 0;
    const bool known = piece_stream_resident(job->stream, &bytes);
    atomic_store_explicit(&job->plan->resident_before, bytes, memory_order_relaxed);
    atomic_store_explicit(&job->plan->resident_unknown, known && !job->after_unknown ? 0 : 1,
                          memory_order_relaxed);
}

static fl_status job_begin(struct loader *loader, struct loader_job *job)
{
    const struct fl_manifest *manifest = &job->plan->plan.manifest;
    job->begin_ns = fl_clock_now(&loader->config.clock);
    job->piece_ns = job->begin_ns;
    job->order = calloc(manifest->piece_count + 1, sizeof(job->order[0]));
    if (job->order == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "model %s: no memory to load it", manifest->name);
    }
    uint32_t piece;
    while (weight_store_order(job->weights, job->order_count, &piece) == FL_OK) {
        job->order[job->order_count++] = piece;
    }
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        if (!weight_store_has_memory(job->weights, i)) {
            add_progress(loader, job->plan, 0, PIECE_SOURCE_FILE); /* nothing to load */
        }
    }
    const struct piece_stream_config config = {
        .manifest = manifest,
        .order = job->order,
        .order_count = job->order_count,
        .storage = loader->config.storage,
        .cache = loader->config.cache,
        .fetches = loader->config.fetches,
        .clock = loader->config.clock,
    };
    FL_TRY(piece_stream_open(&config, &job->stream));
    if (loader->config.meter != NULL) {
        job->medium_bytes = loader->config.meter->medium_bytes();
        atomic_store_explicit(&job->plan->mhz_before, loader->config.meter->mhz(),
                              memory_order_relaxed);
    }
    note_resident(job);
    return FL_OK;
}

/* Put what is staged of the current piece, as far as it makes whole row groups. */
static void put_staged(struct loader *loader, struct loader_job *job, uint32_t index)
{
    const struct fl_piece *piece = &job->plan->plan.manifest.pieces[index];
    while (job->staged > 0) {
        FL_ASSERT(job->tensor < piece->tensor_count);
        const struct fl_tensor_ref *tensor = &piece->tensors[job->tensor];
        const size_t size = row_size(tensor);
        const size_t here = job->staged / size;
        const uint32_t left = tensor->rows - job->row;
        const uint32_t rows =
            here >= left ? left : (uint32_t)(here / MATRIX_ROW_GROUP * MATRIX_ROW_GROUP);
        if (rows == 0) {
            return;
        }
        weight_store_put(job->weights, index, job->tensor, job->row, rows, loader->staging);
        job->staged -= rows * size;
        /* The next rows begin aligned again. */
        memmove(loader->staging, loader->staging + rows * size, job->staged);
        job->row += rows;
        if (job->row == tensor->rows) {
            job->row = 0;
            job->tensor++;
        }
    }
}

static void job_end(struct loader *loader, const struct loader_job *job)
{
    struct node_plan *plan = job->plan;
    if (loader->config.meter != NULL) {
        atomic_store_explicit(&plan->mhz_after, loader->config.meter->mhz(), memory_order_relaxed);
    }
    const double ms =
        (double)(fl_clock_now(&loader->config.clock) - job->begin_ns) / (double)FL_NS_PER_MS;
    fl_log(FL_LOG_INFO,
           "plan %" PRIu64 " loaded model %s bytes %" PRIu64 " ms %.0f file %" PRIu64
           " cache %" PRIu64 " fetched %" PRIu64,
           plan->plan.plan_id, plan->plan.manifest.name, plan->bytes_total, ms,
           atomic_load_explicit(&plan->bytes_file, memory_order_relaxed),
           atomic_load_explicit(&plan->bytes_cache, memory_order_relaxed),
           atomic_load_explicit(&plan->bytes_fetched, memory_order_relaxed));
}

static enum fl_source source_of(const struct piece_chunk *chunk, uint64_t size)
{
    switch (chunk->source) {
    case PIECE_SOURCE_FILE:
        return 2 * chunk->resident > size ? FL_SOURCE_PAGE_CACHE : FL_SOURCE_DISK;
    case PIECE_SOURCE_CACHE: return FL_SOURCE_SHARD_CACHE;
    case PIECE_SOURCE_WIRE: break;
    }
    return FL_SOURCE_WIRE;
}

/* The piece is there: its spans, and a new interval. */
static void record_piece(struct loader *loader, struct loader_job *job,
                         const struct piece_chunk *chunk, uint64_t now)
{
    const uint64_t size = fl_piece_size(&job->plan->plan.manifest.pieces[chunk->piece]);
    const uint64_t other_ns = job->verify_ns + job->repack_ns + job->away_ns;
    const uint64_t whole_ns = now - job->piece_ns;
    struct fl_span span = {
        .start_ns = job->piece_ns,
        .end_ns = now,
        .busy_ns = whole_ns > other_ns ? whole_ns - other_ns : 0,
        .plan_id = job->plan->plan.plan_id,
        .bytes = size,
        .piece = chunk->piece,
        .phase = FL_PHASE_READ,
        .source = source_of(chunk, size),
    };
    fl_span_ring_put(loader->config.spans, &span);
    if (job->verify_ns > 0) {
        span.phase = FL_PHASE_VERIFY;
        span.busy_ns = job->verify_ns;
        fl_span_ring_put(loader->config.spans, &span);
    }
    span.phase = FL_PHASE_REPACK;
    span.busy_ns = job->repack_ns;
    fl_span_ring_put(loader->config.spans, &span);
    job->piece_ns = now;
    job->verify_ns = 0;
    job->repack_ns = 0;
    job->away_ns = 0;
}

/* One piece more is there: what the page cache holds of it, and what came from the medium so far.
 * A first token may be out, and be asked where its time went, long before all is loaded. */
static void note_after(struct loader *loader, struct loader_job *job)
{
    struct node_plan *plan = job->plan;
    uint64_t bytes = 0;
    job->after_unknown =
        job->after_unknown || !piece_stream_resident_now(job->stream, job->after++, &bytes);
    job->resident_after += bytes;
    atomic_store_explicit(&plan->resident_after, job->resident_after, memory_order_relaxed);
    if (job->after_unknown) {
        atomic_store_explicit(&plan->resident_unknown, 1, memory_order_relaxed);
    }
    if (loader->config.meter != NULL) {
        /* 0 when it cannot be told any more. */
        const uint64_t medium = loader->config.meter->medium_bytes();
        atomic_store_explicit(&plan->medium_bytes,
                              medium > job->medium_bytes ? medium - job->medium_bytes : 0,
                              memory_order_relaxed);
    }
}

/* FL_END when everything is loaded. */
static fl_status job_step(struct loader *loader, struct loader_job *job)
{
    struct piece_chunk chunk;
    FL_TRY(staging_reserve(loader, &job->plan->plan.manifest));
    FL_TRY(piece_stream_next(job->stream, loader->staging + job->staged, &chunk));
    if (chunk.offset == 0) {
        memmove(loader->staging, loader->staging + job->staged, chunk.size);
        job->staged = 0;
        job->tensor = 0;
        job->row = 0;
    }
    job->staged += chunk.size;
    job->verify_ns += chunk.verify_ns;
    const uint64_t begun_ns = fl_clock_now(&loader->config.clock);
    put_staged(loader, job, chunk.piece);
    const uint64_t now = fl_clock_now(&loader->config.clock);
    job->repack_ns += now - begun_ns;
    note_resident(job);
    if (chunk.last) {
        FL_ASSERT(job->staged == 0);
        record_piece(loader, job, &chunk, now);
        weight_store_publish(job->weights, chunk.piece, now);
        add_progress(loader, job->plan,
                     fl_piece_size(&job->plan->plan.manifest.pieces[chunk.piece]), chunk.source);
        note_after(loader, job);
    }
    return FL_OK;
}

/* Time that the loader spent on another plan, or on rows of this one, is not reading. */
static void add_away(struct loader *loader, uint64_t spent_ns)
{
    for (uint32_t i = 0; i < loader->job_count; i++) {
        loader->jobs[i]->away_ns += spent_ns;
    }
}

static void job_fail(struct loader *loader, uint32_t index, fl_status status)
{
    struct loader_job *job = loader->jobs[index];
    char text[FL_ERROR_TEXT_MAX];
    snprintf(text, sizeof(text), "node %s: %.400s", node_plan_stage(job->plan)->node,
             fl_last_error());
    node_plan_fail(job->plan, status, text);
    weight_store_fail(job->weights, status);
    job_release(loader, index, status);
    wake_signal(loader->config.wire_wake);
}

/* Rows that a prompt waits for; false when there is nothing to be done for them now. */
static bool serve_rows(struct loader *loader, const struct loader_job *job)
{
    struct fl_span span;
    const uint64_t begun_ns = fl_clock_now(&loader->config.clock);
    if (embedding_reader_step(job->embed, loader->config.storage, piece_stream_copy(job->stream),
                              &loader->config.clock, &span) != FL_OK) {
        return false;
    }
    span.plan_id = job->plan->plan.plan_id;
    fl_span_ring_put(loader->config.spans, &span);
    add_away(loader, span.end_ns - begun_ns);
    return true;
}

/* What comes before any piece: ends of jobs, new jobs, rows that a prompt waits for. */
static bool serve_jobs(struct loader *loader)
{
    for (uint32_t i = 0; i < loader->job_count; i++) {
        struct loader_job *job = loader->jobs[i];
        if (atomic_load_explicit(&job->abandoned, memory_order_relaxed) != 0) {
            job_release(loader, i, FL_CANCELLED);
            return true;
        }
        if (job->stream == NULL) {
            const fl_status status = job_begin(loader, job);
            if (status != FL_OK) {
                job_fail(loader, i, status);
            }
            return true;
        }
        if (job->embed != NULL && serve_rows(loader, job)) {
            return true;
        }
    }
    return false;
}

fl_status loader_step(struct loader *loader)
{
    take_arrived(loader);
    if (serve_jobs(loader)) {
        return FL_OK;
    }
    if (loader->job_count == 0) {
        free(loader->staging);
        loader->staging = NULL;
        loader->staging_size = 0;
        return loader->config.cache != NULL && shard_cache_commit(loader->config.cache) ? FL_OK
                                                                                        : FL_AGAIN;
    }
    const fl_status status = job_step(loader, loader->jobs[0]);
    if (status == FL_END) {
        job_end(loader, loader->jobs[0]);
        job_release(loader, 0, FL_CANCELLED);
        return FL_OK;
    }
    if (status != FL_OK && status != FL_AGAIN) {
        job_fail(loader, 0, status);
        return FL_OK;
    }
    return status;
}

bool loader_busy(const struct loader *loader)
{
    return loader->job_count > 0;
}
