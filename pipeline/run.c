#include "pipeline/run.h"

#include <inttypes.h>
#include <stdlib.h>

static size_t x_size(uint32_t row_max, uint32_t width)
{
    return (size_t)row_max * width * sizeof(float);
}

uint64_t run_memory(uint32_t row_max, uint32_t width)
{
    return sizeof(struct run) + (uint64_t)x_size(row_max, width) +
           (uint64_t)row_max *
               (sizeof(struct run_segment) + 2 * sizeof(uint32_t) + sizeof(struct attention_row));
}

fl_status run_open(struct device *device, uint32_t row_max, uint32_t width, struct run *out)
{
    struct run run = {
        .row_max = row_max,
        .segments = calloc(row_max, sizeof(*run.segments)),
        .ids = calloc(row_max, sizeof(*run.ids)),
        .positions = calloc(row_max, sizeof(*run.positions)),
        .sequence = calloc(row_max, sizeof(*run.sequence)),
        .x = device->ops->alloc(device, DEVICE_MEMORY_BUFFER, x_size(row_max, width)),
    };
    if (run.segments == NULL || run.ids == NULL || run.positions == NULL || run.sequence == NULL ||
        run.x == NULL) {
        run_close(device, width, &run);
        return FL_FAIL(FL_NO_MEMORY,
                       "no memory for a run of %" PRIu32 " rows: %" PRIu64 " bytes are wanted",
                       row_max, run_memory(row_max, width));
    }
    *out = run;
    return FL_OK;
}

void run_close(struct device *device, uint32_t width, struct run *run)
{
    if (run->x != NULL) {
        device->ops->free(device, run->x, x_size(run->row_max, width));
    }
    free(run->sequence);
    free(run->positions);
    free(run->ids);
    free(run->segments);
    *run = (struct run){0};
}

void run_clear(struct run *run)
{
    run->row_count = 0;
    run->segment_count = 0;
    run->live_count = 0;
    run->piece = 0;
    run->has_input = false;
    run->times = (struct run_times){0};
}

uint32_t run_add(struct run *run, uint32_t request, uint32_t position, const uint32_t *blocks,
                 bool sample)
{
    FL_ASSERT(run->row_count < run->row_max);
    const uint32_t row = run->row_count++;
    run->positions[row] = position;
    run->sequence[row] = (struct attention_row){.blocks = blocks, .position = position};

    struct run_segment *last = &run->segments[run->segment_count > 0 ? run->segment_count - 1 : 0];
    if (run->segment_count > 0 && last->request == request &&
        last->position + last->rows == position) {
        last->rows++;
        last->sample = sample;
    } else {
        run->segments[run->segment_count++] = (struct run_segment){
            .request = request,
            .position = position,
            .row = row,
            .rows = 1,
            .sample = sample,
        };
        run->live_count++;
    }
    return row;
}

void run_ready(struct run *run, uint64_t ready_ns)
{
    FL_ASSERT(run->segment_count > 0);
    struct run_segment *last = &run->segments[run->segment_count - 1];
    last->ready_ns = ready_ns > last->ready_ns ? ready_ns : last->ready_ns;
}

void run_kill(struct run *run, uint32_t request, const uint32_t *spare)
{
    for (uint32_t i = 0; i < run->segment_count; i++) {
        struct run_segment *segment = &run->segments[i];
        if (segment->request != request) {
            continue;
        }
        segment->request = RUN_DEAD;
        run->live_count--;
        for (uint32_t row = segment->row; row < segment->row + segment->rows; row++) {
            run->sequence[row] = (struct attention_row){.blocks = spare, .position = 0};
        }
    }
}

bool run_wants_sample(const struct run_segment *segment)
{
    return segment->request != RUN_DEAD && segment->sample;
}

uint32_t run_sample_count(const struct run *run)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < run->segment_count; i++) {
        count += run_wants_sample(&run->segments[i]) ? 1 : 0;
    }
    return count;
}

struct forward_rows run_rows(const struct run *run)
{
    return (struct forward_rows){
        .count = run->row_count,
        .positions = run->positions,
        .sequence = run->sequence,
        .x = run->x,
    };
}
