/* bench_loader - how fast a node's loader brings a model's weights in, one thread.
 *
 *   bench_loader MODEL.gguf [rounds]
 *
 * CSV: where the bytes came from, MiB, milliseconds of wall and of this thread,
 * GB/s.  The first round reads what the page cache lacks; later ones measure
 * copying out of it and repacking.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/device.h"
#include "node/loader.h"
#include "node/model_folder.h"
#include "pipeline/model.h"
#include "proto/base/clock.h"

static uint64_t thread_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * FL_NS_PER_S + (uint64_t)now.tv_nsec;
}

static fl_status run_round(const struct model *model, struct loader *loader, struct device *device)
{
    const struct fl_manifest *whole = model_manifest(model);
    const struct model_range range = {
        .layer_count = whole->shape.layer_count, .has_embed = true, .has_head = true};
    struct fl_stage stage = {
        .node = "bench", .layer_count = range.layer_count, .has_embed = true, .has_head = true};
    struct fl_plan plan = {.plan_id = 1, .stage_count = 1, .stages = &stage};
    FL_TRY(model_stage_manifest(whole, &range, &plan.manifest));
    struct loader_job job = {.embed = NULL};
    FL_TRY(node_plan_make(&plan, &job.plan));
    FL_TRY(weight_store_open(&job.plan->plan.manifest, device, &job.weights));

    const struct fl_clock clock = fl_clock_monotonic();
    const uint64_t wall_ns = fl_clock_now(&clock);
    const uint64_t cpu_ns = thread_ns();
    loader_submit(loader, &job);
    while (!loader_released(&job)) {
        if (loader_step(loader) == FL_AGAIN) {
            return FL_FAIL(FL_IO, "the file is not where it was");
        }
    }
    const double wall_ms = (double)(fl_clock_now(&clock) - wall_ns) / (double)FL_NS_PER_MS;
    const double cpu_ms = (double)(thread_ns() - cpu_ns) / (double)FL_NS_PER_MS;
    const double size = (double)job.plan->bytes_file;
    printf("file,%.1f,%.1f,%.1f,%.2f\n", size / (1 << 20), wall_ms, cpu_ms, size / cpu_ms / 1e6);
    weight_store_close(job.weights);
    node_plan_free(job.plan);
    return FL_OK;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fputs("bench_loader MODEL.gguf [rounds]\n", stderr);
        return 2;
    }
    struct wake wakes[3];
    struct model *model;
    struct fetch_queue *fetches;
    struct loader *loader;
    struct device *device;
    char *path = strdup(argv[1]);
    char *slash = path != NULL ? strrchr(path, '/') : NULL;
    if (slash == NULL) {
        free(path);
        fputs("bench_loader: MODEL needs its folder, as in ./MODEL.gguf\n", stderr);
        return 2;
    }
    *slash = '\0';
    struct model_folder folder = {.path = path};
    const struct model_storage storage = model_folder_storage(&folder);
    const struct device_host_config host = {.threads = 1, .isa = "auto"};
    const struct loader_config config = {
        .storage = &storage,
        .clock = fl_clock_monotonic(),
        .loader_wake = &wakes[0],
        .compute_wake = &wakes[1],
        .wire_wake = &wakes[2],
    };
    if (model_open(argv[1], &model) != FL_OK || wake_open(&wakes[0]) != FL_OK ||
        wake_open(&wakes[1]) != FL_OK || wake_open(&wakes[2]) != FL_OK ||
        fetch_queue_open(&wakes[0], &wakes[2], &fetches) != FL_OK ||
        device_host_open(&host, &device) != FL_OK || loader_open(&config, &loader) != FL_OK) {
        return 1;
    }
    puts("source,mib,wall_ms,cpu_ms,gb_per_cpu_s");
    const long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 3;
    for (long i = 0; i < rounds; i++) {
        if (run_round(model, loader, device) != FL_OK) {
            return 1;
        }
    }
    return 0;
}
