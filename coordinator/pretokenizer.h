/* pretokenizer.h - cuts a text into the words that byte pair encoding may not cross.
 *
 * A pre-tokenizer is one to four regular expressions, applied one after the
 * other: each cuts every part its predecessor left into matches and the gaps
 * between them.  `tokenizer.ggml.pre` names it.
 *
 * Thread:  owner; one text at a time.
 * Memory:  open() compiles (PCRE2, JIT where the machine has it), close() frees.
 *          Matching takes no memory beyond a fixed stack.
 * Source:  the expressions are those the models were trained with (GPT-2,
 *          Llama 3, Qwen2, SmolLM tokenizer files).  `\s` is written out,
 *          because PCRE2 counts U+180E as space and those files do not.
 */
#ifndef COORDINATOR_PRETOKENIZER_H
#define COORDINATOR_PRETOKENIZER_H

#include <stdbool.h>
#include <stddef.h>

#include "pipeline/gguf.h"
#include "proto/base/status.h"

enum { PRETOKENIZER_STEPS_MAX = 4 };

struct pretokenizer;

/* What one step has still to cut. */
struct pretokenizer_cut {
    size_t begin; /* the part this step works on */
    size_t end;
    size_t at;          /* everything before has been handed down */
    size_t match_begin; /* the next match, when match_end > at */
    size_t match_end;
};

/* A text being cut.  The caller sets nothing; see pretokenizer_start(). */
struct pretokenizer_cursor {
    const char *text;
    struct pretokenizer_cut cuts[PRETOKENIZER_STEPS_MAX];
    unsigned step;
};

/* `name` as in `tokenizer.ggml.pre`; empty means "default".
 * FL_UNSUPPORTED for one we do not know, FL_NO_MEMORY. */
FL_MUST_CHECK fl_status pretokenizer_open(struct gguf_string name, struct pretokenizer **out);
void pretokenizer_close(struct pretokenizer *pretokenizer);

/* `text` is valid UTF-8, borrowed until the last word. */
void pretokenizer_start(struct pretokenizer_cursor *cursor, const char *text, size_t size);

/* The next word: `out` points into the text.  FL_END after the last one; FL_TOO_LARGE when an
 * expression gives up on the text. */
FL_MUST_CHECK fl_status pretokenizer_next(struct pretokenizer *pretokenizer,
                                          struct pretokenizer_cursor *cursor,
                                          struct gguf_string *out);

#endif
