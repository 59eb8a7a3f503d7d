/* Unpacks any bytes as a request and as an event; what is accepted packs and is accepted again. */
#include "proto/client_message.h"

#include <stdlib.h>

enum { ARENA_SIZE = 4 << 20, PACKED_SIZE = 1 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned char memory[ARENA_SIZE];
static unsigned char scratch_memory[ARENA_SIZE];
static unsigned char packed[PACKED_SIZE];

static void drive_request(const uint8_t *data, size_t size)
{
    static struct fl_client_request request;
    static struct fl_client_request again;
    struct fl_arena arena;
    struct fl_arena scratch;
    fl_arena_init(&arena, memory, sizeof(memory));
    fl_arena_init(&scratch, scratch_memory, sizeof(scratch_memory));
    if (fl_client_request_unpack(data, size, &arena, &request) != FL_OK) {
        return;
    }
    size_t packed_size = 0;
    FL_ASSERT(fl_client_request_pack(&request, &scratch, packed, sizeof(packed), &packed_size) ==
              FL_OK);
    fl_arena_reset(&scratch);
    FL_ASSERT(fl_client_request_unpack(packed, packed_size, &scratch, &again) == FL_OK);
    FL_ASSERT(again.kind == request.kind && again.id == request.id);
}

static void drive_event(const uint8_t *data, size_t size)
{
    static struct fl_client_event event;
    static struct fl_client_event again;
    struct fl_arena arena;
    struct fl_arena scratch;
    fl_arena_init(&arena, memory, sizeof(memory));
    fl_arena_init(&scratch, scratch_memory, sizeof(scratch_memory));
    if (fl_client_event_unpack(data, size, &arena, &event) != FL_OK) {
        return;
    }
    size_t packed_size = 0;
    FL_ASSERT(fl_client_event_pack(&event, &scratch, packed, sizeof(packed), &packed_size) ==
              FL_OK);
    fl_arena_reset(&scratch);
    FL_ASSERT(fl_client_event_unpack(packed, packed_size, &scratch, &again) == FL_OK);
    FL_ASSERT(again.kind == event.kind && again.id == event.id);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    drive_request(data, size);
    drive_event(data, size);
    return 0;
}
