#include "pipeline/stage_run.h"

#include <string.h>

#include "pipeline/stage_request.h"

/* Put the request's next row, which came at `arrived_ns`, into the run.  Rows that came before their
 * ADMIT could not be used earlier. */
static uint32_t add_row(struct stage *stage, struct run *run, uint32_t index, uint64_t arrived_ns)
{
    struct stage_request *request = &stage->requests[index];
    const uint32_t position = request->next_run++;
    const bool sample = position + 1 >= request->prompt_count;
    const uint32_t row =
        run_add(run, index, position, kv_cache_blocks(stage->kv, request->sequence), sample);
    run_ready(run, stage_later(arrived_ns, request->arrived_ns));
    return row;
}

/* The same with its token, on the first stage. */
static void add_token_row(struct stage *stage, struct run *run, uint32_t index)
{
    const uint32_t row = add_row(stage, run, index, stage->requests[index].token_ns);
    run->ids[row] = kv_cache_token(stage->kv, stage->requests[index].sequence, run->positions[row]);
}

/* The request with the lowest id above `id` that has prompt rows to run, or STAGE_REQUEST_NONE. */
static uint32_t next_prefill(const struct stage *stage, uint64_t id)
{
    uint32_t found = STAGE_REQUEST_NONE;
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        const struct stage_request *request = &stage->requests[i];
        if (request->used && !request->failed && request->id > id &&
            request->next_run < request->prompt_count &&
            (found == STAGE_REQUEST_NONE || request->id < stage->requests[found].id)) {
            found = i;
        }
    }
    return found;
}

static void form_from_tokens(struct stage *stage, struct run *run)
{
    for (uint32_t i = 0; i < stage->plan->sequence_max; i++) {
        const struct stage_request *request = &stage->requests[i];
        if (request->used && !request->failed && request->next_run >= request->prompt_count &&
            request->next_run < request->next_in) {
            add_token_row(stage, run, i);
        }
    }
    uint32_t room = stage->plan->chunk_rows;
    for (uint32_t i = next_prefill(stage, 0); i != STAGE_REQUEST_NONE && room > 0;
         i = next_prefill(stage, stage->requests[i].id)) {
        const struct stage_request *request = &stage->requests[i];
        for (; room > 0 && request->next_run < request->prompt_count; room--) {
            add_token_row(stage, run, i);
        }
    }
}

/* Move waiting rows into the run: those of decode steps, or up to a chunk of the others. */
static void form_from_inbox(struct stage *stage, struct run *run, bool decode)
{
    const size_t width = stage->shape->width;
    uint32_t room = decode ? stage->plan->sequence_max : stage->plan->chunk_rows;
    for (uint32_t row = inbox_first(stage->inbox); row != INBOX_NONE && room > 0;) {
        const struct inbox_row waiting = *inbox_row(stage->inbox, row);
        const uint32_t index = stage_request_find(stage, waiting.request_id);
        const struct stage_request *request =
            index == STAGE_REQUEST_NONE ? NULL : &stage->requests[index];
        if (request != NULL && request->failed) {
            inbox_remove(stage->inbox, row);
        } else if (request != NULL && waiting.position == request->next_run &&
                   (waiting.position >= request->prompt_count) == decode) {
            const uint32_t to = add_row(stage, run, index, waiting.arrived_ns);
            memcpy(stage->host_rows + to * width, inbox_data(stage->inbox, row),
                   width * sizeof(float));
            inbox_remove(stage->inbox, row);
            room--;
        }
        row = waiting.next;
    }
}

/* Say whose rows the run holds and since when they could have been used. */
static void trace_run(struct stage *stage, struct run *run)
{
    struct run_times *times = &run->times;
    const uint64_t first_id = stage->requests[run->segments[0].request].id;
    *times = (struct run_times){
        .plan_id = stage->plan->plan_id,
        .number = stage->run_end + 1,
        .request_id = first_id,
        .position = run->segments[0].position,
        .rows = run->row_count,
    };
    for (uint32_t i = 0; i < run->segment_count; i++) {
        const struct run_segment *segment = &run->segments[i];
        const struct stage_request *request = &stage->requests[segment->request];
        times->request_id = request->id == first_id ? times->request_id : 0;
        times->input_ns = stage_later(segment->ready_ns, times->input_ns);
        if (segment->position < request->prompt_count) {
            times->prefill = true;
            run_trace_join(stage->trace, times, request->id, segment->position, segment->rows,
                           segment->ready_ns);
        }
    }
}

bool stage_run_form(struct stage *stage)
{
    if (stage->run_end - stage->run_first == STAGE_RUN_MAX) {
        return false;
    }
    struct run *run = &stage->runs[stage->run_end % STAGE_RUN_MAX];
    run_clear(run);
    if (stage->is_first) {
        form_from_tokens(stage, run);
    } else {
        form_from_inbox(stage, run, true);
        form_from_inbox(stage, run, false);
        run->has_input = true;
    }
    if (run->row_count == 0) {
        return false;
    }
    if (!stage->is_first) {
        stage->device->ops->copy_in(stage->device, run->x, stage->host_rows,
                                    (size_t)run->row_count * stage->shape->width * sizeof(float));
    }
    if (stage->trace != NULL) {
        trace_run(stage, run);
    }
    stage->run_end++;
    return true;
}

bool stage_run_is_at_head(const struct stage *stage, const struct run *run)
{
    return stage->is_last && run->piece + 1 == stage->chain_count;
}

bool stage_run_is_complete(const struct stage *stage, const struct run *run)
{
    return run->piece == stage->chain_count || run->live_count == 0 ||
           (stage_run_is_at_head(stage, run) && run_sample_count(run) == 0);
}

bool stage_run_retire(struct stage *stage)
{
    bool any = false;
    for (; stage->run_first < stage->run_end; stage->run_first++) {
        struct run *run = &stage->runs[stage->run_first % STAGE_RUN_MAX];
        if (!stage_run_is_complete(stage, run)) {
            break;
        }
        if (!stage->is_last && run->live_count > 0) {
            float *rows = outbox_slot(stage->outbox);
            if (rows == NULL) {
                break;
            }
            stage->device->ops->copy_out(stage->device, rows, run->x,
                                         (size_t)run->row_count * stage->shape->width *
                                             sizeof(float));
            outbox_push(stage->outbox, run);
        }
        for (uint32_t i = 0; i < run->segment_count; i++) {
            const struct run_segment *segment = &run->segments[i];
            if (segment->request != RUN_DEAD) {
                kv_cache_fill(stage->kv, stage->requests[segment->request].sequence,
                              segment->position + segment->rows);
            }
        }
        run_trace_end(stage->trace, &run->times);
        any = true;
    }
    return any;
}
