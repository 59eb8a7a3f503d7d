#include "proto/cluster_message.h"

#include <inttypes.h>

/* A header begins with these, so that bytes of another origin are not taken for one. */
enum {
    ACTIVATION_MAGIC = 0x31414c46, /* "FLA1" */
    FETCH_MAGIC = 0x31464c46,      /* "FLF1" */
};

static void put32(unsigned char *out, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        out[i] = (unsigned char)(value >> (8 * i));
    }
}

static void put64(unsigned char *out, uint64_t value)
{
    put32(out, (uint32_t)value);
    put32(out + 4, (uint32_t)(value >> 32));
}

static uint32_t get32(const unsigned char *data)
{
    return (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
           (uint32_t)data[3] << 24;
}

static uint64_t get64(const unsigned char *data)
{
    return get32(data) | (uint64_t)get32(data + 4) << 32;
}

/*  0  magic        8  plan_id     24  position   32  width
 *  4  zero        16  request_id  28  rows       36  flags  */
void fl_activation_header_pack(const struct fl_activation_header *header,
                               unsigned char out[FL_ACTIVATION_HEADER_SIZE])
{
    put32(out, ACTIVATION_MAGIC);
    put32(out + 4, 0);
    put64(out + 8, header->plan_id);
    put64(out + 16, header->request_id);
    put32(out + 24, header->position);
    put32(out + 28, header->rows);
    put32(out + 32, header->width);
    put32(out + 36, header->flags);
}

fl_status fl_activation_header_unpack(const void *data, size_t size,
                                      struct fl_activation_header *out)
{
    const unsigned char *bytes = data;
    if (size != FL_ACTIVATION_HEADER_SIZE) {
        return FL_FAIL(FL_PROTOCOL, "activation header has %zu bytes, want %d", size,
                       FL_ACTIVATION_HEADER_SIZE);
    }
    if (get32(bytes) != ACTIVATION_MAGIC || get32(bytes + 4) != 0) {
        return FL_FAIL(FL_PROTOCOL, "activation header begins with 0x%08" PRIx32 ", want 0x%08x",
                       get32(bytes), (unsigned)ACTIVATION_MAGIC);
    }
    const struct fl_activation_header header = {
        .plan_id = get64(bytes + 8),
        .request_id = get64(bytes + 16),
        .position = get32(bytes + 24),
        .rows = get32(bytes + 28),
        .width = get32(bytes + 32),
        .flags = get32(bytes + 36),
    };
    if (header.plan_id == 0 || header.request_id == 0) {
        return FL_FAIL(FL_PROTOCOL,
                       "activations of plan %" PRIu64 " request %" PRIu64 ": 0 is none",
                       header.plan_id, header.request_id);
    }
    if (header.rows == 0 || header.rows > FL_CHUNK_MAX) {
        return FL_FAIL(FL_PROTOCOL, "activation rows %" PRIu32 " are outside 1 to %d", header.rows,
                       FL_CHUNK_MAX);
    }
    if (header.position > FL_CONTEXT_MAX - header.rows) {
        return FL_FAIL(FL_PROTOCOL, "activation position %" PRIu32 " is beyond %d", header.position,
                       FL_CONTEXT_MAX);
    }
    if (header.width == 0 || header.width > FL_WIDTH_MAX) {
        return FL_FAIL(FL_PROTOCOL, "activation width %" PRIu32 " is outside 1 to %d", header.width,
                       FL_WIDTH_MAX);
    }
    if ((header.flags & ~(uint32_t)FL_ACTIVATION_SAMPLE) != 0) {
        return FL_FAIL(FL_PROTOCOL, "activation flags 0x%" PRIx32 " are not known", header.flags);
    }
    *out = header;
    return FL_OK;
}

/*  0  magic  4  zero  8  transfer_id  16  status  20  size  24  checksum  */
void fl_fetch_header_pack(const struct fl_fetch_header *header,
                          unsigned char out[FL_FETCH_HEADER_SIZE])
{
    put32(out, FETCH_MAGIC);
    put32(out + 4, 0);
    put64(out + 8, header->transfer_id);
    put32(out + 16, header->status);
    put32(out + 20, header->size);
    put64(out + 24, header->checksum);
}

fl_status fl_fetch_header_unpack(const void *data, size_t size, struct fl_fetch_header *out)
{
    const unsigned char *bytes = data;
    if (size != FL_FETCH_HEADER_SIZE) {
        return FL_FAIL(FL_PROTOCOL, "fetch header has %zu bytes, want %d", size,
                       FL_FETCH_HEADER_SIZE);
    }
    if (get32(bytes) != FETCH_MAGIC || get32(bytes + 4) != 0) {
        return FL_FAIL(FL_PROTOCOL, "fetch header begins with 0x%08" PRIx32 ", want 0x%08x",
                       get32(bytes), (unsigned)FETCH_MAGIC);
    }
    const struct fl_fetch_header header = {
        .transfer_id = get64(bytes + 8),
        .status = get32(bytes + 16),
        .size = get32(bytes + 20),
        .checksum = get64(bytes + 24),
    };
    if (header.size > FL_FETCH_SIZE_MAX) {
        return FL_FAIL(FL_PROTOCOL, "fetched bytes %" PRIu32 " are over %d", header.size,
                       FL_FETCH_SIZE_MAX);
    }
    *out = header;
    return FL_OK;
}
