#include "coordinator/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

enum {
    MATCH_LIMIT = 10000000, /* backtracking steps per match, without JIT */
    HEAP_LIMIT_KIB = 16384,
    JIT_STACK_MIN = 32 << 10,
    JIT_STACK_MAX = 1 << 20,
};

struct pretokenizer {
    unsigned step_count;
    pcre2_code *codes[PRETOKENIZER_STEPS_MAX];
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* White_Space as Unicode lists it, for use inside [..]. */
#define SPACES                                                                           \
    "\\x{09}-\\x{0d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}" \
    "\\x{202f}\\x{205f}\\x{3000}"
#define S  "[" SPACES "]"
#define NS "[^" SPACES "]"

/* The final run of spaces is there so that an expression covers its text without gaps. */
#define GPT2                                      \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+" \
    "| ?[^" SPACES "\\p{L}\\p{N}]+|" S "+(?!" NS ")|" S "+"
#define LLAMA3(digits)                                                                    \
    "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+" \
    "|" digits "| ?[^" SPACES "\\p{L}\\p{N}]+[\\r\\n]*|" S "*[\\r\\n]+|" S "+(?!" NS ")|" S "+"

static const struct {
    const char *name;
    const char *steps[PRETOKENIZER_STEPS_MAX];
} known[] = {
    {"default", {"[\\p{P}$+<=>^~|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
    {"gpt-2", {GPT2}},
    {"llama-bpe", {LLAMA3("\\p{N}{1,3}")}},
    {"qwen2", {LLAMA3("\\p{N}")}},
    {"smollm", {"\\p{N}", GPT2}},
};

static fl_status compile(struct pretokenizer *pretokenizer, const char *pattern)
{
    int error = 0;
    PCRE2_SIZE offset = 0;
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NO_UTF_CHECK, &error, &offset, NULL);
    if (code == NULL) {
        return FL_FAIL(FL_INTERNAL, "pretokenizer: PCRE2 error %d at %zu of %s", error, offset,
                       pattern);
    }
    pretokenizer->codes[pretokenizer->step_count++] = code;
    (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); /* without JIT it is slower, not wrong */
    return FL_OK;
}

static fl_status prepare(struct pretokenizer *pretokenizer)
{
    pretokenizer->match = pcre2_match_data_create(1, NULL);
    pretokenizer->context = pcre2_match_context_create(NULL);
    pretokenizer->stack = pcre2_jit_stack_create(JIT_STACK_MIN, JIT_STACK_MAX, NULL);
    if (pretokenizer->match == NULL || pretokenizer->context == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "pretokenizer: no memory for matching");
    }
    pcre2_set_match_limit(pretokenizer->context, MATCH_LIMIT);
    pcre2_set_heap_limit(pretokenizer->context, HEAP_LIMIT_KIB);
    if (pretokenizer->stack != NULL) { /* NULL when PCRE2 was built without JIT */
        pcre2_jit_stack_assign(pretokenizer->context, NULL, pretokenizer->stack);
    }
    return FL_OK;
}

fl_status pretokenizer_open(struct gguf_string name, struct pretokenizer **out)
{
    const struct gguf_string wanted = name.size == 0 ? (struct gguf_string){"default", 7} : name;
    size_t index = 0;
    while (index < sizeof(known) / sizeof(known[0]) &&
           (strlen(known[index].name) != wanted.size ||
            memcmp(known[index].name, wanted.data, wanted.size) != 0)) {
        index++;
    }
    if (index == sizeof(known) / sizeof(known[0])) {
        return FL_FAIL(FL_UNSUPPORTED,
                       "pretokenizer: \"%.*s\" is not supported; default, gpt-2, "
                       "llama-bpe, qwen2 and smollm are",
                       (int)(wanted.size < 40 ? wanted.size : 40), wanted.data);
    }
    struct pretokenizer *pretokenizer = calloc(1, sizeof(*pretokenizer));
    if (pretokenizer == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "pretokenizer: no memory");
    }
    fl_status status = prepare(pretokenizer);
    for (size_t i = 0; status == FL_OK && i < PRETOKENIZER_STEPS_MAX; i++) {
        if (known[index].steps[i] != NULL) {
            status = compile(pretokenizer, known[index].steps[i]);
        }
    }
    if (status != FL_OK) {
        pretokenizer_close(pretokenizer);
        return status;
    }
    *out = pretokenizer;
    return FL_OK;
}

void pretokenizer_close(struct pretokenizer *pretokenizer)
{
    if (pretokenizer == NULL) {
        return;
    }
    for (unsigned i = 0; i < pretokenizer->step_count; i++) {
        pcre2_code_free(pretokenizer->codes[i]);
    }
    pcre2_match_data_free(pretokenizer->match);
    pcre2_match_context_free(pretokenizer->context);
    pcre2_jit_stack_free(pretokenizer->stack);
    free(pretokenizer);
}

static struct pretokenizer_cut cut_of(size_t begin, size_t end)
{
    return (struct pretokenizer_cut){.begin = begin, .end = end, .at = begin, .match_end = begin};
}

void pretokenizer_start(struct pretokenizer_cursor *cursor, const char *text, size_t size)
{
    cursor->text = text;
    cursor->step = 0;
    cursor->cuts[0] = cut_of(0, size);
}

/* Find the next match at or after cut->at; none leaves an empty one at the end. */
static fl_status find_match(struct pretokenizer *pretokenizer, const char *text, unsigned step,
                            struct pretokenizer_cut *cut)
{
    const size_t size = cut->end - cut->begin;
    const int found = pcre2_match(pretokenizer->codes[step], (PCRE2_SPTR)(text + cut->begin), size,
                                  cut->at - cut->begin, PCRE2_NO_UTF_CHECK, pretokenizer->match,
                                  pretokenizer->context);
    if (found == PCRE2_ERROR_NOMATCH) {
        cut->match_begin = cut->end;
        cut->match_end = cut->end;
        return FL_OK;
    }
    if (found < 0) {
        return FL_FAIL(FL_TOO_LARGE,
                       "pretokenizer: gave up at byte %zu of the text (PCRE2 error "
                       "%d)",
                       cut->at, found);
    }
    const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(pretokenizer->match);
    FL_ASSERT(ends[1] > ends[0]); /* no expression above matches nothing */
    cut->match_begin = cut->begin + ends[0];
    cut->match_end = cut->begin + ends[1];
    return FL_OK;
}

fl_status pretokenizer_next(struct pretokenizer *pretokenizer, struct pretokenizer_cursor *cursor,
                            struct gguf_string *out)
{
    for (;;) {
        struct pretokenizer_cut *cut = &cursor->cuts[cursor->step];
        if (cut->at == cut->end) {
            if (cursor->step == 0) {
                return FL_END;
            }
            cursor->step--;
            continue;
        }
        if (cut->match_end <= cut->at) {
            FL_TRY(find_match(pretokenizer, cursor->text, cursor->step, cut));
        }
        const size_t begin = cut->at;
        cut->at = cut->at < cut->match_begin ? cut->match_begin : cut->match_end;
        if (cursor->step + 1 == pretokenizer->step_count) {
            *out = (struct gguf_string){cursor->text + begin, cut->at - begin};
            return FL_OK;
        }
        cursor->step++;
        cursor->cuts[cursor->step] = cut_of(begin, cut->at);
    }
}
