/* Any records to either side, with and without a key: nobody gets in who does not hold it. */
#include "proto/handshake.h"

#include <string.h>

#include "proto/base/log.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct fl_pool_key key = {.bytes = {1, 2, 3}};
    fl_log_init("", FL_LOG_ERROR);
    if (size < 1) {
        return 0;
    }
    const bool opener = (data[0] & 1) != 0;
    const bool has_key = (data[0] & 2) != 0;
    struct fl_handshake handshake;
    unsigned char out[FL_HANDSHAKE_RECORD_MAX];
    size_t out_size = 0;
    fl_handshake_init(&handshake, FL_PARTY_NODE, opener, has_key ? &key : NULL);
    if (opener) {
        fl_handshake_hello(&handshake, out, &out_size);
    }
    data++;
    size--;
    bool over = false;
    while (size > 0) { /* one byte of length, then a record */
        const size_t record = data[0] < size - 1 ? data[0] : size - 1;
        const fl_status status = fl_handshake_take(&handshake, data + 1, record, out, &out_size);
        FL_ASSERT(out_size <= sizeof(out));
        FL_ASSERT(out_size == 0 || fl_handshake_is_record(out, out_size));
        FL_ASSERT(status == FL_OK || status == FL_AGAIN || status == FL_PROTOCOL ||
                  status == FL_DENIED);
        FL_ASSERT(!over || status == FL_PROTOCOL);
        FL_ASSERT(status != FL_OK || !has_key);
        over = over || status != FL_AGAIN;
        data += record + 1;
        size -= record + 1;
    }
    return 0;
}
