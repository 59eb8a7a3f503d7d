/* bench_kernels.c - matrix products per type against what this machine can read and multiply.
 *
 *   bench_kernels [--threads N] [--isa NAME] [--type NAME] [--mebibytes N] [--json]
 *                 [--only read] [--threads 1 --cpu-time]
 *
 * A vector product (T = 1) reads its weights once: GB/s and the share of a plain read loop's, on
 * `mebibytes` of packed weights (more than any cache).  A matrix product (T = 64) reuses them:
 * GMAC/s.  Best of several rounds, as others use the machine too.
 */
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <time.h>

#include "kernels/cpu_pool.h"
#include "kernels/device.h"
#include "tests/kernels/fixture.h"

enum { N = 4096, K = 2048, T = 64, ROUNDS = 5, ROWS_MADE = 256 };

struct options {
    uint32_t threads;
    const char *isa;
    const char *type;
    size_t bytes;
    bool json;
    bool read_only;
    bool cpu_time;
};

/* Of the process's CPU time with --cpu-time: what a thread alone does, on a machine that is busy. */
static double seconds(bool cpu_time)
{
    struct timespec now;
    clock_gettime(cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- reading ---- */

typedef uint64_t words __attribute__((vector_size(32)));

struct read_job {
    const uint8_t *data;
    size_t size;
    uint32_t parts;
    words sums[256];
};

static void read_part(void *ctx, uint32_t part, uint32_t thread)
{
    struct read_job *job = ctx;
    /* Two streams a thread: one prefetcher alone does not fill the memory's channels. */
    const size_t lines = job->size / 128 / job->parts / 2;
    const words *first = (const words *)(const void *)(job->data + 2 * lines * part * 128);
    const words *second = first + lines * 4;
    words a = {0}, b = {0}, c = {0}, d = {0};
    (void)thread;
    for (size_t i = 0; i < lines * 4; i += 4) {
        a ^= first[i] ^ second[i];
        b ^= first[i + 1] ^ second[i + 1];
        c ^= first[i + 2] ^ second[i + 2];
        d ^= first[i + 3] ^ second[i + 3];
    }
    job->sums[part] = a ^ b ^ c ^ d;
}

static double read_rate(struct cpu_pool *pool, const uint8_t *data, size_t size, bool cpu_time)
{
    static struct read_job job;
    double best = 0.0;
    job = (struct read_job){.data = data, .size = size, .parts = cpu_pool_threads(pool) * 4};
    for (int round = 0; round < ROUNDS; round++) {
        const double start = seconds(cpu_time);
        cpu_pool_run(pool, job.parts, read_part, &job);
        const double rate = (double)size / (seconds(cpu_time) - start) * 1e-9;
        best = rate > best ? rate : best;
    }
    return best;
}

/* ---- products ---- */

struct bench {
    const struct kernel_ops *ops;
    struct cpu_pool *pool;
    struct test_rows rows;
    float *out;
    uint8_t *memory;
    size_t memory_size;
    bool cpu_time;
};

/* Copies of one packed matrix side by side; returns how many fit. */
static uint32_t weights_make(struct bench *b, enum fl_dtype dtype)
{
    uint64_t seed = 1;
    size_t row_size = 0;
    if (fl_dtype_row_size(dtype, K, &row_size) != FL_OK) {
        abort();
    }
    const size_t size = matrix_packed_size(dtype, N, K);
    uint8_t *raw = test_alloc(row_size * ROWS_MADE);
    for (size_t n = 0; n < ROWS_MADE; n++) {
        random_row(dtype, K, &seed, raw + n * row_size);
    }
    for (uint32_t n = 0; n < N; n += ROWS_MADE) {
        matrix_pack_rows(dtype, K, raw, n, ROWS_MADE, b->memory);
    }
    free(raw);
    const uint32_t copies = (uint32_t)(b->memory_size / size);
    for (uint32_t i = 1; i < copies; i++) {
        memcpy(b->memory + i * size, b->memory, size);
    }
    return copies;
}

/* Packed bytes per second of one pack of ROWS_MADE rows, again and again. */
static double pack_rate(const struct bench *b, enum fl_dtype dtype)
{
    uint64_t seed = 1;
    size_t row_size = 0;
    if (fl_dtype_row_size(dtype, K, &row_size) != FL_OK) {
        abort();
    }
    uint8_t *raw = test_alloc(row_size * ROWS_MADE);
    for (size_t n = 0; n < ROWS_MADE; n++) {
        random_row(dtype, K, &seed, raw + n * row_size);
    }
    double best = 0.0;
    for (int round = 0; round < ROUNDS; round++) {
        const double start = seconds(b->cpu_time);
        for (uint32_t n = 0; n < 1024; n += ROWS_MADE) {
            matrix_pack_rows(dtype, K, raw, n, ROWS_MADE, b->memory);
        }
        const double rate = (double)row_size * 1024 / (seconds(b->cpu_time) - start) * 1e-9;
        best = rate > best ? rate : best;
    }
    free(raw);
    return best;
}

/* Seconds of the fastest round over `copies` matrices, `rows` activations each. */
static double product_seconds(const struct bench *b, enum fl_dtype dtype, uint32_t copies,
                              uint32_t rows)
{
    const size_t size = matrix_packed_size(dtype, N, K);
    const struct activations x = test_rows_view(&b->rows.x, 0, rows);
    double best = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        const double start = seconds(b->cpu_time);
        for (uint32_t i = 0; i < copies; i++) {
            const struct matrix w = {b->memory + i * size, dtype, N, K};
            b->ops->matmul(b->pool, &w, &x, ACTIVATION_Q8, b->out);
        }
        const double took = seconds(b->cpu_time) - start;
        best = took < best ? took : best;
    }
    return best;
}

static void bench_type(struct bench *b, enum fl_dtype dtype, double read, bool json, bool first)
{
    const double packing = pack_rate(b, dtype);
    const uint32_t copies = weights_make(b, dtype);
    const double bytes = (double)matrix_packed_size(dtype, N, K) * copies;
    const double vector = bytes / product_seconds(b, dtype, copies, 1) * 1e-9;
    const uint32_t few = copies < 4 ? copies : 4;
    const double macs = (double)N * K * T * few;
    const double matrix = macs / product_seconds(b, dtype, few, T) * 1e-9;
    if (json) {
        printf("%s{\"type\":\"%s\",\"gemv_gb_s\":%.2f,\"gemv_share\":%.3f,\"gemm_gmac_s\":%.1f,"
               "\"pack_gb_s\":%.2f}",
               first ? "" : ",", fl_dtype_name(dtype), vector, vector / read, matrix, packing);
    } else {
        printf(
            "%-5s gemv %6.2f GB/s %4.0f %% of reading | gemm T=%d %6.1f GMAC/s | pack %5.2f GB/s "
            "a thread\n",
            fl_dtype_name(dtype), vector, 100.0 * vector / read, T, matrix, packing);
    }
    fflush(stdout);
}

static void cpu_name(char *out, size_t size)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(out, size, "unknown CPU");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon != NULL) {
            snprintf(out, size, "%.*s", (int)strcspn(colon + 2, "\"\n"), colon + 2);
            break;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
}

static bool options_read(struct options *o, int argc, char **argv)
{
    static const struct option longs[] = {
        {"threads", required_argument, NULL, 't'},   {"isa", required_argument, NULL, 'i'},
        {"type", required_argument, NULL, 'y'},      {"json", no_argument, NULL, 'j'},
        {"mebibytes", required_argument, NULL, 'm'}, {"only", required_argument, NULL, 'o'},
        {"cpu-time", no_argument, NULL, 'c'},        {NULL, 0, NULL, 0},
    };
    int c;
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        switch (c) {
        case 't': o->threads = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'i': o->isa = optarg; break;
        case 'y': o->type = optarg; break;
        case 'm': o->bytes = strtoul(optarg, NULL, 10) << 20; break;
        case 'j': o->json = true; break;
        case 'o':
            if (strcmp(optarg, "read") != 0) {
                return false;
            }
            o->read_only = true;
            break;
        case 'c': o->cpu_time = true; break;
        default: return false;
        }
    }
    return optind == argc && (!o->cpu_time || o->threads == 1) &&
           o->bytes >= matrix_packed_size(FL_DTYPE_F32, N, K);
}

int main(int argc, char **argv)
{
    struct options o = {.threads = 2, .bytes = (size_t)192 << 20};
    struct bench b = {.memory = NULL};
    uint64_t seed = 2;
    char cpu[128];
    if (!options_read(&o, argc, argv)) {
        fprintf(stderr,
                "usage: %s [--threads N] [--isa NAME] [--type NAME] [--mebibytes N (32 or "
                "more)] [--only read] [--json]\n",
                argv[0]);
        return 2;
    }
    struct device *device = NULL;
    const struct device_host_config config = {.threads = o.threads, .isa = o.isa};
    if (device_host_open(&config, &device) != FL_OK) {
        return 1;
    }
    b.ops = device->kernels;
    b.pool = device->stream;
    b.memory_size = o.bytes;
    b.cpu_time = o.cpu_time;
    b.memory =
        device->ops->alloc(device, DEVICE_MEMORY_WEIGHTS, o.bytes); /* as a stage's weights */
    if (b.memory == NULL) {
        return 1;
    }
    memset(b.memory, 1, o.bytes);
    b.out = test_alloc((size_t)T * N * sizeof(float));
    test_rows_init(&b.rows, T, K, &seed);
    b.ops->quantize(b.pool, &b.rows.x);
    cpu_name(cpu, sizeof(cpu));
    const double read = read_rate(b.pool, b.memory, o.bytes, o.cpu_time);
    if (o.json) {
        printf("{\"cpu\":\"%s\",\"isa\":\"%s\",\"threads\":%u,\"read_gb_s\":%.2f,\"types\":[", cpu,
               b.ops->name, o.threads, read);
    } else {
        printf("%s, %s, %u threads, reading %.2f GB/s, N %d K %d\n", cpu, b.ops->name, o.threads,
               read, N, K);
    }
    bool first = true;
    for (int d = 0; d < DTYPE_COUNT && !o.read_only; d++) {
        if (o.type == NULL || strcmp(o.type, fl_dtype_name(all_dtypes[d])) == 0) {
            bench_type(&b, all_dtypes[d], read, o.json, first);
            first = false;
        }
    }
    if (o.json) {
        printf("]}\n");
    }
    device->ops->free(device, b.memory, o.bytes);
    device->ops->close(device);
    test_rows_free(&b.rows);
    free(b.out);
    return 0;
}
