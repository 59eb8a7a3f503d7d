#include "node/piece_stream.h"

#include <stdlib.h>
#include <string.h>

_Static_assert((int)SHARD_CHUNK_SIZE == (int)FL_FETCH_SIZE_MAX, "one chunk is one fetch");

/* A place in the whole stream: the n-th piece of the order, and a chunk of it. */
struct place {
    uint32_t n;
    uint32_t chunk;
};

/* One chunk on the wire. */
struct flight {
    struct place place;
    uint32_t slot;
    struct fl_range ranges[FL_PIECE_TENSOR_MAX];
};

struct piece_stream {
    struct piece_stream_config config;
    struct model_copy *copy; /* NULL: not here */
    struct shard_use *use;
    struct place here;  /* next chunk to hand out */
    struct place ahead; /* next chunk to ask the coordinator for; never before `here` */
    uint32_t flight_first;
    uint32_t flight_count;
    struct flight flights[FETCH_STREAM_MAX]; /* a ring, in order of place */
    struct shard_entry *entry;               /* of the current piece, when it is cached */
    struct shard_writer *writer;             /* of the current piece, when it is fetched */
    bool *cached;                            /* [order_count] */
    bool *measured;                          /* [order_count] */
    uint64_t *resident;                      /* [order_count]: bytes that were in the page cache */
    uint64_t resident_all;                   /* of the measured ones */
    bool resident_unknown;                   /* of one at least */
    uint64_t verify_ns;                      /* spent on the current chunk's checksum */
};

static const struct fl_piece *piece_at(const struct piece_stream *stream, uint32_t n)
{
    return &stream->config.manifest->pieces[stream->config.order[n]];
}

static uint32_t chunk_count(const struct fl_piece *piece)
{
    return (uint32_t)((fl_piece_size(piece) + SHARD_CHUNK_SIZE - 1) / SHARD_CHUNK_SIZE);
}

static size_t chunk_size(const struct fl_piece *piece, uint32_t chunk)
{
    const uint64_t left = fl_piece_size(piece) - (uint64_t)chunk * SHARD_CHUNK_SIZE;
    return left < SHARD_CHUNK_SIZE ? (size_t)left : SHARD_CHUNK_SIZE;
}

static void step(const struct piece_stream *stream, struct place *place)
{
    if (++place->chunk == chunk_count(piece_at(stream, place->n))) {
        *place = (struct place){.n = place->n + 1};
    }
}

/* Where a chunk's bytes lie: out_ranges and out_files [FL_PIECE_TENSOR_MAX]; returns their number. */
static uint32_t chunk_ranges(const struct fl_piece *piece, uint32_t chunk,
                             struct fl_range *out_ranges, uint32_t *out_files)
{
    uint64_t skip = (uint64_t)chunk * SHARD_CHUNK_SIZE;
    size_t left = chunk_size(piece, chunk);
    uint32_t count = 0;
    for (uint32_t t = 0; t < piece->tensor_count && left > 0; t++) {
        const struct fl_tensor_ref *tensor = &piece->tensors[t];
        if (skip >= tensor->size) {
            skip -= tensor->size;
            continue;
        }
        const uint64_t rest = tensor->size - skip;
        const size_t size = rest < left ? (size_t)rest : left;
        out_files[count] = tensor->file;
        out_ranges[count++] =
            (struct fl_range){.offset = tensor->offset + skip, .size = (uint32_t)size};
        left -= size;
        skip = 0;
    }
    FL_ASSERT(left == 0);
    return count;
}

/* Residency ---------------------------------------------------------------------------------- */

/* Bytes of a piece of the model's own files that are in the page cache now. */
static bool file_resident(const struct piece_stream *stream, const struct fl_piece *piece,
                          uint64_t *out_bytes)
{
    const struct model_storage *storage = stream->config.storage;
    uint64_t bytes = 0;
    for (uint32_t t = 0; t < piece->tensor_count; t++) {
        const struct fl_tensor_ref *tensor = &piece->tensors[t];
        uint64_t here = 0;
        if (storage->resident == NULL ||
            !storage->resident(stream->copy, tensor->file, tensor->offset, tensor->size, &here)) {
            return false;
        }
        bytes += here;
    }
    *out_bytes = bytes;
    return true;
}

static void note_resident(struct piece_stream *stream, uint32_t n, bool known, uint64_t bytes)
{
    if (!stream->measured[n]) {
        stream->measured[n] = true;
        stream->resident[n] = known ? bytes : 0;
        stream->resident_all += stream->resident[n];
        stream->resident_unknown = stream->resident_unknown || !known;
    }
}

/* The model's own files, if they are here and hold its bytes. */
static fl_status open_copy(struct piece_stream *stream)
{
    const struct piece_stream_config *config = &stream->config;
    FL_TRY(config->storage->open(config->storage->ctx, config->manifest, &stream->copy));
    for (uint32_t n = 0; n < config->order_count; n++) {
        uint64_t bytes = 0;
        const bool known = file_resident(stream, piece_at(stream, n), &bytes);
        note_resident(stream, n, known, bytes);
    }
    const fl_status status = config->storage->check(stream->copy, config->manifest);
    if (status != FL_OK) {
        config->storage->close(stream->copy);
        stream->copy = NULL;
        memset(stream->measured, 0, config->order_count * sizeof(stream->measured[0]));
        stream->resident_all = 0;
        stream->resident_unknown = false;
    }
    return status;
}

bool piece_stream_resident(const struct piece_stream *stream, uint64_t *out_bytes)
{
    *out_bytes = stream->resident_all;
    return !stream->resident_unknown;
}

bool piece_stream_resident_now(struct piece_stream *stream, uint32_t n, uint64_t *out_bytes)
{
    if (stream->copy != NULL) {
        return file_resident(stream, piece_at(stream, n), out_bytes);
    }
    struct shard_entry *entry = NULL;
    *out_bytes = 0;
    if (!stream->cached[n] ||
        shard_cache_find(stream->config.cache, stream->config.manifest->identity,
                         piece_at(stream, n), &entry) != FL_OK) {
        return true;
    }
    const bool known = shard_entry_resident(entry, out_bytes);
    shard_entry_close(entry);
    return known;
}

/* Chunks ------------------------------------------------------------------------------------- */

fl_status piece_stream_open(const struct piece_stream_config *config, struct piece_stream **out)
{
    struct piece_stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "model %s: no memory to load it", config->manifest->name);
    }
    stream->config = *config;
    stream->cached = calloc(config->order_count + 1, sizeof(*stream->cached));
    stream->measured = calloc(config->order_count + 1, sizeof(*stream->measured));
    stream->resident = calloc(config->order_count + 1, sizeof(*stream->resident));
    if (stream->cached == NULL || stream->measured == NULL || stream->resident == NULL) {
        piece_stream_close(stream);
        return FL_FAIL(FL_NO_MEMORY, "model %s: no memory to load it", config->manifest->name);
    }
    const fl_status status = open_copy(stream);
    if (status != FL_OK && status != FL_NOT_FOUND) {
        piece_stream_close(stream);
        return status;
    }
    if (stream->copy == NULL && config->cache != NULL) {
        stream->use = shard_cache_use(config->cache, config->manifest->identity);
        for (uint32_t n = 0; n < config->order_count; n++) {
            struct shard_entry *entry = NULL;
            stream->cached[n] = shard_cache_find(config->cache, config->manifest->identity,
                                                 piece_at(stream, n), &entry) == FL_OK;
            shard_entry_close(entry);
        }
    }
    *out = stream;
    return FL_OK;
}

/* Give up what is on the wire. */
static void land_all(struct piece_stream *stream)
{
    for (; stream->flight_count > 0; stream->flight_count--) {
        fetch_queue_release(stream->config.fetches, stream->flights[stream->flight_first].slot);
        stream->flight_first = (stream->flight_first + 1) % FETCH_STREAM_MAX;
    }
}

void piece_stream_close(struct piece_stream *stream)
{
    if (stream == NULL) {
        return;
    }
    land_all(stream);
    shard_entry_close(stream->entry);
    shard_writer_close(stream->writer);
    shard_cache_unuse(stream->use);
    if (stream->copy != NULL) {
        stream->config.storage->close(stream->copy);
    }
    free(stream->cached);
    free(stream->measured);
    free(stream->resident);
    free(stream);
}

struct model_copy *piece_stream_copy(const struct piece_stream *stream)
{
    return stream->copy;
}

/* From the model's own files. */
static fl_status next_of_file(struct piece_stream *stream, const struct fl_piece *piece,
                              unsigned char *dst)
{
    const struct model_storage *storage = stream->config.storage;
    struct fl_range ranges[FL_PIECE_TENSOR_MAX];
    uint32_t files[FL_PIECE_TENSOR_MAX];

    /* Let the disk read the chunk after this one while this one is repacked. */
    struct place after = stream->here;
    step(stream, &after);
    if (storage->will_need != NULL && after.n < stream->config.order_count) {
        const uint32_t count = chunk_ranges(piece_at(stream, after.n), after.chunk, ranges, files);
        for (uint32_t i = 0; i < count; i++) {
            storage->will_need(stream->copy, files[i], ranges[i].offset, ranges[i].size);
        }
    }
    const uint32_t count = chunk_ranges(piece, stream->here.chunk, ranges, files);
    for (uint32_t i = 0; i < count; i++) {
        FL_TRY(storage->read(stream->copy, files[i], ranges[i].offset, dst, ranges[i].size));
        dst += ranges[i].size;
    }
    return FL_OK;
}

/* Forget that the current piece is cached; it begins again. */
static void piece_again(struct piece_stream *stream)
{
    shard_entry_close(stream->entry);
    stream->entry = NULL;
    stream->cached[stream->here.n] = false;
    stream->here.chunk = 0;
    land_all(stream);
    stream->ahead = stream->here;
}

static fl_status next_of_cache(struct piece_stream *stream, const struct fl_piece *piece,
                               unsigned char *dst)
{
    if (stream->entry == NULL) {
        uint64_t bytes = 0;
        if (shard_cache_find(stream->config.cache, stream->config.manifest->identity, piece,
                             &stream->entry) != FL_OK) {
            return FL_CORRUPT; /* evicted or damaged since */
        }
        const bool known = shard_entry_resident(stream->entry, &bytes);
        note_resident(stream, stream->here.n, known, bytes);
    }
    FL_TRY(shard_entry_load(stream->entry, stream->here.chunk, dst));
    const uint64_t begun_ns = fl_clock_now(&stream->config.clock);
    const fl_status status = shard_entry_verify(stream->entry, stream->here.chunk, dst);
    stream->verify_ns = fl_clock_now(&stream->config.clock) - begun_ns;
    return status;
}

/* Ask for one chunk.  FL_AGAIN when no more fit under way. */
static fl_status take_off(struct piece_stream *stream, struct place place)
{
    if (stream->flight_count == FETCH_STREAM_MAX) {
        return FL_AGAIN;
    }
    struct flight *flight =
        &stream->flights[(stream->flight_first + stream->flight_count) % FETCH_STREAM_MAX];
    uint32_t files[FL_PIECE_TENSOR_MAX];
    const uint32_t count =
        chunk_ranges(piece_at(stream, place.n), place.chunk, flight->ranges, files);
    struct fetch_request request = {.manifest = stream->config.manifest};
    uint32_t offset = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (i == 0 || files[i] != files[i - 1]) {
            request.parts[request.part_count++] = (struct fetch_part){
                .file = files[i], .ranges = &flight->ranges[i], .offset = offset};
        }
        struct fetch_part *part = &request.parts[request.part_count - 1];
        part->range_count++;
        part->size += flight->ranges[i].size;
        offset += flight->ranges[i].size;
    }
    FL_TRY(fetch_queue_submit(stream->config.fetches, &request, &flight->slot));
    flight->place = place;
    stream->flight_count++;
    return FL_OK;
}

/* Keep several fetches under way, from `here` on, past cached pieces. */
static fl_status look_ahead(struct piece_stream *stream)
{
    const struct place here = stream->here;
    struct place *ahead = &stream->ahead;
    if (ahead->n < here.n || (ahead->n == here.n && ahead->chunk < here.chunk)) {
        *ahead = here;
    }
    while (ahead->n < stream->config.order_count) {
        if (stream->cached[ahead->n]) {
            *ahead = (struct place){.n = ahead->n + 1};
            continue;
        }
        const fl_status status = take_off(stream, *ahead);
        if (status != FL_OK) {
            return status == FL_AGAIN ? FL_OK : status;
        }
        step(stream, ahead);
    }
    return FL_OK;
}

static fl_status next_of_wire(struct piece_stream *stream, const struct fl_piece *piece,
                              unsigned char *dst)
{
    if (stream->flight_count == 0) {
        return FL_AGAIN; /* every slot is another plan's for now */
    }
    struct flight *flight = &stream->flights[stream->flight_first];
    FL_ASSERT(flight->place.n == stream->here.n && flight->place.chunk == stream->here.chunk);
    const unsigned char *bytes;
    FL_TRY(fetch_queue_poll(stream->config.fetches, flight->slot, &bytes));
    const size_t size = chunk_size(piece, stream->here.chunk);
    memcpy(dst, bytes, size);
    fetch_queue_release(stream->config.fetches, flight->slot);
    stream->flight_first = (stream->flight_first + 1) % FETCH_STREAM_MAX;
    stream->flight_count--;

    if (stream->here.chunk == 0 && stream->config.cache != NULL) {
        shard_writer_close(stream->writer);
        stream->writer =
            shard_writer_open(stream->config.cache, stream->config.manifest->identity, piece);
    }
    if (stream->writer != NULL) {
        shard_writer_put(stream->writer, dst, size);
    }
    return FL_OK;
}

/* One try; FL_CORRUPT when the piece has to begin again. */
static fl_status next_chunk(struct piece_stream *stream, const struct fl_piece *piece,
                            unsigned char *dst, enum piece_source *out_source)
{
    if (stream->copy != NULL) {
        *out_source = PIECE_SOURCE_FILE;
        return next_of_file(stream, piece, dst);
    }
    FL_TRY(look_ahead(stream));
    if (stream->cached[stream->here.n]) {
        *out_source = PIECE_SOURCE_CACHE;
        return next_of_cache(stream, piece, dst);
    }
    *out_source = PIECE_SOURCE_WIRE;
    return next_of_wire(stream, piece, dst);
}

fl_status piece_stream_next(struct piece_stream *stream, void *dst, struct piece_chunk *out)
{
    if (stream->here.n == stream->config.order_count) {
        return FL_END;
    }
    const struct fl_piece *piece = piece_at(stream, stream->here.n);
    enum piece_source source = PIECE_SOURCE_FILE;
    stream->verify_ns = 0;
    fl_status status = next_chunk(stream, piece, dst, &source);
    if (status == FL_CORRUPT && source == PIECE_SOURCE_CACHE) {
        piece_again(stream);
        status = next_chunk(stream, piece, dst, &source);
    }
    FL_TRY(status);

    const bool last = stream->here.chunk + 1 == chunk_count(piece);
    *out = (struct piece_chunk){
        .piece = stream->config.order[stream->here.n],
        .offset = (uint64_t)stream->here.chunk * SHARD_CHUNK_SIZE,
        .size = chunk_size(piece, stream->here.chunk),
        .last = last,
        .source = source,
        .verify_ns = stream->verify_ns,
        .resident = stream->resident[stream->here.n],
    };
    step(stream, &stream->here);
    if (last) {
        shard_entry_close(stream->entry);
        stream->entry = NULL;
        shard_writer_close(stream->writer);
        stream->writer = NULL;
    }
    return FL_OK;
}
