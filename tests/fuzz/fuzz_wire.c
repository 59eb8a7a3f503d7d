/* Feeds a stream in pieces that the input chooses; frames must agree with a plain reading of it. */
#include "proto/wire.h"

#include <string.h>

#include "proto/base/log.h"
#include "proto/network_address.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { LIMIT = 3000 };
    fl_log_init("", FL_LOG_ERROR);
    struct fl_network_address address;
    (void)fl_network_address_value((const char *)data, size, &address);
    if (size < 1) {
        return 0;
    }
    struct fl_frame_reader reader;
    const size_t piece = (size_t)data[0] + 1;
    fl_frame_reader_init(&reader, LIMIT);
    size_t expected = 1; /* where the next frame begins in data */
    fl_status status = FL_AGAIN;
    for (size_t used = 1; used < size && status == FL_AGAIN;) {
        unsigned char *space = NULL;
        size_t room = 0;
        status = fl_frame_reader_space(&reader, &space, &room);
        if (status != FL_OK) {
            break;
        }
        size_t count = size - used < piece ? size - used : piece;
        count = count < room ? count : room;
        memcpy(space, data + used, count);
        fl_frame_reader_filled(&reader, count);
        used += count;
        const unsigned char *frame = NULL;
        size_t frame_size = 0;
        while ((status = fl_frame_reader_next(&reader, &frame, &frame_size)) == FL_OK) {
            FL_ASSERT(frame_size == fl_frame_header_get(data + expected) && frame_size <= LIMIT);
            FL_ASSERT(memcmp(frame, data + expected + FL_FRAME_HEADER_SIZE, frame_size) == 0);
            expected += FL_FRAME_HEADER_SIZE + frame_size;
        }
        FL_ASSERT(reader.size <= LIMIT + FL_FRAME_HEADER_SIZE);
    }
    if (status == FL_PROTOCOL) {
        FL_ASSERT(fl_frame_header_get(data + expected) > LIMIT);
    } else {
        FL_ASSERT(size - expected < FL_FRAME_HEADER_SIZE ||
                  size - expected < FL_FRAME_HEADER_SIZE + fl_frame_header_get(data + expected));
    }
    fl_frame_reader_free(&reader);
    return 0;
}
