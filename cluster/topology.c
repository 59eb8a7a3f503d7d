#include "cluster/topology.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cJSON.h>

#include "proto/base/size_text.h"

enum { KNOWN_MAX = 256, WHERE_MAX = 96 };

enum field_kind {
    FIELD_TEXT,
    FIELD_ADDRESS,
    FIELD_WORD,
    FIELD_NUMBER,
    FIELD_SIZE,
    FIELD_LAYERS,
    FIELD_PORTS,
};

/* A key of an object, and where its value goes. */
struct field {
    const char *key;
    enum field_kind kind;
    size_t offset;
    size_t text_max;          /* of a text, with its NUL */
    uint64_t min, max;        /* of a number or size */
    const char *const *words; /* of a word, NULL at the end */
};

static const char *const activation_words[] = {"q8", "f32", NULL};
static const char *const isa_words[] = {"auto", "scalar", "avx2", "avx512", NULL};

#define TEXT(type, name, what)                                                                 \
    {                                                                                          \
#        name, what, offsetof(struct type, name), sizeof(((struct type *)0)->name), 0, 0, NULL \
    }
#define WORD(type, name, list)                                                                  \
    {                                                                                           \
#        name, FIELD_WORD, offsetof(struct type, name), sizeof(((struct type *)0)->name), 0, 0, \
            list                                                                                \
    }
#define NUMBER(type, name, what, low, high)                          \
    {                                                                \
#        name, what, offsetof(struct type, name), 0, low, high, NULL \
    }

static const struct field coordinator_fields[] = {
    TEXT(topology_coordinator, listen, FIELD_ADDRESS),
    TEXT(topology_coordinator, client_listen, FIELD_ADDRESS),
    TEXT(topology_coordinator, models, FIELD_TEXT),
    TEXT(topology_coordinator, key_file, FIELD_TEXT),
    WORD(topology_coordinator, activations, activation_words),
    NUMBER(topology_coordinator, context, FIELD_NUMBER, 1, 1 << 24),
    NUMBER(topology_coordinator, kv_budget, FIELD_SIZE, 1, UINT64_C(1) << 50),
    NUMBER(topology_coordinator, chunk, FIELD_NUMBER, 1, FL_CHUNK_MAX),
    NUMBER(topology_coordinator, queue, FIELD_NUMBER, 1, 1 << 16),
    NUMBER(topology_coordinator, split, FIELD_LAYERS, 1, 1 << 16),
    NUMBER(topology_coordinator, data_ports, FIELD_PORTS, 0, 0),
};

static const struct field node_fields[] = {
    TEXT(topology_node, name, FIELD_TEXT),
    TEXT(topology_node, join, FIELD_ADDRESS),
    TEXT(topology_node, listen, FIELD_ADDRESS),
    TEXT(topology_node, models, FIELD_TEXT),
    TEXT(topology_node, cache, FIELD_TEXT),
    TEXT(topology_node, key_file, FIELD_TEXT),
    WORD(topology_node, isa, isa_words),
    NUMBER(topology_node, memory, FIELD_SIZE, 1, UINT64_C(1) << 50),
    NUMBER(topology_node, cache_budget, FIELD_SIZE, 1, UINT64_C(1) << 60),
    NUMBER(topology_node, threads, FIELD_NUMBER, 1, 1024),
    NUMBER(topology_node, data_ports, FIELD_PORTS, 0, 0),
};

static const struct field box_fields[] = {
    TEXT(topology_box, name, FIELD_TEXT),
    NUMBER(topology_box, memory, FIELD_SIZE, 1, UINT64_C(1) << 50),
};

#undef TEXT
#undef WORD
#undef NUMBER

#define FIELD_COUNT(fields) (sizeof(fields) / sizeof((fields)[0]))

/* Which file, and which object of it: "pool.json: coordinator". */
struct place {
    const char *file;
    char object[WHERE_MAX];
};

static fl_status wrong(const struct place *place, const char *key, const char *what)
{
    return FL_FAIL(FL_INVALID, "%s: %s%s%s %s", place->file, place->object,
                   place->object[0] != '\0' ? "." : "", key, what);
}

/* Texts. */

static fl_status take_text(const struct place *place, const struct field *field, const cJSON *value,
                           unsigned char *out)
{
    char what[KNOWN_MAX];
    const char *text = cJSON_GetStringValue(value);
    if (text == NULL || text[0] == '\0') {
        return wrong(place, field->key, "must be a text that is not empty");
    }
    if (strlen(text) >= field->text_max) {
        snprintf(what, sizeof(what), "has %zu bytes, %zu are allowed", strlen(text),
                 field->text_max - 1);
        return wrong(place, field->key, what);
    }
    for (const char *at = text; *at != '\0'; at++) {
        if ((unsigned char)*at < ' ' || *at == 0x7f) {
            return wrong(place, field->key, "has a control character in it");
        }
    }
    if (field->kind == FIELD_ADDRESS) {
        struct fl_network_address address;
        if (!fl_network_address_value(text, strlen(text), &address)) {
            snprintf(what, sizeof(what), "is \"%.64s\"; HOST:PORT would be right", text);
            return wrong(place, field->key, what);
        }
    }
    memcpy(out, text, strlen(text) + 1);
    return FL_OK;
}

static fl_status take_ports(const struct place *place, const struct field *field,
                            const cJSON *value, unsigned char *out)
{
    char name[KNOWN_MAX];
    struct transport_ports ports;
    const char *text = cJSON_GetStringValue(value);
    if (text == NULL) {
        return wrong(place, field->key, "must be a text, \"FIRST-LAST\"");
    }
    snprintf(name, sizeof(name), "%s: %s.%s", place->file, place->object, field->key);
    FL_TRY(transport_ports_parse(text, name, &ports));
    memcpy(out, &ports, sizeof(ports));
    return FL_OK;
}

static fl_status take_word(const struct place *place, const struct field *field, const cJSON *value,
                           unsigned char *out)
{
    const char *text = cJSON_GetStringValue(value);
    char known[KNOWN_MAX] = "";
    size_t used = 0;
    for (size_t i = 0; field->words[i] != NULL; i++) {
        if (text != NULL && strcmp(text, field->words[i]) == 0) {
            memcpy(out, text, strlen(text) + 1);
            return FL_OK;
        }
        used += (size_t)snprintf(known + used, sizeof(known) - used, "%s\"%s\"",
                                 i > 0 ? ", " : "must be one of ", field->words[i]);
    }
    return wrong(place, field->key, known);
}

/* Numbers. */

static bool whole_number(const cJSON *value, uint64_t *out)
{
    const double number = cJSON_GetNumberValue(value);
    /* Up to 2^53 every integer is exact, and nothing here needs more. */
    if (!cJSON_IsNumber(value) || !(number >= 0 && number <= 9007199254740992.0) ||
        number != (double)(uint64_t)number) {
        return false;
    }
    *out = (uint64_t)number;
    return true;
}

static fl_status take_number(const struct place *place, const struct field *field,
                             const cJSON *value, unsigned char *out)
{
    char what[KNOWN_MAX];
    struct topology_number number = {.given = true};
    const char *text = cJSON_GetStringValue(value);
    bool good = whole_number(value, &number.value);
    if (!good && text != NULL && field->kind == FIELD_SIZE) {
        good = fl_size_text_value(text, &number.value);
    }
    if (!good || number.value < field->min || number.value > field->max) {
        if (field->kind == FIELD_SIZE) {
            snprintf(what, sizeof(what),
                     "must be a size: \"512MiB\", \"2GiB\" or a number of bytes");
        } else {
            snprintf(what, sizeof(what), "must be a whole number from %llu to %llu",
                     (unsigned long long)field->min, (unsigned long long)field->max);
        }
        return wrong(place, field->key, what);
    }
    memcpy(out, &number, sizeof(number));
    return FL_OK;
}

static fl_status take_layers(const struct place *place, const struct field *field,
                             const cJSON *value, struct topology_coordinator *coordinator)
{
    uint64_t layers = 0;
    uint32_t count = 0;
    const cJSON *item = NULL;
    if (!cJSON_IsArray(value)) {
        return wrong(place, field->key, "must be a list of numbers of layers: [10, 12, 8]");
    }
    cJSON_ArrayForEach(item, value)
    {
        if (count == FL_STAGE_COUNT_MAX || !whole_number(item, &layers) || layers < field->min ||
            layers > field->max) {
            return wrong(place, field->key, "must be a list of 1 to 64 numbers of layers");
        }
        coordinator->split[count++] = (uint32_t)layers;
    }
    if (count == 0) {
        return wrong(place, field->key, "must be a list of 1 to 64 numbers of layers");
    }
    coordinator->split_count = count;
    return FL_OK;
}

/* Objects. */

static fl_status unknown_key(const struct place *place, const char *key, const struct field *fields,
                             size_t count)
{
    char known[KNOWN_MAX] = "";
    size_t used = 0;
    for (size_t i = 0; i < count && used < sizeof(known); i++) {
        used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%s", i > 0 ? ", " : "",
                                 fields[i].key);
    }
    char quoted[WHERE_MAX];
    snprintf(quoted, sizeof(quoted), "%.40s", key);
    for (char *at = quoted; *at != '\0'; at++) {
        *at = (unsigned char)*at < ' ' || *at == 0x7f ? '?' : *at;
    }
    return FL_FAIL(FL_INVALID, "%s: %s has no \"%s\"; it may have %s", place->file,
                   place->object[0] != '\0' ? place->object : "a configuration", quoted, known);
}

/* No key twice: which of the two holds is anybody's guess. */
static fl_status check_duplicates(const struct place *place, const cJSON *object)
{
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, object)
    {
        for (const cJSON *other = item->next; other != NULL; other = other->next) {
            if (strcmp(item->string, other->string) == 0) {
                char key[WHERE_MAX];
                snprintf(key, sizeof(key), "%.40s", item->string);
                return wrong(place, key, "is there twice");
            }
        }
    }
    return FL_OK;
}

static fl_status take_value(const struct place *place, const struct field *field,
                            const cJSON *value, void *out)
{
    unsigned char *at = (unsigned char *)out + field->offset;
    switch (field->kind) {
    case FIELD_TEXT:
    case FIELD_ADDRESS: return take_text(place, field, value, at);
    case FIELD_WORD: return take_word(place, field, value, at);
    case FIELD_NUMBER:
    case FIELD_SIZE: return take_number(place, field, value, at);
    case FIELD_LAYERS: return take_layers(place, field, value, out);
    case FIELD_PORTS: return take_ports(place, field, value, at);
    }
    return FL_OK;
}

static fl_status take_object(const struct place *place, const cJSON *object,
                             const struct field *fields, size_t count, void *out)
{
    const cJSON *item = NULL;
    if (!cJSON_IsObject(object)) {
        return FL_FAIL(FL_INVALID, "%s: %s must be an object in braces", place->file,
                       place->object);
    }
    if (cJSON_GetArraySize(object) > (int)count) { /* so that the pairs below are few */
        for (item = object->child; item != NULL; item = item->next) {
            size_t i = 0;
            while (i < count && strcmp(item->string, fields[i].key) != 0) {
                i++;
            }
            if (i == count) {
                return unknown_key(place, item->string, fields, count);
            }
        }
        return wrong(place, "keys", "are there twice");
    }
    FL_TRY(check_duplicates(place, object));
    cJSON_ArrayForEach(item, object)
    {
        size_t i = 0;
        while (i < count && strcmp(item->string, fields[i].key) != 0) {
            i++;
        }
        if (i == count) {
            return unknown_key(place, item->string, fields, count);
        }
        FL_TRY(take_value(place, &fields[i], item, out));
    }
    return FL_OK;
}

static fl_status check_name(const struct place *place, const char *name)
{
    for (const char *at = name; *at != '\0'; at++) {
        const bool good = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') ||
                          (*at >= '0' && *at <= '9') || *at == '.' || *at == '_' || *at == '-';
        if (!good) {
            return wrong(place, "name", "may have letters, digits, '.', '_' and '-' only");
        }
    }
    return FL_OK;
}

static fl_status take_boxes(const char *file, const cJSON *list, struct topology *out)
{
    const cJSON *item = NULL;
    if (!cJSON_IsArray(list)) {
        return FL_FAIL(FL_INVALID, "%s: nodes must be a list: [{\"name\": \"box1\"}]", file);
    }
    cJSON_ArrayForEach(item, list)
    {
        struct place place = {.file = file};
        snprintf(place.object, sizeof(place.object), "nodes[%u]", (unsigned)out->box_count);
        if (out->box_count == TOPOLOGY_NODE_MAX) {
            return FL_FAIL(FL_INVALID, "%s: nodes has more than %d entries", file,
                           TOPOLOGY_NODE_MAX);
        }
        struct topology_box *box = &out->boxes[out->box_count];
        FL_TRY(take_object(&place, item, box_fields, FIELD_COUNT(box_fields), box));
        if (box->name[0] == '\0') {
            return wrong(&place, "name", "is missing");
        }
        FL_TRY(check_name(&place, box->name));
        if (topology_find(out, box->name) != NULL) {
            return FL_FAIL(FL_INVALID, "%s: nodes names %s twice", file, box->name);
        }
        out->box_count++;
    }
    return FL_OK;
}

static fl_status take_all(const char *file, const cJSON *root, struct topology *out)
{
    static const struct field known[] = {{.key = "coordinator"}, {.key = "node"}, {.key = "nodes"}};
    struct place place = {.file = file};
    const cJSON *item = NULL;
    if (!cJSON_IsObject(root)) {
        return FL_FAIL(FL_INVALID, "%s: a configuration is an object in braces", file);
    }
    FL_TRY(cJSON_GetArraySize(root) <= 8 ? check_duplicates(&place, root) : FL_OK);
    cJSON_ArrayForEach(item, root)
    {
        snprintf(place.object, sizeof(place.object), "%.40s", item->string);
        if (strcmp(item->string, "coordinator") == 0) {
            FL_TRY(take_object(&place, item, coordinator_fields, FIELD_COUNT(coordinator_fields),
                               &out->coordinator));
        } else if (strcmp(item->string, "node") == 0) {
            FL_TRY(take_object(&place, item, node_fields, FIELD_COUNT(node_fields), &out->node));
            FL_TRY(check_name(&place, out->node.name));
        } else if (strcmp(item->string, "nodes") == 0) {
            out->box_count = 0;
            FL_TRY(take_boxes(file, item, out));
        } else {
            place.object[0] = '\0';
            return unknown_key(&place, item->string, known, FIELD_COUNT(known));
        }
    }
    return FL_OK;
}

/* The text. */

static fl_status malformed_at(const char *text, size_t offset, const char *name, const char *what)
{
    size_t line = 1;
    size_t column = 1;
    for (size_t i = 0; i < offset; i++) {
        column++;
        if (text[i] == '\n') {
            line++;
            column = 1;
        }
    }
    return FL_FAIL(FL_MALFORMED, "%s:%zu:%zu: %s", name, line, column, what);
}

/* What cJSON would take: deep nesting recursively, and texts with a NUL cut short. */
static fl_status check_text(const char *text, size_t size, const char *name)
{
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < size; i++) {
        if (text[i] == '\0') {
            return malformed_at(text, i, name, "a NUL byte has no place in a configuration");
        }
        if (in_string && text[i] == '\\') {
            if (size - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0) {
                return malformed_at(text, i, name, "a NUL has no place in a configuration");
            }
            i++;
        } else if (text[i] == '"') {
            in_string = !in_string;
        } else if (!in_string && (text[i] == '{' || text[i] == '[')) {
            if (++depth > TOPOLOGY_DEPTH_MAX) {
                return malformed_at(text, i, name, "more than 8 braces and brackets are open");
            }
        } else if (!in_string && (text[i] == '}' || text[i] == ']')) {
            depth--;
        }
    }
    return FL_OK;
}

fl_status topology_parse(const char *text, size_t size, const char *name, struct topology *out)
{
    if (size > TOPOLOGY_FILE_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "%s has %zu bytes; a configuration has at most %d", name, size,
                       TOPOLOGY_FILE_MAX);
    }
    FL_TRY(check_text(text, size, name));
    /* cJSON wants a byte behind the text. */
    char *copy = malloc(size + 1);
    struct topology *parsed = calloc(1, sizeof(*parsed));
    cJSON *root = NULL;
    fl_status status = FL_OK;
    if (copy == NULL || parsed == NULL) {
        status = FL_FAIL(FL_NO_MEMORY, "no memory to read %s", name);
    } else {
        memcpy(copy, text, size);
        copy[size] = '\0';
        const char *end = copy;
        root = cJSON_ParseWithLengthOpts(copy, size + 1, &end, 1);
        status = root == NULL
                     ? malformed_at(text, (size_t)(end - copy) < size ? (size_t)(end - copy) : size,
                                    name, "this is not JSON")
                     : take_all(name, root, parsed);
    }
    if (status == FL_OK) {
        *out = *parsed;
    }
    cJSON_Delete(root);
    free(parsed);
    free(copy);
    return status;
}

static fl_status read_all(int fd, const char *path, char *text, size_t *out_size)
{
    size_t used = 0;
    while (used < TOPOLOGY_FILE_MAX + 1) {
        const ssize_t got = read(fd, text + used, TOPOLOGY_FILE_MAX + 1 - used);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return FL_FAIL(FL_IO, "configuration %s: %s", path, strerror(errno));
        }
        if (got == 0) {
            break;
        }
        used += (size_t)got;
    }
    *out_size = used;
    return FL_OK;
}

fl_status topology_read(const char *path, struct topology *out)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return errno == ENOENT ? FL_FAIL(FL_NOT_FOUND, "configuration %s does not exist", path)
                               : FL_FAIL(FL_IO, "configuration %s: %s", path, strerror(errno));
    }
    char *text = malloc(TOPOLOGY_FILE_MAX + 1);
    size_t size = 0;
    fl_status status = text != NULL ? read_all(fd, path, text, &size)
                                    : FL_FAIL(FL_NO_MEMORY, "no memory to read %s", path);
    if (status == FL_OK) {
        status = topology_parse(text, size, path, out);
    }
    free(text);
    close(fd);
    return status;
}

const struct topology_box *topology_find(const struct topology *topology, const char *name)
{
    for (uint32_t i = 0; i < topology->box_count; i++) {
        if (strcmp(topology->boxes[i].name, name) == 0) {
            return &topology->boxes[i];
        }
    }
    return NULL;
}
