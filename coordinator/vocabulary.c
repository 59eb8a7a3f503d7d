#include "coordinator/vocabulary.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/token_list.h"

#define KEY(name) "tokenizer.ggml." name

/* Texts that end an answer in models whose metadata names only one end token.  Those that other
 * models use for something else (Gemma's "</s>" is HTML) count only when they are control tokens. */
static const struct {
    const char *text;
    bool control_only;
} end_texts[] = {
    {"<|im_end|>", false},
    {"<|eot_id|>", false},
    {"<|eom_id|>", false},
    {"<|end|>", false},
    {"<end_of_turn>", false},
    {"<|endoftext|>", false},
    {"<|end_of_text|>", false},
    {"<end_of_utterance>", false},
    {"</s>", true},
    {"<eos>", true},
    {"<EOT>", true},
    {"[EOS]", true},
    {"[EOT]", true},
};

static uint32_t text_hash(const char *text, size_t size)
{
    const uint64_t factor = 0x9e3779b97f4a7c15;
    uint64_t hash = size * factor;
    uint64_t word = 0;
    while (size >= sizeof(word)) {
        memcpy(&word, text, sizeof(word));
        hash = (hash ^ word) * factor;
        hash ^= hash >> 32;
        text += sizeof(word);
        size -= sizeof(word);
    }
    word = 0;
    for (size_t i = 0; i < size; i++) {
        word |= (uint64_t)(unsigned char)text[i] << 8 * i;
    }
    hash = (hash ^ word) * factor;
    hash ^= hash >> 29;
    hash *= factor;
    return (uint32_t)(hash >> 32);
}

static bool text_equals(struct gguf_string text, const char *data, size_t size)
{
    return text.size == size && memcmp(text.data, data, size) == 0;
}

uint32_t vocabulary_find(const struct vocabulary *vocabulary, const char *text, size_t size)
{
    if (size == 0 || size > vocabulary->text_size_max) {
        return TOKEN_NONE;
    }
    const uint32_t hash = text_hash(text, size);
    for (uint32_t at = hash & vocabulary->slot_mask;; at = (at + 1) & vocabulary->slot_mask) {
        const struct vocabulary_slot slot = vocabulary->slots[at];
        if (slot.id == TOKEN_NONE) {
            return TOKEN_NONE;
        }
        if (slot.hash == hash && text_equals(vocabulary->texts[slot.id], text, size)) {
            return slot.id;
        }
    }
}

bool vocabulary_is_special(const struct vocabulary *vocabulary, uint32_t id)
{
    return vocabulary->types[id] == TOKEN_CONTROL || vocabulary->types[id] == TOKEN_UNKNOWN;
}

bool vocabulary_is_end(const struct vocabulary *vocabulary, uint32_t id)
{
    for (uint32_t i = 0; i < vocabulary->end_count; i++) {
        if (vocabulary->ends[i] == id) {
            return true;
        }
    }
    return false;
}

/* GPT-2's alphabet: printable Latin-1 stands for itself, the rest moves up from U+0100. */
size_t vocabulary_byte_text(unsigned char byte, char out[2])
{
    uint32_t point = byte;
    if (byte <= 0x20) {
        point = 0x100u + byte;
    } else if (byte >= 0x7f && byte <= 0xa0) {
        point = 0x121u + (byte - 0x7fu);
    } else if (byte == 0xad) {
        point = 0x143;
    }
    if (point < 0x80) {
        out[0] = (char)point;
        return 1;
    }
    out[0] = (char)(0xc0 | point >> 6);
    out[1] = (char)(0x80 | (point & 0x3f));
    return 2;
}

/* The byte that a character of the alphabet stands for, or -1. */
static int alphabet_byte(uint32_t point)
{
    if (point >= 0x100 && point <= 0x120) {
        return (int)(point - 0x100);
    }
    if (point >= 0x121 && point <= 0x142) {
        return (int)(point - 0x121 + 0x7f);
    }
    if (point == 0x143) {
        return 0xad;
    }
    return point <= 0xff ? (int)point : -1;
}

static size_t piece_from_alphabet(struct gguf_string text, char *out)
{
    size_t count = 0;
    for (size_t i = 0; i < text.size; i++) {
        const unsigned char lead = (unsigned char)text.data[i];
        const unsigned char next = i + 1 < text.size ? (unsigned char)text.data[i + 1] : 0;
        if (lead >= 0xc2 && lead <= 0xc5 && (next & 0xc0) == 0x80) {
            const int byte = alphabet_byte((lead & 0x1fu) << 6 | (next & 0x3fu));
            if (byte >= 0) {
                out[count++] = (char)byte;
                i++;
                continue;
            }
        }
        out[count++] = (char)lead;
    }
    return count;
}

static size_t piece_from_spm(struct gguf_string text, char *out)
{
    size_t count = 0;
    for (size_t i = 0; i < text.size; i++) {
        if (text.size - i >= 3 && memcmp(text.data + i, "\xe2\x96\x81", 3) == 0) {
            out[count++] = ' ';
            i += 2;
        } else {
            out[count++] = text.data[i];
        }
    }
    return count;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'A' && c <= 'F') {
        return c - 'A' + 10;
    }
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static fl_status piece_from_byte_token(struct gguf_string text, uint32_t id, char *out)
{
    if (text.size == 6 && memcmp(text.data, "<0x", 3) == 0 && text.data[5] == '>') {
        const int high = hex_digit(text.data[3]);
        const int low = hex_digit(text.data[4]);
        if (high >= 0 && low >= 0) {
            *out = (char)(high << 4 | low);
            return FL_OK;
        }
    }
    return FL_FAIL(FL_MALFORMED,
                   "vocabulary: token %" PRIu32 " has type byte but is not written "
                   "like <0x41>",
                   id);
}

/* What a token prints; at most as many bytes as its text has. */
static fl_status write_piece(const struct vocabulary *vocabulary, uint32_t id, char *out,
                             size_t *out_size)
{
    const struct gguf_string text = vocabulary->texts[id];
    *out_size = 0;
    switch ((enum token_type)vocabulary->types[id]) {
    case TOKEN_NORMAL:
        *out_size = vocabulary->kind == VOCABULARY_BPE ? piece_from_alphabet(text, out)
                                                       : piece_from_spm(text, out);
        break;
    case TOKEN_BYTE: *out_size = 1; return piece_from_byte_token(text, id, out);
    case TOKEN_CONTROL:
    case TOKEN_UNKNOWN:
    case TOKEN_USER_DEFINED:
        memcpy(out, text.data, text.size);
        *out_size = text.size;
        break;
    case TOKEN_UNDEFINED:
    case TOKEN_UNUSED: break;
    }
    return FL_OK;
}

static fl_status build_pieces(struct vocabulary *vocabulary)
{
    size_t total = 0;
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        total += vocabulary->texts[id].size;
    }
    vocabulary->pieces = malloc(total + 1);
    vocabulary->piece_offsets = malloc(((size_t)vocabulary->count + 1) * sizeof(uint32_t));
    if (vocabulary->pieces == NULL || vocabulary->piece_offsets == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "vocabulary: no memory for %zu bytes of text", total);
    }
    size_t at = 0;
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        size_t size = 0;
        vocabulary->piece_offsets[id] = (uint32_t)at;
        FL_TRY(write_piece(vocabulary, id, vocabulary->pieces + at, &size));
        at += size;
    }
    vocabulary->piece_offsets[vocabulary->count] = (uint32_t)at;
    return FL_OK;
}

static fl_status build_index(struct vocabulary *vocabulary)
{
    uint32_t slot_count = 16;
    while (slot_count < vocabulary->count * 2) {
        slot_count *= 2;
    }
    vocabulary->slots = malloc(slot_count * sizeof(*vocabulary->slots));
    if (vocabulary->slots == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "vocabulary: no memory for an index of %" PRIu32 " tokens",
                       vocabulary->count);
    }
    for (uint32_t i = 0; i < slot_count; i++) {
        vocabulary->slots[i] = (struct vocabulary_slot){.id = TOKEN_NONE};
    }
    vocabulary->slot_mask = slot_count - 1;
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        const struct gguf_string text = vocabulary->texts[id];
        if (text.size == 0) {
            continue; /* converters leave holes: no text can ever mean this id */
        }
        const uint32_t hash = text_hash(text.data, text.size);
        uint32_t at = hash & vocabulary->slot_mask;
        for (; vocabulary->slots[at].id != TOKEN_NONE; at = (at + 1) & vocabulary->slot_mask) {
            const struct vocabulary_slot slot = vocabulary->slots[at];
            if (slot.hash == hash &&
                text_equals(vocabulary->texts[slot.id], text.data, text.size)) {
                return FL_FAIL(FL_MALFORMED,
                               "vocabulary: tokens %" PRIu32 " and %" PRIu32 " have the same text",
                               slot.id, id);
            }
        }
        vocabulary->slots[at] = (struct vocabulary_slot){.hash = hash, .id = id};
    }
    return FL_OK;
}

static fl_status read_texts(const struct gguf *gguf, struct vocabulary *vocabulary)
{
    enum gguf_type type = GGUF_STRING;
    uint32_t count = 0;
    if (!gguf_has(gguf, KEY("tokens"))) {
        return FL_FAIL(FL_NOT_FOUND, "vocabulary: the file has no tokens (" KEY("tokens") ")");
    }
    FL_TRY(gguf_array_count(gguf, KEY("tokens"), &type, &count));
    if (type != GGUF_STRING || count == 0) {
        return FL_FAIL(FL_MALFORMED, "vocabulary: " KEY("tokens") " is not a list of strings, or "
                                                                  "an empty one");
    }
    if (count > VOCABULARY_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "vocabulary: %" PRIu32 " tokens, at most %d are read", count,
                       (int)VOCABULARY_COUNT_MAX);
    }
    vocabulary->count = count;
    vocabulary->texts = malloc(count * sizeof(*vocabulary->texts));
    vocabulary->types = malloc(count);
    if (vocabulary->texts == NULL || vocabulary->types == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "vocabulary: no memory for %" PRIu32 " tokens", count);
    }
    memset(vocabulary->types, TOKEN_NORMAL, count);
    FL_TRY(gguf_strings(gguf, KEY("tokens"), vocabulary->texts, count));
    for (uint32_t id = 0; id < count; id++) {
        if (vocabulary->texts[id].size > VOCABULARY_TEXT_SIZE_MAX) {
            return FL_FAIL(FL_TOO_LARGE,
                           "vocabulary: token %" PRIu32 " is %zu bytes long, at most "
                           "%d are read",
                           id, vocabulary->texts[id].size, (int)VOCABULARY_TEXT_SIZE_MAX);
        }
        if (vocabulary->texts[id].size > vocabulary->text_size_max) {
            vocabulary->text_size_max = (uint32_t)vocabulary->texts[id].size;
        }
    }
    return FL_OK;
}

/* The length of an optional array beside the tokens; it must be theirs. */
static fl_status check_count(const struct gguf *gguf, const char *key, uint32_t want)
{
    enum gguf_type type = GGUF_STRING;
    uint32_t count = 0;
    FL_TRY(gguf_array_count(gguf, key, &type, &count));
    if (count != want) {
        return FL_FAIL(FL_MALFORMED,
                       "vocabulary: %s has %" PRIu32 " entries for %" PRIu32 " tokens", key, count,
                       want);
    }
    return FL_OK;
}

static fl_status read_types(const struct gguf *gguf, struct vocabulary *vocabulary)
{
    if (!gguf_has(gguf, KEY("token_type"))) {
        return FL_OK;
    }
    FL_TRY(check_count(gguf, KEY("token_type"), vocabulary->count));
    FL_ASSERT(vocabulary->count > 0);
    uint32_t *types = malloc(vocabulary->count * sizeof(*types));
    if (types == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "vocabulary: no memory for %" PRIu32 " token types",
                       vocabulary->count);
    }
    const fl_status status =
        gguf_uints(gguf, KEY("token_type"), TOKEN_BYTE, types, vocabulary->count);
    for (uint32_t id = 0; status == FL_OK && id < vocabulary->count; id++) {
        vocabulary->types[id] = (uint8_t)types[id];
    }
    free(types);
    return status;
}

static fl_status read_scores(const struct gguf *gguf, struct vocabulary *vocabulary)
{
    if (!gguf_has(gguf, KEY("scores"))) {
        return FL_FAIL(FL_MALFORMED, "vocabulary: a \"llama\" tokenizer needs " KEY(
                                         "scores") ", and the file has none");
    }
    FL_TRY(check_count(gguf, KEY("scores"), vocabulary->count));
    FL_ASSERT(vocabulary->count > 0);
    vocabulary->scores = malloc(vocabulary->count * sizeof(*vocabulary->scores));
    if (vocabulary->scores == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "vocabulary: no memory for %" PRIu32 " scores",
                       vocabulary->count);
    }
    FL_TRY(gguf_floats(gguf, KEY("scores"), vocabulary->scores, vocabulary->count));
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        if (isnan(vocabulary->scores[id])) {
            return FL_FAIL(FL_MALFORMED,
                           "vocabulary: the score of token %" PRIu32 " is not a number", id);
        }
    }
    return FL_OK;
}

static fl_status read_id(const struct gguf *gguf, const char *key,
                         const struct vocabulary *vocabulary, uint32_t *id)
{
    uint64_t value = 0;
    if (!gguf_has(gguf, key)) {
        return FL_OK;
    }
    FL_TRY(gguf_get_uint(gguf, key, UINT32_MAX, &value));
    if (value >= vocabulary->count) {
        return FL_FAIL(FL_MALFORMED,
                       "vocabulary: %s is %" PRIu64 ", but there are %" PRIu32 " tokens", key,
                       value, vocabulary->count);
    }
    *id = (uint32_t)value;
    return FL_OK;
}

static fl_status read_flag(const struct gguf *gguf, const char *key, bool *flag)
{
    return gguf_has(gguf, key) ? gguf_get_bool(gguf, key, flag) : FL_OK;
}

static bool name_has_phi3(const struct gguf *gguf)
{
    struct gguf_string name = {0};
    if (!gguf_has(gguf, "general.name") || gguf_get_string(gguf, "general.name", &name) != FL_OK) {
        return false;
    }
    for (size_t i = 0; i + 4 <= name.size; i++) {
        if (strncasecmp(name.data + i, "phi3", 4) == 0 ||
            (i + 5 <= name.size && strncasecmp(name.data + i, "phi-3", 5) == 0)) {
            return true;
        }
    }
    return false;
}

static fl_status read_settings(const struct gguf *gguf, struct vocabulary *vocabulary)
{
    const bool spm = vocabulary->kind == VOCABULARY_SPM;
    struct gguf_string pre = {0};
    if (gguf_has(gguf, KEY("pre"))) {
        FL_TRY(gguf_get_string(gguf, KEY("pre"), &pre));
    }
    vocabulary->bos = spm && vocabulary->count > 1 ? 1 : TOKEN_NONE;
    vocabulary->eos = spm && vocabulary->count > 2 ? 2 : TOKEN_NONE;
    vocabulary->unknown = spm ? 0 : TOKEN_NONE;
    vocabulary->add_bos = spm || text_equals(pre, "llama-bpe", strlen("llama-bpe"));
    vocabulary->add_space_prefix = spm;
    FL_TRY(read_id(gguf, KEY("bos_token_id"), vocabulary, &vocabulary->bos));
    FL_TRY(read_id(gguf, KEY("eos_token_id"), vocabulary, &vocabulary->eos));
    FL_TRY(read_id(gguf, KEY("unknown_token_id"), vocabulary, &vocabulary->unknown));
    FL_TRY(read_flag(gguf, KEY("add_bos_token"), &vocabulary->add_bos));
    FL_TRY(read_flag(gguf, KEY("add_eos_token"), &vocabulary->add_eos));
    FL_TRY(read_flag(gguf, KEY("add_space_prefix"), &vocabulary->add_space_prefix));
    vocabulary->strip_after_special = name_has_phi3(gguf);
    if (vocabulary->add_bos && vocabulary->bos == TOKEN_NONE) {
        return FL_FAIL(FL_MALFORMED, "vocabulary: texts are to start with a BOS token, but " KEY(
                                         "bos_token_id") " is missing");
    }
    if (vocabulary->add_eos && vocabulary->eos == TOKEN_NONE) {
        return FL_FAIL(FL_MALFORMED, "vocabulary: texts are to end with an EOS token, but " KEY(
                                         "eos_token_id") " is missing");
    }
    return FL_OK;
}

static fl_status add_end(struct vocabulary *vocabulary, uint32_t id)
{
    uint32_t at = vocabulary->end_count;
    if (id == TOKEN_NONE || vocabulary_is_end(vocabulary, id)) {
        return FL_OK;
    }
    if (at == VOCABULARY_END_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "vocabulary: more than %d tokens that end an answer",
                       (int)VOCABULARY_END_COUNT_MAX);
    }
    for (; at > 0 && vocabulary->ends[at - 1] > id; at--) {
        vocabulary->ends[at] = vocabulary->ends[at - 1];
    }
    vocabulary->ends[at] = id;
    vocabulary->end_count++;
    return FL_OK;
}

static fl_status read_end_list(const struct gguf *gguf, struct vocabulary *vocabulary)
{
    uint32_t ids[VOCABULARY_END_COUNT_MAX];
    enum gguf_type type = GGUF_STRING;
    uint32_t count = 0;
    if (!gguf_has(gguf, KEY("eos_token_ids"))) {
        return FL_OK;
    }
    FL_TRY(gguf_array_count(gguf, KEY("eos_token_ids"), &type, &count));
    if (count > VOCABULARY_END_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE,
                       "vocabulary: " KEY("eos_token_ids") " has %" PRIu32
                                                           " entries, at most %d are read",
                       count, (int)VOCABULARY_END_COUNT_MAX);
    }
    FL_TRY(gguf_uints(gguf, KEY("eos_token_ids"), vocabulary->count - 1, ids, count));
    for (uint32_t i = 0; i < count; i++) {
        FL_TRY(add_end(vocabulary, ids[i]));
    }
    return FL_OK;
}

static fl_status collect_ends(const struct gguf *gguf, struct vocabulary *vocabulary)
{
    uint32_t turn = TOKEN_NONE;
    uint32_t message = TOKEN_NONE;
    FL_TRY(read_id(gguf, KEY("eot_token_id"), vocabulary, &turn));
    FL_TRY(read_id(gguf, KEY("eom_token_id"), vocabulary, &message));
    FL_TRY(add_end(vocabulary, vocabulary->eos));
    FL_TRY(add_end(vocabulary, turn));
    FL_TRY(add_end(vocabulary, message));
    FL_TRY(read_end_list(gguf, vocabulary));
    for (size_t i = 0; i < sizeof(end_texts) / sizeof(end_texts[0]); i++) {
        const char *text = end_texts[i].text;
        const uint32_t id = vocabulary_find(vocabulary, text, strlen(text));
        if (id == TOKEN_NONE ||
            (end_texts[i].control_only && vocabulary->types[id] != TOKEN_CONTROL)) {
            continue;
        }
        vocabulary->types[id] = TOKEN_CONTROL; /* some files call them normal */
        FL_TRY(add_end(vocabulary, id));
    }
    return FL_OK;
}

/* Some files call their chat markup user-defined, which would let anybody who types "<|im_start|>"
 * open a turn: what looks like markup is control. */
static void protect_markup(struct vocabulary *vocabulary)
{
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        const struct gguf_string text = vocabulary->texts[id];
        if (vocabulary->types[id] != TOKEN_USER_DEFINED || text.size < 5) {
            continue;
        }
        const bool bars =
            memcmp(text.data, "<|", 2) == 0 && memcmp(text.data + text.size - 2, "|>", 2) == 0;
        if (bars || text_equals(text, "<start_of_turn>", 15) || text_equals(text, "[INST]", 6) ||
            text_equals(text, "[/INST]", 7)) {
            vocabulary->types[id] = TOKEN_CONTROL;
        }
    }
}

static fl_status read_kind(const struct gguf *gguf, struct vocabulary *vocabulary)
{
    struct gguf_string model = {0};
    if (!gguf_has(gguf, KEY("model"))) {
        return FL_FAIL(FL_NOT_FOUND, "vocabulary: the file has no tokenizer (" KEY("model") ")");
    }
    FL_TRY(gguf_get_string(gguf, KEY("model"), &model));
    if (text_equals(model, "gpt2", 4)) {
        vocabulary->kind = VOCABULARY_BPE;
    } else if (text_equals(model, "llama", 5)) {
        vocabulary->kind = VOCABULARY_SPM;
    } else {
        return FL_FAIL(FL_UNSUPPORTED,
                       "vocabulary: tokenizer \"%.*s\" is not supported; gpt2 and "
                       "llama are",
                       (int)(model.size < 40 ? model.size : 40), model.data);
    }
    return FL_OK;
}

static fl_status vocabulary_read(const struct gguf *gguf, struct vocabulary *vocabulary)
{
    FL_TRY(read_kind(gguf, vocabulary));
    FL_TRY(read_texts(gguf, vocabulary));
    FL_TRY(read_types(gguf, vocabulary));
    if (vocabulary->kind == VOCABULARY_SPM) {
        FL_TRY(read_scores(gguf, vocabulary));
    }
    FL_TRY(build_index(vocabulary));
    FL_TRY(read_settings(gguf, vocabulary));
    FL_TRY(collect_ends(gguf, vocabulary));
    protect_markup(vocabulary);
    return build_pieces(vocabulary);
}

fl_status vocabulary_open(const struct gguf *gguf, struct vocabulary *out)
{
    struct vocabulary vocabulary = {0};
    const fl_status status = vocabulary_read(gguf, &vocabulary);
    if (status != FL_OK) {
        vocabulary_close(&vocabulary);
        return status;
    }
    *out = vocabulary;
    return FL_OK;
}

void vocabulary_close(struct vocabulary *vocabulary)
{
    free(vocabulary->texts);
    free(vocabulary->types);
    free(vocabulary->scores);
    free(vocabulary->pieces);
    free(vocabulary->piece_offsets);
    free(vocabulary->slots);
    *vocabulary = (struct vocabulary){0};
}
