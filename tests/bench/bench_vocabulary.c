/* How long a vocabulary takes to load, and how fast texts become tokens.
 *
 * bench_vocabulary MODEL.gguf [TEXT] prints CSV: model, tokens, best and median of nine loads in
 * milliseconds, and MB/s of encoding TEXT (a built-in paragraph, when none is given).
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "coordinator/tokenizer.h"

enum { LOADS = 9, TEXT_SIZE = 512 << 10, IDS_MAX = TEXT_SIZE };

static const char paragraph[] =
    "A home pool is three small boxes on a shelf, none of which could hold the model alone. Each "
    "reads its own share from its own disk (say, 2.4 GB at 1,900 MB/s) while the first layers "
    "already compute; nobody waits for a barrier.\n\n\tfor (int i = 0; i < 10; i++) { total += "
    "weights[i] * 3; }\n\nZa\xc5\xbc\xc3\xb3\xc5\x82\xc4\x87 g\xc4\x99\xc5\x9bl\xc4\x85 "
    "ja\xc5\xba\xc5\x84. It's the reader's turn: we'll see what they've found.\n";

static double now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static char *read_text(const char *path, size_t *size)
{
    char *text = malloc(TEXT_SIZE);
    *size = 0;
    if (text == NULL) {
        return NULL;
    }
    if (path != NULL) {
        FILE *file = fopen(path, "rb");
        if (file == NULL) {
            free(text);
            return NULL;
        }
        *size = fread(text, 1, TEXT_SIZE, file);
        fclose(file);
        return text;
    }
    while (*size + sizeof(paragraph) <= TEXT_SIZE) {
        memcpy(text + *size, paragraph, sizeof(paragraph) - 1);
        *size += sizeof(paragraph) - 1;
    }
    return text;
}

static int bench_encode(struct tokenizer *tokenizer, const char *text, size_t size,
                        double *out_mb_s, size_t *out_count)
{
    uint32_t *ids = malloc(IDS_MAX * sizeof(*ids));
    double best = 0;
    for (int i = 0; ids != NULL && i < 5; i++) {
        const double begin = now_ms();
        if (tokenizer_encode(tokenizer, text, size, 0, ids, IDS_MAX, out_count) != FL_OK) {
            free(ids);
            return 1;
        }
        const double rate = (double)size / 1e3 / (now_ms() - begin);
        best = rate > best ? rate : best;
    }
    *out_mb_s = best;
    free(ids);
    return 0;
}

int main(int argc, char **argv)
{
    double loads[LOADS];
    struct gguf *gguf = NULL;
    struct tokenizer *tokenizer = NULL;
    size_t size = 0;
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL.gguf [TEXT]\n", argv[0]);
        return 2;
    }
    const double open_begin = now_ms();
    if (gguf_open(argv[1], &gguf) != FL_OK) {
        return 1;
    }
    const double open_ms = now_ms() - open_begin;
    for (int i = 0; i < LOADS; i++) {
        tokenizer_close(tokenizer);
        const double begin = now_ms();
        if (tokenizer_open(gguf, &tokenizer) != FL_OK) {
            return 1;
        }
        loads[i] = now_ms() - begin;
    }
    qsort(loads, LOADS, sizeof(loads[0]), compare);

    char *text = read_text(argc > 2 ? argv[2] : NULL, &size);
    double mb_s = 0;
    size_t count = 0;
    if (text == NULL || bench_encode(tokenizer, text, size, &mb_s, &count) != 0) {
        return 1;
    }
    const char *name = strrchr(argv[1], '/');
    printf(
        "model,tokens,header_ms,load_best_ms,load_median_ms,text_bytes,text_tokens,encode_mb_s\n");
    printf("%s,%" PRIu32 ",%.1f,%.1f,%.1f,%zu,%zu,%.1f\n", name == NULL ? argv[1] : name + 1,
           tokenizer_vocabulary(tokenizer)->count, open_ms, loads[0], loads[LOADS / 2], size, count,
           mb_s);
    free(text);
    tokenizer_close(tokenizer);
    gguf_close(gguf);
    return 0;
}
