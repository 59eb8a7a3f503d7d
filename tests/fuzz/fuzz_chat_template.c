/* Any program is recognised or refused; what it makes of a conversation keeps typed parts whole. */
#include "coordinator/chat_template.h"

#include <stdlib.h>
#include <string.h>

#include "proto/base/log.h"

enum { TEXT_MAX = 1 << 16, MESSAGES_MAX = 6 };

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fl_log_init("", FL_LOG_ERROR);
    return 0;
}

/* Conversations from the input's first bytes: two bits a role, and a piece of it as content. */
static size_t make_messages(const uint8_t *data, size_t size, struct chat_message *messages)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    const size_t count = data[0] % (MESSAGES_MAX + 1);
    for (size_t i = 0; i < count; i++) {
        const uint8_t byte = data[1 + i];
        const size_t content_size = byte / 4 < size ? byte / 4 : size;
        messages[i] = (struct chat_message){
            .role = roles[byte % 4],
            .content = {(const char *)data + (size - content_size), content_size}};
    }
    return count;
}

static void check_text(const struct chat_template *chat, const struct chat_message *messages,
                       size_t count, unsigned flags)
{
    static char bytes[TEXT_MAX];
    struct text_range typed[MESSAGES_MAX];
    struct chat_text text = {.text = bytes, .max = TEXT_MAX, .typed = typed};
    struct chat_text small = {.text = bytes, .max = 0};
    const fl_status status = chat_template_render(chat, messages, count, flags, &text);
    if (status != FL_OK) {
        FL_ASSERT(status == FL_INVALID);
        return;
    }
    FL_ASSERT(text.size <= TEXT_MAX && text.typed_count <= count);
    size_t at = 0;
    for (size_t i = 0; i < text.typed_count; i++) {
        FL_ASSERT(at <= typed[i].begin && typed[i].begin <= typed[i].end);
        at = typed[i].end;
    }
    FL_ASSERT(at <= text.size);
    (void)!chat_template_render(chat, messages, count, flags, &small);
    FL_ASSERT(small.size == text.size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct chat_message messages[MESSAGES_MAX];
    struct chat_template chat;
    if (size < MESSAGES_MAX + 2) {
        return 0;
    }
    const size_t skip = MESSAGES_MAX + 2;
    const struct gguf_string program = {(const char *)data + skip, size - skip};
    const size_t count = make_messages(data, size, messages);
    if (chat_template_recognise(program, &chat) == FL_OK) {
        FL_ASSERT(chat.default_system_size < sizeof(chat.default_system));
        chat.bos = (struct gguf_string){"<s>", 3};
        chat.eos = (struct gguf_string){"</s>", 4};
        check_text(&chat, messages, count, data[skip - 1] & 1);
    }
    return 0;
}
