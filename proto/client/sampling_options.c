#include "proto/client/sampling_options.h"

#include <string.h>

#include "proto/client/input_text.h"

fl_status sampling_options_apply(const struct sampling_options *options, struct fl_generate *out)
{
    _Static_assert(OPTION_LIST_MAX <= (int)FL_STOP_STRING_MAX, "every stop has a place");
    out->sampling = options->sampling;
    out->max_tokens = options->max_tokens;
    out->chat_template = options->chat_template != NULL ? options->chat_template : "";
    out->stop_count = (uint32_t)options->stops.count;
    for (size_t i = 0; i < options->stops.count; i++) {
        const char *text = options->stops.items[i];
        const size_t size = strlen(text);
        if (size == 0 || size > FL_STOP_STRING_SIZE_MAX) {
            return FL_FAIL(FL_INVALID, "--stop has %zu bytes, want 1 to %d", size,
                           FL_STOP_STRING_SIZE_MAX);
        }
        FL_TRY(input_text_check("--stop", text, size));
        out->stops[i] = (struct fl_text){.data = text, .size = size};
    }
    return FL_OK;
}
