#include "coordinator/chat_template.h"

#include <stdlib.h>
#include <string.h>

#define NAMES                                                                    \
    "chatml, llama2, llama3, gemma, mistral-v1, mistral-v3, mistral-v3-tekken, " \
    "mistral-v7, mistral-v7-tekken, phi3"

static const char *const names[CHAT_FAMILIES] = {
    [CHAT_CHATML] = "chatml",
    [CHAT_LLAMA2] = "llama2",
    [CHAT_LLAMA3] = "llama3",
    [CHAT_GEMMA] = "gemma",
    [CHAT_MISTRAL_V1] = "mistral-v1",
    [CHAT_MISTRAL_V3] = "mistral-v3",
    [CHAT_MISTRAL_V3_TEKKEN] = "mistral-v3-tekken",
    [CHAT_MISTRAL_V7] = "mistral-v7",
    [CHAT_MISTRAL_V7_TEKKEN] = "mistral-v7-tekken",
    [CHAT_PHI3] = "phi3",
};

/* Families whose turns are bracketed by [INST]. */
struct inst_marks {
    const char *user_open;
    const char *user_close;
    const char *answer_open;
    const char *system_open;
    const char *system_close;
};

static const struct inst_marks inst_marks[CHAT_FAMILIES] = {
    [CHAT_LLAMA2] = {"[INST] ", " [/INST]", " ", "<<SYS>>\n", "\n<</SYS>>\n\n"},
    [CHAT_MISTRAL_V1] = {" [INST] ", " [/INST]", " ", "", "\n\n"},
    [CHAT_MISTRAL_V3] = {"[INST] ", "[/INST]", " ", "", "\n\n"},
    [CHAT_MISTRAL_V3_TEKKEN] = {"[INST]", "[/INST]", "", "", "\n\n"},
    [CHAT_MISTRAL_V7] = {"[INST] ", "[/INST]", " ", "[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"},
    [CHAT_MISTRAL_V7_TEKKEN] = {"[INST]", "[/INST]", "", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"},
};

static bool contains(struct gguf_string text, const char *part)
{
    return memmem(text.data, text.size, part, strlen(part)) != NULL;
}

static bool contains_either(struct gguf_string text, const char *one, const char *other)
{
    return contains(text, one) || contains(text, other);
}

static bool trims_contents(struct gguf_string program)
{
    return contains_either(program, "['content'] | trim", "['content']|trim") ||
           contains_either(program, "[\"content\"] | trim", "[\"content\"]|trim") ||
           contains_either(program, "content | trim", "content|trim");
}

static bool starts_with(struct gguf_string text, const char *start)
{
    return text.size >= strlen(start) && memcmp(text.data, start, strlen(start)) == 0;
}

static bool ends_with(struct gguf_string text, const char *end)
{
    const size_t size = strlen(end);
    return text.size >= size && memcmp(text.data + text.size - size, end, size) == 0;
}

/* A string literal of the program, its quotes and escapes resolved; false when it does not end or
 * does not fit. */
static bool read_literal(const char *at, const char *end, char *out, size_t max, size_t *out_size)
{
    const char quote = *at++;
    size_t size = 0;
    for (; at < end && *at != quote; at++) {
        char byte = *at;
        if (byte == '\\' && at + 1 < end) {
            at++;
            byte = *at;
            if (byte == 'n') {
                byte = '\n';
            } else if (byte == 't') {
                byte = '\t';
            }
        }
        if (size == max) {
            return false;
        }
        out[size++] = byte;
    }
    *out_size = size;
    return at < end;
}

/* Many ChatML programs hold a system message for conversations that bring none: a literal with a
 * whole system turn.  Takes it over into `chat`. */
static void find_default_system(struct gguf_string program, struct chat_template *chat)
{
    static const char open[] = "<|im_start|>system\n";
    static const char close[] = "<|im_end|>\n";
    char literal[CHAT_DEFAULT_SYSTEM_SIZE_MAX];
    const char *end = program.data + program.size;
    const char *at = program.data + 1;
    while (at < end && (at = memmem(at, (size_t)(end - at), "<|im_start|>system", 18)) != NULL) {
        struct gguf_string text = {.data = literal};
        const bool quoted = at[-1] == '\'' || at[-1] == '"';
        if (quoted && read_literal(at - 1, end, literal, sizeof(literal), &text.size) &&
            starts_with(text, open) && ends_with(text, close) &&
            text.size > sizeof(open) + sizeof(close) - 2) {
            text.data += sizeof(open) - 1;
            text.size -= sizeof(open) - 1 + sizeof(close) - 1;
            memcpy(chat->default_system, text.data, text.size);
            chat->default_system_size = text.size;
            return;
        }
        at++;
    }
}

static bool is_mistral(enum chat_family family)
{
    return family >= CHAT_MISTRAL_V1 && family <= CHAT_MISTRAL_V7_TEKKEN;
}

static enum chat_family recognise_mistral(struct gguf_string program)
{
    if (contains(program, "[SYSTEM_PROMPT]")) {
        return contains(program, "[SYSTEM_PROMPT] ") ? CHAT_MISTRAL_V7 : CHAT_MISTRAL_V7_TEKKEN;
    }
    if (contains(program, "[AVAILABLE_TOOLS]") && !contains(program, " [INST]")) {
        return contains(program, "[INST] ") ? CHAT_MISTRAL_V3 : CHAT_MISTRAL_V3_TEKKEN;
    }
    return CHAT_MISTRAL_V1;
}

static enum chat_family recognise_family(struct gguf_string program)
{
    if (contains(program, "<|im_start|>")) { /* Phi 4 has its own mark in place of line ends */
        return contains(program, "<|im_sep|>") ? CHAT_FAMILIES : CHAT_CHATML;
    }
    if (contains(program, "<|start_header_id|>")) {
        return CHAT_LLAMA3;
    }
    if (contains(program, "<start_of_turn>")) {
        return CHAT_GEMMA;
    }
    if (contains(program, "<|end|>") && contains_either(program, "<|user|>", "<|assistant|>")) {
        return CHAT_PHI3;
    }
    if (contains(program, "[INST]")) {
        return contains(program, "<<SYS>>") ? CHAT_LLAMA2 : recognise_mistral(program);
    }
    return CHAT_FAMILIES;
}

fl_status chat_template_recognise(struct gguf_string program, struct chat_template *out)
{
    const enum chat_family family = recognise_family(program);
    if (family == CHAT_FAMILIES) {
        return FL_FAIL(FL_UNSUPPORTED, "chat template: the model's own is not one we recognise; "
                                       "name its family with --template (" NAMES ")");
    }
    *out = (struct chat_template){
        .family = family,
        .trims = family == CHAT_LLAMA2 ? contains(program, ".strip()")
                                       : !is_mistral(family) && trims_contents(program),
        .trims_answers = contains_either(program, "|trim + eos_token", "| trim + eos_token"),
        .tight = family == CHAT_MISTRAL_V1 && !contains(program, " [INST]"),
        .writes_bos = contains(program, "bos_token"),
        .repeats_bos = contains(program, "bos_token + '[INST]"),
        .closes_with_eos = family == CHAT_PHI3 && contains(program, "eos_token"),
    };
    if (family == CHAT_CHATML) {
        find_default_system(program, out);
    }
    return FL_OK;
}

fl_status chat_template_named(const char *name, struct chat_template *out)
{
    for (size_t i = 0; i < CHAT_FAMILIES; i++) {
        if (strcmp(names[i], name) == 0) {
            const enum chat_family family = (enum chat_family)i;
            *out = (struct chat_template){
                .family = family,
                .trims = family == CHAT_LLAMA2 || family == CHAT_LLAMA3 || family == CHAT_GEMMA,
                .writes_bos = family != CHAT_CHATML && family != CHAT_PHI3,
                .repeats_bos = family == CHAT_LLAMA2,
            };
            return FL_OK;
        }
    }
    return FL_FAIL(FL_UNSUPPORTED, "chat template: there is no family \"%.40s\"; there are " NAMES,
                   name);
}

static struct gguf_string token_text(const struct vocabulary *vocabulary, uint32_t id)
{
    return id < vocabulary->count ? vocabulary->texts[id] : (struct gguf_string){.data = ""};
}

fl_status chat_template_open(const struct gguf *gguf, const struct vocabulary *vocabulary,
                             const char *name, struct chat_template *out)
{
    static const char key[] = "tokenizer.chat_template";
    struct gguf_string program = {0};
    if (name != NULL) {
        FL_TRY(chat_template_named(name, out));
    } else if (!gguf_has(gguf, key)) {
        return FL_FAIL(FL_NOT_FOUND,
                       "chat template: the model file has none (%s); name a family "
                       "with --template (" NAMES ")",
                       key);
    } else {
        FL_TRY(gguf_get_string(gguf, key, &program));
        FL_TRY(chat_template_recognise(program, out));
    }
    out->bos = token_text(vocabulary, vocabulary->bos);
    out->eos = token_text(vocabulary, vocabulary->eos);
    return FL_OK;
}

const char *chat_template_name(const struct chat_template *chat)
{
    return names[chat->family];
}

/* What Python's str.strip() takes off the end of `text`: bytes of one character, or 0. */
static size_t space_size(struct gguf_string text, bool at_end)
{
    static const char *const wide[] = {
        "\xc2\x85",     "\xc2\xa0",     "\xe1\x9a\x80", "\xe2\x80\x80", "\xe2\x80\x81",
        "\xe2\x80\x82", "\xe2\x80\x83", "\xe2\x80\x84", "\xe2\x80\x85", "\xe2\x80\x86",
        "\xe2\x80\x87", "\xe2\x80\x88", "\xe2\x80\x89", "\xe2\x80\x8a", "\xe2\x80\xa8",
        "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80",
    };
    if (text.size == 0) {
        return 0;
    }
    const char byte = text.data[at_end ? text.size - 1 : 0];
    if (byte == ' ' || (byte >= '\t' && byte <= '\r') || (byte >= 0x1c && byte <= 0x1f)) {
        return 1;
    }
    for (size_t i = 0; i < sizeof(wide) / sizeof(wide[0]); i++) {
        if (at_end ? ends_with(text, wide[i]) : starts_with(text, wide[i])) {
            return strlen(wide[i]);
        }
    }
    return 0;
}

static struct gguf_string trim_end(struct gguf_string text)
{
    for (size_t size; (size = space_size(text, true)) > 0;) {
        text.size -= size;
    }
    return text;
}

static struct gguf_string trim(struct gguf_string text)
{
    text = trim_end(text);
    for (size_t size; (size = space_size(text, false)) > 0;) {
        text.data += size;
        text.size -= size;
    }
    return text;
}

static void put_bytes(struct chat_text *out, const char *data, size_t size)
{
    if (size > 0 && out->size < out->max) {
        const size_t room = out->max - out->size;
        memcpy(out->text + out->size, data, size < room ? size : room);
    }
    out->size += size;
}

static void put(struct chat_text *out, const char *text)
{
    put_bytes(out, text, strlen(text));
}

static void put_typed(struct chat_text *out, struct gguf_string content)
{
    if (out->typed != NULL) {
        out->typed[out->typed_count++] =
            (struct text_range){.begin = out->size, .end = out->size + content.size};
    }
    put_bytes(out, content.data, content.size);
}

static bool role_is(const struct chat_message *message, const char *role)
{
    return strcmp(message->role, role) == 0;
}

/* Families that know one system message, first, and then users and assistants in turn. */
static fl_status check_turns(const struct chat_template *chat, const struct chat_message *messages,
                             size_t count)
{
    const size_t first = role_is(&messages[0], "system") ? 1 : 0;
    if (first == count) {
        return FL_FAIL(FL_INVALID, "chat: %s needs a user message after the system message",
                       names[chat->family]);
    }
    for (size_t i = first; i < count; i++) {
        const char *want = (i - first) % 2 == 0 ? "user" : "assistant";
        if (!role_is(&messages[i], want)) {
            return FL_FAIL(FL_INVALID,
                           "chat: message %zu is from \"%s\", but %s wants user and "
                           "assistant in turn after at most one system message, here \"%s\"",
                           i + 1, messages[i].role, names[chat->family], want);
        }
    }
    return FL_OK;
}

static fl_status check_messages(const struct chat_template *chat,
                                const struct chat_message *messages, size_t count)
{
    if (count == 0) {
        return FL_FAIL(FL_INVALID, "chat: there is no message");
    }
    if (count > CHAT_MESSAGE_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "chat: %zu messages, at most %d are read", count,
                       (int)CHAT_MESSAGE_COUNT_MAX);
    }
    for (size_t i = 0; i < count; i++) {
        if (!role_is(&messages[i], "system") && !role_is(&messages[i], "user") &&
            !role_is(&messages[i], "assistant")) {
            return FL_FAIL(FL_INVALID,
                           "chat: message %zu has the role \"%.40s\"; there are "
                           "system, user and assistant",
                           i + 1, messages[i].role);
        }
    }
    const bool free_order =
        chat->family == CHAT_CHATML || chat->family == CHAT_LLAMA3 || chat->family == CHAT_PHI3;
    return free_order ? FL_OK : check_turns(chat, messages, count);
}

static struct gguf_string content_of(const struct chat_template *chat,
                                     const struct chat_message *message)
{
    const bool trims = chat->trims || (chat->trims_answers && role_is(message, "assistant"));
    return trims ? trim(message->content) : message->content;
}

/* ChatML, Llama 3 and Phi 3: every message between its role and an end mark. */
static void render_labelled(const struct chat_template *chat, const struct chat_message *messages,
                            size_t count, unsigned flags, struct chat_text *out)
{
    static const char *const marks[CHAT_FAMILIES][3] = {
        [CHAT_CHATML] = {"<|im_start|>", "\n", "<|im_end|>\n"},
        [CHAT_LLAMA3] = {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"},
        [CHAT_PHI3] = {"<|", "|>\n", "<|end|>\n"},
    };
    const char *const *mark = marks[chat->family];
    if (chat->default_system_size > 0 && !role_is(&messages[0], "system")) {
        put(out, mark[0]);
        put(out, "system");
        put(out, mark[1]);
        put_bytes(out, chat->default_system, chat->default_system_size);
        put(out, mark[2]);
    }
    for (size_t i = 0; i < count; i++) {
        put(out, mark[0]);
        put(out, messages[i].role);
        put(out, mark[1]);
        put_typed(out, content_of(chat, &messages[i]));
        put(out, mark[2]);
    }
    if ((flags & CHAT_ADD_PROMPT) != 0) {
        put(out, mark[0]);
        put(out, "assistant");
        put(out, mark[1]);
    } else if (chat->closes_with_eos) {
        put_bytes(out, chat->eos.data, chat->eos.size);
    }
}

static void render_gemma(const struct chat_template *chat, const struct chat_message *messages,
                         size_t count, unsigned flags, struct chat_text *out)
{
    const size_t first = role_is(&messages[0], "system") ? 1 : 0;
    for (size_t i = first; i < count; i++) {
        put(out, "<start_of_turn>");
        put(out, role_is(&messages[i], "user") ? "user\n" : "model\n");
        if (i == 1 && first == 1) { /* Gemma knows no system role: the first user says it */
            put_typed(out, messages[0].content);
            put(out, "\n\n");
        }
        put_typed(out, content_of(chat, &messages[i]));
        put(out, "<end_of_turn>\n");
    }
    if ((flags & CHAT_ADD_PROMPT) != 0) {
        put(out, "<start_of_turn>model\n");
    }
}

/* The system message and a user's, which Llama 2 trims as one text. */
static void put_system_and_user(const struct chat_template *chat, const struct inst_marks *marks,
                                struct gguf_string system, struct gguf_string user,
                                struct chat_text *out)
{
    put(out, marks->system_open);
    put_typed(out, system);
    if (!chat->trims) {
        put(out, marks->system_close);
        put_typed(out, user);
        return;
    }
    user = trim_end(user);
    const struct gguf_string close = {marks->system_close, strlen(marks->system_close)};
    put_bytes(out, close.data, user.size == 0 ? trim_end(close).size : close.size);
    put_typed(out, user);
}

/* Which message carries the system message: Mistral v3 says it in the last one, if a user's. */
static size_t system_carrier(const struct chat_template *chat, size_t first, size_t count)
{
    const bool last = chat->family == CHAT_MISTRAL_V3 || chat->family == CHAT_MISTRAL_V3_TEKKEN;
    return last ? count - 1 : first;
}

/* Llama 2 and Mistral: users speak in [INST] brackets, answers end with EOS. */
static void render_inst(const struct chat_template *chat, const struct chat_message *messages,
                        size_t count, struct chat_text *out)
{
    struct inst_marks marks = inst_marks[chat->family];
    const bool llama = chat->family == CHAT_LLAMA2;
    const bool own_system =
        chat->family == CHAT_MISTRAL_V7 || chat->family == CHAT_MISTRAL_V7_TEKKEN;
    const size_t first = role_is(&messages[0], "system") ? 1 : 0;
    const size_t carrier = system_carrier(chat, first, count);
    if (chat->tight) {
        marks.user_open = "[INST] ";
        marks.answer_open = "";
    }
    if (own_system && first == 1) {
        put(out, marks.system_open);
        put_typed(out, content_of(chat, &messages[0]));
        put(out, marks.system_close);
    }
    for (size_t i = first; i < count; i++) {
        const struct gguf_string content = content_of(chat, &messages[i]);
        if (role_is(&messages[i], "assistant")) {
            put(out, marks.answer_open);
            put_typed(out, content);
            put(out, llama ? " " : "");
            put_bytes(out, chat->eos.data, chat->eos.size);
            continue;
        }
        if (chat->repeats_bos && i > first) {
            put_bytes(out, chat->bos.data, chat->bos.size);
        }
        put(out, marks.user_open);
        if (first == 1 && i == carrier && !own_system) {
            put_system_and_user(chat, &marks, messages[0].content, messages[i].content, out);
        } else {
            put_typed(out, content);
        }
        put(out, marks.user_close);
    }
}

static fl_status render(const struct chat_template *chat, const struct chat_message *messages,
                        size_t count, unsigned flags, struct chat_text *out)
{
    FL_TRY(check_messages(chat, messages, count));
    if (chat->family == CHAT_GEMMA) {
        render_gemma(chat, messages, count, flags, out);
    } else if (inst_marks[chat->family].user_open != NULL) {
        render_inst(chat, messages, count, out);
    } else {
        render_labelled(chat, messages, count, flags, out);
    }
    if (out->size > out->max) {
        return FL_FAIL(FL_TOO_LARGE,
                       "chat: the conversation is %zu bytes long, there is room for "
                       "%zu",
                       out->size, out->max);
    }
    return FL_OK;
}

fl_status chat_template_render(const struct chat_template *chat,
                               const struct chat_message *messages, size_t count, unsigned flags,
                               struct chat_text *out)
{
    out->size = 0;
    out->typed_count = 0;
    if (chat->writes_bos) {
        put_bytes(out, chat->bos.data, chat->bos.size);
    }
    return render(chat, messages, count, flags, out);
}

/* Room for what a conversation may take, refused before it is allocated. */
static fl_status text_open(const struct chat_template *chat, const struct chat_message *messages,
                           size_t count, struct chat_text *out)
{
    enum { MARKS_SIZE_MAX = 128 }; /* of one message */
    size_t max = sizeof(chat->default_system) + (size_t)2 * MARKS_SIZE_MAX;
    if (count > CHAT_MESSAGE_COUNT_MAX) {
        return check_messages(chat, messages, count);
    }
    for (size_t i = 0; i < count; i++) {
        if (messages[i].content.size > TOKENIZER_TEXT_SIZE_MAX) {
            return FL_FAIL(FL_TOO_LARGE,
                           "chat: message %zu is %zu bytes long, at most %d are "
                           "read",
                           i + 1, messages[i].content.size, (int)TOKENIZER_TEXT_SIZE_MAX);
        }
        max += messages[i].content.size + chat->bos.size + chat->eos.size + MARKS_SIZE_MAX;
    }
    if (max > (size_t)2 * TOKENIZER_TEXT_SIZE_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "chat: the conversation is over %d bytes long",
                       (int)TOKENIZER_TEXT_SIZE_MAX);
    }
    char *text = malloc(max);
    struct text_range *typed = malloc((count + 1) * sizeof(*typed));
    if (text == NULL || typed == NULL) {
        free(text);
        free(typed);
        return FL_FAIL(FL_NO_MEMORY, "chat: no memory for a conversation of %zu bytes", max);
    }
    *out = (struct chat_text){.text = text, .max = max, .typed = typed};
    return FL_OK;
}

fl_status chat_template_encode(const struct chat_template *chat, struct tokenizer *tokenizer,
                               const struct chat_message *messages, size_t count, unsigned flags,
                               uint32_t *ids, size_t max, size_t *out_count)
{
    const struct vocabulary *vocabulary = tokenizer_vocabulary(tokenizer);
    const bool bos = chat->writes_bos && vocabulary->bos < vocabulary->count;
    const bool parse_content = (flags & CHAT_PARSE_CONTENT) != 0;
    struct chat_text text = {0};
    *out_count = 0;
    FL_TRY(text_open(chat, messages, count, &text));
    fl_status status = render(chat, messages, count, flags, &text);
    if (status == FL_OK) {
        const size_t skip = bos && max > 0 ? 1 : 0;
        if (skip == 1) {
            ids[0] = vocabulary->bos;
        }
        status = tokenizer_encode_parts(
            tokenizer, text.text, text.size,
            TOKENIZER_ADD_SPECIAL | TOKENIZER_NO_EOS | TOKENIZER_PARSE_SPECIAL |
                (bos ? (unsigned)TOKENIZER_NO_BOS : 0u),
            text.typed, parse_content ? 0 : text.typed_count, ids + skip, max - skip, out_count);
        *out_count += *out_count > 0 || status == FL_OK ? bos : 0;
    }
    free(text.text);
    free(text.typed);
    return status;
}
