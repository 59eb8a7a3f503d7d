/* model_writer.h - models made to order, for tests and benchmarks.
 *
 * random    weights that depend on the seed and the tensor alone; quantised
 *           ones are valid blocks with finite scales of a sensible size
 * scripted  attention and FFN are zero, embeddings one-hot, and the output
 *           matrix makes greedy decoding follow a given chain: after token i
 *           comes chain[i].  Every other token's logit is 0, the next one's
 *           is sqrt(width).
 *
 *     struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
 *     spec.layer_count = 6;
 *     CHECK_EQ(model_write(&spec, path), FL_OK);
 *
 * Memory:  what a spec points to is borrowed for the call.
 */
#ifndef TESTS_SUPPORT_MODEL_WRITER_H
#define TESTS_SUPPORT_MODEL_WRITER_H

#include <stdbool.h>
#include <stdint.h>

#include "pipeline/gguf.h"
#include "proto/model_shape.h"
#include "tests/support/gguf_buffer.h"
#include "tests/support/token_table.h"

struct model_token {
    struct gguf_string text; /* plain bytes */
    enum token_table_type type;
    float score; /* spm */
};

struct model_spec {
    enum fl_architecture architecture;
    uint64_t seed;
    uint32_t layer_count;
    uint32_t width;
    uint32_t head_count;
    uint32_t head_count_kv;
    uint32_t head_size; /* any: attention.key_length is written when it is not width / head_count */
    uint32_t ffn_width;
    uint32_t vocabulary; /* at least; 0: as many as the tokenizer has */
    uint32_t context;
    uint32_t window;                        /* gemma3 */
    uint32_t window_pattern;                /* gemma3; 0: the key is left out */
    enum fl_dtype dtypes[FL_ROLE_LAST + 1]; /* of matrices, by role; vectors are F32 */
    bool untied;                            /* has output.weight */

    /* How the file says it. */
    uint32_t version;            /* 2 or 3 */
    uint32_t alignment;          /* 32: the key is left out */
    enum gguf_type integer_type; /* of all integer keys */
    bool arrays;                 /* head counts and FFN widths as arrays, one value a layer */
    const uint32_t *heads_kv;    /* [layer_count], with `arrays`: differing ones; NULL: alike */
    const uint32_t *ffn_widths;  /* [layer_count], likewise */
    bool vocabulary_key;         /* ARCH.vocab_size */
    uint32_t part_count;         /* 1: one file; else PATH is cut into NAME-0000i-of-0000n.gguf */

    /* RoPE */
    float rope_base;
    uint32_t rope_dim;              /* 0: the head's size, and no key */
    const char *rope_scaling;       /* the type key's text, or NULL */
    float rope_factor;              /* 0: no key */
    float rope_scale_linear;        /* 0: no key */
    float rope_attention_factor;    /* 0: no key */
    uint32_t rope_original_context; /* 0: no key */
    bool rope_freqs;                /* rope_freqs.weight */
    bool rope_factors;              /* rope_factors_long and _short */

    /* Tokenizer */
    enum token_table_kind tokenizer; /* NONE: no tokenizer in the file */
    const char *pre;                 /* bpe; NULL: no key */
    const char *chat_template;       /* NULL: no key */
    bool add_bos, add_eos, add_space_prefix;
    bool no_builtin_tokens;           /* `tokens` are all there are */
    const struct model_token *tokens; /* [token_count], after the built-in ones */
    uint32_t token_count;
    uint32_t bos, eos, eot, unk; /* ids; MODEL_TOKEN_ABSENT: the tokenizer's own */

    const uint32_t *chain; /* scripted: [chain_count], the id that follows each; others: 0 */
    uint32_t chain_count;  /* 0: random weights */
    void (*more_keys)(struct gguf_buffer *buffer, void *ctx); /* appends keys, or NULL */
    void *ctx;
};

/* ChatML, as SmolLM2 has it, and Gemma's. */
extern const char model_template_chatml[];
extern const char model_template_gemma[];

/* A model of a few hundred KiB: three layers (gemma3: seven, a window of 8, the sixth global),
 * wide enough for `dtype`; bpe for llama, spm for gemma3. */
struct model_spec model_spec_tiny(enum fl_architecture architecture, enum fl_dtype dtype);

/* A scripted llama of one layer that follows `chain`.  Tokens are the built-in ones of `tokenizer` and
 * `tokens` after them. */
struct model_spec model_spec_scripted(enum token_table_kind tokenizer,
                                      const struct model_token *tokens, uint32_t token_count,
                                      const uint32_t *chain, uint32_t chain_count);

/* All matrices of one type. */
void model_spec_set_dtype(struct model_spec *spec, enum fl_dtype dtype);

/* Ids of built-in tokens and of the spec's own: open the spec's vocabulary, then token_table_find(). */
void model_spec_tokens(const struct model_spec *spec, struct token_table *out);

/* Write the model to `path`, or to its parts.  Streams: memory does not depend on the size. */
FL_MUST_CHECK fl_status model_write(const struct model_spec *spec, const char *path);

/* The path of part `number` (from 1) of `count`; `path` itself when there is one. */
void model_part_path(const char *path, uint32_t number, uint32_t count, char *out, size_t out_size);

/* The header that model_write() would put into one file, for tests that break it. */
void model_header(const struct model_spec *spec, struct gguf_buffer *out, uint64_t *out_file_size);

#endif
