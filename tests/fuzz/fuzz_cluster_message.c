/* Unpacks any bytes; what is accepted packs again to a message that is accepted too. */
#include "proto/cluster_message.h"

#include <stdlib.h>

enum { ARENA_SIZE = 4 << 20, PACKED_SIZE = 1 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void unpack_headers(const uint8_t *data, size_t size)
{
    struct fl_activation_header activation;
    struct fl_fetch_header fetch;
    (void)!fl_activation_header_unpack(data, size, &activation);
    (void)!fl_fetch_header_unpack(data, size, &fetch);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static unsigned char memory[ARENA_SIZE];
    static unsigned char scratch_memory[ARENA_SIZE];
    static unsigned char packed[PACKED_SIZE];
    static struct fl_cluster_message message;
    static struct fl_cluster_message again;

    unpack_headers(data, size);
    struct fl_arena arena;
    struct fl_arena scratch;
    fl_arena_init(&arena, memory, sizeof(memory));
    fl_arena_init(&scratch, scratch_memory, sizeof(scratch_memory));
    if (fl_cluster_message_unpack(data, size, &arena, &message) != FL_OK) {
        return 0;
    }
    size_t packed_size = 0;
    FL_ASSERT(fl_cluster_message_pack(&message, &scratch, packed, sizeof(packed), &packed_size) ==
              FL_OK);
    fl_arena_reset(&scratch);
    FL_ASSERT(fl_cluster_message_unpack(packed, packed_size, &scratch, &again) == FL_OK);
    FL_ASSERT(again.kind == message.kind);
    return 0;
}
