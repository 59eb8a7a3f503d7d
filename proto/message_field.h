/* message_field.h - single fields of protobuf messages, checked on their way in.
 *
 * What the two mappers (cluster_message.c, client_message.c) share: memory of
 * generated structs comes from an arena, and every field meets its limit here.
 * A failed check is FL_PROTOCOL with a sentence that names the field.
 *
 * Thread:  any.
 * Memory:  everything comes from the arena; nothing is freed before its reset.
 */
#ifndef PROTO_MESSAGE_FIELD_H
#define PROTO_MESSAGE_FIELD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/arena.h"
#include "proto/base/status.h"
#include "proto/cluster_message.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Limits of fields that only people read. */
enum {
    FL_FIELD_WORD_MAX = 64,       /* states, phases, instruction sets */
    FL_FIELD_SENTENCE_MAX = 4096, /* notes, causes, problems, errors */
};

/* Numbers beyond this are no measurement: microseconds of 2^63 ns, and more. */
#define FL_FIELD_QUANTITY_MAX 1e16

struct ProtobufCBinaryData;
struct ProtobufCMessage;
struct ProtobufCMessageDescriptor;

/* One field as it lies in a message. */
struct fl_raw_field {
    uint32_t number;
    uint64_t value;            /* of a varint */
    const unsigned char *data; /* of bytes, a text or a message inside; NULL for a number */
    size_t size;
};

/* Walk the fields of a message without taking it apart, so that a limit can be met before memory is
 * spent: *at moves from its first byte to `end`.  False at the end, and at what is no field. */
bool fl_field_next(const unsigned char **at, const unsigned char *end, struct fl_raw_field *out);

/* Parse `data` [size] into a generated struct.  FL_PROTOCOL when it is no message of this type or one
 * of very many tiny parts, FL_TOO_LARGE above size_max, FL_NO_MEMORY when the arena is too small. */
FL_MUST_CHECK fl_status fl_field_parse(const struct ProtobufCMessageDescriptor *descriptor,
                                       const void *data, size_t size, size_t size_max,
                                       struct fl_arena *arena, struct ProtobufCMessage **out);

/* Serialise a generated struct into out [size].  FL_TOO_LARGE when it does not fit or is over
 * size_max. */
FL_MUST_CHECK fl_status fl_field_serialise(const struct ProtobufCMessage *message, size_t size_max,
                                           void *out, size_t size, size_t *out_size);

/* `count` zeroed elements; NULL in *out when count is 0.  FL_NO_MEMORY. */
FL_MUST_CHECK fl_status fl_field_array(struct fl_arena *arena, size_t count, size_t element_size,
                                       void *out);

/* A generated struct from the arena, set to its defaults: `out` is the address of a pointer to it. */
#define FL_FIELD_MAKE(arena, type, prefix, out)                \
    do {                                                       \
        FL_TRY(fl_field_array((arena), 1, sizeof(type), out)); \
        prefix##__init(*(out));                                \
    } while (0)

/* Let a bytes field of a message to be packed point to `data` [size]. */
void fl_field_borrow(const void *data, size_t size, struct ProtobufCBinaryData *out);

/* The same for a text that ends with NUL; NULL is an empty one. */
void fl_field_borrow_text(const char *text, struct ProtobufCBinaryData *out);

/* A number within [low, high]. */
FL_MUST_CHECK fl_status fl_field_range(const char *field, uint64_t value, uint64_t low,
                                       uint64_t high);

/* A finite number within [low, high]. */
FL_MUST_CHECK fl_status fl_field_real(const char *field, double value, double low, double high);

/* A NUL-terminated copy of UTF-8 text without NUL, at most size_max bytes with the terminator. */
FL_MUST_CHECK fl_status fl_field_text(struct fl_arena *arena, const char *field,
                                      const struct ProtobufCBinaryData *data, size_t size_max,
                                      const char **out);

/* The same into out [size]. */
FL_MUST_CHECK fl_status fl_field_copy(const char *field, const struct ProtobufCBinaryData *data,
                                      char *out, size_t size);

/* A name of letters, digits, '.', '_' and '-': not empty, below FL_NAME_MAX. */
FL_MUST_CHECK fl_status fl_field_name(const char *field, const struct ProtobufCBinaryData *data,
                                      char out[FL_NAME_MAX]);

/* A model's name: text without '/' and control characters that does not begin with '.'. */
FL_MUST_CHECK fl_status fl_field_model(const char *field, const struct ProtobufCBinaryData *data,
                                       char out[FL_MODEL_NAME_MAX]);

#ifdef __cplusplus
}
#endif
#endif
