#include "proto/timeline_message.h"

#include "proto/client.pb-c.h"

#include "proto/message_field.h"
#include "proto/span.h"

/* ---- build: plain struct to generated struct ---- */

static fl_status build_phase(const struct fl_phase_summary *from, struct fl_arena *arena,
                             Firstlight__Phase **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Phase, firstlight__phase, out);
    fl_field_borrow_text(from->phase, &(*out)->phase);
    (*out)->exposed_ms = from->exposed_ms;
    (*out)->hidden_ms = from->hidden_ms;
    (*out)->bytes = from->bytes;
    return FL_OK;
}

static fl_status build_segment(const struct fl_segment_summary *from, struct fl_arena *arena,
                               Firstlight__Segment **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Segment, firstlight__segment, out);
    fl_field_borrow_text(from->phase, &(*out)->phase);
    fl_field_borrow_text(from->node, &(*out)->node);
    fl_field_borrow_text(from->cause, &(*out)->cause);
    (*out)->start_ms = from->start_ms;
    (*out)->ms = from->ms;
    (*out)->bytes = from->bytes;
    return FL_OK;
}

static fl_status build_node(const struct fl_timeline_node *from, struct fl_arena *arena,
                            Firstlight__TimelineNode **out)
{
    FL_FIELD_MAKE(arena, Firstlight__TimelineNode, firstlight__timeline_node, out);
    fl_field_borrow_text(from->node, &(*out)->node);
    (*out)->clock_known = from->clock_known;
    (*out)->clock_offset_us = from->clock_offset_us;
    (*out)->clock_error_us = from->clock_error_us;
    (*out)->residency_known = from->residency_known;
    (*out)->page_cache_before = from->page_cache_before;
    (*out)->page_cache_after = from->page_cache_after;
    (*out)->shard_bytes = from->shard_bytes;
    (*out)->medium_bytes = from->medium_bytes;
    fl_field_borrow_text(from->regime, &(*out)->regime);
    (*out)->process_ms = from->process_ms;
    (*out)->slept_ms = from->slept_ms;
    (*out)->mhz_before = from->mhz_before;
    (*out)->mhz_after = from->mhz_after;
    (*out)->spans_lost = from->spans_lost;
    return FL_OK;
}

static fl_status build_span(const struct fl_timeline_span *from, struct fl_arena *arena,
                            Firstlight__TimelineSpan **out)
{
    FL_FIELD_MAKE(arena, Firstlight__TimelineSpan, firstlight__timeline_span, out);
    fl_field_borrow_text(from->phase, &(*out)->phase);
    fl_field_borrow_text(from->node, &(*out)->node);
    fl_field_borrow_text(from->lane, &(*out)->lane);
    fl_field_borrow_text(from->source, &(*out)->source);
    fl_field_borrow_text(from->cause, &(*out)->cause);
    fl_field_borrow_text(from->piece, &(*out)->piece);
    (*out)->start_ms = from->start_ms;
    (*out)->end_ms = from->end_ms;
    (*out)->busy_ms = from->busy_ms;
    (*out)->cause_ms = from->cause_ms;
    (*out)->bytes = from->bytes;
    (*out)->run = from->run;
    (*out)->position = from->position;
    (*out)->rows = from->rows;
    return FL_OK;
}

fl_status fl_phase_message_build(const struct fl_phase_summary *phases, uint32_t count,
                                 struct fl_arena *arena, Firstlight__Phase ***out)
{
    FL_TRY(fl_field_array(arena, count, sizeof(**out), out));
    for (uint32_t i = 0; i < count; i++) {
        FL_TRY(build_phase(&phases[i], arena, &(*out)[i]));
    }
    return FL_OK;
}

fl_status fl_timeline_message_build(const struct fl_timeline *timeline, struct fl_arena *arena,
                                    Firstlight__Timeline **out)
{
    FL_FIELD_MAKE(arena, Firstlight__Timeline, firstlight__timeline, out);
    Firstlight__Timeline *message = *out;
    message->timeline_id = timeline->id;
    fl_field_borrow_text(timeline->model, &message->model);
    message->response_class = (Firstlight__ResponseClass)timeline->class_;
    message->ttft_ms = timeline->ttft_ms;
    message->predicted_ms = timeline->predicted_ms;
    message->prompt_tokens = timeline->prompt_tokens;
    message->complete = timeline->complete;
    message->n_segments = timeline->segment_count;
    FL_TRY(fl_field_array(arena, timeline->segment_count, sizeof(*message->segments),
                          &message->segments));
    for (uint32_t i = 0; i < timeline->segment_count; i++) {
        FL_TRY(build_segment(&timeline->segments[i], arena, &message->segments[i]));
    }
    message->n_phases = timeline->phase_count;
    FL_TRY(
        fl_phase_message_build(timeline->phases, timeline->phase_count, arena, &message->phases));
    message->n_nodes = timeline->node_count;
    FL_TRY(fl_field_array(arena, timeline->node_count, sizeof(*message->nodes), &message->nodes));
    for (uint32_t i = 0; i < timeline->node_count; i++) {
        FL_TRY(build_node(&timeline->nodes[i], arena, &message->nodes[i]));
    }
    message->n_spans = timeline->span_count;
    FL_TRY(fl_field_array(arena, timeline->span_count, sizeof(*message->spans), &message->spans));
    for (uint32_t i = 0; i < timeline->span_count; i++) {
        FL_TRY(build_span(&timeline->spans[i], arena, &message->spans[i]));
    }
    return FL_OK;
}

/* ---- take: generated struct to plain struct, every field checked ---- */

static fl_status take_phase(const Firstlight__Phase *message, struct fl_arena *arena,
                            struct fl_phase_summary *out)
{
    FL_TRY(fl_field_text(arena, "phase phase", &message->phase, FL_FIELD_WORD_MAX, &out->phase));
    FL_TRY(fl_field_real("phase exposed_ms", message->exposed_ms, 0, FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("phase hidden_ms", message->hidden_ms, 0, FL_FIELD_QUANTITY_MAX));
    out->exposed_ms = message->exposed_ms;
    out->hidden_ms = message->hidden_ms;
    out->bytes = message->bytes;
    return FL_OK;
}

static fl_status take_segment(const Firstlight__Segment *message, struct fl_arena *arena,
                              struct fl_segment_summary *out)
{
    FL_TRY(fl_field_text(arena, "segment phase", &message->phase, FL_FIELD_WORD_MAX, &out->phase));
    FL_TRY(fl_field_text(arena, "segment node", &message->node, FL_NAME_MAX, &out->node));
    FL_TRY(
        fl_field_text(arena, "segment cause", &message->cause, FL_FIELD_SENTENCE_MAX, &out->cause));
    FL_TRY(fl_field_real("segment start_ms", message->start_ms, -FL_FIELD_QUANTITY_MAX,
                         FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("segment ms", message->ms, 0, FL_FIELD_QUANTITY_MAX));
    out->start_ms = message->start_ms;
    out->ms = message->ms;
    out->bytes = message->bytes;
    return FL_OK;
}

static fl_status take_node(const Firstlight__TimelineNode *message, struct fl_arena *arena,
                           struct fl_timeline_node *out)
{
    FL_TRY(fl_field_text(arena, "timeline node node", &message->node, FL_NAME_MAX, &out->node));
    FL_TRY(fl_field_real("timeline node clock_offset_us", message->clock_offset_us,
                         -FL_FIELD_QUANTITY_MAX, FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("timeline node clock_error_us", message->clock_error_us, 0,
                         FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("timeline node page_cache_before", message->page_cache_before, 0, 1));
    FL_TRY(fl_field_real("timeline node page_cache_after", message->page_cache_after, 0, 1));
    FL_TRY(fl_field_text(arena, "timeline node regime", &message->regime, FL_FIELD_WORD_MAX,
                         &out->regime));
    FL_TRY(
        fl_field_real("timeline node process_ms", message->process_ms, 0, FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("timeline node slept_ms", message->slept_ms, 0, FL_FIELD_QUANTITY_MAX));
    out->clock_known = message->clock_known != 0;
    out->clock_offset_us = message->clock_offset_us;
    out->clock_error_us = message->clock_error_us;
    out->residency_known = message->residency_known != 0;
    out->page_cache_before = message->page_cache_before;
    out->page_cache_after = message->page_cache_after;
    out->shard_bytes = message->shard_bytes;
    out->medium_bytes = message->medium_bytes;
    out->process_ms = message->process_ms;
    out->slept_ms = message->slept_ms;
    out->mhz_before = message->mhz_before;
    out->mhz_after = message->mhz_after;
    out->spans_lost = message->spans_lost;
    return FL_OK;
}

static fl_status take_span(const Firstlight__TimelineSpan *message, struct fl_arena *arena,
                           struct fl_timeline_span *out)
{
    FL_TRY(fl_field_text(arena, "span phase", &message->phase, FL_FIELD_WORD_MAX, &out->phase));
    FL_TRY(fl_field_text(arena, "span node", &message->node, FL_NAME_MAX, &out->node));
    FL_TRY(fl_field_text(arena, "span lane", &message->lane, FL_FIELD_WORD_MAX, &out->lane));
    FL_TRY(fl_field_text(arena, "span source", &message->source, FL_FIELD_WORD_MAX, &out->source));
    FL_TRY(fl_field_text(arena, "span cause", &message->cause, FL_FIELD_SENTENCE_MAX, &out->cause));
    FL_TRY(fl_field_text(arena, "span piece", &message->piece, FL_FIELD_WORD_MAX, &out->piece));
    FL_TRY(fl_field_real("span start_ms", message->start_ms, -FL_FIELD_QUANTITY_MAX,
                         FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("span end_ms", message->end_ms, -FL_FIELD_QUANTITY_MAX,
                         FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("span busy_ms", message->busy_ms, 0, FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("span cause_ms", message->cause_ms, -FL_FIELD_QUANTITY_MAX,
                         FL_FIELD_QUANTITY_MAX));
    out->start_ms = message->start_ms;
    out->end_ms = message->end_ms;
    out->busy_ms = message->busy_ms;
    out->cause_ms = message->cause_ms;
    out->bytes = message->bytes;
    out->run = message->run;
    out->position = message->position;
    out->rows = message->rows;
    return FL_OK;
}

fl_status fl_phase_message_take(Firstlight__Phase *const *message, size_t count,
                                struct fl_arena *arena, struct fl_phase_summary **out)
{
    FL_TRY(fl_field_range("phase count", count, 0, FL_PHASE_COUNT));
    FL_TRY(fl_field_array(arena, count, sizeof(**out), out));
    for (size_t i = 0; i < count; i++) {
        FL_TRY(take_phase(message[i], arena, &(*out)[i]));
    }
    return FL_OK;
}

static fl_status take_lists(const Firstlight__Timeline *message, struct fl_arena *arena,
                            struct fl_timeline *out)
{
    FL_TRY(fl_field_range("segment count", message->n_segments, 0, FL_TIMELINE_SEGMENT_MAX));
    FL_TRY(fl_field_range("timeline node count", message->n_nodes, 0, FL_STAGE_COUNT_MAX));
    FL_TRY(fl_field_range("span count", message->n_spans, 0, FL_TIMELINE_SPAN_MAX));
    out->segment_count = (uint32_t)message->n_segments;
    FL_TRY(fl_field_array(arena, message->n_segments, sizeof(*out->segments), &out->segments));
    for (size_t i = 0; i < message->n_segments; i++) {
        FL_TRY(take_segment(message->segments[i], arena, &out->segments[i]));
    }
    out->phase_count = (uint32_t)message->n_phases;
    FL_TRY(fl_phase_message_take(message->phases, message->n_phases, arena, &out->phases));
    out->node_count = (uint32_t)message->n_nodes;
    FL_TRY(fl_field_array(arena, message->n_nodes, sizeof(*out->nodes), &out->nodes));
    for (size_t i = 0; i < message->n_nodes; i++) {
        FL_TRY(take_node(message->nodes[i], arena, &out->nodes[i]));
    }
    out->span_count = (uint32_t)message->n_spans;
    FL_TRY(fl_field_array(arena, message->n_spans, sizeof(*out->spans), &out->spans));
    for (size_t i = 0; i < message->n_spans; i++) {
        FL_TRY(take_span(message->spans[i], arena, &out->spans[i]));
    }
    return FL_OK;
}

fl_status fl_timeline_message_take(const Firstlight__Timeline *message, struct fl_arena *arena,
                                   struct fl_timeline *out)
{
    FL_TRY(fl_field_text(arena, "timeline model", &message->model, FL_MODEL_NAME_MAX, &out->model));
    FL_TRY(fl_field_range("response_class", (uint64_t)message->response_class, FL_CLASS_UNKNOWN,
                          FL_CLASS_WARM));
    FL_TRY(fl_field_real("ttft_ms", message->ttft_ms, 0, FL_FIELD_QUANTITY_MAX));
    FL_TRY(fl_field_real("predicted_ms", message->predicted_ms, 0, FL_FIELD_QUANTITY_MAX));
    out->id = message->timeline_id;
    out->class_ = (enum fl_class)message->response_class;
    out->ttft_ms = message->ttft_ms;
    out->predicted_ms = message->predicted_ms;
    out->prompt_tokens = message->prompt_tokens;
    out->complete = message->complete != 0;
    return take_lists(message, arena, out);
}
