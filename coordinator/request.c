#include "coordinator/request.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/generation.h"
#include "coordinator/placement.h"
#include "coordinator/prompt.h"
#include "coordinator/summary.h"
#include "coordinator/trace.h"
#include "proto/base/log.h"

enum { RETRY_MS = 1000 };

struct request *request_by_serial(struct coordinator *coordinator, uint64_t serial)
{
    for (struct request *request = coordinator->requests; request != NULL;
         request = request->next) {
        if (request->serial == serial) {
            return request;
        }
    }
    return NULL;
}

static struct request *find_request(struct coordinator *coordinator, uint64_t client, uint64_t id)
{
    for (struct request *request = coordinator->requests; request != NULL;
         request = request->next) {
        if (request->client == client && request->id == id) {
            return request;
        }
    }
    return NULL;
}

uint32_t request_count(const struct coordinator *coordinator, enum request_state state)
{
    uint32_t count = 0;
    for (const struct request *request = coordinator->requests; request != NULL;
         request = request->next) {
        count += request->kind == FL_REQUEST_GENERATE && request->state == state;
    }
    return count;
}

fl_status request_queue_full(const struct coordinator *coordinator)
{
    return FL_FAIL(FL_BUSY, "the queue is full: %" PRIu32 " requests wait already (--queue)",
                   coordinator->config.settings.queue);
}

static uint32_t count_of_client(const struct coordinator *coordinator, uint64_t client)
{
    uint32_t count = 0;
    for (const struct request *request = coordinator->requests; request != NULL;
         request = request->next) {
        count += request->client == client;
    }
    return count;
}

void request_event(struct coordinator *coordinator, const struct request *request,
                   struct fl_client_event *event)
{
    if (request->muted) {
        return;
    }
    event->id = request->id;
    coordinator->config.event(coordinator->config.ctx, request->client, event);
}

void request_free(struct coordinator *coordinator, struct request *request)
{
    FL_ASSERT(request->sequence == NULL && request->timeline == NULL);
    for (struct request **at = &coordinator->requests; *at != NULL; at = &(*at)->next) {
        if (*at == request) {
            *at = request->next;
            break;
        }
    }
    catalog_release(coordinator->catalog, request->model);
    free(request->text);
    free(request->messages);
    free(request->tokens);
    free(request->logits);
    free(request);
}

static void refuse(struct coordinator *coordinator, uint64_t client, uint64_t id, fl_status code,
                   const char *text, uint32_t retry_ms)
{
    const struct fl_client_event event = {
        .id = id,
        .kind = FL_EVENT_ERROR,
        .as.error = {.code = (uint32_t)code, .text = text, .retry_ms = retry_ms}};
    fl_log(FL_LOG_INFO, "request ended: %s", text);
    coordinator->config.event(coordinator->config.ctx, client, &event);
}

void request_fail(struct coordinator *coordinator, struct request *request, fl_status code,
                  const char *text, uint32_t retry_ms)
{
    /* A copy: what is released on the way may report failures of its own. */
    char sentence[STATE_TEXT_MAX];
    snprintf(sentence, sizeof(sentence), "%s", text);
    struct placement *placement = request->sequence != NULL ? request->placement : NULL;
    generation_release(coordinator, request);
    (void)trace_keep(coordinator, request);
    if (!request->muted) {
        refuse(coordinator, request->client, request->id, code, sentence, retry_ms);
    }
    request_free(coordinator, request);
    if (placement != NULL) {
        generation_admit(coordinator, placement);
    }
}

/* ---- jobs of the worker that answer by themselves ---- */

struct listing {
    struct job job;
    struct coordinator *coordinator;
    uint64_t serial;
    fl_status status;
    char text[MODEL_SHELF_PROBLEM_MAX];
    uint32_t count;
    struct model_file *files; /* a copy of the folder's */
};

static void run_listing(struct job *job)
{
    struct listing *listing = (struct listing *)job;
    struct model_shelf *folder = catalog_folder(listing->coordinator->catalog);
    listing->status = model_shelf_scan(folder);
    if (listing->status != FL_OK) {
        snprintf(listing->text, sizeof(listing->text), "%s", fl_last_error());
        return;
    }
    model_shelf_inspect(folder);
    const uint32_t count = model_shelf_count(folder);
    listing->files = calloc(count > 0 ? count : 1, sizeof(*listing->files));
    for (uint32_t i = 0; listing->files != NULL && i < count; i++) {
        listing->files[listing->count++] = *model_shelf_at(folder, i);
    }
}

static void done_listing(struct job *job, void *ctx)
{
    struct coordinator *coordinator = ctx;
    struct listing *listing = (struct listing *)job;
    struct request *request = request_by_serial(coordinator, listing->serial);
    if (request != NULL && listing->status != FL_OK) {
        request_fail(coordinator, request, listing->status, listing->text, 0);
    } else if (request != NULL) {
        summary_send_models(coordinator, request, listing->files, listing->count);
        request_free(coordinator, request);
    }
    free(listing->files);
    free(listing);
}

static void start_listing(struct coordinator *coordinator, struct request *request)
{
    struct listing *listing = calloc(1, sizeof(*listing));
    if (listing == NULL) {
        request_fail(coordinator, request, FL_NO_MEMORY, "no memory for the list of models", 0);
        return;
    }
    *listing = (struct listing){.job = {.run = run_listing, .done = done_listing},
                                .coordinator = coordinator,
                                .serial = request->serial};
    request->state = REQUEST_TOKENISING;
    if (worker_submit(coordinator->worker, &listing->job) != FL_OK) {
        free(listing);
        request_fail(coordinator, request, FL_BUSY, fl_last_error(), RETRY_MS);
    }
}

/* ---- load and unload ---- */

static void load_model_ready(struct coordinator *coordinator, struct request *request)
{
    const fl_status status = placement_get(coordinator, request->model, &request->placement);
    if (status != FL_OK) {
        request_fail(coordinator, request, status, fl_last_error(), 0);
        return;
    }
    request->state = REQUEST_LOADING;
    generation_progress(coordinator, request->placement);
}

static void unload(struct coordinator *coordinator, struct request *request)
{
    char text[STATE_TEXT_MAX];
    struct placement *placement = placement_find(coordinator, request->model_name);
    const uint32_t count = placement != NULL ? placement_request_count(placement) : 0;
    if (placement == NULL) {
        snprintf(text, sizeof(text), "model '%s' is not loaded", request->model_name);
        request_fail(coordinator, request, FL_NOT_FOUND, text, 0);
        return;
    }
    if (count > 0) {
        snprintf(text, sizeof(text),
                 "model '%s' is in use by %" PRIu32 " request%s; unload it afterwards",
                 request->model_name, count, count == 1 ? "" : "s");
        request_fail(coordinator, request, FL_BUSY, text, RETRY_MS);
        return;
    }
    placement_drop(coordinator, placement, FL_CANCELLED, "the model was unloaded", 0);
    struct fl_client_event event = {.kind = FL_EVENT_UNLOADED};
    request_event(coordinator, request, &event);
    request_free(coordinator, request);
}

static void timeline(struct coordinator *coordinator, struct request *request, uint64_t id)
{
    const struct timeline *found = NULL;
    fl_status status = timeline_find(coordinator->timelines, id, &found);
    if (status == FL_OK) {
        status = summary_send_timeline(coordinator, request, found);
    }
    if (status != FL_OK) {
        request_fail(coordinator, request, status, fl_last_error(), 0);
    } else {
        request_free(coordinator, request);
    }
}

/* ---- all kinds ---- */

static void go_on(struct coordinator *coordinator, struct request *request)
{
    switch (request->kind) {
    case FL_REQUEST_GENERATE:
    case FL_REQUEST_TOKENIZE: generation_model_ready(coordinator, request); return;
    case FL_REQUEST_LOAD: load_model_ready(coordinator, request); return;
    case FL_REQUEST_PLAN: {
        const fl_status status = placement_dry_run(coordinator, request->model, request);
        if (status != FL_OK) {
            request_fail(coordinator, request, status, fl_last_error(), 0);
        } else {
            request_free(coordinator, request);
        }
        return;
    }
    case FL_REQUEST_CANCEL:
    case FL_REQUEST_MODELS:
    case FL_REQUEST_UNLOAD:
    case FL_REQUEST_STATUS:
    case FL_REQUEST_TIMELINE: break;
    }
    FL_ASSERT(false); /* these need no model */
}

void request_model_ready(struct coordinator *coordinator, const char *name, fl_status status,
                         const char *text, struct catalog_model *model)
{
    /* One at a time from the front: going on may end requests, others' too. */
    for (;;) {
        struct request *request = coordinator->requests;
        while (request != NULL &&
               (request->state != REQUEST_OPENING || strcmp(request->model_name, name) != 0)) {
            request = request->next;
        }
        if (request == NULL) {
            return;
        }
        if (status != FL_OK) {
            request_fail(coordinator, request, status, text, 0);
            continue;
        }
        request->model = model;
        catalog_keep(model);
        request->state = REQUEST_TOKENISING;
        go_on(coordinator, request);
    }
}

static void open_model(struct coordinator *coordinator, struct request *request)
{
    request->state = REQUEST_OPENING;
    struct catalog_model *model = NULL;
    const fl_status status = catalog_get(coordinator->catalog, request->model_name, &model);
    if (status == FL_OK) {
        request->model = model;
        catalog_keep(model);
        request->state = REQUEST_TOKENISING;
        go_on(coordinator, request);
    } else if (status != FL_AGAIN) {
        request_fail(coordinator, request, status, fl_last_error(), RETRY_MS);
    }
}

static fl_status take_name(struct request *request, const char *name)
{
    if (name == NULL || name[0] == '\0') {
        return FL_FAIL(FL_INVALID, "the request names no model; 'firstlight models' lists them");
    }
    const int size = snprintf(request->model_name, sizeof(request->model_name), "%s", name);
    if (size < 0 || (size_t)size >= sizeof(request->model_name)) {
        return FL_FAIL(FL_INVALID, "a model's name has fewer than %d bytes, this one has %d",
                       FL_MODEL_NAME_MAX, size);
    }
    return FL_OK;
}

static fl_status take_tokenize(struct request *request, const struct fl_tokenize *wanted)
{
    FL_TRY(take_name(request, wanted->model));
    FL_TRY(prompt_take_text(request, &wanted->text, "text"));
    request->special = wanted->special;
    request->no_bos = wanted->no_bos;
    return FL_OK;
}

static fl_status take_wanted(struct coordinator *coordinator, struct request *request,
                             const struct fl_client_request *wanted)
{
    switch (wanted->kind) {
    case FL_REQUEST_GENERATE:
        FL_TRY(take_name(request, wanted->as.generate.model));
        trace_arrived(coordinator, request);
        return generation_take(request, &wanted->as.generate);
    case FL_REQUEST_TOKENIZE: return take_tokenize(request, &wanted->as.tokenize);
    case FL_REQUEST_PLAN:
    case FL_REQUEST_LOAD:
    case FL_REQUEST_UNLOAD: return take_name(request, wanted->as.by_model.model);
    case FL_REQUEST_CANCEL:
    case FL_REQUEST_MODELS:
    case FL_REQUEST_STATUS:
    case FL_REQUEST_TIMELINE: break;
    }
    return FL_OK;
}

static fl_status check_room(struct coordinator *coordinator, uint64_t client,
                            const struct fl_client_request *wanted)
{
    if (wanted->version != FL_CLIENT_VERSION) {
        return FL_FAIL(FL_UNSUPPORTED,
                       "the client speaks version %" PRIu32 " of the protocol, this coordinator "
                       "version %d; update the older of the two",
                       wanted->version, FL_CLIENT_VERSION);
    }
    if (find_request(coordinator, client, wanted->id) != NULL) {
        return FL_FAIL(FL_INVALID, "request id %" PRIu64 " is under way on this connection already",
                       wanted->id);
    }
    if (count_of_client(coordinator, client) >= COORDINATOR_CLIENT_REQUEST_MAX) {
        return FL_FAIL(FL_BUSY, "this connection has %d requests under way, the limit",
                       COORDINATOR_CLIENT_REQUEST_MAX);
    }
    /* Those still being tokenised may find room or not; they are held to a limit of their own. */
    const struct coordinator_settings *settings = &coordinator->config.settings;
    const uint32_t preparing = request_count(coordinator, REQUEST_OPENING) +
                               request_count(coordinator, REQUEST_TOKENISING);
    if (wanted->kind == FL_REQUEST_GENERATE &&
        (request_count(coordinator, REQUEST_QUEUED) >= settings->queue ||
         preparing >= settings->queue + settings->sequences)) {
        return request_queue_full(coordinator);
    }
    return FL_OK;
}

static void append(struct coordinator *coordinator, struct request *request)
{
    struct request **at = &coordinator->requests;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = request;
}

void request_start(struct coordinator *coordinator, uint64_t client,
                   const struct fl_client_request *wanted)
{
    if (wanted->kind == FL_REQUEST_CANCEL) {
        struct request *cancelled = find_request(coordinator, client, wanted->as.cancel.id);
        if (cancelled != NULL) {
            generation_cancel(coordinator, cancelled);
        }
        return;
    }
    fl_status status = check_room(coordinator, client, wanted);
    struct request *request = status == FL_OK ? calloc(1, sizeof(*request)) : NULL;
    if (status == FL_OK && request == NULL) {
        status = FL_FAIL(FL_NO_MEMORY, "no memory for a request");
    }
    if (status != FL_OK) {
        refuse(coordinator, client, wanted->id, status, fl_last_error(),
               status == FL_BUSY ? RETRY_MS : 0);
        return;
    }
    *request = (struct request){.serial = coordinator->next_serial++,
                                .client = client,
                                .id = wanted->id,
                                .kind = wanted->kind,
                                .arrived_ns = state_now(coordinator)};
    append(coordinator, request);
    status = take_wanted(coordinator, request, wanted);
    if (status != FL_OK) {
        request_fail(coordinator, request, status, fl_last_error(), 0);
        return;
    }
    switch (request->kind) {
    case FL_REQUEST_MODELS: start_listing(coordinator, request); return;
    case FL_REQUEST_STATUS:
        summary_send_status(coordinator, request);
        request_free(coordinator, request);
        return;
    case FL_REQUEST_UNLOAD: unload(coordinator, request); return;
    case FL_REQUEST_TIMELINE: timeline(coordinator, request, wanted->as.timeline.id); return;
    case FL_REQUEST_GENERATE:
    case FL_REQUEST_TOKENIZE:
    case FL_REQUEST_PLAN:
    case FL_REQUEST_LOAD: open_model(coordinator, request); return;
    case FL_REQUEST_CANCEL: break;
    }
}
