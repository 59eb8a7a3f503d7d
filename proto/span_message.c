#include "proto/span_message.h"

#include "proto/cluster.pb-c.h"

#include "proto/message_field.h"

static fl_status build_span(const struct fl_span *span, struct fl_arena *arena,
                            Firstlight__Cluster__Span **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Span, firstlight__cluster__span, out);
    (*out)->start_ns = span->start_ns;
    (*out)->end_ns = span->end_ns;
    (*out)->busy_ns = span->busy_ns;
    (*out)->plan_id = span->plan_id;
    (*out)->request_id = span->request_id;
    (*out)->run = span->run;
    (*out)->bytes = span->bytes;
    (*out)->cause_ns = span->cause_ns;
    (*out)->piece = span->piece + 1; /* FL_SPAN_NO_PIECE wraps to 0 */
    (*out)->position = span->position;
    (*out)->rows = span->rows;
    (*out)->phase = span->phase;
    (*out)->lane = span->lane;
    (*out)->source = span->source;
    (*out)->cause = span->cause;
    return FL_OK;
}

fl_status fl_span_message_build(const struct fl_spans *spans, struct fl_arena *arena,
                                Firstlight__Cluster__Spans **out)
{
    FL_ASSERT(spans->span_count <= FL_SPANS_MAX);
    FL_FIELD_MAKE(arena, Firstlight__Cluster__Spans, firstlight__cluster__spans, out);
    (*out)->plan_id = spans->plan_id;
    (*out)->request_id = spans->request_id;
    (*out)->last = spans->last;
    (*out)->lost = spans->lost;
    (*out)->exec_ns = spans->start.exec_ns;
    (*out)->ready_ns = spans->start.ready_ns;
    (*out)->shard_bytes = spans->start.shard_bytes;
    (*out)->residency_known = spans->start.residency_known;
    (*out)->page_cache_before = spans->start.page_cache_before;
    (*out)->page_cache_after = spans->start.page_cache_after;
    (*out)->medium_bytes = spans->start.medium_bytes;
    (*out)->direct = spans->start.direct;
    (*out)->mhz_before = spans->start.mhz_before;
    (*out)->mhz_after = spans->start.mhz_after;
    (*out)->n_spans = spans->span_count;
    FL_TRY(fl_field_array(arena, spans->span_count, sizeof(*(*out)->spans), &(*out)->spans));
    for (uint32_t i = 0; i < spans->span_count; i++) {
        FL_TRY(build_span(&spans->spans[i], arena, &(*out)->spans[i]));
    }
    return FL_OK;
}

static fl_status take_span(const Firstlight__Cluster__Span *message, struct fl_span *out)
{
    FL_TRY(fl_field_range("span end", message->end_ns, message->start_ns, UINT64_MAX));
    FL_TRY(
        fl_field_range("span busy time", message->busy_ns, 0, message->end_ns - message->start_ns));
    FL_TRY(fl_field_range("span piece", message->piece, 0, FL_PIECE_COUNT_MAX));
    FL_TRY(fl_field_range("span phase", message->phase, 0, FL_PHASE_COUNT - 1));
    FL_TRY(fl_field_range("span lane", message->lane, 0, FL_LANE_COUNT - 1));
    FL_TRY(fl_field_range("span source", message->source, 0, FL_SOURCE_COUNT - 1));
    FL_TRY(fl_field_range("span cause", message->cause, 0, FL_CAUSE_COUNT - 1));
    *out = (struct fl_span){
        .start_ns = message->start_ns,
        .end_ns = message->end_ns,
        .busy_ns = message->busy_ns,
        .plan_id = message->plan_id,
        .request_id = message->request_id,
        .run = message->run,
        .bytes = message->bytes,
        .cause_ns = message->cause_ns,
        .piece = message->piece - 1, /* 0 wraps to FL_SPAN_NO_PIECE */
        .position = message->position,
        .rows = message->rows,
        .phase = (enum fl_phase)message->phase,
        .lane = (enum fl_lane)message->lane,
        .source = (enum fl_source)message->source,
        .cause = (enum fl_cause)message->cause,
    };
    return FL_OK;
}

fl_status fl_span_message_take(const Firstlight__Cluster__Spans *message, struct fl_arena *arena,
                               struct fl_spans *out)
{
    FL_TRY(fl_field_range("plan_id", message->plan_id, 1, UINT64_MAX));
    FL_TRY(fl_field_range("request_id", message->request_id, 1, UINT64_MAX));
    FL_TRY(fl_field_range("ready_ns", message->ready_ns, message->exec_ns, UINT64_MAX));
    FL_TRY(
        fl_field_range("page_cache_before", message->page_cache_before, 0, message->shard_bytes));
    FL_TRY(fl_field_range("page_cache_after", message->page_cache_after, 0, message->shard_bytes));
    FL_TRY(fl_field_range("span count", message->n_spans, 0, FL_SPANS_MAX));
    *out = (struct fl_spans){
        .plan_id = message->plan_id,
        .request_id = message->request_id,
        .last = message->last,
        .lost = message->lost,
        .start =
            {
                .exec_ns = message->exec_ns,
                .ready_ns = message->ready_ns,
                .shard_bytes = message->shard_bytes,
                .residency_known = message->residency_known,
                .page_cache_before = message->page_cache_before,
                .page_cache_after = message->page_cache_after,
                .medium_bytes = message->medium_bytes,
                .direct = message->direct,
                .mhz_before = message->mhz_before,
                .mhz_after = message->mhz_after,
            },
        .span_count = (uint32_t)message->n_spans,
    };
    FL_TRY(fl_field_array(arena, message->n_spans, sizeof(*out->spans), &out->spans));
    for (size_t i = 0; i < message->n_spans; i++) {
        FL_TRY(take_span(message->spans[i], &out->spans[i]));
    }
    return FL_OK;
}
